"""The data keys of given owners, read by themselves: they may be in another database."""

import functools
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any

import sqlalchemy as sa

from adk_secure_sessions.db.protocol import Parameters, Row
from adk_secure_sessions.keys.data_keys import DataKeyRow
from adk_secure_sessions.storage.schema import data_keys

# Rows as DataKeyRow has them.
DATA_KEYS = sa.select(*(data_keys.c[name] for name in DataKeyRow._fields))
# How many values a statement takes: a user and their app, or as many as there are.
_FEW, _MANY = 2, 200

Read = Callable[[sa.Executable, Parameters], Awaitable[Sequence[Row]]]


async def keys_of(read: Read, owners: Iterable[object]) -> list[DataKeyRow]:
    """All generations, by *read*, which is of the key tables."""
    found = []
    # SQLite keeps any type in any column: what is no tag has no keys.
    for tags in chunks({owner for owner in owners if isinstance(owner, bytes)}):
        rows = await read(_query(len(tags)), parameters(tags))
        found += [DataKeyRow(*row) for row in rows]
    return found


def chunks(values: Iterable[Any]) -> Iterator[list[Any]]:
    """*values* in lists of two lengths, so that there are few statements; the last one repeats."""
    remaining = list(values)
    while remaining:
        size = _FEW if len(remaining) <= _FEW else _MANY
        part, remaining = remaining[:size], remaining[size:]
        yield part + part[-1:] * (size - len(part))


def among(column: sa.ColumnElement[Any], number: int) -> sa.ColumnElement[bool]:
    """That *column* is one of *number* parameters, as `parameters` names them."""
    return column.in_([sa.bindparam(f"v{n}", type_=column.type) for n in range(number)])


def parameters(values: Sequence[object]) -> dict[str, object]:
    return {f"v{n}": value for n, value in enumerate(values)}


@functools.cache
def _query(number: int) -> sa.Select[Any]:
    return DATA_KEYS.where(among(data_keys.c.owner, number))
