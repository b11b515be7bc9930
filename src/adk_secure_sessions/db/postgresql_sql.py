"""PostgreSQL's SQL with numbered parameters, compiled once from SQLAlchemy's statements.

A write is one statement with a data-modifying CTE for each change, each of which asks that the
one before it met its row.  Where a later one does not, the statement divides by zero: that
error takes back all of it.
"""

import functools
import re
from typing import NamedTuple

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import asyncpg

DIVISION_BY_ZERO = "22012"  # SQLSTATE

_dialect = asyncpg.dialect(paramstyle="named")  # type: ignore[no-untyped-call]
_PARAMETER = re.compile(r"(?<![:\w]):(\w+)")
_INSERT = re.compile(r"(INSERT INTO .*) VALUES \((.*)\)", re.DOTALL)
_LOCK = " FOR "  # what a SELECT may end with


class Query(NamedTuple):
    """SQL, and the names of `$1`, `$2` and so on."""

    text: str
    names: list[str]


class Compound(NamedTuple):
    """SQL, and for `$1`, `$2` and so on which change they are of, and their name there."""

    text: str
    names: list[tuple[int, str]]


@functools.cache
def query_text(query: sa.Executable) -> Query:
    """*query* as it is sent."""
    names: list[str] = []
    return Query(_numbered(query, names, 0), names)


@functools.cache
def compound(changes: tuple[tuple[sa.Executable, bool], ...]) -> Compound:
    """All *changes* in one statement that returns 1, or 0 if the first met no row.

    Each is a statement and whether it may meet any number of rows instead of one.
    """
    members: list[str] = []
    names: list[tuple[int, str]] = []
    before = ""  # the last change that has to meet a row
    for number, (statement, any_number) in enumerate(changes):
        own: list[str] = []
        text = _numbered(statement, own, len(names))
        names += [(number, name) for name in own]
        if before:
            text = _only_if(text, f"EXISTS (SELECT FROM {before})")
        members.append(f"c{number} AS ({text} RETURNING 1)")
        if not any_number:
            before = f"c{number}"
    # Only names of our own are joined into the text: values are parameters.
    return Compound(
        f"WITH {', '.join(members)} SELECT CASE WHEN EXISTS (SELECT FROM c0) "  # noqa: S608
        f"THEN 1 / (SELECT count(*) FROM {before}) ELSE 0 END",
        names,
    )


def _numbered(statement: sa.Executable, names: list[str], offset: int) -> str:
    """The SQL of *statement* with `$1` for `:name`; *names* becomes theirs, in order."""

    def number(match: re.Match[str]) -> str:
        name = match[1]
        if name not in names:
            names.append(name)
        return f"${offset + names.index(name) + 1}"

    assert isinstance(statement, sa.ClauseElement)
    return _PARAMETER.sub(number, str(statement.compile(dialect=_dialect)))


def _only_if(text: str, condition: str) -> str:
    if values := _INSERT.fullmatch(text):
        return f"{values[1]} SELECT {values[2]} WHERE {condition}"
    body, lock, kind = text.partition(_LOCK)
    return f"{body} AND {condition}{lock}{kind}"
