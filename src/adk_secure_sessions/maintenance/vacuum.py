"""Remove the bytes of deleted and replaced rows from the files of a database.

When a row is deleted or replaced, a database only marks the row's space in the file as free.  The
bytes of the row remain in the file.  docs/erasure.md describes which bytes remain on each kind of
database.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from adk_secure_sessions.audit import audited_command
from adk_secure_sessions.db.dialects import IN_USE, dialect_of
from adk_secure_sessions.db.protocol import Conflict, Disconnected, Executor, with_retries
from adk_secure_sessions.errors import DatabaseError
from adk_secure_sessions.maintenance.database import Database
from adk_secure_sessions.results import Result, success_flag
from adk_secure_sessions.storage.schema import FEATURE_TABLES
from adk_secure_sessions.storage.survey import TableSet


@dataclass
class Vacuum(Result):
    """The result of `vacuum`.

    Attributes:
        cleared: True if all tables were rewritten.
        obstacles: One text for each table (SQLite: for the file) that could not be rewritten, with
            the reason.  Those of a key database say so.  The file of such a table may still contain
            bytes of deleted or replaced rows.
    """

    success_line = "all tables were rewritten: their free space holds no replaced or deleted values"

    cleared: bool = success_flag()
    obstacles: tuple[str, ...] = ()

    def extra_lines(self, dry_run: bool) -> Iterable[str]:
        return [f"not rewritten: {obstacle}" for obstacle in self.obstacles]


@audited_command
async def vacuum(db: Database) -> Vacuum:
    """Rewrite all tables, so that their files contain no bytes of deleted or replaced rows.

    Call `vacuum` after `rotate_data` and `retire` if old keys or plaintext must not stay in free
    space, for example after replacing `NoOpBackend`.  `vacuum` changes no row and needs no key.
    SQLite rewrites the whole file.  Other databases rewrite one table after the other.  The key
    database is rewritten after the data database.  Services wait while a table is rewritten.  Logs,
    replicas and backups are not cleared.
    """
    present_names = (await db.survey_existing()).tables
    feature_tables = tuple(table for table in FEATURE_TABLES if table.name in present_names)
    data, keys = db.runner.executors
    by_executor = {data: TableSet.DATA.tables + feature_tables}
    by_executor[keys] = tuple(dict.fromkeys(by_executor.get(keys, ()) + TableSet.KEYS.tables))
    obstacles: list[str] = []
    for executor, tables in by_executor.items():
        where = "" if executor is data else "key database: "
        obstacles += [f"{where}{one}" for one in await rewrite_tables(db, executor, tables)]
    return Vacuum(not obstacles, tuple(obstacles))


async def clear_deleted_bytes(
    executor: Executor, table: sa.Table, lock_wait: int, *, rewrites_table: bool
) -> str:
    """Remove the bytes of deleted rows from the file that stores *table*, or return why not.

    With *rewrites_table*, rewrite the table (SQLite: the whole file) while services wait; otherwise
    only empty the write-ahead log of SQLite.  Wait *lock_wait* seconds for a lock.
    """

    def work(connection: sa.Connection) -> str:
        dialect = dialect_of(connection)
        if rewrites_table:
            return dialect.rewrite(connection, table, lock_wait)
        return dialect.truncate_wal(connection, lock_wait)

    try:
        return await executor.run_sync(work, commit=False)
    except Conflict:
        return IN_USE
    except Disconnected as lost:
        return str(lost.error)
    except DatabaseError as error:
        return str(error)


async def rewrite_tables(db: Database, executor: Executor, tables: Sequence[sa.Table]) -> list[str]:
    """Rewrite *tables* with *executor*, within the limits of *db*; return the reasons why not."""
    dialect = await with_retries(lambda: executor.run_sync(dialect_of, commit=False))
    obstacles, lock_wait = [], db.limits.lock_wait
    for table in tables[:1] if dialect.has_one_file else tables:
        if obstacle := await clear_deleted_bytes(executor, table, lock_wait, rewrites_table=True):
            obstacles.append(obstacle if dialect.has_one_file else f"{table.name}: {obstacle}")
    return obstacles
