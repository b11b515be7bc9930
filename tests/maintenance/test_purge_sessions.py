"""`purge sessions` deletes old sessions, and none that was used meanwhile."""

from datetime import timedelta

import pytest
import sqlalchemy as sa

from adk_secure_sessions import AesGcmBackend, ConfigurationError, EncryptedSessionService
from adk_secure_sessions.maintenance import Database, Problem, fill_index, purge_sessions, verify
from tests.faults import Point, with_faults
from tests.maintenance.support import APP, OLD, event, fill, query, run_sql

BACKEND = AesGcmBackend(OLD)
LONG_AGO = timedelta(days=90)  # tests/maintenance/support.py dates its events in 2023


async def fill_old_and_new(url: str) -> None:
    await fill(url, sessions=3)
    async with EncryptedSessionService(url, BACKEND) as service:
        await service.create_session(app_name=APP, user_id="ada", session_id="today")


async def left(url: str) -> list[str]:
    async with EncryptedSessionService(url, BACKEND) as service:
        listing = await service.list_sessions(app_name=APP)
        return sorted(f"{session.user_id} {session.id}" for session in listing.sessions)


async def test_old_sessions_are_deleted_with_their_events(url: str, place: sa.URL) -> None:
    await fill_old_and_new(url)
    seen: list[tuple[int, int]] = []
    async with Database(url, BACKEND) as db:
        assert (await purge_sessions(db, timedelta.max)).numbers == (0, 0, 0)
        assert (await purge_sessions(db, LONG_AGO, dry_run=True)).numbers == (6, 0, 0)
        assert len(await left(url)) == 7
        done = await purge_sessions(db, LONG_AGO, progress=lambda *at: seen.append(at))
        assert done.numbers == (6, 0, 0)
        assert (await purge_sessions(db, LONG_AGO)).numbers == (0, 0, 0)
        assert (await verify(db)).bad == 0
    assert seen[-1] == (6, 6)
    assert await left(url) == ["ada today"]
    assert query(place, "SELECT count(*) FROM secure_events") == [(0,)]
    assert query(place, "SELECT count(*) FROM secure_users") == [(2,)]


async def test_session_that_is_used_while_a_purge_runs_is_kept(url: str) -> None:
    await fill_old_and_new(url)

    async def use() -> None:
        async with EncryptedSessionService(url, BACKEND) as service:
            session = await service.get_session(app_name=APP, user_id="bob", session_id="s1")
            assert session is not None
            await service.append_event(session, event(100_000_000))

    db, faults = with_faults(lambda: Database(url, BACKEND))
    plan = faults.data.before(Point.WRITE, use)  # by then all old sessions have been found
    async with db:
        assert (await purge_sessions(db, timedelta(days=1))).numbers == (5, 1, 0)
        assert plan.happened
        assert (await verify(db)).bad == 0
    assert await left(url) == ["ada today", "bob s1"]


async def test_old_session_that_cannot_be_decrypted_is_reported_and_left_unchanged(
    url: str, place: sa.URL
) -> None:
    await fill_old_and_new(url)
    ((row,),) = query(place, "SELECT min(id) FROM secure_sessions")
    run_sql(place, "UPDATE secure_sessions SET updated_at = 7 WHERE id = :row", row=row)
    async with Database(url, BACKEND) as db:
        for dry_run in (True, False):
            done = await purge_sessions(db, LONG_AGO, dry_run=dry_run)
            assert (done.deleted, done.kept, done.bad) == (5, 0, 1)
            (problem,) = done.problems
            assert isinstance(problem, Problem)
            assert (problem.table, problem.row) == ("secure_sessions", str(row))
    assert query(place, "SELECT count(*) FROM secure_sessions") == [(2,)]


@pytest.mark.parametrize(
    ("app", "user", "is_unknown"),
    [(APP, None, False), (APP, "ada", False), ("typo", None, True), (APP, "typo", True)],
)
async def test_app_or_user_that_is_not_stored_is_noticed(
    file_url: str, app: str, user: str | None, is_unknown: bool
) -> None:
    await fill(file_url)
    async with Database(file_url, AesGcmBackend(OLD)) as db:
        done = await purge_sessions(db, app_name=app, user_id=user)
        filled = await fill_index(db, app, ["n"])
    assert done.is_unknown is is_unknown
    assert ("there is no such app or user" in done.lines()) is is_unknown
    assert ("the app has no session: check its name" in filled.lines()) is (app == "typo")


async def test_negative_age_is_rejected(file_url: str) -> None:
    async with Database(file_url, BACKEND) as db:
        with pytest.raises(ConfigurationError, match="negative"):
            await purge_sessions(db, timedelta(days=-1))
