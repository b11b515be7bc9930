"""The JSON that storage holds of a state."""

import json
import logging
from typing import Any

from pydantic_core import from_json, to_json, to_jsonable_python

logger = logging.getLogger(__name__)

JsonObject = dict[str, Any]


def dumps(state: JsonObject) -> bytes:
    """*state* as JSON; what JSON cannot hold is replaced by its text, as `to_json_values` does."""
    if not state:
        return b"{}"
    try:
        return to_json(state, inf_nan_mode="constants")
    except Exception:
        pass
    try:
        return _ascii(state)  # which also does lone surrogates, and any depth
    except Exception:
        pass
    return _ascii(to_json_values(state))


def _ascii(state: JsonObject) -> bytes:
    return json.dumps(state, separators=(",", ":")).encode("ascii")


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


def to_json_values(scope: JsonObject) -> JsonObject:
    """A copy of *scope* that JSON can hold: the rest becomes text, with a warning, as ADK does."""
    if not scope:
        return {}
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
