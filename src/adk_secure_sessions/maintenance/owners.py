"""Find the current data key of each owner (user or app), and the spare data keys.

The *current* data key is the newest one that the owner's row names.  With a key database, the
owner's newest data key may be another one: if several services write for a new user at once, each
stores a data key, but only one of them stores the user's row.  A data key that is newer than the
current one, and that no row or record names, is a *spare*.  Nothing is encrypted with it.  It is
kept, because the service that created it may be about to name it.  After the next rotation, it is
an older key, which `retire` deletes.
"""

from collections.abc import Collection
from operator import attrgetter

import sqlalchemy as sa

from adk_secure_sessions.errors import WrongKeyError
from adk_secure_sessions.formats.records import header_ids
from adk_secure_sessions.keys.data_keys import DataKeyRow
from adk_secure_sessions.maintenance.database import Database
from adk_secure_sessions.maintenance.decrypted_rows import header_of, read_owner_with_tag
from adk_secure_sessions.maintenance.problems import UNREADABLE
from adk_secure_sessions.storage.pages import rows_where
from adk_secure_sessions.storage.schema import apps, users


def split_at_current(
    rows: Collection[DataKeyRow], named: Collection[int]
) -> tuple[list[DataKeyRow], DataKeyRow, list[DataKeyRow]]:
    """Divide all data keys of an owner: older than the current one, the current one, newer.

    The current key is the newest key in *named*, or the newest of all if *named* is empty.  All
    generations must be integers.
    """
    ordered = sorted(rows, key=attrgetter("generation"))
    last = len(ordered) - 1
    at = max((n for n, row in enumerate(ordered) if row.id in named), default=last)
    return ordered[:at], ordered[at], ordered[at + 1 :]


async def current_keys(
    db: Database, owners: set[object]
) -> tuple[dict[object, DataKeyRow], set[int]]:
    """Return the current data key of each of *owners* (tags), and the ids of all newer ones.

    If the owner's row is not authentic, the newest data key counts as the current one.  Without
    root keys, the data key that encrypts the owner's row counts as the current one.
    """
    keys: dict[bytes, list[DataKeyRow]] = {}
    for row in (await db.unit.read_data_keys(owners)).data_keys:
        # SQLite stores any type in any column, so a modified generation can have another type.
        if isinstance(row.generation, int):
            keys.setdefault(row.owner, []).append(row)
    several = [owner for owner, rows in keys.items() if len(rows) > 1]
    encrypting: dict[object, int] = {}  # the ids in the headers of the owners' rows
    for table, query in _HEADERS.items():
        for tag, stored in await rows_where(db.unit.read, query, table.c.tag, several):
            if (parts := header_ids(stored)) is not None:
                encrypting[tag] = parts[1]
    current: dict[object, DataKeyRow] = {}
    newer_than_current: set[int] = set()
    for owner, rows in keys.items():
        _, current[owner], _ = split_at_current(rows, ())
        key_id = encrypting.get(owner)
        if key_id is not None and key_id != current[owner].id:
            _, current[owner], newer = split_at_current(rows, await _named_ids(db, owner, key_id))
            newer_than_current.update(row.id for row in newer)
    return current, newer_than_current


async def _named_ids(db: Database, owner_tag: bytes, key_id: int) -> Collection[int]:
    if not db.has_root_keys:
        return [key_id]
    try:
        decrypted = await read_owner_with_tag(db, owner_tag)
    except (WrongKeyError, *UNREADABLE):
        return ()
    return () if decrypted is None else decrypted[1].key_ids


_HEADERS = {table: sa.select(table.c.tag, header_of(table.c.state)) for table in (apps, users)}
