"""Find the rows of an app, user or session, and read the headers of stored records."""

import functools
from typing import Any, NamedTuple

import sqlalchemy as sa

from adk_secure_sessions.audit import audited_command, logged_command
from adk_secure_sessions.errors import ConfigurationError
from adk_secure_sessions.formats.records import parse_header_or_none
from adk_secure_sessions.maintenance.counts import backend_name
from adk_secure_sessions.maintenance.database import Database
from adk_secure_sessions.maintenance.row_scan import header_column, key_text, select_id_by_tag
from adk_secure_sessions.storage.queries import first_rows
from adk_secure_sessions.storage.schema import (
    IS_COLLECTION,
    SEALED_TABLES,
    apps,
    data_keys,
    keyring,
    sessions,
    users,
    witnesses,
)


class Location(NamedTuple):
    """Where the row of an app, user, session or collection is stored.

    Attributes:
        kind: `app`, `user`, `session` or `collection`.
        table: The table of the row.
        tag: The blind index of the ids, in hexadecimal.  The row's version witness in
            `secure_witnesses` has the same tag.  For an app or user, the column `owner` of
            `secure_data_keys` contains this tag, too.
        row: The row's id; None if there is no such row.
    """

    kind: str
    table: str
    tag: str
    row: int | None

    @property
    def cells(self) -> tuple[str, ...]:
        row = "no row" if self.row is None else f"row {self.row}"
        return self.kind, self.table, row, f"tag {self.tag}"


class RecordHeader(NamedTuple):
    """The header of a stored record.  `debug inspect` does not authenticate the header.

    Attributes:
        row: The row's primary key.  For an event or item, the row id of its session or collection
            and its number; for a version witness, the tag in hexadecimal.
        column: The column that stores the record.
        backend_id: The id of the backend that encrypted the record.  None if the value is a master
            key or has an unknown format.
        key_id: The id of the key that encrypted the record: a data master if the record is a
            wrapped data key, otherwise a data key.  None if `backend_id` is None.
        root_key_id: For a master key, the id of the root key that wraps it; otherwise None.
        length: The length of the whole record in bytes.
        kind: For a row of `secure_sessions`, `session` or `collection`; otherwise None.
    """

    row: str
    column: str
    backend_id: int | None
    key_id: int | None
    root_key_id: str | None
    length: int
    kind: str | None

    @property
    def cells(self) -> tuple[str, ...]:
        how, key = backend_name(self.backend_id), f"by {self.key_id}"
        if self.root_key_id is not None:
            how, key = "wrapped", f"by {self.root_key_id}"
        return f"row {self.row}", self.column, how, key, f"{self.length} bytes", self.kind or ""


_RECORD_COLUMNS: dict[str, sa.Column[Any]] = {
    column.table.name: column
    for column in (
        keyring.c.wrapped,
        data_keys.c.wrapped,
        *(table.record_column for table in SEALED_TABLES),
    )
}
TABLE_NAMES = tuple(_RECORD_COLUMNS)


@audited_command
async def lookup(
    db: Database,
    app_name: str,
    user_id: str | None = None,
    session_id: str | None = None,
    collection: str | None = None,
) -> tuple[Location, ...]:
    """Find the rows of an app and, if given, of a user, of a session and of a collection.

    Raises:
        ConfigurationError: *session_id* or *collection* was given without *user_id*.
    """
    if user_id is None and (session_id, collection) != (None, None):
        raise ConfigurationError(
            "a session id or a collection is unique only for one user: give the user id, too"
        )
    ids = await db.runner.identify(app_name, user_id or "", session_id or "")
    tags = [("app", apps, ids.app_tag)]
    if user_id is not None:
        tags.append(("user", users, ids.user_tag))
        if session_id is not None:
            tags.append(("session", sessions, ids.session_tag))
        if collection is not None:
            ids = await db.runner.identify(app_name, user_id, collection, is_collection=True)
            tags.append(("collection", sessions, ids.session_tag))
    locations = []
    for kind, table, tag in tags:
        rows = await db.runner.data_db.read(select_id_by_tag(table), {"tag": tag})
        row_id = next((row_id for (row_id,) in rows), None)
        locations.append(Location(kind, table.name, tag.hex(), row_id))
    return tuple(locations)


@logged_command
async def inspect_records(
    db: Database, table: str, row: str | int | None = None, *, limit: int = 20
) -> tuple[RecordHeader, ...]:
    """Return the headers of stored records; no key is needed.

    Args:
        db: The database; it needs no backend.
        table: A table that contains records, such as `secure_events`.
        row: The row's primary key, a number.  For events, items and snapshots, give the row id of
            the session or collection; for a version witness, the tag in hexadecimal.  By default,
            the first rows of the table are returned.
        limit: The maximum number of rows to return.

    Raises:
        ConfigurationError: *table* contains no records, or *row* is malformed.
    """
    if table not in _RECORD_COLUMNS:
        names = ", ".join(TABLE_NAMES)
        raise ConfigurationError(f"not a table with records: choose one of {names}")
    await db.survey_existing()
    parameters: dict[str, object] = {"limit": limit}
    if row is not None:
        parameters["row"] = _parse_row(table, row)
    column = _RECORD_COLUMNS[table]
    source = column.table
    rows = await db.reader_for(source)(_select_headers(column, row is not None), parameters)
    found = []
    for length, header, root_key_id, is_collection, *key in rows:
        name = key_text(*key)
        ids = None if source is keyring else parse_header_or_none(header)
        backend_id, key_id = ids or (None, None)
        kind = {None: None, True: "collection", False: "session"}[is_collection]
        found.append(RecordHeader(name, column.name, backend_id, key_id, root_key_id, length, kind))
    return tuple(found)


def _parse_row(table: str, row: str | int) -> int | bytes:
    try:
        if table == witnesses.name:
            return bytes.fromhex(str(row))
        if -(2**63) <= (number := int(row)) < 2**63:
            return number
    except ValueError:
        pass
    kind = "a tag in hexadecimal" if table == witnesses.name else "a number"
    raise ConfigurationError(f"a row of {table} is identified by {kind}")


@functools.cache
def _select_headers(column: sa.Column[Any], of_one_row: bool) -> sa.Select[Any]:
    table = column.table
    key = list(table.primary_key.columns)
    root_key_id = keyring.c.root_key_id if table is keyring else sa.null()
    is_collection = IS_COLLECTION if table is sessions else sa.null()
    columns = (sa.func.length(column), header_column(column), root_key_id, is_collection, *key)
    query = sa.select(*columns).order_by(*key)
    if of_one_row:
        query = query.where(key[0] == sa.bindparam("row", type_=key[0].type))
    return first_rows(query, sa.bindparam("limit", type_=sa.BigInteger))
