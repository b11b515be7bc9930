"""Rows of an erased user: replayed from a copy, or read in that copy."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from adk_secure_sessions import EncryptedSessionService, TamperedError, UnknownKeyError, maintenance
from tests.attacks.databases import also_on
from tests.attacks.support import (
    USER,
    Database,
    append,
    assert_rejected,
    assert_works,
    create_again,
    create_another,
    get,
    list_user,
    rejection,
    user_state,
)
from tests.attacks.world import ARCHIVE, BOB, CAROL, NOTES, VISIT, new_event

pytestmark = also_on("fernet", "postgresql")

Rows = dict[str, list[tuple[Any, ...]]]

TAG = "(SELECT tag FROM secure_users WHERE id = :alice)"
SESSIONS = "(SELECT id FROM secure_sessions WHERE user_row = :alice)"
ALICES = {
    "secure_users": "id = :alice",
    "secure_sessions": "user_row = :alice",
    "secure_bases": f"session_row IN {SESSIONS}",
    "secure_events": f"session_row IN {SESSIONS}",
    "secure_witnesses": f"tag = {TAG} OR number IN {SESSIONS}",
    "secure_data_keys": f"owner = {TAG}",
}


async def erase(db: Database) -> Rows:
    """Erase alice; return the rows that she had."""
    rows = {
        table: db.rows(f"SELECT * FROM {table} WHERE {where}") for table, where in ALICES.items()
    }
    assert all(rows.values())
    async with maintenance.Database(db.url, db.backend()) as opened:
        erased = await maintenance.erase_user(opened, VISIT.app_name, VISIT.user_id)
    assert erased.rows == sum(map(len, rows.values()))
    return rows


def replay(db: Database, rows: Rows, *tables: str) -> None:
    with db.connect() as connection:
        for table in tables:
            for row in rows[table]:
                slots = ", ".join("?" * len(row))
                connection.execute(f"INSERT INTO {table} VALUES ({slots})", row)


async def tables_named_by_verify(db: Database) -> set[str]:
    async with maintenance.Database(db.url, db.backend()) as opened:
        return {problem.table for problem in (await maintenance.verify(opened)).problems}


SEALED = [table for table in ALICES if table != "secure_data_keys"]


async def test_rows_replayed_without_their_key_are_rejected(db: Database) -> None:
    rows = await erase(db)
    replay(db, rows, *SEALED)
    await assert_rejected(db, USER, UnknownKeyError)
    assert await tables_named_by_verify(db)


async def test_rows_replayed_after_the_user_came_back_are_rejected(db: Database) -> None:
    rows = await erase(db)
    async with db.service() as service:
        for who in (VISIT, NOTES):
            session = await service.create_session(**who._asdict())
            await service.append_event(session, new_event(0))
    new = db.value(
        "SELECT id FROM secure_users WHERE tag IN "
        "(SELECT owner FROM secure_data_keys) ORDER BY id DESC LIMIT 1"
    )
    replay(db, rows, "secure_bases", "secure_events")
    with db.connect() as connection:  # each of her old sessions as one of the new user row
        for row in rows["secure_sessions"]:
            connection.execute("DELETE FROM secure_sessions WHERE tag = ?", [row[2]])
            slots = ", ".join("?" * len(row))
            connection.execute(
                f"INSERT INTO secure_sessions VALUES ({slots})", (row[0], new, *row[2:])
            )
    async with db.service() as service:
        for who in (VISIT, NOTES, ARCHIVE):
            assert type(await rejection(get, service, db, who)) is UnknownKeyError
        assert type(await rejection(list_user, service, db, VISIT)) is UnknownKeyError
    await assert_works(db, BOB)


@pytest.mark.parametrize("table", ["secure_users", "secure_sessions", "secure_witnesses"])
async def test_rows_of_one_table_replayed_are_detected(db: Database, table: str) -> None:
    rows = await erase(db)
    replay(db, rows, table)
    async with db.service() as service:
        for operation in (get, append):
            error = await rejection(operation, service, db, VISIT)
            assert type(error) in (TamperedError, UnknownKeyError)
        await assert_works(db, BOB)
    assert table in await tables_named_by_verify(db)


async def test_rows_of_events_and_snapshots_replayed_do_not_return(db: Database) -> None:
    rows = await erase(db)
    replay(db, rows, "secure_events", "secure_bases")
    async with db.service() as service:
        session = await service.create_session(**VISIT._asdict())
        assert (session.events, await user_state(service, db, VISIT)) == ([], {})
        assert await get(service, db, VISIT) == session
    assert await tables_named_by_verify(db) == {"secure_events", "secure_bases"}


async def test_key_replayed_without_its_rows_is_detected(db: Database) -> None:
    rows = await erase(db)
    replay(db, rows, "secure_data_keys")
    async with db.service() as service:
        for operation in (create_again, create_another):
            assert type(await rejection(operation, service, db, VISIT)) is TamperedError
    assert await tables_named_by_verify(db) == {"secure_data_keys"}
    async with maintenance.Database(db.url, db.backend()) as opened:  # erases it again
        assert (await maintenance.erase_user(opened, VISIT.app_name, VISIT.user_id)).data_keys == 1
    assert await tables_named_by_verify(db) == set()


async def test_rows_replayed_with_their_data_key_are_accepted(db: Database) -> None:
    """This is not detected, as docs/limits.md says."""
    rows = await erase(db)
    replay(db, rows, *ALICES)
    for who in (VISIT, ARCHIVE, BOB, CAROL):
        await assert_works(db, who)


# --- copies of the rows --------------------------------------------------------------------------


async def test_copy_of_the_rows_cannot_be_decrypted_with_the_current_key_tables(
    file_db: Database, tmp_path: Path
) -> None:
    copy = tmp_path / "copy.db"
    copy.write_bytes(file_db.path.read_bytes())
    await erase(file_db)
    async with _service_on(copy, file_db) as service:
        assert await get(service, file_db, VISIT) == file_db.session(VISIT)
    with closing(sqlite3.connect(copy, isolation_level=None)) as connection:
        connection.execute("ATTACH ? AS now", [str(file_db.path)])
        for table in ("secure_meta", "secure_keyring", "secure_data_keys"):
            connection.execute(f"DELETE FROM main.{table}")
            connection.execute(f"INSERT INTO main.{table} SELECT * FROM now.{table}")
    async with _service_on(copy, file_db) as service:
        for operation in (get, list_user, user_state):
            assert type(await rejection(operation, service, file_db, VISIT)) is UnknownKeyError
        assert await get(service, file_db, BOB) == file_db.session(BOB)


def _service_on(path: Path, db: Database) -> EncryptedSessionService:
    return EncryptedSessionService(f"sqlite+aiosqlite:///{path}", db.backend())
