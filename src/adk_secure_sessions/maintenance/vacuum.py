"""Rewrite all tables, so that their files contain no bytes of deleted or replaced rows."""

from typing import NamedTuple

from adk_secure_sessions.audit import command
from adk_secure_sessions.maintenance.clearing import rewrite
from adk_secure_sessions.maintenance.database import Database
from adk_secure_sessions.storage.schema import DATA_TABLES, FEATURE_TABLES, KEY_TABLES, TABLES


class Vacuum(NamedTuple):
    """The result of `vacuum`.

    Attributes:
        cleared: True if all tables were rewritten.
        obstacles: One text for each table (SQLite: for the file) that could not be rewritten, with
            the reason.  The file of such a table may still contain bytes of deleted or replaced
            rows.
    """

    cleared: bool
    obstacles: tuple[str, ...]


@command
async def vacuum(db: Database) -> Vacuum:
    """Rewrite all tables, so that their files contain no bytes of deleted or replaced rows.

    Call `vacuum` after `rotate_data` and `retire` if old keys or plaintext must not stay in free
    space, for example after replacing `NoOpBackend`.  `vacuum` changes no row and needs no key.
    SQLite rewrites the whole file.  Other databases rewrite one table after the other.  The key
    database is rewritten after the data database.  Services wait while a table is rewritten.  Logs,
    replicas and backups are not cleared.
    """
    present = (await db.survey()).feature_tables
    of_features = tuple(table for table in FEATURE_TABLES if table.name in present)
    if db.executors.has_key_database:
        places = [(db.executor, DATA_TABLES + of_features), (db.key_executor, KEY_TABLES)]
    else:
        places = [(db.executor, TABLES + of_features)]
    obstacles: list[str] = []
    for executor, tables in places:
        obstacles += await rewrite(executor, tables, db.limits.lock_wait)
    return Vacuum(not obstacles, tuple(obstacles))
