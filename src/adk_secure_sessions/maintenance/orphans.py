"""Rows that belong to nothing: nothing that a service reads leads to them."""

import functools
import time
from typing import Any

import sqlalchemy as sa

from adk_secure_sessions.maintenance.database import Database
from adk_secure_sessions.maintenance.engine import Bounds, Meter, Range, batches, within
from adk_secure_sessions.maintenance.problems import Problems
from adk_secure_sessions.storage import (
    apps,
    bases,
    chunks,
    data_keys,
    events,
    is_one_of,
    numbered,
    read_data_keys,
    sessions,
    users,
    witnesses,
)

_BATCH = 200
_PATIENCE = 600_000_000  # microseconds in which a key's owner is written, and clocks differ
_LOST = {
    False: "its owner's row was removed",
    True: "its owner's row was removed, or a process ended before it could write that",
}


async def find_in_sessions(db: Database, keyset: Range, problems: Problems) -> None:
    """Events and bases in that range of session rows, of sessions that there are not."""
    for key, count in await db.read(_events(keyset.bounds), keyset.parameters):
        problems.add(events.name, key, f"{count} events of a session that there is not")
    for (key,) in await db.read(_bases(keyset.bounds), keyset.parameters):
        problems.add(bases.name, key, "of a session that there is not")


async def find_witnesses(db: Database, problems: Problems, meter: Meter) -> None:
    """Witnesses of no app, user or session: what they speak of was removed."""
    async for rows in batches(db, witnesses.c.tag, _witnesses, _BATCH):
        for tag, owned in rows:
            if not owned:
                name = tag.hex() if isinstance(tag, bytes) else "?"
                problems.add(witnesses.name, name, "the row that it speaks of was removed")
        await meter.advance(len(rows))


async def find_data_keys(db: Database, problems: Problems, meter: Meter) -> None:
    """Data keys of no app or user."""
    async for rows in batches(db, data_keys.c.id, _data_keys, _BATCH):
        known = await _owners(db, [owner for _, owner, _ in rows])
        lost = [row for row in rows if row[1] not in known and not _is_new(db, row[2])]
        # Who erases an owner takes the keys first.
        there = {
            key.id for key in await read_data_keys(db.read_keys, [owner for _, owner, _ in lost])
        }
        for key_id, owner, _ in lost:
            if key_id in there or not isinstance(owner, bytes):
                problems.add(data_keys.name, key_id, _LOST[db.executors.has_key_database])
        await meter.advance(len(rows))


def _is_new(db: Database, created_at: object) -> bool:
    """Whether a key may still wait for its owner's row, which is another database's."""
    if not db.executors.has_key_database or not isinstance(created_at, int):
        return False
    return abs(time.time_ns() // 1000 - created_at) < _PATIENCE


async def _owners(db: Database, tags: list[object]) -> set[object]:
    """Those of *tags* that are an app's or a user's."""
    found: set[object] = set()
    for chunk in chunks({tag for tag in tags if isinstance(tag, bytes)}):
        found |= {tag for (tag,) in await db.read(_tags(len(chunk)), numbered(chunk))}
    return found


def _exists(*conditions: sa.ColumnElement[bool]) -> sa.ColumnElement[bool]:
    return sa.select(sa.literal_column("1")).where(*conditions).exists()


@functools.cache
def _events(bounds: Bounds) -> sa.Select[Any]:
    row = events.c.session_row
    return (
        sa.select(row, sa.func.count())
        .where(*within(row, bounds), ~_exists(sessions.c.id == row))
        .group_by(row)
        .order_by(row)
    )


@functools.cache
def _bases(bounds: Bounds) -> sa.Select[Any]:
    row = bases.c.session_row
    query = sa.select(row).where(*within(row, bounds), ~_exists(sessions.c.id == row))
    return query.order_by(row)


@functools.cache
def _witnesses(bounds: Bounds) -> sa.Select[Any]:
    """Tags, and whether each is somebody's."""
    tag = witnesses.c.tag
    owned = sa.or_(*(_exists(table.c.tag == tag) for table in (apps, users, sessions)))
    owned = sa.case((owned, sa.literal_column("1")), else_=sa.literal_column("0"))
    return sa.select(tag, owned).where(*within(tag, bounds)).order_by(tag)


@functools.cache
def _data_keys(bounds: Bounds) -> sa.Select[Any]:
    c = data_keys.c
    return sa.select(c.id, c.owner, c.created_at).where(*within(c.id, bounds)).order_by(c.id)


@functools.cache
def _tags(number: int) -> sa.CompoundSelect[Any]:
    tags = (table.c.tag for table in (apps, users))
    return sa.union_all(*(sa.select(tag).where(is_one_of(tag, number)) for tag in tags))
