"""Which event loop, in which process, an async engine serves."""

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from weakref import WeakMethod

from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.pool import NullPool

from adk_secure_sessions.errors import ConfigurationError


class LoopBinding:
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
        self._watch: AsyncGenerator[None] | None = None

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
        # Weakly: in a loop that goes on, a service that was forgotten must not live on.
        self._watch = watch = _until_end_of_loop(WeakMethod(close))
        try:
            watch.__anext__().send(None)
        except StopIteration:
            pass  # it waits at its yield now

    def _move(self, pid: int) -> None:
        keeps = self._bound and not isinstance(self._engine.pool, NullPool)
        alive = self._loop is not None and pid == self._pid and not self._loop.is_closed()
        if alive and (self._inside or (keeps and self._owned)):
            raise ConfigurationError(
                "the database connections belong to another event loop: make a service for "
                "each loop that runs at the same time, or on SQLite pass db_url"
            )
        self._inside = 0
        if self._loop is None or not keeps:
            return
        if not self._owned:
            raise ConfigurationError(
                "db_engine still holds connections of another event loop or of a parent "
                "process: make the engine where it is used, give it poolclass=NullPool, or "
                "pass db_url"
            )
        # What is left can be closed neither in a loop that has ended nor for a parent.
        self._engine.sync_engine.dispose(close=False)


async def _until_end_of_loop(
    closing: "WeakMethod[Callable[[], Awaitable[None]]]",
) -> AsyncGenerator[None]:
    # A loop that ends closes the asynchronous generators that were begun in it.
    try:
        yield
    finally:
        if close := closing():
            await close()
