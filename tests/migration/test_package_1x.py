"""`Package1xTables` reads what adk-secure-sessions 1.x returned, and rejects what that rejected.

How it works: two databases under tests/vectors/package_1x were written by real releases.  For all
other cases, `Writer` creates the tables of release 1.1 and later, and encrypts with AES-256-GCM.
"""

import base64
import json
import logging
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from google.adk.events import Event

from adk_secure_sessions import (
    AesGcmBackend,
    ConfigurationError,
    EncryptedSessionService,
    WrongKeyError,
)
from adk_secure_sessions.errors import TamperedError
from adk_secure_sessions.formats.events import decode, microseconds
from adk_secure_sessions.formats.json_text import load_state
from adk_secure_sessions.migration import adk_queries, adk_rows, open_source
from adk_secure_sessions.migration.package_1x import Package1xTables
from adk_secure_sessions.migration.sources import Selection, SessionContent, Unreadable
from tests.migration.support import ALL, contents, states

ON_EACH = pytest.mark.parametrize(
    "place",
    ["sqlite", "postgresql", pytest.param("mariadb", marks=pytest.mark.soak)],
    indirect=True,
)
VECTORS = Path(__file__).parent.parent / "vectors" / "package_1x"
KEY = bytes(range(32))
PASSPHRASE = "correct horse battery staple – π"  # noqa: RUF001
START = datetime(2026, 1, 1, tzinfo=UTC)
START_US = 1_767_225_600_000_000


def encrypted(values: object) -> str:
    nonce = os.urandom(12)
    plaintext = values if isinstance(values, bytes) else json.dumps(values).encode()
    sealed = AESGCM(KEY).encrypt(nonce, plaintext, None)
    return base64.b64encode(b"\x01\x02" + nonce + sealed).decode()


class Writer:
    """Writes tables like those of release 1.1 and later."""

    def __init__(self, place: sa.URL) -> None:
        self.metadata = sa.MetaData()
        self.engine = sa.create_engine(place)

        def name(key: str) -> sa.Column[str]:
            return sa.Column(key, sa.String(128), primary_key=True)

        def table(title: str, *columns: sa.Column[Any]) -> sa.Table:
            return sa.Table(title, self.metadata, *columns)

        self.tables = [
            table(
                "sessions",
                *map(name, ["app_name", "user_id", "id"]),
                sa.Column("state", sa.Text, nullable=False),
                sa.Column("create_time", sa.DateTime),
                sa.Column("update_time", sa.DateTime),
            ),
            table("app_states", name("app_name"), sa.Column("state", sa.Text, nullable=False)),
            table(
                "user_states",
                *map(name, ["app_name", "user_id"]),
                sa.Column("state", sa.Text, nullable=False),
            ),
            table(
                "events",
                *map(name, ["id", "app_name", "user_id", "session_id"]),
                sa.Column("invocation_id", sa.String(1024), nullable=False),
                sa.Column("timestamp", sa.DateTime, nullable=False),
                sa.Column("event_data", sa.Text),
            ),
        ]
        self.metadata.create_all(self.engine)

    def insert(self, table: str, *values: Any) -> None:
        with self.engine.begin() as connection:
            connection.execute(sa.insert(self.metadata.tables[table]).values(values))

    def run(self, statement: str, **values: Any) -> None:
        with self.engine.begin() as connection:
            assert connection.execute(sa.text(statement), values).rowcount

    def session(self, user: str, name: str, *, events: int = 2, app: str = "shop") -> None:
        """Insert a session whose last event is its last update."""
        updated = START + timedelta(seconds=max(events - 1, 0))
        times = START.replace(tzinfo=None), updated.replace(tzinfo=None)
        self.insert("sessions", app, user, name, encrypted({"of": name}), *times)
        for number in range(events):
            self.event(user, name, number, app=app)

    def event(
        self, user: str, name: str, number: int, *, app: str = "shop", **changed: Any
    ) -> None:
        """Insert event *number*; *changed* has columns, and replaced fields of the event."""
        time = START + timedelta(seconds=number)
        fields = {
            "id": f"e{number}",
            "invocation_id": "i",
            "author": "agent",
            "timestamp": time.timestamp(),
            "actions": {"state_delta": {"n": number}},
            **changed.pop("fields", {}),
        }
        fields = {key: value for key, value in fields.items() if value is not None}
        columns = {
            "id": f"e{number}",
            "timestamp": time.replace(tzinfo=None),
            "event_data": encrypted(fields),
            **changed,
        }
        where = columns["id"], app, user, name, "i", columns["timestamp"], columns["event_data"]
        self.insert("events", *where)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "1x.db"


@pytest.fixture
def writer(file: Path) -> Iterator[Writer]:
    writer = Writer(sa.URL.create("sqlite", database=str(file)))
    yield writer
    writer.engine.dispose()


def source(file: Path, *keys: str | bytes) -> Package1xTables:
    return Package1xTables(f"sqlite+aiosqlite:///{file}", keys or [KEY])


def event_ids(content: SessionContent | Unreadable) -> list[str]:
    assert isinstance(content, SessionContent)
    return [decode(one.plaintext, 0, 0).id for one in content.events]


def restore(file: Path, name: str) -> None:
    """Create a database that a release of adk-secure-sessions 1.x wrote."""
    with closing(sqlite3.connect(file)) as connection:
        connection.executescript((VECTORS / f"{name}.sql").read_text(encoding="utf-8"))


# --- databases of real releases ------------------------------------------------------------------


@pytest.mark.parametrize("name", ["release_1_0_passphrase", "release_1_2_passphrase_and_aes"])
async def test_database_of_a_release_is_read_as_that_release_read_it(
    name: str, tmp_path: Path
) -> None:
    file = tmp_path / "1x.db"
    restore(file, name)
    before = file.read_bytes()
    expected = json.loads((VECTORS / f"{name}.json").read_text(encoding="utf-8"))
    prefixed = "1_0" not in name
    async with source(file, PASSPHRASE, KEY) as of:
        owners = await states(of)
        found = await contents(of)
        assert await of.count(ALL) == 3
    assert {key[2] for key in found} == set(expected)
    for (app_name, user_id, session_id), content in found.items():
        assert isinstance(content, SessionContent)
        session = expected[session_id]
        parts = {"app:": owners[app_name], "user:": owners.get((app_name, user_id), {})}
        merged = load_state(content.state)
        for prefix, part in parts.items():
            # The releases before 1.1 returned states of apps and users without prefixes.
            merged |= {prefix * prefixed + key: value for key, value in part.items()}
        session["state"].pop("temp:x", None)
        assert merged == session["state"]
        events = [Event.model_validate(values) for values in session["events"]]
        assert [decode(one.plaintext, 0, 0) for one in content.events] == events
        assert [one.time / 1e6 for one in content.events] == [one.timestamp for one in events]
        assert content.updated_at == microseconds(session["last_update_time"])
        assert content.created_at // 3_600_000_000 == 1_795_347_000_000_000 // 3_600_000_000
    assert file.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == [file.name]


# --- on each database ----------------------------------------------------------------------------


@ON_EACH
@pytest.mark.no_tables
async def test_sessions_states_and_sizes_are_read(
    place: sa.URL, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adk_queries, "SESSION_PAGE", 2)
    monkeypatch.setattr(adk_queries, "STATE_PAGE", 1)
    writer = Writer(place)
    for user, name, app in [
        ("ada", "s2", "shop"),
        ("ada", "s1", "shop"),
        ("bob", "s1", "shop"),
        ("ada", "s1", "mart"),
        ("ada", "ünï", "shop"),
    ]:
        writer.session(user, name, app=app)
    for app in ("shop", "mart"):
        writer.insert("app_states", app, encrypted({"a": app}))
        for user in ("ada", "bob"):
            writer.insert("user_states", app, user, encrypted({"u": user}))
    writer.engine.dispose()
    async with Package1xTables(url, [KEY]) as of:
        batches = [batch async for batch in of.sessions(ALL)]
        assert [one[:3] for batch in batches for one in batch] == [
            ("mart", "ada", "s1"),
            ("shop", "ada", "s1"),
            ("shop", "ada", "s2"),
            ("shop", "ada", "ünï"),
            ("shop", "bob", "s1"),
        ]
        found = await contents(of)
        for (_, _, name), content in found.items():
            assert isinstance(content, SessionContent)
            assert load_state(content.state) == {"of": name}
            assert content[2:4] == (START_US, START_US + 1_000_000)
            assert event_ids(content) == ["e0", "e1"]
        assert len(await states(of)) == 6
        assert await of.count(ALL) == 5
        assert set(await contents(of, Selection("mart"))) == {("mart", "ada", "s1")}
        assert set(await states(of, Selection("mart"))) == {
            "mart",
            ("mart", "ada"),
            ("mart", "bob"),
        }
        assert await of.count(Selection("mart")) == 1
        later = START_US + 1_000_001
        assert await contents(of, Selection(since=later)) == {}
        assert await of.count(Selection(since=later - 1)) == 5
        assert await of.read([]) == {}


# --- in the same database as the tables of this package ------------------------------------------


async def warnings_of_service(url: str, caplog: pytest.LogCaptureFixture) -> list[str]:
    async with EncryptedSessionService(url, AesGcmBackend(KEY)) as service:
        await service.prepare_tables()
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]


@ON_EACH
@pytest.mark.no_tables
async def test_service_names_the_tables_of_1x(
    place: sa.URL, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    writer = Writer(place)
    writer.session("ada", "s", events=1)
    writer.engine.dispose()
    (message,) = await warnings_of_service(url, caplog)
    assert "of adk-secure-sessions 1.x" in message
    async with Package1xTables(url, [KEY]) as of:
        assert len(await contents(of)) == 1


@pytest.mark.no_tables
@pytest.mark.parametrize("place", ["postgresql"], indirect=True)
async def test_local_times_of_a_server_are_converted(
    place: sa.URL, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Writer(place)
    writer.session("ada", "s")
    writer.engine.dispose()
    # Without a time zone, times are read as the installed google-adk reads them.
    monkeypatch.setattr(adk_rows, "adk_version", "2.2.0")  # the last release with local times
    monkeypatch.setenv("TZ", "Etc/GMT+5")
    monkeypatch.setenv("PASSPHRASE", base64.b64encode(KEY).decode())
    time.tzset()
    opened = await open_source(url, ["env:PASSPHRASE"])
    for made in (opened, Package1xTables(url, [KEY], time_zone=timezone(timedelta(hours=-5)))):
        async with made as of:
            (content,) = (await contents(of)).values()
        assert isinstance(content, SessionContent)
        assert content.created_at == START_US + 5 * 3_600_000_000
        assert content.events[0].time == START_US  # the encrypted time
    monkeypatch.undo()
    time.tzset()


# --- details -------------------------------------------------------------------------------------


async def test_events_are_in_the_order_of_their_encrypted_times(file: Path, writer: Writer) -> None:
    """Release 1.2 stored local time in the column, and release 1.3 UTC."""
    writer.session("ada", "s", events=0)
    writer.event("ada", "s", 1, timestamp=datetime(2026, 1, 1, 9))
    writer.event("ada", "s", 2)
    async with source(file) as of:
        assert event_ids((await contents(of))["shop", "ada", "s"]) == ["e1", "e2"]


async def test_missing_fields_of_an_event_come_from_its_columns(file: Path, writer: Writer) -> None:
    writer.session("ada", "s", events=0)
    writer.event("ada", "s", 7, fields={"id": None, "invocation_id": None, "timestamp": None})
    async with source(file) as of:
        content = (await contents(of))["shop", "ada", "s"]
        assert isinstance(content, SessionContent)
        (stored,) = content.events
        event = decode(stored.plaintext, 0, 0)
    assert (event.id, event.invocation_id, event.timestamp) == ("e7", "i", START.timestamp() + 7)
    assert stored.time == START_US + 7_000_000


async def test_event_with_a_lone_surrogate_is_read(file: Path, writer: Writer) -> None:
    writer.session("ada", "s", events=0)
    writer.event("ada", "s", 0, fields={"custom_metadata": {"k": "\ud800"}})
    async with source(file) as of:
        content = (await contents(of))["shop", "ada", "s"]
        assert isinstance(content, SessionContent)
        event = decode(content.events[0].plaintext, 0, 0)
    assert event.custom_metadata == {"k": "\ud800"}


BAD = {
    "UPDATE sessions SET state = :other WHERE id = 's1'": "its state: wrong key",
    "UPDATE sessions SET state = '{}' WHERE id = 's1'": "its state: not encrypted",
    "UPDATE sessions SET state = '' WHERE id = 's1'": "its state: its encrypted value was removed",
    "UPDATE sessions SET state = 'ARAAAAAA' WHERE id = 's1'": "its state: encrypted by backend 16",
    "UPDATE sessions SET state = :text WHERE id = 's1'": "its state is not a JSON object",
    "UPDATE sessions SET update_time = 'noon' WHERE id = 's1'": "its create_time or update_time",
    "UPDATE events SET event_data = :other WHERE session_id = 's1' AND id = 'e1'":
        "event 2 of 2: wrong key",
    "UPDATE events SET event_data = NULL WHERE session_id = 's1' AND id = 'e0'":
        "event 1 of 2: its encrypted value was removed",
    "UPDATE events SET event_data = :text WHERE session_id = 's1' AND id = 'e0'":
        "event 1 of 2: the plaintext is not a JSON object",
    "UPDATE events SET event_data = :unknown WHERE session_id = 's1' AND id = 'e0'":
        "event 1 of 2: the installed google-adk",
    "UPDATE events SET id = 'x' WHERE session_id = 's1' AND id = 'e0'":
        "event 1 of 2: its column id differs",
    "UPDATE events SET invocation_id = 'x' WHERE session_id = 's1' AND id = 'e0'":
        "event 1 of 2: its column invocation_id differs",
}  # fmt: skip


@pytest.mark.parametrize("statement", BAD)
async def test_session_that_cannot_be_read_is_reported_alone(
    file: Path, writer: Writer, statement: str
) -> None:
    for name in ("s0", "s1", "s2"):
        writer.session("ada", name)
    values = {
        "other": base64.b64encode(b"\x01\x02" + bytes(60)).decode(),
        "text": encrypted(b'"text"'),
        "unknown": encrypted({"author": {}}),
    }
    writer.run(statement, **{key: one for key, one in values.items() if f":{key}" in statement})
    async with source(file) as of:
        found = await contents(of)
    bad = found.pop(("shop", "ada", "s1"))
    assert isinstance(bad, Unreadable)
    assert bad.reason.startswith(BAD[statement])
    assert "ada" not in bad.reason
    assert [event_ids(one) for one in found.values()] == [["e0", "e1"]] * 2


async def test_state_that_cannot_be_read_is_reported_alone(file: Path, writer: Writer) -> None:
    writer.session("ada", "s")
    writer.insert("app_states", "mart", encrypted([]))
    writer.insert("app_states", "shop", encrypted({"a": 1}))
    writer.insert("user_states", "shop", "ada", "AQIAAAAA")
    async with source(file) as of:
        found = await states(of)
    assert found == {
        "mart": Unreadable(
            "its state is not a JSON object, or exceeds a limit: see docs/limits.md, Sizes"
        ),
        "shop": {"a": 1},
        ("shop", "ada"): Unreadable(f"its state: {TamperedError()}"),
    }


async def test_wrong_key_is_reported_before_anything_is_read(file: Path, writer: Writer) -> None:
    writer.session("ada", "s")
    for keys in ([bytes(32)], ["short"]):
        async with source(file, *keys) as of:
            with pytest.raises(WrongKeyError, match="give the keys of its backends") as caught:
                await of.count(ALL)
            assert "short" not in str(caught.value)


async def test_plaintext_in_front_does_not_make_the_key_wrong(file: Path, writer: Writer) -> None:
    for name in ("a", "b", "c", "s"):
        writer.session("ada", name, events=1)
    writer.run("UPDATE sessions SET state = '{}' WHERE id <> 's'")
    async with Package1xTables(f"sqlite:///{file}", [KEY]) as of:
        found = {ids[2]: content for ids, content in (await contents(of)).items()}
    assert isinstance(found.pop("s"), SessionContent)
    for bad in found.values():
        assert isinstance(bad, Unreadable)
        assert "not encrypted" in bad.reason


async def test_unusable_database_or_key_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="does not exist"):
        source(tmp_path / "missing.db")
    with pytest.raises(ConfigurationError, match="give the keys"):
        Package1xTables(f"sqlite:///{tmp_path}/missing.db")
    (tmp_path / "empty.db").touch()
    async with source(tmp_path / "empty.db") as of:
        with pytest.raises(ConfigurationError, match="contains no tables"):
            await of.count(ALL)
    assert not list(tmp_path.glob("missing*"))


async def test_file_with_the_bytes_of_a_key_is_read(
    file: Path, writer: Writer, tmp_path: Path
) -> None:
    writer.session("ada", "s")
    key = tmp_path / "aes.key"
    key.write_bytes(KEY)
    key.chmod(0o600)
    async with await open_source(f"sqlite:///{file}", [f"file:{key}"]) as source:
        assert isinstance(source, Package1xTables)
        assert await source.count(ALL) == 1
    with pytest.raises(ConfigurationError, match="omit --from-key-db"):
        await open_source(f"sqlite:///{file}", [f"file:{key}"], key_db_url="sqlite:///keys.db")
    key.write_bytes(b"\xf0" * 31)  # neither text nor a key
    with pytest.raises(ConfigurationError) as info:
        await open_source(f"sqlite:///{file}", [f"file:{key}"])
    assert info.value.__context__ is None
    assert "\\xf0" not in str(info.value)
