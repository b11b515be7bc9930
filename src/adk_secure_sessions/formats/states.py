"""Split states into the scopes app, user and session, and encode states as JSON."""

import logging
from typing import NamedTuple

from pydantic_core import to_json

from adk_secure_sessions.formats import json_text
from adk_secure_sessions.formats.records import encode_text

logger: logging.Logger = logging.getLogger(__name__)

JsonObject = json_text.JsonObject

# The maximum depth of nested lists and objects.  The state itself is level 1.  In an event, the
# state delta is at level 3 (event, actions, delta), so the values in the delta reach at most level
# 193.  This is less than the limit of events, `json_text.MAX_LEVELS`.
MAX_STATE_LEVELS = 191
MAX_KEY_BYTES = 8192  # the maximum length of a key with its prefix, in UTF-8

# Copies of the prefixes in `google.adk.sessions.State`.  Importing google-adk takes seconds and
# would delay the command line.  A test checks that the copies are equal to the originals.
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
    merged = dict(session)
    for key, value in app.items():
        merged[APP_PREFIX + key] = value
    for key, value in user.items():
        merged[USER_PREFIX + key] = value
    return merged


def dumps(state: JsonObject) -> bytes:
    """Return the JSON of *state*, whose values are JSON values within the limits of `json_text`."""
    return json_text.dumps(state) if state else b"{}"


def loads(data: bytes, name: str = "the state") -> JsonObject:
    """Parse the state *data*, which must be authenticated; see `json_text.loads`."""
    return {} if data == b"{}" else json_text.loads(data, name, MAX_STATE_LEVELS)


def encode(state: JsonObject, prefix: str = "") -> bytes:
    """Check that *state*, which the application gave, is within the limits, and return its JSON.

    As in ADK, a value that cannot be converted to JSON is replaced by its text, and a warning is
    logged.  A value or a key that exceeds a limit raises ValueError, which names the path of keys
    to the value, and never the value.  *prefix* is the prefix of the scope, for messages.
    """
    if not state:
        return b"{}"
    try:
        data = to_json(state, inf_nan_mode="constants")
    except Exception:  # not chained: the exception's text may contain a value of the state
        data = b""
    if not data or not json_text.fits(data, MAX_STATE_LEVELS):
        named = {prefix + key: value for key, value in state.items()} if prefix else state
        values, is_lossy = json_text.to_values(
            named, levels=MAX_STATE_LEVELS, bytes_mode="utf8", reject="state"
        )
        if is_lossy:
            logger.warning(
                "some state values are not JSON-serializable (callables, for example): "
                "their text is stored instead"
            )
        try:
            data = dumps({key.removeprefix(prefix): value for key, value in values.items()})
        except ValueError as error:  # the JSON is too large; the message contains no value
            path = json_text.shown([json_text.largest(values)])
            raise ValueError(f"state{path}: {error}") from None
    if len(data) > MAX_KEY_BYTES:
        _check_keys(state, prefix)
    return data


def encoded_scopes(state: JsonObject | None) -> Scopes:
    """Split *state* by scope, and convert its values as `encode` does, to JSON values."""
    if not state:
        return Scopes({}, {}, {})
    scopes = split(state)
    return Scopes(
        loads(encode(scopes.app, APP_PREFIX)),
        loads(encode(scopes.user, USER_PREFIX)),
        loads(encode(scopes.session)),
    )


def _check_keys(state: JsonObject, prefix: str) -> None:
    for key in state:
        name = prefix + key
        if len(name) > MAX_KEY_BYTES // 4 and len(encode_text(name)) > MAX_KEY_BYTES:
            path = json_text.shown([name])
            raise ValueError(f"state{path}: the key has more than {MAX_KEY_BYTES} bytes in UTF-8")
