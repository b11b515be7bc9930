"""The database that is attacked: its users and sessions, built once for each backend.

How it works.  `build_world(backend)` runs a service on a new SQLite file and keeps three things:
the bytes of the file when it is finished, and two events earlier (what an attacker may have copied
then); the ids of its rows by name, so that SQL can say `WHERE id = :visit`; and every session as
its owner loads it.  Each user has another role: alice has three sessions, one of them with a large
state and so with a snapshot; bob is another user of the same app, carol one of another app.  Every
id, key, value and text contains `SECRET`, which no error may repeat.

The world "packed" has AES-256-GCM, and a long text in each state and each event.  Its records are
compressed and padded, except for the first event of each session, which a service without these
options has stored.
"""

import asyncio
import functools
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from google.adk.events.event import Event
from google.adk.events.event_actions import EventActions
from google.adk.sessions import Session
from google.genai import types

from adk_secure_sessions import (
    AesGcmBackend,
    EncryptedSessionService,
    EncryptionBackend,
    FernetBackend,
    Packing,
)
from tests.sqlite_files import settle, value

KEY = bytes(range(32))
SECRET = "7Qx"
START = 1_700_000_000.0
BACKENDS: dict[str, Callable[[], EncryptionBackend]] = {
    "aesgcm": lambda: AesGcmBackend(KEY),
    "fernet": lambda: FernetBackend(KEY),
    "packed": lambda: AesGcmBackend(KEY),
}
PACKED: dict[str, Any] = {"packing": Packing("zlib", "padme")}
OPTIONS = {"packed": PACKED}  # of the services, by world
LONG = " ".join(f"{SECRET}{number}" for number in range(300))  # a content with it is compressed


class SessionIds(NamedTuple):
    """Which session: the ids that ADK uses."""

    app_name: str
    user_id: str
    session_id: str


VISIT = SessionIds("clinic", "alice-7Qx", "visit-7Qx")
NOTES = SessionIds("clinic", "alice-7Qx", "notes-7Qx")
ARCHIVE = SessionIds("clinic", "alice-7Qx", "archive-7Qx")  # its large state has a snapshot
BOB = SessionIds("clinic", "bob-7Qx", "visit-7Qx")
CAROL = SessionIds("bank", "carol-7Qx", "visit-7Qx")
ALL_SESSIONS = (VISIT, NOTES, ARCHIVE, BOB, CAROL)

# The names that SQL in the tests has for their rows.
ROWS = {
    VISIT: {"clinic": "apps", "alice": "users", "visit": "sessions"},
    NOTES: {"notes": "sessions"},
    ARCHIVE: {"archive": "sessions"},
    BOB: {"bob": "users", "bob_visit": "sessions"},
    CAROL: {"bank": "apps", "carol": "users", "carol_visit": "sessions"},
}


class World(NamedTuple):
    """A database: its bytes two events before the end and at the end, row ids, and sessions."""

    files: tuple[bytes, bytes]
    rows: dict[str, int]
    sessions: dict[SessionIds, Session]


def new_event(number: int, delta: dict[str, Any] | None = None) -> Event:
    return Event(
        author="agent",
        invocation_id="invocation",
        timestamp=START + number,
        content=types.Content(role="model", parts=[types.Part(text=f"text-7Qx {number}")]),
        actions=EventActions(state_delta=delta or {}),
    )


@functools.cache
def build_world(backend_name: str) -> World:
    """Build it in a thread of its own, since an event loop may be running in this one."""
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(1) as pool:
        path = Path(directory) / "sessions.db"
        return pool.submit(asyncio.run, _build(path, backend_name)).result()


async def _build(path: Path, name: str) -> World:
    url = f"sqlite+aiosqlite:///{path}"
    backend, options = BACKENDS[name], OPTIONS.get(name, {})
    long = {"long-7Qx": LONG} if options else {}
    rows: dict[str, int] = {}
    async with EncryptedSessionService(url, backend(), **options) as service:
        for who in ALL_SESSIONS:
            large = {"large-7Qx": "x" * 8300} if who == ARCHIVE else {}
            state = {"key-7Qx": who.user_id, "user:key-7Qx": who.user_id, "app:key-7Qx": 0}
            state |= {prefix + key: long[key] for key in long for prefix in ("", "user:", "app:")}
            await service.create_session(**who._asdict(), state=large | state)
            for name, table in ROWS[who].items():
                rows[name] = _newest(path, f"secure_{table}")
    async with EncryptedSessionService(url, backend()) as service:
        await append_all(service, 0, large=1000, delta=long)
    async with EncryptedSessionService(url, backend(), **options) as service:
        await append_all(service, 1, large=1000, delta=long)
    first = _content(path)
    async with EncryptedSessionService(url, backend(), **options) as service:
        for number in (2, 3):
            await append_all(service, number, large=8200, delta=long)
    async with EncryptedSessionService(url, backend()) as service:
        loaded = {who: await service.get_session(**who._asdict()) for who in ALL_SESSIONS}
    found = {who: session for who, session in loaded.items() if session}
    assert len(found) == len(ALL_SESSIONS)
    return World((first, _content(path)), rows, found)


async def append_all(
    service: EncryptedSessionService, number: int, large: int, delta: dict[str, Any]
) -> None:
    """Append an event to each session."""
    for who in ALL_SESSIONS:
        session = await service.get_session(**who._asdict())
        assert session is not None
        steps: dict[str, Any] = {"step": number, "user:step": number, "app:step": number}
        if who == ARCHIVE:  # enough, in the second round, for a new snapshot
            steps["more-7Qx"] = "y" * large
        await service.append_event(session, new_event(number, steps | delta))


def _newest(path: Path, table: str) -> int:
    newest: int = value(path, f"SELECT max(id) FROM {table}")  # ids ascend within a process
    return newest


def _content(path: Path) -> bytes:
    settle(path)
    return path.read_bytes()
