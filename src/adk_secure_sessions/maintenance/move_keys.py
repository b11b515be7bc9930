"""Move the keys of a database into a key database, or back into the database of the data.

The row `holds` of `secure_meta` in the data database says where the valid keys are.  The database
that has the keys is the *source* of a move, the other one is its *target*:

1. Close the source: mark its features, so that services reject it, and *park* its master keys.  A
   parked master key has the id -1 - id.  Services store a data key only if the master key's row
   still has its id, so parking stops them.
2. Copy all keys into the target, read them back and compare them.
3. Change the row `holds`: from now on, the keys in the target are valid.
4. Compare the keys again, delete those in the source, and overwrite their bytes.
5. Open the target: remove the mark from its features.

At every moment, one place has all keys.  A killed run can be continued, because the databases tell
which steps are done.  Each transaction checks that no other run has begun meanwhile.
"""

import hashlib
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple, TypeAlias

import sqlalchemy as sa

from adk_secure_sessions.audit import audited_command
from adk_secure_sessions.db.dialects import dialect_of
from adk_secure_sessions.db.protocol import RetryingExecutor
from adk_secure_sessions.errors import ConfigurationError, Reason, SecureSessionError, TamperedError
from adk_secure_sessions.keys.data_keys import DataKeyRow
from adk_secure_sessions.keys.keyring import Keyring, MasterKeyRow
from adk_secure_sessions.maintenance.database import Database, require_no_wrapper
from adk_secure_sessions.maintenance.progress import Meter, Progress
from adk_secure_sessions.maintenance.row_scan import flattened
from adk_secure_sessions.maintenance.vacuum import rewrite_tables
from adk_secure_sessions.results import Result, counter, success_flag
from adk_secure_sessions.storage import clusters, meta
from adk_secure_sessions.storage.feature_list import features_with_mac, load_features
from adk_secure_sessions.storage.operation_runner import empty_caches
from adk_secure_sessions.storage.queries import DATA_KEYS, MASTER_KEYS
from adk_secure_sessions.storage.schema import audit_records, data_keys, keyring, metadata
from adk_secure_sessions.storage.survey import (
    FeatureName,
    Survey,
    TableSet,
    require_same_database,
    require_usable,
    survey_connection,
)
from adk_secure_sessions.storage.table_walk import pages, row_ranges

KeyPlace: TypeAlias = Literal["key-db", "db"]

# The name that each transaction claims on a cluster, so that a run whose node is behind cannot
# write after another run has begun.
_CLAIM = "claim.move"
_BATCH = 500  # the number of data keys that are read and written at once
_OVERLAPPED = "another run of `move-keys` has begun: wait for its end"
_CHANGED = (
    "the keys were changed during the move, by a service or by another run of `move-keys`: stop "
    "all services and other commands that use this database, then run `move-keys` again"
)
_IN_USE = (
    "the move would overwrite or delete keys that may be in use: wait for the end of another run "
    "of `move-keys`, or check both URLs: one may name an old copy of the data"
)


@dataclass
class KeyMove(Result):
    """The result of `move_keys`.

    Attributes:
        to: Where the keys are now: "key-db" or "db".
        master_count: The number of master keys there.
        data_key_count: The number of data keys there.
        resumed: True if this run continued an interrupted run, or found that the keys had already
            been moved.
        cleared: True if the file that had the keys before contains no copy of them any more.  Logs,
            replicas and backups are never cleared.
        obstacles: Why the tables could not be rewritten; empty if `cleared` is True.
    """

    to: KeyPlace
    master_count: int = counter("master key", "moved", shows_zero=True)
    data_key_count: int = counter("data key", "moved", shows_zero=True)
    resumed: bool = False
    cleared: bool = success_flag()
    obstacles: tuple[str, ...] = ()

    def extra_lines(self, dry_run: bool) -> Iterator[str]:
        if self.to == "key-db":
            yield "the key database has the keys: start services with key_db_url"
        else:
            yield "the database has its keys: start services without key_db_url"
        for obstacle in self.obstacles:
            yield f"the file that had the keys before may contain copies of them: {obstacle}"


@audited_command
async def move_keys(db: Database, to: KeyPlace, *, progress: Progress | None = None) -> KeyMove:
    """Move all keys into the key database, or from the key database into the database of the data.

    Stop all services first.  No record and no key changes.  Until the move has ended, services and
    other commands reject the database.  If a run is killed, run it again: the next run continues.
    If the keys have already been moved, a run only clears the file that had the keys before.

    Args:
        db: The database, with `key_db_url` or `key_db_engine`, and with all root keys.
        to: "key-db" moves the keys into the key database, which must be empty.  "db" moves them
            into the database of the data.
        progress: Counts data keys.

    Raises:
        ConfigurationError: There is no key database, or it is not empty; or an unfinished move has
            the other direction; or `EncryptedSessionWrapper` uses the database.
        WrongKeyError: `secure_meta` was modified.
        TamperedError: The row of a data key is malformed.
        SecureSessionError: Another process has changed the keys during this run.
    """
    if to not in ("key-db", "db"):
        raise ConfigurationError("to must be 'key-db' or 'db'")
    db.use_keys(in_key_database=True)
    if not db.runner.executors.has_key_database:
        raise ConfigurationError("give the key database: pass it as key_db_url (--key-db)")
    db.require_files(of_keys=to == "db")
    moved = await _Move(db, to, progress).transfer()
    await db.close()  # the next call opens the database with its keys in the new place
    db.use_keys(in_key_database=to == "key-db")
    if audit_records.name in (await db.survey_existing()).tables:
        await db.keyring()  # store in the audit trail that this command has run
    return moved


class _MoveState(NamedTuple):
    """What the two databases contain; *is_switched* says that the keys in the target are valid."""

    source: Survey
    target: Survey
    is_switched: bool
    keyring: Keyring

    def features_text(self, features: frozenset[str]) -> str:
        return features_with_mac(self.keyring.index_master, self.keyring.database_id, features)


class _Fingerprint(NamedTuple):
    """The numbers of keys in a database, and a hash of their rows, with the ids before parking."""

    master_count: int
    data_key_count: int
    digest: str


class _Move:
    """One run of `move_keys`."""

    def __init__(self, db: Database, to: KeyPlace, progress: Progress | None) -> None:
        self._db = db
        self._progress = progress
        self._run_id = secrets.token_hex(16)
        data, keys = db.runner.data_db, db.runner.key_db
        self._to: KeyPlace = to
        self._to_key_db = to == "key-db"
        self._source, self._target = (data, keys) if self._to_key_db else (keys, data)

    async def transfer(self) -> KeyMove:
        """Do the steps of this module that are not done yet, and return the result."""
        state = await self._survey_movable()
        has_begun = state.is_switched or FeatureName.MOVING in state.source.features
        data = state.source if self._to_key_db else state.target
        if not has_begun and audit_records.name in data.tables:
            # Store in the audit trail that this command has begun.  A run that continues a move can
            # only do so at its end: until then, nothing opens the database.
            self._db.use_keys(in_key_database=not self._to_key_db)
            try:
                await self._db.keyring()
            finally:  # `close` then closes both databases
                self._db.use_keys(in_key_database=True)
            state = await self._survey_movable()
        for side, survey in (self._source, state.source), (self._target, state.target):
            if survey.format_version is not None:
                await side.run_sync(partial(self._store_run_id, survey.meta_texts))
        if not state.is_switched:
            await self._park_and_copy(state)
            await self._db.runner.data_db.run_sync(self._switch)
            state = await self._survey_movable()
        source, target = state.source, state.target
        moved = await _fingerprint(self._target)
        if source.master_rows and await _fingerprint(self._source) != moved:
            raise ConfigurationError(_IN_USE)
        tables = [table for table in (keyring, data_keys) if table.name in source.tables]
        if source.format_version is not None:
            await self._source.run_sync(partial(self._delete_source_keys, tables, moved))
        obstacles = await rewrite_tables(self._db, self._source.executor, tables)
        features = state.features_text(target.features - {FeatureName.MOVING})
        await self._target.run_sync(
            partial(self._release_target, target.meta_texts[meta.FEATURES], features)
        )
        counts = moved.master_count, moved.data_key_count
        return KeyMove(self._to, *counts, has_begun, not obstacles, tuple(obstacles))

    async def _survey_movable(self) -> _MoveState:
        """Survey both databases, and reject those between which no key may be moved."""
        data, keys = await self._db.survey_unchecked()
        if data.database_id and not keys.database_id:
            # The key database is new, or another run has emptied it since the survey of the data.
            data, keys = await self._db.survey_unchecked()
        await self._db.runner.key_db.run_sync(_reject_in_memory, commit=False)
        is_in_key_db = data.table_set is TableSet.DATA
        require_usable(data, TableSet.DATA if is_in_key_db else TableSet.ALL, create_tables=True)
        if data.database_id is None:
            raise ConfigurationError(
                "this database holds no encrypted sessions yet: to create it with a key database, "
                "use `adk-secure-sessions init`"
            )
        require_usable(keys, TableSet.KEYS, create_tables=True)
        if is_in_key_db:
            require_same_database(data, keys)
        elif keys.database_id not in (None, data.database_id):
            raise ConfigurationError(
                "the key database belongs to another database: give an empty key database"
            )
        source, target = (data, keys) if self._to_key_db else (keys, data)
        is_switched = is_in_key_db == self._to_key_db
        holder = target if is_switched else source  # has the valid keys
        masters = list(map(_unparked, holder.master_rows))
        unwrapped = await self._db.open_surveyed(holder._replace(master_rows=masters))
        holder.reject_unfinished(FeatureName.SEPARATING)
        if FeatureName.MOVING in holder.features and _is_parked(holder) == is_switched:
            raise _opposite_move_error("db" if self._to_key_db else "key-db")
        state = _MoveState(source, target, is_switched, unwrapped)
        # The data database may be an old copy from the time of an unfinished move, or an attacker
        # may have replayed its rows.  Then the keys in the key database are in use.
        if not is_switched:
            await self._check_target(state)
        elif source.master_rows and not _is_parked(source):
            raise ConfigurationError(_IN_USE)
        return state

    async def _check_target(self, state: _MoveState) -> None:
        """Reject a target with keys, unless they are those of an unfinished move to it.

        The move overwrites the keys in the target.  So each of them must also be in the source.
        """
        source, target = state.source, state.target
        require_no_wrapper(source, "move-keys")
        if self._to_key_db and target.database_id is not None:
            load_features(target, state.keyring)
            if FeatureName.MOVING not in target.features:
                raise ConfigurationError(_IN_USE)
            if _is_parked(target):
                raise _opposite_move_error("db")
        if not target.tables >= {keyring.name, data_keys.name}:
            return
        is_in_use = not set(target.master_rows) <= {_unparked(row) for row in source.master_rows}
        async for row_range in row_ranges(self._target.read, data_keys.c.id, _BATCH):
            in_target, in_source = [
                {tuple(row) for row in await row_range.read(side.read, DATA_KEYS, data_keys.c.id)}
                for side in (self._target, self._source)
            ]
            is_in_use = is_in_use or not in_target <= in_source
        if is_in_use:
            raise ConfigurationError(_IN_USE)

    async def _park_and_copy(self, state: _MoveState) -> None:
        source = state.source
        # Reject a malformed row before anything is changed.
        total = (await _fingerprint(self._source)).data_key_count
        moving = state.features_text(source.features | {FeatureName.MOVING})
        await self._source.run_sync(partial(self._park_source, source, moving))
        empty_caches()
        names = (meta.FORMAT, meta.DATABASE_ID, meta.PLAINTEXT, meta.MIGRATION_MARK)
        meta_texts = {name: source.meta_texts[name] for name in names if name in source.meta_texts}
        meta_texts |= {meta.FEATURES: moving, meta.MOVE: self._run_id}
        if self._to_key_db:
            meta_texts[meta.HOLDS] = "keys"
        masters = [_unparked(row) for row in source.master_rows]
        await self._target.run_sync(partial(self._create_target, state.target, meta_texts, masters))
        meter = Meter(self._progress, total)
        async for rows in pages(self._source.read, DATA_KEYS, data_keys.c.id, _BATCH, DataKeyRow):
            await self._target.run_sync(partial(self._insert_data_keys, rows))
            await meter.advance(len(rows))
        meter.finish()
        if await _fingerprint(self._source) != await _fingerprint(self._target):
            raise SecureSessionError(_CHANGED, retryable=True)

    # --- transactions ------------------------------------------------------------------------
    # After a lost connection, each of these methods may run again, even after its commit.

    def _store_run_id(self, expected: dict[str, str], connection: sa.Connection) -> None:
        """Store this run's id; raise SecureSessionError if other texts differ from *expected*."""
        clusters.claim(connection, _CLAIM)
        if meta.read_all(connection, lock=True) | {meta.MOVE: ""} != expected | {meta.MOVE: ""}:
            raise SecureSessionError(_OVERLAPPED, retryable=True)
        meta.put(connection, meta.MOVE, self._run_id)

    def _require_own_run(self, connection: sa.Connection) -> None:
        clusters.claim(connection, _CLAIM)
        if meta.read(connection, meta.MOVE, lock=True) != self._run_id:
            raise SecureSessionError(_OVERLAPPED, retryable=True)

    def _lock_keys(self, connection: sa.Connection) -> None:
        """Prepare a transaction that changes keys, and lock the keys against other processes."""
        dialect = dialect_of(connection)
        dialect.set_read_committed(connection)
        dialect.overwrite_deleted(connection)
        dialect.lock_tables(connection, data_keys, keyring)
        clusters.claim(connection, *clusters.KEYRING_CLAIMS)
        connection.execute(sa.select(keyring.c.id).with_for_update()).all()

    def _park_source(self, source: Survey, moving: str, connection: sa.Connection) -> None:
        """Park the master keys, and store *moving*, the features with the feature `moving`."""
        self._lock_keys(connection)
        self._require_own_run(connection)
        if meta.read(connection, meta.FEATURES) == moving:
            return
        stored_rows = {MasterKeyRow(*row) for row in connection.execute(MASTER_KEYS)}
        features, is_same = source.meta_texts[meta.FEATURES], stored_rows == set(source.master_rows)
        if not (is_same and meta.swap(connection, meta.FEATURES, features, moving)):
            raise SecureSessionError(_CHANGED, retryable=True)
        connection.execute(sa.update(keyring).values(id=-1 - keyring.c.id))

    def _create_target(
        self,
        expected: Survey,
        meta_texts: dict[str, str],
        masters: list[MasterKeyRow],
        connection: sa.Connection,
    ) -> None:
        """Create the tables of the keys in the target, with *masters* as the only keys."""
        dialect_of(connection).overwrite_deleted(connection)
        with dialect_of(connection).exclusively(connection):
            is_new = expected.format_version is None
            survey = survey_connection(connection)
            if is_new and survey.has_rows and survey.meta_texts.get(meta.MOVE) != self._run_id:
                raise SecureSessionError(_CHANGED, retryable=True)
            metadata.create_all(connection, tables=TableSet.KEYS.tables)
            if not is_new:
                self._require_own_run(connection)
            for table in (data_keys, keyring):
                connection.execute(sa.delete(table))
            for name, value in meta_texts.items():
                meta.put(connection, name, value)
            connection.execute(sa.insert(keyring), [row._asdict() for row in masters])

    def _insert_data_keys(self, rows: list[DataKeyRow], connection: sa.Connection) -> None:
        """Store a batch of data keys, in place of any rows with the same ids."""
        self._require_own_run(connection)
        ids = [row.id for row in rows]
        connection.execute(sa.delete(data_keys).where(data_keys.c.id.in_(ids)))
        connection.execute(sa.insert(data_keys), [row._asdict() for row in rows])

    def _switch(self, connection: sa.Connection) -> None:
        """Make the keys in the target the valid ones; the text says so in the data database."""
        self._require_own_run(connection)
        holds = TableSet.DATA if self._to_key_db else TableSet.ALL
        meta.put(connection, meta.HOLDS, holds.value)

    def _delete_source_keys(
        self, tables: list[sa.Table], moved: _Fingerprint, connection: sa.Connection
    ) -> None:
        """Delete the keys in the source, and in a key database also all texts of `secure_meta`."""
        if tables:
            self._lock_keys(connection)
            if any(connection.execute(sa.select(table.c.id).limit(1)).first() for table in tables):
                self._require_own_run(connection)
                deleted = [connection.execute(sa.delete(table)).rowcount for table in tables]
                # If the numbers differ, another process has stored a key since the comparison.
                if deleted != [moved.master_count, moved.data_key_count]:
                    raise SecureSessionError(_CHANGED, retryable=True)
        if not self._to_key_db:
            meta.remove_all(connection)
        for name in (meta.FEATURES, meta.MIGRATION_MARK, meta.MOVE):
            meta.put(connection, name, None)

    def _release_target(self, old: str, new: str, connection: sa.Connection) -> None:
        """Replace the features *old* of the target by *new*, and delete the id of the run."""
        if meta.read(connection, meta.FEATURES) != new:
            self._require_own_run(connection)
        if not meta.swap(connection, meta.FEATURES, old, new):
            raise SecureSessionError(_CHANGED, retryable=True)
        meta.put(connection, meta.MOVE, None)


def _opposite_move_error(to: KeyPlace) -> ConfigurationError:
    return ConfigurationError(
        "an earlier run has begun to move the keys the other way: run `adk-secure-sessions "
        f"move-keys --to {to}` again, until it has ended"
    )


def _is_parked(survey: Survey) -> bool:
    return any(row.id < 0 for row in survey.master_rows)


def _unparked(row: MasterKeyRow) -> MasterKeyRow:
    return row._replace(id=~row.id) if row.id < 0 else row


async def _fingerprint(database: RetryingExecutor) -> _Fingerprint:
    digest, count = hashlib.sha256(), 0
    rows = flattened(pages(database.read, MASTER_KEYS, keyring.c.id, _BATCH, MasterKeyRow))
    masters = sorted([_unparked(row) async for row in rows])
    for master in masters:
        digest.update(repr(tuple(master)).encode())
    keys = flattened(pages(database.read, DATA_KEYS, data_keys.c.id, _BATCH, DataKeyRow))
    async for row in keys:
        numbers = (row.id, row.generation, row.backend_id, row.created_at)
        are_sound = all(isinstance(number, int) and 0 <= number < 2**63 for number in numbers)
        if not (are_sound and isinstance(row.owner, bytes) and isinstance(row.wrapped, bytes)):
            detail = "it is malformed and was not moved: restore it from a backup, or delete it"
            raise TamperedError(detail, Reason.MALFORMED, data_keys.name, row.id)
        digest.update(repr(tuple(row)).encode())
        count += 1
    return _Fingerprint(len(masters), count, digest.hexdigest())


def _reject_in_memory(connection: sa.Connection) -> None:
    if dialect_of(connection).has_one_file:
        (_, _, file), *_ = connection.exec_driver_sql("PRAGMA database_list")
        if not file:
            raise ConfigurationError(
                "the key database is in memory, so all keys would be lost when this program ends"
            )
