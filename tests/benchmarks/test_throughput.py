"""Many tasks appending at once, to a session each: how many in a second, how long each takes."""

import asyncio
import gc
import time
from typing import NamedTuple

import pytest
from google.adk.sessions import BaseSessionService, Session

from tests.benchmarks.comparing import keep_timings
from tests.benchmarks.databases import ADK_SQLITE, OURS
from tests.benchmarks.harness import Timings, collector_off, order
from tests.benchmarks.places import Place
from tests.benchmarks.plan import APPENDS, TASKS
from tests.benchmarks.results import Figure, Results
from tests.benchmarks.samples import APP, event

pytestmark = [pytest.mark.benchmark, pytest.mark.asyncio(loop_scope="session")]

ROUNDS = 4


async def begun(service: BaseSessionService) -> list[Session]:
    return [
        await service.create_session(app_name=APP, user_id=f"user-{number}")
        for number in range(TASKS)
    ]


class Burst(NamedTuple):
    """In seconds, the whole of it and each append that succeeded."""

    whole: float
    appends: list[float]
    errors: int


async def burst(side: str, service: BaseSessionService, sessions: list[Session]) -> Burst:
    """Run the tasks.  Ours may not fail; ADK's do on SQLite now and then: database is locked."""
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


async def test_tasks_at_once(place: Place, results: Results) -> None:
    # ADK's SqliteSessionService gives up under this most of the time.
    sides = {side: service for side, service in place.sides.items() if side != ADK_SQLITE}
    sessions = {side: await begun(service) for side, service in sides.items()}
    for side, service in sides.items():
        await burst(side, service, sessions[side])
    timings: Timings = {side: [] for side in sides}
    latencies: Timings = {side: [] for side in sides}
    errors = dict.fromkeys(sides, 0)
    with collector_off():
        for turn in range(ROUNDS):
            for side in order(list(sides), turn):
                one = await burst(side, sides[side], sessions[side])
                timings[side].append(one.whole / len(one.appends))
                latencies[side] += one.appends
                errors[side] += one.errors
                gc.collect(1)
    operation = f"{TASKS} tasks appending"
    keep_timings(results, place, operation, timings)
    for side in sides:
        name = f"{place.name}/{operation}/{side}"
        results.add(f"{name} rate", Figure.of([1 / each for each in timings[side]], "/s"))
        for percent in (50, 99):
            results.add(f"{name} p{percent}", Figure.of(latencies[side], "s", percent))
        results.count(f"{name} errors", errors[side])
