"""google-adk writes to the source while `migrate` copies it; both services then return the same."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.adk.sessions import DatabaseSessionService, Session

from adk_secure_sessions.maintenance import verify
from adk_secure_sessions.migration import AdkTables, compare, migrate
from tests.maintenance.conftest import DRIVERS
from tests.maintenance.support import event
from tests.migration.memory_source import APP
from tests.migration.support import database, service
from tests.servers import Server

USERS = ("ada", "bob", "cleo")


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.soak)])
def source_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite+aiosqlite:///{tmp_path}/adk.db"
        return
    server: Server = request.getfixturevalue(request.param)
    with server.database() as url:
        yield url.set(drivername=DRIVERS[request.param]).render_as_string(hide_password=False)


async def write(adk: DatabaseSessionService, user: str, stop: asyncio.Event) -> None:
    """Interleave the sessions of one user, so that each changes the user's state in turn."""
    sessions: list[Session] = []
    number = 0
    while not stop.is_set():
        number += 1
        if len(sessions) < 8 and number % 5 == 1:
            session = await adk.create_session(
                app_name=APP, user_id=user, session_id=f"s{number}", state={"user:first": number}
            )
            sessions.append(session)
        session = sessions[number % len(sessions)]
        delta = {"n": number, "user:last": number, f"app:{user}": number}
        await adk.append_event(session, event(number, **delta))
        if number % 23 == 0:
            gone = sessions.pop(0)
            await adk.delete_session(app_name=APP, user_id=user, session_id=gone.id)
        await asyncio.sleep(0)


async def test_copy_of_a_source_in_use_is_complete_after_a_last_pass(
    source_url: str, tmp_path: Path
) -> None:
    adk = DatabaseSessionService(source_url)
    stop = asyncio.Event()
    await adk.create_session(app_name=APP, user_id="ada", session_id="first")
    writers = [asyncio.create_task(write(adk, user, stop)) for user in USERS]
    url = f"sqlite:///{tmp_path}/sessions.db"
    behind = 0
    async with AdkTables(source_url) as source, database(url) as db:
        for _ in range(6):
            done = await migrate(source, db)
            assert not done.bad + done.conflicts
            behind += done.behind
            await asyncio.sleep(0.1)
        assert behind
        stop.set()
        await asyncio.gather(*writers)
        last = await migrate(source, db, delete_gone=True)
        assert (last.succeeded, last.behind) == (True, 0)
        compared = await compare(source, db)
        assert compared.completed, compared.findings
        assert (await verify(db)).bad == 0
    async with service(url) as made:
        for user in USERS:
            ours = await made.list_sessions(app_name=APP, user_id=user)
            theirs = await adk.list_sessions(app_name=APP, user_id=user)
            # Older releases of google-adk list sessions in no particular order.
            assert sorted(s.id for s in ours.sessions) == sorted(s.id for s in theirs.sessions)
            assert ours.sessions
            for one in theirs.sessions:
                who = {"app_name": APP, "user_id": user, "session_id": one.id}
                expected = await adk.get_session(**who)  # type: ignore[arg-type]
                found = await made.get_session(**who)  # type: ignore[arg-type]
                assert expected is not None
                assert found is not None
                assert found.model_dump() == expected.model_dump()
    await adk.close()
