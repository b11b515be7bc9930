"""The read operations: get a session with events, list sessions and events, get states."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from operator import itemgetter
from typing import ClassVar, Generic, NamedTuple, TypeVar

from adk_secure_sessions import telemetry
from adk_secure_sessions.audit import record_rejected
from adk_secure_sessions.db.protocol import Row
from adk_secure_sessions.errors import DecryptionError, Reason, TamperedError, UnknownKeyError
from adk_secure_sessions.formats.records import NO_LINK
from adk_secure_sessions.storage import queries as sql
from adk_secure_sessions.storage import sealed_rows
from adk_secure_sessions.storage.operation_runner import Attempt, StorageOperation, read_data_keys
from adk_secure_sessions.storage.queries import (
    EVENT_SEQ,
    EVENT_TIME,
    SESSION_ID,
    SESSION_TAG,
    SESSION_USER,
    QueryRows,
)
from adk_secure_sessions.storage.row_cache import CachedEvents, size_of_event
from adk_secure_sessions.storage.schema import (
    SESSIONS,
    Identity,
    Owner,
    SessionWithStates,
    StoredSession,
)

logger: logging.Logger = logging.getLogger(__name__)

E = TypeVar("E")
P = TypeVar("P")
T = TypeVar("T")
# Decodes events; the arguments are their plaintexts, the row id of the session and each `seq`.
Decode = Callable[[list[bytes], int, Sequence[int]], list[E]]

NO_LIMIT = 2**40  # no app has so many sessions, and no session so many events
_LAST_ROW = 2**63 - 1
# A batch of a page has at least so many rows, except the first: a user may have many collections.
_MIN_BATCH = 100
# How many events are decrypted and decoded before other tasks of the event loop may run.
_CHUNK = 64


@dataclass(eq=False, repr=False)
class GetSession(StorageOperation[tuple[SessionWithStates, list[E]] | None]):
    """Read a session with its last *limit* events, or with all events since the time *since*.

    Return the session and its decoded events; None if there is no such session, or if it has
    expired.  If *since* (microseconds UTC) is given, *limit* is ignored.  Events before *since* are
    decrypted, too: otherwise, a modified time could hide an event.

    If *caches* is True, the events are cached, and all readers get the same objects.  If the first
    events are cached already, only the later ones are read.  If these do not follow the cached
    ones, the whole session is read.
    """

    decode: Decode[E]
    limit: int | None = None
    since: int | None = None
    caches: bool = False

    def __post_init__(self) -> None:
        if self.since is not None:
            self.limit = None
        elif self.limit is not None:
            # Larger limits may not fit into an integer of the database.
            self.limit = min(self.limit, NO_LIMIT)
            self.caches = self.caches and self.limit != 0

    async def execute(self, attempt: Attempt) -> tuple[SessionWithStates, list[E]] | None:
        if self.caches:
            cached = attempt.row_cache.events.get(self.identity.session_tag)
            attempt.keys.count_lookup(telemetry.EVENT_CACHE, hit=cached is not None)
            if cached is not None:
                query, first = sql.SESSION_WITH_EVENTS_FROM, cached.revision
                rows = await attempt.read(query, first=first)
                try:
                    return await self._open(attempt, rows, cached)
                except _DoesNotFollow:
                    attempt.row_cache.events.drop(self.identity.session_tag)
        query = sql.SESSION_WITH_ALL_EVENTS
        if self.limit is not None:
            query = sql.SESSION_WITH_LAST_EVENTS if self.limit else sql.SESSION_WITHOUT_EVENTS
        return await self._open(attempt, await attempt.read(query, limit=self.limit))

    async def _open(
        self, attempt: Attempt, rows: QueryRows, cached: CachedEvents | None = None
    ) -> tuple[SessionWithStates, list[E]] | None:
        app, user = sealed_rows.open_owners(attempt, rows)
        session = sealed_rows.open_session(attempt, rows, user)
        if session is None or user is None or app is None:
            return None
        if session.has_expired:
            attempt.row_cache.events.drop(session.row.tag)
            return None
        with_states = SessionWithStates(session, user.user_id, app.state, user.state)
        if not self.caches:
            return with_states, await self._read_events(attempt, rows, session)
        return with_states, await self._read_and_cache_events(attempt, rows, session, cached)

    async def _read_events(
        self, attempt: Attempt, rows: QueryRows, session: StoredSession
    ) -> list[E]:
        """Return the decoded events in *rows*: the last `limit` events, or all."""
        first = 0 if self.limit is None else max(0, session.row.revision - self.limit)
        link = None if first else NO_LINK
        return await check_and_decode_events(
            attempt, session, rows.events, self.decode, first, link, self.since
        )

    async def _read_and_cache_events(
        self, attempt: Attempt, rows: QueryRows, session: StoredSession, cached: CachedEvents | None
    ) -> list[E]:
        """Return the same events as `_read_events`, and cache all events of the session.

        *rows* has the events that follow *cached*, or all.  If they do not follow it, raise
        `_DoesNotFollow`: the caller reads the whole session, which raises the error if a row was
        tampered with.
        """
        if cached is None and not 0 < session.row.revision == len(rows.events):
            return await self._read_events(attempt, rows, session)
        known = cached or CachedEvents(session.row.id, NO_LINK, [], [])
        if known.session_row_id != session.row.id or known.revision > session.row.revision:
            raise _DoesNotFollow
        size = 0

        def decode(plaintexts: list[bytes], session_row_id: int, seqs: Sequence[int]) -> list[E]:
            nonlocal size
            size += sum(map(size_of_event, plaintexts))
            return self.decode(plaintexts, session_row_id, seqs)

        try:
            events = await check_and_decode_events(
                attempt, session, rows.events, decode, known.revision, known.link
            )
        except DecryptionError as error:
            if cached is None or isinstance(error, UnknownKeyError):
                raise
            raise _DoesNotFollow from None
        times = [row[EVENT_TIME] for row in rows.events]
        extended = known.extended(session.last_link, times, events, size)
        attempt.row_cache.put_events(session.row.tag, extended)
        return extended.select(self.limit, self.since)


async def check_and_decode_events(
    attempt: Attempt,
    session: StoredSession,
    event_rows: list[Row],
    decode: Decode[E],
    first: int = 0,
    link: bytes | None = NO_LINK,
    since: int | None = None,
) -> list[E]:
    """Check that *event_rows* are all events of *session* from the `seq` *first* on, and decode
    those at the time *since* or later.

    *link* is that of the event before the first: see `sealed_rows.open_events`.
    """
    sealed_rows.sort_and_check_events(session, event_rows, first, session.row.revision - 1)
    decoded, link = await _decode_in_chunks(attempt, session, event_rows, link, decode, since)
    sealed_rows.verify_last_link(attempt, session, link)
    return decoded


async def _decode_in_chunks(
    attempt: Attempt,
    session: StoredSession,
    event_rows: Sequence[Row],
    link: bytes | None,
    decode: Decode[E],
    since: int | None = None,
) -> tuple[list[E], bytes | None]:
    """Decrypt *event_rows*, and decode the events at the time *since* or later.

    Return the decoded events, and the link of the last event.  Decrypting and decoding one event
    after another would take twice as long as in parts, between which other tasks of the event loop
    may run.
    """
    decoded: list[E] = []
    for start in range(0, len(event_rows), _CHUNK):
        if start:
            await asyncio.sleep(0)
        rows = event_rows[start : start + _CHUNK]
        plaintexts, link = sealed_rows.open_events(attempt, session, rows, link)
        if since is not None:
            is_wanted = [row[EVENT_TIME] >= since for row in rows]
            plaintexts, rows = [*compress(plaintexts, is_wanted)], [*compress(rows, is_wanted)]
        decoded += decode(plaintexts, session.row.id, [row[EVENT_SEQ] for row in rows])
    return decoded, link


class _DoesNotFollow(Exception):
    """The events that were read do not follow the cached ones in the stored session."""


class EventPosition(NamedTuple):
    """The event at the border of two pages, with its link.  An oldest-first page begins after this
    event, a newest-first page with it.
    """

    session_row_id: int
    seq: int
    link: bytes


class Page(NamedTuple, Generic[E, P]):
    """Events or sessions; *next* is the position of the next page, None if this is the last."""

    items: list[E]
    next: P | None


@dataclass(eq=False, repr=False)
class ListEventsPage(StorageOperation[Page[E, EventPosition] | None]):
    """Read a page of at most *limit* events: those after the event at *position*, oldest first.

    With *newest*, the newest are first, and the page begins with the event at *position*.  Return
    None if the session does not exist, or is not that of *position* any more.  Links join each page
    to its neighbours, and the newest event to the row of the session.
    """

    decode: Decode[E]
    position: EventPosition | None
    limit: int
    newest: bool

    async def execute(self, attempt: Attempt) -> Page[E, EventPosition] | None:
        position, limit, query = self.position, self.limit, sql.SESSION_WITH_EVENTS_BETWEEN
        if not self.newest:
            first = position.seq + 1 if position else 0
            last = first + limit - 1
        elif position:
            first, last = position.seq - limit, position.seq
        else:
            query, first, last = sql.SESSION_WITH_LAST_EVENTS, 0, NO_LIMIT
        rows = await attempt.read(query, first=first, last=last, limit=limit + 1)
        _, user = sealed_rows.open_owners(attempt, rows)
        session = sealed_rows.open_session(attempt, rows, user)
        if session is None or session.has_expired:
            return None
        if position and position.session_row_id != session.row.id:
            return None
        last = min(last, session.row.revision - 1)
        if self.newest:
            first = max(0, last - limit)
        elif position:
            last = max(first, last)  # an event has followed the position
        try:
            return await self._open_page(attempt, session, rows.events, first, last)
        except TamperedError as error:
            if position is None or error.reason is not Reason.MISMATCH:
                raise
            detail = f"{error.detail}, or `after` was modified"  # by the client of an application
            raise TamperedError(detail, error.reason, error.table, error.row) from None

    async def _open_page(
        self, attempt: Attempt, session: StoredSession, rows: list[Row], first: int, last: int
    ) -> Page[E, EventPosition]:
        """Check that *rows* are the events from *first* to *last*, and return the page.

        If an older event precedes a newest-first page, it is the first of *rows*.  The next page
        begins with this event, and must find its link.
        """
        sealed_rows.sort_and_check_events(session, rows, first, last)
        position, border, link = self.position, None, NO_LINK
        if not self.newest and position:
            link = position.link
        elif self.newest and len(rows) > self.limit:
            _, older = sealed_rows.open_events(attempt, session, rows[:1], None)
            assert older is not None, "there is a row"
            border, link, rows = EventPosition(session.row.id, first, older), older, rows[1:]
        decoded, end = await _decode_in_chunks(attempt, session, rows, link, self.decode)
        assert end is not None, "*link* is a link"
        if self.newest and position:
            if end != position.link:
                raise sealed_rows.other_history_error().located(SESSIONS.name, session.row.id)
        elif last < session.row.revision - 1:
            border = EventPosition(session.row.id, last, end)
        else:
            sealed_rows.verify_last_link(attempt, session, end)
        return Page(decoded[::-1] if self.newest else decoded, border)


@dataclass(eq=False, repr=False)
class Listing(StorageOperation[T]):
    """Base class of the listings of a user or, with *of_app*, of all users of an app.

    With *skips_unreadable*, a session that cannot be decrypted is omitted, and its error is logged.
    Otherwise the error is raised.  Return only sessions, or only collections (*is_collection*), and
    only expired or only unexpired ones (`lists_expired`).
    """

    lists_expired: ClassVar[bool] = False

    of_app: bool = False
    skips_unreadable: bool = False
    is_collection: bool = False

    _recorded_errors = frozenset[str]()  # by earlier attempts, too

    def __post_init__(self) -> None:
        self.needs_fresh_keys: bool = self.of_app or self.skips_unreadable

    async def _open_sessions(self, attempt: Attempt, rows: QueryRows) -> list[SessionWithStates]:
        """Return the sessions or collections in *rows* that have not, or have, expired."""
        decrypted = await self._open_users(attempt, rows)
        app = sealed_rows.open_app(attempt, rows)
        app_state = app.state if app else b""
        users = {}
        for user in decrypted:
            try:
                sealed_rows.require_app(app, user)
                users[user.row.id] = user
            except DecryptionError as error:
                self._skip_or_raise(attempt, error)
        opened: list[SessionWithStates] = []
        tags: set[object] = set()
        for stored in rows.sessions:
            try:
                if (tag := stored[SESSION_TAG]) in tags:
                    raise sealed_rows.stored_twice_error(SESSIONS.name, stored[SESSION_ID])
                tags.add(tag)
                owner = users.get(stored[SESSION_USER])
                if owner is None:
                    raise TamperedError(
                        "its user's row was removed or cannot be decrypted",
                        Reason.MISSING,
                        SESSIONS.name,
                        stored[SESSION_ID],
                    )
                session = sealed_rows.open_session_row(attempt, rows, owner, stored)
                is_wanted = session.has_expired == self.lists_expired
                if is_wanted and session.row.is_collection == self.is_collection:
                    opened.append(SessionWithStates(session, owner.user_id, app_state, owner.state))
            except DecryptionError as error:
                self._skip_or_raise(attempt, error)
        return opened

    async def _open_users(self, attempt: Attempt, rows: QueryRows) -> list[Owner]:
        """Return the users in *rows* that can be decrypted."""
        if not self.of_app:
            try:
                user = sealed_rows.open_user(attempt, rows)
            except DecryptionError as error:
                self._skip_or_raise(attempt, error)
                rows.sessions.clear()
                return []
            return [user] if user else []
        if attempt.executors.has_key_database:
            tags = [row.tag for row in rows.users]
            keys = await read_data_keys(attempt.executors.keys.read, tags)
            attempt.keys.unwrap(keys.data_keys, keys.master_fingerprints)
        owners = []
        for row in rows.users:
            try:
                owners.append(sealed_rows.open_owner(attempt, rows, row))
            except DecryptionError as error:
                self._skip_or_raise(attempt, error)
        return owners

    def _skip_or_raise(self, attempt: Attempt, error: DecryptionError) -> None:
        if not self.skips_unreadable or (
            isinstance(error, UnknownKeyError) and not attempt.unknown_key_is_final
        ):
            raise error
        if str(error) not in self._recorded_errors:
            self._recorded_errors |= {str(error)}
            record_rejected(error)
            logger.error("left out of a listing: %s", error)


class ListSessions(Listing[list[SessionWithStates]]):
    """Read all sessions of a user or an app without events, or the collections of a user."""

    async def execute(self, attempt: Attempt) -> list[SessionWithStates]:
        query = sql.sessions_of_app() if self.of_app else sql.sessions_of_user()
        if self.is_collection:
            query = sql.sessions_of_user(only_collections=True)
        rows = await attempt.read(query)
        return await self._open_sessions(attempt, rows)


class SessionPosition(NamedTuple):
    """The position of a row in a paged listing: the row id of its user, and its own row id."""

    user_row_id: int
    row_id: int


_POSITION = itemgetter(SESSION_USER, SESSION_ID)  # of a session row

StoredSessionPage = Page[SessionWithStates, SessionPosition]


class PageOptions(NamedTuple):
    """At most *limit* sessions that follow the position *after*, in order of creation.

    *newest* reverses the order.  If *updated* is given, only sessions are read whose last update is
    in this range (microseconds).  Without *with_snapshots*, large states are not read.
    *skips_unreadable* is that of `Listing`.
    """

    limit: int
    after: SessionPosition | None = None
    newest: bool = False
    with_snapshots: bool = True
    updated: range | None = None
    skips_unreadable: bool = False


class ListSessionsPage(Listing[StoredSessionPage]):
    """Read a page of the sessions of a user or, with *of_app*, of all users of an app.

    Sessions of an app are sorted by the creation of their user first.
    """

    found_by: sql.FoundBy | None = None

    def __init__(self, identity: Identity, options: PageOptions, *, of_app: bool = True) -> None:
        super().__init__(identity, of_app=of_app, skips_unreadable=options.skips_unreadable)
        self._options = options

    def _parameters(self, after: SessionPosition | None, limit: int) -> dict[str, object]:
        newest = self._options.newest
        after = after or (
            SessionPosition(_LAST_ROW, _LAST_ROW) if newest else SessionPosition(-1, -1)
        )
        updated = self._options.updated or range(0)
        return {
            "limit": limit + 1,  # the additional row shows that a page follows
            "after_user": after.user_row_id,
            "after_row": after.row_id,
            "updated_from": updated.start,
            "updated_until": updated.stop,
        }

    async def execute(self, attempt: Attempt) -> StoredSessionPage:
        limit, after = self._options.limit, self._options.after
        sessions, after = await self._read_batch(attempt, after, limit)
        while after is not None and len(sessions) < limit:
            batch, after = await self._read_batch(attempt, after, max(limit, _MIN_BATCH))
            sessions += batch
        if len(sessions) > limit or (len(sessions) == limit and after is not None):
            last = sessions[limit - 1].session
            after = SessionPosition(last.row.user_row, last.row.id)
        return Page(sessions[:limit], after)

    async def _read_batch(
        self, attempt: Attempt, position: SessionPosition | None, limit: int
    ) -> StoredSessionPage:
        """Read at most *limit* rows, and omit collections and expired sessions."""
        query = sql.session_page(
            of_app=self.of_app,
            newest=self._options.newest,
            with_snapshots=self._options.with_snapshots,
            by_time=self._options.updated is not None,
            found_by=self.found_by,
        )
        rows = await attempt.read(query, **self._parameters(position, limit))
        # Sort the rows, because a UNION ALL guarantees no order.  Even in a modified database,
        # these ids are integers: `id` is an integer primary key, and `user_row` equals the `id` of
        # a user.
        rows.sessions.sort(key=_POSITION, reverse=self._options.newest)
        after = None
        if len(rows.sessions) > limit:
            del rows.sessions[limit:]
            after = SessionPosition(*_POSITION(rows.sessions[-1]))
        sessions = await self._open_sessions(attempt, rows)
        # `_open_users` removes all sessions of a user who cannot be decrypted: no page follows.
        return Page(sessions, after if rows.sessions else None)


class GetStates(StorageOperation[tuple[bytes, bytes]]):
    """Read the states of an app and a user as JSON; `{}` for one that is not stored."""

    async def execute(self, attempt: Attempt) -> tuple[bytes, bytes]:
        rows = await attempt.read(sql.OWNERS)
        app, user = sealed_rows.open_owners(attempt, rows)
        return app.state if app else b"{}", user.state if user else b"{}"
