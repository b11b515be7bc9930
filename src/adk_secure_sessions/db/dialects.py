"""What differs from one database to the next: SQL text, locks, and the meaning of errors."""

import functools
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import sqlite

from adk_secure_sessions.db.protocol import Conflict, Disconnected, UniqueViolation

_sqlite = sqlite.dialect(paramstyle="named")

# PostgreSQL's errors by SQLSTATE, SQLite's by name, those of MySQL and MariaDB by number.
_UNIQUE: set[object] = {"23505", "SQLITE_CONSTRAINT_UNIQUE", "SQLITE_CONSTRAINT_PRIMARYKEY", 1062}
_CONFLICT: set[object] = {
    "40001",  # serialization failure
    "40P01",  # deadlock
    "55P03",  # lock not available, after NOWAIT
    1205,  # lock wait timeout
    1213,  # deadlock
    1020,  # the row has changed since the transaction's snapshot
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
_CONNECTION_CLASS = "08"  # SQLSTATEs that begin so are connection exceptions
_ADVISORY_LOCK = int.from_bytes(b"AKS init")
_LOCK_TIMEOUT = 60  # seconds


@functools.cache
def sqlite_sql(statement: sa.Executable) -> str:
    """Compile *statement* to SQLite's SQL with named parameters, once for each statement."""
    assert isinstance(statement, sa.ClauseElement)
    return str(statement.compile(dialect=_sqlite))


@contextmanager
def exclusively(connection: sa.Connection) -> Iterator[None]:
    """Let no other process of ours change the schema during the block.

    A server fails if two processes create one table at the same moment.  On PostgreSQL the lock
    lasts until the caller commits.  On MySQL and MariaDB this commits before it releases the lock.
    SQLite needs no lock of ours, since its writers take turns.
    """
    kind = connection.dialect.name
    if kind == "postgresql":  # held until the end of the transaction
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
    """Decode text from SQLite, whatever bytes it has: a `text_factory`.

    SQLite stores text in any column, and an attacker may have put text where bytes belong.  Our
    own checks must reject it: the error of SQLite's decoder would quote it.
    """
    return data.decode("utf-8", "backslashreplace")


@contextmanager
def taking_any_text(connection: sa.Connection) -> Iterator[None]:
    """Use `any_text` on a SQLite connection during the block; it may belong to the application."""
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
    """Translate a driver's error, bare or in one of SQLAlchemy's.

    Args:
        error: The error.
        connection_lost: Whether the driver knows that its connection is closed.

    Returns:
        UniqueViolation, Conflict or Disconnected if *error* means one of them; else *error*.
    """
    driver: Any = error.orig if isinstance(error, sa.exc.DBAPIError) else error
    state = getattr(driver, "sqlstate", None)
    codes = {state, getattr(driver, "sqlite_errorname", None)}
    codes.update(arg for arg in driver.args if isinstance(arg, int))
    # An operational error of a server's driver without a code: no server was there to give one.
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
