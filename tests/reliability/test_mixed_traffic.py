"""Applications in several processes while keys are rotated, users erased, sessions purged, copied.

By default for some seconds on SQLite; `make soak` takes five minutes on each database, `make
endurance` as long as the environment variable ENDURANCE_SECONDS says.
"""

import asyncio
import os
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import sqlalchemy as sa
from google.adk.errors.session_not_found_error import SessionNotFoundError
from google.adk.events import Event
from google.adk.sessions import InMemorySessionService

from adk_secure_sessions import EncryptedSessionService
from adk_secure_sessions.maintenance import (
    erase_user,
    purge_sessions,
    retire,
    rotate_data,
    rotate_master,
    rotate_root,
)
from adk_secure_sessions.migration import ServiceSource, migrate
from tests.processes import children
from tests.reliability.results import Record
from tests.reliability.traffic import APP, Checked, check, open_database, open_service, write

SHORT, LONG = 2.0, float(os.environ.get("ENDURANCE_SECONDS", "300"))
PROCESSES, TASKS = 2, 3
MEBIBYTE = 1 << 20
# From the end of the first quarter on, the memory of a process may grow by so much.
MAX_GROWTH = 8 * MEBIBYTE
MAX_MORE_FILES = 9  # three for each thread that begins late, as on a busy machine
Say = Callable[[object], None]


# --- processes that write, and what they take ----------------------------------------------------


def resources() -> tuple[int, int]:
    """Return the bytes of memory and the file descriptors that this process has."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd"))


def write_and_watch(
    say: Say, url: str, directory: str, name: str, incarnation: int, tasks: int, pause: float
) -> None:
    """Like `write`; says at the end which resources it had, four times a second."""
    samples: list[tuple[int, int]] = []
    stop = Path(directory, "stop")

    def watch() -> None:
        while not stop.exists():
            samples.append(resources())
            time.sleep(0.25)

    watching = threading.Thread(target=watch)
    watching.start()
    write(say, url, directory, name, incarnation, tasks, pause)
    watching.join()
    say(samples)


# --- a process that maintains the database -------------------------------------------------------


def maintain(say: Say, url: str, directory: str, pause: float) -> None:
    """A job: rotate, purge, erase and migrate at the same time; says how often each was done."""
    stop, done = Path(directory, "stop"), Counter[str]()

    async def repeat(work: Callable[[int], Awaitable[object]]) -> None:
        number = 0
        while not stop.exists():
            await work(number)
            number += 1
            await asyncio.sleep(pause)

    async def main() -> None:
        async with open_service(url) as service:
            maintenance = Maintenance(url, service, done)
            works = (maintenance.rotate, maintenance.purge, maintenance.erase, maintenance.migrate)
            await asyncio.gather(*map(repeat, works))
        say(dict(done))

    asyncio.run(main())


class Maintenance:
    """One round of each command, with a check that it did what it says."""

    def __init__(self, url: str, service: EncryptedSessionService, done: Counter[str]) -> None:
        self._url, self._service, self._done = url, service, done

    async def rotate(self, number: int) -> None:
        """Replace the root key by the other one, then all master keys and data keys."""
        async with open_database(self._url, first=(number + 1) % 2) as db:
            assert len((await rotate_root(db)).rotated_ids) >= 2
            masters = await rotate_master(db)
            records = await rotate_data(db)
            assert (masters.bad, records.bad) == (0, 0), records.problems
            await retire(db)
        self._done.update(["root keys rotated", "master keys rotated", "data keys rotated"])
        self._done["records re-encrypted"] += records.reencrypted

    async def purge(self, number: int) -> None:
        for n in range(3):
            await self._service.create_session(
                app_name=APP,
                user_id="short-lived",
                session_id=f"{number}.{n}",
                expires_after=timedelta(milliseconds=1),
            )
        await asyncio.sleep(0.01)
        async with open_database(self._url) as db:
            found = await purge_sessions(db)
        assert (found.deleted, found.bad) == (3, 0), found.problems
        self._done["sessions purged"] += found.deleted

    async def erase(self, number: int) -> None:
        """Erase a user whose session is being written at that time."""
        who: dict[str, Any] = {"app_name": APP, "user_id": f"leaving {number}"}
        session = await self._service.create_session(**who, state={"user:name": "Ada"})
        appended = 0

        async def append() -> None:
            nonlocal appended
            while True:
                try:
                    await self._service.append_event(session, Event(author="agent"))
                except SessionNotFoundError:
                    return
                appended += 1

        writing = asyncio.ensure_future(append())
        while not appended:
            await asyncio.sleep(0)
        async with open_database(self._url) as db:
            await erase_user(db, APP, who["user_id"])
        await writing
        assert not (await self._service.list_sessions(**who)).sessions
        self._done["users erased"] += 1

    async def migrate(self, number: int) -> None:
        """Copy sessions from another service, compare all of them, and erase their user."""
        source = InMemorySessionService()
        who: dict[str, Any] = {"app_name": "moved", "user_id": f"user {number}"}
        for _ in range(5):
            session = await source.create_session(**who, state={"k": number})
            for _ in range(3):
                await source.append_event(session, Event(author="agent", invocation_id="i"))
        async with open_database(self._url) as db:
            made = await migrate(ServiceSource(source, app_names=["moved"]), db)
            for session in (await source.list_sessions(**who)).sessions:
                theirs = await source.get_session(**who, session_id=session.id)
                ours = await self._service.get_session(**who, session_id=session.id)
                assert theirs is not None
                assert ours is not None
                assert ours.events == theirs.events
            await erase_user(db, who["app_name"], who["user_id"])
        assert (made.copied, made.bad) == (5, 0), made.findings
        self._done["sessions migrated"] += made.copied


# --- the test ------------------------------------------------------------------------------------


def growth(samples: list[tuple[int, int]]) -> tuple[int, int]:
    """Return by how much memory and files have grown from the second quarter to the last one."""
    quarter = len(samples) // 4
    early, late = samples[quarter : 2 * quarter], samples[-quarter:]
    memory = median(one for one, _ in late) - median(one for one, _ in early)
    return int(memory), max(one for _, one in late) - max(one for _, one in early)


@pytest.mark.no_cover
@pytest.mark.parametrize(
    ("place", "seconds"),
    [
        ("sqlite", SHORT),
        *(
            pytest.param(name, LONG, marks=pytest.mark.soak)
            for name in ("sqlite", "postgresql", "mariadb")
        ),
    ],
    indirect=["place"],
)
def test_traffic_with_all_maintenance_loses_nothing_and_takes_no_more_and_more(
    place: sa.URL, url: str, seconds: float, tmp_path: Path, record: Record
) -> None:
    name = place.get_backend_name()
    directory = tmp_path / "journals"
    directory.mkdir()
    is_short = seconds == SHORT
    pause = 0.05 if is_short else 0.02

    async def begin() -> None:
        async with open_service(url) as service:
            await service.prepare_tables()

    asyncio.run(begin())
    jobs: list[tuple[Any, ...]] = [
        (write_and_watch, url, str(directory), f"p{n}", 0, TASKS, pause) for n in range(PROCESSES)
    ]
    jobs.append((maintain, url, str(directory), 1.0 if is_short else 2.0))
    with children(*jobs) as running:
        began = time.monotonic()
        while time.monotonic() < began + seconds:
            if not all(child.process.is_alive() for child in running):
                break  # it has failed, as it says below
            time.sleep(0.1)
        took = time.monotonic() - began
        (directory / "stop").touch()
        *writers, maintainer = ([*child.said()] for child in running)
    (done,) = maintainer
    checked: Checked = asyncio.run(check(url, sorted(directory.glob("p*"))))
    writes = sum(said[0] for said in writers)
    for said in writers:
        memory, open_files = growth(said[1])
        assert open_files <= MAX_MORE_FILES
        assert is_short or memory <= MAX_GROWTH
    assert (checked.lost, checked.doubled) == (0, 0)
    assert writes > 5 * seconds
    assert min(done.values()) >= 1
    assert len(done) == 7
    if is_short:
        return
    record.fault(
        f"mixed traffic/{name}",
        times=done["root keys rotated"],
        acknowledged=checked.acknowledged,
        lost=checked.lost,
        doubled=checked.doubled,
    )
    for kind, number in done.items():
        record.figure(f"mixed traffic/{name}/{kind}", number)
    record.figure(f"mixed traffic/{name}/duration", took, "s")
    record.figure(f"mixed traffic/{name}/processes", len(jobs))
    first = [said[1][len(said[1]) // 4] for said in writers]
    last = [said[1][-1] for said in writers]
    for moment, samples in (("after a quarter", first), ("at the end", last)):
        record.figure(f"mixed traffic/{name}/memory {moment}", max(one for one, _ in samples), "B")
        record.figure(f"mixed traffic/{name}/files {moment}", max(one for _, one in samples))
