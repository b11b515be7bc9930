"""Several changes as one statement of PostgreSQL: its text, and what it does on a server."""

import re
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine

from adk_secure_sessions.db.postgresql import AsyncpgExecutor
from adk_secure_sessions.db.postgresql_sql import apply_sql, read_sql
from adk_secure_sessions.db.protocol import (
    Apply,
    Change,
    Conflict,
    Read,
    Steps,
    UniqueViolation,
)
from adk_secure_sessions.storage import queries as sql
from tests.servers import PostgreSQL

things = sa.Table(
    "things",
    sa.MetaData(),
    sa.Column("id", sa.BigInteger, primary_key=True),
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


def change(id_: int, value: bytes = b"changed", *, any_number: bool = False) -> Change:
    return Change(UPDATE, {"at_id": id_, "value": value}, any_number)


def delete(id_: int, *, any_number: bool = False) -> Change:
    return Change(DELETE, {"at_id": id_}, any_number)


def test_parameters_are_numbered_in_order_through_all_changes() -> None:
    text, sources = apply_sql(((UPDATE, True), (INSERT, True), (DELETE, False)))
    assert sources == [(0, "value"), (0, "at_id"), (1, "id"), (1, "value"), (2, "at_id")]
    assert re.findall(r"\$\d+", text) == [f"${n}" for n in range(1, 6)]
    assert re.search(r"SET value=\$1::BYTEA WHERE things.id = \$2::BIGINT RETURNING 1\)", text)


def test_repeated_name_is_one_parameter_within_a_change_and_another_in_the_next() -> None:
    twice = sa.delete(things).where(
        sa.or_(things.c.id == sa.bindparam("at_id"), -things.c.id == sa.bindparam("at_id"))
    )
    text, sources = apply_sql(((twice, True), (twice, True)))
    assert sources == [(0, "at_id"), (1, "at_id")]
    assert [text.count(f"${n}") for n in (1, 2, 3)] == [2, 2, 0]
    text, names = read_sql(
        sa.select(things).where(things.c.id.between(sa.bindparam("n"), sa.bindparam("n")))
    )
    assert names == ["n"]
    assert "BETWEEN $1::BIGINT AND $1::BIGINT" in text


def test_each_change_runs_only_if_the_last_before_it_that_must_match_a_row_did() -> None:
    text, _ = apply_sql(((UPDATE, True), (DELETE, False), (INSERT, True), (DELETE, True)))
    words = " ".join(text.split())
    members = re.findall(r"change_(\d) AS \((.*?) RETURNING 1\)", words)
    assert [
        (number, re.findall(r"EXISTS \(SELECT 1 FROM change_(\d)\)", body))
        for number, body in members
    ] == [("0", []), ("1", ["0"]), ("2", ["0"]), ("3", ["2"])]
    assert re.search(
        r"CASE WHEN \(EXISTS \(SELECT 1 FROM change_0\)\) "
        r"THEN 1 / \(SELECT count\(\*\) AS \w+ FROM change_3\) ELSE 0 END",
        words,
    )
    assert "VALUES" not in words


def test_lock_of_an_insert_from_a_select_stays_behind_the_guard() -> None:
    """It holds off whoever erases the user until the session is there to be erased, too."""
    text, _ = apply_sql(((UPDATE, True), (sql.INSERT_SESSION_OF_USER, True)))
    words = " ".join(text.split())
    assert "(EXISTS (SELECT 1 FROM change_0)) FOR KEY SHARE OF secure_users RETURNING 1)" in words


def test_compiling_leaves_the_statements_as_they_were() -> None:
    statements = (UPDATE, DELETE, sql.INSERT_SESSION_OF_USER)
    before = [str(statement) for statement in statements]
    apply_sql(tuple((statement, True) for statement in statements))
    assert [str(statement) for statement in statements] == before


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ((), "first change"),
        (((DELETE, False), (UPDATE, True)), "first change"),
        (((INSERT.values(id=1), True),), "each column as a parameter"),
        (((INSERT.values([{"id": 1}, {"id": 2}]), True),), "each column as a parameter"),
        (((ALL, True),), "not Select"),
        (((sa.text("DELETE FROM things"), True),), "not TextClause"),
    ],
)
def test_changes_that_cannot_become_one_statement_are_rejected(
    changes: tuple[tuple[sa.Executable, bool], ...], error: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        apply_sql(changes)


def test_value_is_never_part_of_the_text() -> None:
    """All that differs from one operation to the next is a parameter."""
    queries: list[sa.Executable] = [sql.EVENT_AT]
    for forms in (
        sql.SESSION_WITH_ALL_EVENTS,
        sql.SESSION_WITH_LAST_EVENTS,
        sql.SESSIONS_OF_USER,
        sql.SESSIONS_OF_APP,
    ):
        queries += [forms[False], forms[True]]
    for query in queries:
        text, names = read_sql(query)
        assert not re.search(r"(?<!:):(?!:)\w", text)
        assert set(re.findall(r"\$\d+", text)) == {f"${n + 1}" for n in range(len(names))}
        assert read_sql(query) is read_sql(query)  # compiled once


@pytest.fixture
async def executor(postgresql: PostgreSQL) -> AsyncIterator[AsyncpgExecutor]:
    with postgresql.database() as url:
        engine = create_async_engine(url.set(drivername="postgresql+asyncpg"))
        executor = AsyncpgExecutor(engine, owned=True)
        await executor.define(things.create, commit=True)
        assert await apply(executor, insert(1, b"old"))
        assert await apply(executor, insert(2, b"old"))
        yield executor
        await executor.close()


async def apply(executor: AsyncpgExecutor, *changes: Change) -> bool:
    def transaction() -> Steps[bool]:
        made: bool = yield Apply(changes)
        return made

    return await executor.write(transaction)


async def stored(executor: AsyncpgExecutor) -> dict[int, bytes]:
    return dict(await executor.read(ALL, {}))  # type: ignore[arg-type]


BEFORE = {1: b"old", 2: b"old"}
DONE: list[tuple[Sequence[Change], dict[int, bytes]]] = [
    ([insert(3)], {**BEFORE, 3: b"new"}),
    ([change(1)], {**BEFORE, 1: b"changed"}),
    ([delete(1), insert(3), change(2)], {2: b"changed", 3: b"new"}),
    ([change(1), delete(9, any_number=True), insert(3)], {**BEFORE, 1: b"changed", 3: b"new"}),
    ([change(1), delete(9, any_number=True)], {**BEFORE, 1: b"changed"}),
    ([change(1, b"x\0y"), change(2, b"")], {1: b"x\0y", 2: b""}),
]


@pytest.mark.parametrize(("changes", "after"), DONE)
async def test_changes_that_meet_their_rows_are_made(
    executor: AsyncpgExecutor, changes: Sequence[Change], after: dict[int, bytes]
) -> None:
    assert await apply(executor, *changes) is True
    assert await stored(executor) == after


@pytest.mark.parametrize(
    "changes",
    [
        [change(9)],
        [delete(9), insert(3), change(1)],
        [change(9), delete(1, any_number=True)],
        [change(9), insert(1)],  # not even tried
    ],
)
async def test_first_change_that_meets_nothing_is_told_and_stores_nothing(
    executor: AsyncpgExecutor, changes: Sequence[Change]
) -> None:
    assert await apply(executor, *changes) is False
    assert await stored(executor) == BEFORE


@pytest.mark.parametrize("position", [1, 2, 3])
@pytest.mark.parametrize("miss", [change(9), delete(9)])
async def test_later_change_that_meets_nothing_is_a_conflict_and_stores_nothing(
    executor: AsyncpgExecutor, position: int, miss: Change
) -> None:
    changes = [change(1), insert(3), delete(2)]
    changes.insert(position, miss)
    with pytest.raises(Conflict):
        await apply(executor, *changes)
    assert await stored(executor) == BEFORE


@pytest.mark.parametrize("position", range(3))
async def test_row_that_is_there_already_takes_back_everything(
    executor: AsyncpgExecutor, position: int
) -> None:
    changes = [change(2), insert(3)]
    changes.insert(position, insert(1))
    with pytest.raises(UniqueViolation):
        await apply(executor, *changes)
    assert await stored(executor) == BEFORE


async def test_transaction_reads_and_then_changes(executor: AsyncpgExecutor) -> None:
    def transaction() -> Steps[list[Any]]:
        rows = yield Read(ALL, {})
        yield Apply([change(row[0], row[1] + b"er") for row in rows])
        return [row[0] for row in rows]

    assert await executor.write(transaction) == [1, 2]
    assert await stored(executor) == {1: b"older", 2: b"older"}
