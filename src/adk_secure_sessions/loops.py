"""Locks that serve several event loops, and cancellation that leaves nothing half done."""

import asyncio
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import asynccontextmanager
from typing import TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")


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


async def settled(future: "asyncio.Future[T]", revoke: Callable[[], bool]) -> T:
    """Await work that a cancelled caller cannot take back once it has begun.

    A cancellation that comes while it runs is put off until it has ended, so that the caller
    knows what became of it; *revoke* says whether it was stopped from beginning.
    """
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        if future.cancelled() or revoke():
            raise
        await asyncio.wait([future])
        if future.cancelled() or future.exception() is not None:
            raise
        task = asyncio.current_task()
        if task is not None:
            task.uncancel()
            task.cancel()  # again: it is raised where the caller next waits
        return future.result()
