"""The transactions, as plain functions over a connection.

Each opens what it reads before it writes: a row that cannot be opened is never overwritten.
"""

from typing import NamedTuple

from adk_secure_sessions.errors import TamperedError
from adk_secure_sessions.states import JsonObject, dumps, loads
from adk_secure_sessions.storage import seals
from adk_secure_sessions.storage import statements as sql
from adk_secure_sessions.storage.connection import Conflict, Connection
from adk_secure_sessions.storage.ids import new_row_key
from adk_secure_sessions.storage.owners import add_witness, change_app, change_user
from adk_secure_sessions.storage.rows import NO_BASE, Context, Found, Owner, StoredSession

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


class Expected(NamedTuple):
    """The row and the revision that the caller's session object was loaded at."""

    session_row: int
    revision: int


def create_session(
    connection: Connection,
    context: Context,
    app_delta: JsonObject,
    user_delta: JsonObject,
    state: JsonObject,
    now: int,
) -> Created:
    """Store a new session, and the app and the user if they are new.

    Raises:
        DuplicateSession: the id is taken; nothing was changed.
    """
    who = context.who
    found = _read(connection, context)
    app = seals.open_app(context, found)
    user = seals.open_user(context, found)
    if found.sessions:
        raise DuplicateSession
    seals.open_session(context, found, user)  # refuses what is left of a removed row
    app = change_app(connection, context, app, app_delta)
    user = change_user(connection, context, user, app.id, user_delta)
    overlay = dumps(state)
    session = StoredSession(
        new_row_key(), user.id, who.session_tag, who.session_id, 0, NO_BASE, now, now,
        overlay, b"{}", b"",
    )  # fmt: skip
    if len(overlay) > OVERLAY_LIMIT:
        session = session._replace(base=overlay, overlay=b"{}", base_revision=0)
        _write_base(connection, context, session.id, 0, overlay, NO_BASE)
    session = session._replace(sealed=seals.seal_session(context, session))
    connection.run(
        sql.INSERT_SESSION,
        {
            "id": session.id,
            "user_row": session.user_row,
            "tag": session.tag,
            "revision": 0,
            "base_revision": session.base_revision,
            "created_at": now,
            "updated_at": now,
            "state": session.sealed,
        },
    )
    add_witness(connection, context, who.user_tag, session.tag, session.id)
    return Created(session, app, user)


def append_event(
    connection: Connection,
    context: Context,
    known: StoredSession | None,
    expected: Expected,
    event: NewEvent,
) -> StoredSession:
    """Store *event* and its changes of state at the head of the session.

    *known* is the session as this process last saw it, which saves a read while it still
    is so.

    Raises:
        MissingSession: there is no such session.
        StaleRevision: it is not the expected row at the expected revision.
    """
    # Without a key of the writing backend, one is to be made first.
    has_key = context.keys.current(context.who.user_tag) is not None
    if known and has_key and not (context.with_keys or event.app_delta or event.user_delta):
        updated = _advance(connection, context, known, event)
        if updated:
            return updated
    found = _read(connection, context)
    user = seals.open_user(context, found)
    session = seals.open_session(context, found, user)
    if session is None or user is None:
        raise MissingSession
    if expected != (session.id, session.revision):
        raise StaleRevision
    user = change_user(connection, context, user, user.app_row, event.user_delta)
    if event.app_delta:
        app = seals.open_app(context, found)
        if app is None or app.id != user.app_row:
            raise TamperedError(f"secure_users row {user.id}: its app's row was removed")
        change_app(connection, context, app, event.app_delta)
    updated = _advance(connection, context, session, event)
    if updated is None:
        raise Conflict
    return updated


def delete_session(connection: Connection, context: Context) -> None:
    """Delete the session and its events; none is no error."""
    found = _read(connection, context)
    session = seals.open_session(context, found, seals.open_user(context, found))
    if session is None:
        return
    at_row = {"at_id": session.id}
    connection.run(sql.DELETE_SESSION, at_row)  # first: an append that waits then finds none
    connection.run(sql.DELETE_EVENTS, at_row)
    if session.base_revision != NO_BASE:
        connection.run(sql.DELETE_BASE, at_row)
    connection.run(sql.DELETE_WITNESS, {"at_tag": session.tag})


def _read(connection: Connection, context: Context) -> Found:
    query = sql.SESSION_WITHOUT_EVENTS[context.with_keys]
    found = Found(connection.all(query, context.who.tags()))
    context.keys.load(found.keys)
    return found


def _advance(
    connection: Connection,
    context: Context,
    session: StoredSession,
    event: NewEvent,
) -> StoredSession | None:
    """Write the session's next revision and the event; None if the stored row is another."""
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
    met = connection.run(
        sql.UPDATE_SESSION,
        {
            "at_id": session.id,
            "at_user_row": session.user_row,
            "at_tag": session.tag,
            "at_revision": seq,
            "at_base_revision": session.base_revision,
            "at_created_at": session.created_at,
            "at_updated_at": session.updated_at,
            "at_state": session.sealed,
            "revision": updated.revision,
            "base_revision": updated.base_revision,
            "updated_at": updated.updated_at,
            "state": updated.sealed,
        },
    )
    if met != 1:
        return None
    if updated.base is not None:
        _write_base(
            connection,
            context,
            updated.id,
            updated.base_revision,
            updated.base,
            session.base_revision,
        )
    connection.run(
        sql.INSERT_EVENT,
        {
            "session_row": session.id,
            "seq": seq,
            "time": event.time,
            "event": seals.seal_event(context, session.id, seq, event.time, event.plaintext),
        },
    )
    return updated._replace(base=None)


def _write_base(
    connection: Connection,
    context: Context,
    session_row: int,
    revision: int,
    state: bytes,
    old_revision: int,
) -> None:
    sealed = seals.seal_base(context, session_row, revision, state)
    if old_revision == NO_BASE:
        row = {"session_row": session_row, "revision": revision, "state": sealed}
        connection.run(sql.INSERT_BASE, row)
        return
    where = {"at_id": session_row, "at_revision": old_revision}
    if connection.run(sql.UPDATE_BASE, where | {"revision": revision, "state": sealed}) != 1:
        raise Conflict
