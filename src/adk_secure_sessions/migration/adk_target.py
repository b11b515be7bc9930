"""Write sessions into google-adk's tables, and compare the stored rows with the sessions.

The tables are those of `DatabaseSessionService`, schema v1.  google-adk's own code creates them,
and its own classes convert rows back into events.
"""

import json
import os
import re
import stat
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import sqlalchemy as sa
from google.adk.events import Event
from google.adk.sessions.schemas import v1
from sqlalchemy.dialects.postgresql import JSONB

from adk_secure_sessions.concurrency import ClosedByWith
from adk_secure_sessions.db.connect import executors_for, parsed_url
from adk_secure_sessions.db.dialects import dialect_of
from adk_secure_sessions.db.protocol import RetryingExecutor, UniqueViolation, with_retries
from adk_secure_sessions.db.sqlite import file_of
from adk_secure_sessions.errors import ConfigurationError, DatabaseError, DecryptionError
from adk_secure_sessions.formats import events, json_text
from adk_secure_sessions.formats.events import microseconds
from adk_secure_sessions.formats.records import EncodedEvent
from adk_secure_sessions.formats.times import datetime_of
from adk_secure_sessions.hiding import hides_locals
from adk_secure_sessions.migration.adk_queries import (
    ADK_SESSIONS,
    TableKind,
    can_store,
    is_exactly,
    kinds_in,
)
from adk_secure_sessions.migration.adk_rows import JSON_COLUMNS, sessions_time_zone
from adk_secure_sessions.migration.adk_tables import AdkTables
from adk_secure_sessions.migration.compare import is_same_state, session_difference
from adk_secure_sessions.migration.sources import (
    ConversionError,
    Ids,
    ListedSession,
    SessionContent,
)

MISSING = "the target does not have it"
_MICROSECOND = timedelta(microseconds=1)
# Codes of errors for a value that a column cannot hold: PostgreSQL's "data exception" and "program
# limit exceeded"; MySQL's and MariaDB's codes for a wrong or too long value.
_DATA_ERROR_CODES = ("22", "54", "1264", "1292", "1366", "1406", "4025", "SQLITE_TOOBIG")
_NON_ASCII = re.compile(r"[^\x00-\x7f]")


# A session as rows of google-adk's tables: the parameters of the statements that insert the row of
# the session, and those of its events.
TargetRows = tuple[dict[str, object], list[dict[str, object]]]


@hides_locals
class AdkTarget(ClosedByWith):
    """A database to which `export_to_adk` adds google-adk's tables; use it with `async with`.

    The tables have schema v1.  Existing rows are never changed.

    Args:
        url: The URL of the database.

    Attributes:
        is_open: Whether `open` has succeeded.

    Raises:
        ConfigurationError: The URL cannot be used.
    """

    def __init__(self, url: str | sa.URL) -> None:
        self.is_open: bool = False
        self._url = _target_url(url)
        self._dialect = self._url.get_backend_name()
        self._file = file_of(self._url)
        if self._file is None and self._dialect == "sqlite":
            raise ConfigurationError("the target must be a file: write sqlite:///adk.db")
        self._executor = executors_for(self._url).data

    async def open(self) -> None:
        """Create the tables that do not exist.  A new SQLite file can be read only by its owner."""
        if self._file is not None:
            create_private_file(self._file)
        await RetryingExecutor(self._executor).run_sync(_create_tables)
        self._reader = AdkTables(self._url)
        self.is_open = True

    async def close(self) -> None:
        if self.is_open:
            await self._reader.close()
        await self._executor.close()

    # --- write -----------------------------------------------------------------------------------

    def to_rows(self, ids: Ids, content: SessionContent) -> TargetRows:
        """Return the rows that google-adk reads as this session, or raise ConversionError."""
        app_name, user_id, session_id = ids
        self._check_texts(*ids)
        row = {
            "app_name": app_name,
            "user_id": user_id,
            "id": session_id,
            "state": self._json_text(content.state),
            "create_time": self._session_moment("the time of creation", content.created_at),
            "update_time": self._session_moment("the time of the last update", content.updated_at),
        }
        parent = {"app_name": app_name, "user_id": user_id, "session_id": session_id}
        rows = [
            {**parent, **self._event(event, number)} for number, event in enumerate(content.events)
        ]
        if len({row["id"] for row in rows}) < len(rows):
            raise ConversionError("two of its events have the same id")
        self._make_timestamps_increase(rows, content.events)
        return row, rows

    async def insert(self, batch: Mapping[Ids, TargetRows]) -> dict[Ids, str]:
        """Insert each session in whole or not at all; return the reason for each rejected one."""
        insert_all = partial(self._insert, batch=batch.values())
        if not batch or await self._rejection_of(insert_all) is None:
            return {}
        one_by_one = ((ids, partial(self._insert, batch=[rows])) for ids, rows in batch.items())
        reasons = {ids: await self._rejection_of(insert) for ids, insert in one_by_one}
        return {ids: reason for ids, reason in reasons.items() if reason is not None}

    async def insert_state(self, owner: Ids, state: bytes) -> bool:
        """Insert a state, or return False if the target already has the same state.

        Raise ConversionError if the target has another state.
        """
        self._check_texts(*owner)
        row = dict(zip(("app_name", "user_id"), owner, strict=False))
        row["state"] = self._json_text(state)
        now = datetime.now(UTC).replace(tzinfo=None)
        model = v1.StorageAppState if len(owner) == 1 else v1.StorageUserState
        insert = self._insert_statement(model)
        reason = await self._rejection_of(
            lambda connection: connection.execute(insert, [{**row, "update_time": now}]).close()
        )
        if reason is None:
            return True
        difference = await self.state_difference(owner, state)
        if difference is None:
            return False
        other = "the target has another state, which was not changed"
        raise ConversionError(reason if difference == MISSING else other)

    # --- read ------------------------------------------------------------------------------------

    async def session_differences(self, contents: Mapping[Ids, SessionContent]) -> dict[Ids, str]:
        """Return how sessions of the target differ from *contents*: empty for an equal one.

        The result does not contain the sessions that the target does not have.
        """
        sessions = [ListedSession(ids[0], ids[1], ids[2], "") for ids in contents]
        stored_contents = await self._reader.read(sessions)
        reasons: dict[Ids, str] = {}
        for session, (ids, content) in zip(sessions, contents.items(), strict=True):
            stored = stored_contents.get(session)
            if isinstance(stored, SessionContent):  # PostgreSQL's JSONB makes large floats integers
                content = content._replace(expires_at=None)
                reasons[ids] = session_difference(content, stored, numbers_may_differ=True)
            elif stored is not None:
                reasons[ids] = stored.reason
        return reasons

    async def state_difference(self, owner: Ids, state: bytes) -> str | None:
        """Return how a state of the target differs from *state*; None if both are equal."""
        found = await self._reader.state(*owner)
        if not isinstance(found, bytes):
            return found.reason if found else MISSING
        return None if is_same_state(found, state, numbers_may_differ=True) else "its state differs"

    async def count(self, app_name: str | None, user_id: str | None) -> int:
        names = ((ADK_SESSIONS.c.app_name, app_name), (ADK_SESSIONS.c.user_id, user_id))
        conditions = [
            is_exactly(self._dialect, column, name) for column, name in names if name is not None
        ]
        query = sa.select(sa.func.count()).select_from(ADK_SESSIONS).where(*conditions)
        return await self._reader.run_without_snapshot(lambda c: int(c.scalar(query) or 0))

    # --- conversion ------------------------------------------------------------------------------

    def _event(self, event: EncodedEvent, number: int) -> dict[str, object]:
        name = f"event {number + 1}"
        try:
            parsed = events.decode(event.plaintext)
        except (ConfigurationError, DecryptionError):
            raise ConversionError(f"the installed google-adk cannot read {name}") from None
        if "id" not in parsed.model_fields_set or not parsed.id:
            raise ConversionError(f"{name} has no id")
        self._check_texts(parsed.id, parsed.invocation_id)
        return {
            "id": parsed.id,
            "invocation_id": parsed.invocation_id,
            "timestamp": _event_moment(name, parsed.timestamp),
            "event_data": self._json_text(event_json(event)),
        }

    def _make_timestamps_increase(
        self, rows: list[dict[str, Any]], history: Sequence[EncodedEvent]
    ) -> None:
        """Change the column `timestamp` so that google-adk keeps the order of *rows*.

        google-adk sorts events by this column.  If the value of an event is not greater than the
        value of the previous event, replace it by the previous value plus 1 microsecond.  The time
        in the event's JSON does not change; some releases of google-adk do not read it.
        """
        previous: datetime | None = None
        for row, event in zip(rows, history, strict=True):
            if previous is not None and row["timestamp"] <= previous:
                if previous >= datetime.max:
                    raise ConversionError("the time of an event is out of range")
                row["timestamp"] = previous + _MICROSECOND
            previous = row["timestamp"]
            values = {"author": "a", "timestamp": event.time / 1_000_000}
            stored_event: Any = v1.StorageEvent(id="e", invocation_id="i", timestamp=previous)
            stored_event.event_data = values
            if microseconds(stored_event.to_event().timestamp) != event.time:
                raise ConversionError(
                    "the installed google-adk would change the time of an event, or the order of "
                    "events: install google-adk 2.13 or later"
                )

    def _json_text(self, text: bytes) -> str:
        decoded = text.decode()
        # Like google-adk, send only ASCII to MySQL: the column's character set may lack other
        # characters.
        if self._dialect == "mysql" and not decoded.isascii():
            return _NON_ASCII.sub(lambda found: json.dumps(found[0])[1:-1], decoded)
        return decoded

    def _check_texts(self, *texts: str) -> None:
        if not can_store(self._dialect, *texts):
            raise ConversionError("one of its ids has a lone surrogate or a NUL character")

    def _session_moment(self, name: str, time: int) -> datetime:
        """Return a time in the zone in which the installed google-adk reads it."""
        try:
            moment = datetime_of(time).astimezone(sessions_time_zone(self._dialect))
        except (OverflowError, ValueError):
            raise ConversionError(f"{name} is out of range") from None
        return moment.replace(tzinfo=None)

    # --- statements ------------------------------------------------------------------------------

    def _insert(self, connection: sa.Connection, batch: Collection[TargetRows]) -> None:
        connection.execute(
            self._insert_statement(v1.StorageSession), [session for session, _ in batch]
        )
        rows = [row for _, events in batch for row in events]
        if rows:
            connection.execute(self._insert_statement(v1.StorageEvent), rows)

    def _insert_statement(self, model: Any) -> sa.Insert:
        """Return the INSERT into google-adk's table, whose parameters for JSON are texts.

        In some releases of google-adk, SQLAlchemy warns about google-adk's own type of JSON.
        """
        values: dict[str, sa.ColumnElement[Any]] = {}
        for column in model.__table__.columns:
            is_json = column.name in JSON_COLUMNS
            value = sa.bindparam(column.name, type_=sa.Text() if is_json else column.type)
            is_jsonb = is_json and self._dialect == "postgresql"
            values[column.name] = sa.cast(value, JSONB) if is_jsonb else value
        return sa.insert(sa.table(model.__tablename__, *map(sa.column, values))).values(values)

    async def _rejection_of(self, work: Callable[[sa.Connection], None]) -> str | None:
        """Run *work* in a transaction; return why the database rejects its rows, or None."""

        def strictly(connection: sa.Connection) -> None:
            dialect_of(connection).reject_long_values(connection)
            work(connection)

        async def attempt() -> str | None:
            try:
                await self._executor.run_sync(strictly)
            except UniqueViolation:
                return "the target already has it, or an id that its collation takes for the same"
            except DatabaseError as error:
                if not str(error.code).startswith(_DATA_ERROR_CODES):
                    raise
                return f"the target cannot hold one of its values (error {error.code})"
            return None

        return await with_retries(attempt, writes=True)


def create_private_file(path: Path) -> None:
    """Create an empty file that only its owner can read, before anything is written to it.

    A file that exists is accepted if other users cannot read it.  SQLite gives its other files,
    with the endings -wal and -journal, the same permissions.
    """
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        return
    except FileExistsError:
        pass
    file_status = path.lstat()  # do not follow a link, which may name a file of another user
    # Windows has no `geteuid`, and `st_uid` is always 0 there.
    is_others = sys.platform != "win32" and file_status.st_uid != os.geteuid()
    if not stat.S_ISREG(file_status.st_mode) or is_others:
        raise ConfigurationError(
            f"{str(path)!r} exists, and is a link or belongs to another user: plaintext is not "
            "written to it; give another name"
        )
    if sys.platform != "win32" and stat.S_IMODE(file_status.st_mode) & 0o077:
        raise ConfigurationError(
            f"{str(path)!r} exists, and other users may read it: run chmod 600 first, because "
            "plaintext is written to it; or give another name"
        )


def event_json(event: EncodedEvent) -> bytes:
    return event.plaintext[json_text.version_end(event.plaintext) :]


def _event_moment(name: str, seconds: float) -> datetime:
    """Return the time of an event as the installed google-adk stores it in the column."""
    session: Any = SimpleNamespace(app_name="a", user_id="u", id="s")
    event = Event(author="a", invocation_id="i", timestamp=seconds)
    try:
        moment = v1.StorageEvent.from_event(session, event).timestamp
    except (OverflowError, ValueError, OSError):
        raise ConversionError(f"the time of {name} is out of range") from None
    return moment.replace(tzinfo=None)


def _target_url(url: str | sa.URL) -> sa.URL:
    """Parse *url*; for MariaDB, replace the dialect by that of MySQL.

    With the dialect of MariaDB, google-adk creates columns that hold no fractions of a second and
    at most 64 KiB of JSON.  A service that uses the dialect of MariaDB can nevertheless read the
    columns that were created with the dialect of MySQL, and the reverse.
    """
    parsed = parsed_url("the target", url)
    parsed = parsed.set(drivername=parsed.drivername.replace("mariadb", "mysql"))
    if parsed.get_backend_name() not in ("sqlite", "postgresql", "mysql"):
        raise ConfigurationError(
            f"the target {parsed.drivername}://... cannot be used: give a database of SQLite, "
            "PostgreSQL, MySQL or MariaDB"
        )
    return parsed


def _create_tables(connection: sa.Connection) -> None:
    """Create missing tables of google-adk, unless there are others with the same names."""
    kinds = kinds_in(connection)
    if TableKind.ENCRYPTED in kinds:
        raise ConfigurationError(
            "the target is an encrypted database of this package, perhaps the source itself: "
            "plaintext is not written to it; give another database"
        )
    if not kinds - {TableKind.ADK_V1}:
        v1.Base.metadata.create_all(connection)
        table: sa.Table = v1.StorageMetadata.__table__  # type: ignore[assignment]
        key = {"key": "schema_version"}
        if connection.execute(sa.select(table).filter_by(**key)).first() is None:
            connection.execute(sa.insert(table), [{**key, "value": "1"}]).close()
        if TableKind.ADK_V1 in kinds_in(connection):
            return
    raise ConfigurationError(
        "the target has other tables of the same names, such as google-adk's older schema: give a "
        "new database, or migrate the target with `adk migrate session`"
    )
