"""Run a rotation in passes over all rows; a killed rotation continues from its checkpoint.

The time at which a rotation begins is called *since*.  The clocks of different machines may differ.
Therefore *since* is not always the present time: it is always later than the stored time of
creation of every existing key.  Each key that the rotation creates gets *since* or a later time as
its time of creation.  So the stored time alone tells whether a key is older than the rotation.
"""

import hmac
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import sqlalchemy as sa

from adk_secure_sessions.concurrency import gather_all
from adk_secure_sessions.errors import DecryptionError, Reason, SecureSessionError, TamperedError
from adk_secure_sessions.formats.times import time_now
from adk_secure_sessions.keys.blind_index import IndexMaster
from adk_secure_sessions.keys.data_keys import DataKeyRow
from adk_secure_sessions.keys.keyring import DATA_MASTER, MasterKeyRow, unwrap_master_key
from adk_secure_sessions.maintenance.counts import can_unwrap
from adk_secure_sessions.maintenance.database import Database
from adk_secure_sessions.maintenance.problems import Problem, Problems
from adk_secure_sessions.maintenance.progress import Meter, Progress
from adk_secure_sessions.maintenance.retire import Retirement
from adk_secure_sessions.maintenance.row_scan import flattened
from adk_secure_sessions.results import Result, counted, counter, listing, utc_text
from adk_secure_sessions.storage import clusters, meta
from adk_secure_sessions.storage.queries import DATA_KEYS, MASTER_KEYS
from adk_secure_sessions.storage.schema import data_keys
from adk_secure_sessions.storage.schema import keyring as keyring_table
from adk_secure_sessions.storage.survey import Survey
from adk_secure_sessions.storage.table_walk import pages

_MAX_PASSES = 3  # of a run
# The first microsecond of the year 10000, which `datetime` cannot represent.  A key with this time
# or a later time is rejected.
_YEAR_10000 = 253_402_300_800_000_000
NOT_VERIFIED = "; not verified: that needs --key"
OVERLAPPED = "another rotation was started meanwhile; run one rotation at a time"


class UnfinishedRotation(NamedTuple):
    """A rotation that is running, was killed, or could not replace every key.

    Attributes:
        name: The name of the rotation, `master` or `data`; any other name was inserted.
        since: When the rotation began, in microseconds since 1970, UTC; None if its checkpoint is
            malformed, or if its name is no rotation's.
        is_authentic: True if the stored checkpoint is authentic, False if it was modified.  None if
            no root keys were given, or if they do not unwrap the keyring.
        done: Only in the result of `status`, and if the checkpoint was not modified: for `data`,
            the number of records whose data key was created since the rotation began; for `master`,
            the number of data keys whose data master was created since then.
        total: In the same cases, the number of all records, or of all data keys.
    """

    name: str
    since: int | None
    is_authentic: bool | None
    done: int | None = None
    total: int | None = None

    @property
    def line(self) -> str:
        if self.name not in meta.ROTATIONS:
            row = f"{meta.TABLE} row {meta.ROTATION}{self.name}"
            return f"{self.name}: there is no such rotation; delete {row}"
        if self.done is None or self.total is None or self.since is None:
            return f"{self.name}: its checkpoint was tampered with; --restart begins a new rotation"
        percent = 100 * self.done // max(self.total, 1)
        total = counted(self.total, "data key" if self.name == "master" else "record")
        began = f"began {utc_text(self.since)}{'' if self.is_authentic else NOT_VERIFIED}"
        return f"{self.name}: {percent}%, {self.done:,} of {total}; {began}"


@dataclass
class Rotation(Result):
    """The result of `rotate_master` or `rotate_data`; after a dry run, the expected result.

    Attributes:
        since: When the rotation began, in microseconds since 1970, UTC.  It replaces the keys that
            were created before.
        resumed: True if this run continued an unfinished rotation from its stored checkpoint.
        bad: How many rows cannot be decrypted; they were left unchanged.
        left: How many data keys or records are still encrypted with an older key, or with another
            backend than `backend`; they include data keys in `bad`.  `rotate_data` does not count
            them in a dry run.
        problems: The first 1000 rows that cannot be decrypted.
        retirement: What `retire` did after the rotation; None unless the option --retire was given,
            or if something was left.
    """

    since: int = 0
    resumed: bool = False
    bad: int = counter("row", "cannot be decrypted, and left unchanged", is_failure=True)
    left: int = counter("row", "left under older keys", is_failure=True)
    problems: tuple[Problem, ...] = listing("bad")
    retirement: Retirement | None = None

    @property
    def succeeded(self) -> bool:
        return super().succeeded and (self.retirement is None or self.retirement.succeeded)

    def extra_lines(self, dry_run: bool) -> Iterator[str]:
        if dry_run:
            return
        if self.retirement is not None:
            yield from self.retirement.lines()
        elif self.bad and all(row.reason is Reason.UNKNOWN_BACKEND for row in self.problems):
            yield (
                "next: run this again with --also-backend, for the backend that encrypted these "
                "rows"
            )
        elif self.bad:
            yield (
                "next: repeat an `erase-user` that was interrupted, or run `verify` and restore "
                "the whole database from a backup (an older copy of a single row may be "
                "rejected); then run this again"
            )
        elif self.left:
            yield "next: once all services write with the same backend and root key, run this again"
        else:
            yield "next: `retire` deletes the keys that were replaced"


R = TypeVar("R", bound=Rotation)


class RotationRun(ABC, Generic[R]):
    """One run of a rotation, which replaces all keys that were created before `result.since`.

    A pass processes all rows, and then counts the rows that still use older keys.  A service that
    has not read a new key yet may write rows with an old key after the pass has processed them.
    Therefore a run has up to 3 passes.

    A rotation that has not ended has a checkpoint: the stored time *since*.  A dry run stores none.
    """

    def __init__(self, db: Database, name: str, result: R, *, dry_run: bool) -> None:
        self.result: R = result
        self._db = db
        self._name = name
        self._checkpoint = f"{meta.ROTATION}{name}"
        self._dry_run = dry_run
        self._meter = Meter()
        self._problems = Problems()  # problems of the latest pass

    async def run(
        self, *, restart: bool, progress: Progress | None, rows_per_second: float | None
    ) -> R:
        """Continue the unfinished rotation; begin a new one if there is none, or with *restart*."""
        self._meter = Meter(progress, await self._check_and_count_rows(), rows_per_second)
        await self._read_or_store_checkpoint(restart=restart)
        await self._before_passes()
        for _ in range(_MAX_PASSES):
            self._problems = Problems()
            has_replaced = await self._replace_old_keys()
            self.result.left = await self._count_left()
            # If a pass has replaced nothing, another pass would probably replace nothing, either.
            if self._dry_run or not (self.result.left and has_replaced):
                break
        await self._after_passes()
        self._problems.copy_into(self.result)
        if self._dry_run or self.result.left or self.result.bad:
            await self._reject_other_rotation()
        else:
            await self._db.runner.data_db.run_sync(self._remove_checkpoint)
        self._meter.finish()
        return self.result

    @abstractmethod
    async def _check_and_count_rows(self) -> int:
        """Check that the rotation can run; return the number of rows for the progress report."""

    @abstractmethod
    async def _before_passes(self) -> None:
        """Prepare the first pass; `run` calls this once, after it has read the checkpoint."""

    async def _after_passes(self) -> None:
        """Do what follows the passes; `run` keeps the checkpoint until this method returns."""

    @abstractmethod
    async def _replace_old_keys(self) -> bool:
        """Process all rows and replace their keys; return whether this pass has replaced any.

        An implementation calls `_reject_other_rotation` after each page of rows, and skips rows
        whose key is already new.  A run that continues another one starts at the first row:
        skipping is fast.
        """

    @abstractmethod
    async def _count_left(self) -> int:
        """Count the rows that use an older key.

        A dry run replaces nothing, so it counts none of the rows that it could replace.
        """

    async def _reject_other_rotation(self) -> None:
        """Raise SecureSessionError if another rotation was started after this one."""
        if self._dry_run:
            return
        for (value,) in await self._db.runner.data_db.read(meta.VALUE, {"name": self._checkpoint}):
            self._reject_other_checkpoint(value)

    async def _read_or_store_checkpoint(self, *, restart: bool) -> None:
        while True:
            # Select the row by its name, as `_store_checkpoint` does.  If only one of two different
            # queries found a row that an attacker has stored, this loop would be endless.
            own: dict[str, str] = {}
            if not restart:
                name = {"name": self._checkpoint}
                for (text,) in await self._db.runner.data_db.read(meta.VALUE, name):
                    own[self._checkpoint] = text
            index_master = (await self._db.keyring()).index_master
            for rotation in parse_checkpoints(own, index_master):
                if rotation.since is None or not rotation.is_authentic:
                    raise TamperedError(
                        "the checkpoint was modified; begin a new rotation, with --restart or "
                        "restart=True",
                        table=meta.TABLE,
                        row=self._checkpoint,
                    )
                self.result.since, self.result.resumed = rotation.since, True
                return
            self.result.since = await rotation_start_time(self._db)
            mac = index_master.mac("checkpoint", self._checkpoint, str(self.result.since))
            write = partial(self._store_checkpoint, f"{self.result.since} {mac.hex()}", restart)
            # If another run has just begun the rotation, continue the rotation of that run.
            if self._dry_run or await self._db.runner.data_db.run_sync(write):
                return

    def _store_checkpoint(self, value: str, replaces: bool, connection: sa.Connection) -> bool:
        old_value = meta.read(connection, self._checkpoint, lock=True) if replaces else None
        return meta.swap(connection, self._checkpoint, old_value, value)

    def _remove_checkpoint(self, connection: sa.Connection) -> None:
        self._reject_other_checkpoint(meta.read(connection, self._checkpoint, lock=True))
        meta.put(connection, self._checkpoint, None)

    def _reject_other_checkpoint(self, stored: object) -> None:
        # If no checkpoint is stored, another run has completed this rotation, which is no conflict.
        if stored is not None and not str(stored).startswith(f"{self.result.since} "):
            raise SecureSessionError(f"rotation {self._name}: {OVERLAPPED}")


def require_same_plaintext(
    table: str, row: object, plaintext: bytes, decrypt: Callable[[], bytes]
) -> None:
    """Raise SecureSessionError unless *decrypt* decrypts the new value of *row* to *plaintext*.

    Call this before the old value is replaced.  A third party's backend that fails for some sizes,
    or a fault of the memory, must not destroy data.
    """
    with suppress(DecryptionError):
        if decrypt() == plaintext:
            return
    raise SecureSessionError(
        f"{table} row {row}: its new value does not decrypt, so the row was not replaced: "
        "check the backend and the memory of this computer, then repeat the command"
    )


def store_master_keys(
    expected: Survey, new_rows: Sequence[MasterKeyRow], connection: sa.Connection
) -> bool:
    """Insert *new_rows*, or replace the rows with the same ids.

    Return False, and store nothing, if the keyring or the id of the database has changed from
    *expected*: the old root key may wrap an added row, and *new_rows* are bound to the id.
    """
    clusters.claim(connection, clusters.KEYRING_CLAIMS[0])
    database_id = meta.read(connection, meta.DATABASE_ID, lock=True)  # other callers wait for it
    stored_rows = {MasterKeyRow(*row) for row in connection.execute(MASTER_KEYS.with_for_update())}
    if stored_rows != set(expected.master_rows) or database_id != expected.existing_id.hex():
        # An earlier attempt may have been committed although its connection was lost.
        return stored_rows.issuperset(new_rows)
    ids = {row.id for row in stored_rows}
    for row in new_rows:
        update = sa.update(keyring_table).where(keyring_table.c.id == row.id)
        change = update if row.id in ids else sa.insert(keyring_table)
        connection.execute(change.values(row._asdict()))
    return True


# --- times ---------------------------------------------------------------------------------------


async def rotation_start_time(db: Database) -> int:
    """Return the present time or, if a key was created later, that time plus one microsecond.

    If a data key cannot be unwrapped, its time is ignored, because it may have been modified.
    """
    latest = time_now()
    for master in await authenticated_data_masters(db, await db.survey_existing()):
        latest = max(latest, time_after(keyring_table, master))
    keyring = await db.keyring()
    read, size = db.runner.key_db.read, db.limits.ids_per_statement
    later = pages(read, _KEYS_SINCE, data_keys.c.id, size, DataKeyRow, since=latest)
    async for key in flattened(later):
        if can_unwrap(key, keyring):
            latest = max(latest, time_after(data_keys, key))
    return latest


async def authenticated_data_masters(db: Database, survey: Survey) -> list[MasterKeyRow]:
    """Return the rows of all data masters in *survey*, after unwrapping proved them authentic."""
    rows = [row for row in survey.master_rows if row.purpose == DATA_MASTER]
    roots, database_id = db.runner.backends.roots, survey.existing_id
    await gather_all(*(unwrap_master_key(row, roots, database_id) for row in rows))
    return rows


def time_after(table: sa.Table, row: MasterKeyRow | DataKeyRow) -> int:
    """Return the time of creation in *row*, which must be authentic, plus one microsecond."""
    if row.created_at + 1 >= _YEAR_10000:
        detail = (
            "its time of creation is after the year 9999, so an attacker with a key that wraps it "
            "must have inserted it: delete this row"
        )
        raise TamperedError(detail, Reason.MALFORMED, table.name, row.id)
    return row.created_at + 1


_KEYS_SINCE = DATA_KEYS.where(data_keys.c.created_at >= sa.bindparam("since", type_=sa.BigInteger))


# --- stored checkpoints --------------------------------------------------------------------------


def parse_checkpoints(
    meta_texts: Mapping[str, str], index_master: IndexMaster | None
) -> Iterator[UnfinishedRotation]:
    """Yield the rotations with a checkpoint in *meta_texts*; *index_master* authenticates them."""
    for name, value in sorted(meta_texts.items(), key=str):
        if str(name).startswith(meta.ROTATION):
            rotation = str(name).removeprefix(meta.ROTATION)
            match = _CHECKPOINT.fullmatch(str(value)) if rotation in meta.ROTATIONS else None
            since = int(match["since"]) if match else _YEAR_10000
            is_authentic = None
            if index_master is not None:
                mac = index_master.mac("checkpoint", name, str(since)).hex()
                is_authentic = match is not None and hmac.compare_digest(match["mac"], mac)
            begun = since if since < _YEAR_10000 else None
            yield UnfinishedRotation(rotation, begun, is_authentic)


# The form of a checkpoint: the time *since* in microseconds, and a MAC in hexadecimal.
_CHECKPOINT = re.compile(r"(?P<since>0|[1-9][0-9]{0,17}) (?P<mac>[0-9a-f]{32})")
