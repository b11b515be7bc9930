"""PostgreSQL without advisory locks, as some of its derivatives are.

CockroachDB and YugabyteDB cannot be started here.  A function in the schema of the test's account
replaces the function for advisory locks.  test_contention.py writes at SERIALIZABLE.
"""

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack

import pytest
import sqlalchemy as sa

from adk_secure_sessions import AesGcmBackend, ConfigurationError, EncryptedSessionService
from adk_secure_sessions.maintenance import Database, verify
from tests.servers import PostgreSQL

BACKEND = AesGcmBackend(bytes(range(32)))
DRIVERS = ["postgresql+asyncpg", pytest.param("postgresql+psycopg", marks=pytest.mark.soak)]

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


@pytest.fixture(
    params=[
        "missing",
        "without effect",
        *(
            pytest.param(name, marks=pytest.mark.soak)
            for name in ("not implemented", "not allowed")
        ),
    ]
)
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
