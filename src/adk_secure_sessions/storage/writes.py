"""The write operations: create a session, append an event, delete a session.

Each operation has a generator `steps`, which yields requests to the database (`db.protocol`).  The
generator reads rows, decrypts them, and then yields all changes in one request.  Therefore a row
that cannot be decrypted is never overwritten, and on PostgreSQL, no transaction stays open while
rows are decrypted.  `OwnerChanges` makes the changes of apps and users.
"""

from abc import abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeVar

import sqlalchemy as sa

from adk_secure_sessions import telemetry
from adk_secure_sessions.audit import running_access
from adk_secure_sessions.db.protocol import Apply, Change, Conflict, Read, Steps, UniqueViolation
from adk_secure_sessions.errors import Reason, TamperedError, UnknownKeyError
from adk_secure_sessions.formats.json_text import USER_PREFIX, JsonObject, dump_state, load_state
from adk_secure_sessions.formats.records import NO_LINK, EncodedEvent, encode_text, new_link
from adk_secure_sessions.storage import queries as sql
from adk_secure_sessions.storage import sealed_rows
from adk_secure_sessions.storage.features import index_rows
from adk_secure_sessions.storage.operation_runner import (
    Attempt,
    CachedRowOutdated,
    KeySource,
    NeedsDataKey,
    StorageOperation,
    apply_or_conflict,
    insertion_changes,
    key_insertion,
)
from adk_secure_sessions.storage.queries import EVENT_RECORD, QueryRows, QueryVariants
from adk_secure_sessions.storage.schema import (
    COLLECTION,
    NEVER,
    NO_SNAPSHOT,
    AppRow,
    Owner,
    SessionRevision,
    SessionRow,
    SessionWithStates,
    StoredSession,
    UserRow,
    WitnessRow,
    as_parameters,
    new_row_id,
)

T = TypeVar("T")
Changes = list[Change]

# In bytes of JSON.  If an overlay would become larger, it is merged into a new snapshot, and the
# new overlay is empty.  Therefore, most appends rewrite only a small row, even if the state is
# large.
OVERLAY_LIMIT = 8 * 1024
# One request inserts at most this many events and bytes.  A larger event is inserted alone.
_EVENTS_AT_ONCE, _BYTES_AT_ONCE = 5000, 4 * 1024 * 1024


class DuplicateSession(Exception):
    """A session with this id is already stored; *has_expired* tells whether it has expired."""

    def __init__(self, *, has_expired: bool) -> None:
        super().__init__()
        self.has_expired = has_expired


class MissingSession(Exception):
    """The session does not exist."""


class StaleRevision(Exception):
    """The stored session does not have the row id and the revision that the caller expects."""


class NewEvent(NamedTuple):
    """An event to append: its plaintext, its time (microseconds UTC) and its state changes."""

    plaintext: bytes
    time: int
    app_delta: JsonObject
    user_delta: JsonObject
    session_delta: JsonObject


def _witness_change(old: int, new: WitnessRow) -> Change:
    values = {"at_tag": new.tag, "at_number": old, "number": new.number, "seal": new.record}
    return Change(sql.UPDATE_WITNESS, values)


class OwnerChanges:
    """The *changes* of apps and users that one attempt makes, in the order to apply them."""

    def __init__(self, attempt: Attempt) -> None:
        self.changes: list[Change] = []
        self._attempt = attempt
        self._keys = attempt.keys

    def upsert_app(self, app: Owner | None, delta: JsonObject) -> Owner:
        """Insert the app, or merge *delta* into its state; return the app."""
        identity = self._attempt.identity
        if app is None:
            self._ensure_first_key(identity.app_tag)
            name = encode_text(identity.app_name)
            row = AppRow(new_row_id(), identity.app_tag, name, 0, b"")
            app = self._insert(row, "", delta)
        elif delta:
            app = self.update_owner(app, delta=delta)
        return app

    def upsert_user(self, user: Owner | None, app_row_id: int, delta: JsonObject) -> Owner:
        """Insert the user of the app in *app_row_id*, or call `update_owner`; return the user."""
        if user is not None:
            return self.update_owner(user, delta=delta)
        identity = self._attempt.identity
        self._ensure_first_key(identity.user_tag)
        row = UserRow(new_row_id(), app_row_id, identity.user_tag, 0, b"")
        user = self._insert(row, identity.user_id, delta)
        if self._keys.keyring.indexed_key_tags:
            entries = index_rows.value_tags_of(self._attempt, USER_PREFIX, delta)
            row_id = index_rows.index_row_id(user.row.id)
            self.changes += index_rows.new_row_changes(row_id, entries)
        return user

    def update_owner(
        self, owner: Owner, *changed_records: bytes, delta: JsonObject | None = None
    ) -> Owner:
        """Merge *delta* into the state of *owner*, and ensure that its row names a usable data key,
        at least as new as those of *changed_records*, which this transaction changes.
        """
        self._guard_current_key(owner.row.tag, owner.row.record, *changed_records)
        current = self._keys.current(owner.row.tag)
        if delta or current is None or current.id not in owner.key_ids:
            owner = self.store_next_version(owner, delta)
        if delta and owner.is_user and self._keys.keyring.indexed_key_tags:
            self._update_search_index(owner, delta, {})
        return owner

    def set_state(self, owner: Owner, state: bytes) -> Owner:
        """Replace the state of *owner*; return the changed owner."""
        self._guard_current_key(owner.row.tag, owner.row.record)
        changed = self.store_next_version(owner._replace(state=state))
        if owner.is_user and self._keys.keyring.indexed_key_tags:
            self._update_search_index(owner, load_state(state), load_state(owner.state))
        return changed

    def _update_search_index(self, user: Owner, state: JsonObject, replaced: JsonObject) -> None:
        """Add the index rows of *state*, and remove those of keys that only *replaced* has."""
        new = index_rows.value_tags_of(self._attempt, USER_PREFIX, state)
        old = index_rows.value_tags_of(self._attempt, USER_PREFIX, replaced)
        row_id = index_rows.index_row_id(user.row.id)
        self.changes += index_rows.update_changes(row_id, new, old.keys() - new.keys())

    def store_next_version(self, owner: Owner, delta: JsonObject | None = None) -> Owner:
        """Add the changes that store the next version of *owner*, and return it."""
        old = owner.row
        state = dump_state(load_state(owner.state) | delta) if delta else owner.state
        key_ids = self._keys.ids_to_store(old.tag, owner.key_ids)
        row = old._replace(version=old.version + 1)
        owner, witness = self._seal_with_witness(
            Owner(row, owner.user_id, state, new_link(), key_ids)
        )
        at = {"at_id": old.id, "at_version": old.version, "at_state": old.record}
        new = {"version": row.version, "state": owner.row.record}
        self.changes.append(Change(sql.UPDATE_USER if owner.is_user else sql.UPDATE_APP, at | new))
        self.changes.append(_witness_change(old.version, witness))
        return owner

    def require_new_data_key(self, owner_tag: bytes, not_before: int = 0) -> None:
        """Create a data key and add the change that stores it; with a key database, make
        `OperationRunner.run` store one before the next attempt.
        """
        if self._attempt.key_source is KeySource.KEY_DATABASE:
            raise NeedsDataKey(owner_tag, not_before)
        self.changes += key_insertion(self._keys, self._keys.create_data_key(owner_tag, not_before))

    def _insert(self, row: AppRow | UserRow, user_id: str, state: JsonObject) -> Owner:
        """Add the changes that store a new owner in *row*; the owner has a data key."""
        key_ids = self._keys.ids_to_store(row.tag, ())
        owner, witness = self._seal_with_witness(
            Owner(row, user_id, dump_state(state), new_link(), key_ids)
        )
        insert = sql.INSERT_USER if owner.is_user else sql.INSERT_APP
        self.changes.append(Change(insert, as_parameters(owner.row)))
        self.changes.append(Change(sql.INSERT_WITNESS, as_parameters(witness)))
        return owner

    def _seal_with_witness(self, owner: Owner) -> tuple[Owner, WitnessRow]:
        """Return *owner* with a new record, and its version witness; the commit caches both."""
        owner = sealed_rows.seal_owner(self._attempt, owner)
        tag = owner.row.tag
        witness = sealed_rows.seal_witness(self._attempt, tag, tag, owner.row.version, owner.link)
        self._attempt.after_commit(partial(self._attempt.row_cache.put_owner, witness, owner))
        return owner, witness

    def _ensure_first_key(self, owner_tag: bytes) -> None:
        """Create the first data key of an owner that has no row yet.

        If the owner already has a data key, somebody has removed the owner's row.  With a key
        database, a process may have stopped after it stored the data key.  But the key may also be
        an erased one that an attacker inserted again, so create a new one.
        """
        self._require_fresh_keys()
        if self._attempt.key_source is KeySource.KEY_DATABASE:
            self._keys.choose_current(owner_tag, ())
            if self._keys.current(owner_tag) is not None:
                return
        elif self._keys.has_fresh_keys(owner_tag):
            raise TamperedError(
                f"the row of the user or app with tag {owner_tag.hex()} was removed: "
                "its data key is still stored",
                Reason.MISSING,
            )
        self.require_new_data_key(owner_tag)

    def _guard_current_key(self, owner_tag: bytes, *changed_records: bytes) -> None:
        """Make sure that `retire` cannot delete the owner's current data key before the commit.

        `retire` never deletes a key at least as new as one that encrypts an unchanged record.  So
        nothing is needed if the current key is at least as new as the keys of *changed_records*.
        Otherwise (the newest key belongs to another backend), a change locks the row of the current
        key.  No change can lock a row in a key database: a new data key is created.
        """
        keys = self._keys
        if keys.current_is_as_new_as(owner_tag, *changed_records):
            return
        self._require_fresh_keys()
        if keys.stored_key_ids:
            keys.choose_current(owner_tag, keys.stored_key_ids)
            if keys.current_is_as_new_as(owner_tag, *changed_records):
                return
        for record in changed_records:
            # Raise an error if the record's key does not exist.  Otherwise, `current_is_as_new_as`
            # would return False in every attempt, and each attempt would create another key.
            keys.key_of(owner_tag, record)
        current = keys.current(owner_tag)
        if current is None or self._attempt.key_source is KeySource.KEY_DATABASE:
            self.require_new_data_key(owner_tag)
        else:
            locked = {"at_id": current.id, "generation": current.generation}
            self.changes.append(Change(sql.TOUCH_DATA_KEY, locked))

    def _require_fresh_keys(self) -> None:
        """If this attempt uses cached data keys, let the next attempt read them again."""
        if self._attempt.key_source is KeySource.CACHE:
            raise UnknownKeyError("the owner's data keys have to be read again")


@dataclass(eq=False, repr=False)
class Write(StorageOperation[T]):
    """Base class of operations that consist of one transaction on the data database.

    In the audit trail, *audited_as* says what the transaction changes.  With *always_locks_rows*,
    or after several conflicts, an attempt runs `lock_queries` before it reads rows, and all its
    requests are one transaction.  Otherwise, asyncpg commits each request separately.  Rows are
    locked in the order session, app, user: otherwise, two writes could wait for each other.
    """

    writes = True
    audited_as: ClassVar[str]

    always_locks_rows = False
    lock_queries: Sequence[sa.Executable] = field(
        default=(sql.LOCK_SESSION, sql.LOCK_APP, sql.LOCK_USER), init=False
    )
    # The results of attempts, by a value that only they have sent, or whose row they have deleted:
    # a row id, a record or a row of `secure_migrated`.  An attempt that lost its connection may
    # have been committed.  The next attempt finds out whether the value is in the database.
    _unconfirmed_results: dict[object, Any] = field(default_factory=dict, init=False)

    async def execute(self, attempt: Attempt) -> T:
        locks = attempt.must_lock_rows or self.always_locks_rows
        steps = self._locked_steps if locks else self.steps
        transaction = partial(steps, attempt, OwnerChanges(attempt))
        run: Callable[..., Awaitable[T]] = attempt.executors.data.write
        if access := running_access(attempt.executors.data):
            session_id = "" if self.identity.is_collection else self.identity.session_id
            run = partial(access.write_with_entry, self.audited_as, session_id)
        earlier = len(self._unconfirmed_results)
        try:
            return await run(transaction, attempt.run_commit_callbacks, in_one_transaction=locks)
        except (CachedRowOutdated, Conflict, UniqueViolation):  # this attempt has changed nothing
            for value in [*self._unconfirmed_results][earlier:]:
                del self._unconfirmed_results[value]
            raise

    def _locked_steps(self, attempt: Attempt, owner_changes: OwnerChanges) -> Steps[T]:
        for query in self.lock_queries:
            yield Read(query, attempt.identity.tag_parameters())
        return (yield from self.steps(attempt, owner_changes))

    @abstractmethod
    def steps(self, attempt: Attempt, owner_changes: OwnerChanges) -> Steps[T]:
        """Return the generator of the transaction."""


@dataclass(eq=False, repr=False)
class CreateSession(Write[SessionWithStates]):
    """Store a new session, and its app and its user if they are not stored yet.

    If the user already has a session with this id, raise DuplicateSession and change nothing.
    *state* is the session's own state, as JSON.  The times are microseconds UTC.
    """

    audited_as = "create"

    app_delta: JsonObject
    user_delta: JsonObject
    state: bytes
    now: int
    expires_at: int = NEVER

    def steps(self, attempt: Attempt, owner_changes: OwnerChanges) -> Steps[SessionWithStates]:
        skips_read = attempt.may_use_cached_rows and not (self.app_delta or self.user_delta)
        if skips_read and (cached := cached_owners(attempt)):
            return (yield from self._create_from_cache(attempt, cached))
        rows = yield from read_rows(attempt)
        app, user = sealed_rows.open_owners(attempt, rows)
        # This call raises DecryptionError if only some of the session's rows are stored.
        stored = sealed_rows.open_session(attempt, rows, user)
        if stored and stored.row.id not in self._unconfirmed_results:
            raise DuplicateSession(has_expired=stored.has_expired)
        if stored and user and app:  # others may have changed it since
            new = self._unconfirmed_results[stored.row.id]
            return SessionWithStates(new, user.user_id, app.state, user.state)
        app = owner_changes.upsert_app(app, self.app_delta)
        changed = owner_changes.upsert_user(user, app.row.id, self.user_delta)
        session, other_inserts = self._new_session(attempt, changed.row.id)
        columns = as_parameters(session.row)
        insert = Change(sql.INSERT_SESSION, columns)
        if changed == user:  # the user is stored, and no change updates the row
            insert = insert_if_unchanged(sql.INSERT_SESSION_OF_USER, columns, user)
        yield from apply_or_conflict([*owner_changes.changes, insert, *other_inserts])
        return SessionWithStates(session, changed.user_id, app.state, changed.state)

    def _create_from_cache(
        self, attempt: Attempt, cached: "CachedOwners"
    ) -> Steps[SessionWithStates]:
        """Create the session without a read, from the cached rows of its app and its user."""
        session, other_inserts = self._new_session(attempt, cached.user.row.id)
        columns = as_parameters(session.row) | cached.columns
        if not (yield Apply([Change(sql.INSERT_SESSION_OF_CACHED, columns), *other_inserts])):
            raise CachedRowOutdated
        return SessionWithStates(session, cached.user.user_id, cached.app.state, cached.user.state)

    def _new_session(self, attempt: Attempt, user_row_id: int) -> tuple[StoredSession, Changes]:
        """Return a new session, and the changes to make in addition to inserting its row."""
        identity = attempt.identity
        row = SessionRow(
            new_row_id(), user_row_id, identity.session_tag, 0,
            COLLECTION if identity.is_collection else NO_SNAPSHOT, self.now, self.now,
            self.expires_at, b"",
        )  # fmt: skip
        new = NewSession.build(attempt, StoredSession(row, identity.session_id, self.state))
        self._unconfirmed_results[row.id] = new.session
        return new.session, new.inserts_with_witness()


class NewSession(NamedTuple):
    """A new session and its version witness.

    *inserts* inserts its snapshot and its rows of the search index.
    """

    session: StoredSession
    witness: WitnessRow
    inserts: Changes

    @classmethod
    def build(cls, attempt: Attempt, session: StoredSession) -> "NewSession":
        """Encrypt *session*, whose state is its overlay; a large state becomes a snapshot."""
        state, inserts = session.overlay, []
        if len(state) > OVERLAY_LIMIT:
            session = session._replace(
                row=session.row._replace(base_revision=0),
                snapshot=state,
                overlay=b"{}",
                snapshot_link=new_link(),
            )
            inserts.append(snapshot_change(attempt, session, NO_SNAPSHOT))
        if attempt.keys.keyring.indexed_key_tags:
            entries = index_rows.value_tags_of(attempt, "", load_state(state))
            inserts += index_rows.new_row_changes(session.row.id, entries)
        witness = sealed_rows.seal_witness(
            attempt, attempt.identity.user_tag, session.row.tag, session.row.id
        )
        session = sealed_rows.seal_session(attempt, session)
        attempt.cache_session(session, witness)
        return cls(session, witness, inserts)

    def inserts_with_witness(self) -> Changes:
        """Return the changes that insert all rows except those of the session and its events."""
        return [Change(sql.INSERT_WITNESS, as_parameters(self.witness)), *self.inserts]


class CachedOwners(NamedTuple):
    """The cached app and user, with *columns*, the parameters of INSERT_SESSION_OF_CACHED."""

    app: Owner
    user: Owner
    columns: dict[str, object]


def cached_owners(attempt: Attempt) -> CachedOwners | None:
    """Return the cached app and user, for whom a session can be created without a read, or None."""
    identity = attempt.identity
    app = attempt.row_cache.apps.get(identity.app_tag)
    user = attempt.row_cache.users.get(identity.user_tag)
    if not (app and user and app.witness and user.witness):
        return None
    same = (user.value.user_id, user.value.app_row_id) == (identity.user_id, app.value.row.id)
    if not same or not attempt.keys.current_is_as_new_as(identity.user_tag, user.value.row.record):
        return None
    values = app.value.row + user.value.row + app.witness + user.witness
    return CachedOwners(
        app.value, user.value, dict(zip(sql.CACHED_OWNER_PARAMETERS, values, strict=True))
    )


@dataclass(eq=False, repr=False)
class AppendEvent(Write[StoredSession]):
    """Append an event, apply its state changes, and return the updated session.

    Raise MissingSession if the session does not exist or has expired, and StaleRevision if it is
    not as *expected*.  *on_appended* is called with the updated session after the commit, also if
    the caller was cancelled while the transaction ran.
    """

    audited_as = "append"

    expected: SessionRevision
    event: NewEvent
    on_appended: Callable[[StoredSession], None] = lambda session: None

    def steps(self, attempt: Attempt, owner_changes: OwnerChanges) -> Steps[StoredSession]:
        event = self.event
        cached = self._cached_session(attempt)
        if cached and (appended := self._prepare_append(attempt, cached)):
            changes, updated = appended
            if not (yield Apply(changes)):
                raise CachedRowOutdated
            attempt.keys.count_lookup(telemetry.SESSION_CACHE, hit=True)
            return updated
        attempt.keys.count_lookup(telemetry.SESSION_CACHE, hit=False)
        rows, user, session = yield from read_with_last_event(attempt)
        is_expected = self.expected == session.id_and_revision
        # With another revision, an earlier attempt may have stored the event.
        if session.has_expired and (is_expected or not self._unconfirmed_results):
            raise MissingSession
        if not is_expected:
            return (yield from self._recognize_lost_answer(attempt))
        if event.app_delta:
            app = sealed_rows.require_app(sealed_rows.open_app(attempt, rows), user)
            owner_changes.upsert_app(app, event.app_delta)
        owner_changes.update_owner(user, session.row.record, delta=event.user_delta)
        appended = self._prepare_append(attempt, session)
        assert appended is not None, "its snapshot was read"
        changes, updated = appended
        yield from apply_or_conflict(changes + owner_changes.changes)
        return updated

    def _cached_session(self, attempt: Attempt) -> StoredSession | None:
        if not attempt.may_use_cached_rows or self.event.app_delta or self.event.user_delta:
            return None
        identity = attempt.identity
        cached = attempt.row_cache.verified_session(identity.session_tag)
        if cached is None or cached.id_and_revision != self.expected or cached.has_expired:
            return None
        is_usable = attempt.keys.current_is_as_new_as(identity.user_tag, cached.row.record)
        return cached if is_usable else None

    def _prepare_append(
        self, attempt: Attempt, session: StoredSession
    ) -> tuple[Changes, StoredSession] | None:
        """Return the changes that append the event to *session*, and the updated session; None if a
        new snapshot must be written, but the old snapshot was not read.
        """
        event, old, link = self.event, session.row, new_link()
        seq, overlay = old.revision, session.overlay
        if event.session_delta:
            overlay = dump_state(load_state(overlay) | event.session_delta)
        row = SessionRow(
            old.id, old.user_row, old.tag, seq + 1, old.base_revision, old.created_at, event.time,
            session.next_expiry(event.time), b"",
        )  # fmt: skip
        new = StoredSession(
            row, session.session_id, overlay, session.snapshot, link, session.snapshot_link
        )
        changes = []
        if event.session_delta and len(overlay) > OVERLAY_LIMIT:
            if session.snapshot is None:
                return None
            snapshot = dump_state(load_state(session.snapshot) | load_state(overlay))
            new = new._replace(
                row=row._replace(base_revision=seq + 1),
                overlay=b"{}",
                snapshot=snapshot,
                snapshot_link=new_link(),
            )
            changes.append(snapshot_change(attempt, new, old.base_revision))
            new = new._replace(snapshot=None)  # it may be large
        new = sealed_rows.seal_session(attempt, new)
        values = as_parameters(old, "at_")
        values.update(zip(sql.CHANGED_BY_APPEND, sql.values_after_append(new.row), strict=True))
        changes.insert(0, Change(sql.UPDATE_SESSION, values))
        if event.session_delta and attempt.keys.keyring.indexed_key_tags:
            value_tags = index_rows.value_tags_of(attempt, "", event.session_delta)
            changes += index_rows.update_changes(old.id, value_tags)
        (event_row,) = sealed_rows.seal_events(
            attempt, old.id, seq, [(event.plaintext, event.time)], [link], session.last_link
        )
        changes.append(Change(sql.INSERT_EVENT, as_parameters(event_row)))
        self._unconfirmed_results[event_row.record] = new
        attempt.cache_session(new)
        attempt.after_commit(partial(self.on_appended, new))
        return changes, new

    def _recognize_lost_answer(self, attempt: Attempt) -> Steps[StoredSession]:
        """Return the session if an earlier attempt, whose answer was lost, has stored the event."""
        if self._unconfirmed_results:
            where = {"session_row": self.expected.session_row_id, "v0": self.expected.revision}
            for row in (yield Read(sql.events_at(1), where)):
                session: StoredSession | None = self._unconfirmed_results.get(row[EVENT_RECORD])
                if session:
                    attempt.after_commit(partial(self.on_appended, session))
                    return session
        raise StaleRevision


@dataclass(eq=False, repr=False)
class DeleteSession(Write[bool | None]):
    """Delete a session and its events; return None if it does not exist, and False if *condition*
    is given and returns False for the stored session.
    """

    audited_as = "delete"

    condition: Callable[[StoredSession], bool] | None = None

    def steps(self, attempt: Attempt, owner_changes: OwnerChanges) -> Steps[bool | None]:
        tag = attempt.identity.session_tag
        cached = attempt.row_cache.verified_session(tag) if attempt.may_use_cached_rows else None
        if cached and self.condition is None:
            if not (yield Apply(self._prepare_deletion(attempt, cached))):
                raise CachedRowOutdated
            return True
        rows = yield from read_rows(attempt)
        session = sealed_rows.open_session(attempt, rows, sealed_rows.open_user(attempt, rows))
        if self._unconfirmed_results and (
            session is None or session.row.id not in self._unconfirmed_results
        ):
            return True  # by an earlier attempt, whose answer was lost; another session has its id
        if session is None:
            return None
        if self.condition is not None and not self.condition(session):
            return False
        yield from apply_or_conflict(self._prepare_deletion(attempt, session))
        return True

    def _prepare_deletion(self, attempt: Attempt, session: StoredSession) -> Changes:
        """Return the changes that delete *session*, beginning with its row: a concurrent append
        waits for the lock of that row, then finds no row, and adds no event.
        """
        self._unconfirmed_results[session.row.id] = True
        attempt.after_commit(partial(attempt.row_cache.forget_session, session.row.tag))
        row = Change(sql.DELETE_SESSION, as_parameters(session.row, "at_"))
        witness = Change(sql.DELETE_WITNESS, {"at_tag": session.row.tag})
        return [row, witness, *_deletions_by_id(attempt, session)]


def _deletions_by_id(attempt: Attempt, session: StoredSession) -> Changes:
    """Return the changes that delete the events, the snapshot, and rows of the search index."""
    at_row = {"at_id": session.row.id}
    changes = [Change(sql.DELETE_EVENTS, at_row, must_match_one_row=False)]
    if session.row.has_snapshot:
        changes.append(Change(sql.DELETE_SNAPSHOT, at_row))
    return changes + index_rows.removal_changes(attempt, session.row.id)


def insert_if_unchanged(statement: sa.Insert, columns: dict[str, object], user: Owner) -> Change:
    """Return the change that inserts *columns* with *statement*, which matches no row unless the
    row of *user* is as it was read.  Use it if no other change of the transaction checks that row.
    """
    return Change(statement, {**columns, **as_parameters(user.row, "user_")})


def read_rows(
    attempt: Attempt, query: QueryVariants = sql.SESSION_WITHOUT_EVENTS
) -> Steps[QueryRows]:
    """Read the rows of *query* in a transaction, and unwrap the data keys among them."""
    parameters = {**attempt.identity.tag_parameters(), "limit": 1}
    return attempt.unwrap_rows(query, (yield Read(attempt.variant_of(query), parameters)))


def read_with_last_event(attempt: Attempt) -> Steps[tuple[QueryRows, Owner, StoredSession]]:
    """Read the session and its last event, and check that they belong together.

    Without this check, an event could be appended to a session whose row an attacker has replaced
    by that of another copy of the database.  The session could then not be read any more.
    """
    rows = yield from read_rows(attempt, sql.SESSION_WITH_LAST_EVENTS)
    user = sealed_rows.open_user(attempt, rows)
    session = sealed_rows.open_session(attempt, rows, user)
    if session is None or user is None:
        raise MissingSession
    last = session.row.revision - 1
    sealed_rows.sort_and_check_events(session, rows.events, max(last, 0), last)
    before = None if last > 0 else NO_LINK
    _, link = sealed_rows.open_events(attempt, session, rows.events, before)
    sealed_rows.verify_last_link(attempt, session, link)
    return rows, user, session


def replacement_changes(
    attempt: Attempt, owner_changes: OwnerChanges, old: StoredSession, new: NewSession
) -> Changes:
    """Return the changes that replace *old*, its events and its snapshot by *new*."""
    values = as_parameters(old.row, "at_") | as_parameters(new.session.row)
    row, witness = Change(sql.REPLACE_SESSION, values), _witness_change(old.row.id, new.witness)
    deletions = _deletions_by_id(attempt, old)
    return [row, *owner_changes.changes, witness, *deletions, *new.inserts]


def event_groups(events: Iterable[EncodedEvent]) -> list[list[EncodedEvent]]:
    """Divide *events* into groups, each of which one request can insert."""
    return list(
        sql.grouped(events, lambda one: len(one.plaintext), _EVENTS_AT_ONCE, _BYTES_AT_ONCE)
    )


def try_apply_with_events(
    attempt: Attempt,
    changes: Changes,
    session_row_id: int,
    groups: Iterable[list[EncodedEvent]],
    links: Sequence[bytes],
) -> Steps[bool]:
    """Apply *changes* and insert the first of *groups*, then each further group, as all events of a
    session with these *links*; return False if the first change matched no row.
    """
    first = 0
    for group in groups or [[]]:
        previous = links[first - 1] if first else NO_LINK
        own_links = links[first : first + len(group)]
        sealed = sealed_rows.seal_events(attempt, session_row_id, first, group, own_links, previous)
        rows = [as_parameters(row) for row in sealed]
        if first:
            changes = [Change(sql.INSERT_EVENT, rows.pop(0))]
        if not (yield Apply([*changes, *insertion_changes(sql.INSERT_EVENT, rows)])):
            if first:
                raise Conflict
            return False
        first += len(group)
    return True


def snapshot_change(attempt: Attempt, session: StoredSession, replaced: int) -> Change:
    """Return the change that stores the session's snapshot in place of that of revision *replaced*,
    or inserts it if *replaced* is `NO_SNAPSHOT`.
    """
    row = sealed_rows.seal_snapshot(attempt, session)
    if replaced == NO_SNAPSHOT:
        return Change(sql.INSERT_SNAPSHOT, as_parameters(row))
    where = {"at_id": session.row.id, "at_revision": replaced}
    return Change(sql.UPDATE_SNAPSHOT, where | {"revision": row.revision, "state": row.record})
