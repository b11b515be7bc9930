"""A SQLite file's tables on a server: what an attack does to the file is carried over there."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any, NoReturn

import pytest
import sqlalchemy as sa

from adk_secure_sessions.storage.schema import metadata

Rows = list[tuple[Any, ...]]

_REFUSALS = {"DataError", "IntegrityError"}  # and their subclasses, of either driver
_HELD_BY = {sa.BigInteger: int, sa.String: str, sa.LargeBinary: bytes}


class Replica:
    """Keeps one database on a server like a SQLite file, in both directions.

    What the server itself refuses, as text in a column of numbers, is skipped by name.
    """

    def __init__(self, url: sa.URL, driver: str) -> None:
        """*url* for the attacker; the service under attack has another *driver*."""
        self.url = url.set(drivername=driver)
        self._engine = sa.create_engine(url)
        self._name = driver.partition("+")[0]
        self._known: dict[str, Rows] = {}  # what both hold, as far as is known
        self._as_made = False  # but for the constraints of some tables
        self._lifted: set[str] = set()

    def close(self) -> None:
        self._engine.dispose()

    def reset(self) -> None:
        """Have our tables as we make them, whatever is in them."""
        if self._as_made and not self._lifted:
            return
        with self._engine.begin() as connection:
            there = sa.inspect(connection)
            for view in [] if self._as_made else there.get_view_names():
                connection.exec_driver_sql(f"DROP VIEW {view}")
            for table in self._lifted if self._as_made else there.get_table_names():
                connection.exec_driver_sql(f"DROP TABLE {table}")
            metadata.create_all(connection)
        self._as_made, self._lifted = True, set()

    def define(self, *statements: str) -> None:
        """Change the tables themselves."""
        self._as_made = False
        with self._engine.begin() as connection:
            for statement in statements:
                connection.exec_driver_sql(statement)

    def lift_constraints(self, name: str) -> None:
        """Keep the columns and their types, but no key and no NOT NULL.  The rows go."""
        columns = [sa.Column(column.name, column.type) for column in metadata.tables[name].columns]
        bare = sa.Table(name, sa.MetaData(), *columns)
        self._lifted.add(name)
        self._known[name] = []
        with self._engine.begin() as connection:
            bare.drop(connection)
            bare.create(connection)

    def push(self, path: Path, *, anyhow: bool = False) -> None:
        """Make the server hold what the file holds; *anyhow*: whatever it held before."""
        known = {} if anyhow else self._known
        with closing(sqlite3.connect(path)) as file:
            file.text_factory = _text
            held = {
                name: file.execute(f"SELECT * FROM {name}").fetchall() for name in _tables(file)
            }
        changed = {name: rows for name, rows in held.items() if not _same(rows, known.get(name))}
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
            if not _REFUSALS & {kind.__name__ for kind in type(error).__mro__}:
                raise
            self._refuse(str(error))
        self._known |= changed

    def pull(self, path: Path) -> None:
        """Make the file hold what the server holds."""
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
        """Whether the server holds anything else than when it was last looked at."""
        return bool(self._changed())

    def _changed(self) -> dict[str, Rows]:
        found = {}
        with self._engine.connect() as connection, _cursor(connection) as cursor:
            tables = (
                [*metadata.tables] if self._as_made else sa.inspect(connection).get_table_names()
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
                held = next(
                    held for kind, held in _HELD_BY.items() if isinstance(column.type, kind)
                )
                if value is not None and type(value) is not held:
                    self._refuse(
                        f"{name}.{column.name}, {column.type!r}, holds no {type(value).__name__}"
                    )

    def _refuse(self, why: str) -> NoReturn:
        pytest.skip(f"{self._name} itself refuses it: {why}")


def _cursor(connection: sa.Connection) -> closing[Any]:
    """The driver's own, for speed."""
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
