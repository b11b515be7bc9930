"""Operations on the data keys of an owner, which no service runs: they are for commands, and for
records that are stored outside this database.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from adk_secure_sessions.db.protocol import Steps
from adk_secure_sessions.formats.records import HEADER_LENGTH, keep_packed, packing_of
from adk_secure_sessions.keys.data_keys import TransactionKeys
from adk_secure_sessions.storage import queries as sql
from adk_secure_sessions.storage import sealed_rows
from adk_secure_sessions.storage.operation_runner import (
    Attempt,
    KeySource,
    StorageOperation,
    apply_or_conflict,
)
from adk_secure_sessions.storage.queries import EVENT_RECORD, EVENT_TIME, QueryRows
from adk_secure_sessions.storage.reads import Decode, check_and_decode_events
from adk_secure_sessions.storage.schema import (
    EVENTS,
    SESSIONS,
    SNAPSHOTS,
    WITNESSES,
    Owner,
    SealedTable,
    StoredSession,
)
from adk_secure_sessions.storage.writes import OwnerChanges, Write, read_rows

E = TypeVar("E")
T = TypeVar("T")

# The number of records by table and record header.  The header names the backend and the data key.
HeaderCounts = Counter[tuple[str, bytes]]


def _count_headers(*records: tuple[SealedTable[Any], bytes]) -> HeaderCounts:
    return Counter((table.name, record[:HEADER_LENGTH]) for table, record in records)


class OwnerWithHeaders(NamedTuple):
    """A decrypted app or user; *headers* counts the record in its row, and its version witness."""

    app_name: str
    owner: Owner
    headers: HeaderCounts


@dataclass(eq=False, repr=False)
class ReadOwner(StorageOperation[OwnerWithHeaders | None]):
    """Read an app or, with *of_user*, a user without the row cache; None if it has no row.

    *identity* needs only the app and the tag of the owner.
    """

    needs_fresh_keys = True
    bypasses_row_cache = True

    of_user: bool = False

    async def execute(self, attempt: Attempt) -> OwnerWithHeaders | None:
        rows = await attempt.read(sql.OWNERS)
        owner = _open_owner(attempt, rows, of_user=self.of_user)
        if owner is None:
            return None
        row, witness = owner.row, rows.witnesses[owner.row.tag].record
        table = sealed_rows.TABLES_OF_ROWS[type(row)]
        headers = _count_headers((table, row.record), (WITNESSES, witness))
        return OwnerWithHeaders(attempt.identity.app_name, owner, headers)


def _open_owner(attempt: Attempt, rows: QueryRows, *, of_user: bool) -> Owner | None:
    """Return the app, or a user of any id; None if it is not stored."""
    if of_user:
        return sealed_rows.open_owner(attempt, rows, rows.users[0]) if rows.users else None
    return sealed_rows.open_app(attempt, rows)


class SessionWithEvents(NamedTuple, Generic[E]):
    """A decrypted session with all its events, and the rows that were read."""

    session: StoredSession
    events: list[E]
    rows: QueryRows

    @property
    def times(self) -> list[int]:
        """The times of the events, in microseconds since 1970, UTC."""
        return [row[EVENT_TIME] for row in self.rows.events]

    def count_headers(self) -> HeaderCounts:
        """Count the decrypted records of the session."""
        return _count_headers(
            (SESSIONS, self.session.row.record),
            (WITNESSES, self.rows.witnesses[self.session.row.tag].record),
            *((SNAPSHOTS, snapshot.record) for snapshot in self.rows.snapshots.values()),
            *((EVENTS, event[EVENT_RECORD]) for event in self.rows.events),
        )


@dataclass(eq=False, repr=False)
class ReadWholeSession(StorageOperation[SessionWithEvents[E] | None]):
    """Read a session with all its events without the row cache; see `ReadOwner` and `GetSession`.

    If *checks_owners* is False, the rows of the app and the user are not decrypted: `verify` has
    decrypted the ids in *identity* from the rows of the session and its user.
    """

    bypasses_row_cache = True

    decode: Decode[E]
    checks_owners: bool = True

    def __post_init__(self) -> None:
        self.needs_fresh_keys: bool = self.checks_owners

    async def execute(self, attempt: Attempt) -> SessionWithEvents[E] | None:
        rows = await attempt.read(sql.SESSION_WITH_ALL_EVENTS)
        if self.checks_owners:
            _, user = sealed_rows.open_owners(attempt, rows)
        else:
            # Decrypting the session authenticates the user id, and the row id of its user.
            user = Owner(rows.users[0], self.identity.user_id, b"{}") if rows.users else None
        session = sealed_rows.open_session(attempt, rows, user)
        if session is None:
            return None
        decoded = await check_and_decode_events(attempt, session, rows.events, self.decode)
        return SessionWithEvents(session, decoded, rows)


class RenewedKey(NamedTuple):
    """Whether `RenewKey` has created a data key, and whether it has changed the owner's row and
    version witness; both are then encrypted with the data key that encrypts new records.

    *orphaned_key_ids* are the ids of data keys that it has stored in the key database, although the
    owner has no row any more.
    """

    created: bool = False
    changed: bool = False
    orphaned_key_ids: Collection[int] = ()


@dataclass(eq=False, repr=False)
class RenewKey(Write[RenewedKey]):
    """Ensure that an owner's row names exactly one data key, created at *not_before* or later
    (microseconds UTC); create the key if there is none that new.  The owner is the app, or the user
    with the user tag of *identity* (*of_user*).
    """

    audited_as = "data key"
    needs_fresh_keys = True
    bypasses_row_cache = True

    not_before: int
    of_user: bool

    def steps(self, attempt: Attempt, owner_changes: OwnerChanges) -> Steps[RenewedKey]:
        rows = yield from read_rows(attempt, sql.OWNERS)
        keys, stored = attempt.keys, attempt.keys.stored_key_ids
        owner = _open_owner(attempt, rows, of_user=self.of_user)
        if owner is None:
            return RenewedKey(orphaned_key_ids=stored)
        # A rotation does not have the options of the services, so it packs the row as it was.
        row = owner.row
        context = sealed_rows.TABLES_OF_ROWS[type(row)].context(attempt.identity.ids, row)
        keys.packing = packing_of(keys.open_with_flags(row.tag, context, row.record, keep_packed))
        if stored:
            keys.choose_current(row.tag, stored)
        current, is_newest = keys.current(row.tag), keys.current_is_newest(row.tag)
        if current is None or current.row.created_at < self.not_before or not is_newest:
            owner_changes.require_new_data_key(row.tag, self.not_before)
        elif owner.key_ids == (current.id,):
            return RenewedKey()
        owner_changes.store_next_version(owner._replace(key_ids=()))
        yield from apply_or_conflict(owner_changes.changes)
        return RenewedKey(created=bool(keys.new_rows or stored), changed=True)


class EnsureOwners(Write[TransactionKeys]):
    """Store the rows and the data keys of the app and the user of *identity*, if they are missing.

    Return their data keys.  Use them at once: a data key that was erased or rotated meanwhile must
    not encrypt new records.
    """

    audited_as = "owners"

    async def execute(self, attempt: Attempt) -> TransactionKeys:
        rows = await attempt.read(sql.OWNERS)
        app, user = sealed_rows.open_owners(attempt, rows)
        if app and user:
            keys = attempt.keys
            if all(keys.current_is_as_new_as(one.row.tag, one.row.record) for one in (app, user)):
                attempt.run_commit_callbacks()
                return keys
        return await super().execute(attempt)

    def steps(self, attempt: Attempt, owner_changes: OwnerChanges) -> Steps[TransactionKeys]:
        rows = yield from read_rows(attempt, sql.OWNERS)
        app, user = sealed_rows.open_owners(attempt, rows)
        app = owner_changes.update_owner(app) if app else owner_changes.upsert_app(None, {})
        owner_changes.upsert_user(user, app.row.id, {})
        if owner_changes.changes:
            yield from apply_or_conflict(owner_changes.changes)
        return attempt.keys


@dataclass(eq=False, repr=False)
class UseKeys(StorageOperation[T]):
    """Decrypt records that are stored outside this database, with data keys of this database.

    Call *work* with the data keys of the app and the user, and whether they were just read.  If
    *work* raises UnknownKeyError with cached keys, read the keys and call it again.
    """

    work: Callable[[TransactionKeys, bool], Awaitable[T]]

    async def execute(self, attempt: Attempt) -> T:
        is_current = attempt.key_source is not KeySource.CACHE
        if is_current:
            rows = await attempt.read(sql.OWNERS)
            sealed_rows.open_owners(attempt, rows)
        return await self.work(attempt.keys, is_current)
