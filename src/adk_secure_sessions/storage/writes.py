"""The writes: create a session, append an event, delete a session.

Each write is an operation whose generator `steps` yields requests to the database (`db.protocol`).
The generator reads rows, decrypts them, and then yields all changes in one request:

- A row that cannot be decrypted is never overwritten.
- On PostgreSQL, no transaction stays open while rows are decrypted.
- The same steps run on every executor.
"""

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import sqlalchemy as sa

from adk_secure_sessions.db.protocol import Apply, Change, Conflict, Executors, Read, Steps
from adk_secure_sessions.errors import Reason, TamperedError, UnknownKeyError
from adk_secure_sessions.formats.records import encode_text
from adk_secure_sessions.formats.states import JsonObject, dumps, loads
from adk_secure_sessions.storage import bindings
from adk_secure_sessions.storage import queries as sql
from adk_secure_sessions.storage.bindings import (
    NO_SNAPSHOT,
    Attempt,
    Identity,
    KeySource,
    NeedsDataKey,
    Owner,
    StoredSession,
)
from adk_secure_sessions.storage.queries import AppRow, Found, UserRow, WitnessRow
from adk_secure_sessions.storage.schema import new_row_key, users

T = TypeVar("T")
Changes = list[Change]

# In bytes of JSON.  A larger overlay is merged into the snapshot.  Therefore, most appends rewrite
# only a small row, even if the state is large.
OVERLAY_LIMIT = 8 * 1024


class DuplicateSession(Exception):
    """A session with this id already exists."""


class MissingSession(Exception):
    """The session does not exist."""


class StaleRevision(Exception):
    """The stored session does not have the row key and the revision that the caller expects."""


class Expected(NamedTuple):
    """The row key and the revision that the stored session had when the caller loaded it."""

    session_row: int
    revision: int


class NewEvent(NamedTuple):
    """An event to append: its plaintext, its time (microseconds UTC) and its state changes."""

    plaintext: bytes
    time: int
    app_delta: JsonObject
    user_delta: JsonObject
    session_delta: JsonObject


class Created(NamedTuple):
    """A session that was created, with its app and its user."""

    session: StoredSession
    app: Owner
    user: Owner


class _Write(Generic[T]):
    """Base class of operations that consist of one transaction on the data database."""

    reads_keys = False
    writes = True

    def __init__(self, who: Identity) -> None:
        self.who = who

    async def attempt(self, attempt: Attempt, executors: Executors) -> T:
        return await executors.data.write(partial(self.steps, attempt), self.on_commit_after_cancel)

    @abstractmethod
    def steps(self, attempt: Attempt) -> Steps[T]:
        """Return the transaction: a generator, as described in `db.protocol`."""

    def on_commit_after_cancel(self, result: T) -> None:
        """Handle a commit whose caller was cancelled while the transaction ran."""


class CreateSession(_Write[Created]):
    """Store a new session, and its app and its user if they are not stored yet.

    If the user already has a session with this id, `attempt` raises DuplicateSession and changes
    nothing.
    """

    def __init__(
        self, who: Identity, app_delta: JsonObject, user_delta: JsonObject, state: bytes, now: int
    ) -> None:
        super().__init__(who)
        self._app_delta = app_delta
        self._user_delta = user_delta
        self._state = state  # JSON
        self._now = now
        # The row keys of the sessions that this operation's attempts have sent.  An attempt that
        # lost its connection may have been committed.  If the next attempt finds a row with one of
        # these keys, that row is not a duplicate.
        self._sent: set[int] = set()

    def steps(self, attempt: Attempt) -> Steps[Created]:
        known = attempt.is_first and attempt.key_source is KeySource.CACHE
        if known and not (self._app_delta or self._user_delta):
            created = yield from self._create_for_known(attempt)
            if created:
                return created
        found = yield from _read(attempt)
        app = bindings.open_app(attempt, found)
        user = bindings.open_user(attempt, found)
        if found.session and found.session.id not in self._sent:
            raise DuplicateSession
        stored = bindings.open_session(attempt, found, user)  # raises if only some rows are stored
        if stored and user and app:
            return Created(stored, app, user)
        changes: Changes = []
        app = _change_app(changes, attempt, found, app, self._app_delta)
        user_row = None if self._user_delta else found.user
        user = _change_user(changes, attempt, found, user, app.id, self._user_delta)
        session, rest = self._new_session(attempt, user.id)
        row = Change(sql.INSERT_SESSION, _session_columns(session))
        if user_row:  # *changes* do not update the user's row, so require that it is unchanged
            columns = _session_columns(session) | _user_columns(user_row)
            row = Change(sql.INSERT_SESSION_OF_USER, columns)
        yield from _apply([*changes, row, *rest])
        return Created(session, app, user)

    def _create_for_known(self, attempt: Attempt) -> Steps[Created | None]:
        """Create the session without a read, from the cached rows of its app and its user.

        If a row is not cached, or differs from the stored row, create nothing and return None.
        """
        who = attempt.who
        app, user = attempt.cache.apps.get(who.app_tag), attempt.cache.users.get(who.user_tag)
        if not (app and user and app.witness and user.witness):
            return None
        same = (user.value.user_id, user.value.app_row) == (who.user_id, app.value.id)
        if not same or not attempt.keys.is_as_new_as(who.user_tag, user.row.state):
            return None
        session, rest = self._new_session(attempt, user.value.id)
        columns = (
            _session_columns(session)
            | _app_columns(who.app_tag, app.row)
            | _user_columns(user.row)
            | _witness_columns("app_witness", app.witness)
            | _witness_columns("user_witness", user.witness)
        )
        if not (yield Apply([Change(sql.INSERT_SESSION_OF_KNOWN, columns), *rest])):
            return None
        return Created(session, app.value, user.value)

    def _new_session(self, attempt: Attempt, user_row: int) -> tuple[StoredSession, Changes]:
        """Return a new session, and the changes to make in addition to inserting its row."""
        who = attempt.who
        rest: Changes = []
        session = StoredSession(
            new_row_key(), user_row, who.session_tag, who.session_id, 0, NO_SNAPSHOT, self._now,
            self._now, self._state, b"{}", b"",
        )  # fmt: skip
        if len(self._state) > OVERLAY_LIMIT:
            session = session._replace(snapshot=self._state, overlay=b"{}", base_revision=0)
            rest.append(_snapshot_change(attempt, session.id, 0, self._state, NO_SNAPSHOT))
        rest.append(_new_witness(attempt, who.user_tag, session.tag, session.id))
        self._sent.add(session.id)
        return session._replace(sealed=bindings.seal_session(attempt, session)), rest


class AppendEvent(_Write[StoredSession]):
    """Append an event to a session, and apply the event's state changes.

    `attempt` returns the session after the event.  It raises MissingSession if the session does not
    exist, and StaleRevision if its row key and revision are not *expected*.

    Args:
        who: The ids of the session.
        known: The session as this process last read or wrote it, or None.  If the stored row is
            still equal to *known*, no read is needed.
        expected: The row key and the revision of the caller's session object.
        event: The event to append.
        stored: Called with the session after the event, but only if the event was committed after
            the caller had been cancelled.
    """

    def __init__(
        self,
        who: Identity,
        known: StoredSession | None,
        expected: Expected,
        event: NewEvent,
        stored: Callable[[StoredSession], None],
    ) -> None:
        super().__init__(who)
        self._known = known
        self._expected = expected
        self._event = event
        self._stored = stored
        # The sessions that this operation's attempts have sent, by the record of the event, which
        # is unique.  An attempt that lost its connection may have been committed.  If the next
        # attempt finds one of these records, the event is stored and the session is not stale.
        self._sent: dict[bytes, StoredSession] = {}

    def on_commit_after_cancel(self, result: StoredSession) -> None:
        self._stored(result)

    def steps(self, attempt: Attempt) -> Steps[StoredSession]:
        event = self._event
        if known := self._usable_without_read(attempt):
            step = self._advance(attempt, known)
            if step and (yield Apply(step.changes)):
                return step.session
        found = yield from _read(attempt)
        user = bindings.open_user(attempt, found)
        session = bindings.open_session(attempt, found, user)
        if session is None or user is None:
            raise MissingSession
        if self._expected != (session.id, session.revision):
            return (yield from self._stored_before())
        owners: Changes = []
        if event.app_delta:
            app = bindings.open_app(attempt, found)
            if app is None or app.id != user.app_row:
                raise TamperedError(
                    "its app's row was removed",
                    reason=Reason.MISSING,
                    table=users.name,
                    row=user.id,
                )
            _change_app(owners, attempt, found, app, event.app_delta)
        _change_user(owners, attempt, found, user, user.app_row, event.user_delta)
        step = self._advance(attempt, session)
        assert step is not None, "its snapshot was read"
        yield from _apply(step.changes + owners)
        return step.session

    def _usable_without_read(self, attempt: Attempt) -> StoredSession | None:
        """Return the *known* session if the event can be appended without a read, or None."""
        known, event = self._known, self._event
        if known is None or not attempt.is_first or attempt.key_source is not KeySource.CACHE:
            return None
        if event.app_delta or event.user_delta:
            return None
        return known if attempt.keys.is_as_new_as(attempt.who.user_tag, known.sealed) else None

    def _advance(self, attempt: Attempt, session: StoredSession) -> "_Step | None":
        """Return the step to the next revision.

        Return None if the step needs the session's snapshot, and the snapshot was not read.
        """
        event, seq = self._event, session.revision
        new = session._replace(revision=seq + 1, updated_at=event.time, snapshot=None)
        if event.session_delta:
            new = new._replace(overlay=dumps(loads(session.overlay) | event.session_delta))
            if len(new.overlay) > OVERLAY_LIMIT:
                if session.snapshot is None:
                    return None
                snapshot = dumps(loads(session.snapshot) | loads(new.overlay))
                new = new._replace(overlay=b"{}", base_revision=seq + 1, snapshot=snapshot)
        new = new._replace(sealed=bindings.seal_session(attempt, new))
        row = _session_columns(session, "at_")
        row["revision"] = new.revision
        row["base_revision"] = new.base_revision
        row["updated_at"] = new.updated_at
        row["state"] = new.sealed
        changes = [Change(sql.UPDATE_SESSION, row)]
        if new.snapshot is not None:
            replaced = session.base_revision
            changes.append(
                _snapshot_change(attempt, new.id, new.base_revision, new.snapshot, replaced)
            )
        new = new._replace(snapshot=None)
        record = bindings.seal_event(attempt, session.id, seq, event.time, event.plaintext)
        values = {"session_row": session.id, "seq": seq, "time": event.time, "event": record}
        changes.append(Change(sql.INSERT_EVENT, values))
        self._sent[record] = new
        return _Step(changes, new)

    def _stored_before(self) -> Steps[StoredSession]:
        """Return the session if an earlier attempt has stored the event, but its answer was lost.

        Otherwise, raise StaleRevision.
        """
        if self._sent:
            where = {"session_row": self._expected.session_row, "seq": self._expected.revision}
            for row in (yield Read(sql.EVENT_AT, where)):
                if session := self._sent.get(row[sql.EVENT_RECORD]):
                    return session
        raise StaleRevision


class _Step(NamedTuple):
    """The changes that take a session to its next revision, and the session after them."""

    changes: Changes
    session: StoredSession


class DeleteSession(_Write[bool]):
    """Delete a session and its events.

    `attempt` returns True if the session was deleted, and False if the session does not exist.  If
    *before* (microseconds UTC) is given, a session whose last update was not earlier is kept, and
    `attempt` returns False.  For *known*, see `AppendEvent`.
    """

    def __init__(
        self, who: Identity, known: StoredSession | None, before: int | None = None
    ) -> None:
        super().__init__(who)
        self._known = known
        self._before = before

    def steps(self, attempt: Attempt) -> Steps[bool]:
        known = self._known if attempt.is_first else None
        if known and attempt.key_source is KeySource.CACHE:
            row = Change(sql.DELETE_KNOWN_SESSION, _session_columns(known, "at_"))
            if (yield Apply([row, *_deletions(known)])):
                return True
        found = yield from _read(attempt)
        session = bindings.open_session(attempt, found, bindings.open_user(attempt, found))
        if session is None:
            return False
        if self._before is not None and session.updated_at >= self._before:
            return False
        row = Change(sql.DELETE_SESSION, {"at_id": session.id, "at_revision": session.revision})
        yield from _apply([row, *_deletions(session)])
        return True


def _deletions(session: StoredSession) -> Changes:
    """Return the changes to make after deleting the session's row.

    The session's row must be deleted before its events: a concurrent append that waits for the
    row's lock then finds no row, and adds no event.
    """
    at_row = {"at_id": session.id}
    changes = [
        Change(sql.DELETE_EVENTS, at_row, must_match_row=False),
        Change(sql.DELETE_WITNESS, {"at_tag": session.tag}),
    ]
    if session.base_revision != NO_SNAPSHOT:
        changes.append(Change(sql.DELETE_SNAPSHOT, at_row))
    return changes


def _read(attempt: Attempt) -> Steps[Found]:
    query = attempt.form_of(sql.SESSION_WITHOUT_EVENTS)
    found = Found((yield Read(query, attempt.who.tags())))
    attempt.keys.load(found.data_keys)
    return found


def _apply(changes: Changes) -> Steps[None]:
    if not (yield Apply(changes)):
        raise Conflict


def _change_app(
    changes: Changes, attempt: Attempt, found: Found, app: Owner | None, delta: JsonObject
) -> Owner:
    """Add the changes that merge *delta* into the app's state, and return the app after them.

    If *app* is None, add the changes that insert it.
    """
    if app is None:
        who = attempt.who
        app = Owner(new_row_key(), who.app_tag, 0, "", 0, dumps(delta))
        _ensure_first_key(changes, attempt, who.app_tag)
        row = {
            "id": app.id,
            "tag": app.tag,
            "app_name": encode_text(who.app_name),
            "version": 0,
            "state": bindings.seal_app(attempt, app),
        }
        changes.append(Change(sql.INSERT_APP, row))
        changes.append(_new_witness(attempt, app.tag, app.tag, 0))
    elif delta:
        assert found.app is not None
        stored = found.app.state
        _ensure_key(changes, attempt, app.tag, stored)
        app = _next_version(app, delta)
        sealed = bindings.seal_app(attempt, app)
        _update_owner(changes, attempt, sql.UPDATE_APP, app, stored, sealed)
    return app


def _change_user(
    changes: Changes,
    attempt: Attempt,
    found: Found,
    user: Owner | None,
    app_row: int,
    delta: JsonObject,
) -> Owner:
    """Add the changes that merge *delta* into the user's state, and return the user after them.

    If *user* is None, add the changes that insert it.  Also ensure that the user has a current data
    key, which encrypts the user's sessions.
    """
    if user is None:
        who = attempt.who
        user = Owner(new_row_key(), who.user_tag, app_row, who.user_id, 0, dumps(delta))
        _ensure_first_key(changes, attempt, who.user_tag)
        row = {
            "id": user.id,
            "app_row": app_row,
            "tag": user.tag,
            "version": 0,
            "state": bindings.seal_user(attempt, user),
        }
        changes.append(Change(sql.INSERT_USER, row))
        changes.append(_new_witness(attempt, user.tag, user.tag, 0))
        return user
    if user.app_row != app_row:
        raise TamperedError(
            "it belongs to another app's row",
            reason=Reason.WRONG_OWNER,
            table=users.name,
            row=user.id,
        )
    assert found.user is not None
    stored = found.user.state
    _ensure_key(changes, attempt, user.tag, stored, *(row.state for row in found.sessions))
    if delta:
        user = _next_version(user, delta)
        sealed = bindings.seal_user(attempt, user)
        _update_owner(changes, attempt, sql.UPDATE_USER, user, stored, sealed)
    return user


def _next_version(owner: Owner, delta: JsonObject) -> Owner:
    return owner._replace(version=owner.version + 1, state=dumps(loads(owner.state) | delta))


def _update_owner(
    changes: Changes,
    attempt: Attempt,
    statement: sa.Update,
    owner: Owner,
    stored: bytes,
    sealed: bytes,
) -> None:
    old, new = owner.version - 1, owner.version
    row = {"at_id": owner.id, "at_version": old, "at_state": stored}
    row |= {"version": new, "state": sealed}
    seal = bindings.seal_witness(attempt, owner.tag, owner.tag, new)
    witness = {"at_tag": owner.tag, "at_number": old, "number": new, "seal": seal}
    changes += [Change(statement, row), Change(sql.UPDATE_WITNESS, witness)]


def _new_witness(attempt: Attempt, owner: bytes, tag: bytes, number: int) -> Change:
    seal = bindings.seal_witness(attempt, owner, tag, number)
    return Change(sql.INSERT_WITNESS, {"tag": tag, "number": number, "seal": seal})


def _ensure_first_key(changes: Changes, attempt: Attempt, owner: bytes) -> None:
    """Ensure a current data key for an owner who has no row yet.

    If the owner already has a data key, somebody has removed the owner's row, so raise
    TamperedError.  With a key database, that is not an error: the key is written first, and a
    process may have stopped before it wrote the row.
    """
    _require_read_keys(attempt)
    exists = attempt.keys.has_keys(owner)
    if exists and attempt.key_source is not KeySource.KEY_DATABASE:
        raise TamperedError(
            f"the row of the user or app with tag {owner.hex()} was removed: its data key is "
            "still stored",
            reason=Reason.MISSING,
        )
    if not exists or attempt.keys.current(owner) is None:
        _new_key(changes, attempt, owner)


def _ensure_key(changes: Changes, attempt: Attempt, owner: bytes, *stored: bytes) -> None:
    """Ensure a current data key that `retire` cannot delete before the changes are made.

    *stored* are records of the owner, which the changes require to be unchanged.  The cases are:

    - The current key is as new as the keys of *stored*.  It is safe, because `retire` deletes a key
      only if no record is encrypted with that key or an older one.
    - The current key is older, because another backend's key is newer.  The changes lock the row of
      the current key.  With a key database they cannot lock it, so a new data key is created.
    - There is no current key.  A new data key is created.
    """
    keys = attempt.keys
    if keys.is_as_new_as(owner, *stored):
        return
    _require_read_keys(attempt)
    for record in stored:
        # Raise if the record's key does not exist: no new key could ever be as new as that key.
        keys.cipher(owner, record)
    current = keys.current(owner)
    if current is None or attempt.key_source is KeySource.KEY_DATABASE:
        _new_key(changes, attempt, owner)
    else:
        locked = {"at_id": current.id, "generation": current.generation}
        changes.append(Change(sql.HOLD_KEY, locked))


def _new_key(changes: Changes, attempt: Attempt, owner: bytes) -> None:
    if attempt.key_source is KeySource.KEY_DATABASE:
        raise NeedsDataKey(owner)
    row = attempt.keys.new(owner)
    changes.append(Change(sql.INSERT_KEY, row._asdict() | attempt.keys.keyring_guard()))


def _require_read_keys(attempt: Attempt) -> None:
    if attempt.key_source is KeySource.CACHE:
        raise UnknownKeyError("the owner's data keys have to be read again")


def _session_columns(session: StoredSession, prefix: str = "") -> dict[str, object]:
    """Return the session's row as statement parameters, whose names begin with *prefix*."""
    return {
        f"{prefix}id": session.id,
        f"{prefix}user_row": session.user_row,
        f"{prefix}tag": session.tag,
        f"{prefix}revision": session.revision,
        f"{prefix}base_revision": session.base_revision,
        f"{prefix}created_at": session.created_at,
        f"{prefix}updated_at": session.updated_at,
        f"{prefix}state": session.sealed,
    }


def _app_columns(tag: bytes, row: AppRow) -> dict[str, object]:
    return {
        "app_id": row.id,
        "app_version": row.version,
        "app_app_name": row.name,
        "app_tag": tag,
        "app_state": row.state,
    }


def _user_columns(row: UserRow) -> dict[str, object]:
    return {
        "user_id": row.id,
        "user_app_row": row.app_row,
        "user_version": row.version,
        "user_tag": row.tag,
        "user_state": row.state,
    }


def _witness_columns(prefix: str, row: WitnessRow) -> dict[str, object]:
    return {
        f"{prefix}_tag": row.tag,
        f"{prefix}_number": row.number,
        f"{prefix}_seal": row.seal,
    }


def _snapshot_change(
    attempt: Attempt, session_row: int, revision: int, state: bytes, replaced: int
) -> Change:
    """Return the change that stores a snapshot of *revision*.

    *replaced* is the revision of the snapshot that it replaces, or NO_SNAPSHOT.
    """
    sealed = bindings.seal_snapshot(attempt, session_row, revision, state)
    if replaced == NO_SNAPSHOT:
        row = {"session_row": session_row, "revision": revision, "state": sealed}
        return Change(sql.INSERT_SNAPSHOT, row)
    where = {"at_id": session_row, "at_revision": replaced}
    return Change(sql.UPDATE_SNAPSHOT, where | {"revision": revision, "state": sealed})
