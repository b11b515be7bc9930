"""Behind PgBouncer in transaction mode; `conformance` runs on it, too.

PgBouncer gives each transaction another connection to the server.  Version 1.18 keeps no prepared
statements: one that a client has prepared is missing on most connections, and a connection may have
another client's of the same name.
"""

import asyncio
import gc
import logging
from collections.abc import Iterator
from typing import Any

import asyncpg  # type: ignore[import-untyped]
import pytest
import sqlalchemy as sa
from sqlalchemy import URL
from sqlalchemy.ext.asyncio import create_async_engine

from adk_secure_sessions import (
    AesGcmBackend,
    ConfigurationError,
    EncryptedSessionService,
    maintenance,
)
from adk_secure_sessions.db.connect import executors_for
from tests.conformance.services import KEY
from tests.conformance.support import together
from tests.on_servers.test_pool import converse
from tests.servers import PgBouncer, PostgreSQL

DRIVERS = ["postgresql+asyncpg", pytest.param("postgresql+psycopg", marks=pytest.mark.soak)]


@pytest.fixture(params=DRIVERS)
def driver(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def url(pgbouncer: PgBouncer, driver: str) -> Iterator[URL]:
    with pgbouncer.database() as made:
        yield made.set(drivername=driver)


async def test_services_share_the_connections_of_a_pooler(url: URL) -> None:
    backend = AesGcmBackend(KEY)
    async with (
        EncryptedSessionService(url, backend) as one,
        EncryptedSessionService(url, backend) as other,
    ):
        await one.prepare_tables()
        await together(*(converse((one, other)[n % 2], n) for n in range(16)))


async def test_maintenance_works_behind_a_pooler(url: URL) -> None:
    backend = AesGcmBackend(KEY)
    async with EncryptedSessionService(url, backend) as service:
        await converse(service, 1)
        working = asyncio.gather(*(converse(service, n) for n in range(2, 6)))
        async with maintenance.Database(url, backend) as db:
            await maintenance.rotate_master(db)
            await maintenance.rotate_data(db)
            await working
            await maintenance.retire(db)
            assert not (await maintenance.verify(db)).problems
            await maintenance.erase_user(db, "app", "u1")


def open_connections() -> set[asyncpg.Connection]:
    gc.collect()
    return {
        one
        for one in gc.get_objects()
        if isinstance(one, asyncpg.Connection) and not one.is_closed()
    }


@pytest.mark.parametrize("driver", ["postgresql+asyncpg"], indirect=True)
async def test_connections_that_are_in_use_when_a_pooler_is_found_are_closed(url: URL) -> None:
    """Finding it disposes of SQLAlchemy's pool, to which they would return."""
    backend = AesGcmBackend(KEY)
    async with EncryptedSessionService(url, backend) as service:
        await together(*(converse(service, n) for n in range(4)))
    before = open_connections()
    for _ in range(2):
        async with maintenance.Database(url, backend) as db:
            await together(
                *(maintenance.status(db) for _ in range(4)),
                *(maintenance.verify(db) for _ in range(8)),
            )
        assert open_connections() <= before


@pytest.mark.parametrize("driver", ["postgresql+asyncpg"], indirect=True)
async def test_statements_are_prepared_until_a_pooler_is_found(
    url: URL, postgresql: PostgreSQL, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "adk_secure_sessions"):
        with postgresql.database() as direct:
            direct = direct.set(drivername="postgresql+asyncpg")
            async with EncryptedSessionService(direct, AesGcmBackend(KEY)) as service:
                await together(*(converse(service, n) for n in range(8)))
        assert "pooler" not in caplog.text
        async with EncryptedSessionService(url, AesGcmBackend(KEY)) as service:
            await together(*(converse(service, n) for n in range(8)))
        assert caplog.text.count("pooler") == 1


async def test_direct_connection_keeps_its_prepared_statements(postgresql: PostgreSQL) -> None:
    """Only of asyncpg: psycopg forgets them at each ROLLBACK, with which SQLAlchemy ends reads."""
    query = sa.text("SELECT statement FROM pg_prepared_statements WHERE statement LIKE '%LIKE%'")
    with postgresql.database() as url:
        url = url.set(drivername="postgresql+asyncpg")
        executor = executors_for(url, engine_kwargs={"pool_size": 1}).data
        found = [await executor.read(query, {}) for _ in range(3)]
        await executor.close()
    assert [[row[0] for row in rows] for rows in found] == [[query.text]] * 3


@pytest.mark.parametrize("driver", ["postgresql+asyncpg"], indirect=True)
async def test_nothing_is_prepared_by_name_if_the_application_says_so(url: URL) -> None:
    options: dict[str, Any] = {"connect_args": {"statement_cache_size": 0}}
    async with EncryptedSessionService(url, AesGcmBackend(KEY), **options) as service:
        await together(*(converse(service, n) for n in range(4)))
    assert prepared_by_us(url) == 0


def prepared_by_us(url: URL) -> int:
    """The named statements on the pooler's connections; each call sees one of three."""
    engine = sa.create_engine(
        url.set(drivername="postgresql+psycopg"), connect_args={"prepare_threshold": None}
    )
    with engine.connect() as connection:
        count = sa.text("SELECT count(*) FROM pg_prepared_statements WHERE name <> ''")
        found = connection.scalar(count)
    engine.dispose()
    return int(found or 0)


async def test_engine_of_the_application_works_or_the_error_names_its_option(
    url: URL, driver: str
) -> None:
    async def use(first: int, **options: Any) -> None:
        engine = create_async_engine(url, pool_size=5, **options)
        try:
            async with EncryptedSessionService(
                db_engine=engine, backend=AesGcmBackend(KEY)
            ) as service:
                await together(*(converse(service, first + n) for n in range(6)))
                for _ in range(5):
                    await service.close()
                    await service.prepare_tables()
        finally:
            await engine.dispose()

    if driver == "postgresql+asyncpg":
        options = {"prepared_statement_cache_size": 0, "prepared_statement_name_func": lambda: ""}
        await use(0, connect_args=options)
        try:
            await use(10)
        except ConfigurationError as error:
            option = str(error)
            assert "prepared_statement_cache_size" in option
    else:
        await use(0)
