"""The executor for a SQLAlchemy `AsyncEngine` that the application or this package has created."""

import asyncio
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from typing import Any
from weakref import WeakMethod

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.pool import NullPool, StaticPool

from adk_secure_sessions.concurrency import LoopLocks, ThreadLock, await_to_end
from adk_secure_sessions.db.dialects import decode_any_text, dialect_of
from adk_secure_sessions.db.failures import (
    is_read_only,
    needs_unprepared,
    statement_timeout,
    timed_out_error,
    translate,
)
from adk_secure_sessions.db.protocol import (
    Change,
    Disconnected,
    Parameters,
    Row,
    T,
    Transaction,
    run_changes,
    run_steps,
    with_claims,
)
from adk_secure_sessions.errors import ConfigurationError, SecureSessionError

_COUNT_ROWS = {"preserve_rowcount": True}  # by default, SQLAlchemy has no row count of an INSERT
_KILL_TIMEOUT = 5.0  # seconds
_MAX_CANCEL_REQUESTS = 5  # for one query; one or two seconds pass between them
# A key of `Connection.info`, set once we have checked whether the connection is behind a pooler.
_CHECKED = "adk_secure_sessions.pooler"

# For an engine of the application with asyncpg: with psycopg, we disable prepared statements.
_POOLER = (
    "there is a connection pooler in transaction mode before the database: give the engine "
    "connect_args={'prepared_statement_cache_size': 0, 'prepared_statement_name_func': lambda: ''}"
)


class AsyncEngineExecutor:
    """Runs transactions on a SQLAlchemy engine; see `protocol.Executor`.

    Each call, except `AsyncpgExecutor.read`, runs in its own task; a cancelled caller waits until
    it has ended.  If *owns_engine* is True, this package has created the engine, and `close`
    disposes of it.

    Only one event loop at a time uses the engine.  With the driver of a server, a connection works
    only in the event loop that opened it.
    """

    def __init__(
        self, engine: AsyncEngine, *, owns_engine: bool, read_timeout: float | None = None
    ) -> None:
        self._engine = engine
        self._owns_engine = owns_engine
        self._read_timeout = read_timeout
        self._dialect = dialect_of(engine)
        self._is_psycopg = engine.dialect.driver == "psycopg"
        self._is_cluster: bool | None = None  # None until the server was asked
        # With a StaticPool, all tasks share one connection.  `_exclusive_use` then returns a lock.
        # Without this lock, one transaction could contain the statements of several tasks.
        self._has_one_connection = isinstance(engine.pool, StaticPool)
        self._locks = LoopLocks()
        self._lock = ThreadLock()  # of the next four fields
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = 0
        self._calls = 0  # the number of calls in progress
        self._at_end: AsyncGenerator[None] | None = None
        if owns_engine and self._dialect.is_server:
            sa.event.listen(engine.sync_engine, "handle_error", _discard_read_only)
        # Increases when the pool is disposed of.  A connection that was checked out before is
        # closed after its operation.  SQLAlchemy would return it to the former pool, and would
        # never close it.
        self._disposals = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        # The driver's connection of each task, except of tasks that still wait for a connection.
        # The value is None if the task is about to return its connection to the pool.
        self._connections: dict[asyncio.Task[Any], Any] = {}
        # The tasks whose query we have asked a server to end.
        self._interrupted: set[asyncio.Task[Any]] = set()
        # The tasks that ask a server to end a query.
        self._cancel_requests: set[asyncio.Task[Any]] = set()

    async def read(self, query: sa.Executable, parameters: Parameters) -> Sequence[Row]:
        work = partial(self._fetch, query=query, parameters=parameters)
        return await self._run_shielded(partial(self._run_translated, work), interruptible=True)

    async def write(
        self,
        transaction: Transaction[T],
        on_commit: Callable[[], None] | None = None,
        *,
        in_one_transaction: bool = False,
    ) -> T:
        work = partial(self._transact, transaction, in_one_transaction)
        return await self._run_shielded(work, on_commit)

    async def run_sync(self, work: Callable[[sa.Connection], T], *, commit: bool = True) -> T:
        def run(connection: sa.Connection) -> T:
            with self._dialect.decoding(connection, decode_any_text):
                if commit:
                    return work(connection)
                return self._with_time_limit(lambda: work(connection))

        return await self._run_shielded(
            partial(self._run_translated, run, commit=commit), interruptible=not commit
        )

    async def close(self) -> None:
        if not self.may_be_connected():
            return
        while tasks := [*self._tasks, *self._cancel_requests]:
            await asyncio.wait(tasks)
        if self._owns_engine:
            await self._release_all()

    async def _transact(self, transaction: Transaction[T], in_one_transaction: bool) -> T:
        def work(connection: sa.Connection) -> T:
            is_cluster = self._is_cluster  # which another task may reset meanwhile
            if is_cluster is None:
                is_cluster = self._is_cluster = self._dialect.locks_per_node(connection)
                if self._dialect.is_server:
                    connection.rollback()
            if in_one_transaction:
                self._dialect.set_read_committed(connection)
            steps = with_claims(transaction()) if is_cluster else transaction()
            apply = partial(run_changes, partial(self._make_change, connection))
            return run_steps(steps, partial(self._fetch, connection), apply)

        return await self._run_translated(work, commit=True)

    async def _run_translated(
        self, work: Callable[[sa.Connection], T], *, commit: bool = False
    ) -> T:
        """Do the same as `_run`, with the errors that `failures.translate` returns."""
        try:
            return await self._run(work, commit=commit)
        except Exception as error:
            translated_error = translate(error)
            if translated_error is error and asyncio.current_task() not in self._connections:
                translated_error = rejected_option_error(error)
            if translated_error is error:
                raise
            if needs_unprepared(error):
                translated_error = ConfigurationError(_POOLER)
            raise translated_error from None

    async def _run(self, work: Callable[[sa.Connection], T], *, commit: bool) -> T:
        """Run *work* in a transaction on a connection of the pool, and return its result."""
        disposals = self._disposals
        async with self._exclusive_use(commit), self._engine.connect() as connection:
            assert connection.sync_connection is not None
            self._mark_connected(connection.sync_connection.connection.driver_connection)
            try:
                if self._is_psycopg and not connection.sync_connection.info.get(_CHECKED):
                    await connection.run_sync(_prepare_nothing_behind_pooler)
                if commit:
                    await connection.run_sync(self._dialect.begin_immediate)
                result = await connection.run_sync(work)
                if commit:
                    await connection.run_sync(
                        lambda sync: self._with_time_limit(sync.commit, writes=True)
                    )
                return result
            except Exception as error:
                # The server may answer, but be no use any more: it has become read-only, or it is a
                # node that has lost its cluster.  A new connection may lead to another server.
                if self._dialect.is_server and isinstance(translate(error), Disconnected):
                    self._is_cluster = None
                    await connection.invalidate()
                raise
            finally:
                # The request to end the query may still be on its way to the server.  If this
                # connection returned to the pool, another task could use it, and the request would
                # end the query of that task.
                if self._mark_finished() or disposals != self._disposals:
                    await connection.invalidate()

    def _exclusive_use(self, writes: bool) -> AbstractAsyncContextManager[None]:
        """Let only one task of an event loop write to a file, or use a single connection."""
        if self._has_one_connection or (writes and not self._dialect.is_server):
            return self._locks.lock("connection")
        return nullcontext()

    async def _run_shielded(
        self,
        work: Callable[[], Coroutine[Any, Any, T]],
        on_commit: Callable[[], None] | None = None,
        *,
        interruptible: bool = False,
    ) -> T:
        """Run *work* in its own task, to its end: an interrupted transaction would stay open.

        If *work* is *interruptible*, because it writes nothing, a cancellation ends its query.
        """
        self.begin_call()
        results: list[T] = []
        errors: list[Exception] = []

        async def run() -> None:
            # The task itself returns and raises nothing: asyncio quotes its result in the debug
            # log, and logs its error if `asyncio.run` has cancelled it at the end of the loop.
            try:
                results.append(await work())
            except Exception as error:
                errors.append(error)
            else:
                if on_commit is not None:
                    on_commit()

        task = asyncio.ensure_future(run())
        self._tasks.add(task)
        task.add_done_callback(self._end_task)

        def on_cancel() -> None:
            if task not in self._connections:
                task.cancel()
            elif interruptible:
                self._interrupt(task)

        await await_to_end(task, on_cancel)
        if errors:
            raise errors.pop()
        return results[0]

    def _make_change(self, connection: sa.Connection, change: Change) -> int:
        """Return how many rows *change* matched."""
        self._dialect.check_packet_size(connection, change.rows or [change.parameters])
        values = change.rows or change.parameters
        run = partial(connection.execute, execution_options=_COUNT_ROWS)
        return self._with_time_limit(lambda: run(change.statement, values).rowcount, writes=True)

    def _fetch(
        self, connection: sa.Connection, query: sa.Executable, parameters: Parameters
    ) -> Sequence[Row]:
        return self._with_time_limit(lambda: self._dialect.fetch(connection, query, parameters))

    def _with_time_limit(self, work: Callable[[], T], *, writes: bool = False) -> T:
        """Run *work*; if it takes too long, interrupt it and raise DatabaseError."""
        task = asyncio.current_task()
        seconds = statement_timeout(self._read_timeout, writes=writes)
        if seconds is None or task is None:
            return work()
        has_timed_out = False

        def interrupt() -> None:
            nonlocal has_timed_out
            has_timed_out = True
            self._interrupt(task)

        timer = asyncio.get_running_loop().call_later(seconds, interrupt)
        try:
            result = work()
            # PostgreSQL reports success if a COMMIT that waits for a standby is interrupted.
            if not (writes and has_timed_out):
                return result
        except BaseException as error:
            if not has_timed_out:
                raise
            if isinstance(error, asyncio.CancelledError):
                task.uncancel()
        finally:
            timer.cancel()
        raise timed_out_error(seconds, "a write" if writes else "a read")

    def _interrupt(self, task: asyncio.Task[Any]) -> None:
        """Interrupt the statement that *task* has sent to the database.

        A time limit that the server is told would also apply to other clients behind a pooler.
        """
        driver = self._connections[task]
        if driver is None:
            return
        if not self._dialect.is_server:
            try:
                # Run the coroutine at once: a task would run it later, and might interrupt the next
                # statement of the connection.
                driver.interrupt().send(None)
            except StopIteration:
                pass
            return
        self._interrupted.add(task)
        if self._is_psycopg and hasattr(driver, "cancel_safe"):  # psycopg 3.2 and later
            self._in_background(_cancel_query(task, driver))
            return
        task.cancel()  # this makes asyncpg send a cancel request to the server
        if (statement := self._dialect.kill_statement(driver)) is not None:
            self._in_background(self._kill(statement))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._cancel_requests.add(task)
        task.add_done_callback(self._cancel_requests.discard)

    async def _kill(self, statement: str) -> None:
        try:
            async with asyncio.timeout(_KILL_TIMEOUT), self._engine.connect() as connection:
                await connection.exec_driver_sql(statement)
        except Exception:
            pass  # the connection has ended, or the server does not answer

    def _mark_connected(self, driver: Any) -> None:
        if (task := asyncio.current_task()) in self._tasks:
            assert task is not None
            self._connections[task] = driver

    def _mark_finished(self) -> bool:
        """Prevent later interrupts of the current task; return whether one may be under way."""
        task = asyncio.current_task()
        if task not in self._connections:
            return False
        self._connections[task] = None
        return task in self._interrupted

    def begin_call(self) -> bool:
        """Register a call, and return whether it is the first call in its event loop."""
        loop, pid = asyncio.get_running_loop(), os.getpid()
        with self._lock.lock:
            is_first = loop is not self._loop or pid != self._pid
            if is_first:
                self._leave_previous_loop(pid)
                self._loop, self._pid = loop, pid
                self._at_end = generator = _until_end_of_loop(WeakMethod(self._end_of_loop))
                try:
                    generator.__anext__().send(None)
                except StopIteration:
                    pass  # `__anext__()` has ended; the generator now waits at its `yield`
            self._calls += 1
        return is_first

    def may_be_connected(self) -> bool:
        """Return whether `close` may have tasks to wait for, and connections to close."""
        if os.getpid() != self._pid:
            return False  # not used in this process: all are those of the parent
        if self._loop is not None and self._loop.is_closed():
            if not self._owns_engine:
                return False  # the application closes the connections, and no task goes on
            self.begin_call()  # forgets the tasks of that loop, which never end
            self.end_call()
        return True

    def end_call(self) -> None:
        """Register the end of a call."""
        with self._lock.lock:
            self._calls -= 1

    def _leave_previous_loop(self, pid: int) -> None:
        """Discard the connections of the previous event loop or of the parent process."""
        keeps = self._dialect.is_server and not isinstance(self._engine.pool, NullPool)
        alive = self._loop is not None and pid == self._pid and not self._loop.is_closed()
        if alive and (self._calls or (keeps and self._owns_engine)):
            raise ConfigurationError(
                "the database connections belong to another event loop: create a service for "
                "each loop that runs at the same time, or on SQLite pass db_url"
            )
        self._calls = 0
        for former in self._tasks, self._connections, self._interrupted, self._cancel_requests:
            former.clear()  # `close` would wait forever for tasks of a parent process
        if self._loop is None or not keeps:
            return
        if not self._owns_engine:
            raise ConfigurationError(
                "db_engine still holds connections of another event loop or of a parent "
                "process: create the engine where it is used, give it poolclass=NullPool, or "
                "pass db_url"
            )
        # close=False, because the event loop of the connections has ended, or because the
        # connections belong to the parent process.
        self._engine.sync_engine.dispose(close=False)

    def _end_task(self, task: asyncio.Task[Any]) -> None:
        self.end_call()
        self._tasks.discard(task)
        self._connections.pop(task, None)
        self._interrupted.discard(task)

    async def _end_of_loop(self) -> None:
        if self._cancel_requests:
            await asyncio.wait(self._cancel_requests)
        if self._owns_engine:
            await self._release_all()

    async def _release_all(self) -> None:
        self._disposals += 1
        await self._engine.dispose()
        self._disposals += 1  # until here, connections were checked out of the former pool


async def _cancel_query(task: asyncio.Task[Any], driver: Any) -> None:
    """Send cancel requests to the server until *task*, which waits for a query of psycopg, ends.

    A pooler ignores a request if the query has not reached the server yet.  If *task* were
    cancelled instead, psycopg would send only one.
    """
    for _ in range(_MAX_CANCEL_REQUESTS):
        try:
            await driver.cancel_safe(timeout=1)
        except Exception:
            pass  # the server does not answer
        if task in (await asyncio.wait([task], timeout=1))[0]:
            return
    task.cancel()


def _discard_read_only(context: sa.engine.ExceptionContext) -> None:
    """Make SQLAlchemy's pool replace all its connections if the server is read-only.

    If a URL names several hosts, new connections lead to the new primary.
    """
    if is_read_only(context.original_exception):
        context.is_disconnect = True


def rejected_option_error(error: Exception) -> Exception:
    """Return our error if *error* says that the driver rejects an option, else *error*."""
    if isinstance(error, SecureSessionError) or not isinstance(error, TypeError | ValueError):
        return error
    # The text of a TypeError contains names of functions and arguments, but no values.
    problem = str(error) if isinstance(error, TypeError) else "a value is not valid"
    return ConfigurationError(
        "the driver of the database does not accept an option in the database URL or in "
        f"connect_args: {problem}"
    )


def _prepare_nothing_behind_pooler(connection: sa.Connection) -> None:
    """Keep psycopg from preparing statements if this connection is behind a pooler.

    All psycopg processes use the same names for prepared statements.  So behind a pooler in
    transaction mode, an EXECUTE could run the statement of another client.  To a new client, a
    server sends the number `pg_backend_pid()`, and a pooler sends another number.
    """
    driver: Any = connection.connection.driver_connection
    number = connection.exec_driver_sql("SELECT pg_backend_pid()").scalar()
    connection.rollback()
    if number != driver.info.backend_pid:
        driver.prepare_threshold = None
    connection.info[_CHECKED] = True


async def _until_end_of_loop(
    closing: "WeakMethod[Callable[[], Awaitable[None]]]",
) -> AsyncGenerator[None]:
    """Await *closing* before the running event loop ends.

    ADK's `Runner.run` runs each call in a new event loop, which must close its connections.  When
    `asyncio.run` ends, it closes the asynchronous generators of its event loop, which runs the
    finally block.  The weak reference does not keep an unused service in memory.
    """
    try:
        yield
    finally:
        if close := closing():
            await close()
