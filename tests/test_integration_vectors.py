"""vectors/integrations.*: memories, and sessions that another service stores."""

import copy
from pathlib import Path
from typing import Any

from google.adk.events import Event
from google.adk.sessions import InMemorySessionService, Session
from google.genai import types

from adk_secure_sessions import EncryptedSessionService, EncryptedSessionWrapper
from adk_secure_sessions.formats.memory_items import COLLECTION_NAME
from adk_secure_sessions.integrations.memory import EncryptedMemoryService
from adk_secure_sessions.maintenance import Database, verify
from tests import vector_databases as vectors
from tests.vector_databases import Json

CONTENTS = vectors.load("integrations.json")
CASES = vectors.cases_of("integration_rejections.json")
BACKENDS = vectors.backends("integrations.json")
database = vectors.copies_of("integrations.sql")


async def read_memory(path: Path, app: str, user: str) -> Json:
    async with EncryptedSessionService(f"sqlite:///{path}", *BACKENDS) as sessions:
        service = EncryptedMemoryService(sessions)
        memory = await service._up_to_date(await service._cache(), (app, user, COLLECTION_NAME))
        assert memory is not None
        entries = [
            {"scope": list(scope), **entry.values()}
            for scope, kept in memory._scopes.items()
            for entry in kept.values()
        ]
        return {"deleted": sorted(memory.deleted), "entries": entries}


class Inner(InMemorySessionService):
    """Returns the stored session of a vector for all ids."""

    def __init__(self, stored: Json) -> None:
        super().__init__()
        self._stored = stored

    async def get_session(self, **ids: Any) -> Session:
        events = []
        for one in self._stored["events"]:
            fields = {name: value for name, value in one.items() if name not in _OWN_FORM}
            content = types.Content(role="model", parts=[types.Part(text=one["text"])])
            events.append(Event(**fields, content=content))
        fields = {name: value for name, value in self._stored.items() if name != "events"}
        return Session(**fields, events=events)


_OWN_FORM = ("text", "state_delta")


async def read_session(path: Path, stored: Json, ids: tuple[str, str, str]) -> Json:
    first, more = BACKENDS
    options: Any = {"key_db_url": f"sqlite:///{path}", "additional_backends": more}
    async with EncryptedSessionWrapper(Inner(stored), first, **options) as service:
        found = await service.get_session(app_name=ids[0], user_id=ids[1], session_id=ids[2])
        assert found is not None
        return {"state": found.state, "events": found.events}


def ids_of(stored: Json) -> tuple[str, str, str]:
    return stored["app_name"], stored["user_id"], stored["id"]


async def test_services_read_what_the_vector_says(database: Path) -> None:
    for memory in CONTENTS["memories"]:
        found = await read_memory(database, memory["app_name"], memory["user_id"])
        assert found == {name: memory[name] for name in ("deleted", "entries")}
    for session in CONTENTS["sessions"]:
        found = await read_session(database, session["stored"], ids_of(session["stored"]))
        assert found["state"] == session["state"]
        assert found["events"] == [Event.model_validate(one) for one in session["events"]]
    async with Database(f"sqlite:///{database}", *BACKENDS) as db:
        assert (await verify(db)).bad == 0


def test_reader_written_from_the_page_alone_reads_the_same(database: Path) -> None:
    with vectors.reader_of(database, "integrations.json") as reader:
        for memory in CONTENTS["memories"]:
            found = reader.memory(memory["app_name"], memory["user_id"])
            assert found == {name: memory[name] for name in ("deleted", "entries")}
        for session in CONTENTS["sessions"]:
            found = reader.wrapped_session(session["stored"], *ids_of(session["stored"]))
            assert found == {name: session[name] for name in ("state", "events")}


# --- rejections ----------------------------------------------------------------------------------


def changed(database: Path, case: Json) -> tuple[Json, tuple[str, str, str]]:
    """Change the database as the case says; return the stored session, and the ids to ask for."""
    vectors.change(database, case)
    original = CONTENTS["sessions"][case.get("session", 0)]["stored"]
    stored = copy.deepcopy(original)
    for path, value in case.get("set", ()):
        place = stored
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = value
    stored["events"] += [case["append"]] if "append" in case else []
    return stored, ids_of(original)


@vectors.each_case(CASES)
async def test_change_is_rejected_as_named(database: Path, case: Json) -> None:
    stored, ids = changed(database, case)

    async def use() -> None:
        if "memory" in case:
            await read_memory(database, *case["memory"])
        else:
            await read_session(database, stored, ids)

    def read() -> None:
        with vectors.reader_of(database, "integrations.json") as reader:
            if "memory" in case:
                reader.memory(*case["memory"])
            else:
                reader.wrapped_session(stored, *ids)

    await vectors.assert_used_as_named(case, use)
    vectors.assert_read_as_named(case, read)
