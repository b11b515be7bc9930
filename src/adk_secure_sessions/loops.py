"""Locks that serve several event loops, each its own tasks."""

import asyncio
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from weakref import WeakKeyDictionary


class LoopLocks:
    """A lock for each key, made when first held and forgotten when nobody wants it."""

    def __init__(self) -> None:
        self._loops: WeakKeyDictionary[
            asyncio.AbstractEventLoop, dict[Hashable, tuple[asyncio.Lock, list[int]]]
        ] = WeakKeyDictionary()

    @asynccontextmanager
    async def hold(self, key: Hashable) -> AsyncIterator[None]:
        """Hold the lock of *key* against other tasks of this event loop."""
        locks = self._loops.setdefault(asyncio.get_running_loop(), {})
        lock, users = locks.setdefault(key, (asyncio.Lock(), [0]))
        users[0] += 1
        try:
            async with lock:
                yield
        finally:
            users[0] -= 1
            if not users[0]:
                del locks[key]
