"""Locks for services used by several event loops, and ways to wait until work has ended."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from contextlib import asynccontextmanager
from typing import TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")


class LoopLocks:
    """One lock for each pair of event loop and key, created on first use.

    A lock that no task holds or waits for is removed, so unused keys take no memory.
    """

    def __init__(self) -> None:
        # For each lock, a list of one number: how many tasks hold the lock or wait for it.
        self._loops: WeakKeyDictionary[
            asyncio.AbstractEventLoop, dict[Hashable, tuple[asyncio.Lock, list[int]]]
        ] = WeakKeyDictionary()

    @asynccontextmanager
    async def hold(self, key: Hashable) -> AsyncIterator[None]:
        """Hold the lock of *key*.  Tasks of other event loops are not excluded."""
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
        on_result_after_cancel: If the caller was cancelled, called with the result of *task*
            before CancelledError is raised.
        has_begun: Returns True once *task* has reached the part that must not be interrupted.
            Before that, cancelling the caller also cancels *task*.

    Raises:
        asyncio.CancelledError: The caller was cancelled; an error of *task* is then ignored.
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
    """Call and await *wait* until *is_done* returns True, and ignore cancellations."""
    while not is_done():
        try:
            await wait()
        except asyncio.CancelledError:
            continue


async def at_once(*awaitables: Awaitable[T]) -> list[T]:
    """Await all of *awaitables* at the same time and return their results, in order.

    Raises:
        BaseException: The first error among them, raised after all have ended.  `asyncio.gather`
            alone would raise while others still run.
    """
    answers = await asyncio.gather(*awaitables, return_exceptions=True)
    results = []
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
        results.append(answer)
    return results
