"""Many tasks in 4 processes that keep changing one app's state: none fails, no change is lost.

"serializable" stands for derivatives of PostgreSQL that cannot be started here, CockroachDB and
YugabyteDB: at SERIALIZABLE, PostgreSQL reports conflicts with the same SQLSTATE as they do, 40001.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from google.adk.events import Event, EventActions

from adk_secure_sessions import AesGcmBackend, EncryptedSessionService
from adk_secure_sessions.maintenance import Database, fill_index, verify
from adk_secure_sessions.storage.features.index_rows import complete
from tests.galera import NODES, Galera
from tests.processes import children
from tests.servers import Server, for_service

KEY = bytes(range(32))
PROCESSES = 4
DRIVERS: dict[str, tuple[str, str | None]] = {
    "sqlite": ("sqlite+aiosqlite", None),
    "postgresql+asyncpg": ("postgresql+asyncpg", "postgresql"),
    "postgresql+psycopg": ("postgresql+psycopg", "postgresql"),
    "mariadb+asyncmy": ("mariadb+asyncmy", "mariadb"),
    "pgbouncer": ("postgresql+asyncpg", "pgbouncer"),
    "serializable": ("postgresql+asyncpg", "serializable"),
    "serializable-psycopg": ("postgresql+psycopg", "serializable"),
    "galera": ("mariadb+asyncmy", "galera"),
}
_LATER = ["galera", "sqlite", "postgresql+psycopg", "pgbouncer", "serializable-psycopg"]

Say = Callable[[object], None]


@pytest.fixture(
    params=[
        pytest.param(name, marks=[pytest.mark.soak] if name in _LATER else []) for name in DRIVERS
    ]
)
def databases(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[str]]:
    """The URLs of one database; of a cluster, one for each node."""
    driver, fixture = DRIVERS[request.param]
    if fixture is None:
        yield [f"{driver}:///{tmp_path}/sessions.db"]
        return
    server: Server = request.getfixturevalue(fixture)
    with server.database() as url:
        urls = [url.set(drivername=driver)]
        if isinstance(server, Galera):
            # Otherwise, `check` might read on a node that is behind.
            one = urls[0].update_query_dict({"init_command": "SET SESSION wsrep_sync_wait = 7"})
            urls = [server.on(one, number) for number in range(NODES)]
        yield [one.render_as_string(hide_password=False) for one in urls]


def open_service(url: str) -> EncryptedSessionService:
    return EncryptedSessionService(url, AesGcmBackend(KEY))


def write(say: Say, url: str, process: int, tasks: int, seconds: float) -> None:
    """Each task counts in a key of its own, and says at the end how far it came."""

    async def count(service: EncryptedSessionService, task: int) -> tuple[str, int]:
        key, user = f"app:{process}.{task}", f"user {process}.{task}"
        session = await service.create_session(app_name="app", user_id=user)
        number, end = 0, time.time() + seconds
        while number < 2 or time.time() < end:
            number += 1
            delta: dict[str, object] = {key: number, "user:last": number}
            event = Event(author="a", invocation_id="i", actions=EventActions(state_delta=delta))
            await service.append_event(session, event)
            if number % 5 == 0:  # creating a session changes the app's state, too
                number += 1
                session = await service.create_session(
                    app_name="app", user_id=user, state={key: number}
                )
        return key, number

    async def run() -> None:
        async with open_service(url) as service:
            say(dict(await asyncio.gather(*(count(service, n) for n in range(tasks)))))

    asyncio.run(run())


async def check(url: str, expected: dict[str, int]) -> None:
    async with open_service(url) as service:
        last = await service.create_session(app_name="app", user_id="last")
        assert last.state == expected
    async with Database(url, AesGcmBackend(KEY)) as db:
        found = await verify(db)
    assert (found.bad, found.unchecked) == (0, 0)
    assert found.events == sum(number - (number - 1) // 5 for number in expected.values())


@pytest.mark.parametrize(
    ("tasks", "seconds"),
    [pytest.param(6, 0.4, id="short"), pytest.param(16, 60.0, id="long", marks=pytest.mark.soak)],
)
@pytest.mark.no_cover
def test_no_task_fails_and_no_change_is_lost_while_many_write_one_state(
    databases: list[str], tasks: int, seconds: float
) -> None:
    # The first use by all processes creates the tables and the keys.
    urls = [databases[process % len(databases)] for process in range(PROCESSES)]
    jobs = [(write, url, process, tasks, seconds) for process, url in enumerate(urls)]
    expected: dict[str, int] = {}
    with children(*jobs) as started:
        for child in started:
            (counted,) = child.said()
            expected |= counted
    asyncio.run(check(databases[0], expected))
    written = sum(expected.values())
    print(f"{written} writes in {seconds:g} s")
    assert written > PROCESSES * tasks


async def test_an_index_that_is_filled_while_a_service_starts_stays_complete(
    postgresql: Server,
) -> None:
    names: dict[str, Any] = {"app_name": "app", "user_id": "u"}
    with (
        postgresql.database() as place,
        closing(sa.create_engine(place, poolclass=sa.NullPool).connect()) as connection,
    ):
        url = for_service(place)
        async with (
            open_service(url) as first,
            EncryptedSessionService(url, AesGcmBackend(KEY), indexed_state_keys=["n"]) as service,
            Database(url, AesGcmBackend(KEY)) as db,
        ):
            await first.create_session(**names, state={"n": 1})
            await fill_index(db, "app", ["n"])
            keyring = await db.keyring()
            complete(keyring, [keyring.index_master.state_key_tag("app", "n")], connection)
            creation = asyncio.create_task(service.create_session(**names, state={"n": 1}))
            waiting = sa.text("SELECT count(*) FROM pg_locks WHERE NOT granted")
            while not (connection.scalar(waiting) or creation.done()):
                await asyncio.sleep(0.01)
            connection.commit()
            await creation
            found = await service.find_sessions(app_name="app", key="n", value=1)
    assert len(found.sessions) == 2
