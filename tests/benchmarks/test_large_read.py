"""What reading a session of 5000 events does to the event loop, and takes of memory."""

import asyncio
import gc
import time

import pytest

from tests.benchmarks.budgets import MEMORY, STALL
from tests.benchmarks.databases import ADK, ADK_SQLITE, OURS
from tests.benchmarks.harness import Operation, collector_off
from tests.benchmarks.memory import peak
from tests.benchmarks.places import NEAR, Place
from tests.benchmarks.plan import LARGE
from tests.benchmarks.results import Figure, Results
from tests.benchmarks.samples import APP

pytestmark = [
    pytest.mark.benchmark,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.parametrize("place", NEAR, indirect=True),
]

READS = 9


async def reading(place: Place, side: str) -> Operation:
    name = await place.stock.history(side, LARGE)
    service = place.sides[side]
    return lambda: service.get_session(app_name=APP, user_id="reader", session_id=name)


async def longest_stall(operation: Operation) -> float:
    """The longest time, in seconds, that another task waited for its turn meanwhile."""
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
    await asyncio.sleep(0)  # so that the last part of the read counts, too
    ticker.cancel()
    del result
    return longest


async def test_stall(place: Place, results: Results) -> None:
    for side in place.sides:
        if side == ADK_SQLITE:
            continue
        read = await reading(place, side)
        await longest_stall(read)  # warms up
        with collector_off():
            without = []
            for _ in range(READS):
                without.append(await longest_stall(read))
                gc.collect(1)
        with_collector = [await longest_stall(read) for _ in range(READS)]
        name = f"{place.name}/stall, {LARGE} events"
        goal = STALL if side == OURS else None
        results.add(f"{name}/{side}", Figure.of(without, "s", goal=goal))
        results.add(f"{name}/{side} with garbage collection", Figure.of(with_collector, "s"))


async def test_memory(place: Place, results: Results) -> None:
    name = f"{place.name}/memory, {LARGE} events"
    peaks = {}
    for side in place.sides:
        if side != ADK_SQLITE:
            read = await reading(place, side)
            await read()
            peaks[side] = await peak(read)
            results.count(f"{name}/{side}", peaks[side], "B")
    results.count(f"{name}/of {ADK}", peaks[OURS] / peaks[ADK], "x", MEMORY)
