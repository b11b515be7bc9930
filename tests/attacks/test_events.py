"""Events that are moved, replayed, reordered, duplicated, added and deleted."""

import pytest

from adk_secure_sessions import TamperedError
from tests.attacks.databases import also_on
from tests.attacks.support import (
    HISTORY,
    MISPLACED,
    SESSION,
    Database,
    Impact,
    assert_rejected,
    get_after,
    get_last,
    get_last_three,
)
from tests.attacks.world import BOB, CAROL, NOTES, VISIT, SessionIds

LAST = 3
WITHIN_LAST_THREE = Impact((*HISTORY.rejected, get_last_three), HISTORY.unaffected)
AT_THE_END = Impact((*WITHIN_LAST_THREE.rejected, get_last), HISTORY.unaffected)


@also_on("fernet", "packed", "postgresql")
@pytest.mark.parametrize(("target", "whose"), [(":notes", NOTES), (":bob_visit", BOB)])
@pytest.mark.parametrize("seq", [0, LAST])
async def test_event_moved_to_another_session_is_rejected(
    db: Database, target: str, whose: SessionIds, seq: int
) -> None:
    db.run(
        f"UPDATE OR REPLACE secure_events SET session_row = {target} "
        "WHERE session_row = :visit AND seq = :seq",
        seq=seq,
    )
    unaffected = tuple(who for who in (NOTES, BOB, CAROL) if who != whose)
    theirs = AT_THE_END if seq == LAST else HISTORY
    await assert_rejected(db, HISTORY._replace(unaffected=unaffected), *MISPLACED)
    await assert_rejected(db, theirs._replace(unaffected=unaffected), *MISPLACED, who=whose)


@pytest.mark.parametrize(("source", "seq"), [(":notes", 1), (":bob_visit", 1), (":carol_visit", 1)])
async def test_event_overwritten_by_one_of_another_session_is_rejected(
    db: Database, source: str, seq: int
) -> None:
    theirs = db.value(
        f"SELECT event FROM secure_events WHERE session_row = {source} AND seq = :seq", seq=seq
    )
    db.run(
        "UPDATE secure_events SET event = :event WHERE session_row = :visit AND seq = :seq",
        event=theirs,
        seq=seq,
    )
    await assert_rejected(db, WITHIN_LAST_THREE, *MISPLACED)


@pytest.mark.parametrize(("old", "new"), [(0, 1), (0, LAST), (2, LAST)])
async def test_event_replayed_over_a_later_one_is_rejected(
    db: Database, old: int, new: int
) -> None:
    db.run(
        "UPDATE secure_events SET (time, event) = (SELECT time, event FROM secure_events "
        "WHERE session_row = :visit AND seq = :old) WHERE session_row = :visit AND seq = :new",
        old=old,
        new=new,
    )
    await assert_rejected(db, AT_THE_END if new == LAST else WITHIN_LAST_THREE, TamperedError)


@pytest.mark.parametrize(("one", "other"), [(0, 1), (1, 2), (0, LAST), (2, LAST)])
async def test_events_reordered_are_rejected(db: Database, one: int, other: int) -> None:
    for old, new in ((one, 1000), (other, one), (1000, other)):
        db.run(
            "UPDATE secure_events SET seq = :new WHERE session_row = :visit AND seq = :old",
            old=old,
            new=new,
        )
    await assert_rejected(db, AT_THE_END if other == LAST else WITHIN_LAST_THREE, TamperedError)


@pytest.mark.parametrize("seq", [0, 1, LAST])
async def test_event_deleted_is_detected(db: Database, seq: int) -> None:
    db.run("DELETE FROM secure_events WHERE session_row = :visit AND seq = :seq", seq=seq)
    impact = {0: HISTORY, 1: WITHIN_LAST_THREE, LAST: SESSION}[seq]
    await assert_rejected(db, impact, TamperedError)


async def test_all_events_deleted_are_detected(db: Database) -> None:
    db.run("DELETE FROM secure_events WHERE session_row = :visit")
    await assert_rejected(db, SESSION, TamperedError)


async def test_last_event_deleted_and_the_revision_lowered_is_detected(db: Database) -> None:
    db.run("DELETE FROM secure_events WHERE session_row = :visit AND seq = 3")
    db.run("UPDATE secure_sessions SET revision = 3 WHERE id = :visit")
    await assert_rejected(db, SESSION, TamperedError)


async def test_event_deleted_and_the_later_ones_renumbered_are_rejected(db: Database) -> None:
    db.run("DELETE FROM secure_events WHERE session_row = :visit AND seq = 1")
    for seq in (2, LAST):
        db.run(
            "UPDATE secure_events SET seq = seq - 1 WHERE session_row = :visit AND seq = :seq",
            seq=seq,
        )
    db.run("UPDATE secure_sessions SET revision = 3 WHERE id = :visit")
    await assert_rejected(db, SESSION, TamperedError)


@pytest.mark.parametrize("source", [":visit", ":notes", ":bob_visit"])
@pytest.mark.parametrize("seq", [0, LAST])
async def test_event_copied_to_the_end_is_rejected(db: Database, source: str, seq: int) -> None:
    db.run(
        "INSERT INTO secure_events SELECT :visit, 4, time, event FROM secure_events "
        f"WHERE session_row = {source} AND seq = :seq",
        seq=seq,
    )
    await assert_rejected(db, SESSION, TamperedError)


async def test_event_copied_to_the_end_with_the_revision_raised_is_rejected(db: Database) -> None:
    db.run(
        "INSERT INTO secure_events SELECT :visit, 4, time, event FROM secure_events "
        "WHERE session_row = :visit AND seq = 3"
    )
    db.run("UPDATE secure_sessions SET revision = 5 WHERE id = :visit")
    await assert_rejected(db, SESSION, TamperedError)


@pytest.mark.parametrize("seq", [5, 1000, 2**63 - 1])
async def test_event_copied_beyond_the_end_is_rejected(db: Database, seq: int) -> None:
    db.run(
        "INSERT INTO secure_events SELECT :visit, :seq, time, event FROM secure_events "
        "WHERE session_row = :visit AND seq = 3",
        seq=seq,
    )
    await assert_rejected(db, SESSION, TamperedError)


@pytest.mark.parametrize("seq", [-1, -(2**63)])
async def test_event_copied_before_the_first_is_rejected(db: Database, seq: int) -> None:
    db.run(
        "INSERT INTO secure_events SELECT :visit, :seq, time, event FROM secure_events "
        "WHERE session_row = :visit AND seq = 0",
        seq=seq,
    )
    await assert_rejected(db, HISTORY, TamperedError)


@also_on("postgresql")
@pytest.mark.parametrize("seq", [0, 2, LAST])
async def test_event_duplicated_under_its_own_number_is_rejected(db: Database, seq: int) -> None:
    db.lift_constraints("secure_events")
    db.run(
        "INSERT INTO secure_events SELECT * FROM secure_events "
        "WHERE session_row = :visit AND seq = :seq",
        seq=seq,
    )
    impact = {0: HISTORY, 2: WITHIN_LAST_THREE, LAST: AT_THE_END}[seq]
    await assert_rejected(db, impact, TamperedError)


@also_on("fernet")  # servers do not store 1.5 in a column of integers
async def test_event_duplicated_between_two_others_is_rejected(db: Database) -> None:
    db.lift_constraints("secure_events")
    db.run(
        "INSERT INTO secure_events SELECT session_row, 1.5, time, event FROM secure_events "
        "WHERE session_row = :visit AND seq = 1"
    )
    await assert_rejected(db, WITHIN_LAST_THREE, TamperedError)


async def test_event_replaced_by_a_copy_of_its_neighbour_is_rejected(db: Database) -> None:
    """The number of events is still right, and so is the last one."""
    db.lift_constraints("secure_events")
    db.run("DELETE FROM secure_events WHERE session_row = :visit AND seq = 1")
    db.run(
        "INSERT INTO secure_events SELECT * FROM secure_events "
        "WHERE session_row = :visit AND seq = 2"
    )
    await assert_rejected(db, WITHIN_LAST_THREE, TamperedError)


@pytest.mark.parametrize("seq", [0, LAST])
@pytest.mark.parametrize("microseconds", [1, -3600 * 1_000_000])
async def test_event_whose_time_was_modified_is_rejected(
    db: Database, seq: int, microseconds: int
) -> None:
    db.run(
        "UPDATE secure_events SET time = time + :by WHERE session_row = :visit AND seq = :seq",
        seq=seq,
        by=microseconds,
    )
    await assert_rejected(db, AT_THE_END if seq == LAST else HISTORY, TamperedError)


async def test_time_modified_to_hide_an_event_from_a_filter_is_rejected(db: Database) -> None:
    """Events that `after_timestamp` leaves out are authenticated, too."""
    db.run("UPDATE secure_events SET time = 0 WHERE session_row = :visit AND seq = 3")
    await assert_rejected(db, Impact((get_after,), ()), TamperedError)


async def test_events_of_two_sessions_swapped_whole_are_rejected(db: Database) -> None:
    for old, new in ((":visit", "7"), (":notes", ":visit"), ("7", ":notes")):
        db.run(f"UPDATE secure_events SET session_row = {new} WHERE session_row = {old}")
    impact = AT_THE_END._replace(unaffected=(BOB, CAROL))
    await assert_rejected(db, impact, TamperedError, who=VISIT)
    await assert_rejected(db, impact, TamperedError, who=NOTES)
