"""`PlaintextFallbackService`: a database and a plaintext source of which a part was copied.

`opened` opens a service on the database of the test, like one more process that uses it.
"""

import asyncio
import logging
import random
import socket
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from google.adk.errors.already_exists_error import AlreadyExistsError
from google.adk.errors.session_not_found_error import SessionNotFoundError
from google.adk.events.event import Event
from google.adk.events.event_actions import EventActions
from google.adk.sessions import BaseSessionService, InMemorySessionService, Session
from google.adk.sessions.base_session_service import GetSessionConfig

from adk_secure_sessions import (
    AesGcmBackend,
    ConfigurationError,
    DatabaseError,
    EncryptedSessionService,
)
from adk_secure_sessions.migration import Package1xTables
from adk_secure_sessions.migration.adk_tables import AdkTables
from adk_secure_sessions.migration.fallback import PlaintextFallbackService
from adk_secure_sessions.migration.sources import Unreadable
from adk_secure_sessions.service import StaleSessionError
from adk_secure_sessions.storage.features.imports import ImportStatus
from tests.cli.support import make_adk_tables
from tests.migration.lookups import APP, START, MemoryLookup, said

KEY = bytes(range(32))
ADA: dict[str, Any] = {"app_name": APP, "user_id": "ada"}
VISIT: dict[str, Any] = {**ADA, "session_id": "visit"}
OTHER: dict[str, Any] = {**ADA, "session_id": "other"}
Open = Callable[[], PlaintextFallbackService]


@pytest.fixture
def source() -> MemoryLookup:
    """Two sessions of ada, with states."""
    source = MemoryLookup()
    source.put("ada", "visit", ["one", "two", "three"], step=3)
    source.put("ada", "other", ["hello"], step=1)
    source.users["ada"] = {"language": "en"}
    source.app = {"greeting": "hi"}
    return source


@pytest.fixture
async def encrypted(tmp_path: Path) -> AsyncIterator[Callable[..., EncryptedSessionService]]:
    url = f"sqlite+aiosqlite:///{tmp_path}/sessions.db"
    async with AsyncExitStack() as stack:

        def open_service(**options: Any) -> EncryptedSessionService:
            service = EncryptedSessionService(url, AesGcmBackend(KEY), **options)
            stack.push_async_callback(service.close)
            return service

        yield open_service


@pytest.fixture
def opened(encrypted: Callable[..., EncryptedSessionService], source: MemoryLookup) -> Open:
    return lambda: PlaintextFallbackService(encrypted(), source)


@pytest.fixture
def service(opened: Open) -> PlaintextFallbackService:
    return opened()


def changing(text: str, seconds: float, **delta: object) -> Event:
    """An event that also changes states."""
    named = {key.replace("__", ":"): value for key, value in delta.items()}
    return said(text, seconds, actions=EventActions(state_delta=named))


async def get(service: BaseSessionService, ids: dict[str, Any] = VISIT, **config: Any) -> Session:
    options = GetSessionConfig(**config) if config else None
    found = await service.get_session(**ids, config=options)
    assert found is not None, "the session is missing"
    return found


def texts(session: Session) -> list[str]:
    return [event.content.parts[0].text for event in session.events]  # type: ignore[union-attr, index, misc]


async def listed(service: BaseSessionService, user_id: str | None = "ada") -> list[str]:
    response = await service.list_sessions(app_name=APP, user_id=user_id)
    assert all(session.events == [] for session in response.sessions)
    return [session.id for session in response.sessions]


# --- Reading --------------------------------------------------------------------------------------


async def test_session_that_was_not_copied_is_copied_when_it_is_read(
    service: PlaintextFallbackService, encrypted: Callable[..., EncryptedSessionService]
) -> None:
    session = await get(service)
    assert texts(session) == ["one", "two", "three"]
    assert session.state == {"step": 3, "user:language": "en", "app:greeting": "hi"}
    assert session.last_update_time == START + 3
    assert (session.app_name, session.user_id, session.id) == (APP, "ada", "visit")
    assert await get(encrypted()) == session
    assert await encrypted().get_session(**OTHER) is None
    assert (await get(service, OTHER, num_recent_events=0)).events == []
    assert await service.get_session(**{**VISIT, "session_id": "nobody's"}) is None
    assert service.copied_sessions == 2


@pytest.mark.parametrize("user_id", ["ada", None])
async def test_listing_merges_both_sides_without_doubles(
    service: PlaintextFallbackService, source: MemoryLookup, user_id: str | None
) -> None:
    source.put("ada", "late", ["x"] * 5)
    await service.append_event(await get(service, OTHER), said("two", 2))
    await service.create_session(**ADA, session_id="new")
    await service.delete_session(**VISIT)
    assert await listed(service, user_id) == ["other", "late", "new"]
    response = await service.list_sessions(app_name=APP, user_id=user_id)
    for session in response.sessions:
        assert session.state["user:language"] == "en"
        assert session.state["app:greeting"] == "hi"
    source.put("bob", "bobs")
    source.users["bob"] = {"language": "pt"}
    response = await service.list_sessions(app_name=APP)
    assert response.sessions[0].state == {"user:language": "pt", "app:greeting": "hi"}
    assert [one.id for one in response.sessions] == ["bobs", "other", "late", "new"]
    assert service.copied_sessions == 1, "a listing copies no sessions"


async def test_listing_reads_all_users_states_at_once(
    service: PlaintextFallbackService, source: MemoryLookup
) -> None:
    for number in range(5):
        source.put(f"user{number}", "s")
        source.users[f"user{number}"] = {"n": number}
    response = await service.list_sessions(app_name=APP)
    found = {one.user_id: one.state.get("user:n") for one in response.sessions}
    assert found == {"ada": None} | {f"user{number}": number for number in range(5)}
    assert source.queried.count("states") == 1
    assert "user_state" not in source.queried


async def test_session_that_cannot_be_read_is_reported_and_can_be_skipped(
    service: PlaintextFallbackService,
    source: MemoryLookup,
    encrypted: Callable[..., EncryptedSessionService],
) -> None:
    source.unreadable.add(("ada", "visit"))
    reason = "a session of the plaintext source cannot be read: its state is not JSON"
    calls = service.get_session(**VISIT), service.list_sessions(**ADA)
    for call in (*calls, service.create_session(**VISIT)):
        with pytest.raises(ConfigurationError, match=reason):
            await call
    skipping = encrypted(skip_unreadable_sessions=True)
    async with PlaintextFallbackService(skipping, source) as second:
        assert await listed(second) == ["other"]
    await service.delete_session(**VISIT)
    assert await listed(service) == ["other"]


async def test_listing_leaves_out_the_sessions_of_a_user_whose_state_cannot_be_read(
    service: PlaintextFallbackService,
    source: MemoryLookup,
    encrypted: Callable[..., EncryptedSessionService],
) -> None:
    for user_id in ("bob", "carl"):
        source.put(user_id, f"{user_id}s")
    await get(service, {**ADA, "user_id": "bob", "session_id": "bobs"})
    await get(service)
    source.users["carl"] = Unreadable("its state is not JSON")
    with pytest.raises(ConfigurationError, match="a state of the plaintext source cannot be read"):
        await listed(service, None)
    skipping = encrypted(skip_unreadable_sessions=True)
    async with PlaintextFallbackService(skipping, source) as second:
        for _ in range(2):
            assert await listed(second, None) == ["bobs", "other", "visit"]
        assert await listed(second, "carl") == []
        with pytest.raises(ConfigurationError, match="a state of the plaintext source"):
            await second.get_session(app_name=APP, user_id="carl", session_id="carls")


async def test_copied_sessions_expire_as_those_that_migrate_copies(
    encrypted: Callable[..., EncryptedSessionService], source: MemoryLookup, tmp_path: Path
) -> None:
    visit, content = source.sessions_by_ids["ada", "visit"]
    now = time.time_ns() // 1000
    source.sessions_by_ids["ada", "visit"] = visit, content._replace(updated_at=now)
    expiring = encrypted(expires_after=timedelta(hours=1))
    async with PlaintextFallbackService(expiring, source) as service:
        assert await listed(service) == ["visit"], "the other session has expired"
        assert await service.get_session(**OTHER) is None
        assert len((await get(service)).events) == 3
        assert (await service.create_session(**OTHER)).state.keys().isdisjoint({"step"})
        source.put("ada", "third", step=1)
        await service.create_session(**ADA, session_id="third")
        with pytest.raises(AlreadyExistsError):
            await service.create_session(**VISIT)
    with closing(sqlite3.connect(tmp_path / "sessions.db")) as connection:
        query = "SELECT expires_at - updated_at FROM secure_sessions"
        assert connection.execute(query).fetchall() == [(3600 * 1_000_000,)] * 3


async def test_plaintext_database_that_hangs_is_an_error_without_its_password(
    encrypted: Callable[..., EncryptedSessionService],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:  # it never answers
        port = server.getsockname()[1]
        source = AdkTables(f"postgresql+asyncpg://reader:needle@127.0.0.1:{port}/adk?ssl=disable")
        async with PlaintextFallbackService(encrypted(), source, read_timeout=0.2) as service:
            for call in (
                service.get_session(**VISIT),
                service.list_sessions(**ADA),
                service.create_session(**VISIT),
                service.delete_session(**VISIT),
                service.get_user_state(**ADA),
            ):
                with pytest.raises(DatabaseError) as raised:
                    await asyncio.wait_for(call, 20)
                assert raised.value.retryable
                assert f"(postgresql+asyncpg://127.0.0.1:{port}/adk)" in str(raised.value)
                assert "needle" not in str(raised.value)


async def test_read_of_the_source_that_never_ends_is_interrupted(
    encrypted: Callable[..., EncryptedSessionService], tmp_path: Path
) -> None:
    path = tmp_path / "adk.db"
    make_adk_tables(path)
    source = AdkTables(f"sqlite:///{path}")
    names = ("app_name", "user_id", "id", "state", "create_time", "update_time")
    columns = ", ".join(f"'-' || n AS {name}" for name in names)
    endless = f"WITH RECURSIVE e(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM e) SELECT {columns}"
    async with PlaintextFallbackService(encrypted(), source, read_timeout=0.2) as service:
        assert await service.get_session(**VISIT) is None
        with closing(sqlite3.connect(path)) as connection:
            connection.executescript(
                f"DROP TABLE sessions; CREATE VIEW sessions AS {endless} FROM e"
            )
        with pytest.raises(
            DatabaseError, match=r"the plaintext source \(sqlite:.*adk.db\): a read"
        ):
            await service.get_session(**VISIT)


# --- Writing --------------------------------------------------------------------------------------


async def test_append_to_a_listed_session_copies_it(
    service: PlaintextFallbackService, encrypted: Callable[..., EncryptedSessionService]
) -> None:
    session = (await service.list_sessions(**ADA)).sessions[1]
    event = changing("four", 4, step=4, user__language="de")
    assert await service.append_event(session, event) is event
    assert texts(session) == ["four"]
    assert session.state["step"] == 4
    for reader in (service, encrypted()):
        stored = await get(reader)
        assert texts(stored) == ["one", "two", "three", "four"]
        assert stored.state == {"step": 4, "user:language": "de", "app:greeting": "hi"}
    assert await encrypted().get_session(**OTHER) is None
    await service.append_event(session, said("five", 5))  # with the marker of the copied session
    assert len((await get(service)).events) == 5
    assert service.copied_sessions == 1


async def test_states_that_were_copied_count_for_sessions_of_the_source(
    service: PlaintextFallbackService, opened: Open, source: MemoryLookup
) -> None:
    event = changing("four", 4, user__language="de", app__greeting="hallo")
    await service.append_event(await get(service), event)
    source.users["ada"] = {"language": "changed"}
    source.app = {"greeting": "changed"}
    for reader in (service, opened()):
        other = await get(reader, OTHER)
        assert other.state == {"step": 1, "user:language": "de", "app:greeting": "hallo"}
        response = await reader.list_sessions(**ADA)
        assert [one.state for one in response.sessions if one.id == "other"] == [other.state]


async def test_copied_session_shows_states_that_were_not_copied(
    service: PlaintextFallbackService, source: MemoryLookup
) -> None:
    """`migrate` copies the sessions first, and the states at its end."""
    found = await source.find(APP, "ada", "visit")
    assert found
    content = (await source.read([found]))[found]
    result = await service._imports.import_session(
        APP, "ada", "visit", state=b'{"step": 3}', events=[], created_at=0,
        updated_at=content.updated_at, source_etag="1",  # type: ignore[union-attr]
    )  # fmt: skip
    assert result is ImportStatus.NEW
    response = await service.list_sessions(**ADA)
    expected = {"step": 3, "user:language": "en", "app:greeting": "hi"}
    assert [one.state for one in response.sessions if one.id == "visit"] == [expected]
    session = await get(service)
    assert session.state == expected
    assert await service.get_user_state(**ADA) == {"language": "en"}
    await service.append_event(session, changing("one", 9, user__size=2))
    assert await service.get_user_state(**ADA) == {"language": "en", "size": 2}


async def test_object_listed_before_another_process_copied_the_session_can_be_appended_to(
    service: PlaintextFallbackService, opened: Open
) -> None:
    session = (await service.list_sessions(**ADA)).sessions[1]
    await get(opened())
    await service.append_event(session, said("four", 4))
    assert texts(await get(service)) == ["one", "two", "three", "four"]


async def test_object_of_another_service_is_stale(
    service: PlaintextFallbackService,
) -> None:
    session = await get(service)
    session._storage_update_marker = "2026-01-01T00:00:00"  # of google-adk
    with pytest.raises(StaleSessionError):
        await service.append_event(session, said("four", 4))


@pytest.mark.parametrize("known", [["three"], ["two"]])
async def test_rebuilt_object_is_compared_by_its_last_event(
    service: PlaintextFallbackService, known: list[str]
) -> None:
    session = await get(service)
    rebuilt = Session.model_validate_json(session.model_dump_json())
    rebuilt.events = [event for event in rebuilt.events if event.id == f"id of {known[0]}"]
    if known == ["three"]:
        await service.append_event(rebuilt, changing("four", 4, user__size=1))
        assert (await get(service)).state["user:language"] == "en"
    else:
        with pytest.raises(StaleSessionError):
            await service.append_event(rebuilt, said("four", 4))


async def test_rebuilt_object_of_a_new_session_keeps_the_users_state(
    service: PlaintextFallbackService, encrypted: Callable[..., EncryptedSessionService]
) -> None:
    created = await encrypted().create_session(app_name=APP, user_id="bob", session_id="new")
    service._source.users["bob"] = {"language": "pt"}  # type: ignore[attr-defined]
    rebuilt = Session.model_validate_json(created.model_dump_json())
    await service.append_event(rebuilt, changing("one", 1, user__size=1))
    state = await service.get_user_state(app_name=APP, user_id="bob")
    assert state == {"language": "pt", "size": 1}


async def test_partial_event_copies_nothing(service: PlaintextFallbackService) -> None:
    session = (await service.list_sessions(**ADA)).sessions[1]
    await service.append_event(session, said("part", 4, partial=True))
    assert service.copied_sessions == 0


async def test_state_that_a_plain_service_has_written_is_kept(
    service: PlaintextFallbackService,
    encrypted: Callable[..., EncryptedSessionService],
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain = encrypted()
    await plain.create_session(**ADA, session_id="new", state={"user:language": "pt"})
    for _ in range(2):
        assert (await get(service)).state["user:language"] == "pt"
        assert await service.get_user_state(**ADA) == {"language": "pt"}
        assert {
            one.state["user:language"] for one in (await service.list_sessions(**ADA)).sessions
        } == {"pt"}
        await service.append_event(await get(service), said("four", 4))
        service._runner.empty_caches()  # as when they expire
    assert caplog.text.count("the state in the plaintext source is not used") == 1


# --- Deleting -------------------------------------------------------------------------------------


async def test_deleting_an_unknown_session_stores_nothing(
    service: PlaintextFallbackService,
) -> None:
    ids = (APP, "ada", "unknown")
    await service.delete_session(app_name=APP, user_id="ada", session_id="unknown")
    assert await service._imports.rows_for([ids]) == {}


# --- Two processes --------------------------------------------------------------------------------


def once(name: str, work: Callable[[], Awaitable[object]]) -> Callable[[str], Awaitable[None]]:
    """Return a `before` that awaits *work* before the first query of the method *name*."""
    done: list[str] = []

    async def before(query: str) -> None:
        if query == name and not done:
            done.append(query)
            await work()

    return before


@pytest.mark.in_turn("query", "is_deleted")
@pytest.mark.parametrize("query", ["find", "read", "app_state", "user_state"])
@pytest.mark.parametrize("is_deleted", [False, True])
async def test_session_that_is_copied_during_a_read_is_read_again(
    service: PlaintextFallbackService,
    opened: Open,
    source: MemoryLookup,
    query: str,
    is_deleted: bool,
) -> None:
    other = opened()

    async def copy() -> None:
        event = changing("four", 4, user__language="de")
        await other.append_event(await get(other), event)
        if is_deleted:
            await other.delete_session(**VISIT)

    source.before = once(query, copy)
    found = await service.get_session(**VISIT)
    if is_deleted:
        assert found is None
    else:
        assert found is not None
        assert texts(found) == ["one", "two", "three", "four"]
        assert found.state["user:language"] == "de"
        assert found == await get(other)


@pytest.mark.parametrize("query", ["headers", "app_state", "user_state"])
async def test_session_that_is_copied_during_a_listing_is_listed_once(
    service: PlaintextFallbackService, opened: Open, source: MemoryLookup, query: str
) -> None:
    other = opened()

    async def copy() -> None:
        event = changing("four", 4, user__language="de")
        await other.append_event(await get(other), event)

    source.before = once(query, copy)
    assert sorted(await listed(service)) == ["other", "visit"]
    assert await listed(service) == ["other", "visit"]


@pytest.mark.parametrize("query", ["find", "read", "app_state", "user_state"])
async def test_session_that_is_deleted_during_its_copy_is_not_found(
    service: PlaintextFallbackService, opened: Open, source: MemoryLookup, query: str
) -> None:
    other = opened()
    session = Session(id="visit", app_name=APP, user_id="ada", last_update_time=START + 3)
    source.before = once(query, lambda: other.delete_session(**VISIT))
    with pytest.raises(SessionNotFoundError):
        await service.append_event(session, said("four", 4))
    assert await service.get_session(**VISIT) is None


async def test_append_to_a_session_of_an_unknown_user_stores_nothing_of_the_user(
    service: PlaintextFallbackService, tmp_path: Path
) -> None:
    session = Session(id="none", app_name=APP, user_id="nobody")
    with pytest.raises(SessionNotFoundError):
        await service.append_event(session, said("one", 1))
    with closing(sqlite3.connect(tmp_path / "sessions.db")) as connection:
        for table, number in (("users", 0), ("data_keys", 1), ("migrated", 1)):  # of the app
            query = f"SELECT count(*) FROM secure_{table}"
            assert connection.execute(query).fetchone() == (number,), table


@pytest.mark.parametrize("query", ["app_state", "user_state"])
async def test_states_are_copied_once(
    service: PlaintextFallbackService, opened: Open, source: MemoryLookup, query: str
) -> None:
    other = opened()

    async def write() -> None:
        event = changing("two", 2, user__language="de", app__greeting="hallo")
        await other.append_event(await get(other, OTHER), event)

    source.before = once(query, write)
    await service.append_event(await get(service), said("four", 4))
    assert (await get(service)).state == {
        "step": 3,
        "user:language": "de",
        "app:greeting": "hallo",
    }


# --- The end of the migration ---------------------------------------------------------------------


async def test_complete_migration_ends_fallback(
    service: PlaintextFallbackService,
    opened: Open,
    source: MemoryLookup,
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = await get(service)
    await service._copy_session((APP, "ada", "visit"))
    await service._imports.store_mark()
    second = opened()
    await second.prepare_tables()
    assert "the migration is complete" in caplog.text
    source.queried.clear()
    assert await second.get_session(**OTHER) is None
    assert await listed(second, None) == ["visit"]
    await second.append_event(before, said("four", 4))
    await second.create_session(**OTHER)
    await second.delete_session(**OTHER)
    assert await second.get_user_state(**ADA) == {"language": "en"}
    assert (second.fallback_reads, source.queried) == (0, [])


async def test_running_service_stops_reading_when_its_keyring_is_renewed(
    service: PlaintextFallbackService, source: MemoryLookup
) -> None:
    await get(service)
    await service._imports.store_mark()
    runner = service._runner
    keys = await runner.database_keys()
    await runner.reread_keyring(keys, keys.keyring)
    source.queried.clear()
    assert await service.get_session(**OTHER) is None
    assert source.queried == []


# --- What can be seen of it -----------------------------------------------------------------------


async def test_reads_of_the_source_are_counted_and_logged(
    service: PlaintextFallbackService, source: MemoryLookup, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "adk_secure_sessions")
    await service.prepare_tables()
    warnings = [one.message for one in caplog.records if one.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "plaintext fallback is switched on" in warnings[0]
    assert "a source in memory" in warnings[0]
    assert service.fallback_reads == 0
    await get(service)
    assert service.fallback_reads == len(source.queried) == 4
    await service.list_sessions(**ADA)
    await service.append_event(await get(service), said("four", 4))
    assert service.fallback_reads == len(source.queried)
    reads = service.fallback_reads
    await get(service)
    assert service.fallback_reads == reads, "nothing of this session is read from the source"
    assert caplog.text.count("plaintext fallback is switched on") == 1
    assert caplog.text.count("reads of the source so far") == 1
    for needle in ("ada", "visit", "language", "three"):
        assert needle not in caplog.text


def test_arguments_are_checked(source: MemoryLookup) -> None:
    with pytest.raises(ConfigurationError, match="service must be an EncryptedSessionService"):
        PlaintextFallbackService(InMemorySessionService(), source)  # type: ignore[arg-type]
    service = EncryptedSessionService(":memory:", AesGcmBackend(KEY))
    with pytest.raises(ConfigurationError, match="source must be an AdkTables"):
        PlaintextFallbackService(service, InMemorySessionService())  # type: ignore[arg-type]
    of_1x = Package1xTables("postgresql+asyncpg://unused.invalid/clinic", ["passphrase"])
    with pytest.raises(ConfigurationError, match="is not plaintext: stop the application"):
        PlaintextFallbackService(service, of_1x)


# --- Everything together --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "seed", [1, 2, *(pytest.param(n, marks=pytest.mark.soak) for n in range(3, 60))]
)
async def test_application_sees_no_difference_to_a_database_that_was_copied_before(
    opened: Open, source: MemoryLookup, seed: int
) -> None:
    """Random operations of three processes, while sessions and states are copied."""
    choice = random.Random(seed)
    users = ["ada", "bob", "cyd"]
    for user in users[1:]:
        for number in range(3):
            source.put(user, f"s{number}", ["x"] * number, n=number)
        source.users[user] = {"name": user}
    # The model: everything is copied before anything happens.
    model = EncryptedSessionService(":memory:", AesGcmBackend(KEY))
    first = PlaintextFallbackService(model, source)
    for user, session_id in source.sessions_by_ids:
        await first._copy_session((APP, user, session_id))
    await first._copy_states(APP, *users)
    services = [opened() for _ in range(3)]
    clock = START + 100
    for _ in range(60):
        service = choice.choice(services)
        user = choice.choice(users)
        session_id = choice.choice(["visit", "other", "s0", "s1", "s2", "new"])
        ids: dict[str, Any] = {"app_name": APP, "user_id": user, "session_id": session_id}
        clock += 1
        operation = choice.choice(
            ["append", "append", "create", "delete", "list", "list all", "state", "copy", "states"]
        )
        if operation == "append":
            pair = [await one.get_session(**ids) for one in (service, model)]
            assert _shown(pair[0]) == _shown(pair[1])
            both: tuple[BaseSessionService, ...] = (services[clock % 3], model)
            for one, session in zip(both, pair, strict=True):
                if session is not None:
                    delta = {"n": clock, f"user:k{clock % 3}": clock, f"app:k{clock % 2}": clock}
                    event = said(f"at {clock}", clock, actions=EventActions(state_delta=delta))
                    await one.append_event(session, event)
        elif operation == "create":
            results = []
            for one in (service, model):
                try:
                    made = await one.create_session(**ids, state={"user:made": clock, "n": 1})
                    results.append(made.state)
                except AlreadyExistsError:
                    results.append({})
            assert results[0] == results[1]
        elif operation == "delete":
            for one in (service, model):
                await one.delete_session(**ids)
        elif operation in ("list", "list all"):
            whose = user if operation == "list" else None
            responses = [
                await one.list_sessions(app_name=APP, user_id=whose) for one in (service, model)
            ]
            shown = [
                sorted((one.user_id, one.id, str(_shown(one))) for one in response.sessions)
                for response in responses
            ]
            assert shown[0] == shown[1]
        elif operation == "state":
            states = [
                await one.get_user_state(app_name=APP, user_id=user) for one in (service, model)
            ]
            assert states[0] == states[1]
        elif operation == "copy":  # as `migrate` does it: without the states
            await service._copy_session((APP, user, session_id))
        else:
            await service._copy_states(APP, user)
    await model.close()


def _shown(session: Session | None) -> object:
    if session is None:
        return None
    state = dict(sorted(session.state.items()))
    return session.user_id, session.id, state, [event.id for event in session.events]
