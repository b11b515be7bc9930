"""The interface between transactions and the executors that run them on a database.

A transaction is a generator that does no I/O itself.  When the generator yields a `Read`, the
executor sends the rows back.  When the generator yields an `Apply`, the executor makes the changes
and sends back True, or False if the first change matched no row:

    def rename(number: int, name: str) -> Steps[bool]:
        rows = yield Read(SELECT_BY_NUMBER, {"number": number})
        if not rows:
            return False
        return (yield Apply([Change(UPDATE_NAME, {"number": number, "name": name})]))

    renamed = await executor.write(partial(rename, 7, "Ada"))

The same generator runs on a thread for SQLite, as single statements on asyncpg, and inside a
SQLAlchemy transaction.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import sqlalchemy as sa

from adk_secure_sessions import telemetry
from adk_secure_sessions.errors import SecureSessionError

T = TypeVar("T")
Row = Sequence[Any]
Parameters = Mapping[str, object]
Reader = Callable[[sa.Executable, Parameters], Awaitable[Sequence[Row]]]  # `read` of an executor


class UniqueViolation(Exception):
    """Another transaction has already inserted the same row.  The transaction can be repeated."""


class Conflict(Exception):
    """Another transaction has changed a row that was read.  The transaction can be repeated."""


class Disconnected(Exception):
    """The connection was lost before the answer came, or its server is no use any more, such as a
    former primary.  A write may or may not have been stored.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__("the connection to the database was lost")
        self.error = error  # a DatabaseError; callers raise it if the last retry also fails


@dataclass(slots=True, eq=False, repr=False)
class Read:
    """Request for the rows of *query*.  The answer is the sequence of rows from the driver."""

    query: sa.Executable
    parameters: Parameters


@dataclass(slots=True, eq=False, repr=False)
class Change:
    """An INSERT, UPDATE or DELETE with its parameters."""

    statement: sa.Executable
    parameters: Parameters
    # Whether the statement must match exactly one row: `Apply` says what happens otherwise.
    must_match_one_row: bool = True
    # If not empty, `statement` is what `sqlalchemy.insert(table)` returns, and inserts these rows.
    # `parameters` are then not used, and `must_match_one_row` must be False.
    rows: Sequence[Parameters] = ()


@dataclass(slots=True, eq=False, repr=False)
class Apply:
    """Request to make all *changes*, in this order.

    *must_match_one_row* must be True for the first change.  If this change matched no row, nothing
    was changed, and the answer is False; otherwise it is True.  If a later change with
    *must_match_one_row* matched no row, or one matched several rows, `Executor.write` rolls back
    and raises Conflict, or UniqueViolation if an inserted row already exists.

    Other processes may have written since the transaction's last Read.  The WHERE clause of a
    change must therefore compare columns with the values that the transaction relies on.
    """

    changes: Sequence[Change]


Steps = Generator[Read | Apply, Any, T]
Transaction = Callable[[], Steps[T]]  # begins a transaction: an executor calls it once


class Executor(Protocol):
    """Runs queries and transactions on a database; each kind of driver has a class of its own.

    Every method raises Disconnected if the connection is lost, Conflict if the database reports a
    deadlock or a serialization failure, and DatabaseError for other errors of the database and for
    a query that takes too long; never an exception of SQLAlchemy or a driver.
    """

    async def read(self, query: sa.Executable, parameters: Parameters) -> Sequence[Row]:
        """Run one query and return its rows; if the caller is cancelled, interrupt the query."""

    async def write(
        self,
        transaction: Transaction[T],
        on_commit: Callable[[], None] | None = None,
        *,
        in_one_transaction: bool = False,
    ) -> T:
        """Run *transaction*, which is called once, commit its changes and return its result.

        If the caller is cancelled while the transaction runs, `write` waits for its end and raises
        CancelledError.  *on_commit* is called after the commit, in this case, too.  After
        Disconnected or a DatabaseError that is `retryable`, the changes may or may not have been
        stored; after any other error, nothing was stored.

        If *in_one_transaction* is True, all steps run in one database transaction.  Rows that a
        Read has locked with FOR UPDATE then stay locked until the commit.  Each query sees all
        changes that were committed before the query began.  Otherwise, no Apply may follow an Apply
        with the answer True, because asyncpg commits each Apply separately.
        """

    async def run_sync(self, work: Callable[[sa.Connection], T], *, commit: bool = True) -> T:
        """Run *work* on a SQLAlchemy connection and return its result.

        The schema and maintenance use it, because they inspect tables and decide row by row.  If
        *commit* is True, *work* runs in one transaction, which is rolled back if *work* raises.
        If it is False, *work* must change nothing, and each of its queries may see other commits.
        """

    async def close(self) -> None:
        """Close every connection.  The next call opens new ones."""


class Executors(NamedTuple):
    """The executors of the data database and of the key database: one object for both if the keys
    are in the data database.
    """

    data: Executor
    keys: Executor

    @property
    def has_key_database(self) -> bool:
        """Whether the keys are in a separate database."""
        return self.keys is not self.data

    async def close(self) -> None:
        """Close the connections of all executors."""
        try:
            await self.data.close()
        finally:
            if self.has_key_database:
                await self.keys.close()


def run_steps(
    steps: Steps[T],
    fetch: Callable[[sa.Executable, Parameters], Sequence[Row]],
    apply: Callable[[Sequence[Change]], bool],
) -> T:
    """Run *steps* one request at a time, in a transaction of the caller; return their result."""
    answer: object = None
    try:
        while True:
            step = steps.send(answer)
            if isinstance(step, Read):
                answer = fetch(step.query, step.parameters)
            else:
                answer = apply(step.changes)
    except StopIteration as end:
        result: T = end.value
        return result


def run_changes(run: Callable[[Change], int], changes: Sequence[Change]) -> bool:
    """Answer an Apply by *run*, which makes a change and returns how many rows it matched."""
    for change in changes:
        matched = run(change)
        if matched != 1 and change.must_match_one_row:
            if matched == 0 and change is changes[0]:
                return False
            raise Conflict
    return True


def with_claims(steps: Steps[T]) -> Steps[T]:
    """Return *steps*, in which each statement with the execution option `claim` also makes the
    changes that `claim` returns for its parameters: see `storage.clusters`.
    """
    answer: object = None
    try:
        while True:
            step = steps.send(answer)
            if isinstance(step, Read):
                answer = yield step
                yield Apply(_claim(step.query, step.parameters))
            else:
                changes: list[Change] = []
                for change in step.changes:
                    changes += change, *_claim(change.statement, change.parameters)
                answer = yield Apply(changes)
    except StopIteration as end:
        result: T = end.value
        return result


def _claim(statement: sa.Executable, parameters: Parameters) -> Sequence[Change]:
    claim = statement.get_execution_options().get("claim")
    return claim(parameters) if claim else ()


# --- Retries -------------------------------------------------------------------------------------

# The number of conflicts after which an operation fails.  With 20, single writes failed while 24
# tasks changed one app's state through the three nodes of a Galera cluster on a busy machine: of
# three nodes that commit at the same time, only one succeeds.
MAX_CONFLICTS = 40
# After this number of conflicts, a write locks its rows.  Without locks, one in 10,000 writes
# failed while 64 tasks wrote the same app's state.
_CONFLICTS_WITHOUT_LOCK = 3
_MAX_PAUSE = 1.0  # seconds of a pause after a conflict
# Seconds to wait after each lost connection.  Writes are retried more often than reads: after a
# lost connection, it is unknown whether a write was stored, and only a retry can find out.
_READ_PAUSES = (0.05,)
_WRITE_PAUSES = (0.05, 0.2, 0.5, 1.0, 2.0)


class Retries:
    """Counts the failed attempts at one operation, and pauses before each new attempt."""

    def __init__(self, *, writes: bool, max_conflicts: int = MAX_CONFLICTS) -> None:
        self._max_conflicts = max_conflicts
        self._conflicts = 0
        self._pauses = iter(_WRITE_PAUSES if writes else _READ_PAUSES)

    @property
    def locks_rows(self) -> bool:
        """Whether the next attempt of a write should lock the rows that it changes."""
        return self._conflicts >= _CONFLICTS_WITHOUT_LOCK

    async def pause_or_raise(self, error: UniqueViolation | Conflict | Disconnected) -> None:
        """Pause before the next attempt; raise an error for the caller if no attempt is left."""
        if isinstance(error, Disconnected):
            pause = next(self._pauses, None)
            if pause is None:
                raise error.error from None
            telemetry.count_retry("disconnected")
            await asyncio.sleep(pause)
            return
        self._conflicts += 1
        if self._conflicts == self._max_conflicts:
            raise SecureSessionError(
                "other transactions changed or locked the same rows during each of "
                f"{self._max_conflicts} attempts, or a trigger ignores the changes: try again",
                retryable=True,
            ) from None
        telemetry.count_retry("conflict")
        longest = 0.005 * self._conflicts
        if self.locks_rows:
            # Row locks usually prevent further conflicts, but not between the nodes of a cluster.
            # There, only longer and longer pauses let each of many writers succeed.
            longest = min(longest * 2 ** (self._conflicts - _CONFLICTS_WITHOUT_LOCK), _MAX_PAUSE)
        await asyncio.sleep(random.uniform(0, longest))  # noqa: S311 - no secret


async def with_retries(work: Callable[[], Awaitable[T]], *, writes: bool = False) -> T:
    """Call *work* and return its result; call it again after a conflict or a lost connection."""
    retries = Retries(writes=writes)
    while True:
        try:
            return await work()
        except (UniqueViolation, Conflict, Disconnected) as error:
            await retries.pause_or_raise(error)


class RetryingExecutor(NamedTuple):
    """Runs queries and transactions on one database, and repeats them as `with_retries` does."""

    executor: Executor

    async def read(self, query: sa.Executable, parameters: Parameters) -> Sequence[Row]:
        """Run one query; repeat the query if the connection is lost."""
        return await with_retries(lambda: self.executor.read(query, parameters))

    async def run_sync(self, work: Callable[[sa.Connection], T], *, commit: bool = True) -> T:
        """Run *work* in one transaction, and in a new one after a conflict."""
        run = self.executor.run_sync
        return await with_retries(lambda: run(work, commit=commit), writes=True)
