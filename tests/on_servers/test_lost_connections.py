"""Connections that are lost between operations, and at each moment of an operation."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from google.adk.sessions import BaseSessionService
from sqlalchemy import URL

from tests.conformance.services import Kind
from tests.conformance.support import (
    create,
    delete,
    each_kind,
    event,
    find,
    ids,
    listed,
    reload,
    together,
)
from tests.on_servers.proxy import Cut, Proxy, proxy_before
from tests.reliability.results import Record, database_of
from tests.servers import Server

LATER = ["encrypted-postgresql-engine", "encrypted-psycopg", "encrypted-mariadb-engine"]
kind = each_kind(
    "encrypted-postgresql",
    soak=["encrypted-mariadb", *LATER],
)
LARGE = "x" * 10_000  # too large for an overlay: it is stored in the snapshot
STATES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "session": {"k": 1},
    "owners": {"k": 1, "user:k": 1, "app:k": 1},
    "base": {"k": LARGE, "user:k": LARGE},
}


def each_cut(*ways: Cut) -> pytest.MarkDecorator:
    """Cut in these *ways*; under `make soak` in the others, too."""
    rest = [pytest.param(way, marks=pytest.mark.soak) for way in Cut if way not in ways]
    return pytest.mark.parametrize("how", [*ways, *rest], ids=lambda way: way.name)


@pytest.fixture
async def by_proxy(
    kind: Kind, url: URL, record: Record
) -> AsyncIterator[tuple[Proxy, BaseSessionService]]:
    async with proxy_before(url) as (proxy, address), kind.open(address) as service:
        yield proxy, service
    # No operation of these tests raises, and each test reads what it has written.
    record.fault(f"connection cut/{database_of(url)}", times=proxy.cuts)


async def each_moment(
    proxy: Proxy, how: Cut, operation: Callable[[int], Awaitable[None]], *, at_least: int = 1
) -> None:
    """Run *operation* again and again, the connection cut one message later each time.

    *operation* is given how often it was run before.  A connection that has prepared a statement
    sends other messages than one that has not: the second time, each run with a cut follows a run
    without one, which prepares the statements.
    """
    runs = itertools.count()
    for known in (False, True):
        for number in range(100):
            if known:
                await operation(next(runs))
            proxy.cut(how, number)
            await operation(next(runs))
            if not proxy.leave():  # the operation ended before that message
                assert number >= at_least
                break
        else:
            raise AssertionError("the operation never ends")


async def test_connections_that_the_server_ended_meanwhile_disturb_nobody(
    service: BaseSessionService, server: Server, url: URL, record: Record
) -> None:
    session = await create(service)
    for n in range(3):
        await together(*(reload(service, session) for _ in range(5)))
        server.kill(url)
        assert await reload(service, session) == session
        server.kill(url)
        await service.append_event(session, event(delta={"k": n, "user:k": n}))
        server.kill(url)
        await service.append_event(session, event("nothing is read first"))
        server.kill(url)
        other = await create(service, f"s{n}")
        server.kill(url)
        assert len(await listed(service)) == 2
        server.kill(url)
        await delete(service, other)
    assert await reload(service, session) == session
    assert len(session.events) == 6
    record.fault(f"connections ended/{database_of(url)}", times=3 * 5, acknowledged=13)


async def test_idle_connections_that_the_network_has_dropped_disturb_nobody(
    by_proxy: tuple[Proxy, BaseSessionService],
) -> None:
    proxy, service = by_proxy
    session = await create(service)
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: reload(service, session),
        lambda: service.append_event(session, event("text")),
    ]
    for call in calls:
        await together(*(reload(service, session) for _ in range(9)))
        proxy.forget()
        await call()
    assert await reload(service, session) == session
    assert len(session.events) == 1


@pytest.mark.parametrize(
    "kind",
    [
        *("encrypted-postgresql", "encrypted-mariadb"),
        *(pytest.param(name, marks=pytest.mark.soak) for name in LATER),
    ],
    indirect=True,
)
@each_cut(Cut.ANSWERED)
@pytest.mark.parametrize(
    "state",
    ["owners", "base", *(pytest.param(s, marks=pytest.mark.soak) for s in ("nothing", "session"))],
)
async def test_append_whose_connection_is_cut_is_stored_once_and_returns(
    by_proxy: tuple[Proxy, BaseSessionService], how: Cut, state: str
) -> None:
    proxy, service = by_proxy
    session = await create(service)
    appended = []

    async def append(number: int) -> None:
        delta = {key: [number, value] for key, value in STATES[state].items()}
        appended.append(await service.append_event(session, event(str(number), delta=delta)))

    await each_moment(proxy, how, append)
    assert session.events == appended
    assert await reload(service, session) == session
    await service.append_event(session, event("goes on"))


@each_cut(Cut.AT_ONCE)
async def test_append_to_a_session_that_was_just_created_is_stored_once(
    by_proxy: tuple[Proxy, BaseSessionService], how: Cut
) -> None:
    proxy, service = by_proxy
    sessions = [await create(service, f"s{n}", state={"k": LARGE}) for n in range(30)]

    async def append(number: int) -> None:
        session = sessions[number]
        await service.append_event(session, event("first", delta={"k": number}))
        assert await reload(service, session) == session
        assert len(session.events) == 1

    await each_moment(proxy, how, append)


async def test_append_that_is_still_waiting_at_the_server_is_not_stored_twice(
    by_proxy: tuple[Proxy, BaseSessionService], server: Server, url: URL
) -> None:
    """The second attempt does not find the event yet, and sends it again."""
    proxy, service = by_proxy
    session = await create(service)
    await service.append_event(session, event("one"))
    with server.rows_locked(url, "secure_sessions"):
        proxy.cut(Cut.AT_ONCE, 0)
        task = asyncio.ensure_future(service.append_event(session, event("two", delta={"k": 1})))
        await asyncio.sleep(0.5)
        assert proxy.leave()
        assert not task.done()
    await asyncio.wait_for(task, 30)
    assert len(session.events) == 2
    assert await reload(service, session) == session
    await service.append_event(session, event("goes on"))


@each_cut(Cut.ANSWERED)
@pytest.mark.parametrize("state", ["base", pytest.param("nothing", marks=pytest.mark.soak)])
async def test_session_whose_creation_was_cut_is_created_once_and_returned(
    by_proxy: tuple[Proxy, BaseSessionService], how: Cut, state: str
) -> None:
    proxy, service = by_proxy
    await create(service, "the first makes the tables", user_id="first")

    async def create_one(number: int) -> None:
        made = await create(service, user_id=f"u{number}", state=STATES[state])
        assert made.state == STATES[state]
        await service.append_event(made, event("goes on"))
        assert await reload(service, made) == made

    await each_moment(proxy, how, create_one, at_least=2)


@each_cut(Cut.ANSWERED)
async def test_deletion_that_was_cut_is_made(
    by_proxy: tuple[Proxy, BaseSessionService], how: Cut
) -> None:
    proxy, service = by_proxy
    sessions = [await create(service, f"s{n}", state={"k": LARGE}) for n in range(40)]

    async def delete_one(number: int) -> None:
        await delete(service, sessions[number])
        assert await find(service, sessions[number]) is None

    await each_moment(proxy, how, delete_one, at_least=2)
    assert set(ids(await listed(service))) < set(ids(sessions))


@each_cut(Cut.ANSWERED)
async def test_read_that_was_cut_gives_its_result(
    by_proxy: tuple[Proxy, BaseSessionService], how: Cut
) -> None:
    proxy, service = by_proxy
    session = await create(service, state={"k": LARGE, "user:k": 1})
    await service.append_event(session, event("text"))

    async def get(_: int) -> None:
        assert await reload(service, session) == session

    async def list_user(_: int) -> None:
        assert ids(await listed(service)) == [session.id]

    async def list_app(_: int) -> None:
        assert ids(await listed(service, None)) == [session.id]

    for read in (get, list_user, list_app):
        await each_moment(proxy, how, read)
