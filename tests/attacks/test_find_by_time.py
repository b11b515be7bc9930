"""A search by time: a modified time is detected only if the search still finds the session."""

from typing import Any

import pytest

from adk_secure_sessions import TamperedError
from adk_secure_sessions.maintenance import verify
from tests.attacks.support import Database
from tests.attacks.world import NOTES, START, VISIT


async def test_session_that_was_moved_into_the_period_is_rejected(aes_db: Database) -> None:
    aes_db.run("UPDATE secure_sessions SET updated_at = 5 WHERE id = :visit")
    async with aes_db.service() as service:
        with pytest.raises(TamperedError):
            await service.find_sessions(app_name=VISIT.app_name, updated_before=START - 1)


async def test_time_that_was_changed_inside_the_period_is_rejected(aes_db: Database) -> None:
    async with aes_db.service() as service:
        period: dict[str, Any] = {"updated_after": START - 1}
        await service.find_sessions(app_name=VISIT.app_name, **period)  # the row is now cached
        aes_db.run("UPDATE secure_sessions SET updated_at = updated_at + 1 WHERE id = :visit")
        with pytest.raises(TamperedError):
            await service.find_sessions(app_name=VISIT.app_name, **period)
        with pytest.raises(TamperedError):
            await service.find_sessions_page(VISIT.app_name, limit=10, **period)


async def test_session_that_was_moved_out_of_the_period_is_missed(aes_db: Database) -> None:
    """docs/limits.md says so."""
    aes_db.run("UPDATE secure_sessions SET updated_at = 5 WHERE id = :visit")
    async with aes_db.service() as service:
        found = await service.find_sessions(app_name=VISIT.app_name, updated_after=START - 1)
        ids = {(session.app_name, session.user_id, session.id) for session in found.sessions}
        assert NOTES in ids
        assert VISIT not in ids
    async with aes_db.maintained() as opened:
        problems = (await verify(opened)).problems
    assert "secure_sessions" in {problem.table for problem in problems}
