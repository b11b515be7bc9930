"""Statements on SQLite files behind the services' back."""

import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any


def execute(
    path: Path, sql: str, values: Sequence[object] | Mapping[str, object] = ()
) -> list[tuple[Any, ...]]:
    """Run a statement, and return the rows that it selects; fail if it would change none."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        cursor = connection.execute(sql, values)
        assert cursor.rowcount, f"no row was met by {sql}"
        return cursor.fetchall()


def value(path: Path, sql: str, values: Sequence[object] | Mapping[str, object] = ()) -> Any:
    """Return the single value that a query selects."""
    ((found,),) = execute(path, sql, values)
    return found


def settle(path: Path) -> None:
    """Merge the write-ahead log, which a closing connection may leave, into the file."""
    assert execute(path, "PRAGMA wal_checkpoint(TRUNCATE)")[0][0] == 0
