"""Remove the bytes of deleted rows from the files of a database.

When a row is deleted or replaced, a database only marks the row's space in the file as free.  The
bytes of the row remain in the file.  docs/erasure.md describes which bytes remain on each kind of
database.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import sqlalchemy as sa

from adk_secure_sessions.db.protocol import Conflict, Disconnected, Executor
from adk_secure_sessions.errors import DatabaseError

_NOT_REWRITTEN = "the table of the data keys was not rewritten"
_IN_USE = "other connections used the database all the time"


def overwrite_deleted(connection: sa.Connection) -> None:
    """On SQLite, make this connection overwrite the rows that it deletes.

    Other databases have no such setting.
    """
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql("PRAGMA secure_delete = ON").close()


async def clear(executor: Executor, table: sa.Table, lock_wait: int, *, rewrite: bool) -> str:
    """Remove the bytes of deleted rows from the file that stores *table*.

    Args:
        executor: The executor of the database that has *table*.
        table: The table.
        lock_wait: Seconds to wait for a lock.
        rewrite: If True, rewrite the table (SQLite: the whole file).  Services wait meanwhile.

    Returns:
        The reason why the bytes could not be removed; empty if they were removed.
    """
    try:
        return await executor.define(partial(_clear_now, table, lock_wait, rewrite), commit=False)
    except Conflict:
        return _IN_USE
    except Disconnected as lost:
        return str(lost.error)
    except DatabaseError as error:
        return str(error)


async def rewrite(executor: Executor, tables: Sequence[sa.Table], lock_wait: int) -> list[str]:
    """Rewrite *tables*, which must be all tables of this package in the database of *executor*.

    *lock_wait* is how many seconds to wait for a lock.

    Returns:
        The reasons why tables could not be rewritten.
    """
    try:
        kind = await executor.define(lambda connection: connection.dialect.name, commit=False)
    except Disconnected as lost:
        return [str(lost.error)]
    if kind == "sqlite":  # SQLite rewrites the whole file, with all tables
        obstacle = await clear(executor, tables[0], lock_wait, rewrite=True)
        return [obstacle] if obstacle else []
    obstacles = []
    for table in tables:
        if obstacle := await clear(executor, table, lock_wait, rewrite=True):
            obstacles.append(f"{table.name}: {obstacle}")
    return obstacles


def _clear_now(table: sa.Table, lock_wait: int, rewrite: bool, connection: sa.Connection) -> str:
    kind = connection.dialect.name
    if kind == "sqlite":
        return _clear_sqlite(lock_wait, rewrite, connection)
    if not rewrite:
        return _NOT_REWRITTEN
    if kind == "postgresql":
        return _rewrite_postgresql(table.name, lock_wait, connection)
    if kind in ("mysql", "mariadb"):
        return _rewrite_mysql(table.name, lock_wait, connection)
    return f"there is no known way to rewrite a table of {kind}"


def _clear_sqlite(lock_wait: int, rewrite: bool, connection: sa.Connection) -> str:
    show, change = "PRAGMA busy_timeout", "PRAGMA busy_timeout = {}"
    with _setting(connection, show, change, lock_wait * 1000):
        if rewrite:
            connection.exec_driver_sql("VACUUM")
        busy, *_ = connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)").one()
    return _IN_USE if busy else ""


_PRIMARY_KEY = sa.text(
    "SELECT quote_ident(c.relname) FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid "
    "WHERE i.indrelid = to_regclass(:name) AND i.indisprimary"
)


def _rewrite_postgresql(name: str, lock_wait: int, connection: sa.Connection) -> str:
    # A plain VACUUM does not overwrite a deleted row unless it moves another row of the same page.
    # VACUUM (FULL) cannot run in a transaction, so its lock_timeout would have to be a setting of
    # the connection.  A pooler may give that connection to other clients.  CLUSTER also rewrites
    # the table, and can run in a transaction.
    key = connection.scalar(_PRIMARY_KEY, {"name": name})
    if key is None:
        return f"{name} has no primary key"
    connection.exec_driver_sql(f"SET LOCAL lock_timeout = '{lock_wait}s'").close()
    try:
        connection.exec_driver_sql(f"CLUSTER {name} USING {key}").close()
        connection.exec_driver_sql(f"ALTER TABLE {name} SET WITHOUT CLUSTER").close()
        connection.commit()
        return ""
    except sa.exc.DBAPIError as error:
        if getattr(error.orig, "sqlstate", None) != "42501":
            raise
    connection.rollback()
    return f"this account is not allowed to rewrite {name}; the owner of the table is allowed"


def _rewrite_mysql(name: str, lock_wait: int, connection: sa.Connection) -> str:
    if not connection.scalar(sa.text("SELECT @@innodb_file_per_table")):
        return "the table shares its file with other tables: innodb_file_per_table is off"
    statement = f"OPTIMIZE TABLE {name}"
    if getattr(connection.dialect, "is_mariadb", False):
        rows = connection.exec_driver_sql(f"{statement} WAIT {lock_wait}").all()
    else:
        # MySQL cannot limit the wait of this one statement: OPTIMIZE accepts neither WAIT nor the
        # hint SET_VAR.  If this process is killed, a pooler may give the connection to another
        # client with the changed setting.  This is harmless: that client waits at most *lock_wait*
        # seconds for the lock of a whole table.
        show, change = "SELECT @@lock_wait_timeout", "SET lock_wait_timeout = {}"
        with _setting(connection, show, change, lock_wait):
            rows = connection.exec_driver_sql(statement).all()
    said = {kind.lower(): text for _table, _operation, kind, text in rows}
    return "" if said.get("status") == "OK" else f"the database: {said.get('error', said)}"


@contextmanager
def _setting(connection: sa.Connection, show: str, change: str, value: object) -> Iterator[None]:
    """Change a setting of *connection* during the block, and restore the old value afterwards.

    *show* is the statement that reads the setting.  *change* is the statement that sets it, with
    `{}` for the value.
    """
    before = connection.exec_driver_sql(show).scalar()
    connection.exec_driver_sql(change.format(value)).close()
    try:
        yield
    finally:
        if not connection.invalidated:
            connection.exec_driver_sql(change.format(before)).close()
