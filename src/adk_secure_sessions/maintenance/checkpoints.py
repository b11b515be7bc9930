"""How far a rotation came, kept in `secure_meta` so that one that was killed goes on."""

import re
import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import NamedTuple

import sqlalchemy as sa

from adk_secure_sessions.errors import TamperedError
from adk_secure_sessions.keys.blind_index import BlindIndex
from adk_secure_sessions.maintenance.database import Database
from adk_secure_sessions.storage.tables import meta

_PREFIX = "rotation."
_WRITTEN = re.compile(r"(\d{1,19}) \d -?\d{1,19} [0-9a-f]{32}")


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
        fresh = Checkpoint(time.time_ns() // 1000)
        stored = None if restart else await self._stored()
        self.resumed = stored is not None
        if stored is None:
            await self.save(fresh)
        return stored or fresh

    async def save(self, checkpoint: Checkpoint) -> None:
        """Remember it."""
        if not self._dry_run:
            text = " ".join(map(str, checkpoint))
            value = f"{text} {(await self._seal(text)).hex()}"
            await self._db.change(partial(_replace, self._name, value))

    async def end(self) -> None:
        """There is nothing left to do."""
        if not self._dry_run:
            await self._db.change(partial(_replace, self._name, None))

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


def _replace(name: str, value: str | None, connection: sa.Connection) -> None:
    connection.execute(sa.delete(meta).where(meta.c.name == name))
    if value is not None:
        connection.execute(sa.insert(meta).values(name=name, value=value))
