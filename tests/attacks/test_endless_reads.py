"""Somebody put a view or trigger that never ends into the database: statements are interrupted."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import pytest
import sqlalchemy as sa
from sqlalchemy import URL
from sqlalchemy.ext.asyncio import create_async_engine

from adk_secure_sessions import (
    AesGcmBackend,
    ConfigurationError,
    DatabaseError,
    EncryptedSessionService,
)
from tests.conformance.services import KEY
from tests.conformance.support import APP, USER, create, event, find, reload
from tests.drivers import each_driver, on_drivers, server, url
from tests.servers import Server

__all__ = ["server", "url"]

LATER = ["aiosqlite-engine", "psycopg", "asyncpg-pgbouncer", "psycopg-pgbouncer"]
name = each_driver(*("sqlite", "asyncpg", "asyncmy"), soak=LATER)

Open = Callable[[float | None], EncryptedSessionService]


@pytest.fixture
async def open_service(name: str, url: URL) -> AsyncIterator[Open]:
    engine = create_async_engine(url) if name.endswith("engine") else None

    def opened(read_timeout: float | None) -> EncryptedSessionService:
        backend = AesGcmBackend(KEY)
        if engine is not None:
            return EncryptedSessionService(
                db_engine=engine, backend=backend, read_timeout=read_timeout
            )
        return EncryptedSessionService(url, backend, read_timeout=read_timeout)

    yield opened
    if engine is not None:
        await engine.dispose()


def replace_events(url: URL, server: Server | None) -> None:
    """Put a view that never ends in the place of `secure_events`; `restore_events` undoes it."""
    columns = "session_row, seq, time, event"
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n"
    condition = f"session_row IN ({endless} WHERE i < 0)"
    if server is not None and "maria" in server.admin_url.drivername:
        # MariaDB bounds recursion.  A query that sleeps keeps no core busy.
        condition = "SLEEP(1000 + LEAST(session_row, 1)) = 2"
    with behind(url, server) as connection:
        connection.exec_driver_sql("ALTER TABLE secure_events RENAME TO saved")
        connection.exec_driver_sql(
            f"CREATE VIEW secure_events AS SELECT {columns} FROM saved WHERE {condition}"
        )


def restore_events(url: URL, server: Server | None) -> None:
    with behind(url, server) as connection:
        connection.exec_driver_sql("DROP VIEW secure_events")
        connection.exec_driver_sql("ALTER TABLE saved RENAME TO secure_events")


def behind(url: URL, server: Server | None) -> "sa.Connection":
    """A connection of somebody else."""
    if server is None:
        driver, found = "sqlite", url
    else:
        driver = server.admin_url.drivername
        found = url.set(query=server.admin_url.query)
    engine = sa.create_engine(
        found.set(drivername=driver), isolation_level="AUTOCOMMIT", poolclass=sa.pool.NullPool
    )
    return engine.connect()


async def nothing_runs(url: URL, server: Server | None) -> None:
    """Wait until the server has ended the query, even though no client waits for it any more."""
    if server is None:
        return
    text = f"SELECT count(*) FROM pg_stat_activity WHERE usename = '{url.username}' "
    text += "AND state = 'active'"
    if "maria" in server.admin_url.drivername:
        text = "SELECT count(*) FROM information_schema.processlist "
        text += f"WHERE db = '{url.database}' AND command = 'Query'"
    async with asyncio.timeout(20):
        while True:
            with server.admin.connect() as connection:
                if not connection.exec_driver_sql(text).scalar():
                    return
            await asyncio.sleep(0.05)


@on_drivers("sqlite", "asyncpg", soak=["asyncmy", *LATER])
async def test_endless_read_is_interrupted_after_its_time_and_the_service_goes_on(
    open_service: Open, url: URL, server: Server | None
) -> None:
    async with open_service(0.5) as service:
        session = await create(service)
        await service.append_event(session, event("text"))
        other = await create(service, "other")
        await asyncio.to_thread(replace_events, url, server)
        began = time.monotonic()
        # On SQLite, the third one waits for the two threads that read.
        reads = [asyncio.ensure_future(find(service, session)) for _ in range(3)]
        results = await asyncio.gather(*reads, return_exceptions=True)
        for error in results:
            assert isinstance(error, DatabaseError), error
            assert error.retryable
            assert "read_timeout" in str(error)
        assert time.monotonic() - began < 20
        await nothing_runs(url, server)
        # A write reads, too.
        with pytest.raises(DatabaseError, match="read_timeout"):
            await service.append_event(session, event("text", delta={"app:k": 1}))
        state = await service.get_user_state(app_name=APP, user_id=USER)
        assert state == {}  # no events are read for this
        await asyncio.to_thread(restore_events, url, server)
        assert await reload(service, other) == other
        await service.append_event(await reload(service, session), event("goes on"))


async def test_endless_read_ends_at_the_server_when_its_caller_is_cancelled(
    open_service: Open, url: URL, server: Server | None
) -> None:
    async with open_service(None) as service:
        session = await create(service)
        await service.append_event(session, event("text"))
        await asyncio.to_thread(replace_events, url, server)
        reads = [asyncio.ensure_future(find(service, session)) for _ in range(3)]
        await asyncio.sleep(0.3)
        for read in reads:
            read.cancel()
        done, running = await asyncio.wait(reads, timeout=20)
        assert not running
        assert all(read.cancelled() for read in done)
        await nothing_runs(url, server)
        await asyncio.to_thread(restore_events, url, server)
        await service.append_event(await reload(service, session), event("goes on"))


ENDLESS_TRIGGER = {
    "sqlite": [
        "CREATE VIEW endless AS "
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n",
        "CREATE TRIGGER slow BEFORE INSERT ON secure_events "
        "BEGIN SELECT count(*) FROM endless WHERE i < 0; END",
    ],
    "postgresql": [
        "CREATE FUNCTION endless() RETURNS trigger LANGUAGE plpgsql AS "
        "'BEGIN LOOP PERFORM pg_sleep(0.05); END LOOP; END'",
        "CREATE TRIGGER slow BEFORE INSERT ON secure_events "
        "FOR EACH ROW EXECUTE FUNCTION endless()",
    ],
    "mysql": [
        "CREATE TRIGGER slow BEFORE INSERT ON secure_events FOR EACH ROW "
        "SET NEW.time = NEW.time + SLEEP(1000)"
    ],
}


@on_drivers("sqlite", "asyncpg", soak=["asyncmy", *LATER])
async def test_write_behind_a_trigger_that_never_ends_is_interrupted_after_its_time(
    open_service: Open, url: URL, server: Server | None
) -> None:
    await write_is_interrupted(open_service, url, server)


@on_drivers("psycopg")
async def test_commit_behind_a_deferred_trigger_that_never_ends_is_interrupted_after_its_time(
    open_service: Open, url: URL, server: Server | None
) -> None:
    at_once = "TRIGGER slow BEFORE INSERT ON secure_events "
    deferred = at_once.replace("BEFORE", "AFTER") + "DEFERRABLE INITIALLY DEFERRED "
    await write_is_interrupted(open_service, url, server, (at_once, f"CONSTRAINT {deferred}"))


async def write_is_interrupted(
    open_service: Open, url: URL, server: Server | None, changed: tuple[str, str] = ("", "")
) -> None:
    async with open_service(0.2) as service:
        session = await create(service)
        with behind(url, server) as connection:
            for statement in ENDLESS_TRIGGER[connection.dialect.name.replace("mariadb", "mysql")]:
                connection.exec_driver_sql(statement.replace(*changed))
        began = time.monotonic()
        append = asyncio.ensure_future(service.append_event(session, event("text")))
        # On a server, they might wait for a lock of the endless one, which counts.
        number = 0 if server else 4
        others = [asyncio.ensure_future(create(service, f"other {n}")) for n in range(number)]
        with pytest.raises(DatabaseError, match="a write did not end within 2 s") as raised:
            await append
        assert raised.value.retryable
        created = await asyncio.gather(*others)
        assert 2 <= time.monotonic() - began < 20
        await nothing_runs(url, server)
        with behind(url, server) as connection:
            on = " ON secure_events" if connection.dialect.name == "postgresql" else ""
            connection.exec_driver_sql(f"DROP TRIGGER slow{on}")
        for one in (session, *created):
            assert await reload(service, one) == one
            await service.append_event(one, event("goes on"))


@on_drivers("sqlite", "asyncpg", "asyncmy")
async def test_service_closes_although_a_read_never_ends(
    open_service: Open, url: URL, server: Server | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing else shortens this time, of 5 s, in which each read on SQLite keeps a core busy.
    monkeypatch.setattr("adk_secure_sessions.db.sqlite._EXIT_TIMEOUT", 0.5)
    service = open_service(0.5 if server else None)
    session = await create(service)
    await service.append_event(session, event("text"))
    await asyncio.to_thread(replace_events, url, server)
    read = asyncio.ensure_future(find(service, session))
    await asyncio.sleep(0.2)
    async with asyncio.timeout(30):
        await service.close()
    with pytest.raises(DatabaseError):
        await read


@on_drivers("sqlite", soak=["asyncpg", "asyncmy"])
async def test_start_rejects_a_view_in_the_place_of_a_table(
    open_service: Open, url: URL, server: Server | None
) -> None:
    async with open_service(60) as service:
        await create(service)
    await asyncio.to_thread(replace_events, url, server)
    async with asyncio.timeout(30), open_service(60) as service:
        with pytest.raises(ConfigurationError, match="secure_events was removed"):
            await service.prepare_tables()
