"""What a transaction sees of the database, whoever runs it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import sqlalchemy as sa

T = TypeVar("T")
Row = Sequence[Any]


class UniqueViolation(Exception):
    """Another transaction made this row first; the whole transaction is worth repeating."""


class Conflict(Exception):
    """Another transaction changed a row since it was read; worth repeating."""


class Connection(Protocol):
    """A database connection inside a transaction."""

    def all(self, statement: sa.Executable, parameters: Mapping[str, object]) -> Sequence[Row]:
        """Run a read; the rows may be of any sequence type."""
        ...

    def run(self, statement: sa.Executable, parameters: Mapping[str, object]) -> int:
        """Run a write and return how many rows it met.  Raises UniqueViolation."""
        ...


Transaction = Callable[[Connection], T]


class Executor(Protocol):
    """Runs transactions, one kind of executor for each kind of database.

    A cancelled caller's transaction is skipped whole, or ends before the caller leaves.
    """

    async def read(self, transaction: Transaction[T]) -> T:
        """Run one read statement or several, without a promise that these belong together."""
        ...

    async def write(
        self, transaction: Transaction[T], late: Callable[[T], None] | None = None
    ) -> T:
        """Run *transaction* and commit, or roll back if it raises; it may be run again.

        *late* gets the result if the caller was cancelled while it ran.
        """
        ...

    async def define(self, work: Callable[[sa.Connection], T], *, commit: bool) -> T:
        """Run *work* on a SQLAlchemy connection: to look at the schema, or to make tables."""
        ...

    async def close(self) -> None:
        """Release every connection; the next call opens new ones."""
        ...
