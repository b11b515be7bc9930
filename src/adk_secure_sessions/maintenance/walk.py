"""Walk over all apps, users and sessions in pages, and decrypt their ids."""

import functools
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa

from adk_secure_sessions.errors import Reason, TamperedError
from adk_secure_sessions.formats.records import binary, decode_text, split_id
from adk_secure_sessions.keys.data_keys import StagedKeys
from adk_secure_sessions.maintenance.database import Database
from adk_secure_sessions.maintenance.problems import UNREADABLE
from adk_secure_sessions.storage.pages import pages
from adk_secure_sessions.storage.queries import (
    chunks,
    is_one_of,
    numbered,
)
from adk_secure_sessions.storage.reads import CheckUser
from adk_secure_sessions.storage.rows import (
    SESSIONS,
    USERS,
    Owner,
    SessionRow,
    StoredSession,
    UserRow,
    naming,
)
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
    columns: SessionRow | None = None

    def known_ids(self) -> SessionIds:
        """Return the ids, or raise the error that decrypting them raised."""
        if self.ids is None:
            assert self.error is not None
            raise self.error
        return self.ids


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


async def located_sessions(
    db: Database, due: Due | None = None
) -> AsyncIterator[list[LocatedSession]]:
    """Yield all sessions and collections in pages, each with its decrypted ids or an error.

    A collection is a named list of items (artifacts or memory), with a row in `secure_sessions`.
    If ids were decrypted, the row is authentic.  The events, the snapshot and the version witness
    of a session are not read.  If *due* is given, yield no collections, and only sessions that are
    due according to their stored times, which are not authenticated yet.
    """
    query, parameters = (_SESSIONS, {}) if due is None else (_DUE_SESSIONS, due.parameters)
    size = db.limits.rows
    walk = pages(db.read, query, sessions.c.id, size, SessionRow, **parameters)
    async for rows in walk:
        yield await _located(db, rows)


async def sessions_of(db: Database, user_row: int) -> AsyncIterator[list[LocatedSession]]:
    """Yield the sessions and collections of one user; see `located_sessions`."""
    size = db.limits.rows
    walk = pages(db.read, _OF_USER, sessions.c.id, size, SessionRow, user_row=user_row)
    async for rows in walk:
        yield await _located(db, rows)


async def located(db: Database, row_ids: Iterable[int]) -> list[LocatedSession]:
    """Return the sessions and collections with these row ids; see `located_sessions`."""
    return await _located(db, await _with_ids(db, row_ids))


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


def owner_tags(db: Database, table: sa.Table) -> AsyncIterator[list[OwnerTag]]:
    """Yield all rows of *table* in pages; the table is `secure_apps` or `secure_users`."""
    query = _APP_TAGS if table is apps else _USER_TAGS
    return pages(db.read, query, table.c.id, db.limits.rows, OwnerTag)


_APP_TAGS = sa.select(apps.c.id, apps.c.tag, apps.c.app_name)
_USER_TAGS = sa.select(users.c.id, users.c.tag, apps.c.app_name, users.c.app_row).select_from(
    users.outerjoin(apps, apps.c.id == users.c.app_row)
)


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


async def _located(db: Database, rows: Sequence[SessionRow]) -> list[LocatedSession]:
    found = await _decrypted(db, rows)
    if all(one.error is None for one in found):
        return found
    # After the query for the sessions, another process may have erased a user, or re-encrypted
    # sessions and retired their old data keys.  So read everything again.
    return await _decrypted(db, await _with_ids(db, [row.id for row in rows]))


async def _decrypted(db: Database, rows: Sequence[SessionRow]) -> list[LocatedSession]:
    owners: dict[object, tuple[UserRow, object]] = {}
    for ids in chunks({row.user_row for row in rows}):
        for *user, app_name in await db.read(_users(len(ids)), numbered(ids)):
            owners[user[0]] = UserRow(*user), app_name
    keys = await db.keys_of(*(user.tag for user, _ in owners.values()))
    return [_locate(row, owners.get(row.user_row), keys) for row in rows]


async def _with_ids(db: Database, row_ids: Iterable[int]) -> list[SessionRow]:
    rows: list[SessionRow] = []
    for ids in chunks(row_ids):
        rows += [SessionRow(*row) for row in await db.read(_sessions(len(ids)), numbered(ids))]
    return sorted(rows)


def _locate(
    row: SessionRow, owner: tuple[UserRow, object] | None, keys: StagedKeys
) -> LocatedSession:
    """Decrypt the ids of *row*; *owner* is its user's row, and the name of the user's app."""
    try:
        if owner is None:
            raise TamperedError(
                "its user's row was removed", reason=Reason.MISSING, table=sessions.name, row=row.id
            )
        user, stored_name = owner
        with naming(users.name, user.id):
            app_name = app_name_of(stored_name)
            context = USERS.context((app_name,), user)
            user_id, _ = split_id(keys.open(user.tag, context, user.state))
        with naming(sessions.name, row.id):
            context = SESSIONS.context((app_name, user_id), row)
            session_id, _ = split_id(keys.open(user.tag, context, row.state))
    except UNREADABLE as error:
        return LocatedSession(row.id, row.tag, None, error)
    is_collection = row.base_revision == COLLECTION
    ids = SessionIds(app_name, user_id, session_id, is_collection)
    return LocatedSession(row.id, row.tag, ids, columns=row)


# --- statements ----------------------------------------------------------------------------------


def purgeable() -> tuple[sa.ColumnElement[bool], ...]:
    """Return the SQL conditions for rows that `purge` may delete; see `Due.parameters`."""
    before, now = (sa.bindparam(name, type_=sa.BigInteger) for name in ("before", "now"))
    is_session = sessions.c.base_revision != sa.literal_column(str(COLLECTION))
    return is_session, sa.or_(sessions.c.updated_at < before, sessions.c.expires_at <= now)


_SESSIONS = sa.select(*sessions.c)
_DUE_SESSIONS = _SESSIONS.where(*purgeable())
_OF_USER = _SESSIONS.where(sessions.c.user_row == sa.bindparam("user_row"))


@functools.cache
def _sessions(number: int) -> sa.Select[Any]:
    return _SESSIONS.where(is_one_of(sessions.c.id, number))


@functools.cache
def _users(number: int) -> sa.Select[Any]:
    query = sa.select(*users.c, apps.c.app_name)
    query = query.select_from(users.outerjoin(apps, apps.c.id == users.c.app_row))
    return query.where(is_one_of(users.c.id, number))
