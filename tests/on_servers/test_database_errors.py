"""Whatever a database or a driver reports, callers get our own errors, without stored values.

Each test makes a database fail in one way.  Then it calls every operation of the service and some
maintenance functions (`provoke`): those that fail must raise a `SecureSessionError` whose text and
whose chain of causes name no id, and contain no exception of SQLAlchemy or a driver.
"""

import sqlite3
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from google.adk.sessions import Session
from google.adk.sessions.base_session_service import GetSessionConfig
from sqlalchemy import URL
from sqlalchemy.ext.asyncio import create_async_engine

from adk_secure_sessions import (
    AesGcmBackend,
    Audit,
    ConfigurationError,
    DatabaseError,
    EncryptedSessionService,
    SecureSessionError,
    maintenance,
)
from adk_secure_sessions.db.dialects import dialect_of
from adk_secure_sessions.db.protocol import Disconnected
from tests.conformance.services import KEY
from tests.conformance.support import event
from tests.drivers import each_driver, on_drivers, server, url
from tests.reliability.results import Record, database_of
from tests.servers import Server

__all__ = ["server", "url"]

name = each_driver("sqlite", "asyncpg", "asyncmy", soak=["aiosqlite-engine", "psycopg"])
on_postgresql = on_drivers("asyncpg", soak=["psycopg"])
FOREIGN = ("sqlalchemy", "asyncpg", "psycopg", "asyncmy", "sqlite3", "aiosqlite")
NEEDLE = "needle5309"


@pytest.fixture
def behind(url: URL, server: Server | None) -> Iterator[Callable[[str], None]]:
    """Runs a statement as somebody else who may do anything to the database."""
    driver = server.admin_url.drivername if server else "sqlite"
    engine = sa.create_engine(url.set(drivername=driver), isolation_level="AUTOCOMMIT")

    def run(statement: str) -> None:
        with engine.connect() as connection:
            connection.exec_driver_sql(statement)

    yield run
    engine.dispose()


@pytest.fixture
def admin(server: Server) -> Callable[[str], None]:
    def run(statement: str) -> None:
        with server.admin.connect() as connection:
            connection.exec_driver_sql(statement)

    return run


@asynccontextmanager
async def open_service(
    name: str, url: URL, **options: Any
) -> AsyncIterator[EncryptedSessionService]:
    backend = AesGcmBackend(KEY)
    if name != "aiosqlite-engine":
        async with EncryptedSessionService(url, backend, **options) as service:
            yield service
        return
    engine = create_async_engine(url)
    async with EncryptedSessionService(db_engine=engine, backend=backend) as service:
        yield service
    await engine.dispose()


WHO: Any = {"app_name": f"app {NEEDLE}", "user_id": f"user {NEEDLE}"}
DELTA = {"k": NEEDLE, "user:k": NEEDLE, "app:k": NEEDLE}


async def begin(service: EncryptedSessionService) -> Session:
    session = await service.create_session(**WHO, session_id=NEEDLE, state=dict(DELTA))
    await service.append_event(session, event("text", delta=dict(DELTA)))
    return session


async def provoke(
    service: EncryptedSessionService, session: Session | None
) -> list[SecureSessionError]:
    """Call every operation of *service*; return the errors, all of which must be ours."""
    calls: list[Callable[[], Any]] = [
        lambda: service.get_session(**WHO, session_id=NEEDLE),
        lambda: service.list_sessions(**WHO),
        lambda: service.list_sessions(app_name=WHO["app_name"]),
        lambda: service.get_user_state(**WHO),
        lambda: service.create_session(**WHO, state=dict(DELTA)),
        lambda: service.create_session(app_name=WHO["app_name"], user_id=f"other {NEEDLE}"),
        lambda: service.delete_session(**WHO, session_id=NEEDLE),
    ]
    if session is not None:
        later = event("text", delta=dict(DELTA))
        calls.insert(4, lambda: service.append_event(session, later))
    errors: list[SecureSessionError] = []
    for call in calls:
        try:
            await call()
        except Exception as error:
            errors.append(ours(error))
    return errors


async def provoke_maintenance(url: URL) -> list[SecureSessionError]:
    errors: list[SecureSessionError] = []
    functions: list[Callable[[maintenance.Database], Any]] = [
        maintenance.verify,
        maintenance.status,
        maintenance.rotate_master,
        maintenance.rotate_data,
        maintenance.retire,
        lambda db: maintenance.erase_user(db, WHO["app_name"], WHO["user_id"]),
    ]
    for function in functions:
        async with maintenance.Database(url, AesGcmBackend(KEY)) as db:
            try:
                await function(db)
            except Exception as error:
                errors.append(ours(error))
    return errors


def ours(error: Exception) -> SecureSessionError:
    assert isinstance(error, SecureSessionError), repr(error)
    chain: list[BaseException] = [error]
    for link in chain:
        chain += [one for one in (link.__cause__, link.__context__) if one and one not in chain]
        assert not type(link).__module__.startswith(FOREIGN), repr(link)
    assert NEEDLE not in "".join(traceback.format_exception(error))
    return error


def database_errors(errors: list[SecureSessionError]) -> list[DatabaseError]:
    found = [error for error in errors if isinstance(error, DatabaseError)]
    assert found, errors
    return found


async def test_table_dropped_under_a_running_service(
    name: str, url: URL, behind: Callable[[str], None]
) -> None:
    async with open_service(name, url) as service:
        session = await begin(service)
        behind("DROP TABLE secure_events")
        errors = await provoke(service, session)
        behind("DROP TABLE secure_users")
        errors += await provoke(service, session)
    for error in database_errors(errors):
        assert not error.retryable
        assert "check that all tables" in str(error)
        assert error.code in ("42P01", "1146", "SQLITE_ERROR")
    assert await provoke_maintenance(url)


@on_postgresql
async def test_permission_denied(name: str, url: URL, behind: Callable[[str], None]) -> None:
    async with open_service(name, url) as service:
        session = await begin(service)
        behind(f"REVOKE ALL ON secure_sessions, secure_data_keys FROM {url.username}")
        errors = await provoke(service, session)
    async with open_service(name, url) as service:
        errors += await provoke(service, session)  # when it opens the database
    for error in database_errors(errors):
        assert "grant the account" in str(error)
        assert "permission denied for table secure_" in str(error)  # the server says which
    assert await provoke_maintenance(url)


@on_postgresql
async def test_missing_permission_on_the_audit_trail_is_not_said_to_be_another(
    name: str, url: URL, behind: Callable[[str], None]
) -> None:
    """Of the permissions that the text names for other tables, this table needs only two."""
    async with open_service(name, url, audit=Audit("blind", table=True)) as service:
        await begin(service)
        behind(f"REVOKE INSERT ON secure_audit FROM {url.username}")
        with pytest.raises(DatabaseError, match="on secure_audit only SELECT and INSERT") as caught:
            await service.create_session(**WHO)
    assert "permission denied for table secure_audit" in str(caught.value)


@on_drivers("asyncmy")
async def test_permission_denied_by_mariadb(
    name: str, url: URL, admin: Callable[[str], None]
) -> None:
    async with open_service(name, url) as service:
        session = await begin(service)
    user = str(url.database)[:20]
    admin(f"CREATE USER {user}@localhost")
    try:
        admin(f"GRANT SELECT ON {url.database}.* TO {user}@localhost")
        reader = url.set(username=user)
        async with open_service(name, reader) as service:
            errors = database_errors(await provoke(service, session))
        assert {error.code for error in errors} == {"1142"}
        assert all("grant the account" in str(error) for error in errors)
        assert await provoke_maintenance(reader)
    finally:
        admin(f"DROP USER {user}@localhost")


@on_drivers("asyncmy")
async def test_connection_that_is_lost_while_tables_are_created_is_a_lost_connection(
    name: str, url: URL, server: Server
) -> None:
    def create(connection: sa.Connection) -> None:
        with dialect_of(connection).exclusively(connection):
            server.kill(url)
            connection.exec_driver_sql("SELECT 1")

    async with open_service(name, url) as service:
        await begin(service)
        with pytest.raises(Disconnected):
            await service._runner.executors.data.run_sync(create)


@pytest.mark.usefixtures("without_pauses")
@on_postgresql
async def test_server_that_became_read_only(
    name: str, url: URL, server: Server, admin: Callable[[str], None], record: Record
) -> None:
    async with open_service(name, url) as service:
        session = await begin(service)
        admin(f"ALTER ROLE {url.username} SET default_transaction_read_only = on")
        server.kill(url)
        with pytest.raises(SecureSessionError) as info:
            await service.append_event(session, event("text"))
        found = await service.get_session(**WHO, session_id=NEEDLE)
        assert found is not None
    error = ours(info.value)
    assert isinstance(error, DatabaseError)
    assert (error.code, error.retryable) == ("25006", True)
    record.fault(f"read-only server/{database_of(url)}", times=1, errors=[error])
    assert "primary" in str(error)


@on_drivers("asyncpg", "asyncmy", soak=["psycopg"])
async def test_time_limit_of_the_server(
    name: str, url: URL, server: Server, record: Record
) -> None:
    async with open_service(name, url) as service:
        session = await begin(service)
    options: dict[str, Any] = {
        "asyncpg": {"server_settings": {"statement_timeout": "300"}},
        "psycopg": {"options": "-c statement_timeout=300"},
        "asyncmy": {"init_command": "SET SESSION max_statement_time = 0.3"},
    }
    async with open_service(name, url, connect_args=options[name]) as service:
        found = await service.get_session(**WHO, session_id=session.id)
        assert found is not None
        with server.rows_locked(url, "secure_sessions"):
            errors = database_errors(await provoke(service, found))
    for error in errors:
        assert error.retryable
        assert error.code in ("57014", "1969")
    record.fault(f"statement time-out/{database_of(url)}", times=len(errors), errors=errors)


class AlmostFull(sqlite3.Connection):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.execute("PRAGMA max_page_count = 40").close()


@on_drivers("sqlite")
async def test_full_disk(name: str, url: URL) -> None:
    async with open_service(name, url, connect_args={"factory": AlmostFull}) as service:
        session = await begin(service)
        errors: list[SecureSessionError] = []
        for _ in range(200):
            try:
                await service.append_event(session, event("x" * 4000))
            except Exception as error:
                errors.append(ours(error))
                break
        errors += await provoke(service, session)
    for found in database_errors(errors):
        assert (found.code, found.retryable) == ("SQLITE_FULL", True)
        assert "free space" in str(found)


@on_drivers("sqlite")
async def test_file_locked_by_another_process(name: str, url: URL, record: Record) -> None:
    async with open_service(name, url, connect_args={"timeout": 0.1}) as service:
        session = await begin(service)
        with sqlite3.connect(str(url.database), isolation_level=None) as other:
            other.execute("BEGIN IMMEDIATE")
            errors = database_errors(await provoke(service, session))
            other.execute("ROLLBACK")
        other.close()
    for error in errors:
        assert (error.code, error.retryable) == ("SQLITE_BUSY", True)
    record.fault("file locked/sqlite", times=len(errors), errors=errors)


@on_drivers("sqlite", "aiosqlite-engine")
async def test_damaged_file(name: str, url: URL) -> None:
    async with open_service(name, url) as service:
        await begin(service)
    with Path(str(url.database)).open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * 100_000)
    for damaged in (True, False):
        async with open_service(name, url) as service:
            assert len(await provoke(service, None)) == 7
        Path(str(url.database)).write_bytes(b"no database" * 1000 if damaged else b"")
    assert await provoke_maintenance(url)


UNREACHABLE: dict[str, tuple[str, str]] = {
    "unknown host": ("{driver}://u:{needle}@nowhere.invalid/d", "cannot be reached"),
    "closed port": ("{driver}://u:{needle}@127.0.0.1:9/d", "cannot be reached"),
    "no socket": ("{driver}://u:{needle}@/d?{socket}=/nowhere", "cannot be reached"),
}


@pytest.mark.parametrize("driver", ["postgresql+asyncpg", "postgresql+psycopg", "mysql+asyncmy"])
@pytest.mark.parametrize("why", UNREACHABLE)
async def test_server_that_cannot_be_reached(driver: str, why: str) -> None:
    text, expected = UNREACHABLE[why]
    socket = "unix_socket" if "asyncmy" in driver else "host"
    url = sa.make_url(text.format(driver=driver, needle=NEEDLE, socket=socket))
    async with EncryptedSessionService(url, AesGcmBackend(KEY)) as service:
        with pytest.raises(SecureSessionError) as info:
            await service.get_session(app_name="a", user_id="u", session_id="s")
    error = ours(info.value)
    assert isinstance(error, DatabaseError)
    assert error.retryable
    assert expected in str(error)


@on_drivers("asyncpg", "psycopg", "asyncmy")
async def test_account_that_the_server_rejects(name: str, url: URL) -> None:
    rejected = url.set(username="nobody_here", password=NEEDLE)
    async with open_service(name, rejected) as service:
        with pytest.raises(SecureSessionError) as info:
            await service.get_session(app_name="a", user_id="u", session_id="s")
    error = ours(info.value)
    assert isinstance(error, DatabaseError)
    assert "nobody_here" in str(error)


@on_drivers("asyncpg", "psycopg", "asyncmy")
@pytest.mark.parametrize("option", [{"nonsense": NEEDLE}, {"port": NEEDLE}], ids=str)
async def test_option_that_the_driver_rejects(name: str, url: URL, option: dict[str, str]) -> None:
    async with open_service(name, url, connect_args=option) as service:
        errors = await provoke(service, None)  # through a socket, a port may not matter
    assert all(isinstance(error, ConfigurationError | DatabaseError) for error in errors)
    if "nonsense" in option:
        assert len(errors) == 7


async def test_number_that_no_database_holds(name: str, url: URL) -> None:
    async with open_service(name, url) as service:
        await begin(service)
        found = await service.get_session(
            **WHO, session_id=NEEDLE, config=GetSessionConfig(num_recent_events=10**30)
        )
        assert found is not None
        assert len(found.events) == 1


@on_drivers("aiosqlite-engine", "asyncpg", "asyncmy")
async def test_engine_that_was_disposed_of_connects_again(url: URL) -> None:
    engine = create_async_engine(url)
    async with EncryptedSessionService(db_engine=engine, backend=AesGcmBackend(KEY)) as service:
        session = await begin(service)
        await engine.dispose()
        assert not await provoke(service, session)
    await engine.dispose()
