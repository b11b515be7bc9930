"""Write a database of every feature, with its key database and its artifacts, to a new folder.

    python examples/freeze_release.py tests/vectors/release_2_0

Before a release that adds a feature to the stored format, run this once with a new folder, add what
is new to it first, and commit the folder.  Use the oldest google-adk that this package supports, so
that all supported ones read the events.  Every later release must read it: see
tests/test_frozen_releases.py.  No file of such a folder is ever changed.

All contents are invented.  The root key is the bytes 0 to 31.
"""

import asyncio
import base64
import json
import sqlite3
import sys
import tempfile
import warnings
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

from google.adk.events import Event, EventActions
from google.adk.memory.memory_entry import MemoryEntry
from google.adk.sessions import DatabaseSessionService, Session
from google.genai import types

from adk_secure_sessions import (
    AesGcmBackend,
    EncryptedArtifactService,
    EncryptedMemoryService,
    EncryptedSessionService,
)
from adk_secure_sessions.maintenance import Database
from adk_secure_sessions.migration import migrate, open_source

ROOT_KEY = bytes(range(32))
NEVER = timedelta(days=36_500)  # the session that expires is readable for a hundred years
LARGE = {"record": "x" * 9000}  # more than 8 KiB: a snapshot, and then an overlay


def said(number: int, delta: dict[str, Any] | None = None) -> Event:
    return Event(
        id=f"event-{number}",
        author="user",
        timestamp=1_750_000_000.0 + number,
        content=types.Content(role="user", parts=[types.Part(text=f"sentence {number}")]),
        actions=EventActions(state_delta=delta or {}),
    )


def described(session: Session) -> dict[str, Any]:
    """What every release of google-adk reads in *session*."""
    return {
        "user_id": session.user_id,
        "session_id": session.id,
        "state": session.state,
        "last_update_time": session.last_update_time,
        "events": [
            {
                "id": event.id,
                "author": event.author,
                "timestamp": event.timestamp,
                "text": event.content.parts[0].text
                if event.content and event.content.parts
                else "",
                "state_delta": event.actions.state_delta,
            }
            for event in session.events
        ],
    }


async def fill(directory: Path) -> dict[str, Any]:
    """Write the databases and the artifacts to *directory*, and return what they contain."""
    data, keys = f"sqlite:///{directory}/data.db", f"sqlite:///{directory}/keys.db"
    backend = AesGcmBackend(ROOT_KEY)
    plain = DatabaseSessionService(f"sqlite+aiosqlite:///{directory}/plain.db")
    copied = await plain.create_session(
        app_name="clinic", user_id="eve", session_id="copied", state={"copied": True}
    )
    await plain.append_event(copied, said(1))
    await plain.close()
    async with Database(data, backend, key_db_url=keys) as db:
        await migrate(await open_source(f"sqlite:///{directory}/plain.db"), db)
    async with EncryptedSessionService(data, backend, key_db_url=keys) as service:
        for session_id, state, expires in (
            ("plain", {"own": 1, "user:named": "Ada", "app:opened": [1, {"deep": None}]}, None),
            ("large", LARGE, None),
            ("expiring", {}, NEVER),
        ):
            session = await service.create_session(
                app_name="clinic",
                user_id="ada",
                session_id=session_id,
                state=state,
                **({"expires_after": expires} if expires else {}),
            )
            for number in range(3):
                await service.append_event(session, said(number, {f"key {number}": "ü😀"}))
        memory = EncryptedMemoryService(service)
        remembered = types.Content(role="user", parts=[types.Part(text="allergic to penicillin")])
        await memory.add_memory(
            app_name="clinic",
            user_id="ada",
            memories=[MemoryEntry(id="one", content=remembered)],
        )
        artifacts = EncryptedArtifactService(service, directory / "artifacts")
        for text in ("AB negative", "AB positive"):
            await artifacts.save_artifact(
                app_name="clinic",
                user_id="ada",
                filename="user:card",
                artifact=types.Part(text=text),
            )
        ids = [("ada", one) for one in ("plain", "large", "expiring")] + [("eve", "copied")]
        sessions = []
        for user_id, session_id in ids:
            read = await service.get_session(
                app_name="clinic", user_id=user_id, session_id=session_id
            )
            assert read is not None
            sessions.append(described(read))
    return {
        "root_key": ROOT_KEY.hex(),
        "sessions": sessions,
        "artifacts": {"user:card": ["AB negative", "AB positive"]},
        "memories": ["allergic to penicillin"],
        "blobs": {
            str(path.relative_to(directory / "artifacts")): base64.b64encode(
                path.read_bytes()
            ).decode()
            for path in sorted((directory / "artifacts").rglob("*"))
            if path.is_file()
        },
    }


def main(folder: Path) -> None:
    folder.mkdir()  # an existing one is never changed
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        directory = Path(name)
        contents = asyncio.run(fill(directory))
        for database in ("data", "keys"):
            with closing(sqlite3.connect(directory / f"{database}.db")) as connection:
                lines = "\n".join(connection.iterdump())
            (folder / f"{database}.sql").write_text(lines + "\n", encoding="utf-8", newline="\n")
    text = json.dumps(contents, indent=1, ensure_ascii=True)
    (folder / "contents.json").write_text(text + "\n", encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
