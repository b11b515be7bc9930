"""Statements meet exactly the rows that they name, and their rows become typed ones.

What a statement means only a database can tell: here SQLite in memory.  The same statements run on
every server in tests/conformance and tests/attacks.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa

from adk_secure_sessions.keys.keyring import MasterFingerprint
from adk_secure_sessions.storage import queries as sql
from adk_secure_sessions.storage import schema
from adk_secure_sessions.storage.queries import QueryRows, padded_chunks
from tests.storage.support import WHO

# --- parameters in chunks ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "lengths"), [(0, []), (1, [2]), (2, [2]), (3, [200]), (200, [200]), (202, [200, 2])]
)
def test_chunks_have_one_of_two_lengths_and_lose_no_value(number: int, lengths: list[int]) -> None:
    made = [*padded_chunks(range(number))]
    assert [len(part) for part in made] == lengths
    assert {value for part in made for value in part} == set(range(number))


def test_short_chunk_repeats_its_last_value() -> None:
    assert [*padded_chunks(["a"])] == [["a", "a"]]


# --- on a database -------------------------------------------------------------------------------


@pytest.fixture
def connection() -> Iterator[sa.Connection]:
    engine = sa.create_engine("sqlite://")
    with engine.connect() as connection:
        schema.metadata.create_all(connection)
        yield connection
    engine.dispose()


SESSION_COLUMNS: dict[str, Any] = {
    "id": 3, "user_row": 2, "tag": WHO.session_tag, "revision": 1, "base_revision": -1,
    "created_at": 50, "updated_at": 60, "expires_at": 65, "state": b"session",
}  # fmt: skip
APP_COLUMNS: dict[str, Any] = {
    "id": 1, "tag": WHO.app_tag, "app_name": b"clinic", "version": 4, "state": b"app"
}  # fmt: skip
USER_COLUMNS: dict[str, Any] = {
    "id": 2, "app_row": 1, "tag": WHO.user_tag, "version": 5, "state": b"user"
}  # fmt: skip
KEY_COLUMNS: dict[str, Any] = {
    "id": 70, "owner": WHO.user_tag, "generation": 0, "backend_id": 1, "created_at": 80,
    "wrapped": b"wrapped",
}  # fmt: skip

MASTER_COLUMNS: dict[str, Any] = {
    "id": 60, "purpose": "data", "root_key_id": "root", "created_at": 61, "wrapped": b"master",
}  # fmt: skip
MARK = MasterFingerprint(60, 61, b"master")


@pytest.fixture
def filled(connection: sa.Connection) -> sa.Connection:
    """One row of each kind, and some of somebody else, which no statement may meet."""

    def add(table: sa.Table, *rows: dict[str, Any]) -> None:
        connection.execute(sa.insert(table), list(rows))

    other = b"o" * 16
    add(schema.apps, APP_COLUMNS, APP_COLUMNS | {"id": 101, "tag": other})
    add(schema.users, USER_COLUMNS, USER_COLUMNS | {"id": 102, "tag": other, "app_row": 101})
    add(
        schema.sessions,
        SESSION_COLUMNS,
        SESSION_COLUMNS | {"id": 103, "tag": other, "user_row": 102},
    )
    tags = {WHO.app_tag: 4, WHO.user_tag: 5, WHO.session_tag: 3, other: 9}
    add(
        schema.witnesses,
        *({"tag": tag, "number": number, "seal": b"seal"} for tag, number in tags.items()),
    )
    add(
        schema.snapshots,
        *({"session_row": n, "revision": 0, "state": b"snapshot"} for n in (3, 103)),
    )
    add(
        schema.events,
        *(
            {"session_row": row, "seq": seq, "time": 90 + seq, "event": b"%d" % seq}
            for row in (3, 103)
            for seq in range(3)
        ),
    )
    add(schema.keyring, MASTER_COLUMNS)
    add(schema.data_keys, KEY_COLUMNS, KEY_COLUMNS | {"id": 71, "owner": other})
    return connection


def read_rows(connection: sa.Connection, query: sa.Executable, **more: object) -> QueryRows:
    return QueryRows(
        [tuple(row) for row in connection.execute(query, {**WHO.tag_parameters(), **more})]
    )


@pytest.mark.parametrize(
    "variants",
    [
        sql.SESSION_WITH_ALL_EVENTS,
        sql.SESSION_WITH_LAST_EVENTS,
        sql.SESSION_WITHOUT_EVENTS,
        sql.sessions_of_user(),
        sql.sessions_of_app(),
        sql.OWNERS,
    ],
    ids=["all events", "last events", "no events", "user's list", "app's list", "owners"],
)
def test_data_keys_and_the_keyring_are_read_only_where_they_are_asked_for(
    filled: sa.Connection, variants: sql.QueryVariants
) -> None:
    rows = read_rows(filled, variants.with_keys, limit=1)
    assert (len(rows.data_keys), rows.master_fingerprints) == (1, [MARK])
    rows = read_rows(filled, variants.without_keys, limit=1)
    assert (rows.data_keys, rows.master_fingerprints) == ([], [])


# --- changes that rely on what was read ----------------------------------------------------------


def met(connection: sa.Connection, statement: sa.Executable, values: dict[str, Any]) -> int:
    """How many rows a change meets."""
    return connection.execute(statement, values).rowcount


def prefixed(prefix: str, columns: dict[str, Any]) -> dict[str, Any]:
    return {f"{prefix}_{name}": value for name, value in columns.items()}


def altered(value: object) -> object:
    return value + 1 if isinstance(value, int) else b"another......."


NEXT = {"revision": 2, "base_revision": -1, "updated_at": 61, "expires_at": 66, "state": b"next"}
NEW_SESSION = SESSION_COLUMNS | {"id": 4, "tag": b"n" * 16}
OF_USER = prefixed("user", USER_COLUMNS)
OF_CACHED = {
    **prefixed("app", APP_COLUMNS),
    **OF_USER,
    **prefixed("app_witness", {"tag": WHO.app_tag, "number": 4, "seal": b"seal"}),
    **prefixed("user_witness", {"tag": WHO.user_tag, "number": 5, "seal": b"seal"}),
}
STATE = {"version": 6, "state": b"next"}
# A change, what it requires of the rows that are there, and what it writes.
CHANGES: dict[str, tuple[sa.Executable, dict[str, Any], dict[str, Any]]] = {
    "app": (sql.UPDATE_APP, {"at_id": 1, "at_version": 4, "at_state": b"app"}, STATE),
    "user": (sql.UPDATE_USER, {"at_id": 2, "at_version": 5, "at_state": b"user"}, STATE),
    "witness": (
        sql.UPDATE_WITNESS, {"at_tag": WHO.user_tag, "at_number": 5}, {"number": 6, "seal": b"next"}
    ),
    "snapshot": (
        sql.UPDATE_SNAPSHOT, {"at_id": 3, "at_revision": 0}, {"revision": 1, "state": b"next"}
    ),
    "session": (sql.UPDATE_SESSION, prefixed("at", SESSION_COLUMNS), NEXT),
    "session's deletion": (sql.DELETE_SESSION, prefixed("at", SESSION_COLUMNS), {}),
    "session of cached owners": (sql.INSERT_SESSION_OF_CACHED, OF_CACHED, NEW_SESSION),
    "session of a user": (sql.INSERT_SESSION_OF_USER, OF_USER, NEW_SESSION),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_change_meets_the_rows_that_were_read_and_no_others(
    filled: sa.Connection, name: str
) -> None:
    """One column after the other is not as this process knows it."""
    statement, where, values = CHANGES[name]
    for column in where:
        assert met(filled, statement, values | where | {column: altered(where[column])}) == 0
    assert met(filled, statement, values | where) == 1


@pytest.mark.parametrize(
    ("masters", "expected"),
    [([11], 1), ([11, 12], 0), ([12], 0), ([], 0)],
    ids=["as it was read", "one more", "another", "none"],
)
def test_data_key_is_stored_only_under_the_keyring_that_was_read(
    connection: sa.Connection, masters: list[int], expected: int
) -> None:
    for master in [1, *masters]:  # 1 is the index master key
        row = {"id": master, "purpose": "data", "root_key_id": "key", "created_at": 0}
        connection.execute(sa.insert(schema.keyring), row | {"wrapped": b""})
    assert (
        met(connection, sql.INSERT_KEY, KEY_COLUMNS | {"master_id": 11, "master_count": 2})
        == expected
    )


def test_locking_a_data_key_changes_nothing_and_meets_it_only_while_it_is_there(
    filled: sa.Connection,
) -> None:
    locked = {"at_id": 70, "generation": 0}
    assert met(filled, sql.TOUCH_DATA_KEY, locked) == 1
    assert filled.execute(sa.select(schema.data_keys)).first() == tuple(KEY_COLUMNS.values())
    assert met(filled, sql.TOUCH_DATA_KEY, locked | {"at_id": 72}) == 0
