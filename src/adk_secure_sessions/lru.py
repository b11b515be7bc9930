"""Caches of limited size that remove the least recently used entry."""

from collections import OrderedDict
from threading import Lock
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Lru(Generic[K, V]):
    """A cache of at most *limit* entries; several threads may use it at once.

    No lock is needed, because each call on the `OrderedDict` is atomic.  If another thread removes
    an entry between two calls, the second call raises `KeyError`, which is ignored.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._entries: OrderedDict[K, V] = OrderedDict()

    def get(self, key: K) -> V | None:
        """Return the value of *key* and mark it as most recently used; return None if missing."""
        value = self._entries.get(key)
        if value is not None:
            try:
                self._entries.move_to_end(key)
            except KeyError:
                pass  # another thread has just removed the entry
        return value

    def put(self, key: K, value: V) -> None:
        """Store *value* under *key*; if the cache is full, remove the least recently used entry."""
        self._entries[key] = value
        try:
            self._entries.move_to_end(key)
            while len(self._entries) > self._limit:
                self._entries.popitem(last=False)
        except KeyError:
            pass  # another thread has just removed the entry

    def items(self) -> list[tuple[K, V]]:
        """Return all entries, the least recently used one first, without marking them as used."""
        return list(self._entries.items())

    def drop(self, key: K) -> None:
        """Remove the entry of *key*, if there is one."""
        self._entries.pop(key, None)


class SizedLru(Generic[K, V]):
    """A cache whose entries have sizes, at most *limit* in total; several threads may use it."""

    def __init__(self, limit: int) -> None:
        self.limit: int = limit
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._size = 0
        self._lock = Lock()  # an entry and the total size change together

    @property
    def size(self) -> int:
        """The total size of all entries."""
        return self._size

    def get(self, key: K) -> V | None:
        """Return the value of *key* and mark it as most recently used; return None if missing."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
            return entry[0]

    def put(self, key: K, value: V, size: int) -> None:
        """Store *value* under *key*; remove the least recently used entries if the cache is full.

        If *size* is larger than the limit, *value* is not stored, and the entry of *key* is
        removed.  Other entries stay.
        """
        with self._lock:
            self._remove(key)
            if size > self.limit:
                return
            self._entries[key] = value, size
            self._size += size
            while self._size > self.limit:
                _, (_, removed) = self._entries.popitem(last=False)
                self._size -= removed

    def drop(self, key: K) -> None:
        """Remove the entry of *key*, if there is one."""
        with self._lock:
            self._remove(key)

    def _remove(self, key: K) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._size -= entry[1]
