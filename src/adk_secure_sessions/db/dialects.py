"""Differences between the databases: SQL text, locks, and error codes."""

import functools
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import sqlite

from adk_secure_sessions.db.protocol import Conflict, Disconnected, UniqueViolation

_sqlite = sqlite.dialect(paramstyle="named")

# Error codes: SQLSTATE on PostgreSQL, names on SQLite, numbers on MySQL and MariaDB.
_UNIQUE: set[object] = {"23505", "SQLITE_CONSTRAINT_UNIQUE", "SQLITE_CONSTRAINT_PRIMARYKEY", 1062}
_CONFLICT: set[object] = {
    "40001",  # serialization failure
    "40P01",  # deadlock
    "55P03",  # lock not available, after NOWAIT
    1205,  # lock wait timeout
    1213,  # deadlock
    1020,  # the row has changed since the transaction read it
}
_DISCONNECTED: set[object] = {
    "57P01",  # admin shutdown
    "57P02",  # crash shutdown
    "57P03",  # cannot connect now
    "25006",  # read only: the server is no longer the primary
    1053,  # server shutdown in progress
    1927,  # connection was killed
    1290,  # read only
    1792,  # write in a read-only transaction
    2003,  # cannot connect
    2006,  # server has gone away
    2013,  # connection lost during a query
    2055,  # connection lost
}
_CONNECTION_CLASS = "08"  # the first two characters of every SQLSTATE for a connection error
_ADVISORY_LOCK = int.from_bytes(b"AKS init")
_LOCK_TIMEOUT = 60  # seconds


@functools.cache
def sqlite_sql(statement: sa.Executable) -> str:
    """Return *statement* as SQL for SQLite, with named parameters; the result is cached."""
    assert isinstance(statement, sa.ClauseElement)
    return str(statement.compile(dialect=_sqlite))


@contextmanager
def exclusively(connection: sa.Connection) -> Iterator[None]:
    """Hold a lock during the block, so that only one process creates tables at a time.

    Without a lock, if two processes create the same table at the same time, one of them gets an
    error from the server.

    - On PostgreSQL, the lock lasts until the caller commits.
    - On MySQL and MariaDB, the end of the block commits and then releases the lock.
    - SQLite needs no lock, since it allows only one writer at a time.
    """
    kind = connection.dialect.name
    if kind == "postgresql":  # the server releases the lock at the end of the transaction
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_ADVISORY_LOCK)))
    if kind not in ("mysql", "mariadb"):
        yield
        return
    name = sa.func.concat("secure_sessions.", sa.func.md5(sa.func.database()))
    connection.execute(sa.select(sa.func.get_lock(name, _LOCK_TIMEOUT)))
    try:
        yield
        connection.commit()
    finally:
        connection.execute(sa.select(sa.func.release_lock(name)))


def any_text(data: bytes) -> str:
    """Decode text from SQLite, even if the text is not UTF-8.

    It is the `text_factory` of our SQLite connections.  SQLite stores text in any column, so an
    attacker may have written text into a binary column.  The default decoder would raise an
    error that quotes such text; with this function, our own checks reject it.
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


def meaning(error: Exception, *, connection_lost: bool = False) -> Exception:
    """Translate the error of a driver into UniqueViolation, Conflict or Disconnected.

    Args:
        error: The driver's error, or SQLAlchemy's error that wraps it.
        connection_lost: True if the driver says that its connection is closed.

    Returns:
        The translated error; *error* itself if it has another cause.
    """
    driver: Any = error.orig if isinstance(error, sa.exc.DBAPIError) else error
    state = getattr(driver, "sqlstate", None)
    codes = {state, getattr(driver, "sqlite_errorname", None)}
    codes.update(arg for arg in driver.args if isinstance(arg, int))
    # An error that a server has sent has a code.  Therefore, an operational error without a code
    # means that no server has answered.
    unanswered = (
        codes == {None}
        and isinstance(error, sa.exc.OperationalError)
        and not isinstance(driver, sqlite3.Error)
    )
    ended = codes & _DISCONNECTED or str(state).startswith(_CONNECTION_CLASS)
    if connection_lost or unanswered or ended or isinstance(driver, OSError):
        return Disconnected(error)
    if codes & _UNIQUE:
        return UniqueViolation()
    return Conflict() if codes & _CONFLICT else error
