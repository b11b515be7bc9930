"""The executor for PostgreSQL with asyncpg: each read and each write is a single statement.

A single statement takes one round trip and commits by itself.  If a round trip takes 1.3 ms, a
single statement appends an event in a third of the time of BEGIN, UPDATE, INSERT and COMMIT.

Statements are prepared once for each connection.  A pooler in transaction mode, such as PgBouncer,
may run each transaction on another connection to the server.  On that connection, a prepared
statement may be missing, or another client may have prepared a statement with the same name.
Therefore, the name of a statement is a hash of its text, so that statements with the same name are
the same.  If a statement is missing, the server rejects the request without executing anything.
After the first such rejection, the executor gives names to no more statements: `_PoolerDetection`
tells how they run then.
"""

import asyncio
import functools
import hashlib
import logging
import os
import sys
import time
import uuid
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy import PoolProxiedConnection
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.util import greenlet_spawn

from adk_secure_sessions.db.async_engine import AsyncEngineExecutor, rejected_option_error
from adk_secure_sessions.db.failures import (
    needs_unprepared,
    pool_timed_out_error,
    statement_timeout,
    timed_out_error,
    translate,
)
from adk_secure_sessions.db.postgresql_sql import DIVISION_BY_ZERO, compile_apply, compile_read
from adk_secure_sessions.db.protocol import (
    Change,
    Conflict,
    Disconnected,
    Parameters,
    Read,
    Row,
    Steps,
    T,
    Transaction,
)

logger: logging.Logger = logging.getLogger(__name__)

_PLAN_IS_OUTDATED = "0A000"  # SQLSTATE: a table has changed since the statement was prepared
_CLOSE_TIMEOUT = 5.0  # seconds to close a connection, including the cancel request
# Three keys of a connection's `info`: the statements that were prepared on the connection, the
# executor's `_disposals` at the time of the checkout, and when we returned it to the pool.
_PREPARED = "adk_secure_sessions.prepared"
_DISPOSALS = "adk_secure_sessions.disposals"
_RETURNED = "adk_secure_sessions.returned"
# Two options of a connection.  If one of them is 0, the application has disabled prepared
# statements.
_NO_CACHE = ("statement_cache_size", "prepared_statement_cache_size")
# This list keeps the garbage collector from closing connections of the parent process in a child,
# which would break them for the parent.
_abandoned: list[PoolProxiedConnection] = []


class AsyncpgExecutor(AsyncEngineExecutor):
    """Runs transactions with asyncpg on connections from SQLAlchemy's pool.

    If this package created the engine, the executor keeps up to *max_idle* connections checked out
    of the pool between operations, and waits up to *timeout* seconds for a free one.  If each
    operation checked out a connection and returned it, an append would take 1.31 times the CPU time
    and 1.17 times the elapsed time, and a read of 20 events 1.20 and 1.16 times.  The cost is that
    of two greenlets, the pool's bookkeeping and its events.  Without the greenlets, the operations
    would still take 1.07 to 1.12 times the CPU time.  (Medians of 300 interleaved pairs, with
    PostgreSQL 18 on the same machine.)

    An application's own engine may have any kind of pool, so its connections are returned to the
    pool after each operation; *max_idle* is then 0.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        *,
        owns_engine: bool,
        read_timeout: float | None = None,
        max_idle: int = 0,
        timeout: float = 0,
    ) -> None:
        super().__init__(engine, owns_engine=owns_engine, read_timeout=read_timeout)
        self._pooler = _PoolerDetection()
        if owns_engine:
            sa.event.listen(engine.sync_engine, "do_connect", self._pooler.set_options)
        self._max_idle = max_idle
        self._timeout = timeout
        self._idle: list[PoolProxiedConnection] = []  # checked out of the pool, but not in use
        self._last_loss = 0.0  # when a connection was lost, by `time.monotonic`
        self._slots = self._new_slots()
        self._finalizer = weakref.finalize(self, _close_idle, self._idle, os.getpid())

    async def read(self, query: sa.Executable, parameters: Parameters) -> Sequence[Row]:
        # A read needs no task of its own: if the caller is cancelled, `_use_connection` closes it.
        self.begin_call()
        try:
            return await self._use_connection(
                lambda statements: statements.fetch(query, parameters)
            )
        finally:
            self.end_call()

    async def close(self) -> None:
        if not self.may_be_connected():
            return
        # Each operation holds a slot (see `_new_slots`).  So when this method has taken all slots,
        # no operation is running.
        slots = 0
        async with self._locks.lock("close"):  # two calls with some slots each would wait for ever
            try:
                while slots < self._max_idle:
                    await self._slots.acquire()
                    slots += 1
            finally:  # also if the caller was cancelled
                for _ in range(slots):
                    self._slots.release()
        await super().close()

    async def _transact(self, transaction: Transaction[T], in_one_transaction: bool) -> T:
        return await self._use_connection(
            lambda statements: statements.run_steps(transaction(), in_one_transaction)
        )

    async def _run(self, work: Callable[[sa.Connection], T], *, commit: bool) -> T:
        await self._take_slot()
        try:
            # Return an idle connection to the pool, so that SQLAlchemy can check it out.
            if self._idle:
                self._idle.pop().close()
            try:
                return await super()._run(work, commit=commit)
            except sa.exc.DBAPIError as error:
                if not (self._owns_engine and needs_unprepared(error)):
                    raise
            # A pooler rejected a prepared statement, and nothing was committed.  Replace the open
            # connections, on which statements are prepared with names, and run *work* again.
            self._pooler.mark_found()
            await self._release_all()
            return await super()._run(work, commit=commit)
        finally:
            self._slots.release()

    def begin_call(self) -> bool:
        pid = self._pid
        is_first = super().begin_call()
        if is_first:
            if pid != self._pid:
                _abandoned.extend(self._idle)
                self._idle.clear()
            _close_idle(self._idle, self._pid)  # their event loop was closed without `_end_of_loop`
            self._slots = self._new_slots()
            self._finalizer.detach()  # perhaps it has the id of the parent process
            self._finalizer = weakref.finalize(self, _close_idle, self._idle, self._pid)
        return is_first

    async def _release_all(self) -> None:
        while self._idle:
            self._idle.pop().close()
        await super()._release_all()

    async def _use_connection(self, work: "Callable[[_StatementRunner], Awaitable[T]]") -> T:
        """Call *work* with a connection, and return its result; translate errors."""
        async with self._exclusive_use(False):
            pooled = await self._acquire()
            driver: Any = pooled.driver_connection
            self._mark_connected(driver)
            statements = _StatementRunner(
                driver, pooled.info.setdefault(_PREPARED, {}), self._pooler, self._read_timeout
            )
            usable = False  # stays False if we are cancelled before the server answers
            try:
                result = await work(statements)
                usable = True
                return result
            except Exception as error:
                translated_error = _translate_asyncpg(error, connection_lost=driver.is_closed())
                is_lost = isinstance(translated_error, Disconnected)
                usable = not (is_lost or statements.is_unusable)
                # The network may have ended all connections that were idle, which a time-out may
                # show, too; or new connections may lead to another server.
                if is_lost:
                    self._last_loss = time.monotonic()
                while self._idle and not usable:
                    self._discard(self._idle.pop())
                raise translated_error from None
            finally:
                await self._release(pooled, usable=usable)

    async def _acquire(self) -> PoolProxiedConnection:
        """Wait for a slot (see `_new_slots`); return a connection that the driver has not closed.

        If the server has closed it, the first statement raises Disconnected and is repeated:
        asking the server first would take a round trip.
        """
        await self._take_slot()
        try:
            while self._idle:
                if _is_open(pooled := self._idle.pop()):
                    return pooled
                pooled.invalidate()
            while True:
                pooled = await greenlet_spawn(self._checkout)
                returned = pooled.info.get(_RETURNED, self._last_loss)
                if returned >= self._last_loss and _is_open(pooled):
                    return pooled
                pooled.invalidate()
        except BaseException as error:
            self._slots.release()
            if not isinstance(error, Exception):
                raise
            raise rejected_option_error(_translate_asyncpg(error, connection_lost=False)) from None

    def _checkout(self) -> PoolProxiedConnection:
        disposals = self._disposals  # may increase while SQLAlchemy opens a connection
        pooled = self._engine.sync_engine.raw_connection()
        pooled.info[_DISPOSALS] = disposals
        return pooled

    async def _release(self, pooled: PoolProxiedConnection, *, usable: bool) -> None:
        try:
            if not usable or pooled.info[_DISPOSALS] != self._disposals:
                self._discard(pooled)
            elif self._max_idle:
                self._idle.append(pooled)
            else:
                pooled.info[_RETURNED] = time.monotonic()
                await greenlet_spawn(pooled.close)
        finally:
            self._slots.release()

    def _discard(self, pooled: PoolProxiedConnection) -> None:
        """Remove a connection from the pool, which may then open another, and close it."""
        driver = pooled.driver_connection
        pooled.detach()
        with suppress(RuntimeError):  # the loop was closed while this task waited: it is destroyed
            asyncio.get_running_loop()
            self._in_background(_close(driver))

    def _new_slots(self) -> asyncio.Semaphore:
        """Return a semaphore with one slot for each connection that may be in use.

        SQLAlchemy's pool cannot limit kept connections: it counts them as in use.
        """
        return asyncio.Semaphore(self._max_idle or sys.maxsize)

    async def _take_slot(self) -> None:
        if not self._slots.locked():
            await self._slots.acquire()
            return
        try:
            async with asyncio.timeout(self._timeout):
                await self._slots.acquire()
        except TimeoutError:
            raise pool_timed_out_error(self._timeout) from None


def _close_idle(idle: list[PoolProxiedConnection], pid: int) -> None:
    """Close idle connections when their executor is garbage-collected or Python exits."""
    for pooled in idle:
        driver: Any = pooled.driver_connection
        pooled.detach()  # otherwise the pool warns that the connection was not returned
        if os.getpid() != pid:
            continue  # the connection belongs to the parent process
        try:
            driver.terminate()
        except RuntimeError:
            pass  # the connection's event loop is closed
    idle.clear()


def _is_open(pooled: PoolProxiedConnection) -> bool:
    driver: Any = pooled.driver_connection
    return not driver.is_closed()


async def _close(driver: Any) -> None:
    """Close a connection; asyncpg first sends a cancel request for a statement that still runs."""
    try:
        await driver.close(timeout=_CLOSE_TIMEOUT)
    except Exception:
        pass  # asyncpg has aborted the connection


class _PoolerDetection:
    """Records whether there is a pooler in transaction mode between this process and the server.

    If there is one, each operation is one transaction of four round trips instead of one, and its
    statements are prepared without names.
    """

    def __init__(self) -> None:
        self.is_found = False

    def mark_found(self) -> None:
        if not self.is_found:
            self.is_found = True
            logger.info(
                "there is a connection pooler in transaction mode before the database: statements "
                "are not prepared any more"
            )

    def set_options(
        self, dialect: object, record: object, args: list[Any], options: dict[str, Any]
    ) -> None:
        """Set how SQLAlchemy prepares its statements on a new connection."""
        if any(options.get(name) == 0 for name in _NO_CACHE):
            self.is_found = True  # the application disabled prepared statements: assume a pooler
        if self.is_found:
            # Without a cache, each execution prepares an unnamed statement in the transaction that
            # executes it.  The next transaction may run on another connection to the server.
            options["prepared_statement_cache_size"] = options["statement_cache_size"] = 0
            options["prepared_statement_name_func"] = str
        else:
            # Use random names.  Behind a pooler, other clients may prepare statements on the same
            # connection to the server, and two statements cannot have the same name.
            options.setdefault("prepared_statement_name_func", lambda: f"aks_{uuid.uuid4().hex}")


@dataclass(slots=True, eq=False, repr=False)
class _StatementRunner:
    """Runs the statements of one operation; *prepared* are those of the connection, by text."""

    _driver: Any
    _prepared: dict[str, Any]
    _pooler: _PoolerDetection
    _timeout: float | None
    _in_transaction: bool = False
    is_unusable: bool = False  # True once a statement was interrupted, or a ROLLBACK has failed

    async def fetch(self, query: sa.Executable, parameters: Parameters) -> Sequence[Row]:
        text, names = compile_read(query)
        return await self._with_time_limit(text, [parameters[name] for name in names])

    async def _with_time_limit(
        self, text: str, values: list[object] | None, *, writes: bool = False
    ) -> Sequence[Row]:
        seconds = statement_timeout(self._timeout, writes=writes)
        try:
            return await self._execute(text, values, seconds, writes=writes)
        except TimeoutError as error:
            # If the network timed out, the error has an errno.  If our own time limit expired, the
            # error has no errno.
            if error.errno is not None or seconds is None:
                raise
            self.is_unusable = True
            raise timed_out_error(seconds, "a write" if writes else "a read") from None

    async def run_steps(self, steps: Steps[T], in_one_transaction: bool) -> T:
        """Run *steps* and return their result; each Read or Apply is one statement."""
        if not (in_one_transaction or self._pooler.is_found):
            return await self._run_steps(steps)
        async with self._transaction(writes=True):
            return await self._run_steps(steps)

    @asynccontextmanager
    async def _transaction(self, *, writes: bool) -> AsyncIterator[None]:
        """Run the block in a transaction.

        It is not one of asyncpg, whose statements have no time limit, and which would wait for the
        answer to ROLLBACK after a statement has timed out.
        """
        await self._with_time_limit("BEGIN ISOLATION LEVEL READ COMMITTED", None, writes=writes)
        self._in_transaction = True
        try:
            yield
            await self._with_time_limit("COMMIT", None, writes=writes)
        except Exception as error:
            # After a time-out, the connection is closed instead.
            if not (self.is_unusable or isinstance(error, TimeoutError)):
                try:
                    await self._with_time_limit("ROLLBACK", None, writes=writes)
                except Exception:
                    self.is_unusable = True
            raise
        finally:
            self._in_transaction = False

    async def _run_steps(self, steps: Steps[T]) -> T:
        answer: object = None
        try:
            while True:
                step = steps.send(answer)
                if isinstance(step, Read):
                    answer = await self.fetch(step.query, step.parameters)
                else:
                    # Outside a transaction, the first Apply is committed: see `Executor.write`.
                    assert self._in_transaction or answer is not True
                    changes = step.changes
                    text, sources = compile_apply(
                        tuple((change.statement, change.must_match_one_row) for change in changes),
                        frozenset(i for i, change in enumerate(changes) if change.rows),
                    )
                    values = [_parameter_value(changes[index], name) for index, name in sources]
                    answer = bool((await self._with_time_limit(text, values, writes=True))[0][0])
        except StopIteration as end:
            result: T = end.value
            return result

    async def _execute(
        self, text: str, values: list[object] | None, seconds: float | None, *, writes: bool
    ) -> Sequence[Row]:
        rows: Sequence[Row]
        if values is None:  # BEGIN, COMMIT or ROLLBACK
            await self._driver.execute(text, timeout=seconds)
            return []
        if not self._pooler.is_found:
            try:
                if (statement := self._prepared.get(text)) is None:
                    statement = await self._driver.prepare(text, name=_name(text), timeout=seconds)
                    self._prepared[text] = statement
                rows = await statement.fetch(*values, timeout=seconds)
                return rows
            except Exception as error:
                # In both of the following cases, the server has executed nothing.
                if getattr(error, "sqlstate", None) == _PLAN_IS_OUTDATED:
                    self._prepared.pop(text, None)
                elif needs_unprepared(error):
                    self._pooler.mark_found()
                else:
                    raise
            # Remove this reference, so that asyncpg closes the statement at the server.
            statement = None
            if self._in_transaction:
                raise Conflict  # the server has aborted the transaction
        async with nullcontext() if self._in_transaction else self._transaction(writes=writes):
            statement = await self._driver.prepare(text, name="", timeout=seconds)
            rows = await statement.fetch(*values, timeout=seconds)
            return rows


def _parameter_value(change: Change, name: str) -> object:
    if change.rows:
        return [row[name] for row in change.rows]
    return change.parameters[name]


@functools.cache
def _name(text: str) -> str:
    return f"aks_{hashlib.sha256(text.encode()).hexdigest()[:40]}"


def _translate_asyncpg(error: Exception, *, connection_lost: bool) -> Exception:
    state: str | None = getattr(error, "sqlstate", None)
    if state == DIVISION_BY_ZERO:  # a later change matched no row: see `postgresql_sql`
        return Conflict()
    # SQLAlchemy wraps asyncpg's errors in its own classes, in a module whose name also contains
    # "asyncpg".
    is_of_asyncpg = "asyncpg" in type(error).__module__
    # An error without an SQLSTATE does not come from the server: either the connection has failed,
    # or a parameter was not valid (ValueError).
    lost = connection_lost or (state is None and not isinstance(error, ValueError))
    return translate(error, connection_lost=is_of_asyncpg and lost)
