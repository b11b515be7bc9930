"""Another data master: the data keys, one or a few for each user and app, are wrapped anew."""

import time
from functools import partial
from typing import Any, NamedTuple

import sqlalchemy as sa

from adk_secure_sessions.errors import ConfigurationError, SecureSessionError
from adk_secure_sessions.formats.records import header
from adk_secure_sessions.keys.data_keys import (
    WRAP_BACKEND_ID,
    DataKeyRow,
    unwrap_data_key,
    wrap_data_key,
)
from adk_secure_sessions.keys.keyring import (
    DATA,
    Keyring,
    MasterKeyRow,
    new_master,
    unwrap_master_key,
)
from adk_secure_sessions.keys.providers import PLAINTEXT_ROOT_KEY_ID
from adk_secure_sessions.maintenance.checkpoints import ANOTHER, Checkpoint, Checkpoints, is_since
from adk_secure_sessions.maintenance.coverage import count_data_keys
from adk_secure_sessions.maintenance.database import Database
from adk_secure_sessions.maintenance.engine import Meter, Progress, count_rows, ranges, within
from adk_secure_sessions.maintenance.problems import UNREADABLE, Problem, Problems
from adk_secure_sessions.storage import (
    DATA_KEYS,
    data_keys,
    keyring,
)

_BATCH = 500
_PASSES = 3


class MasterRotation(NamedTuple):
    """What `rotate_master` did, or would do.

    Attributes:
        master_id: The data master that is to wrap all data keys; None: it is yet to be made.
        since: When the rotation began, in microseconds since 1970, UTC.
        resumed: Whether a run before this one began it; the database says so.
        rotated: Data keys that another wrapped.
        left: Data keys that another master still wraps.
        bad: Of these, such as cannot be unwrapped; they were left alone.
        problems: The first 1000 of them.
    """

    master_id: int | None
    since: int
    resumed: bool
    rotated: int
    left: int
    bad: int
    problems: tuple[Problem, ...]


async def rotate_master(
    db: Database,
    *,
    dry_run: bool = False,
    restart: bool = False,
    progress: Progress | None = None,
    rows_per_second: float | None = None,
) -> MasterRotation:
    """Make a new data master under the root key of `backend`, and wrap all data keys with it.

    In batches, each key only if it is still as it was read; services that run go on, and take
    up the new master when they meet it.  A run that was killed is continued by the next.  The
    old masters stay until `retire`.

    Args:
        db: The database, with all root keys that its master keys need.
        dry_run: Unwrap all data keys, and write nothing.
        restart: Begin anew, although a rotation before did not end.
        progress: Called with the number of data keys done, and of all.
        rows_per_second: Go no faster.

    Raises:
        WrongKeyError: A root key is missing or wrong.
        SecureSessionError: Another rotation was begun meanwhile; what this one did stays.
        KeyServiceError: The key provider failed.
        ConfigurationError: The database cannot be used, or `backend` has no root key.
        TamperedError: What is stored of the rotation before was altered.
    """
    if db.backends.writer.root_key.key_id == PLAINTEXT_ROOT_KEY_ID:
        raise ConfigurationError("NoOpBackend has no root key to wrap a master with")
    await db.keys()
    run = _Run(db, dry_run, Meter(progress, await _total(db), rows_per_second))
    return await run.rotate(restart)


class _Run:
    def __init__(self, db: Database, dry_run: bool, meter: Meter) -> None:
        self._db = db
        self._dry_run = dry_run
        self._meter = meter
        self._checkpoints = Checkpoints(db, "master", dry_run=dry_run)
        self._problems = Problems()
        self._rotated = 0

    async def rotate(self, restart: bool) -> MasterRotation:
        at = await self._checkpoints.begin(restart=restart)
        master_id = await self._master(at.since)
        left = 0
        for _ in range(_PASSES):
            await self._walk(master_id, at)
            left = await self._left(master_id)
            if left <= self._problems.count or self._dry_run:
                break
            at = Checkpoint(at.since)  # another process wrapped some meanwhile
        await self._checkpoints.end(at.since, complete=not (left or self._problems.count))
        self._meter.finish()
        found = self._problems
        return MasterRotation(
            master_id,
            at.since,
            self._checkpoints.resumed,
            self._rotated,
            left,
            found.count,
            tuple(found.kept),
        )

    async def _master(self, since: int) -> int | None:
        """The newest master of this rotation, made if there is none yet."""
        root, keys = self._db.backends.writer.root_key, await self._db.keys()
        while True:
            rows = (await self._db.survey()).keyring
            mine = [row for row in rows if row.purpose == DATA and row.root_key_id == root.key_id]
            newest = max(mine, key=lambda row: (row.created_at, row.id), default=None)
            if newest is not None and is_since(since, newest.created_at):
                await self._db.renew_keyring()
                return newest.id
            if self._dry_run:
                return None
            database_id = keys.keyring.database_id
            now = max(since, time.time_ns() // 1000)
            fresh = await new_master(DATA, root, database_id, now)
            await unwrap_master_key(
                fresh, {root.key_id: root}, database_id
            )  # or it would open nothing
            await self._db.change_keys(partial(_add, fresh, len(rows)))

    async def _walk(self, master_id: int | None, at: Checkpoint) -> None:
        keys = await self._db.keys()
        self._problems = Problems()
        after = at.after if at.after >= 0 else None
        async for keyset in ranges(self._db, data_keys.c.id, _BATCH, after):
            found = await self._db.read_keys(_rows(keyset.bounds), keyset.parameters)
            rows = [DataKeyRow(*row) for row in found]
            old = [row for row in rows if header(row.wrapped) != (WRAP_BACKEND_ID, master_id)]
            await self._wrap(old, keys.keyring, master_id)
            await self._meter.advance(len(rows))
            if isinstance(keyset.last, int):
                await self._checkpoints.save(at._replace(after=keyset.last))

    async def _wrap(self, rows: list[DataKeyRow], masters: Keyring, master_id: int | None) -> None:
        changed: dict[int, DataKeyRow] = {}
        opened: dict[int, bytes] = {}
        for row in rows:
            try:
                opened[row.id] = unwrap_data_key(row, masters)
            except UNREADABLE as error:
                self._problems.refused(error, data_keys.name, row.id)
            else:
                changed[row.id] = row
        if self._dry_run or not changed:
            self._rotated += len(changed)
            return
        assert master_id is not None, "only a dry run has none"
        new = {
            key: wrap_data_key(row, masters, master_id, opened[key]) for key, row in changed.items()
        }
        pairs = [(row, new[key]) for key, row in changed.items()]
        await self._db.change_keys(partial(_rewrap, pairs, master_id))
        span = {"after": min(changed) - 1, "last": max(changed)}
        stored = await self._db.read_keys(_rows((True, True)), span)
        for row in (DataKeyRow(*values) for values in stored):
            if row == new.get(row.id):
                if unwrap_data_key(row, masters) != opened[row.id]:
                    raise SecureSessionError(f"data key {row.id} does not read back as it was")
                self._rotated += 1

    async def _left(self, master_id: int | None) -> int:
        if self._dry_run:
            return self._rotated + self._problems.count
        if master_id not in {row.id for row in (await self._db.survey()).keyring}:
            raise SecureSessionError(f"master key {master_id} was dropped meanwhile: {ANOTHER}")
        counts = await count_data_keys(self._db, Meter(None, 0, None))
        return sum(one.keys for one in counts if one.master_id != master_id)


async def _total(db: Database) -> int:
    return await count_rows(db, data_keys)


def _add(row: MasterKeyRow, known: int, connection: sa.Connection) -> None:
    """Add *row*, unless another run was first; services notice by the number of rows."""
    if connection.scalar(sa.select(sa.func.count()).select_from(keyring)) == known:
        connection.execute(sa.insert(keyring).values(row._asdict()))


def _rewrap(
    pairs: list[tuple[DataKeyRow, DataKeyRow]], master_id: int, connection: sa.Connection
) -> None:
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
        # Another run's `retire` may have dropped the master before it wrapped anything.
        sa.select(sa.literal_column("1")).where(keyring.c.id == sa.bindparam("master_id")).exists(),
    )
    .values(wrapped=sa.bindparam("new", type_=data_keys.c.wrapped.type))
)


def _rows(bounds: tuple[bool, bool]) -> sa.Select[Any]:
    key = data_keys.c.id
    return DATA_KEYS.where(*within(key, bounds)).order_by(key)
