"""How a transaction asks the database, and what the executors that answer it promise.

A transaction is a generator that does no I/O itself.  It yields a `Read` and is sent the rows, or
yields an `Apply` and is sent whether the changes were made:

    def rename(number: int, name: str) -> Steps[bool]:
        rows = yield Read(SELECT_BY_NUMBER, {"number": number})
        if not rows:
            return False
        return (yield Apply([Change(UPDATE_NAME, {"number": number, "name": name})]))

    renamed = await executor.write(partial(rename, 7, "Ada"))

The same generator runs on a thread over SQLite, as single statements on asyncpg, and inside a
SQLAlchemy transaction: it knows nothing of threads, event loops and drivers.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import sqlalchemy as sa

T = TypeVar("T")
Row = Sequence[Any]
Parameters = Mapping[str, object]


class UniqueViolation(Exception):
    """Another transaction inserted this row first.  The transaction can be tried again."""


class Conflict(Exception):
    """Another transaction changed a row since it was read.  The transaction can be tried again."""


class Disconnected(Exception):
    """The connection was lost before the answer came: a write may be stored or not."""

    def __init__(self, error: Exception) -> None:
        super().__init__("the connection to the database was lost")
        self.error = error  # the driver's, for the caller if trying again does not help


class Read(NamedTuple):
    """Request for the rows of *query*.  The answer is a sequence of rows, of any sequence type."""

    query: sa.Executable
    parameters: Parameters


class Change(NamedTuple):
    """An INSERT, UPDATE or DELETE with its parameters.

    It must match one row.  If not *must_match_row*, it may match any number of rows, also none.
    """

    statement: sa.Executable
    parameters: Parameters
    must_match_row: bool = True


class Apply(NamedTuple):
    """Request to make all *changes*, in this order; the first of them must match a row.

    The answer is False if the first change matched no row: then nothing was changed.  Otherwise
    it is True.  The transaction ends, and `Executor.write` raises, Conflict if a later change
    matched no row, and UniqueViolation if a row to insert is there already.

    Other processes may have written since the transaction's last Read.  The changes therefore
    name, in their WHERE clauses, the values that they rely on.
    """

    changes: Sequence[Change]


Steps = Generator[Read | Apply, Any, T]
Transaction = Callable[[], Steps[T]]


class Executor(Protocol):
    """Runs queries and transactions; there is one class of executor for each kind of database.

    If a caller of `write` is cancelled before the transaction has begun, the transaction does not
    run.  If it has begun, it ends before the cancellation goes on.

    Every method raises Disconnected if the connection is lost, Conflict if the database reports a
    deadlock or a serialization failure, and for other errors of the driver an exception of
    `sqlalchemy.exc` whose text has no parameters.
    """

    async def read(self, query: sa.Executable, parameters: Parameters) -> Sequence[Row]:
        """Run one query and return its rows."""
        ...

    async def write(
        self,
        transaction: Transaction[T],
        on_commit_after_cancel: Callable[[T], None] | None = None,
    ) -> T:
        """Run *transaction*, commit its changes and return its result.

        A transaction may have several Apply steps, but only one of them may be answered by True:
        on PostgreSQL each is a statement that commits by itself.

        Args:
            transaction: Makes the generator; it is called once.
            on_commit_after_cancel: Called with the result if the caller was cancelled while the
                transaction ran, since the caller does not get the result then.

        Raises:
            Disconnected: The changes may be stored or not.
            UniqueViolation, Conflict: See `Apply`; nothing was stored.
            Exception: Whatever *transaction* itself raises; nothing was stored.
        """
        ...

    async def define(self, work: Callable[[sa.Connection], T], *, commit: bool) -> T:
        """Run *work* in a transaction on a SQLAlchemy connection and return its result.

        It is for the schema and for maintenance, and slower than `write`.  Nothing is committed
        if *work* raises, nor without *commit*.

        Raises:
            Disconnected: The changes may be stored or not.
            Exception: Whatever *work* itself raises; nothing was stored.
        """
        ...

    async def close(self) -> None:
        """Close every connection.  The next call opens new ones."""
        ...


class Executors(NamedTuple):
    """The executor for the data and the one for the key tables.

    Both are the same object unless the keys have a database of their own.
    """

    data: Executor
    keys: Executor

    @property
    def has_key_database(self) -> bool:
        """Whether the key tables are in a database of their own."""
        return self.keys is not self.data

    async def close(self) -> None:
        """Close the connections of both."""
        try:
            await self.data.close()
        finally:
            if self.has_key_database:
                await self.keys.close()


def run_in_turn(
    steps: Steps[T],
    fetch: Callable[[sa.Executable, Parameters], Sequence[Row]],
    run: Callable[[sa.Executable, Parameters], int],
) -> T:
    """Run *steps* one statement at a time, inside a transaction that the caller has begun.

    Args:
        steps: The transaction.
        fetch: Runs a query and returns its rows.
        run: Runs a change and returns how many rows it matched.

    Raises:
        Conflict: See `Apply`; the caller must roll back.
        Exception: Whatever *steps*, *fetch* or *run* raise.
    """
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
    for index, change in enumerate(changes):
        matched = run(change.statement, change.parameters)
        if change.must_match_row and matched != 1:
            if index == 0:
                return False
            raise Conflict
    return True
