"""Encrypted values that are moved, copied or swapped; each was authentic in its old cell."""

import pytest

from adk_secure_sessions import PlaintextRefusedError, TamperedError, UnknownKeyError, WrongKeyError
from tests.attacks.cells import (
    APP_STATE,
    APP_WITNESS,
    DATA_MASTER,
    EVERY_CELL,
    INDEX_MASTER,
    RECORDS,
    SNAPSHOT,
    Cell,
    by_name,
)
from tests.attacks.databases import also_on
from tests.attacks.support import (
    DATABASE,
    MISPLACED,
    SESSION,
    SESSION_BY_ID,
    USER,
    Database,
    assert_rejected,
    get,
    list_user,
    outcome,
    rejection,
)
from tests.attacks.world import BOB, NOTES


def swap(db: Database, table: str, column: str, one: str, other: str) -> None:
    """Exchange a column of two rows, even if it is UNIQUE."""
    first = db.value(f"SELECT {column} FROM {table} WHERE {one}")
    second = db.value(f"SELECT {column} FROM {table} WHERE {other}")
    keys = [db.value(f"SELECT rowid FROM {table} WHERE {where}") for where in (one, other)]
    for key, value in ((keys[0], b"\0"), (keys[1], first), (keys[0], second)):
        db.run(f"UPDATE {table} SET {column} = :value WHERE rowid = :key", value=value, key=key)


# With its tag, by which it is found, a row gets all that belongs to the other one.
COLUMNS = pytest.mark.parametrize("column", ["state", "tag"])


@also_on("fernet", "mariadb")
@COLUMNS
async def test_states_or_rows_of_two_users_swapped_are_rejected(db: Database, column: str) -> None:
    swap(db, "secure_users", column, "id = :alice", "id = :bob")
    await assert_rejected(db, USER._replace(unaffected=()), *MISPLACED)
    await assert_rejected(db, USER._replace(unaffected=()), *MISPLACED, who=BOB)


@also_on("mariadb", cases=["tag"])
@COLUMNS
async def test_states_or_rows_of_two_sessions_of_one_user_swapped_are_rejected(
    db: Database, column: str
) -> None:
    swap(db, "secure_sessions", column, "id = :visit", "id = :notes")
    impact = SESSION._replace(unaffected=(BOB,))
    await assert_rejected(db, impact, TamperedError)
    await assert_rejected(db, impact, TamperedError, who=NOTES)


async def test_sessions_of_two_users_swapped_by_tag_are_rejected(db: Database) -> None:
    """Each user finds the session of the other, with its history."""
    swap(db, "secure_sessions", "tag", "id = :visit", "id = :bob_visit")
    impact = SESSION._replace(unaffected=(NOTES,))
    await assert_rejected(db, impact, *MISPLACED)
    await assert_rejected(db, impact, *MISPLACED, who=BOB)


async def test_session_given_to_another_user_is_not_listed_as_theirs(db: Database) -> None:
    db.run("UPDATE secure_sessions SET user_row = :bob WHERE id = :visit")
    async with db.service() as service:
        assert type(await rejection(list_user, service, db, BOB)) in MISPLACED


def errors_for(source: Cell, target: Cell) -> set[type[Exception]]:
    """The errors for the value of one cell in another cell."""
    if target.table == "secure_keyring":
        return {WrongKeyError}
    if source in RECORDS and target in RECORDS:
        same_owner = (source in OF_THE_APP) == (target in OF_THE_APP)
        return {TamperedError} if same_owner else set(MISPLACED)
    # A wrapped key names a master key, or is not a record.
    return {TamperedError, UnknownKeyError, PlaintextRefusedError}


OF_THE_APP = (APP_STATE, APP_WITNESS)


@also_on("fernet", "packed", cases=["event"])
@pytest.mark.parametrize("target", EVERY_CELL, ids=by_name)
async def test_value_of_any_other_kind_is_rejected(db: Database, target: Cell) -> None:
    """Every pair: a user's state as a session's, an event as a snapshot, a key as a state..."""
    accepted = []
    for source in EVERY_CELL:
        if source == target:
            continue
        target.store(db, source.stored(db))
        before = db.dump()
        async with db.service() as service:
            error = await outcome(get(service, db, target.who))
        if type(error) not in errors_for(source, target) or db.dump() != before:
            accepted.append(f"{source.name}: {error!r}")
        db.restore()
    assert accepted == []


@pytest.mark.parametrize("target", RECORDS, ids=by_name)
async def test_record_of_another_app_is_rejected(db: Database, target: Cell) -> None:
    accepted = []
    for source in RECORDS:
        theirs = source.where.replace(":clinic", ":bank").replace(":alice", ":carol")
        theirs = theirs.replace(":visit", ":carol_visit")
        if source == SNAPSHOT:
            continue  # the other app has none
        target.store(db, db.value(f"SELECT {source.column} FROM {source.table} WHERE {theirs}"))
        async with db.service() as service:
            error = await outcome(get(service, db, target.who))
        if type(error) not in MISPLACED:
            accepted.append(f"{source.name}: {error!r}")
        db.restore()
    assert accepted == []


async def test_data_key_given_to_another_user_is_rejected(db: Database) -> None:
    """The owners are swapped, so that each user would encrypt with the other's key."""
    both = ["owner = (SELECT tag FROM secure_users WHERE id = :alice)"]
    both += ["owner = (SELECT tag FROM secure_users WHERE id = :bob)"]
    swap(db, "secure_data_keys", "owner", *both)
    await assert_rejected(db, USER._replace(unaffected=()), TamperedError)
    await assert_rejected(db, USER._replace(unaffected=()), TamperedError, who=BOB)


@pytest.mark.parametrize("column", ["wrapped", "purpose"])
async def test_master_keys_that_swap_a_column_are_rejected(db: Database, column: str) -> None:
    swap(db, "secure_keyring", column, DATA_MASTER.where, INDEX_MASTER.where)
    await assert_rejected(db, DATABASE, WrongKeyError)


async def test_witnesses_of_two_sessions_swapped_are_rejected(db: Database) -> None:
    """Tag and record stay together; the numbers that they prove are exchanged."""
    rows = db.rows("SELECT id, tag FROM secure_sessions WHERE id IN (:visit, :notes)")
    one, other = (f"tag = x'{tag.hex()}'" for _, tag in rows)
    numbers = [
        db.value(f"SELECT number FROM secure_witnesses WHERE {where}") for where in (one, other)
    ]
    db.run(f"UPDATE secure_witnesses SET number = :number WHERE {one}", number=numbers[1])
    db.run(f"UPDATE secure_witnesses SET number = :number WHERE {other}", number=numbers[0])
    impact = SESSION_BY_ID._replace(unaffected=(BOB,))
    await assert_rejected(db, impact, TamperedError)
    await assert_rejected(db, impact, TamperedError, who=NOTES)
