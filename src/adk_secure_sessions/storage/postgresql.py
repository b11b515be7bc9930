"""PostgreSQL by asyncpg: each read and each write is one statement on the driver itself.

A write is one statement with a data-modifying CTE for each change, each of which asks that the
one before it met its row.  Where a later one does not, the statement divides by zero: that
error takes back all of it.
"""

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy import PoolProxiedConnection
from sqlalchemy.dialects.postgresql import asyncpg
from sqlalchemy.util import await_only, greenlet_spawn

from adk_secure_sessions.storage.async_engine import AsyncEngineExecutor
from adk_secure_sessions.storage.connection import (
    Change,
    Conflict,
    Disconnected,
    Row,
    T,
    Transaction,
)
from adk_secure_sessions.storage.dialect import meaning

_dialect = asyncpg.dialect(paramstyle="named")  # type: ignore[no-untyped-call]
_PARAMETER = re.compile(r"(?<![:\w]):(\w+)")
_DIVISION_BY_ZERO = "22012"


class AsyncpgExecutor(AsyncEngineExecutor):
    """Takes connections from SQLAlchemy's pool and uses them without SQLAlchemy."""

    async def _transact(self, transaction: Transaction[T], *, writes: bool) -> T:
        async with self._alone(False):
            return await greenlet_spawn(self._in_greenlet, transaction)

    def _in_greenlet(self, transaction: Transaction[T]) -> T:
        try:
            pooled = self._connection()
        except (sa.exc.DBAPIError, OSError) as error:
            meant = meaning(error)
        except Exception as error:
            meant = _translated(error, lost=False)
        else:
            return _used(pooled, transaction)
        raise meant

    def _connection(self) -> PoolProxiedConnection:
        """A connection that the server has not closed, so far as is known without asking it."""
        while _driver(pooled := self._engine.sync_engine.raw_connection()).is_closed():
            pooled.invalidate()
        return pooled


def _used(pooled: PoolProxiedConnection, transaction: Transaction[T]) -> T:
    driver = _driver(pooled)
    try:
        result = transaction(_AsyncpgConnection(driver))
    except Exception as error:
        meant = _translated(error, lost=driver.is_closed())
    except BaseException:
        pooled.invalidate()  # the loop is ending, and the answer still on its way
        raise
    else:
        pooled.close()
        return result
    if isinstance(meant, Disconnected):
        pooled.invalidate()
    else:
        pooled.close()
    raise meant


def _driver(pooled: PoolProxiedConnection) -> Any:
    return pooled.driver_connection


def _translated(error: Exception, *, lost: bool) -> Exception:
    """The driver's errors as SQLAlchemy's, as everywhere else; without statement or values."""
    state = getattr(error, "sqlstate", None)
    if state == _DIVISION_BY_ZERO:
        return Conflict()
    if not isinstance(error, OSError) and not type(error).__module__.startswith("asyncpg"):
        return error
    kind: type[sa.exc.DBAPIError] = sa.exc.DBAPIError
    if lost or state is None:
        kind = sa.exc.OperationalError
    elif state.startswith("23"):
        kind = sa.exc.IntegrityError
    elif state.startswith("42"):
        kind = sa.exc.ProgrammingError
    wrapped = kind(None, None, error, hide_parameters=True, connection_invalidated=lost)
    return meaning(wrapped, lost=lost)


class _AsyncpgConnection:
    """A `Connection` on the driver; every statement is a transaction of its own."""

    __slots__ = ("_driver",)

    def __init__(self, driver: Any) -> None:
        self._driver = driver

    def all(self, statement: sa.Executable, parameters: Mapping[str, object]) -> Sequence[Row]:
        text, names = _query(statement)
        rows: Sequence[Row] = await_only(
            self._driver.fetch(text, *[parameters[name] for name in names])
        )
        return rows

    def apply(self, changes: Sequence[Change]) -> bool:
        text, names = _compound(tuple((change.statement, change.any_number) for change in changes))
        values = [changes[number].parameters[name] for number, name in names]
        met: int = await_only(self._driver.fetchval(text, *values))
        return bool(met)


class _Query(NamedTuple):
    text: str
    names: tuple[str, ...]


class _Compound(NamedTuple):
    text: str
    names: tuple[tuple[int, str], ...]  # which change, which of its parameters


@functools.cache
def _query(statement: sa.Executable) -> _Query:
    names: list[str] = []
    return _Query(_numbered(_sql(statement), names, 0), tuple(names))


@functools.cache
def _compound(statements: tuple[tuple[sa.Executable, bool], ...]) -> _Compound:
    members: list[str] = []
    names: list[tuple[int, str]] = []
    before = ""  # the last change that has to meet a row
    for number, (statement, any_number) in enumerate(statements):
        own: list[str] = []
        text = _numbered(_sql(statement), own, len(names))
        names += [(number, name) for name in own]
        if before:
            text = _only_if(text, f"EXISTS (SELECT FROM {before})")
        members.append(f"c{number} AS ({text} RETURNING 1)")
        if not any_number:
            before = f"c{number}"
    # Only names of our own are joined into the text: values are parameters.
    text = (
        f"WITH {', '.join(members)} SELECT CASE WHEN EXISTS (SELECT FROM c0) "  # noqa: S608
        f"THEN 1 / (SELECT count(*) FROM {before}) ELSE 0 END"
    )
    return _Compound(text, tuple(names))


def _sql(statement: sa.Executable) -> str:
    assert isinstance(statement, sa.ClauseElement)
    return str(statement.compile(dialect=_dialect))


def _numbered(text: str, names: list[str], offset: int) -> str:
    """*text* with `$1` for `:name`; *names* becomes theirs, in order."""

    def number(match: re.Match[str]) -> str:
        name = match[1]
        if name not in names:
            names.append(name)
        return f"${offset + names.index(name) + 1}"

    return _PARAMETER.sub(number, text)


def _only_if(text: str, condition: str) -> str:
    values = re.fullmatch(r"(INSERT INTO .*) VALUES \((.*)\)", text, re.DOTALL)
    return (
        f"{values[1]} SELECT {values[2]} WHERE {condition}" if values else f"{text} AND {condition}"
    )
