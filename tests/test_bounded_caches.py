"""The map of limited size."""

import os
import signal
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest

from adk_secure_sessions.caches import FifoCache, SizedLru


def filled(limit: int, *keys: str) -> FifoCache[str, str]:
    cache = FifoCache[str, str](limit)
    for key in keys:
        cache.put(key, key.upper())
    return cache


def held(cache: FifoCache[str, str] | SizedLru[str, str], keys: str) -> str:
    return "".join(key for key in keys if cache.get(key) is not None)


def test_entry_that_was_replaced_last_is_kept() -> None:
    cache = filled(2, "a", "b")
    cache.put("a", "new")
    cache.put("c", "C")
    assert held(cache, "abc") == "ac"
    assert cache.get("a") == "new"


def test_entry_can_be_found_while_it_is_replaced() -> None:
    """Another thread may look it up at any time: here when the key is hashed."""
    cache, seen = filled(2, "a"), list[str | None]()

    class Key(str):
        def __hash__(self) -> int:
            seen.append(cache.get("a"))
            return super().__hash__()

    cache.put(Key("a"), "new")
    assert seen
    assert None not in seen


def test_dropped_key_is_gone() -> None:
    cache = filled(2, "a", "b")
    cache.drop("a")
    assert held(cache, "ab") == "b"


def test_limit_of_zero_holds_nothing() -> None:
    assert held(filled(0, "a"), "a") == ""


# --- a limit of the total size -------------------------------------------------------------------


def sized(limit: int, **sizes: int) -> SizedLru[str, str]:
    lru = SizedLru[str, str](limit)
    for key, size in sizes.items():
        lru.put(key, key.upper(), size)
    return lru


def test_least_recently_used_entries_make_room_for_a_large_one() -> None:
    lru = sized(10, a=3, b=3, c=3)
    lru.get("a")
    lru.put("d", "D", 6)
    assert held(lru, "abcd") == "ad"
    assert lru.size == 9


def test_entry_that_is_larger_than_the_limit_is_not_stored_and_removes_no_other() -> None:
    lru = sized(10, a=5)
    lru.put("b", "B", 11)
    assert held(lru, "ab") == "a"
    lru.put("a", "larger", 11)
    assert held(lru, "ab") == ""
    assert lru.size == 0


def test_size_of_a_replaced_or_dropped_entry_is_free_again() -> None:
    lru = sized(10, a=5, b=5)
    lru.put("a", "new", 2)
    assert lru.size == 7
    lru.drop("b")
    lru.drop("unknown")
    assert lru.size == 2
    assert lru.get("a") == "new"


def test_many_threads_never_exceed_the_size() -> None:
    lru = SizedLru[int, int](100)

    def work(start: int) -> None:
        for number in range(start, start + 2000):
            lru.put(number % 50, number, number % 30)
            lru.get((number + 7) % 50)
            lru.drop((number + 13) % 50)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    left = [found for key in range(50) if (found := lru.get(key)) is not None]
    assert sum(number % 30 for number in left) == lru.size <= 100


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_process_that_was_forked_during_a_change_can_change_the_cache() -> None:
    lru = sized(10, a=5)
    with lru._lock.lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 and later warn of forks with several threads
        child = os.fork()
        if not child:
            signal.alarm(10)
            lru.put("b", "B", 5)
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
