"""Run a rotation in passes over all rows, with a checkpoint from which a next run continues."""

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

_PREFIX = "rotation."  # `secure_meta` stores a checkpoint under this prefix and a rotation name
_PASSES = 3
_SKEW = 24 * 60 * 60 * 1_000_000  # microseconds that the clock of another machine may be ahead
OVERLAPPED = "another rotation was started meanwhile; run one at a time"


class Checkpoint(NamedTuple):
    """How far a rotation has come.

    Attributes:
        since: When the rotation began, in microseconds since 1970, UTC.  It replaces all keys that
            were created before.
        stage: The index of the table that the rotation is processing: for `data`, 0 is the table
            of apps and 1 the table of users.
        after: The id of the last processed row of that table; -1 if no row is processed yet.
    """

    since: int
    stage: int = 0
    after: int = -1


class UnfinishedRotation(NamedTuple):
    """A rotation that is running, was killed, or could not replace every key.

    Attributes:
        rotation: The name of the rotation, `master` or `data`.
        since: When the rotation began, in microseconds since 1970, UTC; None if its checkpoint is
            malformed.
        genuine: True if the stored checkpoint is authentic, False if it was modified.  None if
            the root keys that were given do not decrypt the keyring.
    """

    rotation: str
    since: int | None
    genuine: bool | None


class Rotation(ABC):
    """One run of a rotation.

    A pass processes all rows, and then counts the rows that are still under older keys.  A service
    that has not read a new key yet may use an old key for rows that the pass has already processed.
    So there are up to 3 passes.
    """

    def __init__(self, db: Database, name: str, *, dry_run: bool) -> None:
        self._db = db
        self._dry_run = dry_run
        self._checkpoints = Checkpoints(db, name, dry_run=dry_run)
        self._since = 0
        self._meter = Meter(None, 0, None)
        self._problems = Problems()  # problems of the latest pass
        self._left = 0  # rows under older keys after the latest pass

    async def run(
        self, *, restart: bool, progress: Progress | None, rows_per_second: float | None
    ) -> None:
        """Continue the unfinished rotation; without one, or with *restart*, begin a new rotation.

        Raises:
            TamperedError: The stored checkpoint was modified.
            SecureSessionError: Another rotation was started while this one ran.
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
        """Return the total number of rows for the progress report."""

    async def _begin(self) -> None:  # noqa: B027 - not every rotation has something to do
        """Prepare the first pass; `run` calls this once, after it has read the checkpoint."""

    @abstractmethod
    async def _walk(self, at: Checkpoint) -> None:
        """Process all rows after the position *at*: replace their keys, unless in a dry run."""

    @abstractmethod
    async def _count_left(self) -> int:
        """Count the rows still under older keys; in a dry run, the rows that would be replaced."""

    @abstractmethod
    def _may_walk_again(self) -> bool:
        """Return whether another pass may replace keys of rows that are left."""


class Checkpoints:
    """Reads and writes the checkpoint of the rotation called *name*; a dry run writes nothing.

    `resumed` is True if `begin` found the checkpoint of an unfinished rotation.
    """

    def __init__(self, db: Database, name: str, *, dry_run: bool) -> None:
        self._db = db
        self._name = f"{_PREFIX}{name}"
        self._dry_run = dry_run
        self.resumed: bool = False

    async def begin(self, *, restart: bool) -> Checkpoint:
        """Return the stored checkpoint; without one, or with *restart*, store and return a new one.

        Raises:
            TamperedError: The stored checkpoint was modified.
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
            SecureSessionError: Another rotation was started after this one began.
        """
        await self._write(checkpoint, checkpoint.since)

    async def end(self, since: int, *, complete: bool) -> None:
        """If *complete*, delete the checkpoint; otherwise, reset its position to the first row.

        Raises:
            SecureSessionError: Another rotation was started after this one began.
        """
        await self._write(None if complete else Checkpoint(since), since)

    async def _later_than_all_keys(self) -> int:
        """Return the current time or, if the newest key is from the future, a later time.

        Such a key was created on a machine whose clock is ahead.  Times that are more than `_SKEW`
        ahead are ignored.
        """
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
                "the checkpoint was modified; begin a new rotation, with --restart or restart=True",
                table=meta.name,
                row=self._name,
            )
        return Checkpoint(*map(int, str(value).split(" ")[:-1]))

    async def _index(self) -> BlindIndex:
        return (await self._db.keys()).keyring.index


def is_since(since: int, created_at: int) -> bool:
    """Return whether a key that was created at *created_at* is not older than *since*.

    Return False for a time that is more than `_SKEW` in the future: clocks do not differ that much.
    """
    return since <= created_at <= time.time_ns() // 1000 + _SKEW


def unfinished(stored: Mapping[str, str], index: BlindIndex | None) -> Iterator[UnfinishedRotation]:
    """Yield the rotations that have a checkpoint in *stored*, the values of `secure_meta` by name.

    *index* authenticates checkpoints; None if the keyring cannot be unwrapped.
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
    """Replace the checkpoint *name* by *value*, or delete it if *value* is None.

    If *expected* is not None and the stored checkpoint is of a rotation that began at another time,
    leave the checkpoint unchanged and return False.
    """
    query = sa.select(meta.c.value).where(meta.c.name == name).with_for_update()
    stored = connection.scalar(query)
    # If no checkpoint is stored, another run has completed this rotation: that is no conflict.
    if expected is not None and stored is not None and not str(stored).startswith(f"{expected} "):
        return False
    connection.execute(sa.delete(meta).where(meta.c.name == name))
    if value is not None:
        connection.execute(sa.insert(meta).values(name=name, value=value))
    return True
