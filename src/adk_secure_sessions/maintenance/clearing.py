"""What deleted rows leave in a database's files, and how they are rid of it.

A database marks the place of a deleted row as free, and leaves the bytes there for whoever reads
the file.  What was seen of each is in docs/erasure.md.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import sqlalchemy as sa

from adk_secure_sessions.db.protocol import Conflict, Disconnected, Executor

_PATIENCE = 5  # seconds to wait for a lock, while services wait behind us
_NOT_ASKED = "the table of the data keys was not rewritten"
_IN_USE = "others used the database all the time"


def overwrite_deleted(connection: sa.Connection) -> None:
    """Have what this connection deletes overwritten, where the database can do that by itself."""
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql("PRAGMA secure_delete = ON").close()


async def clear(executor: Executor, table: sa.Table, *, rewrite: bool) -> str:
    """Rid the file that holds *table* of deleted rows; what hinders that, or nothing.

    *rewrite*: even if the table, or the SQLite file, has to be written anew.
    """
    try:
        return await executor.define(partial(_clear, table, rewrite), commit=False)
    except Conflict:
        return _IN_USE
    except Disconnected as lost:
        error: Exception = lost.error
    except (sa.exc.DBAPIError, OSError) as failed:
        error = failed
    return f"the database: {getattr(error, 'orig', error)}"


def _clear(table: sa.Table, rewrite: bool, connection: sa.Connection) -> str:
    kind = connection.dialect.name
    if kind == "sqlite":
        return _clear_sqlite(rewrite, connection)
    if not rewrite:
        return _NOT_ASKED
    if kind == "postgresql":
        return _rewrite_postgresql(table.name, connection)
    if kind in ("mysql", "mariadb"):
        return _rewrite_mysql(table.name, connection)
    return f"how to rewrite a table of {kind} is not known"


def _clear_sqlite(rewrite: bool, connection: sa.Connection) -> str:
    with _setting(connection, "PRAGMA busy_timeout", "PRAGMA busy_timeout = {}", _PATIENCE * 1000):
        if rewrite:
            connection.exec_driver_sql("VACUUM")
        busy, *_ = connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)").one()
    return _IN_USE if busy else ""


def _rewrite_postgresql(name: str, connection: sa.Connection) -> str:
    """VACUUM alone leaves the bytes of a row where no other row of its page is moved there."""
    connection.execution_options(isolation_level="AUTOCOMMIT")
    file = sa.select(sa.func.pg_relation_filenode(name))
    before = connection.scalar(file)
    with _setting(connection, "SHOW lock_timeout", "SET lock_timeout = '{}'", f"{_PATIENCE}s"):
        connection.exec_driver_sql(f"VACUUM (FULL) {name}")
    if connection.scalar(file) == before:  # it only warns
        return f"the account may not VACUUM {name}, which its owner may"
    return ""


def _rewrite_mysql(name: str, connection: sa.Connection) -> str:
    if not connection.scalar(sa.text("SELECT @@innodb_file_per_table")):
        return "the table shares its file with others: innodb_file_per_table is off"
    show, change = "SELECT @@lock_wait_timeout", "SET lock_wait_timeout = {}"
    with _setting(connection, show, change, _PATIENCE):
        said = {
            row[2].lower(): row[3] for row in connection.exec_driver_sql(f"OPTIMIZE TABLE {name}")
        }
    return "" if said.get("status") == "OK" else f"the database: {said.get('error', said)}"


@contextmanager
def _setting(connection: sa.Connection, show: str, change: str, value: object) -> Iterator[None]:
    """Change a setting of the connection, which may be the caller's, for a while."""
    before = connection.exec_driver_sql(show).scalar()
    connection.exec_driver_sql(change.format(value)).close()
    try:
        yield
    finally:
        if not connection.invalidated:
            connection.exec_driver_sql(change.format(before)).close()
