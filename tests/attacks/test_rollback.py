"""Older copies of rows are replayed: each authentic, and from another time."""

from typing import Any, NamedTuple

import pytest

from adk_secure_sessions import TamperedError
from tests.attacks.databases import also_on
from tests.attacks.forging import insert_rows
from tests.attacks.support import (
    APP,
    HISTORY,
    SESSION,
    SESSION_BY_ID,
    SNAPSHOT,
    USER,
    Database,
    Impact,
    OlderCopy,
    assert_rejected,
    delete,
    get,
    get_last,
    list_app,
    list_user,
    rejection,
)
from tests.attacks.world import ARCHIVE, VISIT, SessionIds, new_event


class Older(NamedTuple):
    """An older row that is replayed, and what is rejected then."""

    table: str
    where: str
    impact: Impact
    who: SessionIds = VISIT


WITNESS_OF = "tag = (SELECT tag FROM past.secure_{} WHERE id = {})"
OLDER = {
    "user": Older("secure_users", "id = :alice", USER),
    "app": Older("secure_apps", "id = :clinic", APP),
    "witness of a user": Older("secure_witnesses", WITNESS_OF.format("users", ":alice"), USER),
    "witness of an app": Older("secure_witnesses", WITNESS_OF.format("apps", ":clinic"), APP),
    "session": Older("secure_sessions", "id = :visit", SESSION),
    "session of a large state": Older("secure_sessions", "id = :archive", SESSION, ARCHIVE),
    "snapshot": Older("secure_bases", "session_row = :archive", SNAPSHOT, ARCHIVE),
}


@also_on("fernet", "packed", "postgresql", cases=["session", "witness of a user"])
@pytest.mark.parametrize("case", OLDER.values(), ids=list(OLDER))
async def test_older_row_is_rejected(older: OlderCopy, case: Older) -> None:
    older.replay_row(case.table, case.where)
    await assert_rejected(older.database, case.impact, TamperedError, who=case.who)


@pytest.mark.parametrize(
    ("table", "number", "where", "impact", "who"),
    [
        ("secure_bases", "revision", "session_row = :archive", SNAPSHOT, ARCHIVE),
        ("secure_sessions", "revision", "id = :visit", SESSION, VISIT),
        ("secure_users", "version", "id = :alice", USER, VISIT),
    ],
    ids=["snapshot", "session", "user"],
)
async def test_older_row_under_the_current_number_is_rejected(
    older: OlderCopy, table: str, number: str, where: str, impact: Impact, who: SessionIds
) -> None:
    db = older.database
    current = db.value(f"SELECT {number} FROM {table} WHERE {where}")
    older.replay_row(table, where)
    db.run(f"UPDATE {table} SET {number} = :now WHERE {where}", now=current)
    await assert_rejected(db, impact, TamperedError, who=who)


async def test_older_session_row_and_snapshot_together_are_rejected(older: OlderCopy) -> None:
    """The events prove that the session has moved on."""
    older.replay_row("secure_sessions", "id = :archive")
    older.replay_row("secure_bases", "session_row = :archive")
    await assert_rejected(older.database, SNAPSHOT, TamperedError, who=ARCHIVE)


# --- a session that was deleted ------------------------------------------------------------------

Rows = dict[str, list[tuple[Any, ...]]]
TABLES = {
    "secure_sessions": "id = :row",
    "secure_bases": "session_row = :row",
    "secure_events": "session_row = :row",
    "secure_witnesses": "number = :row",
}


async def delete_session_of(db: Database, who: SessionIds) -> Rows:
    """Delete a session; return the rows that it had."""
    names = {VISIT: ":visit", ARCHIVE: ":archive"}
    rows = {
        table: db.rows(f"SELECT * FROM {table} WHERE {where.replace(':row', names[who])}")
        for table, where in TABLES.items()
    }
    async with db.service() as service:
        await service.delete_session(**who._asdict())
    return rows


async def recreate(db: Database, who: SessionIds, events: int) -> None:
    async with db.service() as service:
        session = await service.create_session(**who._asdict(), state={"created": "again"})
        for number in range(events):
            await service.append_event(session, new_event(number + 50))


@pytest.mark.parametrize(
    ("table", "impact"), [("secure_sessions", SESSION), ("secure_witnesses", SESSION_BY_ID)]
)
async def test_row_or_witness_of_a_deleted_session_replayed_is_rejected(
    db: Database, table: str, impact: Impact
) -> None:
    rows = await delete_session_of(db, VISIT)
    insert_rows(db, table, rows[table])
    await assert_rejected(db, impact, TamperedError)


async def test_events_of_a_deleted_session_replayed_do_not_return(db: Database) -> None:
    rows = await delete_session_of(db, VISIT)
    insert_rows(db, "secure_events", rows["secure_events"])
    async with db.service() as service:
        assert await get(service, db, VISIT) is None
        await service.create_session(**VISIT._asdict())
        session = await service.get_session(**VISIT._asdict())
        assert session is not None
        assert session.events == []


@pytest.mark.parametrize("created_again", [False, True])
async def test_row_of_a_deleted_session_without_events_is_rejected(
    db: Database, created_again: bool
) -> None:
    """Only its version witness proves that it was deleted."""
    who = VISIT._replace(session_id="empty-7Qx")
    async with db.service() as service:
        await service.create_session(**who._asdict(), state={"old": "7Qx"})
        row = db.rows("SELECT * FROM secure_sessions ORDER BY id DESC LIMIT 1")
        await service.delete_session(**who._asdict())
        if created_again:
            await service.create_session(**who._asdict(), state={"new": "7Qx"})
    insert_rows(db, "secure_sessions", row)
    async with db.service() as service:
        for operation in (get, get_last, list_user, list_app, delete):
            assert type(await rejection(operation, service, db, who)) is TamperedError


@pytest.mark.in_turn("table", "events")
@also_on("fernet", "postgresql")
@pytest.mark.parametrize("table", ["secure_sessions", "secure_witnesses"])
@pytest.mark.parametrize("events", [0, 4])
async def test_row_of_a_former_session_of_the_same_id_is_rejected(
    db: Database, table: str, events: int
) -> None:
    rows = await delete_session_of(db, VISIT)
    await recreate(db, VISIT, events)
    insert_rows(db, table, rows[table])
    impact = SESSION if table == "secure_sessions" else SESSION_BY_ID
    await assert_rejected(db, impact, TamperedError)


async def test_row_of_a_former_session_under_the_new_key_is_rejected(db: Database) -> None:
    rows = await delete_session_of(db, VISIT)
    await recreate(db, VISIT, 4)
    new = db.value("SELECT max(id) FROM secure_sessions")
    db.run("DELETE FROM secure_sessions WHERE id = :new", new=new)
    insert_rows(db, "secure_sessions", rows["secure_sessions"])
    db.run("UPDATE secure_sessions SET id = :new WHERE id = :visit", new=new)
    await assert_rejected(db, SESSION, TamperedError)


@pytest.mark.parametrize("seq", [0, 3])
async def test_event_of_a_former_session_of_the_same_id_is_rejected(db: Database, seq: int) -> None:
    rows = await delete_session_of(db, VISIT)
    await recreate(db, VISIT, 4)
    _, _, time, event = rows["secure_events"][seq]
    new = db.value("SELECT max(id) FROM secure_sessions")
    db.run(
        "UPDATE secure_events SET time = :time, event = :event "
        "WHERE session_row = :new AND seq = :seq",
        time=time,
        event=event,
        new=new,
        seq=seq,
    )
    impact = HISTORY if seq == 0 else HISTORY._replace(rejected=(*HISTORY.rejected, get_last))
    await assert_rejected(db, impact, TamperedError)


async def test_snapshot_of_a_former_session_of_the_same_id_is_rejected(db: Database) -> None:
    rows = await delete_session_of(db, ARCHIVE)
    async with db.service() as service:
        session = await service.create_session(**ARCHIVE._asdict(), state={"a": "x" * 9000})
        for number in range(3):
            await service.append_event(session, new_event(number, {"b": "y" * 9000}))
    new = db.value("SELECT max(id) FROM secure_sessions")
    ((_, _, state),) = rows["secure_bases"]
    db.run("UPDATE secure_bases SET state = :state WHERE session_row = :new", state=state, new=new)
    await assert_rejected(db, SNAPSHOT, TamperedError, who=ARCHIVE)
