"""Encrypted values with a byte modified, removed or added, in every kind of cell."""

from collections.abc import Callable
from contextlib import AsyncExitStack

import pytest

from adk_secure_sessions import PlaintextRefusedError, TamperedError, UnknownKeyError, WrongKeyError
from tests.attacks.cells import (
    DATA_KEYS,
    EVENT,
    EVERY_CELL,
    MASTER_KEYS,
    RECORDS,
    SNAPSHOT,
    Cell,
    by_name,
)
from tests.attacks.databases import also_on
from tests.attacks.support import (
    Database,
    Operation,
    assert_rejected,
    get,
    get_last_three,
    get_no_events,
)

VERSION, BACKEND, BODY = 3, 4, 13  # offsets in a record
NOOP = 3


def error_for(offset: int, value: int, cell: Cell) -> type[Exception]:
    """The error for a record whose byte at *offset* has become *value*."""
    if cell.table == "secure_keyring":
        return WrongKeyError
    if offset < VERSION:
        return PlaintextRefusedError
    if offset == BACKEND and cell.table != "secure_data_keys":
        return PlaintextRefusedError if value == NOOP else UnknownKeyError
    if BACKEND < offset < BODY:
        return UnknownKeyError
    return TamperedError


SHORT = [cell for cell in RECORDS if cell != SNAPSHOT]


@also_on("fernet", "postgresql", cases=["event"])
@pytest.mark.parametrize("cell", SHORT, ids=by_name)
async def test_record_with_any_one_byte_modified_is_rejected(db: Database, cell: Cell) -> None:
    await assert_every_byte_is_authenticated(
        db, cell, get_last_three if cell == EVENT else get_no_events
    )


def offsets(db: Database, stored: bytes) -> list[int]:
    """Every byte; on a server, which plays no part in decryption, the header and some others."""
    step = 16 if db.replica else 1
    return [*range(0, BODY, 4 if db.replica else 1), *range(BODY, len(stored), step)]


async def assert_every_byte_is_authenticated(db: Database, cell: Cell, read: Operation) -> None:
    stored = cell.stored(db)
    async with db.service() as service:
        before = await read(service, db, cell.who)
        for offset in offsets(db, stored):
            changed = bytearray(stored)
            changed[offset] ^= 0x01 if offset < BODY else 1 << offset % 8
            cell.store(db, bytes(changed))
            with pytest.raises(error_for(offset, changed[offset], cell)):
                await read(service, db, cell.who)
        cell.store(db, stored)
        assert await read(service, db, cell.who) == before


@also_on("postgresql", cases=["data master"])
@pytest.mark.parametrize("cell", [*DATA_KEYS, *MASTER_KEYS], ids=by_name)
@pytest.mark.parametrize("third", [0, *(pytest.param(n, marks=pytest.mark.soak) for n in (1, 2))])
async def test_wrapped_key_with_any_one_byte_modified_is_rejected(
    aes_db: Database, cell: Cell, third: int
) -> None:
    """Keys are unwrapped when a service starts: a new service for each byte of every three."""
    stored = cell.stored(aes_db)
    for offset in offsets(aes_db, stored)[third::3]:
        changed = bytearray(stored)
        changed[offset] ^= 0x01
        cell.store(aes_db, bytes(changed))
        async with aes_db.service() as service:
            with pytest.raises(error_for(offset, changed[offset], cell)):
                await get_no_events(service, aes_db, cell.who)
    cell.store(aes_db, stored)
    async with aes_db.service() as service:
        assert await get(service, aes_db, cell.who) == aes_db.session(cell.who)


@pytest.mark.in_turn("cell", "offset")
@also_on("fernet", "postgresql", cases=["8-event", "8-user's data key"])
@pytest.mark.parametrize("cell", EVERY_CELL, ids=by_name)
@pytest.mark.parametrize("offset", [BACKEND, 8, -1])
async def test_value_with_a_byte_modified_is_rejected_by_every_operation_and_affects_nobody_else(
    db: Database, cell: Cell, offset: int
) -> None:
    changed = bytearray(cell.stored(db))
    changed[offset] ^= 0x10
    cell.store(db, bytes(changed))
    error = error_for(offset if offset >= 0 else BODY, changed[offset], cell)
    await assert_rejected(db, cell.impact, error, who=cell.who)


LENGTHS: dict[str, Callable[[bytes], bytes]] = {
    "without its last byte": lambda stored: stored[:-1],
    "without its first byte": lambda stored: stored[1:],
    "cut to half": lambda stored: stored[: len(stored) // 2],
    "cut to its header": lambda stored: stored[:BODY],
    "cut within its header": lambda stored: stored[: BODY - 1],
    "cut to its magic": lambda stored: stored[:3],
    "cut to one byte": lambda stored: stored[:1],
    **{
        f"cut to {length} bytes": lambda stored, length=length: stored[:length]  # type: ignore[misc]
        for length in range(0, 60, 10)
    },
    "with a zero at the end": lambda stored: stored + b"\0",
    "with its last byte twice": lambda stored: stored + stored[-1:],
    "with a zero at the start": lambda stored: b"\0" + stored,
    "with a block more": lambda stored: stored + stored[-16:],
    "twice": lambda stored: stored + stored,
    "with the header twice": lambda stored: stored[:BODY] + stored,
    "as hexadecimal text": lambda stored: stored.hex().encode(),
}


@also_on("fernet", "packed", "postgresql", cases=["event"])
@pytest.mark.parametrize("cell", EVERY_CELL, ids=by_name)
async def test_value_of_another_length_is_rejected(db: Database, cell: Cell) -> None:
    stored = cell.stored(db)
    assert len(stored) > 40
    expected = (WrongKeyError,) if cell in MASTER_KEYS else (TamperedError, PlaintextRefusedError)
    async with AsyncExitStack() as stack:
        service = await stack.enter_async_context(db.service())
        # Keys are unwrapped when a service starts: a new service for every fourth length.
        for change in [*LENGTHS.values()][:: 1 if cell in RECORDS else 4]:
            if (changed := change(stored)) == stored:
                continue  # it is shorter than that
            cell.store(db, changed)
            if cell not in RECORDS:
                service = await stack.enter_async_context(db.service())
            with pytest.raises(expected):
                await get(service, db, cell.who)
        cell.store(db, stored)
        if cell not in RECORDS:
            service = await stack.enter_async_context(db.service())
        assert await get(service, db, cell.who) == db.session(cell.who)
