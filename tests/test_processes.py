"""Several processes on one database, killed processes, forked ones, and services left open."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from google.adk.events import Event, EventActions
from google.adk.memory.memory_entry import MemoryEntry
from google.adk.sessions import Session
from google.genai import types

from adk_secure_sessions import (
    AesGcmBackend,
    ConfigurationError,
    EncryptedMemoryService,
    EncryptedSessionService,
)
from adk_secure_sessions.db import sqlite
from adk_secure_sessions.integrations import adk
from adk_secure_sessions.integrations.memory_index import UserMemory
from tests.key_database.support import count
from tests.processes import FORKS, IMPORTED_ONCE, results, say_imported
from tests.servers import DRIVERS

pytestmark = pytest.mark.no_tables  # processes also create them at once
KEY = bytes(range(32))
APP, USER = "app", "user"

Say = Callable[[object], None]  # sends an object to the test


def open_service(url: str) -> EncryptedSessionService:
    return EncryptedSessionService(url, AesGcmBackend(KEY))


def event(**delta: object) -> Event:
    return Event(author="agent", invocation_id="i", actions=EventActions(state_delta=delta))


async def found(service: EncryptedSessionService, session_id: str) -> Session:
    session = await service.get_session(app_name=APP, user_id=USER, session_id=session_id)
    assert session is not None
    return session


on_mariadb_later = pytest.mark.parametrize(
    "place",
    ["sqlite", "postgresql", pytest.param("mariadb", marks=pytest.mark.soak)],
    indirect=True,
)


async def append_to_shared(service: EncryptedSessionService, **delta: object) -> None:
    while True:
        session = await found(service, "shared")
        try:
            await service.append_event(session, event(**delta))
            return
        except ValueError as error:
            if "modified in storage" not in str(error):
                raise


def append_to_shared_and_own(say: Say, url: str, name: str) -> None:
    async def task(service: EncryptedSessionService, own: Session, *numbers: int) -> None:
        for n in numbers:
            delta = {f"{name}-{n}": n, f"user:{name}-{n}": n}
            await append_to_shared(service, **delta)
            await service.append_event(own, event(**{f"user:{name}": 1, f"app:{name}-{n}": n}))

    async def main() -> None:
        async with open_service(url) as service:
            own = await service.create_session(app_name=APP, user_id=USER, session_id=name)
            await asyncio.gather(
                task(service, own, 0, 1), task(service, own, 2, 3), task(service, own, 4)
            )

    asyncio.run(main())


@pytest.mark.skipif(not FORKS, reason="children are not forked here")
def test_children_are_forked_from_a_process_that_has_imported_adk() -> None:
    assert results((say_imported,)) == [[IMPORTED_ONCE]]


@on_mariadb_later
async def test_processes_appending_at_once_lose_no_event_and_no_state(url: str) -> None:
    names = [f"p{n}" for n in range(4)]
    async with open_service(url) as service:
        await service.create_session(app_name=APP, user_id=USER, session_id="shared")
        jobs = [(append_to_shared_and_own, url, name) for name in names]
        await asyncio.to_thread(results, *jobs)
        stored = await found(service, "shared")
        keys = sorted(min(event.actions.state_delta) for event in stored.events)
        assert keys == sorted(f"{name}-{n}" for name in names for n in range(5))
        assert stored.state == (
            {f"{name}-{n}": n for name in names for n in range(5)}
            | {f"app:{name}-{n}": n for name in names for n in range(5)}
            | {f"user:{name}-{n}": n for name in names for n in range(5)}
            | {f"user:{name}": 1 for name in names}
        )
        for name in names:
            assert len((await found(service, name)).events) == 5


def create_twenty(say: Say, url: str, name: str) -> None:
    async def main() -> None:
        async with open_service(url) as s:
            await asyncio.gather(
                *(
                    s.create_session(
                        app_name=APP, user_id=USER, session_id=f"{name}-{n}", state={"n": n}
                    )
                    for n in range(20)
                )
            )

    asyncio.run(main())


@on_mariadb_later
async def test_processes_starting_at_once_agree_on_one_keyring_and_one_data_key(
    url: str, place: sa.URL
) -> None:
    await asyncio.to_thread(results, *((create_twenty, url, f"p{n}") for n in range(4)))
    async with open_service(url) as service:
        listed = await service.list_sessions(app_name=APP, user_id=USER)
        assert sorted(session.id for session in listed.sessions) == sorted(
            f"p{p}-{n}" for p in range(4) for n in range(20)
        )
    assert count(place, "secure_keyring") == 2  # data and index
    assert count(place, "secure_data_keys") == 2  # one of the app, one of the user
    assert count(place, "secure_users") == count(place, "secure_apps") == 1


UNCLOSED = {
    "ended loop": "kept = asyncio.run(main())",
    "loop left open": """
        loop = asyncio.new_event_loop()
        kept = loop.run_until_complete(main())
    """,
    "thread": """
        import threading
        thread = threading.Thread(target=lambda: asyncio.run(main()))
        thread.start()
        thread.join()
    """,
}


def run_unclosed(how: str, *urls: str) -> tuple[int, str, str]:
    """Leave services open in a new interpreter; return its exit status and its output."""
    script = """
    import asyncio, sys
    from google.adk.events import Event
    from adk_secure_sessions import AesGcmBackend, EncryptedSessionService
    async def main():
        return [await use(url) for url in sys.argv[1:]]
    async def use(url):
        s = EncryptedSessionService(url, AesGcmBackend(bytes(32)))
        session = await s.create_session(app_name="app", user_id="user")
        await asyncio.gather(*(s.append_event(session, Event(author="a")) for n in range(3)))
        return s
    """
    source = textwrap.dedent(script) + textwrap.dedent(UNCLOSED[how]) + "\nprint('done')\n"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", source, *urls],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    "place", ["postgresql", pytest.param("mariadb", marks=pytest.mark.soak)], indirect=True
)
@pytest.mark.parametrize(
    "how",
    [
        "loop left open",  # the hardest
        pytest.param("ended loop", marks=pytest.mark.soak),
        pytest.param("thread", marks=pytest.mark.soak),
    ],
)
def test_services_that_were_never_closed_let_the_process_end(
    url: str, how: str, tmp_path: Path
) -> None:
    """On a server, on a file and in memory: a new interpreter for each would take seconds more."""
    file = f"sqlite+aiosqlite:///{tmp_path}/sessions.db"
    assert run_unclosed(how, url, file, ":memory:") == (0, "done\n", "")


def forked(job: Callable[[], object]) -> int:
    """Fork this process, whatever is open, and run *job* in the child; return its number."""
    child = os.fork()
    if child == 0:
        try:
            job()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return child


def ended(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


async def append_to(service: EncryptedSessionService, session_id: str, times: int = 1) -> int:
    """Append *times* events to a session, perhaps a new one; return how many it has then."""
    if await service.get_session(app_name=APP, user_id=USER, session_id=session_id) is None:
        await service.create_session(app_name=APP, user_id=USER, session_id=session_id)
    for n in range(times):
        await service.append_event(await found(service, session_id), event(n=n))
    return len((await found(service, session_id)).events)


def fork_while_connected(say: Say, url: str) -> None:
    service = open_service(url)

    def child(name: str) -> None:
        assert asyncio.run(append_to(service, name, 3)) == 3
        gc.collect()
        assert asyncio.run(append_to(service, name, 3)) == 6

    with asyncio.Runner() as runner:
        assert runner.run(append_to(service, "parent", 3)) == 3
        children = [forked(partial(child, f"c{n}")) for n in range(3)]
        assert runner.run(append_to(service, "parent", 3)) == 6
        assert [ended(child) for child in children] == [0, 0, 0]
        gc.collect()
        say(runner.run(append_to(service, "parent", 3)))


def close_in_the_parent_while_a_fork_writes(say: Say, url: str) -> None:
    """The last connection of the parent must not delete the write-ahead log of the child."""
    service = open_service(url)
    asyncio.run(append_to(service, "s"))
    (stored, say_stored), (closed, say_closed) = os.pipe(), os.pipe()

    def child() -> None:
        assert asyncio.run(append_to(service, "s")) == 2
        os.write(say_stored, b"1")
        os.read(closed, 1)
        assert asyncio.run(append_to(service, "s")) == 3

    started = forked(child)
    os.read(stored, 1)
    asyncio.run(service.close())
    os.write(say_closed, b"1")
    assert ended(started) == 0
    say(asyncio.run(append_to(service, "s")))


def fork_while_a_thread_writes(say: Say, url: str) -> None:
    """The child can use the file if the fork had to wait for a short time only."""
    service = open_service(url)
    asyncio.run(service.prepare_tables())
    for timeout, rejects in ((5.0, False), (0.1, True)):
        sqlite._FORK_TIMEOUT = timeout
        begun = threading.Event()

        def write(_: sa.Connection, begun: threading.Event = begun) -> None:
            begun.set()
            time.sleep(0.5)

        def child(rejects: bool = rejects) -> None:
            signal.alarm(20)  # ends the child if it waits for a lock of the parent
            for one in service, open_service(url):
                with pytest.raises(ConfigurationError, match="fork") if rejects else nullcontext():
                    assert asyncio.run(append_to(one, "s")) > 0

        with ThreadPoolExecutor() as threads:
            writing = threads.submit(lambda: asyncio.run(service._runner.data_db.run_sync(write)))
            begun.wait()
            assert ended(forked(child)) == 0
            writing.result()
    say(asyncio.run(append_to(service, "s")))


def fork_while_a_thread_reads(say: Say, url: str) -> None:
    """Calls that begin during a fork wait for its end."""
    service, ends = open_service(url), threading.Event()
    asyncio.run(append_to(service, "s"))
    in_memory = open_service("sqlite://")
    asyncio.run(append_to(in_memory, "s"))

    async def read() -> None:
        while not ends.is_set():
            await found(service, "s")

    def child() -> None:
        assert asyncio.run(append_to(service, "s")) > 1

    with ThreadPoolExecutor() as threads:
        reading = threads.submit(lambda: asyncio.run(read()))
        began = time.monotonic()
        statuses = [ended(forked(child)) for _ in range(5)]
        assert time.monotonic() - began < 5 * sqlite._FORK_TIMEOUT
        ends.set()
        reading.result()
    say(statuses)


def close_in_a_fork_during_an_operation(say: Say, url: str) -> None:
    """The child neither waits for the parent's task nor closes the parent's connections."""
    service = open_service(url)
    executor: Any = service._runner.executors.data

    async def begin() -> "asyncio.Task[int]":
        writing = asyncio.ensure_future(append_to(service, "parent", 3))
        while not executor._tasks:
            await asyncio.sleep(0)
        return writing

    async def close(uses: bool) -> None:
        assert not uses or await append_to(service, "c") == 1
        await service.close()

    def child(uses: bool) -> None:
        signal.alarm(20)  # ends the child if it waits for the parent's task
        asyncio.run(close(uses))

    with asyncio.Runner() as runner:
        runner.run(append_to(service, "parent", 3))
        writing = runner.run(begin())
        assert [ended(forked(partial(child, uses))) for uses in (False, True)] == [0, 0]
        say(runner.get_loop().run_until_complete(writing))


def search_in_a_fork_while_a_thread_has_the_locks(say: Say, url: str) -> None:
    user: dict[str, Any] = {"app_name": APP, "user_id": USER}
    uri = f"encrypted+{url}?key=file:{url.partition('///')[2]}.key"
    service = EncryptedMemoryService(open_service(url))

    async def search(text: str) -> int:
        return len((await service.search_memory(**user, query=text)).memories)

    def child() -> None:
        signal.alarm(10)  # ends the child if it waits for a lock
        assert asyncio.run(search("needle")) == 1
        with pytest.raises(ConfigurationError, match="file"):
            adk.session_service(uri)

    async def remember() -> UserMemory | None:
        content = types.Content(parts=[types.Part(text="needle")])
        await service.add_memory(**user, memories=[MemoryEntry(content=content)])
        assert await search("needle") == 1
        return (await service._cache()).get((APP, USER, '["memory"]'))

    memory = asyncio.run(remember())
    assert memory is not None
    with memory.lock, adk._lock.lock:
        started = forked(child)
    say(ended(started))


def collect_the_service_in_a_fork(say: Say, url: str) -> None:
    service: EncryptedSessionService | None = open_service(url)

    def child() -> None:
        nonlocal service
        assert service is not None
        asyncio.new_event_loop().run_until_complete(append_to(service, "s"))
        executor: Any = service._runner.executors.data
        drivers = [pooled.driver_connection for pooled in executor._idle]
        service = executor = None
        gc.collect()
        assert [driver.is_closed() for driver in drivers] == [True]

    say(ended(forked(child)))


def fork_with_database_in_memory(say: Say, _url: str) -> None:
    """Its database stays with the parent, so the child may not use it."""
    service = open_service(":memory:")
    asyncio.run(service.prepare_tables())

    def child() -> None:
        with pytest.raises(ConfigurationError, match="fork"):
            asyncio.run(append_to(service, "s"))

    say(ended(forked(child)))


# What each job says at its end: how many events it has stored, or the status of the child.
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize(
    ("job", "said", "place"),
    [
        (close_in_the_parent_while_a_fork_writes, 4, "sqlite"),
        *(
            pytest.param(close_in_the_parent_while_a_fork_writes, 4, name, marks=pytest.mark.soak)
            for name in DRIVERS
        ),
        (fork_while_connected, 9, "postgresql"),
        pytest.param(fork_while_connected, 9, "mariadb", marks=pytest.mark.soak),
        (collect_the_service_in_a_fork, 0, "postgresql"),
        (close_in_a_fork_during_an_operation, 6, "postgresql"),
        pytest.param(close_in_a_fork_during_an_operation, 6, "mariadb", marks=pytest.mark.soak),
        (fork_while_a_thread_writes, 3, "sqlite"),
        (fork_while_a_thread_reads, [0] * 5, "sqlite"),
        (search_in_a_fork_while_a_thread_has_the_locks, 0, "sqlite"),
        (fork_with_database_in_memory, 0, "sqlite"),
    ],
    indirect=["place"],
)
def test_neither_the_forked_process_nor_its_parent_is_disturbed(
    url: str, job: Callable[[Say, str], None], said: int
) -> None:
    assert results((job, url)) == [[said]]
