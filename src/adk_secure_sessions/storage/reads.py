"""The reads: get a session with its events, list sessions, get a user's state.

Each read is an operation with one query.  With a key database, a second query may read data keys.
Events are decrypted in chunks in the event loop, and other tasks can run between two chunks.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Generic, NamedTuple, TypeVar

from adk_secure_sessions.db.protocol import Executors
from adk_secure_sessions.errors import DecryptionError, Reason, TamperedError
from adk_secure_sessions.storage import bindings
from adk_secure_sessions.storage import queries as sql
from adk_secure_sessions.storage.bindings import (
    Attempt,
    Identity,
    Owner,
    RowCache,
    StoredSession,
)
from adk_secure_sessions.storage.queries import EVENT_SEQ, EVENT_TIME, Found, QueryForms
from adk_secure_sessions.storage.schema import sessions, users
from adk_secure_sessions.storage.unit_of_work import read_data_keys

logger: logging.Logger = logging.getLogger(__name__)

E = TypeVar("E")

_CHUNK = 64  # events to decrypt and decode before other tasks may run


class View(NamedTuple):
    """A session, and the states of its app and user as JSON."""

    session: StoredSession
    user_id: str
    app_state: bytes
    user_state: bytes


class _Read:
    """Base class of the operations that change nothing."""

    reads_keys = False
    writes = False

    def __init__(self, who: Identity) -> None:
        self.who = who

    async def _read(
        self,
        attempt: Attempt,
        executors: Executors,
        forms: QueryForms,
        parameters: Mapping[str, object] | None = None,
    ) -> Found:
        query = attempt.form_of(forms)
        found = Found(await executors.data.read(query, parameters or self.who.tags()))
        attempt.keys.load(found.data_keys)
        return found


class GetSession(_Read, Generic[E]):
    """Read a session with its last *limit* events, or with all events from time *after* on.

    `attempt` returns None if there is no such session.  Events before *after* are decrypted, too.
    Decrypting authenticates an event's time; otherwise, a modified time could hide an event.

    Args:
        who: The ids of the session.
        decode: Called with an event's plaintext, its session's row key and its `seq`.
        limit: The maximum number of events; None for all.
        after: A time in microseconds UTC.  If given, *limit* is ignored.
    """

    def __init__(
        self,
        who: Identity,
        decode: Callable[[bytes, int, int], E],
        limit: int | None = None,
        after: int | None = None,
    ) -> None:
        super().__init__(who)
        self._decode = decode
        self._limit = limit if after is None else None
        self._after = after

    async def attempt(self, attempt: Attempt, executors: Executors) -> tuple[View, list[E]] | None:
        forms = sql.SESSION_WITH_ALL_EVENTS
        if self._limit is not None:
            forms = sql.SESSION_WITH_LAST_EVENTS if self._limit else sql.SESSION_WITHOUT_EVENTS
        parameters = {**self.who.tags(), "limit": self._limit or 0}
        found = await self._read(attempt, executors, forms, parameters)
        app = bindings.open_app(attempt, found)
        user = bindings.open_user(attempt, found)
        session = bindings.open_session(attempt, found, user)
        if session is None or user is None:
            return None
        return _view(session, user, app), await self._history(attempt, found, session)

    async def _history(self, attempt: Attempt, found: Found, session: StoredSession) -> list[E]:
        bindings.check_events(session, found.events, self._limit)
        events: list[E] = []
        after = self._after
        for start in range(0, len(found.events), _CHUNK):
            if start:
                await asyncio.sleep(0)
            rows = found.events[start : start + _CHUNK]
            # Decrypt all events of the chunk before decoding: alternating takes twice as long.
            opened = bindings.open_events(attempt, session, rows)
            events += [
                self._decode(plaintext, session.id, row[EVENT_SEQ])
                for row, plaintext in zip(rows, opened, strict=True)
                if after is None or row[EVENT_TIME] >= after
            ]
        return events


class ListUserSessions(_Read):
    """Read all sessions of a user, without events.

    If *skip* is True, a session that cannot be decrypted is omitted, and its error is logged.  If
    False, the error is raised.
    """

    def __init__(self, who: Identity, *, skip: bool) -> None:
        super().__init__(who)
        self._skip = skip
        self.reads_keys = skip

    async def attempt(self, attempt: Attempt, executors: Executors) -> list[View]:
        found = await self._read(attempt, executors, sql.SESSIONS_OF_USER)
        app = bindings.open_app(attempt, found)
        try:
            user = bindings.open_user(attempt, found)
        except DecryptionError as error:
            _skip_or_raise(error, skip=self._skip)
            return []
        return _listed(attempt, found, app, [user] if user else [], skip=self._skip)


class ListAppSessions(_Read):
    """Read all sessions of all users of an app, without events.

    If *skip* is True, a session that cannot be decrypted is omitted, and its error is logged.  If
    False, the error is raised.
    """

    reads_keys = True

    def __init__(self, who: Identity, *, skip: bool) -> None:
        super().__init__(who)
        self._skip = skip

    async def attempt(self, attempt: Attempt, executors: Executors) -> list[View]:
        parameters = {"app_tag": self.who.app_tag}
        found = await self._read(attempt, executors, sql.SESSIONS_OF_APP, parameters)
        if executors.has_key_database:
            tags = [row.tag for row in found.users]
            attempt.keys.load(await read_data_keys(executors.keys.read, tags))
        app = bindings.open_app(attempt, found)
        opened = []
        for row in found.users:
            try:
                opened.append(bindings.open_user_row(attempt, found, row))
            except DecryptionError as error:
                _skip_or_raise(error, skip=self._skip)
        return _listed(attempt, found, app, opened, skip=self._skip)


class GetUserState(_Read):
    """Read a user's state as JSON; `{}` for an unknown user."""

    async def attempt(self, attempt: Attempt, executors: Executors) -> bytes:
        user = bindings.open_user(attempt, await self._read(attempt, executors, sql.OWNERS))
        return user.state if user else b"{}"


class CheckApp(_Read):
    """Decrypt an app's row; `attempt` returns None if the app has no row.

    `CheckApp` and `CheckUser` do not use the row cache.  `verify` must notice a data key that was
    tampered with after the row was cached.
    """

    reads_keys = True

    async def attempt(self, attempt: Attempt, executors: Executors) -> Owner | None:
        found = await self._read(attempt, executors, sql.OWNERS)
        return bindings.open_app(attempt._replace(cache=RowCache(0)), found)


class CheckUser(_Read):
    """Decrypt the row with the user tag of *who*; `attempt` returns None if no row has the tag."""

    reads_keys = True

    async def attempt(self, attempt: Attempt, executors: Executors) -> Owner | None:
        found = await self._read(attempt, executors, sql.OWNERS)
        if found.user is None:
            return None
        return bindings.open_user_row(attempt._replace(cache=RowCache(0)), found, found.user)


def _view(session: StoredSession, user: Owner, app: Owner | None) -> View:
    """Return a view of the session; raise TamperedError if *app* is not the user's app."""
    if app is None or user.app_row != app.id:
        raise TamperedError(
            "its app's row was removed", reason=Reason.MISSING, table=users.name, row=user.id
        )
    return View(session, user.user_id, app.state, user.state)


def _listed(
    attempt: Attempt, found: Found, app: Owner | None, opened: list[Owner], *, skip: bool
) -> list[View]:
    """Return views of the sessions in *found*.

    *opened* are the users whose rows could be decrypted.  If *skip* is True, sessions that cannot
    be decrypted are omitted, and their errors are logged.
    """
    by_row = {user.id: user for user in opened}
    views = []
    for row in found.sessions:
        user = by_row.get(row.user_row)
        try:
            if user is None:
                raise TamperedError(
                    "its user's row was removed or cannot be decrypted",
                    reason=Reason.MISSING,
                    table=sessions.name,
                    row=row.id,
                )
            views.append(_view(bindings.open_listed_session(attempt, found, user, row), user, app))
        except DecryptionError as error:
            _skip_or_raise(error, skip=skip)
    return views


def _skip_or_raise(error: DecryptionError, *, skip: bool) -> None:
    if not skip:
        raise error
    logger.error("left out of a listing: %s", error)
