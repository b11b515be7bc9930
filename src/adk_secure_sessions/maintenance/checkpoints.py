"""How far a rotation came, kept in `secure_meta` so that one that was killed goes on."""

import re
import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import NamedTuple

import sqlalchemy as sa

from adk_secure_sessions.errors import SecureSessionError, TamperedError
from adk_secure_sessions.keys.blind_index import BlindIndex
from adk_secure_sessions.maintenance.database import Database
from adk_secure_sessions.storage import (
    data_keys,
    keyring,
    meta,
)

_PREFIX = "rotation."
ANOTHER = "another was begun meanwhile; run one at a time"
_WRITTEN = re.compile(r"(\d{1,19}) \d -?\d{1,19} [0-9a-f]{32}")


_SKEW = 24 * 60 * 60 * 1_000_000  # microseconds that a clock may be ahead
_LATEST = [
    sa.select(sa.func.max(table.c.created_at)).where(
        table.c.created_at <= sa.bindparam("limit", type_=sa.BigInteger)
    )
    for table in (keyring, data_keys)
]


class Checkpoint(NamedTuple):
    """A rotation that has begun.

    Attributes:
        since: Keys made before are replaced; microseconds since 1970, UTC.
        stage: Which of its tables it is at.
        after: The row that it did last there; -1: none.
    """

    since: int
    stage: int = 0
    after: int = -1


class Unfinished(NamedTuple):
    """A rotation that has not ended: it runs, was killed, or could not do all.

    Attributes:
        rotation: `master` or `data`.
        since: When it began, in microseconds since 1970, UTC; None: what is stored is malformed.
        genuine: Whether that is as a rotation wrote it; None where no root key opens the keyring.
    """

    rotation: str
    since: int | None
    genuine: bool | None


class Checkpoints:
    """The one of a rotation called *name*; with *dry_run* none is written.

    `resumed` tells whether it was begun before.
    """

    def __init__(self, db: Database, name: str, *, dry_run: bool) -> None:
        self._db = db
        self._name = f"{_PREFIX}{name}"
        self._dry_run = dry_run
        self.resumed = False

    async def begin(self, *, restart: bool) -> Checkpoint:
        """Where a rotation that did not end left off, or a new one; *restart*: a new one anyhow.

        Raises:
            TamperedError: what is stored is not what was written.
        """
        now = time.time_ns() // 1000
        latest = [
            row[0] or 0
            for query in _LATEST
            for row in await self._db.read_keys(query, {"limit": now + _SKEW})
        ]
        # Of machines whose clock is ahead, too.
        fresh = Checkpoint(max(now, *(latest_one + 1 for latest_one in latest)))
        stored = None if restart else await self._stored()
        self.resumed = stored is not None
        if stored is None:
            await self._write(fresh, None)
        return stored or fresh

    async def save(self, checkpoint: Checkpoint) -> None:
        """Remember it.  Raises SecureSessionError if another rotation was begun meanwhile."""
        await self._write(checkpoint, checkpoint.since)

    async def end(self, since: int, *, complete: bool) -> None:
        """Forget it; or if something is left, have the next run look at all again.

        Raises like `save`.
        """
        await self._write(None if complete else Checkpoint(since), since)

    async def _write(self, checkpoint: Checkpoint | None, expected: int | None) -> None:
        if self._dry_run:
            return
        value = None
        if checkpoint is not None:
            text = " ".join(map(str, checkpoint))
            value = f"{text} {(await self._seal(text)).hex()}"
        if not await self._db.change(partial(_replace, self._name, value, expected)):
            raise SecureSessionError(f"rotation {self._name.removeprefix(_PREFIX)}: {ANOTHER}")

    async def _stored(self) -> Checkpoint | None:
        value = (await self._db.survey()).meta.get(self._name)
        if value is None:
            return None
        if not _is_genuine(await self._index(), self._name, str(value)):
            raise TamperedError(
                f"secure_meta row {self._name}: it was altered; begin the rotation anew, "
                "with --restart or restart=True"
            )
        return Checkpoint(*map(int, str(value).split(" ")[:-1]))

    async def _seal(self, text: str) -> bytes:
        return (await self._index()).checkpoint(self._name, text)

    async def _index(self) -> BlindIndex:
        return (await self._db.keys()).keyring.index


def is_since(since: int, created_at: int) -> bool:
    """Whether a key of that time is of a rotation that began at *since*, or came after."""
    return since <= created_at <= time.time_ns() // 1000 + _SKEW


def unfinished(stored: Mapping[str, str], index: BlindIndex | None) -> Iterator[Unfinished]:
    """What `secure_meta` says of rotations; *index*, if there is one, tells whether it is true."""
    for name, value in sorted(stored.items()):
        if str(name).startswith(_PREFIX):
            written = _WRITTEN.fullmatch(str(value))
            genuine = None if index is None else _is_genuine(index, name, str(value))
            since = int(written[1]) if written else None
            yield Unfinished(str(name).removeprefix(_PREFIX), since, genuine)


def _is_genuine(index: BlindIndex, name: str, value: str) -> bool:
    text, _, seal = value.rpartition(" ")
    return seal == index.checkpoint(name, text).hex()


def _replace(name: str, value: str | None, expected: int | None, connection: sa.Connection) -> bool:
    """Whether it was the one that began at *expected*; None is any."""
    query = sa.select(meta.c.value).where(meta.c.name == name).with_for_update()
    stored = connection.scalar(query)
    # One that ended leaves none: whoever else was at it has done all there was to do.
    if expected is not None and stored is not None and not str(stored).startswith(f"{expected} "):
        return False
    connection.execute(sa.delete(meta).where(meta.c.name == name))
    if value is not None:
        connection.execute(sa.insert(meta).values(name=name, value=value))
    return True
