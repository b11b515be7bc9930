"""A whole database as data: for the service, and for a reader written from the page alone."""

import json
import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from google.adk.events import Event, EventActions
from google.adk.sessions import Session

from adk_secure_sessions import EncryptedSessionService, SecureSessionError
from tests import format_reader
from tests.pages import DOCS
from tests.sqlite_files import execute, value
from tests.vector_databases import Json, backends, copies_of, load, reader_of, roots

DATABASE = load("database.json")
ROOTS = roots("database.json")
database = copies_of("database.sql")
assert DATABASE["sessions"], "an empty vector file must not pass as success"


def service_on(path: Path, writer: str) -> EncryptedSessionService:
    return EncryptedSessionService(f"sqlite:///{path}", *backends("database.json", writer))


def who(expected: Json) -> dict[str, Any]:
    return {name: expected[name] for name in ("app_name", "user_id", "session_id")}


def scoped(expected: Json) -> Json:
    """The state as callers see it: with the app's and the user's."""
    (app,) = (a["state"] for a in DATABASE["apps"] if a["app_name"] == expected["app_name"])
    (user,) = (
        u["state"]
        for u in DATABASE["users"]
        if (u["app_name"], u["user_id"]) == (expected["app_name"], expected["user_id"])
    )
    return {
        **expected["state"],
        **{f"app:{key}": of_app for key, of_app in app.items()},
        **{f"user:{key}": of_user for key, of_user in user.items()},
    }


def assert_is(session: Session | None, expected: Json, *, with_events: bool = True) -> None:
    assert session is not None
    events = expected["events"] if with_events else []
    assert (session.app_name, session.user_id, session.id) == tuple(who(expected).values())
    assert session.state == scoped(expected)
    assert session.last_update_time == expected["updated_at"] / 1_000_000
    assert session.events == [Event.model_validate(event) for event in events]


async def assert_all_are(service: EncryptedSessionService) -> None:
    for expected in DATABASE["sessions"]:
        assert_is(await service.get_session(**who(expected)), expected)


@pytest.mark.parametrize("writer", list(ROOTS))
async def test_service_reads_the_database_as_the_vector_says(database: Path, writer: str) -> None:
    async with service_on(database, writer) as service:
        await assert_all_are(service)
        for app in DATABASE["apps"]:
            name = app["app_name"]
            there = [one for one in DATABASE["sessions"] if one["app_name"] == name]
            there.sort(key=lambda one: one["updated_at"])
            listed = (await service.list_sessions(app_name=name)).sessions
            for session, expected in zip(listed, there, strict=True):
                assert_is(session, expected, with_events=False)
        for user in DATABASE["users"]:
            names = {"app_name": user["app_name"], "user_id": user["user_id"]}
            assert await service.get_user_state(**names) == user["state"]


def test_reader_written_from_the_page_alone_reads_the_same(database: Path) -> None:
    with reader_of(database, "database.json") as reader:
        found = reader.contents()
    for kind, contents in found.items():
        by_name = sorted(contents, key=json.dumps)
        assert by_name == sorted(DATABASE[kind], key=lambda one: json.dumps(one))


def test_reader_written_from_the_page_alone_merges_states_as_the_service_does(
    database: Path,
) -> None:
    with reader_of(database, "database.json") as reader:
        for expected in DATABASE["sessions"]:
            found = reader.session(**who(expected))
            assert found is not None
            assert found["state"] == scoped(expected)
        assert reader.session("clinic", "bob", "no such session") is None


_VISIT = "(SELECT id FROM secure_sessions WHERE base_revision = -1 AND revision = 4)"


def _set(table: str, column: str, value: str) -> str:
    """An UPDATE with bytes: joining bytes gives text in SQLite."""
    return f"UPDATE {table} SET {column} = CAST({value} AS BLOB)"


# Rejected when the database is opened, by a reader of any kind.
UNUSABLE = {
    "format is another": "UPDATE secure_meta SET value = '01' WHERE name = 'format'",
    "database id is no hexadecimal": (
        "UPDATE secure_meta SET value = replace(value, '7', 'x') WHERE name = 'database_id'"
    ),
    "database id is too short": (
        "UPDATE secure_meta SET value = substr(value, 3) WHERE name = 'database_id'"
    ),
    "database id was removed": "DELETE FROM secure_meta WHERE name = 'database_id'",
    "holds says that keys are elsewhere": "INSERT INTO secure_meta VALUES ('holds', 'data')",
    "index master was removed": "DELETE FROM secure_keyring WHERE purpose = 'index'",
    "data masters were removed": "DELETE FROM secure_keyring WHERE purpose = 'data'",
    "purpose of a master was altered": (
        "UPDATE secure_keyring SET purpose = 'other' WHERE purpose = 'data'"
    ),
    "root key is unknown": "UPDATE secure_keyring SET root_key_id = 'key:0000000000000000'",
    "root key of a master is another": (
        "UPDATE secure_keyring SET root_key_id = (SELECT root_key_id FROM secure_keyring "
        "WHERE purpose = 'index') WHERE purpose = 'data'"
    ),
}
# Rejected when the rows are read.
TAMPERED = {
    "one data master was removed": (
        "DELETE FROM secure_keyring WHERE id = "
        "(SELECT id FROM secure_keyring WHERE purpose = 'data' ORDER BY created_at)"
    ),
    "data keys were removed": "DELETE FROM secure_data_keys WHERE generation = 0",
    "data keys are given to another owner": (
        "UPDATE secure_data_keys SET owner = (SELECT tag FROM secure_users ORDER BY id), "
        "generation = generation + 10 "
        "WHERE owner = (SELECT tag FROM secure_users ORDER BY id DESC)"
    ),
    "backend of data keys was altered": "UPDATE secure_data_keys SET backend_id = 3 - backend_id",
    "app name was altered": _set("secure_apps", "app_name", "app_name || X'20'"),
    "witnesses of apps were removed": (
        "DELETE FROM secure_witnesses WHERE tag IN (SELECT tag FROM secure_apps)"
    ),
    "witnesses of users were removed": (
        "DELETE FROM secure_witnesses WHERE tag IN (SELECT tag FROM secure_users)"
    ),
    "witnesses of sessions were removed": (
        "DELETE FROM secure_witnesses WHERE tag IN (SELECT tag FROM secure_sessions)"
    ),
    "version of a user is another": "UPDATE secure_users SET version = version + 1",
    "number of a witness is another": "UPDATE secure_witnesses SET number = number + 1",
    "session is given to another user": (
        "UPDATE secure_sessions SET user_row = (SELECT max(id) FROM secure_users) "
        f"WHERE id = {_VISIT}"
    ),
    "snapshot where there is none": (
        f"INSERT INTO secure_bases SELECT {_VISIT}, -1, state FROM secure_bases"
    ),
    "snapshot was removed": "DELETE FROM secure_bases",
    "snapshot has another revision": "UPDATE secure_bases SET revision = 0",
    "first event was removed": "DELETE FROM secure_events WHERE seq = 0",
    "last event was removed": f"DELETE FROM secure_events WHERE session_row = {_VISIT} AND seq = 3",
    "event was added": (
        f"INSERT INTO secure_events SELECT session_row, 4, time, event FROM secure_events "
        f"WHERE session_row = {_VISIT} AND seq = 3"
    ),
    "time of an event was altered": "UPDATE secure_events SET time = time + 1",
    "record was emptied": "UPDATE secure_sessions SET state = X''",
    "record is text": "UPDATE secure_sessions SET state = 'AKS'",
    "record is a number": "UPDATE secure_sessions SET state = 17",
    "record is of another version": (
        _set("secure_events", "event", "X'414B5301' || substr(event, 5)")
    ),
    "record is of the no-op backend": (
        _set("secure_events", "event", "X'414B530203' || substr(event, 6)")
    ),
    "key id is negative": (
        _set("secure_events", "event", "substr(event, 1, 5) || X'FF' || substr(event, 7)")
    ),
    "number is text": "UPDATE secure_sessions SET created_at = 'early'",
    "number has a fraction": "UPDATE secure_sessions SET created_at = created_at + 0.5",
}
# Rejected where the session is asked for by its id.
_OF_USERS = "(SELECT tag FROM secure_users)"
TAMPERED_PARENTS = {
    "name of apps": TAMPERED["app name was altered"],
    "apps": "DELETE FROM secure_apps",
    "apps and witnesses": (
        "DELETE FROM secure_witnesses WHERE tag IN (SELECT tag FROM secure_apps);"
        "DELETE FROM secure_apps"
    ),
    "users": "DELETE FROM secure_users",
    "users and witnesses": (
        f"DELETE FROM secure_witnesses WHERE tag IN {_OF_USERS}; DELETE FROM secure_users"
    ),
    "sessions": "DELETE FROM secure_sessions",
    "app row of users": "UPDATE secure_users SET app_row = app_row + 1",
}


async def assert_rejected_by_service(path: Path) -> None:
    async def read_all() -> None:
        async with service_on(path, "aesgcm") as service:
            for expected in DATABASE["sessions"]:
                await service.get_session(**who(expected))

    with pytest.raises(SecureSessionError):
        await read_all()


def tamper(path: Path, statements: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        before = connection.total_changes
        connection.executescript(statements)
        assert connection.total_changes > before, "nothing was tampered with"


@pytest.mark.parametrize("name", UNUSABLE)
async def test_service_and_reader_reject_a_database_on_opening(database: Path, name: str) -> None:
    tamper(database, UNUSABLE[name])
    await assert_rejected_by_service(database)
    with pytest.raises(format_reader.Refused), reader_of(database, "database.json"):
        pass


@pytest.mark.parametrize("name", TAMPERED)
async def test_service_and_reader_reject_tampered_rows(database: Path, name: str) -> None:
    tamper(database, TAMPERED[name])
    await assert_rejected_by_service(database)
    assert_rejected_by_reader(database)


def assert_rejected_by_reader(path: Path) -> None:
    with reader_of(path, "database.json") as reader, pytest.raises(format_reader.Refused):
        reader.contents()


@pytest.mark.parametrize("name", TAMPERED_PARENTS)
async def test_service_and_reader_reject_a_session_whose_parents_were_tampered_with(
    database: Path, name: str
) -> None:
    tamper(database, TAMPERED_PARENTS[name])
    await assert_rejected_by_service(database)
    with reader_of(database, "database.json") as reader:
        for expected in DATABASE["sessions"]:
            with pytest.raises(format_reader.Refused):
                reader.session(**who(expected))


@pytest.mark.parametrize(
    "table", ["secure_apps", "secure_users", "secure_sessions", "secure_bases", "secure_witnesses"]
)
async def test_service_and_reader_reject_rows_that_were_rolled_back(
    database: Path, table: str
) -> None:
    (archive,) = (one for one in DATABASE["sessions"] if one["base_revision"] != -1)
    delta = {"app:new": 1, "user:new": 1, "new": "x" * 9000}
    actions = EventActions(state_delta=delta)
    event = Event(author="nurse", timestamp=1_800_000_000.0, actions=actions)
    older = execute(database, f"SELECT * FROM {table}")
    async with service_on(database, "aesgcm") as service:
        session = await service.get_session(**who(archive))
        assert session is not None
        await service.append_event(session, event)
    with reader_of(database, "database.json") as reader:
        assert reader.contents()
    for row in older:
        execute(database, f"REPLACE INTO {table} VALUES ({', '.join('?' * len(row))})", row)
    await assert_rejected_by_service(database)
    assert_rejected_by_reader(database)


async def test_rows_that_belong_to_nothing_are_ignored(database: Path) -> None:
    statements = (
        "INSERT INTO secure_events SELECT 1, seq, time, event FROM secure_events WHERE seq = 0 "
        "LIMIT 1; INSERT INTO secure_bases SELECT 1, revision, state FROM secure_bases;"
        "INSERT INTO secure_meta VALUES ('unknown', '1')"
    )
    tamper(database, statements)
    with reader_of(database, "database.json") as reader:
        found = [reader.session(**who(expected)) for expected in DATABASE["sessions"]]
        assert all(found)
    async with service_on(database, "aesgcm") as service:
        await assert_all_are(service)


def add_master(path: Path, purpose: str, key: bytes) -> None:
    """Insert a master key, as somebody can who has the root key."""
    root = ROOTS["aesgcm"]
    name = f"key:{format_reader.expand(root, b'adk-secure-sessions/v1/key-id', 8).hex()}"
    database_id = value(path, "SELECT value FROM secure_meta WHERE name = 'database_id'")
    where = format_reader.context("master-key", bytes.fromhex(database_id), purpose, name, 1, 2)
    wrapping_key = format_reader.expand(root, b"adk-secure-sessions/v1/wrap")
    body = AESGCM(wrapping_key).encrypt(bytes(12), key, b"\x01" + where)
    row = (1, purpose, name, 2, b"\x01" + bytes(12) + body)
    execute(path, "INSERT INTO secure_keyring VALUES (?, ?, ?, ?, ?)", row)


@pytest.mark.parametrize(("purpose", "length"), [("index", 32), ("data", 31), ("data", 0)])
def test_reader_rejects_a_master_key_that_no_writer_makes(
    database: Path, purpose: str, length: int
) -> None:
    """A second index master key, and master keys of another length."""
    add_master(database, purpose, os.urandom(length))
    with pytest.raises(format_reader.Refused), reader_of(database, "database.json"):
        pass


async def test_data_master_that_wraps_nothing_is_ignored(database: Path) -> None:
    add_master(database, "data", os.urandom(32))
    with reader_of(database, "database.json") as reader:
        assert reader.contents()["sessions"]
    async with service_on(database, "aesgcm") as service:
        await assert_all_are(service)


@pytest.fixture
def split(database: Path) -> tuple[Path, Path]:
    """The same rows in a database and a key database: no record is bound to that."""
    keys = database.with_name("keys.db")
    with closing(sqlite3.connect(keys)) as connection:
        connection.executescript((DOCS / "sql" / "sqlite-keys.sql").read_text(encoding="utf-8"))
    with closing(sqlite3.connect(database, isolation_level=None)) as connection:
        connection.execute("ATTACH ? AS keys", (str(keys),))
        for table in ("meta", "keyring", "data_keys"):
            connection.execute(f"INSERT INTO keys.secure_{table} SELECT * FROM secure_{table}")
        connection.execute("INSERT INTO keys.secure_meta VALUES ('holds', 'keys')")
        connection.execute("INSERT INTO main.secure_meta VALUES ('holds', 'data')")
        for table in ("keyring", "data_keys"):
            connection.execute(f"DROP TABLE main.secure_{table}")
    return database, keys


async def test_split_database_is_read_as_before(split: tuple[Path, Path]) -> None:
    data, keys = (f"sqlite:///{path}" for path in split)
    both = backends("database.json")
    async with EncryptedSessionService(data, *both, key_db_url=keys) as service:
        await assert_all_are(service)
    with closing(sqlite3.connect(split[0])) as one, closing(sqlite3.connect(split[1])) as other:
        found = format_reader.Database(one, *ROOTS.values(), keys=other).contents()
        for alone in (one, other):
            with pytest.raises(format_reader.Refused):
                format_reader.Database(alone, *ROOTS.values())
    assert len(found["sessions"]) == len(DATABASE["sessions"])


def test_database_covers_the_format(database: Path) -> None:
    """Two backends, two generations of a data key, a snapshot, a session without events."""
    for count, query in (
        (2, "SELECT count(DISTINCT substr(event, 5, 1)) FROM secure_events"),
        (1, "SELECT max(generation) FROM secure_data_keys"),
        (1, "SELECT count(*) FROM secure_bases"),
    ):
        assert value(database, query) == count, query
    assert value(database, "SELECT count(*) FROM secure_sessions WHERE revision = 0") >= 1
