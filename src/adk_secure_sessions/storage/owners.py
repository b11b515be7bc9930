"""Rows of apps and users: their first row, key and witness, and changes of their state."""

from adk_secure_sessions.errors import TamperedError
from adk_secure_sessions.keys.data_keys import StagedKeys
from adk_secure_sessions.records import encode_text
from adk_secure_sessions.states import JsonObject, dumps, loads
from adk_secure_sessions.storage import seals
from adk_secure_sessions.storage import statements as sql
from adk_secure_sessions.storage.connection import Conflict, Connection
from adk_secure_sessions.storage.ids import new_row_key
from adk_secure_sessions.storage.rows import Context, Found, Owner


def change_app(
    connection: Connection, context: Context, app: Owner | None, delta: JsonObject
) -> Owner:
    """Merge *delta* into the app's state; None is an app that has no row yet."""
    if app is None:
        who = context.who
        app = Owner(new_row_key(), who.app_tag, 0, "", 0, dumps(delta))
        _add_key(connection, context.keys, who.app_tag)
        row = {
            "id": app.id,
            "tag": app.tag,
            "app_name": encode_text(who.app_name),
            "version": 0,
            "state": seals.seal_app(context, app),
        }
        connection.run(sql.INSERT_APP, row)
        add_witness(connection, context, app.tag, app.tag, 0)
    elif delta:
        _ensure_key(connection, context.keys, app.tag)
        app = _changed(app, delta)
        sealed = seals.seal_app(context, app)
        _update_owner(connection, context, sql.UPDATE_APP, app, sealed)
    return app


def change_user(
    connection: Connection,
    context: Context,
    user: Owner | None,
    app_row: int,
    delta: JsonObject,
) -> Owner:
    """Merge *delta* into the user's state; None is a user that has no row yet."""
    if user is None:
        who = context.who
        user = Owner(new_row_key(), who.user_tag, app_row, who.user_id, 0, dumps(delta))
        _add_key(connection, context.keys, who.user_tag)
        row = {
            "id": user.id,
            "app_row": app_row,
            "tag": user.tag,
            "version": 0,
            "state": seals.seal_user(context, user),
        }
        connection.run(sql.INSERT_USER, row)
        add_witness(connection, context, user.tag, user.tag, 0)
        return user
    if user.app_row != app_row:
        raise TamperedError(f"secure_users row {user.id}: it belongs to another app's row")
    _ensure_key(connection, context.keys, user.tag)
    if delta:
        user = _changed(user, delta)
        sealed = seals.seal_user(context, user)
        _update_owner(connection, context, sql.UPDATE_USER, user, sealed)
    return user


def _changed(owner: Owner, delta: JsonObject) -> Owner:
    return owner._replace(version=owner.version + 1, state=dumps(loads(owner.state) | delta))


def _update_owner(
    connection: Connection,
    context: Context,
    statement: sql.Change,
    owner: Owner,
    sealed: bytes,
) -> None:
    old, new = owner.version - 1, owner.version
    row = {"at_id": owner.id, "at_version": old, "version": new, "state": sealed}
    seal = seals.seal_witness(context, owner.tag, owner.tag, new)
    witness = {"at_tag": owner.tag, "at_number": old, "number": new, "seal": seal}
    if connection.run(statement, row) != 1 or connection.run(sql.UPDATE_WITNESS, witness) != 1:
        raise Conflict


def add_witness(
    connection: Connection, context: Context, owner: bytes, tag: bytes, number: int
) -> None:
    seal = seals.seal_witness(context, owner, tag, number)
    connection.run(sql.INSERT_WITNESS, {"tag": tag, "number": number, "seal": seal})


def _add_key(connection: Connection, keys: StagedKeys, owner: bytes) -> None:
    """Make the first key of a new owner; one that is there already lost its owner's row."""
    if connection.all(sql.KEYS_OF_OWNER, {"owner": owner}):
        raise TamperedError(
            f"secure_data_keys holds keys of the tag {owner.hex()}, whose own row was removed"
        )
    connection.run(sql.INSERT_KEY, keys.new(owner)._asdict())


def _ensure_key(connection: Connection, keys: StagedKeys, owner: bytes) -> None:
    """Make the next generation where the owner has no key of the writing backend."""
    if keys.current(owner) is None:
        keys.load(Found(connection.all(sql.KEYS_OF_OWNER, {"owner": owner})).keys)
    if keys.current(owner) is None:
        connection.run(sql.INSERT_KEY, keys.new(owner)._asdict())
