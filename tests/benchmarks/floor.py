"""The floor: a minimal session service on our tables, to compare ours with.

It writes and reads the same rows as our service, with JSON that is encrypted with AES-256-GCM in
the columns, and returns the same ADK objects.  It has one key, and authenticates no context: rows
can be exchanged, replayed and removed.  App state and user state are always empty, and it appends
only to sessions that it created itself.
"""

import json
import os
import time
import uuid
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from google.adk.events import Event
from google.adk.sessions import BaseSessionService, Session
from google.adk.sessions.base_session_service import GetSessionConfig, ListSessionsResponse
from pydantic_core import from_json

OVERLAY_LIMIT = 8 * 1024  # bytes; a larger state goes to `secure_bases`, as in our service
Row = Sequence[Any]
_KEY = bytes(range(32))  # the same for floors that share a database

# Parameters are numbered as in SQLite; PostgreSQL writes $1 instead of ?1.
# They are the tags: ?1 of the app, ?2 of the user, ?3 of the session.
OWNERS = """
SELECT 0, id, 0, 0, state FROM secure_apps WHERE tag = ?1
UNION ALL SELECT 1, id, 0, 0, state FROM secure_users WHERE tag = ?2"""
SESSION = (
    OWNERS
    + """
UNION ALL SELECT 2, number, 0, 0, seal FROM secure_witnesses WHERE tag IN (?1, ?2, ?3)
UNION ALL SELECT 3, id, revision, updated_at, state FROM secure_sessions WHERE tag = ?3
UNION ALL SELECT 4, session_row, revision, 0, state FROM secure_bases
  WHERE session_row = (SELECT id FROM secure_sessions WHERE tag = ?3)"""
)
SESSION_AND_EVENTS = (
    SESSION
    + """
UNION ALL SELECT 5, seq, time, 0, event FROM secure_events
  WHERE session_row = (SELECT id FROM secure_sessions WHERE tag = ?3)"""
)
SESSIONS = """
SELECT 0, id, 0, 0, state, tag FROM secure_apps WHERE tag = ?1
UNION ALL SELECT 1, id, 0, 0, state, tag FROM secure_users WHERE tag = ?2
UNION ALL SELECT 2, w.number, 0, 0, w.seal, w.tag FROM secure_witnesses w
  WHERE w.tag IN (?1, ?2)
UNION ALL SELECT 2, w.number, 0, 0, w.seal, w.tag FROM secure_witnesses w, secure_sessions s
  WHERE w.tag = s.tag AND s.user_row = (SELECT id FROM secure_users WHERE tag = ?2)
    AND s.revision = 0
UNION ALL SELECT 3, id, revision, updated_at, state, tag FROM secure_sessions
  WHERE user_row = (SELECT id FROM secure_users WHERE tag = ?2)
UNION ALL SELECT 4, b.session_row, b.revision, 0, b.state, s.tag
  FROM secure_bases b, secure_sessions s
  WHERE b.session_row = s.id AND s.user_row = (SELECT id FROM secure_users WHERE tag = ?2)"""


class NewSession(NamedTuple):
    """A row of `secure_sessions`, and its row of `secure_bases` if the state is large."""

    app_tag: bytes
    user_tag: bytes
    tag: bytes
    id: int
    base_revision: int
    now: int
    state: bytes
    base: bytes | None


class NewEvent(NamedTuple):
    """A row of `secure_events`, and the new values of the session's row."""

    session_row: int
    seq: int
    time: int
    state: bytes
    event: bytes


@dataclass(slots=True)
class _KnownSession:
    """Cached values of a session that this process created."""

    row: int
    overlay: dict[str, Any]
    revision: int = 0


class Floor(BaseSessionService):
    """Converts between ADK's objects and rows; subclasses run the statements on a driver."""

    def __init__(self) -> None:
        self._known: dict[str, _KnownSession] = {}
        self._last_row = 0
        self._cipher = AESGCM(_KEY)

    async def create_session(
        self,
        *,
        app_name: str,
        user_id: str,
        state: dict[str, Any] | None = None,
        session_id: str | None = None,
    ) -> Session:
        session_id = session_id or str(uuid.uuid4())
        encoded = _dumps(state or {})
        large = len(encoded) > OVERLAY_LIMIT
        new = NewSession(
            *_tags(app_name, user_id, session_id),
            self.next_row(),
            0 if large else -1,
            time.time_ns() // 1000,
            self.encrypt(b"{}" if large else encoded),
            self.encrypt(encoded) if large else None,
        )
        await self.insert_session(new)
        own = from_json(encoded)
        self._known[session_id] = _KnownSession(new.id, {} if large else own.copy())
        return _session(app_name, user_id, session_id, own, new.now)

    async def get_session(
        self,
        *,
        app_name: str,
        user_id: str,
        session_id: str,
        config: GetSessionConfig | None = None,
    ) -> Session | None:
        query = SESSION_AND_EVENTS if config is None else SESSION
        own: dict[str, Any] = {}
        base: dict[str, Any] = {}
        updated: int | None = None
        history: list[Row] = []
        for row in await self.read(query, _tags(app_name, user_id, session_id)):
            kind = row[0]
            if kind == 5:
                history.append(row)
            elif kind == 3:
                own, updated = from_json(self._decrypt(row[4])), row[3]
            elif kind == 4:
                base = from_json(self._decrypt(row[4]))
        if updated is None:
            return None
        history.sort(key=itemgetter(1))  # costs little: the rows arrive in this order
        decode = Event.model_validate_json
        events = [decode(self._decrypt(row[4])) for row in history]
        return _session(app_name, user_id, session_id, base | own, updated, events)

    async def list_sessions(
        self, *, app_name: str, user_id: str | None = None
    ) -> ListSessionsResponse:
        assert user_id is not None
        found: list[Row] = []
        bases: dict[int, Row] = {}
        for row in await self.read(SESSIONS, _tags(app_name, user_id, "")[:2]):
            if row[0] == 3:
                found.append(row)
            elif row[0] == 4:
                bases[row[1]] = row
        found.sort(key=lambda row: int(row[3]))
        sessions = []
        for row in found:
            own, base = from_json(self._decrypt(row[4])), bases.get(row[1])
            if base is not None:
                own = from_json(self._decrypt(base[4])) | own
            session_id = row[5].rpartition(b"\0")[2].decode()
            sessions.append(_session(app_name, user_id, session_id, own, row[3]))
        return ListSessionsResponse(sessions=sessions)

    async def delete_session(self, *, app_name: str, user_id: str, session_id: str) -> None:
        await self.delete(_tags(app_name, user_id, session_id))
        self._known.pop(session_id, None)

    async def append_event(self, session: Session, event: Event) -> Event:
        known = self._known[session.id]
        delta = event.actions.state_delta
        overlay = known.overlay | delta
        now = round(event.timestamp * 1_000_000)
        encoded = event.model_dump_json(exclude_none=True).encode()
        values = self.encrypt(_dumps(overlay)), self.encrypt(encoded)
        await self.insert_event(NewEvent(known.row, known.revision, now, *values))
        known.overlay = overlay
        known.revision += 1
        session.last_update_time = now / 1_000_000
        session.state.update(delta)
        session.events.append(event)
        return event

    def next_row(self) -> int:
        """Return an ascending key, as our service makes them."""
        self._last_row = max(self._last_row + 1, time.time_ns() // 1_000_000 << 21)
        return self._last_row

    def encrypt(self, plaintext: bytes) -> bytes:
        """Return the nonce and the ciphertext with its tag."""
        nonce = os.urandom(12)
        return nonce + self._cipher.encrypt(nonce, plaintext, None)

    def _decrypt(self, value: bytes) -> bytes:
        return self._cipher.decrypt(value[:12], value[12:], None)

    @abstractmethod
    async def insert_session(self, new: NewSession) -> None:
        """Insert the rows of a session, and those of its app and user if they are new."""

    @abstractmethod
    async def insert_event(self, new: NewEvent) -> None:
        """Insert an event and update its session, if the session still has revision `new.seq`."""

    @abstractmethod
    async def delete(self, tags: tuple[bytes, bytes, bytes]) -> None:
        """Delete all rows of a session."""

    @abstractmethod
    async def read(self, query: str, tags: tuple[bytes, ...]) -> Sequence[Row]:
        """Run one of this module's queries."""

    @abstractmethod
    async def close(self) -> None:
        """Close the connections."""


def _tags(app_name: str, user_id: str, session_id: str) -> tuple[bytes, bytes, bytes]:
    app = app_name.encode()
    user = b"%b\0%b" % (app, user_id.encode())
    return app, user, b"%b\0%b" % (user, session_id.encode())


def _dumps(state: dict[str, Any]) -> bytes:
    return json.dumps(state, separators=(",", ":")).encode()


def _session(
    app_name: str,
    user_id: str,
    session_id: str,
    state: dict[str, Any],
    updated: int,
    events: list[Event] | None = None,
) -> Session:
    return Session(
        id=session_id,
        app_name=app_name,
        user_id=user_id,
        state=state,
        events=events or [],
        last_update_time=updated / 1_000_000,
    )
