"""Retire replaced keys: delete data keys and data masters that no row uses any more."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import sqlalchemy as sa

from adk_secure_sessions.audit import command
from adk_secure_sessions.db.dialects import dialect_of
from adk_secure_sessions.errors import ConfigurationError, Reason, TamperedError
from adk_secure_sessions.formats.records import pack, unpack
from adk_secure_sessions.keys.data_keys import (
    WRAP_BACKEND_ID,
    DataKeyRow,
    StagedKeys,
    unwrap_data_key,
)
from adk_secure_sessions.keys.keyring import DATA, MasterKeyRow
from adk_secure_sessions.maintenance.database import Database
from adk_secure_sessions.maintenance.orphans import reject_orphans
from adk_secure_sessions.maintenance.owners import (
    APP_OF_TAG,
    USER_OF_TAG,
    by_age,
    header_of,
)
from adk_secure_sessions.maintenance.problems import UNREADABLE, Problems
from adk_secure_sessions.maintenance.progress import Meter, Progress
from adk_secure_sessions.maintenance.records import OwnerIds, session_batches
from adk_secure_sessions.maintenance.walk import app_name_of, located_sessions
from adk_secure_sessions.storage import clusters
from adk_secure_sessions.storage.opening import WRAPPER, Survey, stored_features
from adk_secure_sessions.storage.pages import pages
from adk_secure_sessions.storage.queries import DATA_KEYS, MASTER_KEYS
from adk_secure_sessions.storage.reads import CheckApp, CheckSession, CheckUser, Headers
from adk_secure_sessions.storage.schema import (
    apps,
    bases,
    data_keys,
    events,
    keyring,
    sessions,
    users,
    witnesses,
)
from adk_secure_sessions.storage.unit_of_work import read_data_keys

_MAX_EXAMPLES = 1000
# Attempts to examine keys, each with whether it is the last one.  Another process may change the
# keys at the same time.  For example, another run of `retire` may delete keys that are kept here.
_ATTEMPTS = (False, False, True)


class KeptKey(NamedTuple):
    """A replaced key that `retire` keeps, because rows need it or may need it.

    Attributes:
        table: The table of the key: `secure_data_keys` or `secure_keyring`.
        id: The key's id.
        references: The name of each table with rows that need the key, and the number of these
            rows.  Empty in three cases: it is unknown which rows need the key; or rows only need
            an older key of the same owner; or only the owner's row names the key.
    """

    table: str
    id: int
    references: tuple[tuple[str, int], ...]


class Retirement(NamedTuple):
    """The result of `retire`; after a dry run, the expected result.

    Attributes:
        data_keys: How many data keys were deleted.
        masters: The ids of the data masters that were deleted.
        kept: How many replaced keys were kept.
        examples: The first 1000 kept keys.
        spare_keys: How many data keys are newer than the current data key of their owner, and no
            row or record names them.  They were left alone: with a key database, a service may be
            about to name such a key.  The next rotation replaces them.
    """

    data_keys: int
    masters: tuple[int, ...]
    kept: int
    examples: tuple[KeptKey, ...]
    spare_keys: int = 0


@command
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
    Then `retire` raises TamperedError and deletes nothing.

    Then `retire` processes one owner (a user or an app) after the other, and decrypts all records
    of the owner.  If a record is missing or cannot be decrypted, `retire` keeps all data keys of
    this owner: an attacker may have modified the headers that name the keys.  Otherwise, one
    transaction finds the replaced data keys that no record names, and deletes them.  With a key
    database, these are two transactions.  A data key is replaced if it is older than the newest one
    that the owner's row names.  If a replaced data key is kept, all newer data keys of its owner
    are also kept.

    A replaced data master is deleted if it wraps no data key.  If a data key cannot be unwrapped,
    all data masters are kept.

    Args:
        db: The database.
        dry_run: Find unused keys, but delete nothing.
        progress: Called with the number of owners (users and apps) processed, and the number of
            all owners with more than one data key.
        rows_per_second: The maximum number of owners to check per second.

    Raises:
        ConfigurationError: The database cannot be used, or holds no encrypted sessions yet; or
            `EncryptedSessionWrapper` uses it.
        WrongKeyError: The root keys do not decrypt the keyring.
        TamperedError: A row belongs to no session, user or app, or the row of a session cannot be
            decrypted; nothing was deleted.
    """
    await db.renew_keyring()  # a later release may have added a feature, which this call rejects
    reject_wrapper(await db.survey(), "retire")
    await reject_orphans(db)
    await _reject_unreadable_sessions(db)
    ((total,),) = await db.read_keys(_NUMBER_OF_OWNERS, {})
    meter = Meter(progress, int(total), rows_per_second)
    kept: list[KeptKey] = []
    deleted = number = spare = 0
    owner_tag, size = data_keys.c.owner, db.limits.headers
    async for owners in pages(db.read_keys, _OWNERS, owner_tag, size, lambda owner: owner):
        for owner in owners:
            keys = await _retire_data_keys(db, owner, dry_run)
            deleted += len(keys.unused)
            number += len(keys.kept)
            spare += keys.spare
            kept += keys.kept[: _MAX_EXAMPLES - len(kept)]
            await meter.advance()
    meter.finish()
    masters = await _retire_unused_masters(db, dry_run)
    kept += masters.kept[: _MAX_EXAMPLES - len(kept)]
    unused = tuple(row.id for row in masters.unused)
    return Retirement(deleted, unused, number + len(masters.kept), tuple(kept), spare)


def reject_wrapper(survey: Survey, command: str) -> None:
    """Raise ConfigurationError if `EncryptedSessionWrapper` uses the database.

    *command* is the name of the command, for the error: `retire` or `separate`.  Both commands
    delete keys that no record uses, but cannot read the records of the wrapper, which another
    session service stores.
    """
    if WRAPPER in stored_features(survey):
        raise ConfigurationError(
            f"EncryptedSessionWrapper uses this database, and `{command}` cannot count the records "
            "that another session service stores: no key was deleted"
        )


# --- data keys -----------------------------------------------------------------------------------


class _OlderKeys(NamedTuple):
    """The data keys of one owner that were replaced, and the number of the owner's spare keys."""

    kept: list[KeptKey]
    unused: list[DataKeyRow]
    spare: int = 0


class _OwnerRow(NamedTuple):
    """The row of an app or user: its table and id."""

    table: sa.Table
    id: int


async def _reject_unreadable_sessions(db: Database) -> None:
    """Raise TamperedError if the row of a session cannot be decrypted.

    An attacker may have moved the session's row to another user.  Then the owner of the session is
    unknown, so the session may need any data key.
    """
    async for page in located_sessions(db):
        for one in page:
            if one.ids is None:
                raise TamperedError(
                    "it cannot be decrypted, and may need any key: restore it, or delete it; "
                    "`verify` lists all such rows",
                    reason=Reason.MISMATCH,
                    table=sessions.name,
                    row=one.row,
                )


class _Audit(NamedTuple):
    """An owner whose records were all decrypted.

    Attributes:
        rows: All data keys of the owner; all are authentic.
        named: The ids of the data keys that the owner's row names.
        headers: The number of records, by table and record header.
    """

    rows: list[DataKeyRow]
    named: frozenset[int]
    headers: Headers


async def _retire_data_keys(db: Database, owner: bytes, dry_run: bool) -> _OlderKeys:
    """Delete the unused data keys of *owner*, unless *dry_run* is True.

    Return the owner's older data keys: those that are kept, and those that are unused.
    """
    for is_last in _ATTEMPTS:
        rows = (await read_data_keys(db.read_keys, [owner])).data_keys
        keys = await _retire_rows(db, owner, rows, dry_run)
        if is_last or keys.unused or not keys.kept:
            return keys
        if set(rows) == set((await read_data_keys(db.read_keys, [owner])).data_keys):
            return keys
    raise AssertionError


async def _retire_rows(
    db: Database, owner: bytes, rows: list[DataKeyRow], dry_run: bool
) -> _OlderKeys:
    """Do the same as `_retire_data_keys` for *rows*, the data keys that the owner had before.

    If another process has changed the data keys since, all replaced keys are kept.
    """
    audit = await _audit(db, owner, rows)
    if audit is None:
        claimed = await db.change(partial(_find_headers, owner, True), commit=False)
        if claimed is None:  # no row needs a key: `_reject_orphans` has found none
            return _OlderKeys([], [])
        return _OlderKeys([_kept(row, _under(row, claimed)) for row in _replaced(rows)], [])
    if db.key_executor is db.executor:
        work = partial(_retire_beside_data, owner, audit, dry_run)
        return await db.change(work, commit=not dry_run)
    # The keys were read before the records.  Services may write in the meantime, but never with a
    # key that is deleted here:
    # - Of the keys that were read, the key with the highest generation is always kept.
    # - Every key that is deleted here is older than all keys in use.  With a key database, a
    #   service never replaces a record by a record under an older key.
    found = await db.change(partial(_find_headers, owner, dry_run), commit=not dry_run)
    keys = _sort_out(audit, found)
    if keys.unused and not dry_run:
        await db.change_keys(partial(_delete, keys.unused))
    return keys


async def _audit(db: Database, owner: bytes, rows: list[DataKeyRow]) -> _Audit | None:
    """Decrypt all records of *owner*; return None if a record or a data key is not authentic."""
    try:
        keys = await db.keys_of(owner)
        ids = {row.id for row in rows}
        for table, query in ((apps, APP_OF_TAG), (users, USER_OF_TAG)):
            for row_id, app_name in await db.read(query, {"owner": owner}):
                named, headers = await _check_owner(
                    db, keys, owner, table is users, row_id, app_name_of(app_name)
                )
                if keys.rows_are_authentic(owner, ids):
                    return _Audit(rows, named, headers)
    except UNREADABLE:
        pass
    return None


async def _check_owner(
    db: Database, keys: StagedKeys, tag: bytes, of_user: bool, row_id: int, app_name: str
) -> tuple[frozenset[int], Headers]:
    """Decrypt all records of an owner, and return `named` and `headers` of `_Audit`.

    Args:
        db: The database.
        keys: The data keys of the owner.
        tag: The tag of the owner.
        of_user: True if the owner is a user, False if it is an app.
        row_id: The id of the owner's row.
        app_name: The name of the app, or of the user's app.

    Raises one of `UNREADABLE` if a row is missing or cannot be decrypted.
    """
    who = await db.unit.identify(app_name)
    check: CheckApp | CheckUser = CheckApp(who)
    if of_user:
        check = CheckUser(who._replace(user_tag=tag))
    owner = await db.unit.run(check)
    if owner is None or owner.id != row_id:
        raise TamperedError("its row was removed", reason=Reason.MISSING)
    headers = Counter(check.headers)
    if of_user:
        problems = Problems()
        ids = OwnerIds(tag, row_id, app_name, owner.user_id)
        async for batch in session_batches(db, keys, ids, problems):
            for row, session_id in batch.sessions.items():
                of_session = await db.unit.identify(
                    app_name, owner.user_id, session_id, row in batch.collections
                )
                session: CheckSession[None] = CheckSession(of_session, _undecoded)
                await db.unit.run(session)
                headers += session.headers
        if problems.count:
            raise TamperedError("a session cannot be decrypted", reason=Reason.MISMATCH)
    return frozenset(owner.key_ids), headers


def _undecoded(plaintext: bytes, session_row: int, seq: int) -> None:
    return None  # `retire` only checks that each event can be decrypted


def _retire_beside_data(
    owner: bytes, audit: _Audit, dry_run: bool, connection: sa.Connection
) -> _OlderKeys:
    """Delete the unused data keys of *owner*, if they are in the same database as the records."""
    query = DATA_KEYS.where(data_keys.c.owner == owner)
    dialect_of(connection).see_what_is_committed(connection)
    row = _owner_row(owner, dry_run, connection)
    # FOR UPDATE waits for services that have locked a key because they write with it (`HOLD_KEY`).
    found = connection.execute(query if dry_run else query.with_for_update())
    rows = [DataKeyRow(*values) for values in found]
    headers = None if row is None else _count_headers(owner, row, connection)
    if set(rows) != set(audit.rows):  # another process has changed the data keys since the audit
        headers = None
    keys = _sort_out(audit, headers)
    if keys.unused and not dry_run:
        _delete(keys.unused, connection)
    return keys


def _replaced(rows: list[DataKeyRow]) -> list[DataKeyRow]:
    """Return all *rows* except the one with the highest generation, for the report of kept keys.

    If a row is malformed, the newest key is not known, so return all *rows*.
    """
    if not all(map(_is_sound, rows)):
        return rows
    return sorted(rows, key=attrgetter("generation"))[:-1]


def _under(row: DataKeyRow, headers: Headers) -> list[tuple[str, int]]:
    """Return pairs of a table and the number of its records whose header names the key in *row*.

    Tables without such records are omitted.
    """
    if not _is_sound(row):
        return []
    own = pack(row.backend_id, row.id)
    return [(table, number) for (table, header), number in headers.items() if header == own]


def _kept(row: DataKeyRow, references: Iterable[tuple[str, int]] = ()) -> KeptKey:
    return KeptKey(data_keys.name, row.id, tuple(references))


def _sort_out(audit: _Audit, headers: Headers | None) -> _OlderKeys:
    """Sort an owner's replaced keys into keys to keep and unused keys, and count spare keys.

    A key is kept in these cases:

    - Rows use the key.
    - Rows use an older key.  A service that has read the newer key may be about to write such a row
      again with the newer key.
    - The owner's row names the key.  A service that writes with another backend may use the key.
    - A record has a header that names no key of the owner.  So the record may need any key.

    Args:
        audit: The owner's keys and decrypted records.
        headers: The number of the owner's records by table and header, counted after *audit* was
            made.  None if the owner's row was deleted or the owner's data keys have changed since
            then.  In this case, all keys are kept.
    """
    older, _, newer = by_age(audit.rows, audit.named)
    if headers is None:
        return _OlderKeys([_kept(row) for row in older], [])
    headers = headers | audit.headers
    known = {pack(row.backend_id, row.id) for row in audit.rows}
    unknown = [
        (table, number) for (table, header), number in headers.items() if header not in known
    ]
    kept: list[KeptKey] = []
    unused: list[DataKeyRow] = []
    for row in older:
        under = _under(row, headers)
        if under or unknown or kept or row.id in audit.named:
            kept.append(_kept(row, [*under, *unknown]))
        else:
            unused.append(row)
    spare = 0
    for row in newer:
        if under := _under(row, headers):
            kept.append(_kept(row, under))
        else:
            spare += 1
    return _OlderKeys(kept, unused, spare)


def _delete(rows: list[DataKeyRow], connection: sa.Connection) -> None:
    """Delete the *rows* whose wrapped key has not changed since they were read."""
    parameters = [{"at_id": row.id, "at_wrapped": row.wrapped} for row in rows]
    connection.execute(_DELETE_KEY, parameters)


def _is_sound(row: DataKeyRow) -> bool:
    """Return whether the columns have the right types; SQLite stores any type in any column."""
    numbers = isinstance(row.generation, int) and row.backend_id in range(256)
    return numbers and isinstance(row.wrapped, bytes)


def _find_headers(owner: bytes, dry_run: bool, connection: sa.Connection) -> Headers | None:
    """Count the records of *owner* by table and header; return None if the owner has no row.

    Except in a dry run, lock the owner's row.
    """
    dialect_of(connection).see_what_is_committed(connection)
    row = _owner_row(owner, dry_run, connection)
    return None if row is None else _count_headers(owner, row, connection)


def _owner_row(owner: bytes, dry_run: bool, connection: sa.Connection) -> _OwnerRow | None:
    """Find the row of *owner* and, except in a dry run, lock it; return None if it does not exist.

    The lock waits for open transactions that add a session of the owner.
    """
    for table in (apps, users):
        query = sa.select(table.c.id).where(table.c.tag == owner)
        row_id = connection.scalar(query if dry_run else query.with_for_update())
        if row_id is not None:
            return _OwnerRow(table, row_id)
    return None


def _count_headers(owner: bytes, row: _OwnerRow, connection: sa.Connection) -> Headers:
    """Count the records of an owner by table and header; *owner* is the tag of *row*."""
    counts: Headers = Counter()
    for name, query in _queries_by_header(owner, row):
        for header, number in connection.execute(query):
            counts[name, header] += number
    return counts


def _queries_by_header(owner: bytes, row: _OwnerRow) -> Iterator[tuple[str, sa.Select[Any]]]:
    """Yield table names, each with a query that counts the owner's records in it by header."""

    def by_header(column: sa.Column[Any], *where: sa.ColumnElement[bool]) -> sa.Select[Any]:
        header = header_of(column)
        return sa.select(header, sa.func.count()).where(*where).group_by(header)

    table = row.table
    yield table.name, by_header(table.c.state, table.c.id == row.id)
    yield witnesses.name, by_header(witnesses.c.seal, witnesses.c.tag == owner)
    if table is users:
        of_user = sessions.c.user_row == row.id
        ids = sa.select(sessions.c.id).where(of_user)
        tags = sa.select(sessions.c.tag).where(of_user)
        yield sessions.name, by_header(sessions.c.state, of_user)
        yield witnesses.name, by_header(witnesses.c.seal, witnesses.c.tag.in_(tags))
        yield bases.name, by_header(bases.c.state, bases.c.session_row.in_(ids))
        yield events.name, by_header(events.c.event, events.c.session_row.in_(ids))


# --- data masters --------------------------------------------------------------------------------


class _OlderMasters(NamedTuple):
    """The data masters that were replaced: all except the newest (by time of creation)."""

    kept: list[KeptKey]
    unused: list[MasterKeyRow]


async def _retire_unused_masters(db: Database, dry_run: bool) -> _OlderMasters:
    """Delete the replaced data masters that wrap no data key, unless *dry_run* is True."""
    for is_last in _ATTEMPTS:
        wrapped = await _count_wrapped(db)
        known = (await db.renew_keyring()).rows
        work = partial(_retire_masters, dry_run, known, wrapped)
        masters = await db.change_keys(work, commit=not dry_run)
        if is_last or masters.unused or not masters.kept:
            return masters
        if known == (await db.renew_keyring()).rows:
            return masters
    raise AssertionError


async def _count_wrapped(db: Database) -> Counter[int] | None:
    """Count the data keys by data master id; return None if a data key cannot be unwrapped."""
    masters = (await db.keys()).keyring
    counts: Counter[int] = Counter()
    size = db.limits.rows
    async for rows in pages(db.read_keys, DATA_KEYS, data_keys.c.id, size, DataKeyRow):
        for row in rows:
            try:
                unwrap_data_key(row, masters)
                counts[unpack(row.wrapped)[1]] += 1
            except UNREADABLE:
                return None
    return counts


def _retire_masters(
    dry_run: bool,
    known: Mapping[int, MasterKeyRow],
    wrapped: Counter[int] | None,
    connection: sa.Connection,
) -> _OlderMasters:
    """Delete the replaced data masters that wrap no data key.

    Return two lists: the replaced data masters that are kept, and those that wrap no data key.

    Args:
        dry_run: If True, delete nothing.
        known: The rows of the keyring by id; all are authentic.  If the stored rows have changed
            since, all data masters are kept.
        wrapped: The result of `_count_wrapped`.  If it is None, all data masters are kept.
        connection: The connection, in a transaction.
    """
    dialect_of(connection).see_what_is_committed(connection)
    if not dry_run:
        clusters.claim(connection, *clusters.KEYRING_CLAIMS)
        # Wait for open transactions that store a data key: one of the masters may wrap that key.
        dialect_of(connection).lock_tables(connection, data_keys)
    found = connection.execute(MASTER_KEYS if dry_run else MASTER_KEYS.with_for_update())
    stored = [MasterKeyRow(*row) for row in found]
    rows = [row for row in known.values() if row.purpose == DATA]
    older = sorted(rows, key=attrgetter("created_at", "id"))[:-1]
    if wrapped is None or set(stored) != set(known.values()):
        return _OlderMasters([KeptKey(keyring.name, row.id, ()) for row in older], [])
    header = header_of(data_keys.c.wrapped)
    by_header = sa.select(header, sa.func.count()).group_by(header)
    counts = {header: int(number) for header, number in connection.execute(by_header)}
    expected = {pack(WRAP_BACKEND_ID, row.id) for row in rows}
    unknown = sum(number for header, number in counts.items() if header not in expected)
    kept, unused = [], []
    for row in older:
        number = max(counts.get(pack(WRAP_BACKEND_ID, row.id), 0), wrapped[row.id]) + unknown
        if number:
            kept.append(KeptKey(keyring.name, row.id, ((data_keys.name, number),)))
        else:
            unused.append(row)
    if unused and not dry_run:
        ids = [row.id for row in unused]
        connection.execute(sa.delete(keyring).where(keyring.c.id.in_(ids)))
    return _OlderMasters(kept, unused)


# --- statements ----------------------------------------------------------------------------------

_DELETE_KEY = sa.delete(data_keys).where(
    data_keys.c.id == sa.bindparam("at_id"),
    data_keys.c.wrapped == sa.bindparam("at_wrapped", type_=data_keys.c.wrapped.type),
)


# The owners with more than one data key.
_OWNERS = (
    sa.select(data_keys.c.owner)
    .group_by(data_keys.c.owner)
    .having(sa.func.count() > sa.literal_column("1"))
)
_NUMBER_OF_OWNERS = sa.select(sa.func.count()).select_from(_OWNERS.subquery())
