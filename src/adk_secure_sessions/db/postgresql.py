"""PostgreSQL by asyncpg: each read and each write is one statement on the driver itself."""

import asyncio
import os
import weakref
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy import PoolProxiedConnection
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.util import greenlet_spawn

from adk_secure_sessions.db.async_engine import AsyncEngineExecutor
from adk_secure_sessions.db.dialects import meaning
from adk_secure_sessions.db.postgresql_sql import DIVISION_BY_ZERO, apply_sql, read_sql
from adk_secure_sessions.db.protocol import (
    Conflict,
    Disconnected,
    Parameters,
    Read,
    Row,
    Steps,
    T,
    Transaction,
)

# SQLAlchemy puts a class of its own around an error while connecting.
_DRIVER = ("asyncpg", "sqlalchemy.dialects.postgresql.asyncpg")
# Of a parent process, or of an event loop that was torn down: whoever closes one of the
# former takes it from the parent, and of the latter none can be closed.
_abandoned: list[PoolProxiedConnection] = []


class AsyncpgExecutor(AsyncEngineExecutor):
    """Takes connections from SQLAlchemy's pool and uses them without SQLAlchemy.

    Up to *keep* stay with us between operations: a visit to the pool costs as much as a
    statement.  Of a caller's engine none does.  *timeout*: seconds to wait for one.
    """

    def __init__(
        self, engine: AsyncEngine, *, owned: bool, keep: int = 0, timeout: float = 0
    ) -> None:
        super().__init__(engine, owned=owned)
        self._keep = keep
        self._timeout = timeout
        self._idle: list[PoolProxiedConnection] = []
        self._slots = asyncio.Semaphore(keep)
        weakref.finalize(self, _drop, self._idle, os.getpid())

    async def read(self, query: sa.Executable, parameters: Parameters) -> Sequence[Row]:
        # In no task of its own: a query whose caller is cancelled ends with its connection.
        self._enter()
        try:
            return await self._use(lambda driver: _fetch(driver, query, parameters))
        finally:
            self._binding.leave()

    async def close(self) -> None:
        for _ in range(self._keep):  # until nobody uses one
            await self._slots.acquire()
        for _ in range(self._keep):
            self._slots.release()
        await super().close()

    async def _transact(self, transaction: Transaction[T]) -> T:
        return await self._use(lambda driver: _follow(driver, transaction()))

    async def _run(self, work: Callable[[sa.Connection], T], *, commit: bool, alone: bool) -> T:
        await self._wait()
        try:
            if self._idle:  # make room in the pool
                self._idle.pop().close()
            return await super()._run(work, commit=commit, alone=alone)
        finally:
            self._signal()

    def _enter(self) -> bool:
        moved = super()._enter()
        if moved:
            _abandoned.extend(self._idle)
            self._idle.clear()
            self._slots = asyncio.Semaphore(self._keep)
        return moved

    async def _release_all(self) -> None:
        while self._idle:
            self._idle.pop().close()
        await super()._release_all()

    async def _use(self, work: Callable[[Any], Awaitable[T]]) -> T:
        async with self._alone(False):
            pooled = await self._acquire()
            self._begin()
            driver: Any = pooled.driver_connection
            usable = False
            try:
                result = await work(driver)
                usable = True
                return result
            except Exception as error:
                meant = _translated(error, lost=driver.is_closed())
                usable = not isinstance(meant, Disconnected)
            finally:
                await self._release(pooled, usable=usable)
        raise meant

    async def _acquire(self) -> PoolProxiedConnection:
        """A connection that the server has not closed, so far as is known without asking it."""
        await self._wait()
        try:
            while self._idle:
                if _is_open(pooled := self._idle.pop()):
                    return pooled
                pooled.invalidate()
            while not _is_open(pooled := await greenlet_spawn(self._checkout)):
                pooled.invalidate()
            return pooled
        except Exception as error:
            meant = _translated(error, lost=False)
            self._signal()
        except BaseException:
            self._signal()
            raise
        raise meant

    def _checkout(self) -> PoolProxiedConnection:
        return self._engine.sync_engine.raw_connection()

    async def _release(self, pooled: PoolProxiedConnection, *, usable: bool) -> None:
        try:
            if not usable:
                pooled.invalidate()
            elif self._keep:
                self._idle.append(pooled)
            else:
                await greenlet_spawn(pooled.close)
        finally:
            self._signal()

    async def _wait(self) -> None:
        if not self._keep:
            return  # SQLAlchemy's pool does the waiting
        if not self._slots.locked():
            await self._slots.acquire()
            return
        try:
            async with asyncio.timeout(self._timeout):
                await self._slots.acquire()
                return
        except TimeoutError:
            pass
        raise sa.exc.TimeoutError(
            f"none of {self._keep} connections was free within {self._timeout:g} s: raise pool_size"
        )

    def _signal(self) -> None:
        if self._keep:
            self._slots.release()


def _drop(idle: list[PoolProxiedConnection], pid: int) -> None:
    """What becomes of the connections of a service that nobody closed, at the latest at exit."""
    for pooled in idle:
        driver: Any = pooled.driver_connection
        pooled.detach()  # the pool would complain of it
        if os.getpid() != pid:
            continue  # a parent's
        try:
            driver.terminate()
        except RuntimeError:
            pass  # its event loop is closed
    idle.clear()


def _is_open(pooled: PoolProxiedConnection) -> bool:
    driver: Any = pooled.driver_connection
    return not driver.is_closed()


async def _follow(driver: Any, steps: Steps[T]) -> T:
    try:
        step = next(steps)
        while True:
            answer: object
            if isinstance(step, Read):
                answer = await _fetch(driver, step.query, step.parameters)
            else:
                text, sources = apply_sql(
                    tuple((change.statement, not change.any_number) for change in step.changes)
                )
                values = [step.changes[index].parameters[name] for index, name in sources]
                answer = bool(await driver.fetchval(text, *values))
            step = steps.send(answer)
    except StopIteration as end:
        result: T = end.value
        return result


async def _fetch(driver: Any, query: sa.Executable, parameters: Parameters) -> Sequence[Row]:
    text, names = read_sql(query)
    rows: Sequence[Row] = await driver.fetch(text, *[parameters[name] for name in names])
    return rows


def _translated(error: Exception, *, lost: bool) -> Exception:
    """The driver's errors as SQLAlchemy's, as everywhere else; without statement or values."""
    state: str | None = getattr(error, "sqlstate", None)
    if state == DIVISION_BY_ZERO:
        return Conflict()
    if isinstance(error, sa.exc.DBAPIError | OSError):
        return meaning(error)
    if not type(error).__module__.startswith(_DRIVER):
        return error
    kind: type[sa.exc.DBAPIError] = sa.exc.DBAPIError
    if lost or state is None:
        kind = sa.exc.OperationalError
    elif state.startswith("23"):
        kind = sa.exc.IntegrityError
    elif state.startswith("42"):
        kind = sa.exc.ProgrammingError
    wrapped = kind(None, None, error, hide_parameters=True, connection_invalidated=lost)
    return meaning(wrapped, lost=lost)
