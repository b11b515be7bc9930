"""Read the records of one app or user in batches, and re-encrypt them."""

import functools
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

import sqlalchemy as sa

from adk_secure_sessions.db.protocol import Row
from adk_secure_sessions.errors import SecureSessionError
from adk_secure_sessions.formats.records import (
    FLAGS,
    HEADER_LENGTH,
    decode_text,
    header,
    split_id,
    split_owner,
)
from adk_secure_sessions.keys.data_keys import StagedKeys
from adk_secure_sessions.maintenance.database import Database
from adk_secure_sessions.maintenance.owners import header_of
from adk_secure_sessions.maintenance.problems import UNREADABLE, Problems
from adk_secure_sessions.storage.pages import Span, grouped, pages
from adk_secure_sessions.storage.rows import (
    APPS,
    EVENTS,
    SESSIONS,
    SNAPSHOTS,
    USERS,
    WITNESSES,
    EventRow,
    SealedColumn,
    SessionRow,
    SnapshotRow,
    naming,
)
from adk_secure_sessions.storage.schema import (
    COLLECTION,
    apps,
    sessions,
    users,
)

R = TypeVar("R", bound=tuple[Any, ...])
Key = tuple[Any, ...]  # the values of a row's primary key

# Records are re-encrypted in groups, and one statement reads a group.  A group has at most
# `_RECORDS` records and at most `_BYTES` bytes.  A record larger than `_BYTES` is a group of its
# own.
_RECORDS = 64
_BYTES = 4 * 1024 * 1024
_SIZES = 1000  # how many pairs (primary key, length of the record) one statement reads

# --- records and their contexts ------------------------------------------------------------------


class Record(NamedTuple):
    """A stored record, still encrypted.

    *key* is the primary key of the row.  *version* is the value of the row's version column
    (`SealedColumn.version`), or 0 for an event.  *context* is a function that returns the record's
    context, or raises DecryptionError.  *stored* are the bytes of the record.
    """

    column: SealedColumn[Any]
    key: Key
    version: int
    context: Callable[[], bytes]
    stored: bytes

    @property
    def name(self) -> str:
        """The row's primary key as text, for messages."""
        parts = (part.hex() if isinstance(part, bytes) else str(part) for part in self.key)
        return ", ".join(parts)


class OwnerIds(NamedTuple):
    """The tag, the row id and the ids in ADK of an app or user; *user_id* is None for an app."""

    tag: bytes
    row: int
    app_name: str
    user_id: str | None


class SessionBatch(NamedTuple):
    """Some sessions of one user, with the records of their rows and their version witnesses.

    *sessions* maps row ids to session ids, and the row ids of collections to the names of the
    collections.  *collections* contains the row ids of the collections.  *rows* is the number of
    sessions and version witnesses that were read.  *span* is the range of session row ids.
    """

    sessions: dict[int, str]
    collections: frozenset[int]
    records: list[Record]
    rows: int
    span: Span


async def read_app(
    db: Database, keys: StagedKeys, row_id: int
) -> tuple[OwnerIds, list[Record]] | None:
    """Read the records of an app: its row and its version witness.

    *keys* are the data keys of the app.  This function also tells *keys* which data keys the app's
    row names.  Return None if the app's row does not exist.

    Raises:
        DecryptionError: The app's row cannot be decrypted.
    """
    rows = await _read(db, APPS, [(row_id,)])
    if not rows:
        return None
    row = rows[0]
    with naming(apps.name, row_id):
        app_name = decode_text(row.app_name)
        context = APPS.context((app_name,), row)
        fields = split_owner(keys.open(row.tag, context, row.state))
    keys.adopt(row.tag, fields.key_ids)
    owner = OwnerIds(row.tag, row_id, app_name, None)
    record = Record(APPS, (row_id,), row.version, lambda: context, row.state)
    return owner, [record, *await _witness_records(db, app_name, [row.tag])]


async def read_user(
    db: Database, keys: StagedKeys, row_id: int, app_name: str
) -> tuple[OwnerIds, list[Record]] | None:
    """Read the records of a user's row and its version witness, but not those of the sessions.

    *keys* are the data keys of the user.  This function also tells *keys* which data keys the
    user's row names.  Return None if the user's row does not exist.

    Raises:
        DecryptionError: The user's row cannot be decrypted.
    """
    rows = await _read(db, USERS, [(row_id,)])
    if not rows:
        return None
    row = rows[0]
    with naming(users.name, row_id):
        context = USERS.context((app_name,), row)
        user_id, rest = split_id(keys.open(row.tag, context, row.state))
        fields = split_owner(rest)
    keys.adopt(row.tag, fields.key_ids)
    owner = OwnerIds(row.tag, row_id, app_name, user_id)
    record = Record(USERS, (row_id,), row.version, lambda: context, row.state)
    return owner, [record, *await _witness_records(db, app_name, [row.tag])]


async def session_batches(
    db: Database, keys: StagedKeys, owner: OwnerIds, problems: Problems
) -> AsyncIterator[SessionBatch]:
    """Yield a user's sessions in batches, in the order of their row ids.

    Sessions that cannot be decrypted are added to *problems* instead.
    """
    query, size = _OF_USER, db.limits.rows
    walk = pages(db.read, query, sessions.c.id, size, SessionRow, user_row=owner.row)
    async for rows in walk:
        ids, records, tags = {}, [], []
        for row in rows:
            try:
                ids[row.id], record = _session_record(keys, owner, row)
            except UNREADABLE as error:
                problems.add_error(error, sessions.name, row.id)
                continue
            records.append(record)
            tags.append(row.tag)
        proofs = await _witness_records(db, owner.app_name, tags)
        records += proofs
        collections = frozenset(row.id for row in rows if row.base_revision == COLLECTION)
        span = Span(rows[0].id - 1, rows[-1].id)
        yield SessionBatch(ids, collections, records, len(rows) + len(proofs), span)


async def snapshot_batches(
    db: Database, owner: OwnerIds, batch: SessionBatch, current: bytes
) -> AsyncIterator[list[Record]]:
    """Yield, in groups, the snapshots of the sessions in *batch* that must be re-encrypted.

    *current* is the record header that names the owner's current data key.  Snapshots with this
    header are skipped.
    """
    async for keys in _keys_of_others(db, SNAPSHOTS, owner, batch, current):
        rows = await _read(db, SNAPSHOTS, keys)
        yield [_snapshot_record(owner, batch, row) for row in rows]


async def event_batches(
    db: Database, owner: OwnerIds, batch: SessionBatch, current: bytes
) -> AsyncIterator[list[Record]]:
    """Yield, in groups, the events of the sessions in *batch* that must be re-encrypted.

    *current* is the record header that names the owner's current data key.  Events with this header
    are skipped.
    """
    async for keys in _keys_of_others(db, EVENTS, owner, batch, current):
        rows = await _read(db, EVENTS, keys)
        yield [_event_record(owner, batch, row) for row in rows]


def _session_record(keys: StagedKeys, owner: OwnerIds, row: SessionRow) -> tuple[str, Record]:
    """Decrypt the session in *row*, and return its id and its record.

    Raises:
        DecryptionError: The session cannot be decrypted.
    """
    assert owner.user_id is not None
    with naming(sessions.name, row.id):
        context = SESSIONS.context((owner.app_name, owner.user_id), row)
        session_id, _ = split_id(keys.open(owner.tag, context, row.state))
    return session_id, Record(SESSIONS, (row.id,), row.revision, lambda: context, row.state)


def _snapshot_record(owner: OwnerIds, batch: SessionBatch, row: SnapshotRow) -> Record:
    context = partial(SNAPSHOTS.context, _ids(owner, batch.sessions[row.session_row]), row)
    return Record(SNAPSHOTS, (row.session_row,), row.revision, context, row.state)


def _event_record(owner: OwnerIds, batch: SessionBatch, row: EventRow) -> Record:
    context = partial(EVENTS.context, _ids(owner, batch.sessions[row.session_row]), row)
    return Record(EVENTS, (row.session_row, row.seq), 0, context, row.event)


async def _witness_records(db: Database, app_name: str, tags: Iterable[bytes]) -> list[Record]:
    records = []
    for row in await _read(db, WITNESSES, [(tag,) for tag in tags]):
        context = partial(WITNESSES.context, (app_name,), row)
        records.append(Record(WITNESSES, (row.tag,), row.number, context, row.seal))
    return records


def _ids(owner: OwnerIds, session_id: str) -> tuple[str, str, str]:
    assert owner.user_id is not None
    return owner.app_name, owner.user_id, session_id


# --- re-encrypting -------------------------------------------------------------------------------


class _Decrypted(NamedTuple):
    """A decrypted record that must be encrypted with the current data key.

    *plaintext* begins with its flags, so a compressed or padded record stays as it is.
    """

    record: Record
    context: bytes
    plaintext: bytes


class Reencryptor:
    """Re-encrypts records; `count` is the number of records re-encrypted so far."""

    def __init__(self, db: Database, problems: Problems, *, dry_run: bool) -> None:
        self._db = db
        self.problems: Problems = problems
        self._dry_run = dry_run
        self.count: int = 0

    async def reencrypt(
        self, keys: StagedKeys, owner: bytes, records: Iterable[Record], target: int | None
    ) -> None:
        """Re-encrypt the *records* that are not encrypted with the data key *target* yet.

        A record that cannot be decrypted is added to `problems` and left unchanged.  A record that
        another process has changed since it was read is left unchanged, too.  Each re-encrypted
        record is read again and decrypted before it is counted.  A dry run only decrypts and
        counts.

        Args:
            keys: The data keys of *owner*.
            owner: The tag (blind index) of the app or user.
            records: Records of *owner*.
            target: The id of the owner's current data key.  None in a dry run if the rotation would
                create that data key.

        Raises:
            SecureSessionError: A re-encrypted record does not decrypt to the original plaintext.
        """
        old: list[_Decrypted] = []
        for record in records:
            table = record.column.table.name
            try:
                with naming(table, record.name):
                    if _key_id(record.stored) != target:
                        context = record.context()
                        plaintext = _plaintext(keys, owner, record, context)
                        old.append(_Decrypted(record, context, plaintext))
            except UNREADABLE as error:
                self.problems.add_error(error, table, record.name)
        if self._dry_run or not old:
            self.count += len(old)
            return
        new = [keys.seal_whole(owner, one.context, one.plaintext) for one in old]
        changes = [(one.record, sealed) for one, sealed in zip(old, new, strict=True)]
        await self._db.change(partial(_replace, changes))
        stored = await self._read_back([one.record for one in old])
        for one, sealed in zip(old, new, strict=True):
            table = one.record.column.table.name
            if stored.get((table, one.record.key)) == sealed:
                if keys.open_whole(owner, one.context, sealed) != one.plaintext:
                    raise SecureSessionError(
                        f"{table} row {one.record.name} does not read back as it was written"
                    )
                self.count += 1

    async def _read_back(self, records: list[Record]) -> dict[tuple[str, Key], bytes]:
        found = {}
        for column in dict.fromkeys(record.column for record in records):
            keys = [record.key for record in records if record.column is column]
            columns = (*column.key, column.value)
            for *key, stored in await _select(self._db, column, keys, columns):
                found[column.table.name, tuple(key)] = stored
        return found


def _plaintext(keys: StagedKeys, owner: bytes, record: Record, context: bytes) -> bytes:
    """Decrypt *record* and check its flags as a reader does; return its plaintext with the flags.

    Raises:
        DecryptionError: A reader would reject the record.
    """
    if record.column is WITNESSES:
        return FLAGS + keys.open_witness(owner, context, record.stored)
    return keys.open_whole(owner, context, record.stored)


def _key_id(stored: object) -> int | None:
    """Return the data key id in the header of *stored*; None for a value in an unknown format."""
    found = header(stored)
    return found[1] if found else None


# --- statements ----------------------------------------------------------------------------------


async def _keys_of_others(
    db: Database, column: SealedColumn[Any], owner: OwnerIds, batch: SessionBatch, current: bytes
) -> AsyncIterator[list[Key]]:
    """Yield groups of primary keys of the records in *batch* whose header is not *current*."""
    parameters = {**batch.span.parameters, "user_row": owner.row, "current": current}
    async for rows in pages(db.read, _others(column), column.key, _SIZES, _sized, **parameters):
        sizes = [one for one in rows if one[0][0] in batch.sessions]
        for group in grouped(sizes, itemgetter(1), _RECORDS, _BYTES):
            yield [key for key, _ in group]


def _sized(*row: Any) -> tuple[Key, int]:
    *key, size = row
    return tuple(key), size


async def _read(db: Database, column: SealedColumn[R], keys: Sequence[Key]) -> list[R]:
    """Return the rows with the primary keys *keys*."""
    columns = tuple(column.table.c)
    return [column.row(*values) for values in await _select(db, column, keys, columns)]


async def _select(
    db: Database, column: SealedColumn[Any], keys: Sequence[Key], of: tuple[sa.Column[Any], ...]
) -> list[Row]:
    rows: list[Row] = []
    for start in range(0, len(keys), _RECORDS):
        part = list(keys[start : start + _RECORDS])
        # The statement always has `_RECORDS` keys, so fill the list with copies of the first key.
        part += part[:1] * (_RECORDS - len(part))
        parameters = {
            f"k{number}_{position}": value
            for number, key in enumerate(part)
            for position, value in enumerate(key)
        }
        rows += await db.read(_by_keys(column, of), parameters)
    return rows


@functools.cache
def _by_keys(column: SealedColumn[Any], of: tuple[sa.Column[Any], ...]) -> sa.Select[Any]:
    wanted = [
        sa.and_(
            *(
                part == sa.bindparam(f"k{number}_{position}", type_=part.type)
                for position, part in enumerate(column.key)
            )
        )
        for number in range(_RECORDS)
    ]
    return sa.select(*of).where(sa.or_(*wanted))


_OF_USER = sa.select(*sessions.c).where(sessions.c.user_row == sa.bindparam("user_row"))


@functools.cache
def _others(column: SealedColumn[Any]) -> sa.Select[Any]:
    """Select the primary keys and lengths of a user's records whose header is not `current`."""
    return (
        sa.select(*column.key, sa.func.length(column.value))
        .select_from(column.table.join(sessions, sessions.c.id == column.key[0]))
        .where(
            sessions.c.user_row == sa.bindparam("user_row"),
            *Span(0, 0).conditions(sessions.c.id),
            header_of(column.value) != sa.bindparam("current", type_=sa.LargeBinary),
        )
    )


def _replace(changes: list[tuple[Record, bytes]], connection: sa.Connection) -> None:
    for column in dict.fromkeys(record.column for record, _ in changes):
        parameters = []
        for record, sealed in changes:
            if record.column is column:
                values = {f"at_{number}": value for number, value in enumerate(record.key)}
                values |= {"at_version": record.version, "at_header": record.stored[:HEADER_LENGTH]}
                parameters.append({**values, "new": sealed})
        connection.execute(_swap(column), parameters)


@functools.cache
def _swap(column: SealedColumn[Any]) -> sa.Update:
    """Return the UPDATE that replaces a record if the record has not changed since it was read.

    The statement compares the row's version and the record's header.  Every write of a row changes
    its version, and every re-encryption changes the key that the header names.
    """
    conditions = [
        part == sa.bindparam(f"at_{number}", type_=part.type)
        for number, part in enumerate(column.key)
    ]
    if column.version is not None:
        conditions.append(column.version == sa.bindparam("at_version"))
    conditions.append(header_of(column.value) == sa.bindparam("at_header", type_=sa.LargeBinary))
    new = sa.bindparam("new", type_=column.value.type)
    return sa.update(column.table).where(*conditions).values({column.value: new})
