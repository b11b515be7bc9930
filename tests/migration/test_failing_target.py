"""A target whose disk is full or whose server stops loses nothing; the next run continues."""

import sqlite3
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import URL

from adk_secure_sessions import AesGcmBackend, DatabaseError
from adk_secure_sessions.maintenance import Database
from adk_secure_sessions.migration import compare, migrate
from adk_secure_sessions.migration.sources import ListedSession
from tests import servers
from tests.faults import Point, lost, with_faults
from tests.migration.memory_source import MemorySource, event
from tests.migration.support import KEY, copy, database

TEXT = "x" * 4000


class AlmostFull(sqlite3.Connection):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.execute("PRAGMA max_page_count = 200").close()


def filled(sessions: int = 20, events: int = 20) -> MemorySource:
    source = MemorySource(batch=4)
    for number in range(sessions):
        source.put(f"u{number % 3}", f"s{number}", events=[event(n, TEXT) for n in range(events)])
    return source


async def is_equal(source: MemorySource, url: str) -> bool:
    async with database(url) as db:
        return (await compare(source, db)).all_equal


async def test_full_disk_ends_the_run_and_the_next_one_continues(tmp_path: Path) -> None:
    url, source = f"sqlite:///{tmp_path}/sessions.db", filled()
    options: dict[str, Any] = {"connect_args": {"factory": AlmostFull}}
    async with Database(url, AesGcmBackend(KEY), **options) as db:
        with pytest.raises(DatabaseError, match="free space") as info:
            await migrate(source, db)
    assert info.value.code == "SQLITE_FULL"
    done = await copy(source, url)
    assert done.unchanged > 0
    assert (done.copied + done.unchanged, done.conflicts) == (20, 0)
    assert await is_equal(source, url)


async def test_connection_lost_at_any_transaction_does_not_end_the_run(tmp_path: Path) -> None:
    source, total = filled(sessions=2, events=1), 0
    for number in range(100):
        db, faults = with_faults(partial(database, f"sqlite:///{tmp_path}/{number}.db"))
        if number:
            faults.data.before(Point.RUN, lost(), nth=number)
        async with db:
            assert (await migrate(source, db)).copied == 2
        total = total or faults.data.counts[Point.RUN]
        if number == total:
            break
    assert 3 < total < 100


@pytest.fixture(scope="module")
def private() -> Iterator[servers.Server]:
    """A server for this module alone, on which committed data survives a crash."""
    with servers.postgresql("-csynchronous_commit=on") as server:
        yield server


@pytest.fixture
def server_url(private: servers.Server) -> Iterator[URL]:
    with private.database() as url:
        yield url.set(drivername="postgresql+asyncpg")


async def test_server_restarted_during_the_copy_loses_nothing(
    private: servers.Server, server_url: URL
) -> None:
    url, source = server_url.render_as_string(hide_password=False), filled()
    restarts: list[int] = []

    def restart(sessions: Sequence[ListedSession]) -> None:
        if source.reads and not restarts:
            private.stop()
            private.start()
            restarts.append(source.reads)

    source.before_read = restart
    done = await copy(source, url)
    assert restarts
    assert (done.copied, done.conflicts, done.bad) == (20, 0, 0)
    assert await is_equal(source, url)
