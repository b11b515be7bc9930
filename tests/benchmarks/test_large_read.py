"""What reading a session of 5000 events does to the event loop, and takes of memory."""

import asyncio
import gc
import statistics
import time
import tracemalloc

import pytest

from tests.benchmarks.budgets import MEMORY, STALL
from tests.benchmarks.comparing import line, verdict
from tests.benchmarks.databases import ADK, ADK_SQLITE, OURS
from tests.benchmarks.harness import Operation, collector_off
from tests.benchmarks.places import NEAR, Place
from tests.benchmarks.samples import APP

pytestmark = [
    pytest.mark.benchmark,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.parametrize("place", NEAR, indirect=True),
]

EVENTS, READS = 5000, 5


async def reading(place: Place, side: str) -> Operation:
    name = await place.stock.history(side, EVENTS)
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


async def test_stall(place: Place) -> None:
    sides = [side for side in place.sides if side != ADK_SQLITE]
    for side in sides:
        read = await reading(place, side)
        await longest_stall(read)  # warms up
        with collector_off():
            without = []
            for _ in range(READS):
                without.append(await longest_stall(read))
                gc.collect(1)
        with_collector = [await longest_stall(read) for _ in range(READS)]
        quiet = statistics.median(without)
        text = f"{side:<13} {quiet * 1e3:7.1f} ms without garbage collection"
        text += f", {statistics.median(with_collector) * 1e3:7.1f} ms with it"
        text += f" (longest {max(without) * 1e3:.1f}, {max(with_collector) * 1e3:.1f})"
        limit = verdict(quiet * 1e3, STALL * 1e3, " ms") if side == OURS else ""
        line(place.name, f"stall, {EVENTS} events", f"{text}  {limit}")


async def peak(operation: Operation) -> int:
    """Bytes of Python's that were in use at once, at most, and were not before."""
    gc.collect()
    tracemalloc.start()
    try:
        result = await operation()
        most = tracemalloc.get_traced_memory()[1]
        del result
        return most
    finally:
        tracemalloc.stop()


async def test_memory(place: Place) -> None:
    peaks = {}
    for side in place.sides:
        if side != ADK_SQLITE:
            read = await reading(place, side)
            await read()
            peaks[side] = await peak(read)
    for side, bytes_used in peaks.items():
        text = f"{side:<13} {bytes_used / 1e6:7.1f} MB at most"
        if side == OURS:
            ratio = bytes_used / peaks[ADK]
            text += f", {ratio:.2f} of {ADK}  {verdict(ratio, MEMORY)}"
        line(place.name, f"memory, {EVENTS} events", text)
