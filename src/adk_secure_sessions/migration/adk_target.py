"""Write sessions into google-adk's tables, and compare the stored rows with the sessions.

The tables are those of `DatabaseSessionService`, schema v1.  google-adk's own code creates them,
and its own classes convert rows back into events.
"""

import inspect
import json
import math
import os
import re
import stat
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, NamedTuple, TypeVar

import sqlalchemy as sa
from google.adk.events import Event
from google.adk.sessions.schemas import v1
from sqlalchemy.dialects.postgresql import JSONB

from adk_secure_sessions.db.connect import executors_for
from adk_secure_sessions.db.dialects import dialect_of
from adk_secure_sessions.db.protocol import UniqueViolation, repeated
from adk_secure_sessions.errors import ConfigurationError, DatabaseError, DecryptionError
from adk_secure_sessions.formats import events, json_text, states
from adk_secure_sessions.loops import ClosedByWith
from adk_secure_sessions.migration.adk_sql import Kind, kinds_in
from adk_secure_sessions.migration.adk_tables import AdkTables
from adk_secure_sessions.migration.compare import differences
from adk_secure_sessions.migration.sources import Ids, SessionContent, SourceSession, Unreadable
from adk_secure_sessions.storage.features.imports import SourceEvent
from adk_secure_sessions.tracebacks import hides_locals

T = TypeVar("T")
MISSING = "the target does not have it"
_STATE = "its state differs"

_LONGEST_ID, _LONGEST_INVOCATION_ID = 128, 256  # characters, in the columns of google-adk
_EPOCH = datetime(1970, 1, 1)
_MICROSECOND = timedelta(microseconds=1)
_FIRST_YEAR = {"mysql": 1000}  # the first year that a column of times can hold; 1 if not listed
# Codes of errors for a value that a column cannot hold: PostgreSQL's "data exception" and "program
# limit exceeded"; MySQL's and MariaDB's codes for a wrong or too long value.
_UNSUITABLE = ("22", "54", "1264", "1292", "1366", "1406", "4025", "SQLITE_TOOBIG")
# PostgreSQL's JSONB returns a float of at least this size as an integer.
_FIRST_WITHOUT_FRACTION = 1e16
_NON_ASCII = re.compile(r"[^\x00-\x7f]")
# Finds a number with an exponent of 0 or more, as in the JSON of a large float.
_LARGE_NUMBER = re.compile(rb"[0-9][eE]\+?[0-9]")
_JSON_COLUMNS = ("state", "event_data")


class UnsuitableSession(Exception):
    """google-adk's database cannot hold a session or a state.

    The text of the error contains no content of the session or state.
    """


class SessionRows(NamedTuple):
    """A session as rows of google-adk's tables: parameters of the statements that insert them."""

    ids: Ids
    session: dict[str, object]
    events: list[dict[str, object]]


class _Reading(NamedTuple):
    """The way in which the installed google-adk reads columns with times.

    Recent releases read the columns as UTC.  They read the time of an event from its JSON, and use
    the column `timestamp` only to sort the events.

    Attributes:
        has_local_updates: The column `update_time` of a session contains local time.
        has_local_events: The column `timestamp` of an event contains local time.
        is_event_time: google-adk reads the time of an event from the column `timestamp`.
    """

    has_local_updates: bool
    has_local_events: bool
    is_event_time: bool


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
        parsed = _parsed(url)
        self.is_open: bool = False
        self._file: Path | None = None
        if parsed.get_backend_name() == "sqlite":
            name = parsed.database or ""
            if name in ("", ":memory:") or name.startswith("file:"):
                raise ConfigurationError("the target must be a file: write sqlite:///adk.db")
            self._file = Path(name)
        self._executor = executors_for(parsed, None, None, None, {}).data
        self._url = parsed
        self._dialect = parsed.get_backend_name()

    async def open(self) -> None:
        """Create the tables that do not exist.  A new SQLite file can be read only by its owner.

        Raises:
            ConfigurationError: The database has tables of google-adk's older schema, or
                `create_private_file` rejects the existing file.
            DatabaseError: The database cannot be used.
        """
        if self._file is not None:
            create_private_file(self._file)
        await self._run(_create_tables, commit=True)
        self._stored = AdkTables(self._url)
        self.is_open = True

    async def close(self) -> None:
        """Close the connections."""
        if self.is_open:
            await self._stored.close()
        await self._executor.close()

    # --- write -----------------------------------------------------------------------------------

    def rows_of(self, ids: Ids, content: SessionContent) -> SessionRows:
        """Return the rows that google-adk reads as this session.

        Raises:
            UnsuitableSession: google-adk's database cannot hold the session.
        """
        app_name, user_id, session_id = ids
        self._check_ids(ids)
        row = {
            "app_name": app_name,
            "user_id": user_id,
            "id": session_id,
            "state": self._json("the state", states.dumps(content.state)),
            "create_time": self._session_moment("the time of creation", content.created_at),
            "update_time": self._session_moment("the time of the last update", content.updated_at),
        }
        parent = {"app_name": app_name, "user_id": user_id, "session_id": session_id}
        rows = [
            {**parent, **self._event(event, number)} for number, event in enumerate(content.events)
        ]
        if len({one["id"] for one in rows}) < len(rows):
            raise UnsuitableSession("two of its events have the same id")
        self._sort(rows)
        return SessionRows(ids, row, rows)

    async def insert(self, batch: Sequence[SessionRows]) -> dict[Ids, str]:
        """Insert sessions that the target does not have, each in whole or not at all.

        Return a mapping from the ids of each rejected session to the reason.
        """
        if not batch or await self._try(partial(self._insert, batch=batch)) is None:
            return {}
        rejected = {}
        for rows in batch:
            reason = await self._try(partial(self._insert, batch=[rows]))
            if reason is not None:
                rejected[rows.ids] = reason
        return rejected

    async def insert_state(self, owner: Ids, state: bytes) -> bool:
        """Insert a state; return False if the target already has the same state.

        Raises UnsuitableSession if the target cannot hold the state, or already has another state.
        """
        self._check_ids(owner)
        row = dict(zip(("app_name", "user_id"), owner, strict=False))
        row["state"] = self._json("the state", state)
        now = datetime.now(UTC).replace(tzinfo=None)
        model = v1.StorageAppState if len(owner) == 1 else v1.StorageUserState
        insert = self._inserting(model, "state")
        reason = await self._try(
            lambda connection: connection.execute(insert, [{**row, "update_time": now}]).close()
        )
        if reason is None:
            return True
        difference = await self.state_difference(owner, state)
        if difference == _STATE:
            raise UnsuitableSession("the target has another state, which was not changed")
        if difference is not None:
            raise UnsuitableSession(reason)
        return False

    # --- read ------------------------------------------------------------------------------------

    async def differences(self, contents: Mapping[Ids, SessionContent]) -> dict[Ids, str | None]:
        """Return how sessions of the target differ from *contents*; None for one that does not."""
        listed = [SourceSession(*_three(ids), "") for ids in contents if self._can_have(ids)]
        stored = {one.ids: found for one, found in (await self._stored.read(listed)).items()}
        return {ids: _difference(one, stored.get(_three(ids))) for ids, one in contents.items()}

    async def state_difference(self, owner: Ids, state: bytes) -> str | None:
        """Return how a state of the target differs from *state*; None if both are equal."""
        found = await self._stored.state(*owner) if self._can_have(owner) else None
        if found is None:
            return MISSING
        if isinstance(found, Unreadable):
            return found.reason
        is_same = json_text.same_json(found, states.loads(state), numbers_may_differ=True)
        return None if is_same else _STATE

    async def count(self, app_name: str | None, user_id: str | None) -> int:
        """Return the number of sessions in the target.

        If *app_name* is given, count only the sessions of this app.  If *user_id* is given, count
        only the sessions of users with this id.
        """
        if not self._can_have(tuple(one for one in (app_name, user_id) if one is not None)):
            return 0
        table = self._table(v1.StorageSession)
        query = sa.select(sa.func.count()).select_from(table)
        for name, value in (("app_name", app_name), ("user_id", user_id)):
            if value is not None:
                query = query.where(table.c[name] == value)
        return int(
            await self._run(lambda connection: connection.execute(query).scalar_one(), commit=False)
        )

    # --- conversion ------------------------------------------------------------------------------

    def _event(self, event: SourceEvent, number: int) -> dict[str, object]:
        name = f"event {number + 1}"
        parsed = _parsed_event(event, name)
        if "id" not in parsed.model_fields_set or not parsed.id:
            raise UnsuitableSession(f"{name} has no id")
        self._check_text(f"the id of {name}", parsed.id)
        invocation = f"the invocation id of {name}"
        self._check_text(invocation, parsed.invocation_id, _LONGEST_INVOCATION_ID)
        return {
            "id": parsed.id,
            "invocation_id": parsed.invocation_id,
            "timestamp": self._event_moment(name, event.time),
            "event_data": self._json(name, _json_of(event)),
        }

    def _sort(self, rows: list[dict[str, Any]]) -> None:
        """Change the column `timestamp` so that google-adk keeps the order of *rows*.

        google-adk sorts events by this column.  If the value of an event is not greater than the
        value of the previous event, replace it by the previous value plus 1 microsecond.  The time
        in the event's JSON does not change.
        """
        last: datetime | None = None
        for row in rows:
            if last is not None and row["timestamp"] <= last:
                if self._reading.is_event_time:
                    raise UnsuitableSession(
                        "its events do not have increasing times, and the installed google-adk "
                        "would change their order: install google-adk 2.13 or later"
                    )
                if last >= datetime.max:
                    raise UnsuitableSession("the time of an event is out of range")
                row["timestamp"] = last + _MICROSECOND
            last = row["timestamp"]

    def _json(self, name: str, text: bytes) -> str:
        if self._dialect == "postgresql":
            if _LARGE_NUMBER.search(text) and not _fits_jsonb(json_text.loads(text)):
                raise UnsuitableSession(f"{name} has a number that PostgreSQL's JSONB would change")
            return text.decode()
        decoded = text.decode()
        # Like google-adk, send only ASCII to MySQL: the column's character set may lack other
        # characters.
        if self._dialect == "mysql" and not decoded.isascii():
            return _NON_ASCII.sub(lambda found: json.dumps(found[0])[1:-1], decoded)
        return decoded

    def _check_ids(self, ids: tuple[str, ...]) -> None:
        """Raise UnsuitableSession if the columns cannot hold the ids of a session or an owner."""
        names = ("the app name", "the user id", "the session id")
        for name, value in zip(names, ids, strict=False):
            self._check_text(name, value)

    def _can_have(self, ids: tuple[str, ...]) -> bool:
        with suppress(UnsuitableSession):
            self._check_ids(ids)
            return True
        return False

    def _check_text(self, name: str, value: str, longest: int = _LONGEST_ID) -> None:
        try:
            value.encode()
        except UnicodeEncodeError:
            raise UnsuitableSession(f"{name} has a lone surrogate") from None
        if self._dialect == "sqlite":
            return
        if len(value) > longest:
            raise UnsuitableSession(f"{name} has more than {longest} characters")
        if self._dialect == "postgresql" and "\0" in value:
            raise UnsuitableSession(f"{name} has a NUL character")

    def _moment(self, name: str, microseconds: int) -> datetime:
        try:
            moment = _EPOCH + timedelta(microseconds=microseconds)
        except OverflowError:
            moment = datetime.min
        if moment.year < _FIRST_YEAR.get(self._dialect, 1) or moment == datetime.min:
            raise UnsuitableSession(f"{name} is out of range")
        return moment

    def _event_moment(self, name: str, microseconds: int) -> datetime:
        moment = self._moment(f"the time of {name}", microseconds)
        if not self._reading.has_local_events:
            return moment
        local = _local(moment)
        if self._reading.is_event_time and _microseconds(local.timestamp()) != microseconds:
            raise UnsuitableSession(
                f"the time of {name} is in the hour that a clock change repeats, and the installed "
                "google-adk would change it: install google-adk 2.13 or later"
            )
        return local

    def _session_moment(self, name: str, microseconds: int) -> datetime:
        moment = self._moment(name, microseconds)
        return _local(moment) if self._reading.has_local_updates else moment

    @cached_property
    def _reading(self) -> _Reading:
        """Find out how the installed google-adk reads times, by converting two times with it."""
        session: Any = SimpleNamespace(app_name="a", user_id="u", id="s")
        local_updates = local_events = is_event_time = False
        for seconds in (1_705_000_000.0, 1_720_000_000.0):  # one in winter, one in daylight saving
            moment = _EPOCH + timedelta(seconds=seconds)
            event = Event(author="a", invocation_id="i", timestamp=seconds)
            made: Any = v1.StorageEvent.from_event(session, event)
            local_events |= made.timestamp.replace(tzinfo=None) != moment
            made.timestamp, made.event_data = moment, {"author": "a", "timestamp": 1.0}
            is_event_time |= made.to_event().timestamp != 1.0
            row: Any = v1.StorageSession(update_time=moment)
            is_sqlite = self._dialect == "sqlite"
            # In releases that store UTC in every database, the method has no parameter for the kind
            # of the database.
            asks = "is_sqlite" in inspect.signature(row.get_update_timestamp).parameters
            stored = row.get_update_timestamp(**({"is_sqlite": is_sqlite} if asks else {}))
            local_updates |= stored != seconds
        return _Reading(local_updates, local_events, is_event_time)

    # --- statements ------------------------------------------------------------------------------

    def _table(self, model: Any) -> sa.TableClause:
        """Return google-adk's table, but with types of SQLAlchemy for the JSON columns.

        In some releases of google-adk, SQLAlchemy warns about google-adk's own type.
        """
        json_type = JSONB() if self._dialect == "postgresql" else sa.Text()
        columns = (
            sa.column(column.name, json_type if column.name in _JSON_COLUMNS else column.type)
            for column in model.__table__.columns
        )
        return sa.table(model.__tablename__, *columns)

    def _insert(self, connection: sa.Connection, batch: Sequence[SessionRows]) -> None:
        connection.execute(
            self._inserting(v1.StorageSession, "state"), [one.session for one in batch]
        )
        rows = [row for one in batch for row in one.events]
        if rows:
            connection.execute(self._inserting(v1.StorageEvent, "event_data"), rows)

    def _inserting(self, model: Any, json_column: str) -> sa.Insert:
        """Return the INSERT that stores the text of its parameter *json_column* as JSON."""
        table = self._table(model)
        text: sa.ColumnElement[Any] = sa.bindparam(json_column, type_=sa.Text())
        if self._dialect == "postgresql":
            text = sa.cast(text, JSONB)
        values: dict[str, sa.ColumnElement[Any]] = {
            column.name: sa.bindparam(column.name, type_=column.type) for column in table.columns
        }
        return sa.insert(table).values({**values, json_column: text})

    async def _try(self, work: Callable[[sa.Connection], None]) -> str | None:
        """Run *work* in a transaction; return why the database rejects its rows, or None."""
        try:
            await self._run(work, commit=True)
        except UniqueViolation:
            return "the target already has it, or has an id that its collation takes for the same"
        except DatabaseError as error:
            if not str(error.code).startswith(_UNSUITABLE):
                raise
            return f"the target cannot hold one of its values (error {error.code})"
        return None

    async def _run(self, work: Callable[[sa.Connection], T], *, commit: bool) -> T:
        taken = False

        def strictly(connection: sa.Connection) -> T:
            dialect_of(connection).reject_long_values(connection)
            return work(connection)

        async def attempt() -> T | None:
            nonlocal taken
            try:
                return await self._executor.define(strictly, commit=commit)
            except UniqueViolation:
                # `repeated` would run *work* again after this error.  So raise the error only after
                # `repeated` has returned.
                taken = True
                return None

        result: Any = await repeated(attempt, writes=commit)
        if taken:
            raise UniqueViolation
        return result  # type: ignore[no-any-return]


def new_private_file(path: Path) -> BinaryIO:
    """Create a file that only its owner can read, and return it open for writing.

    Do not open the file again by its name: somebody with write access to the directory may have
    replaced the file by a link.
    """
    created = _create(path)
    if created is None:
        raise ConfigurationError(
            f"{str(path)!r} exists already, and a file is not overwritten: delete it, or give "
            "another name"
        )
    return os.fdopen(created, "wb")


def _create(path: Path) -> int | None:
    """Create a file with mode 0600, and return its descriptor; None if the file exists."""
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return None


def create_private_file(path: Path) -> None:
    """Create an empty file that only its owner can read, before anything is written to it.

    A file that exists is accepted if other users cannot read it.  SQLite gives its other files,
    with the endings -wal and -journal, the same permissions.
    """
    created = _create(path)
    if created is not None:
        os.close(created)
        return
    found = path.lstat()  # do not follow a link, which may name a file of another user
    # Windows has no `geteuid`, and `st_uid` is always 0 there.
    is_others = sys.platform != "win32" and found.st_uid != os.geteuid()
    if not stat.S_ISREG(found.st_mode) or is_others:
        raise ConfigurationError(
            f"{str(path)!r} exists, and is a link or belongs to another user: plaintext is not "
            "written to it; give another name"
        )
    if sys.platform != "win32" and stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigurationError(
            f"{str(path)!r} exists, and other users may read it: run chmod 600 first, because "
            "plaintext is written to it; or give another name"
        )


def _difference(content: SessionContent, stored: SessionContent | Unreadable | None) -> str | None:
    if stored is None:
        return MISSING
    if isinstance(stored, Unreadable):
        return stored.reason
    # PostgreSQL's JSONB returns large floats as integers.
    fields = differences(content._replace(expires_at=None), stored, by_value=True)
    return f"different: {', '.join(fields)}" if fields else None


def _three(ids: Ids) -> tuple[str, str, str]:
    app_name, user_id, session_id = ids
    return app_name, user_id, session_id


def _fits_jsonb(value: Any) -> bool:
    """Return whether JSONB keeps the numbers in *value*.

    For example, JSONB stores the float 1e23 as the integer 10**23, which differs from the exact
    value of the float.
    """
    if isinstance(value, dict):
        return all(map(_fits_jsonb, value.values()))
    if isinstance(value, list):
        return all(map(_fits_jsonb, value))
    if not isinstance(value, float) or not abs(value) >= _FIRST_WITHOUT_FRACTION:
        return True
    return math.isfinite(value) and int(Decimal(repr(value))) == value


def _json_of(event: SourceEvent) -> bytes:
    """Return the JSON of an event.  In the plaintext, the version of google-adk precedes it."""
    return event.plaintext[json_text.version_end(event.plaintext) :]


def _parsed_event(event: SourceEvent, name: str) -> Event:
    with suppress(ConfigurationError, DecryptionError):
        return events.decode_in(event.plaintext, "", "")
    raise UnsuitableSession(f"the installed google-adk cannot read {name}")


def _local(moment: datetime) -> datetime:
    """Convert UTC to the time zone of this process."""
    return moment.replace(tzinfo=UTC).astimezone().replace(tzinfo=None)


def _microseconds(seconds: float) -> int:
    return round(seconds * 1_000_000)


def _parsed(url: str | sa.URL) -> sa.URL:
    """Parse *url*; for MariaDB, replace the dialect by that of MySQL.

    With the dialect of MariaDB, google-adk creates columns that hold no fractions of a second and
    at most 64 KiB of JSON.  A service that uses the dialect of MariaDB can nevertheless read the
    columns that were created with the dialect of MySQL, and the reverse.
    """
    parsed: sa.URL | None = None
    with suppress(sa.exc.ArgumentError, ValueError):
        parsed = sa.make_url(url)
    if parsed is None:
        raise ConfigurationError(
            "the target is not a database URL: write, for example, sqlite:///adk.db"
        )
    backend, _, driver = parsed.drivername.partition("+")
    if backend == "mariadb":
        parsed = parsed.set(drivername="+".join(filter(None, ["mysql", driver])))
    if parsed.get_backend_name() not in ("sqlite", "postgresql", "postgres", "mysql"):
        raise ConfigurationError(
            f"the target {parsed.drivername}://... cannot be used: give a database of SQLite, "
            "PostgreSQL, MySQL or MariaDB"
        )
    return parsed


def _create_tables(connection: sa.Connection) -> None:
    """Create missing tables of google-adk, unless there are others with the same names."""
    if not kinds_in(connection) - {Kind.ADK_V1, Kind.ENCRYPTED}:
        v1.Base.metadata.create_all(connection)
        table: sa.Table = v1.StorageMetadata.__table__  # type: ignore[assignment]
        key = {"key": "schema_version"}
        if connection.execute(sa.select(table).filter_by(**key)).first() is None:
            connection.execute(sa.insert(table), [{**key, "value": "1"}]).close()
        if Kind.ADK_V1 in kinds_in(connection):
            return
    raise ConfigurationError(
        "the target has other tables of the same names, such as google-adk's older schema: give a "
        "new database, or migrate the target with `adk migrate session`"
    )
