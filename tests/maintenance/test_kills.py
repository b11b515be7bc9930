"""A rotation that is killed at any statement leaves every row readable, and the next goes on."""

import asyncio
import os
import shutil
import signal
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from adk_secure_sessions import AesGcmBackend, FernetBackend
from adk_secure_sessions.db.async_engine import AsyncEngineExecutor
from adk_secure_sessions.maintenance import (
    Database,
    retire,
    rotate_data,
    rotate_master,
    rotate_root,
    status,
    verify,
)
from tests.maintenance.support import NEW, OLD, fill, query
from tests.processes import children

# By what a process is to do: the function, what writes from then on, and what is read besides.
OLD_BACKEND = FernetBackend(OLD)
JOBS: dict[str, tuple[Any, Any, tuple[Any, ...]]] = {
    "root": (rotate_root, FernetBackend(NEW), (OLD_BACKEND,)),
    "master": (rotate_master, OLD_BACKEND, ()),
    "data": (rotate_data, AesGcmBackend(OLD), (OLD_BACKEND,)),
    "retire": (retire, AesGcmBackend(OLD), (OLD_BACKEND,)),
}
# So many statements end one run.  On SQLite each of them; on a server, where a transaction that
# lost its client is taken back all the same, some of them.
STEP = {"sqlite": 1, "postgresql": 9, "mariadb": 9}


def open_database(url: str, job: str) -> Database:
    _, backend, others = JOBS[job]
    return Database(url, backend, others)


def run_until(say: Callable[[object], None], url: str, job: str, last: int) -> None:
    """Do it, but for statement number *last*, before which the process is killed."""
    count = 0

    def statement(*_: object) -> None:
        nonlocal count
        count += 1
        if count == last:
            os.kill(os.getpid(), signal.SIGKILL)

    if url.startswith("sqlite"):
        sa.event.listen(
            sa.Engine, "connect", lambda driver, _: driver.set_trace_callback(statement)
        )
    else:
        sa.event.listen(sa.Engine, "before_cursor_execute", statement)
        enter = AsyncEngineExecutor._enter

        def counting(self: AsyncEngineExecutor) -> bool:
            statement()
            return enter(self)

        AsyncEngineExecutor._enter = counting  # type: ignore[method-assign]

    async def main() -> None:
        async with open_database(url, job) as db:
            await JOBS[job][0](db)

    asyncio.run(main())
    say(count)


def killed(url: str, job: str, last: int) -> bool:
    """Whether it was, rather than ended before."""
    with children((run_until, url, job, last)) as (child,):
        said = list(child.said())
        child.process.join()
        assert child.process.exitcode == (0 if said else -signal.SIGKILL)
    return not said


async def end(url: str, job: str) -> Any:
    """Everything is readable; then the next run ends what this one began."""
    async with open_database(url, job) as db:
        found = await verify(db)
        assert found.bad == found.unchecked == 0, found.problems
        assert (found.users, found.sessions, found.events) == (1, 2, 6)
        done = await JOBS[job][0](db)
        again = await verify(db)
        assert again == found
        if job == "data":
            assert all(one.rows == one.newest for one in (await status(db)).records)
    return done


async def prepare(url: str, job: str) -> None:
    await fill(url, OLD_BACKEND, users=("ada",), sessions=2, events=3)
    if job == "retire":
        async with open_database(url, "data") as db:
            await rotate_data(db)
            await rotate_master(db)


@pytest.mark.parametrize(
    ("job", "step"),
    [("data", 5), *(pytest.param(job, 1, marks=pytest.mark.soak) for job in JOBS)],
)
async def test_run_that_is_killed_at_any_statement_is_ended_by_the_next(
    job: str, step: int, tmp_path: Path
) -> None:
    original, copy = tmp_path / "original.db", tmp_path / "copy.db"
    await prepare(f"sqlite:///{original}", job)
    url, kills, at = f"sqlite:///{copy}", 0, 1
    while True:
        for leftover in tmp_path.glob("copy.db*"):
            leftover.unlink()
        shutil.copy(original, copy)
        if not killed(url, job, at):
            break
        kills += 1
        at += step
        await end(url, job)
    assert kills > 10


@pytest.mark.parametrize("job", JOBS)
async def test_run_that_is_killed_again_and_again_comes_to_its_end(
    job: str, url: str, place: sa.URL
) -> None:
    """Each run does a little more than the one before, on what that one left."""
    await prepare(url, job)
    step = STEP[place.get_backend_name()]
    last = 12
    while killed(url, job, last):
        last += step
    done = await end(url, job)
    if job in ("master", "data"):
        names = query(place, "SELECT name FROM secure_meta WHERE name LIKE 'rotation%'")
        assert not names
        assert done.left == 0


async def test_run_goes_on_where_the_one_before_was_killed(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/sessions.db"
    await fill(url, OLD_BACKEND, users=[f"user {n}" for n in range(5)])
    keys = "SELECT count(*) FROM secure_data_keys WHERE backend_id = 1"
    with sqlite3.connect(tmp_path / "sessions.db") as connection:
        last = 20
        while killed(url, "data", last) and connection.execute(keys).fetchone()[0] < 4:
            last += 10
        ((made,),) = connection.execute(keys)
        assert 4 <= made < 6
        started = connection.execute("SELECT value FROM secure_meta WHERE name LIKE 'rotation%'")
        since = int(started.fetchone()[0].split()[0])
    async with open_database(url, "data") as db:
        done = await rotate_data(db)
    assert done.since == since
    assert done.keys == 6 - made
    assert 0 < done.resealed < 6 * 2 + 10 * 5
