"""Retire replaced keys: delete data keys and data masters that no row uses any more."""

import functools
from collections import Counter
from collections.abc import Iterator
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import sqlalchemy as sa

from adk_secure_sessions.errors import WrongKeyError
from adk_secure_sessions.formats.records import pack
from adk_secure_sessions.keys.data_keys import WRAP_BACKEND_ID, DataKeyRow
from adk_secure_sessions.keys.keyring import DATA, MasterKeyRow
from adk_secure_sessions.maintenance.database import Database, see_what_is_committed
from adk_secure_sessions.maintenance.engine import Meter, Progress, first_rows, header_of
from adk_secure_sessions.storage import (
    DATA_KEYS,
    MASTER_KEYS,
    apps,
    bases,
    data_keys,
    events,
    keyring,
    read_data_keys,
    sessions,
    users,
    witnesses,
)

_MAX_EXAMPLES = 1000


class KeptKey(NamedTuple):
    """A replaced key that `retire` keeps, because rows need it or may need it.

    Attributes:
        table: The table of the key: `secure_data_keys` or `secure_keyring`.
        id: The key's id.
        references: `(table, rows)` for each table with rows that need the key.  Empty if it cannot
            be determined which rows need the key, or if rows need only an older key of its owner.
    """

    table: str
    id: int
    references: tuple[tuple[str, int], ...]


class Retirement(NamedTuple):
    """The result of `retire`, or what a dry run expects it to be.

    Attributes:
        data_keys: How many data keys were deleted.
        masters: The ids of the data masters that were deleted.
        kept: How many replaced keys were kept.
        examples: The first 1000 kept keys.
    """

    data_keys: int
    masters: tuple[int, ...]
    kept: int
    examples: tuple[KeptKey, ...]


async def retire(
    db: Database,
    *,
    dry_run: bool = False,
    progress: Progress | None = None,
    rows_per_second: float | None = None,
) -> Retirement:
    """Delete the data keys and data masters that were replaced and that no row uses.

    Without a key database, one transaction checks that no row uses a key, and deletes the key.  If
    a data key is kept, all newer data keys of its owner are kept, too.  If a row of an owner uses
    an unknown data key, all data keys of that owner are kept.  No root key is needed.

    Args:
        db: The database.
        dry_run: Find unused keys, but delete nothing.
        progress: Called with the number of owners (users and apps) processed, and the number of
            all owners that have more than one data key.
        rows_per_second: The maximum number of owners to check per second.

    Raises:
        ConfigurationError: The database cannot be used, or holds no encrypted sessions yet.
        WrongKeyError: The keyring was tampered with.
    """
    await db.survey()
    ((total,),) = await db.read_keys(_number_of_owners(), {})
    meter = Meter(progress, int(total), rows_per_second)
    kept: list[KeptKey] = []
    deleted = number = 0
    after = b""
    query = _owners_after(db.limits.headers)
    while owners := [owner for (owner,) in await db.read_keys(query, {"after": after})]:
        for owner in owners:
            keys = await _retire_data_keys(db, owner, dry_run)
            deleted += len(keys.unused)
            number += len(keys.kept)
            kept += keys.kept[: _MAX_EXAMPLES - len(kept)]
            await meter.advance()
        after = owners[-1]
    meter.finish()
    masters = await db.change_keys(partial(_retire_masters, dry_run), commit=not dry_run)
    kept += masters.kept[: _MAX_EXAMPLES - len(kept)]
    unused = tuple(row.id for row in masters.unused)
    return Retirement(deleted, unused, number + len(masters.kept), tuple(kept))


# --- data keys -----------------------------------------------------------------------------------

Headers = Counter[tuple[str, bytes]]  # number of rows, by table and record header


class _OlderKeys(NamedTuple):
    """The data keys of one owner that were replaced by a newer one."""

    kept: list[KeptKey]
    unused: list[DataKeyRow]


class _OwnerRow(NamedTuple):
    """The row of an app or user: its table and id."""

    table: sa.Table
    id: int


async def _retire_data_keys(db: Database, owner: bytes, dry_run: bool) -> _OlderKeys:
    """Delete the unused data keys of *owner*, and return kept and unused keys."""
    if db.key_executor is db.executor:
        return await db.change(partial(_retire_beside_data, owner, dry_run), commit=not dry_run)
    # Read the keys before counting the records.  Services may meanwhile write with the newest of
    # these keys, which is always kept.  With a key database, a service never overwrites a row with
    # a record under an older key, so an unused key that is older than all used keys stays unused.
    rows = await read_data_keys(db.read_keys, [owner])
    found = await db.change(partial(_references, owner, dry_run), commit=not dry_run)
    keys = _sort_out(rows, found)
    if keys.unused and not dry_run:
        await db.change_keys(partial(_delete, keys.unused))
    return keys


def _retire_beside_data(owner: bytes, dry_run: bool, connection: sa.Connection) -> _OlderKeys:
    """Delete the unused data keys of *owner*; keys and records are in the same database."""
    query = DATA_KEYS.where(data_keys.c.owner == owner)
    see_what_is_committed(connection)
    row = _owner_row(owner, dry_run, connection)
    # FOR UPDATE waits for services that have locked one of the keys to write with it (HOLD_KEY).
    found = connection.execute(query if dry_run else query.with_for_update())
    rows = [DataKeyRow(*values) for values in found]
    keys = _sort_out(rows, None if row is None else _count_headers(owner, row, connection))
    if keys.unused and not dry_run:
        _delete(keys.unused, connection)
    return keys


def _sort_out(rows: list[DataKeyRow], headers: Headers | None) -> _OlderKeys:
    """Sort an owner's replaced keys into kept and unused ones.

    If rows use a key, all newer keys are kept, too: a service that has read a newer key may be
    about to encrypt such a row with it.

    Args:
        rows: All data keys of the owner.
        headers: The number of the owner's records, by header.  None if the owner's row was
            removed.  The owner's records cannot be found without that row, so all keys are kept.
    """
    if not all(map(_is_sound, rows)):
        return _OlderKeys([KeptKey(data_keys.name, row.id, ()) for row in rows], [])
    older = sorted(rows, key=attrgetter("generation"))[:-1]  # empty if another process deleted all
    if headers is None:
        return _OlderKeys([KeptKey(data_keys.name, row.id, ()) for row in older], [])
    named = {pack(row.backend_id, row.id): row.id for row in rows}
    unknown = [
        (table, number) for (table, header), number in headers.items() if header not in named
    ]
    kept: list[KeptKey] = []
    unused: list[DataKeyRow] = []
    for row in older:
        under = [
            (table, number)
            for (table, header), number in headers.items()
            if named.get(header) == row.id
        ]
        if under or unknown or kept:
            kept.append(KeptKey(data_keys.name, row.id, (*under, *unknown)))
        else:
            unused.append(row)
    return _OlderKeys(kept, unused)


def _delete(rows: list[DataKeyRow], connection: sa.Connection) -> None:
    """Delete those *rows* whose wrapped key has not changed since they were read."""
    parameters = [{"at_id": row.id, "at_wrapped": row.wrapped} for row in rows]
    connection.execute(_DELETE_KEY, parameters)


def _is_sound(row: DataKeyRow) -> bool:
    """Return whether the columns have the right types; SQLite stores any type in any column."""
    numbers = isinstance(row.generation, int) and row.backend_id in range(256)
    return numbers and isinstance(row.wrapped, bytes)


def _references(owner: bytes, dry_run: bool, connection: sa.Connection) -> Headers | None:
    """Count the records of *owner* by header; return None if the owner's row does not exist."""
    see_what_is_committed(connection)
    row = _owner_row(owner, dry_run, connection)
    return None if row is None else _count_headers(owner, row, connection)


def _owner_row(owner: bytes, dry_run: bool, connection: sa.Connection) -> _OwnerRow | None:
    """Find and lock the row of *owner*.  The lock waits for transactions that add a session."""
    for table in (apps, users):
        query = sa.select(table.c.id).where(table.c.tag == owner)
        row_id = connection.scalar(query if dry_run else query.with_for_update())
        if row_id is not None:
            return _OwnerRow(table, row_id)
    return None


def _count_headers(owner: bytes, row: _OwnerRow, connection: sa.Connection) -> Headers:
    counts: Headers = Counter()
    for name, query in _queries_by_header(owner, row):
        for header, number in connection.execute(query):
            counts[name, header] += number
    return counts


def _queries_by_header(owner: bytes, row: _OwnerRow) -> Iterator[tuple[str, sa.Select[Any]]]:
    """Yield a table name and a query that counts the owner's records in that table by header."""

    def by_header(column: sa.Column[Any], *where: sa.ColumnElement[bool]) -> sa.Select[Any]:
        header = header_of(column)
        return sa.select(header, sa.func.count()).where(*where).group_by(header)

    table = row.table
    yield table.name, by_header(table.c.state, table.c.id == row.id)
    yield witnesses.name, by_header(witnesses.c.seal, witnesses.c.tag == owner)
    if table is users:
        of_user = sessions.c.user_row == row.id
        ids = sa.select(sessions.c.id).where(of_user)
        tags = sa.select(sessions.c.tag).where(of_user)
        yield sessions.name, by_header(sessions.c.state, of_user)
        yield witnesses.name, by_header(witnesses.c.seal, witnesses.c.tag.in_(tags))
        yield bases.name, by_header(bases.c.state, bases.c.session_row.in_(ids))
        yield events.name, by_header(events.c.event, events.c.session_row.in_(ids))


# --- data masters --------------------------------------------------------------------------------


class _OlderMasters(NamedTuple):
    """The data masters that were replaced by a newer one."""

    kept: list[KeptKey]
    unused: list[MasterKeyRow]


def _retire_masters(dry_run: bool, connection: sa.Connection) -> _OlderMasters:
    """Delete the replaced data masters that wrap no data key; return kept and unused masters."""
    see_what_is_committed(connection)
    if connection.dialect.name == "postgresql" and not dry_run:
        # Wait for open transactions that store a data key, perhaps under one of these masters.
        connection.execute(sa.text(f"LOCK TABLE {data_keys.name} IN SHARE MODE"))
    query = MASTER_KEYS.where(keyring.c.purpose == DATA)
    found = connection.execute(query if dry_run else query.with_for_update())
    rows = [MasterKeyRow(*row) for row in found]
    if not rows:
        raise WrongKeyError("the keyring holds no data master: restore secure_keyring")
    if not all(isinstance(row.created_at, int) for row in rows):
        return _OlderMasters([KeptKey(keyring.name, row.id, ()) for row in rows], [])
    older = sorted(rows, key=attrgetter("created_at", "id"))[:-1]
    header = header_of(data_keys.c.wrapped)
    by_header = sa.select(header, sa.func.count()).group_by(header)
    counts = {header: int(number) for header, number in connection.execute(by_header)}
    known = {pack(WRAP_BACKEND_ID, row.id) for row in rows}
    unknown = sum(number for header, number in counts.items() if header not in known)
    kept, unused = [], []
    for row in older:
        number = counts.get(pack(WRAP_BACKEND_ID, row.id), 0) + unknown
        if number:
            kept.append(KeptKey(keyring.name, row.id, ((data_keys.name, number),)))
        else:
            unused.append(row)
    if unused and not dry_run:
        ids = [row.id for row in unused]
        connection.execute(sa.delete(keyring).where(keyring.c.id.in_(ids)))
    return _OlderMasters(kept, unused)


# --- statements ----------------------------------------------------------------------------------

_DELETE_KEY = sa.delete(data_keys).where(
    data_keys.c.id == sa.bindparam("at_id"),
    data_keys.c.wrapped == sa.bindparam("at_wrapped", type_=data_keys.c.wrapped.type),
)


def _with_several_keys() -> sa.Select[Any]:
    owner = data_keys.c.owner
    return sa.select(owner).group_by(owner).having(sa.func.count() > sa.literal_column("1"))


@functools.cache
def _owners_after(limit: int) -> sa.Select[Any]:
    owner = data_keys.c.owner
    later = owner > sa.bindparam("after", type_=owner.type)
    query = _with_several_keys().where(later).order_by(owner)
    return first_rows(query, sa.literal_column(str(limit)))


@functools.cache
def _number_of_owners() -> sa.Select[Any]:
    return sa.select(sa.func.count()).select_from(_with_several_keys().subquery())
