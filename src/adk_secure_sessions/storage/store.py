"""The operations on encrypted sessions, with ADK's plaintext ids and JSON as arguments."""

from collections.abc import Callable
from typing import TypeVar

from adk_secure_sessions.formats.states import JsonObject
from adk_secure_sessions.storage.bindings import StoredSession
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

    Every method may raise the errors of `UnitOfWork.run`.
    """

    def __init__(self, unit: UnitOfWork) -> None:
        self.unit = unit

    async def prepare(self) -> None:
        """Open the database, so that the first operation need not do so."""
        await self.unit.keys()

    async def close(self) -> None:
        """Close the connections and discard the keys and cached sessions.

        The next call opens the database again.
        """
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
        return await self.unit.run(GetSession(who, decode, limit, after))

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
        return await self.unit.run(DeleteSession(who, before))

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

        After the commit, *stored* is called with the updated session, even if the caller was
        cancelled.

        Raises MissingSession if the session is not stored.  Raises StaleRevision if the row id and
        the revision of the stored session differ from those in *expected*.
        """
        who = await self.unit.identify(app_name, user_id, session_id)
        stored(await self.unit.run(AppendEvent(who, expected, event, stored)))

    async def user_state(self, app_name: str, user_id: str) -> bytes:
        """Return the user's state as JSON; `{}` for an unknown user."""
        return await self.unit.run(GetUserState(await self.unit.identify(app_name, user_id)))
