"""A map of limited size that forgets the entry used longest ago."""

from collections import OrderedDict
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Lru(Generic[K, V]):
    """Holds at most *limit* entries; several threads may use it at once.

    It needs no lock.  Each step on the `OrderedDict` is atomic, and the only thing that can happen
    between two steps is that another thread removes the entry: then `KeyError` says so.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._entries: OrderedDict[K, V] = OrderedDict()

    def get(self, key: K) -> V | None:
        """Return the value of *key*, or None; it counts as used now."""
        value = self._entries.get(key)
        if value is not None:
            try:
                self._entries.move_to_end(key)
            except KeyError:
                pass  # another thread has just removed it
        return value

    def put(self, key: K, value: V) -> None:
        """Store *value* under *key*, and remove the entries used longest ago beyond the limit."""
        self._entries[key] = value
        try:
            self._entries.move_to_end(key)
            while len(self._entries) > self._limit:
                self._entries.popitem(last=False)
        except KeyError:
            pass  # another thread has just removed it

    def drop(self, key: K) -> None:
        """Remove *key*, if it is there."""
        self._entries.pop(key, None)
