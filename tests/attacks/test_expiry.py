"""Attacks on the time at which a session expires."""

from datetime import timedelta
from typing import Any

import pytest

from adk_secure_sessions import DecryptionError, TamperedError
from adk_secure_sessions.maintenance import purge_sessions
from tests.attacks.databases import also_on
from tests.attacks.support import Database
from tests.attacks.world import VISIT

pytestmark = also_on("mariadb")
EXPIRED = "UPDATE secure_sessions SET expires_at = 5 WHERE id = :visit"


async def test_expiry_moved_to_the_past_hides_and_replaces_no_session(aes_db: Database) -> None:
    ids = VISIT._asdict()
    async with aes_db.service() as service:
        before = await service.get_session(**ids)
    aes_db.run(EXPIRED)
    async with aes_db.service() as service:
        for attempt in (service.get_session, service.create_session):
            with pytest.raises(TamperedError):
                await attempt(**ids)
    aes_db.run("UPDATE secure_sessions SET expires_at = 9223372036854775807 WHERE id = :visit")
    async with aes_db.service() as service:
        assert await service.get_session(**ids) == before


async def test_expiry_moved_to_the_past_purges_no_session(aes_db: Database) -> None:
    aes_db.run(EXPIRED)
    async with aes_db.maintained() as db:
        found = await purge_sessions(db)
    assert (found.deleted, found.bad) == (0, 1)


async def test_expiry_moved_to_the_past_deletes_no_session_when_one_is_created(
    aes_db: Database,
) -> None:
    aes_db.run(EXPIRED)
    async with aes_db.service(expires_after=timedelta(days=1)) as service:
        for number in range(2):
            await service.create_session(app_name=VISIT.app_name, user_id=f"new {number}")
        aes_db.run("UPDATE secure_apps SET app_name = 'text' WHERE id = :clinic")
        await service.create_session(app_name="another app", user_id="new")
    assert aes_db.value("SELECT count(*) FROM secure_sessions WHERE id = :visit") == 1


async def test_expiry_moved_away_revives_no_session(aes_db: Database) -> None:
    ids: dict[str, Any] = VISIT._replace(session_id="short")._asdict()
    async with aes_db.service() as service:
        await service.create_session(**ids, expires_after=timedelta(microseconds=1))
        assert await service.get_session(**ids) is None
    aes_db.run(
        "UPDATE secure_sessions SET expires_at = 9223372036854775807 "
        "WHERE expires_at < 9223372036854775807"
    )
    async with aes_db.service() as service:
        for attempt in (service.get_session, service.create_session):
            with pytest.raises(DecryptionError):
                await attempt(**ids)
