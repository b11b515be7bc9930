"""Walk over all apps, users and sessions in pages, and over the records of one app or user."""

import functools
from collections.abc import AsyncIterator, Iterable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

import sqlalchemy as sa

from adk_secure_sessions.errors import Reason, TamperedError
from adk_secure_sessions.formats.records import (
    HEADER_LENGTH,
    decode_text,
    require_bytes,
    split_id,
    split_owner,
)
from adk_secure_sessions.keys.data_keys import DataKeyRow, StagedKeys
from adk_secure_sessions.maintenance.database import Database
from adk_secure_sessions.maintenance.problems import ROW_ERRORS, Problems
from adk_secure_sessions.storage import reads
from adk_secure_sessions.storage.pages import Span, grouped, pages, rows_where
from adk_secure_sessions.storage.queries import DATA_KEYS
from adk_secure_sessions.storage.schema import (
    SEALED,
    Owner,
    SealedColumn,
    SessionRow,
    UserRow,
    apps,
    data_keys,
    locating_errors,
    sessions,
    users,
)

R = TypeVar("R", bound=tuple[Any, ...])

_APPS, _USERS, _SESSIONS, _SNAPSHOTS, _EVENTS, _WITNESSES = SEALED
# One statement reads a group of at most `_GROUP_SIZE` records and `_GROUP_BYTES` bytes.
# A record larger than `_GROUP_BYTES` is a group of its own.
_GROUP_SIZE = 64
_GROUP_BYTES = 4 * 1024 * 1024
_SIZES = 1000  # how many pairs (primary key, length of the record) one statement reads


class SessionIds(NamedTuple):
    """The ids of a session in ADK, or of a collection, whose name is in *session_id*."""

    app_name: str
    user_id: str
    session_id: str


class SessionWithIds(NamedTuple):
    """A row of `secure_sessions`, and its decrypted ids or, if it is not authentic, the error."""

    columns: SessionRow
    ids_or_error: SessionIds | Exception

    @property
    def id(self) -> int:
        return self.columns.id

    def require_ids(self) -> SessionIds:
        """Return the ids, or raise the error that decrypting them raised."""
        if isinstance(self.ids_or_error, Exception):
            raise self.ids_or_error
        return self.ids_or_error


async def sessions_with_ids(
    db: Database, query: sa.Select[Any] | None = None, **parameters: object
) -> AsyncIterator[list[SessionWithIds]]:
    """Yield sessions and collections in pages, each with its decrypted ids or an error.

    If ids were decrypted, the row is authentic.  The events, the snapshot and the version witness
    are not read.  To select only some rows, pass *query*, a constant of a module that is derived
    from `SESSION_ROWS`; *parameters* are its bind parameters.
    """
    query, size = SESSION_ROWS if query is None else query, db.limits.rows
    walk = pages(db.runner.read, query, sessions.c.id, size, SessionRow, **parameters)
    async for rows in walk:
        yield await _with_ids(db, rows)


def sessions_of(db: Database, user_row: int) -> AsyncIterator[list[SessionWithIds]]:
    return sessions_with_ids(db, _OF_USER, user_row=user_row)


async def sessions_in_rows(db: Database, row_ids: Iterable[int]) -> list[SessionWithIds]:
    """Return the sessions and collections with these row ids; see `sessions_with_ids`."""
    return await _with_ids(db, await _stored_rows(db, row_ids))


def app_name_of(stored: object) -> str:
    """Return the app's name from its column, which is None if the app's row was removed."""
    if stored is None:
        raise TamperedError("its app's row was removed", Reason.MISSING)
    return decode_text(stored)


def all_data_keys(db: Database) -> AsyncIterator[list[DataKeyRow]]:
    return pages(
        db.runner.read_keys, DATA_KEYS, data_keys.c.id, db.limits.keys_per_page, DataKeyRow
    )


class OwnerRow(NamedTuple):
    """The columns that identify an app or a user; they are not authenticated yet.

    For a user, *app_name* is the name in the row of the user's app, or None if that row does not
    exist.  *app_row* is the id of that row; for an app, it is 0.
    """

    id: int
    tag: object
    app_name: object
    app_row: int = 0


def owner_rows(db: Database, table: sa.Table) -> AsyncIterator[list[OwnerRow]]:
    """Yield all rows of *table* in pages; the table is `secure_apps` or `secure_users`."""
    return pages(db.runner.read, _OWNERS[table], table.c.id, db.limits.rows, OwnerRow)


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
) -> tuple[str, Owner, reads.HeaderCounts] | None:
    """Decrypt the app or user in *row*, and its version witness; return None if it was deleted.

    Return the app's name, the owner, and the number of both records by header.
    """
    of_user = table is users
    with locating_errors(table.name, row.id):
        app_name, tag = app_name_of(row.app_name), require_bytes(row.tag)
        identity = await db.runner.identify(app_name)
        if not of_user and identity.app_tag != tag:
            raise TamperedError("its app_name or its tag was modified", Reason.WRONG_OWNER)
    check = reads.CheckOwner(
        identity._replace(user_tag=tag) if of_user else identity, of_user=of_user
    )
    owner = await db.runner.run(check)
    if owner is None:
        return None
    if of_user and (await db.runner.identify(app_name, owner.user_id)).user_tag != tag:
        detail = "its tag belongs to another user"
        raise TamperedError(detail, Reason.WRONG_OWNER, table.name, row.id)
    return app_name, owner, check.header_counts


async def read_owner_with_tag(
    db: Database, tag: bytes
) -> tuple[str, Owner, reads.HeaderCounts] | None:
    """Do the same as `read_owner` for the app or user with *tag*, if there is one."""
    for table, query in _OWNERS.items():
        for row in await rows_where(db.runner.read, query, table.c.tag, [tag]):
            return await read_owner(db, table, OwnerRow(*row))
    return None


async def _with_ids(db: Database, rows: Sequence[SessionRow]) -> list[SessionWithIds]:
    decrypted = await _decrypt_all(db, rows)
    if not any(isinstance(session.ids_or_error, Exception) for session in decrypted):
        return decrypted
    # After the query for the sessions, another process may have erased a user, or re-encrypted
    # sessions and retired their old data keys.  So read everything again.
    return await _decrypt_all(db, await _stored_rows(db, [row.id for row in rows]))


async def _decrypt_all(db: Database, rows: Sequence[SessionRow]) -> list[SessionWithIds]:
    owners: dict[object, tuple[UserRow, object]] = {}
    user_rows = {row.user_row for row in rows}
    for *user, app_name in await rows_where(db.runner.read, _USERS_WITH_APP, users.c.id, user_rows):
        owners[user[0]] = UserRow(*user), app_name
    keys = await db.runner.load_data_keys(*(user.tag for user, _ in owners.values()))
    return [_decrypt_ids(row, owners.get(row.user_row), keys) for row in rows]


async def _stored_rows(db: Database, row_ids: Iterable[int]) -> list[SessionRow]:
    rows = await rows_where(db.runner.read, SESSION_ROWS, sessions.c.id, row_ids)
    return sorted(SessionRow(*row) for row in rows)


def _decrypt_ids(
    row: SessionRow, owner: tuple[UserRow, object] | None, keys: StagedKeys
) -> SessionWithIds:
    """Decrypt the ids of *row*; *owner* is its user's row, and the name of the user's app."""
    try:
        if owner is None:
            detail = "its user's row was removed"
            raise TamperedError(detail, Reason.MISSING, sessions.name, row.id)
        user, stored_name = owner
        with locating_errors(users.name, user.id):
            app_name = app_name_of(stored_name)
            context = _USERS.context((app_name,), user)
            user_id, _ = split_id(keys.open(user.tag, context, user.state))
        with locating_errors(sessions.name, row.id):
            context = _SESSIONS.context((app_name, user_id), row)
            session_id, _ = split_id(keys.open(user.tag, context, row.state))
    except ROW_ERRORS as error:
        return SessionWithIds(row, error)
    return SessionWithIds(row, SessionIds(app_name, user_id, session_id))


# --- the records of one owner --------------------------------------------------------------------


class EncryptedRecord(NamedTuple):
    """A stored record, still encrypted: its column, its row, and the ids for its context."""

    column: SealedColumn[Any]
    row: Any
    ids: Sequence[str]

    @property
    def key(self) -> tuple[Any, ...]:
        return self.column.key_of(self.row)

    @property
    def stored(self) -> Any:  # bytes, or any other type in a modified row of SQLite
        return self.row[-1]

    @property
    def name(self) -> str:
        """The row's primary key as text, for messages."""
        return ", ".join(part.hex() if isinstance(part, bytes) else str(part) for part in self.key)


async def records_of_owner(
    db: Database, keys: StagedKeys, table: sa.Table, row: OwnerRow
) -> list[EncryptedRecord] | None:
    """Return the records of the row and the version witness of an app or user.

    *keys* are the owner's data keys.  Also select the current one, from the ids in the row.  Return
    None if the row does not exist any more.
    """
    column = _APPS if table is apps else _USERS
    listed = await rows_with_primary_keys(db, column, [(row.id,)])
    if not listed:
        return None
    (stored,) = listed
    with locating_errors(table.name, row.id):
        ids = (app_name_of(row.app_name),)
        plaintext = keys.open(stored.tag, column.context(ids, stored), stored.state)
        if table is users:
            _, plaintext = split_id(plaintext)
        _, key_ids, _ = split_owner(plaintext)
        keys.choose_current(stored.tag, key_ids)
    return [EncryptedRecord(column, stored, ids), *await _witnesses(db, ids, [stored.tag])]


async def records_of_sessions(
    db: Database, app_name: str, user_row: int, current: bytes, problems: Problems
) -> AsyncIterator[list[EncryptedRecord]]:
    """Yield the records of a user's sessions in groups, each session before its events.

    Snapshots and events whose header is *current* are skipped.
    """
    async for page in sessions_of(db, user_row):
        ids_of: dict[int, Sequence[str]] = {}
        records: list[EncryptedRecord] = []
        for session in page:
            try:
                ids_of[session.id] = session.require_ids()
                records.append(EncryptedRecord(_SESSIONS, session.columns, ids_of[session.id]))
            except ROW_ERRORS as error:
                problems.add_error(error, sessions.name, session.id)
        tags = [record.row.tag for record in records]
        yield records + await _witnesses(db, (app_name,), tags)
        if not records:
            continue
        # These ids were authenticated: a modified id could be -2**63, and one less would overflow.
        span = Span(records[0].row.id - 1, records[-1].row.id)
        parameters = {**span.parameters, "user_row": user_row, "current": current}
        for column in (_SNAPSHOTS, _EVENTS):
            query = _primary_keys_under_other_headers(column)
            async for sized in pages(
                db.runner.read, query, column.key, _SIZES, _sized, **parameters
            ):
                known = [pair for pair in sized if pair[0][0] in ids_of]
                for group in grouped(known, itemgetter(1), _GROUP_SIZE, _GROUP_BYTES):
                    keys = [key for key, _ in group]
                    rows: list[Any] = await rows_with_primary_keys(db, column, keys)
                    yield [EncryptedRecord(column, row, ids_of[row[0]]) for row in rows]


async def _witnesses(
    db: Database, ids: Sequence[str], tags: Iterable[bytes]
) -> list[EncryptedRecord]:
    rows = await rows_with_primary_keys(db, _WITNESSES, [(tag,) for tag in tags])
    return [EncryptedRecord(_WITNESSES, row, ids) for row in rows]


async def rows_with_primary_keys(
    db: Database, column: SealedColumn[R], keys: Sequence[tuple[Any, ...]]
) -> list[R]:
    rows: list[R] = []
    for start in range(0, len(keys), _GROUP_SIZE):
        part = list(keys[start : start + _GROUP_SIZE])
        # The statement always has `_GROUP_SIZE` keys, so repeat the first key.
        part += part[:1] * (_GROUP_SIZE - len(part))
        parameters = {
            f"k{number}_{position}": value
            for number, key in enumerate(part)
            for position, value in enumerate(key)
        }
        stored = await db.runner.read(_with_primary_keys(column), parameters)
        rows += [column.row_type(*row) for row in stored]
    return rows


def _sized(*row: Any) -> tuple[tuple[Any, ...], int]:
    *key, size = row
    return tuple(key), size


# --- statements ----------------------------------------------------------------------------------


SESSION_ROWS = sa.select(*sessions.c)
_OF_USER = SESSION_ROWS.where(sessions.c.user_row == sa.bindparam("user_row"))


def header_of(column: sa.Column[Any]) -> sa.ColumnElement[Any]:
    # Use literals instead of parameters.  With parameters, the expressions in SELECT and GROUP BY
    # would have different parameters, and PostgreSQL would treat the expressions as different.
    one: sa.ColumnElement[int] = sa.literal_column("1")
    length: sa.ColumnElement[int] = sa.literal_column(str(HEADER_LENGTH))
    return sa.func.substr(column, one, length, type_=sa.LargeBinary)


@functools.cache
def _with_primary_keys(column: SealedColumn[Any]) -> sa.Select[Any]:
    wanted = [
        sa.and_(
            *(
                part == sa.bindparam(f"k{number}_{position}", type_=part.type)
                for position, part in enumerate(column.key)
            )
        )
        for number in range(_GROUP_SIZE)
    ]
    return sa.select(*column.table.c).where(sa.or_(*wanted))


@functools.cache
def _primary_keys_under_other_headers(column: SealedColumn[Any]) -> sa.Select[Any]:
    """Select the primary keys and lengths of a user's records whose header is not `current`."""
    return (
        sa.select(*column.key, sa.func.length(column.value))
        .select_from(column.table.join(sessions, sessions.c.id == column.key[0]))
        .where(
            sessions.c.user_row == sa.bindparam("user_row"),
            *Span(0, 0).conditions(sessions.c.id),
            header_of(column.value) != sa.bindparam("current", type_=sa.LargeBinary),
        )
    )
