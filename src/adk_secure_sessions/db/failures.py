"""Translate the errors of drivers to the exceptions of `protocol` or to a `DatabaseError`.

The text and the attributes of a driver's exception may contain statement parameters and stored
values.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa

from adk_secure_sessions.db.protocol import Conflict, Disconnected, UniqueViolation
from adk_secure_sessions.errors import DatabaseError

_READ_ONLY: tuple[str | int, ...] = (
    "25006",
    1290,  # the server runs with `read_only`
    1792,  # write in a read-only transaction
)
# The first error means that a prepared statement does not exist on the connection, and the second
# that its name is already used.  Both happen behind a pooler, where each transaction may run on
# another connection.  With both errors, the server has executed nothing.
_PREPARED = ("26000", "42P05")
# While psycopg connects, its errors have no codes, and some of their texts quote options of the
# URL.  After the prefixes in _PSYCOPG are removed, a text that begins with one of _UNCONNECTED
# quotes no option.
_PSYCOPG = ("connection failed: ", "connection is bad: ")
_UNCONNECTED = (
    "connection to server",
    "connection timeout",
    "could not translate host name",
    "failed to resolve host",
)
# The modules of drivers.  SQLAlchemy does not wrap all errors of drivers in its own classes, so
# `_is_of_driver` recognizes an error by the module of its class.
_DRIVERS = (
    "sqlite3",
    "aiosqlite",
    "asyncpg",
    "psycopg",
    "asyncmy",
    "aiomysql",
    "pymysql",
    "sqlalchemy",  # SQLAlchemy replaces errors of asyncpg by errors of its own classes
)


class _ErrorKind(NamedTuple):
    """A kind of errors for which users get the same advice.

    The `DatabaseError` quotes the database's text, which contains no stored values for *codes*.
    """

    # PostgreSQL's SQLSTATEs, SQLite's names, the numbers of MySQL and MariaDB.  A number is a whole
    # code.  A text may be only the start of a code.
    codes: Sequence[str | int]
    advice: str  # what the user can do; the end of the text of the `DatabaseError`
    retryable: bool = False  # whether the same call may succeed later
    replaced_by: type[Exception] | None = None  # an exception of `protocol` that replaces the error


_UNREACHABLE = "check that the database runs and that its URL is right, then try again"
_KINDS = (
    _ErrorKind(
        _READ_ONLY,
        "the server is read-only: connect to the primary server, or try again",
        True,
        Disconnected,
    ),
    _ErrorKind(
        ("SQLITE_READONLY_ROLLBACK", "SQLITE_READONLY_RECOVERY", "SQLITE_READONLY_CANTINIT"),
        "a process stopped while it wrote to the file, and its transaction must be undone first: "
        "copy the file, and the files beside it that end in -journal and -wal, to a directory "
        "where you can write; open the copy once with `sqlite3 COPY .schema`, and use the copy",
    ),
    _ErrorKind(
        ("SQLITE_READONLY", "SQLITE_PERM", "SQLITE_AUTH"),
        "check the path, its directory and permissions",
    ),
    _ErrorKind(
        ("SQLITE_CANTOPEN",),
        "check the path, its directory and permissions; if you cannot write to the directory, and "
        "a file that ends in -wal is beside the database, copy both to a directory where you can",
    ),
    _ErrorKind(("28", 1045, 1044, 1698), "check the user and the password in the database URL"),
    _ErrorKind(("3D", 1049), "create the database, or correct its name in the URL"),
    _ErrorKind(
        ("42501", 1142, 1143, 1227),
        "grant the account what it lacks: services need SELECT, INSERT, UPDATE and DELETE on their "
        "tables, but on secure_audit only SELECT and INSERT",
    ),
    _ErrorKind(
        ("42P01", "42703", 1146, 1054, "SQLITE_ERROR"),
        "check that all tables and columns exist; if not, restore them from a backup",
    ),
    _ErrorKind(("53300", 1040, 1203), "allow more connections, or lower pool_size", True),
    _ErrorKind(
        ("53", 1114, 1021, "SQLITE_FULL", "SQLITE_IOERR_SHMSIZE"),
        "free space for the database",
        True,
    ),
    _ErrorKind(
        ("57014", 1317, 1969, 3024, "SQLITE_INTERRUPT"),
        "it was cancelled, or took too long: try again",
        True,
    ),
    _ErrorKind(("SQLITE_BUSY", "SQLITE_LOCKED"), "another process holds the lock: try again", True),
    _ErrorKind(("SQLITE_IOERR", "58"), "check the disk", True),
    _ErrorKind(("SQLITE_NOTADB", "SQLITE_CORRUPT"), "restore the file from a backup"),
    _ErrorKind(
        (
            "40003",  # it is not known whether the statement was executed (CockroachDB)
            1180,  # error during COMMIT: the other nodes may or may not have the changes
        ),
        "it is not known whether the change was stored: read the data before you repeat the change",
        True,
        Disconnected,
    ),
    _ErrorKind(
        (1047,),  # the node is not connected to the majority of a Galera cluster, or still joining
        "this node of the cluster is not ready: wait until it has joined the others, or connect to "
        "another node",
        True,
        Disconnected,
    ),
    _ErrorKind((1153,), "raise max_allowed_packet of the database server"),
    _ErrorKind(
        ("08", "57P", 1053, 1927, 2002, 2003, 2005, 2006, 2013, 2055),
        _UNREACHABLE,
        True,
        Disconnected,
    ),
    _ErrorKind(
        (
            "40",  # serialization failure, deadlock
            "55P03",  # lock not available, after NOWAIT or `lock_timeout`
            1205,  # lock wait timeout
            1213,  # deadlock; on a Galera cluster, also a row that another node has written
            1020,  # the row has changed since the transaction's snapshot
            1412,  # a table has been created or changed since the transaction's snapshot
        ),
        "try again",
        True,
        Conflict,
    ),
    _ErrorKind(
        ("23505", "SQLITE_CONSTRAINT_UNIQUE", "SQLITE_CONSTRAINT_PRIMARYKEY", 1062),
        "try again",
        True,
        UniqueViolation,
    ),
)
_LOST = _ErrorKind((), _UNREACHABLE, retryable=True)
_OTHER = _ErrorKind((), "look for this error in the log of the database")


def translate(error: Exception, *, connection_lost: bool = False) -> Exception:
    """Return UniqueViolation, Conflict, Disconnected or DatabaseError for *error* of a driver.

    Return *error* itself if neither a driver nor SQLAlchemy nor the operating system raised it.
    """
    if isinstance(error, sa.exc.TimeoutError):
        return pool_timed_out_error()
    driver = _driver_error(error)
    system = isinstance(driver, OSError | EOFError)
    if not (system or isinstance(error, sa.exc.SQLAlchemyError) or _is_of_driver(driver)):
        return error
    codes = _codes(driver)
    # A server's errors have a code, so an operational error without a code means that no server
    # has answered.
    unanswered = (
        not codes
        and isinstance(error, sa.exc.OperationalError)
        and type(driver).__module__ != "sqlite3"
    )
    kind = _kind_of(codes)
    lost = connection_lost or getattr(error, "connection_invalidated", False)
    if lost or unanswered or system or kind.replaced_by is Disconnected:
        return Disconnected(_database_error(driver, codes, _LOST if kind is _OTHER else kind))
    return _database_error(driver, codes, kind) if kind.replaced_by is None else kind.replaced_by()


def is_read_only(error: BaseException) -> bool:
    """Return whether *error* shows that the server rejects writes, like a former primary."""
    return not _codes(_driver_error(error)).isdisjoint(_READ_ONLY)


def needs_unprepared(error: BaseException) -> bool:
    """Return whether *error* shows that prepared statements must be disabled: see `_PREPARED`."""
    return not _codes(_driver_error(error)).isdisjoint(_PREPARED)


def _driver_error(error: BaseException) -> Any:
    return error.orig if isinstance(error, sa.exc.DBAPIError) else error


def statement_timeout(read_timeout: float | None, *, writes: bool) -> float | None:
    """Return how many seconds a statement may take: one that writes may have to wait for locks."""
    return 10 * read_timeout if writes and read_timeout is not None else read_timeout


def timed_out_error(seconds: float, what: str) -> DatabaseError:
    return DatabaseError(
        f"{what} did not end within {seconds:g} s and was interrupted: try again, or raise "
        "read_timeout",
        retryable=True,
    )


def pool_timed_out_error(seconds: float | None = None) -> DatabaseError:
    within = "in time" if seconds is None else f"within {seconds:g} s"
    return DatabaseError(
        f"none of the pool's connections was free {within}: try again, or raise pool_size",
        retryable=True,
    )


def _is_of_driver(error: object) -> bool:
    return type(error).__module__.partition(".")[0].lstrip("_") in _DRIVERS


def _codes(driver: Any) -> set[object]:
    codes = {getattr(driver, "sqlstate", None), getattr(driver, "sqlite_errorname", None)}
    if not isinstance(driver, OSError):
        codes.update(arg for arg in getattr(driver, "args", ()) if isinstance(arg, int))
    return codes - {None, ""}


def _kind_of(codes: set[object]) -> _ErrorKind:
    texts = [code for code in codes if isinstance(code, str)]
    for kind in _KINDS:
        starts = tuple(start for start in kind.codes if isinstance(start, str))
        if not codes.isdisjoint(kind.codes) or any(text.startswith(starts) for text in texts):
            return kind
    return _OTHER


def _database_error(driver: Any, codes: set[object], kind: _ErrorKind) -> DatabaseError:
    code = min(map(str, codes), default=None)
    facts = [code, _text(driver) if kind.codes else _connection_error_text(driver)]
    named = ", ".join(fact for fact in facts if fact) or type(driver).__name__
    what = "the database reported an error"
    if kind.advice == _UNREACHABLE:
        what = "the database cannot be reached, or the connection was lost"
    return DatabaseError(f"{what} ({named}): {kind.advice}", retryable=kind.retryable, code=code)


def _text(driver: Any) -> str:
    """Return the first line of the driver's text: in others, PostgreSQL quotes values."""
    texts = [arg for arg in getattr(driver, "args", ()) if isinstance(arg, str)]
    lines = texts[0].splitlines() if texts else []
    # SQLAlchemy may put the driver's class before its text.
    return lines[0].rpartition("'>: ")[2] if lines else ""


def _connection_error_text(driver: Any) -> str:
    """Return the text of *driver* if it says why no connection could be made; otherwise ""."""
    if isinstance(driver, OSError):
        return driver.strerror or str(driver)
    text = _text(driver)
    for start in _PSYCOPG:
        text = text.removeprefix(start)
    return text if text.startswith(_UNCONNECTED) else ""
