"""The statements of docs/sql, for teams whose service may not create tables."""

import os
from datetime import timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa
from google.adk.events import Event
from sqlalchemy.ext.asyncio import create_async_engine

from adk_secure_sessions import AesGcmBackend, Audit, ConfigurationError, EncryptedSessionService
from adk_secure_sessions.maintenance import Database, erase_user, rotate_data, verify
from adk_secure_sessions.storage.features.expiry import INDEX
from examples import make_sql
from tests.servers import Server

KEY = os.urandom(32)
ASYNC = {"postgresql": "postgresql+asyncpg", "mysql": "mysql+asyncmy", "sqlite": "sqlite"}


def test_sql_files_match_the_tables() -> None:
    assert make_sql.main(["--check"]) == 0


async def use(url: sa.URL, key_db_url: sa.URL | None = None) -> None:
    async with EncryptedSessionService(
        url, AesGcmBackend(KEY), key_db_url=key_db_url, create_tables=False
    ) as service:
        session = await service.create_session(app_name="a", user_id="u", state={"k": 1})
        found = await service.get_session(app_name="a", user_id="u", session_id=session.id)
        assert found == session


async def import_one(url: sa.URL) -> None:
    async with Database(url, AesGcmBackend(KEY)) as db:
        await db.imports.import_state(("a", "imported"), b"{}")


async def assert_index_is_advised(url: sa.URL, caplog: pytest.LogCaptureFixture) -> None:
    """The account has all permissions that a service needs, but may not create an index."""
    caplog.clear()
    async with EncryptedSessionService(
        url, AesGcmBackend(KEY), expires_after=timedelta(days=1)
    ) as service:
        for _ in range(2):
            await service.create_session(app_name="a", user_id="u")
    (text,) = (one.getMessage() for one in caplog.records if "expire" in one.getMessage())
    assert f"CREATE INDEX {INDEX} ON secure_sessions (expires_at)" in text


async def index_one(url: sa.URL) -> None:
    async with EncryptedSessionService(
        url, AesGcmBackend(KEY), create_tables=False, indexed_state_keys=["k"]
    ) as service:
        await service.create_session(app_name="a", user_id="u", state={"k": 1})


async def record_one(url: sa.URL) -> None:
    async with EncryptedSessionService(
        url, AesGcmBackend(KEY), create_tables=False, audit=Audit("blind", table=True)
    ) as service:
        await service.create_session(app_name="a", user_id="u")


# The files of the tables that a feature adds, and the first use of each feature.
FEATURES = {"migration": import_one, "audit": record_one, "state-index": index_one}


async def assert_tables_are_missing(url: sa.URL, key_db_url: sa.URL | None = None) -> None:
    async with EncryptedSessionService(
        url, AesGcmBackend(KEY), key_db_url=key_db_url, create_tables=False
    ) as service:
        with pytest.raises(ConfigurationError, match="docs/sql"):
            await service.prepare_tables()


async def test_service_works_on_tables_made_by_the_file_for_sqlite(tmp_path: Path) -> None:
    url = sa.make_url(f"sqlite:///{tmp_path}/s.db")
    await assert_tables_are_missing(url)
    run_file(url, "sqlite")
    await use(url)
    with pytest.raises(ConfigurationError, match=r"docs/sql/sqlite-state-index\.sql"):
        await index_one(url)
    run_file(url, "sqlite-state-index")
    await index_one(url)


def run_file(url: sa.URL, file: str) -> None:
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        for statement in make_sql.statements(file):
            connection.exec_driver_sql(statement)
    engine.dispose()


async def assert_pair_works(data: sa.URL, kind: str, keys: sa.URL, kind_of_keys: str) -> None:
    urls = data.set(drivername=ASYNC[kind]), keys.set(drivername=ASYNC[kind_of_keys])
    await assert_tables_are_missing(*urls)
    run_file(keys, f"{kind_of_keys}-keys")
    await assert_tables_are_missing(*urls)
    run_file(data, f"{kind}-data")
    await use(*urls)


async def test_service_works_on_a_key_database_made_by_the_files(tmp_path: Path) -> None:
    data, keys = (sa.make_url(f"sqlite:///{tmp_path}/{name}.db") for name in "dk")
    await assert_pair_works(data, "sqlite", keys, "sqlite")


async def test_service_works_on_a_key_database_on_another_server(
    postgresql: Server, mariadb: Server
) -> None:
    with postgresql.database() as data, mariadb.database() as keys:
        await assert_pair_works(data, "postgresql", keys, "mysql")
    with mariadb.database() as data, postgresql.database() as keys:
        await assert_pair_works(data, "mysql", keys, "postgresql")


async def test_unused_key_tables_stay_empty_beside_a_key_database(tmp_path: Path) -> None:
    data, keys = (sa.make_url(f"sqlite:///{tmp_path}/{name}.db") for name in "dk")
    run_file(data, "sqlite")
    run_file(keys, "sqlite")
    await use(data, keys)
    engine = sa.create_engine(data)
    with engine.connect() as connection:
        for table in ("secure_keyring", "secure_data_keys"):
            assert connection.scalar(sa.text(f"SELECT count(*) FROM {table}")) == 0
    engine.dispose()


async def test_service_on_postgresql_needs_no_right_to_create(
    postgresql: Server, caplog: pytest.LogCaptureFixture
) -> None:
    with postgresql.database() as url:
        schema = url.username
        url = url.set(drivername=ASYNC["postgresql"])
        await assert_tables_are_missing(url)

        def run_as_owner(name: str) -> None:
            with postgresql.admin.begin() as connection:
                connection.exec_driver_sql(f"SET search_path TO {schema}")
                for statement in make_sql.statements(name, grantee=str(schema)):
                    connection.exec_driver_sql(statement)
                connection.exec_driver_sql("RESET search_path")

        with postgresql.admin.begin() as connection:
            connection.exec_driver_sql(f"ALTER SCHEMA {schema} OWNER TO CURRENT_USER")
            connection.exec_driver_sql(f"GRANT USAGE ON SCHEMA {schema} TO {schema}")
        run_as_owner("postgresql")
        await use(url)
        await assert_index_is_advised(url, caplog)
        for file, add in FEATURES.items():
            with pytest.raises(ConfigurationError, match=rf"docs/sql/postgresql-{file}\.sql"):
                await add(url)
            run_as_owner(f"postgresql-{file}")
            await add(url)


def run_script(url: sa.URL, name: str) -> None:
    """Run a script of docs/sql with autocommit, as psql does."""
    engine = sa.create_engine(
        url.set(drivername="postgresql+psycopg"),
        poolclass=sa.NullPool,
        isolation_level="AUTOCOMMIT",
    )
    with engine.connect() as connection:
        for statement in make_sql.statements(name):
            connection.exec_driver_sql(statement)
        compressed = connection.exec_driver_sql(
            "SELECT relname FROM pg_attribute JOIN pg_class ON oid = attrelid"
            " WHERE attname IN ('state', 'event') AND relname LIKE 'secure%%'"
            " AND attstorage <> 'e'"
        )
        assert not compressed.all()


@pytest.mark.parametrize("new", [True, False])
async def test_service_and_commands_work_on_partitioned_tables(
    postgresql: Server, new: bool
) -> None:
    with postgresql.database() as url:
        url = url.set(drivername=ASYNC["postgresql"])
        if new:
            run_script(url, "postgresql-partitioned")
        async with EncryptedSessionService(
            url, AesGcmBackend(KEY), create_tables=not new
        ) as service:
            sessions = [
                await service.create_session(app_name="a", user_id="u", state={"k": "v" * 10_000})
                for _ in range(20)
            ]
            for session in sessions:
                await service.append_event(session, Event(author="user"))
        if not new:
            run_script(url, "postgresql-partitioning")
        async with Database(url, AesGcmBackend(KEY)) as db:
            rotated = await rotate_data(db)
            assert rotated.reencrypted >= 60  # rows of sessions, snapshots and events
            found = await verify(db)
            assert (found.sessions, found.events, found.bad) == (20, 20, 0)
            assert (await erase_user(db, "a", "u")).events == 20
        async with EncryptedSessionService(url, AesGcmBackend(KEY)) as service:
            await service.create_session(app_name="a", user_id="u")


async def test_service_on_mariadb_needs_no_right_to_create(
    mariadb: Server, caplog: pytest.LogCaptureFixture
) -> None:
    with mariadb.database() as url:
        name = url.database
        url = url.set(drivername=ASYNC["mysql"])
        await assert_tables_are_missing(url)
        with mariadb.admin.begin() as connection:
            connection.exec_driver_sql(f"USE {name}")
            connection.exec_driver_sql(f"CREATE USER {name}@localhost IDENTIFIED BY 'secret'")
            connection.exec_driver_sql(f"CREATE ROLE {name}_role")
            connection.exec_driver_sql(f"GRANT {name}_role TO {name}@localhost")
            connection.exec_driver_sql(f"SET DEFAULT ROLE {name}_role FOR {name}@localhost")

        def run_as_owner(file: str) -> None:
            with mariadb.admin.begin() as connection:
                connection.exec_driver_sql(f"USE {name}")
                for statement in make_sql.statements(file, grantee=f"{name}_role"):
                    connection.exec_driver_sql(statement)
                connection.exec_driver_sql("USE information_schema")

        run_as_owner("mysql")
        limited = url.set(username=name, password="secret")
        try:
            await use(limited)
            await assert_index_is_advised(limited, caplog)
            async with Database(limited, AesGcmBackend(KEY)) as db:
                assert (await erase_user(db, "a", "u")).users == 1
            for file, add in FEATURES.items():
                with pytest.raises(ConfigurationError, match=rf"docs/sql/mysql-{file}\.sql"):
                    await add(limited)
                run_as_owner(f"mysql-{file}")
                await add(limited)
        finally:
            with mariadb.admin.begin() as connection:
                connection.exec_driver_sql(f"DROP USER {name}@localhost")
                connection.exec_driver_sql(f"DROP ROLE {name}_role")


@pytest.mark.parametrize("dialect", ["mysql", "mariadb"])
async def test_service_creates_tables_of_innodb_whatever_the_default_engine(
    mariadb: Server, dialect: str
) -> None:
    with mariadb.database() as url:
        other = {"init_command": "SET default_storage_engine = MyISAM"}
        url = url.set(drivername=f"{dialect}+asyncmy")
        engine = create_async_engine(url, connect_args=other)
        async with EncryptedSessionService(db_engine=engine, backend=AesGcmBackend(KEY)) as service:
            await service.prepare_tables()
        async with engine.connect() as connection:
            query = sa.text(
                "SELECT @@default_storage_engine, t.engine, c.data_type "
                "FROM information_schema.tables t JOIN information_schema.columns c "
                "USING (table_schema, table_name) "
                "WHERE table_schema = database() AND c.column_name IN ('state', 'event', 'wrapped')"
            )
            rows = (await connection.execute(query)).all()
        await engine.dispose()
    assert len(rows) == 7
    assert set(rows) == {("MyISAM", "InnoDB", "longblob")}
