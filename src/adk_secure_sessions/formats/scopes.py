"""State as ADK sees it: scopes by key prefix."""

from typing import NamedTuple

from google.adk.sessions import State

from adk_secure_sessions.formats.states import JsonObject


class Scopes(NamedTuple):
    """State split by where it belongs; keys of app and user are without their prefix."""

    app: JsonObject
    user: JsonObject
    session: JsonObject


def split(state: JsonObject | None) -> Scopes:
    """Split *state* by scope; `temp:` keys are left out."""
    scopes = Scopes({}, {}, {})
    for key, value in (state or {}).items():
        if ":" not in key:
            scopes.session[key] = value
        elif key.startswith(State.APP_PREFIX):
            scopes.app[key.removeprefix(State.APP_PREFIX)] = value
        elif key.startswith(State.USER_PREFIX):
            scopes.user[key.removeprefix(State.USER_PREFIX)] = value
        elif not key.startswith(State.TEMP_PREFIX):
            scopes.session[key] = value
    return scopes


def merge(app: JsonObject, user: JsonObject, session: JsonObject) -> JsonObject:
    """The state of a session as callers see it."""
    merged = dict(session)
    for key, value in app.items():
        merged[State.APP_PREFIX + key] = value
    for key, value in user.items():
        merged[State.USER_PREFIX + key] = value
    return merged
