"""Locks and cancellation, on one event loop and on several."""

import asyncio
import gc
import threading

import pytest

from adk_secure_sessions.concurrency import LoopLocks, await_to_end, gather_all


async def worker(locks: LoopLocks, key: str, log: list[str]) -> None:
    async with locks.lock(key):
        log.append("in")
        await asyncio.sleep(0)
        log.append("out")


def known(locks: LoopLocks) -> int:
    return len(locks._locks)


@pytest.mark.parametrize(
    ("keys", "logged"),
    [("aaaaa", ["in", "out"] * 5), ("abc", ["in"] * 3 + ["out"] * 3)],
    ids=["one key", "different keys"],
)
async def test_only_tasks_of_one_key_wait_for_each_other(keys: str, logged: list[str]) -> None:
    locks, log = LoopLocks(), list[str]()
    await asyncio.gather(*(worker(locks, key, log) for key in keys))
    assert log == logged


async def test_lock_that_no_task_wants_is_removed() -> None:
    locks = LoopLocks()
    await asyncio.gather(*(worker(locks, f"key {number % 2}", []) for number in range(6)))
    assert known(locks) == 0


async def test_cancelled_waiter_leaves_the_lock_to_the_next() -> None:
    locks, log = LoopLocks(), list[str]()
    async with locks.lock("key"):
        waiter = asyncio.create_task(worker(locks, "key", log))
        following = asyncio.create_task(worker(locks, "key", log))
        await asyncio.sleep(0)
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
    await asyncio.wait_for(following, 5)
    assert log == ["in", "out"]
    assert known(locks) == 0


def test_each_event_loop_has_locks_of_its_own() -> None:
    locks, log = LoopLocks(), list[str]()
    for _ in range(3):
        asyncio.run(worker(locks, "key", log))
    assert log == ["in", "out"] * 3
    assert known(locks) == 0


def test_loops_in_two_threads_do_not_wait_for_each_other() -> None:
    locks, together = LoopLocks(), threading.Barrier(2)

    async def hold() -> None:
        async with locks.lock("key"):
            together.wait(5)  # blocks: both threads must be inside at once

    threads = [threading.Thread(target=lambda: asyncio.run(hold())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert not together.broken


# --- await_to_end --------------------------------------------------------------------------------


def pending() -> "asyncio.Future[str]":
    return asyncio.get_running_loop().create_future()


async def cancelled_while_running(future: "asyncio.Future[str]") -> asyncio.Task[str]:
    task = asyncio.create_task(await_to_end(future))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    return task


async def test_cancelled_caller_waits_for_the_work_through_a_second_cancellation() -> None:
    future = pending()
    task = await cancelled_while_running(future)
    task.cancel()
    await asyncio.sleep(0.01)
    assert not task.done()
    future.set_result("done")
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 5)


async def test_error_of_the_work_of_a_cancelled_caller_is_not_logged_as_never_retrieved() -> None:
    reported: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    future = pending()
    task = await cancelled_while_running(future)
    future.set_exception(RuntimeError("inside"))
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 5)
    del future, task
    gc.collect()
    assert reported == []


async def test_timeout_that_had_to_wait_is_a_timeout_and_cancels_nothing_after_it() -> None:
    future = pending()
    asyncio.get_running_loop().call_later(0.05, future.set_result, "done")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await await_to_end(future)
    await asyncio.sleep(0)


async def test_work_that_has_not_begun_is_cancelled_with_its_caller() -> None:
    future = pending()

    def cancel_it() -> None:
        future.cancel()

    task = asyncio.create_task(await_to_end(future, cancel_it))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 5)
    assert future.cancelled()


# --- gather_all -----------------------------------------------------------------------------------


async def test_results_at_once_are_in_the_order_of_what_was_asked() -> None:
    async def answer(number: int) -> int:
        await asyncio.sleep(0.01 * (3 - number))
        return number

    assert await gather_all(*(answer(number) for number in range(3))) == [0, 1, 2]


async def test_first_error_at_once_is_raised_when_all_have_ended() -> None:
    ended: list[str] = []

    async def fail(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        ended.append(name)
        raise RuntimeError(name)

    with pytest.raises(RuntimeError, match="first"):
        await gather_all(fail("first", 0.02), fail("second", 0.01), fail("third", 0.03))
    assert ended == ["second", "first", "third"]
