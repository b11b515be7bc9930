"""64 tasks in 4 processes that keep changing one app's state: none fails, and no change is lost."""

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from google.adk.events import Event, EventActions

from adk_secure_sessions import AesGcmBackend, EncryptedSessionService
from tests.processes import children
from tests.servers import Server

KEY = bytes(range(32))
PROCESSES, TASKS = 4, 16
DRIVERS = {
    "sqlite": None,
    "postgresql+asyncpg": "postgresql",
    "postgresql+psycopg": "postgresql",
    "mariadb+asyncmy": "mariadb",
    "pgbouncer": "pgbouncer",
}
_LATER = ["sqlite", "postgresql+psycopg", "pgbouncer"]

Say = Callable[[object], None]


@pytest.fixture(
    params=[
        pytest.param(name, marks=[pytest.mark.soak] if name in _LATER else []) for name in DRIVERS
    ]
)
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    name: str = request.param
    if (fixture := DRIVERS[name]) is None:
        yield f"sqlite+aiosqlite:///{tmp_path}/sessions.db"
        return
    server: Server = request.getfixturevalue(fixture)
    driver = "postgresql+asyncpg" if name == "pgbouncer" else name
    with server.database() as url:
        yield url.set(drivername=driver).render_as_string(hide_password=False)


def open_service(url: str) -> EncryptedSessionService:
    return EncryptedSessionService(url, AesGcmBackend(KEY))


def write(say: Say, url: str, process: int, seconds: float) -> None:
    """Each task counts in a key of its own, and says at the end how far it came."""

    async def count(service: EncryptedSessionService, task: int) -> tuple[str, int]:
        key, user = f"app:{process}.{task}", f"user {process}.{task}"
        session = await service.create_session(app_name="app", user_id=user)
        number, end = 0, time.time() + seconds
        while number == 0 or time.time() < end:
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
            say(dict(await asyncio.gather(*(count(service, n) for n in range(TASKS)))))

    asyncio.run(run())


async def state_of_app(url: str) -> dict[str, object]:
    async with open_service(url) as service:
        session = await service.create_session(app_name="app", user_id="last")
        state: dict[str, object] = session.state
        return {key: value for key, value in state.items() if key.startswith("app:")}


@pytest.mark.parametrize(
    "seconds",
    [pytest.param(1.0, id="short"), pytest.param(60.0, id="long", marks=pytest.mark.soak)],
)
@pytest.mark.no_cover
def test_no_task_fails_and_no_change_is_lost_while_many_write_one_state(
    database: str, seconds: float
) -> None:
    async def begin() -> None:
        async with open_service(database) as service:
            await service.create_session(app_name="app", user_id="first", state={"app:x": 0})

    asyncio.run(begin())
    jobs = [(write, database, process, seconds) for process in range(PROCESSES)]
    expected: dict[str, object] = {"app:x": 0}
    with children(*jobs) as started:
        for child in started:
            (counted,) = child.said()
            expected |= counted
    assert asyncio.run(state_of_app(database)) == expected
    written = sum(value for value in expected.values() if isinstance(value, int))
    print(f"{written} writes in {seconds:g} s")
    assert written > PROCESSES * TASKS
