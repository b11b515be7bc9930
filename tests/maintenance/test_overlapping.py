"""Rotations, retirements and services that overlap: no record is left under a deleted key."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa

from adk_secure_sessions import (
    AesGcmBackend,
    EncryptedSessionService,
    FernetBackend,
    SecureSessionError,
)
from adk_secure_sessions.formats.events import encode_item
from adk_secure_sessions.maintenance import (
    Database,
    Retirement,
    erase_user,
    lookup,
    retire,
    rotate_data,
    rotate_master,
    status,
)
from adk_secure_sessions.storage.schema import data_keys
from tests.faults import Faults, Point, with_faults
from tests.maintenance.support import APP, OLD, Killed, assert_whole, event, fill, interrupt, query
from tests.servers import DRIVERS, PostgreSQL, Server

AES, FERNET = AesGcmBackend(OLD), FernetBackend(OLD)


def maintained(url: str) -> tuple[Database, Faults]:
    return with_faults(lambda: Database(url, AES))


def of(text: str) -> Callable[[Any, Any], bool]:
    """Queries that contain *text*."""
    return lambda step, answer: text in str(step.query)


async def rotate_until_the_second_session(url: str) -> None:
    """Kill a rotation when the user and the first session are under the new key."""

    def kill(done: int, total: int) -> None:
        if done == 2 + 2 + 3:  # of the app, of the user, of the first session: each with a witness
            raise Killed

    async with Database(url, AES) as db:
        db.limits = db.limits._replace(rows_per_statement=1)
        with pytest.raises(Killed):
            await rotate_data(db, restart=True, progress=kill)


async def rotate_and_retire(another: Database, rotate: Any) -> Retirement:
    """Begin a rotation anew, which is killed as its faults say, and retire keys."""
    async with another:
        with pytest.raises(Killed):
            await rotate(another, restart=True)
        return await retire(another)


async def test_key_that_a_service_may_use_in_place_of_an_older_one_is_kept(url: str) -> None:
    """Two rotations that were killed left three generations; nothing is under the middle one."""
    await fill(url, AES, users=["ada"], sessions=2, events=1)
    async with EncryptedSessionService(url, AES) as service:
        await rotate_until_the_second_session(url)
        found = {}
        async with Database(url, AES) as db:
            for name in ("s0", "s1"):
                (*_, location) = await lookup(db, APP, "ada", name)
                session = await service.get_session(app_name=APP, user_id="ada", session_id=name)
                assert session is not None  # now the service knows the second generation, too
                found[location.row] = session
        await rotate_until_the_second_session(url)
        async with Database(url, AES) as db:
            retired = await retire(db)
        assert [one.references != () for one in retired.kept_keys] == [True, False]
        await service.append_event(found[max(row for row in found if row)], event(9))
    await assert_whole(url, AES)


async def test_master_that_another_rotation_retired_wraps_no_data_key(url: str) -> None:
    await fill(url)
    db, faults = maintained(url)
    wrapped_keys = of("secure_data_keys.wrapped")

    async def rotate_until_the_master_is_made() -> None:
        another, its_faults = maintained(url)
        its_faults.keys.before(Point.READ, Killed(), nth=2, when=wrapped_keys)
        assert (await rotate_and_retire(another, rotate_master)).deleted_master_ids

    # By then the master of the first rotation is stored, and has wrapped nothing.
    # The first read of data keys looks for those that were created later.
    plan = faults.keys.before(Point.READ, rotate_until_the_master_is_made, nth=2, when=wrapped_keys)
    async with db:
        with pytest.raises(SecureSessionError, match="another rotation was started meanwhile"):
            await rotate_master(db)
    assert plan.happened
    await assert_whole(url, AES)
    async with Database(url, AES) as db:
        assert (await rotate_master(db)).left == 0
    await assert_whole(url, AES)


@pytest.mark.parametrize("rotate", [rotate_data, rotate_master])
@pytest.mark.parametrize(
    "nth", [1, 3, *(pytest.param(nth, marks=pytest.mark.soak) for nth in (2, 4, 5))]
)
async def test_rotations_that_are_started_at_once_are_one_rotation(
    rotate: Any, nth: int, file_url: str
) -> None:
    await fill(file_url)
    db, faults = maintained(file_url)
    begun: list[int | None] = []

    async def begin_another() -> None:
        await interrupt(file_url, rotate)
        async with Database(file_url) as another:
            begun.extend(one.since for one in (await status(another)).unfinished)

    faults.data.before(Point.RUN, begin_another, nth=nth)
    async with db:
        done = await rotate(db)
        assert (await status(db)).unfinished == ()
    assert done.left == 0
    assert begun == [done.since]
    await assert_whole(file_url, AES)


async def test_overlapping_rotations_leave_no_record_under_a_retired_data_key(url: str) -> None:
    await fill(url, AES, users=["ada"], sessions=1, events=1)
    db, faults = maintained(url)
    whole_events = of("secure_events.time")

    async def rotate_until_the_events_and_retire() -> None:
        another, its_faults = maintained(url)
        its_faults.data.after(Point.READ, Killed(), when=whole_events)
        await rotate_and_retire(another, rotate_data)

    # Between the read of the events and the write of what they are re-encrypted to.
    plan = faults.data.after(Point.READ, rotate_until_the_events_and_retire, when=whole_events)
    async with db:
        with pytest.raises(SecureSessionError, match="another rotation was started meanwhile"):
            await rotate_data(db)
    assert plan.happened
    await assert_whole(url, AES)


async def test_rotation_that_another_one_has_overtaken_uses_no_retired_key(url: str) -> None:
    await fill(url, AES, users=["ada"], sessions=1, events=1)
    db, faults = maintained(url)

    async def rotate_and_retire_all() -> None:
        async with Database(url, AES) as another:
            assert (await rotate_data(another, restart=True)).succeeded
            assert (await retire(another)).kept == 0

    # Between the choice of the events to re-encrypt and their read.
    plan = faults.data.before(Point.READ, rotate_and_retire_all, when=of("secure_events.time"))
    async with db:
        assert (await rotate_data(db)).left == 0
    assert plan.happened
    await assert_whole(url, AES)


async def test_item_that_a_service_replaces_during_a_rotation_keeps_its_new_content(
    file_url: str,
) -> None:
    old, new, last = (encode_item({"n": n}) for n in range(3))
    service = EncryptedSessionService(file_url, AES)
    version = await service.collections.append((APP, "ada", "c"), old)
    db, faults = maintained(file_url)

    async def append() -> None:
        nonlocal version
        version = await service.collections.append_at(version, (APP, "ada", "c"), last)

    async def replace() -> None:
        nonlocal version
        version = await service.collections.append_at(version, (APP, "ada", "c"), last, {0: new})

    # The service knows no new key, and changes the row of the collection before the rotation does.
    plans = [
        faults.data.after(Point.READ, append, when=of("secure_sessions.expires_at")),
        faults.data.after(Point.READ, replace, when=of("secure_events.time")),
    ]
    async with service, db:
        assert (await rotate_data(db)).left == 0
        found = await service.collections.get((APP, "ada", "c"))
    assert [plan.happened for plan in plans] == [1, 1]
    assert found is not None
    assert found.items == (new, last, last)


@pytest.mark.parametrize("nth", [1, 2])
async def test_rotation_for_another_backend_meanwhile_leaves_records_to_the_next_pass(
    file_url: str, nth: int
) -> None:
    await fill(file_url, AES, users=["ada"], sessions=1, events=1)
    db, faults = with_faults(lambda: Database(file_url, AES, [FERNET]))

    async def rotate_to_fernet() -> None:
        async with Database(file_url, FERNET, [AES]) as another:
            await rotate_data(another)

    # Between the renewal of a key, of the app or of the user, and the re-encryption of the records.
    plan = faults.data.after(Point.WRITE, rotate_to_fernet, nth=nth)
    async with db:
        done = await rotate_data(db)
    assert plan.happened
    assert (done.left, done.bad) == (0, 0)  # a later pass has re-encrypted them
    await assert_whole(file_url, AES)


async def test_key_that_a_rotation_wraps_again_before_it_is_retired_is_deleted(
    url: str, place: sa.URL
) -> None:
    await fill(url, AES, users=["ada"], sessions=1, events=1)
    db, faults = maintained(url)

    async def rotate() -> None:
        async with Database(url, AES) as another:
            assert (await rotate_master(another)).left == 0

    async with db:
        await rotate_data(db)
        plan = faults.data.after(Point.READ, rotate, when=of("secure_events.time"))
        retired = await retire(db)
    assert plan.happened
    assert (retired.deleted_data_keys, retired.kept) == (2, 0)
    assert query(place, "SELECT count(*) FROM secure_data_keys") == [(2,)]
    await assert_whole(url, AES)


async def test_key_of_another_backend_that_is_retired_as_a_service_writes_is_not_used(
    postgresql: Server,
) -> None:
    """Between the read, which finds the key still stored, and the changes."""
    with postgresql.database() as place:
        url = place.set(drivername="postgresql+asyncpg").render_as_string(hide_password=False)

        async def retire_all() -> None:
            async with Database(url, AES, [FERNET]) as db:
                assert (await retire(db)).kept == 0

        await fill(url, FERNET, users=["ada"], sessions=1)
        service, faults = with_faults(lambda: EncryptedSessionService(url, FERNET, [AES]))
        async with service:
            async with Database(url, AES, [FERNET]) as db:
                await rotate_data(db)
            session = await service.get_session(app_name=APP, user_id="ada", session_id="s0")
            assert session is not None
            plan = faults.data.after(Point.READ, retire_all, when=of("secure_data_keys"))
            await service.append_event(session, event(9))
            assert plan.happened
        await assert_whole(url, FERNET, AES)


async def test_rotation_makes_no_key_for_a_user_who_is_erased_meanwhile(
    url: str, place: sa.URL
) -> None:
    await fill(url)
    db, faults = maintained(url)

    async def erase_ada() -> None:
        async with Database(url, AES) as another:
            assert (await erase_user(another, APP, "ada")).users == 1

    ((ada,),) = query(place, "SELECT min(id) FROM secure_users")

    def reads_ada(step: Any, rows: Any) -> bool:
        return "secure_users.state" in str(step.query) and ada in [row[0] for row in rows]

    plan = faults.data.after(Point.READ, erase_ada, when=reads_ada)
    async with db:
        assert (await rotate_data(db)).bad == 0
    assert plan.happened
    assert query(place, "SELECT count(*) FROM secure_data_keys") == [(4,)]  # app and bob, twice
    await assert_whole(url, AES)
    async with EncryptedSessionService(url, AES) as service:
        await service.create_session(app_name=APP, user_id="ada")


async def test_services_store_keys_while_retire_waits_for_a_transaction_of_postgresql(
    postgresql: PostgreSQL,
) -> None:
    with postgresql.database() as place:
        url = place.set(drivername=DRIVERS["postgresql"]).render_as_string(hide_password=False)
        await fill(url, users=["ada"], sessions=1)
        engine = sa.create_engine(place)
        async with Database(url, AES) as db:
            await rotate_master(db)
            with engine.begin() as connection:
                connection.execute(sa.delete(data_keys).where(data_keys.c.id == -1))
                retiring = asyncio.ensure_future(retire(db))
                locks = "SELECT count(*) FROM pg_locks WHERE NOT granted"
                while not query(place, locks)[0][0]:
                    await asyncio.sleep(0.01)
                storing = asyncio.ensure_future(fill(url, users=["bob"], sessions=1))
                stored, _ = await asyncio.wait([storing], timeout=30)
            await storing
            assert stored, "the new key had to wait for the end of the transaction"
            assert len((await retiring).deleted_master_ids) == 1
        engine.dispose()
