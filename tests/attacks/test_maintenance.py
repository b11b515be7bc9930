"""Maintenance of a database with an alien value in a column: an error or a report, no loss."""

import functools
import itertools
import sqlite3
from collections.abc import Awaitable, Callable, Collection, Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import pytest

from adk_secure_sessions import AesGcmBackend, SecureSessionError
from adk_secure_sessions.cli.program import Failure, require_confirmation
from adk_secure_sessions.maintenance import Database as Maintained
from adk_secure_sessions.maintenance import (
    erase_user,
    lookup,
    purge_sessions,
    retire,
    rotate_data,
    rotate_master,
    rotate_root,
    status,
    verify,
)
from adk_secure_sessions.migration import EncryptedSource, export_lines, migrate
from tests.attacks.databases import SERVERS
from tests.attacks.support import Database
from tests.attacks.world import SECRET, VISIT

pytestmark = pytest.mark.no_cover

Operation = Callable[[Maintained], Awaitable[object]]


async def copy(db: Maintained) -> None:
    async with Maintained("sqlite:///:memory:", AesGcmBackend(bytes(32))) as target:
        await migrate(EncryptedSource(db), target, skip_bad=True)


async def confirm(db: Maintained) -> None:
    with suppress(Failure):
        require_confirmation(await db.describe(), "another name", "change it")


# Each command, and whether the database is as before once the column has its old value again.
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
    "export": (lambda db: export_lines(db, lambda line: None, skip_bad=True), True),
    "confirm": (confirm, True),
    "migrate": (copy, True),
    "purge": (lambda db: purge_sessions(db, timedelta(0)), False),
    "purge, dry": (lambda db: purge_sessions(db, timedelta(0), dry_run=True), True),
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
    "the largest": str(2**63 - 2),  # `expires_at` of most sessions is one more
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


def columns(db: Database) -> list[Column]:
    with db.connect() as connection:
        tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        found = []
        for (table,) in tables.fetchall():
            info = connection.execute(f"PRAGMA table_info({table})").fetchall()
            key = ", ".join(row[1] for row in sorted(info, key=lambda row: row[5]) if row[5])
            found += [Column(table, row[1], key) for row in info]
        return found


def tamper(db: Database, column: Column, value: str) -> object:
    """Write *value* into a column of the last row; return the old value.

    Raises IntegrityError, or skips, where the database itself rejects it.
    """
    table, name, key = column
    last = f"({key}) = (SELECT {key} FROM {table} ORDER BY {key} DESC LIMIT 1)"
    with db.connect() as connection:
        ((before,),) = connection.execute(f"SELECT {name} FROM {table} WHERE {last}")
        connection.execute(f"UPDATE {table} SET {name} = {value} WHERE {last}")
    return before


def restore(db: Database, column: Column, value: str, before: object) -> int:
    """Write the old value again; return how many rows had *value*."""
    table, name, _ = column
    with db.connect() as connection:
        sql = f"UPDATE {table} SET {name} = ? WHERE {name} IS {value}"
        return connection.execute(sql, (before,)).rowcount


# By default, every command meets one value of the wrong type in a share of the columns, so that
# each column meets one or two commands.  Two commands meet another value, too.
# `make soak` takes every column (None) and every value.
SHARES = 8
DEFAULT = [
    (name, "no UTF-8", number % SHARES)
    for number, name in enumerate(name for name in OPERATIONS if "dry" not in name)
]
DEFAULT += [("verify", "infinity", 0), ("export", "the smallest", 2)]
CASES = [*DEFAULT, *itertools.product(OPERATIONS, VALUES, [None])]


def others_in_soak(chosen: Collection[Any], among: Iterable[Any]) -> list[Any]:
    """Parameters of which only the *chosen* ones run by default."""
    return [
        pytest.param(
            *(one if isinstance(one, tuple) else (one,)),
            marks=[] if one in chosen else pytest.mark.soak,
        )
        for one in among
    ]


@pytest.mark.parametrize(
    "typed_db", others_in_soak(["url"], ["url", "engine", *SERVERS]), indirect=True
)
@pytest.mark.parametrize(("operation", "value", "share"), others_in_soak(DEFAULT, CASES))
async def test_column_that_holds_anything_is_rejected_or_named_and_nothing_is_lost(
    operation: str, value: str, share: int | None, typed_db: Database
) -> None:
    db, sql, (run, restorable) = typed_db, VALUES[value], OPERATIONS[operation]
    async with db.maintained() as maintained:  # so that there are old keys
        await rotate_master(maintained)
        await rotate_data(maintained)
    every = columns(db)
    for column in every if share is None else every[share::SHARES]:
        with db.undone_afterwards():
            try:
                before = tamper(db, column, sql)
            except (sqlite3.IntegrityError, pytest.skip.Exception):
                continue
            said = ""
            with db.watched() as changed:
                async with db.maintained() as maintained:
                    try:
                        await run(maintained)
                    except SecureSessionError as error:
                        said = str(error)
                    except Exception as error:
                        raise AssertionError(f"{column}: {error}") from error
                assert SECRET not in said
                if not restorable or not changed():  # nothing was written, so nothing is lost
                    continue
            left_alone = restore(db, column, sql, before) == 1
            # `retire` may delete a key that nothing refers to.
            assert left_alone or (operation == "retire" and column.table in KEYS), column
            async with db.maintained() as maintained:
                found = await verify(maintained)
            assert found.bad == found.unchecked == 0, (column, found.problems)
