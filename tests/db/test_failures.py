"""What the errors of each driver mean, and what the texts of our own say."""

import sqlite3
import traceback

import asyncpg  # type: ignore[import-untyped]
import psycopg.errors
import pymysql  # type: ignore[import-untyped]
import pytest
import sqlalchemy as sa

from adk_secure_sessions.db.failures import needs_unprepared, translate
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


def mysql_error(code: int) -> Exception:
    error: Exception = pymysql.err.OperationalError(code, "x")
    return error


ASYNCPG = asyncpg.exceptions
# By meaning: the classes of PostgreSQL's errors, SQLite's codes, and those of MySQL and MariaDB.
MEANINGS: dict[type[Exception], tuple[list[type[Exception]], list[str], list[int]]] = {
    UniqueViolation: (
        [ASYNCPG.UniqueViolationError, psycopg.errors.UniqueViolation],
        ["SQLITE_CONSTRAINT_UNIQUE", "SQLITE_CONSTRAINT_PRIMARYKEY"],
        [1062],
    ),
    Conflict: (
        [
            *(ASYNCPG.SerializationError, ASYNCPG.DeadlockDetectedError),
            *(ASYNCPG.LockNotAvailableError, psycopg.errors.SerializationFailure),
        ],
        [],
        [1205, 1213, 1020, 1412],
    ),
    Disconnected: (
        [
            *(ASYNCPG.AdminShutdownError, ASYNCPG.CrashShutdownError),
            *(ASYNCPG.CannotConnectNowError, ASYNCPG.ReadOnlySQLTransactionError),
            *(ASYNCPG.ConnectionFailureError, ASYNCPG.StatementCompletionUnknownError),
            *(ASYNCPG.ConnectionDoesNotExistError, psycopg.errors.AdminShutdown),
        ],
        [],
        [1047, 1180, 1053, 1927, 1290, 1792, 2003, 2006, 2013, 2055],
    ),
    DatabaseError: (
        [
            *(ASYNCPG.ForeignKeyViolationError, ASYNCPG.NotNullViolationError),
            *(ASYNCPG.InvalidPasswordError, ASYNCPG.UndefinedTableError),
            *(ASYNCPG.TooManyConnectionsError, ASYNCPG.QueryCanceledError),
        ],
        ["SQLITE_CONSTRAINT_NOTNULL", "SQLITE_BUSY", "SQLITE_FULL"],
        [1048, 1045, 1146],
    ),
}


@pytest.mark.parametrize("meaning", MEANINGS)
def test_error_of_a_driver_means(meaning: type[Exception]) -> None:
    postgresql, sqlite, mysql = MEANINGS[meaning]
    errors = [kind("x") for kind in postgresql] + [mysql_error(code) for code in mysql]
    errors += [sqlite_error(sqlite3.OperationalError, name) for name in sqlite]
    for driver in errors:
        for error in (driver, by_sqlalchemy(driver)):
            meant = translate(error)
            assert type(meant) is meaning, repr(driver)
            assert meant.__cause__ is None


def test_operational_error_without_a_code_means_that_no_server_answered() -> None:
    silent = by_sqlalchemy(psycopg.OperationalError("connection refused"), sa.exc.OperationalError)
    assert isinstance(translate(silent), Disconnected)
    other = by_sqlalchemy(psycopg.OperationalError("x"), sa.exc.ProgrammingError)
    assert type(translate(other)) is DatabaseError
    # SQLite has no server.
    local = by_sqlalchemy(sqlite3.OperationalError("x"), sa.exc.OperationalError)
    assert type(translate(local)) is DatabaseError


@pytest.mark.parametrize("error", [ConnectionRefusedError(), TimeoutError(), OSError(5, "x")])
def test_error_of_the_operating_system_means_disconnected(error: Exception) -> None:
    meant = translate(error)
    assert isinstance(meant, Disconnected)
    assert isinstance(meant.error, DatabaseError)
    assert meant.error.retryable


@pytest.mark.parametrize(
    "error",
    [ASYNCPG.UniqueViolationError("x"), ASYNCPG.UndefinedTableError("x"), mysql_error(1213)],
)
def test_error_of_a_closed_connection_means_disconnected_whatever_else_it_says(
    error: Exception,
) -> None:
    meant = translate(by_sqlalchemy(error), connection_lost=True)
    assert isinstance(meant, Disconnected)
    assert isinstance(meant.error, DatabaseError)


@pytest.mark.parametrize("error", [RuntimeError("ours"), ConfigurationError("ours"), KeyError(1)])
def test_error_of_another_kind_is_returned_as_it_is(error: Exception) -> None:
    assert translate(error) is error


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
    "full directory": (
        sqlite_error(sqlite3.OperationalError, "SQLITE_IOERR_SHMSIZE"),
        True,
        "SQLITE_IOERR_SHMSIZE",
        "free space",
    ),
    "busy": (sqlite_error(sqlite3.OperationalError, "SQLITE_BUSY"), True, "SQLITE_BUSY", "lock"),
    "packet": (mysql_error(1153), False, "1153", "max_allowed_packet"),
    "timeout": (mysql_error(1969), True, "1969", "try again"),
    "pool": (sa.exc.TimeoutError("x"), True, None, "raise pool_size"),
    "unknown": (ASYNCPG.DataError("x"), False, "22000", "log of the database"),
    # Of a cluster.
    "unknown outcome": (
        *(ASYNCPG.StatementCompletionUnknownError("x"), True, "40003", "read the data before"),
    ),
    "COMMIT": (mysql_error(1180), True, "1180", "read the data before"),
    "joining": (mysql_error(1047), True, "1047", "connect to another node"),
    # Begins like an SQLSTATE, and is none.
    "4025": (mysql_error(4025), False, "4025", "log of the database"),
}


@pytest.mark.parametrize("name", ADVICE)
def test_error_says_what_to_do(name: str) -> None:
    error, retryable, code, advice = ADVICE[name]
    meant = translate(error)
    if isinstance(meant, Disconnected):
        meant = meant.error
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
    meant = translate(WITH_VALUES[name])
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
