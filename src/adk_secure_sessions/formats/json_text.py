"""The JSON of states and events: its limits, the checks before writing, and parsing.

docs/limits.md, "Sizes", lists the limits.  Every process can parse JSON that is within the limits:
pydantic's parser accepts 200 nested lists and objects, and 4300 digits in an integer, in every
process.  It does not count an innermost list or object that is empty: see `loads`.  The limits of
Python's module `json` depend on the stack and on a setting of the process.
"""

import json
import logging
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

from pydantic_core import SchemaValidator, core_schema, from_json, to_json, to_jsonable_python

from adk_secure_sessions.errors import DecryptionError, Reason
from adk_secure_sessions.formats.records import encode_text

logger: logging.Logger = logging.getLogger(__name__)

JsonObject = dict[str, Any]

MAX_LEVELS = 200  # nested lists and objects, also empty ones
_ABOVE_FLOATS = 2**1024 - 2**970  # the smallest integer that `float` rounds above all floats
MAX_DIGITS = 4300  # in one integer
MAX_BYTES = 256 * 2**20  # JSON in one record
# The maximum depth of nested lists and objects.  The state itself is level 1.  In an event, the
# state delta is at level 3 (event, actions, delta), so the values in the delta reach at most level
# 193.  This is less than the limit of events, `MAX_LEVELS`.
MAX_STATE_LEVELS = 191
MAX_KEY_BYTES = 8192  # the maximum length of a key with its prefix, in UTF-8

# Copies of the prefixes in `google.adk.sessions.State`.  Importing google-adk takes seconds and
# would delay the command line.  A test checks that the copies are equal to the originals.
APP_PREFIX, USER_PREFIX, TEMP_PREFIX = "app:", "user:", "temp:"

_FIRST_TOO_LARGE = 10**MAX_DIGITS  # the smallest integer with more than MAX_DIGITS digits
# Converting an integer with more bits to decimal text takes seconds.
_MAX_DECIMAL_BITS = 2**20
# Parses any JSON object without creating Python values.
_PARSER = SchemaValidator(core_schema.model_fields_schema({}, extra_behavior="ignore"))
# The escape of a surrogate in JSON, such as \ud800.
_SURROGATE = rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}"
# A list or an object without elements.  It may also match inside a string.
_EMPTY = rb"\[[ \t\n\r]*\]|\{[ \t\n\r]*\}"
# The versions of google-adk that error messages quote.  Another text may contain anything.
_VERSION = re.compile(r"\d{1,4}(?:\.\d{1,6}){1,3}[a-z0-9.+]{0,20}")


# --- write ---------------------------------------------------------------------------------------


def is_within_limits(data: bytes, levels: int = MAX_LEVELS) -> bool:
    """Return whether the JSON object *data*, which begins with its brace, is within the limits.

    Data that is short and has few brackets cannot exceed a limit, so it is not parsed.
    """
    if len(data) <= MAX_DIGITS and not _may_exceed(data, levels):
        return True
    return len(data) <= MAX_BYTES and data.startswith(b"{") and _has_at_most_levels(data, levels)


def is_within_levels(data: bytes, levels: int = MAX_LEVELS) -> bool:
    """Return whether valid JSON has at most *levels* nested lists and objects.

    For invalid JSON, the result is undefined.
    """
    return not _may_exceed(data, levels) or _has_at_most_levels(data, levels)


def _may_exceed(data: bytes, levels: int) -> bool:
    """Return whether *data* has more than *levels* brackets that open a list or an object."""
    # `replace` searches with memchr, and stops after *most* brackets: 900 bytes with two brackets
    # take a third of the instructions of `translate`, and 1 MB a twentieth of its time.
    most = levels + 1
    without = data.replace(b"{", b"", most).replace(b"[", b"", most)
    return len(data) - len(without) > levels


def _has_at_most_levels(data: bytes, levels: int) -> bool:
    # If the deepest list or object may be empty, give it an element: the parser then counts it.
    return _parses(data, levels - 1) or (
        _parses(data, levels) and _parses(re.sub(_EMPTY, b"[0]", data), levels)
    )


def _parses(data: bytes, levels: int) -> bool:
    outer = MAX_LEVELS - levels
    # The parser's limit is always MAX_LEVELS.  To get a lower limit, enclose *data* in extra
    # objects, which use up the difference.
    if outer:
        data = b'{"":' * outer + data + b"}" * outer
    try:
        _PARSER.validate_json(data)
    except ValueError:
        return False
    return True


def dumps(values: JsonObject) -> bytes:
    """Return the JSON of *values*, JSON values within the limits; ValueError if it is too large."""
    data = _dumps(values)
    if len(data) > MAX_BYTES:
        raise ValueError(f"{len(data)} bytes of JSON are too large: the limit is {MAX_BYTES}")
    return data


def largest_key(values: JsonObject) -> str:
    return max(values, key=lambda key: len(_dumps(values[key])))


def _dumps(value: Any) -> bytes:
    try:
        return to_json(value, inf_nan_mode="constants")
    except ValueError:  # lone surrogates
        return bytes(_with_stack(partial(json.dumps, separators=(",", ":")), value), "ascii")


class _Container(NamedTuple):
    """A list or dict that `to_values` converts, and *outer*, the container that contains it."""

    outer: "_Container | None"
    key: object
    value: object
    level: int

    def contains(self, value: object) -> bool:
        at: _Container | None = self
        while at:
            if at.value is value:
                return True
            at = at.outer
        return False

    def path(self) -> str:
        keys = []
        at = self
        while at.outer:
            keys.append(at.key)
            at = at.outer
        return subscripts(keys[::-1])


def subscripts(keys: list[object]) -> str:
    """Return *keys* as subscripts, such as `['a'][0]`: the first 60 characters of 10 keys."""
    texts = [
        repr(key if len(key) <= 60 else key[:60] + "…") if isinstance(key, str) else str(key)
        for key in keys[:10]
    ]
    return "".join(f"[{text}]" for text in texts) + ("[…]" if len(keys) > 10 else "")


def to_values(
    root: JsonObject, *, levels: int, bytes_mode: str, reject: str = ""
) -> tuple[JsonObject, bool]:
    """Return *root* as JSON values within the limits, and whether a value was replaced by its text.

    *root* may have any keys and values, nested to any depth, so the function is not recursive.  A
    value that cannot be converted to JSON, or exceeds a limit such as *levels*, is replaced by its
    text.  If *reject*, the name of *root*, is given, a value that exceeds a limit raises ValueError
    instead, which names the path of keys to the value, and never the value.  *bytes_mode* is that
    of `pydantic_core.to_jsonable_python`.
    """
    result: list[Any] = [None]
    replaced = False
    todo: list[tuple[Any, Any, Any, _Container | None]] = [(root, result, 0, None)]
    for value, into, key, outer in todo:
        kind = type(value)
        if value is None or kind in (str, bool, float):
            into[key] = value
            continue
        if kind is int:
            if abs(value) < _FIRST_TOO_LARGE:
                into[key] = value
                continue
            problem = f"an integer has more than {MAX_DIGITS} digits"
        elif kind in (dict, list, tuple, set, frozenset):
            level = outer.level + 1 if outer else 1
            if level <= levels and not (outer and outer.contains(value)):
                here = _Container(outer, key, value, level)
                if kind is dict:
                    # Of keys with the same JSON text, the last value is kept.
                    named = {_key(inner): item for inner, item in value.items()}
                    into[key] = made = dict.fromkeys(named)
                    todo += [(item, made, name, here) for name, item in named.items()]
                else:
                    items = list(value)
                    into[key] = [None] * len(items)
                    todo += [(item, into[key], at, here) for at, item in enumerate(items)]
                continue
            problem = "the value is circular, or its depth exceeds the limit"
        else:
            form, is_text = json_form(value, bytes_mode)
            replaced |= is_text
            todo.append((form, into, key, outer))
            continue
        if reject:
            path = outer.path() + subscripts([key]) if outer else ""
            raise ValueError(f"{reject}{path}: {problem}")
        into[key] = _text(value)
        replaced = True
    return result[0], replaced


def exact_values(root: JsonObject, levels: int, name: str) -> JsonObject:
    """Return *root* as JSON values; if one has no JSON form within the limits, raise ValueError.

    The error calls *root* by *name*.
    """
    values, is_lossy = to_values(root, levels=levels, bytes_mode="base64", reject=name)
    if is_lossy:
        raise ValueError(f"{name} holds a value without JSON form: convert it first")
    return values


def json_form(value: object, bytes_mode: Any) -> tuple[Any, bool]:
    """Return *value* as JSON values, and whether a value without JSON form became its text."""
    try:
        return to_jsonable_python(value, bytes_mode=bytes_mode), False
    except Exception:
        pass
    try:
        return to_jsonable_python(value, bytes_mode=bytes_mode, serialize_unknown=True), True
    except Exception:
        return _text(value), True


def _key(key: object) -> str:
    if type(key) is str:
        return key
    try:
        (name,) = to_jsonable_python({key: None})
    except Exception:
        return _text(key)
    return str(name)


def _text(value: object) -> str:
    if type(value) is int:
        # str() rejects integers with more digits than a setting of the process allows.
        is_decimal = value.bit_length() <= _MAX_DECIMAL_BITS
        return to_json(value).decode("ascii") if is_decimal else hex(value)
    try:
        return str.__str__(str(value))
    except Exception:  # for example, because the value is nested too deep
        return f"<{type(value).__name__}>"


def same_json(value: Any, other: Any, *, numbers_may_differ: bool = False) -> bool:
    """Return whether two JSON values are the same: `1`, `1.0` and `True` differ, NaN equals NaN.

    If *numbers_may_differ* is True, an integer equals the float that is nearest to it.
    """
    todo = [(value, other)]
    while todo:
        one, two = todo.pop()
        kinds = {type(one), type(two)}
        if numbers_may_differ and kinds == {int, float} and abs(one) < _ABOVE_FLOATS > abs(two):
            one, two, kinds = float(one), float(two), {float}
        if len(kinds) > 1:
            return False
        if type(one) is dict:
            if one.keys() != two.keys():
                return False
            todo += [(item, two[key]) for key, item in one.items()]
        elif type(one) is list:
            if len(one) != len(two):
                return False
            todo += zip(one, two, strict=True)
        elif one != two and not (one != one and two != two):
            return False
    return True


def canonical_json(value: Any) -> bytes:
    """Return *value* as JSON with sorted keys, in ASCII: the same values have the same JSON."""
    dumps = partial(json.dumps, sort_keys=True, separators=(",", ":"))
    return bytes(_with_stack(dumps, value), "ascii")


# --- states ---------------------------------------------------------------------------------------


class Scopes(NamedTuple):
    """A state, split by scope.  The keys in `app` and `user` have no prefix."""

    app: JsonObject
    user: JsonObject
    session: JsonObject


def split_scopes(state: JsonObject | None) -> Scopes:
    """Split *state* by scope, and omit `temp:` keys, which ADK never stores."""
    if not state or ":" not in "".join(state):  # as most states: one search instead of one per key
        return Scopes({}, {}, dict(state or {}))
    app: JsonObject = {}
    user: JsonObject = {}
    session: JsonObject = {}
    for key, value in state.items():
        if ":" not in key:
            session[key] = value
        elif key.startswith(APP_PREFIX):
            app[key.removeprefix(APP_PREFIX)] = value
        elif key.startswith(USER_PREFIX):
            user[key.removeprefix(USER_PREFIX)] = value
        elif not key.startswith(TEMP_PREFIX):
            session[key] = value
    return Scopes(app, user, session)


def merge_scopes(app: JsonObject, user: JsonObject, session: JsonObject) -> JsonObject:
    merged = dict(session)
    for key, value in app.items():
        merged[APP_PREFIX + key] = value
    for key, value in user.items():
        merged[USER_PREFIX + key] = value
    return merged


def dump_state(state: JsonObject) -> bytes:
    """Return the JSON of *state*, whose values are JSON values within the limits."""
    return dumps(state) if state else b"{}"


def load_state(data: bytes, name: str = "the state") -> JsonObject:
    """Parse the state *data*, which must be authenticated; see `loads`."""
    return {} if data == b"{}" else loads(data, name, MAX_STATE_LEVELS)


def encode_state(state: JsonObject, prefix: str = "") -> bytes:
    """Check that *state*, which the application gave, is within the limits, and return its JSON.

    As in ADK, a value that cannot be converted to JSON is replaced by its text, and a warning is
    logged.  A value or a key that exceeds a limit raises ValueError, which names the path of keys
    to the value, and never the value.  *prefix* is the prefix of the scope, for messages.
    """
    if not state:
        return b"{}"
    try:
        # In the JSON of a model, `to_json` writes null for infinity and NaN.
        values = to_jsonable_python(state, inf_nan_mode="constants")
        data = to_json(values, inf_nan_mode="constants")
    except Exception:  # not chained: the exception's text may contain a value of the state
        data = b""
    if not data or not is_within_limits(data, MAX_STATE_LEVELS):
        named = {prefix + key: value for key, value in state.items()} if prefix else state
        values, is_lossy = to_values(
            named, levels=MAX_STATE_LEVELS, bytes_mode="utf8", reject="state"
        )
        if is_lossy:
            logger.warning(
                "some state values are not JSON-serializable (callables, for example): "
                "their text is stored instead"
            )
        try:
            data = dump_state({key.removeprefix(prefix): value for key, value in values.items()})
        except ValueError as error:  # the JSON is too large; the message contains no value
            path = subscripts([largest_key(values)])
            raise ValueError(f"state{path}: {error}") from None
    if len(data) > MAX_KEY_BYTES:
        _check_keys(state, prefix)
    return data


def convert_state(state: JsonObject, prefix: str = "") -> JsonObject:
    """Convert the values of *state* as `encode_state` does, to JSON values."""
    return load_state(encode_state(state, prefix)) if state else {}


def convert_scopes(state: JsonObject | None) -> Scopes:
    """Split *state* by scope, and convert its values as `encode_state` does, to JSON values."""
    if not state:
        return Scopes({}, {}, {})
    app, user, session = split_scopes(state)
    return Scopes(
        convert_state(app, APP_PREFIX), convert_state(user, USER_PREFIX), convert_state(session)
    )


def _check_keys(state: JsonObject, prefix: str) -> None:
    for key in state:
        name = prefix + key
        if len(name) > MAX_KEY_BYTES // 4 and len(encode_text(name)) > MAX_KEY_BYTES:
            path = subscripts([name])
            raise ValueError(f"state{path}: the key has more than {MAX_KEY_BYTES} bytes in UTF-8")


# --- read ----------------------------------------------------------------------------------------


def loads(data: bytes, name: str = "the plaintext", levels: int = MAX_LEVELS) -> JsonObject:
    """Parse *data*, which must be authenticated, and return a new dict.

    If *data* is not a JSON object in UTF-8 within the limits, raise DecryptionError, in which
    *name* stands for *data*.
    """
    # The parser accepts MAX_LEVELS nested levels, and one more if the innermost is empty.  For a
    # lower limit, lists around *data* use up the other levels, unless *data* is too short or has
    # too few brackets.
    may_be_deep = len(data) > 2 * levels and _may_exceed(data, levels)
    outer = MAX_LEVELS - levels + 1 if may_be_deep else 0
    try:
        value: Any = from_json(b"[" * outer + data + b"]" * outer if outer else data)
        for _ in range(outer):
            (value,) = value
    except ValueError:
        value = _loads_slowly(data, levels)
    if type(value) is dict:
        return value
    raise DecryptionError(
        f"{name} is not a JSON object within the limits: its writer is faulty", Reason.MALFORMED
    )


def _loads_slowly(data: bytes, levels: int) -> Any:
    """Parse JSON with so many levels, or with lone surrogates; return None if it is neither."""
    try:
        value = from_json(data)
        return value if is_within_levels(data, levels) else None
    except ValueError:
        pass
    # pydantic rejects lone surrogates.  So check the limits with spaces in their place, and parse
    # the JSON with Python's module `json`, which accepts them.
    if re.search(_SURROGATE, data) and is_within_limits(
        re.sub(_SURROGATE, rb"\\u0020", data).lstrip(), levels
    ):
        try:
            # int() rejects more digits than a setting of the process allows.
            return _with_stack(partial(json.loads, parse_int=from_json), data.decode())
        except ValueError:
            pass
    return None


def version_end(plaintext: bytes) -> int:
    end = 1 + plaintext[0] if plaintext else 0
    return end if end <= len(plaintext) and plaintext[1:end].isascii() else 0


def read_event(plaintext: bytes) -> tuple[str, JsonObject]:
    """Return the version of google-adk that wrote the event, and the event's fields.

    The version is for error messages.  If it does not look like a version, it may hold content, and
    the result is a text that says so.
    """
    if end := version_end(plaintext):
        version = plaintext[1:end].decode("ascii")
        quoted = version if _VERSION.fullmatch(version) else "of an unknown version"
        return quoted, loads(plaintext[end:])
    raise DecryptionError(
        "the plaintext does not begin with a version of google-adk: its writer is faulty",
        Reason.MALFORMED,
    )


def _with_stack(function: Callable[[Any], Any], argument: object) -> Any:
    """Return *function*(*argument*), which may recurse 200 levels deep.

    On Python 3.11, the module `json` takes several frames a level: if the stack of this thread is
    too small, call *function* in a new thread.
    """
    try:
        return function(argument)
    except RecursionError:
        pass
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function, argument).result()
