"""Erasures leave no copies of deleted rows in the database's files, which are read as bytes."""

import asyncio
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine

from adk_secure_sessions import AesGcmBackend, EncryptedSessionService
from adk_secure_sessions.db.async_engine import AsyncEngineExecutor
from adk_secure_sessions.maintenance import Database, erase_user
from adk_secure_sessions.maintenance.vacuum import clear_deleted_bytes
from adk_secure_sessions.storage.schema import data_keys
from tests.attacks.needles import files_of, present
from tests.maintenance.support import APP, OLD, event, fill, query
from tests.servers import DRIVERS, MariaDB, PostgreSQL, Server, unavailable

BACKEND = AesGcmBackend(OLD)
USERS = [f"u{number}" for number in range(120)]  # enough for pages of their keys to be split
ERASED = USERS[::2]


class Careless(sqlite3.Connection):
    """As SQLite is where it was not built to overwrite what it deletes."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.execute("PRAGMA secure_delete = OFF").close()


CARELESS: dict[str, Any] = {"factory": Careless}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sessions.db"


async def talk(service: EncryptedSessionService, events: int = 1) -> None:
    """All at once: it is committed in groups."""

    async def one(user: str) -> None:
        session = await service.create_session(app_name=APP, user_id=user, session_id="s")
        for number in range(events):
            await service.append_event(session, event(number, k=user))

    await asyncio.gather(*map(one, USERS))


def records_of(path: Path, tags: list[bytes]) -> list[bytes]:
    """Wrapped data keys and pieces of events of these users."""
    with closing(sqlite3.connect(path)) as connection:
        found = []
        for tag in tags:
            keys = connection.execute("SELECT wrapped FROM secure_data_keys WHERE owner = ?", [tag])
            found += [wrapped for (wrapped,) in keys]
            events = connection.execute(
                "SELECT event FROM secure_events WHERE session_row IN (SELECT id FROM "
                "secure_sessions WHERE user_row IN (SELECT id FROM secure_users WHERE tag = ?))",
                [tag],
            )
            found += [event[20:84] for (event,) in events]
    assert len(found) >= len(tags)
    return found


async def tags_of(db: Database, users: list[str]) -> list[bytes]:
    index_master = (await db.keyring()).index_master
    return [index_master.tag_of(APP, user) for user in users]


async def test_sqlite_files_hold_no_bytes_of_erased_rows(path: Path) -> None:
    """Not in free space, not in copies left by split pages, and not in the write-ahead log."""
    url = f"sqlite+aiosqlite:///{path}"
    async with EncryptedSessionService(url, BACKEND, connect_args=CARELESS) as service:
        await talk(service)
        async with Database(url, BACKEND, connect_args=CARELESS) as db:
            values = records_of(path, await tags_of(db, ERASED))
            assert present(path, values) == len(values)
            for user in ERASED:
                found = await erase_user(db, APP, user)
                assert (found.data_keys, found.cleared, found.obstacle) == (1, True, "")
            # While the service keeps the log open.
            assert files_of(path)["sessions.db-wal"] == b""
            assert present(path, values) == 0
            left = records_of(path, await tags_of(db, USERS[1::2]))
            assert present(path, left) == len(left)


async def test_rewriting_a_sqlite_file_clears_what_a_careless_engine_left(path: Path) -> None:
    url = f"sqlite+aiosqlite:///{path}"
    engine = create_async_engine(url, connect_args=CARELESS)
    async with EncryptedSessionService(db_engine=engine, backend=BACKEND) as service:
        await talk(service, events=0)
    await engine.dispose()
    async with Database(url, BACKEND) as db:
        values = records_of(path, await tags_of(db, ERASED))
        for user in ERASED:
            await erase_user(db, APP, user)
        assert (await erase_user(db, APP, "nobody", rewrite=True)).cleared
        assert present(path, values) == 0


async def test_reader_of_the_log_prevents_clearing_and_does_not_prevent_erasing(
    path: Path,
) -> None:
    url = f"sqlite+aiosqlite:///{path}"
    await fill(url, users=["ada"], sessions=1)
    async with Database(url, BACKEND) as db:
        db.limits = db.limits._replace(lock_wait=0)
        values = [wrapped_of(url)]
        with closing(sqlite3.connect(path, isolation_level=None)) as reader:
            reader.execute("BEGIN")
            reader.execute("SELECT count(*) FROM secure_events").fetchone()
            found = await erase_user(db, APP, "ada")
            assert (found.users, found.cleared, found.succeeded) == (1, False, True)
            assert "other connections used the database" in found.obstacle
            assert present(path, values) == len(values)
        assert (await erase_user(db, APP, "ada")).cleared
        assert present(path, values) == 0
        timeout = await db.runner.executors.data.run_sync(
            lambda connection: connection.exec_driver_sql("PRAGMA busy_timeout").scalar(),
            commit=False,
        )
        assert timeout == 30_000  # as it was


# --- servers -------------------------------------------------------------------------------------


def files_with(server: Server, value: bytes) -> set[str]:
    assert server.directory is not None
    names = set()
    for file in server.directory.rglob("*"):
        if file.is_file() and value in file.read_bytes():
            names.add(file.name)
    return names


def wrapped_of(place: sa.URL | str) -> bytes:
    ((wrapped,),) = query(
        place,
        "SELECT wrapped FROM secure_data_keys WHERE owner IN (SELECT tag FROM secure_users)",
    )
    return bytes(wrapped)


@pytest.mark.parametrize("kind", DRIVERS)
async def test_server_keeps_bytes_in_the_table_until_it_is_rewritten(
    kind: str, request: pytest.FixtureRequest
) -> None:
    server: Server = request.getfixturevalue(kind)
    if server.directory is None:
        unavailable("the server's files are not to be read here")
    with file_per_table(server), server.database() as place:
        url = place.set(drivername=DRIVERS[kind])
        await fill(url.render_as_string(hide_password=False), users=["ada"], sessions=1)
        wrapped = wrapped_of(place)
        async with Database(url, BACKEND) as db:
            table = file_of_table(place)
            write_out(server, place)
            assert table in files_with(server, wrapped)
            found = await erase_user(db, APP, "ada")
            assert (found.data_keys, found.cleared) == (1, False)
            assert "not rewritten" in found.obstacle
            write_out(server, place)
            assert table in files_with(server, wrapped)
            found = await erase_user(db, APP, "ada", rewrite=True)
            assert (found.rows, found.cleared, found.obstacle) == (0, True, "")
            write_out(server, place)
            # The write-ahead log remains, whose names have 24 hexadecimal digits, or the redo log.
            logs = {name for name in files_with(server, wrapped) if len(name) == 24}
            assert files_with(server, wrapped) - logs <= {"ib_logfile0"}
            if kind == "postgresql":
                timeout = await db.runner.executors.data.run_sync(
                    lambda connection: connection.exec_driver_sql("SHOW lock_timeout").scalar(),
                    commit=False,
                )
                assert timeout == "0"


async def test_postgresql_account_that_owns_no_table_erases_but_cannot_rewrite(
    postgresql: PostgreSQL,
) -> None:
    with postgresql.database() as place, _account(postgresql, place) as account:
        await fill(_asyncpg(place), users=["ada", "bob"], sessions=1)
        with postgresql.admin.connect() as connection:
            connection.exec_driver_sql(
                f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {place.username} "
                f"TO {account.username}"
            )
        async with Database(_asyncpg(account), BACKEND) as db:
            found = await erase_user(db, APP, "ada", rewrite=True)
            assert (found.users, found.cleared, found.succeeded) == (1, False, False)
            assert "the owner of the table is" in found.obstacle


def _asyncpg(url: sa.URL) -> str:
    return url.set(drivername="postgresql+asyncpg").render_as_string(hide_password=False)


@contextmanager
def _account(server: PostgreSQL, place: sa.URL) -> Iterator[sa.URL]:
    """Another, that may use the tables and nothing else."""
    name = f"{place.username}_guest"
    with server.admin.connect() as connection:
        connection.exec_driver_sql(f"CREATE ROLE {name} LOGIN PASSWORD 'guest'")
        connection.exec_driver_sql(f"GRANT USAGE ON SCHEMA {place.username} TO {name}")
        connection.exec_driver_sql(f"ALTER ROLE {name} SET search_path = {place.username}")
        try:
            yield place.set(username=name, password="guest")
        finally:
            connection.exec_driver_sql(f"DROP OWNED BY {name}")
            connection.exec_driver_sql(f"DROP ROLE {name}")


@pytest.mark.parametrize("kind", DRIVERS)
async def test_rewriting_gives_up_while_another_transaction_uses_the_table(
    kind: str, request: pytest.FixtureRequest
) -> None:
    server: Server = request.getfixturevalue(kind)
    with file_per_table(server), server.database() as place:
        url = place.set(drivername=DRIVERS[kind]).render_as_string(hide_password=False)
        await fill(url, users=["ada"], sessions=1)
        engine = sa.create_engine(place)
        async with Database(url, BACKEND) as db:
            db.limits = db.limits._replace(lock_wait=1)
            with engine.begin() as connection:
                connection.exec_driver_sql("SELECT * FROM secure_keyring, secure_data_keys").all()
                found = await erase_user(db, APP, "ada", rewrite=True)
                assert (found.users, found.cleared, found.succeeded) == (1, False, False)
                said = "other connections" if kind == "postgresql" else "Lock wait timeout exceeded"
                assert said in found.obstacle
            assert (await erase_user(db, APP, "ada", rewrite=True)).cleared
        engine.dispose()


@contextmanager
def file_per_table(server: Server) -> Iterator[None]:
    """As MariaDB is by default; the tests' server is not."""
    if not isinstance(server, MariaDB):
        yield
        return
    change = "SET GLOBAL innodb_file_per_table = {}"
    with server.admin.connect() as connection:
        before = connection.exec_driver_sql("SELECT @@innodb_file_per_table").scalar()
        connection.exec_driver_sql(change.format(1))
        try:
            yield
        finally:
            connection.exec_driver_sql(change.format(before))


async def test_mariadb_table_is_rewritten_without_a_setting_of_the_connection(
    mariadb: MariaDB,
) -> None:
    """A pooler would give it to other clients if this process were killed."""
    with file_per_table(mariadb), mariadb.database() as place:
        url = place.set(drivername="mariadb+asyncmy")
        await fill(url.render_as_string(hide_password=False), users=["ada"], sessions=1)
        engine = create_async_engine(url)
        statements: list[str] = []

        def note(_c: object, _cursor: object, text: str, *_rest: object) -> None:
            statements.append(text)

        executor = AsyncEngineExecutor(engine, owns_engine=True)
        await executor.run_sync(lambda connection: connection.scalar(sa.select(1)), commit=False)
        sa.event.listen(engine.sync_engine, "before_cursor_execute", note)
        assert await clear_deleted_bytes(executor, data_keys, 5, rewrites_table=True) == ""
        await executor.close()
        assert any("OPTIMIZE" in text for text in statements)
        assert not [text for text in statements if text.startswith("SET")]


def file_of_table(place: sa.URL) -> str:
    if place.get_backend_name() != "postgresql":
        return "secure_data_keys.ibd"
    ((path,),) = query(place, "SELECT pg_relation_filepath('secure_data_keys')")
    return Path(path).name


def write_out(server: Server, place: sa.URL) -> None:
    """Have the table's file hold what is in memory."""
    if not isinstance(server, MariaDB):
        server.flush()
        return
    with server.admin.connect() as connection:
        connection.exec_driver_sql(f"FLUSH TABLES {place.database}.secure_data_keys FOR EXPORT")
        connection.exec_driver_sql("UNLOCK TABLES")
