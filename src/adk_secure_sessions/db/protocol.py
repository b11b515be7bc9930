"""What a transaction asks of the database, and who runs it."""

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import sqlalchemy as sa

T = TypeVar("T")
Row = Sequence[Any]
Parameters = Mapping[str, object]


class UniqueViolation(Exception):
    """Another transaction made this row first; the whole transaction is worth repeating."""


class Conflict(Exception):
    """Another transaction changed a row since it was read; worth repeating."""


class Disconnected(Exception):
    """The connection was lost, and with it the answer: what was sent may be stored or not."""

    def __init__(self, error: Exception) -> None:
        super().__init__("the connection to the database was lost")
        self.error = error  # what a caller is to see in the end


class Read(NamedTuple):
    """Asks for the rows of a query; they may be of any sequence type."""

    query: sa.Executable
    parameters: Parameters


class Change(NamedTuple):
    """One statement of a write; it must meet one row unless *any_number* is allowed."""

    statement: sa.Executable
    parameters: Parameters
    any_number: bool = False


class Apply(NamedTuple):
    """Asks for all *changes*, in this order; the answer is whether they were made.

    None is if the first met no row.  One that comes later and meets none raises Conflict; a
    row that is there already, UniqueViolation.  What was read may be out of date by now: the
    changes themselves say, by what they meet, on what they rely.
    """

    changes: Sequence[Change]


# A transaction is a generator: it yields what it asks for, is sent the answer, and knows
# nothing of threads, event loops and drivers.
Steps = Generator[Read | Apply, Any, T]
Transaction = Callable[[], Steps[T]]


class Executor(Protocol):
    """Runs transactions, one kind of executor for each kind of database.

    A cancelled caller's write is skipped whole, or ends before the caller leaves.
    """

    async def read(self, query: sa.Executable, parameters: Parameters) -> Sequence[Row]:
        """Run one query."""
        ...

    async def write(
        self, transaction: Transaction[T], late: Callable[[T], None] | None = None
    ) -> T:
        """Run *transaction* and commit what it applied, which it does at most once.

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


class Executors(NamedTuple):
    """That of the data and that of the key tables: the same, or each of its own database."""

    data: Executor
    keys: Executor

    @property
    def are_apart(self) -> bool:
        """Whether the key tables are in a database of their own."""
        return self.keys is not self.data

    async def close(self) -> None:
        """Release the connections to both."""
        try:
            await self.data.close()
        finally:
            if self.are_apart:
                await self.keys.close()


def run_in_turn(
    steps: Steps[T],
    fetch: Callable[[sa.Executable, Parameters], Sequence[Row]],
    run: Callable[[sa.Executable, Parameters], int],
) -> T:
    """Run *steps* inside a transaction: *run* returns how many rows a statement met."""
    try:
        step = next(steps)
        while True:
            answer: object
            if isinstance(step, Read):
                answer = fetch(step.query, step.parameters)
            else:
                answer = _apply_in_turn(step.changes, run)
            step = steps.send(answer)
    except StopIteration as end:
        result: T = end.value
        return result


def _apply_in_turn(
    changes: Sequence[Change], run: Callable[[sa.Executable, Parameters], int]
) -> bool:
    for number, change in enumerate(changes):
        met = run(change.statement, change.parameters)
        if met != 1 and not change.any_number:
            if number == 0:
                return False
            raise Conflict
    return True
