"""What a transaction sees of the database, whoever runs it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import sqlalchemy as sa

T = TypeVar("T")
Row = Sequence[Any]


class UniqueViolation(Exception):
    """Another transaction made this row first; the whole transaction is worth repeating."""


class Conflict(Exception):
    """Another transaction changed a row since it was read; worth repeating."""


class Disconnected(Exception):
    """The connection was lost, and with it the answer: what was sent may be stored or not."""

    def __init__(self, error: Exception) -> None:
        super().__init__("the connection to the database was lost")
        self.error = error  # what a caller is to see in the end


class Change(NamedTuple):
    """One statement of a write; it must meet one row unless *any_number* is allowed."""

    statement: sa.Executable
    parameters: Mapping[str, object]
    any_number: bool = False


class Connection(Protocol):
    """A database connection inside a transaction."""

    def all(self, statement: sa.Executable, parameters: Mapping[str, object]) -> Sequence[Row]:
        """Run a read; the rows may be of any sequence type."""
        ...

    def apply(self, changes: Sequence[Change]) -> bool:
        """Make all *changes*, in this order; False, and none made, if the first met no row.

        What a transaction read may be out of date by now: the changes themselves say, by
        what they meet, on what they rely.

        Raises:
            Conflict: a later one met no row.
            UniqueViolation: a row is there already.
        """
        ...


def apply_in_turn(
    run: Callable[[sa.Executable, Mapping[str, object]], int], changes: Sequence[Change]
) -> bool:
    """`Connection.apply` where *run* runs one write and returns how many rows it met."""
    for number, change in enumerate(changes):
        met = run(change.statement, change.parameters)
        if met != 1 and not change.any_number:
            if number == 0:
                return False
            raise Conflict
    return True


Transaction = Callable[[Connection], T]


class Executor(Protocol):
    """Runs transactions, one kind of executor for each kind of database.

    A cancelled caller's transaction is skipped whole, or ends before the caller leaves.
    """

    async def read(self, transaction: Transaction[T]) -> T:
        """Run *transaction*, which only reads."""
        ...

    async def write(
        self, transaction: Transaction[T], late: Callable[[T], None] | None = None
    ) -> T:
        """Run *transaction*, which reads and applies once at most each.

        If it raises, nothing of it is stored, but for Disconnected, when all of it may be.
        *late* gets the result if the caller was cancelled while it ran.
        """
        ...

    async def define(self, work: Callable[[sa.Connection], T], *, commit: bool) -> T:
        """Run *work* on a SQLAlchemy connection: to look at the schema, or to make tables."""
        ...

    async def close(self) -> None:
        """Release every connection; the next call opens new ones."""
        ...
