"""Read `secure_sessions` in batches, and decrypt the ids of each session, user and app."""

import functools
from collections.abc import AsyncIterator, Mapping
from typing import Any, NamedTuple

import sqlalchemy as sa

from adk_secure_sessions.errors import Reason, TamperedError, UnknownKeyError
from adk_secure_sessions.formats.records import binary, decode_text, split_id
from adk_secure_sessions.keys.data_keys import StagedKeys
from adk_secure_sessions.maintenance.database import Database
from adk_secure_sessions.maintenance.engine import Bounds, Range, ranges, within
from adk_secure_sessions.maintenance.problems import UNREADABLE
from adk_secure_sessions.storage.bindings import (
    Owner,
    StoredSession,
    naming,
    session_context,
    user_context,
)
from adk_secure_sessions.storage.queries import UserRow
from adk_secure_sessions.storage.reads import CheckUser
from adk_secure_sessions.storage.schema import COLLECTION, apps, sessions, users


class SessionIds(NamedTuple):
    """The ids that identify a session in ADK.

    A collection has the same ids, with *is_collection* set and its name in *session_id*.
    """

    app_name: str
    user_id: str
    session_id: str
    is_collection: bool = False


class LocatedSession(NamedTuple):
    """A row of `secure_sessions`: its row id, its tag, and the decrypted ids or the error.

    *columns* are the columns of the row, which are authentic; None if *ids* is None.
    """

    row: int
    tag: bytes
    ids: SessionIds | None
    error: Exception | None = None
    columns: "SessionColumns | None" = None

    def known_ids(self) -> SessionIds:
        """Return the ids, or raise the error that decrypting them raised."""
        if self.ids is None:
            assert self.error is not None
            raise self.error
        return self.ids


class LocatedSessions(NamedTuple):
    """Sessions whose row ids are in the range *span*."""

    span: Range
    sessions: list[LocatedSession]


class SessionColumns(NamedTuple):
    """The columns of a row of `secure_sessions`; the record in *state* is still encrypted."""

    id: int
    user_row: int
    revision: int
    base_revision: int
    created_at: int
    updated_at: int
    expires_at: int
    tag: bytes
    state: bytes

    @property
    def numbers(self) -> tuple[int, ...]:
        """The integer columns, in the order in which `session_context` takes them."""
        return self[:7]


class Due(NamedTuple):
    """Decides which sessions `purge` deletes; all times are microseconds since 1970, UTC.

    Attributes:
        before: Sessions that were last updated before this time are due.  If None, no session is
            due because of its age.
        now: Sessions that expire at this time or earlier are due.
    """

    before: int | None
    now: int

    @property
    def parameters(self) -> dict[str, object]:
        """The parameters of the conditions of `purgeable`."""
        return {"before": -(2**63) if self.before is None else self.before, "now": self.now}

    def includes(self, session: StoredSession) -> bool:
        """Return whether `purge` deletes *session*."""
        is_old = self.before is not None and session.updated_at < self.before
        return is_old or session.expires_at <= self.now


async def located_sessions(db: Database, due: Due | None = None) -> AsyncIterator[LocatedSessions]:
    """Yield all sessions and collections in batches, each with its decrypted ids or an error.

    A collection is a named list of items (artifacts or memory), with a row in `secure_sessions`.
    If ids were decrypted, the row is authentic.  The events, the snapshot and the version witness
    of a session are not read.

    Args:
        db: The database.
        due: If given, yield no collections, and only sessions that are due.  The statement compares
            the stored times, which are not authenticated yet.
    """
    async for span in ranges(db, sessions.c.id, db.limits.rows):
        yield LocatedSessions(span, await _located_with_present_keys(db, span, due))


async def located_in(db: Database, span: Range) -> list[LocatedSession]:
    """Return the sessions and collections whose row ids are in *span*; see `located_sessions`."""
    return await _located_with_present_keys(db, span, None)


def app_name_of(stored: object) -> str:
    """Return the app's name from *stored*, the value of `secure_apps.app_name`.

    Raises:
        TamperedError: *stored* is None, because the app's row was removed; or *stored* is not
            bytes, or not UTF-8.
    """
    if stored is None:
        raise TamperedError("its app's row was removed", reason=Reason.MISSING)
    return decode_text(stored)


class OwnerTag(NamedTuple):
    """The columns that identify an app or a user; they are not authenticated yet.

    For a user, *app_name* is the name in the row of the user's app, or None if that row does not
    exist.  *app_row* is the id of that row; for an app, it is 0.
    """

    id: int
    tag: object
    app_name: object
    app_row: int = 0


@functools.cache
def app_tags(bounds: Bounds) -> sa.Select[Any]:
    """Return the query for the columns of `OwnerTag`, of the apps whose row ids are in a range."""
    c = apps.c
    return sa.select(c.id, c.tag, c.app_name).where(*within(c.id, bounds)).order_by(c.id)


@functools.cache
def user_tags(bounds: Bounds) -> sa.Select[Any]:
    """Return the query for the columns of `OwnerTag`, of the users whose row ids are in a range."""
    c = users.c
    query = sa.select(c.id, c.tag, apps.c.app_name, c.app_row)
    query = query.select_from(users.outerjoin(apps, apps.c.id == c.app_row))
    return query.where(*within(c.id, bounds)).order_by(c.id)


async def read_tagged_user(db: Database, row: OwnerTag) -> tuple[str, Owner] | None:
    """Read and decrypt the user with the tag in *row*; return the app's name and the user.

    Return None if the user was deleted after *row* was read.

    Raises:
        TamperedError: The tag belongs to another user, or a row was tampered with.
    """
    with naming(users.name, row.id):
        app_name = app_name_of(row.app_name)
        tag = binary(row.tag)
    who = await db.unit.identify(app_name)
    user = await db.unit.run(CheckUser(who._replace(user_tag=tag)))
    if user is None:
        return None
    if (await db.unit.identify(app_name, user.user_id)).user_tag != tag:
        raise TamperedError(
            "its tag belongs to another user",
            reason=Reason.WRONG_OWNER,
            table=users.name,
            row=row.id,
        )
    return app_name, user


class _SessionsAndOwners(NamedTuple):
    """Rows of sessions, the rows of their users, and the names of their apps.

    The keys of *users* and *app_names* are row ids.  Nothing is authenticated yet.
    """

    sessions: list[SessionColumns]
    users: Mapping[int, UserRow]
    app_names: Mapping[int, object]


async def _located_with_present_keys(
    db: Database, span: Range, due: Due | None
) -> list[LocatedSession]:
    """Read sessions and then their data keys; if a data key is missing, read both a second time.

    Between the query for sessions and the query for data keys, another process may re-encrypt the
    sessions and retire their old data keys.
    """
    located = await _located(db, span, due)
    if any(isinstance(one.error, UnknownKeyError) for one in located):
        located = await _located(db, span, due)
    return located


async def _located(db: Database, span: Range, due: Due | None) -> list[LocatedSession]:
    found = await _read(db, span, due)
    keys = await db.keys_of(*(user.tag for user in found.users.values()))
    # SQLite stores any type in any column, so a modified id can have another type, which cannot be
    # compared with an integer.  A row with such an id comes first.
    in_order = sorted(found.sessions, key=lambda row: row.id if isinstance(row.id, int) else -1)
    return [_locate(row, found, keys) for row in in_order]


def _locate(row: SessionColumns, found: _SessionsAndOwners, keys: StagedKeys) -> LocatedSession:
    try:
        user = found.users.get(row.user_row)
        if user is None:
            raise TamperedError(
                "its user's row was removed", reason=Reason.MISSING, table=sessions.name, row=row.id
            )
        with naming(users.name, user.id):
            app_name = app_name_of(found.app_names.get(user.app_row))
            context = user_context(app_name, user.tag, user.id, user.app_row, user.version)
            user_id, _ = split_id(keys.open(user.tag, context, user.state))
        with naming(sessions.name, row.id):
            context = session_context(app_name, user_id, row.tag, *row.numbers)
            session_id, _ = split_id(keys.open(user.tag, context, row.state))
    except UNREADABLE as error:
        return LocatedSession(row.id, row.tag, None, error)
    is_collection = row.base_revision == COLLECTION
    ids = SessionIds(app_name, user_id, session_id, is_collection)
    return LocatedSession(row.id, row.tag, ids, columns=row)


# --- rows ----------------------------------------------------------------------------------------


async def _read(db: Database, span: Range, due: Due | None) -> _SessionsAndOwners:
    parameters = span.parameters | (due.parameters if due else {})
    found_sessions, found_users, app_names = [], {}, {}
    query = _sessions_users_apps(span.bounds, due is not None)
    for kind, *values in await db.read(query, parameters):
        if kind == _SESSION:
            found_sessions.append(SessionColumns(*values))
        elif kind == _USER:
            row_id, app_row, version, *_padding, tag, state = values
            found_users[row_id] = UserRow(row_id, app_row, version, tag, state)
        else:
            row_id, *_padding, app_name, _ = values
            app_names[row_id] = app_name
    return _SessionsAndOwners(found_sessions, found_users, app_names)


_SESSION, _USER, _APP = range(3)  # the values of `kind`, the first column of the UNION
_NUMBERS, _BLOBS = 7, 2  # how many integer columns and binary columns follow `kind`


@functools.cache
def _sessions_users_apps(bounds: Bounds, only_due: bool) -> sa.CompoundSelect[Any]:
    """Return one query for sessions, their users and their apps.

    A single query sees all these rows in one consistent state of the database.
    """
    s, u = sessions.c, users.c
    numbers = [s.id, s.user_row, s.revision, s.base_revision, s.created_at, s.updated_at]
    numbers.append(s.expires_at)
    own = _member(_SESSION, numbers, [s.tag, s.state]).where(*within(s.id, bounds))
    if only_due:
        own = own.where(*purgeable())
    theirs = u.id.in_(sa.select(s.user_row).where(*within(s.id, bounds)))
    return sa.union_all(
        own,
        _member(_USER, [u.id, u.app_row, u.version], [u.tag, u.state]).where(theirs),
        _member(_APP, [apps.c.id], [apps.c.app_name]).where(
            apps.c.id.in_(sa.select(u.app_row).where(theirs))
        ),
    )


def purgeable() -> tuple[sa.ColumnElement[bool], ...]:
    """Return the SQL conditions for rows that `purge` may delete; see `Due.parameters`."""
    before, now = (sa.bindparam(name, type_=sa.BigInteger) for name in ("before", "now"))
    is_session = sessions.c.base_revision != sa.literal_column(str(COLLECTION))
    return is_session, sa.or_(sessions.c.updated_at < before, sessions.c.expires_at <= now)


def _member(kind: int, numbers: list[Any], blobs: list[Any]) -> sa.Select[Any]:
    """Return one SELECT of the UNION: *kind*, 7 numbers and 2 blobs, padded with 0 and NULL."""
    zero: sa.ColumnElement[int] = sa.literal_column("0")
    padded = numbers + [zero] * (_NUMBERS - len(numbers))
    padded += blobs + [sa.cast(sa.null(), sa.LargeBinary)] * (_BLOBS - len(blobs))
    columns = (column.label(f"c{number}") for number, column in enumerate(padded))
    label: sa.ColumnElement[int] = sa.literal_column(str(kind))
    return sa.select(label.label("kind"), *columns)
