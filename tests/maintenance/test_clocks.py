"""Every command ends and tells the truth, whether its clock is ahead of other clocks or behind."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from adk_secure_sessions import AesGcmBackend, EncryptedSessionService, TamperedError
from adk_secure_sessions.keys.data_keys import DataKeyRow, wrap_data_key
from adk_secure_sessions.maintenance import (
    Database,
    erase_user,
    init,
    purge_sessions,
    retire,
    rotate_data,
    rotate_master,
    rotate_root,
    status,
    verify,
)
from tests.clocks import shifted
from tests.maintenance.support import (
    APP,
    NEW,
    OLD,
    ROTATIONS,
    assert_whole,
    event,
    fill,
    interrupt,
    query,
    run_sql,
)

AES, NEXT = AesGcmBackend(OLD), AesGcmBackend(NEW)
DATA_MASTERS = "SELECT id FROM secure_keyring WHERE purpose = 'data'"
WITNESSES = "SELECT * FROM secure_witnesses ORDER BY tag"
PATIENCE = 20.0  # seconds; each case takes less than one
# By how many days the clock is behind or ahead.
each_shift = pytest.mark.parametrize(
    "days", [-400, 400, *(pytest.param(days, marks=pytest.mark.soak) for days in (-2, 2))]
)


def newest_master(place: sa.URL) -> int:
    (row, *_) = query(place, f"{DATA_MASTERS} ORDER BY created_at DESC")
    return int(row[0])


# --- rotations -----------------------------------------------------------------------------------


@each_shift
async def test_master_rotation_ends_with_one_new_master_whatever_its_clock_says(
    days: int, url: str, place: sa.URL
) -> None:
    await fill(url)
    before = query(place, WITNESSES)
    async with Database(url, AES) as db:
        with shifted(days):
            done = await asyncio.wait_for(rotate_master(db), PATIENCE)
        assert (done.resumed, done.rotated, done.left, done.bad) == (False, 3, 0, 0)
        assert len(query(place, DATA_MASTERS)) == 2
        assert newest_master(place) == done.master_id
        again = await asyncio.wait_for(rotate_master(db), PATIENCE)
        assert (again.resumed, again.rotated, again.left) == (False, 3, 0)
        assert newest_master(place) == again.master_id != done.master_id
        assert again.since > done.since
        retired = await retire(db)
        assert (len(retired.deleted_master_ids), retired.kept) == (2, 0)
    assert query(place, DATA_MASTERS) == [(again.master_id,)]
    assert query(place, WITNESSES) == before, "a record was encrypted again"
    await assert_whole(url, AES)


@each_shift
@pytest.mark.parametrize("name", ROTATIONS)
async def test_rotation_that_was_interrupted_is_completed_under_another_clock(
    name: str, days: int, file_url: str
) -> None:
    await fill(file_url)
    with shifted(days):
        await interrupt(file_url, ROTATIONS[name])
    async with Database(file_url, AES) as db:
        (unfinished,) = (await status(db)).unfinished
        done = await asyncio.wait_for(ROTATIONS[name](db), PATIENCE)
        assert (done.resumed, done.since, done.left) == (True, unfinished.since, 0)
        again = await asyncio.wait_for(ROTATIONS[name](db), PATIENCE)
        assert (again.resumed, again.left) == (False, 0)
        assert getattr(again, "rotated", 3) == 3
        assert getattr(again, "created_data_keys", 3) == 3
    await assert_whole(file_url, AES)


@pytest.mark.parametrize("days", [-30, 30])
@pytest.mark.parametrize("name", ROTATIONS)
async def test_service_with_another_clock_does_not_disturb_a_rotation(
    name: str, days: int, file_url: str
) -> None:
    """It creates keys before the rotation and while it runs; those from before are replaced."""
    with shifted(days):
        await fill(file_url, users=["ada"])
    await fill(file_url, users=["bob"], name="t")
    async with Database(file_url, AES) as db, EncryptedSessionService(file_url, AES) as service:

        async def create(user: str) -> None:
            with shifted(days):
                await service.create_session(app_name=APP, user_id=user)

        created: list[asyncio.Future[None]] = []

        def progress(done: int, total: int) -> None:
            if not created:
                created.append(asyncio.ensure_future(create("eve")))

        done = await asyncio.wait_for(ROTATIONS[name](db, progress=progress), PATIENCE)
        await created[0]
        assert done.left == 0
        # If the service's clock is behind, the key of the new user looks old, and is replaced, too.
        assert getattr(done, "created_data_keys", 3) in ((3,) if days > 0 else (3, 4))
        again = await asyncio.wait_for(ROTATIONS[name](db), PATIENCE)
        assert getattr(again, "rotated", 4) == getattr(again, "created_data_keys", 4) == 4
        assert (again.left, (await retire(db)).kept) == (0, 0)
    await assert_whole(file_url, AES)


@pytest.mark.parametrize("name", ROTATIONS)
async def test_authentic_key_of_an_impossible_time_is_named(name: str, file_url: str) -> None:
    """Only somebody who had a master key can have inserted it; no later time can be stored."""
    await fill(file_url)
    async with Database(file_url, AES) as db:
        known = await db.keyring()
        assert known.wrapping_master_id is not None
        ((owner,),) = query(file_url, "SELECT min(tag) FROM secure_users")
        forged = DataKeyRow(1, owner, 99, 1, 2**63 - 1, b"")
        forged = wrap_data_key(forged, known, known.wrapping_master_id, bytes(32))
        columns = ", ".join(f":{field}" for field in forged._fields)
        run_sql(file_url, f"INSERT INTO secure_data_keys VALUES ({columns})", **forged._asdict())
        with pytest.raises(TamperedError, match=r"secure_data_keys row 1: .* delete") as raised:
            await ROTATIONS[name](db)
        assert (raised.value.table, raised.value.row) == ("secure_data_keys", "1")
        run_sql(file_url, "DELETE FROM secure_data_keys WHERE id = 1")
        assert (await ROTATIONS[name](db)).left == 0
    await assert_whole(file_url, AES)


# --- the other commands --------------------------------------------------------------------------


async def erase(db: Database) -> object:
    return replace(await erase_user(db, APP, "ada"), cleared=True)


COMMANDS: dict[str, Callable[[Database], Awaitable[Any]]] = {
    "init": init,
    "verify": verify,
    "retire": retire,
    "rotate_root": rotate_root,
    "erase_user": erase,
}


@pytest.mark.parametrize(
    "days", [400, *(pytest.param(days, marks=pytest.mark.soak) for days in (-400, -2, 2))]
)
@pytest.mark.parametrize("name", COMMANDS)
async def test_command_does_the_same_whatever_its_clock_says(
    name: str, days: int, tmp_path: Path
) -> None:
    results = []
    for shift in (0, days):
        url = f"sqlite+aiosqlite:///{tmp_path}/{shift}.db"
        await fill(url)
        async with Database(url, AES) as db:
            await rotate_data(db)
        with shifted(shift):
            async with Database(url, NEXT, [AES]) as db:
                found = await asyncio.wait_for(COMMANDS[name](db), PATIENCE)
                if name == "rotate_root":
                    found = found.numbers
                results.append(found)
                await verify(db)
        await assert_whole(url, NEXT, AES)
    assert results[0] == results[1]


async def test_purge_tells_the_moment_that_its_clock_led_to(file_url: str) -> None:
    """It can only use its clock; the moment shows a clock that is wrong, also in a dry run."""
    await fill(file_url, users=["ada"])
    async with EncryptedSessionService(file_url, AES) as service:
        session = await service.create_session(app_name=APP, user_id="ada", session_id="new")
        made = event(0)
        made.timestamp = time.time()
        await service.append_event(session, made)
    async with Database(file_url, AES) as db:
        for days, deleted in ((-10_000, 0), (0, 2), (400, 3)):
            with shifted(days):
                at = time.time_ns() // 1000
                found = await purge_sessions(db, timedelta(days=90), dry_run=True)
            assert found.deleted == deleted
            moment = at - timedelta(days=90) // timedelta(microseconds=1)
            assert found.before is not None
            assert moment <= found.before <= moment + 10_000_000
