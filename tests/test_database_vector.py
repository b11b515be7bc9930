"""A whole database as data: read by the service, and by a reader made from the page alone."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from google.adk.events import Event
from google.adk.sessions import Session

from adk_secure_sessions import AesGcmBackend, EncryptedSessionService, FernetBackend
from tests import format_reader
from tests.pages import DOCS

VECTORS = Path(__file__).parent / "vectors"
Json = dict[str, Any]
DATABASE: Json = json.loads((VECTORS / "database.json").read_text(encoding="utf-8"))
assert DATABASE["sessions"], "an empty vector file must not pass as success"


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "sessions.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript((VECTORS / "database.sql").read_text(encoding="utf-8"))
    return path


ROOTS = {root["backend"]: bytes.fromhex(root["root_key"]) for root in DATABASE["root_keys"]}


def service_on(path: Path, writer: str) -> EncryptedSessionService:
    aes, fernet = AesGcmBackend(ROOTS["aesgcm"]), FernetBackend(ROOTS["fernet"])
    url = f"sqlite+aiosqlite:///{path}"
    if writer == "aesgcm":
        return EncryptedSessionService(url, aes, [fernet])
    return EncryptedSessionService(url, fernet, [aes])


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
        **{f"app:{key}": value for key, value in app.items()},
        **{f"user:{key}": value for key, value in user.items()},
    }


def assert_is(session: Session | None, expected: Json, *, with_events: bool = True) -> None:
    assert session is not None
    events = expected["events"] if with_events else []
    assert (session.app_name, session.user_id, session.id) == tuple(who(expected).values())
    assert session.state == scoped(expected)
    assert session.last_update_time == expected["updated_at"] / 1_000_000
    assert session.events == [Event.model_validate(event) for event in events]


@pytest.mark.parametrize("writer", list(ROOTS))
async def test_service_finds_in_the_database_what_is_said_to_be_there(
    database: Path, writer: str
) -> None:
    async with service_on(database, writer) as service:
        for expected in DATABASE["sessions"]:
            assert_is(await service.get_session(**who(expected)), expected)
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


@pytest.mark.parametrize("writer", list(ROOTS))
async def test_service_goes_on_in_the_database(database: Path, writer: str) -> None:
    event = Event(author="nurse", id="new", timestamp=1_800_000_000.0)
    async with service_on(database, writer) as service:
        for expected in DATABASE["sessions"]:
            session = await service.get_session(**who(expected))
            assert session is not None
            await service.append_event(session, event)
    async with service_on(database, writer) as again:
        for expected in DATABASE["sessions"]:
            session = await again.get_session(**who(expected))
            assert session is not None
            assert [event.id for event in session.events][len(expected["events"]) :] == ["new"]


async def test_reading_the_database_changes_nothing(database: Path) -> None:
    def dump() -> list[str]:
        with closing(sqlite3.connect(database)) as connection:
            return list(connection.iterdump())

    before = dump()
    async with service_on(database, "aesgcm") as service:
        for expected in DATABASE["sessions"]:
            await service.get_session(**who(expected))
    assert dump() == before


def test_reader_made_from_the_page_alone_finds_the_same(database: Path) -> None:
    with closing(sqlite3.connect(database)) as connection:
        found = format_reader.Database(connection, *ROOTS.values()).contents()
    for kind, contents in found.items():
        by_name = sorted(contents, key=json.dumps)
        assert by_name == sorted(DATABASE[kind], key=lambda one: json.dumps(one))


@pytest.fixture
def split(database: Path) -> tuple[Path, Path]:
    """The same rows in two databases: no record knows of that."""
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
    aes, fernet = AesGcmBackend(ROOTS["aesgcm"]), FernetBackend(ROOTS["fernet"])
    data, keys = (f"sqlite:///{path}" for path in split)
    async with EncryptedSessionService(data, aes, [fernet], key_db_url=keys) as service:
        for expected in DATABASE["sessions"]:
            assert_is(await service.get_session(**who(expected)), expected)
    with closing(sqlite3.connect(split[0])) as one, closing(sqlite3.connect(split[1])) as other:
        found = format_reader.Database(one, *ROOTS.values(), keys=other).contents()
        for alone in (one, other):
            with pytest.raises(format_reader.Refused):
                format_reader.Database(alone, *ROOTS.values())
    assert len(found["sessions"]) == len(DATABASE["sessions"])


def test_the_database_holds_what_the_vectors_are_for(database: Path) -> None:
    """Two backends, two generations of a user's key, a base with an overlay, no events at all."""
    with closing(sqlite3.connect(database)) as connection:

        def one(sql: str) -> Any:
            return connection.execute(sql).fetchone()[0]

        assert one("SELECT count(DISTINCT substr(event, 5, 1)) FROM secure_events") == 2
        assert one("SELECT max(generation) FROM secure_data_keys") == 1
        assert one("SELECT count(*) FROM secure_bases") == 1
        assert one("SELECT count(*) FROM secure_sessions WHERE revision = 0") >= 1
