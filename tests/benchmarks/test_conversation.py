"""Conversations as an agent has them, one and many at once, ours beside ADK's in clear."""

import asyncio
import time
import uuid
from dataclasses import dataclass, field

import pytest
from google.adk.sessions import BaseSessionService

from tests.benchmarks.databases import FLOOR, OURS
from tests.benchmarks.harness import collector_off, order
from tests.benchmarks.places import NEAR, Place
from tests.benchmarks.plan import ROUNDS, STEPS, TURNS
from tests.benchmarks.results import Figure, Results
from tests.benchmarks.samples import APP, turn

pytestmark = [
    pytest.mark.benchmark,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.parametrize("place", NEAR, indirect=True),
]


@dataclass
class Taken:
    """Seconds, and how often an operation failed."""

    rates: list[float] = field(default_factory=list)
    latencies: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in STEPS})
    errors: int = 0


class Conversation:
    """One user's: create, then events and, after every turn, a read."""

    def __init__(self, service: BaseSessionService, taken: Taken) -> None:
        self._service = service
        self._taken = taken
        self._turns = [turn(number) for number in range(TURNS)]

    async def hold(self) -> int:
        """Return how many operations it took.  One that fails ends it."""
        user = f"patient-{uuid.uuid4()}"
        start = time.perf_counter()
        session = await self._service.create_session(app_name=APP, user_id=user, state={"step": ""})
        start = self._note("create", start)
        for events in self._turns:
            for event in events:
                await self._service.append_event(session, event)
                start = self._note("append", start)
            read = await self._service.get_session(
                app_name=APP, user_id=user, session_id=session.id
            )
            start = self._note("get", start)
            assert read is not None
            session = read
        assert len(session.events) == 4 * TURNS
        return 1 + 5 * TURNS

    def _note(self, operation: str, start: float) -> float:
        now = time.perf_counter()
        self._taken.latencies[operation].append(now - start)
        return now


async def hold(side: str, service: BaseSessionService, count: int, taken: Taken) -> None:
    """Ours may not fail; ADK's do on SQLite under load: the database is locked."""
    conversations = [Conversation(service, taken) for _ in range(count)]
    start = time.perf_counter()
    done = await asyncio.gather(*(one.hold() for one in conversations), return_exceptions=True)
    whole = time.perf_counter() - start
    failed = [one for one in done if isinstance(one, BaseException)]
    if failed and side == OURS:
        raise failed[0]
    taken.errors += len(failed)
    taken.rates.append(sum(one for one in done if isinstance(one, int)) / whole)


@pytest.mark.parametrize("count", ROUNDS)
async def test_conversation(place: Place, results: Results, count: int) -> None:
    sides = {side: service for side, service in place.all_sides.items() if side != FLOOR}
    for side, service in sides.items():
        await hold(side, service, 1, Taken())
    taken = {side: Taken() for side in sides}
    with collector_off():
        for number in range(ROUNDS[count]):
            for side in order(list(sides), number):
                await hold(side, sides[side], count, taken[side])
    for side, one in taken.items():
        name = f"{place.name}/conversation, {count} at once/{side}"
        results.add(f"{name} rate", Figure.of(one.rates, "/s"))
        for operation, latencies in one.latencies.items():
            for percent in (50, 95, 99):
                figure = Figure.of(latencies, "s", percent)
                results.add(f"{name} {operation} p{percent}", figure)
        results.count(f"{name} errors", one.errors)
