"""How long a read of 5000 events blocks the event loop, and its peak memory."""

import asyncio
import gc
import time

import pytest

from tests.benchmarks.budgets import EVENT_LOOP_STALL, LARGE_READ_MEMORY
from tests.benchmarks.databases import ADK, ADK_SQLITE, OURS
from tests.benchmarks.deployments import LOCAL, Deployment
from tests.benchmarks.harness import Operation, gc_paused
from tests.benchmarks.memory import peak_memory
from tests.benchmarks.plan import LARGE_READ
from tests.benchmarks.results import Figure, Results
from tests.benchmarks.workload import APP

pytestmark = [
    pytest.mark.bench,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.parametrize("deployment", LOCAL, indirect=True),
]

READS = 9


async def reading(deployment: Deployment, side: str) -> Operation:
    name = await deployment.seeded.session_with_events(side, LARGE_READ)
    service = deployment.sides[side]
    return lambda: service.get_session(app_name=APP, user_id="reader", session_id=name)


async def longest_stall(operation: Operation) -> float:
    """Return the longest time, in seconds, that *operation* kept another task from running."""
    longest = 0.0

    async def tick() -> None:
        nonlocal longest
        last = time.perf_counter()
        while True:
            await asyncio.sleep(0)
            now = time.perf_counter()
            longest, last = max(longest, now - last), now

    ticker = asyncio.ensure_future(tick())
    await asyncio.sleep(0)
    result = await operation()
    await asyncio.sleep(0)  # counts the last part of the read, too
    ticker.cancel()
    del result
    return longest


async def test_stall(deployment: Deployment, results: Results) -> None:
    for side in deployment.sides:
        if side == ADK_SQLITE:
            continue
        read = await reading(deployment, side)
        await longest_stall(read)  # warm-up
        with gc_paused():
            stalls = []
            for _ in range(READS):
                stalls.append(await longest_stall(read))
                gc.collect(1)
        gc.unfreeze()  # an application has not exempted what it has imported
        stalls_with_gc = [await longest_stall(read) for _ in range(READS)]
        gc.freeze()
        name = f"{deployment.name}/event loop stall, {LARGE_READ} events"
        goal = EVENT_LOOP_STALL if side == OURS else None
        results.add(f"{name}/{side}", Figure.of(stalls, "s", goal=goal))
        results.add(f"{name}/{side} with garbage collection", Figure.of(stalls_with_gc, "s"))


async def test_memory(deployment: Deployment, results: Results) -> None:
    name = f"{deployment.name}/memory, {LARGE_READ} events"
    peaks = {}
    for side in deployment.sides:
        if side != ADK_SQLITE:
            read = await reading(deployment, side)
            await read()
            peaks[side] = await peak_memory(read)
            results.count(f"{name}/{side}", peaks[side], "B")
    results.count(f"{name}/relative to {ADK}", peaks[OURS] / peaks[ADK], "x", LARGE_READ_MEMORY)
