"""Rows and keys are read one after the other: what happens in between does no harm."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from adk_secure_sessions import EncryptedSessionService
from adk_secure_sessions.db.protocol import Executor, Executors
from adk_secure_sessions.maintenance import orphans, retire, rotate_data, verify
from adk_secure_sessions.maintenance.engine import Meter
from adk_secure_sessions.maintenance.problems import Problems
from tests.key_database.support import APP, Pair, create, event, find, query, run_sql

Then = Callable[[int], Awaitable[None]]


class Interrupted:
    """An executor that reads only after *then*, which is told how often it was."""

    def __init__(self, executor: Executor, then: Then) -> None:
        self._executor = executor
        self._then = then
        self.count = 0

    async def read(self, *arguments: Any) -> Any:
        self.count += 1
        await self._then(self.count)
        return await self._executor.read(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)


async def fill(pair: Pair) -> None:
    async with pair.service() as service:
        for user in ("ada", "bob", "carol"):
            session = await create(service, user)
            await service.append_event(session, event(n=1))


async def replace_keys(pair: Pair) -> None:
    """Other data keys, and none of those before."""
    async with pair.maintained() as db:
        assert (await rotate_data(db)).left == 0
        assert (await retire(db)).data_keys == 4


def generations(pair: Pair) -> set[int]:
    return {number for (number,) in query(pair.keys, "SELECT generation FROM secure_data_keys")}


def interrupt(service: EncryptedSessionService, which: str, then: Then) -> Interrupted:
    """Run *then* before reads of the data, or of the keys."""
    executors: Executors = service._store.unit.executors
    inner: Any = Interrupted(getattr(executors, which), then)
    service._store.unit.executors = executors._replace(**{which: inner})
    return inner  # type: ignore[no-any-return]


async def test_keys_that_were_replaced_before_the_rows_are_read_are_read_again(
    files: Pair,
) -> None:
    await fill(files)

    async def then(number: int) -> None:
        if number == 1:
            await replace_keys(files)

    for reading in (
        lambda service: find(service),
        lambda service: service.list_sessions(app_name=APP, user_id="ada"),
        lambda service: service.get_user_state(app_name=APP, user_id="ada"),
    ):
        async with files.service() as service:
            data = interrupt(service, "data", then)
            assert await reading(service) is not None
            assert data.count == 2
    assert generations(files) == {3}


async def test_keys_that_were_replaced_after_the_rows_are_read_are_read_again(
    files: Pair,
) -> None:
    await fill(files)

    async def then(number: int) -> None:
        if number == 2:  # the first is of the app's
            await replace_keys(files)

    async with files.service() as service:
        keys = interrupt(service, "keys", then)
        assert len((await service.list_sessions(app_name=APP)).sessions) == 3
        assert keys.count == 4
    assert generations(files) == {1}


async def test_what_a_process_knows_needs_no_key_database(files: Pair) -> None:
    await fill(files)

    async def gone(number: int) -> None:
        raise OSError("the key database cannot be reached")

    async with files.service() as service:
        session = await find(service)
        assert session is not None
        keys = interrupt(service, "keys", gone)
        await service.append_event(session, event(n=2, **{"user:n": 1, "app:n": 1}))
        await create(service, name="another")
        assert await find(service) is not None
        assert len((await service.list_sessions(app_name=APP, user_id="ada")).sessions) == 2
        assert keys.count == 0
        with pytest.raises(OSError, match="reached"):
            await find(service, "bob")


async def test_verify_raises_no_alarm_where_keys_are_replaced_after_each_row_is_read(
    files: Pair,
) -> None:
    await fill(files)

    async def then(number: int) -> None:
        if number % 2:
            await replace_keys(files)

    async with files.maintained() as db:
        await db.keys()
        inner: Any = Interrupted(db.executors.keys, then)
        db.unit.executors = db.unit.executors._replace(keys=inner)
        found = await verify(db)
    assert (found.problems, found.users, found.sessions) == ((), 3, 3)
    assert min(generations(files)) > 4


async def test_user_erased_while_keys_are_checked_is_no_alarm(files: Pair) -> None:
    await fill(files)
    hour = "UPDATE secure_data_keys SET created_at = created_at - 3600000000"
    run_sql(files.keys, hour)

    async def then(number: int) -> None:
        ((tag,),) = query(files.data, "SELECT tag FROM secure_users ORDER BY id LIMIT 1")
        run_sql(files.keys, "DELETE FROM secure_data_keys WHERE owner = :tag", tag=tag)
        run_sql(files.data, "DELETE FROM secure_users WHERE tag = :tag", tag=tag)

    problems = Problems()
    async with files.maintained() as db:
        inner: Any = Interrupted(db.executors.data, then)
        db.unit.executors = db.unit.executors._replace(data=inner)
        await orphans.find_data_keys(db, problems, Meter(None, 0, None))
    assert (problems.count, inner.count) == (0, 1)
