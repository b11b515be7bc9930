"""Reads of a session without and with the cache of events."""

from contextlib import AsyncExitStack

import pytest
from google.adk.sessions import BaseSessionService, Session

from tests.benchmarks.budgets import HISTORY_CACHE
from tests.benchmarks.comparison import SECONDS
from tests.benchmarks.databases import ADK, CACHED_EVENTS, OURS, opened
from tests.benchmarks.deployments import LOCAL, Deployment
from tests.benchmarks.harness import Operation, interleave
from tests.benchmarks.plan import HISTORY_EVENTS, HISTORY_GOAL_EVENTS
from tests.benchmarks.results import Figure, Results
from tests.benchmarks.workload import APP

pytestmark = [
    pytest.mark.bench,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.parametrize("deployment", LOCAL, indirect=True),
]


def pass_over(session: Session) -> int:
    """Touch the text of every part, so that a read that only promises events gains nothing."""
    length = 0
    for event in session.events:
        content = event.content
        if content is not None:
            for part in content.parts or ():
                length += len(part.text or "")
    return length


def reading(service: BaseSessionService, session_id: str) -> Operation:
    async def read() -> Session:
        session = await service.get_session(app_name=APP, user_id="reader", session_id=session_id)
        assert session is not None
        assert pass_over(session) > 0
        return session

    return read


@pytest.mark.parametrize("events", HISTORY_EVENTS)
async def test_history_cache(deployment: Deployment, results: Results, events: int) -> None:
    ours = await deployment.seeded.session_with_events(OURS, events)
    adks = await deployment.seeded.session_with_events(ADK, events)
    async with AsyncExitStack() as stack:
        url = deployment.urls[OURS]
        cached = await stack.enter_async_context(opened(CACHED_EVENTS, url))
        sides = {
            ADK: reading(deployment.sides[ADK], adks),
            OURS: reading(deployment.sides[OURS], ours),
            CACHED_EVENTS: reading(cached, ours),
        }
        timings = await interleave(sides, SECONDS, max_rounds=60)
    name = f"{deployment.name}/history, {events} events"
    for side, values in timings.items():
        results.add(f"{name}/{side}", Figure.of(values, "s"))
        if side != ADK:
            has_goal = side != OURS and events == HISTORY_GOAL_EVENTS
            goal = HISTORY_CACHE if has_goal else None
            ratio = Figure.ratio(values, timings[ADK], goal)
            results.add(f"{name}/{side} relative to {ADK}", ratio)
