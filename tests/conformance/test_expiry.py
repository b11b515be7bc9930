"""Sessions that expire: an expired one acts like a deleted one until it is purged."""

import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from google.adk.errors.already_exists_error import AlreadyExistsError
from google.adk.errors.session_not_found_error import SessionNotFoundError
from google.adk.sessions import BaseSessionService, Session
from sqlalchemy import URL

from adk_secure_sessions import AesGcmBackend, ConfigurationError, EncryptedSessionService
from adk_secure_sessions.db.protocol import Conflict
from adk_secure_sessions.maintenance import Database, purge_sessions, verify
from tests.conformance.services import KEY
from tests.conformance.support import APP, USER, each_kind, event, find, listed, rejected_as_stale
from tests.faults import Point, with_faults

kind = each_kind(
    "encrypted-file",
    some=dict.fromkeys(
        ["encrypted-mariadb", "encrypted-postgresql"],
        (
            "test_expired_session_is_replaced_by_a_new_one",
            "test_purge_deletes_expired_sessions_and_verify_checks_them",
        ),
    ),
    soak=["encrypted-cached-events", "encrypted-engine", "encrypted-psycopg"],
)
HOUR = timedelta(hours=1)
Later = Callable[[timedelta], None]


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Later:
    """Moves the clock that decides what has expired."""
    now = time.time_ns

    def move(by: timedelta) -> None:
        shift = by // timedelta(microseconds=1) * 1000
        monkeypatch.setattr(time, "time_ns", lambda: now() + shift)

    return move


async def create(service: BaseSessionService, name: str = "s", **options: Any) -> Session:
    assert isinstance(service, EncryptedSessionService)
    return await service.create_session(app_name=APP, user_id=USER, session_id=name, **options)


def maintained(url: URL) -> Database:
    return Database(url.render_as_string(hide_password=False), AesGcmBackend(KEY))


async def test_expired_session_is_not_returned(service: BaseSessionService, later: Later) -> None:
    short = await create(service, "short", expires_after=HOUR, state={"user:u": 1})
    long = await create(service, "long", expires_after=4 * HOUR)
    never = await create(service, "never")
    later(2 * HOUR)
    assert await find(service, short) is None
    assert await find(service, short, num_recent_events=0) is None
    assert await find(service, long) is not None
    assert [one.id for one in await listed(service)] == ["long", "never"]
    assert [one.id for one in await listed(service, None)] == ["long", "never"]
    assert isinstance(service, EncryptedSessionService)
    page = await service.list_sessions_page(APP, USER, limit=2)
    assert [one.id for one in page.sessions] == ["long", "never"]
    later(400 * 24 * HOUR)
    assert [one.id for one in await listed(service)] == ["never"]
    assert (await find(service, never) or never).state == {"user:u": 1}  # the user's state stays


@pytest.mark.parametrize("known", [True, False])
async def test_append_to_an_expired_session_finds_no_session(
    service: BaseSessionService, another_service: BaseSessionService, later: Later, known: bool
) -> None:
    session = await create(service, expires_after=HOUR)
    writer = service if known else another_service
    later(2 * HOUR)
    with pytest.raises(SessionNotFoundError):
        await writer.append_event(session, event("text", delta={"k": 1}))
    assert not session.events
    assert session.state == {}


async def test_append_after_a_conflict_does_not_revive_an_expired_session(
    file_url: str, later: Later
) -> None:
    make = partial(EncryptedSessionService, file_url, AesGcmBackend(KEY))
    service, faults = with_faults(make)
    session = await create(service, expires_after=HOUR)

    def expire() -> None:
        later(2 * HOUR)
        raise Conflict

    faults.data.before(Point.APPLY, expire)
    with pytest.raises(SessionNotFoundError):
        await service.append_event(session, event("text"))
    await service.close()


async def test_append_moves_the_expiry(service: BaseSessionService, later: Later) -> None:
    session = await create(service, expires_after=HOUR)
    at = time.time() + 1800
    await service.append_event(session, event("text", timestamp=at))
    later(timedelta(minutes=89))
    assert await find(service, session) is not None
    later(timedelta(minutes=91))
    assert await find(service, session) is None


async def test_append_through_another_service_keeps_the_lifetime(
    url: URL, service: BaseSessionService, another_service: BaseSessionService, later: Later
) -> None:
    short = await create(service, "short", expires_after=HOUR)
    never = await create(service, "never")
    text = url.render_as_string(hide_password=False)
    async with EncryptedSessionService(text, AesGcmBackend(KEY), expires_after=9 * HOUR) as third:
        for session in (short, never):
            again = await find(third, session)
            assert again
            await third.append_event(again, event("text", timestamp=time.time()))
        await create(third, "nine")
    later(2 * HOUR)
    assert [one.id for one in await listed(another_service)] == ["never", "nine"]
    later(10 * HOUR)
    assert [one.id for one in await listed(another_service)] == ["never"]


async def test_expired_session_is_replaced_by_a_new_one(
    url: URL, service: BaseSessionService, later: Later
) -> None:
    old = await create(service, expires_after=HOUR, state={"old": "x" * 20_000})
    await service.append_event(old, event("old", timestamp=time.time()))
    with pytest.raises(AlreadyExistsError):
        await create(service)
    later(2 * HOUR)
    new = await create(service, state={"new": 1})
    assert await find(service, new) == new
    with rejected_as_stale():
        await service.append_event(old, event("late"))
    await service.append_event(new, event("text"))
    async with maintained(url) as db:
        found = await verify(db)
    assert (found.bad, found.sessions, found.events) == (0, 1, 1)


async def test_purge_deletes_expired_sessions_and_verify_checks_them(
    url: URL, service: BaseSessionService, later: Later
) -> None:
    for n in range(3):
        session = await create(service, f"s{n}", expires_after=HOUR * (1 + n))
        await service.append_event(session, event("text", timestamp=time.time()))
    await create(service, "never")
    async with maintained(url) as db:
        assert (await purge_sessions(db)).deleted == 0
        later(timedelta(hours=2, minutes=30))
        assert (await verify(db)).sessions == 4
        assert (await purge_sessions(db, dry_run=True)).numbers == (2, 0, 0)
        assert (await purge_sessions(db, app_name="another")).deleted == 0
        assert (await purge_sessions(db, user_id="another")).deleted == 0
        assert (await purge_sessions(db, app_name=APP, user_id=USER)).numbers == (2, 0, 0)
        assert (await verify(db)).sessions == 2
    assert [one.id for one in await listed(service)] == ["s2", "never"]


async def test_delete_of_an_expired_session_deletes_it(
    url: URL, service: BaseSessionService, later: Later
) -> None:
    await create(service, expires_after=HOUR)
    later(2 * HOUR)
    await service.delete_session(app_name=APP, user_id=USER, session_id="s")
    async with maintained(url) as db:
        assert (await verify(db)).sessions == 0


@pytest.mark.parametrize("bad", [timedelta(), -HOUR, 5])
async def test_expiry_that_is_no_positive_time_is_an_error(
    service: BaseSessionService, bad: Any
) -> None:
    with pytest.raises(ConfigurationError, match=r"expires_after must be a positive"):
        await create(service, expires_after=bad)
    with pytest.raises(ConfigurationError, match=r"expires_after must be a positive"):
        EncryptedSessionService(":memory:", AesGcmBackend(KEY), expires_after=bad)


async def test_very_long_lifetime_is_not_for_ever(
    service: BaseSessionService, later: Later
) -> None:
    session = await create(service, expires_after=timedelta.max)
    await service.append_event(session, event("text", timestamp=time.time()))
    later(timedelta(days=36500))
    assert await find(service, session) is not None
