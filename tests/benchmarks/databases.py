"""Create the databases to measure on, open the services on them, and measure their size."""

from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import sqlalchemy as sa
from google.adk.sessions import BaseSessionService
from google.adk.sessions.database_session_service import DatabaseSessionService
from google.adk.sessions.sqlite_session_service import SqliteSessionService
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from adk_secure_sessions import AesGcmBackend, Caches, EncryptedSessionService, FernetBackend
from tests import servers
from tests.benchmarks.floor_postgresql import PostgresFloor
from tests.benchmarks.floor_sqlite import SqliteFloor
from tests.maintenance.support import plaintext_backend

# The sides of a comparison: our service with each backend, ADK's services, and the floor.
OURS, FERNET, NO_OP = "aesgcm", "fernet", "no-op"
ADK, ADK_SQLITE, FLOOR = "adk", "adk-sqlite", "floor"
CACHED_EVENTS = "cached events"

_KEY = bytes(range(32))  # the same in each process
# PostgreSQL's default durability, which the servers of other tests turn off.  Background work is
# off; `update_statistics` replaces what autovacuum does for the planner.
_POSTGRESQL_OPTIONS = (
    "-cfsync=on",
    "-csynchronous_commit=on",
    "-cfull_page_writes=on",
    "-cautovacuum=off",
    "-cmax_wal_size=8GB",
    "-ccheckpoint_timeout=1h",
)


@asynccontextmanager
async def opened(
    side: str, url: sa.URL, *, prepare: bool = True
) -> AsyncIterator[BaseSessionService]:
    """Open the service of *side* on its own database, and *prepare* its tables and connection."""
    service = await _open(side, url)
    try:
        if prepare:
            await service.list_sessions(app_name="", user_id="")
        yield service
    finally:
        if hasattr(service, "close"):  # ADK's SqliteSessionService has none
            await service.close()


async def _open(side: str, url: sa.URL) -> BaseSessionService:
    if side == OURS:
        return EncryptedSessionService(url, AesGcmBackend(_KEY))
    if side == CACHED_EVENTS:
        return EncryptedSessionService(url, AesGcmBackend(_KEY), cache=Caches(events=2**30))
    if side == FERNET:
        return EncryptedSessionService(url, FernetBackend(_KEY))
    if side == NO_OP:
        return EncryptedSessionService(url, plaintext_backend())
    if side == ADK:
        return DatabaseSessionService(url.render_as_string(hide_password=False))
    if side == ADK_SQLITE:
        return SqliteSessionService(str(url.database))
    async with EncryptedSessionService(url, plaintext_backend()) as service:
        await service.prepare_tables()  # of the floor
    if url.get_backend_name() == "sqlite":
        return SqliteFloor(Path(str(url.database)))
    return await PostgresFloor.connect(url)


class Databases:
    """Creates empty databases of one kind; *stack* removes them at its end."""

    def __init__(self, kind: str, stack: ExitStack, directory: Path) -> None:
        self.kind = kind
        self._stack = stack
        self._directory = directory
        self._made = 0
        self._server: servers.PostgreSQL | None = None
        if kind == "postgresql":
            self._server = stack.enter_context(servers.postgresql(*_POSTGRESQL_OPTIONS))

    @property
    def directory_of_server(self) -> Path | None:
        """The directory of the server; None if there is none."""
        return self._server.directory if self._server else None

    def create(self) -> sa.URL:
        """Create an empty database and return its URL."""
        self._made += 1
        if self._server is not None:
            url = self._stack.enter_context(self._server.database())
            return url.set(drivername="postgresql+asyncpg")
        path = self._directory / f"{self._made}.db"
        return sa.URL.create("sqlite+aiosqlite", database=str(path))


async def update_statistics(url: sa.URL) -> None:
    """Run ANALYZE on PostgreSQL, after many rows were added."""
    if url.get_backend_name() == "postgresql":
        async with autocommit_connection(url) as connection:
            await connection.exec_driver_sql("ANALYZE")


async def stored_bytes(url: sa.URL) -> int:
    """Return the size of the database in bytes, with indexes, after a vacuum."""
    async with autocommit_connection(url) as connection:
        if connection.dialect.name == "sqlite":
            await connection.exec_driver_sql("VACUUM")
            await connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
            return Path(str(url.database)).stat().st_size
        await connection.exec_driver_sql("VACUUM FULL")
        total = await connection.scalar(
            sa.text(
                "SELECT sum(pg_total_relation_size(oid))::bigint FROM pg_class"
                " WHERE relkind = 'r' AND relnamespace = current_schema()::regnamespace"
            )
        )
        assert isinstance(total, int)
        return total


@asynccontextmanager
async def autocommit_connection(url: sa.URL) -> AsyncIterator[AsyncConnection]:
    engine = create_async_engine(url, isolation_level="AUTOCOMMIT")
    try:
        async with engine.connect() as connection:
            yield connection
    finally:
        await engine.dispose()
