"""Events that are moved, replayed, reordered, duplicated, added and deleted."""

from itertools import product

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
    create_again,
    delete,
    get,
    get_after,
    get_last,
    get_last_three,
    get_no_events,
    list_user,
    only,
)
from tests.attacks.world import BOB, CAROL, NOTES, VISIT, SessionIds

LAST = 3
WITHIN_LAST_THREE = Impact((*HISTORY.rejected, get_last_three), HISTORY.unaffected)
# Pages read events by their numbers, so they never find an event between or before these.
WHOLE = Impact((get, get_after), HISTORY.unaffected)
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


COPY = "INSERT INTO secure_events SELECT :visit, {}, time, event FROM secure_events WHERE "
REVISION = "UPDATE secure_sessions SET revision = {} WHERE id = :visit"
RENUMBER = "UPDATE secure_events SET seq = seq - 1 WHERE session_row = :visit AND seq = {}"
DELETE = "DELETE FROM secure_events WHERE session_row = :visit"
# The statements, and what is rejected then.
CHANGES: dict[str, tuple[list[str], Impact]] = {
    "all deleted": ([DELETE], SESSION),
    "last deleted, revision lowered": ([f"{DELETE} AND seq = 3", REVISION.format(3)], SESSION),
    "deleted, later ones renumbered": (
        [f"{DELETE} AND seq = 1", RENUMBER.format(2), RENUMBER.format(3), REVISION.format(3)],
        SESSION,
    ),
    **{
        f"{seq} of {source} copied to the end": (
            [f"{COPY.format(4)} session_row = :{source} AND seq = {seq}"],
            SESSION,
        )
        for source, seq in product(("visit", "notes", "bob_visit"), (0, LAST))
    },
    "copied to the end, revision raised": (
        [f"{COPY.format(4)} session_row = :visit AND seq = 3", REVISION.format(5)],
        SESSION,
    ),
    **{
        f"copied as {seq}": ([f"{COPY.format(seq)} session_row = :visit AND seq = 3"], SESSION)
        for seq in (5, 1000, 2**63 - 1)
    },
    **{
        f"copied as {seq}": ([f"{COPY.format(seq)} session_row = :visit AND seq = 0"], WHOLE)
        for seq in (-1, -(2**63))
    },
}


@pytest.mark.parametrize(("statements", "impact"), CHANGES.values(), ids=CHANGES)
async def test_events_deleted_or_copied_are_rejected(
    db: Database, statements: list[str], impact: Impact
) -> None:
    for statement in statements:
        db.run(statement)
    await assert_rejected(db, impact, TamperedError)


@also_on("postgresql")
async def test_event_before_the_first_one_of_a_new_session_is_rejected(db: Database) -> None:
    new = VISIT._replace(session_id="new")
    async with db.service() as service:
        await create_again(service, db, new)
    copy = "SELECT id, -1, 0, state FROM secure_sessions ORDER BY id DESC LIMIT 1"
    db.run(f"INSERT INTO secure_events {copy}")
    await assert_rejected(db, only(get_no_events, list_user, delete), TamperedError, who=new)


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
    db.run(f"{COPY.format(1.5)} session_row = :visit AND seq = 1")
    await assert_rejected(db, WHOLE, TamperedError)


async def test_event_replaced_by_a_copy_of_its_neighbour_is_rejected(db: Database) -> None:
    """The number of events is still right, and so is the last one."""
    db.lift_constraints("secure_events")
    db.run("DELETE FROM secure_events WHERE session_row = :visit AND seq = 1")
    db.run(f"{COPY.format(2)} session_row = :visit AND seq = 2")
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
    await assert_rejected(db, only(get_after), TamperedError)
