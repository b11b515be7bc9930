"""A read with cached events asks only for newer ones, and accepts what a read without would."""

from collections.abc import Sequence

import pytest

from adk_secure_sessions.errors import TamperedError
from adk_secure_sessions.storage.attempts import RowCache
from adk_secure_sessions.storage.histories import History, HistoryCache, size_of_event
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


def text(plaintext: bytes, session_row: int, seq: int) -> str:
    return plaintext.decode()


def get(limit: int | None = None, after: int | None = None) -> GetSession[str]:
    return GetSession(WHO, text, limit, after, caches=True)


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
    cache.histories.put(WHO.session_tag, history_of(known, stored.session.id, stored.links))
    return cache


def history_of(known: int, row: int = 1, links: Sequence[bytes] = ()) -> History:
    """The history of the first *known* events, as texts in uppercase: a test sees the source."""
    events, size = [f"EVENT {seq}" for seq in range(known)], size_of_event(b"event 0")
    empty, link = History(row, b"", [], []), links[known - 1] if links else b"link"
    return empty.extended(link, [*range(100, 100 + known)], events, known * size)


async def test_second_read_asks_for_newer_events_only() -> None:
    stored = Stored(events=3)
    cache = RowCache(10, 10**6)
    first, executor = await read(stored, cache, get(), stored.rows())
    assert first == ["event 0", "event 1", "event 2"]
    assert executor.requests == [ALL]
    for _ in range(2):
        again, executor = await read(stored, cache, get(), newer(stored, 3))
        assert again == first
        assert [id(one) for one in again] == [id(one) for one in first]
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
        assert [one.isupper() for one in found] == [n < known for n in range(5)]
        assert executor.requests == [NEW]


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


async def test_read_that_does_not_cache_does_not_use_the_cache() -> None:
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


async def test_session_that_is_larger_than_the_cache_is_remembered() -> None:
    stored = Stored(events=20)
    cache = RowCache(10, 20_000)
    assert cache.histories.accepts(WHO.session_tag, stored.session.id)
    for _ in range(3):
        found, executor = await read(stored, cache, get(), stored.rows())
        assert found == [f"event {n}" for n in range(20)]
        assert executor.requests == [ALL]
        assert cache.histories.size == 0
        assert not cache.histories.accepts(WHO.session_tag, stored.session.id)


async def test_session_that_grows_larger_than_the_cache_leaves_it() -> None:
    stored = Stored(events=12)
    cache = cache_of(stored, 3, size=20_000)
    assert cache.histories.size > 0
    found, _ = await read(stored, cache, get(), newer(stored, 3))
    assert found is not None
    assert [one.lower() for one in found] == [f"event {n}" for n in range(12)]
    assert cache.histories.size == 0


def test_slow_read_does_not_replace_later_events() -> None:
    cache = HistoryCache(10**6)

    def put(row: int, number: int) -> None:
        cache.put(b"tag", history_of(number, row))

    def known() -> tuple[int, int]:
        history = cache.get(b"tag")
        assert history is not None
        return history.row, history.revision

    put(1, 5)
    put(1, 3)
    assert known() == (1, 5)
    put(2, 1)
    assert known() == (2, 1)


def test_callers_may_change_the_list_but_not_the_cached_one() -> None:
    history = history_of(3)
    for limit, after in ((None, None), (3, None), (None, 0)):
        part = history.part(limit, after)
        assert part == ["EVENT 0", "EVENT 1", "EVENT 2"]
        part.clear()
    assert history.revision == 3


def test_size_of_an_event_grows_with_its_text_and_its_values() -> None:
    sizes = [size_of_event(one) for one in (b"x", b"x" * 1000, b"[1,2,3]" * 1000)]
    assert sizes == sorted(sizes)
    assert sizes[1] - sizes[0] == 999
    assert sizes[2] > 20 * 7000


def test_contents_are_in_no_repr() -> None:
    cache = HistoryCache(10**6)
    history = history_of(1)
    cache.put(b"tag", history)
    assert cache.get(b"tag") is history
    assert "event 0" not in (repr([cache, history]) + str(history)).lower()
