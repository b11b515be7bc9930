"""Walking through a table in batches by its key, with progress and a limit on speed."""

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

import sqlalchemy as sa

from adk_secure_sessions.db.protocol import Row
from adk_secure_sessions.maintenance.database import Database
from adk_secure_sessions.storage import (
    sessions,
)

Progress = Callable[[int, int], None]
Bounds = tuple[bool, bool]
BATCH = 100  # rows of apps, users and sessions


class Range(NamedTuple):
    """Keys above *after*, up to *last*; None is no limit."""

    after: int | bytes | None
    last: int | bytes | None

    @property
    def bounds(self) -> Bounds:
        """Which limits there are: what a statement for this range has to have."""
        return self.after is not None, self.last is not None

    @property
    def parameters(self) -> dict[str, object]:
        named = {"after": self.after, "last": self.last}
        return {name: value for name, value in named.items() if value is not None}


def within(key: sa.ColumnElement[Any], bounds: Bounds) -> list[sa.ColumnElement[bool]]:
    """Conditions that hold *key* in a range of these *bounds*."""
    conditions = []
    if bounds[0]:
        conditions.append(key > sa.bindparam("after", type_=key.type))
    if bounds[1]:
        conditions.append(key <= sa.bindparam("last", type_=key.type))
    return conditions


@functools.cache
def _boundary(key: sa.Column[Any], bounded: bool) -> sa.Select[Any]:
    step = sa.bindparam("step", type_=sa.BigInteger)
    query = sa.select(key).order_by(key).limit(sa.literal_column("1")).offset(step)
    return query.where(*within(key, (bounded, False)))


async def ranges(
    db: Database, key: sa.Column[Any], size: int = BATCH, after: int | bytes | None = None
) -> AsyncIterator[Range]:
    """Ranges of *key* that leave no value above *after* out, *size* rows in each but the last.

    The last key of a batch comes first, then whoever wants it reads up to there: MySQL takes
    no LIMIT in a subquery.
    """
    read = db.reader_of(key.table)
    while True:
        at = Range(after, None)
        query = _boundary(key, after is not None)
        rows = await read(query, {**at.parameters, "step": size - 1})
        # SQLite keeps any type in any column: whatever is no key of ours is read with the rest.
        last = next((row[0] for row in rows if isinstance(row[0], int | bytes)), None)
        yield Range(after, last)
        if last is None:
            return
        after = last


async def batches(
    db: Database,
    key: sa.Column[Any],
    statement: Callable[[Bounds], sa.Executable],
    size: int = BATCH,
) -> AsyncIterator[list[Row]]:
    """What *statement* finds in each range of *key*."""
    read = db.reader_of(key.table)
    async for keys in ranges(db, key, size):
        yield list(await read(statement(keys.bounds), keys.parameters))


def first(query: sa.Select[Any], limit: sa.ColumnElement[int]) -> sa.Select[Any]:
    """The first *limit* rows of *query*."""
    # Without an offset SQLAlchemy has SQLite take a parameter of its own for it.
    none: sa.ColumnElement[int] = sa.literal_column("0")
    return query.limit(limit).offset(none)


class Meter:
    """Counts rows, reports them, and holds them to so many a second."""

    def __init__(self, progress: Progress | None, total: int, rows_per_second: float | None):
        self._progress = progress
        self._total = total
        self._rate = rows_per_second
        self._began = time.monotonic()
        self._done = 0

    async def advance(self, rows: int = 1) -> None:
        self._done += rows
        if self._progress is not None and rows:
            # Others write meanwhile: there may be more than there were.
            self._total = max(self._total, self._done)
            self._progress(self._done, self._total)
        if self._rate:
            ahead = self._done / self._rate - (time.monotonic() - self._began)
            if ahead > 0:
                await asyncio.sleep(ahead)

    def finish(self) -> None:
        """There is no more, even if there were more at the start."""
        if self._progress is not None:
            self._progress(self._done, self._done)


async def count_events(db: Database) -> int:
    """By what their sessions say: the table itself is large, and to count it takes long."""
    ((number,),) = await db.read(_EVENTS, {})
    return int(min(max(number or 0, 0), _MOST))  # altered, they may even add up to infinity


_MOST = 10**15
# Not as integers: SQLite fails where altered ones add up to more than 64 bits hold.
_EVENTS = sa.select(sa.func.sum(sessions.c.revision * sa.literal_column("1.0")))


async def count_rows(db: Database, *tables: sa.Table) -> int:
    total = 0
    for table in tables:
        ((count,),) = await db.reader_of(table)(_count(table), {})
        total += int(count)
    return total


@functools.cache
def _count(table: sa.Table) -> sa.Select[Any]:
    return sa.select(sa.func.count()).select_from(table)
