"""Replace the data master: wrap all data keys with a new data master."""

from dataclasses import dataclass
from functools import partial

import sqlalchemy as sa

from adk_secure_sessions.audit import audited_command, record_new_key
from adk_secure_sessions.errors import ConfigurationError, SecureSessionError
from adk_secure_sessions.formats.records import parse_header_or_none
from adk_secure_sessions.keys.data_keys import (
    WRAP_BACKEND_ID,
    DataKeyRow,
    unwrap_data_key,
    wrap_data_key,
)
from adk_secure_sessions.keys.keyring import (
    DATA_MASTER,
    MAX_MASTERS,
    Keyring,
    MasterKeyRow,
    new_master,
    unwrap_master_key,
)
from adk_secure_sessions.keys.providers import PLAINTEXT_ROOT_KEY_ID
from adk_secure_sessions.maintenance.counts import count_data_keys, estimate_rows
from adk_secure_sessions.maintenance.database import Database
from adk_secure_sessions.maintenance.progress import Meter, Progress
from adk_secure_sessions.maintenance.rotation import (
    OVERLAPPED,
    Rotation,
    RotationRun,
    authenticated_data_masters,
    require_same_plaintext,
    store_master_keys,
    time_after,
)
from adk_secure_sessions.maintenance.row_scan import scan_data_keys
from adk_secure_sessions.results import counter
from adk_secure_sessions.storage import clusters
from adk_secure_sessions.storage.queries import DATA_KEYS
from adk_secure_sessions.storage.schema import data_keys
from adk_secure_sessions.storage.schema import keyring as keyring_table
from adk_secure_sessions.storage.table_walk import rows_where

_HEADROOM = 4  # master keys that services with other root keys may have to create


@dataclass
class MasterRotation(Rotation):
    """The result of `rotate_master`; it also has the attributes of `Rotation`.

    Attributes:
        master_id: The id of the new data master; None if a dry run did not create it.
        rotated: How many data keys were wrapped with the new data master.
    """

    master_id: int | None = None
    rotated: int = counter(
        "data key", "wrapped by the new data master", shows_zero=True, is_change=True
    )


@audited_command
async def rotate_master(
    db: Database,
    *,
    dry_run: bool = False,
    restart: bool = False,
    progress: Progress | None = None,
    rows_per_second: float | None = None,
) -> MasterRotation:
    """Create a new data master under the root key of `backend`, and wrap all data keys with it.

    Data keys are wrapped in batches.  A row is replaced only if no other process has changed the
    row since it was read.  Services can keep running: they read the new data master when they first
    need it.  If a run is killed, the next run continues its rotation.  The old data masters stay
    until `retire` deletes them.

    Args:
        restart: Begin a new rotation even if another one is unfinished.
        progress: Counts data keys.

    Raises:
        SecureSessionError: Another rotation was started during this one, or a newly wrapped data
            key cannot be unwrapped.  The data keys that this rotation has already wrapped keep the
            new data master.
        ConfigurationError: `backend` has no root key; or the keyring is nearly full, and `retire`
            has to delete old data masters first.
        TamperedError: The checkpoint of the unfinished rotation was modified; or the time of
            creation of a key is after the year 9999.
    """
    run = _MasterRotationRun(db, "master", MasterRotation(), dry_run=dry_run)
    return await run.run(restart=restart, progress=progress, rows_per_second=rows_per_second)


class _MasterRotationRun(RotationRun[MasterRotation]):
    async def _check_and_count_rows(self) -> int:
        if self._db.runner.backends.writing_backend.root_key.key_id == PLAINTEXT_ROOT_KEY_ID:
            raise ConfigurationError("NoOpBackend has no root key to wrap a master with")
        await self._db.keyring()
        return await estimate_rows(self._db, data_keys)

    async def _before_passes(self) -> None:
        """Find the data master of this rotation; if there is none yet, create it.

        It is the newest data master that the root key of `backend` wraps, if it was created since
        the rotation began.  After each attempt to add a data master, search again: another process
        may have added one first.
        """
        root = self._db.runner.backends.writing_backend.root_key
        created: MasterKeyRow | None = None
        while True:
            survey = await self._db.survey_existing()
            # Not the id with which this run began: `separate` may have replaced it since.
            database_id = survey.existing_id
            masters = await authenticated_data_masters(self._db, survey)
            candidates = [row for row in masters if row.root_key_id == root.key_id]
            newest = max(candidates, key=lambda row: (row.created_at, row.id), default=None)
            if newest is not None and newest.created_at >= self.result.since:
                await self._db.reread_keyring()
                self.result.master_id = newest.id
                if newest == created:
                    record_new_key(database_id, "data master", newest.id, root_key=root.key_id)
                return
            if len(survey.master_rows) >= MAX_MASTERS - _HEADROOM:
                raise ConfigurationError(
                    f"the keyring has {len(survey.master_rows)} master keys, and a database with "
                    f"more than {MAX_MASTERS} cannot be opened: run `retire`, which deletes those "
                    "that wrap no data key; if it keeps them, it says why"
                )
            if self._dry_run:
                return
            # Services wrap new data keys with the data master that was created last.  So the new
            # data master must have a later time of creation than all other data masters.
            now = max([self.result.since, *(time_after(keyring_table, row) for row in masters)])
            created, _ = await new_master(DATA_MASTER, root, database_id, now)
            # Check that the new data master can be unwrapped before data keys depend on it.
            await unwrap_master_key(created, {root.key_id: root}, database_id)
            # The new row changes the number of rows: at the latest when a service stores a data
            # key, it detects that, and reads the keyring again.
            await self._db.runner.key_db.run_sync(partial(store_master_keys, survey, [created]))

    async def _replace_old_keys(self) -> bool:
        before = self.result.rotated
        keyring = await self._db.keyring()
        wanted_header = (WRAP_BACKEND_ID, self.result.master_id)
        async for rows in scan_data_keys(self._db):
            outdated = [row for row in rows if parse_header_or_none(row.wrapped) != wanted_header]
            await self._rewrap_batch(outdated, keyring)
            await self._meter.advance(len(rows))
            await self._reject_other_rotation()
        return self.result.rotated > before

    async def _rewrap_batch(self, rows: list[DataKeyRow], keyring: Keyring) -> None:
        """Wrap the data keys with the new data master; count those that are stored."""
        keys: dict[DataKeyRow, bytes] = {}
        for row in rows:
            with self._problems.collecting_errors(data_keys.name, row.id):
                keys[row] = unwrap_data_key(row, keyring)
        if self._dry_run or not keys:
            self.result.rotated += len(keys)
            return
        master_id = self.result.master_id
        assert master_id is not None, "only a dry run creates no data master"
        pairs = [(row, wrap_data_key(row, keyring, master_id, key)) for row, key in keys.items()]
        for before, after in pairs:
            decrypt = partial(unwrap_data_key, after, keyring)
            require_same_plaintext(data_keys.name, after.id, keys[before], decrypt)
        await self._db.runner.key_db.run_sync(partial(_store_rewrapped, pairs, master_id))
        new_rows = {after for _, after in pairs}
        read, ids = self._db.runner.key_db.read, [before.id for before, _ in pairs]
        stored_rows = await rows_where(read, DATA_KEYS, data_keys.c.id, ids)
        self.result.rotated += sum(DataKeyRow(*values) in new_rows for values in stored_rows)

    async def _count_left(self) -> int:
        if self._dry_run:
            return self._problems.count
        if self.result.master_id not in {
            row.id for row in (await self._db.survey_existing()).master_rows
        }:
            raise SecureSessionError(
                f"master key {self.result.master_id} was retired meanwhile: {OVERLAPPED}"
            )
        counts = await count_data_keys(self._db, Meter())
        return sum(count.key_count for count in counts if count.master_id != self.result.master_id)


def _store_rewrapped(
    pairs: list[tuple[DataKeyRow, DataKeyRow]], master_id: int, connection: sa.Connection
) -> None:
    """For each pair of an old and a new row, replace the old row if it has not changed."""
    clusters.claim(connection, clusters.KEYRING_CLAIMS[0])
    parameters = [
        {"at_id": old.id, "at_wrapped": old.wrapped, "new": new.wrapped, "master_id": master_id}
        for old, new in pairs
    ]
    connection.execute(_REWRAP, parameters)


_REWRAP = (
    sa.update(data_keys)
    .where(
        data_keys.c.id == sa.bindparam("at_id"),
        data_keys.c.wrapped == sa.bindparam("at_wrapped", type_=data_keys.c.wrapped.type),
        # Require that the new data master still exists.  If another rotation has replaced the new
        # data master before any data key was wrapped with it, `retire` may have deleted it.
        sa.select(sa.literal_column("1"))
        .where(keyring_table.c.id == sa.bindparam("master_id"))
        .exists(),
    )
    .values(wrapped=sa.bindparam("new", type_=data_keys.c.wrapped.type))
)
