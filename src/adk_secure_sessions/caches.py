"""The sizes of a service's caches, and caches that remove entries when they are full."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from adk_secure_sessions.concurrency import ThreadLock
from adk_secure_sessions.errors import ConfigurationError
from adk_secure_sessions.hiding import hides_locals

K = TypeVar("K")
V = TypeVar("V")


@hides_locals
@dataclass(frozen=True)
class Caches:
    """The sizes of a service's caches.

    Args:
        sessions: Maximum number of sessions to cache, of users, and of apps, without their events.
            Most appends to a cached session need no read.
        data_keys: Maximum number of users and apps whose data keys are cached.
        events: Maximum size of the cache of decrypted events, in bytes; 0 for no such cache.  A
            read of a cached session reads and decrypts only the events that were stored since the
            last read.  All session objects then contain the same cached `Event` objects, which
            nobody may change.  The cached events are plaintext in memory.  If an older event is
            modified in storage, only `verify` detects this.
        seconds: How long sessions, events and data keys are cached, in seconds.  If another process
            erases a user, this process may use the user's cached data key for this time.

    Raises:
        ConfigurationError: A size is not an integer, `seconds` is not a number, or one of them is
            negative.
    """

    sessions: int = 4096
    data_keys: int = 10_000
    events: int = 0
    seconds: float = 300.0

    def __post_init__(self) -> None:
        for name in ("sessions", "data_keys", "events"):
            size = getattr(self, name)
            if not isinstance(size, int) or size < 0:
                raise ConfigurationError(f"{name} of Caches must be an integer, 0 or more")
        if not isinstance(self.seconds, int | float) or not self.seconds >= 0:  # also not a number
            raise ConfigurationError("seconds of Caches must be a number, 0 or more")


class FifoCache(Generic[K, V]):
    """A cache of at most *limit* entries, which removes the entry that was stored first.

    Several threads may use it: each call on the `OrderedDict` is atomic.  `get` does not count as a
    use, because an operation calls it up to twelve times: 4% of its CPU time.
    """

    def __init__(self, limit: int) -> None:
        self.limit: int = limit
        self._entries: OrderedDict[K, V] = OrderedDict()
        self.get: Callable[[K], V | None] = self._entries.get

    def put(self, key: K, value: V) -> None:
        """Store *value* as the last entry; remove the first ones if the cache is full."""
        entries = self._entries
        entries[key] = value  # `get` finds the old value until now
        try:
            entries.move_to_end(key)
            while len(entries) > self.limit:
                entries.popitem(last=False)
        except KeyError:
            pass  # another thread has just removed the entry, or the last one

    def items(self) -> list[tuple[K, V]]:
        return list(self._entries.items())

    def drop(self, key: K) -> None:
        self._entries.pop(key, None)


class SizedLru(Generic[K, V]):
    """A cache whose entries have sizes, at most *limit* in total; several threads may use it."""

    def __init__(self, limit: int) -> None:
        self.limit: int = limit
        self.size: int = 0
        self._entries: OrderedDict[K, V] = OrderedDict()
        self._sizes: dict[K, int] = {}
        self._lock = ThreadLock()  # an entry and the total size change together

    def get(self, key: K) -> V | None:
        value = self._entries.get(key)
        if value is not None:
            try:
                self._entries.move_to_end(key)
            except KeyError:
                pass  # another thread has just removed the entry
        return value

    def put(self, key: K, value: V, size: int) -> None:
        """Store *value*; remove the least recently used entries if the cache is full.

        A *value* that is larger than the limit is not stored.  Other entries stay.
        """
        if size > self.limit:
            self.drop(key)
            return
        with self._lock.lock:
            self.size += size - self._sizes.get(key, 0)
            self._sizes[key] = size
            self._entries[key] = value  # `get` finds the old value until now
            self._entries.move_to_end(key)
            while self.size > self.limit and self._entries:  # a fork may have left a wrong size
                removed, _ = self._entries.popitem(last=False)
                self.size -= self._sizes.pop(removed, 0)

    def drop(self, key: K) -> None:
        if key not in self._entries:
            return  # as most sessions in the cache of events, which may be off
        with self._lock.lock:
            self._entries.pop(key, None)
            self.size -= self._sizes.pop(key, 0)
