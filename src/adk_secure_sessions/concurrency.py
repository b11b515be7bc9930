"""Locks for event loops and threads, waiting for work to end, and context variables for a block."""

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Hashable, Iterable
from contextlib import suppress
from contextvars import Context, ContextVar
from threading import Lock
from typing import Any, Generic, Self, TypeVar, cast
from weakref import WeakMethod, WeakSet, WeakValueDictionary

S = TypeVar("S")
T = TypeVar("T")


class ClosedByWith(ABC):
    """Base class of objects for `async with`, which closes the object at the end of the block."""

    @abstractmethod
    async def close(self) -> None:
        """Close the object."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()


class LoopLocks:
    """Asyncio locks, one for each event loop and key, created on first use.

    A lock that no task holds or waits for is garbage-collected, so unused locks take no memory.
    """

    def __init__(self) -> None:
        self._locks = WeakValueDictionary[tuple[object, Hashable], asyncio.Lock]()

    def lock(self, key: Hashable) -> asyncio.Lock:
        """Return the lock of *key*, for `async with`.

        Only tasks of the same event loop wait for this lock.
        """
        loop_key = (asyncio.get_running_loop(), key)
        if (lock := self._locks.get(loop_key)) is None:
            lock = self._locks[loop_key] = asyncio.Lock()
        return lock


class ThreadLock:
    """A lock of threads, which is replaced in a forked process.

    The thread that held the lock in the parent does not exist in the child: it would stay locked.
    """

    def __init__(self) -> None:
        self.lock: Lock = Lock()
        _thread_locks.add(self)


_thread_locks: "WeakSet[ThreadLock]" = WeakSet()


def _replace_locks() -> None:
    for one in _thread_locks:
        one.lock = Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_replace_locks)


async def await_to_end(
    task: "asyncio.Future[T]", on_cancel: Callable[[], None] = lambda: None
) -> T:
    """Await *task*, and return its result.

    If the caller is cancelled, call *on_cancel*, which may make *task* end sooner, wait until
    *task* has ended, and raise CancelledError.
    """
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if not task.done():
            on_cancel()
        await wait_ignoring_cancel(task)
        if not task.cancelled():
            task.exception()  # of an exception that nobody asked for, asyncio logs an error
        raise


async def wait_ignoring_cancel(task: "asyncio.Future[Any]") -> None:
    """Wait until *task* has ended; ignore cancellations of the caller."""
    while not task.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait([task])


def call_later(seconds: float, method: Callable[..., object], *args: object) -> asyncio.TimerHandle:
    """Call a *method* of an object after some *seconds*, if the object exists until then.

    The call is not in the context of the caller, whose variables may refer to plaintext.
    """
    reference = WeakMethod(method)

    def call() -> None:
        if (alive := reference()) is not None:
            alive(*args)

    return asyncio.get_running_loop().call_later(seconds, call, context=Context())


async def to_thread(call: Callable[..., T], *args: object) -> T:
    """Do the same as `asyncio.to_thread`, with which the debug log of asyncio quotes the result."""
    results: list[T] = []
    await asyncio.to_thread(lambda: results.append(call(*args)))
    return results[0]


async def gather_all(*awaitables: Awaitable[T]) -> list[T]:
    """Await all *awaitables* at the same time, and return their results in the same order.

    The first error is raised after all have ended; `asyncio.gather` would raise at once.
    """
    answers = await asyncio.gather(*awaitables, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return cast("list[T]", answers)


async def in_groups(size: int, work: Callable[[S], Awaitable[T]], items: Iterable[S]) -> list[T]:
    """Return `await work(item)` for each of *items*, of which *size* run at the same time."""
    remaining, results = list(items), list[T]()
    for start in range(0, len(remaining), size):
        results += await gather_all(*map(work, remaining[start : start + size]))
    return results


class context_value(Generic[T]):  # noqa: N801 - used like a function: `with context_value(...)`
    """A context manager that gives a context variable a value for its block.

    `ContextVar.reset` raises ValueError if the block ends in another context than it began in.
    This happens if the garbage collector closes a coroutine.
    """

    __slots__ = ("_before", "_value", "_variable")

    def __init__(self, variable: ContextVar[T], value: T) -> None:
        self._variable = variable
        self._value = value

    def __enter__(self) -> None:
        self._before = self._variable.get()
        self._variable.set(self._value)

    def __exit__(self, *error: object) -> None:
        self._variable.set(self._before)
