"""tests/vectors/database.sql and .json: a small database, and the contents a reader must find.

`EncryptedSessionService` writes the database, with fixed random bytes and clocks.
"""

import asyncio
import json
import re
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from google.adk.events import Event
from google.adk.sessions import Session

from adk_secure_sessions import (
    AesGcmBackend,
    EncryptedSessionService,
    EncryptionBackend,
    FernetBackend,
)
from adk_secure_sessions.formats.times import time_now
from adk_secure_sessions.keys.keyring import DATA_MASTER, Keyring, new_master
from examples.vectors.fixed import MICROSECONDS, TIME, Json, counting, made
from examples.vectors.keys import root_key_id

ABOUT = (
    "The contents that a reader must find in database.sql, made by examples/make_vectors.py. It "
    "needs two root keys: AesGcmBackend wrote first, then FernetBackend. Times are microseconds "
    "UTC. The state of a session is given without that of its app and its user. Events are JSON "
    "as google-adk 1.28.0 writes it. 'overlay_keys' are the keys in the overlay, which is in the "
    "session's own row."
)
AES_KEY, FERNET_KEY = counting(0x00, 32), counting(0x80, 32)
ADK_VERSION = "1.28.0"
_PREFIX = bytes([len(ADK_VERSION)]) + ADK_VERSION.encode()
CLINIC, BANK = "clinic", "Bank & Söhne"
ADA, BOB, EVA = "ada lovelace", "bob", "éva@example.org"
VISIT, ARCHIVE, EMPTY, LOAN = "first visit", "archive", "no events yet", "кредит 🏦"
LONG_NOTE = "The patient came in and said little. " * 226  # more than an overlay may hold

_ACTIONS = (
    '"actions":{"state_delta":%s,"artifact_delta":{},"requested_auth_configs":{},'
    '"requested_tool_confirmations":{}}'
)


def _event(number: int, author: str, content: str, delta: Json | None = None) -> str:
    """Return JSON as google-adk 1.28.0 writes it, whichever version is installed."""
    actions = _ACTIONS % json.dumps(delta or {}, separators=(",", ":"))
    return (
        f'{{"content":{content},"invocation_id":"inv-{number}","author":"{author}",{actions},'
        f'"id":"event-{number}","timestamp":{TIME + number}.25}}'
    )


def _says(role: str, *parts: str) -> str:
    return f'{{"parts":[{",".join(parts)}],"role":"{role}"}}'


_ASKED = _says("user", '{"text":"Guten Morgen, ich heiße Ada 🌱"}')
_CALL = _says(
    "model",
    '{"function_call":{"id":"call-1","args":{"substance":"penicillin","grade":3},'
    '"name":"note_allergy"}}',
)
_RESPONSE = _says(
    "user",
    '{"function_response":{"id":"call-1","name":"note_allergy","response":{"noted":true}}}',
)
_ANSWER = _says(
    "model",
    '{"text":"Noted."}',
    '{"inline_data":{"data":"AAECAwQFBgc=","mime_type":"application/octet-stream"}}',
)
_PLAIN = _says("user", '{"text":"And then?"}')
_NOTED = {"step": 1, "user:allergies": ["penicillin"], "app:visits": 1}

# Each session in order of creation: app, user, session id, initial state and events.
_BY_AES: list[tuple[str, str, str, Json, list[str]]] = [
    (
        CLINIC, ADA, VISIT, {"step": 0, "app:name": "Dr. Müller", "user:language": "de"},
        [
            _event(0, "user", _ASKED),
            _event(1, "nurse", _CALL),
            _event(2, "nurse", _RESPONSE, _NOTED),
        ],
    ),
    (
        CLINIC, ADA, ARCHIVE, {"kind": "archive", "pages": 1, "gone": "soon"},
        [
            _event(3, "nurse", _ANSWER, {"note": LONG_NOTE}),
            _event(4, "nurse", _ANSWER, {"pages": 2, "gone": None, "float": 0.1, "big": 2**53 + 1}),
        ],
    ),
    (CLINIC, BOB, EMPTY, {}, []),
    (CLINIC, BOB, VISIT, {"user:language": "en", "nested": {"a": [1, None, True, "\x00"]}}, []),
]  # fmt: skip
_BY_FERNET: list[tuple[str, str, str, Json, list[str]]] = [
    (
        BANK, EVA, LOAN, {"app:open": False, "user:score": 7.5, "größe": "klein"},
        [_event(5, "user", _PLAIN), _event(6, "clerk", _ANSWER, {"user:score": -1, "step": 1})],
    ),
    (CLINIC, BOB, "second visit", {}, [_event(7, "user", _PLAIN, {"user:language": "fr"})]),
]  # fmt: skip
# Events that the second backend appends to sessions of the first one.
_CONTINUED: list[tuple[str, str, str, list[str]]] = [
    (CLINIC, ADA, VISIT, [_event(8, "nurse", _ANSWER, {"step": 2, "app:visits": 2})]),
]
# The JSON of each event: the number of an event is in its id.
EVENTS: list[str] = sorted(
    (text for *_, events in (*_BY_AES, *_BY_FERNET, *_CONTINUED) for text in events),
    key=lambda text: str(json.loads(text)["id"]),
)


class _Draws:
    """Fixed random bytes and times, to replace `os`, `secrets` and `time` in our modules."""

    def __init__(self) -> None:
        self._count = 0
        self._now = MICROSECONDS * 1000

    def bytes(self, length: int) -> bytes:
        self._count += 1
        return made(f"draw {self._count}", length)

    def bits(self, count: int) -> int:
        return int.from_bytes(self.bytes(8)) >> (64 - count)

    def nanoseconds(self) -> int:
        self._now += 1_000_000
        return self._now

    def seconds(self) -> float:
        return self.nanoseconds() / 1e9


@contextmanager
def fixed() -> Iterator[None]:
    """Give the service fixed random bytes and clocks, and the JSON of one ADK release."""
    draws = _Draws()
    os_ = SimpleNamespace(urandom=draws.bytes)
    clock = SimpleNamespace(time_ns=draws.nanoseconds, time=draws.seconds, get_time=draws.seconds)
    secrets_ = SimpleNamespace(token_bytes=draws.bytes, randbits=draws.bits)
    package = "adk_secure_sessions"
    replaced: dict[str, Any] = {
        f"{package}.crypto.aead.os": os_,
        f"{package}.formats.records.os": os_,
        f"{package}.backends.fernet.os": os_,
        f"{package}.backends.fernet.time": clock,
        f"{package}.backends.aes_gcm.os": os_,
        f"{package}.keys.keyring.secrets": secrets_,
        f"{package}.storage.opening.secrets": secrets_,
        f"{package}.storage.schema.secrets": secrets_,
        f"{package}.storage.schema.time": clock,
        f"{package}.storage.schema._last_row_id": 0,
        f"{package}.service.platform_time": clock,
        f"{package}.formats.times.time": clock,
        f"{package}.formats.events.encode": _encode,
        f"{package}.formats.events._PREFIX": _PREFIX,
    }
    with ExitStack() as patches:
        for name, value in replaced.items():
            patches.enter_context(mock.patch(name, value))
        yield


def _encode(event: Event) -> bytes:
    (stored,) = (text for text in EVENTS if json.loads(text)["id"] == event.id)
    return _PREFIX + stored.encode()


def backends() -> list[EncryptionBackend]:
    """Return the two backends that write the database, in order."""
    return [AesGcmBackend(AES_KEY), FernetBackend(FERNET_KEY)]


def root_keys() -> list[Json]:
    """Return the root keys that a reader needs, as in the JSON."""
    return [
        {"backend": backend.name, "root_key": key.hex(), "root_key_id": root_key_id(key)}
        for backend, key in zip(backends(), (AES_KEY, FERNET_KEY), strict=True)
    ]


async def _write(path: Path) -> list[int]:
    """Write the database; return the creation time of each session, in order."""
    first, second = backends()
    created: list[int] = []
    url = f"sqlite+aiosqlite:///{path}"
    async with EncryptedSessionService(url, first) as service:
        for app, user, name, state, events in _BY_AES:
            created.append(await _converse(service, app, user, name, state, events))
    async with EncryptedSessionService(url, second, [first]) as service:
        opened = service._runner._open_keyring

        async def open_keyring(known: Keyring | None) -> Keyring:
            await _add_master(path, second)
            return await opened(known)

        service._runner._open_keyring = open_keyring
        for app, user, name, state, events in _BY_FERNET:
            created.append(await _converse(service, app, user, name, state, events))
        for app, user, name, events in _CONTINUED:
            found = await service.get_session(app_name=app, user_id=user, session_id=name)
            assert found is not None
            await _append(service, found, events)
    return created


async def _add_master(path: Path, backend: EncryptionBackend) -> None:
    """Add a data master under another root key: early versions did, and readers accept it."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        query = "SELECT value FROM secure_meta WHERE name = 'database_id'"
        ((database_id,),) = connection.execute(query)
        known_id = bytes.fromhex(database_id)
        row, _ = await new_master(DATA_MASTER, backend.root_key, known_id, time_now())
        connection.execute("INSERT INTO secure_keyring VALUES (?, ?, ?, ?, ?)", row)


async def _converse(
    service: EncryptedSessionService, app: str, user: str, name: str, state: Json, events: list[str]
) -> int:
    session = await service.create_session(
        app_name=app, user_id=user, session_id=name, state=dict(state)
    )
    created = round(session.last_update_time * 1_000_000)
    await _append(service, session, events)
    return created


async def _append(service: EncryptedSessionService, session: Session, events: list[str]) -> None:
    for text in events:
        await service.append_event(session, Event.model_validate_json(text))


def dumped(connection: sqlite3.Connection, contents: str = "database.json") -> str:
    """Return statements that create the same database, without SQLAlchemy's white space."""
    lines = [f"-- Made by examples/make_vectors.py; {contents} says what is in it.", "BEGIN;"]
    schema = connection.execute(
        "SELECT type, name, sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY type DESC, name"
    ).fetchall()
    for kind, name, sql in schema:
        lines.append(re.sub(r"(?<=\() | (?=\))", "", " ".join(sql.split())) + ";")
        if kind != "table":
            continue
        columns = [row[1] for row in connection.execute(f"PRAGMA table_info({name})")]
        values = ", ".join(f"quote({column})" for column in columns)
        for row in sorted(connection.execute(f"SELECT {values} FROM {name}").fetchall()):
            lines.append(f"INSERT INTO {name} VALUES ({', '.join(row)});")
    return "\n".join([*lines, "COMMIT;"]) + "\n"


def _state_after(start: Json, events: list[str], prefix: str) -> Json:
    """Return the state of one scope after *events*: the last value of each key, as in ADK."""
    state: Json = {}
    for delta in (start, *(json.loads(text)["actions"]["state_delta"] for text in events)):
        for key, value in delta.items():
            scope = key.split(":")[0] + ":" if ":" in key else ""
            if scope == prefix:
                state[key.removeprefix(prefix)] = value
    return state


def _contents(created: list[int]) -> Json:
    """Return the expected contents, made from the scenario without reading the database."""
    sessions, apps, users = [], dict[str, Json](), dict[tuple[str, str], Json]()
    scenario = zip((*_BY_AES, *_BY_FERNET), created, strict=True)
    for (app, user, name, start, events), created_at in scenario:
        more = [text for *who, texts in _CONTINUED if who == [app, user, name] for text in texts]
        history = [*events, *more]
        apps.setdefault(app, {}).update(_state_after(start, history, "app:"))
        users.setdefault((app, user), {}).update(_state_after(start, history, "user:"))
        state = _state_after(start, history, "")
        based = {"kind", "note"} if name == ARCHIVE else set()
        sessions.append(
            {
                "app_name": app,
                "user_id": user,
                "session_id": name,
                "created_at": created_at,
                "updated_at": _time_of(history[-1]) if history else created_at,
                "revision": len(history),
                "base_revision": 1 if based else -1,
                "state": state,
                "overlay_keys": sorted(set(state) - based),
                "events": [json.loads(text) for text in history],
            }
        )
    return {
        "apps": [{"app_name": app, "state": state} for app, state in apps.items()],
        "users": [
            {"app_name": app, "user_id": user, "state": state}
            for (app, user), state in users.items()
        ],
        "sessions": sessions,
    }


def _time_of(event: str) -> int:
    seconds: float = json.loads(event)["timestamp"]
    return round(seconds * 1_000_000)


def database_vectors() -> tuple[str, Json]:
    """Return the contents of database.sql and database.json."""
    _, sql, contents = database_file()
    return sql, contents


def database_file() -> tuple[bytes, str, Json]:
    """Return the SQLite file that the service writes, the same as SQL, and what is in it."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "sessions.db"
        with fixed():
            created = asyncio.run(_write(path))
        with closing(sqlite3.connect(path)) as connection:
            sql = dumped(connection)
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            connection.execute("PRAGMA journal_mode = DELETE")
        file = path.read_bytes()
    return (
        file,
        sql,
        {
            "about": ABOUT,
            "root_keys": root_keys(),
            "adk_version": ADK_VERSION,
            **_contents(created),
        },
    )
