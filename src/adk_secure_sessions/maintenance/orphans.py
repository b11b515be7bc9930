"""Rows that belong to nothing: nothing that a service reads leads to them."""

import functools
from typing import Any

import sqlalchemy as sa

from adk_secure_sessions.maintenance.database import Database
from adk_secure_sessions.maintenance.problems import Problems
from adk_secure_sessions.maintenance.walking import Bounds, Meter, Range, batches, within
from adk_secure_sessions.storage.connection import Row
from adk_secure_sessions.storage.tables import (
    apps,
    bases,
    data_keys,
    events,
    sessions,
    users,
    witnesses,
)

_BATCH = 1000


async def find_in_sessions(db: Database, keyset: Range, problems: Problems) -> None:
    """Events and bases in that range of session rows, of sessions that there are not."""
    for key, count in await db.read(_events(keyset.bounds), keyset.parameters):
        problems.add(events.name, key, f"{count} events of a session that there is not")
    for (key,) in await db.read(_bases(keyset.bounds), keyset.parameters):
        problems.add(bases.name, key, "of a session that there is not")


async def find_witnesses(db: Database, problems: Problems, meter: Meter) -> None:
    """Witnesses of no app, user or session: what they speak of was removed."""
    async for rows in batches(db, witnesses.c.tag, _witnesses, _BATCH):
        for row in _without_owner(rows):
            name = row[0].hex() if isinstance(row[0], bytes) else "?"
            problems.add(witnesses.name, name, "the row that it speaks of was removed")
        await meter.advance(len(rows))


async def find_data_keys(db: Database, problems: Problems, meter: Meter) -> None:
    """Data keys of no app or user."""
    async for rows in batches(db, data_keys.c.id, _data_keys, _BATCH):
        for row in _without_owner(rows):
            problems.add(data_keys.name, row[0], "its owner's row was removed")
        await meter.advance(len(rows))


def _without_owner(rows: list[Row]) -> list[Row]:
    return [row for row in rows if not row[1]]


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


def _owned(key: sa.Column[Any], tag: sa.Column[Any], tables: list[sa.Table]) -> sa.Select[Any]:
    owned = sa.or_(*(_exists(table.c.tag == tag) for table in tables))
    return sa.select(
        key, sa.case((owned, sa.literal_column("1")), else_=sa.literal_column("0"))
    ).order_by(key)


@functools.cache
def _witnesses(bounds: Bounds) -> sa.Select[Any]:
    tag = witnesses.c.tag
    return _owned(tag, tag, [apps, users, sessions]).where(*within(tag, bounds))


@functools.cache
def _data_keys(bounds: Bounds) -> sa.Select[Any]:
    c = data_keys.c
    return _owned(c.id, c.owner, [apps, users]).where(*within(c.id, bounds))
