"""The cache of events, from which a read takes the events that this process has read before.

Its content is plaintext.  The links prove that cached events are the beginning of a stored session:
each event contains the link of the event before it, and the row of the session contains the link of
the last event.  A cached history therefore fits to a stored session if and only if the first event
after the cached ones contains the link of the last cached event, or, if no event follows, the row
of the session contains this link.
"""

import sys
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
    """Converts the plaintexts of events to the values that the cache keeps, and these to events.

    Attributes:
        shares: Whether the values are the events.
        at_once: The number of events to restore before other tasks may run.
    """

    shares: bool
    at_once: int

    def convert(self, plaintext: bytes) -> tuple[E, Any, int]:
        """Return the event in *plaintext*, the value to keep for the event, and its size in bytes.

        The value is not `bytes`.
        """
        ...

    def restore(self, kept: Sequence[Any]) -> list[E]:
        """Return the events of the values or plaintexts *kept*, in a new list."""
        ...


class History(KeyMaterial):
    """The first events of a session; it is never changed.

    The base class keeps the content out of `repr`.

    Attributes:
        row: The row id of the session.
        link: The link of the last of these events.
        times: The time of each event, in microseconds since 1970, UTC.
        kept: For each event, its plaintext, or the value that a `Keeper` has made of it.  Most
            sessions are read once, and converting an event takes longer than parsing it.  So an
            event is converted when it is first taken from the cache.
        size: The size in bytes.
    """

    __slots__ = ("kept", "link", "row", "size", "times")

    def __init__(self, row: int, link: bytes, times: list[int], kept: list[Any], size: int) -> None:
        self.row: int = row
        self.link: bytes = link
        self.times: list[int] = times
        self.kept: list[Any] = kept
        self.size: int = size

    @property
    def revision(self) -> int:
        """The number of events; the next event has this `seq`."""
        return len(self.kept)

    def last(self, number: int) -> Sequence[int]:
        """Return the indexes of the last *number* events; none if *number* is negative."""
        return range(max(0, len(self.kept) - max(0, number)), len(self.kept))

    def since(self, time: int) -> Sequence[int]:
        """Return the indexes of the events whose time is *time* or later."""
        return list(compress(range(len(self.times)), [at >= time for at in self.times]))


class Growing(KeyMaterial):
    """Collects the events of a read that may become a `History`.

    Args:
        known: The events before those of this read; None if there are none.
        limit: The size in bytes from which nothing more is collected.
    """

    __slots__ = ("_kept", "_limit", "_times", "known", "size")

    def __init__(self, known: History | None, limit: int) -> None:
        self.known: History | None = known
        self._limit = limit
        self._times: list[int] = []
        self._kept: list[Any] = []
        self.size: int = known.size if known else _FIXED

    def add(self, plaintexts: list[bytes], times: list[int]) -> None:
        """Add events, which follow the events added before."""
        if self.size <= self._limit:
            self._kept += plaintexts
            self._times += times
            self.size += sum(map(sys.getsizeof, plaintexts)) + _EACH * len(plaintexts)

    def history(self, row: int, link: bytes) -> History:
        """Return the known and the added events as a new `History`."""
        known = self.known
        if known is None:
            return History(row, link, self._times, self._kept, self.size)
        if not self._kept:
            return known
        return History(row, link, known.times + self._times, known.kept + self._kept, self.size)


class Restored(KeyMaterial, Generic[E]):
    """Collects the events that are taken from the cache.

    Args:
        keeper: Restores the events.
        history: The cached events.
        limit: The maximum size of the history, in bytes.

    Attributes:
        events: The events.
    """

    __slots__ = ("_converted", "_history", "_keeper", "_limit", "_size", "events")

    def __init__(self, keeper: Keeper[E], history: History, limit: int) -> None:
        self._keeper = keeper
        self._history = history
        self._limit = limit
        self._size = history.size
        self._converted: dict[int, Any] = {}
        self.events: list[E] = []

    def add_shared(self, indexes: Sequence[int]) -> bool:
        """Add the events with these indexes if the cache keeps the events themselves.

        Return whether it does.  `add`, in several steps, takes as long as all other work of a read
        of 1000 shared events.
        """
        if not self._keeper.shares:
            return False
        kept = self._history.kept
        if isinstance(indexes, range):
            shared = kept[indexes.start : indexes.stop]
        else:
            shared = [kept[index] for index in indexes]
        if bytes in map(type, shared):
            return False
        self.events = shared
        return True

    def add(self, indexes: Sequence[int]) -> None:
        """Add the events of the history with these indexes."""
        kept = [self._history.kept[index] for index in indexes]
        if bytes not in map(type, kept):
            self.events += self._keeper.restore(kept)
            return
        for index, value in zip(indexes, kept, strict=True):
            if type(value) is not bytes or self._size > self._limit:
                self.events += self._keeper.restore([value])
                continue
            event, converted, size = self._keeper.convert(value)
            self.events.append(event)
            self._size += size - sys.getsizeof(value)
            if self._size <= self._limit:
                self._converted[index] = converted

    def history(self) -> History:
        """Return the history with the values that were converted."""
        old = self._history
        if not self._converted:
            return old
        kept = old.kept.copy()
        for index, value in self._converted.items():
            kept[index] = value
        return History(old.row, old.link, old.times, kept, min(self._size, self._limit))


class HistoryCache:
    """The histories of the sessions that were read last, at most *limit* bytes in total.

    A history that is larger than *limit* is not cached.  Several threads may use the cache.
    """

    def __init__(self, limit: int) -> None:
        self._histories: SizedLru[bytes, History] = SizedLru(limit)
        # The row ids of sessions that are too large: their events need not be collected again.
        self._oversized: Lru[bytes, int] = Lru(_OVERSIZED)

    @property
    def limit(self) -> int:
        """The maximum size, in bytes."""
        return self._histories.limit

    @property
    def size(self) -> int:
        """The size of all cached histories, in bytes."""
        return self._histories.size

    def get(self, tag: bytes) -> History | None:
        """Return the history of the session with *tag*; None if it is not cached."""
        return self._histories.get(tag)

    def accepts(self, tag: bytes, row: int) -> bool:
        """Whether the session was not found to be larger than the cache."""
        return self.limit > 0 and self._oversized.get(tag) != row

    def put(self, tag: bytes, row: int, link: bytes, growing: Growing) -> History | None:
        """Cache the events in *growing*, unless more events of the session are cached.

        During a slow read, another task may have read later events of the session.

        Args:
            tag: The blind index of the session.
            row: The row id of the session.
            link: The link of the last event.
            growing: The events that were known or read.

        Returns:
            The events as a history; None if they are larger than the cache.
        """
        if growing.size > self.limit:
            self._histories.drop(tag)
            self._oversized.put(tag, row)
            return None
        history = growing.history(row, link)
        self.replace(tag, history)
        return history

    def replace(self, tag: bytes, history: History) -> None:
        """Cache *history*, unless more events of the session are cached."""
        seen = self._histories.get(tag)
        if seen is history:
            return
        if seen is None or seen.row != history.row or seen.revision <= history.revision:
            self._histories.put(tag, history, history.size)

    def drop(self, tag: bytes) -> None:
        """Remove the history of the session with *tag*, if it is cached."""
        self._histories.drop(tag)
