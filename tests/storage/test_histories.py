"""A read with cached events asks only for newer ones, and accepts what a read without would."""

from collections.abc import Sequence
from typing import Any

import pytest

from adk_secure_sessions.errors import TamperedError
from adk_secure_sessions.storage.bindings import RowCache
from adk_secure_sessions.storage.histories import Growing, History, HistoryCache, Restored
from adk_secure_sessions.storage.reads import GetSession
from tests.storage.support import (
    BLOB,
    EVENT,
    SECOND_BLOB,
    SESSION,
    WHO,
    FakeExecutor,
    RawRow,
    Stored,
    one_database,
)

ALL, NEW, LAST = (
    "read SESSION_WITH_ALL_EVENTS",
    "read SESSION_WITH_NEW_EVENTS",
    "read SESSION_WITH_LAST_EVENTS",
)


class Kept(str):
    """A kept value: the text in uppercase, so that a test sees which events it came from."""

    __slots__ = ()


class TextKeeper:
    """Converts to `Kept`, which is returned from the second time on."""

    shares = False
    at_once = 2

    def __init__(self) -> None:
        self.converted: list[bytes] = []

    def convert(self, plaintext: bytes) -> tuple[str, Kept, int]:
        self.converted.append(plaintext)
        return plaintext.decode().title(), Kept(plaintext.decode().upper()), 100

    def restore(self, kept: Sequence[Any]) -> list[str]:
        return [one.decode().title() if type(one) is bytes else one for one in kept]


def text(plaintext: bytes, session_row: int, seq: int) -> str:
    return plaintext.decode()


def get(
    limit: int | None = None, after: int | None = None, keeper: TextKeeper | None = None
) -> GetSession[str]:
    return GetSession(WHO, text, limit, after, keeper or TextKeeper())


def newer(stored: Stored, known: int) -> list[RawRow]:
    """What the query for new events returns."""
    return [row for row in stored.rows() if row[0] != EVENT or row[1] >= known]


async def read(
    stored: Stored, cache: RowCache, operation: GetSession[str], *answers: list[RawRow]
) -> tuple[list[str] | None, FakeExecutor]:
    """Return the events, and what was asked for."""
    executors, executor = one_database(*answers)
    found = await operation.attempt(stored.knowing(cache), executors)
    return found and found[1], executor


def cache_of(stored: Stored, known: int, size: int = 10**6) -> RowCache:
    """The cache of a process that has read the first *known* events of the session.

    It has read them before the others were stored, from the same database.
    """
    cache = RowCache(10, size)
    growing = Growing(None, size)
    plaintexts = [f"event {seq}".encode() for seq in range(known)]
    growing.add(plaintexts, list(range(100, 100 + known)))
    cache.histories.put(WHO.session_tag, stored.session.id, stored.links[known - 1], growing)
    return cache


async def test_second_read_asks_for_newer_events_only() -> None:
    stored = Stored(events=3)
    cache = RowCache(10, 10**6)
    first, executor = await read(stored, cache, get(), stored.rows())
    assert first == ["event 0", "event 1", "event 2"]
    assert executor.requests == [ALL]
    for expected in (["Event 0", "Event 1", "Event 2"], ["EVENT 0", "EVENT 1", "EVENT 2"]):
        again, executor = await read(stored, cache, get(), newer(stored, 3))
        assert again == expected
        assert executor.requests == [NEW]
    (step,) = executor.steps
    assert getattr(step, "parameters") == {**WHO.tags(), "known": 3}  # noqa: B009 - Read or Apply


@pytest.mark.parametrize("known", [1, 2, 4, 5])
async def test_newer_events_follow_the_known_ones(known: int) -> None:
    stored = Stored(events=5)
    cache = cache_of(stored, known)
    for number in range(3):
        found, executor = await read(stored, cache, get(), newer(stored, 5 if number else known))
        assert found is not None
        assert [one.lower() for one in found] == [f"event {n}" for n in range(5)]
        assert [one.islower() for one in found] == [n >= known and not number for n in range(5)]
        assert executor.requests == [NEW]


async def test_each_event_is_converted_once_and_only_if_it_is_taken_from_the_cache() -> None:
    stored = Stored(events=6)
    cache, keeper = cache_of(stored, 4), TextKeeper()
    for operation, expected in (
        (get(3, keeper=keeper), ["Event 3", "event 4", "event 5"]),
        (get(4, keeper=keeper), ["Event 2", "EVENT 3", "Event 4", "Event 5"]),
        (get(after=104, keeper=keeper), ["EVENT 4", "EVENT 5"]),
        (get(after=101, keeper=keeper), ["Event 1", "EVENT 2", "EVENT 3", "EVENT 4", "EVENT 5"]),
        (get(keeper=keeper), ["Event 0", "EVENT 1", "EVENT 2", "EVENT 3", "EVENT 4", "EVENT 5"]),
        (get(keeper=keeper), [f"EVENT {n}" for n in range(6)]),
    ):
        revision = 6 if keeper.converted else 4
        found, _ = await read(stored, cache, operation, newer(stored, revision))
        assert found == expected
    assert sorted(keeper.converted) == [f"event {n}".encode() for n in range(6)]
    history = cache.histories.get(WHO.session_tag)
    assert history is not None
    assert cache.histories.size == history.size > 6 * 100


async def test_events_stay_plaintexts_if_their_values_do_not_fit_into_the_cache() -> None:
    stored = Stored(events=20)
    plain = cache_of(stored, 20).histories.size
    cache, keeper = cache_of(stored, 20, size=plain + 500), TextKeeper()
    for _ in range(3):
        found, executor = await read(stored, cache, get(keeper=keeper), newer(stored, 20))
        assert found is not None
        assert [one.lower() for one in found] == [f"event {n}" for n in range(20)]
        assert executor.requests == [NEW]
        assert plain < cache.histories.size <= plain + 500
    assert 5 < len(keeper.converted) < 15


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("known", [2, 5])
async def test_last_events_are_taken_from_the_known_and_the_new_ones(
    limit: int, known: int
) -> None:
    stored = Stored(events=5)
    cache = cache_of(stored, known)
    found, executor = await read(stored, cache, get(limit), newer(stored, known))
    assert found is not None
    assert [one.lower() for one in found] == [f"event {n}" for n in range(5)][-limit:]
    assert executor.requests == [NEW]
    history = cache.histories.get(WHO.session_tag)
    assert history is not None
    assert history.revision == 5


@pytest.mark.parametrize("after", [0, 101, 102, 103, 104, 105])
@pytest.mark.parametrize("known", [2, 5])
async def test_events_since_a_time_are_taken_from_the_known_and_the_new_ones(
    after: int, known: int
) -> None:
    stored = Stored(events=5)  # at 100 to 104
    cache = cache_of(stored, known)
    found, _ = await read(stored, cache, get(after=after), newer(stored, known))
    assert found is not None
    assert [one.lower() for one in found] == [f"event {n}" for n in range(5) if 100 + n >= after]


async def test_read_of_the_last_events_caches_nothing_unless_it_has_all() -> None:
    stored = Stored(events=3)
    cache = RowCache(10, 10**6)
    _, executor = await read(stored, cache, get(2), stored.rows(last=2))
    assert executor.requests == [LAST]
    assert cache.histories.size == 0
    await read(stored, cache, get(3), stored.rows())
    assert cache.histories.size > 0


async def test_read_without_events_neither_uses_nor_fills_the_cache() -> None:
    stored = Stored(events=3)
    cache = cache_of(stored, 3)
    found, executor = await read(stored, cache, get(0), newer(stored, 3))
    assert found == []
    assert executor.requests == ["read SESSION_WITHOUT_EVENTS"]


async def test_read_without_a_keeper_does_not_use_the_cache() -> None:
    stored = Stored(events=3)
    cache = cache_of(stored, 3)
    operation: GetSession[str] = GetSession(WHO, text)
    found, executor = await read(stored, cache, operation, stored.rows())
    assert found == ["event 0", "event 1", "event 2"]
    assert executor.requests == [ALL]


# --- cached events that do not fit ---------------------------------------------------------------


async def test_events_of_another_copy_of_the_database_are_read_again() -> None:
    """The same ids and revision, but other links: the cached events end with another one."""
    stored = Stored(events=3)
    cache = cache_of(stored, 3)
    other = stored.another_copy(events=3)
    found, executor = await read(other, cache, get(), newer(other, 3), other.rows())
    assert found == ["event 0", "event 1", "event 2"]
    assert executor.requests == [NEW, ALL]
    _, executor = await read(other, cache, get(), newer(other, 3))
    assert executor.requests == [NEW]


async def test_newer_events_that_follow_others_are_read_again_with_those() -> None:
    stored = Stored(events=3)
    cache = cache_of(stored, 3)
    other = stored.another_copy(events=5)
    found, executor = await read(other, cache, get(), newer(other, 3), other.rows())
    assert found == [f"event {n}" for n in range(5)]
    assert executor.requests == [NEW, ALL]


async def test_session_with_fewer_events_than_the_known_ones_is_read_again() -> None:
    stored = Stored(events=5)
    cache = cache_of(stored, 5)
    older = stored.another_copy(events=3)
    found, executor = await read(older, cache, get(), newer(older, 5), older.rows())
    assert found == ["event 0", "event 1", "event 2"]
    assert executor.requests == [NEW, ALL]


async def test_limit_is_kept_if_the_known_events_do_not_fit() -> None:
    stored = Stored(events=3)
    cache = cache_of(stored, 3)
    other = stored.another_copy(events=3)
    found, executor = await read(other, cache, get(2), newer(other, 3), other.rows(last=2))
    assert found == ["event 1", "event 2"]
    assert executor.requests == [NEW, LAST]


def changed(rows: list[RawRow], kind: int, position: int, value: object) -> list[RawRow]:
    """The rows, with another value in the first row of *kind*."""
    at = [row[0] for row in rows].index(kind)
    row = rows[at]
    return [*rows[:at], (*row[:position], value, *row[position + 1 :]), *rows[at + 1 :]]


@pytest.mark.parametrize(
    ("position", "value"),
    [(1, 0), (1, 4), (1, "x"), (2, 7), (BLOB, b""), (BLOB, None)],
    ids=["known seq", "seq of another", "text as seq", "time", "empty record", "no record"],
)
async def test_new_event_that_was_tampered_with_is_rejected_as_without_the_cache(
    position: int, value: object
) -> None:
    stored = Stored(events=5)
    whole = stored.replaced(EVENT, position, value, at=3)
    with pytest.raises(TamperedError) as without:
        await read(stored, RowCache(10), get(), whole)
    cache = cache_of(stored, 3)
    with pytest.raises(TamperedError) as rejected:
        await read(stored, cache, get(), changed(newer(stored, 3), EVENT, position, value), whole)
    assert str(rejected.value) == str(without.value)
    assert cache.histories.get(WHO.session_tag) is None
    assert rejected.value.__context__ is None


async def test_missing_or_additional_new_event_is_rejected() -> None:
    stored = Stored(events=5)
    for seq in (3, 4):
        cache = cache_of(stored, 3)
        whole = [row for row in stored.rows() if (row[0], row[1]) != (EVENT, seq)]
        part = [row for row in newer(stored, 3) if (row[0], row[1]) != (EVENT, seq)]
        with pytest.raises(TamperedError, match="events 0 to 4"):
            await read(stored, cache, get(), part, whole)
    cache = cache_of(stored, 3)
    twice = [row for row in stored.rows() if (row[0], row[1]) == (EVENT, 4)]
    with pytest.raises(TamperedError, match="events 0 to 4"):
        await read(stored, cache, get(), newer(stored, 3) + twice, stored.rows() + twice)


async def test_session_row_that_was_tampered_with_is_rejected_without_another_query() -> None:
    stored = Stored(events=3)
    cache = cache_of(stored, 3)
    rows = changed(newer(stored, 3), SESSION, SECOND_BLOB, stored.session.sealed + b"x")
    with pytest.raises(TamperedError):
        await read(stored, cache, get(), rows)


# --- what leaves the cache -----------------------------------------------------------------------


async def test_events_of_a_session_that_is_gone_leave_the_cache() -> None:
    stored = Stored(events=3)
    cache = cache_of(stored, 3)
    found, _ = await read(stored, cache, get(), [])
    assert found is None
    assert cache.histories.size == 0


async def test_session_that_is_larger_than_the_cache_is_not_collected_each_time() -> None:
    stored = Stored(events=20)
    cache = RowCache(10, 1000)
    assert cache.histories.accepts(WHO.session_tag, stored.session.id)
    for _ in range(3):
        found, executor = await read(stored, cache, get(), stored.rows())
        assert found == [f"event {n}" for n in range(20)]
        assert executor.requests == [ALL]
        assert cache.histories.size == 0
        assert not cache.histories.accepts(WHO.session_tag, stored.session.id)


async def test_session_that_grows_larger_than_the_cache_leaves_it() -> None:
    stored = Stored(events=12)
    cache = cache_of(stored, 3, size=800)
    assert cache.histories.size > 0
    found, _ = await read(stored, cache, get(), newer(stored, 3))
    assert found is not None
    assert [one.lower() for one in found] == [f"event {n}" for n in range(12)]
    assert cache.histories.size == 0


def test_slow_read_does_not_replace_later_events() -> None:
    cache = HistoryCache(10**6)

    def put(row: int, number: int) -> None:
        growing = Growing(None, 10**6)
        growing.add([b"event"] * number, [1] * number)
        cache.put(b"tag", row, b"link", growing)

    def known() -> tuple[int, int]:
        history = cache.get(b"tag")
        assert history is not None
        return history.row, history.revision

    put(1, 5)
    put(1, 3)
    assert known() == (1, 5)
    put(2, 1)
    assert known() == (2, 1)


def test_shared_events_are_taken_at_once_if_none_is_a_plaintext() -> None:
    def restored(*kept: object, shares: bool = True) -> Restored[str]:
        keeper = TextKeeper()
        keeper.shares = shares
        history = History(1, b"link", [*range(len(kept))], [*kept], 10)
        return Restored(keeper, history, 10**6)

    one, two, three = Kept("ONE"), Kept("TWO"), Kept("THREE")
    all_shared = restored(one, two, three)
    for indexes, expected in ((range(1, 3), [two, three]), ([0, 2], [one, three]), (range(0), [])):
        assert all_shared.add_shared(indexes)
        assert all_shared.events == expected
    assert all_shared.add_shared(range(3))
    all_shared.events.clear()  # a caller may change the list, but not the cached one
    assert all_shared.add_shared(range(3))
    assert all_shared.events == [one, two, three]
    some = restored(one, b"two", three)
    assert not some.add_shared(range(3))
    assert some.events == []
    assert some.add_shared([0, 2])
    assert some.events == [one, three]
    assert not restored(one, two, shares=False).add_shared(range(2))


def test_contents_are_in_no_repr() -> None:
    growing = Growing(None, 10**6)
    growing.add([b"secret"], [1])
    cache = HistoryCache(10**6)
    history = cache.put(b"tag", 1, b"link", growing)
    assert history is not None
    restored = Restored(TextKeeper(), history, 10**6)
    restored.add(range(1))
    assert restored.events == ["Secret"]
    shown = repr([growing, cache, history, restored, restored.history()])
    assert "secret" not in (shown + str(history)).lower()
