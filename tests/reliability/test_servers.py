"""Servers that are slow, and transactions that the server ends because of a deadlock.

`on_servers` has the other faults of servers: restarts, lost connections, exhausted pools.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import sqlalchemy as sa

from adk_secure_sessions import AesGcmBackend, DatabaseError, EncryptedSessionService
from tests.conformance.support import create, delete, event, find, listed, reload
from tests.drivers import each_driver, on_drivers, server, url
from tests.on_servers.proxy import proxy_before
from tests.reliability.results import Record, database_of
from tests.servers import Server

__all__ = ["server", "url"]

name = each_driver("asyncpg", "asyncmy", soak=["psycopg"])
KEY = bytes(range(32))
LIMIT = 1.0  # seconds, for a read and for connecting; a write has ten times as long


@on_drivers("asyncpg", soak=["asyncmy", "psycopg"])
async def test_slow_server_is_an_error_that_may_be_tried_again(url: sa.URL, record: Record) -> None:
    """The server gets what is sent, but its answers stop on the way."""
    async with (
        proxy_before(url) as (proxy, by_proxy),
        EncryptedSessionService(by_proxy, AesGcmBackend(KEY), read_timeout=LIMIT) as service,
    ):
        session = await create(service)
        await service.append_event(session, event("before", delta={"k": 1}))
        expected = session.model_copy(deep=True)
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: find(service, session),
            lambda: listed(service),  # it has to connect first: the connection was closed
        ]
        errors: list[DatabaseError] = []
        longest = 0.0
        for call in calls:
            proxy.stall()
            began = time.monotonic()
            with pytest.raises(DatabaseError) as raised:
                await asyncio.wait_for(call(), 60)
            longest = max(longest, time.monotonic() - began)
            errors.append(raised.value)
            proxy.go_on()
        assert all(error.retryable for error in errors)
        went_on = time.monotonic()
        assert await reload(service, session) == expected
        pause = time.monotonic() - went_on
        await service.append_event(session, event("goes on"))
        assert await reload(service, session) == session
        assert len(session.events) == 2
    record.fault(
        f"slow server/{database_of(url)}",
        times=len(calls),
        acknowledged=3,
        errors=errors,
        pause=pause,
    )
    record.figure(f"slow server/{database_of(url)}/until the error", longest, "s")


@on_drivers("asyncpg")
async def test_read_behind_a_pooler_that_stops_answering_ends(url: sa.URL) -> None:
    """It is a transaction of several messages, and the server stops after each of them."""
    options: Any = {"connect_args": {"statement_cache_size": 0}}  # says that there is a pooler
    async with (
        proxy_before(url) as (proxy, by_proxy),
        EncryptedSessionService(
            by_proxy, AesGcmBackend(KEY), read_timeout=LIMIT, **options
        ) as service,
    ):
        session = await create(service)
        for number in range(4):
            assert await reload(service, session) == session
            proxy.stall(number)
            with pytest.raises(DatabaseError) as raised:
                await asyncio.wait_for(find(service, session), 30)
            assert raised.value.retryable
            proxy.go_on()
            assert await reload(service, session) == session
            proxy.stall(number)
            read = asyncio.ensure_future(find(service, session))
            await asyncio.sleep(LIMIT / 4)
            read.cancel()
            await asyncio.wait([read], timeout=30)
            assert read.cancelled()
            proxy.go_on()


async def test_append_during_a_pause_of_the_server_is_stored_once(
    url: sa.URL, record: Record
) -> None:
    """The pause is longer than a read may take, and shorter than a write may."""
    async with (
        proxy_before(url) as (proxy, by_proxy),
        EncryptedSessionService(by_proxy, AesGcmBackend(KEY), read_timeout=2.0) as service,
    ):
        session = await create(service)
        await service.append_event(session, event("before"))
        proxy.stall()
        task = asyncio.ensure_future(service.append_event(session, event("slow", delta={"k": 1})))
        await asyncio.sleep(0.5)
        assert not task.done()
        proxy.go_on()
        went_on = time.monotonic()
        await asyncio.wait_for(task, 30)
        pause = time.monotonic() - went_on
        assert await reload(service, session) == session
        assert len(session.events) == 2
    record.fault(f"pause of the server/{database_of(url)}", times=1, acknowledged=3, pause=pause)


# --- deadlocks -----------------------------------------------------------------------------------


def deadlocks(server: Server) -> int:
    with server.admin.connect() as connection:
        if server.admin.dialect.name == "postgresql":
            connection.exec_driver_sql("SELECT pg_stat_force_next_flush()")
            counted = connection.exec_driver_sql("SELECT sum(deadlocks) FROM pg_stat_database")
        else:
            counted = connection.exec_driver_sql(
                "SELECT variable_value FROM information_schema.global_status "
                "WHERE variable_name = 'Innodb_deadlocks'"
            )
        return int(counted.scalar() or 0)


def waiting(server: Server, url: sa.URL) -> bool:
    """Whether a transaction in the test's database waits for a lock."""
    with server.admin.connect() as connection:
        if server.admin.dialect.name == "postgresql":
            found = connection.exec_driver_sql(
                f"SELECT count(*) FROM pg_stat_activity WHERE usename = '{url.username}' "
                "AND wait_event_type = 'Lock'"
            )
        else:
            found = connection.exec_driver_sql(
                "SELECT count(*) FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'"
            )
        return bool(found.scalar())


TABLES = ("secure_users", "secure_sessions")


@pytest.mark.parametrize("operation", ["append", "create", "delete"])
async def test_write_that_the_server_ends_because_of_a_deadlock_is_made_once(
    url: sa.URL,
    server: Server,
    operation: str,
    record: Record,
) -> None:
    """Another program locks the same rows, in one order and in the other."""
    if server.admin.dialect.name == "postgresql":
        # The server ends the transaction that notices the deadlock: the service's looks first.
        with server.admin.connect() as connection:
            connection.exec_driver_sql(f"ALTER ROLE {url.username} SET deadlock_timeout = '300ms'")
    before = deadlocks(server)
    times = 0
    async with EncryptedSessionService(url, AesGcmBackend(KEY)) as service:
        session = await create(service, state={"user:k": 0})
        other = await create(service, "other", state={"k": 1})
        for number, tables in enumerate((TABLES, TABLES[::-1])):
            calls: dict[str, Callable[[], Awaitable[object]]] = {
                "append": lambda n=number: service.append_event(  # type: ignore[misc]
                    session, event(str(n), delta={"k": n, "user:k": n + 1})
                ),
                "create": lambda n=number: create(  # type: ignore[misc]
                    service, f"new {n}", state={"user:k": n + 1}
                ),
                "delete": lambda: delete(service, other),
            }
            with locking(server, url, tables) as lock_the_second:
                task = asyncio.ensure_future(calls[operation]())
                deadline = time.monotonic() + 10
                while not await asyncio.to_thread(waiting, server, url) and not task.done():
                    assert time.monotonic() < deadline
                    # MariaDB fills the table again only if nobody has read it for 0.1 s.
                    await asyncio.sleep(0.15)
                await asyncio.to_thread(lock_the_second)
            await asyncio.wait_for(task, 30)
            times += 1
        if operation == "append":
            assert await reload(service, session) == session
            assert len(session.events) == 2
            assert session.state["user:k"] == 2
        elif operation == "create":
            found = await listed(service)
            assert sorted(one.id for one in found) == ["new 0", "new 1", "other", "session"]
            assert {one.state["user:k"] for one in found} == {2}
        else:
            assert await find(service, other) is None
            assert len(await listed(service)) == 1
    happened = deadlocks(server) - before
    assert operation != "append" or happened
    if happened:
        name = f"deadlock, {operation}/{database_of(url)}"
        record.fault(name, times=happened, acknowledged=times)


@contextmanager
def locking(server: Server, url: sa.URL, tables: Sequence[str]) -> Iterator[Callable[[], None]]:
    """Another program's transaction: it has locked the rows of one table; yields: lock the other's.

    The transaction is a superuser's, so that the server ends the service's.
    """
    engine = sa.create_engine(server.admin_url)
    schema = url.username if engine.dialect.name == "postgresql" else url.database

    def lock(table: str) -> None:
        connection.exec_driver_sql(f"SELECT * FROM {schema}.{table} FOR UPDATE")

    with engine.connect() as connection:
        if engine.dialect.name == "postgresql":
            connection.exec_driver_sql("SET deadlock_timeout = '20s'")
        else:  # InnoDB ends the transaction that has changed fewer rows
            scratch = f"{schema}.scratch"
            connection.exec_driver_sql(f"USE {schema}")  # the numbers come from a storage engine
            connection.exec_driver_sql(f"CREATE TABLE IF NOT EXISTS {scratch} (n int)")
            connection.exec_driver_sql(f"INSERT INTO {scratch} SELECT seq FROM seq_1_to_1000")
        lock(tables[0])
        yield lambda: lock(tables[1])
        connection.rollback()
    engine.dispose()
