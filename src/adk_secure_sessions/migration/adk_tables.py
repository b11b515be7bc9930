"""Read the tables of google-adk's `DatabaseSessionService` and `SqliteSessionService`.

`AdkTables` does not use google-adk's service, which runs four queries for each session and creates
a model of SQLAlchemy for each event.  Instead, `AdkTables` reads a batch of sessions with two
queries, in one read-only transaction.  The transaction ends before the rows are converted, so that
it does not block google-adk's writers for long.  `adk_sql` contains the queries, and `adk_rows`
converts the rows.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import tzinfo
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import sqlalchemy as sa

from adk_secure_sessions.db.connect import executors_for
from adk_secure_sessions.db.dialects import dialect_of
from adk_secure_sessions.db.protocol import Executor, repeated
from adk_secure_sessions.db.sqlite import file_uri, is_in_memory, read_only_mode
from adk_secure_sessions.errors import ConfigurationError
from adk_secure_sessions.formats.states import JsonObject
from adk_secure_sessions.maintenance.description import Description, describe
from adk_secure_sessions.migration.adk_rows import (
    Row,
    UnreadableRow,
    check_names,
    state_of,
    time_of,
)
from adk_secure_sessions.migration.adk_sql import (
    APP_STATES,
    SESSIONS,
    STATE_TABLES,
    USER_STATES,
    Header,
    Kind,
    Page,
    Positions,
    StateRow,
    Tables,
    kinds_in,
)
from adk_secure_sessions.migration.sources import (
    LookupSource,
    Scope,
    SessionContent,
    SessionHeader,
    SourceSession,
    SourceSize,
    States,
    Unreadable,
)
from adk_secure_sessions.storage.pages import grouped
from adk_secure_sessions.tracebacks import hides_locals

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine  # this import takes a third of a second

__all__ = ["AdkTables", "Kind", "detect"]

T = TypeVar("T")

# The maximum number of sessions in one batch of `AdkTables.sessions`, and of bytes in their rows; a
# larger session is a batch alone.  In memory, the content of a session is about twice as large as
# its rows.
_BATCH_SESSIONS = 500
_BATCH_BYTES = 4 * 2**20


async def detect(
    db_url: str | sa.URL | None = None, *, db_engine: "AsyncEngine | None" = None
) -> frozenset[Kind]:
    """Return which kinds of tables a database contains; an empty set if it contains none of them.

    One database can contain the tables of this package and those of google-adk.  It cannot contain
    both the tables of google-adk and those of adk-secure-sessions 1.x, which have the same names.

    To tell the tables of google-adk from those of 1.x, this function reads the first 50 and the
    last 50 states of sessions, apps and users, in the order of their ids.  If 1.x has encrypted one
    of these states, the tables are those of 1.x.  Otherwise, the tables are google-adk's.  So an
    attacker who replaces only some encrypted states by plaintext does not change the result.
    """
    return await inspect(kinds_in, db_url, db_engine=db_engine)


async def inspect(
    work: Callable[[sa.Connection], T],
    db_url: str | sa.URL | None = None,
    *,
    db_engine: "AsyncEngine | None" = None,
) -> T:
    """Call *work*, which inspects a database and writes nothing, and return its result."""
    reader = _Reader(db_url, db_engine)
    try:
        return await reader.inspect(work)
    finally:
        await reader.close()


@hides_locals
class AdkTables(LookupSource):
    """The tables of google-adk's `DatabaseSessionService` or `SqliteSessionService`.

    google-adk may keep reading and writing the tables.

    Args:
        db_url: The database URL; give exactly one of *db_url* and *db_engine*.  A SQLite file is
            opened as read-only.
        db_engine: Your own engine for the database.
        time_zone: The time zone of the processes that wrote the database.  Give it if it was not
            UTC, and if they used a release of google-adk that stored local times: docs/migrate.md,
            Times, lists these releases.  By default, times are read as the installed google-adk
            reads them.

    Raises:
        ConfigurationError: One of these arguments cannot be used, or the SQLite file does not
            exist.
    """

    def __init__(
        self,
        db_url: str | sa.URL | None = None,
        *,
        db_engine: "AsyncEngine | None" = None,
        time_zone: tzinfo | None = None,
    ) -> None:
        self._reader = _Reader(db_url, db_engine)
        self._time_zone = time_zone
        self._found: Tables | None = None
        self._place = db_url, db_engine

    @property
    def description(self) -> str:
        """The kind of the tables; before the first read, `google-adk's tables`."""
        return self._found.kind.value if self._found else "google-adk's tables"

    @property
    def place(self) -> str:
        """The database, without user name, password and options."""
        db_url, db_engine = self._place
        if db_engine is None and db_url in (None, ":memory:"):
            return self.description
        url = sa.make_url(db_url or "") if db_engine is None else db_engine.url
        return str(sa.URL.create(url.drivername, None, None, url.host, url.port, url.database))

    async def describe(self) -> Description:
        """Describe the database to a person who is to confirm that its rows are deleted."""
        tables = await self._tables()
        work = partial(describe, table=SESSIONS, updated_at="update_time")
        found = await self._reader.run(work)
        try:
            updated_at = time_of(found.updated_at, tables.sessions_zone)
        except UnreadableRow:
            updated_at = None
        return found._replace(updated_at=updated_at)

    async def size(self, scope: Scope) -> SourceSize:
        """Return how many sessions and events *scope* contains."""
        tables = await self._tables()
        return await self._reader.run(partial(tables.size, scope=scope))

    async def sessions(self, scope: Scope) -> AsyncIterator[Sequence[SourceSession]]:
        """Yield the sessions in *scope* in batches, sorted by app name, user id and session id."""
        tables = await self._tables()
        async for page in self._pages(partial(tables.page, scope=scope), "sessions"):
            for batch in grouped(page, lambda one: one[1], _BATCH_SESSIONS, _BATCH_BYTES):
                yield [session for session, _size in batch]

    async def read(
        self, sessions: Sequence[SourceSession]
    ) -> Mapping[SourceSession, SessionContent | Unreadable]:
        """Return the contents of *sessions*; a session that was deleted meanwhile is omitted."""
        if not sessions:
            return {}
        tables = await self._tables()
        keys = [session.ids for session in sessions]
        headers, events = await self._reader.run(
            lambda connection: (tables.headers(connection, keys), tables.events(connection, keys))
        )
        histories: dict[Any, list[Row]] = {key: [] for key in headers}
        for app_name, user_id, session_id, *columns in events:
            history = histories.get((app_name, user_id, session_id))
            if history is not None:
                history.append(columns)
        stored = [(session, tables.key(session)) for session in sessions]
        return await self._convert(
            lambda: {
                session: self._content(tables, session, headers[key], histories[key])
                for session, key in stored
                if key in headers
            }
        )

    async def states(self, scope: Scope) -> AsyncIterator[States]:
        """Yield the states of all users of apps in *scope*, and then of these apps, in batches."""
        tables = await self._tables()
        for table in STATE_TABLES:
            work = partial(tables.states, scope=scope, table=table)
            async for rows in self._pages(work, table.name):
                yield await self._convert(partial(self.convert_states, rows))
            if tables.has_shared_states:
                rows = await self._reader.run(partial(tables.aliases, scope=scope, table=table))
                yield await self._convert(partial(self.convert_states, rows))

    async def find(
        self, app_name: str, user_id: str, session_id: str
    ) -> SessionHeader | Unreadable | None:
        """Return a session; None if there is no session with exactly these ids."""
        names = (app_name, user_id, session_id)
        tables = await self._tables()
        if not tables.can_store(names):
            return None
        rows, _ = await self._reader.run(partial(tables.lookup, names=names))
        return _header(tables, *rows[0]) if rows else None

    async def headers(
        self, app_name: str, user_id: str | None
    ) -> AsyncIterator[Mapping[SourceSession, SessionHeader | Unreadable]]:
        """Yield the sessions of a user or, if *user_id* is None, of an app, in batches."""
        names = (app_name,) if user_id is None else (app_name, user_id)
        tables = await self._tables()
        if tables.can_store(names):
            async for rows in self._pages(partial(tables.lookup, names=names), "sessions"):
                yield {session: _header(tables, session, row) for session, row in rows}

    async def state(
        self, app_name: str, user_id: str | None = None
    ) -> JsonObject | Unreadable | None:
        """Return the state of a user, or of an app; None if there is none."""
        names = (app_name,) if user_id is None else (app_name, user_id)
        table = APP_STATES if user_id is None else USER_STATES
        tables = await self._tables()
        if not tables.can_store(names):
            return None
        row = await self._reader.run(partial(tables.state, table=table, names=names))
        return None if row is None else self._state(names, row)

    async def close(self) -> None:
        """Close the connections to the database."""
        if self._found is not None and self._found.pickles is not None:
            self._found.pickles.close()
        await self._reader.close()

    def writer(self) -> Executor:
        """Return an executor that can change the tables, for `erase_source`; the caller closes it.

        If the source was given as an engine, closing the executor does not close the engine.
        """
        return executors_for(*self._place, None, None, {}).data

    async def tables(self) -> Tables:
        """Return the statements for the source's tables.

        Raises:
            ConfigurationError: The database does not contain the tables, or the installed
                google-adk cannot read them.
        """
        return await self._tables()

    def convert_states(self, rows: Sequence[StateRow]) -> States:
        """Convert *rows*, which `Tables.states` has read."""
        return {row.names: self._state(*row) for row in rows}

    async def _convert(self, work: Callable[[], T]) -> T:
        """Return the result of *work*, which converts rows.

        `Package1x` overrides this method: it runs *work* in a thread, because decryption is slow.
        So does schema v0, whose pickles are loaded in another process.
        """
        if self._found is not None and self._found.pickles is not None:
            return await asyncio.to_thread(work)
        return work()

    def _content(
        self, tables: Tables, session: SourceSession, header: Header, history: list[Row]
    ) -> SessionContent | Unreadable:
        try:
            return tables.content(session, header, history)
        except UnreadableRow as error:
            return Unreadable(str(error))

    def _state(self, names: tuple[str, ...], stored: object) -> JsonObject | Unreadable:
        """Convert the state of the app or user with these *names*."""
        try:
            check_names(*names)
            return self._state_of_owner(stored)
        except UnreadableRow as error:
            return Unreadable(str(error))

    def _state_of_owner(self, stored: object) -> JsonObject:
        """Convert the state of an app or a user, or raise `UnreadableRow`."""
        return state_of(stored, "its")

    async def _tables(self) -> "Tables":
        if self._found is None:
            self._found = await self._reader.inspect(
                lambda connection: Tables(connection, self._time_zone)
            )
        return self._found

    async def _pages(self, work: Callable[..., Page[T]], table: str) -> AsyncIterator[list[T]]:
        """Yield the pages that *work* returns for a connection and a position."""
        after, positions = None, Positions(table)
        while True:
            rows, after = await self._reader.run(partial(work, after=after))
            if rows:
                yield rows
            if after is None:
                return
            positions.add(after)


def _header(tables: Tables, session: SourceSession, row: Header) -> SessionHeader | Unreadable:
    try:
        return tables.header(session, row)
    except UnreadableRow as error:
        return Unreadable(str(error))


# --- Connections ---------------------------------------------------------------------------------


class _Reader:
    """Runs functions on a connection to the source, in a read-only transaction if possible."""

    def __init__(self, db_url: str | sa.URL | None, db_engine: "AsyncEngine | None") -> None:
        url = None if db_url is None else _read_only(db_url)
        self._executor = executors_for(url, db_engine, None, None, {}).data

    async def inspect(self, work: Callable[[sa.Connection], T]) -> T:
        """Call *work*, which inspects the tables, for example their names and columns.

        Unlike in `run`, the driver of SQLite returns texts as str.  If *work* makes several
        queries, they may read different states of the database.
        """
        return await repeated(lambda: self._executor.define(work, commit=False))

    async def run(self, work: Callable[[sa.Connection], T]) -> T:
        """Call *work* in a transaction; all its queries read the same state of the database.

        The driver of SQLite returns texts as bytes, because content that is not UTF-8 must not make
        the query of a whole batch fail.
        """

        def run_in_snapshot(connection: sa.Connection) -> T:
            with taking_bytes(connection):
                dialect_of(connection).begin_snapshot(connection)
                return work(connection)

        return await repeated(lambda: self._executor.define(run_in_snapshot, commit=False))

    async def close(self) -> None:
        await self._executor.close()


def _read_only(db_url: str | sa.URL) -> str | sa.URL:
    """Return *db_url*, changed so that SQLite opens the file as read-only."""
    try:
        url = sa.make_url(db_url)
    except (sa.exc.ArgumentError, ValueError):
        return db_url  # `executors_for` raises the error
    if url.get_backend_name() != "sqlite" or is_in_memory(url):
        return url
    database = url.database or ""
    if database.startswith("file:"):
        return url if "mode" in url.query else url.update_query_dict({"mode": "ro", "uri": "true"})
    path = Path(database)
    if not path.is_file():
        raise ConfigurationError("the SQLite file of the source does not exist: check its path")
    name, value = read_only_mode(path)
    query = {**url.query, name: value, "uri": "true"}
    return url.set(database=file_uri(path.absolute()), query=query)


def taking_bytes(connection: sa.Connection) -> AbstractContextManager[None]:
    """Make the driver of SQLite return texts as bytes during the block.

    `adk_rows` decodes ids, and parses JSON from bytes.  If the driver decoded the texts, content
    that is not UTF-8 would make the query of a whole batch fail, not only of one session.
    """
    return dialect_of(connection).decoding(connection, bytes)
