"""Count rows, and records and data keys by the backend and the key that encrypt them.

The *current* data key of an owner (a user or an app) is here that of the last writer of the owner's
row: the key that encrypts the row.  A *spare* is a data key newer than the current one that no row
or record names: with a key database, the loser of a race for a new user.  It is kept, because its
service may still name it.  After the next rotation, it is an older key, which `retire` deletes.
"""

from collections import Counter
from collections.abc import Container, Iterable
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

import sqlalchemy as sa

from adk_secure_sessions.errors import DecryptionError
from adk_secure_sessions.formats.records import BACKEND_NAMES, parse_header_or_none
from adk_secure_sessions.keys.data_keys import DataKeyRow, unwrap_data_key
from adk_secure_sessions.keys.keyring import Keyring
from adk_secure_sessions.maintenance.database import Database
from adk_secure_sessions.maintenance.progress import Meter
from adk_secure_sessions.maintenance.row_scan import header_column, scan_data_keys
from adk_secure_sessions.storage.schema import (
    IS_COLLECTION,
    SEALED_TABLES,
    SealedTable,
    apps,
    events,
    sessions,
    snapshots,
    users,
    witnesses,
)
from adk_secure_sessions.storage.table_walk import row_ranges, rows_where


class RecordCount(NamedTuple):
    """How many rows of one table one backend has encrypted.

    Attributes:
        table: The table's name.
        backend_id: The id of the backend; None for values in an unknown format.
        rows: The number of these rows.
        under_current: How many of these rows name, in the record's header, the data key that
            encrypts the row of their owner (the user or app).
    """

    table: str
    backend_id: int | None
    rows: int
    under_current: int

    def cells_under(self, label: str) -> tuple[object, ...]:
        """Return the cells of a line; *label* says which keys `under_current` counts."""
        percent = f"{100 * self.under_current // max(self.rows, 1)}%"  # 100% means all rows
        current = f"{self.under_current} {label}"
        return self.table, backend_name(self.backend_id), self.rows, current, percent


class DataKeyCount(NamedTuple):
    """How many data keys of one backend are wrapped by one data master.

    Attributes:
        backend_id: The id of the backend that encrypts with these keys.
        master_id: The id of the data master; None if the wrapped keys are in an unknown format.
        key_count: The number of these data keys.
    """

    backend_id: int
    master_id: int | None
    key_count: int

    @property
    def cells(self) -> tuple[object, ...]:
        return backend_name(self.backend_id), f"under master key {self.master_id}", self.key_count


def backend_name(backend_id: int | None) -> str:
    """Return the name of a backend, `backend ID` for one of another package, or `no record`."""
    if backend_id is None:
        return "no record"
    return BACKEND_NAMES.get(backend_id, f"backend {backend_id}")


async def estimate_rows(db: Database, *tables: sa.Table) -> int:
    """Return about how many rows *tables* have, for reports of progress.

    The number of events is the sum of the revisions of all sessions, which is not authenticated:
    counting events would take long.
    """
    total = 0
    for table in tables:
        query = _SUM_OF_REVISIONS if table is events else _count_all(table)
        ((count,),) = await db.reader_for(table)(query, {})
        total += clamped(count)
    return total


async def count_items(db: Database) -> int:
    """Return the number of items of all collections, which is the sum of their revisions."""
    ((items,),) = await db.runner.data_db.read(_SUM_OF_ITEMS, {})
    return clamped(items)


def clamped(number: Any) -> int:
    """Convert *number*, the result of a SUM, to an integer from 0 to 10**15.

    If the values were tampered with, they may be negative, or their sum may be infinite.
    """
    return int(min(max(number or 0, 0), 10**15))


async def count_records(
    db: Database, meter: Meter, since: int, keyring: Keyring | None = None
) -> tuple[tuple[RecordCount, ...], int]:
    """Return the record counts by table and backend, and the number of spare data keys.

    A record counts as under the current key if its data key is the current one of its owner, was
    created at *since* or later, and can be unwrapped by *keyring*, if that is given.
    """
    counts: Counter[tuple[str, int | None]] = Counter()
    under_current: Counter[tuple[str, int | None]] = Counter()
    newer_keys: set[int] = set()  # data keys that are newer than the current ones
    used_newer_keys: set[int] = set()  # those of them that records name nevertheless
    for key, query in _COUNT_QUERIES:
        table = key.table
        # Spans of sessions, so that one query counts all events of a session.
        walked = sessions.c.id if table in (snapshots, events) else key
        async for row_range in row_ranges(
            db.runner.data_db.read, walked, db.limits.ids_per_statement
        ):
            groups = await row_range.read(db.runner.data_db.read, query, key)
            keys_of = await data_keys_by_owner(db, {owner for owner, *_ in groups})
            newer_keys |= {row.id for keys in keys_of.values() for row in keys.newer}
            current_ids = {
                owner: row.id
                for owner, (_, row, _) in keys_of.items()
                if isinstance(row.created_at, int)
                and row.created_at >= since
                and (keyring is None or can_unwrap(row, keyring))
            }
            for owner, header, rows in groups:
                backend_id, key_id = parse_header_or_none(header) or (None, None)
                counts[table.name, backend_id] += rows
                if key_id is not None and key_id == current_ids.get(owner):
                    under_current[table.name, backend_id] += rows
                elif key_id in newer_keys:
                    used_newer_keys.add(key_id)
            await meter.advance(sum(rows for *_, rows in groups))
    records = (RecordCount(*kind, number, under_current[kind]) for kind, number in counts.items())
    return tuple(records), len(newer_keys - used_newer_keys)


async def count_data_keys(db: Database, meter: Meter) -> tuple[DataKeyCount, ...]:
    """Count data keys by backend and by data master; *meter* counts the rows."""
    counts: Counter[tuple[int, int | None]] = Counter()
    async for keys in scan_data_keys(db):
        for key in keys:
            _, master_id = parse_header_or_none(key.wrapped) or (None, None)
            counts[key.backend_id, master_id] += 1
        await meter.advance(len(keys))
    return tuple(DataKeyCount(*key, number) for key, number in counts.items())


def can_unwrap(row: DataKeyRow, keyring: Keyring) -> bool:
    """Return whether *keyring* can unwrap the data key: if so, *row* is authentic."""
    with suppress(DecryptionError):
        unwrap_data_key(row, keyring)
        return True
    return False


# --- data keys of owners ---------------------------------------------------------------------


class OwnerKeyRows(NamedTuple):
    """All data keys of one owner: see `split_at_newest_named`."""

    older: list[DataKeyRow]
    newest_named: DataKeyRow
    newer: list[DataKeyRow]


def split_at_newest_named(
    rows: Iterable[DataKeyRow], named_ids: Container[int | None]
) -> OwnerKeyRows:
    """Divide *rows* at the newest one in *named_ids*, or at the newest of all if that has none."""
    # A modified generation may have another type: then, the key cannot be unwrapped.
    ordered = sorted(rows, key=lambda row: row.generation if type(row.generation) is int else -1)
    last_index = len(ordered) - 1
    index = max((n for n, row in enumerate(ordered) if row.id in named_ids), default=last_index)
    return OwnerKeyRows(ordered[:index], ordered[index], ordered[index + 1 :])


async def data_keys_by_owner(db: Database, owners: set[object]) -> dict[object, OwnerKeyRows]:
    """Return the data keys of *owners*, by tag, divided at the one that encrypts its row."""
    keys: dict[bytes, list[DataKeyRow]] = {}
    for row in (await db.runner.read_data_keys_with_retries(owners)).data_keys:
        keys.setdefault(row.owner, []).append(row)
    several = [owner for owner, rows in keys.items() if len(rows) > 1]
    key_id_of: dict[object, int | None] = {}  # the key ids in the headers of the owners' rows
    for table, query in _HEADERS.items():
        for tag, header in await rows_where(db.runner.data_db.read, query, table.c.tag, several):
            _, key_id_of[tag] = parse_header_or_none(header) or (None, None)
    return {
        owner: split_at_newest_named(rows, [key_id_of.get(owner)]) for owner, rows in keys.items()
    }


# --- statements that count -----------------------------------------------------------------------

# If revisions were tampered with, their sum may exceed 64 bits, and SQLite raises an error for such
# a sum of integers.  So multiply the revisions by 1.0.
_SUM_OF_REVISIONS = sa.select(sa.func.sum(sessions.c.revision * sa.literal_column("1.0")))
_SUM_OF_ITEMS = _SUM_OF_REVISIONS.where(IS_COLLECTION)


def select_count(source: sa.FromClause, *where: sa.ColumnElement[bool]) -> sa.Select[Any]:
    return sa.select(sa.func.count()).select_from(source).where(*where)


# The executors cache each statement object, so do not make one for each run of a command.
_count_all = cache(select_count)


def _count_by_owner(table: SealedTable[Any]) -> sa.Select[Any]:
    """Return the query that counts rows by the tag of their owner, or NULL, and header."""
    source: sa.FromClause = table.table
    owner: sa.ColumnElement[Any] = users.c.tag
    if source in (apps, users):
        owner = source.c.tag
    else:
        if source is witnesses:
            # The owner of a session's version witness is the user.  The `tag` of any other version
            # witness is the tag of its owner.
            owner = sa.func.coalesce(users.c.tag, source.c.tag)
            source = source.outerjoin(sessions, sessions.c.tag == source.c.tag)
        elif source is not sessions:
            source = source.outerjoin(sessions, sessions.c.id == source.c.session_row)
        source = source.outerjoin(users, users.c.id == sessions.c.user_row)
    header = header_column(table.record_column)
    return sa.select(owner, header, sa.func.count()).select_from(source).group_by(owner, header)


# For each table, the column by which it is read in spans, and the query that counts its rows.
_COUNT_QUERIES = tuple((table.key_columns[0], _count_by_owner(table)) for table in SEALED_TABLES)
_HEADERS = {table: sa.select(table.c.tag, header_column(table.c.state)) for table in (apps, users)}
