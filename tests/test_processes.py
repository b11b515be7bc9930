"""Real processes on one SQLite file: nothing is lost, nothing is locked, nothing hangs."""

import asyncio
import os
import sqlite3
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from google.adk.events import Event

from adk_secure_sessions import AesGcmBackend, ConfigurationError, EncryptedSessionService

KEY = bytes(range(32))
APP, USER = "app", "user"
# One process imports, and forks as many as there are names: importing ADK takes seconds.
PRELUDE = """
    import asyncio, os, sys, traceback
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


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite+aiosqlite:///{tmp_path}/sessions.db"


def open_service(url: str) -> EncryptedSessionService:
    return EncryptedSessionService(url, AesGcmBackend(KEY))


async def test_processes_appending_at_once_lose_no_event_and_no_state(url: str) -> None:
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
        async def main():
            async with service() as s:
                own = await s.create_session(app_name=APP, user_id=USER, session_id=ME)
                for n in range(5):
                    await retrying(s, "shared", **{f"{ME}-{n}": n})
                    await s.append_event(own, event(**{f"user:{ME}": n, f"app:{ME}-{n}": n}))
        """
        names = [f"p{n}" for n in range(8)]
        script = textwrap.dedent(script) + textwrap.dedent(EACH)
        await asyncio.to_thread(finish, spawn(script, url, *names))
        stored = await service.get_session(app_name=APP, user_id=USER, session_id=shared.id)
        assert stored is not None
        keys = sorted(key for event in stored.events for key in event.actions.state_delta)
        assert keys == sorted(f"{name}-{n}" for name in names for n in range(5))
        assert stored.state == (
            {f"{name}-{n}": n for name in names for n in range(5)}
            | {f"app:{name}-{n}": n for name in names for n in range(5)}
            | {f"user:{name}": 4 for name in names}
        )
        for name in names:
            own = await service.get_session(app_name=APP, user_id=USER, session_id=name)
            assert own is not None
            assert len(own.events) == 5


async def test_processes_starting_at_once_agree_on_one_keyring_and_one_data_key(
    url: str, tmp_path: Path
) -> None:
    script = """
    async def main():
        async with service() as s:
            await asyncio.gather(*(
                s.create_session(app_name=APP, user_id=USER, session_id=f"{ME}-{n}", state={"n": n})
                for n in range(5)
            ))
    """
    script = textwrap.dedent(script) + textwrap.dedent(EACH)
    await asyncio.to_thread(finish, spawn(script, url, *(f"p{n}" for n in range(4))))
    async with open_service(url) as service:
        listed = await service.list_sessions(app_name=APP, user_id=USER)
        assert sorted(session.id for session in listed.sessions) == sorted(
            f"p{p}-{n}" for p in range(4) for n in range(5)
        )
    with sqlite3.connect(tmp_path / "sessions.db") as database:
        (keys,) = database.execute("SELECT count(*) FROM secure_data_keys").fetchone()
        (masters,) = database.execute("SELECT count(*) FROM secure_keyring").fetchone()
    assert (keys, masters) == (2, 2)  # one of the app, one of the user; data and index


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


@pytest.mark.parametrize("url", ["sqlite+aiosqlite:///{}/x.db", ":memory:"])
def test_service_that_was_never_closed_lets_the_process_end(url: str, tmp_path: Path) -> None:
    script = """
    async def main():
        s = service()
        await s.create_session(app_name=APP, user_id=USER)
        return s
    kept = asyncio.run(main())
    print("done")
    """
    assert finish(spawn(script, url.format(tmp_path), "forgetful")) == "done\n"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
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
