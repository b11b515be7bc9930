"""Replace all data keys, for the same or another backend, and re-encrypt every record."""

import functools
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import sqlalchemy as sa

from adk_secure_sessions.audit import audited_command
from adk_secure_sessions.errors import ConfigurationError, UnknownKeyError
from adk_secure_sessions.formats.records import (
    HEADER_LENGTH,
    build_header,
    keep_packed,
    parse_header_or_none,
    reject_flags,
    require_bytes,
    split_id,
    split_owner,
)
from adk_secure_sessions.keys.data_keys import TransactionKeys
from adk_secure_sessions.maintenance.counts import count_records, estimate_rows
from adk_secure_sessions.maintenance.database import Database
from adk_secure_sessions.maintenance.progress import Progress
from adk_secure_sessions.maintenance.rotation import Rotation, RotationRun, require_same_plaintext
from adk_secure_sessions.maintenance.row_scan import (
    OwnerRow,
    app_name_of,
    header_column,
    key_text,
    scan_owners,
    scan_sessions_of_user,
)
from adk_secure_sessions.results import aligned, counter
from adk_secure_sessions.storage import key_operations, meta
from adk_secure_sessions.storage.queries import grouped
from adk_secure_sessions.storage.schema import (
    SEALED_TABLES,
    SealedTable,
    apps,
    data_keys,
    events,
    sessions,
    users,
    witnesses,
)
from adk_secure_sessions.storage.table_walk import RowRange, pages, rows_where

_APPS, _USERS, _SESSIONS, _SNAPSHOTS, _EVENTS, _WITNESSES = SEALED_TABLES
# One statement reads a group of at most `_GROUP_SIZE` records and `_GROUP_BYTES` bytes.
# A record larger than `_GROUP_BYTES` is a group of its own.
_GROUP_SIZE = 200
_GROUP_BYTES = 4 * 1024 * 1024
_SIZES = 1000  # how many pairs (primary key, length of the record) one statement reads


@dataclass
class DataRotation(Rotation):
    """The result of `rotate_data`; it also has the attributes of `Rotation`.

    Attributes:
        created_data_keys: How many data keys were created; 0 after a dry run.
        reencrypted: How many records were re-encrypted.
        left_in: The name of each table with records that are left, and their number.
        blobs: How many contents of artifacts were re-encrypted.  `rotate_data` re-encrypts none;
            `rotate_data_and_blobs` of `integrations.blob_rotation` does.
        blob_bytes: The number of bytes of these contents.
        bad_blobs: How many contents are missing or were tampered with; they were left unchanged.
            They are included in `bad` and `problems`, with the rows that name them.
    """

    reencrypted: int = counter("record", "re-encrypted", shows_zero=True, is_change=True)
    blobs: int = counter("blob", "re-encrypted", is_change=True)
    blob_bytes: int = counter("byte", "re-encrypted", is_change=True)
    created_data_keys: int = counter("data key", "created")
    bad_blobs: int = counter("blob", "missing or tampered with")
    left_in: tuple[tuple[str, int], ...] = ()

    def extra_lines(self, dry_run: bool) -> Iterator[str]:
        yield from aligned(self.left_in, "  ")
        if self.bad_blobs and self.bad == self.bad_blobs and not dry_run:
            yield (
                "next: restore these blobs from a backup of the store, or delete their artifacts, "
                "then run this again"
            )
        else:
            yield from super().extra_lines(dry_run)


@audited_command
async def rotate_data(
    db: Database,
    *,
    dry_run: bool = False,
    restart: bool = False,
    progress: Progress | None = None,
    rows_per_second: float | None = None,
) -> DataRotation:
    """Create a new data key of `backend` for each app and user, and re-encrypt all records.

    Records are re-encrypted in batches.  A record is replaced only if no other process has changed
    the record since it was read.  Replaced records are read again before they are counted.
    Services can keep running: when a service first reads a row that uses a new key, it reads the
    new key.  If a run is killed, the next run continues its rotation.  The old keys stay until
    `retire` deletes them.

    To change to another backend, first restart all services with the new backend as `backend` and
    the old backend in `additional_backends`.  Then call this function with a `Database` that has
    the same arguments.

    Args:
        restart: Begin a new rotation even if another one is unfinished.

    Raises:
        ConfigurationError: The only data master is stored as plaintext.
        TamperedError: The checkpoint of the unfinished rotation was modified; or the time of
            creation of a key is after the year 9999.
        SecureSessionError: Another rotation was started during this one, or a re-encrypted record
            does not decrypt.  The records that are already re-encrypted keep their new data keys.
    """
    run = DataRotationRun(db, dry_run=dry_run)
    return await run.run(restart=restart, progress=progress, rows_per_second=rows_per_second)


# --- the records of one owner --------------------------------------------------------------------


class _EncryptedRecord(NamedTuple):
    """A stored record, still encrypted: its table, its row, and the ids for its context."""

    table: SealedTable[Any]
    row: Any
    ids: Sequence[str]
    of_collection: bool = False

    @property
    def key(self) -> tuple[Any, ...]:
        return self.table.primary_key_of(self.row)

    @property
    def stored(self) -> Any:  # bytes, or any other type in a modified row of SQLite
        return self.row[-1]

    @property
    def name(self) -> str:
        return key_text(*self.key)


async def _choose_key_and_read_owner(
    db: Database, keys: TransactionKeys, table: SealedTable[Any], row: OwnerRow
) -> list[_EncryptedRecord] | None:
    """Return the records of the row and the version witness of an app or user.

    *keys* are the owner's data keys.  Also make the newest key that the row names the current one
    of *keys*.  Return None if the row does not exist any more.
    """
    rows = await _read_by_keys(db, table, [(row.id,)])
    if not rows:
        return None
    (owner_row,) = rows
    ids = (app_name_of(row.stored_app_name),)
    plaintext = keys.open(owner_row.tag, table.context(ids, owner_row), owner_row.record)
    if table is _USERS:
        _, plaintext = split_id(plaintext)
    _, key_ids, _ = split_owner(plaintext)
    keys.choose_current(owner_row.tag, key_ids)
    return [
        _EncryptedRecord(table, owner_row, ids),
        *await _witness_records(db, ids, [owner_row.tag]),
    ]


async def _witness_records(
    db: Database, ids: Sequence[str], tags: Iterable[bytes]
) -> list[_EncryptedRecord]:
    rows = await _read_by_keys(db, _WITNESSES, [(tag,) for tag in tags])
    return [_EncryptedRecord(_WITNESSES, row, ids) for row in rows]


async def _read_by_keys(
    db: Database, table: SealedTable[Any], keys: Iterable[tuple[Any, ...]]
) -> list[Any]:
    rows = await rows_where(db.runner.data_db.read, _ROWS[table], table.key_columns, keys)
    return [table.row_type(*row) for row in rows]


# --- the run -------------------------------------------------------------------------------------


class DataRotationRun(RotationRun[DataRotation]):
    """One run of `rotate_data`; a subclass may re-encrypt more after the records."""

    def __init__(self, db: Database, *, dry_run: bool) -> None:
        super().__init__(db, "data", DataRotation(), dry_run=dry_run)

    async def _check_and_count_rows(self) -> int:
        if (await self._db.keyring()).wrapping_master_id is None:
            raise ConfigurationError(
                "the keyring has no data master except one stored as plaintext, which protects "
                "nothing: run `rotate master` first"
            )
        # Each app, user and session has one row of its own and one version witness.
        row_count = 2 * await estimate_rows(self._db, apps, users, sessions)
        # A pass re-encrypts each row and, except in a dry run, `_count_left` counts it.
        return (1 if self._dry_run else 2) * (row_count + await estimate_rows(self._db, events))

    async def _before_passes(self) -> None:
        # Before `NoOpBackend` writes a record, store that the database contains plaintext records.
        if self._db.runner.backends.stores_plaintext and not self._dry_run:
            await self._db.runner.data_db.run_sync(meta.mark_plaintext)
            if self._db.runner.executors.has_key_database:
                await self._db.runner.key_db.run_sync(meta.mark_plaintext)

    async def _replace_old_keys(self) -> bool:
        before = self.result.reencrypted
        for table in (_APPS, _USERS):
            async for page in scan_owners(self._db, table.table):
                for row in page:
                    with self._problems.collecting_errors(table.name, row.id):
                        await self._rotate_owner(table, row)
                await self._reject_other_rotation()
        return self.result.reencrypted > before

    async def _rotate_owner(self, table: SealedTable[Any], row: OwnerRow) -> None:
        tag, app_name = require_bytes(row.tag), app_name_of(row.stored_app_name)
        if not self._dry_run:
            await self._renew_key(app_name, tag, of_user=table is _USERS)
        keys = await self._db.runner.unwrap_data_keys(tag)
        records = await _choose_key_and_read_owner(self._db, keys, table, row)
        if records is None:
            return  # the owner was deleted since its tag was read
        if keys.current(tag) is None and not self._dry_run:
            return  # a rotation for another backend has replaced the new key: `_count_left` counts
        wanted_key = self._wanted_key(keys, tag)
        await self._reencrypt(keys, tag, wanted_key, records)
        await self._meter.advance(len(records))
        if table is _APPS:
            return
        # A session is re-encrypted before its events.  Services never encrypt an event with a data
        # key older than that of the session, so events appended later use the new data key.
        wanted_header = build_header(*wanted_key) if wanted_key else b""
        async for records in self._records_of_sessions(app_name, row.id, wanted_header):
            await self._reencrypt(keys, tag, wanted_key, records)
            await self._meter.advance(len(records))

    async def _records_of_sessions(
        self, app_name: str, user_row: int, wanted_header: bytes
    ) -> AsyncIterator[list[_EncryptedRecord]]:
        """Yield the records of a user's sessions in groups, each session before its events.

        Snapshots and events whose header is *wanted_header* are skipped.
        """
        async for page in scan_sessions_of_user(self._db, user_row):
            found: dict[int, _EncryptedRecord] = {}
            for session in page:
                with self._problems.collecting_errors(sessions.name, session.id):
                    found[session.id] = _EncryptedRecord(
                        _SESSIONS, session.row, session.require_ids(), session.row.is_collection
                    )
            records = list(found.values())
            tags = [record.row.tag for record in records]
            yield records + await _witness_records(self._db, (app_name,), tags)
            if not records:
                continue
            # These ids are authentic: a modified id could be -2**63, and one less would overflow.
            row_range = RowRange(records[0].row.id - 1, records[-1].row.id)
            values: dict[str, object] = {"user_row": user_row, "wanted_header": wanted_header}
            values |= row_range.parameters
            for table in (_SNAPSHOTS, _EVENTS):
                query = _select_keys_under_other_headers(table)
                read, key = self._db.runner.data_db.read, table.key_columns
                async for sizes in pages(read, query, key, _SIZES, lambda *row: row, **values):
                    readable = [row for row in sizes if row[0] in found]
                    for group in grouped(readable, itemgetter(-1), _GROUP_SIZE, _GROUP_BYTES):
                        keys = [row[:-1] for row in group]
                        rows = await _read_by_keys(self._db, table, keys)
                        yield [found[row[0]]._replace(table=table, row=row) for row in rows]

    async def _renew_key(self, app_name: str, tag: bytes, *, of_user: bool) -> None:
        """Create the owner's new data key, and name it in its row, so that services use it."""
        identity = await self._db.runner.identify(app_name)
        renewed = await self._db.runner.run(
            key_operations.RenewKey(
                identity._replace(user_tag=tag) if of_user else identity,
                self.result.since,
                of_user=of_user,
            )
        )
        self.result.created_data_keys += renewed.created
        self.result.reencrypted += 2 * renewed.changed  # the owner's row and its version witness
        if renewed.orphaned_key_ids:
            # The owner was erased after the key was stored in the key database: delete the key.
            query = sa.delete(data_keys).where(data_keys.c.id.in_(renewed.orphaned_key_ids))
            await self._db.runner.key_db.run_sync(
                lambda connection: connection.execute(query).close()
            )

    def _wanted_key(self, keys: TransactionKeys, owner_tag: bytes) -> tuple[int, int] | None:
        """Return the ids of the backend and the key that the owner's records are to have, or None.

        Return None in a dry run of a rotation that would create a new key: all records are to have
        this key.
        """
        key = keys.current(owner_tag)
        is_new = (
            key and key.row.created_at >= self.result.since and keys.current_is_newest(owner_tag)
        )
        return (key.backend_id, key.id) if key and (is_new or not self._dry_run) else None

    async def _reencrypt(
        self,
        keys: TransactionKeys,
        owner_tag: bytes,
        wanted_key: tuple[int, int] | None,
        records: list[_EncryptedRecord],
        attempts: int = 3,
    ) -> None:
        """Re-encrypt those *records* whose headers do not contain *wanted_key* yet.

        A record is left unchanged if its key is newer than the current one, or if in all *attempts*
        another process has changed it since it was read.  Each re-encrypted record is read again
        before it is counted.
        """
        # With contexts and plaintexts.  Each plaintext begins with its flags, so a compressed or
        # padded record stays as it is.
        outdated: list[tuple[_EncryptedRecord, bytes, bytes]] = []
        for record in records:
            table = record.table
            with self._problems.collecting_errors(table.name, record.name):
                if wanted_key is None or parse_header_or_none(record.stored) != wanted_key:
                    context = table.context(record.ids, record.row)
                    try:
                        plaintext = _decrypt(keys, owner_tag, context, table, record.stored)
                    except UnknownKeyError:  # another service may have created the key since
                        later_keys = await self._db.runner.unwrap_data_keys(owner_tag)
                        plaintext = _decrypt(later_keys, owner_tag, context, table, record.stored)
                    # `retire` expects that no record is replaced by one under an older key.  If
                    # another rotation has used a newer key, it may have ended, so that `retire`
                    # has deleted the current key of *keys*.
                    if self._dry_run or keys.current_is_as_new_as(owner_tag, record.stored):
                        outdated.append((record, context, plaintext))
        if self._dry_run or not outdated:
            self.result.reencrypted += len(outdated)
            return
        changes: _Replacements = {}
        for record, context, plaintext in outdated:
            sealed = keys.seal(owner_tag, context, plaintext, has_flags=True)
            decrypt_new = partial(_decrypt, keys, owner_tag, context, record.table, sealed)
            require_same_plaintext(record.table.name, record.name, plaintext, decrypt_new)
            changes.setdefault(record.table, []).append((record, sealed))
        await self._db.runner.data_db.run_sync(partial(_store_reencrypted, changes))
        changed: list[_EncryptedRecord] = []
        for table, replaced in changes.items():
            new_records = {record.key: (record, sealed) for record, sealed in replaced}
            for row in await _read_by_keys(self._db, table, new_records):
                record, sealed = new_records[table.primary_key_of(row)]
                if row[-1] == sealed:
                    self.result.reencrypted += 1
                else:
                    changed.append(record._replace(row=row))
        if changed and attempts > 1:
            await self._reencrypt(keys, owner_tag, wanted_key, changed, attempts - 1)

    async def _count_left(self) -> int:
        if self._dry_run:
            return 0
        writing_backend_id = self._db.runner.backends.writing_backend.backend_id
        left_in: Counter[str] = Counter()
        keyring = await self._db.keyring()
        counts, _ = await count_records(self._db, self._meter, self.result.since, keyring)
        for records in counts:
            current = records.under_current if records.backend_id == writing_backend_id else 0
            left_in[records.table] += records.rows - current
        self.result.left_in = tuple((+left_in).items())
        return left_in.total()


def _decrypt(
    keys: TransactionKeys, owner: bytes, context: bytes, table: SealedTable[Any], stored: bytes
) -> bytes:
    """Decrypt *stored*, check its flags as a reader does, and return its plaintext with them."""
    handler = reject_flags if table.table is witnesses else keep_packed
    return keys.open_with_flags(owner, context, stored, handler)


# The records to replace and the new ones, by table.
_Replacements = dict[SealedTable[Any], list[tuple[_EncryptedRecord, bytes]]]


def _store_reencrypted(changes: _Replacements, connection: sa.Connection) -> None:
    for table, replaced in changes.items():
        parameters = []
        for record, sealed in replaced:
            at_key = {f"at_{number}": value for number, value in enumerate(record.key)}
            # An item has no version, and a service that does not know the new key may have replaced
            # the item by one under the same key.
            is_item = record.of_collection and table is _EVENTS
            if is_item and connection.scalar(_LOCK_ITEM, at_key) != record.stored:
                continue
            version, header = table.version_of(record.row), record.stored[:HEADER_LENGTH]
            parameters.append({**at_key, "at_version": version, "at_header": header, "new": sealed})
        if parameters:
            connection.execute(_replace_if_unchanged(table), parameters)


_ROWS = {table: sa.select(*table.table.c) for table in SEALED_TABLES}


@functools.cache
def _select_keys_under_other_headers(table: SealedTable[Any]) -> sa.Select[Any]:
    """Select the primary keys and lengths of a user's records without `wanted_header`."""
    return (
        sa.select(*table.key_columns, sa.func.length(table.record_column))
        .select_from(table.table.join(sessions, sessions.c.id == table.key_columns[0]))
        .where(
            sessions.c.user_row == sa.bindparam("user_row"),
            *RowRange(0, 0).conditions(sessions.c.id),
            header_column(table.record_column)
            != sa.bindparam("wanted_header", type_=sa.LargeBinary),
        )
    )


_LOCK_ITEM = (
    sa.select(events.c.event)
    .where(events.c.session_row == sa.bindparam("at_0"), events.c.seq == sa.bindparam("at_1"))
    .with_for_update()
)


@functools.cache
def _replace_if_unchanged(table: SealedTable[Any]) -> sa.Update:
    """Return the UPDATE that replaces a record if the record has not changed since it was read.

    The statement compares the row's version, if it has one, and the record's header, which names
    the key.  Every write changes the version, and every re-encryption changes the key.
    """
    conditions = [
        part == sa.bindparam(f"at_{number}", type_=part.type)
        for number, part in enumerate(table.key_columns)
    ]
    if table.version_column is not None:
        conditions.append(table.version_column == sa.bindparam("at_version"))
    at_header = sa.bindparam("at_header", type_=sa.LargeBinary)
    conditions.append(header_column(table.record_column) == at_header)
    new_record = sa.bindparam("new", type_=table.record_column.type)
    return sa.update(table.table).where(*conditions).values({table.record_column: new_record})
