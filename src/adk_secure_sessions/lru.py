"""A cache of limited size that removes the least recently used entry."""

from collections import OrderedDict
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
