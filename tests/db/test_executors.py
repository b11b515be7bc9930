"""What `protocol.Executor` promises, on each kind of executor."""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import sqlalchemy as sa

from adk_secure_sessions.db.protocol import Change, Conflict, Executor, Read, Steps, UniqueViolation
from adk_secure_sessions.errors import DatabaseError
from tests.db.support import (
    ALL,
    INSERT,
    apply,
    applying,
    delete,
    insert,
    on,
    reading_then_applying,
    stored,
    things,
    update,
)

BEFORE = {1: b"old", 2: b"old"}


@pytest.fixture
async def filled(executor: Executor) -> Executor:
    await fill(executor)
    return executor


async def fill(executor: Executor) -> None:
    """Store BEFORE, whatever was stored."""
    await executor.run_sync(lambda connection: connection.execute(sa.delete(things)))
    assert await apply(executor, insert(1, b"old"), insert(2, b"old"))


# --- Apply ---------------------------------------------------------------------------------------

MADE: list[tuple[Sequence[Change], dict[int, bytes]]] = [
    ([insert(3)], {**BEFORE, 3: b"new"}),
    ([update(1)], {**BEFORE, 1: b"changed"}),
    ([update(1, b"old")], BEFORE),  # matched, if not changed
    ([delete(1), insert(3), update(2)], {2: b"changed", 3: b"new"}),
    (
        [update(1), delete(9, must_match_one_row=False), insert(3)],
        {1: b"changed", 2: b"old", 3: b"new"},
    ),
    ([update(1), delete(9, must_match_one_row=False)], {**BEFORE, 1: b"changed"}),
    ([update(1, b"x\0y"), update(2, b"")], {1: b"x\0y", 2: b""}),
]


async def test_changes_that_match_their_rows_are_made(executor: Executor) -> None:
    for changes, after in MADE:
        await fill(executor)
        assert await apply(executor, *changes) is True
        assert await stored(executor) == after, changes


async def test_first_change_that_matches_no_row_is_the_answer_false_and_changes_nothing(
    filled: Executor,
) -> None:
    for changes in (
        [update(9)],
        [delete(9), insert(3), update(1)],
        [update(9), delete(1, must_match_one_row=False)],
        [update(9), insert(1)],  # which is there already, but is not tried
    ):
        assert await apply(filled, *changes) is False
        assert await stored(filled) == BEFORE, changes


def many(*ids: int) -> Change:
    rows = [{"id": one, "value": b"many"} for one in ids]
    return Change(INSERT, {}, must_match_one_row=False, rows=rows)


async def test_rows_of_a_change_are_all_inserted_or_none(filled: Executor) -> None:
    after = {1: b"changed", 2: b"old", **dict.fromkeys(range(3, 300), b"many")}
    assert await apply(filled, update(9), many(3)) is False
    with pytest.raises(UniqueViolation):
        await apply(filled, update(1), many(3, 1, 4))
    with pytest.raises(Conflict):
        await apply(filled, update(1), many(3), update(9))
    assert await stored(filled) == BEFORE
    assert await apply(filled, update(1), many(*range(3, 300))) is True
    assert await stored(filled) == after


async def test_write_with_a_change_that_fails_stores_nothing(filled: Executor) -> None:
    failing = [(change, range(1, 4), Conflict) for change in (update(9), delete(9))]
    for change, positions, error in [*failing, (insert(1), range(4), UniqueViolation)]:
        for position in positions:
            changes = [update(1), insert(3), delete(2)]
            changes.insert(position, change)
            with pytest.raises(error):
                await apply(filled, *changes)
            assert await stored(filled) == BEFORE, changes


@on("asyncpg")
async def test_second_apply_outside_a_transaction_is_a_programming_error(filled: Executor) -> None:
    """asyncpg has committed the first one; the other executors would run both in a transaction."""

    def transaction() -> Steps[None]:
        for number in (1, 2):
            yield from applying(update(number))()

    with pytest.raises(AssertionError):
        await filled.write(transaction)
    await filled.write(transaction, in_one_transaction=True)
    assert await stored(filled) == {1: b"changed", 2: b"changed"}


async def test_transaction_changes_what_it_has_read(filled: Executor) -> None:
    def transaction() -> Steps[list[Any]]:
        rows = yield Read(ALL, {})
        yield from applying(*(update(row[0], row[1] + b"er") for row in rows))()
        return [row[0] for row in rows]

    assert await filled.write(transaction) == [1, 2]
    assert await stored(filled) == {1: b"older", 2: b"older"}


async def test_transaction_may_apply_again_after_the_answer_false(filled: Executor) -> None:
    def transaction() -> Steps[bool]:
        if (yield from applying(update(9), insert(3))()):
            raise AssertionError
        return (yield from applying(update(1))())

    assert await filled.write(transaction) is True
    assert await stored(filled) == {1: b"changed", 2: b"old"}


async def test_transaction_that_raises_before_its_changes_stores_nothing(filled: Executor) -> None:
    def transaction() -> Steps[bool]:
        if (yield Read(ALL, {})):
            raise RuntimeError("the transaction's own")
        return (yield from applying(update(1))())

    with pytest.raises(RuntimeError, match="the transaction's own"):
        await filled.write(transaction)
    assert await stored(filled) == BEFORE
    assert await apply(filled, update(1))  # the connection is usable


# --- errors --------------------------------------------------------------------------------------


async def test_error_of_the_database_is_ours_without_parameters(executor: Executor) -> None:
    secret = 8_812_345
    table = sa.table("nowhere", sa.column("n", sa.BigInteger))
    number = sa.bindparam("n", type_=sa.BigInteger)
    selected = sa.select(table).where(table.c.n == number)
    inserted = sa.insert(table).from_select(["n"], sa.select(number))
    for asked in (
        executor.read(selected, {"n": secret}),
        apply(executor, Change(inserted, {"n": secret})),
    ):
        with pytest.raises(DatabaseError) as info:
            await asked
        assert str(secret) not in str(info.value)
        assert await stored(executor) == {}


# --- run -----------------------------------------------------------------------------------------


def insert_one(connection: sa.Connection) -> str:
    connection.execute(INSERT, {"id": 1, "value": b"x"})
    return "done"


async def test_defined_work_is_stored_if_it_is_to_be_committed(executor: Executor) -> None:
    for commit, after in ((False, {}), (True, {1: b"x"})):
        assert await executor.run_sync(insert_one, commit=commit) == "done"
        assert await stored(executor) == after


async def test_defined_work_that_raises_stores_nothing(executor: Executor) -> None:
    def work(connection: sa.Connection) -> None:
        insert_one(connection)
        raise RuntimeError("the work's own")

    with pytest.raises(RuntimeError, match="the work's own"):
        await executor.run_sync(work)
    assert await stored(executor) == {}
    assert await executor.run_sync(insert_one) == "done"


# --- cancellation --------------------------------------------------------------------------------


async def test_cancelled_write_is_stored_and_reported_or_neither(executor: Executor) -> None:
    """Cancelled after so many turns of the event loop, or a little later."""
    for moment in range(40):
        reported: list[bool] = []
        report = partial(reported.append, True)
        writing = asyncio.ensure_future(
            executor.write(reading_then_applying(insert(moment)), report)
        )
        for _ in range(moment % 20):
            await asyncio.sleep(0.0005 if moment > 20 else 0)
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        assert reported == [True] * (moment in await stored(executor)), moment


async def test_cancelled_read_leaves_the_executor_usable(filled: Executor) -> None:
    for moment in range(20):
        reading = asyncio.ensure_future(stored(filled))
        for _ in range(moment):
            await asyncio.sleep(0)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    assert await asyncio.gather(*(stored(filled) for _ in range(20))) == [BEFORE] * 20


# --- close ---------------------------------------------------------------------------------------


@on("sqlite", "aiosqlite-engine", "asyncpg", "asyncpg-engine", "psycopg", "asyncmy")
async def test_closed_executor_opens_again(executor: Executor) -> None:
    for number in range(3):
        running = [asyncio.create_task(apply(executor, insert(10 * number + n))) for n in range(5)]
        for _ in range(5):  # until they have begun
            await asyncio.sleep(0)
        closing = asyncio.gather(*running, executor.close(), executor.close())
        await asyncio.wait_for(closing, 30)
    assert len(await stored(executor)) == 15
