"""The transactions, as generators of what they ask of the database.

Each reads, opens what it read, and then applies all of its changes at once: a row that cannot
be opened is never overwritten, and a server need not hold a transaction open in between.
"""

from typing import NamedTuple

from adk_secure_sessions.db.protocol import Apply, Change, Conflict, Read, Row, Steps
from adk_secure_sessions.errors import (
    Reason,
    TamperedError,
)
from adk_secure_sessions.formats.states import JsonObject, dumps, loads
from adk_secure_sessions.storage import bindings as seals
from adk_secure_sessions.storage import queries as sql
from adk_secure_sessions.storage.ids import new_row_key
from adk_secure_sessions.storage.owners import Changes, add_witness, change_app, change_user
from adk_secure_sessions.storage.rows import NO_BASE, Context, Found, Owner, StoredSession
from adk_secure_sessions.storage.schema import users

# An overlay of more bytes of JSON than this is folded into the base, so that an append
# rewrites a small row however large the state is.
OVERLAY_LIMIT = 8 * 1024


class DuplicateSession(Exception):
    """The session id is taken."""


class MissingSession(Exception):
    """There is no such session."""


class StaleRevision(Exception):
    """Storage has moved past the revision that the caller holds."""


class Created(NamedTuple):
    """What creating a session gave."""

    session: StoredSession
    app: Owner
    user: Owner


class NewEvent(NamedTuple):
    """An event to append, in its three parts; *time* in microseconds UTC."""

    plaintext: bytes
    time: int
    app_delta: JsonObject
    user_delta: JsonObject
    session_delta: JsonObject


class Sent:
    """What the attempts at one operation tried to store.

    An attempt that lost its connection may have succeeded: the next finds it here.
    """

    def __init__(self) -> None:
        self.sessions: set[int] = set()  # row ids
        self.events: dict[bytes, StoredSession] = {}  # by their record, which is never repeated


class Expected(NamedTuple):
    """The row and the revision that the caller's session object was loaded at."""

    session_row: int
    revision: int


def create_session(
    context: Context,
    trusting: bool,
    app_delta: JsonObject,
    user_delta: JsonObject,
    state: bytes,
    now: int,
    sent: Sent,
) -> Steps[Created]:
    """Store a new session of *state*, JSON, and the app and the user if they are new.

    *trusting* that app and user are still as this process last saw them saves a read.

    Raises:
        DuplicateSession: the id is taken; nothing was changed.
    """
    if trusting and not (app_delta or user_delta or context.with_keys):
        created = yield from _create_for_known(context, state, now, sent)
        if created:
            return created
    found = yield from _read(context)
    app = seals.open_app(context, found)
    user = seals.open_user(context, found)
    if found.sessions and found.sessions[0][1] not in sent.sessions:
        raise DuplicateSession
    stored = seals.open_session(context, found, user)  # also refuses the rest of a removed row
    if stored and user and app:
        return Created(stored, app, user)
    changes: Changes = []
    is_new = user is None
    app = change_app(changes, context, found, app, app_delta)
    user = change_user(changes, context, found, user, app.id, user_delta)
    more, session = _new_session(context, user.id, state, now)
    sent.sessions.add(session.id)
    row = Change(sql.INSERT_SESSION, _columns(session))
    if not (is_new or user_delta):  # else the user's row is written by the changes
        row = Change(sql.INSERT_SESSION_OF_USER, _columns(session) | _user_columns(found.users[0]))
    yield from _apply([*changes, row, *more])
    return Created(session, app, user)


def _create_for_known(
    context: Context, state: bytes, now: int, sent: Sent
) -> Steps[Created | None]:
    """The same for an app and a user that are known, and unchanged since; else None."""
    who = context.who
    app, user = context.memo.owners.get(who.app_tag), context.memo.owners.get(who.user_tag)
    if not (app and user and app.witness and user.witness):
        return None
    same = (user.value.user_id, user.value.app_row) == (who.user_id, app.value.id)
    if not same or not context.keys.is_as_new_as(who.user_tag, user.row[9]):
        return None
    changes, session = _new_session(context, user.value.id, state, now)
    known = {
        "app_id": app.row[1],
        "app_version": app.row[2],
        "app_app_name": app.row[8],
        "app_tag": who.app_tag,
        "app_state": app.row[9],
        "app_witness_tag": who.app_tag,
        "app_witness_number": app.witness[1],
        "app_witness_seal": app.witness[9],
        "user_witness_tag": who.user_tag,
        "user_witness_number": user.witness[1],
        "user_witness_seal": user.witness[9],
    }
    sent.sessions.add(session.id)
    known |= _user_columns(user.row)
    row = Change(sql.INSERT_SESSION_OF_KNOWN, _columns(session) | known)
    if not (yield Apply([row, *changes])):
        return None
    return Created(session, app.value, user.value)


def _new_session(
    context: Context, user_row: int, state: bytes, now: int
) -> tuple[Changes, StoredSession]:
    """A session, and what goes with its row."""
    who = context.who
    changes: Changes = []
    session = StoredSession(
        new_row_key(), user_row, who.session_tag, who.session_id, 0, NO_BASE, now, now,
        state, b"{}", b"",
    )  # fmt: skip
    if len(state) > OVERLAY_LIMIT:
        session = session._replace(base=state, overlay=b"{}", base_revision=0)
        changes.append(_base_change(context, session.id, 0, state, NO_BASE))
    add_witness(changes, context, who.user_tag, session.tag, session.id)
    return changes, session._replace(sealed=seals.seal_session(context, session))


def _columns(session: StoredSession, prefix: str = "") -> dict[str, object]:
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


def _user_columns(row: Row) -> dict[str, object]:
    """The stored row of a user, as parameters."""
    return {
        "user_id": row[1],
        "user_app_row": row[2],
        "user_version": row[3],
        "user_tag": row[8],
        "user_state": row[9],
    }


def append_event(
    context: Context,
    known: StoredSession | None,
    expected: Expected,
    event: NewEvent,
    sent: Sent,
) -> Steps[StoredSession]:
    """Store *event* and its changes of state at the head of the session.

    *known* is the session as this process last saw it, which saves a read while it still
    is so.

    Raises:
        MissingSession: there is no such session.
        StaleRevision: it is not the expected row at the expected revision.
    """
    changes_owners = event.app_delta or event.user_delta
    if (
        known
        and not (context.with_keys or changes_owners)
        and context.keys.is_as_new_as(context.who.user_tag, known.sealed)
    ):
        step = _advance(context, known, event)
        if step:
            sent.events[step.record] = step.session
            if (yield Apply(step.changes)):
                return step.session
    found = yield from _read(context)
    user = seals.open_user(context, found)
    session = seals.open_session(context, found, user)
    if session is None or user is None:
        raise MissingSession
    if expected != (session.id, session.revision):
        return (yield from _sent_before(expected, sent))
    owners: Changes = []
    if event.app_delta:
        app = seals.open_app(context, found)
        if app is None or app.id != user.app_row:
            raise TamperedError(
                "its app's row was removed", reason=Reason.MISSING, table=users.name, row=user.id
            )
        change_app(owners, context, found, app, event.app_delta)
    change_user(owners, context, found, user, user.app_row, event.user_delta)
    step = _advance(context, session, event)
    assert step is not None, "its base was read"
    sent.events[step.record] = step.session
    yield from _apply(step.changes + owners)
    return step.session


def delete_session(
    context: Context, known: StoredSession | None, before: int | None = None
) -> Steps[bool]:
    """Delete the session and its events; whether there was one, last updated *before* then.

    *known* is the session as this process last saw it, as for `append_event`.
    """
    if known and not context.with_keys:
        row = Change(sql.DELETE_KNOWN_SESSION, _columns(known, "at_"))
        if (yield Apply([row, *_deletions(known)])):
            return True
    found = yield from _read(context)
    session = seals.open_session(context, found, seals.open_user(context, found))
    if session is None or (before is not None and session.updated_at >= before):
        return False
    row = Change(sql.DELETE_SESSION, {"at_id": session.id, "at_revision": session.revision})
    yield from _apply([row, *_deletions(session)])
    return True


def _deletions(session: StoredSession) -> Changes:
    """What goes with the session's row, which goes first: an append that waits finds none."""
    at_row = {"at_id": session.id}
    changes = [
        Change(sql.DELETE_EVENTS, at_row, any_number=True),
        Change(sql.DELETE_WITNESS, {"at_tag": session.tag}),
    ]
    if session.base_revision != NO_BASE:
        changes.append(Change(sql.DELETE_BASE, at_row))
    return changes


def _read(context: Context) -> Steps[Found]:
    query = context.form_of(sql.SESSION_WITHOUT_EVENTS)
    found = Found((yield Read(query, context.who.tags())))
    context.keys.load(found.keys)
    return found


def _apply(changes: Changes) -> Steps[None]:
    if not (yield Apply(changes)):
        raise Conflict


def _sent_before(expected: Expected, sent: Sent) -> Steps[StoredSession]:
    """What an attempt of ours stored whose answer was lost, if it did."""
    if sent.events:
        where = {"session_row": expected.session_row, "seq": expected.revision}
        for row in (yield Read(sql.EVENT_AT, where)):
            if updated := sent.events.get(row[8]):
                return updated
    raise StaleRevision


class _Step(NamedTuple):
    changes: Changes
    session: StoredSession
    record: bytes  # the event's


def _advance(context: Context, session: StoredSession, event: NewEvent) -> _Step | None:
    """The session's next revision; None if that needs its base, which was not read."""
    seq = session.revision
    updated = session._replace(revision=seq + 1, updated_at=event.time, base=None)
    if event.session_delta:
        updated = updated._replace(overlay=dumps(loads(session.overlay) | event.session_delta))
        if len(updated.overlay) > OVERLAY_LIMIT:
            if session.base is None:
                return None
            base = dumps(loads(session.base) | loads(updated.overlay))
            updated = updated._replace(overlay=b"{}", base_revision=seq + 1, base=base)
    updated = updated._replace(sealed=seals.seal_session(context, updated))
    row = _columns(session, "at_")
    row["revision"] = updated.revision
    row["base_revision"] = updated.base_revision
    row["updated_at"] = updated.updated_at
    row["state"] = updated.sealed
    changes = [Change(sql.UPDATE_SESSION, row)]
    if updated.base is not None:
        changes.append(
            _base_change(
                context, updated.id, updated.base_revision, updated.base, session.base_revision
            )
        )
    record = seals.seal_event(context, session.id, seq, event.time, event.plaintext)
    stored = {"session_row": session.id, "seq": seq, "time": event.time, "event": record}
    changes.append(Change(sql.INSERT_EVENT, stored))
    return _Step(changes, updated._replace(base=None), record)


def _base_change(
    context: Context, session_row: int, revision: int, state: bytes, old_revision: int
) -> Change:
    sealed = seals.seal_base(context, session_row, revision, state)
    if old_revision == NO_BASE:
        row = {"session_row": session_row, "revision": revision, "state": sealed}
        return Change(sql.INSERT_BASE, row)
    where = {"at_id": session_row, "at_revision": old_revision}
    return Change(sql.UPDATE_BASE, where | {"revision": revision, "state": sealed})
