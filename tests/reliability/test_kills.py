"""Processes that write are killed (SIGKILL): nothing acknowledged is lost, and nothing is doubled.

A killed process gives its memory back, but what it has written stays with the kernel.  So this
tests the library and the database's transactions, not the disk: no test cuts the power.
"""

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import sqlalchemy as sa

from tests.processes import Child
from tests.reliability.results import Record
from tests.reliability.traffic import check, longest_pause, open_service, write
from tests.servers import DRIVERS

PROCESSES, TASKS, PAUSE = 3, 4, 0.005
soak = pytest.mark.soak


def kill_again_and_again(
    url: str, directory: Path, kills: int, jobs: Callable[..., object] = write
) -> list[float]:
    """Run processes that write, kill one after the other, and start it again; return when."""
    chance = random.Random(kills)
    moments: list[float] = []
    with ExitStack() as stack:

        def start(name: str, incarnation: int) -> Child:
            child = Child(jobs, url, str(directory), name, incarnation, TASKS, PAUSE)
            stack.callback(child.close)
            child.go()
            return child

        running = [start(f"p{n}", 0) for n in range(PROCESSES)]
        for kill in range(kills):
            slot, incarnation = kill % PROCESSES, kill // PROCESSES
            victim = running[slot]
            # It dies somewhere in its work, and not while it starts.
            wait_for_lines(directory / f"p{slot}.{incarnation}", chance.randrange(6, 60))
            time.sleep(chance.uniform(0, 0.01))
            victim.process.kill()
            moments.append(time.monotonic())
            assert list(victim.said()) == [], "it had ended before it was killed"
            victim.process.join()
            assert victim.process.exitcode == -signal.SIGKILL
            running[slot] = start(f"p{slot}", incarnation + 1)
        started = Counter(kill % PROCESSES for kill in range(kills))
        for slot in range(PROCESSES):  # after the last kill, too, everybody writes
            wait_for_lines(directory / f"p{slot}.{started[slot]}", 20)
        (directory / "stop").touch()
        for child in running:
            (writes,) = child.said()  # and it has written nothing to stderr
            assert writes > 0
    return moments


def wait_for_lines(path: Path, lines: int) -> None:
    deadline = time.monotonic() + 60
    while not path.exists() or path.read_bytes().count(b"\n") < lines:
        assert time.monotonic() < deadline, "a process that was started again writes nothing"
        time.sleep(0.005)


@pytest.mark.no_cover
@pytest.mark.parametrize(
    ("place", "kills"),
    [
        ("sqlite", 10),
        pytest.param("postgresql", 10, marks=soak),
        *(pytest.param(name, 200, marks=soak) for name in ("sqlite", *DRIVERS)),
    ],
    indirect=["place"],
)
def test_killed_writers_lose_and_double_nothing(
    place: sa.URL, url: str, kills: int, tmp_path: Path, record: Record
) -> None:
    journals_in = tmp_path / "journals"
    journals_in.mkdir()

    async def begin() -> None:
        async with open_service(url) as service:
            await service.prepare_tables()

    asyncio.run(begin())
    moments = kill_again_and_again(url, journals_in, kills)
    journals = sorted(journals_in.glob("p*"))
    checked = asyncio.run(check(url, journals))
    record.fault(
        f"kill -9/{place.get_backend_name()}",
        times=len(moments),
        acknowledged=checked.acknowledged,
        lost=checked.lost,
        doubled=checked.doubled,
        pause=longest_pause(journals, moments),
    )
    assert (checked.lost, checked.doubled) == (0, 0)
    assert checked.acknowledged > 5 * kills
    assert len(moments) == kills
