"""Rows counted by what their records say of the keys that sealed them, without opening any."""

import functools
from collections import Counter
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

import sqlalchemy as sa

from adk_secure_sessions.formats.records import HEADER_LENGTH, header
from adk_secure_sessions.maintenance.database import Database
from adk_secure_sessions.maintenance.engine import Bounds, Meter, batches, within
from adk_secure_sessions.storage import (
    apps,
    bases,
    data_keys,
    events,
    read_data_keys,
    sessions,
    users,
    witnesses,
)

_BATCH = 500


class RecordCount(NamedTuple):
    """Rows of one table that one backend sealed.

    Attributes:
        table: Its name.
        backend_id: As in the stored format; None: no record of a format that is known.
        rows: How many.
        newest: How many of them are sealed with their owner's newest data key.
    """

    table: str
    backend_id: int | None
    rows: int
    newest: int


class DataKeyCount(NamedTuple):
    """Data keys of one backend that one data master wraps; None: not to be told."""

    backend_id: int
    master_id: int | None
    keys: int


class _Counted(NamedTuple):
    """A table, the key it is walked by, and the query that counts it: owner, header, rows."""

    table: sa.Table
    key: sa.Column[Any]
    query: Callable[[Bounds], sa.Executable]


async def count_records(db: Database, meter: Meter, since: int = 0) -> tuple[RecordCount, ...]:
    """Of data keys made before *since* none counts as an owner's newest."""
    counts: Counter[tuple[str, int | None]] = Counter()
    newest: Counter[tuple[str, int | None]] = Counter()
    for table, key, query in _COUNTED:
        async for rows in batches(db, key, query, _BATCH):
            keys = await _newest_keys(db, {row[0] for row in rows}, since)
            for owner, start, number in rows:
                backend_id, key_id = header(start) or (None, None)
                counts[table.name, backend_id] += number
                if key_id is not None and key_id == keys.get(owner):
                    newest[table.name, backend_id] += number
            await meter.advance(sum(row[2] for row in rows))
    return tuple(
        RecordCount(table, backend_id, number, newest[table, backend_id])
        for (table, backend_id), number in counts.items()
    )


async def count_data_keys(db: Database, meter: Meter) -> tuple[DataKeyCount, ...]:
    counts: Counter[tuple[int, int | None]] = Counter()
    async for rows in batches(db, data_keys.c.id, _data_keys, _BATCH):
        for backend_id, start, number in rows:
            _, master_id = header(start) or (None, None)
            counts[backend_id, master_id] += number
        await meter.advance(sum(row[2] for row in rows))
    return tuple(DataKeyCount(*key, number) for key, number in counts.items())


async def _newest_keys(db: Database, owners: set[object], since: int) -> dict[object, int | None]:
    """The id of the newest data key of each; None if it was made before *since*."""
    rows = await read_data_keys(db.read_keys, owners)
    # SQLite keeps any type in any column.
    numbered = [row for row in rows if isinstance(row.generation, int)]
    newest = {row.owner: row for row in sorted(numbered, key=attrgetter("generation"))}
    return {
        owner: row.id if isinstance(row.created_at, int) and row.created_at >= since else None
        for owner, row in newest.items()
    }


def start_of(column: sa.Column[Any]) -> sa.ColumnElement[Any]:
    """The header's bytes.  Literals: PostgreSQL does not take two parameters for one expression."""
    one: sa.ColumnElement[int] = sa.literal_column("1")
    length: sa.ColumnElement[int] = sa.literal_column(str(HEADER_LENGTH))
    return sa.func.substr(column, one, length, type_=sa.LargeBinary)


@functools.cache
def _data_keys(bounds: Bounds) -> sa.Select[Any]:
    c = data_keys.c
    query = sa.select(c.backend_id, start_of(c.wrapped), sa.func.count())
    return query.where(*within(c.id, bounds)).group_by(c.backend_id, start_of(c.wrapped))


def _by_owner(
    column: sa.Column[Any], source: sa.FromClause, owner: sa.ColumnElement[Any]
) -> sa.Select[Any]:
    """Rows of *source* by their owner and their header."""
    start = start_of(column)
    query = sa.select(owner, start, sa.func.count()).select_from(source)
    return query.group_by(owner, start)


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
    """A session's is sealed by its user's key, an app's and a user's by their own."""
    tag = witnesses.c.tag
    source = witnesses.outerjoin(sessions, sessions.c.tag == tag)
    source = source.outerjoin(users, users.c.id == sessions.c.user_row)
    query = _by_owner(witnesses.c.seal, source, sa.func.coalesce(users.c.tag, tag))
    return query.where(*within(tag, bounds))


# Events and bases by ranges of their sessions: a batch ends with a session's last event.
_COUNTED = (
    _Counted(apps, apps.c.id, _apps),
    _Counted(users, users.c.id, _users),
    _Counted(sessions, sessions.c.id, _sessions),
    _Counted(bases, sessions.c.id, _bases),
    _Counted(events, sessions.c.id, _events),
    _Counted(witnesses, witnesses.c.tag, _witnesses),
)
