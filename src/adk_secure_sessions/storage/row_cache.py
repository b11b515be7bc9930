"""The cache of decrypted rows, and that of the events of sessions, which one process keeps."""

from dataclasses import dataclass
from itertools import compress
from typing import Any, Generic, NamedTuple, TypeVar

from adk_secure_sessions.caches import FifoCache, SizedLru
from adk_secure_sessions.db.protocol import Row
from adk_secure_sessions.hiding import HoldsSecrets
from adk_secure_sessions.storage.schema import Owner, StoredSession, WitnessRow

V = TypeVar("V", bound=Owner | StoredSession)


class CachedRow(NamedTuple, Generic[V]):
    """An entry of `RowCache`: a decrypted row, and its version witness (None if not read).

    If a later read returns exactly the same row and witness, the row is not decrypted again.
    *entry_number* was `RowCache.entry_count` after the entry was made.  For a session,
    *last_event_is_verified* is True if this process has decrypted or written its last event.  An
    append then needs no read.  *listed* is the row by which a listing has last returned the
    session, if its snapshot is cached, too: comparing it alone saves a tenth of a listing.
    """

    witness: WitnessRow | None
    value: V
    entry_number: int
    last_event_is_verified: bool = False
    listed: Row | None = None


# Estimated bytes of memory: `CachedEvents` without events; an event in addition to its text; each
# value in an event.  The error is at most a quarter (tracemalloc, texts of 0.3 to 10 KB).
_FIXED, _OF_EVENT, _OF_VALUE = 400, 3500, 64


def size_of_event(plaintext: bytes) -> int:
    values = plaintext.count(b",") + plaintext.count(b"{") + plaintext.count(b"[")
    return _OF_EVENT + len(plaintext) + _OF_VALUE * values


@dataclass(slots=True, eq=False, repr=False)
class CachedEvents(HoldsSecrets):
    """The first events of a session, decrypted and checked with their links; never changed.

    All readers get the same event objects: copies would take most of the time that the cache saves.
    *link* is the link of the last of these events.  *times* are microseconds UTC; *size* is in
    bytes.
    """

    session_row_id: int
    link: bytes
    times: list[int]
    events: list[Any]
    size: int = _FIXED

    @property
    def revision(self) -> int:
        """The number of events; the next event has this `seq`."""
        return len(self.events)

    def extended(
        self, link: bytes, times: list[int], events: list[Any], size: int
    ) -> "CachedEvents":
        if not events:
            return self
        return CachedEvents(
            self.session_row_id, link, self.times + times, self.events + events, self.size + size
        )

    def select(self, limit: int | None, since: int | None) -> list[Any]:
        """Return the last *limit* events, or those at the time *since* or later, in a new list."""
        if since is not None:
            return list(compress(self.events, [at >= since for at in self.times]))
        return self.events[-limit:] if limit else self.events.copy()


class RowCache:
    """The rows that this process has read or written last, by tag: at most *limit* of each kind.

    *entry_count* counts new entries: it tells whether an entry was made before an attempt began.
    *found_erased_user* is True once a read found that the row of a cached user was deleted.
    """

    def __init__(self, limit: int, size_of_events: int = 0) -> None:
        self.apps: FifoCache[bytes, CachedRow[Owner]] = FifoCache(limit)
        self.users: FifoCache[bytes, CachedRow[Owner]] = FifoCache(limit)
        self.sessions: FifoCache[bytes, CachedRow[StoredSession]] = FifoCache(limit)
        # The first events of the sessions that were read last, in at most *size_of_events* bytes.
        self.events: SizedLru[bytes, CachedEvents] = SizedLru(size_of_events)
        self.entry_count: int = 0
        self.found_erased_user: bool = False

    def put(
        self,
        rows: FifoCache[bytes, CachedRow[V]],
        witness: WitnessRow | None,
        value: V,
        *,
        is_verified: bool = False,
    ) -> None:
        """Cache *value*, unless a newer version of the row is cached.

        During a slow read, another task may have read or written a newer version.  If *witness* is
        None, that of the cached version is kept.
        """
        tag = value.row.tag
        cached = rows.get(tag)
        if cached and cached.value.row.id == value.row.id:
            if cached.value.version > value.version:
                return
            witness = witness or cached.witness
        self.entry_count += 1
        rows.put(tag, CachedRow(witness, value, self.entry_count, is_verified))

    def put_owner(self, witness: WitnessRow | None, value: Owner) -> None:
        self.put(self.users if value.is_user else self.apps, witness, value)

    def put_session(
        self, session: StoredSession, witness: WitnessRow | None, *, is_verified: bool
    ) -> None:
        """Cache *session* like `put`, but without its snapshot, which may be large."""
        if session.row.has_snapshot and session.snapshot is not None:
            session = session._replace(snapshot=None)
        self.put(self.sessions, witness, session, is_verified=is_verified)

    def put_events(self, tag: bytes, new: CachedEvents) -> None:
        """Cache *new*, unless more events of the session with *tag* are cached: during a slow read,
        another task may have read later events.
        """
        cached = self.events.get(tag)
        same_session = cached is not None and cached.session_row_id == new.session_row_id
        if cached is None or not same_session or cached.revision < new.revision:
            self.events.put(tag, new, new.size)

    def forget_session(self, tag: bytes) -> None:
        """Remove the session with *tag* and its events, because the session is not stored."""
        self.sessions.drop(tag)
        self.events.drop(tag)

    def set_last_event_verified(self, session: StoredSession) -> None:
        """Set `last_event_is_verified`, if the cached row equals `session.row`."""
        cached = self.sessions.get(session.row.tag)
        if cached and cached.value.row == session.row and not cached.last_event_is_verified:
            self.sessions.put(session.row.tag, cached._replace(last_event_is_verified=True))

    def verified_session(self, tag: bytes) -> StoredSession | None:
        """Return the cached session if its last event is verified, otherwise None."""
        cached = self.sessions.get(tag)
        return cached.value if cached and cached.last_event_is_verified else None
