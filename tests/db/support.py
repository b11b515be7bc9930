"""The table that tests of executors use, short ways to change it, and the kinds of executors."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import sqlalchemy as sa

from adk_secure_sessions.db.protocol import Apply, Change, Executor, Read, Steps, Transaction


@dataclass(frozen=True)
class Kind:
    """A way to an executor: by a URL with *driver*, or by an engine of the application's own."""

    driver: str
    server: str | None = None  # the fixture that is the server
    in_memory: bool = False
    by_engine: bool = False


KINDS = {
    "sqlite": Kind("sqlite"),
    "sqlite-memory": Kind("sqlite", in_memory=True),
    "aiosqlite-engine": Kind("sqlite+aiosqlite", by_engine=True),
    "asyncpg": Kind("postgresql+asyncpg", "postgresql"),
    "asyncpg-engine": Kind("postgresql+asyncpg", "postgresql", by_engine=True),
    "psycopg": Kind("postgresql+psycopg", "postgresql"),
    "asyncpg-pgbouncer": Kind("postgresql+asyncpg", "pgbouncer"),
    "psycopg-pgbouncer": Kind("postgresql+psycopg", "pgbouncer"),
    "asyncmy": Kind("mariadb+asyncmy", "mariadb"),
}
LATER = ["asyncpg-pgbouncer", "psycopg-pgbouncer"]  # on_servers/test_pooler.py is about it


def on(*names: str) -> pytest.MarkDecorator:
    """Run a test on these of `KINDS` only."""
    return pytest.mark.parametrize("kind", [KINDS[name] for name in names], ids=names)


things = sa.Table(
    "things",
    sa.MetaData(),
    sa.Column("id", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("value", sa.LargeBinary),
)
INSERT = sa.insert(things)
UPDATE = (
    sa.update(things)
    .where(things.c.id == sa.bindparam("at_id"))
    .values(value=sa.bindparam("value"))
)
DELETE = sa.delete(things).where(things.c.id == sa.bindparam("at_id"))
ALL = sa.select(things.c.id, things.c.value).order_by(things.c.id)


def insert(id_: int, value: bytes = b"new") -> Change:
    return Change(INSERT, {"id": id_, "value": value})


def update(id_: int, value: bytes = b"changed", *, must_match_one_row: bool = True) -> Change:
    return Change(UPDATE, {"at_id": id_, "value": value}, must_match_one_row)


def delete(id_: int, *, must_match_one_row: bool = True) -> Change:
    return Change(DELETE, {"at_id": id_}, must_match_one_row)


def applying(*changes: Change) -> Transaction[bool]:
    """A transaction of one Apply, whose result is the answer."""

    def transaction() -> Steps[bool]:
        made: bool = yield Apply(changes)
        return made

    return transaction


def reading_then_applying(*changes: Change) -> Transaction[bool]:
    """A transaction that reads first, which does not change what it applies."""

    def transaction() -> Steps[bool]:
        yield Read(ALL, {})
        made: bool = yield Apply(changes)
        return made

    return transaction


async def apply(executor: Executor, *changes: Change) -> bool:
    return await executor.write(applying(*changes))


async def stored(executor: Executor) -> dict[int, bytes]:
    rows: Sequence[Sequence[object]] = await executor.read(ALL, {})
    return {row[0]: row[1] for row in rows}  # type: ignore[misc]
