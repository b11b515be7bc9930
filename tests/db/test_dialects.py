"""What the errors of each driver mean, and SQL that differs between databases."""

import sqlite3
from typing import Any

import asyncpg  # type: ignore[import-untyped]
import psycopg.errors
import pymysql  # type: ignore[import-untyped]
import pytest
import sqlalchemy as sa

from adk_secure_sessions.db.dialects import any_text, meaning, sqlite_sql, taking_any_text
from adk_secure_sessions.db.protocol import Conflict, Disconnected, UniqueViolation


def sqlite_error(kind: type[sqlite3.Error], name: str) -> Exception:
    error = kind("the text")
    error.sqlite_errorname = name
    return error


def by_sqlalchemy(
    driver: Exception, kind: type[sa.exc.DBAPIError] = sa.exc.DBAPIError
) -> Exception:
    """The driver's error as SQLAlchemy raises it."""
    return kind(None, None, driver)


ASYNCPG = asyncpg.exceptions
MEANINGS: dict[str, tuple[Exception, type[Exception] | None]] = {
    # PostgreSQL, by SQLSTATE
    "23505": (ASYNCPG.UniqueViolationError("x"), UniqueViolation),
    "23503": (ASYNCPG.ForeignKeyViolationError("x"), None),
    "23502": (ASYNCPG.NotNullViolationError("x"), None),
    "40001": (ASYNCPG.SerializationError("x"), Conflict),
    "40P01": (ASYNCPG.DeadlockDetectedError("x"), Conflict),
    "55P03": (ASYNCPG.LockNotAvailableError("x"), Conflict),
    "57P01": (ASYNCPG.AdminShutdownError("x"), Disconnected),
    "57P02": (ASYNCPG.CrashShutdownError("x"), Disconnected),
    "57P03": (ASYNCPG.CannotConnectNowError("x"), Disconnected),
    "25006": (ASYNCPG.ReadOnlySQLTransactionError("x"), Disconnected),
    "08006": (ASYNCPG.ConnectionFailureError("x"), Disconnected),
    "08003": (ASYNCPG.ConnectionDoesNotExistError("x"), Disconnected),
    "28P01": (ASYNCPG.InvalidPasswordError("x"), None),
    "42P01": (ASYNCPG.UndefinedTableError("x"), None),
    "53300": (ASYNCPG.TooManyConnectionsError("x"), None),
    "57014": (ASYNCPG.QueryCanceledError("x"), None),
    "psycopg 23505": (psycopg.errors.UniqueViolation("x"), UniqueViolation),
    "psycopg 40001": (psycopg.errors.SerializationFailure("x"), Conflict),
    "psycopg 57P01": (psycopg.errors.AdminShutdown("x"), Disconnected),
    # SQLite, by the name of its code
    "SQLITE_CONSTRAINT_UNIQUE": (
        sqlite_error(sqlite3.IntegrityError, "SQLITE_CONSTRAINT_UNIQUE"),
        UniqueViolation,
    ),
    "SQLITE_CONSTRAINT_PRIMARYKEY": (
        sqlite_error(sqlite3.IntegrityError, "SQLITE_CONSTRAINT_PRIMARYKEY"),
        UniqueViolation,
    ),
    "SQLITE_CONSTRAINT_NOTNULL": (
        sqlite_error(sqlite3.IntegrityError, "SQLITE_CONSTRAINT_NOTNULL"),
        None,
    ),
    "SQLITE_BUSY": (sqlite_error(sqlite3.OperationalError, "SQLITE_BUSY"), None),
    "SQLITE_FULL": (sqlite_error(sqlite3.OperationalError, "SQLITE_FULL"), None),
    # MySQL and MariaDB, by number
    "1062": (pymysql.err.IntegrityError(1062, "Duplicate entry"), UniqueViolation),
    "1048": (pymysql.err.IntegrityError(1048, "Column cannot be null"), None),
    "1205": (pymysql.err.OperationalError(1205, "Lock wait timeout"), Conflict),
    "1213": (pymysql.err.OperationalError(1213, "Deadlock"), Conflict),
    "1020": (pymysql.err.OperationalError(1020, "Record has changed"), Conflict),
    "1053": (pymysql.err.OperationalError(1053, "Server shutdown"), Disconnected),
    "1927": (pymysql.err.OperationalError(1927, "Connection was killed"), Disconnected),
    "1290": (pymysql.err.OperationalError(1290, "read-only option"), Disconnected),
    "1792": (pymysql.err.OperationalError(1792, "READ ONLY transaction"), Disconnected),
    "2003": (pymysql.err.OperationalError(2003, "Can't connect"), Disconnected),
    "2006": (pymysql.err.OperationalError(2006, "gone away"), Disconnected),
    "2013": (pymysql.err.OperationalError(2013, "Lost connection"), Disconnected),
    "2055": (pymysql.err.OperationalError(2055, "Lost connection"), Disconnected),
    "1045": (pymysql.err.OperationalError(1045, "Access denied"), None),
    "1146": (pymysql.err.ProgrammingError(1146, "no such table"), None),
}


@pytest.mark.parametrize("name", MEANINGS)
def test_error_of_a_driver_means(name: str) -> None:
    driver, expected = MEANINGS[name]
    for error in (driver, by_sqlalchemy(driver)):
        meant = meaning(error)
        if expected is None:
            assert meant is error
        else:
            assert type(meant) is expected


def test_operational_error_without_a_code_means_that_no_server_answered() -> None:
    silent = by_sqlalchemy(psycopg.OperationalError("connection refused"), sa.exc.OperationalError)
    assert isinstance(meaning(silent), Disconnected)
    other = by_sqlalchemy(psycopg.OperationalError("x"), sa.exc.ProgrammingError)
    assert meaning(other) is other
    # SQLite has no server.
    local = by_sqlalchemy(sqlite3.OperationalError("x"), sa.exc.OperationalError)
    assert meaning(local) is local


@pytest.mark.parametrize("error", [ConnectionRefusedError(), TimeoutError(), OSError(5, "x")])
def test_error_of_the_operating_system_means_disconnected(error: Exception) -> None:
    meant = meaning(error)
    assert isinstance(meant, Disconnected)
    assert meant.error is error


@pytest.mark.parametrize("name", ["23505", "42P01", "SQLITE_FULL", "1213"])
def test_error_of_a_closed_connection_means_disconnected_whatever_else_it_says(name: str) -> None:
    error = by_sqlalchemy(MEANINGS[name][0])
    meant = meaning(error, connection_lost=True)
    assert isinstance(meant, Disconnected)
    assert meant.error is error


def test_statement_for_sqlite_is_compiled_once_with_named_parameters() -> None:
    table = sa.table("t", sa.column("a", sa.Integer))
    statement = sa.select(table.c.a).where(table.c.a == sa.bindparam("a"))
    assert " ".join(sqlite_sql(statement).split()) == "SELECT t.a FROM t WHERE t.a = :a"
    assert sqlite_sql(statement) is sqlite_sql(statement)


@pytest.mark.parametrize(
    "data", [b"", b"text", "é".encode(), b"\xff\xfe", b"a\x00b", b"\xed\xa0\x80"]
)
def test_any_bytes_are_text_of_sqlite(data: bytes) -> None:
    text = any_text(data)
    text.encode()  # has no surrogates
    assert (text.encode() == data) is (b"\xff" not in data and b"\xed" not in data)


def test_any_text_is_taken_during_the_block_only() -> None:
    engine = sa.create_engine("sqlite://")
    query = "SELECT CAST(x'ff' AS TEXT)"
    with engine.connect() as connection:
        driver: Any = connection.connection.driver_connection
        with taking_any_text(connection):
            assert connection.exec_driver_sql(query).scalar() == "\\xff"
        assert driver.text_factory is str
        with pytest.raises(RuntimeError, match="inside"), taking_any_text(connection):
            raise RuntimeError("inside")
        assert driver.text_factory is str
    engine.dispose()
