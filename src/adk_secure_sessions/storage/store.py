"""The operations on encrypted sessions, with ADK's plaintext ids and JSON as arguments."""

from collections.abc import Callable
from typing import TypeVar

from adk_secure_sessions.formats.states import JsonObject
from adk_secure_sessions.lru import Lru
from adk_secure_sessions.storage.bindings import NO_SNAPSHOT, Identity, StoredSession
from adk_secure_sessions.storage.reads import (
    GetSession,
    GetUserState,
    ListAppSessions,
    ListUserSessions,
    View,
)
from adk_secure_sessions.storage.unit_of_work import UnitOfWork
from adk_secure_sessions.storage.writes import (
    AppendEvent,
    CreateSession,
    DeleteSession,
    Expected,
    NewEvent,
)

T = TypeVar("T")


class Store:
    """The operations on the sessions of one database.

    A store caches the sessions that it has read or written.  Appending to a cached session needs
    no read.  Every method raises the errors of `UnitOfWork.run`.
    """

    def __init__(self, unit: UnitOfWork, *, cached_sessions: int) -> None:
        self.unit = unit
        self._known: Lru[bytes, StoredSession] = Lru(cached_sessions)
        self._cached_sessions = cached_sessions

    async def prepare(self) -> None:
        """Open the database, before the first operation does so."""
        await self.unit.keys()

    async def close(self) -> None:
        """Close the connections and discard all keys and cached sessions.

        The next call opens the database again.
        """
        self._known = Lru(self._cached_sessions)
        await self.unit.close()

    async def create(
        self,
        app_name: str,
        user_id: str,
        session_id: str,
        app_delta: JsonObject,
        user_delta: JsonObject,
        state: bytes,
        now: int,
    ) -> View:
        """Create a session and return it.

        *app_delta* and *user_delta* are merged into the states of the app and the user.  *state*
        is the session's state as JSON, and *now* is in microseconds UTC.

        Raises DuplicateSession if the user already has a session with this id.
        """
        who = await self.unit.identify(app_name, user_id, session_id)
        created = await self.unit.run(CreateSession(who, app_delta, user_delta, state, now))
        self._remember(who, created.session)
        return View(created.session, user_id, created.app.state, created.user.state)

    async def get(
        self,
        app_name: str,
        user_id: str,
        session_id: str,
        decode: Callable[[bytes, int, int], T],
        *,
        limit: int | None = None,
        after: int | None = None,
    ) -> tuple[View, list[T]] | None:
        """Return a session and its decoded events; None if the session is not stored.

        See `GetSession` for the arguments.
        """
        who = await self.unit.identify(app_name, user_id, session_id)
        found = await self.unit.run(GetSession(who, decode, limit, after))
        if found is not None:
            self._remember(who, found[0].session)
        return found

    async def list_user(self, app_name: str, user_id: str, *, skip: bool) -> list[View]:
        """Return all sessions of a user; see `ListUserSessions` for *skip*."""
        who = await self.unit.identify(app_name, user_id)
        return await self.unit.run(ListUserSessions(who, skip=skip))

    async def list_app(self, app_name: str, *, skip: bool) -> list[View]:
        """Return all sessions of an app; see `ListAppSessions` for *skip*."""
        who = await self.unit.identify(app_name)
        return await self.unit.run(ListAppSessions(who, skip=skip))

    async def delete(
        self, app_name: str, user_id: str, session_id: str, *, before: int | None = None
    ) -> bool:
        """Delete a session and its events, and return whether the session was deleted.

        If *before* (microseconds UTC) is given, the session is deleted only if its last update was
        earlier.
        """
        who = await self.unit.identify(app_name, user_id, session_id)
        known = self._known.get(who.session_tag) if before is None else None
        deleted = await self.unit.run(DeleteSession(who, known, before))
        self._known.drop(who.session_tag)
        return deleted

    async def append(
        self,
        app_name: str,
        user_id: str,
        session_id: str,
        expected: Expected,
        event: NewEvent,
        stored: Callable[[StoredSession], None],
    ) -> None:
        """Append an event.

        After the commit, *stored* is called with the session after the event, even if the caller
        was cancelled.

        Raises MissingSession if the session is not stored, and StaleRevision if its row key and
        revision are not *expected*.
        """
        who = await self.unit.identify(app_name, user_id, session_id)
        sessions = self._known
        known = sessions.get(who.session_tag)
        if known is not None and (known.id, known.revision) != expected:
            known = None

        def done(session: StoredSession) -> None:
            sessions.put(who.session_tag, session)
            stored(session)

        done(await self.unit.run(AppendEvent(who, known, expected, event, done)))

    async def user_state(self, app_name: str, user_id: str) -> bytes:
        """Return the user's state as JSON; `{}` for an unknown user."""
        return await self.unit.run(GetUserState(await self.unit.identify(app_name, user_id)))

    def _remember(self, who: Identity, session: StoredSession) -> None:
        if session.base_revision != NO_SNAPSHOT:  # a snapshot may be large: do not cache it
            session = session._replace(snapshot=None)
        elif self._known.get(who.session_tag) is session:
            return
        self._known.put(who.session_tag, session)
