"""Sealing records anew with their owner's current data key, by compare-and-swap."""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import sqlalchemy as sa

from adk_secure_sessions.db.protocol import Row
from adk_secure_sessions.errors import SecureSessionError
from adk_secure_sessions.formats.records import HEADER_LENGTH, header
from adk_secure_sessions.keys.data_keys import StagedKeys
from adk_secure_sessions.maintenance.coverage import start_of
from adk_secure_sessions.maintenance.database import Database
from adk_secure_sessions.maintenance.problems import UNREADABLE, Problems
from adk_secure_sessions.storage import (
    apps,
    bases,
    events,
    naming,
    sessions,
    users,
    witnesses,
)

RECORDS = 64  # at once
BYTES = 4 * 1024 * 1024  # at once, if it is more than one record


class Sealed(NamedTuple):
    """A table's sealed column, the key of its rows, and what each write of a row changes."""

    table: sa.Table
    column: sa.Column[Any]
    key: tuple[sa.Column[Any], ...]
    version: sa.Column[Any] | None


APPS = Sealed(apps, apps.c.state, (apps.c.id,), apps.c.version)
USERS = Sealed(users, users.c.state, (users.c.id,), users.c.version)
SESSIONS = Sealed(sessions, sessions.c.state, (sessions.c.id,), sessions.c.revision)
BASES = Sealed(bases, bases.c.state, (bases.c.session_row,), bases.c.revision)
EVENTS = Sealed(events, events.c.event, (events.c.session_row, events.c.seq), None)
WITNESSES = Sealed(witnesses, witnesses.c.seal, (witnesses.c.tag,), witnesses.c.number)


class Record(NamedTuple):
    """A stored record, and what tells the place that it is bound to, or raises DecryptionError."""

    kind: Sealed
    key: tuple[Any, ...]
    version: int
    where: Callable[[], bytes]
    stored: bytes

    @property
    def name(self) -> str:
        """Of its row, for messages."""
        parts = (part.hex() if isinstance(part, bytes) else str(part) for part in self.key)
        return ", ".join(parts)


class Resealer:
    """Seals records of one owner after another, and counts them."""

    def __init__(self, db: Database, problems: Problems, *, dry_run: bool) -> None:
        self._db = db
        self._problems = problems
        self._dry_run = dry_run
        self.count = 0

    async def reseal(
        self, keys: StagedKeys, owner: bytes, found: Iterable[Record], target: int | None
    ) -> None:
        """Seal those of *found* that are not under *target*, the id of the owner's current key.

        One that cannot be opened is named and left alone.  One that was changed meanwhile is
        left as it is.  Each is read back, and opened, before it counts.

        Raises:
            SecureSessionError: what was written does not read back.
        """
        old: list[tuple[Record, bytes, bytes]] = []  # with its place and plaintext
        for record in found:
            try:
                with naming(record.kind.table.name, record.name):
                    if key_id(record.stored) != target:
                        where = record.where()
                        old.append((record, where, keys.open(owner, where, record.stored)))
            except UNREADABLE as error:
                self._problems.refused(error, record.kind.table.name, record.name)
        if self._dry_run or not old:
            self.count += len(old)
            return
        new = [keys.seal(owner, where, plaintext) for _, where, plaintext in old]
        records = [record for record, *_ in old]
        await self._db.change(partial(_replace, list(zip(records, new, strict=True))))
        stored = await self._read_back(records)
        for (record, where, plaintext), sealed in zip(old, new, strict=True):
            if stored.get((record.kind.table.name, record.key)) == sealed:
                if keys.open(owner, where, sealed) != plaintext:
                    raise SecureSessionError(
                        f"{record.kind.table.name} row {record.name} does not read back as it was"
                    )
                self.count += 1

    async def _read_back(self, records: list[Record]) -> dict[tuple[str, tuple[Any, ...]], bytes]:
        found = {}
        for kind in dict.fromkeys(record.kind for record in records):
            keys = [record.key for record in records if record.kind is kind]
            for *key, sealed in await read(self._db, kind, keys, (kind.column,)):
                found[kind.table.name, tuple(key)] = sealed
        return found


def key_id(stored: object) -> int | None:
    """The id of the data key that a record names; None for what is no record."""
    found = header(stored)
    return found[1] if found else None


def chunks(sizes: Sequence[tuple[tuple[Any, ...], int]]) -> Iterator[list[tuple[Any, ...]]]:
    """Keys in groups for which memory is not too large; *sizes* are of their records, in bytes."""
    chunk: list[tuple[Any, ...]] = []
    total = 0
    for key, size in sizes:
        if chunk and (len(chunk) == RECORDS or total + size > BYTES):
            yield chunk
            chunk, total = [], 0
        chunk.append(key)
        total += size
    if chunk:
        yield chunk


async def read(
    db: Database, kind: Sealed, keys: Sequence[tuple[Any, ...]], columns: tuple[sa.Column[Any], ...]
) -> list[Row]:
    """The rows of *keys*, each as its key and *columns*."""
    rows: list[Row] = []
    for start in range(0, len(keys), RECORDS):
        part = list(keys[start : start + RECORDS])
        part += part[:1] * (RECORDS - len(part))  # one statement, whatever their number
        parameters = {
            f"k{number}_{place}": value
            for number, key in enumerate(part)
            for place, value in enumerate(key)
        }
        rows += await db.read(_by_keys(kind, columns), parameters)
    return rows


@functools.cache
def _by_keys(kind: Sealed, columns: tuple[sa.Column[Any], ...]) -> sa.Select[Any]:
    wanted = [
        sa.and_(
            *(
                column == sa.bindparam(f"k{number}_{place}", type_=column.type)
                for place, column in enumerate(kind.key)
            )
        )
        for number in range(RECORDS)
    ]
    return sa.select(*kind.key, *columns).where(sa.or_(*wanted))


def _replace(changes: list[tuple[Record, bytes]], connection: sa.Connection) -> None:
    for kind in dict.fromkeys(record.kind for record, _ in changes):
        parameters = []
        for record, sealed in changes:
            if record.kind is kind:
                values = {f"at_{place}": value for place, value in enumerate(record.key)}
                values |= {"at_version": record.version, "at_start": record.stored[:HEADER_LENGTH]}
                parameters.append({**values, "new": sealed})
        connection.execute(_swap(kind), parameters)


@functools.cache
def _swap(kind: Sealed) -> sa.Update:
    """Replace a record that is still the one that was read.

    Its header and its row's version say so: each write changes the latter, and each new sealing
    of the same version changes the key that the former names.
    """
    conditions = [
        column == sa.bindparam(f"at_{place}", type_=column.type)
        for place, column in enumerate(kind.key)
    ]
    if kind.version is not None:
        conditions.append(kind.version == sa.bindparam("at_version"))
    conditions.append(start_of(kind.column) == sa.bindparam("at_start", type_=sa.LargeBinary))
    new = sa.bindparam("new", type_=kind.column.type)
    return sa.update(kind.table).where(*conditions).values({kind.column: new})
