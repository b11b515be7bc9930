"""The database that was written when format 2 was frozen: every release must be able to use it."""

import hashlib
import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from google.adk.events import Event, EventActions

from adk_secure_sessions import EncryptedSessionService
from adk_secure_sessions.maintenance import Database, verify
from tests.vector_databases import Json, backends, load, reader_of, roots

FROZEN = Path(__file__).parent / "vectors" / "format2"
SHA_256 = "0e5f121dc6820e6eae6e93a75c57dabcc18f732ddb23777e19bb3c276360c51f"
NAME = "format2/contents.json"
CONTENTS, ROOTS = load(NAME), roots(NAME)


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return Path(shutil.copyfile(FROZEN / "sessions.db", tmp_path / "sessions.db"))


def service_on(path: Path, writer: str) -> EncryptedSessionService:
    return EncryptedSessionService(f"sqlite:///{path}", *backends(NAME, writer))


def ids(expected: Json) -> dict[str, Any]:
    return {name: expected[name] for name in ("app_name", "user_id", "session_id")}


def state_of(expected: Json) -> Json:
    """The session's state as callers see it: with the app's and the user's."""
    state = dict(expected["state"])
    for kind, prefix, names in (("apps", "app:", 1), ("users", "user:", 2)):
        who = list(ids(expected).values())[:names]
        (own,) = (one for one in CONTENTS[kind] if [*one.values()][:names] == who)
        state |= {prefix + key: value for key, value in own["state"].items()}
    return state


def test_frozen_file_is_never_changed() -> None:
    assert hashlib.sha256((FROZEN / "sessions.db").read_bytes()).hexdigest() == SHA_256


def test_frozen_file_holds_what_the_statements_create() -> None:
    with closing(sqlite3.connect(":memory:")) as made:
        made.executescript((FROZEN / "sessions.sql").read_text(encoding="utf-8"))
        with closing(sqlite3.connect(f"file:{FROZEN}/sessions.db?immutable=1", uri=True)) as file:
            tables = "SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name"
            names = made.execute(tables).fetchall()
            assert file.execute(tables).fetchall() == names
            for (name,) in names:
                rows = f"SELECT * FROM {name} ORDER BY 1, 2"
                assert file.execute(rows).fetchall() == made.execute(rows).fetchall()


@pytest.mark.parametrize("writer", list(ROOTS))
async def test_every_session_of_the_frozen_database_is_read(database: Path, writer: str) -> None:
    async with service_on(database, writer) as service:
        for expected in CONTENTS["sessions"]:
            session = await service.get_session(**ids(expected))
            assert session is not None
            assert session.state == state_of(expected)
            assert session.last_update_time == expected["updated_at"] / 1_000_000
            assert session.events == [Event.model_validate(event) for event in expected["events"]]
        for user in CONTENTS["users"]:
            who = {"app_name": user["app_name"], "user_id": user["user_id"]}
            assert await service.get_user_state(**who) == user["state"]


@pytest.mark.parametrize("writer", list(ROOTS))
async def test_events_are_appended_to_the_frozen_database(database: Path, writer: str) -> None:
    delta = {"new": 1, "user:new": 2, "app:new": 3, "large": "x" * 9000}
    async with service_on(database, writer) as service:
        for expected in CONTENTS["sessions"]:
            session = await service.get_session(**ids(expected))
            assert session is not None
            event = Event(author="user", id="new", timestamp=1_800_000_000.0)
            event.actions = EventActions(state_delta=delta)
            await service.append_event(session, event)
        await service.create_session(app_name="clinic", user_id="new", session_id="new")
    async with service_on(database, writer) as again:
        for expected in CONTENTS["sessions"]:
            session = await again.get_session(**ids(expected))
            assert session is not None
            assert [event.id for event in session.events][len(expected["events"]) :] == ["new"]
            assert session.state.items() >= delta.items()
    with reader_of(database, NAME) as reader:
        found = reader.contents()
    assert len(found["sessions"]) == len(CONTENTS["sessions"]) + 1


async def test_frozen_database_is_verified(database: Path) -> None:
    async with Database(f"sqlite:///{database}", *backends(NAME)) as db:
        found = await verify(db)
    assert found.bad == found.unchecked == 0
    assert found.sessions == len(CONTENTS["sessions"])
    assert found.events == sum(len(one["events"]) for one in CONTENTS["sessions"])


def test_reader_written_from_the_page_alone_reads_the_frozen_database(database: Path) -> None:
    with reader_of(database, NAME) as reader:
        found = reader.contents()
    for kind, contents in found.items():
        assert sorted(contents, key=json.dumps) == sorted(CONTENTS[kind], key=json.dumps)
