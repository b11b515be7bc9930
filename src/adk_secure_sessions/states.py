"""State as ADK sees it: scopes by key prefix, and the JSON that storage holds."""

import json
import logging
from typing import Any, NamedTuple

from google.adk.sessions import State
from pydantic_core import from_json, to_jsonable_python

logger = logging.getLogger(__name__)

JsonObject = dict[str, Any]


class Scopes(NamedTuple):
    """State split by where it belongs; keys of app and user are without their prefix."""

    app: JsonObject
    user: JsonObject
    session: JsonObject


def split(state: JsonObject | None) -> Scopes:
    """Split *state* by scope as JSON values of its own; `temp:` keys are left out.

    What JSON cannot hold is replaced by its text, with a warning, as ADK does.
    """
    scopes = Scopes({}, {}, {})
    for key, value in (state or {}).items():
        if key.startswith(State.APP_PREFIX):
            scopes.app[key.removeprefix(State.APP_PREFIX)] = value
        elif key.startswith(State.USER_PREFIX):
            scopes.user[key.removeprefix(State.USER_PREFIX)] = value
        elif not key.startswith(State.TEMP_PREFIX):
            scopes.session[key] = value
    return Scopes(*(_to_json(scope) if scope else scope for scope in scopes))


def merge(app: JsonObject, user: JsonObject, session: JsonObject) -> JsonObject:
    """The state of a session as callers see it."""
    merged = dict(session)
    for key, value in app.items():
        merged[State.APP_PREFIX + key] = value
    for key, value in user.items():
        merged[State.USER_PREFIX + key] = value
    return merged


def dumps(state: JsonObject) -> bytes:
    """JSON in ASCII: escapes carry NUL and lone surrogates through any database."""
    return json.dumps(state, separators=(",", ":")).encode("ascii") if state else b"{}"


def loads(data: bytes) -> JsonObject:
    """The inverse of `dumps`; every call returns values of its own."""
    if data == b"{}":
        return {}
    state: JsonObject
    try:
        state = from_json(data)
    except ValueError:  # lone surrogates
        state = json.loads(data)
    return state


def _to_json(scope: JsonObject) -> JsonObject:
    try:
        coerced: JsonObject = to_jsonable_python(scope)
    except Exception:
        # Without the exception's text, which may repeat a value.
        logger.warning(
            "some state values are not JSON-serializable (callables, for example): "
            "their text is stored in their place"
        )
        coerced = to_jsonable_python(scope, serialize_unknown=True)
    return coerced
