"""The SQL that reads google-adk's tables and deletes rows, and the recognition of the tables.

The queries select columns without types, so that nobody converts texts, times and JSON.

Here, the *key* of a row has the values of its primary key: an app name; an app name and a user id;
or an app name, a user id and a session id.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, tzinfo
from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple, TypeVar

import sqlalchemy as sa
from sqlalchemy.dialects.mysql import CHAR

from adk_secure_sessions.crypto.package_1x import is_envelope
from adk_secure_sessions.db.dialects import dialect_of
from adk_secure_sessions.errors import ConfigurationError
from adk_secure_sessions.formats.records import EncodedEvent, is_unicode
from adk_secure_sessions.formats.times import datetime_of
from adk_secure_sessions.migration import adk_rows
from adk_secure_sessions.migration.adk_rows import Row
from adk_secure_sessions.migration.pickled_actions import PickleReader, PickleReaderError
from adk_secure_sessions.migration.sources import (
    EVERYTHING,
    SEE_LIMITS,
    Contents,
    ConversionError,
    Ids,
    ListedSession,
    Selection,
    SessionContent,
    States,
    try_convert,
)

# The numbers of rows of a page: of sessions without their states, of sessions with them, of states.
SESSION_PAGE, LOOKUP_PAGE, STATE_PAGE = 5000, 500, 500
# PostgreSQL returns the compressed size of a value; the size is estimated as this multiple of it.
_COMPRESSION = 3
_UNREADABLE_EVENT = f"{adk_rows.INSTALLED_ADK} cannot read it, or it exceeds a limit: {SEE_LIMITS}"
_SAMPLES = 50  # the number of states that `_first_and_last_states` reads at each end of a table
_NOT_TEXT = (
    "an app_name, user_id or id that is not text in UTF-8, so that google-adk cannot read it, "
    "either: correct or delete the row in the source"
)
_MAX_NAMED_ROWS = 10  # the maximum number of such rows that an error names


class TableKind(StrEnum):
    """The kinds of session databases that can be recognized from their tables."""

    ADK_V1 = "google-adk's tables, schema v1"
    ADK_V0 = "google-adk's tables, schema v0"
    ADK_SQLITE = "a file of google-adk's SqliteSessionService"
    ENCRYPTED = "a database of this package"
    PACKAGE_1X = "a database of adk-secure-sessions 1.x"


_MYSQL = ("mysql", "mariadb")


# --- SQL -----------------------------------------------------------------------------------------


def _table(name: str, key: Sequence[str], *columns: str) -> sa.Table:
    """Return a table whose columns have no types, so that SQLAlchemy converts no values."""
    key_columns = [sa.Column[Any](column, primary_key=True) for column in key]
    return sa.Table(name, sa.MetaData(), *key_columns, *map(sa.Column[Any], columns))


ADK_SESSIONS = _table(
    "sessions", ("app_name", "user_id", "id"), "rowid", "state", "create_time", "update_time"
)
APP_STATES = _table("app_states", ("app_name",), "rowid", "state")
USER_STATES = _table("user_states", ("app_name", "user_id"), "rowid", "state")
STATE_TABLES = (USER_STATES, APP_STATES)
_WITH_STATES = (ADK_SESSIONS, APP_STATES, USER_STATES)
# Here, the primary key has only the ids of the session, without the id of the event.
_EVENTS = _table(
    "events",
    ("app_name", "user_id", "session_id"),
    "rowid",
    *dict.fromkeys([*adk_rows.JSON_EVENT_COLUMNS, *adk_rows.PICKLED_EVENT_COLUMNS]),
)
# In the order in which rows are deleted.
ADK_TABLES = (_EVENTS, ADK_SESSIONS, USER_STATES, APP_STATES)
_SESSION_KEY, _EVENT_KEY = tuple(ADK_SESSIONS.primary_key), tuple(_EVENTS.primary_key)


# Joins `events` to `sessions`.  The database compares the ids, because the collation of MySQL may
# ignore case.  Python would then not find the session of an event whose ids have another case.
_PAIRS = zip(_EVENT_KEY, _SESSION_KEY, strict=True)
_SESSION_EVENTS = ADK_SESSIONS.join(_EVENTS, sa.and_(*(key == id_ for key, id_ in _PAIRS)))

T = TypeVar("T")
# The keys of apps or users, each with the unconverted state.
StateRows = Sequence[tuple[Ids, Any]]


class SourceSessionRows(NamedTuple):
    """A session, its row, and the rows of its events."""

    session: ListedSession
    row: Row
    events: list[Row]


def _pages(read: Callable[[Ids | None], list[T]]) -> Iterator[list[T]]:
    after = None
    while page := read(after):
        yield page
        after = last_key(page)


def last_key(page: Sequence[Any]) -> Ids:
    """Return the first 3 values of the `ListedSession` or key with which the last row begins."""
    ids: Ids = page[-1][0][:3]
    return ids


class AdkQueries:
    """The SQL for google-adk's tables in one database, and the conversion of their rows.

    *time_zone* is that of the writers; None for the zone that the installed google-adk assumes.
    """

    kinds: tuple[TableKind, ...] = (TableKind.ADK_V1, TableKind.ADK_V0, TableKind.ADK_SQLITE)

    def __init__(self, connection: sa.Connection, time_zone: tzinfo | None) -> None:
        kinds = kinds_in(connection)
        own_kinds = [kind for kind in self.kinds if kind in kinds]
        if not own_kinds:
            other_kinds = ", ".join(kinds) or "no sessions"
            raise ConfigurationError(
                "the database contains no tables of google-adk's session services (found: "
                f"{other_kinds}): check the URL of the source"
            )
        self.kind: TableKind = own_kinds[0]
        self.dialect: str = connection.dialect.name
        self._is_mysql = self.dialect in _MYSQL
        self._events_zone: tzinfo = time_zone or UTC
        zone = None if self.dialect == "sqlite" else time_zone
        self.sessions_zone: tzinfo | None = zone or adk_rows.sessions_time_zone(self.dialect)
        self._require_text_ids(connection)
        inspector = sa.inspect(connection)
        # Whether `events` has an index on the session's ids.  google-adk 1.28 and later create this
        # index when they open a database.
        self._has_index = self.kind is TableKind.ADK_SQLITE or any(
            index["column_names"][:3] == ["app_name", "user_id", "session_id"]
            for index in inspector.get_indexes("events")
        )
        column_names = {column["name"] for column in inspector.get_columns("events")}
        columns: tuple[str, ...] = adk_rows.JSON_EVENT_COLUMNS
        self.pickles: PickleReader | None = None  # of schema v0
        if self.kind is TableKind.ADK_V0:
            columns = adk_rows.PICKLED_EVENT_COLUMNS
            self.pickles = PickleReader()
        # Tables of early releases of google-adk have fewer columns: select NULL for the others.
        self._selected = [
            self._text(_EVENTS.c[name]) if name in column_names else sa.null() for name in columns
        ]
        sized_names = column_names & {*adk_rows.JSON_COLUMNS, "actions"}
        self._size_columns = [_EVENTS.c[name] for name in columns if name in sized_names]

    def _where(self, selection: Selection) -> list[sa.ColumnElement[bool]]:
        since = [] if selection.since is None else [self._is_since(selection.since)]
        return self._in_app(ADK_SESSIONS, selection) + since

    def _in_app(self, table: sa.Table, selection: Selection) -> list[sa.ColumnElement[bool]]:
        name = selection.app_name
        return [] if name is None else [is_exactly(self.dialect, table.c.app_name, name)]

    def count(self, connection: sa.Connection, selection: Selection) -> int:
        query = sa.select(sa.func.count()).select_from(ADK_SESSIONS)
        return connection.scalar(query.where(*self._where(selection))) or 0

    def session_page(
        self, connection: sa.Connection, selection: Selection, after: Ids | None, limit: int
    ) -> list[tuple[ListedSession, int]]:
        """Return the next sessions, each with the approximate size of its rows in bytes.

        *after* is the key of the last row before them (see `last_key`); None for the first page.
        """
        sizes = (
            sa.func.coalesce(sa.func.sum(self._size(column)), 0) for column in self._size_columns
        )
        size: Any = sum(sizes, start=sa.literal(0))
        sessions = self._sessions(
            connection, self._where(selection), after, limit, self._size(ADK_SESSIONS.c.state), size
        )
        return [(session, int(size) + int(row.state or 0)) for session, row, size in sessions]

    def _sessions(
        self,
        connection: sa.Connection,
        conditions: Sequence[sa.ColumnElement[bool]],
        after: Ids | None,
        limit: int,
        state: sa.ColumnElement[Any],
        size: sa.ColumnElement[Any],
    ) -> list[tuple[ListedSession, Any, Any]]:
        """Return the next sessions, with *state* of their rows and *size* of their events."""
        conditions = [*conditions, *self._after(_SESSION_KEY, after)]
        chosen = sa.select(*_SESSION_KEY, *_session_columns(state)).where(*conditions)
        rows: Sequence[Any]
        rows = connection.execute(chosen.order_by(*_SESSION_KEY).limit(limit)).all()
        if not rows:
            return []
        keys = [self._text_ids(row[:3]) for row in rows]
        counting = sa.select(*_SESSION_KEY, sa.func.count(), size).select_from(_SESSION_EVENTS)
        in_page = [*conditions, sa.not_(self._is_after(_SESSION_KEY, keys[-1]))]
        counted = connection.execute(counting.where(*in_page).group_by(*_SESSION_KEY))
        counts: dict[tuple[Any, ...], Any] = {tuple(row[:3]): row[3:] for row in counted}
        sessions = []
        for key, row in zip(keys, rows, strict=True):
            number, total = counts.get(tuple(row[:3]), (0, 0))
            created, updated = map(_time_as_text, (row.create_time, row.update_time))
            etag = f"{created} {updated} {number}"
            sessions.append((ListedSession(key[0], key[1], key[2], etag), row, total))
        return sessions

    def session_versions(self, connection: sa.Connection) -> Iterator[ListedSession]:
        """Yield all sessions.  Reading their sizes, too, would take 17 times as long."""
        nothing, zero = sa.null(), sa.literal(0)
        read = partial(self._sessions, connection, [], limit=SESSION_PAGE, state=nothing, size=zero)
        for page in _pages(read):
            yield from (session for session, _, _ in page)

    def all_states(self, connection: sa.Connection) -> Iterator[StateRows]:
        for table in STATE_TABLES:
            read = partial(self.state_page, connection, EVERYTHING, table, limit=STATE_PAGE)
            yield from _pages(read)

    def lock_tables(self, connection: sa.Connection) -> None:
        # On SQLite, the transaction that the caller has begun has locked the file.
        dialect_of(connection).lock_tables(connection, *ADK_TABLES)
        if self._is_mysql:  # each query then locks the rows and gaps that it reads
            connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL SERIALIZABLE").close()
        self._require_text_ids(connection)  # no page has such a row, so nobody has compared it

    def delete_all(self, connection: sa.Connection) -> tuple[int, int, int]:
        events, sessions, *states = (
            connection.execute(sa.delete(table)).rowcount for table in ADK_TABLES
        )
        return sessions, events, sum(states)

    def sessions_with_events(
        self, connection: sa.Connection, sessions: Sequence[ListedSession]
    ) -> list[SourceSessionRows]:
        """Return each of *sessions* that is stored, with its row and the rows of its events."""
        keys = [session.ids for session in sessions]
        query = sa.select(*_SESSION_KEY, *_session_columns(self._text(ADK_SESSIONS.c.state)))
        query = query.where(self._is_one_of(_SESSION_KEY, keys))
        rows_of: dict[tuple[Any, ...], tuple[Row, list[Row]]]
        rows_of = {tuple(row[:3]): (row, []) for row in connection.execute(query)}
        for app_name, user_id, session_id, *columns in self._events(connection, keys):
            if (session_rows := rows_of.get((app_name, user_id, session_id))) is not None:
                session_rows[1].append(columns)
        by_ids: dict[Ids, ListedSession] = {session.ids: session for session in sessions}
        found = ((by_ids.get(self._text_ids(ids)), rows) for ids, rows in rows_of.items())
        return [SourceSessionRows(one, *rows) for one, rows in found if one is not None]

    def sessions_with_prefix(
        self, connection: sa.Connection, key: Sequence[str], after: Ids | None, limit: int
    ) -> list[SourceSessionRows]:
        """Return the next sessions whose ids begin with *key*: of an app, of a user, or one.

        The lists of events are always empty.
        """
        pairs = zip(_SESSION_KEY, key, strict=False)
        conditions = [is_exactly(self.dialect, column, name) for column, name in pairs]
        sessions = self._sessions(
            connection, conditions, after, limit, self._text(ADK_SESSIONS.c.state), sa.literal(0)
        )
        return [SourceSessionRows(session, row, []) for session, row, _ in sessions]

    def owner_state(self, connection: sa.Connection, table: sa.Table, key: Sequence[str]) -> Any:
        """Return the state of an app or a user, unconverted; None if there is no row.

        On MySQL, the key in the row may have another spelling than *key*, for example in case.
        google-adk uses the same row.
        """
        if not can_store(self.dialect, *key):
            return None
        query = sa.select(self._text(table.c.state))
        conditions = [column == name for column, name in zip(table.primary_key, key, strict=True)]
        return connection.scalar(query.where(*conditions))

    def _events(self, connection: sa.Connection, keys: Sequence[tuple[str, ...]]) -> Sequence[Row]:
        """Return the three ids and the columns of each event, in the order of google-adk."""
        tie_breaker = _EVENTS.c.rowid if self.kind is TableKind.ADK_SQLITE else _EVENTS.c.id
        if self._is_mysql:
            query = sa.select(*_SESSION_KEY, *self._selected).select_from(_SESSION_EVENTS)
            query = query.where(self._is_one_of(_SESSION_KEY, keys))
        else:
            # With a join, SQLite would scan the whole index of `events`.
            query = sa.select(*_EVENT_KEY, *self._selected)
            query = query.where(self._is_one_of(_EVENT_KEY, keys))
        return connection.execute(query.order_by(_EVENTS.c.timestamp, tie_breaker)).all()

    def convert_sessions(self, found: Sequence[SourceSessionRows]) -> Contents:
        return {rows.session: try_convert(self.convert_session, *rows) for rows in found}

    def convert_states(self, rows: StateRows) -> States:
        return {key: try_convert(self._convert_owner_state, key, state) for key, state in rows}

    def _convert_owner_state(self, key: Ids, stored: object) -> bytes:
        adk_rows.require_valid_ids(*key)
        return self.convert_state(stored)

    def convert_session(
        self, session: ListedSession, row: Any, history: list[Row]
    ) -> SessionContent:
        """Convert the row of a session and the rows of its events, as queries above return them."""
        adk_rows.require_valid_ids(*session.ids)
        state = self.convert_state(row.state)
        created_at = adk_rows.to_microseconds(row.create_time, self.sessions_zone)
        updated_at = adk_rows.to_microseconds(row.update_time, self.sessions_zone)
        events: list[EncodedEvent] = []
        for columns in history:
            try:
                events.append(self.convert_event(columns))
            except PickleReaderError:
                raise
            except Exception as error:
                number = f"event {len(events) + 1} of {len(history)}"
                reason = error if isinstance(error, ConversionError) else _UNREADABLE_EVENT
                raise ConversionError(f"{number}: {reason}") from None
        return SessionContent(state, events, created_at, updated_at)

    def convert_state(self, stored: object) -> bytes:
        return adk_rows.convert_state(stored)

    def convert_event(self, row: Row) -> EncodedEvent:
        """Convert an event, or raise any kind of error; only ConversionError has a reason."""
        if self.pickles is not None:
            return adk_rows.convert_pickle_row(self.pickles, row, self._events_zone)
        return adk_rows.convert_json_row(row, self._events_zone)

    def state_page(
        self,
        connection: sa.Connection,
        selection: Selection,
        table: sa.Table,
        after: Ids | None,
        limit: int,
    ) -> list[tuple[Ids, Any]]:
        """Return the next rows of a table of states; *after* is as for `session_page`."""
        key, in_app = tuple(table.primary_key), self._in_app(table, selection)
        query = sa.select(*key, self._text(table.c.state))
        query = query.where(*in_app, *self._after(key, after)).order_by(*key).limit(limit)
        return [(self._text_ids(row[:-1]), row[-1]) for row in connection.execute(query).all()]

    def states_of_other_spellings(
        self, connection: sa.Connection, selection: Selection, table: sa.Table
    ) -> StateRows:
        """On MySQL, return the states of owners with another spelling in the table `sessions`.

        Its collation, which by default ignores case, finds one row of state for several spellings.
        """
        if not self._is_mysql:
            return []
        pairs = list(zip(_SESSION_KEY, table.primary_key, strict=False))
        spelled = [column for column, _ in pairs]
        query = (
            sa.select(*map(sa.func.min, spelled), sa.func.min(table.c.state))
            .join_from(ADK_SESSIONS, table, sa.and_(*(column == other for column, other in pairs)))
            .where(sa.or_(*(sa.func.hex(column) != sa.func.hex(other) for column, other in pairs)))
            .group_by(*map(sa.func.hex, spelled))
        )
        rows = connection.execute(query.where(*self._in_app(ADK_SESSIONS, selection)))
        return [(tuple(map(adk_rows.to_text, names)), state) for *names, state in rows]

    def _require_text_ids(self, connection: sa.Connection) -> None:
        """On SQLite, raise ConfigurationError if a name is not a text.

        A column of SQLite may hold values of any type.  SQLite sorts a number before every text and
        a BLOB after every text, so that no page would have such a row.
        """
        for table in _WITH_STATES if self.dialect == "sqlite" else ():
            others = (sa.func.typeof(column) != "text" for column in table.primary_key)
            query = sa.select(table.c.rowid).where(sa.or_(*others)).limit(_MAX_NAMED_ROWS)
            if rows := ", ".join(map(str, connection.scalars(query))):
                raise ConfigurationError(f"the table {table.name} has (in row {rows}) {_NOT_TEXT}")

    def _text_ids(self, names: Sequence[Any]) -> Ids:
        try:
            return tuple(map(adk_rows.to_text, names))
        except (TypeError, ValueError):
            raise ConfigurationError(f"the source has {_NOT_TEXT}") from None

    def _is_since(self, since: int) -> Any:
        updated_at = ADK_SESSIONS.c.update_time
        try:
            naive = datetime_of(since).astimezone(self.sessions_zone).replace(tzinfo=None)
        except (OverflowError, ValueError):
            raise ConfigurationError("since (--since) must be in the years 2 to 9998") from None
        if self.dialect != "sqlite":
            return updated_at >= sa.literal(naive, sa.DateTime())
        # A row may hold text or seconds.  In SQLite, any text is greater than any number.  So
        # without the condition on the type, the second comparison would accept every text.
        return sa.or_(
            updated_at >= naive.isoformat(" "),
            sa.and_(sa.func.typeof(updated_at) != "text", updated_at >= since / 1_000_000),
        )

    def _text(self, column: sa.Column[Any]) -> sa.ColumnElement[Any]:
        """Return *column* as text, if it contains JSON.  On PostgreSQL, its type may be JSONB."""
        is_jsonb = self.dialect == "postgresql" and column.name in adk_rows.JSON_COLUMNS
        return sa.cast(column, sa.Text()) if is_jsonb else column

    def _size(self, column: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
        if self.dialect == "postgresql":
            return sa.func.pg_column_size(column) * _COMPRESSION
        return sa.func.length(column)

    def _after(
        self, columns: Sequence[sa.ColumnElement[Any]], key: Ids | None
    ) -> list[sa.ColumnElement[bool]]:
        # `_require_text_ids` has rejected other types.  But an attacker may add rows since then: a
        # BLOB is after every text, so the rows would come again in each page.
        are_text = [
            sa.func.typeof(column) == "text" for column in columns if self.dialect == "sqlite"
        ]
        return are_text if key is None else [*are_text, self._is_after(columns, key)]

    def _is_after(
        self, columns: Sequence[sa.ColumnElement[Any]], key: Ids
    ) -> sa.ColumnElement[bool]:
        """Return the condition that the tuple *columns* is greater than *key*.

        For MySQL, which uses no index to compare tuples, the condition compares single columns.
        """
        if not self._is_mysql:
            condition: sa.ColumnElement[bool] = sa.tuple_(*columns) > sa.tuple_(*key)
            return condition
        condition = columns[-1] > key[-1]
        for column, value in zip(columns[-2::-1], key[-2::-1], strict=True):
            condition = sa.or_(column > value, sa.and_(column == value, condition))
        return condition

    def _is_one_of(
        self, columns: Sequence[sa.ColumnElement[Any]], keys: Sequence[tuple[str, ...]]
    ) -> sa.ColumnElement[bool]:
        if self._is_mysql and not all(name.isascii() for key in keys for name in key):
            # MariaDB does not convert a list of tuples to the character set of the columns.
            pairs = (zip(columns, key, strict=True) for key in keys)
            return sa.or_(*(sa.and_(*(column == name for column, name in key)) for key in pairs))
        if self._is_mysql or not (self._has_index or self.dialect == "postgresql"):
            return sa.tuple_(*columns).in_(keys)
        if self.dialect == "sqlite":
            # For a list of tuples, SQLite scans the whole table.  For a table expression, SQLite
            # uses the index.  If there is no index, which the first condition checks, SQLite would
            # scan the table for each tuple of the expression.
            listed = sa.values(*map(sa.column, ("a", "u", "i")), name="k").data(list(keys)).cte("k")
            return sa.tuple_(*columns).in_(sa.select(listed))
        # For a list of tuples, PostgreSQL would plan a separate index scan for each tuple.
        texts = sa.ARRAY(sa.Text())
        arrays = [
            sa.cast(sa.literal(list(names), texts), texts) for names in zip(*keys, strict=True)
        ]
        rows = sa.func.unnest(*arrays).table_valued("a", "u", "i").render_derived(name="k")
        return sa.tuple_(*columns).in_(sa.select(rows))


def is_exactly(dialect: str, column: sa.ColumnElement[str], name: str) -> sa.ColumnElement[bool]:
    """Return the condition that *column* is *name*, also if its collation ignores differences."""
    if not can_store(dialect, name):
        return sa.false()
    # An index is used for the first condition.
    is_equal = column == name
    if dialect not in _MYSQL:
        binary = sa.collate(column, "BINARY" if dialect == "sqlite" else "C")
        return sa.and_(is_equal, binary == name)
    # The column may have another character set.
    text = sa.cast(column, CHAR(charset="utf8mb4"))
    return sa.and_(is_equal, sa.cast(text, sa.LargeBinary) == name.encode())


def _session_columns(state: sa.ColumnElement[Any]) -> list[sa.ColumnElement[Any]]:
    """Return the columns of a session's row that `AdkQueries.convert_session` converts."""
    return [state.label("state"), ADK_SESSIONS.c.create_time, ADK_SESSIONS.c.update_time]


def _time_as_text(time: Any) -> str:
    # Raise no error for bytes that are not UTF-8: `to_microseconds` rejects them later, and then
    # only this session is unreadable.
    return time.decode(errors="backslashreplace") if isinstance(time, bytes) else str(time)


def can_store(dialect: str, *texts: str) -> bool:
    """Return whether a database can have columns with these texts."""
    text = "".join(texts)
    return is_unicode(text) and (dialect != "postgresql" or "\0" not in text)


# --- Recognition ---------------------------------------------------------------------------------


def kinds_in(connection: sa.Connection, *, reads_all: bool = False) -> frozenset[TableKind]:
    """Return which kinds of session tables the database contains.

    google-adk and adk-secure-sessions 1.x use the same names.  If 1.x has encrypted one of the
    first or last states, the tables are those of 1.x.  So an attacker who replaces only some
    encrypted states by plaintext does not change the result.  With *reads_all*, one encrypted state
    anywhere is enough.
    """
    inspector = sa.inspect(connection)
    tables = set(inspector.get_table_names())
    kinds = {TableKind.ENCRYPTED} if "secure_meta" in tables else set()
    if {"sessions", "events", "app_states", "user_states"} <= tables:
        columns = {column["name"]: column for column in inspector.get_columns("events")}
        if {"app_name", "user_id", "session_id", "timestamp"} <= columns.keys():
            reads_all = reads_all and not kinds
            states = (
                non_json_states(connection) if reads_all else _first_and_last_states(connection)
            )
            is_1x = any(map(is_envelope, states))
            kinds.add(TableKind.PACKAGE_1X if is_1x else kind_of_adk(connection, tables, columns))
    return frozenset(kinds)


def kind_of_adk(
    connection: sa.Connection, tables: set[str], columns: Mapping[str, Any]
) -> TableKind:
    if "adk_internal_metadata" in tables:
        metadata = _table("adk_internal_metadata", ("key",), "value")
        query = sa.select(metadata.c.value).where(metadata.c.key == "schema_version")
        version = connection.scalar(query)
        if version not in ("0", "1"):
            raise ConfigurationError(
                f"google-adk's tables have the schema version {version!r:.20}, which this release "
                "of adk-secure-sessions does not know: use a later release"
            )
        return TableKind.ADK_V1 if version == "1" else TableKind.ADK_V0
    if "event_data" not in columns:
        return TableKind.ADK_V0
    is_seconds = isinstance(columns["timestamp"]["type"], sa.Float | sa.REAL)
    return TableKind.ADK_SQLITE if is_seconds else TableKind.ADK_V1


def _first_and_last_states(connection: sa.Connection) -> list[str | bytes]:
    """Return the first characters of the first and the last states of each table."""
    starts: list[str | bytes] = []
    for table in _WITH_STATES:
        for order in (table.primary_key, [column.desc() for column in table.primary_key]):
            query = sa.select(_start_of(table, connection)).order_by(*order).limit(_SAMPLES)
            starts += (start for start in connection.scalars(query) if start is not None)
    return starts


def non_json_states(connection: sa.Connection, limit: int | None = None) -> Iterator[Any]:
    """Yield the states that are not JSON objects, at most *limit* of each table."""
    for table in _WITH_STATES:
        is_object = sa.func.substr(_start_of(table, connection), 1, 1) == "{"
        yield from connection.scalars(sa.select(table.c.state).where(~is_object).limit(limit))


def _start_of(table: sa.Table, connection: sa.Connection) -> sa.ColumnElement[Any]:
    """Return the first characters of a state, which are all that `is_envelope` needs."""
    state: sa.ColumnElement[Any] = table.c.state
    if connection.dialect.name == "postgresql":
        state = sa.cast(state, sa.Text())
    return sa.func.substr(state, 1, 4)
