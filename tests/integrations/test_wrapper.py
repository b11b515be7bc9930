"""`EncryptedSessionWrapper` before ADK's session services: use, secrecy, erasure, rotations."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from google.adk.errors.session_not_found_error import SessionNotFoundError
from google.adk.events import Event
from google.adk.sessions import BaseSessionService, InMemorySessionService, Session

from adk_secure_sessions import (
    AesGcmBackend,
    ConfigurationError,
    EncryptedSessionWrapper,
    FernetBackend,
    UnknownKeyError,
    WrongKeyError,
)
from adk_secure_sessions.maintenance import Database, erase_user, retire, separate, verify
from adk_secure_sessions.maintenance.rotate_data import rotate_data
from adk_secure_sessions.maintenance.rotate_master import rotate_master
from tests.attacks import needles
from tests.attacks.needles import found_in, needle
from tests.conformance.support import create, delete, event, find, listed, reload
from tests.integrations.inner_services import INNER, Inner, each_inner, stored_bytes

KEY = os.urandom(32)
Open = Callable[..., EncryptedSessionWrapper]


@pytest.fixture(params=each_inner)
async def inner(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Inner]:
    async with INNER[request.param](tmp_path) as opened:
        yield opened


@pytest.fixture
def key_url(tmp_path: Path) -> str:
    return f"sqlite+aiosqlite:///{tmp_path / 'keys.db'}"


@pytest.fixture
async def open_wrapper(key_url: str) -> AsyncIterator[Open]:
    opened: list[EncryptedSessionWrapper] = []

    def open_one(inner: BaseSessionService, **options: Any) -> EncryptedSessionWrapper:
        options = {"backend": AesGcmBackend(KEY), "key_db_url": key_url, **options}
        opened.append(EncryptedSessionWrapper(inner, **options))
        return opened[-1]

    yield open_one
    for one in opened:
        await one.close()


@pytest.fixture
def service(inner: Inner, open_wrapper: Open) -> EncryptedSessionWrapper:
    return open_wrapper(inner.open())


STATE = {"app:a": 1, "user:u": [2], "s": {"three": None}}


@pytest.mark.parametrize(
    "inner",
    [pytest.param(name, marks=pytest.mark.soak if name == "mongodb" else ()) for name in INNER],
    indirect=True,
)
async def test_what_is_stored_comes_back(service: EncryptedSessionWrapper) -> None:
    session = await create(service, state={**STATE, "temp:t": 1})
    assert session.state == STATE
    appended = event("text", delta={"s": 4, "user:v": None, "temp:t": 5}, branch="b")
    assert await service.append_event(session, appended) is appended
    assert session.state == {**STATE, "s": 4, "user:v": None, "temp:t": 5}
    again = await reload(service, session)
    assert again.state == {**STATE, "s": 4, "user:v": None}
    assert again.events == session.events == [appended]
    (one,) = await listed(service)
    assert (one.id, one.state, one.events) == (session.id, again.state, [])
    await delete(service, session)
    assert await find(service, session) is None


async def test_another_wrapper_reads_and_continues(inner: Inner, open_wrapper: Open) -> None:
    first, second = open_wrapper(inner.open()), open_wrapper(inner.open())
    session = await create(first, state=STATE)
    await first.append_event(session, event("one"))
    again = await reload(second, session)
    await second.append_event(again, event("two", delta={"user:u": 9}))
    texts = [one.content.parts[0].text for one in (await reload(first, session)).events]  # type: ignore[union-attr,index]
    assert texts == ["one", "two"]
    if hasattr(BaseSessionService, "get_user_state"):
        assert await first.get_user_state(app_name="app", user_id="user") == {"u": 9}


async def test_two_wrappers_write_different_users_at_once(inner: Inner, open_wrapper: Open) -> None:
    services = [open_wrapper(inner.open()) for _ in range(2)]

    async def converse(number: int) -> Session:
        service = services[number % 2]
        session = await create(service, f"s{number}", user_id=f"user {number // 2}")
        for turn in range(3):
            await service.append_event(session, event(str(turn), delta={"turn": turn}))
        return session

    sessions = [await converse(0)]  # ADK's services cannot create their tables twice at once
    sessions += await asyncio.gather(*(converse(number) for number in range(1, 6)))
    for number, session in enumerate(sessions):
        again = await reload(services[(number + 1) % 2], session)
        assert (again.state, again.events) == ({"turn": 2}, session.events)


async def test_no_needle_reaches_the_inner_store(
    inner: Inner, service: EncryptedSessionWrapper, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(0)
    session = await create(service, app_name=needles.APP, state=needles.state())
    one = needles.new_event({**needles.state(), **needles.large_state()})
    one.author = one.invocation_id = "kept"  # the inner service needs them as plaintext
    await service.append_event(session, one)
    assert needle("text") in (await reload(service, session)).model_dump_json()
    stored = await stored_bytes(inner)
    assert needles.APP.encode() in stored
    assert found_in(stored) == found_in(caplog.text.encode()) == set()


async def test_control_finds_the_needles_without_the_wrapper(tmp_path: Path) -> None:
    async with INNER["sqlite"](tmp_path) as inner:
        plain = inner.open()
        session = await create(plain, app_name=needles.APP, state=needles.state())
        await plain.append_event(session, needles.new_event({}))
        assert {needle("text"), needle("user key"), needle("session value")} <= found_in(
            await stored_bytes(inner)
        )


# --- erasure and rotations -----------------------------------------------------------------------


async def erase(key_url: str, user_id: str) -> None:
    async with Database(key_url, AesGcmBackend(KEY)) as db:
        assert (await erase_user(db, "app", user_id)).data_keys == 1


async def test_erased_users_copies_are_unreadable(
    service: EncryptedSessionWrapper, key_url: str, inner: Inner
) -> None:
    gone = await create(service, "gone", user_id="gone", state=STATE)
    await service.append_event(gone, event("text"))
    kept = await create(service, "kept", user_id="kept", state=STATE)
    await erase(key_url, "gone")
    with pytest.raises(UnknownKeyError):
        await reload(service, gone)
    with pytest.raises(UnknownKeyError):
        await listed(service, "gone")
    assert (await reload(service, kept)).state == STATE
    await delete(service, gone)  # needs no key
    assert await find(service, gone) is None


async def test_user_id_can_be_used_again_after_an_erasure(
    service: EncryptedSessionWrapper, key_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    old = await create(service, "old", state=STATE)
    await erase(key_url, "user")
    new = await create(service, "new", state={"user:v": 3})
    assert new.state == {"app:a": 1, "user:v": 3}  # the old entry of the user's state is left out
    assert "left out" in caplog.text
    await service.append_event(new, event(delta={"user:u": "new"}))
    assert (await reload(service, new)).state == {"app:a": 1, "user:u": "new", "user:v": 3}
    with pytest.raises(UnknownKeyError):
        await reload(service, old)


async def test_unreadable_sessions_can_be_left_out_of_listings(
    inner: Inner, open_wrapper: Open, key_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "adk_secure_sessions.audit")
    service = open_wrapper(inner.open(), skip_unreadable_sessions=True)
    await create(service, "gone", user_id="gone", state=STATE)
    await create(service, "kept", user_id="kept", state=STATE)
    await erase(key_url, "gone")
    assert [one.id for one in await listed(service, None)] == ["kept"]
    assert sum("record.rejected" in message for message in caplog.messages) == 1


async def test_running_wrapper_does_not_write_with_an_erased_key(
    service: EncryptedSessionWrapper, key_url: str
) -> None:
    session = await create(service)
    # Another process erases the user: nothing empties the caches of this one.
    async with Database(key_url, AesGcmBackend(KEY)) as db:
        await db.keyring()
        statement = "DELETE FROM {} WHERE {}"
        await db.runner.data_db.run_sync(lambda c: _delete_user(c, statement))
    new = await create(service, "new", state={"s": 1})
    await service.append_event(new, event("text"))
    service._runner.empty_caches()
    assert (await reload(service, new)).events == new.events
    assert (await reload(service, session)).events == []


def _delete_user(connection: Any, statement: str) -> None:
    owner = "(SELECT tag FROM secure_users)"
    for table, where in (
        ("secure_data_keys", f"owner IN {owner}"),
        ("secure_witnesses", f"tag IN {owner}"),
        ("secure_users", "1 = 1"),
    ):
        connection.exec_driver_sql(statement.format(table, where)).close()


async def test_rotations_work_and_old_records_stay_readable(
    service: EncryptedSessionWrapper, open_wrapper: Open, inner: Inner, key_url: str
) -> None:
    session = await create(service, state=STATE)
    await service.append_event(session, event("one"))
    before = _key_ids(await stored_bytes(inner))
    async with Database(key_url, AesGcmBackend(KEY)) as db:
        await rotate_master(db)
        await rotate_data(db)
        assert not (await verify(db)).bad
    await service.append_event(session, event("two"))
    another = open_wrapper(inner.open())
    assert (await reload(another, session)).events == session.events
    assert _key_ids(await stored_bytes(inner)) - before, "new records have a new data key"


def _key_ids(stored: bytes) -> set[bytes]:
    """Return the beginnings of all records in base64: the header has the id of the data key."""
    return {stored[at : at + 17] for at in range(len(stored)) if stored.startswith(b"QUtTAg", at)}


async def test_retire_and_separate_are_rejected(open_wrapper: Open, key_url: str) -> None:
    service = open_wrapper(InMemorySessionService())
    await create(service)
    async with Database(key_url, AesGcmBackend(KEY)) as db:
        for command in (retire, separate):
            with pytest.raises(ConfigurationError, match="EncryptedSessionWrapper uses"):
                await command(db)
        assert (await db.survey_existing()).meta_texts["features"].startswith("wrapper ")


async def test_other_backend_can_take_over(open_wrapper: Open) -> None:
    inner = InMemorySessionService()
    session = await create(open_wrapper(inner), state=STATE)
    both = {"backend": FernetBackend(KEY), "additional_backends": [AesGcmBackend(KEY)]}
    service = open_wrapper(inner, **both)
    again = await reload(service, session)
    await service.append_event(again, event("text", delta={"app:a": 2, "user:u": 3}))
    assert (await reload(service, session)).state == {**STATE, "app:a": 2, "user:u": 3}


async def test_wrong_key_is_rejected(open_wrapper: Open) -> None:
    inner = InMemorySessionService()
    session = await create(open_wrapper(inner))
    other = open_wrapper(inner, backend=AesGcmBackend(os.urandom(32)))
    with pytest.raises(WrongKeyError):
        await reload(other, session)


# --- what the inner service does -----------------------------------------------------------------


class Failing(InMemorySessionService):
    """Fails to store events while `fails`, after it has changed the session object."""

    fails = True

    async def append_event(self, session: Session, event: Event) -> Event:
        if self.fails:
            await BaseSessionService.append_event(self, session, event)
            raise RuntimeError("the network is down")
        return await super().append_event(session, event)


async def test_failed_append_leaves_the_session_as_it_was(open_wrapper: Open) -> None:
    inner = Failing()
    service = open_wrapper(inner)
    session = await create(service, state=STATE)
    with pytest.raises(RuntimeError, match="network"):
        await service.append_event(session, event("one", delta={"s": 1, "temp:t": 2}))
    assert (session.events, session.state) == ([], {**STATE, "temp:t": 2})
    inner.fails = False
    await service.append_event(session, event("two", delta={"s": 2}))
    assert (await reload(service, session)).events == session.events


async def test_rebuilt_session_object_is_compared_with_the_stored_one(
    service: EncryptedSessionWrapper,
) -> None:
    session = await create(service)
    await service.append_event(session, event("one"))
    rebuilt = Session.model_validate_json(session.model_dump_json())
    await service.append_event(rebuilt, event("two"))
    assert len((await reload(service, session)).events) == len(rebuilt.events) == 2
    old = Session.model_validate_json(session.model_dump_json())
    with pytest.raises(ValueError, match="modified in storage"):
        await service.append_event(old, event("three"))


async def test_changed_ids_of_a_session_object_are_used(service: EncryptedSessionWrapper) -> None:
    session = await create(service)
    with pytest.raises(SessionNotFoundError):
        await service.append_event(session.model_copy(update={"id": "other"}), event("text"))
    assert (await reload(service, session)).events == []


class Renaming(InMemorySessionService):
    async def create_session(self, *, session_id: str | None = None, **values: Any) -> Session:
        return await super().create_session(session_id="renamed", **values)


async def test_session_that_gets_another_id_is_rejected_and_deleted(open_wrapper: Open) -> None:
    inner = Renaming()
    service = open_wrapper(inner)
    with pytest.raises(ConfigurationError, match="under another id"):
        await create(service, "mine", state=STATE)
    assert not (await inner.list_sessions(app_name="app")).sessions
    session = await create(service, None, state={"user:u": 1})  # the inner service may choose it
    assert (session.id, session.state) == ("renamed", {"app:a": 1, "user:u": 1})


async def test_id_that_some_services_strip_is_rejected(service: EncryptedSessionWrapper) -> None:
    await create(service, "padded")
    for session_id in ("", " ", " padded", "padded\n"):
        with pytest.raises(ValueError, match="spaces"):
            await create(service, session_id)
        wanted: dict[str, Any] = {"app_name": "app", "user_id": "user", "session_id": session_id}
        if session_id:
            assert await service.get_session(**wanted) is None
            await service.delete_session(**wanted)
    assert [one.id for one in await listed(service)] == ["padded"]


def test_arguments_are_checked() -> None:
    inner, backend = InMemorySessionService(), AesGcmBackend(KEY)
    with pytest.raises(ConfigurationError, match="key_db_url"):
        EncryptedSessionWrapper(inner, backend)
    with pytest.raises(ConfigurationError, match="session service"):
        EncryptedSessionWrapper("redis://", backend, key_db_url=":memory:")  # type: ignore[arg-type]


async def test_service_without_user_state_says_so(open_wrapper: Open) -> None:
    class Without(InMemorySessionService):
        get_user_state = None  # type: ignore[assignment]

    service = open_wrapper(Without())
    with pytest.raises(NotImplementedError, match="get_user_state"):
        await service.get_user_state(app_name="app", user_id="user")


async def test_impossible_time_is_rejected(service: EncryptedSessionWrapper) -> None:
    session = await create(service)
    for time in (float("nan"), float("inf"), 1e13):
        with pytest.raises(ValueError, match="not a possible time"):
            await service.append_event(session, event("text", timestamp=time))


async def test_session_equals_its_copy_from_json_as_with_the_service_inside(
    open_wrapper: Open,
) -> None:
    service = open_wrapper(InMemorySessionService())
    session = await service.create_session(app_name="app", user_id="ada")
    assert Session.model_validate_json(session.model_dump_json()) == session
