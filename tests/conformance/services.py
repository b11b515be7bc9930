"""The services under test, by name.  Another database is another entry of `KINDS`."""

import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.adk.sessions import BaseSessionService
from google.adk.sessions.database_session_service import DatabaseSessionService
from sqlalchemy import URL, event
from sqlalchemy.ext.asyncio import create_async_engine

from adk_secure_sessions import AesGcmBackend, EncryptedSessionService

# One key for the whole run, so that a second service opens what the first one wrote.
KEY = os.urandom(32)


@dataclass(frozen=True)
class Kind:
    """A way to have a session service on a database that is given by its URL."""

    open: Callable[[URL], AbstractAsyncContextManager[BaseSessionService]]
    driver: str = "sqlite+aiosqlite"
    # The fixture that is the server where the database lives; none: in a file.
    server: str | None = None
    is_reference: bool = False
    # Whether opening the same URL again gives the same database.
    is_shared: bool = True
    # Whether several event loops may use one service at once, each in its thread.
    is_threaded: bool = False
    # Whether another event loop has to be refused, even after the first has ended.
    is_bound: bool = False


_adk_tables: list[bytes] = []


def file_in(directory: Path) -> URL:
    """The URL of a SQLite file."""
    return URL.create("sqlite+aiosqlite", database=str(directory / "sessions.db"))


@asynccontextmanager
async def adk(url: URL) -> AsyncIterator[BaseSessionService]:
    # Most of the run's time is the reference's: give it its tables ready-made, and spare
    # it the waiting for the disk.  Nothing here pulls the plug on it.  A busy machine can keep
    # its writers waiting for one another longer than the five seconds after which they give up.
    database = Path(url.database or "")
    if _adk_tables and not database.exists():
        database.write_bytes(_adk_tables[0])
    service = DatabaseSessionService(url.render_as_string())
    event.listen(service.db_engine.sync_engine, "connect", _with_pragmas)
    try:
        if not _adk_tables:
            await service.list_sessions(app_name="")
            _adk_tables.append(database.read_bytes())
        yield service
    finally:
        await service.close()


@asynccontextmanager
async def encrypted(url: URL) -> AsyncIterator[BaseSessionService]:
    text = url.render_as_string(hide_password=False)
    async with EncryptedSessionService(text, AesGcmBackend(KEY)) as service:
        yield service


@asynccontextmanager
async def encrypted_with_keys_apart(url: URL) -> AsyncIterator[BaseSessionService]:
    keys = url.set(database=f"{url.database}.keys")
    async with EncryptedSessionService(url, AesGcmBackend(KEY), key_db_url=keys) as service:
        yield service


@asynccontextmanager
async def encrypted_memory(url: URL) -> AsyncIterator[BaseSessionService]:
    async with EncryptedSessionService(url.set(database=":memory:"), AesGcmBackend(KEY)) as service:
        yield service


@asynccontextmanager
async def encrypted_engine(url: URL) -> AsyncIterator[BaseSessionService]:
    engine = create_async_engine(url)
    try:
        async with EncryptedSessionService(db_engine=engine, backend=AesGcmBackend(KEY)) as service:
            yield service
    finally:
        await engine.dispose()


# SQLAlchemy's async engines serve one event loop at a time; our threads for SQLite serve any.
KINDS: dict[str, Kind] = {
    "adk": Kind(adk, is_reference=True),
    "encrypted-file": Kind(encrypted, is_threaded=True),
    "encrypted-memory": Kind(encrypted_memory, is_shared=False, is_threaded=True),
    "encrypted-engine": Kind(encrypted_engine),
    "encrypted-keys-apart": Kind(encrypted_with_keys_apart, is_threaded=True),
    "encrypted-postgresql": Kind(encrypted, "postgresql+asyncpg", "postgresql"),
    "encrypted-postgresql-engine": Kind(
        encrypted_engine, "postgresql+asyncpg", "postgresql", is_bound=True
    ),
    "encrypted-psycopg": Kind(encrypted, "postgresql+psycopg", "postgresql"),
    "encrypted-mariadb": Kind(encrypted, "mariadb+asyncmy", "mariadb"),
    "encrypted-mariadb-engine": Kind(encrypted_engine, "mysql+asyncmy", "mariadb", is_bound=True),
}
# One of each executor: every case runs on these.  On the rest run by default those that may
# depend on the driver or the engine; all of them under `make soak`.
MAIN_KINDS = ["adk", "encrypted-file", "encrypted-postgresql", "encrypted-mariadb"]
OTHER_KINDS = [name for name in KINDS if name not in MAIN_KINDS]
ENGINES = [name for name, kind in KINDS.items() if kind.open is encrypted_engine]


def _with_pragmas(connection: Any, _record: object) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA synchronous=OFF")
    cursor.execute("PRAGMA busy_timeout=30000")
    cursor.close()
