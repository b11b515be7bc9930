"""PostgreSQL as its derivatives behave: SERIALIZABLE by default, and without advisory locks.

CockroachDB and YugabyteDB cannot be started here.  At SERIALIZABLE, PostgreSQL reports conflicts
with the same SQLSTATE as they do, 40001.  A function in the schema of the test's account replaces
the function for advisory locks.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack

import pytest
import sqlalchemy as sa
from google.adk.events import Event, EventActions

from adk_secure_sessions import AesGcmBackend, ConfigurationError, EncryptedSessionService
from adk_secure_sessions.maintenance import Database, verify
from tests.processes import results
from tests.servers import PostgreSQL, Serializable

BACKEND = AesGcmBackend(bytes(range(32)))
DRIVERS = ["postgresql+asyncpg", pytest.param("postgresql+psycopg", marks=pytest.mark.soak)]
PROCESSES = TASKS = 4
Say = Callable[[object], None]

# The body of the function in place of PostgreSQL's.
_RAISES = "BEGIN RAISE EXCEPTION 'no advisory locks' USING ERRCODE = '{}'; END"
WITHOUT_LOCKS = {
    "missing": _RAISES.format("42883"),
    "not implemented": _RAISES.format("0A000"),
    "not allowed": _RAISES.format("42501"),
    "without effect": "BEGIN END",
}


async def whole(url: str) -> bool:
    async with Database(url, BACKEND) as db:
        found = await verify(db)
    return (found.bad, found.unchecked) == (0, 0)


def write(say: Say, url: str, process: int, seconds: float) -> None:
    """Each task counts in a key of the app, and appends to a session that all tasks share."""

    async def count(service: EncryptedSessionService, task: int, end: float) -> None:
        key, number = f"{process}.{task}", 0
        session = await service.create_session(app_name="app", user_id=key)
        loop = asyncio.get_running_loop()
        while number < 2 or loop.time() < end:
            number += 1
            delta: dict[str, object] = {f"app:{key}": number, "user:n": number}
            actions = EventActions(state_delta=delta)
            await service.append_event(
                session, Event(author="a", invocation_id="i", actions=actions)
            )
            if number % 4 == 0:
                session = await service.create_session(app_name="app", user_id=key)
        say((f"app:{key}", number))

    async def run() -> None:
        async with EncryptedSessionService(url, BACKEND) as service:
            end = asyncio.get_running_loop().time() + seconds
            await asyncio.gather(*(count(service, task, end) for task in range(TASKS)))

    asyncio.run(run())


@pytest.mark.parametrize(
    "seconds",
    [pytest.param(1.0, id="short"), pytest.param(60.0, id="long", marks=pytest.mark.soak)],
)
@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.no_cover
def test_processes_that_write_one_state_lose_and_double_nothing(
    serializable: Serializable, driver: str, seconds: float
) -> None:
    with serializable.database() as database:
        url = database.set(drivername=driver).render_as_string(hide_password=False)
        # The first use by all processes creates the tables and the keys.
        said = results(*((write, url, process, seconds) for process in range(PROCESSES)))
        expected = dict(pair for of_process in said for pair in of_process)

        async def check() -> None:
            async with EncryptedSessionService(url, BACKEND) as service:
                last = await service.create_session(app_name="app", user_id="last")
                assert last.state == expected
                events = 0
                for one in (await service.list_sessions(app_name="app")).sessions:
                    found = await service.get_session(
                        app_name="app", user_id=one.user_id, session_id=one.id
                    )
                    assert found is not None
                    events += len(found.events)
                assert events == sum(expected.values())
            assert await whole(url)

        asyncio.run(check())


@pytest.fixture(params=WITHOUT_LOCKS)
def without_locks(request: pytest.FixtureRequest, postgresql: PostgreSQL) -> Iterator[sa.URL]:
    """A database on which `pg_advisory_xact_lock` is another function."""
    with postgresql.database() as url, postgresql.admin.connect() as connection:
        name = url.username
        connection.exec_driver_sql(
            f"CREATE FUNCTION {name}.pg_advisory_xact_lock(bigint) RETURNS void LANGUAGE plpgsql "
            f"AS $$ {WITHOUT_LOCKS[request.param]} $$"
        )
        connection.exec_driver_sql(f"ALTER ROLE {name} SET search_path = {name}, pg_catalog")
        yield url


@pytest.mark.parametrize("driver", DRIVERS)
async def test_many_services_that_open_a_new_database_at_once_create_it_without_locks(
    without_locks: sa.URL, driver: str
) -> None:
    url = without_locks.set(drivername=driver)
    async with AsyncExitStack() as stack:
        services = [
            await stack.enter_async_context(EncryptedSessionService(url, BACKEND)) for _ in range(6)
        ]
        await asyncio.gather(
            *(
                one.create_session(app_name="app", user_id=f"user {n}")
                for n, one in enumerate(services)
            )
        )
        for one in services:
            assert len((await one.list_sessions(app_name="app")).sessions) == 6
    assert await whole(url.render_as_string(hide_password=False))


async def test_table_of_another_account_that_cannot_be_seen_is_named(
    postgresql: PostgreSQL,
) -> None:
    with postgresql.database() as url, postgresql.admin.connect() as connection:
        # An index has the name of a table, so the table can be neither found nor created.
        name = url.username
        connection.exec_driver_sql(f"CREATE TABLE {name}.other (id int)")
        connection.exec_driver_sql(f"CREATE INDEX secure_meta ON {name}.other (id)")
        async with EncryptedSessionService(
            url.set(drivername="postgresql+asyncpg"), BACKEND
        ) as service:
            with pytest.raises(ConfigurationError, match="a table exists, but does not show it"):
                await service.create_session(app_name="app", user_id="user")
