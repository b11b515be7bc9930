"""Operations for the migration package."""

from collections.abc import Callable
from typing import TypeVar

from adk_secure_sessions.storage.features.imports import Imports
from adk_secure_sessions.storage.reads import (
    GetSession,
    GetStates,
    ListPage,
    Page,
    Position,
    View,
)
from adk_secure_sessions.storage.rows import StoredSession
from adk_secure_sessions.storage.unit_of_work import UnitOfWork
from adk_secure_sessions.storage.writes import DeleteSession

T = TypeVar("T")


class Store(Imports):
    """Imports, and operations with plaintext ids."""

    @property
    def unit(self) -> UnitOfWork:
        return self._unit

    async def get(
        self,
        app_name: str,
        user_id: str,
        session_id: str,
        decode: Callable[[bytes, int, int], T],
        *,
        limit: int | None = None,
        after: int | None = None,
        caches: bool = False,
    ) -> tuple[View, list[T]] | None:
        """Return a session and its decoded events; None if the session is not stored.

        *decode* is called with an event's plaintext, its session's row id and its `seq`.  *limit*
        is the maximum number of events, the last ones; None for all.  If *after* (microseconds
        since 1970, UTC) is given, only events at this time or later are returned, and *limit* is
        ignored.  If *caches* is True, the events are cached: see `GetSession`.
        """
        who = await self.unit.identify(app_name, user_id, session_id)
        return await self.unit.run(GetSession(who, decode, limit, after, caches))

    async def list_page(
        self,
        app_name: str,
        user_id: str | None,
        after: Position | None,
        *,
        limit: int,
        newest: bool,
        with_state: bool,
        skip: bool,
    ) -> Page:
        """Return at most *limit* sessions of a user, or of an app if *user_id* is None.

        `ListPage` describes the arguments.  In contrast to `ListPage`, collections and expired
        sessions do not count towards *limit*: if fewer than *limit* sessions are returned, no
        session follows.
        """
        who = await self.unit.identify(app_name, user_id or "")
        return await self.unit.run(
            ListPage(
                who,
                after,
                of_app=user_id is None,
                limit=limit,
                newest=newest,
                with_state=with_state,
                skip=skip,
            )
        )

    async def delete(
        self,
        app_name: str,
        user_id: str,
        session_id: str,
        *,
        condition: Callable[[StoredSession], bool] | None = None,
    ) -> bool:
        """Delete a session and its events, and return whether the session was deleted.

        If *condition* is given, delete the session only if *condition* returns True for it.
        """
        who = await self.unit.identify(app_name, user_id, session_id)
        return await self.unit.run(DeleteSession(who, condition))

    async def stored(self, app_name: str, user_id: str, session_id: str) -> StoredSession | None:
        """Return a session without events, even if it has expired; None if it is not stored."""
        who = await self.unit.identify(app_name, user_id, session_id)
        found = await self.unit.run(GetSession(who, _item, 0, finds_expired=True))
        return found[0].session if found else None

    async def user_state(self, app_name: str, user_id: str) -> bytes:
        """Return the user's state as JSON; `{}` for an unknown user."""
        _, state = await self.states(app_name, user_id)
        return state

    async def states(self, app_name: str, user_id: str) -> tuple[bytes, bytes]:
        """Return the states of an app and a user as JSON; `{}` for one that is not stored."""
        return await self.unit.run(GetStates(await self.unit.identify(app_name, user_id)))


def _item(plaintext: bytes, _row: int, _seq: int) -> bytes:
    return plaintext
