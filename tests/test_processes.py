"""Real processes on one database: nothing is lost, nothing is locked, nothing hangs."""

import asyncio
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from google.adk.events import Event

from adk_secure_sessions import AesGcmBackend, ConfigurationError, EncryptedSessionService
from tests.servers import Server

KEY = bytes(range(32))
APP, USER = "app", "user"
# One process imports, and forks as many as there are names: importing ADK takes seconds.
PRELUDE = """
    import asyncio, gc, os, sys, traceback
    from google.adk.events import Event, EventActions
    from adk_secure_sessions import AesGcmBackend, EncryptedSessionService
    KEY, APP, USER = bytes(range(32)), "app", "user"
    URL, NAMES = sys.argv[1], sys.argv[2:]
    def service():
        return EncryptedSessionService(URL, AesGcmBackend(KEY))
    def event(**delta):
        return Event(author=ME, invocation_id="i", actions=EventActions(state_delta=delta))
    def forked(run, *arguments):
        child = os.fork()
        if child == 0:
            try:
                status = run(*arguments) or 0
            except BaseException:
                traceback.print_exc()
                status = 99
            sys.stdout.flush()
            os._exit(status)
        return child
    def ended(child):
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    ME = NAMES[0]
"""
EACH = """
    def named(name):
        global ME
        ME = name
        asyncio.run(main())
    assert [ended(child) for child in [forked(named, name) for name in NAMES]] == [0] * len(NAMES)
"""


def spawn(script: str, url: str, *names: str) -> "subprocess.Popen[str]":
    source = "".join(map(textwrap.dedent, (PRELUDE, script)))
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", source, url, *names],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: "subprocess.Popen[str]") -> str:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out


DRIVERS = {"postgresql": "postgresql+asyncpg", "mariadb": "mariadb+asyncmy"}
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
on_servers = pytest.mark.parametrize("database", DRIVERS)
on_each_database = pytest.mark.parametrize("database", ["sqlite", *DRIVERS])
on_mariadb_later = pytest.mark.parametrize(
    "database", ["sqlite", "postgresql", pytest.param("mariadb", marks=pytest.mark.soak)]
)


@pytest.fixture
def database() -> str:
    return "sqlite"


@pytest.fixture
def place(request: pytest.FixtureRequest, database: str, tmp_path: Path) -> Iterator[sa.URL]:
    """An empty database, as the test itself reaches it, without the service."""
    if database == "sqlite":
        yield sa.URL.create("sqlite", database=f"{tmp_path}/sessions.db")
        return
    server: Server = request.getfixturevalue(database)
    with server.database() as url:
        yield url


@pytest.fixture
def url(place: sa.URL, database: str) -> str:
    driver = DRIVERS.get(database, "sqlite+aiosqlite")
    return place.set(drivername=driver).render_as_string(hide_password=False)


def count(place: sa.URL, table: str) -> int:
    engine = sa.create_engine(place)
    with engine.connect() as connection:
        (number,) = connection.exec_driver_sql(f"SELECT count(*) FROM {table}").one()
    engine.dispose()
    return int(number)


def open_service(url: str) -> EncryptedSessionService:
    return EncryptedSessionService(url, AesGcmBackend(KEY))


@on_each_database
async def test_processes_appending_at_once_lose_no_event_and_no_state(
    url: str, database: str
) -> None:
    async with open_service(url) as service:
        shared = await service.create_session(app_name=APP, user_id=USER, session_id="shared")
        script = """
        async def retrying(s, session_id, **delta):
            while True:
                session = await s.get_session(app_name=APP, user_id=USER, session_id=session_id)
                try:
                    return await s.append_event(session, event(**delta))
                except ValueError as error:
                    if "modified in storage" not in str(error):
                        raise
        async def task(s, own, numbers):
            for n in numbers:
                await retrying(s, "shared", **{f"{ME}-{n}": n, f"user:{ME}-{n}": n})
                await s.append_event(own, event(**{f"user:{ME}": 1, f"app:{ME}-{n}": n}))
        async def main():
            async with service() as s:
                own = await s.create_session(app_name=APP, user_id=USER, session_id=ME)
                await asyncio.gather(task(s, own, [0, 1]), task(s, own, [2, 3]), task(s, own, [4]))
        """
        # MariaDB lets them wait for one another most.
        names = [f"p{n}" for n in range(4 if database == "mariadb" else 8)]
        script = textwrap.dedent(script) + textwrap.dedent(EACH)
        await asyncio.to_thread(finish, spawn(script, url, *names))
        stored = await service.get_session(app_name=APP, user_id=USER, session_id=shared.id)
        assert stored is not None
        keys = sorted(min(event.actions.state_delta) for event in stored.events)
        assert keys == sorted(f"{name}-{n}" for name in names for n in range(5))
        assert stored.state == (
            {f"{name}-{n}": n for name in names for n in range(5)}
            | {f"app:{name}-{n}": n for name in names for n in range(5)}
            | {f"user:{name}-{n}": n for name in names for n in range(5)}
            | {f"user:{name}": 1 for name in names}
        )
        for name in names:
            own = await service.get_session(app_name=APP, user_id=USER, session_id=name)
            assert own is not None
            assert len(own.events) == 5


@on_each_database
async def test_processes_starting_at_once_agree_on_one_keyring_and_one_data_key(
    url: str, place: sa.URL
) -> None:
    script = """
    async def main():
        async with service() as s:
            await asyncio.gather(*(
                s.create_session(app_name=APP, user_id=USER, session_id=f"{ME}-{n}", state={"n": n})
                for n in range(20)
            ))
    """
    script = textwrap.dedent(script) + textwrap.dedent(EACH)
    await asyncio.to_thread(finish, spawn(script, url, *(f"p{n}" for n in range(4))))
    async with open_service(url) as service:
        listed = await service.list_sessions(app_name=APP, user_id=USER)
        assert sorted(session.id for session in listed.sessions) == sorted(
            f"p{p}-{n}" for p in range(4) for n in range(20)
        )
    assert count(place, "secure_keyring") == 2  # data and index
    assert count(place, "secure_data_keys") == 2  # one of the app, one of the user
    assert count(place, "secure_users") == count(place, "secure_apps") == 1


@on_servers
async def test_tasks_that_are_the_first_of_a_user_agree_on_one_data_key(
    url: str, place: sa.URL
) -> None:
    async with open_service(url) as service:
        await asyncio.gather(
            *(
                service.create_session(
                    app_name=APP, user_id=USER, session_id=f"s{n}", state={f"user:k{n}": n}
                )
                for n in range(20)
            )
        )
        session = await service.get_session(app_name=APP, user_id=USER, session_id="s0")
        assert session is not None
        assert session.state == {f"user:k{n}": n for n in range(20)}
    assert count(place, "secure_data_keys") == 2
    assert count(place, "secure_sessions") == 20


@on_mariadb_later
async def test_killed_process_leaves_every_session_readable(url: str) -> None:
    script = """
    async def main():
        s = service()
        session = await s.create_session(app_name=APP, user_id=USER, session_id=ME)
        for n in range(10**6):
            await s.append_event(session, event(n=n))
            print(n, flush=True)
    asyncio.run(main())
    """
    process = spawn(script, url, "killed")
    assert process.stdout is not None
    acknowledged = -1
    while acknowledged < 20:
        acknowledged = int(process.stdout.readline())
    process.kill()
    rest, _ = process.communicate()
    acknowledged = int(rest.split()[-1]) if rest.split() else acknowledged
    async with open_service(url) as service:
        session = await service.get_session(app_name=APP, user_id=USER, session_id="killed")
        assert session is not None
        numbers = [event.actions.state_delta["n"] for event in session.events]
        assert numbers == list(range(len(numbers)))
        assert len(numbers) > acknowledged  # what was acknowledged is there
        assert session.state == {"n": numbers[-1]}
        await service.append_event(session, Event(author="survivor"))


FORGETFUL = {
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


def forgetful(how: str) -> str:
    script = """
    async def main():
        s = service()
        session = await s.create_session(app_name=APP, user_id=USER)
        await asyncio.gather(*(s.append_event(session, event(n=n)) for n in range(3)))
        return s
    """
    return textwrap.dedent(script) + textwrap.dedent(FORGETFUL[how]) + "\nprint('done')\n"


@on_mariadb_later
@pytest.mark.parametrize(
    "how",
    [
        "loop left open",  # the hardest
        pytest.param("ended loop", marks=pytest.mark.soak),
        pytest.param("thread", marks=pytest.mark.soak),
    ],
)
def test_service_that_was_never_closed_lets_the_process_end(url: str, how: str) -> None:
    process = spawn(forgetful(how), url, "forgetful")
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == (0, "done\n", "")


def test_database_in_memory_that_was_never_closed_lets_the_process_end() -> None:
    assert finish(spawn(forgetful("ended loop"), ":memory:", "forgetful")) == "done\n"


@needs_fork
@pytest.mark.parametrize(
    "database", ["sqlite", *(pytest.param(name, marks=pytest.mark.soak) for name in DRIVERS)]
)
def test_service_goes_on_in_a_forked_process(url: str) -> None:
    script = """
    s = service()
    async def append(text):
        session = await s.get_session(app_name=APP, user_id=USER, session_id="s")
        session = session or await s.create_session(app_name=APP, user_id=USER, session_id="s")
        await s.append_event(session, event(**{text: 1}))
        return len(session.events)
    asyncio.run(append("parent"))
    assert ended(forked(lambda: asyncio.run(append("child")))) == 2
    print(asyncio.run(append("parent again")))
    """
    assert finish(spawn(script, url, "parent")) == "3\n"


@needs_fork
@pytest.mark.parametrize(
    "database", ["postgresql", pytest.param("mariadb", marks=pytest.mark.soak)]
)
def test_fork_while_connections_are_open_disturbs_neither_parent_nor_child(url: str) -> None:
    script = """
    s = service()
    async def append(session_id):
        for n in range(3):
            session = await s.get_session(app_name=APP, user_id=USER, session_id=session_id)
            session = session or await s.create_session(
                app_name=APP, user_id=USER, session_id=session_id)
            await s.append_event(session, event(n=n))
        return len(session.events)
    def child(name):
        assert asyncio.run(append(name)) == 3
        gc.collect()
        assert asyncio.run(append(name)) == 6
    with asyncio.Runner() as runner:
        assert runner.run(append("parent")) == 3
        children = [forked(child, f"c{n}") for n in range(3)]
        assert runner.run(append("parent")) == 6
        assert [ended(child) for child in children] == [0, 0, 0]
        gc.collect()
        print(runner.run(append("parent")))
    """
    process = spawn(script, url, "parent")
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == (0, "9\n", "")


@needs_fork
def test_memory_database_is_refused_in_a_forked_process() -> None:
    script = """
    s = service()
    asyncio.run(s.prepare_tables())
    def create():
        try:
            asyncio.run(s.create_session(app_name=APP, user_id=USER))
        except ValueError as error:
            return 7 if "fork" in str(error) else 8
    print(ended(forked(create)))
    """
    assert finish(spawn(script, ":memory:", "parent")) == "7\n"
    assert issubclass(ConfigurationError, ValueError)
