"""Streaming replication of PostgreSQL: a failover to a real standby under load.

Each test starts two private servers: see `tests/replication.py`.
"""

import asyncio
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack

import pytest
from google.adk.events import Event, EventActions
from sqlalchemy import URL

from adk_secure_sessions import (
    AesGcmBackend,
    DatabaseError,
    EncryptedSessionService,
    StaleSessionError,
)
from adk_secure_sessions.maintenance import Database, verify
from tests.conformance.services import KEY
from tests.replication import Cluster, Node, cluster

APP = "app"
# Seconds until each writer stores events again: the pauses between retries are at most 2 s, and the
# machine of the tests may be busy.
RECOVERY = 20
DRIVERS = ["asyncpg", pytest.param("psycopg", marks=pytest.mark.soak)]


@pytest.fixture
def servers() -> Iterator[Cluster]:
    with cluster() as found:
        yield found


@pytest.fixture(params=DRIVERS)
def url(request: pytest.FixtureRequest, servers: Cluster) -> URL:
    """The database on both servers, as an application names it for writes."""
    url = servers.primary.admin_url.set(drivername=f"postgresql+{request.param}")
    return servers.multi_host(url)


class Writer:
    """Appends numbered events to sessions of its own, and remembers which were acknowledged."""

    def __init__(self, service: EncryptedSessionService, name: str) -> None:
        self._service = service
        self._name = name
        self._number = 0
        self.sessions: dict[str, list[str]] = {}  # the ids of acknowledged events
        self.unknown: dict[str, set[str]] = {}  # the ids of events whose append has failed
        self.acknowledged_at: list[float] = []

    async def run(self, until: asyncio.Event) -> None:
        while not until.is_set():
            try:
                await self._converse(until)
            except (DatabaseError, StaleSessionError):
                # It is unknown whether the last write was stored: go on in a new session.
                await asyncio.sleep(0.05)

    async def _converse(self, until: asyncio.Event) -> None:
        name = f"{self._name}-{self._number}"
        self._number += 1
        session = await self._service.create_session(
            app_name=APP, user_id=self._name, session_id=name
        )
        acknowledged = self.sessions[name] = []
        self.unknown[name] = set()
        while not until.is_set():
            event = Event(author="user", actions=EventActions(state_delta={"n": len(acknowledged)}))
            event.id = f"{name}-{len(acknowledged)}"
            self.unknown[name].add(event.id)
            await self._service.append_event(session, event)
            self.unknown[name].discard(event.id)
            acknowledged.append(event.id)
            self.acknowledged_at.append(time.monotonic())

    async def check(self, service: EncryptedSessionService) -> int:
        """Check that *service* has each acknowledged event once; return their number."""
        for name, acknowledged in self.sessions.items():
            found = await service.get_session(app_name=APP, user_id=self._name, session_id=name)
            assert found is not None, name
            stored = [event.id for event in found.events]
            assert stored[: len(acknowledged)] == acknowledged
            assert set(stored[len(acknowledged) :]) <= self.unknown[name]
            assert len(stored) == len(set(stored))
        return sum(map(len, self.sessions.values()))


async def progress(writers: list[Writer], events: int) -> float:
    """Wait until each writer has stored *events* more events; return how many seconds it took."""
    began, wanted = time.monotonic(), [len(one.acknowledged_at) + events for one in writers]
    while any(len(one.acknowledged_at) < n for one, n in zip(writers, wanted, strict=True)):
        assert time.monotonic() < began + 120, "the services store nothing"
        await asyncio.sleep(0.02)
    return time.monotonic() - began


async def fail_over(servers: Cluster, url: URL, *, events: int, tasks: int = 3) -> None:
    """Crash the primary under load, promote the standby, and let the old primary come back."""
    async with AsyncExitStack() as stack:
        writers = []
        for number in range(2):
            service = EncryptedSessionService(url, AesGcmBackend(KEY))
            await stack.enter_async_context(service)
            writers += [Writer(service, f"{number}-{task}") for task in range(tasks)]
        until = asyncio.Event()
        running = [asyncio.create_task(writer.run(until)) for writer in writers]
        await progress(writers, events)
        await asyncio.to_thread(servers.primary.crash)
        await asyncio.sleep(0.2)  # services without any primary
        await asyncio.to_thread(servers.promote)
        assert await progress(writers, 1) < RECOVERY
        await progress(writers, events)
        await asyncio.to_thread(servers.return_fenced)
        demoted = stored(servers.primary)
        await progress(writers, events)
        until.set()
        await asyncio.gather(*running)
        assert stored(servers.primary) == demoted, "a service has written to the old primary"
        async with EncryptedSessionService(url, AesGcmBackend(KEY)) as fresh:
            total = sum([await writer.check(fresh) for writer in writers])
        assert total == sum(len(writer.acknowledged_at) for writer in writers)
        async with Database(url, AesGcmBackend(KEY)) as db:
            assert (await verify(db)).problems == ()


def stored(node: Node) -> object:
    return node.scalar("SELECT string_agg(event::text, ',' ORDER BY event) FROM secure_events")


async def test_no_acknowledged_event_is_lost_or_doubled_by_a_failover(
    servers: Cluster, url: URL
) -> None:
    await fail_over(servers, url, events=5)


@pytest.mark.soak
async def test_many_writers_survive_a_failover(servers: Cluster, url: URL) -> None:
    await fail_over(servers, url, events=50, tasks=10)


async def test_connections_to_a_primary_that_was_demoted_are_replaced(
    servers: Cluster, url: URL
) -> None:
    """A planned switch: the old primary keeps its connections, but is read-only."""
    async with EncryptedSessionService(url, AesGcmBackend(KEY)) as service:
        writers = [Writer(service, str(task)) for task in range(4)]
        until = asyncio.Event()
        running = [asyncio.create_task(writer.run(until)) for writer in writers]
        await progress(writers, 3)
        servers.primary.execute("ALTER SYSTEM SET default_transaction_read_only = on")
        servers.primary.execute("SELECT pg_reload_conf()")
        await asyncio.sleep(0.5)  # the standby acknowledges the last transactions
        await asyncio.to_thread(servers.promote)
        demoted = stored(servers.primary)
        assert await progress(writers, 1) < RECOVERY
        until.set()
        await asyncio.gather(*running)
        assert stored(servers.primary) == demoted
        assert sum([await writer.check(service) for writer in writers])
