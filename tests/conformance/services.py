"""The services under test, by name.  Another database is another entry of `KINDS`."""

import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.adk.sessions import BaseSessionService
from google.adk.sessions.database_session_service import DatabaseSessionService
from sqlalchemy import event
from sqlalchemy.ext.asyncio import create_async_engine

from adk_secure_sessions import AesGcmBackend, EncryptedSessionService

# One key for the whole run, so that a second service opens what the first one wrote.
KEY = os.urandom(32)


@dataclass(frozen=True)
class Kind:
    """A way to have a session service on a database that lives in a given directory."""

    open: Callable[[Path], AbstractAsyncContextManager[BaseSessionService]]
    is_reference: bool = False
    # Whether opening the same directory again gives the same database.
    is_shared: bool = True
    # Whether several event loops may use one service at once, each in its thread.
    is_threaded: bool = True


DATABASE = "sessions.db"
_adk_tables: list[bytes] = []


def url_in(directory: Path) -> str:
    return f"sqlite+aiosqlite:///{directory / DATABASE}"


@asynccontextmanager
async def adk(directory: Path) -> AsyncIterator[BaseSessionService]:
    # Most of the run's time is the reference's: give it its tables ready-made, and spare
    # it the waiting for the disk.  Nothing here pulls the plug on it.
    database = directory / DATABASE
    if _adk_tables and not database.exists():
        database.write_bytes(_adk_tables[0])
    service = DatabaseSessionService(url_in(directory))
    event.listen(service.db_engine.sync_engine, "connect", _without_sync)
    try:
        if not _adk_tables:
            await service.list_sessions(app_name="")
            _adk_tables.append(database.read_bytes())
        yield service
    finally:
        await service.close()


@asynccontextmanager
async def encrypted_file(directory: Path) -> AsyncIterator[BaseSessionService]:
    async with EncryptedSessionService(url_in(directory), AesGcmBackend(KEY)) as service:
        yield service


@asynccontextmanager
async def encrypted_memory(directory: Path) -> AsyncIterator[BaseSessionService]:
    url = "sqlite+aiosqlite:///:memory:"
    async with EncryptedSessionService(url, AesGcmBackend(KEY)) as service:
        yield service


@asynccontextmanager
async def encrypted_engine(directory: Path) -> AsyncIterator[BaseSessionService]:
    engine = create_async_engine(url_in(directory))
    try:
        async with EncryptedSessionService(db_engine=engine, backend=AesGcmBackend(KEY)) as service:
            yield service
    finally:
        await engine.dispose()


KINDS: dict[str, Kind] = {
    "adk": Kind(adk, is_reference=True, is_threaded=False),
    "encrypted-file": Kind(encrypted_file),
    "encrypted-memory": Kind(encrypted_memory, is_shared=False),
    # SQLAlchemy's async engines serve one event loop at a time.
    "encrypted-engine": Kind(encrypted_engine, is_threaded=False),
}


def _without_sync(connection: Any, _record: object) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA synchronous=OFF")
    cursor.close()
