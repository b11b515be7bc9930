"""Sessions at the upper end of what applications have: what they cost, and that they come back."""

import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import pytest
import sqlalchemy as sa
from google.adk.events import Event, EventActions

from adk_secure_sessions import AesGcmBackend, EncryptedSessionService
from tests.benchmarks.memory import peak_memory
from tests.conformance.support import create, event, reload
from tests.drivers import each_driver, server, url
from tests.reliability.results import Record, database_of

__all__ = ["server", "url"]

name = each_driver("sqlite", soak=["asyncpg", "asyncmy"])
KEY = bytes(range(32))
EVENTS, KEYS, MEGABYTES = 10_000, 10_000, 20


class Measured:
    """Stores time and CPU time of steps, and the memory of a repeated read."""

    def __init__(self, record: Record, what: str, driver: str) -> None:
        self._record, self._name = record, f"limits/{driver}/{what}"

    @contextmanager
    def step(self, step: str) -> Iterator[None]:
        elapsed, cpu = time.perf_counter(), time.process_time()
        yield
        self._record.figure(f"{self._name}/{step}", time.perf_counter() - elapsed, "s")
        self._record.figure(f"{self._name}/{step}, CPU", time.process_time() - cpu, "s")

    async def memory(self, step: str, operation: Callable[[], Awaitable[object]]) -> None:
        self._record.figure(f"{self._name}/{step}, memory", await peak_memory(operation), "B")


@pytest.mark.soak
async def test_session_of_ten_thousand_events_is_read_back(url: sa.URL, record: Record) -> None:
    measured = Measured(record, f"{EVENTS:,} events", database_of(url))
    async with EncryptedSessionService(url, AesGcmBackend(KEY)) as service:
        session = await create(service)
        with measured.step("write"):
            for n in range(EVENTS):
                actions = EventActions(state_delta={"n": n})
                await service.append_event(
                    session, Event(author="agent", invocation_id="i", actions=actions)
                )
        with measured.step("read"):
            found = await reload(service, session)
        assert found == session
        assert len(found.events) == EVENTS
        with measured.step("read the last 20"):
            last = await reload(service, session, num_recent_events=20)
        assert last.events == session.events[-20:]
        await measured.memory("read", lambda: reload(service, session))


async def test_state_of_ten_thousand_keys_is_read_back_and_changed(
    url: sa.URL, record: Record
) -> None:
    measured = Measured(record, f"{KEYS:,} state keys", database_of(url))
    async with EncryptedSessionService(url, AesGcmBackend(KEY)) as service:
        state = {f"key number {n}": f"value {n}" for n in range(KEYS)}
        with measured.step("write"):
            session = await create(service, state=state)
        with measured.step("change one key"):
            await service.append_event(session, event(delta={"key number 5000": "changed"}))
        with measured.step("read"):
            found = await reload(service, session)
        assert found == session
        assert len(found.state) == KEYS
        assert found.state["key number 5000"] == "changed"
        await measured.memory("read", lambda: reload(service, session))


@pytest.mark.soak  # on_servers/test_large_values.py stores one by default
async def test_event_of_twenty_megabytes_is_measured(url: sa.URL, record: Record) -> None:
    measured = Measured(record, f"an event of {MEGABYTES} MB", database_of(url))
    async with EncryptedSessionService(url, AesGcmBackend(KEY)) as service:
        session = await create(service)
        with measured.step("write"):
            await service.append_event(session, event("x" * MEGABYTES * 1_000_000))
        with measured.step("read"):
            found = await reload(service, session)
        assert found == session
        await measured.memory("read", lambda: reload(service, session))
