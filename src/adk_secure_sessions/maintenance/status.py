"""What a database holds, told from what is not secret."""

import time
from typing import NamedTuple

from adk_secure_sessions.errors import DecryptionError, WrongKeyError
from adk_secure_sessions.keys.blind_index import BlindIndex
from adk_secure_sessions.keys.keyring import MasterKeyRow, unwrap_master_key
from adk_secure_sessions.maintenance.checkpoints import Unfinished, unfinished
from adk_secure_sessions.maintenance.coverage import (
    DataKeyCount,
    RecordCount,
    count_data_keys,
    count_records,
)
from adk_secure_sessions.maintenance.database import Database
from adk_secure_sessions.maintenance.engine import Meter, Progress, count_events, count_rows
from adk_secure_sessions.storage import (
    apps,
    bases,
    data_keys,
    sessions,
    users,
    witnesses,
)


class MasterKey(NamedTuple):
    """A row of `secure_keyring`.

    Attributes:
        id: Its id.
        purpose: `data` or `index`.
        root_key_id: Names the root key that wraps it; `none` is in clear.
        created_at: Microseconds since 1970, UTC.
        age: Seconds.
        opens: Whether the root keys that were given open it; None where none was given.
    """

    id: int
    purpose: str
    root_key_id: str
    created_at: int
    age: float
    opens: bool | None


class Status(NamedTuple):
    """What `status` found.

    Attributes:
        format_version: As stored.
        has_plaintext_records: Whether `NoOpBackend` has written there; nothing vouches for it.
        masters: The keyring.
        data_keys: By backend, and by the master that wraps them.
        records: By table and backend.
        unfinished: Rotations that have not ended.
    """

    format_version: str
    has_plaintext_records: bool
    masters: tuple[MasterKey, ...]
    data_keys: tuple[DataKeyCount, ...]
    records: tuple[RecordCount, ...]
    unfinished: tuple[Unfinished, ...]


async def status(
    db: Database, *, progress: Progress | None = None, rows_per_second: float | None = None
) -> Status:
    """Count rows and keys.  No key is needed, and nothing is opened but, with keys, the keyring.

    Args:
        db: The database; with a backend, it is told of each master whether that opens it, and
            of an unfinished rotation whether it is genuine.
        progress: Called with the number of rows done, and of all.
        rows_per_second: Go no faster.

    Raises:
        ConfigurationError: It cannot be used, or is not ours yet.
        KeyServiceError: The key provider failed.
    """
    survey = await db.survey()
    assert survey.database_id is not None, "it is refused otherwise"
    masters = [await _master(db, row, survey.database_id) for row in survey.keyring]
    total = await count_rows(db, apps, users, sessions, bases, witnesses, data_keys)
    meter = Meter(progress, total + await count_events(db), rows_per_second)
    keys = await count_data_keys(db, meter)
    records = await count_records(db, meter)
    meter.finish()
    index = await _index(db) if any(unfinished(survey.meta, None)) else None
    return Status(
        str(survey.format_version),
        survey.has_plaintext_records,
        tuple(masters),
        keys,
        records,
        tuple(unfinished(survey.meta, index)),
    )


async def _master(db: Database, row: MasterKeyRow, database_id: bytes) -> MasterKey:
    opens = None
    if db.has_keys:
        try:
            await unwrap_master_key(row, db.backends.roots, database_id)
            opens = True
        except (WrongKeyError, DecryptionError):
            opens = False
    # SQLite keeps any type in any column.
    created_at = row.created_at if isinstance(row.created_at, int) else 0
    age = time.time() - created_at / 1_000_000
    return MasterKey(row.id, row.purpose, row.root_key_id, created_at, age, opens)


async def _index(db: Database) -> BlindIndex | None:
    """What authenticates checkpoints, if the root keys open it."""
    if not db.has_keys:
        return None
    try:
        return (await db.keys()).keyring.index
    except (WrongKeyError, DecryptionError):
        return None
