"""The pool of connections, and the options that an application has for it."""

import asyncio
from typing import Any

import pytest
from sqlalchemy import URL
from sqlalchemy.pool import AsyncAdaptedQueuePool, NullPool

from adk_secure_sessions import AesGcmBackend, DatabaseError, EncryptedSessionService
from tests.conformance.services import KEY
from tests.conformance.support import create, each_kind, event, reload, together
from tests.reliability.results import Record, database_of
from tests.servers import Server

kind = each_kind("encrypted-postgresql", soak=["encrypted-mariadb"])


def open_service(url: URL, **options: Any) -> EncryptedSessionService:
    return EncryptedSessionService(url, AesGcmBackend(KEY), **options)


async def converse(service: EncryptedSessionService, n: int) -> None:
    session = await create(service, f"s{n}", user_id=f"u{n % 3}")
    for m in range(4):
        delta = {"k": m, "user:k": n, "app:k": m}
        await service.append_event(session, event(f"{n} {m}", delta=delta))
        assert (await reload(service, session)).events == session.events


async def test_many_tasks_share_few_connections(url: URL, server: Server) -> None:
    seen: list[int] = []

    async def watch(working: "asyncio.Future[Any]") -> None:
        while not working.done():
            seen.append(len(await asyncio.to_thread(server.connections, url)))

    async with open_service(url, pool_size=2) as service:
        working = asyncio.ensure_future(together(*(converse(service, n) for n in range(50))))
        await asyncio.gather(working, watch(working))
    assert max(seen) == 2
    while server.connections(url):  # closed by now, but the server may not have noticed
        await asyncio.sleep(0.01)


async def test_waiting_too_long_for_a_connection_is_an_error_that_says_what_to_do(
    url: URL, server: Server, record: Record
) -> None:
    async with open_service(url, pool_size=1, pool_timeout=0.2) as service:
        session = await create(service)
        with server.rows_locked(url, "secure_sessions"):
            holding = asyncio.ensure_future(service.append_event(session, event("waits")))
            await asyncio.sleep(0.1)
            with pytest.raises(DatabaseError, match="raise pool_size") as raised:
                await asyncio.wait_for(reload(service, session), 30)
        await holding
        assert await reload(service, session) == session
    name = f"pool exhausted/{database_of(url)}"
    record.fault(name, times=1, acknowledged=2, errors=[raised.value])


@pytest.mark.parametrize(
    "options",
    [
        {"poolclass": NullPool},
        {"poolclass": AsyncAdaptedQueuePool, "pool_size": 1},
        {"isolation_level": "READ COMMITTED"},
        *(
            pytest.param(options, marks=pytest.mark.soak)
            for options in (
                {"pool_pre_ping": True},
                {"pool_recycle": 0},
                {"pool_recycle": 3600, "pool_size": 2, "max_overflow": 1},
                {"max_overflow": 3, "pool_size": 1},
                {"pool_size": 3, "pool_timeout": 5, "pool_use_lifo": True},
                {"echo": False, "execution_options": {}},
            )
        ),
    ],
    ids=str,
)
async def test_option_of_sqlalchemy_s_pool_works(
    url: URL, server: Server, options: dict[str, Any]
) -> None:
    async with open_service(url, **options) as service:
        await together(*(converse(service, n) for n in range(6)))
        server.kill(url)
        await together(*(converse(service, n + 6) for n in range(6)))
        if options.get("poolclass") is NullPool:
            while server.connections(url):
                await asyncio.sleep(0.01)
