"""Attacks under a running service, which has the session and its keys in its caches."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import pytest
from google.adk.sessions import Session

from adk_secure_sessions import EncryptedSessionService, SecureSessionError, TamperedError
from tests.attacks.places import (
    APP_STATE,
    APP_WITNESS,
    BASE,
    RECORDS,
    SESSION_STATE,
    USER_STATE,
    USER_WITNESS,
    Place,
    by_name,
)
from tests.attacks.support import Database, Older, append_delta, texts_of
from tests.attacks.world import ARCHIVE, BOB, CAROL, SECRET, VISIT, Who, new_event


class Running(NamedTuple):
    """A service that has just read and written a session, and its owner's handle."""

    service: EncryptedSessionService
    session: Session


@asynccontextmanager
async def running(db: Database, who: Who = VISIT) -> AsyncIterator[Running]:
    async with db.service() as service:
        session = await service.get_session(**who._asdict())
        assert session is not None
        await service.append_event(session, new_event(10, {"step": 10}))
        await service.list_sessions(app_name=who.app_name)
        await service.get_user_state(app_name=who.app_name, user_id=who.user_id)
        assert await service.get_session(**who._asdict()) == session
        yield Running(service, session)


async def assert_append_refused(
    db: Database, run: Running, delta: dict[str, Any], error: type[Exception] = TamperedError
) -> None:
    """Refused, with the database and the session object left as they are; twice."""
    before = db.dump()
    for _ in range(2):
        with pytest.raises(error) as refusal:
            await append_delta(run.service, run.session, delta)
        assert SECRET not in "".join(texts_of(refusal.value))
        assert db.dump() == before, "a refused append changed the database"


async def assert_read_refused(db: Database, run: Running, who: Who = VISIT) -> None:
    before = db.dump()
    with pytest.raises(SecureSessionError):
        await run.service.get_session(**who._asdict())
    assert db.dump() == before


async def assert_others_work(run: Running) -> None:
    for who in (BOB, CAROL):
        session = await run.service.get_session(**who._asdict())
        assert session is not None
        await run.service.append_event(session, new_event(10))
        assert await run.service.get_session(**who._asdict()) == session


SESSION_COLUMNS = {
    "user_row": ":bob",
    "revision": "revision - 1",
    "base_revision": "0",
    "created_at": "created_at + 1",
    "updated_at": "updated_at + 1",
    "tag": "x'00112233445566778899aabbccddeeff'",
    "id": "id + 1",
    "state": "CAST(state || x'00' AS BLOB)",
}


@pytest.mark.parametrize("column", SESSION_COLUMNS)
@pytest.mark.parametrize("delta", [{}, {"step": 11}], ids=["an event", "an event and state"])
async def test_append_to_a_session_whose_row_was_altered_is_refused(
    db: Database, column: str, delta: dict[str, Any]
) -> None:
    async with running(db) as run:
        db.run(f"UPDATE secure_sessions SET {column} = {SESSION_COLUMNS[column]} WHERE id = :visit")
        await assert_append_refused(db, run, delta)
        await assert_read_refused(db, run)
        await assert_others_work(run)


@pytest.mark.parametrize("column", SESSION_COLUMNS)
async def test_read_of_a_session_whose_row_was_altered_is_refused(
    db: Database, column: str
) -> None:
    async with running(db) as run:
        db.run(f"UPDATE secure_sessions SET {column} = {SESSION_COLUMNS[column]} WHERE id = :visit")
        await assert_read_refused(db, run)
        await assert_others_work(run)


async def test_append_to_a_session_whose_row_was_rolled_back_is_refused(older: Older) -> None:
    db = older.database
    async with running(db) as run:
        older.put_back("secure_sessions", "id = :visit")
        await assert_append_refused(db, run, {"step": 11})
        await assert_read_refused(db, run)


async def test_append_to_a_session_whose_row_was_removed_is_refused(db: Database) -> None:
    async with running(db) as run:
        db.run("DELETE FROM secure_sessions WHERE id = :visit")
        await assert_append_refused(db, run, {"step": 11})
        await assert_read_refused(db, run)
        await assert_others_work(run)


async def test_append_where_an_event_was_added_is_refused(db: Database) -> None:
    async with running(db) as run:
        db.run(
            "INSERT INTO secure_events SELECT session_row, 5, time, event FROM secure_events "
            "WHERE session_row = :visit AND seq = 4"
        )
        await assert_append_refused(db, run, {"step": 11})
        await assert_read_refused(db, run)


@pytest.mark.parametrize("seq", [0, 2, 4])
async def test_event_removed_is_missed_by_the_next_read(db: Database, seq: int) -> None:
    async with running(db) as run:
        db.run("DELETE FROM secure_events WHERE session_row = :visit AND seq = :seq", seq=seq)
        await assert_read_refused(db, run)
        await assert_others_work(run)


@pytest.mark.parametrize("place", RECORDS, ids=by_name)
async def test_record_altered_after_it_was_read_is_refused(db: Database, place: Place) -> None:
    """What was opened before is not believed again for being known."""
    async with running(db, place.who) as run:
        changed = bytearray(place.stored(db))
        changed[-1] ^= 1
        place.store(db, bytes(changed))
        await assert_read_refused(db, run, place.who)


@pytest.mark.parametrize("place", RECORDS, ids=by_name)
async def test_row_removed_after_it_was_read_is_missed(db: Database, place: Place) -> None:
    async with running(db, place.who) as run:
        db.run(f"DELETE FROM {place.table} WHERE {place.where}")
        await assert_read_refused(db, run, place.who)


@pytest.mark.parametrize(
    "place", [APP_STATE, USER_STATE, SESSION_STATE, APP_WITNESS, USER_WITNESS], ids=by_name
)
async def test_row_rolled_back_after_it_was_read_is_refused(db: Database, place: Place) -> None:
    """Also where the service has seen and accepted exactly this row before."""
    async with running(db) as run:
        (row,) = db.rows(f"SELECT * FROM {place.table} WHERE {place.where}")
        await append_delta(run.service, run.session, {"step": 1, "user:step": 1, "app:step": 1})
        assert await run.service.get_session(**VISIT._asdict()) == run.session
        with db.connect() as connection:
            slots = ", ".join("?" * len(row))
            connection.execute(f"REPLACE INTO {place.table} VALUES ({slots})", row)
        await assert_read_refused(db, run)
        await assert_append_refused(db, run, {"user:step": 2, "app:step": 2})


@pytest.mark.parametrize("place", [USER_STATE, USER_WITNESS, SESSION_STATE], ids=by_name)
async def test_user_state_is_not_changed_where_a_record_was_altered(
    db: Database, place: Place
) -> None:
    async with running(db) as run:
        place.store(db, bytes(reversed(place.stored(db)[13:])))
        with pytest.raises(SecureSessionError):
            await append_delta(run.service, run.session.model_copy(deep=True), {"user:step": 11})
        changed = bytearray(place.stored(db))
        place.store(db, bytes(changed) + b"\0")
        await assert_append_refused(db, run, {"user:step": 11}, SecureSessionError)
        await assert_others_work(run)


@pytest.mark.parametrize("place", [APP_STATE, APP_WITNESS], ids=by_name)
async def test_app_state_is_not_changed_where_a_record_was_altered(
    db: Database, place: Place
) -> None:
    async with running(db) as run:
        changed = bytearray(place.stored(db))
        changed[-1] ^= 1
        place.store(db, bytes(changed))
        await assert_append_refused(db, run, {"app:step": 11})


async def test_base_is_not_replaced_where_it_was_altered(db: Database) -> None:
    async with running(db, ARCHIVE) as run:
        changed = bytearray(BASE.stored(db))
        changed[-1] ^= 1
        BASE.store(db, bytes(changed))
        await assert_append_refused(db, run, {"more": "z" * 9000})


async def test_base_where_none_belongs_is_refused(db: Database) -> None:
    """Another session's, put where this one will need a base of its own."""
    db.run("INSERT INTO secure_bases SELECT :visit, revision, state FROM secure_bases")
    async with db.service() as service:
        session = db.held(VISIT)
        before = db.dump()
        with pytest.raises(TamperedError):
            await append_delta(service, session, {"more": "z" * 9000})
        assert db.dump() == before


async def test_delete_of_a_session_whose_row_was_altered_is_refused(db: Database) -> None:
    async with running(db) as run:
        db.run("UPDATE secure_sessions SET updated_at = 1 WHERE id = :visit")
        before = db.dump()
        with pytest.raises(TamperedError):
            await run.service.delete_session(**VISIT._asdict())
        assert db.dump() == before


async def test_create_for_a_user_whose_row_was_altered_is_refused(db: Database) -> None:
    async with running(db) as run:
        db.run("UPDATE secure_users SET version = version + 1 WHERE id = :alice")
        before = db.dump()
        with pytest.raises(TamperedError):
            await run.service.create_session(app_name=VISIT.app_name, user_id=VISIT.user_id)
        assert db.dump() == before


async def test_data_key_swapped_for_another_after_it_was_opened_opens_nothing_else(
    db: Database,
) -> None:
    """The service keeps the key that it opened; the next one to start refuses."""
    async with running(db) as run:
        db.run("UPDATE secure_data_keys SET wrapped = zeroblob(73)")
        assert await run.service.get_session(**VISIT._asdict()) == run.session
    async with db.service() as service:
        with pytest.raises(SecureSessionError):
            await service.get_session(**VISIT._asdict())


async def test_many_appends_to_an_altered_session_are_all_refused(db: Database) -> None:
    async with running(db) as run:
        db.run("UPDATE secure_sessions SET updated_at = updated_at - 1 WHERE id = :visit")
        before = db.dump()
        handles = [run.session.model_copy(deep=True) for _ in range(10)]
        results = await asyncio.gather(
            *(run.service.append_event(one, new_event(11, {"step": 11})) for one in handles),
            run.service.list_sessions(app_name=VISIT.app_name),
            return_exceptions=True,
        )
        assert {type(result) for result in results} == {TamperedError}
        assert db.dump() == before


async def test_one_bad_session_does_not_spoil_the_others_of_the_same_commit(db: Database) -> None:
    """Appends that queue up share a transaction: each is refused or kept for itself."""
    async with running(db) as run:
        others = [await run.service.get_session(**who._asdict()) for who in (BOB, CAROL)]
        db.run("UPDATE secure_sessions SET updated_at = updated_at - 1 WHERE id = :visit")
        event = new_event(12, {"user:step": 12})
        results = await asyncio.gather(
            *(
                run.service.append_event(session, event.model_copy(deep=True))
                for session in (others[0], run.session, others[1])
                if session
            ),
            return_exceptions=True,
        )
        assert [isinstance(result, Exception) for result in results] == [False, True, False]
        for session in others:
            assert session is not None
            found = await run.service.get_session(
                app_name=session.app_name, user_id=session.user_id, session_id=session.id
            )
            assert found == session
