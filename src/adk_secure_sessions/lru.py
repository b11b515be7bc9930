"""A bounded map that forgets what was used longest ago; safe between threads without a lock."""

from collections import OrderedDict
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Lru(Generic[K, V]):
    """Holds at most *limit* entries."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._entries: OrderedDict[K, V] = OrderedDict()

    def get(self, key: K) -> V | None:
        value = self._entries.get(key)
        if value is not None:
            try:
                self._entries.move_to_end(key)
            except KeyError:
                pass  # another thread has just dropped it
        return value

    def put(self, key: K, value: V) -> None:
        self._entries[key] = value
        try:
            self._entries.move_to_end(key)
            while len(self._entries) > self._limit:
                self._entries.popitem(last=False)
        except KeyError:
            pass  # as above

    def drop(self, key: K) -> None:
        self._entries.pop(key, None)
