"""`compression=` and `padding=`: every kind of record, also in a database that has both kinds.

How it works.  `write` has a service store a session with large states and large and small events;
`states` and `texts` are what must be read back.  `stored(url)` are the records in the SQLite file.
A record of `NoOpBackend` shows its flags; the length of one of AES-256-GCM is that of its plaintext
and `AES`.
"""

import base64
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from google.adk.events import Event, EventActions
from google.adk.sessions import InMemorySessionService, Session
from google.adk.sessions.base_session_service import GetSessionConfig
from google.genai import types
from sqlalchemy import URL

from adk_secure_sessions import (
    AesGcmBackend,
    EncryptedSessionService,
    EncryptedSessionWrapper,
    EncryptionBackend,
    Packing,
)
from adk_secure_sessions.formats.records import PADDED, ZLIB, padme
from adk_secure_sessions.integrations.artifacts import EncryptedArtifactService
from adk_secure_sessions.integrations.memory import EncryptedMemoryService
from adk_secure_sessions.maintenance import Database, verify
from adk_secure_sessions.maintenance.rotate_data import rotate_data
from adk_secure_sessions.migration import PlaintextFallbackService, migrate
from tests import format_reader
from tests.drivers import each_driver, server, url
from tests.maintenance.support import plaintext_backend
from tests.migration.lookups import MemoryLookup
from tests.migration.memory_source import MemorySource

__all__ = ["server", "url"]

name = each_driver("sqlite", "asyncpg", soak=["asyncmy", "psycopg", "aiosqlite-engine"])

KEY = bytes(range(32))
AES = 13 + 12 + 16  # bytes that a record adds to its plaintext
WHO: dict[str, Any] = {"app_name": "clinic", "user_id": "ada", "session_id": "visit"}
USER = {name: WHO[name] for name in ("app_name", "user_id")}
LONG = "take one pill in the morning, " * 200
COMPRESSED: dict[str, Any] = {"packing": Packing("zlib")}
PADDED_ONLY: dict[str, Any] = {"packing": Packing(padding="padme")}
BOTH: dict[str, Any] = {"packing": Packing("zlib", "padme")}
OPTIONS: list[dict[str, Any]] = [{}, COMPRESSED, PADDED_ONLY, BOTH]
IDS = ["plain", "compressed", "padded", "both"]


def file(path: Path) -> str:
    return f"sqlite+aiosqlite:///{path / 'sessions.db'}"


def service_on(
    database: str | URL, backend: EncryptionBackend | None = None, **options: Any
) -> EncryptedSessionService:
    return EncryptedSessionService(database, backend or AesGcmBackend(KEY), **options)


def event(text: str, **delta: Any) -> Event:
    part = types.Part(text=text)
    return Event(
        author="agent",
        invocation_id="i",
        content=types.Content(role="model", parts=[part]),
        actions=EventActions(state_delta=delta),
    )


async def get(service: EncryptedSessionService, **options: Any) -> Session:
    session = await service.get_session(**WHO, **options)
    assert session is not None
    return session


def texts(session: Session) -> list[str]:
    return [
        part.text or ""
        for event in session.events
        for part in (event.content or _EMPTY).parts or []
    ]


_EMPTY = types.Content()
FIRST_STATE = {"app:motd": f"app {LONG}", "user:name": f"user {LONG}", "notes": LONG * 2, "n": 0}


async def write(service: EncryptedSessionService) -> None:
    """A session with a snapshot and an overlay, an app and a user, all of more than 1 KB."""
    session = await service.create_session(**WHO, state=FIRST_STATE)
    await service.append_event(session, event(f"first {LONG}", n=1))
    await service.append_event(session, event("second", overlay=f"overlay {LONG}"))
    await service.append_event(session, event("short"))


STATE = {**FIRST_STATE, "n": 1, "overlay": f"overlay {LONG}"}
TEXTS = [f"first {LONG}", "second", "short"]


async def assert_readable(service: EncryptedSessionService) -> None:
    session = await get(service)
    assert (session.state, texts(session)) == (STATE, TEXTS)
    (listed,) = (await service.list_sessions(app_name="clinic")).sessions
    assert listed.state == STATE
    last = await get(service, config=GetSessionConfig(num_recent_events=1))
    assert texts(last) == TEXTS[-1:]
    assert (await service.get_user_state(**USER))["name"] == STATE["user:name"]


RECORDS = {
    "app": "SELECT state FROM secure_apps",
    "user": "SELECT state FROM secure_users",
    "session": "SELECT state FROM secure_sessions",
    "snapshot": "SELECT state FROM secure_bases",
    "event": "SELECT event FROM secure_events ORDER BY seq",
    "witness": "SELECT seal FROM secure_witnesses",
    "data key": "SELECT wrapped FROM secure_data_keys",
}


def stored(database: str) -> dict[str, list[bytes]]:
    with closing(sqlite3.connect(database.partition(":///")[2])) as connection:
        return {
            kind: [record for (record,) in connection.execute(query)]
            for kind, query in RECORDS.items()
        }


def flags_of(database: str) -> dict[str, list[int]]:
    """The flags of the records of `NoOpBackend`; data keys have another backend."""
    found = stored(database)
    del found["data key"]
    return {kind: [record[13] for record in rows] for kind, rows in found.items()}


# --- round trips ---------------------------------------------------------------------------------


@pytest.mark.parametrize("writer", OPTIONS, ids=IDS)
async def test_every_service_reads_what_a_service_has_packed(
    url: URL, writer: dict[str, Any]
) -> None:
    async with service_on(url, **writer) as service:
        await write(service)
        await assert_readable(service)
    async with service_on(url) as reader:
        await assert_readable(reader)


async def test_flags_say_what_each_record_needs(tmp_path: Path) -> None:
    for number, (options, flag) in enumerate(
        [({}, 0), (COMPRESSED, ZLIB), (PADDED_ONLY, PADDED), (BOTH, ZLIB | PADDED)]
    ):
        database = f"sqlite+aiosqlite:///{tmp_path / str(number)}.db"
        async with service_on(database, plaintext_backend(), **options) as service:
            await write(service)
        found = flags_of(database)
        short = flag & PADDED
        assert found.pop("witness") == [0, 0, 0]
        assert found.pop("event") == [flag, flag, short]
        assert found == {kind: [flag] for kind in ("app", "user", "session", "snapshot")}


@pytest.mark.parametrize("options", [PADDED_ONLY, BOTH], ids=["padded", "both"])
async def test_padded_records_have_padme_lengths(tmp_path: Path, options: Any) -> None:
    async with service_on(file(tmp_path), **options) as service:
        await write(service)
        session = await get(service)
        for number in range(40):
            await service.append_event(session, event("x" * number * 37, n=number))
    found = stored(file(tmp_path))
    assert {len(record) - AES for record in found.pop("witness")} == {1, 17}
    assert {len(record) - AES for record in found.pop("data key")} == {33}
    lengths = [len(record) - AES for records in found.values() for record in records]
    assert len(lengths) == 47
    assert [padme(length) for length in lengths] == lengths


async def test_reader_written_from_the_page_alone_reads_packed_databases(tmp_path: Path) -> None:
    async with service_on(file(tmp_path), **BOTH) as service:
        await write(service)
        memory = EncryptedMemoryService(service)
        await memory.add_session_to_memory(await get(service))
    with closing(sqlite3.connect(tmp_path / "sessions.db")) as connection:
        found = format_reader.Database(connection, KEY).session(*WHO.values())
        assert found is not None
        assert found["state"] == STATE
        contents = [one["content"]["parts"][0]["text"] for one in found["events"]]
        assert contents == TEXTS
        entries = format_reader.Database(connection, KEY).memory(*USER.values())
        assert entries is not None
        assert len(entries["entries"]) == len(TEXTS)


# --- databases that have both kinds of records ---------------------------------------------------


async def test_services_with_and_without_options_share_a_database(url: URL) -> None:
    state, said = dict(STATE), list(TEXTS)
    async with service_on(url, **OPTIONS[-1]) as service:
        await write(service)
    for round_, options in enumerate([*OPTIONS, {}, BOTH]):
        async with service_on(url, **options) as service:
            session = await get(service)
            assert (session.state, texts(session)) == (state, said)
            delta = {
                "overlay": f"{round_} {LONG}", "app:motd": f"{round_}", "user:name": LONG + "!",
                "other": LONG * (round_ % 2 + 1),
            }  # fmt: skip
            await service.append_event(session, event(f"{round_} {LONG}", **delta))
            state.update(delta)
            said.append(f"{round_} {LONG}")
            assert (await get(service)).state == state
    async with Database(url, AesGcmBackend(KEY)) as db:
        assert (await verify(db)).problems == ()


async def test_service_without_options_writes_values_without_flags(tmp_path: Path) -> None:
    async with service_on(file(tmp_path), plaintext_backend(), **BOTH) as service:
        await write(service)
    async with service_on(file(tmp_path), plaintext_backend()) as service:
        session = await get(service)
        await service.append_event(session, event(LONG, overlay="x", **{"user:name": "short"}))
    found = flags_of(file(tmp_path))
    assert (found["session"], found["user"]) == ([0], [0])
    assert found["event"] == [ZLIB | PADDED, ZLIB | PADDED, PADDED, 0]
    assert (found["app"], found["snapshot"]) == ([ZLIB | PADDED], [ZLIB | PADDED])


# --- artifacts, memory, the wrapper --------------------------------------------------------------


async def test_artifacts_and_memory_are_packed_with_their_service(tmp_path: Path) -> None:
    part = types.Part(inline_data=types.Blob(mime_type="text/plain", data=b"stored"))
    who = {**WHO, "filename": "note.txt"}
    async with service_on(file(tmp_path), plaintext_backend(), **BOTH) as service:
        await write(service)
        await EncryptedMemoryService(service).add_session_to_memory(await get(service))
        artifacts = EncryptedArtifactService(service, tmp_path / "blobs")
        await artifacts.save_artifact(**who, artifact=part, custom_metadata={"why": LONG})
    assert {flag & PADDED for flag in flags_of(file(tmp_path))["event"]} == {PADDED}
    assert flags_of(file(tmp_path))["event"].count(ZLIB | PADDED) == 4, "events, memory, artifact"
    async with service_on(file(tmp_path), plaintext_backend()) as service:
        found = await EncryptedMemoryService(service).search_memory(**USER, query="pill")
        assert len(found.memories) == 1
        loaded = await EncryptedArtifactService(service, tmp_path / "blobs").load_artifact(**who)
        assert loaded is not None
        assert loaded.inline_data == part.inline_data


async def test_wrapper_packs_and_reads(tmp_path: Path) -> None:
    inner = InMemorySessionService()

    def wrapper(**options: Any) -> EncryptedSessionWrapper:
        return EncryptedSessionWrapper(
            inner, AesGcmBackend(KEY), key_db_url=file(tmp_path), **options
        )

    async with wrapper(**BOTH) as service:
        session = await service.create_session(**WHO, state={"user:notes": LONG, "n": 1})
        await service.append_event(session, event(LONG, n=2))
    kept = await inner.get_session(**WHO)
    assert kept is not None
    (part,) = (kept.events[0].content or _EMPTY).parts or []
    sizes = [
        len(base64.b64decode(value)) - AES for value in (*kept.state.values(), part.text or "")
    ]
    assert [padme(size) for size in sizes] == sizes
    assert max(sizes) < 1000
    async with wrapper() as service:
        found = await service.get_session(**WHO)
        assert found is not None
        assert found.state == {"user:notes": LONG, "n": 2}
        assert texts(found) == [LONG]


# --- maintenance ---------------------------------------------------------------------------------


async def test_rotation_keeps_the_flags_of_every_record(tmp_path: Path) -> None:
    async with service_on(file(tmp_path), plaintext_backend(), **PADDED_ONLY) as service:
        await write(service)
    async with service_on(file(tmp_path), plaintext_backend(), **COMPRESSED) as service:
        await service.append_event(await get(service), event(LONG, **{"app:motd": LONG + "!"}))
    before = flags_of(file(tmp_path))
    assert (before["app"], before["user"]) == ([ZLIB], [PADDED])
    async with Database(file(tmp_path), plaintext_backend()) as db:
        assert (await rotate_data(db)).problems == ()
    assert flags_of(file(tmp_path)) == before


@pytest.fixture
def source() -> MemorySource:
    made = MemorySource()
    made.put("ada", "visit", events=3, state={"notes": LONG * 2, "n": 1})
    made.users["clinic", "ada"] = {"name": LONG}
    made.apps["clinic"] = {"motd": LONG}
    return made


async def test_migrate_packs_what_it_copies(tmp_path: Path, source: MemorySource) -> None:
    async with Database(file(tmp_path), plaintext_backend(), **BOTH) as db:
        done = await migrate(source, db)
        assert (done.copied, done.bad) == (1, 0)
    found = flags_of(file(tmp_path))
    assert found.pop("event") == [PADDED] * 3
    assert found.pop("witness") == [0, 0, 0]
    both = [ZLIB | PADDED]
    assert found == {"app": both, "user": both, "session": [PADDED], "snapshot": both}
    async with service_on(file(tmp_path), plaintext_backend()) as service:
        assert (await get(service)).state["notes"] == LONG * 2


async def test_fallback_packs_the_session_that_it_copies(tmp_path: Path) -> None:
    source = MemoryLookup()
    source.put("ada", "visit", texts=[LONG, "short"], state={"notes": LONG * 2})
    encrypted = service_on(file(tmp_path), plaintext_backend(), **BOTH)
    async with PlaintextFallbackService(encrypted, source) as service:
        session = await service.get_session(**WHO)
        assert session is not None
        await service.append_event(session, event("next"))
    assert flags_of(file(tmp_path))["event"] == [ZLIB | PADDED, PADDED, PADDED]
    assert flags_of(file(tmp_path))["snapshot"] == [ZLIB | PADDED]
