import asyncio
import inspect
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from google.adk.events.event import Event
from google.adk.sessions import BaseSessionService, Session
from sqlalchemy import URL, text
from sqlalchemy.ext.asyncio import create_async_engine

from adk_secure_sessions import AesGcmBackend, EncryptedSessionService
from tests.conformance.services import ENGINES, KEY, KINDS, Kind
from tests.conformance.support import (
    create,
    each_kind,
    event,
    find,
    ids,
    listed,
    only_ours,
    reference_lacks,
    reload,
    together,
)

# Their drivers and engines are tested by other kinds.
LATER = [
    "encrypted-cached-events",
    "encrypted-galera",
    "encrypted-pgbouncer-psycopg",
    "encrypted-mariadb-engine",
    "encrypted-packed",
    "encrypted-serializable-psycopg",
]
# What may depend on the driver or the engine.
ALSO = [
    "encrypted-fallback",
    "encrypted-key-database",
    "encrypted-mariadb",
    "encrypted-pgbouncer",
    "encrypted-postgresql-engine",
    "encrypted-psycopg",
    "encrypted-serializable",
]
BY_DRIVER = (
    "test_conversation_goes_on_in_a_new_service",
    "test_service_serves_event_loops_in_several_threads_at_once",
    "test_service_serves_one_event_loop_after_the_other",
)
kind = each_kind(
    *(name for name in KINDS if name not in [*LATER, *ALSO]),
    some=dict.fromkeys(ALSO, BY_DRIVER),
    soak=LATER,
)


@only_ours("about our class")
async def test_no_method_of_adks_base_class_is_inherited(service: BaseSessionService) -> None:
    public = {
        name
        for name, method in inspect.getmembers(BaseSessionService, inspect.isfunction)
        if not name.startswith("_")
    }
    assert public >= {"create_session", "get_session", "append_event"}
    for name in public:
        ours = inspect.getattr_static(type(service), name)
        assert ours is not inspect.getattr_static(BaseSessionService, name), name


@only_ours("about our class")
async def test_methods_take_the_arguments_that_adks_take(service: BaseSessionService) -> None:
    # Tests of the cache of events have subclasses of their own.
    ours = next(one for one in type(service).__mro__ if not one.__module__.startswith("tests"))
    for name, method in inspect.getmembers(BaseSessionService, inspect.isfunction):
        if not name.startswith("_"):
            expected = inspect.signature(method).parameters
            found = dict(inspect.signature(getattr(ours, name)).parameters)
            # create_session has one option that ADK does not have.
            more = {key: found.pop(key) for key in found.keys() - expected.keys()}
            for option in more.values():
                assert (name, option.name) == ("create_session", "expires_after")
                assert option.default is None
                assert option.kind is inspect.Parameter.KEYWORD_ONLY
            assert list(found) == list(expected), name
            for parameter in expected:
                assert found[parameter].kind == expected[parameter].kind, (name, parameter)
                assert found[parameter].default == expected[parameter].default, (name, parameter)


@reference_lacks("no flush", seen_in=(1, 33))
async def test_flush_has_nothing_to_wait_for(
    service: BaseSessionService, another_service: BaseSessionService
) -> None:
    await service.flush()
    session = await create(service)
    await service.append_event(session, event("text"))
    assert await reload(another_service, session) == session
    await service.flush()
    assert await reload(another_service, session) == session


@pytest.mark.no_tables
@only_ours("prepare_tables came late, and is called otherwise before")
async def test_preparing_tables_ahead_is_harmless_however_often(
    service: EncryptedSessionService,
) -> None:
    await service.prepare_tables()
    session = await create(service)
    await together(*(service.prepare_tables() for _ in range(3)))
    assert await reload(service, session) == session


async def test_conversation_goes_on_in_a_new_service(kind: Kind, url: URL) -> None:
    if not kind.is_shared:
        pytest.skip("a database in memory ends with its service")
    async with kind.open(url) as service:
        session = await create(service, state={"k": [1], "user:u": 1, "app:a": 1})
        await service.append_event(session, event("before", delta={"l": 2}))
    async with kind.open(url) as service:
        again = await reload(service, session)
        assert again == session
        # Also with a session object of the service that was closed.
        await service.append_event(session, event("after", delta={"m": 3}))
    async with kind.open(url) as service:
        assert await reload(service, session) == session
        assert await listed(service) == [session.model_copy(update={"events": []})]


async def test_two_services_see_each_others_sessions(
    service: BaseSessionService, another_service: BaseSessionService
) -> None:
    mine = await create(service, "mine", state={"app:a": 1, "user:u": 1})
    theirs = await create(another_service, "theirs", state={"app:b": 2, "user:v": 2})
    assert theirs.state == {"app:a": 1, "user:u": 1, "app:b": 2, "user:v": 2}
    await another_service.append_event(theirs, event("hello"))
    assert await reload(service, theirs) == theirs
    assert (await reload(another_service, mine)).state == theirs.state
    assert sorted(ids(await listed(service))) == ["mine", "theirs"]


async def test_service_finds_what_another_creates_later(
    service: BaseSessionService, another_service: BaseSessionService
) -> None:
    assert await listed(another_service, "new") == []  # and must not cache that
    session = await create(service, user_id="new", app_name="app", state={"user:u": 1})
    assert await reload(another_service, session) == session
    assert (await create(another_service, "other", user_id="new")).state == {"user:u": 1}


@only_ours("closing twice, and what happens then, is ours to promise")
async def test_closing_twice_is_harmless(service: EncryptedSessionService) -> None:
    await create(service)
    await service.close()
    await service.close()


@pytest.mark.parametrize("kind", ENGINES, indirect=True)
async def test_closing_leaves_the_callers_engine_open(url: URL) -> None:
    engine = create_async_engine(url)
    try:
        async with EncryptedSessionService(db_engine=engine, backend=AesGcmBackend(KEY)) as service:
            await create(service)
        async with engine.connect() as connection:
            assert (await connection.execute(text("SELECT 1"))).scalar() == 1
    finally:
        await engine.dispose()


@pytest.mark.parametrize(
    "template", ["sqlite+aiosqlite:///{}/x.db", "sqlite:///{}/x.db", "sqlite+aiosqlite:///:memory:"]
)
async def test_url_as_adks_users_write_them_is_understood(tmp_path: Path, template: str) -> None:
    url = template.format(tmp_path)
    async with EncryptedSessionService(url, AesGcmBackend(KEY)) as service:
        session = await create(service)
        await service.append_event(session, event("text"))
        assert await reload(service, session) == session
    assert (tmp_path / "x.db").exists() == ("x.db" in url)


def test_service_serves_one_event_loop_after_the_other(
    kind: Kind, service_of_no_loop: BaseSessionService
) -> None:
    """The synchronous `Runner.run` starts a loop for every call."""
    service = service_of_no_loop
    if kind.is_bound:
        pytest.skip("rejected, see on_servers/test_event_loops.py: connections belong to a loop")

    async def at_once() -> None:
        await together(
            *(append(service, session, event(str(n))) for n in range(5)),
            *(create(service, f"s{n}") for n in range(5)),
            *(listed(service) for n in range(5)),
        )

    session = asyncio.run(create(service, state={"n": -1}))
    for n in range(3):
        asyncio.run(append(service, session, event(str(n), delta={"n": n})))
    assert asyncio.run(reload(service, session)) == session
    asyncio.run(at_once())
    assert asyncio.run(reload(service, session)) == session
    assert len(session.events) == 8
    assert len(asyncio.run(listed(service))) == 6


def test_service_serves_event_loops_in_several_threads_at_once(
    kind: Kind, service_of_no_loop: BaseSessionService
) -> None:
    if not kind.is_threaded:
        pytest.skip("SQLAlchemy's async engines serve one event loop at a time")
    service = service_of_no_loop

    async def converse(n: int) -> Session:
        session = await create(service, f"s{n}", state={f"user:k{n}": n})
        for m in range(5):
            await service.append_event(session, event(f"{n} {m}", delta={"m": m}))
        return session

    with ThreadPoolExecutor(4) as threads:
        sessions = list(threads.map(lambda n: asyncio.run(converse(n)), range(8)))
    for session in sessions:
        again = asyncio.run(reload(service, session))
        assert again.events == session.events
        assert again.state == {f"user:k{n}": n for n in range(8)} | {"m": 4}


@reference_lacks("times go through the local time zone")
@pytest.mark.skipif(not hasattr(time, "tzset"), reason="the time zone cannot be set here")
async def test_hour_that_daylight_saving_repeats_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, service: BaseSessionService
) -> None:
    repeated = 1_730_611_800.0  # 2024-11-03 01:30 in New York, for the first time
    times = [repeated - 3600, repeated, repeated + 3600, repeated + 7200]
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        session = await create(service)
        for moment in times:
            await service.append_event(session, event(timestamp=moment))
        again = await reload(service, session)
        assert again == session
        assert [e.timestamp for e in again.events] == times
        assert again.last_update_time == times[-1]
        later = await reload(service, session, after_timestamp=times[2])
        assert [e.timestamp for e in later.events] == times[2:]
        monkeypatch.setenv("TZ", "Asia/Kolkata")
        time.tzset()
        assert await reload(service, session) == again
        await service.append_event(session, event("not stale"))
    finally:
        monkeypatch.undo()
        time.tzset()


async def test_readers_beside_a_writer_see_a_beginning_of_its_events(
    service: BaseSessionService,
) -> None:
    session = await create(service)

    async def write() -> list[Session]:
        for n in range(5):
            await service.append_event(session, event(str(n)))
        return []

    reads = (reload(service, session) for _ in range(50))
    _, read = await together(write(), together(*reads))
    for seen in read:
        assert ids(seen.events) == ids(session.events)[: len(seen.events)]
    assert await find(service, session) == session


async def append(service: BaseSessionService, session: Session, appended: Event) -> Event:
    return await service.append_event(session, appended)
