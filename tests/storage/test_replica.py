"""Which rows of a replica are new enough, and when a replica that has failed is asked again."""

import logging

import pytest

from adk_secure_sessions.errors import DatabaseError, TamperedError
from adk_secure_sessions.storage.replica import (
    AtLeast,
    Behind,
    Freshness,
    KnownRow,
    KnownRows,
    Replica,
)
from tests.storage.support import FakeExecutor

A, B = b"a", b"b"


def on_replica(known: KnownRows, at_least: AtLeast | None = None) -> Freshness:
    return Freshness(known, on_replica=True, at_least=at_least)


def on_primary(known: KnownRows) -> Freshness:
    return Freshness(known, on_replica=False)


def knowing(row_id: int, version: int) -> KnownRows:
    known = KnownRows(10)
    known.wrote(A, row_id, version, 0)
    return known


@pytest.mark.parametrize(("row_id", "version"), [(1, 4), (2, 9), (0, 9)])
def test_older_or_other_row_on_the_replica_is_behind(row_id: int, version: int) -> None:
    with pytest.raises(Behind):
        on_replica(knowing(1, 5)).met(A, row_id, version, 0)


def test_row_on_the_replica_that_is_as_new_is_accepted_and_a_newer_one_is_learned() -> None:
    known = knowing(1, 5)
    on_replica(known).met(A, 1, 5, 0)
    on_replica(known).met(A, 1, 7, 0)
    with pytest.raises(Behind):
        on_replica(known).met(A, 1, 6, 0)


def test_deleted_row_on_the_replica_is_behind_until_the_primary_has_it_again() -> None:
    known = knowing(1, 5)
    known.deleted(A)
    for row_id in (1, 2):
        with pytest.raises(Behind):
            on_replica(known).met(A, row_id, 5, 0)
    on_primary(known).met(A, 2, 0, 0)
    on_replica(known).met(A, 2, 0, 0)


def test_missing_row_on_the_replica_is_behind_and_on_the_primary_is_deleted() -> None:
    known = knowing(1, 5)
    with pytest.raises(Behind) as caught:
        on_replica(known).missing(A)
    assert caught.value.is_missing
    on_primary(known).missing(A)
    with pytest.raises(Behind):
        on_replica(known).met(A, 1, 5, 0)


def test_primary_corrects_what_is_known_unless_it_was_learned_during_the_read() -> None:
    known = knowing(1, 5)
    slow, later = on_primary(known), on_primary(known)
    known.wrote(A, 1, 6, 0)
    slow.met(A, 1, 5, 0)
    slow.missing(A)
    with pytest.raises(Behind):
        on_replica(known).met(A, 1, 5, 0)
    later.met(A, 1, 8, 0)
    on_primary(known).met(A, 1, 3, 0)  # a backup was restored
    on_replica(known).met(A, 1, 3, 0)


def test_slow_read_does_not_bring_a_deleted_row_back() -> None:
    known = knowing(1, 5)
    slow = on_primary(known)
    known.deleted(A)
    slow.met(A, 1, 5, 0)
    with pytest.raises(Behind):
        on_replica(known).met(A, 1, 5, 0)


@pytest.mark.parametrize(
    ("row_id", "version", "is_new"), [(1, 5, True), (1, 6, True), (1, 4, False), (2, 5, False)]
)
def test_revision_of_the_caller_is_a_lower_limit(row_id: int, version: int, is_new: bool) -> None:
    freshness = on_replica(KnownRows(10), AtLeast(A, 1, 5))
    freshness.met(B, 7, 0, 0)
    if is_new:
        freshness.met(A, row_id, version, 0)
    else:
        with pytest.raises(Behind):
            freshness.met(A, row_id, version, 0)


def test_listing_without_a_known_row_is_behind() -> None:
    known = KnownRows(10)
    known.wrote(A, 1, 0, 100)
    known.wrote(B, 2, 0, 200)
    freshness = on_replica(known)
    freshness.listed([100], {A})
    freshness.listed([100, 300], {A})
    freshness.listed([200], set(), lambda row: row.id > 2)
    with pytest.raises(Behind):
        freshness.listed([100, 200], {A})
    on_primary(known).listed([200], set())
    freshness.listed([100, 200], {A})


def test_least_recently_used_rows_are_forgotten() -> None:
    known = KnownRows(0)
    for number in range(20_000):
        known.wrote(number.to_bytes(4, "big"), 1, 0, 0)
    assert known.get(bytes(4)) is None
    assert isinstance(known.get((19_999).to_bytes(4, "big")), KnownRow)


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("time.monotonic", lambda: self.now)


def test_replica_that_has_failed_is_asked_again_by_one_read_after_a_pause(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock, replica = Clock(monkeypatch), Replica(FakeExecutor())
    assert replica.is_due()
    replica.failed(DatabaseError("no answer"))
    clock.now += 9
    assert not replica.is_due()
    clock.now += 2
    assert [replica.is_due(), replica.is_due()] == [True, False]
    replica.answered()
    assert replica.is_due()
    for _ in range(5):
        replica.failed(DatabaseError("no answer"))
        clock.now += 10
    assert len(caplog.messages) == 1, "one message a minute"
    clock.now += 10
    replica.failed(DatabaseError("no answer"))
    assert len(caplog.messages) == 2


def test_pause_after_an_erasure_is_not_ended_by_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, replica = Clock(monkeypatch), Replica(FakeExecutor())
    replica.pause(300)
    replica.answered()
    clock.now += 299
    assert not replica.is_due()
    clock.now += 2
    assert replica.is_due()


def test_rejected_rows_are_logged_once_a_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock, replica = Clock(monkeypatch), Replica(FakeExecutor())
    for _ in range(3):
        replica.was_rejected(TamperedError("modified"))
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    clock.now += 61
    replica.was_rejected(TamperedError("modified"))
    assert len(caplog.records) == 2
