"""The writes: create a session, append an event, delete a session.

Each is an operation whose `steps` are a generator of what the transaction asks of the database
(`db.protocol`): it reads, opens what it read, and then applies all of its changes at once.  So a
row that cannot be opened is never overwritten, a server holds no transaction open in between, and
the same steps run on every executor.
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

# An overlay of more bytes of JSON than this is merged into the snapshot, so that an append
# rewrites a small row however large the state is.
OVERLAY_LIMIT = 8 * 1024


class DuplicateSession(Exception):
    """The session id is taken."""


class MissingSession(Exception):
    """There is no such session."""


class StaleRevision(Exception):
    """Storage has moved past the revision that the caller has."""


class Expected(NamedTuple):
    """The row and the revision that the caller's session object was loaded at."""

    session_row: int
    revision: int


class NewEvent(NamedTuple):
    """An event to append: its plaintext, its time (microseconds UTC) and its changes of state."""

    plaintext: bytes
    time: int
    app_delta: JsonObject
    user_delta: JsonObject
    session_delta: JsonObject


class Created(NamedTuple):
    """A new session, with its app and its user."""

    session: StoredSession
    app: Owner
    user: Owner


class _Write(Generic[T]):
    """An operation that is one transaction on the data."""

    reads_keys = False
    writes = True

    def __init__(self, who: Identity) -> None:
        self.who = who

    async def attempt(self, attempt: Attempt, executors: Executors) -> T:
        return await executors.data.write(partial(self.steps, attempt), self.on_commit_after_cancel)

    @abstractmethod
    def steps(self, attempt: Attempt) -> Steps[T]:
        """The transaction."""

    def on_commit_after_cancel(self, result: T) -> None:
        """Called with the result if the caller was cancelled while the transaction ran."""


class CreateSession(_Write[Created]):
    """Store a new session, and its app and user if they are new.

    `attempt` raises DuplicateSession if the id is taken; then nothing was changed.
    """

    def __init__(
        self, who: Identity, app_delta: JsonObject, user_delta: JsonObject, state: bytes, now: int
    ) -> None:
        super().__init__(who)
        self._app_delta = app_delta
        self._user_delta = user_delta
        self._state = state  # JSON
        self._now = now
        # Row keys that attempts have sent.  One that lost its connection may have stored the row:
        # the next attempt then finds it, and it is no duplicate.
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
        stored = bindings.open_session(attempt, found, user)  # rejects an incompletely removed row
        if stored and user and app:
            return Created(stored, app, user)
        changes: Changes = []
        app = _change_app(changes, attempt, found, app, self._app_delta)
        user_row = None if self._user_delta else found.user
        user = _change_user(changes, attempt, found, user, app.id, self._user_delta)
        session, rest = self._new_session(attempt, user.id)
        row = Change(sql.INSERT_SESSION, _session_columns(session))
        if user_row:  # it is not among the changes: require that it is still as it was read
            columns = _session_columns(session) | _user_columns(user_row)
            row = Change(sql.INSERT_SESSION_OF_USER, columns)
        yield from _apply([*changes, row, *rest])
        return Created(session, app, user)

    def _create_for_known(self, attempt: Attempt) -> Steps[Created | None]:
        """Create it without a read; None if app and user are not known, or not as they were."""
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
        """A session, and the changes that go with its row."""
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
    """Store an event and its changes of state, at the head of the session.

    `attempt` raises MissingSession if there is no such session, and StaleRevision if it is not
    the expected row at the expected revision.

    Args:
        who: Whose session.
        known: The session as this process last saw it: while it still is, no read is needed.
        expected: The session as the caller last saw it.
        event: What to store.
        stored: Called with the session once it is stored, even if the caller was cancelled.
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
        # By the event's record, which is never repeated: what attempts have sent.  One that lost
        # its connection may have stored it; then the session is not stale.
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
        """The session as this process knows it, if the event can be stored on top of that."""
        known, event = self._known, self._event
        if known is None or not attempt.is_first or attempt.key_source is not KeySource.CACHE:
            return None
        if event.app_delta or event.user_delta:
            return None
        return known if attempt.keys.is_as_new_as(attempt.who.user_tag, known.sealed) else None

    def _advance(self, attempt: Attempt, session: StoredSession) -> "_Step | None":
        """The session's next revision; None if that needs its snapshot, which was not read."""
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
        """The session as an attempt stored it whose answer was lost.  Raises StaleRevision."""
        if self._sent:
            where = {"session_row": self._expected.session_row, "seq": self._expected.revision}
            for row in (yield Read(sql.EVENT_AT, where)):
                if session := self._sent.get(row[sql.EVENT_RECORD]):
                    return session
        raise StaleRevision


class _Step(NamedTuple):
    """The changes that take a session to its next revision, and the session then."""

    changes: Changes
    session: StoredSession


class DeleteSession(_Write[bool]):
    """Delete a session and its events.

    `attempt` returns whether there was such a session, last updated before *before*
    (microseconds UTC) if that is given.  *known* is as for `AppendEvent`.
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
    """The changes that follow the deletion of the session's row.

    The row goes first: an append that waits for it then finds none.
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
    """Merge *delta* into the app's state; None is an app that has no row yet."""
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
    """Merge *delta* into the user's state; None is a user that has no row yet.

    Afterwards there is a data key to encrypt the user's sessions with.
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
    """Make the first data key of a new owner.

    A data key that exists already proves that the owner's row was removed.  Only in a key
    database it may be waiting for that row: a process may have ended between the two writes.
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
    """Ensure a current data key at least as new as those of *stored*, and guard the changes on it.

    The changes require the records *stored* to be unchanged, and `retire` deletes a data key only
    while no record is under it or an older one: so nothing is encrypted with a retired key.  If
    another backend's key is newer than ours, ours is locked; if it cannot be, or if there is
    none, the next generation is made.
    """
    keys = attempt.keys
    if keys.is_as_new_as(owner, *stored):
        return
    _require_read_keys(attempt)
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
    """The stored row, as parameters."""
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
    """Write the snapshot of that revision; *replaced* is the one before, or NO_SNAPSHOT."""
    sealed = bindings.seal_snapshot(attempt, session_row, revision, state)
    if replaced == NO_SNAPSHOT:
        row = {"session_row": session_row, "revision": revision, "state": sealed}
        return Change(sql.INSERT_SNAPSHOT, row)
    where = {"at_id": session_row, "at_revision": replaced}
    return Change(sql.UPDATE_SNAPSHOT, where | {"revision": revision, "state": sealed})
