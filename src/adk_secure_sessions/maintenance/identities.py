"""The ids behind rows of `secure_sessions`, in batches."""

import functools
from collections.abc import AsyncIterator, Mapping
from operator import itemgetter
from typing import Any, NamedTuple

import sqlalchemy as sa

from adk_secure_sessions.db.protocol import Row
from adk_secure_sessions.errors import (
    Reason,
    TamperedError,
    UnknownKeyError,
)
from adk_secure_sessions.formats.records import decode_text, split_id
from adk_secure_sessions.keys.data_keys import StagedKeys
from adk_secure_sessions.maintenance.database import Database
from adk_secure_sessions.maintenance.engine import Bounds, Range, ranges, within
from adk_secure_sessions.maintenance.problems import UNREADABLE
from adk_secure_sessions.storage import (
    apps,
    naming,
    session_context,
    sessions,
    user_context,
    users,
)


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
    async for keyset in ranges(db, sessions.c.id, size):
        located = await _batch(db, keyset, before)
        if any(isinstance(one.error, UnknownKeyError) for one in located):
            # Keys are read after the rows: they may have been replaced in between.
            located = await _batch(db, keyset, before)
        yield Batch(keyset, located)


async def _batch(db: Database, keyset: Range, before: int | None) -> list[Located]:
    parameters = keyset.parameters if before is None else keyset.parameters | {"before": before}
    found: dict[int, list[Row]] = {kind: [] for kind in range(3)}
    for kind, *row in await db.read(_rows(keyset.bounds, before is not None), parameters):
        found[kind].append(row)
    staged = await db.keys_of(*(row[6] for row in found[_USER]))
    app_names = {row[0]: row[6] for row in found[_APP]}
    owners = {row[0]: (*row, app_names.get(row[1])) for row in found[_USER]}
    in_order = sorted(found[_SESSION], key=itemgetter(0))
    return [_located(row, owners, staged) for row in in_order]


def _located(row: Row, owners: Mapping[int, Row], staged: StagedKeys) -> Located:
    row_id, user_row, revision, base_revision, created_at, updated_at, tag, stored = row
    try:
        if user_row not in owners:
            raise TamperedError(
                "its user's row was removed", reason=Reason.MISSING, table=sessions.name, row=row_id
            )
        user = _open_user(owners[user_row], staged)
        with naming(sessions.name, row_id):
            numbers = (user_row, revision, base_revision, created_at, updated_at)
            where = session_context(user.app_name, user.user_id, tag, row_id, *numbers)
            session_id, _ = split_id(staged.open(user.tag, where, stored))
    except UNREADABLE as error:
        return Located(row_id, None, error)
    return Located(row_id, Ids(user.app_name, user.user_id, session_id))


def app_name_of(stored: object) -> str:
    """From the row of a user's app; None where there is none.  Raises TamperedError."""
    if stored is None:
        raise TamperedError("its app's row was removed", reason=Reason.MISSING)
    return decode_text(stored)


def _open_user(row: Row, staged: StagedKeys) -> _User:
    row_id, app_row, version, *_, tag, stored, app_name_stored = row
    with naming(users.name, row_id):
        app_name = app_name_of(app_name_stored)
        where = user_context(app_name, tag, row_id, app_row, version)
        user_id, _ = split_id(staged.open(tag, where, stored))
    return _User(tag, app_name, user_id)


_SESSION, _USER, _APP = range(3)
_NUMBERS, _BLOBS = 6, 2


def _member(kind: int, numbers: list[Any], blobs: list[Any]) -> sa.Select[Any]:
    """Columns `kind, 6 numbers, 2 blobs`, padded."""
    zero: sa.ColumnElement[int] = sa.literal_column("0")
    padded = numbers + [zero] * (_NUMBERS - len(numbers))
    padded += blobs + [sa.cast(sa.null(), sa.LargeBinary)] * (_BLOBS - len(blobs))
    columns = (column.label(f"c{number}") for number, column in enumerate(padded))
    label: sa.ColumnElement[int] = sa.literal_column(str(kind))
    return sa.select(label.label("kind"), *columns)


@functools.cache
def _rows(bounds: Bounds, by_time: bool) -> sa.CompoundSelect[Any]:
    """Sessions, their users and apps, by one statement: others write meanwhile."""
    s, u = sessions.c, users.c
    numbers = [s.id, s.user_row, s.revision, s.base_revision, s.created_at, s.updated_at]
    own = _member(_SESSION, numbers, [s.tag, s.state]).where(*within(s.id, bounds))
    if by_time:
        own = own.where(s.updated_at < sa.bindparam("before", type_=sa.BigInteger))
    theirs = u.id.in_(sa.select(s.user_row).where(*within(s.id, bounds)))
    return sa.union_all(
        own,
        _member(_USER, [u.id, u.app_row, u.version], [u.tag, u.state]).where(theirs),
        _member(_APP, [apps.c.id], [apps.c.app_name]).where(
            apps.c.id.in_(sa.select(u.app_row).where(theirs))
        ),
    )
