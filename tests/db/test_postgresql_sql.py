"""Queries, and several changes as one statement, as SQL for asyncpg.

What such a statement does on a server is tested in `test_executors`.
"""

import re
from collections.abc import Iterator, Mapping

import sqlalchemy as sa

from adk_secure_sessions.db.postgresql_sql import compile_apply, compile_read
from adk_secure_sessions.storage import queries as sql
from tests.db.support import DELETE, INSERT, UPDATE, things


def test_parameters_are_numbered_in_order_through_all_changes() -> None:
    text, sources = compile_apply(((UPDATE, True), (INSERT, True), (DELETE, False)))
    assert sources == [(0, "value"), (0, "at_id"), (1, "id"), (1, "value"), (2, "at_id")]
    assert re.findall(r"\$\d+", text) == [f"${n}" for n in range(1, 6)]
    assert re.search(r"SET value=\$1::BYTEA WHERE things.id = \$2::BIGINT RETURNING 1\)", text)


def test_repeated_name_is_one_parameter_within_a_change_and_another_in_the_next() -> None:
    twice = sa.delete(things).where(
        sa.or_(things.c.id == sa.bindparam("at_id"), -things.c.id == sa.bindparam("at_id"))
    )
    text, sources = compile_apply(((twice, True), (twice, True)))
    assert sources == [(0, "at_id"), (1, "at_id")]
    assert [text.count(f"${n}") for n in (1, 2, 3)] == [2, 2, 0]
    text, names = compile_read(
        sa.select(things).where(things.c.id.between(sa.bindparam("n"), sa.bindparam("n")))
    )
    assert names == ["n"]
    assert "BETWEEN $1::BIGINT AND $1::BIGINT" in text


def test_each_change_runs_only_if_the_last_before_it_that_must_match_a_row_did() -> None:
    text, _ = compile_apply(((UPDATE, True), (DELETE, False), (INSERT, True), (DELETE, True)))
    words = " ".join(text.split())
    members = re.findall(r"change_(\d) AS \((.*?) RETURNING 1\)", words)
    assert [
        (number, re.findall(r"\(SELECT count\(\*\) AS \w+ FROM change_(\d)\) = 1", body))
        for number, body in members
    ] == [("0", []), ("1", ["0"]), ("2", ["0"]), ("3", ["2"])]
    assert re.search(
        r"CASE WHEN \(EXISTS \(SELECT 1 FROM change_0\)\) "
        r"THEN 1 / CASE WHEN \(\(SELECT count\(\*\) AS \w+ FROM change_3\) = 1\) THEN 1 ELSE 0 END",
        words,
    )
    assert "VALUES" not in words


def test_rows_of_a_change_are_one_array_for_each_column() -> None:
    text, sources = compile_apply(((UPDATE, True), (INSERT, False)), frozenset({1}))
    assert sources == [(0, "value"), (0, "at_id"), (1, "id"), (1, "value")]
    words = " ".join(text.split())
    assert "FROM unnest($3::BIGINT[], $4::BYTEA[]) AS new_rows(id, value)" in words
    assert "WHERE (SELECT count(*) AS count_1 FROM change_0) = 1 RETURNING 1)" in words


def test_lock_of_an_insert_from_a_select_stays_behind_the_guard() -> None:
    """It holds off whoever erases the user until the session is there to be erased, too."""
    text, _ = compile_apply(((UPDATE, True), (sql.INSERT_SESSION_OF_USER, True)))
    words = " ".join(text.split())
    assert "FROM change_0) = 1 FOR KEY SHARE OF secure_users RETURNING 1)" in words


def test_compiling_leaves_the_statements_as_they_were() -> None:
    statements = (UPDATE, DELETE, sql.INSERT_SESSION_OF_USER)
    before = [str(statement) for statement in statements]
    compile_apply(tuple((statement, True) for statement in statements))
    assert [str(statement) for statement in statements] == before


def queries_of_storage() -> Iterator[sa.SelectBase]:
    for value in vars(sql).values():
        for found in value.values() if isinstance(value, Mapping) else [value]:
            if isinstance(found, sa.SelectBase):
                yield found


def test_every_value_of_the_queries_is_a_parameter() -> None:
    """So each query is compiled once, and its text names no user."""
    queries = list(queries_of_storage())
    assert len(queries) > 10
    for query in queries:
        text, names = compile_read(query)
        assert not re.search(r"(?<!:):(?!:)\w", text)
        assert set(re.findall(r"\$\d+", text)) == {f"${n + 1}" for n in range(len(names))}
        assert compile_read(query) is compile_read(query)  # compiled once
