"""Threads that run transactions on SQLite connections of their own.

A writing thread takes what has queued up, runs it in one `BEGIN IMMEDIATE`, a savepoint for
each transaction, and commits once.
"""

import asyncio
import logging
import sqlite3
import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import sqlalchemy as sa

from adk_secure_sessions.db.dialects import any_text, meaning, sqlite_sql, taking_any_text
from adk_secure_sessions.db.protocol import (
    Parameters,
    Row,
    T,
    Transaction,
    UniqueViolation,
    run_in_turn,
)
from adk_secure_sessions.loops import ended

logger = logging.getLogger(__name__)

_BATCH = 64  # transactions in one commit, at most
_EXIT_TIMEOUT = 5.0  # seconds


class SqliteConnection:
    """What runs on the driver itself."""

    __slots__ = ("driver",)

    def __init__(self, driver: sqlite3.Connection) -> None:
        self.driver = driver

    def fetch(self, query: sa.Executable, parameters: Parameters) -> Sequence[Row]:
        return self.driver.execute(sqlite_sql(query), parameters).fetchall()

    def transact(self, transaction: Transaction[T]) -> T:
        return run_in_turn(transaction(), self.fetch, self._run)

    def _run(self, statement: sa.Executable, parameters: Parameters) -> int:
        try:
            return self.driver.execute(sqlite_sql(statement), parameters).rowcount
        except sqlite3.IntegrityError as error:
            meant = meaning(error)
            if not isinstance(meant, UniqueViolation):
                raise
        raise meant


class Job:
    """Work for a thread, and the task that waits for it."""

    __slots__ = ("_claim", "_ended", "_future", "_result", "commit", "loop", "on_engine", "work")

    def __init__(self, work: Callable[[Any], Any], *, on_engine: bool, commit: bool) -> None:
        self.work = work
        self.on_engine = on_engine  # work on a SQLAlchemy connection instead of the driver's
        self.commit = commit
        self.loop = asyncio.get_running_loop()
        self._future: asyncio.Future[Any] = self.loop.create_future()
        self._claim = threading.Lock()
        self._ended: asyncio.Event | None = None  # made by a cancellation that has to wait
        self._result: list[Any] = []

    def claimed(self) -> bool:
        """Whether the caller is first: the thread, to run it, or a cancellation, to stop it."""
        return self._claim.acquire(blocking=False)

    async def outcome(self, late: Callable[[Any], None] | None) -> Any:
        """Await the result.  A cancellation stops what has not begun, and waits for what has.

        As `loops.settled`, without `asyncio.shield`, which costs a turn of the event loop.
        """
        try:
            return await self._future
        except asyncio.CancelledError:
            if not self.claimed():
                self._ended = self._ended or asyncio.Event()
                await ended(self._ended.wait, lambda: bool(self._result))
                result, error = self._result
                if late is not None and error is None:
                    late(result)
            raise

    def settle(self, result: Any, error: BaseException | None) -> None:
        """In the event loop: hand over what came of it."""
        self._result = [result, error]  # for a cancellation that comes now, or came before
        if self._future.done():
            if self._ended is not None:
                self._ended.set()
        elif error is not None:
            self._future.set_exception(error)
        else:
            self._future.set_result(result)


class _Done(NamedTuple):
    job: Job
    result: Any
    error: BaseException | None


class _Inbox:
    """What waits for a thread, and is taken in the order it came."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        self._ahead: list[Job | None] = []  # taken from the queue, and not for this batch
        self._busy = False

    @property
    def waiting(self) -> int:
        """How much work is in front of a new job, roughly."""
        return self._queue.qsize() + self._busy

    def put(self, job: Job | None) -> None:
        """Queue *job*; None ends the thread."""
        self._queue.put(job)

    def take(self, most: int) -> list[Job]:
        """Wait for work, and return what may run in one transaction; empty at the end."""
        self._busy = False
        job = self._ahead.pop() if self._ahead else self._queue.get()
        self._busy = True
        batch: list[Job] = []
        while job is not None and not (batch and job.on_engine):
            batch.append(job)
            if job.on_engine or len(batch) == most:
                return batch
            try:
                job = self._queue.get_nowait()
            except Empty:
                return batch
        if batch:
            self._ahead.append(job)
        return batch


class WorkerThread:
    """A thread and a connection that it opens, uses and closes itself."""

    def __init__(self, engine: sa.Engine, *, writes: bool) -> None:
        self.inbox = _Inbox()
        # Daemon: ADK's tools never close a service, and must still be able to exit.
        self.thread = threading.Thread(
            target=_serve,
            args=(self.inbox, engine, writes),
            name=f"adk-secure-sessions-{'writer' if writes else 'reader'}",
            daemon=True,
        )
        self.thread.start()


def stop(threads: list[WorkerThread]) -> None:
    """End *threads*, after what they have queued."""
    for thread in threads:
        thread.inbox.put(None)
    for thread in threads:
        thread.thread.join(_EXIT_TIMEOUT)


def _serve(inbox: _Inbox, engine: sa.Engine, writes: bool) -> None:
    connection: SqliteConnection | None = None
    while batch := inbox.take(_BATCH if writes else 1):
        try:
            batch = [job for job in batch if job.claimed()]
            if not batch:
                continue
            if batch[0].on_engine:
                outcomes = [_run_on_engine(engine, batch[0])]
            else:
                connection = connection or _connect(engine, writes)
                outcomes = _run_batch(connection, batch) if writes else [_run(connection, batch[0])]
        except BaseException as error:
            outcomes = [_Done(job, None, _translated(error)) for job in batch]
        _deliver(outcomes)
    if connection is not None:
        connection.driver.close()


def _connect(engine: sa.Engine, writes: bool) -> SqliteConnection:
    pooled = engine.raw_connection()
    driver = pooled.driver_connection
    assert isinstance(driver, sqlite3.Connection)
    if not isinstance(engine.pool, sa.pool.StaticPool):
        pooled.detach()  # held for good: it must not count against the pool
    driver.isolation_level = None  # BEGIN is ours
    driver.text_factory = any_text
    if writes:
        _enter_wal(driver)
        driver.execute("PRAGMA synchronous = FULL")
    else:
        driver.execute("PRAGMA query_only = ON")
    return SqliteConnection(driver)


def _enter_wal(driver: sqlite3.Connection) -> None:
    # Switching ignores the busy timeout while another process switches too.
    for attempt in range(100):
        try:
            driver.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorname != "SQLITE_BUSY" or attempt == 99:
                raise
            threading.Event().wait(0.05)


def _run_batch(connection: SqliteConnection, batch: list[Job]) -> list[_Done]:
    """Run *batch* in one transaction; one that raises takes only its own changes back."""
    driver = connection.driver
    done: list[_Done] = []
    try:
        driver.execute("BEGIN IMMEDIATE")
        for job in batch:
            if len(batch) > 1:
                driver.execute("SAVEPOINT one")
            outcome = _run(connection, job)
            done.append(outcome)
            if not driver.in_transaction:  # a full disk, say, ends it all
                raise outcome.error or sqlite3.OperationalError("the transaction was ended")
            if len(batch) > 1:
                if outcome.error is not None:
                    driver.execute("ROLLBACK TO one")
                driver.execute("RELEASE one")
        keep = len(batch) > 1 or all(outcome.error is None for outcome in done)
        driver.execute("COMMIT" if keep else "ROLLBACK")
        return done
    except BaseException as error:
        if driver.in_transaction:
            driver.execute("ROLLBACK")
        translated = _translated(error)
        return [_Done(job, None, translated) for job in batch]


def _run(connection: SqliteConnection, job: Job) -> _Done:
    try:
        return _Done(job, job.work(connection), None)
    except BaseException as error:
        return _Done(job, None, _translated(error))


def _run_on_engine(engine: sa.Engine, job: Job) -> _Done:
    try:
        with engine.connect() as connection:
            if job.commit:
                connection.exec_driver_sql("BEGIN IMMEDIATE")
            with taking_any_text(connection):
                result = job.work(connection)
            if job.commit:
                connection.commit()
        return _Done(job, result, None)
    except BaseException as error:
        return _Done(job, None, error)


def _translated(error: BaseException) -> BaseException:
    """The driver's errors as SQLAlchemy's, as everywhere else; without statement or values."""
    if not isinstance(error, sqlite3.Error):
        return error
    return sa.exc.DBAPIError.instance(None, None, error, sqlite3.Error, hide_parameters=True)


def _deliver(outcomes: list[_Done]) -> None:
    by_loop: dict[asyncio.AbstractEventLoop, list[_Done]] = {}
    for outcome in outcomes:
        by_loop.setdefault(outcome.job.loop, []).append(outcome)
    for loop, mine in by_loop.items():
        try:
            loop.call_soon_threadsafe(_settle, mine)
        except RuntimeError:  # the loop was closed: nobody waits any more
            logger.debug("an event loop was closed before its transactions were answered")


def _settle(outcomes: list[_Done]) -> None:
    for job, result, error in outcomes:
        job.settle(result, error)
