"""Other data keys, perhaps of another backend: every record is sealed anew."""

import functools
from collections import Counter
from functools import partial
from typing import Any, NamedTuple

import sqlalchemy as sa

from adk_secure_sessions.backends import NoOpBackend
from adk_secure_sessions.db.protocol import Apply, Change, Conflict, Steps, UniqueViolation
from adk_secure_sessions.errors import ConfigurationError
from adk_secure_sessions.formats.records import binary, pack
from adk_secure_sessions.keys.data_keys import DataKey, StagedKeys
from adk_secure_sessions.maintenance.checkpoints import Checkpoint, Checkpoints, is_since
from adk_secure_sessions.maintenance.coverage import count_records
from adk_secure_sessions.maintenance.database import Database
from adk_secure_sessions.maintenance.engine import (
    BATCH,
    Bounds,
    Meter,
    Progress,
    count_events,
    count_rows,
    ranges,
    within,
)
from adk_secure_sessions.maintenance.identities import app_name_of
from adk_secure_sessions.maintenance.problems import UNREADABLE, Problem, Problems
from adk_secure_sessions.maintenance.records import (
    Owner,
    base_chunks,
    event_chunks,
    open_app,
    open_user,
    session_batches,
)
from adk_secure_sessions.maintenance.resealing import Record, Resealer
from adk_secure_sessions.storage import (
    INSERT_KEY,
    apps,
    data_keys,
    mark_plaintext,
    naming,
    repeated,
    sessions,
    users,
)

_PASSES = 3
_APPS, _USERS = range(2)


class DataRotation(NamedTuple):
    """What `rotate_data` did, or would do.

    Attributes:
        since: When the rotation began, in microseconds since 1970, UTC; data keys made before
            are replaced.
        resumed: Whether a run before this one began it; the database says so.
        keys: Data keys that it made.
        resealed: Records that it sealed anew.
        left: Records that are not under their owner's newest data key, of the writing backend
            and made since then; in a dry run, those that are yet to be sealed anew.
        left_in: Table by table, how many of these.
        bad: How many of the rows cannot be opened; they were left alone.
        problems: The first 1000 of them.
    """

    since: int
    resumed: bool
    keys: int
    resealed: int
    left: int
    left_in: tuple[tuple[str, int], ...]
    bad: int
    problems: tuple[Problem, ...]


async def rotate_data(
    db: Database,
    *,
    dry_run: bool = False,
    restart: bool = False,
    progress: Progress | None = None,
    rows_per_second: float | None = None,
) -> DataRotation:
    """Give each app and user a new data key of `backend`, and seal all their records with it.

    One owner after the other, in batches, each record only if it is still as it was read, and
    each read back before it counts.  Services that run go on: they take up a new key when they
    meet a row that is sealed with it.  A run that was killed is continued by the next.  The old
    keys stay until `retire`.

    To another backend: first have all services write with it, and list the one before; here,
    too, it is `backend`, and the one before among `additional_backends`.

    Args:
        db: The database, with every backend whose records it may hold.
        dry_run: Open what would be sealed anew, and write nothing.
        restart: Begin anew, although a rotation before did not end.
        progress: Called with the number of rows done, and of all.
        rows_per_second: Go no faster.

    Raises:
        WrongKeyError: The root keys do not open it.
        ConfigurationError: The database cannot be used, or its only data master is in clear.
        TamperedError: What is stored of the rotation before was altered.
        SecureSessionError: Another rotation was begun meanwhile; what this one did stays.
    """
    return await _Run(db, dry_run, progress, rows_per_second).rotate(restart)


class _Run:
    def __init__(
        self, db: Database, dry_run: bool, progress: Progress | None, rate: float | None
    ) -> None:
        self._db = db
        self._dry_run = dry_run
        self._progress = progress
        self._rate = rate
        self._meter = Meter(None, 0, None)
        self._checkpoints = Checkpoints(db, "data", dry_run=dry_run)
        self._since = 0
        self._keys = 0
        self._resealed = 0
        self._begin_pass()

    def _begin_pass(self) -> None:
        self._problems = Problems()
        self._resealer = Resealer(self._db, self._problems, dry_run=self._dry_run)

    async def rotate(self, restart: bool) -> DataRotation:
        keys = await self._db.keys()
        if keys.keyring.current_id is None:
            raise ConfigurationError(
                "the keyring has no data master but in clear, which protects nothing: run "
                "`rotate master` first"
            )
        at = await self._checkpoints.begin(restart=restart)
        self._since = at.since
        total = 2 * await count_rows(self._db, apps, users, sessions)
        total = 2 * (total + await count_events(self._db))  # the second time to see what is left
        self._meter = Meter(self._progress, total, self._rate)
        left: Counter[str] = Counter()
        for _ in range(_PASSES):
            self._begin_pass()
            await self._walk(at)
            self._resealed += self._resealer.count
            left = await self._left()
            if self._dry_run or not left or not self._resealer.count:
                break
            at = Checkpoint(at.since)  # others wrote with older keys meanwhile
        await self._checkpoints.end(at.since, complete=not (left or self._problems.count))
        self._meter.finish()
        found = self._problems
        return DataRotation(
            at.since,
            self._checkpoints.resumed,
            self._keys,
            self._resealed,
            left.total(),
            tuple(left.items()),
            found.count,
            tuple(found.kept),
        )

    async def _walk(self, at: Checkpoint) -> None:
        for stage, (table, query) in enumerate(((apps, _apps), (users, _users))):
            if stage < at.stage:
                continue
            after = at.after if stage == at.stage and at.after >= 0 else None
            async for keyset in ranges(self._db, table.c.id, BATCH, after):
                for row in await self._db.read(query(keyset.bounds), keyset.parameters):
                    try:
                        await self._rotate_owner(stage, *row)
                    except UNREADABLE as error:
                        self._problems.refused(error, table.name, row[0])
                if isinstance(keyset.last, int):
                    await self._checkpoints.save(Checkpoint(at.since, stage, keyset.last))

    async def _rotate_owner(self, stage: int, row_id: int, tag: object, name: object) -> None:
        with naming((apps, users)[stage].name, row_id):
            keys = await self._db.keys_of(binary(tag))
        if stage == _APPS:
            found = await open_app(self._db, keys, row_id)
        else:
            with naming(users.name, row_id):
                app_name = app_name_of(name)
            found = await open_user(self._db, keys, row_id, app_name)
        if found is None:
            return  # deleted meanwhile
        owner, records = found
        keys = await self._with_key(keys, owner.tag)
        await self._reseal(keys, owner, records)
        await self._meter.advance(len(records))
        if owner.user_id is not None:
            await self._rotate_sessions(keys, owner)

    async def _rotate_sessions(self, keys: StagedKeys, owner: Owner) -> None:
        target = self._target(keys, owner.tag)
        start = pack(target.backend_id, target.id) if target else b""
        async for batch in session_batches(self._db, keys, owner, self._problems):
            # Sessions before their events: from then on none is appended with an older key.
            await self._reseal(keys, owner, batch.records)
            async for records in base_chunks(self._db, owner, batch, start):
                await self._reseal(keys, owner, records)
            rows = batch.rows
            async for records in event_chunks(self._db, owner, batch, start):
                await self._reseal(keys, owner, records)
                await self._meter.advance(len(records))
                rows -= len(records)
            await self._meter.advance(max(rows, 0))

    async def _reseal(self, keys: StagedKeys, owner: Owner, records: list[Record]) -> None:
        target = self._target(keys, owner.tag)
        await self._resealer.reseal(keys, owner.tag, records, target.id if target else None)

    def _target(self, keys: StagedKeys, owner: bytes) -> DataKey | None:
        """The key that the records of *owner* are to be under, if there is one yet."""
        current = keys.current(owner)
        if current is None or not keys.current_is_newest(owner):
            return None
        return current if is_since(self._since, current.created_at) else None

    async def _with_key(self, keys: StagedKeys, owner: bytes) -> StagedKeys:
        """The keys of *owner*, among them one that is no older than the rotation."""

        known: StagedKeys | None = keys

        async def attempt() -> StagedKeys:
            nonlocal known
            staged, known = known or await self._db.keys_of(owner), None
            if self._target(staged, owner):
                return staged
            row = staged.new(owner, self._since)
            values = row._asdict() | staged.keyring_guard()
            if isinstance(self._db.backends.writer, NoOpBackend):
                await self._db.change(mark_plaintext)
            try:
                self._keys += await self._insert(owner, values)
            except (Conflict, UniqueViolation):
                await self._db.renew_keyring()
                raise
            return staged

        if self._dry_run:
            return keys
        return await repeated(attempt, writes=True)

    async def _insert(self, owner: bytes, values: dict[str, object]) -> bool:
        """Store a key, unless its owner was erased: it would stand in the way of who comes back."""
        if self._db.key_executor is self._db.executor:
            work = partial(_insert_beside, owner, values)
            return await self._db.executor.define(work, commit=True)
        await self._db.key_executor.write(partial(_insert_apart, values))
        if await self._db.change(partial(_is_stored, owner)):
            return True
        await self._db.change_keys(partial(_drop, values["id"]))
        return False

    async def _left(self) -> Counter[str]:
        """Rows of each table that are yet to be sealed anew, or cannot be."""
        writer = self._db.backends.writer.backend_id
        left: Counter[str] = Counter()
        for one in await count_records(self._db, self._meter, self._since):
            left[one.table] += one.rows - (one.newest if one.backend_id == writer else 0)
        return +left


def _insert_apart(values: dict[str, object]) -> Steps[None]:
    if not (yield Apply([Change(INSERT_KEY, values)])):
        raise Conflict


def _insert_beside(owner: bytes, values: dict[str, object], connection: sa.Connection) -> bool:
    if not _is_stored(owner, connection):
        return False
    counted = {"preserve_rowcount": True}
    if connection.execute(INSERT_KEY, values, execution_options=counted).rowcount != 1:
        raise Conflict
    return True


def _is_stored(owner: bytes, connection: sa.Connection) -> bool:
    """Whether the owner has a row; who is about to delete it is waited for."""
    queries = (sa.select(table.c.id).where(table.c.tag == owner) for table in (apps, users))
    return any(connection.scalar(query.with_for_update()) is not None for query in queries)


def _drop(key_id: object, connection: sa.Connection) -> None:
    connection.execute(sa.delete(data_keys).where(data_keys.c.id == key_id))


@functools.cache
def _apps(bounds: Bounds) -> sa.Select[Any]:
    c = apps.c
    return sa.select(c.id, c.tag, c.app_name).where(*within(c.id, bounds)).order_by(c.id)


@functools.cache
def _users(bounds: Bounds) -> sa.Select[Any]:
    c = users.c
    query = sa.select(c.id, c.tag, apps.c.app_name)
    query = query.select_from(users.outerjoin(apps, apps.c.id == c.app_row))
    return query.where(*within(c.id, bounds)).order_by(c.id)
