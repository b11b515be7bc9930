"""The ids behind rows of `secure_sessions`, in batches."""

import functools
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import sqlalchemy as sa

from adk_secure_sessions.errors import TamperedError
from adk_secure_sessions.keys.data_keys import DataKeyRow, StagedKeys
from adk_secure_sessions.maintenance.database import Database
from adk_secure_sessions.maintenance.problems import UNREADABLE
from adk_secure_sessions.maintenance.walking import Bounds, Range, ranges, within
from adk_secure_sessions.records import decode_text, unprefixed
from adk_secure_sessions.storage.connection import Row
from adk_secure_sessions.storage.seals import naming, session_place, user_place
from adk_secure_sessions.storage.tables import apps, data_keys, sessions, users


class Ids(NamedTuple):
    """Whose session it is, as ADK names it."""

    app_name: str
    user_id: str
    session_id: str


class Located(NamedTuple):
    """A row of `secure_sessions`: whose it is, or why that cannot be told."""

    row: int
    ids: Ids | None
    error: Exception | None = None


class Batch(NamedTuple):
    keys: Range
    sessions: list[Located]


class _User(NamedTuple):
    tag: bytes
    app_name: str
    user_id: str


async def identified(
    db: Database, before: int | None = None, size: int = 100
) -> AsyncIterator[Batch]:
    """Each session, or each last updated *before*; nothing vouches for the time yet.

    What is returned was authenticated, but for events, bases and witnesses.
    """
    keys = await db.keys()
    async for keyset in ranges(db, sessions.c.id, size):
        parameters = keyset.parameters if before is None else keyset.parameters | {"before": before}
        rows = await db.read(_sessions(keyset.bounds, before is not None), parameters)
        owners = await _owners(db, keyset) if rows else {}
        staged = StagedKeys(keys)
        if rows:
            # After what they open, so that none is missing that was made meanwhile.
            staged.load(
                DataKeyRow(*row) for row in await db.read(_keys(keyset.bounds), keyset.parameters)
            )
        yield Batch(keyset, [_located(row, owners, staged) for row in rows])


def _located(row: Row, owners: dict[int, Row], staged: StagedKeys) -> Located:
    row_id, user_row, revision, base_revision, created_at, updated_at, tag, stored = row
    try:
        if user_row not in owners:
            raise TamperedError(f"{sessions.name} row {row_id}: its user's row was removed")
        user = _open_user(owners[user_row], staged)
        with naming(sessions.name, row_id):
            numbers = (user_row, revision, base_revision, created_at, updated_at)
            where = session_place(user.app_name, user.user_id, tag, row_id, *numbers)
            session_id, _ = unprefixed(staged.open(user.tag, where, stored))
    except UNREADABLE as error:
        return Located(row_id, None, error)
    return Located(row_id, Ids(user.app_name, user.user_id, session_id))


def _open_user(row: Row, staged: StagedKeys) -> _User:
    row_id, app_row, version, tag, stored, app_name_stored = row
    with naming(users.name, row_id):
        if app_name_stored is None:
            raise TamperedError("its app's row was removed")
        app_name = decode_text(app_name_stored)
        where = user_place(app_name, tag, row_id, app_row, version)
        user_id, _ = unprefixed(staged.open(tag, where, stored))
    return _User(tag, app_name, user_id)


async def _owners(db: Database, keyset: Range) -> dict[int, Row]:
    rows = await db.read(_users(keyset.bounds), keyset.parameters)
    return {row[0]: row for row in rows}


@functools.cache
def _sessions(bounds: Bounds, by_time: bool) -> sa.Select[Any]:
    c = sessions.c
    columns = (c.user_row, c.revision, c.base_revision, c.created_at, c.updated_at, c.tag, c.state)
    query = sa.select(c.id, *columns).where(*within(c.id, bounds)).order_by(c.id)
    if by_time:
        query = query.where(c.updated_at < sa.bindparam("before", type_=sa.BigInteger))
    return query


def _user_rows(bounds: Bounds) -> sa.Select[Any]:
    return sa.select(sessions.c.user_row).where(*within(sessions.c.id, bounds))


@functools.cache
def _users(bounds: Bounds) -> sa.Select[Any]:
    c = users.c
    return (
        sa.select(c.id, c.app_row, c.version, c.tag, c.state, apps.c.app_name)
        .select_from(users.outerjoin(apps, apps.c.id == c.app_row))
        .where(c.id.in_(_user_rows(bounds)))
    )


@functools.cache
def _keys(bounds: Bounds) -> sa.Select[Any]:
    c = data_keys.c
    tags = sa.select(users.c.tag).where(users.c.id.in_(_user_rows(bounds)))
    columns = (c.id, c.owner, c.generation, c.backend_id, c.created_at, c.wrapped)
    return sa.select(*columns).where(c.owner.in_(tags))
