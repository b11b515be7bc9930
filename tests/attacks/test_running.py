"""Attacks while a service runs that has the session and its keys in its caches."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import pytest
from google.adk.sessions import Session

from adk_secure_sessions import EncryptedSessionService, SecureSessionError, TamperedError
from tests.attacks.cells import (
    APP_STATE,
    APP_WITNESS,
    RECORDS,
    SESSION_STATE,
    SNAPSHOT,
    USER_STATE,
    USER_WITNESS,
    Cell,
    by_name,
)
from tests.attacks.databases import also_on
from tests.attacks.forging import insert_rows
from tests.attacks.support import (
    Database,
    OlderCopy,
    Operation,
    append_delta,
    create_another,
    delete,
    get,
    get_last,
    get_no_events,
    list_app,
    list_user,
    rejection,
    texts_of,
)
from tests.attacks.world import ARCHIVE, BOB, CAROL, SECRET, VISIT, SessionIds, new_event


class Running(NamedTuple):
    """A service that has just read and written a session, and that session object."""

    service: EncryptedSessionService
    session: Session


@asynccontextmanager
async def running(db: Database, who: SessionIds = VISIT) -> AsyncIterator[Running]:
    async with db.service() as service:
        session = await service.get_session(**who._asdict())
        assert session is not None
        await service.append_event(session, new_event(10, {"step": 10}))
        await service.list_sessions(app_name=who.app_name)
        await service.get_user_state(app_name=who.app_name, user_id=who.user_id)
        assert await service.get_session(**who._asdict()) == session
        yield Running(service, session)


async def assert_append_rejected(
    db: Database, run: Running, delta: dict[str, Any], error: type[Exception] = TamperedError
) -> None:
    """Twice, the append is rejected, and changes neither the database nor the session object."""
    before = db.dump()
    for _ in range(2):
        with pytest.raises(error) as rejection:
            await append_delta(run.service, run.session, delta)
        assert SECRET not in "".join(texts_of(rejection.value))
        assert db.dump() == before, "a rejected append changed the database"


async def assert_read_rejected(db: Database, run: Running, who: SessionIds = VISIT) -> None:
    before = db.dump()
    with pytest.raises(SecureSessionError):
        await run.service.get_session(**who._asdict())
    assert db.dump() == before


async def assert_listing_rejected(run: Running) -> None:
    with pytest.raises(TamperedError):
        await run.service.list_sessions(app_name=VISIT.app_name, user_id=VISIT.user_id)


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
    "id": "id + 123456",  # the id of no other session
    "state": "CAST(state || x'00' AS BLOB)",
}


@pytest.mark.in_turn("column", "delta")
@also_on("postgresql")
@pytest.mark.parametrize("column", SESSION_COLUMNS)
@pytest.mark.parametrize("delta", [{}, {"step": 11}], ids=["an event", "an event and state"])
async def test_append_to_a_session_whose_row_was_modified_is_rejected(
    db: Database, column: str, delta: dict[str, Any]
) -> None:
    async with running(db) as run:
        db.run(f"UPDATE secure_sessions SET {column} = {SESSION_COLUMNS[column]} WHERE id = :visit")
        if column != "user_row":  # this user has no such session any more
            await assert_listing_rejected(run)
        await assert_append_rejected(db, run, delta)
        await assert_read_rejected(db, run)
        await assert_others_work(run)


@pytest.mark.parametrize(
    "attack",
    [
        "DELETE FROM secure_sessions WHERE id = :visit",
        "INSERT INTO secure_events SELECT session_row, 5, time, event FROM secure_events "
        "WHERE session_row = :visit AND seq = 4",
    ],
    ids=["session removed", "event added"],
)
async def test_append_after_a_row_was_removed_or_added_is_rejected(
    db: Database, attack: str
) -> None:
    async with running(db) as run:
        db.run(attack)
        if "INSERT" in attack:
            await assert_listing_rejected(run)
        await assert_append_rejected(db, run, {"step": 11})
        await assert_read_rejected(db, run)
        await assert_others_work(run)


@also_on("fernet", "postgresql", cases=["event"])
@pytest.mark.parametrize("cell", RECORDS, ids=by_name)
async def test_record_modified_after_it_was_read_is_rejected(db: Database, cell: Cell) -> None:
    """A row that the service has decrypted before is checked again."""
    async with running(db, cell.who) as run:
        changed = bytearray(cell.stored(db))
        changed[-1] ^= 1
        cell.store(db, bytes(changed))
        await assert_read_rejected(db, run, cell.who)


@pytest.mark.parametrize("cell", RECORDS, ids=by_name)
async def test_row_removed_after_it_was_read_is_detected(db: Database, cell: Cell) -> None:
    async with running(db, cell.who) as run:
        db.run(f"DELETE FROM {cell.table} WHERE {cell.where}")
        await assert_read_rejected(db, run, cell.who)


@pytest.mark.parametrize(
    "cell", [APP_STATE, USER_STATE, SESSION_STATE, APP_WITNESS, USER_WITNESS], ids=by_name
)
async def test_row_rolled_back_after_it_was_read_is_rejected(db: Database, cell: Cell) -> None:
    """Even if the service has accepted exactly this row before."""
    async with running(db) as run:
        (row,) = db.rows(f"SELECT * FROM {cell.table} WHERE {cell.where}")
        await append_delta(run.service, run.session, {"step": 1, "user:step": 1, "app:step": 1})
        assert await run.service.get_session(**VISIT._asdict()) == run.session
        insert_rows(db, cell.table, [row])
        await assert_read_rejected(db, run)
        await assert_append_rejected(db, run, {"user:step": 2, "app:step": 2})


OLDER_TOGETHER = {
    "session": {"secure_sessions": "id = :visit"},
    "user": {
        "secure_users": "id = :alice",
        "secure_witnesses": "tag = (SELECT tag FROM past.secure_users WHERE id = :alice)",
    },
    "app": {
        "secure_apps": "id = :clinic",
        "secure_witnesses": "tag = (SELECT tag FROM past.secure_apps WHERE id = :clinic)",
    },
}


@also_on("postgresql")
@pytest.mark.parametrize("what", OLDER_TOGETHER)
async def test_rows_rolled_back_together_are_rejected_if_the_service_has_read_newer_ones(
    older: OlderCopy, what: str
) -> None:
    """A service that has not read them accepts them, as docs/limits.md says."""
    db = older.database
    reads = (get, get_last, get_no_events, list_user, list_app)
    delta = {"step" if what == "session" else f"{what}:step": 1}
    async with db.service() as service:
        session = await service.get_session(**VISIT._asdict())
        assert session is not None
        for table, where in OLDER_TOGETHER[what].items():
            older.replay_row(table, where)
        if what == "session":
            db.run("DELETE FROM secure_events WHERE session_row = :visit AND seq > 1")
        before = db.dump()
        for operation in reads:
            error = await rejection(operation, service, db, VISIT)
            assert type(error) is TamperedError, operation
            assert "restart the service" in str(error)
        with pytest.raises(TamperedError):
            await append_delta(service, session, delta)
        assert db.dump() == before
    async with db.service() as service:
        for operation in reads:
            assert await operation(service, db, VISIT)


@pytest.mark.parametrize(
    ("cell", "scope"),
    [
        (USER_STATE, "user"),
        (USER_WITNESS, "user"),
        (SESSION_STATE, "user"),
        (APP_STATE, "app"),
        (APP_WITNESS, "app"),
    ],
    ids=lambda one: one.name if isinstance(one, Cell) else "",
)
async def test_shared_state_is_not_changed_if_a_record_was_modified(
    db: Database, cell: Cell, scope: str
) -> None:
    async with running(db) as run:
        cell.store(db, bytes(reversed(cell.stored(db)[13:])))
        with pytest.raises(SecureSessionError):
            await append_delta(
                run.service, run.session.model_copy(deep=True), {f"{scope}:step": 11}
            )
        cell.store(db, bytes(cell.stored(db)) + b"\0")
        await assert_append_rejected(db, run, {f"{scope}:step": 11}, SecureSessionError)


async def test_snapshot_that_was_modified_is_not_replaced(db: Database) -> None:
    async with running(db, ARCHIVE) as run:
        changed = bytearray(SNAPSHOT.stored(db))
        changed[-1] ^= 1
        SNAPSHOT.store(db, bytes(changed))
        await assert_append_rejected(db, run, {"more": "z" * 9000})


async def test_snapshot_where_none_belongs_is_rejected(db: Database) -> None:
    """Another session's snapshot is inserted where this session will need one."""
    db.run("INSERT INTO secure_bases SELECT :visit, revision, state FROM secure_bases")
    async with db.service() as service:
        session = db.session(VISIT)
        before = db.dump()
        with pytest.raises(TamperedError):
            await append_delta(service, session, {"more": "z" * 9000})
        assert db.dump() == before


@pytest.mark.parametrize(
    ("attack", "operation"),
    [
        ("UPDATE secure_sessions SET updated_at = 1 WHERE id = :visit", delete),
        ("UPDATE secure_users SET version = version + 1 WHERE id = :alice", create_another),
    ],
    ids=["delete", "create"],
)
async def test_write_that_needs_a_modified_row_is_rejected(
    db: Database, attack: str, operation: Operation
) -> None:
    async with running(db) as run:
        db.run(attack)
        before = db.dump()
        assert type(await rejection(operation, run.service, db, VISIT)) is TamperedError
        assert db.dump() == before


async def test_data_key_replaced_after_it_was_unwrapped_is_rejected_at_the_next_start(
    db: Database,
) -> None:
    """The running service keeps its data key; the next one to start rejects the database."""
    async with running(db) as run:
        db.run("UPDATE secure_data_keys SET wrapped = zeroblob(73)")
        assert await run.service.get_session(**VISIT._asdict()) == run.session
    async with db.service() as service:
        with pytest.raises(SecureSessionError):
            await service.get_session(**VISIT._asdict())


async def test_tampered_session_does_not_affect_others_of_the_same_commit(db: Database) -> None:
    """Appends that queue up share a transaction; each is rejected or stored by itself."""
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
