"""Differences between the databases: SQL text and locks.  `failures` has their error codes."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import sqlite

_sqlite = sqlite.dialect(paramstyle="named")

_ADVISORY_LOCK = int.from_bytes(b"AKS init")
_LOCK_TIMEOUT = 60  # seconds
# SQLSTATEs of a database that has no advisory locks: the function does not exist, this account may
# not call it, or it is not implemented.
_NO_ADVISORY_LOCKS = ("42883", "42501", "0A000")
# The errors of a CREATE TABLE for a table that exists.  On PostgreSQL, the last two occur if
# another transaction creates the table at the same time.
_EXISTS: set[object] = {1050, "42P07", "42710", "23505"}
# The settings of MariaDB Galera and Percona XtraDB Cluster, and of MySQL's Group Replication.
_LOCKS_PER_NODE = """
SHOW GLOBAL VARIABLES WHERE (variable_name = 'wsrep_on' AND value = 'ON')
OR (variable_name = 'group_replication_single_primary_mode' AND value = 'OFF')
"""


@functools.cache
def sqlite_sql(statement: sa.Executable) -> str:
    """Return *statement* as SQL for SQLite, with named parameters; the result is cached."""
    assert isinstance(statement, sa.ClauseElement)
    return str(statement.compile(dialect=_sqlite))


def has_table(connection: sa.Connection, table: sa.Table) -> bool:
    """Return whether *table* exists.

    `Inspector.has_table` raises an error on MySQL and MariaDB if the table does not exist, and the
    account has permissions on single tables only.
    """
    return table.name in sa.inspect(connection).get_table_names()


@contextmanager
def exclusively(connection: sa.Connection) -> Iterator[None]:
    """Hold a lock during the block, so that only one process creates tables at a time.

    Without a lock, if two processes create the same table at the same time, the server reports an
    error to one of them.  Not every database has such a lock, and on a cluster each node may have a
    lock of its own.  So callers must also handle this error: see `already_exists`.

    - On PostgreSQL, the lock lasts until the caller commits.  *connection* must not have run a
      statement in its transaction yet.  The isolation level becomes READ COMMITTED: at a higher
      level, the transaction would not see what the previous holder of the lock has created.
    - On MySQL and MariaDB, the end of the block commits and then releases the lock.  On a cluster
      (see `locks_per_node`), there is no lock, and the end of the block only commits.
    - SQLite needs no lock, since it allows only one writer at a time.
    """
    kind = connection.dialect.name
    if kind == "postgresql":
        connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL READ COMMITTED").close()
        _take_advisory_lock(connection)
    if kind not in ("mysql", "mariadb"):
        yield
        return
    if locks_per_node(connection):  # there, MariaDB rejects GET_LOCK
        yield
        connection.commit()
        return
    name = sa.func.concat("secure_sessions.", sa.func.md5(sa.func.database()))
    connection.execute(sa.select(sa.func.get_lock(name, _LOCK_TIMEOUT)))
    try:
        yield
        connection.commit()
    finally:
        connection.execute(sa.select(sa.func.release_lock(name)))


def _take_advisory_lock(connection: sa.Connection) -> None:
    """Take the lock, which PostgreSQL releases at the end of the transaction.

    A database without advisory locks, such as a derivative of PostgreSQL, is no error.
    """
    lock = sa.select(sa.func.pg_advisory_xact_lock(_ADVISORY_LOCK))
    try:
        with connection.begin_nested():  # an error must not abort the whole transaction
            connection.execute(lock)
    except sa.exc.DBAPIError as error:
        if getattr(error.orig, "sqlstate", None) not in _NO_ADVISORY_LOCKS:
            raise


def already_exists(error: sa.exc.DBAPIError) -> bool:
    """Return whether *error* says that the table to create exists.

    Another process has created the table since the caller looked for it.
    """
    driver: Any = error.orig
    return bool(_EXISTS & {getattr(driver, "sqlstate", None), *getattr(driver, "args", ())[:1]})


def locks_per_node(connection: sa.Connection) -> bool:
    """Return whether the server is a node of a cluster on whose other nodes a lock has no effect.

    Several nodes of such a cluster accept writes.  A transaction locks rows on its own node only.
    At the commit, the cluster rejects a transaction if another node has written one of the same
    rows.  A row that was only locked, or updated to the same value, is not compared.
    """
    if connection.dialect.name not in ("mysql", "mariadb"):
        return False
    return connection.exec_driver_sql(_LOCKS_PER_NODE).first() is not None


def run_triggers_at_once(connection: sa.Connection) -> None:
    """Let no trigger of PostgreSQL wait for the end of this transaction.

    Otherwise a deferred trigger could undo a change at the commit, after the last check.
    CockroachDB has no deferred triggers, and rejects the statement.
    """
    if connection.dialect.name == "postgresql":
        found = "SELECT 1 FROM pg_catalog.pg_trigger WHERE tgdeferrable LIMIT 1"
        if connection.exec_driver_sql(found).first() is not None:
            connection.exec_driver_sql("SET CONSTRAINTS ALL IMMEDIATE").close()


def any_text(data: bytes) -> str:
    """Decode text from SQLite, even if the text is not UTF-8.

    This function is the `text_factory` of our SQLite connections.  SQLite stores text in any
    column, so an attacker may have written text into a binary column.  The default decoder would
    raise an error that quotes this text.  With this function, the text is read, and our own checks
    reject the row.
    """
    return data.decode("utf-8", "backslashreplace")


@contextmanager
def taking_any_text(connection: sa.Connection) -> Iterator[None]:
    """Use `any_text` on a SQLite connection during the block.

    The connection may belong to the application, so its previous `text_factory` is restored after
    the block.
    """
    if connection.dialect.name != "sqlite":
        yield
        return
    driver: Any = connection.connection.driver_connection
    text_factory = driver.text_factory
    driver.text_factory = any_text
    try:
        yield
    finally:
        driver.text_factory = text_factory
