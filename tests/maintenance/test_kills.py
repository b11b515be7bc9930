"""A run that is killed at any statement leaves every row readable, and the next one continues."""

import asyncio
import shutil
import signal
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from adk_secure_sessions import AesGcmBackend, FernetBackend
from adk_secure_sessions.maintenance import (
    Database,
    retire,
    rotate_data,
    rotate_master,
    rotate_root,
    status,
    verify,
)
from tests.maintenance.dying import Statements, dying
from tests.maintenance.support import NEW, OLD, fill, query
from tests.processes import children

# What a process does: the function, the backend that writes, and the others that it reads.
OLD_BACKEND = FernetBackend(OLD)
JOBS: dict[str, tuple[Any, Any, tuple[Any, ...]]] = {
    "root": (rotate_root, FernetBackend(NEW), (OLD_BACKEND,)),
    "master": (rotate_master, OLD_BACKEND, ()),
    "data": (rotate_data, AesGcmBackend(OLD), (OLD_BACKEND,)),
    "retire": (retire, AesGcmBackend(OLD), (OLD_BACKEND,)),
}


def open_database(url: str, job: str) -> Database:
    _, backend, others = JOBS[job]
    return Database(url, backend, others)


def run_and_die(say: Callable[[object], None], url: str, job: str, last: int) -> None:
    """Do it, but die before statement number *last*; say so if there are fewer."""
    db = dying(lambda: open_database(url, job), Statements(last), url)

    async def main() -> None:
        async with db:
            await JOBS[job][0](db)

    asyncio.run(main())
    say("ended")


def killed(url: str, job: str, last: int) -> bool:
    """Run it in a process; whether that was killed before it ended."""
    with children((run_and_die, url, job, last)) as (child,):
        said = list(child.said())
        child.process.join()
        assert child.process.exitcode == (0 if said else -signal.SIGKILL)
    return not said


async def complete(url: str, job: str) -> Any:
    """Check that everything is readable; then have the next run end what this one began."""
    async with open_database(url, job) as db:
        found = await verify(db)
        assert found.bad == found.unchecked == 0, found.problems
        assert (found.users, found.sessions, found.events) == (1, 2, 6)
        if job == "root":
            roots = {one.root_key_id for one in (await status(db)).master_keys}
            assert len(roots) == 1, "rows under both root keys"
        done = await JOBS[job][0](db)
        again = await verify(db)
        assert again == found
        if job == "data":
            assert all(one.rows == one.under_current for one in (await status(db)).records)
    return done


async def prepare(url: str, job: str) -> None:
    await fill(url, OLD_BACKEND, users=("ada",), sessions=2, events=3)
    if job == "retire":
        async with open_database(url, "data") as db:
            await rotate_data(db)
            await rotate_master(db)


@pytest.mark.parametrize(
    ("job", "step"),
    [("data", 17), ("root", 3), *(pytest.param(job, 1, marks=pytest.mark.soak) for job in JOBS)],
)
async def test_run_that_is_killed_at_any_statement_is_completed_by_the_next(
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
        await complete(url, job)
    assert kills > (10 if job == "root" else 60) // step


@pytest.mark.parametrize(
    ("job", "step"),
    [
        ("master", 15),
        ("data", 15),
        pytest.param("retire", 15, marks=pytest.mark.soak),
        ("root", 15),
        *(pytest.param(job, 1, marks=pytest.mark.soak) for job in JOBS),
    ],
)
async def test_run_that_is_killed_again_and_again_is_completed(
    job: str, step: int, url: str, place: sa.URL
) -> None:
    """Each run gets *step* statements further than the one before."""
    await prepare(url, job)
    last = 12
    while killed(url, job, last):
        last += step
    done = await complete(url, job)
    if job in ("master", "data"):
        names = query(place, "SELECT name FROM secure_meta WHERE name LIKE 'rotation%'")
        assert not names
        assert done.left == 0


async def test_run_continues_where_the_one_before_was_killed(tmp_path: Path) -> None:
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
    assert done.created_data_keys == 6 - made
    assert 0 < done.reencrypted < 6 * 2 + 10 * 5
