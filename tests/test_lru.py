"""The map of limited size."""

from concurrent.futures import ThreadPoolExecutor

from adk_secure_sessions.lru import Lru


def filled(limit: int, *keys: str) -> Lru[str, str]:
    lru = Lru[str, str](limit)
    for key in keys:
        lru.put(key, key.upper())
    return lru


def held(lru: Lru[str, str], keys: str) -> str:
    return "".join(key for key in keys if lru.get(key) is not None)


def test_value_is_found_under_its_key() -> None:
    assert filled(2, "a").get("a") == "A"


def test_unknown_key_gives_none() -> None:
    assert filled(2, "a").get("b") is None


def test_entry_put_first_is_forgotten_first() -> None:
    assert held(filled(2, "a", "b", "c"), "abc") == "bc"


def test_entry_used_last_is_kept() -> None:
    lru = filled(2, "a", "b")
    lru.get("a")
    lru.put("c", "C")
    assert held(lru, "abc") == "ac"


def test_putting_again_replaces_and_counts_as_use() -> None:
    lru = filled(2, "a", "b")
    lru.put("a", "new")
    lru.put("c", "C")
    assert held(lru, "abc") == "ac"
    assert lru.get("a") == "new"


def test_dropped_key_is_gone() -> None:
    lru = filled(2, "a", "b")
    lru.drop("a")
    assert held(lru, "ab") == "b"


def test_dropping_an_unknown_key_is_no_error() -> None:
    filled(2).drop("a")


def test_limit_of_zero_holds_nothing() -> None:
    assert held(filled(0, "a"), "a") == ""


def test_many_threads_never_exceed_the_limit() -> None:
    lru = Lru[int, int](10)

    def work(start: int) -> None:
        for number in range(start, start + 2000):
            lru.put(number % 50, number)
            lru.get((number + 7) % 50)
            lru.drop((number + 13) % 50)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert sum(lru.get(key) is not None for key in range(50)) <= 10
