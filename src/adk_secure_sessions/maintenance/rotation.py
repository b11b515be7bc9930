"""Passes of a rotation over all its rows, and the checkpoint that lets a killed one continue."""

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from functools import partial
from typing import NamedTuple

import sqlalchemy as sa

from adk_secure_sessions.errors import SecureSessionError, TamperedError
from adk_secure_sessions.keys.blind_index import BlindIndex
from adk_secure_sessions.maintenance.database import Database
from adk_secure_sessions.maintenance.engine import Meter, Progress
from adk_secure_sessions.maintenance.problems import Problems
from adk_secure_sessions.storage import (
    data_keys,
    keyring,
    meta,
)

_PREFIX = "rotation."  # of the names of checkpoints in `secure_meta`
_PASSES = 3
_SKEW = 24 * 60 * 60 * 1_000_000  # microseconds by which the clock of another machine may be ahead
OVERLAPPED = "another rotation was started meanwhile; run one at a time"


class Checkpoint(NamedTuple):
    """How far a rotation came.

    Attributes:
        since: Keys made before are replaced; microseconds since 1970, UTC.
        stage: The index of the table that is being walked.
        after: The last row of that table that is done; -1 for none.
    """

    since: int
    stage: int = 0
    after: int = -1


class UnfinishedRotation(NamedTuple):
    """A rotation that has not ended: it is running, was killed, or could not replace every key.

    Attributes:
        rotation: `master` or `data`.
        since: When it began, in microseconds since 1970, UTC; None if its checkpoint is malformed.
        genuine: Whether the checkpoint is as a rotation wrote it; None if no root key that was
            given decrypts the keyring.
    """

    rotation: str
    since: int | None
    genuine: bool | None


class Rotation(ABC):
    """One run of a rotation.

    It walks all rows and counts what is left under older keys.  Services that have not yet
    taken up the new key may leave rows behind the walk, so it walks again, up to three times.
    """

    def __init__(self, db: Database, name: str, *, dry_run: bool) -> None:
        self._db = db
        self._dry_run = dry_run
        self._checkpoints = Checkpoints(db, name, dry_run=dry_run)
        self._since = 0
        self._meter = Meter(None, 0, None)
        self._problems = Problems()  # of the latest pass
        self._left = 0  # after the latest pass

    async def run(
        self, *, restart: bool, progress: Progress | None, rows_per_second: float | None
    ) -> None:
        """Continue the rotation that has not ended, or begin one; *restart*: begin one in any case.

        Raises:
            TamperedError: the checkpoint is not as a rotation wrote it.
            SecureSessionError: another rotation was started meanwhile.
        """
        self._meter = Meter(progress, await self._count_rows(), rows_per_second)
        at = await self._checkpoints.begin(restart=restart)
        self._since = at.since
        await self._begin()
        for _ in range(_PASSES):
            self._problems = Problems()
            await self._walk(at)
            self._left = await self._count_left()
            if self._dry_run or not self._may_walk_again():
                break
            at = Checkpoint(at.since)
        complete = not (self._left or self._problems.count)
        await self._checkpoints.end(at.since, complete=complete)
        self._meter.finish()

    @abstractmethod
    async def _count_rows(self) -> int:
        """Count the rows that the meter is to report."""

    async def _begin(self) -> None:  # noqa: B027 - not every rotation has something to do
        """Do what comes between the checkpoint and the first pass."""

    @abstractmethod
    async def _walk(self, at: Checkpoint) -> None:
        """Replace the keys of all rows after *at*."""

    @abstractmethod
    async def _count_left(self) -> int:
        """Count the rows that are still under older keys; in a dry run, those to be replaced."""

    @abstractmethod
    def _may_walk_again(self) -> bool:
        """Whether another pass may replace what is left."""


class Checkpoints:
    """Reads and writes the checkpoint of the rotation called *name*; a dry run writes none.

    `resumed` tells whether `begin` found a rotation that had not ended.
    """

    def __init__(self, db: Database, name: str, *, dry_run: bool) -> None:
        self._db = db
        self._name = f"{_PREFIX}{name}"
        self._dry_run = dry_run
        self.resumed = False

    async def begin(self, *, restart: bool) -> Checkpoint:
        """Return the stored checkpoint; if there is none, or with *restart*, store a new one.

        Raises:
            TamperedError: the stored checkpoint is not as a rotation wrote it.
        """
        stored = None if restart else await self._stored()
        self.resumed = stored is not None
        if stored is not None:
            return stored
        fresh = Checkpoint(await self._later_than_all_keys())
        await self._write(fresh, None)
        return fresh

    async def save(self, checkpoint: Checkpoint) -> None:
        """Store *checkpoint*.

        Raises:
            SecureSessionError: another rotation was started meanwhile.
        """
        await self._write(checkpoint, checkpoint.since)

    async def end(self, since: int, *, complete: bool) -> None:
        """Delete the checkpoint; if not *complete*, have the next run start from the first row.

        Raises:
            SecureSessionError: another rotation was started meanwhile.
        """
        await self._write(None if complete else Checkpoint(since), since)

    async def _later_than_all_keys(self) -> int:
        """The present, or a later moment if keys come from a machine whose clock is ahead."""
        now = time.time_ns() // 1000
        moments = [now]
        for query in _LATEST:
            ((latest,),) = await self._db.read_keys(query, {"limit": now + _SKEW})
            moments.append((latest or 0) + 1)
        return max(moments)

    async def _write(self, checkpoint: Checkpoint | None, expected: int | None) -> None:
        if self._dry_run:
            return
        value = None
        if checkpoint is not None:
            text = " ".join(map(str, checkpoint))
            mac = (await self._index()).checkpoint(self._name, text)
            value = f"{text} {mac.hex()}"
        if not await self._db.change(partial(_replace, self._name, value, expected)):
            raise SecureSessionError(f"rotation {self._name.removeprefix(_PREFIX)}: {OVERLAPPED}")

    async def _stored(self) -> Checkpoint | None:
        value = (await self._db.survey()).meta.get(self._name)
        if value is None:
            return None
        if not _is_genuine(await self._index(), self._name, str(value)):
            raise TamperedError(
                "it was modified; begin the rotation again, with --restart or restart=True",
                table=meta.name,
                row=self._name,
            )
        return Checkpoint(*map(int, str(value).split(" ")[:-1]))

    async def _index(self) -> BlindIndex:
        return (await self._db.keys()).keyring.index


def is_since(since: int, created_at: int) -> bool:
    """Whether a key made at *created_at* belongs to the rotation that began at *since*, or later.

    A key from the future, beyond what clocks differ by, does not.
    """
    return since <= created_at <= time.time_ns() // 1000 + _SKEW


def unfinished(stored: Mapping[str, str], index: BlindIndex | None) -> Iterator[UnfinishedRotation]:
    """Yield the rotations of which *stored*, the content of `secure_meta`, has a checkpoint.

    *index*, if it is known, tells whether the checkpoint is genuine.
    """
    for name, value in sorted(stored.items()):
        if str(name).startswith(_PREFIX):
            written = _FORM.fullmatch(str(value))
            since = int(written["since"]) if written else None
            genuine = None if index is None else _is_genuine(index, name, str(value))
            yield UnfinishedRotation(str(name).removeprefix(_PREFIX), since, genuine)


_FORM = re.compile(r"(?P<since>\d{1,19}) \d -?\d{1,19} [0-9a-f]{32}")
_LATEST = [
    sa.select(sa.func.max(table.c.created_at)).where(
        table.c.created_at <= sa.bindparam("limit", type_=sa.BigInteger)
    )
    for table in (keyring, data_keys)
]


def _is_genuine(index: BlindIndex, name: str, value: str) -> bool:
    text, _, mac = value.rpartition(" ")
    return mac == index.checkpoint(name, text).hex()


def _replace(name: str, value: str | None, expected: int | None, connection: sa.Connection) -> bool:
    """Replace the checkpoint if its rotation began at *expected*, or in any case if that is None.

    Returns whether it did.
    """
    query = sa.select(meta.c.value).where(meta.c.name == name).with_for_update()
    stored = connection.scalar(query)
    # If there is none, another run of this rotation has ended it: that run left nothing to do.
    if expected is not None and stored is not None and not str(stored).startswith(f"{expected} "):
        return False
    connection.execute(sa.delete(meta).where(meta.c.name == name))
    if value is not None:
        connection.execute(sa.insert(meta).values(name=name, value=value))
    return True
