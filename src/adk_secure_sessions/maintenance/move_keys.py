"""Move the keys of a database into a key database, or back into the database of the data.

The row `holds` of `secure_meta` in the data database says where the keys are.  One transaction
changes this row.  Before this transaction, the old copy of the keys is valid; afterwards, the new
copy is valid.  The new copy is complete before the transaction begins.  The old copy is deleted in
the transaction or later.  So at every moment, at least one complete copy of all keys exists, and a
killed run can be continued.

Services must be stopped.  If a service is running nevertheless, it cannot create keys in the old
place after the move:

- Into a key database: the transaction that changes `holds` also compares all keys with the new
  copy, and deletes the old copy.
- Back: the first step changes the ids of the master keys in the key database (`_park`).  A service
  stores a data key only if a master key with the id that the service knows is stored there
  (`INSERT_KEY`).
"""

import hashlib
import secrets
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import sqlalchemy as sa

from adk_secure_sessions.audit import command
from adk_secure_sessions.db.dialects import dialect_of
from adk_secure_sessions.db.protocol import (
    Executor,
    Parameters,
    Read,
    Row,
    Steps,
    repeated,
    run_in_turn,
)
from adk_secure_sessions.errors import (
    ConfigurationError,
    Reason,
    SecureSessionError,
    TamperedError,
)
from adk_secure_sessions.keys.data_keys import DataKeyRow
from adk_secure_sessions.keys.keyring import (
    Keyring,
    MasterKeyRow,
    check_row_count,
    open_keyring,
)
from adk_secure_sessions.maintenance.clearing import rewrite
from adk_secure_sessions.maintenance.database import Database
from adk_secure_sessions.maintenance.progress import Meter, Progress
from adk_secure_sessions.storage import clusters, meta
from adk_secure_sessions.storage.feature_list import check_features, feature_mark
from adk_secure_sessions.storage.pages import first_rows, spans
from adk_secure_sessions.storage.queries import (
    DATA_KEYS,
    MASTER_KEYS,
)
from adk_secure_sessions.storage.schema import (
    KEY_TABLES,
    audit_records,
    data_keys,
    keyring,
    metadata,
)
from adk_secure_sessions.storage.survey import (
    KEY_FILE,
    MOVING,
    SEPARATING,
    WRAPPER,
    Part,
    Survey,
    check,
    check_together,
    look,
    look_at,
)
from adk_secure_sessions.storage.unit_of_work import empty_caches

KeyPlace: TypeAlias = Literal["key-db", "db"]

# The name of the row of `secure_meta` that contains the random id of the run of `move_keys` that
# may write.  If a run was suspended and a later run has begun, the first run finds another id and
# stops.
_RUN = "move"
# The names of the rows of `secure_meta` that are only in the database that has the keys.
_BESIDE_KEYS = (meta.FEATURES, meta.MIGRATION_MARK)
# The name that each transaction claims, on a cluster, so that a run whose node is behind cannot
# write after another run has begun.
_CLAIM = "claim.move"
_BATCH = 500  # the number of data keys that are read and written at once
_LOWEST = -(2**63)  # where the first batch begins: below all ids, also those that `_park` changed

_CHANGED = (
    "the keys were changed during the move: stop all services and other commands that use this "
    "database, then run `move-keys` again"
)
_OVERLAPPED = "another run of `move-keys` has begun: wait for its end"


class KeyMove(NamedTuple):
    """The result of `move_keys`.

    Attributes:
        to: Where the keys are now: "key-db" or "db".
        masters: The number of master keys there.
        data_keys: The number of data keys there.
        resumed: True if this run continued an interrupted run, or found that the keys had already
            been moved.  False if this run began from the start.  A run also begins from the start
            if the earlier run was interrupted at an early step: into the key database, before the
            row `holds` of `secure_meta` was changed; back, before the ids of the master keys were
            changed.
        cleared: True if the file that had the keys before contains no copy of them any more.  Logs,
            replicas and backups are never cleared.
        obstacles: Why the tables could not be rewritten; empty if `cleared` is True.
    """

    to: KeyPlace
    masters: int
    data_keys: int
    resumed: bool
    cleared: bool
    obstacles: tuple[str, ...]


@command
async def move_keys(db: Database, to: KeyPlace, *, progress: Progress | None = None) -> KeyMove:
    """Move all keys into the key database, or from the key database into the database of the data.

    Stop all services first.  No record and no key changes.  Until the move has ended, services and
    other commands reject the database.  If a run is killed, run it again: the next run continues.
    If the keys have already been moved, a run only clears the file that had the keys before.

    Args:
        db: The database, with `key_db_url` or `key_db_engine`, and with all root keys.
        to: "key-db" moves the keys into the key database, which must be empty.  "db" moves them
            into the database of the data.
        progress: Called with the number of copied data keys and the number of all data keys.

    Raises:
        ConfigurationError: There is no key database; or one of the databases cannot be used; or the
            key database is not empty; or an unfinished move has the other direction; or
            `EncryptedSessionWrapper` uses the database.
        WrongKeyError: The root keys do not decrypt the keyring, or `secure_meta` was modified.
        TamperedError: The row of a data key is malformed.
        SecureSessionError: Another process has changed the keys during this run.
    """
    if to not in ("key-db", "db"):
        raise ConfigurationError("to must be 'key-db' or 'db'")
    db.find_keys(in_key_database=True)
    if not db.executors.has_key_database:
        raise ConfigurationError("give the key database: pass it as key_db_url")
    move = _Move(db, db.backends.writer.root_key.key_id, progress)
    try:
        found = await (move.into_key_database() if to == "key-db" else move.into_data_database())
    except SecureSessionError:
        if not await move.was_overtaken():
            raise
        overtaken = "another run of `move-keys` was first, and has moved the keys"
        raise SecureSessionError(overtaken) from None
    await db.close()  # the next call opens the database with its keys in the new place
    db.find_keys(in_key_database=to == "key-db")
    if move.has_audit_table:
        await db.keys()  # store in the audit trail that this command has run
    return found


class _Move:
    """One run of `move_keys`."""

    def __init__(self, db: Database, writer: str, progress: Progress | None) -> None:
        self._db = db
        self._writer = writer  # the id of the writing backend's root key
        self._progress = progress
        self._run = secrets.token_hex(16)
        self.has_audit_table: bool = False
        self._first_part: Part | None = None  # of the data database, when this run first read it
        self._meter = Meter(None, 0, None)

    async def was_overtaken(self) -> bool:
        """Return whether another run has ended a move since this run read the data database."""
        if self._first_part is None:
            return False
        data = await repeated(lambda: look_at(self._db.executors.data))
        with_keys = data
        if data.part is Part.DATA:
            with_keys = await repeated(lambda: look_at(self._db.executors.keys, KEY_FILE))
        has_ended = MOVING not in with_keys.features
        return has_ended and data.part is not self._first_part

    # --- into the key database ---

    async def into_key_database(self) -> KeyMove:
        self._db.require_files(of_keys=False)
        data = await self._survey_data()
        keys = await self._survey_keys()
        check(keys, Part.KEYS, create_tables=True)
        if data.part is Part.DATA:
            return await self._end_in_key_database(data, keys)
        data.reject_unfinished(SEPARATING)
        opened = await self._open(data, data.keyring)
        if MOVING in data.features:
            raise _other_way("db")
        if WRAPPER in data.features:
            raise ConfigurationError(
                "EncryptedSessionWrapper uses this database, and cannot use another one for its "
                "keys: no key was moved"
            )
        await self._check_target(data, keys, opened)
        await self._db.change(partial(_claim, self._run, None))
        await self._count(self._db.read)
        names = (meta.FORMAT, meta.DATABASE_ID, meta.PLAINTEXT, meta.MIGRATION_MARK)
        marks = {name: data.meta[name] for name in names if name in data.meta}
        features = data.features | {MOVING}
        marks[meta.FEATURES] = feature_mark(opened.index, opened.database_id, features)
        marks |= {meta.HOLDS: Part.KEYS.value or "", _RUN: self._run}
        await self._db.change_keys(partial(_prepare_key_database, keys, marks, data.keyring))
        await self._copy(self._db.read, self._db.change_keys)
        copy = await _fingerprint_of(self._db.read_keys)
        found = await self._survey_keys()
        await self._open(found, found.keyring)
        old = {name: data.meta.get(name) for name in _BESIDE_KEYS}
        work = partial(_switch_to_key_database, self._run, copy, old, self._lock_wait)
        await self._db.change(work)
        empty_caches()
        return await self._end_in_key_database(await self._survey_data(), found, resumed=False)

    async def _check_target(self, data: Survey, keys: Survey, opened: Keyring) -> None:
        """Reject a key database that is neither empty nor the target of an unfinished move.

        The move overwrites the keys in the key database.  The data database may be an old copy, or
        an attacker may have replayed its old rows.  Then the key database may have keys that no
        other database has.  So each key in the key database must also be in the data database.
        """
        if keys.database_id is None:
            return
        if keys.database_id != data.database_id:
            raise ConfigurationError(
                "the key database belongs to another database: give an empty key database"
            )
        check_features(keys, opened)
        if MOVING not in keys.features:
            raise ConfigurationError(
                "the key database already has keys of this database, and may be in use: check "
                "db_url, which may name an old copy of the data; or give an empty key database"
            )
        if any(row.id < 0 for row in keys.keyring):
            raise _other_way("db")
        if not set(keys.keyring) <= set(data.keyring):
            raise _newer_keys()
        key = data_keys.c.id
        async for span in spans(self._db.read_keys, key, _BATCH):
            left = await span.read(self._db.read_keys, DATA_KEYS, key)
            here = await span.read(self._db.read, DATA_KEYS, key)
            if not {tuple(row) for row in left} <= {tuple(row) for row in here}:
                raise _newer_keys()

    async def _end_in_key_database(
        self, data: Survey, keys: Survey, *, resumed: bool = True
    ) -> KeyMove:
        """End the move after `holds` was changed, and let services start.

        First delete the keys that an earlier run has left in the data database, and clear the file
        of the data database.
        """
        check_together(data, keys)
        is_parked = any(row.id < 0 for row in keys.keyring)
        if is_parked:
            raise _other_way("db")
        opened = await self._open(keys, keys.keyring)
        features = keys.features
        # Delete the copies that a killed run in the other direction has left in the data database.
        await self._db.change(partial(_delete_inert_keys, self._run))
        obstacles = await self._clear(self._db.executor, data)
        await self._db.change_keys(
            partial(
                _end,
                keys.meta[meta.FEATURES],
                feature_mark(opened.index, opened.database_id, features - {MOVING}),
            )
        )
        await self._db.change(partial(_end, None, None))
        return await self._result("key-db", self._db.read_keys, resumed, obstacles)

    # --- into the database of the data ---

    async def into_data_database(self) -> KeyMove:
        self._db.require_files(of_keys=True)
        data = await self._survey_data()
        keys = await self._survey_keys()
        check(keys, Part.KEYS, create_tables=True)
        if data.part is Part.ALL:
            return await self._end_in_data_database(data, keys)
        check_together(data, keys)
        masters = [_unparked(row) for row in keys.keyring]
        opened = await self._open(keys, masters)
        keys.reject_unfinished(SEPARATING)
        is_parked = masters != keys.keyring
        features = keys.features
        if MOVING in features and not is_parked:
            raise _other_way("key-db")
        await self._db.change(partial(_claim, self._run, Part.DATA.value))
        await self._db.change_keys(partial(_claim, self._run, Part.KEYS.value))
        await self._count(self._db.read_keys)
        mark = feature_mark(opened.index, opened.database_id, features | {MOVING})
        if not is_parked:
            work = partial(
                _park, self._run, keys.keyring, keys.meta[meta.FEATURES], mark, self._lock_wait
            )
            await self._db.change_keys(work)
            empty_caches()
        await self._db.change(partial(_prepare_data_database, self._run, masters))
        await self._copy(self._db.read_keys, self._db.change)
        original = await _fingerprint_of(self._db.read_keys)
        found = (await self._survey_keys()).meta
        names = (meta.PLAINTEXT, meta.MIGRATION_MARK)
        marks = {meta.FEATURES: mark} | {name: found[name] for name in names if name in found}
        await self._db.change(partial(_switch_to_data_database, self._run, original, marks))
        data, keys = await self._survey_data(), await self._survey_keys()
        return await self._end_in_data_database(data, keys, resumed=is_parked)

    async def _end_in_data_database(
        self, data: Survey, keys: Survey, *, resumed: bool = True
    ) -> KeyMove:
        """Remove the keys from the key database, and end the run, so that services can start.

        Before this call, `_switch_to_data_database` has stored that the valid keys are in the data
        database.
        """
        data.reject_unfinished(SEPARATING)
        opened = await self._open(data, data.keyring)
        features = data.features
        if keys.database_id is not None:
            if keys.database_id != data.database_id:
                raise ConfigurationError(
                    "this database has its keys, and the key database belongs to another one"
                )
            await self._check_old_place(features, keys, opened)
            await self._db.change_keys(partial(_claim, self._run, Part.KEYS.value))
            await self._db.change_keys(partial(_delete_keys_and_marks, self._run))
        obstacles = await self._clear(self._db.key_executor, keys)
        mark = feature_mark(opened.index, opened.database_id, features - {MOVING})
        await self._db.change(partial(_end, data.meta[meta.FEATURES], mark))
        return await self._result("db", self._db.read, resumed, obstacles)

    async def _check_old_place(
        self, features: frozenset[str], keys: Survey, opened: Keyring
    ) -> None:
        """Reject a key database whose keys must not be deleted.

        The data database may be an old copy from the time of an unfinished move, or an attacker may
        have replayed its rows.  Then the key database may be in use, and have newer keys.  So its
        keys may only be deleted if a move has changed the ids of its master keys (`_park`), and if
        both databases have equal keys.
        """
        check_features(keys, opened)
        was_left = MOVING in features and MOVING in keys.features
        if was_left and all(row.id < 0 for row in keys.keyring):
            read, read_keys = self._db.read, self._db.read_keys
            if await _fingerprint_of(read) == await _fingerprint_of(read_keys):
                return
        raise ConfigurationError(
            "this database has its keys, and the key database has keys that may be in use: check "
            "db_url, which may name an old copy of the data"
        )

    # --- both ---

    @property
    def _lock_wait(self) -> int:
        return self._db.limits.lock_wait

    async def _survey_data(self) -> Survey:
        """Return the survey of the data database, after a check that the database can be used."""
        survey = await repeated(lambda: look_at(self._db.executors.data))
        self._first_part = self._first_part or survey.part
        check(survey, Part.DATA if survey.part is Part.DATA else Part.ALL, create_tables=True)
        if survey.database_id is None:
            raise ConfigurationError(
                "this database holds no encrypted sessions yet: to create it with a key database, "
                "use `adk-secure-sessions init`"
            )
        self.has_audit_table = audit_records.name in survey.feature_tables
        return survey

    async def _survey_keys(self) -> Survey:
        survey = await repeated(lambda: look_at(self._db.executors.keys, KEY_FILE))
        await repeated(lambda: self._db.key_executor.define(_reject_memory, commit=False))
        return survey

    async def _open(self, survey: Survey, rows: list[MasterKeyRow]) -> Keyring:
        """Unwrap the keyring *rows*, and authenticate the features in *survey*."""
        check_row_count(survey.keyring_rows)
        assert survey.database_id is not None, "the callers reject that"
        roots = self._db.backends.roots
        opened = await open_keyring(rows, roots, self._writer, survey.database_id)
        check_features(survey, opened)
        return opened

    async def _count(self, read: "_ReadRows") -> None:
        ((total,),) = await read(_NUMBERS[data_keys.name], {})
        self._meter = Meter(self._progress, total, None)

    async def _copy(self, read: "_ReadRows", change: "_Changer") -> None:
        """Copy all data keys in batches: *read* reads the old copy, *change* writes the new one."""
        after = _LOWEST
        while rows := await read(_BATCHES[data_keys.name], {"after": after}):
            sound = [_sound(DataKeyRow(*row)) for row in rows]
            await change(partial(_insert, self._run, sound))
            after = sound[-1].id
            await self._meter.advance(len(sound))
        self._meter.finish()

    async def _clear(self, executor: Executor, survey: Survey) -> list[str]:
        """Rewrite the emptied tables; return the reasons why tables could not be rewritten."""
        emptied = (keyring, data_keys)
        tables = [table for table in emptied if table.name not in survey.missing_tables]
        return await rewrite(executor, tables, self._lock_wait) if tables else []

    async def _result(
        self, to: KeyPlace, read: "_ReadRows", resumed: bool, obstacles: list[str]
    ) -> KeyMove:
        ((masters,),) = await read(_NUMBERS[keyring.name], {})
        ((number,),) = await read(_NUMBERS[data_keys.name], {})
        return KeyMove(to, int(masters), int(number), resumed, not obstacles, tuple(obstacles))


_ReadRows: TypeAlias = Callable[[sa.Executable, Parameters], Awaitable[Sequence[Row]]]
_Changer: TypeAlias = Callable[[Callable[[sa.Connection], None]], Awaitable[None]]


def _other_way(to: KeyPlace) -> ConfigurationError:
    return ConfigurationError(
        "an earlier run has begun to move the keys the other way: run `adk-secure-sessions "
        f"move-keys --to {to}` again, until it has ended"
    )


def _newer_keys() -> ConfigurationError:
    return ConfigurationError(
        "the key database has keys that the database does not have: check db_url, which may name "
        "an old copy of the data; or give an empty key database"
    )


def _unparked(row: MasterKeyRow) -> MasterKeyRow:
    """Return *row* with its original id, if `_park` has changed the id."""
    return row._replace(id=~row.id) if row.id < 0 else row


def _sound(row: DataKeyRow) -> DataKeyRow:
    """Return *row*; raise TamperedError if a column has a value that no service stores.

    SQLite stores any type in any column, so a modified row may contain values that the other
    database would reject.
    """
    numbers = (row.id, row.generation, row.backend_id, row.created_at)
    are_sound = all(isinstance(one, int) and 0 <= one < 2**63 for one in numbers)
    if are_sound and isinstance(row.owner, bytes) and isinstance(row.wrapped, bytes):
        return row
    raise TamperedError(
        "the row is malformed, and was not moved: restore it from a backup, or delete it",
        reason=Reason.MALFORMED,
        table=data_keys.name,
        row=row.id,
    )


# --- comparing the copies ------------------------------------------------------------------------


class _Fingerprint(NamedTuple):
    """The numbers of master keys and data keys, and a hash of all their rows."""

    masters: int
    data_keys: int
    digest: str


def _after(query: sa.Select[Any], column: sa.Column[Any]) -> sa.Select[Any]:
    later = column > sa.bindparam("after", type_=sa.BigInteger)
    return first_rows(query.where(later).order_by(column), _BATCH)


_BATCHES = {
    keyring.name: _after(MASTER_KEYS, keyring.c.id),
    data_keys.name: _after(DATA_KEYS, data_keys.c.id),
}
_NUMBERS = {
    table.name: sa.select(sa.func.count()).select_from(table) for table in (keyring, data_keys)
}


def _fingerprint() -> Steps[_Fingerprint]:
    """Compute a fingerprint in steps that read batches of rows; the caller runs each step.

    Before hashing, master keys get the ids that they had before `_park`.  Therefore the keys in the
    key database and their copy in the data database have the same fingerprint.
    """
    digest, masters = hashlib.sha256(), []
    after = _LOWEST
    while rows := (yield Read(_BATCHES[keyring.name], {"after": after})):
        masters += [MasterKeyRow(*row) for row in rows]
        after = masters[-1].id
    for one in sorted(map(_unparked, masters)):
        digest.update(repr(tuple(one)).encode())
    number, after = 0, _LOWEST
    while rows := (yield Read(_BATCHES[data_keys.name], {"after": after})):
        for row in rows:
            digest.update(repr(tuple(_sound(DataKeyRow(*row)))).encode())
        number, after = number + len(rows), rows[-1][0]
    return _Fingerprint(len(masters), number, digest.hexdigest())


async def _fingerprint_of(read: _ReadRows) -> _Fingerprint:
    """Compute the fingerprint of the keys that *read* reads."""
    steps = _fingerprint()
    try:
        step = next(steps)
        while True:
            assert isinstance(step, Read)
            step = steps.send(await read(step.query, step.parameters))
    except StopIteration as end:
        found: _Fingerprint = end.value
        return found


def _fingerprint_now(connection: sa.Connection) -> _Fingerprint:
    """Compute the fingerprint of the keys in the transaction of *connection*."""

    def fetch(query: sa.Executable, parameters: Parameters) -> Sequence[Row]:
        return connection.execute(query, parameters).all()

    def run(statement: sa.Executable, parameters: object) -> int:
        raise AssertionError("a fingerprint changes nothing")

    return run_in_turn(_fingerprint(), fetch, run)


# --- transactions --------------------------------------------------------------------------------
# After a lost connection, each of these functions may run again, even if its first run was
# committed.


def _reject_memory(connection: sa.Connection) -> None:
    """Raise ConfigurationError if the key database is a SQLite database in memory."""
    if dialect_of(connection).is_server:
        return
    for _, name, file in connection.exec_driver_sql("PRAGMA database_list"):
        if name == "main" and not file:
            raise ConfigurationError(
                "the key database is in memory, so all keys would be lost when this program ends"
            )


def _marks(connection: sa.Connection) -> dict[str, str]:
    """Lock the rows of `secure_meta`, and return their values by name."""
    clusters.claim(connection, _CLAIM)
    return meta.read_all(connection, lock=True)


def _require_run(run: str, stored: dict[str, str]) -> None:
    """Raise an error if another run of `move_keys` has begun since this run began."""
    if stored.get(_RUN) != run:
        raise SecureSessionError(_OVERLAPPED, retryable=True)


def _claim(run: str, holds: str | None, connection: sa.Connection) -> None:
    """Store the id of this run.

    Raises:
        SecureSessionError: The row `holds` of `secure_meta` has another value than *holds*, so
            another run has moved the keys.
    """
    if _marks(connection).get(meta.HOLDS) != holds:
        raise SecureSessionError(_OVERLAPPED, retryable=True)
    meta.put(connection, _RUN, run)


def _lock_keys(lock_wait: int, connection: sa.Connection) -> None:
    """Prepare a transaction that changes keys, and lock the keys against other processes."""
    dialect_of(connection).see_what_is_committed(connection)
    dialect_of(connection).overwrite_deleted(connection)
    # Wait for open transactions that store a data key, so that this transaction sees the key.
    dialect_of(connection).lock_tables(connection, data_keys, keyring, timeout=lock_wait)
    clusters.claim(connection, *clusters.KEYRING_CLAIMS)
    connection.execute(sa.select(keyring.c.id).with_for_update()).all()


def _delete_all_keys(connection: sa.Connection) -> tuple[int, int]:
    """Delete all keys, and return the numbers of deleted master keys and data keys."""
    return (
        connection.execute(sa.delete(keyring)).rowcount,
        connection.execute(sa.delete(data_keys)).rowcount,
    )


def _prepare_key_database(
    expected: Survey, marks: dict[str, str], masters: list[MasterKeyRow], connection: sa.Connection
) -> None:
    """Create the tables, with *marks* as the rows of `secure_meta` and *masters* as the only keys.

    *expected* is the survey of the key database, which the caller has checked: the key database is
    empty, or an earlier run of the same move has begun to fill it.

    Raises:
        SecureSessionError: The key database has changed since *expected* was read.
    """
    dialect_of(connection).overwrite_deleted(connection)
    with dialect_of(connection).exclusively(connection):
        found = look(connection)
        if found.meta.get(_RUN) == marks[_RUN]:
            return
        if found != expected:
            raise SecureSessionError(_CHANGED, retryable=True)
        metadata.create_all(connection, tables=KEY_TABLES)
        _delete_all_keys(connection)
        meta.remove_all(connection)
        for name, value in marks.items():
            meta.put(connection, name, value)
        connection.execute(sa.insert(keyring), [row._asdict() for row in masters])


def _insert(run: str, rows: list[DataKeyRow], connection: sa.Connection) -> None:
    """Store a batch of data keys, in place of any rows with the same ids."""
    _require_run(run, _marks(connection))
    ids = [row.id for row in rows]
    connection.execute(sa.delete(data_keys).where(data_keys.c.id.in_(ids)))
    connection.execute(sa.insert(data_keys), [row._asdict() for row in rows])


def _switch_to_key_database(
    run: str,
    copy: _Fingerprint,
    marks: dict[str, str | None],
    lock_wait: int,
    connection: sa.Connection,
) -> None:
    """Store that the keys are in the key database, and delete them here; all or nothing.

    Args:
        run: The id of this run.
        copy: The fingerprint of the keys in the key database.
        marks: The rows `_BESIDE_KEYS` of `secure_meta` when they were copied; None if missing.
        lock_wait: Seconds to wait for a lock.
        connection: The connection to the data database.
    """
    _lock_keys(lock_wait, connection)
    stored = _marks(connection)
    _require_run(run, stored)
    if stored.get(meta.HOLDS) == Part.DATA.value:
        return
    if {name: stored.get(name) for name in marks} != marks or _fingerprint_now(connection) != copy:
        raise SecureSessionError(_CHANGED, retryable=True)
    for name in marks:
        meta.put(connection, name, None)
    meta.put(connection, meta.HOLDS, Part.DATA.value)
    # If the numbers differ, another process has stored a key since the comparison above.
    if _delete_all_keys(connection) != copy[:2]:
        raise SecureSessionError(_CHANGED, retryable=True)


def _delete_inert_keys(run: str, connection: sa.Connection) -> None:
    """Delete the keys in the data database, after a check that they are not the valid keys.

    Raises:
        SecureSessionError: The row `holds` of `secure_meta` does not say that the valid keys are in
            the key database: another run has moved the keys.
    """
    dialect_of(connection).overwrite_deleted(connection)
    if _marks(connection).get(meta.HOLDS) != Part.DATA.value:
        raise SecureSessionError(_OVERLAPPED, retryable=True)
    # Store the id of this run, so that a concurrent run in the other direction ends with an error.
    # Otherwise, that run could make the keys valid that are deleted here.
    meta.put(connection, _RUN, run)
    present = set(sa.inspect(connection).get_table_names())
    for table in (keyring, data_keys):
        if table.name in present:
            connection.execute(sa.delete(table))


def _park(
    run: str,
    masters: list[MasterKeyRow],
    features: str,
    moving: str,
    lock_wait: int,
    connection: sa.Connection,
) -> None:
    """Change the ids of all master keys, so that no service can use the keyring any more.

    The new id is -1 minus the old id, so it is negative.  The wrapped master keys are unchanged.

    Args:
        run: The id of this run.
        masters: The rows of the keyring as this run has read them.
        features: The row `features` of `secure_meta` as this run has read it.
        moving: The new row `features`, which contains the feature `moving`.
        lock_wait: Seconds to wait for a lock.
        connection: The connection to the key database.

    Raises:
        SecureSessionError: The keyring or the row `features` has changed since it was read, or
            another run of `move_keys` has begun.
    """
    _lock_keys(lock_wait, connection)
    stored = _marks(connection)
    _require_run(run, stored)
    if stored.get(meta.FEATURES) == moving:
        return
    found = {MasterKeyRow(*row) for row in connection.execute(MASTER_KEYS)}
    if stored.get(meta.FEATURES) != features or found != set(masters):
        raise SecureSessionError(_CHANGED, retryable=True)
    meta.put(connection, meta.FEATURES, moving)
    connection.execute(sa.update(keyring).values(id=-1 - keyring.c.id))


def _prepare_data_database(
    run: str, masters: list[MasterKeyRow], connection: sa.Connection
) -> None:
    """Create the tables of the keys in the data database, with *masters* as the only keys."""
    dialect_of(connection).overwrite_deleted(connection)
    with dialect_of(connection).exclusively(connection):
        metadata.create_all(connection, tables=KEY_TABLES)
        stored = _marks(connection)
        _require_run(run, stored)
        if stored.get(meta.HOLDS) != Part.DATA.value:
            raise SecureSessionError(_OVERLAPPED, retryable=True)
        _delete_all_keys(connection)
        connection.execute(sa.insert(keyring), [row._asdict() for row in masters])


def _switch_to_data_database(
    run: str, original: _Fingerprint, marks: dict[str, str], connection: sa.Connection
) -> None:
    """Store that the keys are in the data database; all or nothing.

    Args:
        run: The id of this run.
        original: The fingerprint of the keys in the key database.
        marks: The rows of `secure_meta` that move with the keys.  The row `features` contains
            `moving`, so services do not start yet.
        connection: The connection to the data database.
    """
    dialect_of(connection).see_what_is_committed(connection)
    stored = _marks(connection)
    _require_run(run, stored)
    if meta.HOLDS not in stored:
        return
    if _fingerprint_now(connection) != original:
        raise SecureSessionError(_CHANGED, retryable=True)
    for name in _BESIDE_KEYS:
        meta.put(connection, name, None)
    for name, value in marks.items():
        meta.put(connection, name, value)
    meta.put(connection, meta.HOLDS, None)


def _delete_keys_and_marks(run: str, connection: sa.Connection) -> None:
    """Empty the key database, whose keys are in the data database now."""
    dialect_of(connection).overwrite_deleted(connection)
    stored = _marks(connection)
    if not stored:
        return
    _require_run(run, stored)
    _delete_all_keys(connection)
    meta.remove_all(connection)


def _end(old: str | None, new: str | None, connection: sa.Connection) -> None:
    """Delete the id of the run and, if *old* is not None, replace the row `features` by *new*.

    Raises:
        SecureSessionError: The row `features` is neither *old* nor *new*.
    """
    stored = _marks(connection)
    if old is not None and stored.get(meta.FEATURES) != new:
        if stored.get(meta.FEATURES) != old:
            raise SecureSessionError(_CHANGED, retryable=True)
        meta.put(connection, meta.FEATURES, new)
    meta.put(connection, _RUN, None)
