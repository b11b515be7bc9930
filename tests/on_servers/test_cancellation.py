"""Callers that are cancelled at any moment leave nothing behind on the server."""

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from google.adk.sessions import BaseSessionService, Session
from sqlalchemy import URL

from adk_secure_sessions import AesGcmBackend, EncryptedSessionService
from tests.conformance.services import KEY, KINDS
from tests.conformance.support import (
    create,
    delete,
    each_kind,
    event,
    find,
    listed,
    rejected_as_stale,
    reload,
)
from tests.on_servers.test_lost_connections import LARGE
from tests.servers import Server

kind = each_kind("encrypted-postgresql", "encrypted-mariadb", soak=["encrypted-psycopg"])
POOL_SIZE = 3
MOMENTS = 30  # more than there are connections, and than an operation has turns


@pytest.fixture
async def service(url: URL) -> AsyncIterator[BaseSessionService]:
    """A service with a small pool, so that a connection that is not given back is missed."""
    async with EncryptedSessionService(
        url, AesGcmBackend(KEY), pool_size=POOL_SIZE, pool_timeout=20
    ) as service:
        yield service


@pytest.fixture(autouse=True)
async def _nothing_is_left_behind(
    service: BaseSessionService, server: Server, url: URL
) -> AsyncIterator[None]:
    yield
    async with asyncio.timeout(30):
        while await asyncio.to_thread(server.connections, url, in_transaction=True):
            await asyncio.sleep(0.01)
        # Every connection of the pool can be used at the same time, and no row is locked.
        await asyncio.gather(*(create(service, None, user_id="last") for _ in range(8)))
        # Abandoned connections are closed soon; psycopg's only by the garbage collector.
        while len(await asyncio.to_thread(server.connections, url)) > POOL_SIZE:
            gc.collect()
            await asyncio.sleep(0.01)


async def cancelled(operation: Awaitable[object], moment: int) -> None:
    """Cancel *operation* after *moment* turns of the event loop; every third time later."""
    task = asyncio.ensure_future(operation)
    if moment % 3 == 2:
        await asyncio.sleep(moment / 5000)
    else:
        for _ in range(moment):
            await asyncio.sleep(0)
    task.cancel()
    try:
        async with asyncio.timeout(30):
            await task
    except asyncio.CancelledError:
        pass


@pytest.mark.parametrize("session_id", ["the same", pytest.param(None, marks=pytest.mark.soak)])
async def test_cancelled_creation_makes_a_whole_session_or_none(
    service: BaseSessionService, session_id: str | None
) -> None:
    await service.create_session(app_name="other", user_id="u")
    for moment in range(MOMENTS):
        state = {"k": LARGE, "user:k": moment, "app:k": moment}
        name, user_id = session_id or f"s{moment}", f"u{moment}"
        await cancelled(create(service, name, user_id=user_id, state=state), moment)
        found = await service.get_session(app_name="app", user_id=user_id, session_id=name)
        if found is None:
            found = await create(service, name, user_id=user_id, state=state)
        assert found.state == state
        await service.append_event(found, event("goes on"))
        assert await reload(service, found) == found


@pytest.mark.parametrize("read", [reload, lambda service, _: listed(service, None)])
async def test_cancelled_reads_leave_the_connections_usable(
    service: BaseSessionService,
    read: Callable[[BaseSessionService, Session], Awaitable[object]],
) -> None:
    session = await create(service, state={"k": LARGE})
    for n in range(5):
        await service.append_event(session, event(str(n)))
    for moment in range(MOMENTS):
        await cancelled(read(service, session), moment)
    await asyncio.gather(*(cancelled(read(service, session), moment) for moment in range(MOMENTS)))
    assert await reload(service, session) == session


# psycopg sends cancel requests on a connection of its own, which may be slow.
@pytest.mark.parametrize("kind", [KINDS["encrypted-psycopg"]])
async def test_cancelled_reads_do_not_end_the_query_of_another_read(
    service: BaseSessionService,
) -> None:
    session = await create(service, state={"k": LARGE})
    for moment in range(0, 60, 2):
        reads = [asyncio.ensure_future(reload(service, session)) for _ in range(POOL_SIZE)]
        for _ in range(moment % 40):
            await asyncio.sleep(0)
        await asyncio.sleep(moment % 7 / 3000)
        for read in reads:
            read.cancel()
        # These use the connections as soon as they are back in the pool.
        found = await asyncio.gather(*(reload(service, session) for _ in range(2 * POOL_SIZE)))
        assert found == [session] * len(found)
        await asyncio.gather(*reads, return_exceptions=True)


@pytest.mark.parametrize("delta", [{"k": 1}, {"k": LARGE, "user:k": LARGE, "app:k": 1}], ids=len)
async def test_cancelled_append_is_stored_whole_or_not_at_all(
    service: BaseSessionService, delta: dict[str, object]
) -> None:
    session = await create(service)
    for moment in range(MOMENTS):
        before = session.model_copy(deep=True)
        state = {key: [moment, value] for key, value in delta.items()}
        await cancelled(service.append_event(session, event(str(moment), delta=state)), moment)
        stored = await reload(service, session)
        assert len(stored.events) in (len(before.events), len(before.events) + 1)
        assert (stored == before) is (len(stored.events) == len(before.events))
        if session != stored:  # stored, but the caller was not told
            assert session == before
            with rejected_as_stale():
                await service.append_event(session, event("late"))
            session = await reload(service, session)
    await service.append_event(session, event("goes on"))
    assert await reload(service, session) == session


async def test_cancelled_deletion_is_made_or_not(service: BaseSessionService) -> None:
    for moment in range(MOMENTS):
        session = await create(service, f"s{moment}", state={"k": LARGE})
        await service.append_event(session, event("text"))
        await cancelled(delete(service, session), moment)
        if (found := await find(service, session)) is not None:
            assert found == session
            await delete(service, session)
            assert await find(service, session) is None
    assert await listed(service) == []


async def test_caller_cancelled_while_its_append_waits_at_the_server_leaves_with_it(
    service: BaseSessionService, server: Server, url: URL
) -> None:
    session = await create(service)
    with server.rows_locked(url, "secure_sessions"):
        tasks = [
            asyncio.ensure_future(service.append_event(one, event("text")))
            for one in [session] + [await reload(service, session) for _ in range(3)]
        ]
        await asyncio.sleep(0.2)
        for task in tasks:
            task.cancel()
        await asyncio.sleep(0.1)
    await asyncio.wait(tasks, timeout=30)
    stored = await reload(service, session)
    assert len(stored.events) <= 1
    await service.append_event(stored, event("goes on"))


async def test_caller_cancelled_while_waiting_for_a_connection_leaves_at_once(
    service: BaseSessionService, server: Server, url: URL
) -> None:
    session = await create(service)
    sessions = [await create(service, f"s{n}") for n in range(POOL_SIZE)]
    with server.rows_locked(url, "secure_sessions"):
        holding = [
            asyncio.ensure_future(service.append_event(one, event("text"))) for one in sessions
        ]
        await asyncio.sleep(0.2)
        waiting: set[asyncio.Task[Session]] = set()
        for moment in range(10):
            task = asyncio.ensure_future(reload(service, session))
            await asyncio.sleep(0.01 * (moment % 2))
            task.cancel()
            _, waiting = await asyncio.wait([task], timeout=5)
            if waiting:
                break
    await asyncio.gather(*holding)
    assert not waiting
