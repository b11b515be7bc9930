"""Two copies of the database were written separately; one row of one copy is put into the other.

This happens with a staging clone, and after a restore from a backup: `other` has what was written
before the restore, and `db` what was written after it.  The rows are authentic, and have the same
ids, versions and revisions.  Only their links differ.  `longer` is such a copy, too, but has two
events more in each session.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from google.adk.errors.already_exists_error import AlreadyExistsError

from adk_secure_sessions import Caches, EncryptedSessionService, TamperedError
from adk_secure_sessions.formats.records import parse_header
from adk_secure_sessions.maintenance import Database as Maintained
from adk_secure_sessions.maintenance import rotate_data, verify
from tests.attacks.databases import also_on
from tests.attacks.forging import insert_rows
from tests.attacks.support import (
    APP,
    SESSION,
    SNAPSHOT,
    USER,
    Database,
    Impact,
    OlderCopy,
    Operation,
    append,
    append_app_state,
    append_delta,
    append_large,
    append_user_state,
    assert_rejected,
    create_another,
    delete,
    get,
    get_after,
    get_last,
    get_last_three,
    get_no_events,
    list_app,
    list_user,
    rejection,
)
from tests.attacks.world import (
    ALL_SESSIONS,
    ARCHIVE,
    BOB,
    CAROL,
    NOTES,
    VISIT,
    SessionIds,
    append_all,
)
from tests.sqlite_files import execute, settle

_APPENDS = (append, append_user_state, append_app_state, append_large)
MIDDLE = Impact((get, get_after, get_last_three), (NOTES, BOB, CAROL))
LAST = Impact((get, get_after, get_last, get_last_three, *_APPENDS), (NOTES, BOB, CAROL))


@pytest.fixture
def other(db: Database, tmp_path: Path) -> OlderCopy:
    """The other copy: the older one, to which the same was written again."""
    return written_again(db.older(tmp_path), 1)


@pytest.fixture
def longer(db: Database, tmp_path: Path) -> OlderCopy:
    return written_again(db.older(tmp_path), 2)


def written_again(copy: OlderCopy, times: int) -> OlderCopy:
    async def write() -> None:
        backend = copy.database.backend()
        async with EncryptedSessionService(f"sqlite:///{copy.path}", backend) as service:
            for number in range(times):
                for step in (2 + 2 * number, 3 + 2 * number):
                    await append_all(service, step, large=8200, delta={})

    with ThreadPoolExecutor(1) as pool:  # a loop of its own
        pool.submit(asyncio.run, write()).result()
    settle(copy.path)
    return copy


class Row(NamedTuple):
    table: str
    where: str
    impact: Impact
    who: SessionIds = VISIT
    reported: str = ""  # another table that `verify` names


WITNESS = "tag = (SELECT tag FROM past.secure_{} WHERE id = :{})"
ROWS = {
    "event": Row("secure_events", "session_row = :visit AND seq = 2", MIDDLE),
    "last event": Row("secure_events", "session_row = :visit AND seq = 3", LAST),
    "session": Row("secure_sessions", "id = :visit", LAST),  # with its events
    "snapshot": Row("secure_bases", "session_row = :archive", SNAPSHOT, ARCHIVE),
    "user": Row("secure_users", "id = :alice", USER),
    "app": Row("secure_apps", "id = :clinic", APP),
    "user's witness": Row(
        "secure_witnesses", WITNESS.format("users", "alice"), USER, VISIT, "secure_users"
    ),
    "app's witness": Row(
        "secure_witnesses", WITNESS.format("apps", "clinic"), APP, VISIT, "secure_apps"
    ),
}


@also_on("fernet", "postgresql", cases=["user", "event"])
@pytest.mark.parametrize("name", ROWS)
async def test_row_of_another_copy_is_rejected_and_named(other: OlderCopy, name: str) -> None:
    table, where, impact, who, reported = ROWS[name]
    other.replay_row(table, where)
    await assert_rejected(other.database, impact, TamperedError, who=who)
    async with other.database.maintained() as opened:
        assert (reported or table) in {problem.table for problem in (await verify(opened)).problems}


async def test_session_row_of_another_copy_is_not_noticed_in_a_listing(other: OlderCopy) -> None:
    """As docs/limits.md says."""
    other.replay_row("secure_sessions", "id = :visit")
    async with other.database.service() as service:
        assert await list_user(service, other.database, VISIT)


async def test_session_row_and_snapshot_of_another_copy_are_rejected(other: OlderCopy) -> None:
    other.replay_row("secure_sessions", "id = :archive")
    other.replay_row("secure_bases", "session_row = :archive")
    await assert_rejected(other.database, LAST, TamperedError, who=ARCHIVE)


# --- a copy with other revisions -----------------------------------------------------------------


LONGER = ROWS | {"session": Row("secure_sessions", "id = :visit", SESSION)}
del LONGER["last event"], LONGER["app's witness"]


@pytest.mark.parametrize("name", LONGER)
async def test_row_of_a_longer_copy_is_rejected(longer: OlderCopy, name: str) -> None:
    table, where, impact, who, _ = LONGER[name]
    longer.replay_row(table, where)
    await assert_rejected(longer.database, impact, TamperedError, who=who)


@pytest.mark.parametrize("seq", [4, 5])
async def test_event_of_a_longer_copy_is_rejected_behind_the_last(
    longer: OlderCopy, seq: int
) -> None:
    longer.replay_row("secure_events", f"session_row = :visit AND seq = {seq}")
    await assert_rejected(longer.database, SESSION, TamperedError)


async def test_data_key_of_another_copy_encrypts_nothing(other: OlderCopy) -> None:
    """Each copy has rotated its data keys; those of the other one have a higher generation."""
    db = other.database
    async with db.maintained() as ours:
        await rotate_data(ours)
    async with Maintained(f"sqlite:///{other.path}", db.backend()) as theirs:
        await rotate_data(theirs)
        await rotate_data(theirs)
    newest = "(SELECT max(generation) FROM secure_data_keys)"
    query = f"SELECT * FROM secure_data_keys WHERE generation = {newest}"
    keys = execute(other.path, query)
    assert len(keys) == 5
    insert_rows(db, "secure_data_keys", keys)
    inserted = {row[0] for row in keys}
    async with db.service() as service:
        for who in ALL_SESSIONS:
            await create_another(service, db, who)
            assert await get(service, db, who) == db.session(who)
            await append(service, db, who)
    for table in ("apps", "users", "sessions", "bases", "witnesses", "events"):
        column = {"witnesses": "seal", "events": "event"}.get(table, "state")
        records = db.rows(f"SELECT {column} FROM secure_{table}")
        assert not {parse_header(record)[1] for (record,) in records} & inserted


# --- services that run on ------------------------------------------------------------------------


@pytest.mark.parametrize("read", [None, get, get_last, get_no_events, list_user, list_app, append])
async def test_running_service_appends_nothing_to_a_session_row_of_another_copy(
    other: OlderCopy, read: Operation | None
) -> None:
    """Whatever the service has read; when the row is restored, all of it goes on as before."""
    db = other.database
    async with db.service() as service:
        if read is append:  # then the session moves on, and so does its other copy
            await append(service, db, VISIT)
            await _append_to_copy(other)
        elif read:
            await read(service, db, VISIT)
        session = await service.get_session(**VISIT._asdict())
        assert session is not None
        (ours,) = db.rows("SELECT * FROM secure_sessions WHERE id = :visit")
        other.replay_row("secure_sessions", "id = :visit")
        before = db.dump()
        for unproven in (get_no_events, list_user, list_app):  # limits.md: they detect nothing
            await unproven(service, db, VISIT)
            for delta in ({}, {"step": 5}, {"user:step": 5}, {"app:step": 5}, {"m": "z" * 9000}):
                with pytest.raises(TamperedError):
                    await append_delta(service, session, delta)
        for proving in (get, get_last, get_last_three, get_after):
            assert type(await rejection(proving, service, db, VISIT)) is TamperedError
        assert db.dump() == before
        insert_rows(db, "secure_sessions", [ours])
        assert await service.get_session(**VISIT._asdict()) == session
        await append_delta(service, session, {"step": 6})
        assert await service.get_session(**VISIT._asdict()) == session


async def _append_to_copy(other: OlderCopy) -> None:
    backend = other.database.backend()
    async with EncryptedSessionService(f"sqlite:///{other.path}", backend) as theirs:
        session = await theirs.get_session(**VISIT._asdict())
        assert session is not None
        await append_delta(theirs, session, {"step": 100})
    settle(other.path)


async def test_longer_session_row_with_made_up_events_does_not_stop_a_service_for_good(
    longer: OlderCopy,
) -> None:
    """A listing cannot detect it; then the service rejects the row of before as an older one."""
    db = longer.database
    (ours,) = db.rows("SELECT * FROM secure_sessions WHERE id = :visit")
    longer.replay_row("secure_sessions", "id = :visit")
    db.run("INSERT INTO secure_events VALUES (:visit, 5, 0, x'00')")
    async with db.service(cache=Caches(seconds=0.5)) as service:
        await list_user(service, db, VISIT)
        assert type(await rejection(get, service, db, VISIT)) is TamperedError
        db.run("DELETE FROM secure_events WHERE session_row = :visit AND seq = 5")
        insert_rows(db, "secure_sessions", [ours])
        await asyncio.sleep(0.6)
        session = await service.get_session(**VISIT._asdict())
        assert session == db.session(VISIT)
        await append_delta(service, session, {"step": 6})
    async with db.service() as service:
        assert await service.get_session(**VISIT._asdict()) == session


@pytest.mark.parametrize(
    ("table", "row"), [("users", "alice"), ("apps", "clinic"), ("bases", "archive")]
)
async def test_running_service_rejects_an_owners_row_of_another_copy(
    other: OlderCopy, table: str, row: str
) -> None:
    db = other.database
    async with db.service() as service:
        for who in (VISIT, ARCHIVE):
            await get(service, db, who)
        key = "session_row" if table == "bases" else "id"
        other.replay_row(f"secure_{table}", f"{key} = :{row}")
        impact = {"users": USER, "apps": APP, "bases": SNAPSHOT}[table]
        who = ARCHIVE if table == "bases" else VISIT
        before = db.dump()
        for operation in impact.rejected:
            if operation in _NEED_NO_OTHER_ROW:
                continue
            error = await rejection(operation, service, db, who)
            assert isinstance(error, (TamperedError, AlreadyExistsError)), operation
        assert db.dump() == before


# A service that has the session's row in its cache does these without the rows in question.
_NEED_NO_OTHER_ROW = (append, append_large, delete)
