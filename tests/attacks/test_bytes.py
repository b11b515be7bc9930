"""Sealed values with a byte changed, cut off or added, wherever they are."""

from collections.abc import Callable

import pytest

from adk_secure_sessions import (
    PlaintextRefusedError,
    TamperedError,
    UnknownKeyError,
    WrongKeyError,
)
from tests.attacks.places import (
    BASE,
    DATA_KEYS,
    EVENT,
    EVERYWHERE,
    MASTER_KEYS,
    RECORDS,
    Place,
    by_name,
)
from tests.attacks.support import (
    Database,
    Operation,
    append_delta,
    assert_refused,
    get,
    get_last_three,
    get_no_events,
)
from tests.attacks.world import NOTES

VERSION, BACKEND, BODY = 3, 4, 13  # offsets in a record
NOOP = 3


def refused_with(offset: int, value: int, place: Place) -> type[Exception]:
    """The error for a record whose byte at *offset* has become *value*."""
    if place.table == "secure_keyring":
        return WrongKeyError
    if offset < VERSION:
        return PlaintextRefusedError
    if offset == BACKEND and place.table != "secure_data_keys":
        return PlaintextRefusedError if value == NOOP else UnknownKeyError
    if BACKEND < offset < BODY:
        return UnknownKeyError
    return TamperedError


SHORT = [place for place in RECORDS if place != BASE]


@pytest.mark.parametrize("place", SHORT, ids=by_name)
async def test_record_with_any_one_byte_changed_is_refused(db: Database, place: Place) -> None:
    await assert_every_byte_counts(db, place, get_last_three if place == EVENT else get_no_events)


async def test_base_with_any_one_byte_changed_is_refused(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small one: the ten thousand bytes of a real one say no more, and take long."""
    monkeypatch.setattr("adk_secure_sessions.storage.writes.OVERLAY_LIMIT", 50)
    async with db.service() as service:
        await append_delta(service, db.held(NOTES), {"long-7Qx": "x" * 100})
    small = BASE._replace(where="session_row = :notes", who=NOTES)
    assert len(small.stored(db)) < 400
    await assert_every_byte_counts(db, small, get_no_events)


def offsets(db: Database, stored: bytes) -> list[int]:
    """Every byte; on a server, which has no part in opening it, the header and some others."""
    step = 16 if db.replica else 1
    return [*range(0, BODY, 4 if db.replica else 1), *range(BODY, len(stored), step)]


async def assert_every_byte_counts(db: Database, place: Place, read: Operation) -> None:
    stored = place.stored(db)
    async with db.service() as service:
        before = await read(service, db, place.who)
        for offset in offsets(db, stored):
            for bit in (0x01, 0x80):
                changed = bytearray(stored)
                changed[offset] ^= bit
                place.store(db, bytes(changed))
                with pytest.raises(refused_with(offset, changed[offset], place)):
                    await read(service, db, place.who)
        place.store(db, stored)
        assert await read(service, db, place.who) == before


@pytest.mark.parametrize("place", [*DATA_KEYS, *MASTER_KEYS], ids=by_name)
async def test_wrapped_key_with_any_one_byte_changed_is_refused(
    aes_db: Database, place: Place
) -> None:
    """Keys are opened once for each start: a new service for each byte."""
    stored = place.stored(aes_db)
    for offset in offsets(aes_db, stored):
        changed = bytearray(stored)
        changed[offset] ^= 0x01
        place.store(aes_db, bytes(changed))
        async with aes_db.service() as service:
            with pytest.raises(refused_with(offset, changed[offset], place)):
                await get_no_events(service, aes_db, place.who)
    place.store(aes_db, stored)
    async with aes_db.service() as service:
        assert await get(service, aes_db, place.who) == aes_db.held(place.who)


@pytest.mark.parametrize("place", EVERYWHERE, ids=by_name)
@pytest.mark.parametrize("offset", [BACKEND, 8, -1])
async def test_value_with_a_byte_changed_is_refused_everywhere_and_harms_nobody_else(
    db: Database, place: Place, offset: int
) -> None:
    changed = bytearray(place.stored(db))
    changed[offset] ^= 0x10
    place.store(db, bytes(changed))
    error = refused_with(offset if offset >= 0 else BODY, changed[offset], place)
    await assert_refused(db, place.level, error, who=place.who)


LENGTHS: dict[str, Callable[[bytes], bytes]] = {
    "without its last byte": lambda stored: stored[:-1],
    "without its first byte": lambda stored: stored[1:],
    "cut to half": lambda stored: stored[: len(stored) // 2],
    "cut within the nonce": lambda stored: stored[:20],
    "cut to its header": lambda stored: stored[:BODY],
    "cut within its header": lambda stored: stored[: BODY - 1],
    "cut to its magic": lambda stored: stored[:3],
    "cut to one byte": lambda stored: stored[:1],
    "with a zero at the end": lambda stored: stored + b"\0",
    "with its last byte twice": lambda stored: stored + stored[-1:],
    "with a zero at the start": lambda stored: b"\0" + stored,
    "with a block more": lambda stored: stored + stored[-16:],
    "twice": lambda stored: stored + stored,
    "with the header twice": lambda stored: stored[:BODY] + stored,
    "as hexadecimal text": lambda stored: stored.hex().encode(),
}


@pytest.mark.parametrize("place", EVERYWHERE, ids=by_name)
async def test_value_of_another_length_is_refused(db: Database, place: Place) -> None:
    stored = place.stored(db)
    expected = {TamperedError, PlaintextRefusedError}
    for change in LENGTHS.values():
        place.store(db, change(stored))
        async with db.service() as service:
            with pytest.raises(WrongKeyError if place in MASTER_KEYS else tuple(expected)):
                await get(service, db, place.who)


@pytest.mark.parametrize("place", [*RECORDS, *DATA_KEYS], ids=by_name)
async def test_truncated_record_is_refused(aes_db: Database, place: Place) -> None:
    stored = place.stored(aes_db)
    assert len(stored) > 40
    for keep in range(0, min(len(stored), 60), 4):
        place.store(aes_db, stored[:keep])
        async with aes_db.service() as service:
            with pytest.raises((TamperedError, PlaintextRefusedError)):
                await get(service, aes_db, place.who)
