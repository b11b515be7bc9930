"""The cache of decoded events, from which a read takes the events that this process has read before.

Its content is plaintext.  The links prove that cached events are the beginning of a stored session:
each event contains the link of the event before it, and the row of the session contains the link of
the last event.  A cached history therefore fits to a stored session if and only if the first event
after the cached ones contains the link of the last cached event, or, if no event follows, the row
of the session contains this link.
"""

from collections.abc import Sequence
from itertools import compress
from typing import Any, Generic, Protocol, TypeVar

from adk_secure_sessions.crypto.key_material import KeyMaterial
from adk_secure_sessions.lru import Lru, SizedLru

E = TypeVar("E")

# The size of a history without its events, and of the places of one event in the two lists, with
# the integer for its time.
_FIXED, _EACH = 400, 48
# How many sessions that are larger than the cache are remembered.
_OVERSIZED = 1024


class Keeper(Protocol[E]):
    """Converts decoded events to the values that the cache keeps, and back.

    Attributes:
        at_once: The number of events to restore before other tasks may run.
    """

    at_once: int

    def keep(self, event: E, plaintext: bytes) -> tuple[Any, int]:
        """Return the value to keep for *event*, and its size in bytes.

        *plaintext* is the plaintext that *event* was decoded from.
        """
        ...

    def restore(self, kept: Sequence[Any]) -> list[E]:
        """Return the events of the values *kept*, in a new list."""
        ...


class History(KeyMaterial, Generic[E]):
    """The first events of a session, as a `Keeper` keeps them; it is never changed.

    The base class keeps the content out of `repr`, and therefore out of the local variables that
    error reporters record.

    Attributes:
        row: The row id of the session.
        link: The link of the last of these events.
        times: The time of each event, in microseconds since 1970, UTC.
        kept: The value that the keeper returned for each event.
        size: The size in bytes.
    """

    __slots__ = ("kept", "link", "row", "size", "times")

    def __init__(self, row: int, link: bytes, times: list[int], kept: list[Any], size: int) -> None:
        self.row = row
        self.link = link
        self.times = times
        self.kept = kept
        self.size = size

    @property
    def revision(self) -> int:
        """The number of events; the next event has this `seq`."""
        return len(self.kept)

    def last(self, number: int) -> "History[E]":
        """Return the last *number* of these events; none if *number* is negative."""
        first = max(0, len(self.kept) - max(0, number))
        return self._part(self.times[first:], self.kept[first:])

    def since(self, time: int) -> "History[E]":
        """Return those of these events whose time is *time* or later."""
        chosen = [at >= time for at in self.times]
        return self._part(list(compress(self.times, chosen)), list(compress(self.kept, chosen)))

    def _part(self, times: list[int], kept: list[Any]) -> "History[E]":
        return History(self.row, self.link, times, kept, self.size)


class Restored(KeyMaterial, Generic[E]):
    """Collects the events that *keeper* restores.

    Attributes:
        events: The events.
    """

    __slots__ = ("_keeper", "events")

    def __init__(self, keeper: Keeper[E]) -> None:
        self._keeper = keeper
        self.events: list[E] = []

    def add(self, history: History[E], start: int) -> None:
        """Add `keeper.at_once` events of *history*, from the index *start* on."""
        end = start + self._keeper.at_once
        self.events += self._keeper.restore(history.kept[start:end])


class Growing(KeyMaterial, Generic[E]):
    """Collects the events of a read that may become a `History`.

    Args:
        keeper: Converts the events.
        known: The events before those of this read; None if there are none.
        limit: The size in bytes from which nothing more is collected.
    """

    __slots__ = ("_keeper", "_limit", "kept", "known", "size", "times")

    def __init__(self, keeper: Keeper[E], known: History[E] | None, limit: int) -> None:
        self._keeper = keeper
        self.known = known
        self._limit = limit
        self.times: list[int] = []
        self.kept: list[Any] = []
        self.size: int = known.size if known else _FIXED

    def add(self, event: E, plaintext: bytes, time: int) -> None:
        """Add *event*, which follows the events added before."""
        if self.size > self._limit:
            return
        value, size = self._keeper.keep(event, plaintext)
        self.kept.append(value)
        self.times.append(time)
        self.size += size + _EACH

    def history(self, row: int, link: bytes) -> History[E]:
        """Return the known and the added events as a new `History`."""
        times, kept = self.times, self.kept
        if self.known is not None:
            times, kept = self.known.times + times, self.known.kept + kept
        return History(row, link, times, kept, self.size)


class HistoryCache:
    """The histories of the sessions that were read last, at most *limit* bytes in total.

    A history that is larger than *limit* is not cached.  Several threads may use the cache.
    """

    def __init__(self, limit: int) -> None:
        self._histories: SizedLru[bytes, History[Any]] = SizedLru(limit)
        # The row ids of sessions that are too large.  Without them, each read of such a session
        # would convert its events in vain.
        self._oversized: Lru[bytes, int] = Lru(_OVERSIZED)

    @property
    def limit(self) -> int:
        """The maximum size, in bytes."""
        return self._histories.limit

    @property
    def size(self) -> int:
        """The size of all cached histories, in bytes."""
        return self._histories.size

    def get(self, tag: bytes) -> History[Any] | None:
        """Return the history of the session with *tag*; None if it is not cached."""
        return self._histories.get(tag)

    def accepts(self, tag: bytes, row: int) -> bool:
        """Whether the session was not found to be larger than the cache."""
        return self.limit > 0 and self._oversized.get(tag) != row

    def put(self, tag: bytes, row: int, link: bytes, growing: Growing[Any]) -> None:
        """Cache the events in *growing*, unless more events of the session are cached.

        *link* is the link of the last event.  During a slow read, another task may have read later
        events of the session.
        """
        if growing.size > self.limit:
            self._histories.drop(tag)
            self._oversized.put(tag, row)
            return
        history = growing.history(row, link)
        seen = self._histories.get(tag)
        if seen is None or seen.row != row or seen.revision <= history.revision:
            self._histories.put(tag, history, history.size)

    def drop(self, tag: bytes) -> None:
        """Remove the history of the session with *tag*, if it is cached."""
        self._histories.drop(tag)
