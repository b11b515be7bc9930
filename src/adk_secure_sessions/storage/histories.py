"""The cache of events, from which a read takes the events that this process has read before.

Its content is plaintext.  The links prove that cached events are the beginning of a stored session:
each event contains the link of the event before it, and the row of the session contains the link of
the last event.  A cached history therefore fits to a stored session if and only if the first event
after the cached ones contains the link of the last cached event, or, if no event follows, the row
of the session contains this link.

All readers get the same event objects.  Copies would take most of the time that the cache saves.
"""

from itertools import compress
from typing import Any

from adk_secure_sessions.crypto.key_material import KeyMaterial
from adk_secure_sessions.lru import Lru, SizedLru

# The size of a history without its events, and of an event: besides its text, and for each value in
# it.  Within a quarter of what tracemalloc measured for texts, calls and responses of 0.3 to 10 KB.
_FIXED, _OF_EVENT, _OF_VALUE = 400, 3500, 64
# How many sessions that are larger than the cache are remembered.
_OVERSIZED = 1024


def size_of_event(plaintext: bytes) -> int:
    values = plaintext.count(b",") + plaintext.count(b"{") + plaintext.count(b"[")
    return _OF_EVENT + len(plaintext) + _OF_VALUE * values


class History(KeyMaterial):
    """The first events of a session; it is never changed.

    *row* is the row id of the session, and *link* the link of the last of these events.  *times*
    are microseconds UTC; *size* is in bytes.
    """

    __slots__ = ("events", "link", "row", "size", "times")

    def __init__(
        self, row: int, link: bytes, times: list[int], events: list[Any], size: int = _FIXED
    ) -> None:
        self.row: int = row
        self.link: bytes = link
        self.times: list[int] = times
        self.events: list[Any] = events
        self.size: int = size

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


class HistoryCache:
    """The histories of the sessions that were read last, at most *limit* bytes in total.

    A history that is larger than *limit* is not cached.  Several threads may use the cache.
    """

    def __init__(self, limit: int) -> None:
        self._histories: SizedLru[bytes, History] = SizedLru(limit)
        # The row ids of sessions that are too large: their sizes need not be computed again.
        self._oversized: Lru[bytes, int] = Lru(_OVERSIZED)

    @property
    def limit(self) -> int:
        return self._histories.limit

    @property
    def size(self) -> int:
        return self._histories.size

    def get(self, tag: bytes) -> History | None:
        return self._histories.get(tag)

    def accepts(self, tag: bytes, row: int) -> bool:
        """Whether the session was not found to be larger than the cache."""
        return self.limit > 0 and self._oversized.get(tag) != row

    def put(self, tag: bytes, history: History) -> None:
        """Cache *history*, unless more events of the session are cached: during a slow read,
        another task may have read later events.
        """
        if history.size > self.limit:
            self._histories.drop(tag)
            self._oversized.put(tag, history.row)
            return
        seen = self._histories.get(tag)
        if seen is None or seen.row != history.row or seen.revision < history.revision:
            self._histories.put(tag, history, history.size)

    def drop(self, tag: bytes) -> None:
        self._histories.drop(tag)
