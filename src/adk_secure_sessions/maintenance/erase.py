"""Erase a user: delete the data keys and all rows, and remove the deleted keys from the file."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import sqlalchemy as sa

from adk_secure_sessions.audit import add_facts, audited_command
from adk_secure_sessions.db.dialects import dialect_of, has_table
from adk_secure_sessions.errors import ConfigurationError, DatabaseError, SecureSessionError
from adk_secure_sessions.formats.records import build_header
from adk_secure_sessions.maintenance.counts import select_count
from adk_secure_sessions.maintenance.database import Database
from adk_secure_sessions.maintenance.row_scan import header_column, is_stored
from adk_secure_sessions.maintenance.vacuum import clear_deleted_bytes
from adk_secure_sessions.results import Result, counter
from adk_secure_sessions.storage import clusters
from adk_secure_sessions.storage.features import index_rows
from adk_secure_sessions.storage.operation_runner import empty_caches
from adk_secure_sessions.storage.schema import (
    IS_COLLECTION,
    data_keys,
    events,
    keyring,
    migrated,
    sessions,
    snapshots,
    state_index,
    users,
    witnesses,
)

_COLLECTIONS = "collections"  # in the counts of rows by table: the sessions that are collections
# How often a transaction looks for further rows of a user.  Usually it finds none the second time.
_MAX_PASSES = 20


@dataclass
class Erasure(Result):
    """The result of `erase_user`; after a dry run, the expected result.

    The first seven attributes are the numbers of deleted rows.

    Attributes:
        data_keys: The data keys of the user, of all generations.
        users: 1, or 0 if the user does not exist or the user's row had been removed.
        sessions: The sessions of the user.
        snapshots: The snapshots of these sessions.
        events: The events of these sessions, and the items of these collections.
        witnesses: The version witnesses of the user and of these sessions and collections.
        collections: The user's collections, which hold artifacts and memory.  The contents of
            artifacts are not deleted: `purge blobs` deletes them.
        cleared: True if the database file contains no copy of the data keys any more, not even in
            free space.  Logs, replicas and backups are never cleared.
        obstacle: Why `cleared` is False; empty if `cleared` is True.
        rewrite: Whether the table of data keys was to be rewritten; False in a dry run.
        has_app: Whether the database has the app.
        has_migration_table: Whether the database has the table `secure_migrated`, for copied
            sessions.  The source of a migration may then still contain the user.
        keys_were_already_gone: Whether the key database had no data key of the user any more: an
            earlier run was interrupted after it had deleted the keys.
    """

    data_keys: int = counter("data key", "deleted", is_change=True)
    users: int = counter("user", "deleted", is_change=True)
    sessions: int = counter("session", "deleted", is_change=True)
    snapshots: int = counter("snapshot", "deleted", is_change=True)
    events: int = counter("event", "deleted", is_change=True)
    witnesses: int = counter("version witness", "deleted", is_change=True)
    collections: int = counter(
        "collection",
        "deleted with their items",
        hint="`purge blobs` deletes contents of artifacts, which nobody can decrypt any more",
        is_change=True,
    )
    cleared: bool = False
    obstacle: str = ""
    rewrite: bool = False
    has_app: bool = False
    has_migration_table: bool = False
    keys_were_already_gone: bool = False

    @property
    def rows(self) -> int:
        """The number of deleted rows, without those of the search index."""
        return sum(self.numbers)

    @property
    def missing_part(self) -> str:
        """What was missing, in words, also if the user does not exist; empty if nothing was."""
        if not self.users:
            return "the user's own row"
        return "" if self.data_keys or self.keys_were_already_gone else "the data key"

    @property
    def succeeded(self) -> bool:
        return not self.missing_part and (self.cleared or not self.rewrite)

    def extra_lines(self, dry_run: bool) -> Iterator[str]:
        is_unknown = not (self.rows or self.has_app)
        if is_unknown:
            yield "there is no such app"
        elif not self.rows:
            yield "there is no such user"
        elif self.missing_part:
            remain = "run `verify`, which lists any rows of the user that remain"
            yield f"{self.missing_part} was missing: {remain}"
        elif self.keys_were_already_gone:
            yield "a run that was interrupted had already deleted the data key"
        if self.cleared and not is_unknown:
            yield "freed space does not hold the wrapped data key"
        elif not (dry_run or is_unknown):
            yield f"freed space may hold the wrapped data key: {self.obstacle}"
        if self.has_migration_table:
            source = "the source of the migration may still contain the user"
            yield f"{source}: delete the user there, too"
            if not (self.rows or dry_run):
                yield "no migration will copy this user from now on, and no command undoes that"


@audited_command
async def erase_user(
    db: Database, app_name: str, user_id: str, *, dry_run: bool = False, rewrite: bool = False
) -> Erasure:
    """Delete a user's data keys and all rows of that user.

    One transaction deletes everything.  With a key database, a first transaction deletes the
    data keys, and a second transaction deletes the rows.  Nothing is decrypted, so rows that were
    tampered with are also deleted.  Services can keep running.  If the same user id is used again
    later, the service creates a new user with a new data key.  A second erasure finds no rows.

    If the database has the table `secure_migrated`, `erase_user` first stores a tombstone in this
    table: a row which says that the user was erased.  Afterwards, `migrate` copies nothing of the
    user, and `PlaintextFallbackService` does not read the user's data from the source of the
    migration.  On PostgreSQL, storing the tombstone waits until running imports have ended.

    Args:
        rewrite: Rewrite the table of data keys (SQLite: the whole file), so that its free space
            contains no copy of the keys.  Services wait until the table is rewritten.

    Raises:
        ConfigurationError: *app_name* or *user_id* is not text.
        DatabaseError: The database failed, or it does not delete the rows.
    """
    if not (isinstance(app_name, str) and isinstance(user_id, str)):
        raise ConfigurationError("app_name and user_id must be text")
    ids = await db.runner.identify(app_name, user_id)
    tag = ids.user_tag
    add_facts(user=tag.hex(), app=app_name)
    has_app = await is_stored(db, app_name)
    # A feature list without `migration` does not prove that nothing was imported: an attacker
    # may have replayed an older list for the time of the erasure.
    find_table = partial(has_table, table=migrated)
    has_migration_table = await db.runner.data_db.run_sync(find_table, commit=False)
    if has_migration_table and not dry_run:
        await db.imports.add_tombstone(app_name, user_id)
    headers: set[bytes] = set()
    deleted: Counter[str] = Counter()
    executors, size = db.runner.executors, db.limits.ids_per_statement
    has_key_database = executors.has_key_database

    def delete(connection: sa.Connection, **parts: bool) -> None:
        nonlocal deleted
        # Keep the larger numbers: if the connection was lost during COMMIT, the attempt may have
        # been committed, and the next one finds nothing.
        deleted |= _Deletion(tag, headers, size, connection, **parts).run(dry_run=dry_run)

    keys_are_deleted = False
    try:
        if has_key_database:  # delete the keys first: then nobody can decrypt the rows
            await db.runner.key_db.run_sync(partial(delete, deletes_rows=False))
            keys_are_deleted = bool(deleted[data_keys.name]) and not dry_run
        await db.runner.data_db.run_sync(partial(delete, deletes_keys=not has_key_database))
    except SecureSessionError as error:
        if not keys_are_deleted:
            raise
        # Otherwise, the error reads as if nothing had been deleted.
        raise DatabaseError(
            "the user's data keys are deleted, but not the rows, which services reject: "
            f"run the erasure again ({error})",
            retryable=error.retryable,
            code=getattr(error, "code", None),
        ) from None
    finally:  # also if this task is cancelled while a transaction runs
        if not dry_run:
            empty_caches()
    obstacle = "nothing was deleted"
    if not dry_run:
        obstacle = await clear_deleted_bytes(
            executors.keys, data_keys, db.limits.lock_wait, rewrites_table=rewrite
        )
    return Erasure(
        data_keys=deleted[data_keys.name],
        users=deleted[users.name],
        sessions=deleted[sessions.name] - deleted[_COLLECTIONS],
        snapshots=deleted[snapshots.name],
        events=deleted[events.name],
        witnesses=deleted[witnesses.name],
        collections=deleted[_COLLECTIONS],
        cleared=not obstacle,
        obstacle=obstacle,
        rewrite=rewrite and not dry_run,
        has_app=has_app,
        has_migration_table=has_migration_table,
        keys_were_already_gone=has_key_database and bool(deleted) and not deleted[data_keys.name],
    )


# --- deleting ------------------------------------------------------------------------------------


@dataclass(eq=False, repr=False)
class _Deletion:
    """The deletion of rows of one user in one transaction.

    The record headers that name the user's data keys are collected in *_headers*.  They identify
    the user's records even if the user's row was removed or modified.
    """

    _tag: bytes
    _headers: set[bytes]
    _row_ids_per_statement: int
    _connection: sa.Connection
    deletes_keys: bool = True
    deletes_rows: bool = True

    def __post_init__(self) -> None:
        self._dialect = dialect_of(self._connection)
        self._has_index = has_table(self._connection, state_index)
        # These also have the ids of deleted rows.
        self._user_row_ids: set[int] = set()
        self._session_ids_and_tags: set[tuple[int, bytes]] = set()
        self._collection_ids: set[int] = set()

    def run(self, *, dry_run: bool) -> Counter[str]:
        """Delete rows in passes until no rows are left, and count them by table.

        A service whose transaction began before this one may commit new rows during a pass.  The
        next pass finds these rows, because each statement sees all rows that were committed before
        the statement began.  Raise DatabaseError if rows are still there after `_MAX_PASSES`
        passes: a trigger or a rule can undo a deletion without an error.
        """
        self._dialect.set_read_committed(self._connection)
        if dry_run:
            return self._count_rows() + Counter({_COLLECTIONS: len(self._collection_ids)})
        deleted: Counter[str] = Counter()
        self._dialect.set_constraints_immediate(self._connection)
        self._dialect.overwrite_deleted(self._connection)
        for _ in range(_MAX_PASSES):
            for table, where in self._found_rows(for_update=True):
                deleted[table.name] += self._connection.execute(
                    sa.delete(table).where(where)
                ).rowcount
            if not self._count_rows():
                return deleted + Counter({_COLLECTIONS: len(self._collection_ids)})
        raise DatabaseError(
            "the database does not delete the rows of the user: remove triggers and rules of its "
            "tables, and erase the user again"
        )

    def _count_rows(self) -> Counter[str]:
        """Count the rows that are stored now, by table; a table without rows is left out."""
        counts: Counter[str] = Counter()
        for table, where in self._found_rows(for_update=False):
            counts[table.name] += self._connection.scalar(select_count(table, where)) or 0
        return +counts

    def _found_rows(self, *, for_update: bool) -> Iterator[tuple[sa.Table, sa.ColumnElement[bool]]]:
        """Yield the conditions for the rows that are found now; *for_update* locks sessions."""
        if self.deletes_keys:
            self._require_keyring()
            c = data_keys.c
            query = sa.select(c.backend_id, c.id).where(c.owner == self._tag)
            for backend_id, key_id in self._connection.execute(query):
                if backend_id in range(256):  # a header has one byte for the backend id
                    self._headers.add(build_header(backend_id, key_id))
        if self.deletes_rows:
            yield from self._found_rows_except_keys(for_update=for_update)
        if self.deletes_keys:
            yield data_keys, data_keys.c.owner == self._tag
            self._require_keyring()  # the deletion may have waited for `move_keys`

    def _require_keyring(self) -> None:
        """Raise ConfigurationError if `move_keys` has moved the keys since the keyring was read.

        Otherwise, the transaction would find no data key: they are in the other database.
        """
        if self._connection.scalar(select_count(keyring, keyring.c.id >= 0)) == 0:
            raise ConfigurationError(
                "the keys of this database were moved: open the database with its present key "
                "database, or without one; nothing was deleted"
            )

    def _found_rows_except_keys(
        self, *, for_update: bool
    ) -> Iterator[tuple[sa.Table, sa.ColumnElement[bool]]]:
        """Yield the conditions for all rows of the user except the data keys.

        To avoid deadlocks, the sessions are locked first, then the user's row, as in a service.
        Afterwards, services cannot append events to the locked sessions, and cannot create sessions
        of the user, whose row is deleted.
        """
        self._user_row_ids |= self._find_user_row_ids()
        found = self._find_sessions(for_update=for_update)
        self._session_ids_and_tags.update(found)
        if not for_update:
            found = list(self._session_ids_and_tags)  # also count rows of deleted sessions
        yield users, users.c.id.in_(self._user_row_ids)
        yield witnesses, witnesses.c.tag == self._tag
        if for_update:  # another node may just import the user
            clusters.claim_missing_user(self._connection, self._tag)
        if self._has_index and self._user_row_ids:
            row_ids = map(index_rows.index_row_id, self._user_row_ids)
            yield state_index, state_index.c.row_id.in_(row_ids)
        for start in range(0, len(found), self._row_ids_per_statement):
            ids, tags = zip(*found[start : start + self._row_ids_per_statement], strict=True)
            yield witnesses, witnesses.c.tag.in_(tags)
            yield snapshots, snapshots.c.session_row.in_(ids)
            if self._has_index:
                yield state_index, state_index.c.row_id.in_(ids)
            yield events, events.c.session_row.in_(ids)
            yield sessions, sessions.c.id.in_(ids)

    def _find_user_row_ids(self) -> set[int]:
        """Return the row ids of the user: usually one id, of the row with the user's tag.

        If an earlier pass has deleted that row, return its id.  If no row had the tag, an attacker
        may have modified it: return the ids of the rows whose record has one of `_headers`.
        """
        query = sa.select(users.c.id)
        scalars = self._connection.scalars
        row_ids = set(scalars(query.where(users.c.tag == self._tag))) or self._user_row_ids
        if not row_ids and self._headers:
            row_ids = set(scalars(query.where(header_column(users.c.state).in_(self._headers))))
        return row_ids

    def _find_sessions(self, *, for_update: bool) -> list[tuple[int, bytes]]:
        """Return the ids and tags of the user's sessions; with *for_update*, lock these rows.

        If the user has no row, they are the sessions whose record has one of `_headers`.
        """
        c = sessions.c
        is_of_user: sa.ColumnElement[bool]
        if self._user_row_ids:
            is_of_user = c.user_row.in_(self._user_row_ids)
        elif self._headers:
            is_of_user = header_column(c.state).in_(self._headers)
        else:
            return []
        # A modified tag may have another type: convert the tags to bytes.
        query = sa.select(c.id, sa.cast(c.tag, sa.LargeBinary), IS_COLLECTION).where(is_of_user)
        rows = self._connection.execute(query.with_for_update() if for_update else query).all()
        self._collection_ids.update(row_id for row_id, _, is_collection in rows if is_collection)
        return [(row_id, tag) for row_id, tag, _ in rows]
