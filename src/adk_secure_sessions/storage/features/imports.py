"""Import sessions and states from another database, and remember what was imported.

`secure_migrated` has a row for each session, user and app that was imported, and a *tombstone* for
each session and user that must not be imported.  A row stays when the session is deleted.
Therefore, a later import never restores a deleted session, and never replaces a session that a
service has changed since.  Each row has a MAC: see docs/format.md, "Migration".
"""

import hmac
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import NamedTuple, TypeVar

import sqlalchemy as sa

from adk_secure_sessions.db.dialects import dialect_of
from adk_secure_sessions.db.protocol import Change, Conflict, Row, Steps
from adk_secure_sessions.errors import Reason, TamperedError, WrongKeyError
from adk_secure_sessions.formats.json_text import canonical_json, load_state
from adk_secure_sessions.formats.records import NO_LINK, EncodedEvent, encode_text, new_link
from adk_secure_sessions.keys.blind_index import TAG_LENGTH
from adk_secure_sessions.keys.keyring import Keyring
from adk_secure_sessions.storage import meta, sealed_rows
from adk_secure_sessions.storage import queries as sql
from adk_secure_sessions.storage.feature_list import Feature
from adk_secure_sessions.storage.features.search_index import SearchIndex
from adk_secure_sessions.storage.operation_runner import (
    Attempt,
    CachedRowOutdated,
    OperationRunner,
    apply_or_conflict,
)
from adk_secure_sessions.storage.schema import (
    NEVER,
    NO_SNAPSHOT,
    TOMBSTONE,
    Identity,
    MigratedRow,
    Owner,
    SessionRow,
    StoredSession,
    apps,
    as_parameters,
    locating_errors,
    migrated,
    new_row_id,
    sessions,
    users,
)
from adk_secure_sessions.storage.survey import FeatureName
from adk_secure_sessions.storage.table_walk import rows_where
from adk_secure_sessions.storage.writes import (
    CachedOwners,
    Changes,
    DeleteSession,
    NewSession,
    OwnerChanges,
    Write,
    cached_owners,
    event_groups,
    insert_if_unchanged,
    read_rows,
    replacement_changes,
    try_apply_with_events,
)

K = TypeVar("K", bound=tuple[str, ...])
T = TypeVar("T")

_LATEST = 9 * 10**18  # the latest time that the stored format allows, in microseconds
_NO_SOURCE = bytes(TAG_LENGTH)


class ImportStatus(Enum):
    """What this database has of a session or state of the source.

    An import returns the status that it found, and has stored the item if the status `is_due`.
    """

    NEW = "it was never imported"
    OUTDATED = "an earlier version was imported, and no service has changed it since"
    UNCHANGED = "this version was imported, and no service has changed it since"
    CONTINUED = "this version was imported, and a service has changed it since"
    CONFLICT = "an earlier version was imported, and a service has changed or deleted it since"
    SAME_ID = "a service stored it under the same id, and it was never imported"
    DELETED = "it was deleted, its user was erased, or a tombstone forbids to import it"

    @property
    def is_due(self) -> bool:
        """Whether an import stores the session or state, or has stored it."""
        return self in (ImportStatus.NEW, ImportStatus.OUTDATED)


# The status of what was imported and is still stored, by two answers: whether the source has not
# changed it since, and whether no service has changed it since.
_STATUS = {
    (True, True): ImportStatus.UNCHANGED,
    (False, True): ImportStatus.OUTDATED,
    (True, False): ImportStatus.CONTINUED,
    (False, False): ImportStatus.CONFLICT,
}


class ImportMacs(NamedTuple):
    """Computes and checks the MACs in the table `secure_migrated` of one database."""

    keyring: Keyring

    def source_mac(self, tag: bytes, etag: bytes) -> bytes:
        """Return the value of the column `source`: a MAC of *etag*, bound to *tag*."""
        keyring = self.keyring
        return keyring.index_master.mac("migration source", keyring.database_id, tag, etag)

    def state_mac(self, tag: bytes, state: bytes) -> bytes:
        """Return the value of the column `source` for the *state* of a user or an app."""
        return self.source_mac(tag, canonical_json(load_state(state)))

    def build_row(self, tag: bytes, row_id: int, number: int, source: bytes) -> MigratedRow:
        parts = (self.keyring.database_id, tag, source)
        mac = self.keyring.index_master.mac("migrated", *parts, numbers=(row_id, number))
        return MigratedRow(tag, row_id, number, source, mac)

    def tombstone(self, tag: bytes) -> MigratedRow:
        """Return a row that forbids the import of the session or user with *tag*."""
        return self.build_row(tag, TOMBSTONE, 0, _NO_SOURCE)

    def check(self, row: MigratedRow) -> None:
        """Raise TamperedError if the row was modified, or was written for another database."""
        with locating_errors(migrated.name, row.tag.hex() if type(row.tag) is bytes else "?"):
            expected = self.build_row(*row[:4])
            if type(row.mac) is not bytes or not hmac.compare_digest(expected.mac, row.mac):
                raise TamperedError(
                    "its MAC is wrong: it was modified, moved or copied from another database",
                    Reason.MISMATCH,
                )

    def checked_with_tag(self, rows: sql.QueryRows, tag: bytes) -> MigratedRow | None:
        """Check the row with *tag*, and return it; None if there is no such row."""
        row = rows.migrated.get(tag)
        if row is not None:
            self.check(row)
        return row

    def checked_row(self, row: Row) -> "CheckedMigratedRow":
        """Check a row of a query in `_MIGRATED_ROWS`, and return it."""
        *columns, current_row_id, current_number = row
        stored = MigratedRow(*columns)
        self.check(stored)
        version = None if current_row_id is None else (current_row_id, current_number)
        return CheckedMigratedRow(stored, version, self)


class CheckedMigratedRow(NamedTuple):
    """A row of `secure_migrated` whose MAC was checked.

    *current_version* is the row id, and the revision or version, that the session, user or app has
    now; None if it is not stored.  These two numbers were not authenticated.
    """

    row: MigratedRow
    current_version: tuple[int, int] | None
    macs: ImportMacs

    @property
    def is_untouched(self) -> bool:
        """Whether a session is stored and no service has changed it since the import."""
        return self.current_version == (self.row.row_id, self.row.number)

    def status(self, *, is_unchanged: bool) -> ImportStatus:
        """Return the status; *is_unchanged* is whether the source has not changed since the import.

        A rotation of keys also changes the version of a user or an app, so that their status
        `CONTINUED` or `CONFLICT` may mean nothing but that.
        """
        if self.row.is_tombstone:
            return ImportStatus.DELETED
        if self.current_version is None or self.current_version[0] != self.row.row_id:
            # A service has deleted the copy, and may have created the session again.  If the source
            # has changed since the import, the service deleted an older version.
            return ImportStatus.DELETED if is_unchanged else ImportStatus.CONFLICT
        return _STATUS[is_unchanged, self.is_untouched]

    def has_source(self, source_etag: str) -> bool:
        """Return whether `import_session` has stored the session with this *source_etag*."""
        source = self.macs.source_mac(self.row.tag, encode_text(source_etag))
        return hmac.compare_digest(source, self.row.source)

    def has_state(self, state: bytes) -> bool:
        """Return whether *state* (JSON) is the state of the user or app that was imported."""
        return hmac.compare_digest(self.macs.state_mac(self.row.tag, state), self.row.source)


@dataclass(eq=False, repr=False)
class _Import(Write[T]):
    """Base class of the operations that store a session or a state of another database.

    With *replace*, they replace what was imported from another version than *source* (see
    `ImportMacs.source_mac`), if no service has changed it since.
    """

    audited_as = "import"

    macs: ImportMacs
    source: bytes
    replace: bool

    def _is_unchanged(self, row: MigratedRow) -> bool:
        return hmac.compare_digest(row.source, self.source)

    def _checked_status(
        self, status: ImportStatus, stored: StoredSession | Owner | None, row: MigratedRow
    ) -> ImportStatus:
        """Return *status*, which an import has without `replace` as a conflict if it is outdated.

        Raises TamperedError if *stored* is older than the session or state that *row* recorded.
        """
        if stored and stored.row.id == row.row_id and stored.version < row.number:
            raise TamperedError(
                f"its version is {stored.version}, and version {row.number} was imported: an older "
                "row was replayed",
                Reason.MISMATCH,
                sealed_rows.TABLES_OF_ROWS[type(stored.row)].name,
                stored.row.id,
            )
        if status is ImportStatus.OUTDATED and not self.replace:
            return ImportStatus.CONFLICT
        return status


@dataclass(eq=False, repr=False)
class ImportSession(_Import[ImportStatus]):
    """Store a session of another database with all its events, and remember it.

    If its app or its user is not stored yet, store them with empty states.  See `ImportStatus` for
    the cases in which nothing is stored.

    *times* are the columns `created_at`, `updated_at` and `expires_at`, in microseconds UTC.
    """

    lock_queries: Sequence[sa.Executable] = field(default=sql.LOCKS_WITHOUT_APP, init=False)

    state: bytes
    events: Sequence[EncodedEvent]
    times: tuple[int, int, int]

    def __post_init__(self) -> None:
        checked = [*self.times[:2], *(event.time for event in self.events)]
        if max(map(abs, checked)) > _LATEST or not 0 <= self.times[2] <= NEVER:
            raise ValueError("the time of the session or of an event is not a possible time")
        self._groups = event_groups(self.events)
        self.always_locks_rows: bool = len(self._groups) > 1
        self._links: list[bytes] = []  # of the events, in the last attempt

    def steps(self, attempt: Attempt, owner_changes: OwnerChanges) -> Steps[ImportStatus]:
        if attempt.may_use_cached_rows and not self.replace and (cached := cached_owners(attempt)):
            return (yield from self._import_from_cache(attempt, cached))
        rows = yield from read_rows(attempt, sql.imported(session=True))
        app, user = sealed_rows.open_owners(attempt, rows)
        session = sealed_rows.open_session(attempt, rows, user)
        row = self.macs.checked_with_tag(rows, self.identity.session_tag)
        migrated_user = self.macs.checked_with_tag(rows, self.identity.user_tag)
        if row and row.row_id in self._unconfirmed_results:
            result: ImportStatus = self._unconfirmed_results[row.row_id]
            return result
        if migrated_user and migrated_user.is_tombstone:
            return ImportStatus.DELETED
        if row:
            copy = CheckedMigratedRow(row, session and session.id_and_revision, self.macs)
            status = copy.status(is_unchanged=self._is_unchanged(row))
            status = self._checked_status(status, session, row)
            if status.is_due and session and user:
                yield from self._replace_session(attempt, owner_changes, user, session, row)
            return status
        if session:
            return ImportStatus.SAME_ID
        yield from self._create(attempt, owner_changes, app, user)
        return ImportStatus.NEW

    def _import_from_cache(self, attempt: Attempt, cached: CachedOwners) -> Steps[ImportStatus]:
        """Import the session without a read, from the cached rows of its app and its user."""
        new, row = self._build_session(attempt, cached.user.row.id, ImportStatus.NEW)
        columns = as_parameters(new.session.row) | cached.columns
        changes = [
            Change(sql.import_session("cached"), columns),
            *new.inserts_with_witness(),
            Change(sql.INSERT_MIGRATED, as_parameters(row)),
        ]
        if not (yield from self._apply(attempt, new, changes)):
            raise CachedRowOutdated
        return ImportStatus.NEW

    def _create(
        self, attempt: Attempt, owner_changes: OwnerChanges, app: Owner | None, user: Owner | None
    ) -> Steps[None]:
        app = owner_changes.upsert_app(app, {})
        changed = owner_changes.upsert_user(user, app.row.id, {})
        new, row = self._build_session(attempt, changed.row.id, ImportStatus.NEW)
        columns = as_parameters(new.session.row) | {"user_tag": self.identity.user_tag}
        insert = Change(sql.import_session("new"), columns)
        if changed == user:
            insert = insert_if_unchanged(sql.import_session("read"), columns, user)
        # INSERT_MIGRATED comes first: on PostgreSQL it waits for a tombstone, and the next INSERT
        # then sees that tombstone.
        remember = Change(sql.INSERT_MIGRATED, as_parameters(row))
        changes = [remember, *owner_changes.changes, insert, *new.inserts_with_witness()]
        if not (yield from self._apply(attempt, new, changes)):
            raise Conflict

    def _replace_session(
        self,
        attempt: Attempt,
        owner_changes: OwnerChanges,
        user: Owner,
        old: StoredSession,
        row: MigratedRow,
    ) -> Steps[None]:
        owner_changes.update_owner(user, old.row.record)
        new, new_row = self._build_session(attempt, user.row.id, ImportStatus.OUTDATED)
        changes = replacement_changes(attempt, owner_changes, old, new)
        changes.append(_update(row, new_row))
        if not (yield from self._apply(attempt, new, changes)):
            raise Conflict

    def _build_session(
        self, attempt: Attempt, user_row_id: int, result: ImportStatus
    ) -> tuple[NewSession, MigratedRow]:
        """Return a new session and its row of `secure_migrated`."""
        tag = self.identity.session_tag
        self._links = links = [new_link() for _ in self.events]
        row = SessionRow(new_row_id(), user_row_id, tag, len(links), NO_SNAPSHOT, *self.times, b"")
        self._unconfirmed_results[row.id] = result
        last_link = links[-1] if links else NO_LINK
        session = StoredSession(row, self.identity.session_id, self.state, last_link=last_link)
        migrated_row = self.macs.build_row(row.tag, row.id, row.revision, self.source)
        return NewSession.build(attempt, session), migrated_row

    def _apply(self, attempt: Attempt, new: NewSession, changes: Changes) -> Steps[bool]:
        row_id = new.session.row.id
        return try_apply_with_events(attempt, changes, row_id, self._groups, self._links)


class ImportOwnerState(_Import[ImportStatus]):
    """Store the state of an app, or of a user, exactly as it is in another database.

    If *of_user* is False, the user id of *identity* is not used.  A stored state that was not
    imported is replaced only if it is empty.
    """

    def __init__(
        self, identity: Identity, macs: ImportMacs, state: bytes, *, of_user: bool, replace: bool
    ) -> None:
        self._tag = identity.user_tag if of_user else identity.app_tag
        super().__init__(identity, macs, macs.state_mac(self._tag, state), replace)
        self._state = state
        self.of_user = of_user

    def steps(self, attempt: Attempt, owner_changes: OwnerChanges) -> Steps[ImportStatus]:
        rows = yield from read_rows(attempt, sql.imported(session=False))
        if self.of_user:
            app, user = sealed_rows.open_owners(attempt, rows)
        else:
            app, user = sealed_rows.open_app(attempt, rows), None
        owner = user if self.of_user else app
        row = self.macs.checked_with_tag(rows, self._tag)
        if row in self._unconfirmed_results:
            result: ImportStatus = self._unconfirmed_results[row]
            return result
        if row and (row.is_tombstone or owner is None):
            return ImportStatus.DELETED
        status = ImportStatus.NEW
        if row and owner:
            # A service may have changed other fields of the row, such as the ids of its data keys.
            # Therefore, the states are compared and not the versions.
            is_untouched = hmac.compare_digest(row.source, self._source_of(owner))
            status = _STATUS[self._is_unchanged(row), is_untouched]
            status = self._checked_status(status, owner, row)
            if not status.is_due:
                return status
        elif owner and owner.state != b"{}" and self._source_of(owner) != self.source:
            return ImportStatus.SAME_ID
        changed = self._set(app, user, owner_changes)
        new = self.macs.build_row(self._tag, changed.row.id, changed.version, self.source)
        self._unconfirmed_results[new] = status
        remember = _update(row, new) if row else Change(sql.INSERT_MIGRATED, as_parameters(new))
        yield from apply_or_conflict([*owner_changes.changes, remember])
        return status

    def _set(self, app: Owner | None, user: Owner | None, owner_changes: OwnerChanges) -> Owner:
        if not self.of_user and app is None:
            return owner_changes.upsert_app(None, load_state(self._state))
        owner = app = owner_changes.upsert_app(app, {})
        if self.of_user:
            if user is None:
                return owner_changes.upsert_user(None, app.row.id, load_state(self._state))
            owner = user
        if self._source_of(owner) == self.source:
            return owner
        return owner_changes.set_state(owner, self._state)

    def _source_of(self, owner: Owner) -> bytes:
        return self.macs.state_mac(owner.row.tag, owner.state)


@dataclass(eq=False, repr=False)
class AddTombstone(Write[None]):
    """Remember that a session must not be imported.

    If the session was imported before, its row of `secure_migrated` is kept.  This row is enough: a
    session that was imported and is not stored any more is not imported again.
    """

    audited_as = "tombstone"

    macs: ImportMacs

    def steps(self, attempt: Attempt, owner_changes: OwnerChanges) -> Steps[None]:
        tag = self.identity.session_tag
        rows = yield from read_rows(attempt, sql.imported(session=True))
        if self.macs.checked_with_tag(rows, tag) is None:
            new = self.macs.tombstone(tag)
            yield from apply_or_conflict([Change(sql.INSERT_MIGRATED, as_parameters(new))])


class _DeleteCopy(DeleteSession):
    """Delete a session and its row of `secure_migrated`: its id can then be imported again."""

    def _prepare_deletion(self, attempt: Attempt, session: StoredSession) -> Changes:
        row = Change(sql.DELETE_MIGRATED, {"at_tag": session.row.tag}, must_match_one_row=False)
        return [*super()._prepare_deletion(attempt, session), row]


def add_tombstone_of_user(tombstone: MigratedRow, connection: sa.Connection) -> None:
    """Store *tombstone* of a user, in a transaction of its own.

    After the commit, every import of the user has either been committed, or finds the tombstone and
    stores nothing.  On PostgreSQL, this function waits for all running imports, whose rows no query
    sees yet, and later imports wait for the tombstone.  MySQL and MariaDB need no such lock: an
    import inserts the user's version witness before it looks for the tombstone, and the erasure
    waits for it when it deletes this version witness.  On a cluster, the erasure also writes a
    version witness that does not exist, so that it conflicts with an import on another node.
    """
    dialect_of(connection).lock_tables(connection, migrated)
    # A tombstone forbids all imports of the user, so it may replace any row, even one that was
    # tampered with.
    connection.execute(sa.delete(migrated).where(migrated.c.tag == tombstone.tag))
    connection.execute(sa.insert(migrated).values(**as_parameters(tombstone)))


def _update(old: MigratedRow, new: MigratedRow) -> Change:
    return Change(sql.UPDATE_MIGRATED, as_parameters(old, "at_") | as_parameters(new))


class MigrationMark(Enum):
    """The values of the mark that a migration stores in row `migration` of `secure_meta`."""

    COMPLETE = "complete"  # everything was imported
    SOURCE_ERASED = "erased"  # and since then, rows of the source may have been deleted

    @property
    def source_is_erased(self) -> bool:
        return self is MigrationMark.SOURCE_ERASED

    def text(self, keyring: Keyring) -> str:
        purpose = "source erased" if self.source_is_erased else "migration complete"
        return f"{self.value} {keyring.index_master.mac(purpose, keyring.database_id).hex()}"


class Imports:
    """Stores what is imported into a database, and tells what was imported before.

    The first import adds *feature*.
    """

    def __init__(self, runner: OperationRunner, search_index: SearchIndex) -> None:
        self._runner = runner
        self._search_index = search_index
        self._expiry = Feature(runner, FeatureName.EXPIRY)
        self.feature: Feature = Feature(runner, FeatureName.MIGRATION)

    async def import_session(
        self,
        app_name: str,
        user_id: str,
        session_id: str,
        *,
        state: bytes,
        events: Sequence[EncodedEvent],
        created_at: int,
        updated_at: int,
        source_etag: str,
        expires_at: int | None = None,
        replace: bool = False,
    ) -> ImportStatus:
        """Store a session of another database with all its events, in one transaction.

        If the rows of its app and its user are missing, they are created with empty states, so
        import states last.  With *replace*, a session that was imported before from another version
        is replaced, if no service has changed it since.  The caller must check the ids.

        *state* is the session's own state, as `encode_state` returns it.  *source_etag* is a
        text that differs after each change of the session in the source.  The times are in
        microseconds UTC; *expires_at* is None for a session that does not expire.
        """
        await self.feature.ensure()
        await self._search_index.declare_configured(app_name)
        if expires_at is not None:
            await self._expiry.ensure()
        identity = await self._runner.identify(app_name, user_id, session_id)
        macs = await self.macs()
        expiry = NEVER if expires_at is None else min(max(expires_at, 0), NEVER - 1)
        times = (created_at, updated_at, expiry)
        source = macs.source_mac(identity.session_tag, encode_text(source_etag))
        operation = ImportSession(identity, macs, source, replace, state, events, times)
        return await self._runner.run(operation)

    async def import_state(
        self, owner: tuple[str, ...], state: bytes, *, replace: bool = False
    ) -> ImportStatus:
        """Set the state of a user or an app exactly to *state*, as `encode_state` returns it.

        An empty state, as `import_session` creates it, is always replaced.  *replace* and the
        result are those of `import_session`.
        """
        await self.feature.ensure()
        await self._search_index.declare_configured(owner[0])
        of_user = len(owner) > 1
        identity = await self._runner.identify(owner[0], owner[1] if of_user else "")
        macs = await self.macs()
        operation = ImportOwnerState(identity, macs, state, of_user=of_user, replace=replace)
        return await self._runner.run(operation)

    async def delete_copy(self, ids: tuple[str, str, str], copy: MigratedRow) -> bool:
        """Delete a session that was imported, and is gone in the source; return False if a service
        has continued or deleted it.
        """
        identity, untouched = await self._runner.identify(*ids), (copy.row_id, copy.number)
        deletion = _DeleteCopy(identity, lambda now: now.id_and_revision == untouched)
        return bool(await self._runner.run(deletion))

    async def rows_for(self, ids: Iterable[K]) -> dict[K, CheckedMigratedRow]:
        """Return the rows of `secure_migrated` for those *ids* that have one.

        Ids are those of an app, of a user, or of a session.  If a session's user was erased, the
        result for the session is a tombstone.
        """
        if not await self.feature.is_added():
            return {}
        macs, wanted = await self.macs(), list(ids)
        index, rows = macs.keyring.index_master, dict[K, CheckedMigratedRow]()
        for number, table in enumerate((apps, users, sessions), 1):
            tags = {key: index.tag_of(*key) for key in wanted if len(key) == number}
            rows |= await self._rows_for_tags(table, macs, tags)
        user_tags = {key: index.tag_of(*key[:2]) for key in wanted if len(key) == 3}
        for key, migrated_user in (await self._rows_for_tags(users, macs, user_tags)).items():
            if migrated_user.row.is_tombstone:
                version = rows[key].current_version if key in rows else None
                rows[key] = migrated_user._replace(current_version=version)
        return rows

    async def add_tombstone(
        self, app_name: str, user_id: str, session_id: str | None = None
    ) -> None:
        """Store a tombstone of the session or, if *session_id* is None, of all that the user has.

        Call this before deleting the session, or the user's rows.  Otherwise, an import could
        restore them.
        """
        await self.feature.ensure()
        identity = await self._runner.identify(app_name, user_id, session_id or "")
        macs = await self.macs()
        if session_id is not None:
            await self._runner.run(AddTombstone(identity, macs))
            return
        tombstone = macs.tombstone(identity.user_tag)
        await self._runner.data_db.run_sync(partial(add_tombstone_of_user, tombstone))

    async def store_mark(self, *, source_is_erased: bool = False) -> bool:
        """Store the mark that everything was imported, and perhaps erased in the source.

        SOURCE_ERASED is never replaced here: return False.  Otherwise a later run could delete the
        only copies.
        """
        mark = MigrationMark.SOURCE_ERASED if source_is_erased else MigrationMark.COMPLETE
        await self.feature.ensure()
        keyring = await self._runner.keyring()

        def store(connection: sa.Connection) -> bool:
            stored = meta.read(connection, meta.MIGRATION_MARK, lock=True)
            if stored == MigrationMark.SOURCE_ERASED.text(keyring):
                return False
            meta.put(connection, meta.MIGRATION_MARK, mark.text(keyring))
            return True

        return await self._runner.key_db.run_sync(store)

    async def withdraw_mark(self, *, source_is_kept: bool = False) -> bool:
        """Remove COMPLETE; with *source_is_kept*, turn SOURCE_ERASED back into COMPLETE.  Return
        whether the mark was changed.
        """
        old, new = MigrationMark.COMPLETE, None
        if source_is_kept:
            old, new = MigrationMark.SOURCE_ERASED, old
        keyring = await self._runner.keyring()
        if await self.migration_mark() is not old:
            return False  # do not begin to write: the account may only be able to read
        marks = old.text(keyring), new and new.text(keyring)
        swap = partial(meta.swap, name=meta.MIGRATION_MARK, old=marks[0], new=marks[1])
        return await self._runner.key_db.run_sync(swap)

    async def migration_mark(self) -> MigrationMark | None:
        """Return the mark that `store_mark` has stored; None if there is none."""
        keyring = await self._runner.keyring()
        read = partial(meta.read, name=meta.MIGRATION_MARK)
        value = await self._runner.key_db.run_sync(read, commit=False)
        if value is None:
            return None
        for mark in MigrationMark:
            if hmac.compare_digest(str(value).encode(), mark.text(keyring).encode()):
                return mark
        raise WrongKeyError(
            f"the row `{meta.MIGRATION_MARK}` of secure_meta was tampered with: delete the row and "
            "run `migrate compare` again"
        )

    async def macs(self) -> ImportMacs:
        return ImportMacs(await self._runner.keyring())

    async def _rows_for_tags(
        self, table: sa.Table, macs: ImportMacs, tags: Mapping[K, bytes]
    ) -> dict[K, CheckedMigratedRow]:
        read, query = self._runner.data_db.read, _MIGRATED_ROWS[table]
        found = await rows_where(read, query, migrated.c.tag, dict.fromkeys(tags.values()))
        rows = {one.row.tag: one for one in map(macs.checked_row, found)}
        return {key: rows[tag] for key, tag in tags.items() if tag in rows}


# The queries for the rows of `secure_migrated`, each with the id and the version (for a session,
# the revision) of the row that has the same tag in a table, or NULL.
_MIGRATED_ROWS = {
    version.table: sa.select(*migrated.c, version.table.c.id, version).select_from(
        migrated.outerjoin(version.table, version.table.c.tag == migrated.c.tag)
    )
    for version in (apps.c.version, users.c.version, sessions.c.revision)
}
