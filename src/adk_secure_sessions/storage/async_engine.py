"""Any async SQLAlchemy engine: the caller's own, or one for a server database."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.pool import StaticPool

from adk_secure_sessions.errors import ConfigurationError
from adk_secure_sessions.loops import LoopLocks, settled
from adk_secure_sessions.storage.connection import Change, Row, T, Transaction, apply_in_turn
from adk_secure_sessions.storage.dialect import any_text, meaning, sqlite_sql


class _EngineConnection:
    """A `Connection` on SQLAlchemy's synchronous facade."""

    __slots__ = ("_connection",)

    def __init__(self, connection: sa.Connection) -> None:
        self._connection = connection

    def all(self, statement: sa.Executable, parameters: Mapping[str, object]) -> Sequence[Row]:
        if self._connection.dialect.name != "sqlite":
            return self._connection.execute(statement, parameters).all()
        driver: Any = self._connection.connection.driver_connection
        text_factory = driver.text_factory
        driver.text_factory = any_text
        try:
            return self._connection.exec_driver_sql(sqlite_sql(statement), parameters).all()
        finally:
            driver.text_factory = text_factory  # the connection is the caller's

    def apply(self, changes: Sequence[Change]) -> bool:
        return apply_in_turn(self._run, changes)

    def _run(self, statement: sa.Executable, parameters: Mapping[str, object]) -> int:
        result = self._connection.execute(statement, parameters)
        return 1 if isinstance(statement, sa.Insert) else result.rowcount  # not all count inserts


class AsyncEngineExecutor:
    """Runs each transaction in a task of its own, which a cancelled caller waits for."""

    def __init__(self, engine: AsyncEngine, *, owned: bool) -> None:
        self._engine = engine
        self._owned = owned
        self._sqlite = engine.dialect.name == "sqlite"
        # One connection under all tasks: their transactions must not run into one another.
        self._single = isinstance(engine.pool, StaticPool)
        self._locks = LoopLocks()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._guard = threading.Lock()

    async def read(self, transaction: Transaction[T]) -> T:
        return await self._shielded(self._transact(transaction, writes=False))

    async def write(
        self, transaction: Transaction[T], late: Callable[[T], None] | None = None
    ) -> T:
        return await self._shielded(self._transact(transaction, writes=True), late)

    async def define(self, work: Callable[[sa.Connection], T], *, commit: bool) -> T:
        return await self._shielded(self._run(work, commit=commit, alone=self._sqlite))

    async def close(self) -> None:
        if tasks := list(self._tasks):
            await asyncio.wait(tasks)
        if self._owned:
            await self._engine.dispose()

    async def _transact(self, transaction: Transaction[T], *, writes: bool) -> T:
        try:
            return await self._run(
                lambda inner: transaction(_EngineConnection(inner)),
                commit=writes,
                alone=writes and self._sqlite,
            )
        except sa.exc.DBAPIError as error:
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
        loop = asyncio.get_running_loop()
        with self._guard:
            if any(task.get_loop() is not loop for task in self._tasks):
                work.close()
                raise ConfigurationError(
                    "this engine is in use by another event loop: SQLAlchemy's async engines "
                    "serve one at a time; make a service for each, or on SQLite pass db_url"
                )
            task = asyncio.ensure_future(work)
            self._tasks.add(task)
        task.add_done_callback(self._done)
        return await settled(task, late)

    def _done(self, task: asyncio.Task[Any]) -> None:
        with self._guard:
            self._tasks.discard(task)


def _begin_immediate(connection: sa.Connection) -> None:
    # A deferred BEGIN that reads, then writes, is refused at once when another writes.
    driver = connection.connection.driver_connection
    if not getattr(driver, "in_transaction", False):
        connection.exec_driver_sql("BEGIN IMMEDIATE")
