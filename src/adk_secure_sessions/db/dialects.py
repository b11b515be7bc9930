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


@functools.cache
def sqlite_sql(statement: sa.Executable) -> str:
    """Return *statement* as SQL for SQLite, with named parameters; the result is cached."""
    assert isinstance(statement, sa.ClauseElement)
    return str(statement.compile(dialect=_sqlite))


@contextmanager
def exclusively(connection: sa.Connection) -> Iterator[None]:
    """Hold a lock during the block, so that only one process creates tables at a time.

    Without a lock, if two processes create the same table at the same time, the server reports an
    error to one of them.

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
