"""Conversations as an agent has them, one and many at once, ours beside ADK's in clear."""

import asyncio
import time
import uuid
from dataclasses import dataclass, field

import pytest
from google.adk.sessions import BaseSessionService

from tests.benchmarks.databases import FLOOR, OURS
from tests.benchmarks.deployments import LOCAL, Deployment
from tests.benchmarks.harness import gc_paused, side_order
from tests.benchmarks.plan import CONVERSATION_OPERATIONS, CONVERSATION_ROUNDS, TURNS
from tests.benchmarks.results import Figure, Results
from tests.benchmarks.workload import APP, turn

pytestmark = [
    pytest.mark.benchmark,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.parametrize("deployment", LOCAL, indirect=True),
]


@dataclass
class Outcome:
    """Seconds, and how often an operation failed."""

    rates: list[float] = field(default_factory=list)
    latencies: dict[str, list[float]] = field(
        default_factory=lambda: {name: [] for name in CONVERSATION_OPERATIONS}
    )
    errors: int = 0


class Conversation:
    """One user's: create, then events and, after every turn, a read."""

    def __init__(self, service: BaseSessionService, outcome: Outcome) -> None:
        self._service = service
        self._taken = outcome
        self._turns = [turn(number) for number in range(TURNS)]

    async def run(self) -> int:
        """Return how many operations it took.  One that fails ends it."""
        user = f"patient-{uuid.uuid4()}"
        start = time.perf_counter()
        session = await self._service.create_session(app_name=APP, user_id=user, state={"step": ""})
        start = self._record("create", start)
        for events in self._turns:
            for event in events:
                await self._service.append_event(session, event)
                start = self._record("append", start)
            read = await self._service.get_session(
                app_name=APP, user_id=user, session_id=session.id
            )
            start = self._record("get", start)
            assert read is not None
            session = read
        assert len(session.events) == 4 * TURNS
        return 1 + 5 * TURNS

    def _record(self, operation: str, start: float) -> float:
        now = time.perf_counter()
        self._taken.latencies[operation].append(now - start)
        return now


async def run_conversations(
    side: str, service: BaseSessionService, count: int, outcome: Outcome
) -> None:
    """Ours may not fail; ADK's do on SQLite under load: the database is locked."""
    conversations = [Conversation(service, outcome) for _ in range(count)]
    start = time.perf_counter()
    done = await asyncio.gather(*(one.run() for one in conversations), return_exceptions=True)
    whole = time.perf_counter() - start
    failed = [one for one in done if isinstance(one, BaseException)]
    if failed and side == OURS:
        raise failed[0]
    outcome.errors += len(failed)
    outcome.rates.append(sum(one for one in done if isinstance(one, int)) / whole)


@pytest.mark.parametrize("count", CONVERSATION_ROUNDS)
async def test_conversation(deployment: Deployment, results: Results, count: int) -> None:
    sides = {side: service for side, service in deployment.all_sides.items() if side != FLOOR}
    for side, service in sides.items():
        await run_conversations(side, service, 1, Outcome())
    outcome = {side: Outcome() for side in sides}
    with gc_paused():
        for number in range(CONVERSATION_ROUNDS[count]):
            for side in side_order(list(sides), number):
                await run_conversations(side, sides[side], count, outcome[side])
    for side, one in outcome.items():
        name = f"{deployment.name}/conversations, {count} concurrent/{side}"
        results.add(f"{name} rate", Figure.of(one.rates, "/s"))
        for operation, latencies in one.latencies.items():
            for percent in (50, 95, 99):
                figure = Figure.of(latencies, "s", percent)
                results.add(f"{name} {operation} p{percent}", figure)
        results.count(f"{name} errors", one.errors)
