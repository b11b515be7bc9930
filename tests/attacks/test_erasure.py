"""Rows of an erased user: replayed from a copy, or read in that copy."""

import asyncio
import gc
import secrets
import sqlite3
import time
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from google.adk.sessions import Session

from adk_secure_sessions import (
    AesGcmBackend,
    Caches,
    DatabaseError,
    EncryptedMemoryService,
    EncryptedSessionService,
    TamperedError,
    UnknownKeyError,
    maintenance,
)
from tests.attacks.databases import also_on
from tests.attacks.forging import insert_rows
from tests.attacks.support import (
    USER,
    Database,
    append,
    append_delta,
    assert_rejected,
    assert_works,
    contents,
    create_again,
    create_another,
    get,
    get_last,
    get_no_events,
    list_user,
    named_by_records,
    outcome,
    rejection,
    user_state,
)
from tests.attacks.world import ARCHIVE, BOB, CAROL, NOTES, VISIT, SessionIds, new_event
from tests.processes import results

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


def rows_of_alice(db: Database) -> Rows:
    rows = {
        table: db.rows(f"SELECT * FROM {table} WHERE {where}") for table, where in ALICES.items()
    }
    assert all(rows.values())
    return rows


async def erase(db: Database) -> Rows:
    """Erase alice; return the rows that she had."""
    rows = rows_of_alice(db)
    async with maintenance.Database(db.url, db.backend()) as opened:
        erased = await maintenance.erase_user(opened, VISIT.app_name, VISIT.user_id)
    assert erased.rows == sum(map(len, rows.values()))
    return rows


def replay(db: Database, rows: Rows, *tables: str) -> None:
    for table in tables:
        insert_rows(db, table, rows[table])


async def tables_named_by_verify(db: Database) -> set[str]:
    async with maintenance.Database(db.url, db.backend()) as opened:
        return {problem.table for problem in (await maintenance.verify(opened)).problems}


SEALED = [table for table in ALICES if table != "secure_data_keys"]


@pytest.mark.in_turn("is_after", "table")
@pytest.mark.parametrize("is_after", [False, True], ids=["ignored", "inserted again"])
@pytest.mark.parametrize("table", ALICES)
async def test_trigger_that_undoes_deletions_is_reported(
    file_db: Database, table: str, is_after: bool
) -> None:
    db = file_db
    before = rows_of_alice(db)
    columns = [name for (name,) in db.rows(f"SELECT name FROM pragma_table_info('{table}')")]
    again = f"INSERT INTO {table} VALUES ({', '.join(f'OLD.{name}' for name in columns)})"
    when, what = ("AFTER", again) if is_after else ("BEFORE", "SELECT RAISE(IGNORE)")
    db.define(f"CREATE TRIGGER keep {when} DELETE ON {table} BEGIN {what}; END")
    async with maintenance.Database(db.url, db.backend()) as maintained:
        with pytest.raises(DatabaseError, match="does not delete the rows of the user"):
            await maintenance.erase_user(maintained, *VISIT[:2])
    assert rows_of_alice(db) == before
    db.define("DROP TRIGGER keep")
    async with maintenance.Database(db.url, db.backend()) as maintained:
        done = await maintenance.erase_user(maintained, *VISIT[:2])
        second = await maintenance.erase_user(maintained, *VISIT[:2])
    assert (done.users, done.data_keys, second.rows) == (1, 1, 0)


async def test_rows_replayed_without_their_key_are_rejected(db: Database) -> None:
    rows = await erase(db)
    replay(db, rows, *SEALED)
    await assert_rejected(db, USER, UnknownKeyError)
    assert await tables_named_by_verify(db)


@also_on("postgresql")
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


@also_on("fernet", "postgresql")
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


# --- services that run on ------------------------------------------------------------------------

READS = (get, get_last, get_no_events, list_user, user_state)


async def erase_elsewhere(db: Database) -> Rows:
    """Erase alice as another process does: nothing tells this process that the rows are gone."""
    rows = rows_of_alice(db)
    tag = db.value(f"SELECT {TAG}")
    sessions = [row[0] for row in rows["secure_sessions"]]
    with db.connect() as connection:
        for table, column, values in (
            ("secure_data_keys", "owner", [tag]),
            ("secure_users", "tag", [tag]),
            ("secure_witnesses", "tag", [tag]),
            ("secure_witnesses", "number", sessions),
            ("secure_bases", "session_row", sessions),
            ("secure_events", "session_row", sessions),
            ("secure_sessions", "id", sessions),
        ):
            for value in values:
                connection.execute(f"DELETE FROM {table} WHERE {column} = ?", [value])
    assert not any(db.rows(f"SELECT * FROM {table}") == rows[table] for table in rows)
    return rows


async def use(service: EncryptedSessionService, db: Database) -> None:
    """Bring everything of alice into the caches."""
    for operation in READS:
        assert await operation(service, db, VISIT)
    await append_delta(service, db.session(VISIT), {"step": 100, "user:step": 100})


async def assert_nothing_is_left(service: EncryptedSessionService, db: Database) -> None:
    for operation in (*READS, append, create_another, create_again):
        error = await rejection(operation, service, db, VISIT)
        assert type(error) is UnknownKeyError, operation


async def test_rows_replayed_are_rejected_by_a_service_of_the_process_that_erased(
    db: Database,
) -> None:
    async with db.service() as service, db.service() as other:
        for one in (service, other):
            for operation in READS:
                await operation(one, db, VISIT)
        rows = await erase(db)
        replay(db, rows, *SEALED)
        before = db.dump()
        for one in (service, other):
            await assert_nothing_is_left(one, db)
        assert db.dump() == before
    await assert_works(db, BOB)


async def test_rows_replayed_are_rejected_once_another_process_has_seen_that_they_were_gone(
    db: Database,
) -> None:
    async with db.service() as service:
        await use(service, db)
        rows = await erase_elsewhere(db)
        assert await get(service, db, VISIT) is None
        replay(db, rows, *SEALED)
        await assert_nothing_is_left(service, db)


async def test_rows_replayed_are_rejected_by_another_process_after_cache_seconds(
    db: Database,
) -> None:
    """Before, it serves them from its cache, and cannot know; docs/erasure.md says how long."""
    async with db.service(cache=Caches(seconds=0.8)) as service:
        await use(service, db)
        began = time.monotonic()
        rows = await erase_elsewhere(db)
        replay(db, rows, *SEALED)
        served = await outcome(get(service, db, VISIT))
        assert time.monotonic() - began > 0.8 or not isinstance(served, Exception)
        await asyncio.sleep(0.9)
        await assert_nothing_is_left(service, db)


@also_on("engine")
async def test_state_of_an_erased_user_is_not_in_memory(typed_db: Database) -> None:
    """After the erasure, and after reads that find nothing: no object holds it."""
    db, who = typed_db, VISIT._replace(user_id="dave", session_id="of dave")
    marks = Marks()
    async with db.service() as service:
        await fill(service, who, marks)
        assert marks.in_memory(), "the search finds what a service has cached"
        async with maintenance.Database(db.url, db.backend()) as opened:
            await maintenance.erase_user(opened, who.app_name, who.user_id)
        assert not marks.in_memory()
        assert await service.get_session(**who._asdict()) is None
        assert (await list_sessions(service, who)) == []
        assert not marks.in_memory()


async def test_state_of_a_user_whom_another_process_erased_is_not_in_memory_after_cache_seconds(
    typed_db: Database,
) -> None:
    db, who = typed_db, VISIT._replace(user_id="dave", session_id="of dave")
    marks = Marks()
    async with db.service(cache=Caches(seconds=0.5)) as service:
        await fill(service, who, marks)
        db.run("DELETE FROM secure_users WHERE id = (SELECT max(id) FROM secure_users)")
        db.run("DELETE FROM secure_sessions WHERE id = (SELECT max(id) FROM secure_sessions)")
        await asyncio.sleep(0.6)
        assert await get(service, db, BOB)  # any operation
        assert not marks.in_memory()


Noticing = Callable[[EncryptedSessionService, SessionIds], Awaitable[object]]
NOTICING: dict[str, Noticing] = {
    "get": lambda service, who: service.get_session(**who._asdict()),
    "append": lambda service, who: append_to_missing(service, who),
    "list": lambda service, who: list_sessions(service, who),
    "user state": lambda service, who: service.get_user_state(
        app_name=who.app_name, user_id=who.user_id
    ),
}


async def append_to_missing(service: EncryptedSessionService, who: SessionIds) -> None:
    session = Session(
        id=who.session_id, app_name=who.app_name, user_id=who.user_id, last_update_time=1.0
    )
    with pytest.raises(ValueError, match="not found"):
        await service.append_event(session, new_event(2, {}))


def erase_dave(say: Callable[[object], None], url: str, key: bytes, reversed_id: str) -> None:
    async def run() -> None:
        async with maintenance.Database(url, AesGcmBackend(key)) as opened:
            done = await maintenance.erase_user(opened, VISIT.app_name, reversed_id[::-1])
        say((done.users, done.sessions))

    asyncio.run(run())


@pytest.mark.parametrize(
    "name", ["get", *(pytest.param(name, marks=pytest.mark.soak) for name in list(NOTICING)[1:])]
)
async def test_service_that_has_noticed_an_erasure_keeps_nothing_of_the_user(
    name: str, tmp_path: Path
) -> None:
    """Another process erases the user, and one operation of the service finds no row."""
    url, key = f"sqlite:///{tmp_path}/s.db", secrets.token_bytes(32)
    marks = Marks()

    def dave(number: int) -> SessionIds:
        """The ids are marks, too, and this frame must not hold them."""
        user, *sessions = (text[::-1] for text in marks.reversed)
        return VISIT._replace(user_id=user, session_id=sessions[number])

    async with EncryptedSessionService(
        url, AesGcmBackend(key), cache=Caches(events=2**20)
    ) as service:
        memory = EncryptedMemoryService(service)
        for number in (0, 1):
            await fill(service, dave(number), marks)
            session = await service.get_session(**dave(number)._asdict())
            assert session is not None
            await memory.add_session_to_memory(session)
            await memory.search_memory(
                app_name=VISIT.app_name, user_id=session.user_id, query="hello"
            )
            del session
        assert marks.in_memory(), "the search finds what a service has cached"
        erased = results((erase_dave, url, key, marks.reversed[0]))
        assert erased == [[(1, 2)]]
        await NOTICING[name](service, dave(0))
        assert not marks.in_memory()


class Marks:
    """Random texts in a state, and a search for them among all objects of this process."""

    def __init__(self) -> None:
        self.reversed: list[str] = [secrets.token_hex(12) for _ in range(3)]

    def state(self) -> dict[str, str]:
        """Hold no reference to the result."""
        session, user, event = (text[::-1] for text in self.reversed)
        return {"a": session, "user:a": user, "b": event}

    def in_memory(self) -> list[str]:
        """Return the types of the objects that hold one of the marks."""
        gc.collect()
        wanted = [text[::-1].encode() for text in self.reversed]
        found = []
        texts: dict[int, str | bytes | bytearray] = {}
        for one in gc.get_referents(*gc.get_objects()):
            if type(one) in (str, bytes, bytearray) and len(one) >= 24:
                texts[id(one)] = one
        mine = set(map(id, wanted))
        for key, text in texts.items():
            data = text.encode("utf-8", "replace") if isinstance(text, str) else text
            if key not in mine and any(mark in data for mark in wanted):
                found.append(type(text).__name__)
        return found


async def fill(service: EncryptedSessionService, who: SessionIds, marks: Marks) -> None:
    session = await service.create_session(**who._asdict(), state=marks.state())
    await service.append_event(session, new_event(1, {"b": marks.state()["b"]}))
    await service.get_session(**who._asdict())
    await list_sessions(service, who)


async def list_sessions(service: EncryptedSessionService, who: SessionIds) -> list[Session]:
    return (await service.list_sessions(app_name=who.app_name, user_id=who.user_id)).sessions


# --- an erased key of a higher generation --------------------------------------------------------


@also_on("fernet")
async def test_erased_key_of_a_higher_generation_encrypts_nothing_of_the_returned_user(
    db: Database,
) -> None:
    async with db.maintained() as maintained:
        for _ in range(3):
            await maintenance.rotate_data(maintained)
    rows = await erase(db)
    erased = {row[0] for row in rows["secure_data_keys"]}
    async with db.service() as service, db.service() as other:
        session = await service.create_session(**VISIT._asdict())
        assert await get(other, db, VISIT) == session
        highest = rows["secure_data_keys"][-1:]
        insert_rows(db, "secure_data_keys", highest)
        for one in (service, other):
            await append_delta(one, session, {"step": 1})
            await append_delta(one, session, {"user:step": 1})
            await create_another(one, db, VISIT)
    async with db.service() as service:
        await append_delta(service, session, {"step": 2, "user:step": 2})
        assert await get(service, db, VISIT) == session
        await create_another(service, db, VISIT)
    assert not named_by_records(contents(db)) & erased
    async with db.maintained() as maintained:
        assert (await maintenance.rotate_data(maintained)).left == 0
    async with db.service() as service:
        await append_delta(service, session, {"step": 3})
    assert not named_by_records(contents(db)) & erased
    async with db.maintained() as maintained:
        await maintenance.retire(maintained)
        assert not {row_id for (row_id,) in db.rows("SELECT id FROM secure_data_keys")} & erased
        assert (await maintenance.verify(maintained)).bad == 0


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
