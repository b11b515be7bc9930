"""How far a rotation came, kept in `secure_meta` so that one that was killed goes on."""

import time
from functools import partial
from typing import NamedTuple

import sqlalchemy as sa

from adk_secure_sessions.errors import TamperedError
from adk_secure_sessions.maintenance.database import Database
from adk_secure_sessions.storage.tables import meta


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


class Checkpoints:
    """The one of a rotation called *name*; with *dry_run* none is written."""

    def __init__(self, db: Database, name: str, *, dry_run: bool) -> None:
        self._db = db
        self._name = f"rotation.{name}"
        self._dry_run = dry_run

    async def begin(self, *, restart: bool) -> Checkpoint:
        """Where a rotation that did not end left off, or a new one; *restart*: a new one anyhow.

        Raises:
            TamperedError: what is stored is not what was written.
        """
        fresh = Checkpoint(time.time_ns() // 1000)
        stored = None if restart else await self._stored()
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
        text, _, seal = str(value).rpartition(" ")
        if seal != (await self._seal(text)).hex():
            raise TamperedError(
                f"secure_meta row {self._name}: it was altered; begin the rotation anew, "
                "with --restart or restart=True"
            )
        return Checkpoint(*map(int, text.split(" ")))

    async def _seal(self, text: str) -> bytes:
        keyring = (await self._db.keys()).keyring
        return keyring.index.checkpoint(self._name, text)


def _replace(name: str, value: str | None, connection: sa.Connection) -> None:
    connection.execute(sa.delete(meta).where(meta.c.name == name))
    if value is not None:
        connection.execute(sa.insert(meta).values(name=name, value=value))
