"""The tables of a SQLite file on a server, so that one attack runs on every database.

How it works.  Attacks are written in SQLite's SQL and change a SQLite file.  A `Replica` keeps a
server's tables equal to that file: `push` writes to the server the tables whose rows have changed,
`pull` writes to the file what a service has changed on the server.  Some values cannot exist on a
server, such as text in a column of numbers.  Then the server cannot be attacked that way, and
`push` skips the test with the server's reason.
"""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any, NoReturn

import pytest
import sqlalchemy as sa

from adk_secure_sessions.storage.schema import metadata

Rows = list[tuple[Any, ...]]

_REJECTIONS = {"DataError", "IntegrityError"}  # and their subclasses, of either driver
_PYTHON_TYPES = {sa.BigInteger: int, sa.String: str, sa.LargeBinary: bytes}


class Replica:
    """One database on a server, kept equal to a SQLite file in both directions."""

    def __init__(self, url: sa.URL, driver: str) -> None:
        """The attacker connects to *url*; the service under attack uses another *driver*."""
        self.url = url.set(drivername=driver)
        self._engine = sa.create_engine(url)
        self._name = driver.partition("+")[0]
        self._known: dict[str, Rows] = {}  # rows of the file and the server when last equal
        self._schema_is_ours = False  # except for the tables in `_lifted`
        self._lifted: set[str] = set()

    def close(self) -> None:
        self._engine.dispose()

    def reset(self) -> None:
        """Restore the schema, but not the rows."""
        if self._schema_is_ours and not self._lifted:
            return
        with self._engine.begin() as connection:
            there = sa.inspect(connection)
            for view in [] if self._schema_is_ours else there.get_view_names():
                connection.exec_driver_sql(f"DROP VIEW {view}")
            for table in self._lifted if self._schema_is_ours else there.get_table_names():
                connection.exec_driver_sql(f"DROP TABLE {table}")
            metadata.create_all(connection)
        self._schema_is_ours, self._lifted = True, set()

    def define(self, *statements: str) -> None:
        """Change the schema."""
        self._schema_is_ours = False
        with self._engine.begin() as connection:
            for statement in statements:
                connection.exec_driver_sql(statement)

    def lift_constraints(self, name: str) -> None:
        """Remove keys and NOT NULL from a table; its rows are lost."""
        columns = [sa.Column(column.name, column.type) for column in metadata.tables[name].columns]
        bare = sa.Table(name, sa.MetaData(), *columns)
        self._lifted.add(name)
        self._known[name] = []
        with self._engine.begin() as connection:
            bare.drop(connection)
            bare.create(connection)

    def push(self, path: Path, *, force: bool = False) -> None:
        """Copy changed tables of the file to the server, or with *force* all tables."""
        known = {} if force else self._known
        with closing(sqlite3.connect(path)) as file:
            file.text_factory = _text
            stored = {
                name: file.execute(f"SELECT * FROM {name}").fetchall() for name in _tables(file)
            }
        changed = {name: rows for name, rows in stored.items() if not _same(rows, known.get(name))}
        for name, rows in changed.items():
            self._check(name, rows)
        try:
            with self._engine.begin() as connection, _cursor(connection) as cursor:
                for name, rows in changed.items():
                    cursor.execute(f"DELETE FROM {name}")
                    if rows:
                        slots = ", ".join(["%s"] * len(rows[0]))
                        cursor.executemany(f"INSERT INTO {name} VALUES ({slots})", rows)
        except Exception as error:
            if not _REJECTIONS & {kind.__name__ for kind in type(error).__mro__}:
                raise
            self._skip(str(error))
        self._known |= changed

    def pull(self, path: Path) -> None:
        """Copy changed tables of the server to the file."""
        changed = self._changed()
        if not changed:
            return
        with closing(sqlite3.connect(path, isolation_level=None)) as file:
            file.execute("PRAGMA synchronous = OFF")
            for name, rows in changed.items():
                if name not in _tables(file):
                    columns = ", ".join(column.name for column in metadata.tables[name].columns)
                    file.execute(f"CREATE TABLE {name} ({columns})")
                file.execute(f"DELETE FROM {name}")
                for row in rows:
                    file.execute(f"INSERT INTO {name} VALUES ({', '.join('?' * len(row))})", row)
        self._known |= changed

    def has_changed(self) -> bool:
        """Whether a row on the server has changed since the last `push` or `pull`."""
        return bool(self._changed())

    def _changed(self) -> dict[str, Rows]:
        found = {}
        with self._engine.connect() as connection, _cursor(connection) as cursor:
            tables = (
                [*metadata.tables]
                if self._schema_is_ours
                else sa.inspect(connection).get_table_names()
            )
            for name in tables:
                cursor.execute(f"SELECT * FROM {name}")
                found[name] = [tuple(row) for row in cursor.fetchall()]
        return {
            name: rows for name, rows in found.items() if not _same(rows, self._known.get(name))
        }

    def _check(self, name: str, rows: Rows) -> None:
        for row in rows:
            for value, column in zip(row, metadata.tables[name].columns, strict=True):
                expected = next(
                    python
                    for kind, python in _PYTHON_TYPES.items()
                    if isinstance(column.type, kind)
                )
                if value is not None and type(value) is not expected:
                    self._skip(
                        f"{name}.{column.name}, {column.type!r}, holds no {type(value).__name__}"
                    )

    def _skip(self, why: str) -> NoReturn:
        pytest.skip(f"{self._name} itself rejects the value: {why}")


def _cursor(connection: sa.Connection) -> closing[Any]:
    """The driver's own cursor, which is faster than SQLAlchemy's."""
    return closing(connection.connection.cursor())


class _NotText:
    """TEXT that is not UTF-8."""


def _text(data: bytes) -> object:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return _NotText()


def _tables(file: sqlite3.Connection) -> list[str]:
    query = "SELECT name FROM sqlite_master WHERE type = 'table'"
    return [name for (name,) in file.execute(query)]


def _same(one: Rows, other: Rows | None) -> bool:
    """Whether they are the same rows, in whatever order."""
    return other is not None and sorted(map(repr, one)) == sorted(map(repr, other))
