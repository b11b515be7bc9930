"""Sealed values that are moved, copied or swapped, each of them authentic where it was."""

import itertools

import pytest

from adk_secure_sessions import (
    PlaintextRefusedError,
    SecureSessionError,
    TamperedError,
    UnknownKeyError,
    WrongKeyError,
)
from tests.attacks.places import (
    APP_STATE,
    APP_WITNESS,
    DATA_MASTER,
    EVERYWHERE,
    INDEX_MASTER,
    RECORDS,
    Place,
    by_name,
)
from tests.attacks.support import (
    APP,
    DATABASE,
    MISPLACED,
    SESSION,
    SESSION_BY_ID,
    USER,
    Database,
    assert_refused,
    get,
    list_user,
    outcome,
    refusal,
)
from tests.attacks.world import BOB, EVERYBODY, NOTES, VISIT


def swap(db: Database, table: str, column: str, one: str, other: str) -> None:
    """Exchange a column between two rows, UNIQUE or not."""
    first = db.value(f"SELECT {column} FROM {table} WHERE {one}")
    second = db.value(f"SELECT {column} FROM {table} WHERE {other}")
    keys = [db.value(f"SELECT rowid FROM {table} WHERE {where}") for where in (one, other)]
    for key, value in ((keys[0], b"\0"), (keys[1], first), (keys[0], second)):
        db.run(f"UPDATE {table} SET {column} = :value WHERE rowid = :key", value=value, key=key)


async def test_states_of_two_users_swapped_are_refused(db: Database) -> None:
    swap(db, "secure_users", "state", "id = :alice", "id = :bob")
    await assert_refused(db, USER._replace(unharmed=()), *MISPLACED)
    await assert_refused(db, USER._replace(unharmed=()), *MISPLACED, who=BOB)


async def test_rows_of_two_users_swapped_are_refused(db: Database) -> None:
    """All but the tag, by which each is found."""
    swap(db, "secure_users", "tag", "id = :alice", "id = :bob")
    await assert_refused(db, USER._replace(unharmed=()), *MISPLACED)
    await assert_refused(db, USER._replace(unharmed=()), *MISPLACED, who=BOB)


async def test_states_of_two_apps_swapped_are_refused(db: Database) -> None:
    swap(db, "secure_apps", "state", "id = :clinic", "id = :bank")
    await assert_refused(db, APP._replace(unharmed=()), *MISPLACED)


async def test_states_of_two_sessions_of_one_user_swapped_are_refused(db: Database) -> None:
    swap(db, "secure_sessions", "state", "id = :visit", "id = :notes")
    level = SESSION._replace(unharmed=(BOB,))
    await assert_refused(db, level, TamperedError)
    await assert_refused(db, level, TamperedError, who=NOTES)


async def test_tags_of_two_sessions_of_one_user_swapped_are_refused(db: Database) -> None:
    swap(db, "secure_sessions", "tag", "id = :visit", "id = :notes")
    level = SESSION._replace(unharmed=(BOB,))
    await assert_refused(db, level, TamperedError)
    await assert_refused(db, level, TamperedError, who=NOTES)


async def test_states_of_sessions_of_two_users_swapped_are_refused(db: Database) -> None:
    swap(db, "secure_sessions", "state", "id = :visit", "id = :bob_visit")
    level = SESSION._replace(unharmed=(NOTES,))
    await assert_refused(db, level, *MISPLACED)
    await assert_refused(db, level, *MISPLACED, who=BOB)


async def test_sessions_of_two_users_swapped_by_tag_are_refused(db: Database) -> None:
    """Each finds a session that was never theirs, with its history."""
    swap(db, "secure_sessions", "tag", "id = :visit", "id = :bob_visit")
    level = SESSION._replace(unharmed=(NOTES,))
    await assert_refused(db, level, *MISPLACED)
    await assert_refused(db, level, *MISPLACED, who=BOB)


async def test_session_given_to_another_user_is_not_listed_as_theirs(db: Database) -> None:
    db.run("UPDATE secure_sessions SET user_row = :bob WHERE id = :visit")
    async with db.service() as service:
        assert type(await refusal(list_user, service, db, BOB)) in MISPLACED


def may_refuse(source: Place, target: Place) -> set[type[Exception]]:
    """The errors for a value of one place in another."""
    if target.table == "secure_keyring":
        return {WrongKeyError}
    if source in RECORDS and target in RECORDS:
        same_owner = (source in OF_THE_APP) == (target in OF_THE_APP)
        return {TamperedError} if same_owner else set(MISPLACED)
    # A wrapped key names a key that is nobody's data key, or is no record at all.
    return {TamperedError, UnknownKeyError, PlaintextRefusedError}


OF_THE_APP = (APP_STATE, APP_WITNESS)


@pytest.mark.parametrize("target", EVERYWHERE, ids=by_name)
async def test_value_of_any_other_kind_in_its_place_is_refused(db: Database, target: Place) -> None:
    """Every pair: a user's state among sessions, an event as a base, a key as a state..."""
    accepted = []
    for source in EVERYWHERE:
        if source == target:
            continue
        target.store(db, source.stored(db))
        before = db.dump()
        async with db.service() as service:
            error = await outcome(get(service, db, target.who))
        if type(error) not in may_refuse(source, target) or db.dump() != before:
            accepted.append(f"{source.name}: {error!r}")
        db.restore()
    assert accepted == []


@pytest.mark.parametrize("target", RECORDS, ids=by_name)
async def test_record_of_another_app_in_its_place_is_refused(db: Database, target: Place) -> None:
    accepted = []
    for source in RECORDS:
        theirs = source.where.replace(":clinic", ":bank").replace(":alice", ":carol")
        theirs = theirs.replace(":visit", ":carol_visit")
        if source.name == "base":
            continue  # they have none
        target.store(db, db.value(f"SELECT {source.column} FROM {source.table} WHERE {theirs}"))
        async with db.service() as service:
            error = await outcome(get(service, db, target.who))
        if type(error) not in MISPLACED:
            accepted.append(f"{source.name}: {error!r}")
        db.restore()
    assert accepted == []


TABLES = {
    "secure_apps": "state",
    "secure_users": "state",
    "secure_sessions": "state",
    "secure_bases": "state",
    "secure_events": "event",
    "secure_witnesses": "seal",
    "secure_data_keys": "wrapped",
}


@pytest.mark.parametrize(("table", "column"), TABLES.items(), ids=list(TABLES))
async def test_any_two_rows_of_a_table_that_swap_their_sealed_values_are_noticed(
    db: Database, table: str, column: str
) -> None:
    primary = {"secure_events": "session_row, seq", "secure_witnesses": "tag"}
    key = primary.get(table, "rowid")
    few = "WHERE seq IN (0, 3)" if table == "secure_events" else ""
    rows = db.rows(f"SELECT {key}, {column} FROM {table} {few}")
    at = " AND ".join(f"{name} = ?" for name in key.split(", "))
    update = f"UPDATE {table} SET {column} = ? WHERE {at}"
    pairs = [*itertools.combinations(rows, 2)]
    for one, other in pairs[:: 5 if db.replica else 1]:
        with db.connect() as connection:
            connection.execute(update, (other[-1], *one[:-1]))
            connection.execute(update, (one[-1], *other[:-1]))
        async with db.service() as service:
            errors = []
            for who in EVERYBODY:
                try:
                    assert await get(service, db, who) == db.held(who)
                except SecureSessionError as error:
                    errors.append(type(error).__name__)
            assert errors, f"{one[:-1]} and {other[:-1]} can be swapped"
            assert set(errors) <= {"TamperedError", "UnknownKeyError"}
        with db.connect() as connection:
            connection.execute(update, (one[-1], *one[:-1]))
            connection.execute(update, (other[-1], *other[:-1]))


async def test_wrapped_data_keys_of_two_users_swapped_are_refused(db: Database) -> None:
    both = ["owner = (SELECT tag FROM secure_users WHERE id = :alice)"]
    both += ["owner = (SELECT tag FROM secure_users WHERE id = :bob)"]
    swap(db, "secure_data_keys", "wrapped", *both)
    await assert_refused(db, USER._replace(unharmed=()), TamperedError)
    await assert_refused(db, USER._replace(unharmed=()), TamperedError, who=BOB)


async def test_data_key_given_to_another_user_is_refused(db: Database) -> None:
    """With its owner's tag swapped, each user would write under the other's key."""
    both = ["owner = (SELECT tag FROM secure_users WHERE id = :alice)"]
    both += ["owner = (SELECT tag FROM secure_users WHERE id = :bob)"]
    swap(db, "secure_data_keys", "owner", *both)
    await assert_refused(db, USER._replace(unharmed=()), TamperedError)
    await assert_refused(db, USER._replace(unharmed=()), TamperedError, who=BOB)


async def test_wrapped_master_keys_swapped_are_refused(db: Database) -> None:
    swap(db, "secure_keyring", "wrapped", DATA_MASTER.where, INDEX_MASTER.where)
    await assert_refused(db, DATABASE, WrongKeyError)


async def test_master_keys_that_swap_their_purpose_are_refused(db: Database) -> None:
    swap(db, "secure_keyring", "purpose", DATA_MASTER.where, INDEX_MASTER.where)
    await assert_refused(db, DATABASE, WrongKeyError)


async def test_witnesses_of_two_sessions_swapped_are_refused(db: Database) -> None:
    """Tag and seal stay together; what moves is the number they vouch for."""
    rows = db.rows("SELECT id, tag FROM secure_sessions WHERE id IN (:visit, :notes)")
    one, other = (f"tag = x'{tag.hex()}'" for _, tag in rows)
    numbers = [
        db.value(f"SELECT number FROM secure_witnesses WHERE {where}") for where in (one, other)
    ]
    db.run(f"UPDATE secure_witnesses SET number = :number WHERE {one}", number=numbers[1])
    db.run(f"UPDATE secure_witnesses SET number = :number WHERE {other}", number=numbers[0])
    level = SESSION_BY_ID._replace(unharmed=(BOB,))
    await assert_refused(db, level, TamperedError)
    await assert_refused(db, level, TamperedError, who=NOTES)
    assert VISIT.user_id == NOTES.user_id
