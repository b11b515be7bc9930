"""A server that stops and starts again, or that was never there."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from functools import partial

import pytest
from google.adk.sessions import BaseSessionService, Session
from sqlalchemy import URL

from adk_secure_sessions import DatabaseError
from tests import servers
from tests.conformance.services import Kind
from tests.conformance.support import (
    APP,
    STALE,
    USER,
    create,
    each_kind,
    event,
    ids,
    listed,
    reload,
    together,
)
from tests.reliability.results import Record, database_of

kind = each_kind("encrypted-postgresql", soak=["encrypted-mariadb", "encrypted-psycopg"])
LOST = DatabaseError
# Unlike on the servers of other tests, committed data must survive a crash.
PRIVATE: dict[str, Callable[[], AbstractContextManager[servers.Server]]] = {
    "postgresql": partial(servers.postgresql, "-csynchronous_commit=on"),
    "mariadb": partial(servers.mariadb, "--innodb-flush-log-at-trx-commit=2"),
}


@pytest.fixture(scope="module")
def private() -> Iterator[Callable[[str], servers.Server]]:
    """Servers for this module alone, started when a test first wants them."""
    with ExitStack() as stack:
        running: dict[str, servers.Server] = {}

        def get(name: str) -> servers.Server:
            if name not in running:
                running[name] = stack.enter_context(PRIVATE[name]())
            return running[name]

        yield get


@pytest.fixture
def server(kind: Kind, private: Callable[[str], servers.Server]) -> servers.Server:
    assert kind.server is not None
    return private(kind.server)


@pytest.fixture
def url(kind: Kind, server: servers.Server) -> Iterator[URL]:
    with server.database() as database:
        yield database.set(drivername=kind.driver)


@pytest.fixture
async def service(kind: Kind, url: URL) -> AsyncIterator[BaseSessionService]:
    async with kind.open(url) as opened:
        yield opened


def restart(server: servers.Server) -> None:
    server.stop()
    server.start()


async def test_server_restarted_during_operations_loses_nothing_and_stores_nothing_twice(
    service: BaseSessionService, server: servers.Server, url: URL, record: Record
) -> None:
    returned, raised = Counter[str](), Counter[str]()
    errors: list[DatabaseError] = []
    longest = 0.0
    going_on = True

    async def converse(n: int) -> None:
        nonlocal longest
        session = await read(n)
        while going_on:
            one = event(str(n), delta={f"k{n}": len(session.events), f"user:k{n}": 1})
            began = time.monotonic()
            try:
                await service.append_event(session, one)
                returned[one.id] += 1
                longest = max(longest, time.monotonic() - began)
            except STALE:  # an earlier append raised, but was stored
                assert raised
                session = await read(n)
            except LOST as error:
                raised[one.id] += 1
                errors.append(error)
            if len(session.events) % 8 == 0:
                session = await read(n)

    async def read(n: int) -> Session:
        while True:
            try:
                found = await service.get_session(app_name=APP, user_id=USER, session_id=f"s{n}")
            except LOST:
                await asyncio.sleep(0.05)
            else:
                assert found is not None
                return found

    async def disturb() -> None:
        nonlocal going_on
        try:
            for restarts in range(3):
                if restarts:
                    await asyncio.to_thread(restart, server)
                goal = len(returned) + 6
                while len(returned) < goal:
                    await asyncio.sleep(0.3)
        finally:
            going_on = False

    for n in range(6):
        await create(service, f"s{n}")
    await together(disturb(), *(converse(n) for n in range(6)))
    stored = Counter[str]()
    for n in range(6):
        session = await read(n)
        stored.update(ids(session.events))
        await service.append_event(session, event("goes on"))
    record.fault(
        f"restart during traffic/{database_of(url)}",
        times=2,
        acknowledged=len(returned),
        lost=len(returned.keys() - stored.keys()),
        doubled=stored.total() - len(stored),
        errors=errors,
        pause=longest,
    )
    assert set(stored.values()) == {1}
    assert returned.keys() <= stored.keys() <= returned.keys() | raised.keys()
    assert len(returned) > 12
    assert len(raised) <= 24, "an append is to try again for seconds before it raises"


async def test_server_that_is_down_is_an_error_until_it_is_back(
    service: BaseSessionService, kind: Kind, url: URL, server: servers.Server, record: Record
) -> None:
    session = await create(service)
    server.stop()
    try:
        async with asyncio.timeout(60), kind.open(url) as unopened:
            calls: list[Awaitable[object]] = [service.append_event(session, event("lost"))]
            for one in (service, unopened):
                calls += [reload(one, session), listed(one, None)]
            # Together: each tries again for about a second before it raises.
            errors = await asyncio.gather(*calls, return_exceptions=True)
            assert [type(error) for error in errors] == [LOST] * len(calls)
            server.start()
            started = time.monotonic()
            assert await reload(unopened, session) == session
            pause = time.monotonic() - started
    finally:
        server.start()
    await service.append_event(session, event("goes on"))
    assert await reload(service, session) == session
    record.fault(
        f"server down/{database_of(url)}",
        times=1,
        acknowledged=2,
        errors=[error for error in errors if isinstance(error, LOST)],
        pause=pause,
    )
