"""Finding sessions by a value of their state, among very many."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable

import pytest
from google.adk.sessions import Session

from adk_secure_sessions import AesGcmBackend, EncryptedSessionService
from adk_secure_sessions.maintenance import Database, fill_index
from tests.benchmarks import plan
from tests.benchmarks.databases import update_statistics
from tests.benchmarks.deployments import LOCAL, Deployment
from tests.benchmarks.harness import interleave
from tests.benchmarks.results import Figure, Results
from tests.benchmarks.workload import APP, event, state

pytestmark = [
    pytest.mark.bench,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.parametrize("deployment", LOCAL, indirect=True),
]

KEY = bytes(range(32))
KEYS = ["ticket", "batch"]
SECONDS = 10.0
_CONCURRENCY = 50


async def test_search(results: Results, deployment: Deployment) -> None:
    url = deployment.databases.create()
    async with EncryptedSessionService(url, AesGcmBackend(KEY), indexed_state_keys=KEYS) as service:
        await service.prepare_tables()
        async with Database(url, AesGcmBackend(KEY)) as db:
            await fill_index(db, APP, KEYS)
        await _seed(service)
        await update_statistics(url)
        # Each search is for another value, so that no session is cached.
        numbers = itertools.cycle(range(0, plan.SEARCHED_SESSIONS, 997))

        async def one() -> None:
            await _find(service, "ticket", next(numbers), 1)

        async def several() -> None:
            hits = plan.SEARCH_HITS
            await _find(service, "batch", next(numbers) // hits, hits)

        sides = {"one session": one, f"{plan.SEARCH_HITS} sessions": several}
        timings = await interleave(sides, SECONDS)
        for name, values in timings.items():
            figure = Figure.of(values, "s", goal=plan.SEARCH_GOAL)
            results.add(f"{deployment.name}/search/{name}", figure)
        await _append(results, deployment, service)


async def _append(
    results: Results, deployment: Deployment, service: EncryptedSessionService
) -> None:
    """Compare an event that changes an indexed key with one that changes another key."""
    sides = {
        "indexed key": await _appending(service, "ticket"),
        "other key": await _appending(service, "other"),
    }
    timings = await interleave(sides, SECONDS)
    ratio = Figure.ratio(timings["indexed key"], timings["other key"])
    results.add(f"{deployment.name}/search/append, indexed key relative to other key", ratio)


async def _appending(service: EncryptedSessionService, key: str) -> Callable[[], Awaitable[None]]:
    session: Session = await service.create_session(app_name=APP, user_id="appender")
    values = itertools.count()

    async def append() -> None:
        one = event(0)
        one.actions.state_delta = {key: next(values)}
        await service.append_event(session, one)

    return append


async def _find(service: EncryptedSessionService, key: str, value: int, hits: int) -> None:
    found = await service.find_sessions(app_name=APP, key=key, value=value)
    assert len(found.sessions) == hits


async def _seed(service: EncryptedSessionService) -> None:
    initial = state(100)
    numbers = iter(range(plan.SEARCHED_SESSIONS))

    async def create() -> None:
        for number in numbers:
            await service.create_session(
                app_name=APP,
                user_id=f"user-{number % 1000}",
                state=initial | {"ticket": number, "batch": number // plan.SEARCH_HITS},
            )

    await asyncio.gather(*(create() for _ in range(_CONCURRENCY)))
