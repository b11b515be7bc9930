"""Read tables in batches, count records and data keys by backend, and report progress."""

import asyncio
import functools
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple, TypeVar

import sqlalchemy as sa

from adk_secure_sessions import telemetry
from adk_secure_sessions.errors import DecryptionError
from adk_secure_sessions.formats.records import header
from adk_secure_sessions.keys.data_keys import DataKeyRow, unwrap_data_key
from adk_secure_sessions.keys.keyring import Keyring
from adk_secure_sessions.maintenance.database import Database
from adk_secure_sessions.maintenance.owners import CurrentKeys, header_of
from adk_secure_sessions.storage.queries import DATA_KEYS
from adk_secure_sessions.storage.schema import (
    apps,
    bases,
    data_keys,
    events,
    sessions,
    users,
    witnesses,
)

R = TypeVar("R")
Progress = Callable[[int, int], None]  # called with the numbers of processed rows and of all rows
_METRIC_PAUSE = 1.0  # the minimum number of seconds between two updates of the progress metric

# --- ranges and batches --------------------------------------------------------------------------


class Bounds(NamedTuple):
    """Which limits a `Range` has.  Each combination of limits has its own SQL statement."""

    has_after: bool
    has_last: bool


class Range(NamedTuple):
    """The primary keys above *after*, up to and including *last*; None means no limit."""

    after: int | bytes | None
    last: int | bytes | None

    @property
    def bounds(self) -> Bounds:
        """Which of the two limits this range has."""
        return Bounds(self.after is not None, self.last is not None)

    @property
    def parameters(self) -> dict[str, object]:
        """The limits as parameters for the conditions that `within` returns."""
        named = {"after": self.after, "last": self.last}
        return {name: value for name, value in named.items() if value is not None}


def within(key: sa.ColumnElement[Any], bounds: Bounds) -> list[sa.ColumnElement[bool]]:
    """Return SQL conditions that restrict *key* to a range with these *bounds*."""
    conditions = []
    if bounds.has_after:
        conditions.append(key > sa.bindparam("after", type_=key.type))
    if bounds.has_last:
        conditions.append(key <= sa.bindparam("last", type_=key.type))
    return conditions


async def ranges(db: Database, key: sa.Column[Any], size: int) -> AsyncIterator[Range]:
    """Yield ranges of the primary key *key* that together cover all rows, with *size* rows each.

    The last range may have fewer rows or, after tampering, more rows.  This function reads only the
    last key of each range, and the caller reads the rows.  A single statement that reads the last
    key and the rows would need a LIMIT in a subquery, which MySQL rejects.
    """
    read = db.reader_of(key.table)
    after = None
    while True:
        query = _last_key(key, after is not None)
        rows = await read(query, {**Range(after, None).parameters, "step": size - 1})
        # SQLite stores any type in any column, so a modified key may have a wrong type.  A range
        # cannot end at such a key.  So the row with this key, and all rows after that row, belong
        # to the last range.
        last = next((found for (found,) in rows if isinstance(found, int | bytes)), None)
        yield Range(after, last)
        if last is None:
            return
        after = last


async def batches(
    db: Database,
    key: sa.Column[Any],
    statement: Callable[[Bounds], sa.Executable],
    row: Callable[..., R],
    size: int,
) -> AsyncIterator[list[R]]:
    """Run the statement for each range of *key*, and yield the rows of each range as a list.

    Args:
        db: The database.
        key: The primary key, whose ranges have *size* rows each.
        statement: A function that returns the statement that reads the rows of a range with the
            given bounds.
        row: A function that is called with the columns of each row, such as a class of named
            tuples.  Its results are the elements of the yielded lists.
        size: The number of rows in each range.
    """
    read = db.reader_of(key.table)
    async for span in ranges(db, key, size):
        found = await read(statement(span.bounds), span.parameters)
        yield [row(*values) for values in found]


@functools.cache
def select_data_keys(bounds: Bounds) -> sa.Select[Any]:
    """Return the query for the data keys whose ids are in a range with these *bounds*."""
    key = data_keys.c.id
    return DATA_KEYS.where(*within(key, bounds)).order_by(key)


def first_rows(query: sa.Select[Any], limit: sa.ColumnElement[int]) -> sa.Select[Any]:
    """Restrict *query* to its first *limit* rows."""
    # Without an offset, SQLAlchemy adds a parameter for the offset on SQLite.  No caller has a
    # value for this parameter.
    zero: sa.ColumnElement[int] = sa.literal_column("0")
    return query.limit(limit).offset(zero)


@functools.cache
def _last_key(key: sa.Column[Any], has_after: bool) -> sa.Select[Any]:
    step = sa.bindparam("step", type_=sa.BigInteger)
    query = sa.select(key).order_by(key).limit(sa.literal_column("1")).offset(step)
    return query.where(*within(key, Bounds(has_after, False)))


class Meter:
    """Counts processed rows, reports progress, and pauses to process at most *rows_per_second*.

    Count only rows that were read.  Do not add a number that a row contains, such as a revision: an
    attacker may have modified the number, and a large one would make the command wait for ever.

    Args:
        progress: Called with the number of processed rows and *total*; None for no report.
        total: The expected number of rows.
        rows_per_second: The maximum average speed; None for no limit.
    """

    def __init__(self, progress: Progress | None, total: int, rows_per_second: float | None):
        self._progress = progress
        self._total = total
        self._rate = rows_per_second
        self._began = time.monotonic()
        self._done = 0
        self._next_metric = 0.0

    async def advance(self, rows: int = 1) -> None:
        """Count and report *rows* more rows; pause if more than *rows_per_second* were counted."""
        self._done += rows
        if self._progress is not None and rows:
            # Services keep writing, so there may be more rows than were counted at the start.
            self._total = max(self._total, self._done)
            self._progress(self._done, self._total)
        if self._total and (now := time.monotonic()) >= self._next_metric:
            # `advance` may be called a million times, and setting a metric takes time.  Metrics are
            # read only about once a minute, so set this one at most once a second.
            self._next_metric = now + _METRIC_PAUSE
            telemetry.set_progress(min(self._done / self._total, 1.0))
        if self._rate:
            ahead = self._done / self._rate - (time.monotonic() - self._began)
            if ahead > 0:
                await asyncio.sleep(ahead)

    def finish(self) -> None:
        """Report that all rows are done, even if `advance` has counted fewer rows than *total*."""
        if self._progress is not None:
            self._progress(self._done, self._done)
        telemetry.set_progress(1.0)


# --- counting ------------------------------------------------------------------------------------


class RecordCount(NamedTuple):
    """How many rows of one table one backend has encrypted.

    Attributes:
        table: The table's name.
        backend_id: The id of the backend; None for values in an unknown format.
        rows: The number of these rows.
        newest: How many of these rows name the current data key of their owner (the user or app) in
            the record's header.  The current data key is the newest one that the owner's row names.
    """

    table: str
    backend_id: int | None
    rows: int
    newest: int


class RecordCounts(NamedTuple):
    """The numbers of records, and of spare data keys, which no row or record names."""

    records: tuple[RecordCount, ...]
    spare_keys: int


class DataKeyCount(NamedTuple):
    """How many data keys of one backend are wrapped by one data master.

    Attributes:
        backend_id: The id of the backend that encrypts with these keys.
        master_id: The id of the data master; None if the wrapped keys are in an unknown format.
        keys: The number of these data keys.
    """

    backend_id: int
    master_id: int | None
    keys: int


async def count_rows(db: Database, *tables: sa.Table) -> int:
    """Return the number of rows in all of *tables*."""
    total = 0
    for table in tables:
        ((count,),) = await db.reader_of(table)(_count(table), {})
        total += int(count)
    return total


async def count_events(db: Database) -> int:
    """Return the number of events: the sum of the revisions in `secure_sessions`.

    Counting the rows of `secure_events` would take long, because that table is large.
    """
    ((number,),) = await db.read(_CLAIMED_EVENTS, {})
    # If revisions were tampered with, they may be negative, or their sum may be infinite.
    return int(min(max(number or 0, 0), _MOST_EVENTS))


async def count_records(
    db: Database, meter: Meter, since: int = 0, masters: Keyring | None = None
) -> RecordCounts:
    """Count records by table and by the backend in the header, and spare data keys.

    A record counts as `newest` if its header names the current data key of its owner (see
    `CurrentKeys`).  In addition, this data key must have been created at *since* (microseconds
    since 1970) or later.  If the keyring *masters* is given, *masters* must be able to unwrap the
    data key.  *meter* counts the rows.
    """
    counts: Counter[tuple[str, int | None]] = Counter()
    newest: Counter[tuple[str, int | None]] = Counter()
    current = CurrentKeys(db)
    named: set[int] = set()  # the data keys in `current.newer` that records name nevertheless
    for table, key, query in _COUNTED:
        async for groups in batches(db, key, query, _RecordGroup, db.limits.headers):
            found = await current.of({group.owner for group in groups})
            keys = {
                owner: row.id
                for owner, row in found.items()
                if isinstance(row.created_at, int)
                and row.created_at >= since
                and (masters is None or can_unwrap(row, masters))
            }
            for group in groups:
                backend_id, key_id = header(group.header) or (None, None)
                counts[table.name, backend_id] += group.rows
                if key_id is not None and key_id == keys.get(group.owner):
                    newest[table.name, backend_id] += group.rows
                elif key_id in current.newer:
                    named.add(key_id)
            await meter.advance(sum(group.rows for group in groups))
    records = (
        RecordCount(table, backend_id, number, newest[table, backend_id])
        for (table, backend_id), number in counts.items()
    )
    return RecordCounts(tuple(records), len(current.newer - named))


async def count_data_keys(db: Database, meter: Meter) -> tuple[DataKeyCount, ...]:
    """Count data keys by backend and by data master; *meter* counts the rows."""
    counts: Counter[tuple[int, int | None]] = Counter()
    size = db.limits.headers
    async for groups in batches(db, data_keys.c.id, _data_keys, _DataKeyGroup, size):
        for group in groups:
            _, master_id = header(group.header) or (None, None)
            counts[group.backend_id, master_id] += group.rows
        await meter.advance(sum(group.rows for group in groups))
    return tuple(DataKeyCount(*key, number) for key, number in counts.items())


class _RecordGroup(NamedTuple):
    """How many records of one owner have the same header.

    *owner* is the owner's tag, or None if the owner's row does not exist.
    """

    owner: object
    header: object
    rows: int


class _DataKeyGroup(NamedTuple):
    """How many data keys have the same backend, and the same header in the column `wrapped`."""

    backend_id: int
    header: object
    rows: int


def can_unwrap(row: DataKeyRow, masters: Keyring) -> bool:
    """Return whether the keyring *masters* can unwrap the data key in *row*.

    If the result is True, *row* is authentic.
    """
    try:
        unwrap_data_key(row, masters)
    except DecryptionError:
        return False
    return True


# --- statements that count -----------------------------------------------------------------------

_MOST_EVENTS = 10**15  # the largest result of `count_events`; a larger sum was tampered with
# If revisions were tampered with, their sum may exceed 64 bits, and SQLite raises an error for such
# a sum of integers.  So multiply the revisions by 1.0.
_CLAIMED_EVENTS = sa.select(sa.func.sum(sessions.c.revision * sa.literal_column("1.0")))


@functools.cache
def _count(table: sa.Table) -> sa.Select[Any]:
    return sa.select(sa.func.count()).select_from(table)


@functools.cache
def _data_keys(bounds: Bounds) -> sa.Select[Any]:
    c = data_keys.c
    query = sa.select(c.backend_id, header_of(c.wrapped), sa.func.count())
    return query.where(*within(c.id, bounds)).group_by(c.backend_id, header_of(c.wrapped))


def _by_owner(
    column: sa.Column[Any], source: sa.FromClause, owner: sa.ColumnElement[Any]
) -> sa.Select[Any]:
    """Return the query that counts rows of *source* by owner and by the header in *column*.

    The columns of the result are those of `_RecordGroup`.
    """
    query = sa.select(owner, header_of(column), sa.func.count()).select_from(source)
    return query.group_by(owner, header_of(column))


def _with_user(table: sa.Table, session_row: sa.Column[Any]) -> sa.FromClause:
    own = table.outerjoin(sessions, sessions.c.id == session_row)
    return own.outerjoin(users, users.c.id == sessions.c.user_row)


@functools.cache
def _apps(bounds: Bounds) -> sa.Select[Any]:
    return _by_owner(apps.c.state, apps, apps.c.tag).where(*within(apps.c.id, bounds))


@functools.cache
def _users(bounds: Bounds) -> sa.Select[Any]:
    return _by_owner(users.c.state, users, users.c.tag).where(*within(users.c.id, bounds))


@functools.cache
def _sessions(bounds: Bounds) -> sa.Select[Any]:
    source = sessions.outerjoin(users, users.c.id == sessions.c.user_row)
    query = _by_owner(sessions.c.state, source, users.c.tag)
    return query.where(*within(sessions.c.id, bounds))


@functools.cache
def _bases(bounds: Bounds) -> sa.Select[Any]:
    row = bases.c.session_row
    query = _by_owner(bases.c.state, _with_user(bases, row), users.c.tag)
    return query.where(*within(row, bounds))


@functools.cache
def _events(bounds: Bounds) -> sa.Select[Any]:
    row = events.c.session_row
    query = _by_owner(events.c.event, _with_user(events, row), users.c.tag)
    return query.where(*within(row, bounds))


@functools.cache
def _witnesses(bounds: Bounds) -> sa.Select[Any]:
    """Return the query that counts version witnesses by owner and by header.

    The owner of a session's version witness is the user.  The `tag` of any other version witness
    is the tag of its owner.
    """
    tag = witnesses.c.tag
    source = witnesses.outerjoin(sessions, sessions.c.tag == tag)
    source = source.outerjoin(users, users.c.id == sessions.c.user_row)
    query = _by_owner(witnesses.c.seal, source, sa.func.coalesce(users.c.tag, tag))
    return query.where(*within(tag, bounds))


class _Counted(NamedTuple):
    """A table whose rows are counted in batches.

    Attributes:
        table: The table.
        key: The column whose ranges divide the rows into batches.
        query: A function that returns the query that counts the rows in one range.
    """

    table: sa.Table
    key: sa.Column[Any]
    query: Callable[[Bounds], sa.Executable]


# The rows of events and snapshots are divided by session row id, so that one range contains all
# rows of a session.
_COUNTED = (
    _Counted(apps, apps.c.id, _apps),
    _Counted(users, users.c.id, _users),
    _Counted(sessions, sessions.c.id, _sessions),
    _Counted(bases, sessions.c.id, _bases),
    _Counted(events, sessions.c.id, _events),
    _Counted(witnesses, witnesses.c.tag, _witnesses),
)
