"""Conversations of an agent, one and many concurrently: our service and plaintext ADK."""

import asyncio
import time
import uuid
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import pytest
from google.adk.sessions import BaseSessionService

from tests.benchmarks.databases import FLOOR, NO_OP, OURS, opened, update_statistics
from tests.benchmarks.deployments import LOCAL, Deployment
from tests.benchmarks.harness import gc_paused, side_order
from tests.benchmarks.plan import CONVERSATION_OPERATIONS, CONVERSATION_ROUNDS, TURNS
from tests.benchmarks.results import Figure, Results
from tests.benchmarks.workload import APP, turn

pytestmark = [
    pytest.mark.bench,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.parametrize("deployment", LOCAL, indirect=True),
]


@dataclass
class Outcome:
    """Operations per second, latencies in seconds, and the number of failed conversations."""

    rates: list[float] = field(default_factory=list)
    latencies: dict[str, list[float]] = field(
        default_factory=lambda: {name: [] for name in CONVERSATION_OPERATIONS}
    )
    errors: int = 0


class Conversation:
    """The conversation of one user: a create, then turns of four appends and a get."""

    def __init__(self, service: BaseSessionService, outcome: Outcome) -> None:
        self._service = service
        self._outcome = outcome
        self._turns = [turn(number) for number in range(TURNS)]

    async def run(self) -> int:
        """Run it and return the number of operations; raise the first error."""
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
        self._outcome.latencies[operation].append(now - start)
        return now


async def run_conversations(
    side: str, service: BaseSessionService, count: int, outcome: Outcome
) -> None:
    """Run *count* concurrent conversations and add their times to *outcome*.

    An error of ours is raised.  ADK's services do fail on SQLite under load, with "database is
    locked"; their errors are counted.
    """
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
    outcomes = {side: Outcome() for side in deployment.all_sides if side != FLOOR}
    async with AsyncExitStack() as stack:
        sides = {}
        for side in outcomes:
            # A new database: other benchmarks have filled the deployment's to different sizes.
            url = deployment.databases.create()
            service = sides[side] = await stack.enter_async_context(opened(side, url))
            await run_conversations(side, service, count, Outcome())
            await update_statistics(url)
        with gc_paused():
            for number in range(CONVERSATION_ROUNDS[count]):
                for side in side_order(list(sides), number):
                    await run_conversations(side, sides[side], count, outcomes[side])
    for side, outcome in outcomes.items():
        name = f"{deployment.name}/conversations, {count} concurrent/{side}"
        results.add(f"{name} rate", Figure.of(outcome.rates, "/s"))
        for operation, latencies in outcome.latencies.items():
            for percent in (50, 95, 99):
                figure = Figure.of(latencies, "s", percent)
                results.add(f"{name} {operation} p{percent}", figure)
        results.count(f"{name} errors", outcome.errors)
    name = f"{deployment.name}/conversations, {count} concurrent/{OURS} relative to {NO_OP}"
    # The time of an operation is 1 / rate, so the ratio of the times is that of the rates, turned.
    results.add(name, Figure.ratio(outcomes[NO_OP].rates, outcomes[OURS].rates))
