"""The fault-injecting executor, which tests elsewhere rely on."""

import asyncio
import threading

import pytest
import sqlalchemy as sa

from adk_secure_sessions.db.connect import executors_for
from adk_secure_sessions.db.protocol import (
    Apply,
    Conflict,
    Disconnected,
    Executor,
    Read,
    Steps,
    UniqueViolation,
)
from tests.db.support import (
    ALL,
    Kind,
    apply,
    insert,
    on,
    reading_then_applying,
    stored,
    update,
)
from tests.faults import FaultyExecutor, Point, lost


@pytest.fixture
def faulty(executor: Executor) -> FaultyExecutor:
    return FaultyExecutor(executor)


@on("sqlite", "asyncpg", "asyncmy")
@pytest.mark.parametrize(
    ("point", "error"),
    [
        (Point.READ, lost()),
        (Point.WRITE, lost()),
        (Point.APPLY, lost()),
        (Point.APPLY, Conflict()),
        (Point.APPLY, UniqueViolation()),
        (Point.APPLY, RuntimeError("planned")),
        (Point.APPLY, asyncio.CancelledError()),
    ],
    ids=lambda one: one.name if isinstance(one, Point) else type(one).__name__,
)
async def test_error_before_a_point_of_a_write_is_raised_and_nothing_is_stored(
    faulty: FaultyExecutor, point: Point, error: BaseException
) -> None:
    plan = faulty.before(point, error)
    with pytest.raises(type(error)):
        await faulty.write(reading_then_applying(insert(1)))
    assert plan.happened == 1
    assert await stored(faulty) == {}
    assert await faulty.write(reading_then_applying(insert(1)))  # once only


@on("sqlite", "asyncpg", "asyncmy")
@pytest.mark.parametrize("point", [Point.READ, Point.APPLY, Point.WRITE], ids=lambda p: p.name)
async def test_connection_lost_after_a_point_of_a_write_leaves_what_was_committed(
    faulty: FaultyExecutor, kind: Kind, point: Point
) -> None:
    faulty.after(point, lost())
    with pytest.raises(Disconnected):
        await faulty.write(reading_then_applying(insert(1)))
    committed = point is Point.WRITE or (point is Point.APPLY and kind.commits_each_apply)
    assert await stored(faulty) == ({1: b"new"} if committed else {})


@on("sqlite")
async def test_plan_may_look_at_what_is_asked_and_at_the_answer(faulty: FaultyExecutor) -> None:
    def inserts_seven(step: object, _: object) -> bool:
        return isinstance(step, Apply) and step.changes[0].parameters["id"] == 7

    def finds_seven(step: object, rows: list[tuple[int, bytes]]) -> bool:
        return isinstance(step, Read) and any(row[0] == 7 for row in rows)

    inserted = faulty.before(Point.APPLY, Conflict(), when=inserts_seven)
    assert await apply(faulty, insert(1))
    with pytest.raises(Conflict):
        await apply(faulty, insert(7))
    assert await apply(faulty, insert(7))
    found = faulty.after(Point.READ, Conflict(), when=finds_seven)
    with pytest.raises(Conflict):
        await stored(faulty)
    assert (inserted.happened, found.happened) == (1, 1)


@on("asyncpg", "asyncpg-engine", "psycopg", "asyncmy")
async def test_another_process_changes_a_row_between_the_read_and_the_changes(
    faulty: FaultyExecutor, url: sa.URL
) -> None:
    await apply(faulty, insert(1, b"old"), insert(2, b"old"))
    threads: list[threading.Thread] = []

    async def change_the_row() -> None:
        threads.append(threading.current_thread())
        executor = executors_for(url, None, None, None, {}).data
        assert await apply(executor, update(1, b"theirs"))
        await executor.close()

    faulty.after(Point.READ, change_the_row)

    def transaction() -> Steps[tuple[object, bool]]:
        rows = yield Read(ALL, {})
        made: bool = yield Apply([update(2, b"ours")])
        return rows[0][1], made

    assert await faulty.write(transaction) == (b"old", True)
    assert await stored(faulty) == {1: b"theirs", 2: b"ours"}
    assert threads != [threading.current_thread()]


@on("sqlite", "asyncpg", "asyncmy")
async def test_caller_is_cancelled_at_a_point(faulty: FaultyExecutor) -> None:
    loop = asyncio.get_running_loop()
    reported: list[bool] = []
    writing = asyncio.ensure_future(faulty.write(reading_then_applying(insert(1)), reported.append))
    faulty.before(Point.APPLY, lambda: loop.call_soon_threadsafe(writing.cancel))
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert reported == [True]
    assert await stored(faulty) == {1: b"new"}
