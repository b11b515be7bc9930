"""Split states into the scopes app, user and session, and encode states as JSON."""

import json
import logging
from typing import Any, NamedTuple

from pydantic_core import from_json, to_json, to_jsonable_python

logger: logging.Logger = logging.getLogger(__name__)

JsonObject = dict[str, Any]

# The prefixes of google.adk.sessions.State.  They are copied, because importing google-adk takes
# seconds and would delay the command line.  A test checks that they are equal.
APP_PREFIX, USER_PREFIX, TEMP_PREFIX = "app:", "user:", "temp:"


class Scopes(NamedTuple):
    """A state, split by scope.  The keys in `app` and `user` have no prefix."""

    app: JsonObject
    user: JsonObject
    session: JsonObject


def split(state: JsonObject | None) -> Scopes:
    """Split *state* by scope, and omit `temp:` keys, which ADK never stores."""
    scopes = Scopes({}, {}, {})
    for key, value in (state or {}).items():
        if ":" not in key:
            scopes.session[key] = value
        elif key.startswith(APP_PREFIX):
            scopes.app[key.removeprefix(APP_PREFIX)] = value
        elif key.startswith(USER_PREFIX):
            scopes.user[key.removeprefix(USER_PREFIX)] = value
        elif not key.startswith(TEMP_PREFIX):
            scopes.session[key] = value
    return scopes


def merge(app: JsonObject, user: JsonObject, session: JsonObject) -> JsonObject:
    """Return one state with all scopes, as callers see it: the inverse of `split`."""
    merged = dict(session)
    for key, value in app.items():
        merged[APP_PREFIX + key] = value
    for key, value in user.items():
        merged[USER_PREFIX + key] = value
    return merged


def dumps(state: JsonObject) -> bytes:
    """Return *state* as JSON.  A value without JSON form becomes text, as in `to_json_values`."""
    if not state:
        return b"{}"
    try:
        return to_json(state, inf_nan_mode="constants")
    except Exception:
        pass
    try:
        return _ascii(state)  # also encodes lone surrogates and deeper nesting than `to_json`
    except Exception:
        pass
    return _ascii(to_json_values(state))


def _ascii(state: JsonObject) -> bytes:
    return json.dumps(state, separators=(",", ":")).encode("ascii")


def loads(data: bytes) -> JsonObject:
    """Return the state that `dumps` encoded.  Each call returns new objects."""
    if data == b"{}":
        return {}
    state: JsonObject
    try:
        state = from_json(data)
    except ValueError:  # lone surrogates, which pydantic rejects
        state = json.loads(data)
    return state


def to_json_values(state: JsonObject) -> JsonObject:
    """Return a copy of *state* that contains only JSON values.

    As in ADK, a value without JSON form is replaced by its text, and a warning is logged.
    """
    if not state:
        return {}
    try:
        coerced: JsonObject = to_jsonable_python(state)
    except Exception:
        # The exception's text may repeat a value, so it is not logged.
        logger.warning(
            "some state values are not JSON-serializable (callables, for example): "
            "their text is stored instead"
        )
        coerced = to_jsonable_python(state, serialize_unknown=True)
    return coerced
