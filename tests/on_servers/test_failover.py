"""Streaming replication of PostgreSQL: a failover to a real standby under load.

Each test starts two private servers: see `tests/replication.py`.
"""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import URL

from tests.reliability.traffic import Journal, Talk, check, open_service
from tests.replication import Cluster, Node, cluster

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


class Writers:
    """Tasks that converse with services of their own, whatever happens to the servers."""

    def __init__(self, url: URL, journal: Path, *, services: int, tasks: int) -> None:
        self._url = url.render_as_string(hide_password=False)
        self._journal = journal
        self._until = asyncio.Event()
        writing = Journal(journal)
        self.services = [open_service(self._url) for _ in range(services)]
        self._talks = [
            Talk(service, writing, f"{number}-{task}", 0, f"user {number}-{task}", 0.0)
            for number, service in enumerate(self.services)
            for task in range(tasks)
        ]
        self._running = [
            asyncio.create_task(one.converse_through_faults(lambda: not self._until.is_set()))
            for one in self._talks
        ]

    async def progress(self, writes: int) -> float:
        """Wait until each task has made *writes* more writes; return how many seconds it took."""
        began, wanted = time.monotonic(), [one.writes + writes for one in self._talks]
        while any(one.writes < n for one, n in zip(self._talks, wanted, strict=True)):
            assert time.monotonic() < began + 120, "the services store nothing"
            await asyncio.sleep(0.02)
        return time.monotonic() - began

    async def end(self) -> None:
        """End the tasks; check that what was acknowledged is stored, and once."""
        self._until.set()
        await asyncio.gather(*self._running)
        for service in self.services:
            await service.close()
        found = await check(self._url, [self._journal])
        assert (found.lost, found.doubled) == (0, 0)
        assert found.acknowledged == sum(one.writes for one in self._talks)


def stored(node: Node) -> object:
    return node.scalar("SELECT string_agg(event::text, ',' ORDER BY event) FROM secure_events")


@pytest.mark.parametrize(
    ("writes", "tasks"), [(5, 3), pytest.param(50, 10, marks=pytest.mark.soak)]
)
async def test_no_acknowledged_event_is_lost_or_doubled_by_a_failover(
    servers: Cluster, url: URL, tmp_path: Path, writes: int, tasks: int
) -> None:
    """The primary crashes under load, the standby is promoted, and the old primary comes back."""
    writers = Writers(url, tmp_path / "journal", services=2, tasks=tasks)
    await writers.progress(writes)
    await asyncio.to_thread(servers.primary.crash)
    await asyncio.sleep(0.2)  # services without any primary
    await asyncio.to_thread(servers.promote)
    assert await writers.progress(1) < RECOVERY
    await writers.progress(writes)
    await asyncio.to_thread(servers.return_fenced)
    demoted = stored(servers.primary)
    await writers.progress(writes)
    await writers.end()
    assert stored(servers.primary) == demoted, "a service has written to the old primary"


async def test_connections_to_a_primary_that_was_demoted_are_replaced(
    servers: Cluster, url: URL, tmp_path: Path
) -> None:
    """A planned switch: the old primary keeps its connections, but is read-only."""
    writers = Writers(url, tmp_path / "journal", services=1, tasks=4)
    await writers.progress(3)
    servers.primary.execute("ALTER SYSTEM SET default_transaction_read_only = on")
    servers.primary.execute("SELECT pg_reload_conf()")
    await asyncio.sleep(0.5)  # the standby acknowledges the last transactions
    await asyncio.to_thread(servers.promote)
    demoted = stored(servers.primary)
    assert await writers.progress(1) < RECOVERY
    await writers.end()
    assert stored(servers.primary) == demoted
