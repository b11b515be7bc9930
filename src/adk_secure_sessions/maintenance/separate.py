"""Give a copy of a database an id and keys of its own.

A copy, for example a staging clone, has the same keys as the original.  The context of a record
does not contain the id of the database.  An attacker with write access to the copy could therefore
insert records of the original, and the other way round.  After the separation, no key of one
database decrypts a record of the other.
"""

import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import sqlalchemy as sa

from adk_secure_sessions.audit import audited_command, running_command
from adk_secure_sessions.concurrency import gather_all
from adk_secure_sessions.db.dialects import has_table
from adk_secure_sessions.errors import ConfigurationError, SecureSessionError
from adk_secure_sessions.keys.keyring import (
    DATA_MASTER,
    Keyring,
    MasterKeyRow,
    SeparationState,
    rewrap_master_key,
)
from adk_secure_sessions.maintenance.counts import count_records, select_count
from adk_secure_sessions.maintenance.database import Database, require_no_wrapper
from adk_secure_sessions.maintenance.progress import Meter, Progress
from adk_secure_sessions.maintenance.retire import retire
from adk_secure_sessions.maintenance.rotate_data import rotate_data
from adk_secure_sessions.maintenance.rotate_master import rotate_master
from adk_secure_sessions.maintenance.rotation import rotation_start_time, store_master_keys
from adk_secure_sessions.results import Result, counter, success_flag
from adk_secure_sessions.storage import meta
from adk_secure_sessions.storage.feature_list import (
    features_with_mac,
    load_features,
    separation_rows,
)
from adk_secure_sessions.storage.schema import audit_records, data_keys, migrated
from adk_secure_sessions.storage.survey import FeatureName, Survey, TableSet, require_usable

_CHANGED = (
    "the keyring or the features were changed meanwhile, perhaps by another run of `separate`: try "
    "again"
)
_MAX_OLD_MASTERS = 8  # the ids of the old data masters must fit into one row of `secure_meta`


@dataclass
class Separation(Result):
    """The result of `separate`.

    Attributes:
        database_id: The new id of the database, in hexadecimal.
        resumed: True if this run continued a separation that an earlier run began.
        complete: True if no old key is left and services can start.  If False, run `separate`
            again.
        deleted_data_keys: How many old data keys this run deleted.  A key is old if it was
            created before the separation began.
        deleted_master_ids: The ids of the old data masters that this run deleted.
        kept: How many old keys are left.  They cannot be deleted yet, because rows need them or
            because a row cannot be decrypted.
    """

    database_id: str
    resumed: bool
    complete: bool = success_flag()
    deleted_data_keys: int = counter("data key", "deleted", shows_zero=True)
    deleted_master_ids: tuple[int, ...] = counter(
        "data master", "deleted", shows_zero=True, default=()
    )
    kept: int = counter("replaced key", "kept")

    def extra_lines(self, dry_run: bool) -> Iterator[str]:
        if self.complete:
            yield f"the copy has the id {self.database_id} and keys of its own: services can start"
        else:
            yield (
                "the separation has not ended, and services reject the copy: run `verify`, delete "
                "or restore the rows that it names, and run this command again"
            )


@audited_command
async def separate(
    db: Database, *, progress: Progress | None = None, rows_per_second: float | None = None
) -> Separation:
    """Give a copy of a database a new id, a new data master and new data keys; delete the old keys.

    Afterwards, the copy does not know what `migrate` has copied, and its audit trail is empty.

    Run `separate` on the copy.  Services reject the copy until the separation has ended.  If a run
    is killed, or if its result is not `complete`, run `separate` again: the next run continues or,
    if the old data masters are already deleted, begins again.

    Args:
        progress: Begins again for each of three steps: the rotation of the data master, that of
            the data keys, and the retirement of the old keys.

    Raises:
        ConfigurationError: The keyring has more than 8 data masters, or
            `EncryptedSessionWrapper` uses the database.
        TamperedError: A row belongs to no session, user or app, or a session cannot be decrypted.
        SecureSessionError: Another process has changed the keyring or started a rotation during
            this run; or another run of `separate` was first.
    """
    await _complete_new_id(db)
    keyring = await db.keyring()
    # If no old data master is left, begin a new separation: an attacker may have replayed the
    # stored state of an ended separation, so that this copy seems to be separated already.
    resumed = keyring.separation is not None and bool(
        keyring.separation.master_ids & keyring.data_masters.keys()
    )
    if not resumed:
        await _begin_separation(db)
    options: dict[str, Any] = {"progress": progress, "rows_per_second": rows_per_second}
    keyring = await db.reread_keyring()
    separation = keyring.separation
    if separation is None:
        raise SecureSessionError(
            "another run of `separate` has ended the separation: run `check`", retryable=True
        )
    result = Separation(keyring.database_id.hex(), resumed)
    are_replaced = await _replace_keys(db, keyring, separation, options)
    if are_replaced:
        retirement = await retire(db, **options)
        result.deleted_data_keys = retirement.deleted_data_keys
        result.deleted_master_ids = retirement.deleted_master_ids
    old_master_ids = (await db.reread_keyring()).data_masters.keys() & separation.master_ids
    # A data key of an owner without a row is neither rotated nor retired.  It would still decrypt
    # records of the original, so the separation is not complete while such an old key exists.
    read = db.runner.key_db.read
    ((count,),) = await read(_NUMBER_OF_OLD_DATA_KEYS, {"since": separation.since})
    result.kept = len(old_master_ids) + int(count)
    result.complete = are_replaced and not result.kept
    if result.complete:
        await _end_separation(db, keyring)
        if keyring.has_audit_table:
            await db.reread_keyring()
            await db.keyring()  # store in the audit trail of the copy that this command has run
    return result


async def _replace_keys(
    db: Database, keyring: Keyring, separation: SeparationState, options: dict[str, Any]
) -> bool:
    """Replace all old keys, so that `retire` can delete them; return whether that succeeded."""
    meta_texts = (await db.survey_existing()).meta_texts
    needs_new_master = (
        f"{meta.ROTATION}master" in meta_texts
        or not keyring.data_masters.keys() - separation.master_ids
    )
    if needs_new_master and not (await rotate_master(db, **options)).succeeded:
        return False
    # A record is old if its data key is not the current one, or is older than the separation.
    meter = Meter(rate=options["rows_per_second"])
    counts, _ = await count_records(db, meter, separation.since)
    has_old_records = any(count.under_current < count.rows for count in counts)
    is_done = not has_old_records and f"{meta.ROTATION}data" not in meta_texts
    return is_done or (await rotate_data(db, **options)).succeeded


_NUMBER_OF_OLD_DATA_KEYS = select_count(
    data_keys, data_keys.c.created_at < sa.bindparam("since", type_=sa.BigInteger)
)


async def _begin_separation(db: Database) -> None:
    """Store a new database id, bind all master keys to it, and delete old checkpoints."""
    survey, keyring = await db.survey_existing(), await db.keyring()
    load_features(survey, keyring)  # reject a tampered list: the new list contains its features
    require_no_wrapper(survey, "separate")
    old_id, new_id = keyring.database_id, secrets.token_bytes(16)
    master_ids = frozenset(row.id for row in survey.master_rows if row.purpose == DATA_MASTER)
    if len(master_ids) > _MAX_OLD_MASTERS:
        raise ConfigurationError(
            f"the keyring has {len(master_ids)} data masters, and at most {_MAX_OLD_MASTERS} can "
            "be separated: run `retire` first"
        )
    separation = SeparationState(old_id, await rotation_start_time(db), master_ids)
    roots = db.runner.backends.roots
    rewrap = partial(rewrap_master_key, roots=roots, database_id=old_id, new_database_id=new_id)
    wrapped = await gather_all(*(rewrap(row) for row in survey.master_rows))
    meta_texts = separation_rows(separation, keyring.index_master, new_id, survey.features)
    if not await db.runner.key_db.run_sync(partial(_store_separation, survey, wrapped, meta_texts)):
        raise SecureSessionError(_CHANGED, retryable=True)
    if db.runner.executors.has_key_database:
        await db.runner.data_db.run_sync(partial(_store_new_id, old_id.hex(), new_id.hex()))
    # Forget this run's audit trail: its first record was deleted.  A completed run stores both
    # records again at its end.
    if running := running_command():
        running.trails.clear()
    await db.close()  # the next call opens the database with its new id


async def _complete_new_id(db: Database) -> None:
    """Store the new id in the data database, if a killed run stored it only in the key database."""
    if not db.runner.executors.has_key_database:
        return
    db.require_files()
    data, survey = await db.survey_unchecked()
    old_id = survey.separated_from
    if old_id is None or old_id != data.meta_texts.get(meta.DATABASE_ID):
        return
    require_usable(survey, TableSet.KEYS, create_tables=False)
    await db.open_surveyed(survey)
    await db.runner.data_db.run_sync(partial(_store_new_id, old_id, survey.existing_id.hex()))


def _delete_bound_rows(connection: sa.Connection) -> None:
    """Delete the checkpoints, and the rows of `secure_migrated` and `secure_audit`: all of them are
    bound to the original's id.

    The copy starts without a history of imports, and with an empty audit trail: the original has
    the trail of what happened before.  `_end_separation` removes the feature `migration`.
    """
    meta.remove_checkpoints(connection)
    for table in (migrated, audit_records):
        if has_table(connection, table):
            connection.execute(sa.delete(table)).close()


def _store_separation(
    expected: Survey, new: list[MasterKeyRow], meta_texts: dict[str, str], connection: sa.Connection
) -> bool:
    """Store the keyring *new* and *meta_texts* in `secure_meta`; see also `_delete_bound_rows`.

    Return False if the keyring, the id or the features differ from *expected*: a service may have
    added a feature.
    """
    # Lock the id before the keyring is read: `rotate master` adds a master key for the old id only
    # while it holds this lock (on a cluster, the claim of `store_master_keys`).
    names = (meta.DATABASE_ID, meta.FEATURES)
    stored_texts = {name: meta.read(connection, name, lock=True) for name in names}
    # An earlier attempt may have been committed, although its connection was lost.
    if stored_texts[meta.DATABASE_ID] == meta_texts[meta.DATABASE_ID]:
        return True
    is_unchanged = stored_texts.items() <= expected.meta_texts.items()
    if not (is_unchanged and store_master_keys(expected, new, connection)):
        return False
    for name, value in meta_texts.items():
        meta.put(connection, name, value)
    _delete_bound_rows(connection)
    return True


def _store_new_id(old_id: str, new_id: str, connection: sa.Connection) -> None:
    """Store the new id in the data database; see also `_delete_bound_rows`."""
    if meta.read(connection, meta.DATABASE_ID, lock=True) != old_id:
        return  # another run has stored the new id, and services may have stored rows of the copy
    meta.put(connection, meta.DATABASE_ID, new_id)
    _delete_bound_rows(connection)


async def _end_separation(db: Database, keyring: Keyring) -> None:
    survey = await db.survey_existing()
    load_features(survey, keyring)  # reject a tampered list: the new list contains its features
    if FeatureName.SEPARATING not in survey.features:
        return  # another run that has continued this separation has ended it
    features = survey.features - {FeatureName.SEPARATING, FeatureName.MIGRATION}
    value = features_with_mac(keyring.index_master, keyring.database_id, features)

    def end(connection: sa.Connection) -> bool:
        if not meta.swap(connection, meta.FEATURES, survey.meta_texts[meta.FEATURES], value):
            return False
        meta.put(connection, meta.SEPARATION, None)
        meta.put(connection, meta.MIGRATION_MARK, None)
        return True

    if not await db.runner.key_db.run_sync(end):
        raise SecureSessionError(_CHANGED, retryable=True)
