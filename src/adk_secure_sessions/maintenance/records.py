"""The records of one app or user, in batches, each with the place that it is bound to."""

import functools
from collections.abc import AsyncIterator, Iterable
from functools import partial
from typing import Any, NamedTuple

import sqlalchemy as sa

from adk_secure_sessions.db.protocol import Row
from adk_secure_sessions.formats.records import decode_text, split_id
from adk_secure_sessions.keys.data_keys import StagedKeys
from adk_secure_sessions.maintenance.coverage import start_of
from adk_secure_sessions.maintenance.database import Database
from adk_secure_sessions.maintenance.engine import Range, first, within
from adk_secure_sessions.maintenance.problems import UNREADABLE, Problems
from adk_secure_sessions.maintenance.resealing import (
    APPS,
    BASES,
    EVENTS,
    SESSIONS,
    USERS,
    WITNESSES,
    Record,
    Sealed,
    chunks,
    read,
)
from adk_secure_sessions.storage import (
    Identity,
    app_context,
    apps,
    event_context,
    naming,
    session_context,
    sessions,
    snapshot_context,
    user_context,
    users,
    witness_context,
)

_SESSIONS = 100  # at once
_HEADS = 1000  # keys and lengths at once

_APP_COLUMNS = (apps.c.tag, apps.c.version, apps.c.state, apps.c.app_name)
_USER_COLUMNS = (users.c.app_row, users.c.tag, users.c.version, users.c.state)
_WITNESS_COLUMNS = (WITNESSES.table.c.number, WITNESSES.column)


class Owner(NamedTuple):
    """Whose records they are; *user_id* is None for an app."""

    tag: bytes
    row: int
    app_name: str
    user_id: str | None


class Batch(NamedTuple):
    """Some of a user's sessions: their ids, their own records and witnesses."""

    sessions: dict[int, str]
    records: list[Record]
    rows: int  # with their events
    keys: Range


async def open_app(
    db: Database, keys: StagedKeys, row_id: int
) -> tuple[Owner, list[Record]] | None:
    """An app and its own records; None if it is gone.  Raises DecryptionError."""
    rows = await read(db, APPS, [(row_id,)], _APP_COLUMNS)
    if not rows:
        return None
    _, tag, version, stored, name = rows[0]
    with naming(apps.name, row_id):
        app_name = decode_text(name)
        where = app_context(app_name, tag, row_id, version)
        keys.open(tag, where, stored)
    owner = Owner(tag, row_id, app_name, None)
    record = Record(APPS, (row_id,), version, lambda: where, stored)
    return owner, [record, *await _witnesses(db, app_name, [tag])]


async def open_user(
    db: Database, keys: StagedKeys, row_id: int, app_name: str
) -> tuple[Owner, list[Record]] | None:
    """A user and the user's own records; None if the user is gone.  Raises DecryptionError."""
    rows = await read(db, USERS, [(row_id,)], _USER_COLUMNS)
    if not rows:
        return None
    _, app_row, tag, version, stored = rows[0]
    with naming(users.name, row_id):
        where = user_context(app_name, tag, row_id, app_row, version)
        user_id, _ = split_id(keys.open(tag, where, stored))
    owner = Owner(tag, row_id, app_name, user_id)
    record = Record(USERS, (row_id,), version, lambda: where, stored)
    return owner, [record, *await _witnesses(db, app_name, [tag])]


async def session_batches(
    db: Database, keys: StagedKeys, owner: Owner, problems: Problems
) -> AsyncIterator[Batch]:
    """A user's sessions in the order of their row ids; those that cannot be opened are named."""
    after = -1
    while True:
        rows = await db.read(_of_user(), {"user_row": owner.row, "after": after})
        if not rows:
            return
        opened, found, tags = {}, [], []
        for row in rows:
            try:
                session_id, record = _session(keys, owner, row)
            except UNREADABLE as error:
                problems.refused(error, sessions.name, row[0])
                continue
            opened[row[0]] = session_id
            found.append(record)
            tags.append(row[6])
        found += await _witnesses(db, owner.app_name, tags)
        revisions = sum(row[2] for row in rows if isinstance(row[2], int))
        keys_read = Range(after, rows[-1][0])
        yield Batch(opened, found, 2 * len(rows) + revisions, keys_read)
        after = rows[-1][0]


async def base_chunks(
    db: Database, owner: Owner, batch: Batch, start: bytes
) -> AsyncIterator[list[Record]]:
    """The bases of these sessions whose header is not *start*."""
    async for keys in _chunks(db, BASES, owner, batch, start):
        rows = await read(db, BASES, keys, (BASES.table.c.revision, BASES.column))
        yield [_base(owner, batch, *row) for row in rows]


async def event_chunks(
    db: Database, owner: Owner, batch: Batch, start: bytes
) -> AsyncIterator[list[Record]]:
    """Their events whose header is not *start*."""
    async for keys in _chunks(db, EVENTS, owner, batch, start):
        rows = await read(db, EVENTS, keys, (EVENTS.table.c.time, EVENTS.column))
        yield [_event(owner, batch, *row) for row in rows]


async def _chunks(
    db: Database, kind: Sealed, owner: Owner, batch: Batch, start: bytes
) -> AsyncIterator[list[tuple[Any, ...]]]:
    """Keys of such rows, so many that memory holds their records."""
    parameters = {**batch.keys.parameters, "user_row": owner.row, "start": start}
    at = [-1] * len(kind.key)
    while True:
        places = {f"at_{place}": value for place, value in enumerate(at)}
        rows = await db.read(_others(kind), parameters | places)
        sizes = [(tuple(key), size) for *key, size in rows if key[0] in batch.sessions]
        for keys in chunks(sizes):
            yield keys
        if len(rows) < _HEADS:
            return
        *at, _ = rows[-1]


def _session(keys: StagedKeys, owner: Owner, row: Row) -> tuple[str, Record]:
    row_id, *numbers, tag, stored = row
    assert owner.user_id is not None
    with naming(sessions.name, row_id):
        where = session_context(owner.app_name, owner.user_id, tag, row_id, *numbers)
        session_id, _ = split_id(keys.open(owner.tag, where, stored))
    return session_id, Record(SESSIONS, (row_id,), numbers[1], lambda: where, stored)


async def _witnesses(db: Database, app_name: str, tags: Iterable[bytes]) -> list[Record]:
    rows = await read(db, WITNESSES, [(tag,) for tag in tags], _WITNESS_COLUMNS)
    return [
        Record(WITNESSES, (tag,), number, partial(witness_context, app_name, tag, number), seal)
        for tag, number, seal in rows
    ]


def _base(owner: Owner, batch: Batch, session_row: int, revision: int, stored: bytes) -> Record:
    who = _identity(owner, batch.sessions[session_row])
    where = partial(snapshot_context, who, session_row, revision)
    return Record(BASES, (session_row,), revision, where, stored)


def _event(
    owner: Owner, batch: Batch, session_row: int, seq: int, time: int, stored: bytes
) -> Record:
    who = _identity(owner, batch.sessions[session_row])
    where = partial(event_context, who, session_row, seq, time)
    return Record(EVENTS, (session_row, seq), 0, where, stored)


def _identity(owner: Owner, session_id: str) -> Identity:
    assert owner.user_id is not None
    return Identity(owner.app_name, owner.user_id, session_id, b"", owner.tag, b"")


@functools.cache
def _of_user() -> sa.Select[Any]:
    c = sessions.c
    columns = (c.id, c.user_row, c.revision, c.base_revision, c.created_at, c.updated_at)
    query = sa.select(*columns, c.tag, c.state)
    query = query.where(c.user_row == sa.bindparam("user_row"), c.id > sa.bindparam("after"))
    return first(query.order_by(c.id), sa.literal_column(str(_SESSIONS)))


@functools.cache
def _others(kind: Sealed) -> sa.Select[Any]:
    """Keys and lengths of records of a user's sessions whose header is not `start`."""
    *_, last = kind.key
    at = [sa.bindparam(f"at_{place}", type_=sa.BigInteger) for place in range(len(kind.key))]
    later = last > at[-1]
    if len(kind.key) > 1:
        session_row = kind.key[0]
        later = sa.or_(session_row > at[0], sa.and_(session_row == at[0], later))
    query = (
        sa.select(*kind.key, sa.func.length(kind.column))
        .select_from(kind.table.join(sessions, sessions.c.id == kind.key[0]))
        .where(
            sessions.c.user_row == sa.bindparam("user_row"),
            *within(sessions.c.id, (True, True)),
            start_of(kind.column) != sa.bindparam("start", type_=sa.LargeBinary),
            later,
        )
    )
    return first(query.order_by(*kind.key), sa.literal_column(str(_HEADS)))
