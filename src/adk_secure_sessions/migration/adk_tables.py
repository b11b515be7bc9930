"""Read the tables of google-adk's `DatabaseSessionService` and `SqliteSessionService`.

`AdkTables` runs its own SQL instead of google-adk's service, which makes four queries for each
session and a model of SQLAlchemy for each event.  A transaction reads a batch of sessions with two
queries.  It only reads, and ends before the rows are converted, so that it does not block
google-adk's writers for long.  `adk_rows` converts the rows.
"""

import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, tzinfo
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import quote

import sqlalchemy as sa

from adk_secure_sessions.db.connect import executors_for
from adk_secure_sessions.db.sqlite import is_in_memory
from adk_secure_sessions.errors import ConfigurationError
from adk_secure_sessions.formats.states import JsonObject
from adk_secure_sessions.migration import adk_rows
from adk_secure_sessions.migration.adk_rows import EventReader, Row, Unreadable
from adk_secure_sessions.migration.sources import (
    Scope,
    SessionContent,
    Source,
    SourceEvent,
    SourceSession,
    SourceSize,
    UnreadableSession,
    UnreadableState,
)
from adk_secure_sessions.storage import repeated

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine  # this import takes a third of a second

T = TypeVar("T")

_PAGE = 5000  # sessions whose ids are read at once
# Limits for one batch of `AdkTables.sessions`.  A content is about twice as large as its rows.
_BATCH_SESSIONS = 500
_BATCH_BYTES = 4 * 2**20
_STATES = 500  # states of apps or users in one batch
# PostgreSQL reports the compressed size of a value.
_COMPRESSION = 3


class Kind(StrEnum):
    """The kinds of session databases that can be recognized from their tables."""

    ADK_V1 = "google-adk's tables, schema v1"
    ADK_V0 = "google-adk's tables, schema v0"
    ADK_SQLITE = "a file of google-adk's SqliteSessionService"
    ENCRYPTED = "a database of this package"
    PACKAGE_1X = "a database of adk-secure-sessions 1.x"


_ADK_KINDS = (Kind.ADK_V1, Kind.ADK_V0, Kind.ADK_SQLITE)


async def detect(
    db_url: str | sa.URL | None = None, *, db_engine: "AsyncEngine | None" = None
) -> frozenset[Kind]:
    """Return which kinds of tables a database contains; an empty set if it contains none of them.

    One database can contain the tables of this package and those of google-adk.  It cannot contain
    the tables of google-adk and those of adk-secure-sessions 1.x, which have the same names.

    Args:
        db_url: The database URL; give exactly one of *db_url* and *db_engine*.
        db_engine: Your own engine for the database.

    Raises:
        ConfigurationError: An argument cannot be used, or the SQLite file does not exist, or
            google-adk's tables have a schema that this package does not know.
        DatabaseError: The database cannot be reached.
    """
    reader = _Reader(db_url, db_engine)
    try:
        return await reader.inspect(_kinds)
    finally:
        await reader.close()


class AdkTables(Source):
    """The tables of google-adk's `DatabaseSessionService` or `SqliteSessionService`.

    google-adk may keep reading and writing them.

    Args:
        db_url: The database URL; give exactly one of *db_url* and *db_engine*.  A SQLite file is
            opened as read-only.
        db_engine: Your own engine for the database.
        time_zone: The time zone of the processes that wrote the database, if it was not UTC, and
            if they used schema v0, or google-adk before 2.4 with a server.  These releases stored
            local time.  By default, times are read as the installed google-adk reads them.

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
        self._found: _Tables | None = None

    @property
    def description(self) -> str:
        """The kind of tables, after the first read."""
        return self._found.kind.value if self._found else "google-adk's tables"

    async def size(self, scope: Scope) -> SourceSize:
        """Return how many sessions and events *scope* contains."""
        tables = await self._tables()

        def count(connection: sa.Connection) -> SourceSize:
            sessions = sa.select(sa.func.count()).select_from(_s)
            sessions = sessions.where(*tables.within(scope))
            events = sa.select(sa.func.count()).select_from(_e)
            if scope.since is not None:
                events = events.join(_s, _of_session()).where(*tables.within(scope))
            elif scope.app_name is not None:
                events = events.where(_e.c.app_name == scope.app_name)
            return SourceSize(*(connection.scalar(query) or 0 for query in (sessions, events)))

        return await self._reader.run(count)

    async def sessions(self, scope: Scope) -> AsyncIterator[Sequence[SourceSession]]:
        """Yield the sessions in *scope* by app name, user id and session id, in batches."""
        tables = await self._tables()
        after: tuple[str, str, str] | None = None
        while True:
            page = await self._reader.run(
                lambda connection, after=after: tables.page(connection, scope, after)
            )
            batch: list[SourceSession] = []
            total = 0
            for session, size in page:
                if batch and (total + size > _BATCH_BYTES or len(batch) == _BATCH_SESSIONS):
                    yield batch
                    batch, total = [], 0
                batch.append(session)
                total += size
            if batch:
                yield batch
            if len(page) < _PAGE:
                return
            after = page[-1][0][:3]

    async def read(
        self, sessions: Sequence[SourceSession]
    ) -> Mapping[SourceSession, SessionContent | UnreadableSession]:
        """Return the contents of *sessions*; a session that was deleted meanwhile is omitted."""
        tables = await self._tables()
        if not sessions:
            return {}
        keys = [session[:3] for session in sessions]
        headers, events = await self._reader.run(
            lambda connection: (tables.headers(connection, keys), tables.events(connection, keys))
        )
        histories: dict[Any, list[Row]] = {key: [] for key in headers}
        for app_name, user_id, session_id, *columns in events:
            history = histories.get((app_name, user_id, session_id))
            if history is not None:
                history.append(columns)
        found: dict[SourceSession, SessionContent | UnreadableSession] = {}
        for session in sessions:
            key = tables.key(session)
            if key in headers:
                try:
                    found[session] = tables.content(session, headers[key], histories.pop(key))
                except Unreadable as error:
                    found[session] = UnreadableSession(str(error))
        return found

    async def app_states(
        self, scope: Scope
    ) -> AsyncIterator[Mapping[str, JsonObject | UnreadableState]]:
        """Yield the states of the apps in *scope* by app name, in batches."""
        async for batch in self._states(scope, _a, ["app_name"]):
            yield {app_name: state for (app_name,), state in batch.items()}

    async def user_states(
        self, scope: Scope
    ) -> AsyncIterator[Mapping[tuple[str, str], JsonObject | UnreadableState]]:
        """Yield the states of all users of the apps in *scope* by app name and user id."""
        async for batch in self._states(scope, _u, ["app_name", "user_id"]):
            yield {(app_name, user_id): state for (app_name, user_id), state in batch.items()}

    async def close(self) -> None:
        """Close the connections to the database."""
        await self._reader.close()

    async def _tables(self) -> "_Tables":
        if self._found is None:
            self._found = await self._reader.inspect(
                lambda connection: _Tables(connection, self._time_zone)
            )
        return self._found

    async def _states(
        self, scope: Scope, table: sa.TableClause, columns: list[str]
    ) -> AsyncIterator[dict[tuple[str, ...], JsonObject | UnreadableState]]:
        tables = await self._tables()
        after: tuple[str, ...] | None = None
        while True:
            rows = await self._reader.run(
                lambda connection, after=after: tables.states(
                    connection, scope, table, columns, after
                )
            )
            batch = {}
            for *names, state in rows:
                key = tuple(map(adk_rows.text, names))
                batch[key] = _state(key, state)
            if batch:
                yield batch
            if len(rows) < _STATES:
                break
            after = key
        if not tables.has_shared_states:
            return
        aliases = await self._reader.run(
            lambda connection: tables.aliases(connection, scope, table, columns)
        )
        for *names, state in aliases:
            key = tuple(map(adk_rows.text, names))
            yield {key: _state(key, state)}


# --- Connections ---------------------------------------------------------------------------------


class _Reader:
    """Runs functions on a connection to the source, in a read-only transaction if possible."""

    def __init__(self, db_url: str | sa.URL | None, db_engine: "AsyncEngine | None") -> None:
        url = None if db_url is None else _read_only(db_url)
        self._executor = executors_for(url, db_engine, None, None, {}).data

    async def inspect(self, work: Callable[[sa.Connection], T]) -> T:
        """Call *work*, which inspects the tables."""
        return await repeated(lambda: self._executor.define(work, commit=False))

    async def run(self, work: Callable[[sa.Connection], T]) -> T:
        """Call *work* in a transaction; all its queries read the same state of the database."""

        def run_in_snapshot(connection: sa.Connection) -> T:
            with _taking_bytes(connection):
                _begin(connection)
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
    # SQLite may have to create the index of the write-ahead log.  If the directory is not writable
    # and there is no log, SQLite reads the file without a log and without locks.
    has_log = path.with_name(f"{path.name}-wal").exists()
    is_writable = os.access(path.resolve().parent, os.W_OK)
    mode = {"mode": "ro"} if has_log or is_writable else {"immutable": "1"}
    return url.set(
        database=f"file:{quote(str(path.absolute()))}", query={**url.query, **mode, "uri": "true"}
    )


@contextmanager
def _taking_bytes(connection: sa.Connection) -> Iterator[None]:
    """Read SQLite's texts as bytes during the block: `adk_rows` decodes them, and JSON need not be.

    A text that is not UTF-8 then concerns only its own session.
    """
    if connection.dialect.name != "sqlite":
        yield
        return
    driver: Any = connection.connection.driver_connection
    text_factory = driver.text_factory
    driver.text_factory = bytes
    try:
        yield
    finally:
        driver.text_factory = text_factory


def _begin(connection: sa.Connection) -> None:
    """Begin a transaction whose queries read one snapshot; the executor rolls it back."""
    dialect = connection.dialect.name
    if dialect == "sqlite":
        driver: Any = connection.connection.driver_connection
        if not driver.in_transaction:
            connection.exec_driver_sql("BEGIN")
    elif dialect == "postgresql":
        connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
    else:
        connection.exec_driver_sql("START TRANSACTION WITH CONSISTENT SNAPSHOT, READ ONLY")


# --- SQL -----------------------------------------------------------------------------------------


def _table(name: str, alias: str, *columns: str) -> sa.TableClause:
    """Return a table whose columns have no types, so that SQLAlchemy converts no values."""
    made = sa.table(name, *(sa.column(column) for column in columns)).alias(alias)
    return made  # type: ignore[return-value]


_s = _table("sessions", "s", "app_name", "user_id", "id", "state", "create_time", "update_time")
_e = _table(
    "events",
    "e",
    "app_name",
    "user_id",
    "session_id",
    "rowid",
    *dict.fromkeys([*adk_rows.JSON_COLUMNS, *adk_rows.PICKLED_COLUMNS]),
)
_a = _table("app_states", "a", "app_name", "state")
_u = _table("user_states", "u", "app_name", "user_id", "state")
_SESSION_KEY = (_s.c.app_name, _s.c.user_id, _s.c.id)
_JSON = {
    "event_data",
    "content",
    "grounding_metadata",
    "custom_metadata",
    "usage_metadata",
    "citation_metadata",
    "input_transcription",
    "output_transcription",
}


def _of_session() -> sa.ColumnElement[bool]:
    """Join `events` to `sessions` in the database: MySQL may compare ids without their case."""
    pairs = zip((_e.c.app_name, _e.c.user_id, _e.c.session_id), _SESSION_KEY, strict=True)
    return sa.and_(*(one == other for one, other in pairs))


class _Header(NamedTuple):
    """The columns of a session's row, unconverted."""

    state: Any
    created_at: Any
    updated_at: Any


class _Tables:
    """The SQL of one database, and the conversion of its rows.

    Raises:
        ConfigurationError: The database does not contain google-adk's tables, or the installed
            google-adk cannot read them.
    """

    def __init__(self, connection: sa.Connection, time_zone: tzinfo | None) -> None:
        kinds = _kinds(connection)
        found = [kind for kind in _ADK_KINDS if kind in kinds]
        if not found:
            others = ", ".join(kinds) or "no sessions"
            raise ConfigurationError(
                f"the database contains no tables of google-adk's session services, but {others}: "
                "check the URL of the source"
            )
        self.kind: Kind = found[0]
        self._dialect = connection.dialect.name
        self._is_mysql = self._dialect in ("mysql", "mariadb")
        self._sessions_zone = adk_rows.zone_of_sessions(self._dialect)
        self._events_zone: tzinfo = UTC
        if time_zone is not None:
            self._events_zone = time_zone
            if self._dialect != "sqlite":
                self._sessions_zone = time_zone
        present = {column["name"] for column in sa.inspect(connection).get_columns("events")}
        self._columns = adk_rows.JSON_COLUMNS
        self._read_event: EventReader = adk_rows.event_of_json
        if self.kind is Kind.ADK_V0:
            self._columns = adk_rows.PICKLED_COLUMNS
            self._read_event = adk_rows.pickle_reader()
        elif self.kind is Kind.ADK_SQLITE:
            self._read_event = adk_rows.event_of_json_alone
        # Early releases had fewer columns.
        self._selected = [
            self._json(_e.c[name])
            if name in _JSON & present
            else _e.c[name]
            if name in present
            else sa.null()
            for name in self._columns
        ]
        self._sizes = [_e.c[name] for name in present & (_JSON | {"actions"})]

    @property
    def has_shared_states(self) -> bool:
        """Whether two names that differ, for example in case, share a row of state in google-adk.

        MySQL and MariaDB compare names with a collation, which by default ignores case.
        """
        return self._is_mysql

    def within(self, scope: Scope) -> list[sa.ColumnElement[bool]]:
        """Return the conditions on `sessions` for *scope*."""
        conditions: list[sa.ColumnElement[bool]] = []
        if scope.app_name is not None:
            conditions.append(_s.c.app_name == scope.app_name)
        if scope.since is not None:
            conditions.append(self._since(scope.since))
        return conditions

    def page(
        self, connection: sa.Connection, scope: Scope, after: tuple[str, str, str] | None
    ) -> list[tuple[SourceSession, int]]:
        """Return the next sessions, and about how many bytes their rows have."""
        chosen = sa.select(
            *_SESSION_KEY, _s.c.create_time, _s.c.update_time, self._size(_s.c.state)
        )
        chosen = chosen.where(*self.within(scope), *self._after(_SESSION_KEY, after))
        rows = connection.execute(chosen.order_by(*_SESSION_KEY).limit(_PAGE)).all()
        if not rows:
            return []
        keys = [self._checked(row[:3]) for row in rows]
        events = (
            sa.func.count(),
            sum(
                (sa.func.coalesce(sa.func.sum(self._size(column)), 0) for column in self._sizes),
                start=sa.literal(0),
            ),
        )
        counting = sa.select(*_SESSION_KEY, *events).join_from(_s, _e, _of_session())
        counting = counting.where(*self.within(Scope(scope.app_name)))
        counting = counting.where(*self._between(keys[0], keys[-1])).group_by(*_SESSION_KEY)
        counts = {tuple(row[:3]): row[3:] for row in connection.execute(counting)}
        found = []
        for key, row in zip(keys, rows, strict=True):
            number, size = counts.get(tuple(row[:3]), (0, 0))
            version = f"{_shown(row[3])} {_shown(row[4])} {number}"
            found.append((SourceSession(*key, version), int(size) + int(row[5] or 0)))
        return found

    def headers(
        self, connection: sa.Connection, keys: Sequence[tuple[str, ...]]
    ) -> dict[tuple[Any, ...], _Header]:
        """Return the rows of the sessions *keys*."""
        query = sa.select(
            *_SESSION_KEY, self._json(_s.c.state), _s.c.create_time, _s.c.update_time
        ).where(self._is_one_of(keys))
        return {tuple(row[:3]): _Header(*row[3:]) for row in connection.execute(query)}

    def events(self, connection: sa.Connection, keys: Sequence[tuple[str, ...]]) -> Sequence[Row]:
        """Return the events of the sessions *keys*, in google-adk's order: key, then columns."""
        second = _e.c.rowid if self.kind is Kind.ADK_SQLITE else _e.c.id
        query = sa.select(*_SESSION_KEY, *self._selected).join_from(_s, _e, _of_session())
        query = query.where(self._is_one_of(keys)).order_by(_e.c.timestamp, second)
        return connection.execute(query).all()

    def key(self, session: SourceSession) -> tuple[Any, ...]:
        """Return the key of *session* as the driver returns it."""
        if self._dialect == "sqlite":
            return tuple(name.encode() for name in session[:3])
        return session[:3]

    def content(
        self, session: SourceSession, header: _Header, history: list[Row]
    ) -> SessionContent:
        """Convert the rows of a session; raise `Unreadable` if they cannot be converted."""
        adk_rows.check_names(*session[:3])
        state = adk_rows.state_of(header.state, "its")
        try:
            created_at = adk_rows.time_of(header.created_at, self._sessions_zone)
            updated_at = adk_rows.time_of(header.updated_at, self._sessions_zone)
        except Exception:
            created_at = updated_at = None
        if created_at is None or updated_at is None:
            raise Unreadable("its create_time or update_time is not a time")
        events: list[SourceEvent] = []
        read, zone = self._read_event, self._events_zone
        for row in history:
            try:
                events.append(read(row, zone))
            except Exception:
                break  # raise after this block: otherwise `__context__` would hold the event
        if len(events) < len(history):
            raise Unreadable(
                f"event {len(events) + 1} of {len(history)} cannot be read by {adk_rows.INSTALLED},"
                " or exceeds a limit: see docs/limits.md, Sizes"
            )
        return SessionContent(state, events, created_at, updated_at)

    def states(
        self,
        connection: sa.Connection,
        scope: Scope,
        table: sa.TableClause,
        names: list[str],
        after: tuple[str, ...] | None,
    ) -> Sequence[Row]:
        """Return the next rows of a table of states: its primary key, and the state."""
        columns = [table.c[name] for name in names]
        query = sa.select(*columns, self._json(table.c.state)).where(*self._after(columns, after))
        if scope.app_name is not None:
            query = query.where(table.c.app_name == scope.app_name)
        return connection.execute(query.order_by(*columns).limit(_STATES)).all()

    def aliases(
        self, connection: sa.Connection, scope: Scope, table: sa.TableClause, names: list[str]
    ) -> Sequence[Row]:
        """Return the states of apps or users whose sessions spell the name in another way.

        See `has_shared_states`.
        """
        spelled = [_s.c[name] for name in names]
        stored = [table.c[name] for name in names]
        pairs = list(zip(spelled, stored, strict=True))
        binary = [sa.func.hex(name) for name in spelled]
        query = (
            sa.select(*(sa.func.min(name) for name in spelled), sa.func.min(table.c.state))
            .join_from(_s, table, sa.and_(*(one == other for one, other in pairs)))
            .where(sa.or_(*(sa.func.hex(one) != sa.func.hex(other) for one, other in pairs)))
            .group_by(*binary)
        )
        return connection.execute(query.where(*self.within(Scope(scope.app_name)))).all()

    def _checked(self, names: Sequence[Any]) -> tuple[str, str, str]:
        try:
            app_name, user_id, session_id = map(adk_rows.text, names)
            return app_name, user_id, session_id
        except (TypeError, ValueError):
            pass  # raise after this block: otherwise `__context__` would hold the name
        raise ConfigurationError(
            "the table sessions contains a row whose app_name, user_id or id is not text in UTF-8; "
            "google-adk cannot read it, either: correct or delete the row"
        )

    def _since(self, since: int) -> sa.ColumnElement[bool]:
        from datetime import datetime, timedelta

        if self.kind is Kind.ADK_SQLITE:
            condition: sa.ColumnElement[bool] = _s.c.update_time >= since / 1_000_000
            return condition
        time = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=since)
        naive = time.astimezone(self._sessions_zone).replace(tzinfo=None)
        value = sa.literal(naive, sa.DateTime())
        condition = _s.c.update_time >= value
        return condition

    def _json(self, column: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
        """Return *column*, which holds JSON, as text; on PostgreSQL it may be JSONB."""
        return sa.cast(column, sa.Text()) if self._dialect == "postgresql" else column

    def _size(self, column: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
        if self._dialect == "postgresql":
            return sa.func.pg_column_size(column) * _COMPRESSION
        return sa.func.length(column)

    def _after(
        self, columns: Sequence[sa.ColumnElement[Any]], key: tuple[str, ...] | None
    ) -> list[sa.ColumnElement[bool]]:
        return [] if key is None else [self._beyond(columns, key, allow_equal=False)]

    def _between(self, first: tuple[str, ...], last: tuple[str, ...]) -> Any:
        if not self._is_mysql:
            key = sa.tuple_(*_SESSION_KEY)
            return [key >= sa.tuple_(*first), key <= sa.tuple_(*last)]
        return [
            self._beyond(_SESSION_KEY, first, allow_equal=True),
            sa.not_(self._beyond(_SESSION_KEY, last, allow_equal=False)),
        ]

    def _beyond(
        self, columns: Sequence[sa.ColumnElement[Any]], key: tuple[str, ...], *, allow_equal: bool
    ) -> sa.ColumnElement[bool]:
        """Compare *columns* with *key*; MySQL uses no index to compare tuples."""
        if not self._is_mysql:
            condition: sa.ColumnElement[bool] = sa.tuple_(*columns) > sa.tuple_(*key)
            return condition
        found = columns[-1] >= key[-1] if allow_equal else columns[-1] > key[-1]
        for column, value in zip(columns[-2::-1], key[-2::-1], strict=True):
            found = sa.or_(column > value, sa.and_(column == value, found))
        return found

    def _is_one_of(self, keys: Sequence[tuple[str, ...]]) -> sa.ColumnElement[bool]:
        if self._dialect != "postgresql":
            return sa.tuple_(*_SESSION_KEY).in_(keys)
        # For a list of tuples, PostgreSQL would plan a separate index scan for each of them.
        arrays = [
            sa.cast(sa.literal(list(names), sa.ARRAY(sa.Text())), sa.ARRAY(sa.Text()))
            for names in zip(*keys, strict=True)
        ]
        listed = sa.func.unnest(*arrays).table_valued("a", "u", "i").render_derived(name="k")
        return sa.tuple_(*_SESSION_KEY).in_(sa.select(listed.c.a, listed.c.u, listed.c.i))


def _state(names: tuple[str, ...], state: Any) -> JsonObject | UnreadableState:
    try:
        adk_rows.check_names(*names)
        return adk_rows.state_of(state, "its")
    except Unreadable as error:
        return UnreadableState(str(error))


def _shown(time: Any) -> str:
    return adk_rows.text(time) if isinstance(time, str | bytes) else str(time)


# --- Recognition ---------------------------------------------------------------------------------


def _kinds(connection: sa.Connection) -> frozenset[Kind]:
    inspector = sa.inspect(connection)
    tables = set(_names(inspector.get_table_names()))
    kinds = {Kind.ENCRYPTED} if "secure_meta" in tables else set()
    if {"sessions", "events", "app_states", "user_states"} <= tables:
        columns = {column["name"]: column for column in inspector.get_columns("events")}
        if {"app_name", "user_id", "session_id", "timestamp"} <= columns.keys():
            kinds.add(_kind_of_adk(connection, tables, columns))
    return frozenset(kinds)


def _kind_of_adk(connection: sa.Connection, tables: set[str], columns: Mapping[str, Any]) -> Kind:
    if _is_encrypted_1x(connection):
        return Kind.PACKAGE_1X
    if "adk_internal_metadata" in tables:
        metadata = _table("adk_internal_metadata", "m", "key", "value")
        query = sa.select(metadata.c.value).where(metadata.c.key == "schema_version")
        version = connection.scalar(query)
        version = None if version is None else adk_rows.text(version)
        if version not in ("0", "1"):
            raise ConfigurationError(
                f"google-adk's tables have the schema version {version!r:.20}, which this release "
                "of adk-secure-sessions does not know: use a later release"
            )
        return Kind.ADK_V1 if version == "1" else Kind.ADK_V0
    if "event_data" not in columns:
        return Kind.ADK_V0
    is_seconds = isinstance(columns["timestamp"]["type"], sa.Float | sa.REAL)
    return Kind.ADK_SQLITE if is_seconds else Kind.ADK_V1


def _is_encrypted_1x(connection: sa.Connection) -> bool:
    """Return whether states are encrypted: adk-secure-sessions 1.x uses google-adk's tables."""
    for table in (_s, _a, _u):
        state: Any = table.c.state
        if connection.dialect.name == "postgresql":
            state = sa.cast(state, sa.Text())
        first = connection.scalar(sa.select(state).where(state.is_not(None)).limit(1))
        if first is not None:
            # The envelope begins with the byte 1, and its base64 with AQ.  JSON begins with "{".
            return adk_rows.data(first).startswith((b"\x01", b"AQ"))
    return False


def _names(names: Sequence[Any]) -> list[str]:
    return [adk_rows.text(name) for name in names]
