"""Compile SQLAlchemy statements to SQL for asyncpg, with parameters `$1`, `$2` and so on.

All changes of an `Apply` become one statement, which takes one round trip.  A shortened
example of an UPDATE and an INSERT:

    WITH change_0 AS (UPDATE sessions SET ... WHERE ... RETURNING 1),
         change_1 AS (INSERT INTO events (...) SELECT $5, $6
                      WHERE (SELECT count(*) FROM change_0) = 1 RETURNING 1)
    SELECT CASE WHEN EXISTS (SELECT 1 FROM change_0)
                THEN 1 / CASE WHEN (SELECT count(*) FROM change_1) = 1 THEN 1 ELSE 0 END
                ELSE 0 END

- A change runs only if the last preceding change with *must_match_one_row* has matched one row.
  Therefore, the changes run in order.  If the first change matches no row, the other changes do not
  run, and the answer is 0.
- If another change with *must_match_one_row* does not match one row, the changes after it do not
  run.  The last change with *must_match_one_row* has then not matched one row.  Dividing by 0 is an
  error, so PostgreSQL rolls the whole statement back.
"""

import functools
from collections.abc import Sequence
from typing import Any, TypeAlias

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY, asyncpg
from sqlalchemy.sql import visitors

DIVISION_BY_ZERO = "22012"  # SQLSTATE

_Statement: TypeAlias = sa.Insert | sa.Update | sa.Delete

_dialect = asyncpg.dialect()  # type: ignore[no-untyped-call]
_ONE: sa.ColumnElement[int] = sa.literal_column("1", sa.Integer)
_ZERO: sa.ColumnElement[int] = sa.literal_column("0", sa.Integer)


# Compiling takes 1 to 5 ms, so the results of the next two functions are cached.


@functools.cache
def compile_read(query: sa.Executable) -> tuple[str, Sequence[str]]:
    """Compile *query*; return it and the names of its parameters in the order of `$1`, `$2`..."""
    assert isinstance(query, sa.ClauseElement)
    compiled: Any = query.compile(dialect=_dialect)
    return compiled.string, compiled.positiontup


@functools.cache
def compile_apply(
    changes: tuple[tuple[sa.Executable, bool], ...], with_rows: frozenset[int] = frozenset()
) -> tuple[str, Sequence[tuple[int, str]]]:
    """Compile *changes*, the statement and the *must_match_one_row* of each, into one statement.

    Return it and the sources of `$1`, `$2` and so on: the index of a change, and the name of its
    parameter.  The statement returns 1 if all changes were made, and 0 if the first change matched
    no row.  Each parameter of the changes *with_rows* is an array of the values of one column.
    """
    members: list[sa.CTE] = []
    guard: sa.CTE | None = None  # the latest change whose *must_match_one_row* is True
    sources: dict[str, tuple[int, str]] = {}
    assert changes[0][1], "the first change must have must_match_one_row"
    for index, (executable, must_match_one_row) in enumerate(changes):
        changing = _changing(executable, index in with_rows)
        statement = _with_own_parameters(changing, index, sources)
        if guard is not None:
            statement = _only_if(_has_one_row(guard), statement)
        members.append(statement.returning(_ONE).cte(f"change_{index}"))
        if must_match_one_row:
            guard = members[-1]
    assert guard is not None
    made = sa.case((_has_one_row(guard), _ONE), else_=_ZERO)
    answer = sa.case(
        (sa.exists(sa.select(_ONE).select_from(members[0])), _ONE // made), else_=_ZERO
    )
    text, names = compile_read(sa.select(answer).add_cte(*members))
    return text, [sources[name] for name in names]


def _changing(statement: sa.Executable, has_rows: bool) -> _Statement:
    """Return *statement* in a form that can have a WHERE clause.

    INSERT ... VALUES becomes INSERT ... SELECT of the same parameters, or of the rows in arrays.
    """
    assert isinstance(statement, sa.Insert | sa.Update | sa.Delete)
    if not isinstance(statement, sa.Insert) or statement.select is not None:
        return statement
    table = statement.table
    assert statement.compare(sa.insert(table)), "it must take each column as a parameter"
    columns = list(table.columns)
    if has_rows:
        arrays = [sa.bindparam(column.name, type_=ARRAY(column.type)) for column in columns]
        names = [column.name for column in columns]
        rows = sa.func.unnest(*arrays).table_valued(*names).render_derived(name="new_rows")
        return sa.insert(table).from_select(columns, sa.select(*rows.c))
    parameters = [sa.bindparam(column.name, type_=column.type) for column in columns]
    return sa.insert(table).from_select(columns, sa.select(*parameters))


def _with_own_parameters(
    statement: _Statement, index: int, sources: dict[str, tuple[int, str]]
) -> _Statement:
    """Return a copy of *statement* whose parameters have new names, which are unique.

    For each new name, add *index* and the old name to *sources*.
    """

    def rename(parameter: sa.BindParameter[Any]) -> None:
        name = f"{index}_{parameter.key}"
        sources[name] = (index, parameter.key)
        parameter.key = name

    return visitors.cloned_traverse(statement, {}, {"bindparam": rename})


def _has_one_row(member: sa.CTE) -> sa.ColumnElement[bool]:
    return sa.select(sa.func.count()).select_from(member).scalar_subquery() == _ONE


def _only_if(condition: sa.ColumnElement[bool], statement: _Statement) -> _Statement:
    """Return *statement* with *condition* in its WHERE clause; an INSERT is modified in place."""
    if not isinstance(statement, sa.Insert):
        return statement.where(condition)
    assert statement.select is not None
    statement.select = statement.select.where(condition)
    return statement
