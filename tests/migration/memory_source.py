"""A source in memory, whose sessions a test can change at any moment.

    source = MemorySource()
    source.put("ada", "visit", events=3, state={"n": 1})

`put` creates a session, or changes the one with the same ids.  Each change gives the session a new
version.  `before_read` is called before each `read`, so that a test can change something while a
command runs.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from google.adk.events import Event
from google.genai import types

from adk_secure_sessions.formats import events as stored_events
from adk_secure_sessions.formats import json_text
from adk_secure_sessions.formats.json_text import JsonObject
from adk_secure_sessions.formats.records import EncodedEvent
from adk_secure_sessions.migration.sources import (
    ListedSession,
    Selection,
    SessionContent,
    Source,
    States,
    Unreadable,
    encoded_state,
    try_convert,
)

APP = "clinic"
START = 1_700_000_000
Ids = tuple[str, str, str]


def event(number: int, text: str = "") -> EncodedEvent:
    """Return event number *number* of a session, a second after the one before."""
    content = types.Content(role="user", parts=[types.Part(text=text or f"text {number}")])
    made = Event(id=f"e{number}", author="user", timestamp=START + number, content=content)
    return EncodedEvent(stored_events.encode(made), (START + number) * 1_000_000)


def event_of_another_adk(event: EncodedEvent) -> EncodedEvent:
    """Return the event as another release of google-adk stores it: with its fields reordered."""
    version, fields = json_text.read_event(event.plaintext)
    other = b"9.9.9"
    assert version != other.decode()
    text = json_text.dumps(dict(reversed(fields.items())))
    return event._replace(plaintext=bytes([len(other)]) + other + text)


class MemorySource(Source):
    def __init__(self, batch: int = 10) -> None:
        self.contents: dict[Ids, SessionContent | Unreadable] = {}
        self.versions: dict[Ids, int] = {}
        self.users: dict[tuple[str, str], JsonObject | Unreadable] = {}
        self.apps: dict[str, JsonObject | Unreadable] = {}
        self.before_read: Callable[[Sequence[ListedSession]], None] = lambda sessions: None
        self.reads = 0
        self._batch = batch

    def put(
        self,
        user: str,
        session: str,
        *,
        app: str = APP,
        events: int | Sequence[EncodedEvent] = 0,
        state: JsonObject | None = None,
        updated_at: int | None = None,
        expires_at: int | None = None,
    ) -> None:
        made = [event(n) for n in range(events)] if isinstance(events, int) else events
        last = made[-1].time if made else START * 1_000_000
        updated = last if updated_at is None else updated_at
        own: Any = try_convert(encoded_state, state or {})
        if not isinstance(own, Unreadable):
            own = SessionContent(own, made, START * 1_000_000, updated, expires_at)
        self._set((app, user, session), own)

    def spoil(self, user: str, session: str, reason: str = "its state is not JSON") -> None:
        self._set((APP, user, session), Unreadable(reason))

    def remove(self, user: str, session: str) -> None:
        del self.contents[APP, user, session]

    def _set(self, ids: Ids, content: SessionContent | Unreadable) -> None:
        self.contents[ids] = content
        self.versions[ids] = self.versions.get(ids, 0) + 1

    # --- the source ------------------------------------------------------------------------------

    @property
    def description(self) -> str:
        return "a source in memory"

    def _in(self, selection: Selection) -> list[Ids]:
        return [
            ids
            for ids, content in sorted(self.contents.items())
            if selection.app_name in (None, ids[0])
            and (
                selection.since is None
                or isinstance(content, Unreadable)
                or content.updated_at >= selection.since
            )
        ]

    async def count(self, selection: Selection) -> int:
        return len(self._in(selection))

    async def sessions(self, selection: Selection) -> AsyncIterator[Sequence[ListedSession]]:
        last: Ids | None = None
        while True:
            page = [ids for ids in self._in(selection) if last is None or ids > last][: self._batch]
            if not page:
                return
            yield [ListedSession(*ids, str(self.versions[ids])) for ids in page]
            last = page[-1]

    async def read(
        self, sessions: Sequence[ListedSession]
    ) -> Mapping[ListedSession, SessionContent | Unreadable]:
        self.before_read(sessions)
        self.reads += len(sessions)
        return {one: self.contents[one[:3]] for one in sessions if one[:3] in self.contents}

    async def states(self, selection: Selection) -> AsyncIterator[States]:
        for states in (self.users, {(app,): state for app, state in self.apps.items()}):
            yield {
                ids: state if isinstance(state, Unreadable) else try_convert(encoded_state, state)
                for ids, state in states.items()
                if selection.app_name in (None, ids[0])
            }
