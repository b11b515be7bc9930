"""Plaintext columns: a modified value is rejected, whatever its type."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest

from adk_secure_sessions import PlaintextRefusedError, TamperedError, UnknownKeyError, WrongKeyError
from tests.attacks.cells import EVERY_CELL, SAMPLE, Cell, by_name
from tests.attacks.databases import also_on
from tests.attacks.support import (
    APP,
    DATABASE,
    HISTORY,
    MISPLACED,
    SESSION,
    SESSION_BY_ID,
    SNAPSHOT,
    USER,
    Database,
    Impact,
    Operation,
    assert_rejected,
    list_app,
    list_user,
    one_of_each,
)
from tests.attacks.world import ARCHIVE, VISIT, SessionIds

USER_TAG = "(SELECT tag FROM secure_users WHERE id = :alice)"
OF_USER, OF_APP = f"= {USER_TAG}", "= (SELECT tag FROM secure_apps WHERE id = :clinic)"
OF_SESSION = "= (SELECT tag FROM secure_sessions WHERE id = :visit)"


class Column(NamedTuple):
    """A column of one row, the impact of modifying it, and the errors."""

    table: str
    name: str
    where: str
    impact: Impact
    errors: tuple[type[Exception], ...] = (TamperedError,)
    who: SessionIds = VISIT
    # A listing finds its rows by this column; docs/format.md says what it cannot detect.
    except_for: tuple[Operation, ...] = ()


# The errors for a value that is not a record: it may look like plaintext.
_NOT_A_RECORD = (TamperedError, PlaintextRefusedError)
UNREADABLE = dict.fromkeys([cell.table for cell in EVERY_CELL], _NOT_A_RECORD) | {
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
    Column("secure_apps", "id", "id = :clinic", APP, except_for=(list_app,)),
    Column("secure_apps", "version", "id = :clinic", APP),
    Column("secure_users", "id", "id = :alice", USER),
    Column("secure_users", "app_row", "id = :alice", USER, except_for=(list_app,)),
    Column("secure_users", "version", "id = :alice", USER),
    Column("secure_sessions", "id", "id = :visit", SESSION),
    Column("secure_sessions", "user_row", "id = :visit", SESSION, except_for=(list_user, list_app)),
    Column("secure_sessions", "revision", "id = :visit", SESSION),
    Column("secure_sessions", "base_revision", "id = :visit", SESSION),
    Column("secure_sessions", "created_at", "id = :visit", SESSION),
    Column("secure_sessions", "updated_at", "id = :visit", SESSION),
    Column("secure_sessions", "expires_at", "id = :visit", SESSION),
    Column("secure_sessions", "base_revision", "id = :archive", SESSION, who=ARCHIVE),
    Column("secure_bases", "session_row", "session_row = :archive", SNAPSHOT, who=ARCHIVE),
    Column("secure_bases", "revision", "session_row = :archive", SNAPSHOT, who=ARCHIVE),
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
# The columns on which sweeps over NUMBERS and TAGS also run on other databases: of each type.
SAMPLE_COLUMNS = [
    "secure_users.version of alice",
    "secure_events.seq of visit",
    "secure_keyring.created_at of data",
    "secure_sessions.tag of visit",
    "secure_keyring.root_key_id of data",
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
        row = re.findall(r"[:'](\w+)", value.where)[0]
        return f"{value.table}.{value.name} of {row}"
    return None


class Attempts:
    """Tries one value after the other, and reports all that were accepted."""

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
        except pytest.skip.Exception as skipped:  # the server itself rejects the value
            self._impossible.append(str(skipped))
        self._db.restore()

    def conclude(self) -> None:
        assert self._made
        assert self._accepted == []
        if len(self._impossible) == self._made:
            pytest.skip(self._impossible[0])


# By default, a column gets every fourth value: its neighbours in the list get the others.
in_quarters = pytest.mark.parametrize(
    "quarter", [0, *(pytest.param(n, marks=pytest.mark.soak) for n in (1, 2, 3))]
)


async def assert_all_rejected(
    db: Database, column: Column, values: dict[str, str], quarter: int, *, untyped: bool
) -> None:
    attempts = Attempts(db)
    impact = one_of_each(column.impact)
    step, begin = min(len(values), 4), [*NUMBERS, *TAGS].index(column) + quarter
    # A server plays no part in how a value is judged: there, every sixth value.
    part = slice(begin % 2, None, 6) if db.replica else slice(begin % step, None, step)
    for name, expression in [*values.items()][part]:
        value = expression.replace("{}", column.name)
        with attempts.of(name):
            if untyped:
                db.lift_constraints(column.table)
            # OR REPLACE removes the row that has the number already.
            db.run(
                f"UPDATE OR REPLACE {column.table} SET {column.name} = {value} WHERE {column.where}"
            )
            await assert_rejected(
                db, impact, *column.errors, who=column.who, except_for=column.except_for
            )
    attempts.conclude()


@also_on("mariadb", cases=["secure_events.seq of visit"])
@in_quarters
@pytest.mark.parametrize("column", NUMBERS, ids=label)
async def test_number_that_was_modified_is_rejected(
    aes_db: Database, column: Column, quarter: int
) -> None:
    others = dict(OTHER_NUMBERS)
    if column.name == "expires_at":  # it holds the largest number
        del others["one more"], others["the largest"]
    await assert_all_rejected(aes_db, column, others, quarter, untyped=False)


@also_on("postgresql", "mariadb")
async def test_smallest_revision_is_rejected(aes_db: Database) -> None:
    """On servers, a query that subtracts from it fails: the number is out of range."""
    aes_db.run(f"UPDATE secure_sessions SET revision = {-(2**63)} WHERE id = :visit")
    await assert_rejected(aes_db, SESSION, TamperedError)


@pytest.mark.parametrize("column", NUMBERS, ids=label)
async def test_number_that_was_modified_is_rejected_by_every_operation_and_affects_nobody_else(
    db: Database, column: Column
) -> None:
    db.run(f"UPDATE {column.table} SET {column.name} = {column.name} - 7 WHERE {column.where}")
    await assert_rejected(
        db, column.impact, *column.errors, who=column.who, except_for=column.except_for
    )


@also_on("engine", "mariadb", cases=SAMPLE_COLUMNS)
@in_quarters
@pytest.mark.parametrize("column", [*NUMBERS, *TAGS], ids=label)
async def test_value_of_another_type_or_tag_that_was_modified_is_rejected(
    typed_db: Database, column: Column, quarter: int
) -> None:
    """Where the driver fails on a text, the error is one of ours, and does not quote the text."""
    values = (OTHER_TAGS if column in TAGS else OTHER_TYPES) | NOT_UTF8
    if column.name == "session_row" and column.table == "secure_events":
        del values["the same number as text"]  # SQLite compares it as a number
    await assert_all_rejected(typed_db, column, values, quarter, untyped=True)


@also_on("engine", cases=SAMPLE)  # servers do not store such a value
@pytest.mark.parametrize("cell", EVERY_CELL, ids=by_name)
async def test_encrypted_value_as_text_is_rejected(typed_db: Database, cell: Cell) -> None:
    """TEXT of the same bytes: no driver returns it as a BLOB."""
    before = cell.stored(typed_db)
    assert isinstance(before, bytes)
    typed_db.run(
        f"UPDATE {cell.table} SET {cell.column} = CAST({cell.column} AS TEXT) WHERE {cell.where}"
    )
    impact = one_of_each(cell.impact)
    await assert_rejected(typed_db, impact, *UNREADABLE[cell.table], who=cell.who)


@also_on("engine", cases=SAMPLE)  # servers do not store such a value
@in_quarters
@pytest.mark.parametrize("cell", EVERY_CELL, ids=by_name)
async def test_encrypted_value_of_another_type_is_rejected(
    typed_db: Database, cell: Cell, quarter: int
) -> None:
    attempts = Attempts(typed_db)
    impact = one_of_each(cell.impact)
    begin = (EVERY_CELL.index(cell) + quarter) % 4
    for name, value in [*OTHER_VALUES.items()][begin::4]:
        with attempts.of(name):
            typed_db.lift_constraints(cell.table)
            cell.store(typed_db, value)
            await assert_rejected(typed_db, impact, *UNREADABLE[cell.table], who=cell.who)
    attempts.conclude()


@pytest.mark.in_turn("cell", "value")
@also_on("fernet", "mariadb", cases=["nulled-event", "emptied-event"])
@pytest.mark.parametrize("cell", EVERY_CELL, ids=by_name)
@pytest.mark.parametrize("value", [None, b""], ids=["nulled", "emptied"])
async def test_removed_encrypted_value_is_rejected_by_every_operation_and_affects_nobody_else(
    db: Database, cell: Cell, value: bytes | None
) -> None:
    if value is None:
        db.lift_constraints(cell.table)
    cell.store(db, value)
    error = WrongKeyError if cell.table == "secure_keyring" else TamperedError
    await assert_rejected(db, cell.impact, error, who=cell.who)
