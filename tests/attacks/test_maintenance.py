"""Maintenance over columns that hold what nobody of ours wrote: refused or named, nothing lost."""

import asyncio
import functools
import sqlite3
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from adk_secure_sessions import AesGcmBackend, SecureSessionError
from adk_secure_sessions.maintenance import (
    Database,
    erase_user,
    lookup,
    purge,
    retire,
    rotate_data,
    rotate_master,
    rotate_root,
    status,
    verify,
)
from tests.attacks.conftest import SERVERS
from tests.attacks.replica import Replica
from tests.attacks.world import KEY, SECRET, VISIT, build_world

pytestmark = pytest.mark.no_cover

Operation = Callable[[Database], Awaitable[object]]

# What is done, and whether all is as before once the column is.
OPERATIONS: dict[str, tuple[Operation, bool]] = {
    "status": (status, True),
    "verify": (verify, True),
    "rotate root": (rotate_root, True),
    "rotate master": (rotate_master, True),
    "rotate master, dry": (functools.partial(rotate_master, dry_run=True), True),
    "rotate data": (rotate_data, True),
    "rotate data, dry": (functools.partial(rotate_data, dry_run=True), True),
    "retire": (retire, True),
    "retire, dry": (functools.partial(retire, dry_run=True), True),
    "lookup": (lambda db: lookup(db, *VISIT), True),
    "purge": (lambda db: purge(db, timedelta(0)), False),
    "purge, dry": (lambda db: purge(db, timedelta(0), dry_run=True), True),
    "erase": (lambda db: erase_user(db, *VISIT[:2]), False),
    "erase, dry": (lambda db: erase_user(db, *VISIT[:2], dry_run=True), True),
}
VALUES = {
    "text": "'text'",
    "no UTF-8": "CAST(x'fffe80' AS TEXT)",
    "a fraction": "1.5",
    "a BLOB": "x'00ff'",
    "NULL": "NULL",
    "a number": "77777",
    "a negative number": "-77777",
    "the largest": str(2**63 - 1),
    "the smallest": str(-(2**63)),
    "infinity": "9e999",
    "an empty BLOB": "x''",
    "empty text": "''",
}

KEYS = ("secure_keyring", "secure_data_keys")


class Column(NamedTuple):
    table: str
    name: str
    key: str  # of the table's rows


@functools.cache
def rotated_world() -> tuple[bytes, tuple[Column, ...]]:
    """The world after rotations of all its keys, the old ones still there; and its columns."""
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(1) as pool:
        path = Path(directory) / "sessions.db"
        path.write_bytes(build_world("aesgcm").files[1])
        pool.submit(asyncio.run, _rotate(path)).result()
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("PRAGMA journal_mode = DELETE")
            tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            columns = []
            for (table,) in tables.fetchall():
                info = connection.execute(f"PRAGMA table_info({table})").fetchall()
                key = ", ".join(row[1] for row in sorted(info, key=lambda row: row[5]) if row[5])
                columns += [Column(table, row[1], key) for row in info]
        return path.read_bytes(), tuple(columns)


async def _rotate(path: Path) -> None:
    async with database(path) as db:
        await rotate_master(db)
        await rotate_data(db)


def database(path: Path) -> Database:
    return Database(f"sqlite:///{path}", AesGcmBackend(KEY))


class Place:
    """A copy of the world, spoilt as a file, which a *replica* follows."""

    def __init__(self, path: Path, replica: Replica | None, *, on_engine: bool) -> None:
        self._path = path
        self._replica = replica
        self._on_engine = on_engine

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Database]:
        if self._on_engine:
            engine = create_async_engine(f"sqlite+aiosqlite:///{self._path}")
            async with Database(db_engine=engine, backend=AesGcmBackend(KEY)) as db:
                yield db
            await engine.dispose()
            return
        url = self._replica.url if self._replica else f"sqlite:///{self._path}"
        async with Database(url, AesGcmBackend(KEY)) as db:
            yield db

    def spoil(self, column: Column, value: str) -> object:
        """Put *value* into the last row's column; what was there.

        Raises IntegrityError, or skips, where the database itself refuses it.
        """
        for suffix in ("-wal", "-shm"):
            self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)
        self._path.write_bytes(rotated_world()[0])
        table, name, key = column
        last = f"({key}) = (SELECT {key} FROM {table} ORDER BY {key} DESC LIMIT 1)"
        with closing(sqlite3.connect(self._path)) as connection, connection:
            ((before,),) = connection.execute(f"SELECT {name} FROM {table} WHERE {last}")
            connection.execute(f"UPDATE {table} SET {name} = {value} WHERE {last}")
        self._push()
        return before

    def mend(self, column: Column, value: str, before: object) -> int:
        """Put it back; how many rows had it."""
        if self._replica:
            self._replica.pull(self._path)
        table, name, _ = column
        with closing(sqlite3.connect(self._path)) as connection, connection:
            sql = f"UPDATE {table} SET {name} = ? WHERE {name} IS {value}"
            had = connection.execute(sql, (before,)).rowcount
        self._push()
        return had

    def _push(self) -> None:
        if self._replica:
            self._replica.push(self._path, anyhow=True)


@pytest.fixture
def place(request: pytest.FixtureRequest, path: Path) -> Place:
    where = request.param
    replica = request.getfixturevalue(f"on_{where}") if where in SERVERS else None
    if replica:
        replica.reset()
    return Place(path, replica, on_engine=where == "engine")


def each(chosen: Collection[str], among: Iterable[str]) -> list[Any]:
    """The others, too, if there is time."""
    others = pytest.mark.soak
    return [name if name in chosen else pytest.param(name, marks=others) for name in among]


@pytest.mark.parametrize("place", each(["url"], ["url", "engine", *SERVERS]), indirect=True)
@pytest.mark.parametrize(
    "operation", each([name for name in OPERATIONS if "dry" not in name], OPERATIONS)
)
@pytest.mark.parametrize("value", each(["no UTF-8", "infinity"], VALUES))
async def test_column_that_holds_anything_is_refused_or_named_and_nothing_is_lost(
    operation: str, value: str, place: Place
) -> None:
    sql, (run, restorable) = VALUES[value], OPERATIONS[operation]
    for column in rotated_world()[1]:
        try:
            before = place.spoil(column, sql)
        except (sqlite3.IntegrityError, pytest.skip.Exception):
            continue
        said = ""
        async with place.opened() as db:
            try:
                await run(db)
            except SecureSessionError as error:
                said = str(error)
            except Exception as error:
                raise AssertionError(f"{column}: {error}") from error
        assert SECRET not in said
        if restorable:
            left_alone = place.mend(column, sql, before) == 1
            # A key that nothing refers to may go.
            assert left_alone or (operation == "retire" and column.table in KEYS), column
            async with place.opened() as db:
                found = await verify(db)
            assert found.bad == found.unchecked == 0, (column, found.problems)
