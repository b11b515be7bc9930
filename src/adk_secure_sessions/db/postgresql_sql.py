"""SQLAlchemy's statements as SQL for asyncpg, with parameters `$1`, `$2` and so on; compiled once.

All changes of an `Apply` become one statement, which takes one round trip.  For an UPDATE and an
INSERT it is, shortened:

    WITH change_0 AS (UPDATE sessions SET ... WHERE ... RETURNING 1),
         change_1 AS (INSERT INTO events (...) SELECT $5, $6
                      WHERE EXISTS (SELECT 1 FROM change_0) RETURNING 1)
    SELECT CASE WHEN EXISTS (SELECT 1 FROM change_0)
                THEN 1 / (SELECT count(*) FROM change_1) ELSE 0 END

- A change runs only if the change before it that must match a row did.  So the changes run in
  order, and none of them runs if the first one matched no row: the answer is 0 then.
- If a later change that must match a row does not, the last such change does not run either.
  Dividing by its count of 0 is an error, and PostgreSQL rolls back the whole statement.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import asyncpg
from sqlalchemy.sql import visitors

DIVISION_BY_ZERO = "22012"  # SQLSTATE

_Statement: TypeAlias = sa.Insert | sa.Update | sa.Delete

_dialect = asyncpg.dialect()  # type: ignore[no-untyped-call]
_ONE: sa.ColumnElement[int] = sa.literal_column("1", sa.Integer)
_ZERO: sa.ColumnElement[int] = sa.literal_column("0", sa.Integer)


class PreparedSql(NamedTuple):
    """SQL text, and the names of its parameters in the order of `$1`, `$2` and so on."""

    text: str
    names: Sequence[str]


class PreparedChanges(NamedTuple):
    """SQL text, and its parameters in order: each as the index of its change and its name there."""

    text: str
    sources: Sequence[tuple[int, str]]


@functools.cache
def read_sql(query: sa.Executable) -> PreparedSql:
    """Compile one query."""
    return PreparedSql(*_compiled(query))


@functools.cache
def apply_sql(changes: tuple[tuple[sa.Executable, bool], ...]) -> PreparedChanges:
    """Compile *changes* into one statement that returns 1, or 0 if the first matched no row.

    Compiling takes 1 to 5 ms, which happens once for each kind of write in a process.

    Args:
        changes: Each change's statement, and whether it must match a row, as the first one must.

    Raises:
        TypeError: A statement is none of INSERT, UPDATE and DELETE.
        ValueError: The first change need not match a row; or an INSERT has values of its own
            instead of a parameter for each column.
    """
    if not changes or not changes[0][1]:
        raise ValueError("the first change must be one that must match a row")
    members: list[sa.CTE] = []
    guard: sa.CTE | None = None  # the last change so far that must match a row
    sources: dict[str, tuple[int, str]] = {}
    for index, (executable, must_match_row) in enumerate(changes):
        statement = _with_own_parameters(_changing(executable), index, sources)
        if guard is not None:
            statement = _only_if(_has_rows(guard), statement)
        members.append(statement.returning(_ONE).cte(f"change_{index}"))
        if must_match_row:
            guard = members[-1]
    assert guard is not None
    count = sa.select(sa.func.count()).select_from(guard).scalar_subquery()
    answer = sa.case((_has_rows(members[0]), _ONE // count), else_=_ZERO)
    text, names = _compiled(sa.select(answer).add_cte(*members))
    return PreparedChanges(text, [sources[name] for name in names])


def _compiled(statement: sa.Executable) -> tuple[str, Sequence[str]]:
    assert isinstance(statement, sa.ClauseElement)
    compiled: Any = statement.compile(dialect=_dialect)
    return compiled.string, compiled.positiontup


def _changing(statement: sa.Executable) -> _Statement:
    """Return *statement* if it is one that `_only_if` can guard, an INSERT with a SELECT.

    VALUES takes no WHERE, so an INSERT of parameters becomes an INSERT of a SELECT of parameters.
    """
    if not isinstance(statement, sa.Insert | sa.Update | sa.Delete):
        raise TypeError(f"a change is an INSERT, UPDATE or DELETE, not {type(statement).__name__}")
    if not isinstance(statement, sa.Insert) or statement.select is not None:
        return statement
    table = statement.table
    if not statement.compare(sa.insert(table)):
        raise ValueError("an INSERT must take each column as a parameter, or have a SELECT")
    parameters = [sa.bindparam(column.name, type_=column.type) for column in table.columns]
    return sa.insert(table).from_select(list(table.columns), sa.select(*parameters))


def _with_own_parameters(
    statement: _Statement, index: int, sources: dict[str, tuple[int, str]]
) -> _Statement:
    """Copy *statement* with other names for its parameters, which two changes may share.

    *sources* gets the index and the old name for each new name.
    """

    def rename(parameter: sa.BindParameter[Any]) -> None:
        name = f"{index}_{parameter.key}"
        sources[name] = (index, parameter.key)
        parameter.key = name

    return visitors.cloned_traverse(statement, {}, {"bindparam": rename})


def _has_rows(member: sa.CTE) -> sa.ColumnElement[bool]:
    return sa.exists(sa.select(_ONE).select_from(member))


def _only_if(condition: sa.ColumnElement[bool], statement: _Statement) -> _Statement:
    """Add *condition* to *statement*, which is a copy."""
    if not isinstance(statement, sa.Insert):
        return statement.where(condition)
    assert statement.select is not None
    statement.select = statement.select.where(condition)
    return statement
