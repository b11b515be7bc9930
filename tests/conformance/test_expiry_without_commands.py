"""Each new session of a service with `expires_after` deletes at most two that have expired."""

import logging
import time
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import URL

from adk_secure_sessions import AesGcmBackend, EncryptedSessionService
from adk_secure_sessions.db.protocol import Read
from adk_secure_sessions.errors import DatabaseError
from adk_secure_sessions.storage.features import expiry
from adk_secure_sessions.storage.schema import sessions
from tests.conformance.services import KEY
from tests.conformance.support import APP, USER, each_kind, event, reload
from tests.conformance.test_expiry import Later, later
from tests.faults import Point, with_faults

__all__ = ["later"]  # a fixture
kind = each_kind("encrypted-file", "encrypted-mariadb", "encrypted-postgresql")
HOUR = timedelta(hours=1)
WHO: dict[str, Any] = {"app_name": APP, "user_id": USER}


def expiring(url: URL, **options: Any) -> EncryptedSessionService:
    name = url.render_as_string(hide_password=False)
    return EncryptedSessionService(name, AesGcmBackend(KEY), expires_after=10 * HOUR, **options)


async def stored(service: EncryptedSessionService) -> int:
    """Return the number of stored sessions, also of those that have expired."""
    query = sa.select(sa.func.count()).select_from(sessions)
    number: int = (await service._runner.data_db.read(query, {}))[0][0]
    return number


async def test_new_session_deletes_two_that_have_expired(url: URL, later: Later) -> None:
    async with expiring(url) as service:
        for number in range(5):
            await service.create_session(**WHO, session_id=f"old {number}", expires_after=HOUR)
        large = {"large": "x" * 20_000}
        other = {"app_name": "other app \U0001f600", "user_id": "u"}
        await service.create_session(**other, state=large, expires_after=HOUR)
        assert await stored(service) == 6
        later(2 * HOUR)
        for left in (5, 4, 3, 4):  # one more each time, and two less as long as there are some
            await service.create_session(**WHO)
            assert await stored(service) == left
        found = await service.list_sessions(**WHO)
        assert len(found.sessions) == 4


async def test_two_sessions_are_deleted_though_those_of_two_apps_have_expired(
    url: URL, later: Later
) -> None:
    async with expiring(url) as service:
        for number in range(6):
            who: dict[str, Any] = {"app_name": f"app {number % 2}", "user_id": "u"}
            await service.create_session(**who, expires_after=HOUR)
        later(2 * HOUR)
        await service.create_session(**WHO)
        assert await stored(service) == 5


async def test_session_that_is_used_meanwhile_is_kept(url: URL, later: Later) -> None:
    """Another service, whose clock is slow, appends while the session is deleted."""

    async def use() -> None:
        later(timedelta())
        async with expiring(url) as third:
            at = time.time() + 10_000
            await third.append_event(session, event("used", timestamp=at))
        later(2 * HOUR)

    def is_of_deletion(step: object, rows: object) -> bool:
        return isinstance(step, Read) and (step.parameters or {}).get("session_tag") == tag

    async with expiring(url) as service:
        session = await service.create_session(**WHO, expires_after=HOUR)
        tag = (await service._runner.identify(APP, USER, session.id)).session_tag
        other, faults = with_faults(lambda: expiring(url))
        if url.drivername.startswith("sqlite"):  # a write begins with the lock of all writers
            used = faults.data.before(Point.WRITE, use, nth=2)
        else:
            used = faults.data.after(Point.READ, use, when=is_of_deletion)
        async with other:
            later(2 * HOUR)
            await other.create_session(**WHO)
        assert used.happened
        assert await stored(service) == 2
        assert len((await reload(service, session)).events) == 1


async def test_session_whose_id_expired_is_created_while_another_service_deletes_the_old_one(
    url: URL, later: Later
) -> None:
    ids = {**WHO, "session_id": "s"}

    async def delete() -> None:
        async with expiring(url) as other:
            await other.delete_session(**ids)

    service, faults = with_faults(lambda: expiring(url))
    async with service:
        await service.create_session(**ids, expires_after=HOUR)
        later(2 * HOUR)
        deleted = faults.data.before(Point.WRITE, delete, nth=3)  # two attempts to create it fail
        await service.create_session(**ids)
        assert deleted.happened
        assert await stored(service) == 1


async def test_unreadable_sessions_do_not_stop_the_deletion_of_others(
    url: URL, later: Later
) -> None:
    async with expiring(url) as service:
        for number in range(4):
            await service.create_session(**WHO, session_id=f"old {number}", expires_after=HOUR)
        odd: dict[str, Any] = {"app_name": "app \U0001f600", "user_id": "u"}
        await service.create_session(**odd, expires_after=HOUR)
        identities = [
            await service._runner.identify(APP, USER, f"old {number}") for number in (0, 1)
        ]
        tampered = (
            sa.update(sessions)
            .where(sessions.c.tag.in_([one.session_tag for one in identities]))
            .values(state=b"tampered")
        )
        await service._runner.data_db.run_sync(lambda connection: connection.execute(tampered))
        later(2 * HOUR)
        for left in (4, 4, 5):
            await service.create_session(**WHO)
            assert await stored(service) == left


async def test_other_services_delete_nothing(url: URL, later: Later) -> None:
    name = url.render_as_string(hide_password=False)
    async with EncryptedSessionService(name, AesGcmBackend(KEY)) as service:
        await service.prepare_tables()
        # The schema on a server has the tables of other tests.
        await service._runner.data_db.run_sync(_drop_index)
        await service.create_session(**WHO, expires_after=HOUR)
        later(2 * HOUR)
        await service.create_session(**WHO)
        assert await stored(service) == 2
        indexes = await service._runner.data_db.run_sync(_indexes, commit=False)
        assert expiry.INDEX not in indexes


async def test_without_an_index_nothing_is_deleted(
    url: URL, later: Later, caplog: pytest.LogCaptureFixture
) -> None:
    async with expiring(url) as service:
        await service.create_session(**WHO)
        await service._runner.data_db.run_sync(_drop_index)
    async with expiring(url, create_tables=False) as service:
        await service.create_session(**WHO, expires_after=HOUR)
        later(2 * HOUR)
        await service.create_session(**WHO)
        assert await stored(service) == 3
    (warning,) = (one.getMessage() for one in caplog.records if "expired" in one.getMessage())
    assert f"CREATE INDEX {expiry.INDEX} ON secure_sessions (expires_at)" in warning
    async with expiring(url) as service:
        await service.create_session(**WHO)
        assert await stored(service) == 3
        assert expiry.INDEX in await service._runner.data_db.run_sync(_indexes, commit=False)


async def test_index_that_could_not_be_created_in_time_is_not_tried_again_at_once(
    url: URL, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a server creates it, all writes wait."""

    def time_out(*_: object) -> None:
        raise DatabaseError("it took too long", retryable=True)

    monkeypatch.setattr(expiry.Expiry, "_create_missing_index", time_out)
    async with expiring(url) as service:
        for _ in range(3):
            await service.create_session(**WHO)
    (warning,) = (one.getMessage() for one in caplog.records if "expired" in one.getMessage())
    assert "it took too long" in warning


async def test_index_that_another_process_creates_at_the_same_time_is_used(
    url: URL, later: Later, monkeypatch: pytest.MonkeyPatch
) -> None:
    if url.get_backend_name() == "sqlite":
        pytest.skip("SQLite runs one transaction at a time")
    async with expiring(url) as service:
        await service.create_session(**WHO, expires_after=HOUR)
    async with expiring(url) as service:
        # Not seen yet: on a cluster, no lock covers the look and the CREATE INDEX.
        monkeypatch.setattr(sa.Inspector, "get_indexes", lambda *_: [])
        await service.create_session(**WHO, expires_after=HOUR)
        later(2 * HOUR)
        await service.create_session(**WHO)
        assert await stored(service) == 1


def _indexes(connection: sa.Connection) -> set[str | None]:
    return {one["name"] for one in sa.inspect(connection).get_indexes("secure_sessions")}


def _drop_index(connection: sa.Connection) -> None:
    if expiry.INDEX in _indexes(connection):
        of = " ON secure_sessions" if connection.dialect.name in ("mysql", "mariadb") else ""
        connection.execute(sa.text(f"DROP INDEX {expiry.INDEX}{of}"))


async def test_error_of_a_deletion_is_logged_and_not_raised(
    url: URL, later: Later, caplog: pytest.LogCaptureFixture
) -> None:
    async with expiring(url) as service:
        await service.create_session(**WHO, expires_after=HOUR)
        deletion = sa.text("DELETE FROM secure_witnesses")
        await service._runner.data_db.run_sync(lambda connection: connection.execute(deletion))
    later(2 * HOUR)
    async with expiring(url) as service:
        with caplog.at_level(logging.WARNING, "adk_secure_sessions"):
            await service.create_session(app_name="new", user_id="new")
            assert "left out of a listing: secure_users row" in caplog.text
            caplog.clear()
            await service.create_session(app_name="new", user_id="new")
        assert caplog.text == "", "it tries again after a minute"
        assert await stored(service) == 3
