"""Rows by ids, which only the index key can tell, and what rows say of themselves."""

import functools
from typing import Any, NamedTuple

import sqlalchemy as sa

from adk_secure_sessions.errors import ConfigurationError
from adk_secure_sessions.formats.records import header
from adk_secure_sessions.maintenance.coverage import start_of
from adk_secure_sessions.maintenance.database import Database
from adk_secure_sessions.maintenance.engine import first
from adk_secure_sessions.storage import (
    apps,
    bases,
    data_keys,
    events,
    identify,
    keyring,
    sessions,
    users,
    witnesses,
)


class Location(NamedTuple):
    """Where a row is.

    Attributes:
        table: Its table.
        tag: By which it is found, in hexadecimal; the row of `secure_witnesses` has the same,
            and the rows of `secure_data_keys` have it as `owner` (not for sessions).
        row: Its id; None: there is none.
    """

    table: str
    tag: str
    row: int | None


class Sealed(NamedTuple):
    """What a sealed value says of itself; nothing vouches for it.

    Attributes:
        row: The primary key; of a witness, the tag in hexadecimal.
        column: Which holds the value.
        backend_id: As in the stored format; None: no record of a format that is known.
        key_id: Which key sealed it: a data key, or of a data key a master.
        root_key_id: Of a master key, instead of these two.
        length: Bytes, all of it.
    """

    row: str
    column: str
    backend_id: int | None
    key_id: int | None
    root_key_id: str | None
    length: int


_SEALED = {
    table.name: (table, column)
    for table, column in (
        (keyring, keyring.c.wrapped),
        (data_keys, data_keys.c.wrapped),
        (apps, apps.c.state),
        (users, users.c.state),
        (sessions, sessions.c.state),
        (bases, bases.c.state),
        (events, events.c.event),
        (witnesses, witnesses.c.seal),
    )
}
TABLES = tuple(_SEALED)


async def lookup(
    db: Database, app_name: str, user_id: str | None = None, session_id: str | None = None
) -> tuple[Location, ...]:
    """Find the rows of an app, and of its user and that user's session if they are given.

    Raises:
        ConfigurationError: A session without a user, or the database cannot be used.
        WrongKeyError: The root keys do not open it.
    """
    if session_id is not None and user_id is None:
        raise ConfigurationError("the ids of sessions are each user's own: give the user, too")
    who = identify((await db.keys()).keyring.index, app_name, user_id or "", session_id or "")
    wanted = [(apps, who.app_tag)]
    if user_id is not None:
        wanted.append((users, who.user_tag))
    if session_id is not None:
        wanted.append((sessions, who.session_tag))
    found = []
    for table, tag in wanted:
        rows = await db.read(_by_tag(table), {"tag": tag})
        found.append(Location(table.name, tag.hex(), rows[0][0] if rows else None))
    return tuple(found)


async def inspect(
    db: Database, table: str, row: str | int | None = None, *, limit: int = 20
) -> tuple[Sealed, ...]:
    """Read the headers of records, without any key.

    Args:
        db: The database; it needs no backend.
        table: One of those with sealed values, such as `secure_events`.
        row: The primary key: a number, of events that of their session; of a witness its tag
            in hexadecimal.  None for the first rows of the table.
        limit: So many rows at most.

    Raises:
        ConfigurationError: No such table, or no such key; or the database cannot be used.
    """
    if table not in _SEALED:
        raise ConfigurationError(f"no table of sealed values: take one of {', '.join(TABLES)}")
    await db.survey()
    parameters: dict[str, object] = {"limit": limit}
    if row is not None:
        parameters["row"] = _key(table, row)
    sealed, column = _SEALED[table]
    rows = await db.reader_of(sealed)(_headers(table, row is not None), parameters)
    made = []
    for length, start, root_key_id, *key in rows:
        backend_id, key_id = (None, None) if table == keyring.name else header(start) or (None,) * 2
        name = ", ".join(part.hex() if isinstance(part, bytes) else str(part) for part in key)
        made.append(Sealed(name, column.name, backend_id, key_id, root_key_id, length))
    return tuple(made)


def _key(table: str, row: str | int) -> int | bytes:
    try:
        return bytes.fromhex(str(row)) if table == witnesses.name else int(row)
    except ValueError:
        pass
    kind = "a tag in hexadecimal" if table == witnesses.name else "a number"
    raise ConfigurationError(f"a row of {table} is named by {kind}")


@functools.cache
def _by_tag(table: sa.Table) -> sa.Select[Any]:
    return sa.select(table.c.id).where(table.c.tag == sa.bindparam("tag", type_=sa.LargeBinary))


@functools.cache
def _headers(name: str, one: bool) -> sa.Select[Any]:
    table, column = _SEALED[name]
    key = list(table.primary_key.columns)
    root: sa.ColumnElement[Any] = sa.cast(sa.null(), sa.String(255))
    if table is keyring:
        root = keyring.c.root_key_id
    length = sa.func.length(column)
    query = sa.select(length, start_of(column), root, *key).order_by(*key)
    if one:
        query = query.where(key[0] == sa.bindparam("row", type_=key[0].type))
    return first(query, sa.bindparam("limit", type_=sa.BigInteger))
