"""A process that appends events as fast as it can."""

import asyncio
import time
from collections.abc import Callable
from typing import NamedTuple

import sqlalchemy as sa

from tests.benchmarks.databases import OURS, opened
from tests.benchmarks.plan import SCALING_TASKS
from tests.benchmarks.workload import APP, event

SECONDS = 2.0


class Appended(NamedTuple):
    """What one process has done: events, the seconds that took, and its CPU seconds."""

    events: int
    seconds: float
    cpu: float


def append_for(say: Callable[[object], None], url: sa.URL, number: int) -> None:
    """Append events with `SCALING_TASKS` tasks, each to a session of its own, for `SECONDS`."""
    asyncio.run(_append(say, url, number))


async def _append(say: Callable[[object], None], url: sa.URL, number: int) -> None:
    async with opened(OURS, url) as service:
        sessions = [
            await service.create_session(app_name=APP, user_id=f"process-{number}-{task}")
            for task in range(SCALING_TASKS)
        ]
        ready = [event(one) for one in range(50_000 // SCALING_TASKS)]

        async def work(task: int) -> int:
            count = 0
            while time.perf_counter() < end:
                await service.append_event(sessions[task], ready[count].model_copy())
                count += 1
            return count

        start, cpu = time.perf_counter(), time.process_time()
        end = start + SECONDS
        counts = await asyncio.gather(*map(work, range(SCALING_TASKS)))
        used = time.process_time() - cpu
        say(Appended(sum(counts), time.perf_counter() - start, used))
