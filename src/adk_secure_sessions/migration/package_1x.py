"""Read databases that the distribution adk-secure-sessions 1.x has written.

That distribution is another author's, with the same name.  It encrypts states and events, and
stores them in tables like google-adk's.  `crypto.package_1x` describes the stored values.
"""

from collections.abc import Iterable
from datetime import UTC, tzinfo
from functools import partial
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from adk_secure_sessions.concurrency import to_thread
from adk_secure_sessions.crypto.package_1x import Package1xKeys, parse_envelope
from adk_secure_sessions.errors import DecryptionError, WrongKeyError
from adk_secure_sessions.formats import json_text
from adk_secure_sessions.formats.json_text import TEMP_PREFIX
from adk_secure_sessions.formats.records import EncodedEvent
from adk_secure_sessions.hiding import hides_locals
from adk_secure_sessions.migration.adk_queries import (
    AdkQueries,
    TableKind,
    kind_of_adk,
    non_json_states,
)
from adk_secure_sessions.migration.adk_rows import Row, convert_event_json, convert_state, to_text
from adk_secure_sessions.migration.adk_tables import AdkTables
from adk_secure_sessions.migration.sources import (
    ConversionError,
    ListedSession,
    SessionContent,
    Unreadable,
    try_convert,
)

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine  # this import takes a third of a second


@hides_locals
class Package1xTables(AdkTables):
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
        db_url: As for `AdkTables`; so is *db_engine*.
        keys: The keys that the application gave to its `FernetBackend` (a Fernet key or a
            passphrase) or to its `AesGcmBackend` (32 bytes, or these bytes as base64 or hexadecimal
            text).  There may be several keys: each value is decrypted with the one that fits.
        time_zone: As for `AdkTables`.  Only `create_time` and `update_time` in a database on a
            server depend on it: events contain their times.

    Raises:
        ConfigurationError: An argument cannot be used, or the SQLite file does not exist.

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
        return TableKind.PACKAGE_1X.value

    async def _make_queries(self) -> AdkQueries:
        work = partial(_Package1xQueries, time_zone=self._time_zone, keys=self._keys)
        queries = await self.run_without_snapshot(work)
        samples = await self.run_in_snapshot(lambda c: list(non_json_states(c, 2)))
        states = await to_thread(
            lambda: [try_convert(queries.convert_state, state) for state in samples]
        )
        reasons = [state.reason for state in states if isinstance(state, Unreadable)]
        if reasons and len(reasons) == len(states):
            raise WrongKeyError(
                "no key decrypts the first states of this database of adk-secure-sessions 1.x: "
                f"give the keys of its backends ({reasons[0]})"
            )
        return queries


@hides_locals
class _Package1xQueries(AdkQueries):
    """The tables of adk-secure-sessions 1.x in one database.

    Releases since 1.1 create no index on the session ids of events.  Therefore, each query for
    events may scan the whole table.  This is acceptable: one query reads those of many sessions.
    """

    # `kinds_in` tells the tables of adk-secure-sessions 1.x from google-adk's only by their
    # encrypted states.  So accept tables without encrypted states, for example without any state.
    kinds = (TableKind.PACKAGE_1X, TableKind.ADK_V1, TableKind.ADK_SQLITE)

    def __init__(
        self, connection: sa.Connection, time_zone: tzinfo | None, keys: Package1xKeys
    ) -> None:
        super().__init__(connection, time_zone)
        self._keys = keys
        columns = sa.inspect(connection).get_columns("events")
        # The tables of releases before 1.1 are like those of google-adk's SqliteSessionService.
        self.kind = kind_of_adk(connection, set(), {column["name"]: column for column in columns})

    def convert_session(
        self, session: ListedSession, row: Any, history: list[Row]
    ) -> SessionContent:
        decrypted = super().convert_session(session, row, history)
        state = decrypted.state
        _, is_base64 = parse_envelope(row.state)
        if not is_base64:  # a release before 1.1
            values = json_text.load_state(state)
            kept = {key: values[key] for key in values if not key.startswith(TEMP_PREFIX)}
            state = json_text.dump_state(kept)
        # The query sorts the rows by their column `timestamp`.  This column is not authenticated.
        # Some releases stored local time in the column, others UTC.  So sort the events by their
        # decrypted times.
        history_by_time = sorted(decrypted.events, key=lambda event: event.time)
        return decrypted._replace(state=state, events=history_by_time)

    def convert_state(self, stored: object) -> bytes:
        try:
            plaintext = self._keys.decrypt(stored)
        except DecryptionError as error:
            raise ConversionError(f"its state: {error}") from None
        return convert_state(plaintext)

    def convert_event(self, row: Row) -> EncodedEvent:
        event_id, invocation_id, timestamp, stored = row
        names = {"id": to_text(event_id), "invocation_id": to_text(invocation_id)}
        try:
            plaintext = self._keys.decrypt(stored)
            fields = json_text.loads(plaintext)
        except DecryptionError as error:
            raise ConversionError(str(error)) from None
        for name, column in names.items():
            if (fields.get(name) or column) != column:
                raise ConversionError(f"its column {name} differs from its encrypted {name}")
        return convert_event_json(plaintext, names, timestamp, UTC)
