"""Read databases that the distribution adk-secure-sessions 1.x has written.

That distribution is another author's, with the same name.  It encrypts states and events, and
stores them in tables like google-adk's.  `formats.envelopes_1x` describes the stored values.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from datetime import UTC, tzinfo
from typing import TYPE_CHECKING, Any, NamedTuple

import sqlalchemy as sa
from google.adk.events import Event

from adk_secure_sessions.crypto.key_material import hides_frames
from adk_secure_sessions.crypto.package_1x import Package1xKeys
from adk_secure_sessions.errors import (
    ConfigurationError,
    DecryptionError,
    Reason,
    TamperedError,
    WrongKeyError,
)
from adk_secure_sessions.formats import events, json_text
from adk_secure_sessions.formats.envelopes_1x import FERNET, parse_envelope
from adk_secure_sessions.formats.states import TEMP_PREFIX, JsonObject
from adk_secure_sessions.formats.times import microseconds
from adk_secure_sessions.migration import adk_rows
from adk_secure_sessions.migration.adk_rows import INSTALLED, Unreadable, text
from adk_secure_sessions.migration.adk_tables import _Reader
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

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine  # this import takes a third of a second

_PAGE = 1000  # sessions whose ids are read at once
# Limits for one batch.  A content has about half as many bytes as its stored values.
_BATCH_SESSIONS = 500
_BATCH_BYTES = 8 * 2**20
_STATES = 500  # states of apps or users in one batch

Row = Sequence[Any]
Key = tuple[str, ...]


class Package1x(Source):
    """A database of adk-secure-sessions 0.1 to 1.3, which is another author's distribution.

    A value that cannot be decrypted makes its session or state unreadable.  So does an event whose
    id in the table differs from the encrypted id.

    The distribution authenticates the content of each state and event, and nothing else.  An
    attacker with write access may have modified app names, user ids, session ids and the times of
    sessions (`create_time` and `update_time`).  The attacker may also have exchanged states, moved
    events to other sessions, and removed or replayed rows.  Such changes cannot be detected.
    Events are sorted by their encrypted timestamps.

    In the releases before 1.1, `create_session` stored the keys `app:` and `user:` of the initial
    state in the session only.  They stay there, so that they do not become visible in other
    sessions, and keys with `temp:` are omitted.  These releases returned the states of the app and
    the user without the prefixes, which google-adk and this package add.

    Args:
        db_url: The database URL; give exactly one of *db_url* and *db_engine*.  A SQLite file is
            opened as read-only.
        keys: The keys that the application gave to its backends: see `Package1xKeys`.
        db_engine: Your own engine for the database.
        time_zone: The time zone of `create_time` and `update_time` in a database on a server, which
            adk-secure-sessions 1.x wrote in local time if it ran with google-adk before 2.4.  By
            default, these times are UTC.  On SQLite, they are always UTC.

    Raises:
        ConfigurationError: One of these arguments cannot be used, or the SQLite file does not
            exist.

    The first call of a method also raises `WrongKeyError` if no key decrypts the stored states.
    """

    @hides_frames
    def __init__(
        self,
        db_url: str | sa.URL | None = None,
        keys: Iterable[str | bytes] = (),
        *,
        db_engine: "AsyncEngine | None" = None,
        time_zone: tzinfo = UTC,
    ) -> None:
        self._keys = Package1xKeys(keys)
        self._reader = _Reader(db_url, db_engine)
        self._time_zone = time_zone
        self._found: _Tables | None = None

    @property
    def description(self) -> str:
        """The kind of the source."""
        return "a database of adk-secure-sessions 1.x"

    async def size(self, scope: Scope) -> SourceSize:
        """Return how many sessions and events *scope* contains."""
        tables = await self._tables()
        if scope.since is None:
            return await self._reader.run(lambda connection: tables.size(connection, scope))
        number = events_number = 0
        async for page in self._pages(scope):
            number += len(page)
            events_number += sum(found.events for found in page)
        return SourceSize(number, events_number)

    async def sessions(self, scope: Scope) -> AsyncIterator[Sequence[SourceSession]]:
        """Yield the sessions in *scope* by app name, user id and session id, in batches."""
        async for page in self._pages(scope):
            batch: list[SourceSession] = []
            total = 0
            for found in page:
                if batch and (total + found.size > _BATCH_BYTES or len(batch) == _BATCH_SESSIONS):
                    yield batch
                    batch, total = [], 0
                batch.append(found.session)
                total += found.size
            if batch:
                yield batch

    async def read(
        self, sessions: Sequence[SourceSession]
    ) -> Mapping[SourceSession, SessionContent | UnreadableSession]:
        """Return the contents of *sessions*; a session that was deleted meanwhile is omitted."""
        if not sessions:
            return {}
        tables = await self._tables()
        keys = [session[:3] for session in sessions]
        headers, histories = await self._reader.run(
            lambda connection: tables.contents(connection, keys)
        )
        stored = [
            (session, headers[session[:3]], histories.get(session[:3], []))
            for session in sessions
            if session[:3] in headers
        ]
        # Decrypting takes most of the time.  In a thread, it does not stop the event loop.
        return await asyncio.to_thread(
            lambda: {one: self._content(one, header, rows) for one, header, rows in stored}
        )

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
            tables = await self._reader.inspect(_Tables)
            samples = await self._reader.run(tables.samples)
            await asyncio.to_thread(self._check_keys, samples)
            self._found = tables
        return self._found

    async def _pages(self, scope: Scope) -> AsyncIterator[list["_Found"]]:
        tables = await self._tables()
        after: Key | None = None
        while True:
            page = await self._reader.run(
                lambda connection, after=after: tables.page(  # type: ignore[misc]
                    connection, scope, after
                )
            )
            yield [found for found in page if self._is_recent(found, scope)]
            if len(page) < _PAGE:
                return
            after = page[-1].session[:3]

    async def _states(
        self, scope: Scope, table: sa.FromClause, names: list[str]
    ) -> AsyncIterator[dict[Key, JsonObject | UnreadableState]]:
        tables = await self._tables()
        after: Key | None = None
        while True:
            rows = await self._reader.run(
                lambda connection, after=after: tables.states(  # type: ignore[misc]
                    connection, scope, table, names, after
                )
            )
            if rows:
                yield await asyncio.to_thread(
                    lambda rows=rows: {  # type: ignore[misc]
                        key: self._shared_state(key, stored) for key, stored in rows
                    }
                )
            if len(rows) < _STATES:
                return
            after = rows[-1][0]

    # --- Conversion; these methods run in a thread ---

    def _check_keys(self, samples: list[object]) -> None:
        """Raise WrongKeyError if there are *samples*, and none of them can be decrypted."""
        reasons = []
        for stored in samples:
            try:
                self._opened(stored)
            except DecryptionError as error:
                reasons.append(str(error))
            else:
                return
        if reasons:
            raise WrongKeyError(
                "no key decrypts the first states of this database of adk-secure-sessions 1.x: "
                f"give the keys of its backends ({reasons[0]})"
            )

    def _opened(self, stored: object) -> tuple[bytes, bool]:
        """Return a value's plaintext, and whether the value was stored as base64."""
        envelope = parse_envelope(stored)
        if envelope.backend_id == FERNET:
            return self._keys.decrypt_fernet(envelope.body), envelope.is_base64
        return self._keys.decrypt_aes_256_gcm(envelope.body), envelope.is_base64

    def _state(self, stored: object) -> tuple[JsonObject, bool]:
        """Return a state, and whether it was stored as base64; raise Unreadable."""
        try:
            plaintext, is_base64 = self._opened(stored)
        except DecryptionError as error:
            reason = str(error)
        else:
            return adk_rows.state_of(plaintext, "its"), is_base64
        raise Unreadable(f"its state: {reason}")

    def _shared_state(self, key: Key, stored: object) -> JsonObject | UnreadableState:
        """Return the state of an app or a user."""
        try:
            adk_rows.check_names(*key)
            return self._state(stored)[0]
        except Unreadable as error:
            return UnreadableState(str(error))

    def _content(
        self, session: SourceSession, header: "_Header", history: list[Row]
    ) -> SessionContent | UnreadableSession:
        try:
            adk_rows.check_names(*session[:3])
            state, is_base64 = self._state(header.state)
            if not is_base64:  # a release before 1.1
                state = {key: state[key] for key in state if not key.startswith(TEMP_PREFIX)}
            found = [
                self._event(row, f"event {number} of {len(history)}")
                for number, row in enumerate(history, 1)
            ]
            # The rows are in the order of their column `timestamp`, which is not authenticated, and
            # in which one release stored local time and another one UTC.
            found.sort(key=lambda event: event.time)
            created_at, updated_at = map(self._time, header[1:])
        except Unreadable as error:
            return UnreadableSession(str(error))
        return SessionContent(state, found, created_at, updated_at)

    def _event(self, row: Row, name: str) -> SourceEvent:
        """Convert the columns id, invocation_id, timestamp and event_data; raise Unreadable."""
        event_id, invocation_id, timestamp, stored = row
        try:
            plaintext, _ = self._opened(stored)
            return _event(plaintext, text(event_id), text(invocation_id), timestamp)
        except DecryptionError as error:
            reason = str(error)
        except Exception:
            reason = f"{INSTALLED} cannot read it, or it exceeds a limit: see docs/limits.md, Sizes"
        raise Unreadable(f"{name}: {reason}")

    def _time(self, stored: object) -> int:
        try:
            zone = self._time_zone if self._found and self._found.is_server else UTC
            return adk_rows.time_of(stored, zone)
        except Exception:
            pass
        raise Unreadable("its create_time or update_time is not a time")

    def _is_recent(self, found: "_Found", scope: Scope) -> bool:
        if scope.since is None:
            return True
        try:
            return self._time(found.updated_at) >= scope.since
        except Unreadable:
            return True  # `read` reports it


def _event(plaintext: bytes, event_id: str, invocation_id: str, timestamp: object) -> SourceEvent:
    """Convert an event, whose fields win over the columns, which only replace missing fields.

    Raises:
        TamperedError: A column differs from the field.
        ValueError: The installed google-adk cannot read the event, or it exceeds a limit.
    """
    accepted = events.accept(plaintext)
    if accepted is not None:
        data, event = accepted
        is_complete = {"id", "invocation_id", "timestamp"} <= event.model_fields_set
        if is_complete and (event.id, event.invocation_id) == (event_id, invocation_id):
            return SourceEvent(data, microseconds(event.timestamp))
    fields = json_text.loads(plaintext)
    for name, column in {"id": event_id, "invocation_id": invocation_id}.items():
        if (fields.get(name) or column) != column:
            raise TamperedError(
                f"its column {name} differs from its encrypted {name}", reason=Reason.MISMATCH
            )
        fields[name] = column
    fields.setdefault("timestamp", adk_rows.seconds_of(timestamp, UTC))
    event = Event.model_validate(fields)
    return SourceEvent(events.encode(event, replaces=False), microseconds(event.timestamp))


# --- SQL -----------------------------------------------------------------------------------------


def _table(name: str, *columns: str) -> sa.TableClause:
    """Return a table whose columns have no types, so that SQLAlchemy converts no values."""
    return sa.table(name, *(sa.column(column) for column in columns))


_s = _table("sessions", "app_name", "user_id", "id", "state", "create_time", "update_time")
_e = _table(
    "events", "app_name", "user_id", "session_id", "id", "invocation_id", "timestamp", "event_data",
    "rowid",
)  # fmt: skip
_a = _table("app_states", "app_name", "state")
_u = _table("user_states", "app_name", "user_id", "state")
_SESSION = (_s.c.app_name, _s.c.user_id, _s.c.id)
_EVENT_SESSION = (_e.c.app_name, _e.c.user_id, _e.c.session_id)


class _Header(NamedTuple):
    """The columns of a session's row, unconverted."""

    state: Any
    created_at: Any
    updated_at: Any


class _Found(NamedTuple):
    """A session, its number of events, the bytes of its stored values, and its `update_time`."""

    session: SourceSession
    events: int
    size: int
    updated_at: Any


class _Tables:
    """The SQL of one database.

    Releases since 1.1 have no index on the session of an event, so each query for events may read
    the whole table.  Therefore, a query reads the events of many sessions.

    Raises:
        ConfigurationError: The database does not contain the tables of adk-secure-sessions 1.x.
    """

    def __init__(self, connection: sa.Connection) -> None:
        inspector = sa.inspect(connection)
        columns: dict[str, Any] = {}
        if {text(name) for name in inspector.get_table_names()} >= {
            table.name for table in (_s, _e, _a, _u)
        }:
            columns = {text(one["name"]): one["type"] for one in inspector.get_columns("events")}
        if "event_data" not in columns:
            raise ConfigurationError(
                "the database does not contain the tables of adk-secure-sessions 1.x: check the "
                "URL of the source"
            )
        self.is_server: bool = connection.dialect.name != "sqlite"
        self._is_sqlite = not self.is_server
        # The releases before 1.1 sorted events by time alone, which keeps the order of insertion.
        is_before_1_1 = self._is_sqlite and isinstance(columns["timestamp"], sa.Float)
        self._second = _e.c.rowid if is_before_1_1 else _e.c.id

    def samples(self, connection: sa.Connection) -> list[object]:
        """Return a few stored states."""
        found: list[object] = []
        for table in (_s, _a, _u):
            found += connection.execute(sa.select(table.c.state).limit(2)).scalars()
        return found

    def size(self, connection: sa.Connection, scope: Scope) -> SourceSize:
        counts = []
        for table in (_s, _e):
            query = sa.select(sa.func.count()).select_from(table)
            if scope.app_name is not None:
                query = query.where(table.c.app_name == scope.app_name)
            counts.append(connection.scalar(query) or 0)
        return SourceSize(*counts)

    def page(self, connection: sa.Connection, scope: Scope, after: Key | None) -> list[_Found]:
        """Return the next sessions."""
        size = sa.func.length(_s.c.state)
        columns = (*_SESSION, _s.c.create_time, _s.c.update_time, size)
        query = sa.select(*columns)
        query = query.where(*_within(_s, scope), *_beyond(_SESSION, after))
        rows = connection.execute(query.order_by(*_SESSION).limit(_PAGE)).all()
        if not rows:
            return []
        first, last = rows[0][:3], rows[-1][:3]
        stored = sa.func.sum(sa.func.length(_e.c.event_data))
        counting = sa.select(*_EVENT_SESSION, sa.func.count(), stored).group_by(*_EVENT_SESSION)
        key = sa.tuple_(*_EVENT_SESSION)
        counting = counting.where(key >= sa.tuple_(*_key(first)), key <= sa.tuple_(*_key(last)))
        counts = {_key(row[:3]): row[3:] for row in connection.execute(counting)}
        found = []
        for *names, created_at, updated_at, length in rows:
            session_key = _key(names)
            number, total = counts.get(session_key, (0, 0))
            # The releases before 1.1 do not set `update_time` with each event.
            version = f"{_shown(created_at)} {_shown(updated_at)} {number}"
            app_name, user_id, session_id = session_key
            session = SourceSession(app_name, user_id, session_id, version)
            found.append(_Found(session, number, int(total or 0) + int(length or 0), updated_at))
        return found

    def contents(
        self, connection: sa.Connection, keys: Sequence[Key]
    ) -> tuple[dict[Key, _Header], dict[Key, list[Row]]]:
        """Return the rows of the sessions *keys*, and the rows of their events."""
        query = sa.select(*_SESSION, _s.c.state, _s.c.create_time, _s.c.update_time)
        query = query.where(sa.tuple_(*_SESSION).in_(keys))
        headers = {_key(row[:3]): _Header(*row[3:]) for row in connection.execute(query)}
        columns = (*_EVENT_SESSION, _e.c.id, _e.c.invocation_id, _e.c.timestamp, _e.c.event_data)
        of_sessions = sa.select(*columns).where(sa.tuple_(*_EVENT_SESSION).in_(keys))
        histories: dict[Key, list[Row]] = {}
        for row in connection.execute(of_sessions.order_by(_e.c.timestamp, self._second)):
            histories.setdefault(_key(row[:3]), []).append(row[3:])
        return headers, histories

    def states(
        self,
        connection: sa.Connection,
        scope: Scope,
        table: sa.FromClause,
        names: list[str],
        after: Key | None,
    ) -> list[tuple[Key, object]]:
        """Return the next rows of a table of states: the primary key and the state."""
        columns = [table.c[name] for name in names]
        query = sa.select(*columns, table.c.state)
        query = query.where(*_within(table, scope), *_beyond(columns, after))
        rows = connection.execute(query.order_by(*columns).limit(_STATES))
        return [(_key(key), state) for *key, state in rows]


def _within(table: sa.FromClause, scope: Scope) -> list[sa.ColumnElement[bool]]:
    return [] if scope.app_name is None else [table.c.app_name == scope.app_name]


def _beyond(
    columns: Sequence[sa.ColumnElement[Any]], key: Key | None
) -> list[sa.ColumnElement[bool]]:
    return [] if key is None else [sa.tuple_(*columns) > sa.tuple_(*key)]


def _key(names: Iterable[Any]) -> Key:
    """Decode the ids in a row, which are bytes on SQLite.

    Raises:
        ConfigurationError: An id is not text.
    """
    try:
        return tuple(map(text, names))
    except (TypeError, ValueError):
        pass  # raise after this block: otherwise `__context__` would hold the id
    raise ConfigurationError(
        "a row of the source contains an app name, a user id or a session id that is not text in "
        "UTF-8: correct or delete the row"
    )


def _shown(time: Any) -> str:
    return text(time) if isinstance(time, str | bytes) else str(time)
