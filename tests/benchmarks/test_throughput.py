"""Many concurrent tasks append, each to its own session: rate and latency."""

import asyncio
import gc
import time
from typing import NamedTuple

import pytest
from google.adk.sessions import BaseSessionService, Session

from tests.benchmarks.comparison import add_with_budget
from tests.benchmarks.databases import ADK_SQLITE, OURS
from tests.benchmarks.deployments import Deployment
from tests.benchmarks.harness import Timings, gc_paused, side_order
from tests.benchmarks.plan import APPENDS, TASKS
from tests.benchmarks.results import Figure, Results
from tests.benchmarks.workload import APP, event

pytestmark = [pytest.mark.bench, pytest.mark.asyncio(loop_scope="session")]

ROUNDS = 4


async def create_sessions(service: BaseSessionService) -> list[Session]:
    return [
        await service.create_session(app_name=APP, user_id=f"user-{number}")
        for number in range(TASKS)
    ]


class Burst(NamedTuple):
    """Seconds of the whole burst and of each successful append, and the number of errors."""

    whole: float
    appends: list[float]
    errors: int


async def run_burst(side: str, service: BaseSessionService, sessions: list[Session]) -> Burst:
    """Run the tasks.

    An error of ours is raised.  ADK's service sometimes fails on SQLite, with "database is
    locked"; its errors are counted.
    """
    ready = [event(number) for number in range(TASKS * APPENDS)]
    appends: list[float] = []
    errors: list[Exception] = []

    async def append(session: Session) -> None:
        for _ in range(APPENDS):
            one = ready.pop()
            start = time.perf_counter()
            try:
                await service.append_event(session, one)
            except Exception as error:
                if side == OURS:
                    raise
                errors.append(error)
            else:
                appends.append(time.perf_counter() - start)

    start = time.perf_counter()
    await asyncio.gather(*map(append, sessions))
    return Burst(time.perf_counter() - start, appends, len(errors))


async def test_concurrent_tasks(deployment: Deployment, results: Results) -> None:
    # ADK's SqliteSessionService fails under this load most of the time.
    sides = {side: service for side, service in deployment.sides.items() if side != ADK_SQLITE}
    sessions = {side: await create_sessions(service) for side, service in sides.items()}
    for side, service in sides.items():
        await run_burst(side, service, sessions[side])
    timings: Timings = {side: [] for side in sides}
    latencies: Timings = {side: [] for side in sides}
    errors = dict.fromkeys(sides, 0)
    with gc_paused():
        for round_number in range(ROUNDS):
            for side in side_order(list(sides), round_number):
                one = await run_burst(side, sides[side], sessions[side])
                timings[side].append(one.whole / len(one.appends))
                latencies[side] += one.appends
                errors[side] += one.errors
                gc.collect(1)
    operation = f"{TASKS} tasks appending"
    add_with_budget(results, deployment, operation, timings)
    for side in sides:
        name = f"{deployment.name}/{operation}/{side}"
        results.add(f"{name} rate", Figure.of([1 / each for each in timings[side]], "/s"))
        for percent in (50, 99):
            results.add(f"{name} p{percent}", Figure.of(latencies[side], "s", percent))
        results.count(f"{name} errors", errors[side])
