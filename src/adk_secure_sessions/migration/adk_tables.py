"""Read the tables of google-adk's `DatabaseSessionService` and `SqliteSessionService`.

`AdkTables` does not use google-adk's service, which runs four queries for each session and creates
a model of SQLAlchemy for each event.  Instead, `AdkTables` reads a batch of sessions with two
queries, in one read-only transaction.  The transaction ends before the rows are converted, so that
it does not block google-adk's writers for long.  `adk_queries` contains the queries, and `adk_rows`
converts the rows.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from datetime import tzinfo
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import sqlalchemy as sa

from adk_secure_sessions.concurrency import to_thread
from adk_secure_sessions.db.connect import executors_for, parsed_url
from adk_secure_sessions.db.dialects import dialect_of
from adk_secure_sessions.db.protocol import Executor, with_retries
from adk_secure_sessions.db.sqlite import file_uri, is_in_memory, read_only_mode
from adk_secure_sessions.errors import ConfigurationError
from adk_secure_sessions.hiding import hides_locals
from adk_secure_sessions.maintenance.database import Description, describe
from adk_secure_sessions.migration import adk_queries
from adk_secure_sessions.migration.adk_queries import (
    ADK_SESSIONS,
    APP_STATES,
    STATE_TABLES,
    USER_STATES,
    AdkQueries,
    can_store,
    last_key,
)
from adk_secure_sessions.migration.adk_rows import to_microseconds
from adk_secure_sessions.migration.sources import (
    Contents,
    ConversionError,
    ListedSession,
    Selection,
    Source,
    States,
    Unreadable,
)
from adk_secure_sessions.storage.queries import grouped

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine  # this import takes a third of a second

T = TypeVar("T")

# The maximum number of sessions in one batch of `AdkTables.sessions`, and of bytes in their rows; a
# larger session is a batch alone.  In memory, a session is about twice as large as its rows.
_BATCH_SESSIONS = 500
_BATCH_BYTES = 4 * 2**20


@hides_locals
class AdkTables(Source):
    """The tables of google-adk's `DatabaseSessionService` or `SqliteSessionService`.

    google-adk may keep reading and writing the tables.  Several tasks may call the methods of one
    object at the same time.

    Args:
        db_url: The database URL; give exactly one of *db_url* and *db_engine*.  A SQLite file is
            opened as read-only.
        db_engine: Your own engine for the database.
        time_zone: The time zone of the processes that wrote the database.  Give it if it was not
            UTC, and if they used a release of google-adk that stored local times: docs/migrate.md,
            Times, lists these releases.  By default, times are read as the installed google-adk
            reads them.

    Raises:
        ConfigurationError: An argument cannot be used, or the SQLite file does not exist.
    """

    def __init__(
        self,
        db_url: str | sa.URL | None = None,
        *,
        db_engine: "AsyncEngine | None" = None,
        time_zone: tzinfo | None = None,
    ) -> None:
        self._read_only_url = None if db_url is None else _read_only(db_url)
        self._url_and_engine = db_url, db_engine
        self._time_zone = time_zone
        self._queries: AdkQueries | None = None
        self._executors: dict[float | None, Executor] = {}  # by the limit of their reads
        self.set_read_timeout(None)

    def set_read_timeout(self, seconds: float | None) -> None:
        """From now on, interrupt each transaction that reads for longer than *seconds*."""
        if seconds not in self._executors:
            url, engine = self._read_only_url, self._url_and_engine[1]
            self._executors[seconds] = executors_for(url, engine, read_timeout=seconds).data
        self._executor = self._executors[seconds]

    @property
    def description(self) -> str:
        """The kind of the tables; before the first read, `google-adk's tables`."""
        return self._queries.kind.value if self._queries else "google-adk's tables"

    @property
    def location(self) -> str:
        """The database, for messages: without user name, password and options."""
        db_url, db_engine = self._url_and_engine
        url = sa.make_url(db_url or "") if db_engine is None else db_engine.url
        return str(sa.URL.create(url.drivername, None, None, url.host, url.port, url.database))

    async def describe(self) -> Description:
        """Describe the database to a person who is to confirm that its rows are deleted."""
        queries = await self.queries()
        work = partial(describe, table=ADK_SESSIONS, time_column="update_time")
        description = await self.run_in_snapshot(work)
        try:
            updated_at = to_microseconds(description.updated_at, queries.sessions_zone)
        except ConversionError:
            updated_at = None
        return description._replace(updated_at=updated_at)

    async def count(self, selection: Selection) -> int:
        return await self._run(AdkQueries.count, selection=selection)

    async def sessions(self, selection: Selection) -> AsyncIterator[Sequence[ListedSession]]:
        pages = self._pages(AdkQueries.session_page, adk_queries.SESSION_PAGE, selection=selection)
        async for page in pages:
            for batch in grouped(page, lambda sized: sized[1], _BATCH_SESSIONS, _BATCH_BYTES):
                yield [session for session, _size in batch]

    async def read(self, sessions: Sequence[ListedSession]) -> Contents:
        dialect = (await self.queries()).dialect
        sessions = [session for session in sessions if can_store(dialect, *session.ids)]
        if not sessions:
            return {}
        found = await self._run(AdkQueries.sessions_with_events, sessions=sessions)
        return await self._converted(AdkQueries.convert_sessions, found)

    async def states(self, selection: Selection) -> AsyncIterator[States]:
        for table in STATE_TABLES:
            part: dict[str, Any] = {"selection": selection, "table": table}
            async for rows in self._pages(AdkQueries.state_page, adk_queries.STATE_PAGE, **part):
                yield await self._converted(AdkQueries.convert_states, rows)
            if others := await self._run(AdkQueries.states_of_other_spellings, **part):
                yield await self._converted(AdkQueries.convert_states, others)

    async def find(self, app_name: str, user_id: str, session_id: str) -> ListedSession | None:
        """Return the session with these ids; None if there is none."""
        key = (app_name, user_id, session_id)
        rows = await self._run(AdkQueries.sessions_with_prefix, key=key, after=None, limit=1)
        return rows[0].session if rows else None

    async def sessions_of(self, app_name: str, user_id: str | None) -> AsyncIterator[Contents]:
        """Yield the sessions of a user, or of an app, in batches and without their events."""
        key = (app_name,) if user_id is None else (app_name, user_id)
        pages = self._pages(AdkQueries.sessions_with_prefix, adk_queries.LOOKUP_PAGE, key=key)
        async for rows in pages:
            yield await self._converted(AdkQueries.convert_sessions, rows)

    async def state(self, app_name: str, user_id: str | None = None) -> bytes | Unreadable | None:
        """Return the state of a user, or of an app, as JSON; None if the source has none."""
        key = (app_name,) if user_id is None else (app_name, user_id)
        table = APP_STATES if user_id is None else USER_STATES
        row = await self._run(AdkQueries.owner_state, table=table, key=key)
        if row is None:
            return None
        return (await self._converted(AdkQueries.convert_states, [(key, row)]))[key]

    async def close(self) -> None:
        queries, self._queries = self._queries, None
        if queries is not None and queries.pickles is not None:
            queries.pickles.close()
        for executor in self._executors.values():
            await executor.close()

    async def run_without_snapshot(self, work: Callable[[sa.Connection], T]) -> T:
        """Run *work* without a snapshot.

        Here, SQLite's driver returns text as str, which SQLAlchemy's inspector needs.
        """
        return await with_retries(lambda: self._executor.run_sync(work, commit=False))

    async def run_in_snapshot(self, work: Callable[[sa.Connection], T]) -> T:
        """Call *work* in a transaction, whose queries all read one snapshot of the database."""

        def read(connection: sa.Connection) -> T:
            dialect = dialect_of(connection)
            # SQLite's driver returns texts as bytes: otherwise content that is not UTF-8 would make
            # the query of a whole batch fail.
            with dialect.decoding(connection, bytes):
                dialect.begin_snapshot(connection)
                return work(connection)

        return await with_retries(lambda: self._executor.run_sync(read, commit=False))

    def open_writer(self) -> Executor:
        """Return an executor that can change the tables; the caller closes it."""
        return executors_for(*self._url_and_engine).data

    async def queries(self) -> AdkQueries:
        """Return the queries; raise ConfigurationError if there are no tables of google-adk."""
        if self._queries is None:
            made = await self._make_queries()
            # If several tasks were first, all use one object: `close` ends the process of one only.
            self._queries = self._queries or made
        return self._queries

    async def _make_queries(self) -> AdkQueries:
        return await self.run_without_snapshot(partial(AdkQueries, time_zone=self._time_zone))

    async def _run(self, query: Callable[..., T], **arguments: Any) -> T:
        """Call *query*, a method of `AdkQueries`, in a snapshot."""
        queries = await self.queries()
        return await self.run_in_snapshot(partial(query, queries, **arguments))

    async def _converted(self, convert: Callable[[AdkQueries, Any], T], rows: Any) -> T:
        """Convert rows in a thread: parsing a long session, decrypting it or loading its pickles
        would block the event loop.
        """
        return await to_thread(convert, await self.queries(), rows)

    async def _pages(
        self, query: Callable[..., list[T]], size: int, **arguments: Any
    ) -> AsyncIterator[list[T]]:
        after = None
        while rows := await self._run(query, after=after, limit=size, **arguments):
            yield rows
            if len(rows) < size:  # do not follow a writer that adds rows behind the last
                return
            after = last_key(rows)


def _read_only(db_url: str | sa.URL) -> sa.URL:
    url = parsed_url("the source (--from)", db_url)
    if url.get_backend_name() != "sqlite" or is_in_memory(url):
        return url
    database = url.database or ""
    if database.startswith("file:"):
        return url if "mode" in url.query else url.update_query_dict({"mode": "ro", "uri": "true"})
    path = Path(database)
    if not path.is_file():
        raise ConfigurationError(
            f"the SQLite file of the source, {database!r}, does not exist: check its path"
        )
    name, value = read_only_mode(path)
    query = {**url.query, name: value, "uri": "true"}
    return url.set(database=file_uri(path.absolute()), query=query)
