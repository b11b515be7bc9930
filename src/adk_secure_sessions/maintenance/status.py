"""Report the keys, records and unfinished rotations of a database; decrypt no record."""

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import sqlalchemy as sa

from adk_secure_sessions.audit import logged_command
from adk_secure_sessions.errors import DecryptionError, WrongKeyError
from adk_secure_sessions.hiding import hides_locals
from adk_secure_sessions.keys.blind_index import IndexMaster
from adk_secure_sessions.keys.keyring import DATA_MASTER, MasterKeyRow, unwrap_master_key
from adk_secure_sessions.maintenance.counts import (
    DataKeyCount,
    RecordCount,
    count_data_keys,
    count_records,
    estimate_rows,
    select_count,
)
from adk_secure_sessions.maintenance.database import Database
from adk_secure_sessions.maintenance.progress import Meter, Progress
from adk_secure_sessions.maintenance.rotation import (
    NOT_VERIFIED,
    UnfinishedRotation,
    parse_checkpoints,
)
from adk_secure_sessions.results import Result, aligned, counted, utc_text
from adk_secure_sessions.storage import meta
from adk_secure_sessions.storage.features import index_rows
from adk_secure_sessions.storage.schema import (
    INDEX_MARK,
    SEALED_TABLES,
    apps,
    audit_records,
    data_keys,
    migrated,
    state_index,
    users,
)
from adk_secure_sessions.storage.survey import FeatureName, Survey

_INDENT = "  "
_AGAIN = "it runs or was stopped; running {} again is safe and continues it"
_FUTURE = "a clock is or was wrong, and `status` exits 1 until then"
_MAX_CLOCK_DIFFERENCE = 600  # seconds, between machines whose clocks are right


class MasterKey(NamedTuple):
    """A row of `secure_keyring`.

    Attributes:
        id: The id of the master key.
        purpose: `data` for a data master, `index` for the index master.
        root_key_id: The id of the root key that wraps the master key; `none` if the master key is
            stored as plaintext.
        created_at: When the master key was created, in microseconds since 1970, UTC.
        age: Seconds since `created_at`.  An age below -600 is a problem: the clock was ahead when
            the key was created, or this clock is behind.
        is_unwrapped: Whether the given root keys can unwrap the master key; None if no root keys
            were given.
    """

    id: int
    purpose: str
    root_key_id: str
    created_at: int
    age: float
    is_unwrapped: bool | None

    @property
    def is_of_future(self) -> bool:
        return self.age < -_MAX_CLOCK_DIFFERENCE

    @property
    def cells(self) -> tuple[object, ...]:
        age = f"{abs(self.age) / 86400:.0f} days"
        age = f"{age} in the future: {_FUTURE}" if self.is_of_future else f"{age} old"
        unwrapped = {None: "", True: "unwrapped", False: "cannot be unwrapped"}[self.is_unwrapped]
        created = f"of {utc_text(self.created_at, '%Y-%m-%d')}"
        return self.purpose, self.id, f"under {self.root_key_id}", created, age, unwrapped


class MigrationStatus(NamedTuple):
    """The progress of a migration into the database.

    Attributes:
        sessions: How many sessions were copied, including those that were deleted afterwards.
        tombstones: The number of sessions that were deleted before they were copied, plus the
            number of users that were erased.  `migrate` does not copy these sessions and users.
        is_complete: Whether `secure_meta` has the mark that ends the migration: a row that is
            stored when a comparison has found no difference.  With this mark,
            `PlaintextFallbackService` does not read the source any more.
        is_authentic: Whether this mark is authentic; None if there is no mark, if no root keys were
            given, or if they do not unwrap the keyring.
    """

    sessions: int
    tombstones: int
    is_complete: bool
    is_authentic: bool | None

    @property
    def line(self) -> str:
        counts = f"{counted(self.sessions, 'session')} copied"
        counts = f"migration: {counts}, {counted(self.tombstones, 'tombstone')}"
        if not self.is_complete:
            return f"{counts}; not complete: a service with plaintext fallback reads the source"
        if self.is_authentic is False:
            return (
                f"{counts}; its mark of completion was tampered with: run `migrate compare` again"
            )
        return f"{counts}; complete{'' if self.is_authentic else NOT_VERIFIED}"


class IndexStatus(NamedTuple):
    """The search index of state keys.  The names of the keys are not stored.

    Attributes:
        rows: The number of rows: one for each indexed key of each session or user that has the key.
        keys: How many keys are indexed, counted for each app.
        complete: For how many of them `index fill` has ended, so that `find_sessions` works; None
            if no root keys were given, or if they do not unwrap the keyring.
        tampered: How many marks of keys are not authentic; None in the same cases.
    """

    rows: int
    keys: int
    complete: int | None
    tampered: int | None

    @property
    def line(self) -> str:
        counts = f"search index: {counted(self.rows, 'row')} of {counted(self.keys, 'key')}"
        if self.complete is None:
            return f"{counts}{NOT_VERIFIED}"
        if self.tampered:
            wrong = counted(self.tampered, "mark")
            return f"{counts}; {wrong} tampered with: run `index fill` for each app and key"
        left = self.keys - self.complete
        return f"{counts}; {f'{left} not complete: `index fill` ends it' if left else 'complete'}"


class TrailStatus(NamedTuple):
    """The audit trail.  `verify_audit` checks its records; this is only their number.

    Attributes:
        records: The number of records.
        chains: The number of chains: one for each service that has recorded something.
        since: The time of the oldest record, in microseconds since 1970, UTC; None if there is no
            record, or if a time is malformed.
    """

    records: int
    chains: int
    since: int | None

    @property
    def line(self) -> str:
        counts = f"{counted(self.records, 'record')} in {counted(self.chains, 'chain')}"
        oldest = "" if self.since is None else f", the oldest of {utc_text(self.since)}"
        return f"audit trail: {counts}{oldest}"


@dataclass
class Status(Result):
    """The result of `status`.

    Attributes:
        format_version: The version of the stored format.
        has_plaintext_records: True if `NoOpBackend` has written to the database.  This value comes
            from a row of `secure_meta` that is not authenticated.
        master_keys: The master keys.
        data_keys: The number of data keys, by backend and by the data master that wraps them.
        records: The number of records, by table and backend.  While a `data` rotation is
            unfinished, `under_current` counts only records whose data key was created since the
            rotation began.
        unfinished: The rotations that are running, were killed, or could not replace every key.
        migration: The progress of a migration; None if nothing was copied into the database, and
            no service with `PlaintextFallbackService` has used it.
        state_index: The search index of state keys; None if the database has none.
        audit_trail: The audit trail; None if the database has none.
        spare_keys: How many of the data keys are spare: newer than the current data key of their
            owner, while no row or record names them.  With a key database, several services may
            create a data key for one new user.
        is_separating: Whether `separate` has not ended on this copy, so that services reject it.
    """

    format_version: str
    has_plaintext_records: bool
    master_keys: tuple[MasterKey, ...]
    data_keys: tuple[DataKeyCount, ...]
    records: tuple[RecordCount, ...]
    unfinished: tuple[UnfinishedRotation, ...]
    migration: MigrationStatus | None
    state_index: IndexStatus | None
    audit_trail: TrailStatus | None
    spare_keys: int
    is_separating: bool

    @property
    def succeeded(self) -> bool:
        checks = [key.is_unwrapped for key in self.master_keys]
        checks += [run.since is not None and run.is_authentic for run in self.unfinished]
        if self.migration is not None:
            checks.append(self.migration.is_authentic)
        tampered = self.state_index is not None and self.state_index.tampered
        is_of_future = any(key.is_of_future for key in self.master_keys)
        return not (False in checks or tampered or is_of_future)

    def extra_lines(self, dry_run: bool) -> Iterator[str]:
        plaintext = "; some records are, or were, plaintext" if self.has_plaintext_records else ""
        yield f"format {self.format_version}{plaintext}"
        yield from ("master keys", *aligned([key.cells for key in self.master_keys], _INDENT))
        yield from ("data keys", *aligned([count.cells for count in self.data_keys], _INDENT))
        if self.spare_keys:
            spare = counted(self.spare_keys, "data key")
            yield f"{_INDENT}spare: {spare}; no row names them, and they encrypt nothing"
        is_rotating = any(run.name == "data" and run.done is not None for run in self.unfinished)
        label = "under keys of the rotation" if is_rotating else "under current key"
        yield from ("rows", *aligned([count.cells_under(label) for count in self.records], _INDENT))
        if self.is_separating:
            again = _AGAIN.format("`separate`")
            yield f"unfinished separation, and services reject this copy; {again}"
        elif self.unfinished:
            yield "unfinished rotations"
        for rotation in self.unfinished:
            is_own = rotation.total is not None and not self.is_separating
            again = f"; {_AGAIN.format('the same command')}" if is_own else ""
            yield f"{_INDENT}{rotation.line}{again}"
        for part in (self.migration, self.state_index, self.audit_trail):
            if part is not None:
                yield part.line


@logged_command
async def status(
    db: Database, *, progress: Progress | None = None, rows_per_second: float | None = None
) -> Status:
    """Count rows and keys.  No key is needed.

    Args:
        db: The database.  If *db* has a backend, the result also tells which master keys can be
            unwrapped, and whether the checkpoints of unfinished rotations are authentic.  It also
            tells whether the mark that ends a migration is authentic (see `MigrationStatus`).
    """
    survey = await db.survey_existing()
    masters = [await _master_status(db, row, survey.existing_id) for row in survey.master_rows]
    rotations = await unfinished_rotations(db)
    total = await estimate_rows(db, *(sealed.table for sealed in SEALED_TABLES), data_keys)
    meter = Meter(progress, total, rows_per_second)
    keys = await count_data_keys(db, meter)
    since_of = {run.name: run.since for run in rotations if run.is_authentic is not False}
    records, spare_keys = await count_records(db, meter, since_of.get("data") or 0)
    meter.finish()
    return Status(
        str(survey.format_version),
        survey.has_plaintext_records,
        tuple(masters),
        keys,
        records,
        tuple(_with_progress(run, masters, keys, records) for run in rotations),
        await _migration_status(db, survey),
        await _index_status(db, survey),
        await _trail_status(db, survey),
        spare_keys,
        FeatureName.SEPARATING in survey.features,
    )


_NO_ROW: sa.ColumnElement[int] = sa.literal_column("0")  # the row id in a tombstone
# `secure_migrated` also has rows for copied users and apps.  `_COPIED` counts only sessions.
_IS_OWNER = sa.or_(*(migrated.c.tag.in_(sa.select(table.c.tag)) for table in (users, apps)))
_COPIED = select_count(migrated, migrated.c.row_id != _NO_ROW, sa.not_(_IS_OWNER))
_TOMBSTONES = select_count(migrated, migrated.c.row_id == _NO_ROW)
_INDEXED = select_count(state_index, state_index.c.row_id != sa.literal_column(str(INDEX_MARK)))
_TRAIL = sa.select(
    sa.func.count(),
    sa.func.count(audit_records.c.chain.distinct()),
    sa.func.min(audit_records.c.time),
)


async def _migration_status(db: Database, survey: Survey) -> MigrationStatus | None:
    if FeatureName.MIGRATION not in survey.features:
        return None
    ((sessions,),) = await db.runner.data_db.read(_COPIED, {})
    ((tombstones,),) = await db.runner.data_db.read(_TOMBSTONES, {})
    is_complete = meta.MIGRATION_MARK in survey.meta_texts
    is_authentic = None
    if is_complete and await _index_master(db) is not None:
        try:
            is_authentic = await db.imports.migration_mark() is not None
        except WrongKeyError:
            is_authentic = False
    return MigrationStatus(int(sessions), int(tombstones), is_complete, is_authentic)


async def _index_status(db: Database, survey: Survey) -> IndexStatus | None:
    if state_index.name not in survey.tables:
        return None
    ((rows,),) = await db.runner.data_db.read(_INDEXED, {})
    index_master = await _index_master(db)
    marks = await index_rows.read_marks(db.runner.data_db.read, index_master)
    if index_master is None:
        return IndexStatus(int(rows), len(marks), None, None)
    complete = sum(state is index_rows.IndexState.COMPLETE for _, state in marks)
    tampered = sum(state is None for _, state in marks)
    return IndexStatus(int(rows), len(marks) - tampered, complete, tampered)


async def _trail_status(db: Database, survey: Survey) -> TrailStatus | None:
    if audit_records.name not in survey.tables:
        return None
    ((records, chains, since),) = await db.runner.data_db.read(_TRAIL, {})
    # A modified time may have another type.
    return TrailStatus(int(records), int(chains), since if isinstance(since, int) else None)


@hides_locals
async def unfinished_rotations(db: Database) -> tuple[UnfinishedRotation, ...]:
    """Return the rotations that are running, were killed, or could not replace every key."""
    survey = await db.survey_existing()
    has_checkpoint = any(parse_checkpoints(survey.meta_texts, None))
    index_master = await _index_master(db) if has_checkpoint else None
    return tuple(parse_checkpoints(survey.meta_texts, index_master))


def _with_progress(
    run: UnfinishedRotation,
    masters: list[MasterKey],
    keys: tuple[DataKeyCount, ...],
    records: tuple[RecordCount, ...],
) -> UnfinishedRotation:
    if run.since is None or run.is_authentic is False:
        return run
    if run.name == "master":
        new_ids = {
            key.id for key in masters if key.purpose == DATA_MASTER and key.created_at >= run.since
        }
        replaced = sum(count.key_count for count in keys if count.master_id in new_ids)
        total = sum(count.key_count for count in keys)
    else:
        replaced = sum(count.under_current for count in records)
        total = sum(count.rows for count in records)
    return run._replace(done=replaced, total=total)


async def _master_status(db: Database, row: MasterKeyRow, database_id: bytes) -> MasterKey:
    is_unwrapped = False if db.has_root_keys else None
    if db.has_root_keys:
        with suppress(WrongKeyError, DecryptionError):
            await unwrap_master_key(row, db.runner.backends.roots, database_id)
            is_unwrapped = True
    # A modified time may have another type.
    created_at = row.created_at if isinstance(row.created_at, int) else 0
    age = time.time() - created_at / 1_000_000
    return MasterKey(row.id, row.purpose, row.root_key_id, created_at, age, is_unwrapped)


async def _index_master(db: Database) -> IndexMaster | None:
    """Return what authenticates checkpoints and marks; None without the right root keys."""
    if not db.has_root_keys:
        return None
    try:
        return (await db.keyring()).index_master
    except (WrongKeyError, DecryptionError):
        return None
