"""SQLite by URL: threads of our own, so that a transaction costs one hop.

One thread writes: it takes what has queued up, runs it in one `BEGIN IMMEDIATE`, a savepoint
for each transaction, and commits once.  Others read, beside it, thanks to WAL.  A database in
memory has a single connection, and one thread does both.
"""

import asyncio
import functools
import logging
import os
import sqlite3
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.dialects import sqlite as sqlite_dialect

from adk_secure_sessions.errors import ConfigurationError
from adk_secure_sessions.loops import settled
from adk_secure_sessions.storage.connection import Row, T, Transaction, UniqueViolation

logger = logging.getLogger(__name__)

_READERS = 2
_BATCH = 64  # transactions in one commit, at most
_BUSY_TIMEOUT = 30.0  # seconds that another process may hold the write lock
_EXIT_TIMEOUT = 5.0

_dialect = sqlite_dialect.dialect(paramstyle="named")


@functools.cache
def _sql(statement: sa.Executable) -> str:
    assert isinstance(statement, sa.ClauseElement)
    return str(statement.compile(dialect=_dialect))


class _SqliteConnection:
    """A `Connection` on the driver itself."""

    __slots__ = ("driver",)

    def __init__(self, driver: sqlite3.Connection) -> None:
        self.driver = driver

    def all(self, statement: sa.Executable, parameters: Mapping[str, object]) -> Sequence[Row]:
        return self.driver.execute(_sql(statement), parameters).fetchall()

    def run(self, statement: sa.Executable, parameters: Mapping[str, object]) -> int:
        try:
            return self.driver.execute(_sql(statement), parameters).rowcount
        except sqlite3.IntegrityError as error:
            if error.sqlite_errorname not in (
                "SQLITE_CONSTRAINT_UNIQUE",
                "SQLITE_CONSTRAINT_PRIMARYKEY",
            ):
                raise
        raise UniqueViolation


class _Job(NamedTuple):
    """Work for a thread, and who waits for it."""

    work: Callable[[Any], Any]
    future: "asyncio.Future[Any]"
    claim: threading.Lock  # taken by who is first: the thread, to run it, or a cancellation
    on_engine: bool = False  # work on a SQLAlchemy connection instead of the driver's
    commit: bool = True

    def claimed(self) -> bool:
        """Whether the caller is the first to ask."""
        return self.claim.acquire(blocking=False)


class _Done(NamedTuple):
    job: _Job
    result: Any
    error: BaseException | None


class _Inbox:
    """What waits for a thread, and is taken in the order it came."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._ahead: list[_Job | None] = []  # taken from the queue, and not for this batch
        self._busy = False

    @property
    def waiting(self) -> int:
        """How much work is in front of a new job, roughly."""
        return self._queue.qsize() + self._busy

    def put(self, job: _Job | None) -> None:
        """Queue *job*; None ends the thread."""
        self._queue.put(job)

    def take(self, most: int) -> list[_Job]:
        """Wait for work, and return what may run in one transaction; empty at the end."""
        self._busy = False
        job = self._ahead.pop() if self._ahead else self._queue.get()
        self._busy = True
        batch: list[_Job] = []
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


class _Thread:
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


def _stop(threads: list[_Thread]) -> None:
    for thread in threads:
        thread.inbox.put(None)
    for thread in threads:
        thread.thread.join(_EXIT_TIMEOUT)


class SqliteExecutor:
    """Runs transactions on the threads above; started by the first of them."""

    def __init__(self, engine: sa.Engine, *, memory: bool) -> None:
        self._engine = engine
        self._memory = memory
        self._forget_threads()

    def _forget_threads(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._threads: list[_Thread] = []
        self._finalizer: weakref.finalize[Any, SqliteExecutor] | None = None

    async def read(self, transaction: Transaction[T]) -> T:
        return await self._submit(transaction, reads=True)

    async def write(self, transaction: Transaction[T]) -> T:
        return await self._submit(transaction)

    async def define(self, work: Callable[[sa.Connection], T], *, commit: bool) -> T:
        return await self._submit(work, on_engine=True, commit=commit)

    async def close(self) -> None:
        with self._lock:
            threads, self._threads = self._threads, []
            if self._finalizer is not None:
                self._finalizer.detach()
        if threads:
            await asyncio.to_thread(_stop, threads)
        self._engine.dispose()

    async def _submit(
        self,
        work: Callable[[Any], T],
        *,
        reads: bool = False,
        on_engine: bool = False,
        commit: bool = True,
    ) -> T:
        if os.getpid() != self._pid:
            self._after_fork()
        future = asyncio.get_running_loop().create_future()
        job = _Job(work, future, threading.Lock(), on_engine, commit)
        with self._lock:  # so that nothing is queued behind the end of a thread
            threads = self._threads or self._start()
            candidates = threads[1:] if reads and len(threads) > 1 else threads[:1]
            # The first that is idle: what it read last is still in its caches.
            min(candidates, key=lambda thread: thread.inbox.waiting).inbox.put(job)
        return await settled(future, job.claimed)

    def _start(self) -> list[_Thread]:
        readers = 0 if self._memory else _READERS
        self._threads = [_Thread(self._engine, writes=True)]
        self._threads += [_Thread(self._engine, writes=False) for _ in range(readers)]
        self._finalizer = weakref.finalize(self, _stop, self._threads)
        return self._threads

    def _after_fork(self) -> None:
        """Start anew in a child process: neither threads nor connections came along."""
        if self._memory:
            raise ConfigurationError(
                "a database in memory does not survive a fork: "
                "make the service in the child, or use a file"
            )
        if self._finalizer is not None:
            self._finalizer.detach()
        self._engine.dispose(close=False)  # the parent's connections are not ours to close
        self._forget_threads()


def _serve(inbox: _Inbox, engine: sa.Engine, writes: bool) -> None:
    connection: _SqliteConnection | None = None
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


def _connect(engine: sa.Engine, writes: bool) -> _SqliteConnection:
    pooled = engine.raw_connection()
    driver = pooled.driver_connection
    assert isinstance(driver, sqlite3.Connection)
    if not isinstance(engine.pool, sa.pool.StaticPool):
        pooled.detach()  # held for good: it must not count against the pool
    driver.isolation_level = None  # BEGIN is ours
    if writes:
        _enter_wal(driver)
        driver.execute("PRAGMA synchronous = FULL")
    else:
        driver.execute("PRAGMA query_only = ON")
    return _SqliteConnection(driver)


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


def _run_batch(connection: _SqliteConnection, batch: list[_Job]) -> list[_Done]:
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


def _run(connection: _SqliteConnection, job: _Job) -> _Done:
    try:
        return _Done(job, job.work(connection), None)
    except BaseException as error:
        return _Done(job, None, _translated(error))


def _run_on_engine(engine: sa.Engine, job: _Job) -> _Done:
    try:
        with engine.connect() as connection:
            if job.commit:
                connection.exec_driver_sql("BEGIN IMMEDIATE")
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
        by_loop.setdefault(outcome.job.future.get_loop(), []).append(outcome)
    for loop, mine in by_loop.items():
        try:
            loop.call_soon_threadsafe(_settle, mine)
        except RuntimeError:  # the loop was closed: nobody waits any more
            logger.debug("an event loop was closed before its transactions were answered")


def _settle(outcomes: list[_Done]) -> None:
    for job, result, error in outcomes:
        if error is not None:
            job.future.set_exception(error)
        else:
            job.future.set_result(result)


def sqlite_executor(url: sa.URL, engine_kwargs: dict[str, Any]) -> SqliteExecutor:
    """The executor for a SQLite URL; *engine_kwargs* are those of `sqlalchemy.create_engine`."""
    database = url.database or ""
    memory = database in ("", ":memory:") or database.startswith("file::memory:")
    memory = memory or url.query.get("mode") == "memory"
    options = dict(engine_kwargs)
    if memory:
        options.setdefault("poolclass", sa.pool.StaticPool)
    options["connect_args"] = {
        "timeout": _BUSY_TIMEOUT,
        "check_same_thread": False,
        **options.get("connect_args", {}),
    }
    options["hide_parameters"] = True
    engine = sa.create_engine(url.set(drivername="sqlite+pysqlite"), **options)
    return SqliteExecutor(engine, memory=memory)
