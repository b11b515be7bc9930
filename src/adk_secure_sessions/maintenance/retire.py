"""Dropping keys that nothing refers to any more."""

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
from adk_secure_sessions.maintenance.coverage import start_of
from adk_secure_sessions.maintenance.database import Database, see_what_is_committed
from adk_secure_sessions.maintenance.engine import Meter, Progress, first
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

_KEPT = 1000
_OWNERS = 500  # at once


class KeptKey(NamedTuple):
    """An older key that is still needed.

    Attributes:
        table: `secure_data_keys` or `secure_keyring`.
        id: Its id.
        references: Table by table, how many rows need it; none where that cannot be told, or
            where rows need a key before it.
    """

    table: str
    id: int
    references: tuple[tuple[str, int], ...]


class Retirement(NamedTuple):
    """What `retire` did, or would do.

    Attributes:
        data_keys: How many were dropped.
        masters: Ids of the data masters that were dropped.
        kept: How many older keys are still needed.
        examples: The first 1000 of them.
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
    """Drop the data keys and data masters that have a successor and that nothing refers to.

    What refers to a key is looked for in the transaction that drops it, where the keys are beside
    the data.  A key that came after one with rows under it is kept, too.  A row that names no
    key of its owner keeps all of the owner's keys.  No root key is needed.

    Args:
        db: The database.
        dry_run: Look, and drop none.
        progress: Called with the number of owners with several keys done, and of all.
        rows_per_second: So many owners in a second, at most.

    Raises:
        ConfigurationError: It cannot be used, or is not ours yet.
        WrongKeyError: Its keyring was altered.
    """
    await db.survey()
    ((total,),) = await db.read_keys(_number_of_owners(), {})
    meter = Meter(progress, int(total), rows_per_second)
    kept: list[KeptKey] = []
    dropped = number = 0
    after = b""
    while owners := [row[0] for row in await db.read_keys(_owners(), {"after": after})]:
        for owner in owners:
            needed, gone = await _retire_data_keys(db, owner, dry_run)
            dropped += gone
            number += len(needed)
            kept += needed[: _KEPT - len(kept)]
            await meter.advance()
        after = owners[-1]
    meter.finish()
    masters, needed = await db.change_keys(partial(_retire_masters, dry_run), commit=not dry_run)
    kept += needed[: _KEPT - len(kept)]
    return Retirement(dropped, masters, number + len(needed), tuple(kept))


async def _retire_data_keys(db: Database, owner: bytes, dry_run: bool) -> tuple[list[KeptKey], int]:
    """Those of one owner that are needed, and how many were dropped."""
    if db.key_executor is db.executor:
        return await db.change(partial(_retire_beside, owner, dry_run), commit=not dry_run)
    # What refers to them first: services with keys apart seal with none older than a row is under.
    rows = await read_data_keys(db.read_keys, [owner])
    found = await db.change(partial(_references, owner, dry_run), commit=not dry_run)
    kept, unused = _sorted_out(rows, found)
    if unused and not dry_run:
        await db.change_keys(partial(_drop, unused))
    return kept, len(unused)


def _retire_beside(
    owner: bytes, dry_run: bool, connection: sa.Connection
) -> tuple[list[KeptKey], int]:
    """The same in one transaction, which whoever holds one of the keys comes before or after."""
    query = DATA_KEYS.where(data_keys.c.owner == owner)
    see_what_is_committed(connection)
    row = _row(owner, dry_run, connection)
    # Who holds one of them is waited for.
    found = connection.execute(query if dry_run else query.with_for_update())
    rows = [DataKeyRow(*values) for values in found]
    kept, unused = _sorted_out(rows, row and _count(owner, *row, connection))
    if unused and not dry_run:
        _drop(unused, connection)
    return kept, len(unused)


def _sorted_out(
    rows: list[DataKeyRow], found: Counter[tuple[str, bytes]] | None
) -> tuple[list[KeptKey], list[DataKeyRow]]:
    """Which of an owner's keys are needed still, and which are not.

    One that came after a key with rows under it is needed, too: a process that knows it may
    be about to seal with it where such a row is.
    """
    if not all(map(_is_sound, rows)):
        return [KeptKey(data_keys.name, row.id, ()) for row in rows], []
    older = sorted(rows, key=attrgetter("generation"))[:-1]  # none, if they went meanwhile
    if found is None:  # the owner's row was removed: whose keys these are cannot be told
        return [KeptKey(data_keys.name, row.id, ()) for row in older], []
    named = {pack(row.backend_id, row.id): row.id for row in rows}
    unknown = [(table, number) for (table, start), number in found.items() if start not in named]
    kept: list[KeptKey] = []
    unused: list[DataKeyRow] = []
    for row in older:
        mine = [(table, n) for (table, start), n in found.items() if named.get(start) == row.id]
        if mine or unknown or kept:
            kept.append(KeptKey(data_keys.name, row.id, (*mine, *unknown)))
        else:
            unused.append(row)
    return kept, unused


def _drop(rows: list[DataKeyRow], connection: sa.Connection) -> None:
    connection.execute(_DROP_KEY, [{"at_id": row.id, "at_wrapped": row.wrapped} for row in rows])


def _is_sound(row: DataKeyRow) -> bool:
    """Whether the types are such as we write: SQLite keeps any type in any column."""
    numbers = isinstance(row.generation, int) and row.backend_id in range(256)
    return numbers and isinstance(row.wrapped, bytes)


def _references(
    owner: bytes, dry_run: bool, connection: sa.Connection
) -> Counter[tuple[str, bytes]] | None:
    """Rows of *owner* by table and header; None where the owner has no row."""
    see_what_is_committed(connection)
    row = _row(owner, dry_run, connection)
    return row and _count(owner, *row, connection)


def _row(owner: bytes, dry_run: bool, connection: sa.Connection) -> tuple[sa.Table, int] | None:
    """The owner's own, held until the end: who is about to add a session is waited for."""
    for table in (apps, users):
        query = sa.select(table.c.id).where(table.c.tag == owner)
        row_id = connection.scalar(query if dry_run else query.with_for_update())
        if row_id is not None:
            return table, row_id
    return None


def _count(
    owner: bytes, table: sa.Table, row_id: int, connection: sa.Connection
) -> Counter[tuple[str, bytes]]:
    counts: Counter[tuple[str, bytes]] = Counter()
    for name, counting in _counting(table, row_id, owner):
        for start, number in connection.execute(counting):
            counts[name, start] += number
    return counts


def _counting(table: sa.Table, row_id: int, owner: bytes) -> Iterator[tuple[str, sa.Select[Any]]]:
    def by_start(column: sa.Column[Any], *where: sa.ColumnElement[bool]) -> sa.Select[Any]:
        start = start_of(column)
        return sa.select(start, sa.func.count()).where(*where).group_by(start)

    yield table.name, by_start(table.c.state, table.c.id == row_id)
    yield witnesses.name, by_start(witnesses.c.seal, witnesses.c.tag == owner)
    if table is users:
        mine = sessions.c.user_row == row_id
        ids, tags = sa.select(sessions.c.id).where(mine), sa.select(sessions.c.tag).where(mine)
        yield sessions.name, by_start(sessions.c.state, mine)
        yield witnesses.name, by_start(witnesses.c.seal, witnesses.c.tag.in_(tags))
        yield bases.name, by_start(bases.c.state, bases.c.session_row.in_(ids))
        yield events.name, by_start(events.c.event, events.c.session_row.in_(ids))


def _retire_masters(
    dry_run: bool, connection: sa.Connection
) -> tuple[tuple[int, ...], list[KeptKey]]:
    """Ids of the data masters that were dropped, and those that are needed."""
    see_what_is_committed(connection)
    if connection.dialect.name == "postgresql" and not dry_run:
        # Who is about to store a data key under one is waited for.
        connection.execute(sa.text(f"LOCK TABLE {data_keys.name} IN SHARE MODE"))
    query = MASTER_KEYS.where(keyring.c.purpose == DATA)
    found = connection.execute(query if dry_run else query.with_for_update())
    rows = [MasterKeyRow(*row) for row in found]
    if not rows:
        raise WrongKeyError("the keyring holds no data master: restore secure_keyring")
    if not all(isinstance(row.created_at, int) for row in rows):
        return (), [KeptKey(keyring.name, row.id, ()) for row in rows]
    older = sorted(rows, key=attrgetter("created_at", "id"))[:-1]
    start = start_of(data_keys.c.wrapped)
    counting = sa.select(start, sa.func.count()).group_by(start)
    counts = {begin: int(number) for begin, number in connection.execute(counting)}
    known = {pack(WRAP_BACKEND_ID, row.id) for row in rows}
    unknown = sum(number for begin, number in counts.items() if begin not in known)
    kept, dropped = [], []
    for row in older:
        number = counts.get(pack(WRAP_BACKEND_ID, row.id), 0) + unknown
        if number:
            kept.append(KeptKey(keyring.name, row.id, ((data_keys.name, number),)))
        else:
            dropped.append(row.id)
    if dropped and not dry_run:
        connection.execute(sa.delete(keyring).where(keyring.c.id.in_(dropped)))
    return tuple(dropped), kept


_DROP_KEY = sa.delete(data_keys).where(
    data_keys.c.id == sa.bindparam("at_id"),
    data_keys.c.wrapped == sa.bindparam("at_wrapped", type_=data_keys.c.wrapped.type),
)


def _with_several() -> sa.Select[Any]:
    owner = data_keys.c.owner
    return sa.select(owner).group_by(owner).having(sa.func.count() > sa.literal_column("1"))


@functools.cache
def _owners() -> sa.Select[Any]:
    owner = data_keys.c.owner
    later = owner > sa.bindparam("after", type_=owner.type)
    return first(_with_several().where(later).order_by(owner), sa.literal_column(str(_OWNERS)))


@functools.cache
def _number_of_owners() -> sa.Select[Any]:
    return sa.select(sa.func.count()).select_from(_with_several().subquery())
