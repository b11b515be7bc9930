"""The time of operations as a session, and as the database, grows."""

import uuid
from contextlib import AsyncExitStack

import pytest
from google.adk.sessions import BaseSessionService
from google.adk.sessions.base_session_service import GetSessionConfig

from tests.benchmarks.budgets import GROWTH
from tests.benchmarks.databases import ADK, OURS, opened
from tests.benchmarks.deployments import LOCAL, Deployment
from tests.benchmarks.harness import Operation, Timings, interleave
from tests.benchmarks.many_users import DatabasesByUsers
from tests.benchmarks.plan import EVENTS, FEW_USERS, MANY_USERS
from tests.benchmarks.results import Figure, Results
from tests.benchmarks.workload import APP, event, state

pytestmark = [
    pytest.mark.bench,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.parametrize("deployment", LOCAL, indirect=True),
    pytest.mark.parametrize("side", [OURS, ADK]),
]

RECENT = GetSessionConfig(num_recent_events=20)
SECONDS = 3.0


def add_growth(results: Results, name: str, timings: Timings, goal: float | None) -> None:
    """Add the time at each size, and the time at the largest relative to the smallest."""
    for size, values in timings.items():
        results.add(f"{name}, {size}", Figure.of(values, "s"))
    smallest, *_, largest = timings.values()
    results.add(f"{name}, largest relative to smallest", Figure.ratio(largest, smallest, goal))


async def test_session_grows(deployment: Deployment, results: Results, side: str) -> None:
    service = deployment.sides[side]
    sizes = {count: await deployment.seeded.session_with_events(side, count) for count in EVENTS}
    goal = GROWTH if side == OURS else None

    def reading(session_id: str, config: GetSessionConfig | None) -> Operation:
        return lambda: service.get_session(
            app_name=APP, user_id="reader", session_id=session_id, config=config
        )

    whole = {f"{count:,} events": reading(sizes[count], None) for count in EVENTS}
    timings = await interleave(whole, SECONDS, max_rounds=30)
    add_growth(results, f"{deployment.name}/growth by events/{side}/get", timings, None)
    # Only sessions with more than 20 events.
    recent = {f"{count:,} events": reading(sizes[count], RECENT) for count in EVENTS[1:]}
    timings = await interleave(recent, SECONDS)
    add_growth(results, f"{deployment.name}/growth by events/{side}/get 20 recent", timings, goal)

    async def appending(count: int) -> Operation:
        # Separate sessions, so that those which are read keep their length.
        [name] = await deployment.seeded.add(side, "grower", 1, count)
        session = await service.get_session(app_name=APP, user_id="grower", session_id=name)
        assert session is not None
        return lambda: service.append_event(session, event(0))

    appends = {f"{count:,} events": await appending(count) for count in EVENTS}
    timings = await interleave(appends, SECONDS)
    add_growth(results, f"{deployment.name}/growth by events/{side}/append", timings, goal)


async def test_database_grows(
    deployment: Deployment, results: Results, side: str, databases_by_users: DatabasesByUsers
) -> None:
    goal = GROWTH if side == OURS else None
    initial = state(100)

    async def creating(service: BaseSessionService) -> Operation:
        return lambda: service.create_session(
            app_name=APP, user_id="user-1", session_id=str(uuid.uuid4()), state=initial
        )

    async def appending(service: BaseSessionService) -> Operation:
        session = await service.get_session(app_name=APP, user_id="user-2", session_id="only")
        assert session is not None
        return lambda: service.append_event(session, event(0))

    async def getting(service: BaseSessionService) -> Operation:
        return lambda: service.get_session(app_name=APP, user_id="user-3", session_id="only")

    async with AsyncExitStack() as stack:
        services = {
            f"{users:,} sessions": await stack.enter_async_context(
                opened(side, await databases_by_users.url(deployment, users, side))
            )
            for users in (FEW_USERS, MANY_USERS)
        }
        for name, prepare in (("create", creating), ("append", appending), ("get", getting)):
            sides = {size: await prepare(service) for size, service in services.items()}
            timings = await interleave(sides, SECONDS)
            add_growth(
                results, f"{deployment.name}/growth by sessions/{side}/{name}", timings, goal
            )
