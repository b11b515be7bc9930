"""Listings with a session that cannot be decrypted: an error names it, or it is left out."""

import logging

import pytest
from google.adk.sessions import Session

from adk_secure_sessions import DecryptionError, TamperedError
from tests.attacks.cells import SESSION_STATE, SNAPSHOT, USER_KEY, USER_STATE, Cell
from tests.attacks.databases import also_on
from tests.attacks.forging import insert_rows
from tests.attacks.support import Database, list_app, list_user, rejection
from tests.attacks.world import ALL_SESSIONS, ARCHIVE, BOB, NOTES, SECRET, VISIT, SessionIds

ALICES = {VISIT.session_id, NOTES.session_id, ARCHIVE.session_id}
LOGGER = "adk_secure_sessions"


def tamper_with(db: Database, cell: Cell) -> None:
    changed = bytearray(cell.stored(db))
    changed[-1] ^= 1
    cell.store(db, bytes(changed))


async def listed(db: Database, user_id: str | None) -> list[Session]:
    async with db.service(skip_unreadable_sessions=True) as service:
        response = await service.list_sessions(app_name=VISIT.app_name, user_id=user_id)
        return response.sessions


def reported(caplog: pytest.LogCaptureFixture) -> list[str]:
    records = [record for record in caplog.records if record.name.startswith(LOGGER)]
    assert all(record.levelno == logging.ERROR for record in records)
    assert SECRET not in caplog.text
    return [record.getMessage() for record in records]


@also_on("fernet", "mariadb")
@pytest.mark.parametrize("user_id", [VISIT.user_id, None], ids=["of a user", "of all users"])
@pytest.mark.parametrize(
    ("cell", "who", "name"),
    [(SESSION_STATE, VISIT, "visit"), (SNAPSHOT, ARCHIVE, "archive")],
    ids=["session", "snapshot"],
)
async def test_session_that_cannot_be_read_is_named_or_left_out_where_that_is_asked_for(
    db: Database,
    cell: Cell,
    who: SessionIds,
    name: str,
    user_id: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tamper_with(db, cell)
    async with db.service() as service:
        with pytest.raises(TamperedError, match=str(db.world.rows[name])):
            await service.list_sessions(app_name=who.app_name, user_id=user_id)
    sessions = await listed(db, user_id)
    expected = {one for one in ALL_SESSIONS if one.app_name == VISIT.app_name and one != who}
    if user_id:
        expected.discard(BOB)
    assert {SessionIds(one.app_name, one.user_id, one.id) for one in sessions} == expected
    (line,) = reported(caplog)
    assert str(db.world.rows[name]) in line
    # Only listings leave it out.
    async with db.service(skip_unreadable_sessions=True) as service:
        with pytest.raises(DecryptionError):
            await service.get_session(**who._asdict())


@pytest.mark.parametrize("cell", [USER_STATE, USER_KEY], ids=lambda cell: cell.name)
async def test_user_who_cannot_be_read_does_not_keep_others_from_being_listed(
    db: Database, cell: Cell, caplog: pytest.LogCaptureFixture
) -> None:
    tamper_with(db, cell)
    async with db.service() as service:
        with pytest.raises(TamperedError, match=cell.table):
            await service.list_sessions(app_name=VISIT.app_name)
    sessions = await listed(db, None)
    assert [session.user_id for session in sessions] == [BOB.user_id]
    assert await listed(db, VISIT.user_id) == []
    lines = [
        line for line in reported(caplog) if f"secure_users row {db.world.rows['alice']}:" in line
    ]
    assert len(lines) == 2


@also_on("engine", "mariadb")
@pytest.mark.parametrize(
    "change",
    [
        "state = x''",  # servers can store this and the next two as well
        "base_revision = 5",
        "tag = x'00'",
        "state = CAST(state AS TEXT)",
        "state = 'text'",
        "updated_at = 'text'",
        "updated_at = CAST(x'ff' AS TEXT)",
        "created_at = 0.5",
        "revision = 'text'",
    ],
)
async def test_column_of_any_type_does_not_keep_others_from_being_listed(
    typed_db: Database, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    typed_db.run(f"UPDATE secure_sessions SET {change} WHERE id = :visit")
    sessions = await listed(typed_db, VISIT.user_id)
    assert {session.id for session in sessions} == ALICES - {VISIT.session_id}
    (line,) = reported(caplog)
    assert str(typed_db.world.rows["visit"]) in line


@pytest.mark.parametrize("witness", [None, "junk", "of another"])
async def test_deleted_session_inserted_with_a_made_up_event_is_not_listed(
    db: Database, witness: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """The event makes its row seem complete to a listing, which decrypts no events."""
    (row,) = db.rows("SELECT * FROM secure_sessions WHERE id = :visit")
    tag = db.value("SELECT tag FROM secure_sessions WHERE id = :visit")
    async with db.service() as service:
        await service.delete_session(**VISIT._asdict())
    insert_rows(db, "secure_sessions", [row])
    insert_rows(db, "secure_events", [(row[0], 3, 0, b"AKS")])
    if witness:
        seal = db.value("SELECT seal FROM secure_witnesses WHERE number = :notes")
        seal = seal if witness == "of another" else b"AKS"
        columns = db.rows("SELECT name FROM pragma_table_info('secure_witnesses')")
        values: dict[str, object] = {"tag": tag, "number": row[0], "seal": seal}
        insert_rows(db, "secure_witnesses", [tuple(values[name] for (name,) in columns)])
    for operation in (list_user, list_app):
        async with db.service() as service:
            error = await rejection(operation, service, db, VISIT)
            assert isinstance(error, DecryptionError)
    for user_id in (VISIT.user_id, None):
        assert VISIT.session_id not in {
            session.id for session in await listed(db, user_id) if session.user_id != BOB.user_id
        }
    assert all(str(row[0]) in line for line in reported(caplog))


async def test_app_that_cannot_be_read_is_rejected_even_where_sessions_may_be_left_out(
    db: Database,
) -> None:
    """Its state is part of every session."""
    db.run("UPDATE secure_apps SET version = version + 1 WHERE id = :clinic")
    async with db.service(skip_unreadable_sessions=True) as service:
        for user_id in (VISIT.user_id, None):
            with pytest.raises(TamperedError, match="secure_apps"):
                await service.list_sessions(app_name=VISIT.app_name, user_id=user_id)


async def test_nothing_is_reported_where_all_can_be_read(
    db: Database, caplog: pytest.LogCaptureFixture
) -> None:
    assert {session.id for session in await listed(db, VISIT.user_id)} == ALICES
    assert reported(caplog) == []
