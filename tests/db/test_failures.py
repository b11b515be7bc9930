"""What the errors of each driver mean, and what the texts of our own say."""

import sqlite3
import traceback

import asyncpg  # type: ignore[import-untyped]
import psycopg.errors
import pymysql  # type: ignore[import-untyped]
import pytest
import sqlalchemy as sa

from adk_secure_sessions.db.failures import needs_unprepared, translated
from adk_secure_sessions.db.protocol import Conflict, Disconnected, UniqueViolation
from adk_secure_sessions.errors import ConfigurationError, DatabaseError


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
    "40003": (ASYNCPG.StatementCompletionUnknownError("x"), Disconnected),
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
    "1412": (pymysql.err.OperationalError(1412, "Table definition has changed"), Conflict),
    "1047": (pymysql.err.OperationalError(1047, "WSREP has not yet prepared"), Disconnected),
    "1180": (pymysql.err.OperationalError(1180, "Got error 6 during COMMIT"), Disconnected),
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
        meant = translated(error)
        assert type(meant) is (expected or DatabaseError)
        assert meant.__cause__ is None


def test_operational_error_without_a_code_means_that_no_server_answered() -> None:
    silent = by_sqlalchemy(psycopg.OperationalError("connection refused"), sa.exc.OperationalError)
    assert isinstance(translated(silent), Disconnected)
    other = by_sqlalchemy(psycopg.OperationalError("x"), sa.exc.ProgrammingError)
    assert type(translated(other)) is DatabaseError
    # SQLite has no server.
    local = by_sqlalchemy(sqlite3.OperationalError("x"), sa.exc.OperationalError)
    assert type(translated(local)) is DatabaseError


@pytest.mark.parametrize("error", [ConnectionRefusedError(), TimeoutError(), OSError(5, "x")])
def test_error_of_the_operating_system_means_disconnected(error: Exception) -> None:
    meant = translated(error)
    assert isinstance(meant, Disconnected)
    assert isinstance(meant.error, DatabaseError)
    assert meant.error.retryable


@pytest.mark.parametrize("name", ["23505", "42P01", "SQLITE_FULL", "1213"])
def test_error_of_a_closed_connection_means_disconnected_whatever_else_it_says(name: str) -> None:
    error = by_sqlalchemy(MEANINGS[name][0])
    meant = translated(error, connection_lost=True)
    assert isinstance(meant, Disconnected)
    assert isinstance(meant.error, DatabaseError)


@pytest.mark.parametrize("error", [RuntimeError("ours"), ConfigurationError("ours"), KeyError(1)])
def test_error_of_another_kind_is_returned_as_it_is(error: Exception) -> None:
    assert translated(error) is error


# An error, whether it is retryable, its code, and a part of what it says to do.
ADVICE: dict[str, tuple[Exception, bool, str | None, str]] = {
    "no permission": (ASYNCPG.InsufficientPrivilegeError("x"), False, "42501", "grant the account"),
    "no table": (psycopg.errors.UndefinedTable("x"), False, "42P01", "check that all tables"),
    "statement_timeout": (ASYNCPG.QueryCanceledError("x"), True, "57014", "try again"),
    "full disk": (ASYNCPG.DiskFullError("x"), True, "53100", "free space"),
    "too many": (ASYNCPG.TooManyConnectionsError("x"), True, "53300", "lower pool_size"),
    "password": (ASYNCPG.InvalidPasswordError("x"), False, "28P01", "the password"),
    "no database": (ASYNCPG.InvalidCatalogNameError("x"), False, "3D000", "create the database"),
    "read-only file": (
        sqlite_error(sqlite3.OperationalError, "SQLITE_READONLY_DBMOVED"),
        False,
        "SQLITE_READONLY_DBMOVED",
        "permissions",
    ),
    "full file": (
        sqlite_error(sqlite3.OperationalError, "SQLITE_FULL"),
        True,
        "SQLITE_FULL",
        "free space",
    ),
    "busy": (sqlite_error(sqlite3.OperationalError, "SQLITE_BUSY"), True, "SQLITE_BUSY", "lock"),
    "packet": (pymysql.err.OperationalError(1153, "x"), False, "1153", "max_allowed_packet"),
    "timeout": (pymysql.err.OperationalError(1969, "x"), True, "1969", "try again"),
    "pool": (sa.exc.TimeoutError("x"), True, None, "raise pool_size"),
    "unknown": (ASYNCPG.DataError("x"), False, "22000", "log of the database"),
    # Begins like an SQLSTATE, and is none.
    "4025": (pymysql.err.OperationalError(4025, "x"), False, "4025", "log of the database"),
}


# Errors that end in Disconnected, and a part of what its DatabaseError says to do.
LOST_ADVICE: dict[str, tuple[Exception, str]] = {
    "40003": (ASYNCPG.StatementCompletionUnknownError("x"), "read the data before"),
    "1180": (pymysql.err.OperationalError(1180, "x"), "read the data before"),
    "1047": (pymysql.err.OperationalError(1047, "x"), "connect to another node"),
}


@pytest.mark.parametrize("name", LOST_ADVICE)
def test_error_of_a_cluster_says_what_to_do(name: str) -> None:
    error, advice = LOST_ADVICE[name]
    meant = translated(error)
    assert isinstance(meant, Disconnected)
    assert isinstance(meant.error, DatabaseError)
    assert (meant.error.retryable, meant.error.code) == (True, name)
    assert advice in str(meant.error)


@pytest.mark.parametrize("name", ADVICE)
def test_error_says_what_to_do(name: str) -> None:
    error, retryable, code, advice = ADVICE[name]
    meant = translated(error)
    assert isinstance(meant, DatabaseError)
    assert (meant.retryable, meant.code) == (retryable, code)
    assert advice in str(meant)


NEEDLE = "needle-7261"
WITH_VALUES: dict[str, Exception] = {
    "DETAIL": psycopg.errors.UndefinedTable(f"no table\nDETAIL:  Key ({NEEDLE}) exists"),
    "value out of range": ASYNCPG.DataError(f"value {NEEDLE} is out of range"),
    "unknown state": ASYNCPG.PostgresError(f"row contains {NEEDLE}"),
    "argument": asyncpg.exceptions._base.InterfaceError(f"invalid input: {NEEDLE}"),
    "MySQL": pymysql.err.DataError(1406, f"Data too long: {NEEDLE}"),
    "SQLite": sqlite3.OperationalError(f"Could not decode to UTF-8 column a with text {NEEDLE}"),
    "constraint": sqlite_error(sqlite3.IntegrityError, "SQLITE_CONSTRAINT_TRIGGER"),
    "parameters": sa.exc.StatementError("x", "SELECT :n", {"n": NEEDLE}, ValueError(NEEDLE)),
    "shown parameters": sa.exc.OperationalError(
        "SELECT :n", {"n": NEEDLE}, sqlite_error(sqlite3.OperationalError, "SQLITE_BUSY")
    ),
}


@pytest.mark.parametrize("name", WITH_VALUES)
def test_text_in_which_a_driver_may_quote_values_is_left_out(name: str) -> None:
    meant = translated(WITH_VALUES[name])
    shown = getattr(meant, "error", meant)
    assert isinstance(shown, DatabaseError)
    assert NEEDLE not in "".join(traceback.format_exception(shown))
    assert NEEDLE not in repr(vars(shown))


def test_only_missing_and_duplicate_prepared_statements_call_for_unprepared_ones() -> None:
    for kind in (ASYNCPG.InvalidSQLStatementNameError, ASYNCPG.DuplicatePreparedStatementError):
        assert needs_unprepared(kind("x"))
        assert needs_unprepared(by_sqlalchemy(kind("x")))
    assert not needs_unprepared(ASYNCPG.UndefinedTableError("x"))
    assert not needs_unprepared(RuntimeError("26000"))
