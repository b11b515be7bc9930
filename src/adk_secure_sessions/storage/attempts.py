"""An attempt at an operation, and the caches of rows and events.

The links prove that the cached events of a session are the beginning of the stored session: each
event contains the link of the event before it, and the row of the session contains the link of the
last event.  All readers get the same event objects.  Copies would take most of the time that the
cache saves.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from itertools import compress
from typing import Any, Generic, NamedTuple, TypeVar

from sqlalchemy import CompoundSelect

from adk_secure_sessions.caches import Lru
from adk_secure_sessions.crypto.key_material import KeyMaterial
from adk_secure_sessions.keys.data_keys import StagedKeys
from adk_secure_sessions.storage.queries import (
    Found,
    QueryForms,
)
from adk_secure_sessions.storage.schema import (
    Identity,
    Owner,
    StoredSession,
    WitnessRow,
)

V = TypeVar("V", bound=Owner | StoredSession)


class Seen(NamedTuple, Generic[V]):
    """An entry of `RowCache`: a decrypted row, and its version witness (None if not read).

    If a later read returns exactly the same row and witness, the value is used without decrypting
    the row again.  *time* is `RowCache.time` when this process read or wrote the row.
    *has_proven_head* is True for a session whose last event this process has read or written, with
    the link *head* of the session.  Otherwise, an append must first read the session.
    """

    witness: WitnessRow | None
    value: V
    time: int
    has_proven_head: bool = False


# The size of a history without its events, and of an event: besides its text, and for each value in
# it.  Within a quarter of what tracemalloc measured for texts, calls and responses of 0.3 to 10 KB.
_FIXED, _OF_EVENT, _OF_VALUE = 400, 3500, 64


def size_of_event(plaintext: bytes) -> int:
    values = plaintext.count(b",") + plaintext.count(b"{") + plaintext.count(b"[")
    return _OF_EVENT + len(plaintext) + _OF_VALUE * values


@dataclass(slots=True, eq=False, repr=False)
class History(KeyMaterial):
    """The first events of a session; it is never changed.

    *row* is the row id of the session, and *link* the link of the last of these events.  *times*
    are microseconds UTC; *size* is in bytes.
    """

    row: int
    link: bytes
    times: list[int]
    events: list[Any]
    size: int = _FIXED

    @property
    def revision(self) -> int:
        """The number of events; the next event has this `seq`."""
        return len(self.events)

    def extended(self, link: bytes, times: list[int], events: list[Any], size: int) -> "History":
        if not events:
            return self
        return History(self.row, link, self.times + times, self.events + events, self.size + size)

    def part(self, limit: int | None, after: int | None) -> list[Any]:
        """Return the last *limit* events, or those at the time *after* or later, in a new list."""
        if after is not None:
            return list(compress(self.events, [at >= after for at in self.times]))
        return self.events[-limit:] if limit else self.events.copy()


class HistoryCache(Lru[bytes, History]):
    """The histories of the sessions that were read last, at most *limit* bytes in total, by tag."""

    def keep(self, tag: bytes, history: History) -> None:
        """Cache *history*, unless more events of the session are cached: during a slow read,
        another task may have read later events.
        """
        seen = self.get(tag)
        if seen is None or seen.row != history.row or seen.revision < history.revision:
            self.put(tag, history, history.size)


class RowCache:
    """The rows that this process has read or written last, by tag: at most *limit* of each kind.

    *time* counts the new entries: it tells whether an entry was made before an attempt began.
    *lacks_user* is whether a user whose rows are cached was found not to be stored any more.
    """

    def __init__(self, limit: int, history_size: int = 0) -> None:
        self.apps: Lru[bytes, Seen[Owner]] = Lru(limit)
        self.users: Lru[bytes, Seen[Owner]] = Lru(limit)
        self.sessions: Lru[bytes, Seen[StoredSession]] = Lru(limit)
        self.histories: HistoryCache = HistoryCache(history_size)
        self.time: int = 0
        self.lacks_user: bool = False

    def tick(self) -> int:
        self.time += 1
        return self.time

    def put(
        self,
        kind: Lru[bytes, Seen[V]],
        witness: WitnessRow | None,
        value: V,
        *,
        has_proven_head: bool = False,
    ) -> None:
        """Cache *value*, unless a newer version of the row is cached.

        During a slow read, another task may have read or written a newer version.
        """
        tag = value.row.tag
        seen = kind.get(tag)
        if seen and seen.value.row.id == value.row.id and seen.value.version > value.version:
            return
        kind.put(tag, Seen(witness, value, self.tick(), has_proven_head))

    def put_owner(self, witness: WitnessRow | None, value: Owner) -> None:
        self.put(self.users if value.is_user else self.apps, witness, value)

    def put_session(
        self, session: StoredSession, witness: WitnessRow | None, *, has_proven_head: bool
    ) -> None:
        """Cache *session* like `put`, but without its snapshot, which may be large."""
        if session.has_snapshot and session.snapshot is not None:
            session = session._replace(snapshot=None)
        self.put(self.sessions, witness, session, has_proven_head=has_proven_head)

    def forget_session(self, tag: bytes) -> None:
        """Remove the session with *tag* and its events, because the session is not stored."""
        self.sessions.drop(tag)
        self.histories.drop(tag)

    def prove_head(self, session: StoredSession) -> None:
        """Set `has_proven_head` of the cached session, if the cached row equals `session.row`."""
        seen = self.sessions.get(session.row.tag)
        if seen and seen.value.row == session.row and not seen.has_proven_head:
            self.sessions.put(session.row.tag, seen._replace(has_proven_head=True))

    def proven_session(self, tag: bytes) -> StoredSession | None:
        """Return the cached session if its head is proven (see `Seen`), otherwise None."""
        seen = self.sessions.get(tag)
        return seen.value if seen and seen.has_proven_head else None


class KeySource(Enum):
    """The source of the data keys of an attempt's app and user."""

    CACHE = "this process has cached the data keys"
    QUERY = "the query that reads the rows also reads the data keys"
    KEY_DATABASE = "the data keys were read from the key database before the rows"


class Attempt(NamedTuple):
    """One attempt at an operation on the rows of *who*.

    *after_commit* is None for a read.  For a write, it collects functions that cache the rows which
    the write has read; they are called after the commit.  On SQLite, one transaction contains
    several writes, and a write reads rows that earlier writes of the transaction have changed.  If
    such a row were cached before the commit, a concurrent read would find an older stored row, and
    would reject this older row as replayed.
    """

    who: Identity
    keys: StagedKeys
    cache: RowCache
    key_source: KeySource
    is_first: bool  # only the first attempt may use cached rows instead of a read
    began: int = 0  # `cache.time` when the attempt began: see `_reject_older`
    locks_rows: bool = False  # after several conflicts, a write locks rows before it reads them
    after_commit: list[Callable[[], None]] | None = None

    def remember(self, put: Callable[[], None]) -> None:
        """Call *put*, which caches a row that was read; a write calls *put* after the commit."""
        if self.after_commit is None:
            put()
        else:
            self.after_commit.append(put)

    def form_of(self, forms: QueryForms) -> CompoundSelect[Any]:
        return forms[self.key_source is KeySource.QUERY]

    def load_keys(self, found: Found) -> None:
        """Unwrap the data keys in *found* if the query has read them; see `StagedKeys.load`."""
        if self.key_source is KeySource.QUERY:
            self.keys.load(found.data_keys, found.masters)

    def forget_user(self) -> None:
        """Remove the user and the session from the caches, because the user's row is not stored."""
        cache, who = self.cache, self.who
        if cache.users.get(who.user_tag) or cache.sessions.get(who.session_tag):
            cache.lacks_user = True
        self.keys.forget(who.user_tag)
        cache.users.drop(who.user_tag)
        cache.forget_session(who.session_tag)


class NeedsDataKey(Exception):
    """A data key of *owner* (a tag), created at *not_before* or later (microseconds UTC), must be
    stored in the key database before the next attempt.
    """

    def __init__(self, owner: bytes, not_before: int) -> None:
        super().__init__("a data key has to be stored first")
        self.owner = owner
        self.not_before = not_before
