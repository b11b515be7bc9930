"""Rows of apps and users: their first row, key and witness, and changes of their state."""

from adk_secure_sessions.db.protocol import Change
from adk_secure_sessions.errors import (
    Reason,
    TamperedError,
    UnknownKeyError,
)
from adk_secure_sessions.formats.records import encode_text
from adk_secure_sessions.formats.states import JsonObject, dumps, loads
from adk_secure_sessions.storage import bindings as seals
from adk_secure_sessions.storage import queries as sql
from adk_secure_sessions.storage.ids import new_row_key
from adk_secure_sessions.storage.rows import Context, Found, NeedsKey, Owner
from adk_secure_sessions.storage.schema import users

Changes = list[Change]


def change_app(
    changes: Changes, context: Context, found: Found, app: Owner | None, delta: JsonObject
) -> Owner:
    """Merge *delta* into the app's state; None is an app that has no row yet."""
    if app is None:
        who = context.who
        app = Owner(new_row_key(), who.app_tag, 0, "", 0, dumps(delta))
        _add_key(changes, context, who.app_tag)
        row = {
            "id": app.id,
            "tag": app.tag,
            "app_name": encode_text(who.app_name),
            "version": 0,
            "state": seals.seal_app(context, app),
        }
        changes.append(Change(sql.INSERT_APP, row))
        add_witness(changes, context, app.tag, app.tag, 0)
    elif delta:
        stored = found.apps[0][9]
        ensure_key(changes, context, app.tag, stored)
        app = _changed(app, delta)
        sealed = seals.seal_app(context, app)
        _update_owner(changes, context, sql.UPDATE_APP, app, stored, sealed)
    return app


def change_user(
    changes: Changes,
    context: Context,
    found: Found,
    user: Owner | None,
    app_row: int,
    delta: JsonObject,
) -> Owner:
    """Merge *delta* into the user's state; None is a user that has no row yet.

    Afterwards there is a key to seal the user's sessions with.
    """
    if user is None:
        who = context.who
        user = Owner(new_row_key(), who.user_tag, app_row, who.user_id, 0, dumps(delta))
        _add_key(changes, context, who.user_tag)
        row = {
            "id": user.id,
            "app_row": app_row,
            "tag": user.tag,
            "version": 0,
            "state": seals.seal_user(context, user),
        }
        changes.append(Change(sql.INSERT_USER, row))
        add_witness(changes, context, user.tag, user.tag, 0)
        return user
    if user.app_row != app_row:
        raise TamperedError(
            "it belongs to another app's row",
            reason=Reason.WRONG_OWNER,
            table=users.name,
            row=user.id,
        )
    stored = found.users[0][9]
    ensure_key(changes, context, user.tag, stored, *(row[9] for row in found.sessions))
    if delta:
        user = _changed(user, delta)
        sealed = seals.seal_user(context, user)
        _update_owner(changes, context, sql.UPDATE_USER, user, stored, sealed)
    return user


def _changed(owner: Owner, delta: JsonObject) -> Owner:
    return owner._replace(version=owner.version + 1, state=dumps(loads(owner.state) | delta))


def _update_owner(
    changes: Changes,
    context: Context,
    statement: sql.Change,
    owner: Owner,
    stored: bytes,
    sealed: bytes,
) -> None:
    old, new = owner.version - 1, owner.version
    row = {"at_id": owner.id, "at_version": old, "at_state": stored}
    row |= {"version": new, "state": sealed}
    seal = seals.seal_witness(context, owner.tag, owner.tag, new)
    witness = {"at_tag": owner.tag, "at_number": old, "number": new, "seal": seal}
    changes += [Change(statement, row), Change(sql.UPDATE_WITNESS, witness)]


def add_witness(changes: Changes, context: Context, owner: bytes, tag: bytes, number: int) -> None:
    seal = seals.seal_witness(context, owner, tag, number)
    changes.append(Change(sql.INSERT_WITNESS, {"tag": tag, "number": number, "seal": seal}))


def _add_key(changes: Changes, context: Context, owner: bytes) -> None:
    """Make the first key of a new owner; one that is there already lost its owner's row.

    Where keys are apart, it may wait for this row: a process may have ended between the two.
    """
    _need_keys(context)
    is_there = context.keys.has_keys(owner)
    if is_there and not context.keys_apart:
        raise TamperedError(
            f"the row of the user or app with tag {owner.hex()} was removed: its data key is "
            "still stored",
            reason=Reason.MISSING,
        )
    if not is_there or context.keys.current(owner) is None:
        _new_key(changes, context, owner)


def ensure_key(changes: Changes, context: Context, owner: bytes, *stored: bytes) -> None:
    """Have a key to seal with where *stored* are, which the changes ask to be there still.

    So nothing is sealed with a key that was dropped: a key is dropped only while no row is under
    it or one before it.  A key of ours that is older than theirs, which are of another backend,
    is held; where that cannot be, or there is none, the next generation is made.
    """
    keys = context.keys
    if keys.is_as_new_as(owner, *stored):
        return
    _need_keys(context)
    if keys.is_as_new_as(owner, *stored):
        return
    current = keys.current(owner)
    if current is None or context.keys_apart:
        _new_key(changes, context, owner)
    else:
        held = {"at_id": current.id, "generation": current.generation}
        changes.append(Change(sql.HOLD_KEY, held))


def _new_key(changes: Changes, context: Context, owner: bytes) -> None:
    if context.keys_apart:
        raise NeedsKey(owner)
    row = context.keys.new(owner)
    changes.append(Change(sql.INSERT_KEY, row._asdict() | context.keys.keyring_guard()))


def _need_keys(context: Context) -> None:
    if not context.with_keys:
        raise UnknownKeyError("the owner's data keys have to be read again")
