"""Count what a database holds, without decrypting it."""

import time
from typing import NamedTuple

from adk_secure_sessions.errors import DecryptionError, WrongKeyError
from adk_secure_sessions.keys.blind_index import BlindIndex
from adk_secure_sessions.keys.keyring import MasterKeyRow, unwrap_master_key
from adk_secure_sessions.maintenance.database import Database
from adk_secure_sessions.maintenance.engine import (
    DataKeyCount,
    Meter,
    Progress,
    RecordCount,
    count_data_keys,
    count_events,
    count_records,
    count_rows,
)
from adk_secure_sessions.maintenance.rotation import UnfinishedRotation, unfinished
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
        root_key_id: The root key that wraps it; `none` if it is stored as plaintext.
        created_at: When it was made, in microseconds since 1970, UTC.
        age: How long ago that was, in seconds.
        unwraps: Whether the root keys that were given unwrap it; None if none was given.
    """

    id: int
    purpose: str
    root_key_id: str
    created_at: int
    age: float
    unwraps: bool | None


class Status(NamedTuple):
    """The result of `status`.

    Attributes:
        format_version: The version of the stored format, as stored.
        has_plaintext_records: Whether `NoOpBackend` has written to the database, as it claims;
            this is not authenticated.
        masters: The master keys.
        data_keys: How many data keys there are, by backend and by the master that wraps them.
        records: How many records there are, by table and backend.
        unfinished: The rotations that have not ended.
    """

    format_version: str
    has_plaintext_records: bool
    masters: tuple[MasterKey, ...]
    data_keys: tuple[DataKeyCount, ...]
    records: tuple[RecordCount, ...]
    unfinished: tuple[UnfinishedRotation, ...]


async def status(
    db: Database, *, progress: Progress | None = None, rows_per_second: float | None = None
) -> Status:
    """Count rows and keys; no key is needed, and no record is decrypted.

    Args:
        db: The database.  If it has a backend, the result also says which master keys it unwraps,
            and whether an unfinished rotation is genuine.
        progress: Called with the number of rows done and the number of all rows.
        rows_per_second: Count at most so many rows in a second.

    Raises:
        ConfigurationError: The database cannot be used, or holds no encrypted sessions yet.
        KeyServiceError: The key provider failed.
    """
    survey = await db.survey()
    assert survey.database_id is not None, "survey() rejects such a database"
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
    unwraps = None
    if db.has_keys:
        try:
            await unwrap_master_key(row, db.backends.roots, database_id)
            unwraps = True
        except (WrongKeyError, DecryptionError):
            unwraps = False
    # SQLite stores any type in any column.
    created_at = row.created_at if isinstance(row.created_at, int) else 0
    age = time.time() - created_at / 1_000_000
    return MasterKey(row.id, row.purpose, row.root_key_id, created_at, age, unwraps)


async def _index(db: Database) -> BlindIndex | None:
    """Return the key that authenticates checkpoints, if the root keys decrypt the keyring."""
    if not db.has_keys:
        return None
    try:
        return (await db.keys()).keyring.index
    except (WrongKeyError, DecryptionError):
        return None
