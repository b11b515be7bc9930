"""Retire replaced keys: delete data keys and data masters that no row uses any more."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import sqlalchemy as sa

from adk_secure_sessions.audit import audited_command
from adk_secure_sessions.db.dialects import dialect_of
from adk_secure_sessions.errors import DecryptionError, Reason, TamperedError
from adk_secure_sessions.formats.records import build_header, parse_header
from adk_secure_sessions.keys.data_keys import WRAP_BACKEND_ID, DataKeyRow
from adk_secure_sessions.keys.keyring import DATA_MASTER, MasterKeyRow
from adk_secure_sessions.maintenance.counts import can_unwrap, select_count, split_at_newest_named
from adk_secure_sessions.maintenance.database import Database, require_no_wrapper
from adk_secure_sessions.maintenance.problems import CappedList, reject_orphans
from adk_secure_sessions.maintenance.progress import Meter, Progress
from adk_secure_sessions.maintenance.row_scan import (
    flattened,
    header_column,
    read_owner_with_tag,
    scan_data_keys,
    scan_sessions,
    scan_sessions_of_user,
)
from adk_secure_sessions.results import Result, counted, counter, listing
from adk_secure_sessions.storage import clusters, key_operations
from adk_secure_sessions.storage.queries import MASTER_KEYS
from adk_secure_sessions.storage.schema import (
    apps,
    data_keys,
    events,
    sessions,
    snapshots,
    users,
    witnesses,
)
from adk_secure_sessions.storage.schema import keyring as keyring_table
from adk_secure_sessions.storage.table_walk import pages


class KeptKey(NamedTuple):
    """A replaced key that `retire` keeps, because rows need it or may need it.

    Attributes:
        table: The table of the key: `secure_data_keys` or `secure_keyring`.
        id: The key's id.
        references: The name of each table with rows that need the key, and the number of these
            rows.  The row of a user or an app needs each data key that it names.  Empty if the rows
            are unknown, or if only an older key is needed.
    """

    table: str
    id: int
    references: tuple[tuple[str, int], ...]

    @property
    def line(self) -> str:
        rows = ", ".join(f"{counted(number, 'row')} of {name}" for name, number in self.references)
        why = rows or "an older key is needed, or the rows that need it are unknown: see `verify`"
        return f"{self.table} row {self.id} is kept: {why}"


@dataclass
class Retirement(Result):
    """The result of `retire`; after a dry run, the expected result.

    Attributes:
        deleted_data_keys: How many data keys were deleted.
        deleted_master_ids: The ids of the data masters that were deleted.
        kept: How many replaced keys were kept.
        kept_keys: The first 1000 kept keys.
        spare_keys: How many data keys are newer than the current data key of their owner, and no
            row or record names them.  They were left alone: with a key database, a service may be
            about to name such a key.  The next rotation replaces them.
    """

    deleted_data_keys: int = counter("data key", "deleted", shows_zero=True, is_change=True)
    deleted_master_ids: tuple[int, ...] = counter(
        "data master", "deleted", shows_zero=True, is_change=True, default=()
    )
    kept: int = counter("replaced key", "kept", is_failure=True)
    kept_keys: tuple[KeptKey, ...] = listing("kept")
    spare_keys: int = counter(
        "data key", "spare", hint="no row names them, and they encrypt nothing"
    )

    def extra_lines(self, dry_run: bool) -> Iterator[str]:
        # Suggest a rotation only if known rows need a kept key.  If it is unknown which rows need
        # the key, a rotation may not help.
        tables = {key.table for key in self.kept_keys if key.references}
        if data_keys.name in tables:
            yield "next: `rotate data` re-encrypts the records under them; then run `retire` again"
        if keyring_table.name in tables:
            yield "next: `rotate master` wraps the data keys under them; then run `retire` again"
        if tables:
            yield "if a key is still kept then, rows that need it cannot be decrypted: run `verify`"


@audited_command
async def retire(
    db: Database,
    *,
    dry_run: bool = False,
    progress: Progress | None = None,
    rows_per_second: float | None = None,
) -> Retirement:
    """Delete the data keys and data masters that were replaced and that no row uses.

    First, `retire` checks that every row belongs to a session, user or app, and decrypts the row of
    every session.  If a row fails a check, its owner is unknown, so the row may need any data key.
    Then `retire` raises DecryptionError and deletes nothing.

    Then `retire` processes one owner (a user or an app) after the other, and decrypts all records
    of the owner.  If a record is missing or cannot be decrypted, `retire` keeps all data keys of
    this owner: an attacker may have modified the headers that name the keys.  Otherwise, one
    transaction (two with a key database) finds the replaced data keys that no record names, and
    deletes them.  A data key is replaced if it is older than the newest one that the owner's row
    names.  If a replaced data key is kept, all newer data keys of its owner are also kept.

    A replaced data master is deleted if it wraps no data key.  If a data key cannot be unwrapped,
    all data masters are kept.

    Args:
        progress: Counts owners (users and apps) with more than one data key.
        rows_per_second: The maximum number of sessions and records to decrypt per second.  The
            search for rows without an owner, which decrypts nothing, is not limited.

    Raises:
        ConfigurationError: `EncryptedSessionWrapper` uses the database.
        DecryptionError: A row belongs to no session, user or app, or the row of a session cannot be
            decrypted, for example because its backend is not listed; nothing was deleted.
    """
    await db.reread_keyring()  # a later release may have added a feature, which this call rejects
    require_no_wrapper(await db.survey_existing(), "retire")
    await reject_orphans(db)
    throttle = Meter(rate=rows_per_second)
    await _reject_unreadable_sessions(db, throttle)
    ((total,),) = await db.runner.key_db.read(_NUMBER_OF_OWNERS, {})
    meter = Meter(progress, int(total))
    kept_keys: CappedList[KeptKey] = CappedList()
    deleted, spare = Counter[int](), 0  # data keys by the id of their master
    owner_tag, size = data_keys.c.owner, db.limits.ids_per_statement
    read = db.runner.key_db.read
    owners = pages(read, _OWNERS_WITH_SEVERAL_KEYS, owner_tag, size, lambda owner: owner)
    async for owner in flattened(owners):
        keys = await _retire_data_keys(db, owner, dry_run, throttle)
        deleted.update(parse_header(row.wrapped)[1] for row in keys.unused)
        spare += keys.spare
        kept_keys.extend(keys.kept)
        await meter.advance()
    meter.finish()
    known = (await db.reread_keyring()).rows
    key_counts = await _count_by_master(db)
    expected_deletions = deleted if dry_run else Counter[int]()
    master_ids: set[int] = set()
    run = partial(_retire_masters, dry_run, known, key_counts, expected_deletions, master_ids)
    kept_keys.extend(await db.runner.key_db.run_sync(run, commit=not dry_run))
    deleted_ids, kept = tuple(sorted(master_ids)), tuple(kept_keys.first)
    return Retirement(deleted.total(), deleted_ids, kept_keys.count, kept, spare)


async def _reject_unreadable_sessions(db: Database, throttle: Meter) -> None:
    """Raise DecryptionError if the row of a session cannot be decrypted.

    An attacker may have moved the session's row to another user.  Then the owner of the session is
    unknown, so the session may need any data key.
    """
    async for session in flattened(scan_sessions(db)):
        error = session.ids_or_error
        if isinstance(error, DecryptionError):
            if error.reason is Reason.UNKNOWN_BACKEND:  # the operator only has to list it
                raise error.located(sessions.name, session.id)
            detail = "it cannot be decrypted, and may need any key: run `verify` for the cause"
            raise TamperedError(detail, Reason.MISMATCH, sessions.name, session.id)
        await throttle.advance()


# --- data keys -----------------------------------------------------------------------------------


# By the id of a data key: the name of each table with rows that need the key, and their number.
_References = dict[int, list[tuple[str, int]]]


class _ReplacedKeys(NamedTuple):
    """The replaced data keys of an owner, and the number of its spare keys."""

    kept: list[KeptKey]
    unused: list[DataKeyRow]
    spare: int = 0


async def _retire_data_keys(
    db: Database, owner_tag: bytes, dry_run: bool, throttle: Meter
) -> _ReplacedKeys:
    """Delete the owner's unused data keys; keep all if another process adds or changes one."""
    rows = (await db.runner.read_data_keys_with_retries([owner_tag])).data_keys
    try:
        named_and_headers = await _decrypt_owner(db, owner_tag, rows, throttle)
    except DecryptionError:
        return _divide_replaced(rows, {}, None)
    if named_and_headers is None:  # no row needs a key: `reject_orphans` has found none
        return _ReplacedKeys([], [])
    named, decrypted_headers = named_and_headers
    has_key_database = db.runner.executors.has_key_database

    deleted: list[DataKeyRow] = []

    def divide_and_delete(connection: sa.Connection) -> _ReplacedKeys:
        """Find the unused keys; delete them, except in a dry run or with a key database."""
        nonlocal deleted
        stored, headers = _lock_and_count(owner_tag, rows, dry_run, has_key_database, connection)
        if headers is not None:
            headers |= decrypted_headers
        divided = _divide_replaced(stored, named, headers)
        if divided.unused and not has_key_database and not dry_run:
            _delete_keys(divided.unused, connection)
        deleted = [row for row in deleted if row not in stored] + divided.unused
        return divided

    divided = await db.runner.data_db.run_sync(divide_and_delete, commit=not dry_run)
    if not has_key_database:
        return divided._replace(unused=deleted)
    if divided.unused and not dry_run:
        # The keys were read before the records.  Services may have written since, but never with a
        # key that is deleted here:
        # - Of the keys that were read, the key with the highest generation is always kept.
        # - Every key that is deleted here is older than all keys in use.  With a key database,
        #   neither a service nor a rotation replaces a record by a record under an older key.
        await db.runner.key_db.run_sync(partial(_delete_keys, divided.unused))
    return divided


async def _decrypt_owner(
    db: Database, owner_tag: bytes, rows: list[DataKeyRow], throttle: Meter
) -> tuple[_References, key_operations.HeaderCounts] | None:
    """Decrypt all records of the owner, or raise DecryptionError; return None if it is gone.

    Return the data keys that its row names, and the numbers of records by header.
    """
    await db.runner.unwrap_data_keys(owner_tag)  # if one needs a newer keyring, this reads it again
    keyring = await db.keyring()
    if not all(can_unwrap(row, keyring) for row in rows):
        raise TamperedError("a data key was tampered with", Reason.MISMATCH)
    decrypted_owner = await read_owner_with_tag(db, owner_tag)
    if decrypted_owner is None:
        return None
    _, owner, headers = decrypted_owner
    if owner.is_user:
        async for session in flattened(scan_sessions_of_user(db, owner.row.id)):
            ids, is_collection = session.require_ids(), session.row.is_collection
            identity = await db.runner.identify(*ids, is_collection)
            # Only check that each event can be decrypted.
            read = key_operations.ReadWholeSession(identity, lambda *_: [])
            if decrypted := await db.runner.run(read):
                session_headers = decrypted.count_headers()
                headers += session_headers
                await throttle.advance(session_headers.total())
    table = users if owner.is_user else apps
    return {key_id: [(table.name, 1)] for key_id in owner.key_ids}, headers


def _lock_and_count(
    tag: bytes,
    rows: list[DataKeyRow],
    dry_run: bool,
    has_key_database: bool,
    connection: sa.Connection,
) -> tuple[list[DataKeyRow], key_operations.HeaderCounts | None]:
    """Return which of *rows* are still stored, and the numbers of the owner's records by header.

    The numbers are None if the row of the owner, whose tag is *tag*, was deleted, or if a data key
    was added.  With a key database, the data keys are not read again.
    """
    dialect_of(connection).set_read_committed(connection)

    def read(query: sa.Select[Any]) -> list[Any]:
        return list(connection.execute(query if dry_run else query.with_for_update()))

    # The lock on the owner's row waits for open transactions that add a session of the owner.
    queries = (sa.select(table.c.id).where(table.c.tag == tag) for table in (apps, users))
    app, user = (next((row.id for row in read(query)), None) for query in queries)
    has_changed = app is None and user is None
    if not has_key_database:
        # This lock waits for services that have locked a key because they write with it.
        key_ids = sa.select(data_keys.c.id).where(data_keys.c.owner == tag)
        stored_ids = {row.id for row in read(key_ids)}
        # Another run of `retire` may have deleted keys, and `rotate master` may have wrapped keys
        # again, but nobody may have added any.
        has_changed |= not stored_ids <= {row.id for row in rows}
        rows = [row for row in rows if row.id in stored_ids]
    return rows, None if has_changed else _count_headers(tag, user, connection)


def _divide_replaced(
    rows: list[DataKeyRow], named: _References, headers: key_operations.HeaderCounts | None
) -> _ReplacedKeys:
    """Divide an owner's replaced data keys into kept and unused.

    *named* are the keys that the owner's row names.  A key is kept in these cases:

    - Rows use the key.
    - Rows use an older key.  A service that has read the newer key may be about to write such a row
      again with the newer key.
    - The owner's row names the key.  A service that writes with another backend may use the key.
    - A record has a header that names no key of the owner.  So the record may need any key.
    - *headers* are None: a record cannot be decrypted, or the owner's row was deleted, or the
      owner got a data key, since the records were decrypted.
    """
    if not rows:
        return _ReplacedKeys([], [])
    older, _, newer = split_at_newest_named(rows, named)
    if headers is None:
        return _ReplacedKeys([KeptKey(data_keys.name, row.id, ()) for row in older], [])
    by_header: dict[bytes, list[tuple[str, int]]] = {}
    for (table, header), number in headers.items():
        by_header.setdefault(header, []).append((table, number))
    uses: _References = {}
    for row in rows:
        header = build_header(row.backend_id, row.id)
        uses[row.id] = by_header.pop(header, named.get(row.id, []))
    unknown_uses = list(chain(*by_header.values()))
    kept: list[KeptKey] = []
    unused: list[DataKeyRow] = []
    for row in older:
        if uses[row.id] or unknown_uses or kept:
            kept.append(KeptKey(data_keys.name, row.id, (*uses[row.id], *unknown_uses)))
        else:
            unused.append(row)
    used_newer = [row for row in newer if uses[row.id]]
    kept += [KeptKey(data_keys.name, row.id, tuple(uses[row.id])) for row in used_newer]
    return _ReplacedKeys(kept, unused, len(newer) - len(used_newer))


def _delete_keys(rows: list[DataKeyRow], connection: sa.Connection) -> None:
    """Delete the keys, also those that `rotate master` has wrapped again since they were read."""
    connection.execute(_DELETE_KEY, [{"at_id": row.id} for row in rows])


def _count_headers(
    owner_tag: bytes, user: int | None, connection: sa.Connection
) -> key_operations.HeaderCounts:
    """Count the records of an owner by table and header; *user* is the row id, None of an app."""
    c = sessions.c
    is_of_user = c.user_row == user
    ids, tags = sa.select(c.id).where(is_of_user), sa.select(c.tag).where(is_of_user)
    columns: list[tuple[sa.Column[Any], sa.ColumnElement[bool]]]
    columns = [
        (apps.c.state, apps.c.tag == owner_tag),
        (users.c.state, users.c.tag == owner_tag),
        (witnesses.c.seal, witnesses.c.tag == owner_tag),
        (c.state, is_of_user),
        (witnesses.c.seal, witnesses.c.tag.in_(tags)),
        (snapshots.c.state, snapshots.c.session_row.in_(ids)),
        (events.c.event, events.c.session_row.in_(ids)),
    ]
    counts: key_operations.HeaderCounts = Counter()
    for column, where in columns:
        header = header_column(column)
        query = sa.select(header, sa.func.count()).where(where).group_by(header)
        for record_header, number in connection.execute(query):
            counts[column.table.name, record_header] += number
    return counts


# --- data masters --------------------------------------------------------------------------------


async def _count_by_master(db: Database) -> Counter[int] | None:
    """Count the data keys by data master id; return None if a data key cannot be unwrapped."""
    keyring = await db.keyring()
    counts: Counter[int] = Counter()
    async for rows in scan_data_keys(db):
        if not all(can_unwrap(row, keyring) for row in rows):
            return None
        counts.update(parse_header(row.wrapped)[1] for row in rows)
    return counts


def _retire_masters(
    dry_run: bool,
    known: Mapping[int, MasterKeyRow],
    key_counts: Counter[int] | None,
    expected_deletions: Counter[int],
    deleted_ids: set[int],
    connection: sa.Connection,
) -> list[KeptKey]:
    """Delete the replaced data masters that wrap no data key; return those that are kept.

    Add the ids of those that were deleted to *deleted_ids*, which has those of earlier attempts.

    Keep all data masters if the keyring has rows that are not *known*, or if *key_counts* is None.
    Somebody may have modified headers since *key_counts* was counted: the larger number decides.
    *expected_deletions* counts the data keys, by master, that a dry run would have deleted.
    """
    dialect_of(connection).set_read_committed(connection)
    if not dry_run:
        clusters.claim(connection, *clusters.KEYRING_CLAIMS)
        # Wait for open transactions that store a data key: one of the masters may wrap that key.
        dialect_of(connection).lock_tables(connection, data_keys)
    stored_rows = connection.execute(MASTER_KEYS if dry_run else MASTER_KEYS.with_for_update())
    stored_ids = {row.id for row in stored_rows}
    # If the connection was lost during COMMIT, an attempt may have been committed, and its masters
    # are not stored any more.  After a rollback, they are.
    deleted_ids -= stored_ids
    # Another run of `retire` may have deleted some, and `rotate root` may have wrapped them again.
    rows = [row for row in known.values() if row.purpose == DATA_MASTER and row.id in stored_ids]
    older = sorted(rows, key=attrgetter("created_at", "id"))[:-1]
    if key_counts is None or not stored_ids <= known.keys():
        return [KeptKey(keyring_table.name, row.id, ()) for row in older]
    header = header_column(data_keys.c.wrapped)
    by_header = sa.select(header, sa.func.count()).group_by(header)
    counts = {header_bytes: int(number) for header_bytes, number in connection.execute(by_header)}
    known_headers = {build_header(WRAP_BACKEND_ID, row.id) for row in rows}
    unknown = sum(number for header, number in counts.items() if header not in known_headers)
    now = {row.id: counts.get(build_header(WRAP_BACKEND_ID, row.id), 0) for row in older}
    largest = (Counter(now) | key_counts) - expected_deletions
    uses = [(row, largest[row.id] + unknown) for row in older]
    unused_ids = [row.id for row, number in uses if not number]
    if unused_ids and not dry_run:
        connection.execute(sa.delete(keyring_table).where(keyring_table.c.id.in_(unused_ids)))
    deleted_ids.update(unused_ids)
    return [KeptKey(keyring_table.name, row.id, ((data_keys.name, n),)) for row, n in uses if n]


# --- statements ----------------------------------------------------------------------------------

_DELETE_KEY = sa.delete(data_keys).where(data_keys.c.id == sa.bindparam("at_id"))
_OWNERS_WITH_SEVERAL_KEYS = (
    sa.select(data_keys.c.owner)
    .group_by(data_keys.c.owner)
    .having(sa.func.count() > sa.literal_column("1"))
)
_NUMBER_OF_OWNERS = select_count(_OWNERS_WITH_SEVERAL_KEYS.subquery())
