"""The services under test, by name.

How it works.  A `Kind` is a way to open a service on the URL of an empty database.  `KINDS` lists
all of them: ADK's own service, ours on SQLite files, in memory, on a caller's engine, with a key
database, on PostgreSQL and on MariaDB.  The fixture `url` makes the database for a kind (in a file,
or on the server that `Kind.server` names), and the fixture `service` opens it.  To run the tests on
another database, add an entry to `KINDS`.
"""

import itertools
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.adk.events import Event
from google.adk.sessions import BaseSessionService, InMemorySessionService
from google.adk.sessions.base_session_service import GetSessionConfig
from google.adk.sessions.database_session_service import DatabaseSessionService
from google.adk.sessions.sqlite_session_service import SqliteSessionService
from sqlalchemy import URL, event
from sqlalchemy.ext.asyncio import create_async_engine

from adk_secure_sessions import (
    AesGcmBackend,
    Caches,
    EncryptedSessionService,
    EncryptedSessionWrapper,
    Packing,
)
from adk_secure_sessions.migration import PlaintextFallbackService
from tests.integrations.inner_services import FerretDB
from tests.migration.lookups import MemoryLookup

# One key for the whole run, so that a second service opens what the first one wrote.
KEY = os.urandom(32)


@dataclass(frozen=True)
class Kind:
    """How to open a session service on the URL of a database."""

    open: Callable[[URL], AbstractAsyncContextManager[BaseSessionService]]
    driver: str = "sqlite+aiosqlite"
    # The fixture of the server that has the database; None: it is a file.
    server: str | None = None
    is_reference: bool = False
    # Whether opening the same URL again gives the same database.
    is_shared: bool = True
    # Whether several event loops may use one service at once, each in its thread.
    is_threaded: bool = False
    # Whether a second event loop is rejected, even after the first has ended.
    is_bound: bool = False


_adk_tables: list[bytes] = []


def file_in(directory: Path) -> URL:
    """The URL of a SQLite file."""
    return URL.create("sqlite+aiosqlite", database=str(directory / "sessions.db"))


async def adk_service(url: URL) -> DatabaseSessionService:
    """ADK's service on the SQLite file *url*."""
    # ADK's service takes most of the time of a run.  So it gets a copy of a database that has its
    # tables already, and does not wait for the disk, since no test cuts the power.  On a busy
    # machine its writers may wait for each other longer than their default of five seconds.
    database = Path(url.database or "")
    if _adk_tables and not database.exists():
        database.write_bytes(_adk_tables[0])
    service = DatabaseSessionService(url.render_as_string())
    event.listen(service.db_engine.sync_engine, "connect", _with_pragmas)
    if not _adk_tables:
        await service.list_sessions(app_name="")
        _adk_tables.append(database.read_bytes())
    return service


@asynccontextmanager
async def adk(url: URL) -> AsyncIterator[BaseSessionService]:
    service = await adk_service(url)
    try:
        yield service
    finally:
        await service.close()


@asynccontextmanager
async def encrypted(url: URL) -> AsyncIterator[BaseSessionService]:
    text = url.render_as_string(hide_password=False)
    async with EncryptedSessionService(text, AesGcmBackend(KEY)) as service:
        yield service


class ReadsTwice(EncryptedSessionService):
    """Reads each session whole first, so that the returned events come from the cache of events.

    Also keeps the text of each event that it returns, to see whether somebody changes the event:
    other readers of the session have the same objects.
    """

    returned: list[tuple[Event, str]]

    async def get_session(self, *, config: GetSessionConfig | None = None, **ids: Any) -> Any:
        await super().get_session(**ids)
        session = await super().get_session(config=config, **ids)
        events = session.events if session else []
        self.returned += [(event, repr(event)) for event in events]
        return session


@asynccontextmanager
async def encrypted_with_cached_events(url: URL) -> AsyncIterator[BaseSessionService]:
    async with ReadsTwice(url, AesGcmBackend(KEY), cache=Caches(events=2**24)) as service:
        service.returned = []
        yield service
        assert all(repr(event) == text for event, text in service.returned)


@asynccontextmanager
async def encrypted_with_key_database(url: URL) -> AsyncIterator[BaseSessionService]:
    keys = url.set(database=f"{url.database}.keys")
    async with EncryptedSessionService(url, AesGcmBackend(KEY), key_db_url=keys) as service:
        yield service


@asynccontextmanager
async def encrypted_memory(url: URL) -> AsyncIterator[BaseSessionService]:
    async with EncryptedSessionService(url.set(database=":memory:"), AesGcmBackend(KEY)) as service:
        yield service


@asynccontextmanager
async def encrypted_packed(url: URL) -> AsyncIterator[BaseSessionService]:
    async with EncryptedSessionService(
        url, AesGcmBackend(KEY), packing=Packing("zlib", "padme")
    ) as service:
        yield service


@asynccontextmanager
async def encrypted_engine(url: URL) -> AsyncIterator[BaseSessionService]:
    engine = create_async_engine(url)
    try:
        async with EncryptedSessionService(db_engine=engine, backend=AesGcmBackend(KEY)) as service:
            yield service
    finally:
        await engine.dispose()


@asynccontextmanager
async def encrypted_with_fallback(url: URL) -> AsyncIterator[BaseSessionService]:
    """With a plaintext source that has no sessions; tests/migration has tests of one that has."""
    service = EncryptedSessionService(url, AesGcmBackend(KEY))
    async with PlaintextFallbackService(service, MemoryLookup()) as fallback:
        yield fallback


_opened = itertools.count()


@asynccontextmanager
async def encrypted_on_next_node(url: URL) -> AsyncIterator[BaseSessionService]:
    """On each node of the cluster in turn, so that two services of a test use different nodes."""
    number = next(_opened) % 3
    address = Path(str(url.query["unix_socket"])).parent.parent / str(number) / "socket"
    on_node = url.update_query_dict(
        {"unix_socket": str(address), "init_command": "SET SESSION wsrep_sync_wait = 7"}
    )
    async with encrypted(on_node) as service:
        yield service


# SQLAlchemy's async engines serve one event loop at a time, our SQLite threads any number.
KINDS: dict[str, Kind] = {
    "adk": Kind(adk, is_reference=True),
    "encrypted-file": Kind(encrypted, is_threaded=True),
    "encrypted-memory": Kind(encrypted_memory, is_shared=False, is_threaded=True),
    "encrypted-cached-events": Kind(encrypted_with_cached_events, is_threaded=True),
    "encrypted-engine": Kind(encrypted_engine),
    "encrypted-key-database": Kind(encrypted_with_key_database, is_threaded=True),
    "encrypted-fallback": Kind(encrypted_with_fallback),
    "encrypted-packed": Kind(encrypted_packed, is_threaded=True),
    "encrypted-postgresql": Kind(encrypted, "postgresql+asyncpg", "postgresql"),
    "encrypted-postgresql-engine": Kind(
        encrypted_engine, "postgresql+asyncpg", "postgresql", is_bound=True
    ),
    "encrypted-psycopg": Kind(encrypted, "postgresql+psycopg", "postgresql"),
    "encrypted-pgbouncer": Kind(encrypted, "postgresql+asyncpg", "pgbouncer"),
    "encrypted-pgbouncer-psycopg": Kind(encrypted, "postgresql+psycopg", "pgbouncer"),
    "encrypted-mariadb": Kind(encrypted, "mariadb+asyncmy", "mariadb"),
    "encrypted-mariadb-engine": Kind(encrypted_engine, "mysql+asyncmy", "mariadb", is_bound=True),
    "encrypted-serializable": Kind(encrypted, "postgresql+asyncpg", "serializable"),
    "encrypted-serializable-psycopg": Kind(encrypted, "postgresql+psycopg", "serializable"),
    "encrypted-galera": Kind(encrypted_on_next_node, "mariadb+asyncmy", "galera"),
}


async def _inner_in_memory(url: URL) -> BaseSessionService:
    return InMemorySessionService()


async def _inner_sqlite(url: URL) -> BaseSessionService:
    return SqliteSessionService(str(url.database))


def wrapped(
    inner: Callable[[URL], Awaitable[BaseSessionService]],
) -> Callable[[URL], AbstractAsyncContextManager[BaseSessionService]]:
    """Return what opens `EncryptedSessionWrapper` on the service that *inner* creates."""

    @asynccontextmanager
    async def open_wrapper(url: URL) -> AsyncIterator[BaseSessionService]:
        keys = url.set(database=f"{url.database}.keys")
        async with EncryptedSessionWrapper(
            await inner(url), AesGcmBackend(KEY), key_db_url=keys
        ) as service:
            yield service

    return open_wrapper


@asynccontextmanager
async def _wrapped_mongodb(url: URL) -> AsyncIterator[BaseSessionService]:
    server = FerretDB(Path(str(url.query["socket"])), Path(str(url.query["directory"])))
    keys = URL.create("sqlite+aiosqlite", database=str(url.query["keys"]))
    with server.connected(str(url.database)) as open_one:
        async with EncryptedSessionWrapper(
            open_one(), AesGcmBackend(KEY), key_db_url=keys
        ) as service:
            yield service


# Services of ADK behind our wrapper.  They keep the differences of the service that stores.
WRAPPERS: dict[str, Kind] = {
    "wrapped-memory": Kind(wrapped(_inner_in_memory), is_reference=True, is_shared=False),
    "wrapped-sqlite": Kind(wrapped(_inner_sqlite), is_reference=True),
    "wrapped-database": Kind(wrapped(adk_service), is_reference=True),
    "wrapped-mongodb": Kind(_wrapped_mongodb, "mongodb", "ferretdb_server", is_reference=True),
}
# One for each executor.  By default, the others run the tests that may depend on a driver or an
# engine; `make soak` runs all tests on all of them.
MAIN_KINDS = ["adk", "encrypted-file", "encrypted-postgresql", "encrypted-mariadb"]
POOLED_KINDS = ["encrypted-pgbouncer", "encrypted-pgbouncer-psycopg"]
CLUSTER_KINDS = ["encrypted-serializable", "encrypted-serializable-psycopg", "encrypted-galera"]
OTHER_KINDS = [name for name in KINDS if name not in MAIN_KINDS]
# Of a parametrized test, these run every nth case by default, the others the first one.
NTH_CASES = {"adk": 6, "encrypted-file": 1, "wrapped-memory": 4}
ENGINES = [name for name, kind in KINDS.items() if kind.open is encrypted_engine]


def _with_pragmas(connection: Any, _record: object) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA synchronous=OFF")
    cursor.execute("PRAGMA busy_timeout=30000")
    cursor.close()
