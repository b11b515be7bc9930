"""The differences between databases: one object for each kind, which `dialect_of` returns.

`failures` has the codes of errors, which do not overlap.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import itemgetter
from typing import Any

import sqlalchemy as sa

from adk_secure_sessions.db.protocol import Parameters, Row
from adk_secure_sessions.errors import ConfigurationError

_ADVISORY_LOCK = int.from_bytes(b"AKS init")
_LOCK_TIMEOUT = 60  # seconds
# Seconds for which a transaction waits for the lock of a whole table.  Statements of services may
# queue behind the waiting statement, and then wait as long.
LOCK_WAIT = 5
# SQLSTATEs of a database that has no advisory locks: the function does not exist, this account may
# not call it, or it is not implemented.
_NO_ADVISORY_LOCKS = ("42883", "42501", "0A000")
# The errors of a CREATE TABLE or CREATE INDEX for one that exists.  On PostgreSQL, the last two
# occur if another transaction creates it at the same time.
_EXISTS: set[object] = {1050, 1061, "42P07", "42710", "23505"}
# The settings of MariaDB Galera and Percona XtraDB Cluster, and of MySQL's Group Replication.
_LOCKS_PER_NODE = """
SHOW GLOBAL VARIABLES WHERE (variable_name = 'wsrep_on' AND value = 'ON')
OR (variable_name = 'group_replication_single_primary_mode' AND value = 'OFF')
"""
_PRIMARY_KEY = sa.text(
    "SELECT quote_ident(c.relname) FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid "
    "WHERE i.indrelid = to_regclass(:name) AND i.indisprimary"
)
# In bytes.  By default, every MySQL and MariaDB server accepts a packet with a value of this size.
_LARGE = 900_000
_BUSY_TIMEOUT = "PRAGMA busy_timeout", "PRAGMA busy_timeout = {}"
IN_USE = "other connections used the database all the time"
_PACKET_REST = 900  # bytes of a packet that are reserved for everything but the largest value


@functools.cache
def compile_for_sqlite(
    statement: sa.Executable,
) -> tuple[str, Callable[[Parameters], Any]]:
    """Return the SQL of *statement*, and a function that returns the values for the driver.

    They are passed by position, unless a name occurs twice: by name, each value takes 0.1 µs more,
    but repeated bytes would take 0.7 µs each time.
    """
    assert isinstance(statement, sa.ClauseElement)
    compiled: Any = statement.compile(dialect=_sqlite_dialect("qmark"))
    names = compiled.positiontup
    if len(set(names)) == len(names) > 1:  # of one name, `itemgetter` returns no tuple
        return compiled.string, itemgetter(*names)
    return str(statement.compile(dialect=_sqlite_dialect("named"))), dict


@functools.cache
def _sqlite_dialect(paramstyle: str) -> sa.Dialect:
    from sqlalchemy.dialects import sqlite  # which a service on a server does not need

    return sqlite.dialect(paramstyle=paramstyle)


def decode_any_text(data: bytes) -> str:
    """Decode text from SQLite, even if an attacker has written it into a binary column.

    The default decoder would raise an error that quotes this text.  Our own checks reject the row.
    """
    return data.decode("utf-8", "backslashreplace")


def has_table(connection: sa.Connection, table: sa.Table) -> bool:
    # `Inspector.has_table` raises an error on MySQL and MariaDB if the table does not exist and the
    # account has permissions on single tables only.
    return table.name in sa.inspect(connection).get_table_names()


def already_exists(error: sa.exc.DBAPIError) -> bool:
    """Return whether *error* says that another process has just created the table to create."""
    driver: Any = error.orig
    return bool(_EXISTS & {getattr(driver, "sqlstate", None), *getattr(driver, "args", ())[:1]})


class Dialect:
    """A kind of database; the class itself is for the kinds that have no class of their own."""

    def __init__(self, name: str) -> None:
        self.name: str = name  # as in the files docs/sql/NAME.sql

    is_server: bool = True
    commits_each_table: bool = False  # whether each CREATE TABLE is committed
    has_one_file: bool = False  # whether all tables are in one file, which is rewritten as a whole
    current_database: str = "current_database()"  # SQL for the database's name; SQLite: its path

    # --- transactions and locks ---

    def begin_immediate(self, connection: sa.Connection) -> None:
        """Begin a transaction that writes, if the database has a statement of its own for it."""

    def begin_snapshot(self, connection: sa.Connection) -> None:
        """Begin a read-only transaction whose queries all read the same state of the database."""
        text = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"
        connection.exec_driver_sql(text).close()

    def set_read_committed(self, connection: sa.Connection) -> None:
        """Let each statement of the new transaction see what was committed when it began."""
        connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL READ COMMITTED").close()

    def exclusively(self, connection: sa.Connection) -> AbstractContextManager[None]:
        """Hold a lock in a new transaction, so that only one process creates tables at a time.

        Not every database and cluster has such a lock, so callers must also handle the error of
        `already_exists`.  On MySQL and MariaDB, the end of the block commits.
        """
        return nullcontext()

    def lock_tables(self, connection: sa.Connection, *tables: sa.Table) -> None:
        """On PostgreSQL, wait for the transactions that write to *tables*, and let no other begin.

        There, a query does not see what an open transaction will commit.  After `LOCK_WAIT`, the
        waiting transaction fails with a conflict, and its caller repeats it.
        """

    def locks_per_node(self, connection: sa.Connection) -> bool:
        """Return whether the server is a node of a cluster whose other nodes do not see its locks.

        Such a cluster rejects a commit if another node has written one of the same rows.  It does
        not compare a row that was only locked, or updated to the same value.
        """
        return False

    def set_constraints_immediate(self, connection: sa.Connection) -> None:
        """Let no trigger of PostgreSQL undo a change at the commit, after the last check."""

    # --- statements and values ---

    def fetch(
        self, connection: sa.Connection, query: sa.Executable, parameters: Parameters
    ) -> Sequence[Row]:
        return connection.execute(query, parameters).all()

    def decoding(
        self, connection: sa.Connection, decode: Callable[[bytes], object]
    ) -> AbstractContextManager[None]:
        """On SQLite, let *decode* convert the texts that queries of the block return."""
        return nullcontext()

    def check_packet_size(self, connection: sa.Connection, rows: Sequence[Parameters]) -> None:
        """Raise ConfigurationError if the server would not accept the largest value of *rows*."""

    def reject_long_values(self, connection: sa.Connection) -> None:
        """Make the server reject values that are too long for a column, instead of cutting them."""

    def set_table_options(self, table: sa.Table) -> None:
        """Set this database's options of *table*, which is about to be created.

        If they were in the definition of the table, SQLAlchemy would import the dialects of all
        databases when the tables are defined.
        """

    def kill_statement(self, driver: Any) -> str | None:
        """Return the SQL that ends another connection's statement; None if the driver ends it."""
        return None

    # --- bytes of deleted rows ---

    def overwrite_deleted(self, connection: sa.Connection) -> None:
        """On SQLite, make *connection* overwrite the bytes of the rows that it deletes."""

    def truncate_wal(self, connection: sa.Connection, lock_wait: int) -> str:
        """Empty the write-ahead log of a SQLite file; return the reason if that is not possible."""
        return "the table of the data keys was not rewritten"

    def rewrite(self, connection: sa.Connection, table: sa.Table, lock_wait: int) -> str:
        """Rewrite *table*, so that its file has no bytes of deleted rows; return an obstacle."""
        return f"there is no known way to rewrite a table of {self.name}"


class _Sqlite(Dialect):
    is_server = False
    has_one_file = True
    current_database = "(SELECT file FROM pragma_database_list WHERE name = 'main')"

    def begin_immediate(self, connection: sa.Connection) -> None:
        # BEGIN IMMEDIATE takes the write lock before we read.  A plain BEGIN takes the write lock
        # at the first write, after our reads.  If another process holds the lock at that time,
        # SQLite does not wait and raises an error, because the rows that we have read may be
        # outdated.
        _begin(connection, "BEGIN IMMEDIATE")

    def begin_snapshot(self, connection: sa.Connection) -> None:
        _begin(connection, "BEGIN")

    def set_read_committed(self, connection: sa.Connection) -> None:
        pass  # one transaction writes at a time

    def fetch(
        self, connection: sa.Connection, query: sa.Executable, parameters: Parameters
    ) -> Sequence[Row]:
        with self.decoding(connection, decode_any_text):
            text, values_of = compile_for_sqlite(query)
            return connection.exec_driver_sql(text, values_of(parameters)).all()

    @contextmanager
    def decoding(
        self, connection: sa.Connection, decode: Callable[[bytes], object]
    ) -> Iterator[None]:
        driver: Any = connection.connection.driver_connection  # may be the application's
        text_factory = driver.text_factory
        driver.text_factory = decode
        try:
            yield
        finally:
            driver.text_factory = text_factory

    def set_table_options(self, table: sa.Table) -> None:
        table.kwargs["sqlite_with_rowid"] = table.info.get("has_rowid", True)

    def overwrite_deleted(self, connection: sa.Connection) -> None:
        connection.exec_driver_sql("PRAGMA secure_delete = ON").close()

    def truncate_wal(self, connection: sa.Connection, lock_wait: int) -> str:
        with _setting(connection, *_BUSY_TIMEOUT, lock_wait * 1000):
            busy, *_ = connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)").one()
        return IN_USE if busy else ""

    def rewrite(self, connection: sa.Connection, table: sa.Table, lock_wait: int) -> str:
        with _setting(connection, *_BUSY_TIMEOUT, lock_wait * 1000):
            connection.exec_driver_sql("VACUUM")
        return self.truncate_wal(connection, lock_wait)


def _begin(connection: sa.Connection, statement: str) -> None:
    driver = connection.connection.driver_connection
    if not getattr(driver, "in_transaction", False):
        connection.exec_driver_sql(statement)


class _PostgreSql(Dialect):
    @contextmanager
    def exclusively(self, connection: sa.Connection) -> Iterator[None]:
        # The lock lasts until the caller commits.  At a higher isolation level, the transaction
        # would not see what the previous holder of the lock has created.
        self.set_read_committed(connection)
        try:
            with connection.begin_nested():  # an error must not abort the whole transaction
                connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_ADVISORY_LOCK)))
        except sa.exc.DBAPIError as error:
            # A derivative of PostgreSQL may have no such locks.
            if getattr(error.orig, "sqlstate", None) not in _NO_ADVISORY_LOCKS:
                raise
        yield

    def lock_tables(self, connection: sa.Connection, *tables: sa.Table) -> None:
        connection.exec_driver_sql(f"SET LOCAL lock_timeout = '{LOCK_WAIT}s'").close()
        names = ", ".join(table.name for table in tables)
        connection.exec_driver_sql(f"LOCK TABLE {names} IN SHARE ROW EXCLUSIVE MODE").close()

    def set_constraints_immediate(self, connection: sa.Connection) -> None:
        # Derivatives without deferred triggers reject the second statement.
        found = "SELECT 1 FROM pg_catalog.pg_trigger WHERE tgdeferrable LIMIT 1"
        if connection.exec_driver_sql(found).first() is not None:
            connection.exec_driver_sql("SET CONSTRAINTS ALL IMMEDIATE").close()

    def rewrite(self, connection: sa.Connection, table: sa.Table, lock_wait: int) -> str:
        # A plain VACUUM does not overwrite a deleted row unless it moves another row of the same
        # page.  VACUUM (FULL) cannot run in a transaction, so its lock_timeout would have to be a
        # setting of the connection.  A pooler may give that connection, with this setting, to other
        # clients.  CLUSTER also rewrites the table, and can run in a transaction.
        name = table.name
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


class _MySql(Dialect):
    commits_each_table = True
    current_database = "DATABASE()"

    def begin_snapshot(self, connection: sa.Connection) -> None:
        text = "START TRANSACTION WITH CONSISTENT SNAPSHOT, READ ONLY"
        connection.exec_driver_sql(text).close()

    @contextmanager
    def exclusively(self, connection: sa.Connection) -> Iterator[None]:
        if self.locks_per_node(connection):  # there, MariaDB rejects GET_LOCK
            yield
            connection.commit()
            return
        name = sa.func.concat("secure_sessions.", sa.func.md5(sa.func.database()))
        connection.execute(sa.select(sa.func.get_lock(name, _LOCK_TIMEOUT)))
        try:
            yield
            connection.commit()
        finally:
            if not connection.invalidated:
                connection.execute(sa.select(sa.func.release_lock(name)))

    def locks_per_node(self, connection: sa.Connection) -> bool:
        return connection.exec_driver_sql(_LOCKS_PER_NODE).first() is not None

    def check_packet_size(self, connection: sa.Connection, rows: Sequence[Parameters]) -> None:
        # If a packet is too large, the server closes the connection and does not say why.
        values = (value for row in rows for value in row.values())
        size = max((len(value) for value in values if isinstance(value, bytes)), default=0)
        if size <= _LARGE:
            return
        limit = connection.scalar(sa.text("SELECT @@max_allowed_packet"))
        # A packet also contains the driver's escape characters (up to 4% of the value) and the rest
        # of the statement.
        if limit is not None and size + size // 25 + _PACKET_REST > limit:
            raise ConfigurationError(
                f"a value of {size} bytes does not fit into one packet of the database server: "
                f"raise its max_allowed_packet, which is {limit} bytes"
            )

    def reject_long_values(self, connection: sa.Connection) -> None:
        text = "SET SESSION sql_mode = CONCAT(@@sql_mode, ',STRICT_ALL_TABLES')"
        connection.exec_driver_sql(text).close()

    def set_table_options(self, table: sa.Table) -> None:
        # A storage engine with transactions.
        table.kwargs["mysql_engine"] = table.kwargs["mariadb_engine"] = "InnoDB"

    def kill_statement(self, driver: Any) -> str | None:
        # The server would continue a query after the client has closed the connection.
        return f"KILL QUERY {int(driver.thread_id())}"

    def rewrite(self, connection: sa.Connection, table: sa.Table, lock_wait: int) -> str:
        if not connection.scalar(sa.text("SELECT @@innodb_file_per_table")):
            return "the table shares its file with other tables: innodb_file_per_table is off"
        statement = f"OPTIMIZE TABLE {table.name}"
        if getattr(connection.dialect, "is_mariadb", False):
            rows = connection.exec_driver_sql(f"{statement} WAIT {lock_wait}").all()
        else:
            # MySQL cannot limit the wait of this one statement: OPTIMIZE accepts neither WAIT nor
            # the hint SET_VAR.  If this process is killed, a pooler may give the connection to
            # another client with the changed setting.  This is harmless: that client waits at most
            # *lock_wait* seconds for the lock of a whole table.
            show, change = "SELECT @@lock_wait_timeout", "SET lock_wait_timeout = {}"
            with _setting(connection, show, change, lock_wait):
                rows = connection.exec_driver_sql(statement).all()
        texts = {kind.lower(): text for _table, _operation, kind, text in rows}
        return "" if texts.get("status") == "OK" else f"the database: {texts.get('error', texts)}"


@contextmanager
def _setting(connection: sa.Connection, show: str, change: str, value: object) -> Iterator[None]:
    """During the block, change the setting that *show* reads and *change* sets."""
    before = connection.exec_driver_sql(show).scalar()
    connection.exec_driver_sql(change.format(value)).close()
    try:
        yield
    finally:
        if not connection.invalidated:
            connection.exec_driver_sql(change.format(before)).close()


_DIALECTS = {
    "sqlite": _Sqlite("sqlite"),
    "postgresql": _PostgreSql("postgresql"),
    "mysql": _MySql("mysql"),
    "mariadb": _MySql("mysql"),
}


def dialect_of(connection: Any) -> Dialect:
    name = connection.dialect.name
    return _DIALECTS.get(name) or Dialect(name)
