"""What SQLite needs, whether by threads of our own or by a caller's engine."""

import functools

import sqlalchemy as sa
from sqlalchemy.dialects import sqlite

_dialect = sqlite.dialect(paramstyle="named")


@functools.cache
def sqlite_sql(statement: sa.Executable) -> str:
    """*statement* as SQLite's SQL with named parameters, compiled once."""
    assert isinstance(statement, sa.ClauseElement)
    return str(statement.compile(dialect=_dialect))


def any_text(data: bytes) -> str:
    """A text factory that takes any bytes.

    Text where a binary value belongs is to be refused by us, not by SQLite's decoder, which
    quotes it.
    """
    return str(data, "latin-1")


def is_unique_violation(error: BaseException | None) -> bool:
    """Whether an IntegrityError means that the row is there already; if the driver tells."""
    name = getattr(error, "sqlite_errorname", "SQLITE_CONSTRAINT_UNIQUE")
    return name in ("SQLITE_CONSTRAINT_UNIQUE", "SQLITE_CONSTRAINT_PRIMARYKEY")
