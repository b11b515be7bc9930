"""Plaintext columns: what a reader relies on is authentic, whatever its type is made to be."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest

from adk_secure_sessions import PlaintextRefusedError, TamperedError, UnknownKeyError, WrongKeyError
from tests.attacks.places import EVERYWHERE, Place, by_name
from tests.attacks.support import (
    APP,
    DATABASE,
    HISTORY,
    MISPLACED,
    SESSION,
    SESSION_BY_ID,
    USER,
    Database,
    Level,
    Operation,
    assert_refused,
    list_app,
    list_user,
    one_of_each,
)
from tests.attacks.world import ARCHIVE, VISIT, Who

USER_TAG = "(SELECT tag FROM secure_users WHERE id = :alice)"
OF_USER, OF_APP = f"= {USER_TAG}", "= (SELECT tag FROM secure_apps WHERE id = :clinic)"
OF_SESSION = "= (SELECT tag FROM secure_sessions WHERE id = :visit)"


class Column(NamedTuple):
    """A column, who relies on it, and how that is refused."""

    table: str
    name: str
    where: str
    level: Level
    errors: tuple[type[Exception], ...] = (TamperedError,)
    who: Who = VISIT
    # A listing finds its rows by this column; docs/format.md says what it cannot notice.
    but: tuple[Operation, ...] = ()


# What a record is refused with that is none: it may be taken for one in clear.
_NO_RECORD = (TamperedError, PlaintextRefusedError)
UNREADABLE = dict.fromkeys([place.table for place in EVERYWHERE], _NO_RECORD) | {
    "secure_keyring": (WrongKeyError,)
}
OTHER_VALUES: dict[str, Any] = {
    "text": "AKS",
    "empty text": "",
    "a number": 17,
    "zero": 0,
    "a large number": 2**40,
    "a fraction": 0.5,
}

NUMBERS = [
    Column("secure_apps", "id", "id = :clinic", APP, but=(list_app,)),
    Column("secure_apps", "version", "id = :clinic", APP),
    Column("secure_users", "id", "id = :alice", USER),
    Column("secure_users", "app_row", "id = :alice", USER, but=(list_app,)),
    Column("secure_users", "version", "id = :alice", USER),
    Column("secure_sessions", "id", "id = :visit", SESSION),
    Column("secure_sessions", "user_row", "id = :visit", SESSION, but=(list_user, list_app)),
    Column("secure_sessions", "revision", "id = :visit", SESSION),
    Column("secure_sessions", "base_revision", "id = :visit", SESSION),
    Column("secure_sessions", "created_at", "id = :visit", SESSION),
    Column("secure_sessions", "updated_at", "id = :visit", SESSION),
    Column("secure_sessions", "base_revision", "id = :archive", SESSION, who=ARCHIVE),
    Column("secure_bases", "session_row", "session_row = :archive", SESSION, who=ARCHIVE),
    Column("secure_bases", "revision", "session_row = :archive", SESSION, who=ARCHIVE),
    Column("secure_events", "session_row", "session_row = :visit AND seq = 1", HISTORY),
    Column("secure_events", "seq", "session_row = :visit AND seq = 1", HISTORY),
    Column("secure_events", "time", "session_row = :visit AND seq = 1", HISTORY),
    Column("secure_witnesses", "number", f"tag {OF_APP}", APP),
    Column("secure_witnesses", "number", f"tag {OF_USER}", USER),
    Column("secure_witnesses", "number", f"tag {OF_SESSION}", SESSION_BY_ID),
    Column("secure_data_keys", "id", f"owner {OF_USER}", USER),
    Column("secure_data_keys", "generation", f"owner {OF_USER}", USER),
    Column("secure_data_keys", "backend_id", f"owner {OF_USER}", USER, MISPLACED),
    Column("secure_data_keys", "created_at", f"owner {OF_USER}", USER),
    Column("secure_data_keys", "generation", f"owner {OF_APP}", APP),
    Column("secure_keyring", "id", "purpose = 'data'", DATABASE, (WrongKeyError,)),
    Column("secure_keyring", "created_at", "purpose = 'data'", DATABASE, (WrongKeyError,)),
    Column("secure_keyring", "created_at", "purpose = 'index'", DATABASE, (WrongKeyError,)),
]
TAGS = [
    Column("secure_apps", "tag", "id = :clinic", APP),
    Column("secure_apps", "app_name", "id = :clinic", APP),
    Column("secure_users", "tag", "id = :alice", USER, MISPLACED),
    Column("secure_sessions", "tag", "id = :visit", SESSION),
    Column("secure_witnesses", "tag", f"tag {OF_APP}", APP),
    Column("secure_witnesses", "tag", f"tag {OF_USER}", USER),
    Column("secure_witnesses", "tag", f"tag {OF_SESSION}", SESSION_BY_ID),
    Column("secure_data_keys", "owner", f"owner {OF_USER}", USER, (UnknownKeyError,)),
    Column("secure_data_keys", "owner", f"owner {OF_APP}", APP, (UnknownKeyError,)),
    Column("secure_keyring", "purpose", "purpose = 'data'", DATABASE, (WrongKeyError,)),
    Column("secure_keyring", "purpose", "purpose = 'index'", DATABASE, (WrongKeyError,)),
    Column("secure_keyring", "root_key_id", "purpose = 'data'", DATABASE, (WrongKeyError,)),
]
OTHER_NUMBERS = {
    "one more": "{} + 1",
    "one less": "{} - 1",
    "negative": "-{} - 7",
    "the largest": str(2**63 - 1),
    "the smallest": str(-(2**63)),
}
OTHER_TYPES = {
    "NULL": "NULL",
    "text": "'text'",
    "the same number as text": "CAST({} AS TEXT)",
    "a fraction": "{} + 0.5",
    "infinity": "9e999",
    "a BLOB": "x'00ff'",
}
OTHER_TAGS = {
    "NULL": "NULL",
    "another BLOB": "x'00112233445566778899aabbccddeeff'",
    "an empty BLOB": "x''",
    "another text": "'another'",
    "empty text": "''",
    "a number": "1",
    "a real": "1.5",
    "shorter": "CAST(substr({}, 1, length({}) - 1) AS BLOB)",
    "longer": "CAST({} || x'00' AS BLOB)",
}
NOT_UTF8 = {
    "bytes that are never UTF-8": "CAST(x'fffe80' AS TEXT)",
    "the same bytes and more": "CAST({} || x'ff' AS TEXT)",
}


def label(value: object) -> str | None:
    if isinstance(value, Column):
        return f"{value.table}.{value.name} where {value.where.partition(' (')[0]}"
    return None


class Attempts:
    """One value after the other; tells of all that are accepted."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._accepted: list[str] = []
        self._impossible: list[str] = []
        self._made = 0

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        self._made += 1
        try:
            yield
        except AssertionError as failure:
            self._accepted.append(f"{name}: {str(failure).splitlines()[0][:300]}")
        except pytest.skip.Exception as refusal:  # by the server
            self._impossible.append(str(refusal))
        self._db.restore()

    def conclude(self) -> None:
        assert self._accepted == []
        if len(self._impossible) == self._made:
            pytest.skip(self._impossible[0])


async def assert_all_refused(
    db: Database, column: Column, values: dict[str, str], *, untyped: bool
) -> None:
    attempts = Attempts(db)
    level = one_of_each(column.level)
    # A server has no part in how a value is judged: there, every third.
    for name, expression in [*values.items()][:: 3 if db.replica else 1]:
        value = expression.replace("{}", column.name)
        with attempts.of(name):
            if untyped:
                db.lift_constraints(column.table)
            # OR REPLACE: a number that is taken then belongs to this row alone.
            db.run(
                f"UPDATE OR REPLACE {column.table} SET {column.name} = {value} WHERE {column.where}"
            )
            await assert_refused(db, level, *column.errors, who=column.who, but=column.but)
    attempts.conclude()


@pytest.mark.parametrize("column", NUMBERS, ids=label)
async def test_number_that_was_changed_is_refused(aes_db: Database, column: Column) -> None:
    await assert_all_refused(aes_db, column, OTHER_NUMBERS, untyped=False)


@pytest.mark.parametrize("column", NUMBERS, ids=label)
async def test_number_that_was_changed_is_refused_everywhere_and_harms_nobody_else(
    db: Database, column: Column
) -> None:
    db.run(f"UPDATE {column.table} SET {column.name} = {column.name} + 7 WHERE {column.where}")
    await assert_refused(db, column.level, *column.errors, who=column.who, but=column.but)


@pytest.mark.parametrize("column", NUMBERS, ids=label)
async def test_number_of_another_type_is_refused(typed_db: Database, column: Column) -> None:
    values = dict(OTHER_TYPES)
    if column.name == "session_row" and column.table == "secure_events":
        del values["the same number as text"]  # it is compared as the number that it is
    await assert_all_refused(typed_db, column, values, untyped=True)


@pytest.mark.parametrize("column", TAGS, ids=label)
async def test_tag_or_name_that_was_changed_is_refused(typed_db: Database, column: Column) -> None:
    await assert_all_refused(typed_db, column, OTHER_TAGS, untyped=True)


@pytest.mark.parametrize("column", [*NUMBERS, *TAGS], ids=label)
async def test_text_that_is_not_utf8_is_refused(typed_db: Database, column: Column) -> None:
    """The driver itself fails on it: still an error of ours, and without what it met."""
    await assert_all_refused(typed_db, column, NOT_UTF8, untyped=True)


@pytest.mark.parametrize("place", EVERYWHERE, ids=by_name)
async def test_sealed_value_as_text_is_refused(typed_db: Database, place: Place) -> None:
    """TEXT of the same bytes: no driver returns it as the BLOB that it was."""
    before = place.stored(typed_db)
    assert isinstance(before, bytes)
    typed_db.run(
        f"UPDATE {place.table} SET {place.column} = CAST({place.column} AS TEXT) "
        f"WHERE {place.where}"
    )
    level = one_of_each(place.level)
    await assert_refused(typed_db, level, *UNREADABLE[place.table], who=place.who)


@pytest.mark.parametrize("place", EVERYWHERE, ids=by_name)
async def test_sealed_value_of_another_type_is_refused(typed_db: Database, place: Place) -> None:
    attempts = Attempts(typed_db)
    level = one_of_each(place.level)
    for name, value in OTHER_VALUES.items():
        with attempts.of(name):
            typed_db.lift_constraints(place.table)
            place.store(typed_db, value)
            await assert_refused(typed_db, level, *UNREADABLE[place.table], who=place.who)
    attempts.conclude()


@pytest.mark.parametrize("place", EVERYWHERE, ids=by_name)
@pytest.mark.parametrize("value", [None, b""], ids=["nulled", "emptied"])
async def test_sealed_value_that_was_removed_is_refused_everywhere_and_harms_nobody_else(
    db: Database, place: Place, value: bytes | None
) -> None:
    if value is None:
        db.lift_constraints(place.table)
    place.store(db, value)
    error = WrongKeyError if place.table == "secure_keyring" else TamperedError
    await assert_refused(db, place.level, error, who=place.who)
