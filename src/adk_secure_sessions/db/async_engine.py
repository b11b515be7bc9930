"""Any async SQLAlchemy engine: the caller's own, or one for a server database."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.pool import StaticPool

from adk_secure_sessions.db.dialects import meaning, sqlite_sql, taking_any_text
from adk_secure_sessions.db.loop_binding import LoopBinding
from adk_secure_sessions.db.protocol import (
    Parameters,
    Row,
    T,
    Transaction,
    run_in_turn,
)
from adk_secure_sessions.errors import ConfigurationError
from adk_secure_sessions.loops import LoopLocks, settled

_LARGE = 900_000  # bytes; no server is set to take less
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
        self._binding = LoopBinding(engine, owned=owned, bound=not self._sqlite)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._begun: set[asyncio.Task[Any]] = set()  # those that have a connection

    async def read(self, query: sa.Executable, parameters: Parameters) -> Sequence[Row]:
        return await self._shielded(
            self._translating(lambda inner: _fetch(inner, query, parameters))
        )

    async def write(
        self, transaction: Transaction[T], late: Callable[[T], None] | None = None
    ) -> T:
        return await self._shielded(self._transact(transaction), late)

    async def define(self, work: Callable[[sa.Connection], T], *, commit: bool) -> T:
        def run(inner: sa.Connection) -> T:
            with taking_any_text(inner):
                return work(inner)

        return await self._shielded(self._translating(run, commit=commit, alone=self._sqlite))

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
            self._begin()
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
        return await settled(task, late, lambda: task in self._begun)

    def _begin(self) -> None:
        if (task := asyncio.current_task()) in self._tasks:
            self._begun.add(task)

    def _enter(self) -> bool:
        moved = self._binding.enter()
        if moved and self._owned:
            self._binding.close_at_end(self._release_all)
        return moved

    async def _release_all(self) -> None:
        await self._engine.dispose()

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._binding.leave()
        self._tasks.discard(task)
        self._begun.discard(task)


def _fetch(
    connection: sa.Connection, query: sa.Executable, parameters: Parameters
) -> Sequence[Row]:
    if connection.dialect.name != "sqlite":
        return connection.execute(query, parameters).all()
    with taking_any_text(connection):
        return connection.exec_driver_sql(sqlite_sql(query), parameters).all()


def _write(connection: sa.Connection, statement: sa.Executable, parameters: Parameters) -> int:
    largest = max(
        (len(value) for value in parameters.values() if isinstance(value, bytes)), default=0
    )
    if largest > _LARGE and connection.dialect.name in ("mysql", "mariadb"):
        _check_packet(connection, largest)
    return connection.execute(statement, parameters, execution_options=_COUNTED).rowcount


def _check_packet(connection: sa.Connection, size: int) -> None:
    """Refuse what the server would not take: it answers that by closing the connection."""
    limit = connection.scalar(sa.text("SELECT @@max_allowed_packet"))
    if limit is not None and size + size // 25 + _LARGE // 1000 > limit:  # escapes take room
        raise ConfigurationError(
            f"a value of {size} bytes does not fit into one packet of the database server: "
            f"raise its max_allowed_packet, which is {limit} bytes"
        )


def _begin_immediate(connection: sa.Connection) -> None:
    # A deferred BEGIN that reads, then writes, is refused at once when another writes.
    driver = connection.connection.driver_connection
    if not getattr(driver, "in_transaction", False):
        connection.exec_driver_sql("BEGIN IMMEDIATE")
