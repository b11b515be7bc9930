"""Locks that serve several event loops, and waiting that leaves nothing half done."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
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


async def settled(
    task: "asyncio.Future[T]",
    late: Callable[[T], None] | None,
    has_begun: Callable[[], bool] = lambda: True,
) -> T:
    """Await *task*; a caller that is cancelled meanwhile leaves only when it has ended.

    *late* then gets its result, before the cancellation goes on.  A task that has not *begun*
    what must not be cut short is cancelled, too.
    """
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if not has_begun():
            task.cancel()
        await ended(lambda: asyncio.wait([task]), task.done)
        if late is not None and not task.cancelled() and task.exception() is None:
            late(task.result())
        raise


async def ended(wait: Callable[[], Awaitable[object]], done: Callable[[], bool]) -> None:
    """Wait until *done*, whoever cancels."""
    while not done():
        try:
            await wait()
        except asyncio.CancelledError:
            continue


async def at_once(*asking: Awaitable[T]) -> list[T]:
    """All results, once all are there.  Raises the first error."""
    answers = await asyncio.gather(*asking, return_exceptions=True)
    results = []
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
        results.append(answer)
    return results
