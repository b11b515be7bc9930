"""Rows and keys are read one after the other: what happens in between does no harm."""

import time
from typing import Any

import pytest

from adk_secure_sessions.maintenance import erase_user, retire, rotate_data, verify
from tests.faults import Point, with_faults
from tests.key_database.support import APP, Pair, count, create, event, find, query


async def fill(pair: Pair) -> None:
    async with pair.service() as service:
        for user in ("ada", "bob", "carol"):
            session = await create(service, user)
            await service.append_event(session, event(n=1))


async def replace_keys(pair: Pair) -> None:
    """Make other data keys, and delete all that there were."""
    async with pair.maintained() as db:
        assert (await rotate_data(db)).left == 0
        assert (await retire(db)).data_keys == 4


def generations(pair: Pair) -> set[int]:
    return {number for (number,) in query(pair.keys, "SELECT generation FROM secure_data_keys")}


READS: dict[str, Any] = {
    "get": find,
    "list": lambda service: service.list_sessions(app_name=APP, user_id="ada"),
    "user state": lambda service: service.get_user_state(app_name=APP, user_id="ada"),
}


@pytest.mark.parametrize("name", READS)
async def test_keys_that_are_replaced_before_the_rows_are_read_are_read_again(
    name: str, files: Pair
) -> None:
    await fill(files)
    service, faults = with_faults(files.service)
    faults.data.before(Point.READ, lambda: replace_keys(files))  # the keys have been read by then
    async with service:
        assert await READS[name](service) is not None
        assert faults.data.counts[Point.READ] == 2
    assert generations(files) == {1}


async def test_keys_that_are_replaced_after_the_rows_are_read_are_read_again(files: Pair) -> None:
    await fill(files)
    service, faults = with_faults(files.service)
    # Listing an app reads the app's keys, the rows, and then the keys of the users.
    faults.keys.before(Point.READ, lambda: replace_keys(files), nth=2)
    async with service:
        assert len((await service.list_sessions(app_name=APP)).sessions) == 3
        assert faults.keys.counts[Point.READ] == 4
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
        await db.keys()
        faults.keys.before(Point.READ, replace_every_second_time, nth=None)
        found = await verify(db)
    assert (found.problems, found.users, found.sessions) == ((), 3, 3)
    assert min(generations(files)) > 4


async def test_verify_raises_no_alarm_if_a_user_is_erased_while_keys_are_checked(
    files: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An hour ago: the owner of a new key may still be about to be written.  There is no other way
    # to an older key, whose time is authenticated.
    now = time.time_ns
    with monkeypatch.context() as clock:
        clock.setattr(time, "time_ns", lambda: now() - 3600 * 10**9)
        await fill(files)

    async def erase_ada() -> None:
        async with files.maintained() as another:
            assert (await erase_user(another, APP, "ada")).users == 1

    db, faults = with_faults(files.maintained)

    def reads_owners_of_keys(step: Any, rows: Any) -> bool:  # the last query of the data
        return str(step.query).startswith("SELECT secure_apps.tag \nFROM secure_apps")

    plan = faults.data.before(Point.READ, erase_ada, when=reads_owners_of_keys)
    async with db:
        assert (await verify(db)).problems == ()
    assert plan.happened


async def test_rotation_keeps_no_key_for_a_user_who_is_erased_meanwhile(files: Pair) -> None:
    """The key is stored in one database, after the user was erased from both."""
    await fill(files)

    async def erase_ada() -> None:
        async with files.maintained() as another:
            assert (await erase_user(another, APP, "ada")).users == 1

    ((ada,),) = query(files.data, "SELECT min(id) FROM secure_users")

    def reads_ada(step: Any, rows: Any) -> bool:
        return "secure_users.state" in str(step.query) and ada in [row[0] for row in rows]

    db, faults = with_faults(files.maintained)
    plan = faults.data.after(Point.READ, erase_ada, when=reads_ada)
    async with db:
        assert (await rotate_data(db)).bad == 0
        assert plan.happened
        assert (await verify(db)).problems == ()
    assert count(files.keys, "secure_data_keys") == 2 * files.owners() == 2 * 3
    async with files.service() as service:
        await create(service)
