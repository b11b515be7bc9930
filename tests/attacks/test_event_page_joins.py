"""Pages of events join their neighbours; a single page shows less, as docs/limits.md says."""

from pathlib import Path
from typing import Literal

import pytest

from adk_secure_sessions import TamperedError
from tests.attacks.support import Database
from tests.attacks.test_copies import written_again
from tests.attacks.world import VISIT

ORDERS = pytest.mark.parametrize("order", ["oldest", "newest"])
Order = Literal["oldest", "newest"]
ATTACKS = {
    "first event deleted": "DELETE FROM secure_events WHERE session_row = :visit AND seq = 0",
    "event deleted": "DELETE FROM secure_events WHERE session_row = :visit AND seq = 2",
    "last event deleted": "DELETE FROM secure_events WHERE session_row = :visit AND seq = 3",
    "event of another session": (
        "UPDATE secure_events SET event = (SELECT event FROM secure_events "
        "WHERE session_row = :notes AND seq = 0) WHERE session_row = :visit AND seq = 2"
    ),
    "events swapped": (
        "UPDATE secure_events SET event = (SELECT event FROM secure_events AS other "
        "WHERE other.session_row = :visit AND other.seq = 3 - secure_events.seq) "
        "WHERE session_row = :visit AND seq IN (1, 2)"
    ),
    "time of an event": "UPDATE secure_events SET time = 5 WHERE session_row = :visit AND seq = 1",
}


@pytest.mark.in_turn("size", "attack")
@ORDERS
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
async def test_event_is_rejected_by_the_pages_at_the_latest_by_the_last(
    aes_db: Database, attack: str, size: int, order: Order
) -> None:
    aes_db.run(attack)
    async with aes_db.service() as service:
        events = service.iterate_events(**VISIT._asdict(), page_size=size, order=order)
        with pytest.raises(TamperedError):
            [event async for event in events]


@pytest.mark.parametrize(("order", "limit", "replayed"), [("oldest", 3, 3), ("newest", 1, 2)])
async def test_event_of_another_copy_does_not_join_the_page_before(
    aes_db: Database, tmp_path: Path, order: Order, limit: int, replayed: int
) -> None:
    """The last two events of the other copy are not those of the original."""
    other = written_again(aes_db.older(tmp_path), 1)
    async with aes_db.service() as service:
        names = VISIT._asdict()
        page = await service.list_events_page(**names, limit=limit, order=order)
        other.replay_row("secure_events", f"session_row = :visit AND seq = {replayed}")
        with pytest.raises(TamperedError):
            await service.list_events_page(**names, limit=1, order=order, after=page.next)


@ORDERS
@pytest.mark.parametrize("part", [1, 2])
async def test_error_of_a_modified_position_names_it(
    aes_db: Database, part: int, order: Order
) -> None:
    """A client of an application may modify it, without access to the database."""
    async with aes_db.service() as service:
        page = await service.list_events_page(**VISIT._asdict(), limit=2, order=order)
        assert page.next is not None
        parts = page.next.split(".")
        parts[part] = "3" if part == 1 else "0" * len(parts[part])
        with pytest.raises(TamperedError, match="or `after` was modified"):
            await service.list_events_page(
                **VISIT._asdict(), limit=2, order=order, after=".".join(parts)
            )


async def test_session_that_was_rolled_back_to_the_end_of_a_page_is_rejected(
    aes_db: Database, tmp_path: Path
) -> None:
    async with aes_db.service() as service:
        page = await service.list_events_page(**VISIT._asdict(), limit=2)
    aes_db.older(tmp_path).replay_row("secure_sessions", "id = :visit")
    aes_db.run("DELETE FROM secure_events WHERE session_row = :visit AND seq >= 2")
    async with aes_db.service() as service:
        with pytest.raises(TamperedError):
            await service.list_events_page(**VISIT._asdict(), limit=2, after=page.next)
