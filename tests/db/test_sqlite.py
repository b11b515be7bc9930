"""SQLite's threads: transactions share a commit, and each fails or is cancelled by itself.

What every executor promises is tested in `test_executors`.
"""

import asyncio
import gc
import importlib
import math
import os
import shutil
import sqlite3
import stat
import tempfile
import threading
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from adk_secure_sessions.db import sqlite
from adk_secure_sessions.db.protocol import Apply, Change, Read, Steps, with_retries
from adk_secure_sessions.db.sqlite import Job, SqliteExecutor
from adk_secure_sessions.errors import DatabaseError
from tests.processes import results

TABLE = sa.Table("numbers", sa.MetaData(), sa.Column("n", sa.Integer, primary_key=True))
ALL = sa.select(TABLE.c.n).order_by(TABLE.c.n)


@pytest.fixture(params=["file", "memory"])
async def numbers(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[SqliteExecutor]:
    path = None if request.param == "memory" else f"{tmp_path}/numbers.db"
    executor = await opened(sa.URL.create("sqlite", database=path))
    yield executor
    await executor.close()


on_file = pytest.mark.parametrize("numbers", ["file"], indirect=True)


async def opened(url: str | sa.URL, **options: Any) -> SqliteExecutor:
    """An executor on a database with `TABLE`."""
    executor = SqliteExecutor(sa.make_url(url), options)
    await executor.run_sync(TABLE.metadata.create_all)
    return executor


INSERT = sa.insert(TABLE)


def add(number: object) -> Steps[bool]:
    return bool((yield Apply([Change(INSERT, {"n": number})])))


def wait() -> Steps[None]:
    time.sleep(0.2)
    yield from ()


async def stored(executor: SqliteExecutor) -> list[int]:
    return [row[0] for row in await executor.read(ALL, {})]


async def test_failing_transaction_takes_only_itself_back(numbers: SqliteExecutor) -> None:
    def broken() -> Steps[None]:
        yield from add(7)
        raise RuntimeError("no")

    def insert(number: int) -> Awaitable[bool]:
        begun.append(number)
        return numbers.write(partial(add, number))

    begun: list[int] = []
    for first, attempts in ((0, 2), (10, 1)):  # the others are repeated unless they had savepoints
        blocker = asyncio.ensure_future(with_retries(lambda: numbers.write(wait)))
        await asyncio.sleep(0.05)
        work = [with_retries(partial(insert, n)) for n in range(first, first + 5)]
        results = await asyncio.gather(*work, numbers.write(broken), return_exceptions=True)
        assert [type(result) for result in results] == [bool] * 5 + [RuntimeError]
        assert sorted(begun) == sorted([*range(first, first + 5)] * attempts)
        await blocker
        begun.clear()
        numbers._threads[0]._savepoints_until = math.inf
    assert await stored(numbers) == [0, 1, 2, 3, 4, 10, 11, 12, 13, 14]


async def test_transactions_that_queue_up_share_a_commit(tmp_path: Path) -> None:
    statements: list[str] = []

    class Traced(sqlite3.Connection):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.set_trace_callback(statements.append)

    executor = await opened(f"sqlite:///{tmp_path}/numbers.db", connect_args={"factory": Traced})
    statements.clear()
    first = asyncio.ensure_future(executor.write(wait))  # meanwhile the others queue up
    await asyncio.sleep(0.05)
    await asyncio.gather(first, *(executor.write(partial(add, n)) for n in range(50)))
    assert statements.count("COMMIT") == 2  # of the first by itself, and of the 50
    assert sum("INSERT" in statement for statement in statements) == 50
    await executor.close()


async def test_cancelled_as_the_result_arrives_neither_hangs_nor_loses_it(
    numbers: SqliteExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[bool] = []
    ended, delivered = threading.Event(), sqlite._deliver

    def deliver(jobs: list[Job]) -> None:
        delivered(jobs)
        ended.set()

    monkeypatch.setattr(sqlite, "_deliver", deliver)
    task = asyncio.create_task(numbers.write(partial(add, 1), partial(reported.append, True)))
    await asyncio.sleep(0)
    assert ended.wait(5)  # the event loop has the answer, and the task has not seen it
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 5)
    assert reported == [True]
    assert await stored(numbers) == [1]


async def test_tasks_of_one_iteration_share_a_commit(
    numbers: SqliteExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits: list[int] = []
    delivered = sqlite._deliver

    def deliver(jobs: list[Job]) -> None:
        commits.append(len(jobs))
        delivered(jobs)

    monkeypatch.setattr(sqlite, "_deliver", deliver)

    async def add_ten(first: int) -> None:
        for number in range(first, first + 10):
            await numbers.write(partial(add, number))
            time.sleep(0.001)  # releases the GIL, as serializing an event does

    await asyncio.gather(*map(add_ten, range(0, 200, 10)))
    assert commits[-8:] == [20] * 8
    assert await stored(numbers) == list(range(200))


async def test_interrupt_after_a_job_was_queued_is_reported_and_the_job_still_has_its_result(
    numbers: SqliteExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, interrupt, reported = SqliteExecutor._queue, RuntimeError("Ctrl-C"), []

    def interrupted(executor: SqliteExecutor, job: Job) -> None:
        queue(executor, job)
        while not job._taken.locked():
            time.sleep(0.01)
        raise interrupt

    monkeypatch.setattr(SqliteExecutor, "_queue", interrupted)
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    assert await numbers.write(partial(add, 1))
    assert await stored(numbers) == [1]
    assert [context["exception"] for context in reported] == [interrupt] * 2


async def test_errors_and_cancellations_of_a_shared_commit_reach_the_right_tasks(
    numbers: SqliteExecutor,
) -> None:
    released = threading.Event()

    def block() -> Steps[None]:
        released.wait(5)
        yield from ()

    def broken(number: int) -> Steps[None]:
        yield from add(number)
        raise RuntimeError(str(number))

    blocker = asyncio.ensure_future(with_retries(lambda: numbers.write(block)))
    await asyncio.sleep(0.05)
    works = [add if number % 3 else broken for number in range(30)]
    tasks = [
        asyncio.ensure_future(with_retries(partial(numbers.write, partial(work, number))))
        for number, work in enumerate(works)
    ]
    await asyncio.sleep(0.01)
    for task in tasks[::5]:
        task.cancel()
    await asyncio.wait(tasks[::5])
    assert not blocker.done()  # a task that is cancelled before its job began does not wait for it
    released.set()
    await blocker
    results = await asyncio.gather(*tasks, return_exceptions=True)
    for number, result in enumerate(results):
        if number % 5 == 0:
            assert isinstance(result, asyncio.CancelledError)
        elif number % 3 == 0:
            assert repr(result) == f"RuntimeError('{number}')"
        else:
            assert result is True
    assert await stored(numbers) == [n for n in range(30) if n % 3 and n % 5]


@pytest.mark.parametrize("place", ["task", "task without eventfds", "event loop"])
def test_interrupt_leaves_no_other_one_waiting_and_no_open_file(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if place == "task without eventfds":
        monkeypatch.setattr(os, "eventfd", lambda *_: os.close(-1))  # raises OSError
    read_eventfd = os.eventfd_read

    def read_interrupted(eventfd: int) -> None:
        monkeypatch.setattr(os, "eventfd_read", read_eventfd)
        os.eventfd_read(eventfd)
        raise KeyboardInterrupt

    async def interrupted(executor: SqliteExecutor) -> None:
        if place == "event loop":
            monkeypatch.setattr(os, "eventfd_read", read_interrupted)
        await executor.write(partial(add, 10))
        if place != "event loop":
            raise KeyboardInterrupt

    async def main() -> None:
        executor = await opened(f"sqlite:///{tmp_path}/numbers.db")
        blocker = asyncio.ensure_future(executor.write(wait))  # meanwhile the others queue up
        await asyncio.sleep(0.05)
        first = asyncio.ensure_future(interrupted(executor))
        others = [asyncio.ensure_future(executor.write(partial(add, n))) for n in range(3)]
        try:
            await asyncio.sleep(5)
        finally:  # `asyncio.run` cancels this task
            ended = asyncio.gather(blocker, first, *others, return_exceptions=True)
            await asyncio.wait_for(ended, 5)
            rows[:] = await stored(executor)
            await executor.close()

    rows = [-1]
    gc.collect()
    open_files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())
    if place == "event loop":  # what is cancelled before the thread has begun it is not stored
        assert set(rows) <= {0, 1, 2, 10}
    else:
        assert rows == [0, 1, 2, 10]
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= open_files


async def test_task_may_run_the_event_loop_again(
    numbers: SqliteExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asyncio, "_nest_patched", True, raising=False)  # as `nest_asyncio` does
    await stored(numbers)
    loop: Any = asyncio.get_running_loop()
    outer, inner = asyncio.current_task(), asyncio.ensure_future(stored(numbers))
    deadline = time.monotonic() + 5
    asyncio.tasks._leave_task(loop, outer)  # type: ignore[arg-type]
    while not inner.done() and time.monotonic() < deadline:
        loop._run_once()
    asyncio.tasks._enter_task(loop, outer)  # type: ignore[arg-type]
    assert inner.result() == []


def test_call_that_ends_after_its_event_loop_was_closed_keeps_no_memory(tmp_path: Path) -> None:
    executor = asyncio.run(opened(f"sqlite:///{tmp_path}/numbers.db"))
    loop = asyncio.new_event_loop()
    write = loop.create_task(executor.write(wait))
    loop.run_until_complete(asyncio.sleep(0.05))
    loop.close()
    reference = weakref.ref(loop)
    del loop, write
    asyncio.run(executor.close())  # waits for the write
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("collected_by", ["the task", "its own thread"])
async def test_forgotten_executor_ends_its_threads(tmp_path: Path, collected_by: str) -> None:
    executor = await opened(f"sqlite:///{tmp_path}/numbers.db")
    mine = executor._threads.copy()
    await asyncio.sleep(0)  # the last job, which refers to the executor, has woken this task
    while any(one.waiting for one in mine):
        await asyncio.sleep(0)
    vars(executor)["itself"] = executor  # so that only a garbage collection frees it
    del executor
    if collected_by == "the task":
        gc.collect()
    else:  # a thread cannot wait for its own end
        loop, enqueue = asyncio.get_running_loop(), mine[1].queue.put
        await Job(lambda *_: gc.collect(), False, False, loop, sqlite.LoopWaker(loop), enqueue)
    await asyncio.gather(*(asyncio.to_thread(one.thread.join, 5) for one in mine))
    assert [one.thread.is_alive() for one in mine] == [False] * 3


async def test_executor_can_close_while_a_thread_of_another_ends(
    numbers: SqliteExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[Any] = set()

    class Ending:
        @property
        def file(self) -> object:
            threads.discard(self)
            return None

    threads.add(Ending())
    monkeypatch.setattr(sqlite, "_file_threads", threads)
    await numbers.close()
    assert not threads


@on_file
async def test_cancelled_close_forgets_the_file(numbers: SqliteExecutor) -> None:
    blocker = asyncio.ensure_future(numbers.write(wait))
    await asyncio.sleep(0.05)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(numbers.close(), 0.05)
    await blocker
    async with asyncio.timeout(5):
        while numbers._file.opened:
            await asyncio.sleep(0.01)


@on_file
async def test_reader_cannot_write(numbers: SqliteExecutor) -> None:
    await numbers.write(partial(add, 1))
    with pytest.raises(DatabaseError, match="readonly"):
        await numbers.read(INSERT, {"n": 2})


@on_file
async def test_file_is_written_ahead_and_fully_synchronous(numbers: SqliteExecutor) -> None:
    def pragmas() -> Steps[list[object]]:
        names = ("journal_mode", "synchronous")
        rows = []
        for name in names:
            rows += yield Read(sa.text(f"PRAGMA {name}"), {})
        return [value for (value,) in rows]

    assert await numbers.write(pragmas) == ["wal", 2]


# --- files ---------------------------------------------------------------------------------------


def modes(directory: Path) -> dict[str, int]:
    return {file.name: stat.S_IMODE(file.stat().st_mode) for file in directory.iterdir()}


@pytest.mark.parametrize(
    "url",
    [
        "sqlite:///{}/n.db",
        "sqlite:///file:{}/n.db?uri=true",
        "sqlite:///file:{}/n%2Edb?uri=true&cache=private",
        "sqlite:///file://{}/n.db?uri=true",
    ],
)
async def test_new_file_and_its_log_can_be_read_by_their_owner_only(
    tmp_path: Path, url: str
) -> None:
    umask = os.umask(0)
    try:
        executor = await opened(url.format(tmp_path))
        await executor.write(partial(add, 1))
        assert modes(tmp_path) == {"n.db": 0o600, "n.db-wal": 0o600, "n.db-shm": 0o600}
        await executor.close()
    finally:
        os.umask(umask)


async def test_mode_of_an_existing_file_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "n.db").touch()
    (tmp_path / "n.db").chmod(0o640)
    executor = await opened(f"sqlite:///{tmp_path}/n.db")
    await executor.write(partial(add, 1))
    assert set(modes(tmp_path).values()) == {0o640}
    await executor.close()


def use_as_somebody_else(say: Callable[[object], None], path: str) -> None:
    """Read, and try to write, with an account that may not write to the file or its directory."""
    if os.geteuid() == 0:
        importlib.import_module("concurrent.futures.thread")  # Python itself may be root's
        os.setgid(65534)
        os.setuid(65534)

    async def use() -> None:
        executor = SqliteExecutor(sa.URL.create("sqlite", database=path), {})
        try:
            say(await stored(executor))
            names = await executor.run_sync(
                lambda connection: sa.inspect(connection).get_table_names(), commit=False
            )
            say(names)
            await executor.write(partial(add, 99))
        except DatabaseError as error:
            say((error.code, str(error)))
        await executor.close()

    asyncio.run(use())


def write_half_of_a_transaction(path: Path) -> None:
    """Make a file with the numbers 1 to 3000, and a journal: half of the rows are overwritten."""
    original = path.with_name("original.db")
    with closing(sqlite3.connect(original, isolation_level=None)) as connection:
        connection.execute("CREATE TABLE numbers (n INTEGER, filler TEXT)")
        connection.execute("BEGIN")
        rows = [(n, "x" * 1000) for n in range(1, 3001)]
        connection.executemany("INSERT INTO numbers VALUES (?, ?)", rows)
        connection.execute("COMMIT")
        connection.execute("PRAGMA cache_size = 5")
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("UPDATE numbers SET n = 0")
        for ending in ("", "-journal"):
            shutil.copy(f"{original}{ending}", f"{path}{ending}")
        connection.execute("ROLLBACK")
    original.unlink()


@pytest.mark.parametrize("name", ["n.db", "link.db"])
async def test_file_with_half_of_a_transaction_is_not_read(name: str) -> None:
    with tempfile.TemporaryDirectory() as place:  # tmp_path is closed to other accounts
        directory = Path(place)
        write_half_of_a_transaction(directory / "n.db")
        (directory / "link.db").symlink_to(directory / "n.db")
        if name == "link.db":  # the transaction has also switched the write-ahead log on
            with open(directory / "n.db", "r+b") as file:
                file.seek(18)
                file.write(b"\2\2")
        for one in directory.iterdir():
            one.chmod(0o444)
        directory.chmod(0o555)
        ((found,),) = await asyncio.to_thread(
            results, (use_as_somebody_else, str(directory / name))
        )
        directory.chmod(0o755)
    code, message = found
    assert code == "SQLITE_READONLY_ROLLBACK"
    assert "copy the file, and the files beside it" in message


# --- starting threads ----------------------------------------------------------------------------


def alive() -> set[threading.Thread]:
    return {one for one in threading.enumerate() if one.name.startswith("adk-secure-sessions")}


@on_file
async def test_threads_that_were_started_end_if_another_cannot_start(
    numbers: SqliteExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    await numbers.close()
    before, start = alive(), threading.Thread.start

    def fail(thread: threading.Thread) -> None:
        if "reader" in thread.name:
            raise RuntimeError("no more threads")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fail)
    with pytest.raises(RuntimeError, match="no more threads"):
        await numbers.read(ALL, {})
    for thread in alive() - before:
        thread.join(5)
    assert alive() == before
    monkeypatch.undo()
    assert await numbers.read(ALL, {}) == []


@on_file
async def test_write_that_meets_close_after_grouped_writes_leaves_no_threads(
    numbers: SqliteExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = alive() - {one.thread for one in numbers._threads}
    await asyncio.gather(*(numbers.write(partial(add, number)) for number in range(20)))
    assert numbers._threads[0].last_batch_was_group
    write = asyncio.create_task(numbers.write(partial(add, 20)))
    close = asyncio.create_task(numbers.close())
    assert await asyncio.wait_for(write, 10)
    await close
    assert alive() == before
