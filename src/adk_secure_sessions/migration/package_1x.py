"""Read databases that the distribution adk-secure-sessions 1.x has written.

That distribution is another author's, with the same name.  It encrypts states and events, and
stores them in tables like google-adk's.  `formats.envelopes_1x` describes the stored values.
"""

import asyncio
from collections.abc import Callable, Iterable
from datetime import UTC, tzinfo
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import sqlalchemy as sa
from google.adk.events import Event

from adk_secure_sessions.crypto.package_1x import Package1xKeys
from adk_secure_sessions.errors import DecryptionError, Reason, TamperedError, WrongKeyError
from adk_secure_sessions.formats import events, json_text
from adk_secure_sessions.formats.envelopes_1x import FERNET, parse_envelope
from adk_secure_sessions.formats.event_parser import validated
from adk_secure_sessions.formats.states import TEMP_PREFIX, JsonObject
from adk_secure_sessions.formats.times import microseconds
from adk_secure_sessions.migration.adk_rows import (
    INSTALLED,
    Row,
    UnreadableRow,
    check_names,
    seconds_of,
    state_of,
    text,
    time_of,
)
from adk_secure_sessions.migration.adk_sql import (
    APP_STATES,
    SESSIONS,
    USER_STATES,
    Header,
    Kind,
    Tables,
    start_of,
)
from adk_secure_sessions.migration.adk_tables import AdkTables
from adk_secure_sessions.migration.sources import (
    SessionContent,
    SourceSession,
    Unreadable,
)
from adk_secure_sessions.storage.features.imports import SourceEvent
from adk_secure_sessions.tracebacks import hides_locals

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine  # this import takes a third of a second

T = TypeVar("T")


@hides_locals
class Package1x(AdkTables):
    """A database of adk-secure-sessions 1.x, which is another author's distribution.

    docs/migrate.md names the releases.

    A value that cannot be decrypted makes its session or state unreadable.  A session is also
    unreadable if the id or the invocation id of an event differs from the encrypted one.

    The distribution authenticates the content of each state and event, and nothing else.  An
    attacker with write access may have modified app names, user ids, session ids and the times of
    sessions (`create_time` and `update_time`).  The attacker may also have exchanged states, moved
    events to other sessions, and removed or replayed rows.  Such changes cannot be detected.
    Events are sorted by their encrypted timestamps.

    In the releases before 1.1, `create_session` stored keys of the initial state that begin with
    `app:` or `user:` only in the session.  These keys stay in the session, so that other sessions
    do not get them.  Keys that begin with `temp:` are omitted.  These releases also returned the
    states of the app and the user without the prefixes `app:` and `user:`, which google-adk and
    this package add.

    Args:
        db_url: The database URL; give exactly one of *db_url* and *db_engine*.  A SQLite file is
            opened as read-only.
        keys: The keys that the application gave to its `FernetBackend` (a Fernet key or a
            passphrase) or to its `AesGcmBackend` (32 bytes, or these bytes as base64 or hexadecimal
            text).  There may be several keys: each value is decrypted with the one that fits.
        db_engine: Your own engine for the database.
        time_zone: The time zone of `create_time` and `update_time` in a database on a server.  Give
            it if adk-secure-sessions 1.x ran with a release of google-adk that stored local times:
            docs/migrate.md, Times, lists these releases.  By default, times are read as the
            installed google-adk reads them.

    Raises:
        ConfigurationError: One of these arguments cannot be used, or the SQLite file does not
            exist.

    The first call of a method also raises `WrongKeyError` if no key decrypts the stored states.
    """

    def __init__(
        self,
        db_url: str | sa.URL | None = None,
        keys: Iterable[str | bytes] = (),
        *,
        db_engine: "AsyncEngine | None" = None,
        time_zone: tzinfo | None = None,
    ) -> None:
        self._keys = Package1xKeys(keys)
        super().__init__(db_url, db_engine=db_engine, time_zone=time_zone)

    @property
    def description(self) -> str:
        """The kind of the source."""
        return Kind.PACKAGE_1X.value

    async def _tables(self) -> Tables:
        if self._found is None:
            tables = await self._reader.inspect(partial(_Tables, time_zone=self._time_zone))
            samples = await self._reader.run(tables.samples)
            await asyncio.to_thread(self._check_keys, samples)
            self._found = tables
        return self._found

    async def _convert(self, work: Callable[[], T]) -> T:
        # Decryption takes most of the time.  In a thread, it does not block the event loop.
        return await asyncio.to_thread(work)

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

    def _decrypted_state(self, stored: object) -> tuple[JsonObject, bool]:
        """Return a state, and whether it was stored as base64.

        Raises `UnreadableRow` if the state cannot be decrypted or exceeds a limit.
        """
        try:
            plaintext, is_base64 = self._opened(stored)
        except DecryptionError as error:
            raise UnreadableRow(f"its state: {error}") from None
        return state_of(plaintext, "its"), is_base64

    def _state_of_owner(self, stored: object) -> JsonObject:
        return self._decrypted_state(stored)[0]

    def _content(
        self, tables: Tables, session: SourceSession, header: Header, history: list[Row]
    ) -> SessionContent | Unreadable:
        try:
            check_names(*session[:3])
            state, is_base64 = self._decrypted_state(header.state)
            if not is_base64:  # a release before 1.1
                state = {key: state[key] for key in state if not key.startswith(TEMP_PREFIX)}
            found = [
                self._event(row, f"event {number} of {len(history)}")
                for number, row in enumerate(history, 1)
            ]
            # The query sorts the rows by their column `timestamp`.  This column is not
            # authenticated.  Some releases stored local time in the column, others UTC.  So sort
            # the events by their decrypted times.
            found.sort(key=lambda event: event.time)
            created_at = time_of(header.created_at, tables.sessions_zone)
            updated_at = time_of(header.updated_at, tables.sessions_zone)
        except UnreadableRow as error:
            return Unreadable(str(error))
        return SessionContent(state, found, created_at, updated_at)

    def _event(self, row: Row, name: str) -> SourceEvent:
        """Convert the columns id, invocation_id, timestamp and event_data to an event.

        Raises `UnreadableRow` if the event cannot be converted; the error names it by *name*.
        """
        event_id, invocation_id, timestamp, stored = row
        try:
            plaintext, _ = self._opened(stored)
            return _event(plaintext, text(event_id), text(invocation_id), timestamp)
        except DecryptionError as error:
            reason = str(error)
        except Exception:
            reason = f"{INSTALLED} cannot read it, or it exceeds a limit: see docs/limits.md, Sizes"
        raise UnreadableRow(f"{name}: {reason}")


def _event(plaintext: bytes, event_id: str, invocation_id: str, timestamp: object) -> SourceEvent:
    """Convert an event.  A column is used only if the decrypted event lacks the field."""
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
    fields.setdefault("timestamp", seconds_of(timestamp, UTC))
    event = validated(Event, fields)
    return SourceEvent(events.encode(event, replaces=False), microseconds(event.timestamp))


class _Tables(Tables):
    """The SQL for the tables of adk-secure-sessions 1.x in one database.

    Releases since 1.1 create no index on the session ids of events.  Therefore, each query for
    events may scan the whole table.  This is acceptable, because one query reads the events of many
    sessions.
    """

    # `kinds_in` tells the tables of adk-secure-sessions 1.x from google-adk's only by their
    # encrypted states.  So accept tables without encrypted states, for example without any state.
    kinds = (Kind.PACKAGE_1X, Kind.ADK_V1, Kind.ADK_SQLITE)

    def __init__(self, connection: sa.Connection, time_zone: tzinfo | None) -> None:
        super().__init__(connection, time_zone)
        columns = {one["name"]: one["type"] for one in sa.inspect(connection).get_columns("events")}
        # The tables of releases before 1.1 are like those of google-adk's SqliteSessionService.
        is_before_1_1 = isinstance(columns["timestamp"], sa.Float)
        self.kind = Kind.ADK_SQLITE if is_before_1_1 else Kind.ADK_V1

    def samples(self, connection: sa.Connection) -> list[object]:
        """Return a few stored states that are not plaintext."""
        found: list[object] = []
        for table in (SESSIONS, APP_STATES.table, USER_STATES.table):
            is_plaintext = sa.func.substr(start_of(table, connection), 1, 1) == "{"
            query = sa.select(table.c.state).where(~is_plaintext).limit(2)
            found += connection.execute(query).scalars()
        return found
