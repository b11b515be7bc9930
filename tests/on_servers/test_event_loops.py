"""One service in several event loops, one after the other and at the same time."""

import asyncio
import gc
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from google.adk.sessions import Session
from sqlalchemy import URL
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool

from adk_secure_sessions import AesGcmBackend, ConfigurationError, EncryptedSessionService
from tests.conformance.services import KEY
from tests.conformance.support import create, each_kind, event, reload
from tests.servers import Server

kind = each_kind("encrypted-postgresql", soak=["encrypted-mariadb", "encrypted-psycopg"])


def by_url(url: URL) -> EncryptedSessionService:
    return EncryptedSessionService(url, AesGcmBackend(KEY))


def by_engine(engine: AsyncEngine) -> EncryptedSessionService:
    return EncryptedSessionService(db_engine=engine, backend=AesGcmBackend(KEY))


async def go_on(service: EncryptedSessionService, session: Session | None) -> Session:
    """Read and append, by several tasks."""
    session = session or await create(service)
    await asyncio.gather(
        *(service.append_event(session, event(str(n), delta={"user:k": n})) for n in range(4)),
        *(reload(service, session) for _ in range(4)),
    )
    assert await reload(service, session) == session
    return session


def all_gone(server: Server, url: URL) -> bool:
    """Return whether the server soon has no connection to *url* any more."""
    for _ in range(200):
        gc.collect()
        if not server.connections(url):
            return True
        threading.Event().wait(0.05)
    return False


@pytest.fixture(scope="module", autouse=True)
def _only_new_objects_are_collected() -> None:
    """Make the collections below fast: they need not search what was there before the tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def no_resource_is_left() -> Callable[[], None]:
    """A function that fails if a socket or an event loop was not closed."""

    def check() -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            gc.collect()
        assert [str(one.message) for one in caught] == []

    return check


def test_each_loop_has_connections_of_its_own_and_closes_them_at_its_end(
    url: URL, server: Server, no_resource_is_left: Callable[[], None]
) -> None:
    service, session = by_url(url), None
    for _ in range(3):
        session = asyncio.run(go_on(service, session))
        assert all_gone(server, url)
        no_resource_is_left()
    assert session is not None
    assert len(session.events) == 12


def test_loop_that_ends_with_an_error_or_with_tasks_closes_its_connections_too(
    url: URL, server: Server, no_resource_is_left: Callable[[], None]
) -> None:
    service = by_url(url)
    session = asyncio.run(go_on(service, None))

    async def fail() -> None:
        await reload(service, session)
        calls = [reload(service, session) for _ in range(5)]
        left = [asyncio.ensure_future(call) for call in calls]
        appending = asyncio.ensure_future(service.append_event(session, event("left")))
        await asyncio.sleep(0)
        assert not any(task.done() for task in (appending, *left))
        raise RuntimeError("the caller's")

    for _ in range(3):
        with pytest.raises(RuntimeError, match="the caller's"):
            asyncio.run(fail())
        assert all_gone(server, url)
        no_resource_is_left()
    session = asyncio.run(reload(service, session))
    asyncio.run(go_on(service, session))


def test_service_is_closed_after_a_loop_that_was_closed_with_a_write_pending(
    url: URL, server: Server
) -> None:
    service, loop = by_url(url), asyncio.new_event_loop()
    loop.set_exception_handler(lambda *_: None)  # at the end, it logs that a task was pending
    session = loop.run_until_complete(create(service))
    with server.rows_locked(url, "secure_sessions"):
        left = loop.create_task(service.append_event(session, event("left")))
        loop.run_until_complete(asyncio.sleep(0.3))
        loop.close()
        asyncio.run(asyncio.wait_for(service.close(), 30))
    assert not left.done()
    asyncio.run(reload(service, session))


def test_service_with_an_engine_is_closed_after_its_loop_was_closed(url: URL) -> None:
    engine = create_async_engine(url)
    service = by_engine(engine)

    async def use() -> None:
        await create(service)
        await engine.dispose()

    asyncio.run(use())
    asyncio.run(service.close())


@pytest.mark.filterwarnings("ignore:(unclosed|.* was deleted while still open):ResourceWarning")
def test_service_is_closed_in_one_loop_and_opened_again_in_the_next(
    url: URL, server: Server, no_resource_is_left: Callable[[], None]
) -> None:
    service, session = by_url(url), None

    async def go_on_and_close() -> Session:
        async with service:
            return await go_on(service, session)

    for _ in range(3):
        session = asyncio.run(go_on_and_close())
        assert all_gone(server, url)
    loop = asyncio.new_event_loop()
    loop.run_until_complete(go_on(service, session))
    loop.close()  # without `shutdown_asyncgens`, which `asyncio.run` calls
    asyncio.run(service.close())  # in a loop that never used it
    assert all_gone(server, url)
    asyncio.run(service.close())
    no_resource_is_left()


def test_loops_at_once_in_two_threads_work_or_are_rejected(url: URL, server: Server) -> None:
    service = by_url(url)
    first_is_in, second_is_done = threading.Event(), threading.Event()
    outcomes: list[Any] = []

    async def hold() -> Session:
        session = await create(service)
        with server.rows_locked(url, "secure_sessions"):
            task = asyncio.ensure_future(service.append_event(session, event("first")))
            await asyncio.sleep(0.1)
            first_is_in.set()
            await asyncio.to_thread(second_is_done.wait, 30)
        await task
        return await go_on(service, session)

    def second() -> None:
        first_is_in.wait(30)
        try:
            outcomes.append(asyncio.run(create(service, "another")))
        except Exception as error:
            outcomes.append(error)
        second_is_done.set()

    thread = threading.Thread(target=second)
    thread.start()
    session = asyncio.run(hold())
    thread.join(30)
    (outcome,) = outcomes
    if not isinstance(outcome, Session):
        assert isinstance(outcome, ConfigurationError)
        assert "another event loop" in str(outcome)
    assert len(session.events) == 5
    assert asyncio.run(reload(service, session)) == session
    assert all_gone(server, url)


def test_loops_that_take_turns_leave_no_connections_behind_or_are_rejected(
    url: URL, server: Server
) -> None:
    """Two threads, each with an event loop, may never be inside the service at once."""
    service = by_url(url)
    with asyncio.Runner() as one, asyncio.Runner() as other:
        session = one.run(create(service))
        rejection = "another event loop"  # unless there is one with another text
        for _ in range(30):
            try:
                other.run(reload(service, session))
            except ConfigurationError as error:
                rejection = str(error)
                break
            one.run(reload(service, session))
        assert "event loop" in rejection
        assert len(server.connections(url)) < 10
        one.run(go_on(service, session))
    assert all_gone(server, url)


def test_engine_in_a_second_loop_is_rejected_with_advice(url: URL) -> None:
    async def first() -> tuple[AsyncEngine, EncryptedSessionService, Session]:
        engine = create_async_engine(url)
        service = by_engine(engine)
        session = await go_on(service, None)
        await engine.dispose()  # which the service cannot know
        return engine, service, session

    engine, service, session = asyncio.run(first())
    with pytest.raises(ConfigurationError, match=r"db_url.*|NullPool"):
        asyncio.run(go_on(service, session))

    async def again() -> None:
        await go_on(by_engine(engine), session)
        await engine.dispose()

    asyncio.run(again())


def test_engine_without_a_pool_serves_one_loop_after_the_other(
    url: URL, server: Server, no_resource_is_left: Callable[[], None]
) -> None:
    engine = create_async_engine(url, poolclass=NullPool)
    service, session = by_engine(engine), None
    for _ in range(3):
        session = asyncio.run(go_on(service, session))
        assert all_gone(server, url)
        no_resource_is_left()
