"""Walk over all apps, users, sessions and data keys in pages, and decrypt the ids of sessions."""

import functools
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import sqlalchemy as sa

from adk_secure_sessions.errors import DecryptionError, Reason, TamperedError
from adk_secure_sessions.formats.records import HEADER_LENGTH, decode_text, require_bytes, split_id
from adk_secure_sessions.keys.data_keys import DataKeyRow, TransactionKeys
from adk_secure_sessions.maintenance.database import Database
from adk_secure_sessions.storage import key_operations
from adk_secure_sessions.storage.queries import DATA_KEYS
from adk_secure_sessions.storage.schema import (
    SEALED_TABLES,
    SessionRow,
    UserRow,
    apps,
    data_keys,
    locating_errors,
    sessions,
    users,
)
from adk_secure_sessions.storage.table_walk import pages, rows_where

T = TypeVar("T")

_USERS, _SESSIONS = SEALED_TABLES[1:3]


class SessionIds(NamedTuple):
    """The ids of a session in ADK, or of a collection, whose name is in *session_id*."""

    app_name: str
    user_id: str
    session_id: str


class ScannedSession(NamedTuple):
    """A row of `secure_sessions`, and its decrypted ids or, if it is not authentic, the error."""

    row: SessionRow
    ids_or_error: SessionIds | DecryptionError

    @property
    def id(self) -> int:
        return self.row.id

    def require_ids(self) -> SessionIds:
        """Return the ids, or raise the error that decrypting them raised."""
        if isinstance(self.ids_or_error, DecryptionError):
            raise self.ids_or_error
        return self.ids_or_error


async def flattened(walk: AsyncIterator[Sequence[T]]) -> AsyncIterator[T]:
    """Yield the items of the pages of *walk* one by one."""
    async for page in walk:
        for item in page:
            yield item


def key_text(*key: object) -> str:
    """Return a primary key as text for messages; tags are in hexadecimal."""
    return ", ".join(part.hex() if isinstance(part, bytes) else str(part) for part in key)


async def scan_sessions(
    db: Database, query: sa.Select[Any] | None = None, **parameters: object
) -> AsyncIterator[list[ScannedSession]]:
    """Yield sessions and collections in pages, each with its decrypted ids or an error.

    If ids were decrypted, the row is authentic.  The events, the snapshot and the version witness
    are not read.  To select only some rows, pass *query*, a constant of a module that is derived
    from `SESSION_ROWS`; *parameters* are its bind parameters.
    """
    query, size = SESSION_ROWS if query is None else query, db.limits.rows_per_statement
    walk = pages(db.runner.data_db.read, query, sessions.c.id, size, SessionRow, **parameters)
    async for rows in walk:
        yield await _with_ids(db, rows)


def scan_sessions_of_user(db: Database, user_row: int) -> AsyncIterator[list[ScannedSession]]:
    return scan_sessions(db, _OF_USER, user_row=user_row)


async def sessions_in_rows(db: Database, row_ids: Iterable[int]) -> list[ScannedSession]:
    """Return the sessions and collections with these row ids; see `scan_sessions`."""
    return await _with_ids(db, await _stored_rows(db, row_ids))


def app_name_of(stored: object) -> str:
    """Return the app's name from its column, which is None if the app's row was removed."""
    if stored is None:
        raise TamperedError("its app's row was removed", Reason.MISSING)
    return decode_text(stored)


def scan_data_keys(db: Database) -> AsyncIterator[list[DataKeyRow]]:
    size = db.limits.ids_per_statement
    return pages(db.runner.key_db.read, DATA_KEYS, data_keys.c.id, size, DataKeyRow)


class OwnerRow(NamedTuple):
    """The columns that identify an app or a user; they are not authenticated yet.

    For a user, *stored_app_name* is the name in the row of the user's app, or None if that row does
    not exist.  *app_row* is the id of that row; for an app, it is 0.
    """

    id: int
    tag: object
    stored_app_name: object
    app_row: int = 0


def scan_owners(db: Database, table: sa.Table) -> AsyncIterator[list[OwnerRow]]:
    """Yield all rows of *table* in pages; the table is `secure_apps` or `secure_users`."""
    size = db.limits.rows_per_statement
    return pages(db.runner.data_db.read, _OWNERS[table], table.c.id, size, OwnerRow)


_WITH_APP = users.outerjoin(apps, apps.c.id == users.c.app_row)
_USERS_WITH_APP = sa.select(*users.c, apps.c.app_name).select_from(_WITH_APP)
_OWNERS = {
    apps: sa.select(apps.c.id, apps.c.tag, apps.c.app_name),
    users: sa.select(users.c.id, users.c.tag, apps.c.app_name, users.c.app_row).select_from(
        _WITH_APP
    ),
}


async def read_owner(
    db: Database, table: sa.Table, row: OwnerRow
) -> key_operations.OwnerWithHeaders | None:
    """Decrypt the app or user in *row*, and its version witness; return None if it was deleted."""
    of_user = table is users
    with locating_errors(table.name, row.id):
        app_name, tag = app_name_of(row.stored_app_name), require_bytes(row.tag)
        identity = await db.runner.identify(app_name)
        if not of_user and identity.app_tag != tag:
            raise TamperedError("its app_name or its tag was modified", Reason.WRONG_OWNER)
    identity = identity._replace(user_tag=tag) if of_user else identity
    return await db.runner.run(key_operations.ReadOwner(identity, of_user=of_user))


async def read_owner_with_tag(db: Database, tag: bytes) -> key_operations.OwnerWithHeaders | None:
    """Do the same as `read_owner` for the app or user with *tag*, if there is one."""
    for table, query in _OWNERS.items():
        for row in await rows_where(db.runner.data_db.read, query, table.c.tag, [tag]):
            return await read_owner(db, table, OwnerRow(*row))
    return None


async def _with_ids(db: Database, rows: Sequence[SessionRow]) -> list[ScannedSession]:
    scanned = await _decrypt_all(db, rows)
    if not any(isinstance(session.ids_or_error, DecryptionError) for session in scanned):
        return scanned
    # After the query for the sessions, another process may have erased a user, or re-encrypted
    # sessions and retired their old data keys.  So read everything again.
    return await _decrypt_all(db, await _stored_rows(db, [row.id for row in rows]))


async def _decrypt_all(db: Database, rows: Sequence[SessionRow]) -> list[ScannedSession]:
    owners: dict[object, tuple[UserRow, object]] = {}
    user_rows = {row.user_row for row in rows}
    read = db.runner.data_db.read
    for *user, app_name in await rows_where(read, _USERS_WITH_APP, users.c.id, user_rows):
        owners[user[0]] = UserRow(*user), app_name
    keys = await db.runner.unwrap_data_keys(*(user.tag for user, _ in owners.values()))
    return [_decrypt_ids(row, owners.get(row.user_row), keys) for row in rows]


async def _stored_rows(db: Database, row_ids: Iterable[int]) -> list[SessionRow]:
    rows = await rows_where(db.runner.data_db.read, SESSION_ROWS, sessions.c.id, row_ids)
    return sorted(SessionRow(*row) for row in rows)


def _decrypt_ids(
    row: SessionRow, owner: tuple[UserRow, object] | None, keys: TransactionKeys
) -> ScannedSession:
    """Decrypt the ids of *row*; *owner* is its user's row, and the name of the user's app."""
    try:
        if owner is None:
            detail = "its user's row was removed"
            raise TamperedError(detail, Reason.MISSING, sessions.name, row.id)
        user, stored_name = owner
        with locating_errors(users.name, user.id):
            app_name = app_name_of(stored_name)
            context = _USERS.context((app_name,), user)
            user_id, _ = split_id(keys.open(user.tag, context, user.record))
        with locating_errors(sessions.name, row.id):
            context = _SESSIONS.context((app_name, user_id), row)
            session_id, _ = split_id(keys.open(user.tag, context, row.record))
    except DecryptionError as error:
        return ScannedSession(row, error)
    return ScannedSession(row, SessionIds(app_name, user_id, session_id))


# --- statements ----------------------------------------------------------------------------------


SESSION_ROWS = sa.select(*sessions.c)
_OF_USER = SESSION_ROWS.where(sessions.c.user_row == sa.bindparam("user_row"))


@functools.cache
def select_id_by_tag(table: sa.Table) -> sa.Select[Any]:
    return sa.select(table.c.id).where(table.c.tag == sa.bindparam("tag", type_=sa.LargeBinary))


async def is_stored(db: Database, app_name: str, user_id: str | None = None) -> bool:
    """Return whether the app or, with *user_id*, its user has a row, which is not authenticated."""
    ids = await db.runner.identify(app_name, user_id or "")
    table, tag = (apps, ids.app_tag) if user_id is None else (users, ids.user_tag)
    return bool(await db.runner.data_db.read(select_id_by_tag(table), {"tag": tag}))


def header_column(column: sa.Column[Any]) -> sa.ColumnElement[Any]:
    # Use literals instead of parameters.  With parameters, the expressions in SELECT and GROUP BY
    # would have different parameters, and PostgreSQL would treat the expressions as different.
    start: sa.ColumnElement[int] = sa.literal_column("1")
    length: sa.ColumnElement[int] = sa.literal_column(str(HEADER_LENGTH))
    return sa.func.substr(column, start, length, type_=sa.LargeBinary)
