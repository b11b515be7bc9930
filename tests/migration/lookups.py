"""A plaintext source in memory, which finds single sessions, and which a test can change.

    source = MemoryLookup()
    source.put("ada", "visit", texts=["hello"], state={"n": 1})
    source.users["ada"] = {"language": "en"}

`before` is awaited before each query of the source, with the name of the method.  A test sets it to
let another process copy or delete something at this moment.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

from google.adk.events import Event
from google.genai import types

from adk_secure_sessions.formats import events as stored_events
from adk_secure_sessions.formats.json_text import JsonObject, encode_state
from adk_secure_sessions.formats.records import EncodedEvent
from adk_secure_sessions.migration.adk_tables import AdkTables
from adk_secure_sessions.migration.sources import (
    ListedSession,
    Selection,
    SessionContent,
    States,
    Unreadable,
)

APP = "clinic"
START = 1_700_000_000


def said(text: str, seconds: float, **fields: Any) -> Event:
    """Return an event with *text*, so many seconds after `START`."""
    content = types.Content(role="user", parts=[types.Part(text=text)])
    fields = {"id": f"id of {text}", "author": "user", "invocation_id": "i", **fields}
    return Event(timestamp=START + seconds, content=content, **fields)


class MemoryLookup(AdkTables):
    """Sessions of the app `APP` in memory."""

    def __init__(self) -> None:
        self.sessions_by_ids: dict[tuple[str, str], tuple[ListedSession, SessionContent]] = {}
        self.unreadable: set[tuple[str, str]] = set()
        self.users: dict[str, JsonObject | Unreadable] = {}
        self.app: JsonObject = {}
        self.queried: list[str] = []
        self.before: Callable[[str], Awaitable[None]] | None = None

    def put(
        self, user_id: str, session_id: str, texts: Sequence[str] = (), **state: object
    ) -> None:
        """Store a session, or replace it, with one event a second for each of *texts*."""
        old = self.sessions_by_ids.get((user_id, session_id))
        etag = str(int(old[0].etag) + 1 if old else 1)
        history = [
            EncodedEvent(stored_events.encode(said(text, n)), int((START + n) * 1_000_000))
            for n, text in enumerate(texts, 1)
        ]
        end = (START + len(texts)) * 1_000_000
        content = SessionContent(encode_state(state), history, START * 1_000_000, end)
        session = ListedSession(APP, user_id, session_id, etag)
        self.sessions_by_ids[user_id, session_id] = session, content

    async def _query(self, name: str) -> None:
        self.queried.append(name)
        if self.before is not None:
            before, self.before = self.before, None  # what it does may query the source, too
            await before(name)
            self.before = self.before or before

    def _header(self, key: tuple[str, str]) -> SessionContent | Unreadable:
        if key in self.unreadable:
            return Unreadable("its state is not JSON")
        content = self.sessions_by_ids[key][1]
        return content._replace(events=[])

    def _content(self, key: tuple[str, str]) -> SessionContent | Unreadable:
        header = self._header(key)
        if isinstance(header, Unreadable):
            return header
        return header._replace(events=deepcopy(self.sessions_by_ids[key][1].events))

    def set_read_timeout(self, seconds: float | None) -> None:
        pass

    async def close(self) -> None:
        pass

    @property
    def description(self) -> str:
        return "a source in memory"

    async def read(
        self, sessions: Sequence[ListedSession]
    ) -> Mapping[ListedSession, SessionContent | Unreadable]:
        await self._query("read")
        return {
            session: self._content(session[1:3])
            for session in sessions
            if session[1:3] in self.sessions_by_ids
        }

    async def states(self, selection: Selection) -> AsyncIterator[States]:
        await self._query("states")
        yield {(APP, user_id): _encoded(state) for user_id, state in self.users.items()}
        yield {(APP,): encode_state(self.app)}

    async def find(self, app_name: str, user_id: str, session_id: str) -> ListedSession | None:
        await self._query("find")
        found = self.sessions_by_ids.get((user_id, session_id))
        return found[0] if found and app_name == APP else None

    async def sessions_of(
        self, app_name: str, user_id: str | None
    ) -> AsyncIterator[Mapping[ListedSession, SessionContent | Unreadable]]:
        await self._query("headers")
        yield {
            session: self._header(key)
            for key, (session, _) in self.sessions_by_ids.items()
            if app_name == APP and user_id in (None, key[0])
        }

    async def state(self, app_name: str, user_id: str | None = None) -> bytes | Unreadable | None:
        await self._query("app_state" if user_id is None else "user_state")
        found = self.app if user_id is None else self.users.get(user_id)
        return _encoded(found) if app_name == APP and found is not None else None


def _encoded(state: JsonObject | Unreadable) -> bytes | Unreadable:
    return state if isinstance(state, Unreadable) else encode_state(state)
