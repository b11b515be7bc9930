"""Rows and keys are read one after the other: what happens in between does no harm."""

import time
from functools import partial
from typing import Any

import pytest

from adk_secure_sessions.formats.records import build_header, parse_header
from adk_secure_sessions.maintenance import (
    erase_user,
    retire,
    rotate_data,
    rotate_master,
    status,
    verify,
)
from tests.faults import Point, with_faults
from tests.key_database.support import (
    KEY,
    Pair,
    count,
    create,
    find,
    make_ada_with_spare_keys,
    store_only_keys,
)
from tests.maintenance.support import APP, event, query, run_sql


async def fill(pair: Pair) -> None:
    async with pair.service() as service:
        for user in ("ada", "bob", "carol"):
            session = await create(service, user)
            await service.append_event(session, event(n=1))


async def replace_keys(pair: Pair) -> None:
    """Make other data keys, and delete all that there were."""
    async with pair.maintained() as db:
        assert (await rotate_data(db)).left == 0
        assert (await retire(db)).deleted_data_keys == 4


def generations(pair: Pair) -> set[int]:
    return {number for (number,) in query(pair.keys, "SELECT generation FROM secure_data_keys")}


READS: dict[str, Any] = {
    "get": find,
    "list": lambda service: service.list_sessions(app_name=APP, user_id="ada"),
    "list, skip": lambda service: service.list_sessions(app_name=APP, user_id="ada"),
    "user state": lambda service: service.get_user_state(app_name=APP, user_id="ada"),
}


@pytest.mark.parametrize("name", READS)
async def test_keys_that_are_replaced_before_the_rows_are_read_are_read_again(
    name: str, files: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    await fill(files)
    skip = "skip" in name
    service, faults = with_faults(partial(files.service, skip_unreadable_sessions=skip))
    faults.data.before(Point.READ, lambda: replace_keys(files))  # the keys have been read by then
    async with service:
        found = await READS[name](service)
        assert found is not None
        assert len(getattr(found, "sessions", [""])) == 1
        assert faults.data.counts[Point.READ] == 2
    assert "left out" not in caplog.text
    assert generations(files) == {1}


@pytest.mark.parametrize("skip", [False, True])
async def test_keys_that_are_replaced_after_the_rows_are_read_are_read_again(
    skip: bool, files: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    await fill(files)
    service, faults = with_faults(partial(files.service, skip_unreadable_sessions=skip))
    # Listing an app reads the app's keys, the rows, and then the keys of the users.
    faults.keys.before(Point.READ, lambda: replace_keys(files), nth=2)
    async with service:
        assert len((await service.list_sessions(app_name=APP)).sessions) == 3
        assert faults.keys.counts[Point.READ] == 4
    assert "left out" not in caplog.text
    assert generations(files) == {1}


async def test_operations_on_known_users_need_no_key_database(files: Pair) -> None:
    await fill(files)
    service, faults = with_faults(files.service)
    async with service:
        session = await find(service)
        assert session is not None
        unreachable = OSError("the key database cannot be reached")
        plan = faults.keys.before(Point.READ, unreachable, nth=None)
        await service.append_event(session, event(n=2, **{"user:n": 1, "app:n": 1}))
        await create(service, name="another")
        assert await find(service) is not None
        assert len((await service.list_sessions(app_name=APP, user_id="ada")).sessions) == 2
        assert plan.happened == 0
        with pytest.raises(OSError, match="reached"):
            await find(service, "bob")


async def test_verify_raises_no_alarm_if_keys_are_replaced_after_each_row_is_read(
    files: Pair,
) -> None:
    await fill(files)
    db, faults = with_faults(files.maintained)
    reads = 0

    async def replace_every_second_time() -> None:  # the other reads are those that try again
        nonlocal reads
        reads += 1
        if reads % 2:
            await replace_keys(files)

    async with db:
        await db.keyring()
        faults.keys.before(Point.READ, replace_every_second_time, nth=None)
        found = await verify(db)
    assert (found.problems, found.users, found.sessions) == ((), 3, 3)
    assert min(generations(files)) > 4


async def erase_ada(files: Pair) -> None:
    async with files.maintained() as another:
        assert (await erase_user(another, APP, "ada")).users == 1


async def test_verify_raises_no_alarm_if_a_user_is_erased_while_keys_are_checked(
    files: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An hour ago: the owner of a new key may still be about to be written.  There is no other way
    # to an older key, whose time is authenticated.
    now = time.time_ns
    with monkeypatch.context() as clock:
        clock.setattr(time, "time_ns", lambda: now() - 3600 * 10**9)
        await fill(files)

    db, faults = with_faults(files.maintained)

    def reads_owners_of_keys(step: Any, rows: Any) -> bool:  # the last query of the data
        return str(step.query).startswith("SELECT secure_apps.tag \nFROM secure_apps")

    plan = faults.data.before(Point.READ, partial(erase_ada, files), when=reads_owners_of_keys)
    async with db:
        assert (await verify(db)).problems == ()
    assert plan.happened


async def test_rotation_keeps_no_key_for_a_user_who_is_erased_meanwhile(files: Pair) -> None:
    """The key is stored in one database, after the user was erased from both."""
    await fill(files)

    ((ada,),) = query(files.data, "SELECT min(id) FROM secure_users")

    def reads_ada(step: Any, rows: Any) -> bool:
        return "secure_users.state" in str(step.query) and ada in [row[0] for row in rows]

    db, faults = with_faults(files.maintained)
    plan = faults.data.after(Point.READ, partial(erase_ada, files), when=reads_ada)
    async with db:
        assert (await rotate_data(db)).bad == 0
        assert plan.happened
        assert (await verify(db)).problems == ()
    assert count(files.keys, "secure_data_keys") == 2 * files.owners() == 2 * 3
    async with files.service() as service:
        await create(service)


def keys_by_generation(pair: Pair) -> list[int]:
    return [key for (key,) in query(pair.keys, _BY_GENERATION)]


_BY_GENERATION = """
    SELECT id FROM secure_data_keys WHERE owner IN (
        SELECT owner FROM secure_data_keys WHERE generation > 0
    ) ORDER BY generation
"""


def keys_of_records(pair: Pair) -> set[int]:
    """The keys that the headers of all sessions and events name."""
    tables = {"secure_sessions": "state", "secure_events": "event"}
    rows = [
        row for table in tables for row in query(pair.data, f"SELECT {tables[table]} FROM {table}")
    ]
    return {parse_header(record)[1] for (record,) in rows}


@pytest.mark.parametrize("key", [KEY, None], ids=["with a key", "without a key"])
async def test_spare_key_makes_no_record_count_as_old(key: bytes | None, files: Pair) -> None:
    await make_ada_with_spare_keys(files)
    async with files.maintained(key) as db:
        found = await status(db)
    assert all(one.under_current == one.rows for one in found.records)
    assert found.spare_keys == 2


async def test_retire_leaves_spare_keys_and_does_not_count_them_as_kept(files: Pair) -> None:
    await make_ada_with_spare_keys(files)
    async with files.maintained() as db:
        retired = await retire(db)
    assert (retired.deleted_data_keys, retired.kept, retired.spare_keys) == (0, 0, 2)
    assert len(keys_by_generation(files)) == 3


async def test_spare_key_encrypts_nothing(files: Pair) -> None:
    await make_ada_with_spare_keys(files)
    async with files.service() as service:
        session = await find(service)
        assert session is not None
        await service.append_event(session, event(n=1, **{"user:n": 1}))
        await create(service, name="another")
    first, *spare = keys_by_generation(files)
    assert first in keys_of_records(files)
    assert not keys_of_records(files) & set(spare)


async def test_next_rotation_makes_spare_keys_ordinary_unused_keys(files: Pair) -> None:
    await make_ada_with_spare_keys(files)
    async with files.maintained() as db:
        assert (await rotate_data(db)).left == 0
        assert (await status(db)).spare_keys == 0
        retired = await retire(db)
        assert (retired.deleted_data_keys, retired.kept, retired.spare_keys) == (5, 0, 0)
        assert (await verify(db)).problems == ()


async def test_key_that_a_record_names_is_no_spare(files: Pair) -> None:
    """Somebody wrote it into the header of a session, which cannot be decrypted any more."""
    await make_ada_with_spare_keys(files)
    spare = build_header(1, keys_by_generation(files)[-1])
    run_sql(files.data, "UPDATE secure_sessions SET state = :record", record=spare + bytes(64))
    async with files.maintained(None) as db:
        assert (await status(db)).spare_keys == 1


async def test_key_that_a_rotation_wraps_again_before_it_is_retired_is_deleted(files: Pair) -> None:
    await fill(files)
    db, faults = with_faults(files.maintained)

    async def rotate() -> None:
        async with files.maintained() as another:
            assert (await rotate_master(another)).left == 0

    async with db:
        assert (await rotate_data(db)).left == 0
        events = "secure_events.time"
        plan = faults.data.after(Point.READ, rotate, when=lambda step, _: events in str(step.query))
        assert (await retire(db)).deleted_data_keys == 4
    assert plan.happened
    assert count(files.keys, "secure_data_keys") == 4


async def test_row_that_is_not_authentic_names_no_key_to_retire(files: Pair) -> None:
    await make_ada_with_spare_keys(files)
    of_users = "tag IN (SELECT tag FROM secure_users)"
    run_sql(files.data, f"UPDATE secure_witnesses SET seal = substr(seal, 1, 40) WHERE {of_users}")
    async with files.maintained() as db:
        assert (await retire(db)).kept == 2


async def test_keys_of_a_user_who_was_never_stored_are_left_alone(files: Pair) -> None:
    async with files.service() as service:
        await create(service, "bob")
    await store_only_keys(files, "ada")
    async with files.maintained() as db:
        retired = await retire(db)
    assert (retired.deleted_data_keys, retired.kept) == (0, 0)
    assert len(keys_by_generation(files)) == 2
