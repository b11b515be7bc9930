"""Walk over tables in pages by a unique key."""

import functools
import itertools
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import sqlalchemy as sa

from adk_secure_sessions.db.protocol import Reader, Row
from adk_secure_sessions.errors import Reason, TamperedError
from adk_secure_sessions.storage import queries as sql

R = TypeVar("R")
KeyColumn = sa.ColumnElement[Any]
KeyColumns = KeyColumn | tuple[KeyColumn, ...]


class RowRange(NamedTuple):
    """The keys above *after*, up to and including *last*; None means no limit."""

    after: object | None
    last: object | None

    @property
    def parameters(self) -> dict[str, object]:
        named = {"after": self.after, "last": self.last}
        return {name: value for name, value in named.items() if value is not None}

    def conditions(self, key: KeyColumn) -> list[sa.ColumnElement[bool]]:
        after, last = (sa.bindparam(name, type_=key.type) for name in ("after", "last"))
        conditions = []
        if self.after is not None:
            conditions.append(key > after)
        if self.last is not None:
            conditions.append(key <= last)
        return conditions

    async def read(
        self, reader: Reader, query: sa.Select[Any], key: KeyColumn, **parameters: object
    ) -> Sequence[Row]:
        """Return the rows of *query*, a constant or cached, whose *key* is in this range."""
        has_limits = RowRange(*(None if limit is None else 0 for limit in self))
        return await reader(_within(query, key, has_limits), self.parameters | parameters)


async def pages(
    read: Reader,
    query: sa.Select[Any],
    key: KeyColumns,
    size: int,
    make_row: Callable[..., R],
    **parameters: object,
) -> AsyncIterator[list[R]]:
    """Yield the rows of *query* in the order of a unique key, *size* rows at a time.

    Rows that are inserted or deleted meanwhile do not disturb the walk.  *query* selects the
    columns of the key first.  It must be a constant or cached, because each form of it is kept.
    *make_row* is called with the columns of each row.
    """
    columns = key if isinstance(key, tuple) else (key,)
    after: Sequence[object] | None = None
    while True:
        position = {f"after_{number}": value for number, value in enumerate(after or ())}
        statement = _page(query, columns, size, after is not None)
        rows = await read(statement, {**parameters, **position})
        if rows:
            yield [make_row(*values) for values in rows]
        if len(rows) < size:
            return
        after = _last_key(rows, columns)


async def rows_where(
    read: Reader, query: sa.Select[Any], key: KeyColumns, values: Iterable[Any]
) -> list[Row]:
    """Return the rows of *query*, a constant or cached, whose *key* has one of *values*.

    If *key* is a tuple of columns, each value is a tuple.
    """
    rows: list[Row] = []
    for part in sql.padded_chunks(values):
        flat = list(itertools.chain.from_iterable(part)) if isinstance(key, tuple) else part
        rows += await read(_where(query, key, len(part)), sql.list_parameters(flat))
    return rows


async def row_ranges(read: Reader, key: sa.Column[Any], size: int) -> AsyncIterator[RowRange]:
    """Yield ranges of *size* values of *key* each, for several statements; see `pages`."""
    after = None
    async for values in pages(read, _distinct_keys(key), key, size, lambda value: value):
        if len(values) == size:
            yield RowRange(after, values[-1])
            after = values[-1]
    yield RowRange(after, None)


def _last_key(rows: Sequence[Row], key: tuple[KeyColumn, ...]) -> Sequence[object]:
    """Return the key of the last row; TamperedError if it has a type that no page can follow."""
    end: Sequence[object] = rows[-1][: len(key)]
    for column, value in zip(key, end, strict=True):
        if not isinstance(value, int | float | bytes) and not isinstance(column.type, sa.String):
            raise TamperedError(
                "its key has a wrong type: delete this row",
                Reason.MALFORMED,
                getattr(getattr(column, "table", None), "name", None),
                str(value),
            )
    return end


@functools.cache
def _within(query: sa.Select[Any], key: KeyColumn, has_limits: RowRange) -> sa.Select[Any]:
    return query.where(*has_limits.conditions(key))


@functools.cache
def _where(query: sa.Select[Any], key: KeyColumns, number: int) -> sa.Select[Any]:
    if not isinstance(key, tuple):
        return query.where(sql.is_one_of(key, number))
    # For a list of tuples, SQLite would scan the whole table.
    positions = itertools.count()
    alternatives = [
        sa.and_(*(part == sa.bindparam(f"v{next(positions)}", type_=part.type) for part in key))
        for _ in range(number)
    ]
    return query.where(sa.or_(*alternatives))


@functools.cache
def _page(
    query: sa.Select[Any], key: tuple[KeyColumn, ...], size: int, has_after: bool
) -> sa.Select[Any]:
    if has_after:
        later: list[sa.ColumnElement[bool]] = []
        for number, column in enumerate(key):
            before = [_position(key, n) == key[n] for n in range(number)]
            later.append(sa.and_(*before, column > _position(key, number)))
        query = query.where(sa.or_(*later))
    return sql.first_rows(query.order_by(*key), size)


def _position(key: tuple[KeyColumn, ...], number: int) -> sa.BindParameter[Any]:
    return sa.bindparam(f"after_{number}", type_=key[number].type)


@functools.cache
def _distinct_keys(key: sa.Column[Any]) -> sa.Select[Any]:
    return sa.select(key).distinct()
