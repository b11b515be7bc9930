"""What differs from one database to the next: SQL text, and what their errors mean."""

import functools
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import sqlite

from adk_secure_sessions.db.protocol import Conflict, Disconnected, UniqueViolation

_sqlite = sqlite.dialect(paramstyle="named")

# By SQLSTATE, by SQLite's name, by the number of MySQL and MariaDB.
_UNIQUE: set[object] = {"23505", "SQLITE_CONSTRAINT_UNIQUE", "SQLITE_CONSTRAINT_PRIMARYKEY", 1062}
_CONFLICT: set[object] = {
    "40001",  # serialization failure
    "40P01",  # deadlock
    "55P03",  # lock not available, to who does not wait for it
    1205,  # lock wait timeout
    1213,  # deadlock
    1020,  # the row has changed since the snapshot
}
_GONE: set[object] = {
    "57P01",  # admin shutdown
    "57P02",  # crash shutdown
    "57P03",  # cannot connect now
    "25006",  # read only: a primary no longer
    1053,  # server shutdown in progress
    1927,  # connection was killed
    1290,  # read only
    1792,  # a write in a read-only transaction
    2003,  # cannot connect
    2006,  # gone away
    2013,  # lost
    2055,  # lost
}
_ADVISORY_LOCK = int.from_bytes(b"AKS init")
_LOCK_TIMEOUT = 60  # seconds


@functools.cache
def sqlite_sql(statement: sa.Executable) -> str:
    """*statement* as SQLite's SQL with named parameters, compiled once."""
    assert isinstance(statement, sa.ClauseElement)
    return str(statement.compile(dialect=_sqlite))


@contextmanager
def exclusively(connection: sa.Connection) -> Iterator[None]:
    """Change the schema while no other process of ours does, and commit.

    A server that creates one table twice at once fails; SQLite's writers take turns anyway.
    """
    kind = connection.dialect.name
    if kind == "postgresql":  # until the end of the transaction
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
    """A text factory that takes any bytes.

    Text where a binary value belongs is to be refused by us, not by SQLite's decoder, which
    quotes it.
    """
    return data.decode("utf-8", "backslashreplace")


@contextmanager
def taking_any_text(connection: sa.Connection) -> Iterator[None]:
    """Use `any_text` on SQLite for a while: the connection may be another's."""
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


def meaning(error: Exception, *, lost: bool = False) -> Exception:
    """UniqueViolation, Conflict or Disconnected, if *error* means one of them; else itself.

    *lost* is what the driver knows of the connection.
    """
    driver: Any = error.orig if isinstance(error, sa.exc.DBAPIError) else error
    state = getattr(driver, "sqlstate", None)
    codes = {state, getattr(driver, "sqlite_errorname", None)}
    codes.update(arg for arg in driver.args if isinstance(arg, int))
    # Where there is no code, there was no server to give one.
    silent = codes == {None} and isinstance(error, sa.exc.OperationalError)
    silent = silent and not isinstance(driver, sqlite3.Error)
    gone = silent or codes & _GONE or str(state).startswith("08")  # SQLSTATE's class of connections
    if lost or gone or isinstance(driver, OSError):
        return Disconnected(error)
    if codes & _UNIQUE:
        return UniqueViolation()
    return Conflict() if codes & _CONFLICT else error
