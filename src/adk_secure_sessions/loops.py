"""Locks that serve several event loops, and waiting that leaves no work half done."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from contextlib import asynccontextmanager
from typing import TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")


class LoopLocks:
    """A lock for each event loop and key, made when a task first wants it.

    A lock that no task holds or waits for is removed, so any number of keys can be used over time.
    """

    def __init__(self) -> None:
        # A lock, and how many tasks hold it or wait for it.
        self._loops: WeakKeyDictionary[
            asyncio.AbstractEventLoop, dict[Hashable, tuple[asyncio.Lock, list[int]]]
        ] = WeakKeyDictionary()

    @asynccontextmanager
    async def hold(self, key: Hashable) -> AsyncIterator[None]:
        """Hold the lock of *key*; it excludes other tasks of the same event loop only."""
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


async def await_to_end(
    task: "asyncio.Future[T]",
    on_result_after_cancel: Callable[[T], None] | None,
    has_begun: Callable[[], bool] = lambda: True,
) -> T:
    """Await *task*; if the caller is cancelled, first wait until *task* has ended.

    Args:
        task: The work to wait for.
        on_result_after_cancel: Called with the result of *task* if the caller was cancelled,
            before the cancellation goes on.
        has_begun: Whether *task* has begun what must not be interrupted.  If not, *task* is
            cancelled, too.

    Raises:
        asyncio.CancelledError: The caller was cancelled; an error of *task* is dropped then.
        Exception: Whatever *task* raises.
    """
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if not has_begun():
            task.cancel()
        await wait_ignoring_cancel(lambda: asyncio.wait([task]), task.done)
        if on_result_after_cancel is not None and not task.cancelled() and task.exception() is None:
            on_result_after_cancel(task.result())
        raise


async def wait_ignoring_cancel(
    wait: Callable[[], Awaitable[object]], is_done: Callable[[], bool]
) -> None:
    """Await *wait*, again after each cancellation, until *is_done*."""
    while not is_done():
        try:
            await wait()
        except asyncio.CancelledError:
            continue


async def at_once(*awaitables: Awaitable[T]) -> list[T]:
    """Await all of *awaitables* at the same time and return their results, in order.

    Raises:
        BaseException: The first error among them, once all have ended; `asyncio.gather` would
            raise while the others still run.
    """
    answers = await asyncio.gather(*awaitables, return_exceptions=True)
    results = []
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
        results.append(answer)
    return results
