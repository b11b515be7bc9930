"""Any async SQLAlchemy engine: the caller's own, or one for a server database."""

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.pool import NullPool, StaticPool

from adk_secure_sessions.errors import ConfigurationError
from adk_secure_sessions.loops import LoopLocks, settled
from adk_secure_sessions.storage.connection import (
    Parameters,
    Row,
    T,
    Transaction,
    run_in_turn,
)
from adk_secure_sessions.storage.dialect import any_text, meaning, sqlite_sql

_COUNTED = {"preserve_rowcount": True}  # of inserts too


class AsyncEngineExecutor:
    """Runs each transaction in a task of its own, which a cancelled caller waits for."""

    def __init__(self, engine: AsyncEngine, *, owned: bool) -> None:
        self._engine = engine
        self._owned = owned
        self._sqlite = engine.dialect.name == "sqlite"
        # One connection under all tasks: their transactions must not run into one another.
        self._single = isinstance(engine.pool, StaticPool)
        self._locks = LoopLocks()
        self._home = _Home(engine, owned=owned, bound=not self._sqlite)
        self._tasks: set[asyncio.Task[Any]] = set()

    async def read(self, query: sa.Executable, parameters: Parameters) -> Sequence[Row]:
        return await self._shielded(
            self._translating(lambda inner: _fetch(inner, query, parameters))
        )

    async def write(
        self, transaction: Transaction[T], late: Callable[[T], None] | None = None
    ) -> T:
        return await self._shielded(self._transact(transaction), late)

    async def define(self, work: Callable[[sa.Connection], T], *, commit: bool) -> T:
        return await self._shielded(self._translating(work, commit=commit, alone=self._sqlite))

    async def close(self) -> None:
        if tasks := list(self._tasks):
            await asyncio.wait(tasks)
        if self._owned:
            await self._release_all()

    async def _transact(self, transaction: Transaction[T]) -> T:
        def work(inner: sa.Connection) -> T:
            return run_in_turn(
                transaction(),
                lambda query, parameters: _fetch(inner, query, parameters),
                lambda statement, parameters: _write(inner, statement, parameters),
            )

        return await self._translating(work, commit=True, alone=self._sqlite)

    async def _translating(
        self, work: Callable[[sa.Connection], T], *, commit: bool = False, alone: bool = False
    ) -> T:
        try:
            return await self._run(work, commit=commit, alone=alone)
        except sa.exc.DBAPIError as error:
            error.hide_parameters = True  # which a caller's engine need not
            meant = meaning(error, lost=error.connection_invalidated)
        except OSError as error:  # could not connect
            meant = meaning(error)
        raise meant

    async def _run(self, work: Callable[[sa.Connection], T], *, commit: bool, alone: bool) -> T:
        async with self._alone(alone), self._engine.connect() as connection:
            if commit and self._sqlite:
                await connection.run_sync(_begin_immediate)
            result = await connection.run_sync(work)
            if commit:
                await connection.commit()
            return result

    def _alone(self, needed: bool) -> AbstractAsyncContextManager[None]:
        return self._locks.hold("connection") if needed or self._single else nullcontext()

    async def _shielded(
        self, work: Coroutine[Any, Any, T], late: Callable[[T], None] | None = None
    ) -> T:
        # Cancelled between two statements, a transaction would stay open.
        try:
            self._enter()
        except ConfigurationError:
            work.close()
            raise
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return await settled(task, late)

    def _enter(self) -> bool:
        moved = self._home.enter()
        if moved and self._owned:
            self._home.close_at_end(self._release_all)
        return moved

    async def _release_all(self) -> None:
        await self._engine.dispose()

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._home.leave()
        self._tasks.discard(task)


class _Home:
    """Sees to it that one event loop, in one process, uses the engine at a time.

    Connections of a server's driver are *bound* to the loop they were made in.
    """

    def __init__(self, engine: AsyncEngine, *, owned: bool, bound: bool) -> None:
        self._engine = engine
        self._owned = owned
        self._bound = bound
        self._guard = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = 0
        self._inside = 0

    def enter(self) -> bool:
        """Begin an operation; True if it is the first of a new loop.

        Raises:
            ConfigurationError: another loop is at it, or left connections behind.
        """
        loop, pid = asyncio.get_running_loop(), os.getpid()
        with self._guard:
            moved = loop is not self._loop or pid != self._pid
            if moved:
                self._move(pid)
                self._loop, self._pid = loop, pid
            self._inside += 1
        return moved

    def leave(self) -> None:
        with self._guard:
            self._inside -= 1

    def close_at_end(self, close: Callable[[], Awaitable[None]]) -> None:
        """Have the loop run *close* before it ends: ADK's `Runner.run` starts one for each call."""
        self._watch = _until_end_of_loop(close)
        try:
            self._watch.__anext__().send(None)
        except StopIteration:
            pass  # it waits at its yield now

    def _move(self, pid: int) -> None:
        forked = self._loop is not None and pid != self._pid
        if self._inside and not forked:
            raise ConfigurationError(
                "this engine is in use by another event loop: SQLAlchemy's async engines "
                "serve one at a time; make a service for each, or on SQLite pass db_url"
            )
        self._inside = 0
        if self._loop is None or not self._bound or isinstance(self._engine.pool, NullPool):
            return
        if not self._owned:
            raise ConfigurationError(
                "db_engine still holds connections of another event loop or of a parent "
                "process: make the engine where it is used, give it poolclass=NullPool, or "
                "pass db_url"
            )
        # What is left can be closed neither in a loop that has ended nor for a parent.
        self._engine.sync_engine.dispose(close=False)


async def _until_end_of_loop(close: Callable[[], Awaitable[None]]) -> AsyncGenerator[None]:
    # A loop that ends closes the asynchronous generators that were begun in it.
    try:
        yield
    finally:
        await close()


def _fetch(
    connection: sa.Connection, query: sa.Executable, parameters: Parameters
) -> Sequence[Row]:
    if connection.dialect.name != "sqlite":
        return connection.execute(query, parameters).all()
    driver: Any = connection.connection.driver_connection
    text_factory = driver.text_factory
    driver.text_factory = any_text
    try:
        return connection.exec_driver_sql(sqlite_sql(query), parameters).all()
    finally:
        driver.text_factory = text_factory  # the connection is the caller's


def _write(connection: sa.Connection, statement: sa.Executable, parameters: Parameters) -> int:
    return connection.execute(statement, parameters, execution_options=_COUNTED).rowcount


def _begin_immediate(connection: sa.Connection) -> None:
    # A deferred BEGIN that reads, then writes, is refused at once when another writes.
    driver = connection.connection.driver_connection
    if not getattr(driver, "in_transaction", False):
        connection.exec_driver_sql("BEGIN IMMEDIATE")
