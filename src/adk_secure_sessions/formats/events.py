"""Encode and decode stored events: `length of the version ‖ google-adk version ‖ JSON`."""

import logging
import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from google.adk.events import Event, EventActions
from google.adk.sessions import State
from google.adk.version import __version__ as adk_version
from pydantic import BaseModel, ValidationError
from pydantic_core import SchemaSerializer, to_json

from adk_secure_sessions.errors import ConfigurationError, DecryptionError
from adk_secure_sessions.formats import json_text
from adk_secure_sessions.formats.event_parser import (
    create_parser,
    event_serializer,
    may_contain_null,
    validate_model,
)
from adk_secure_sessions.formats.json_text import JsonObject

logger: logging.Logger = logging.getLogger(__name__)

_PREFIX = bytes([len(adk_version)]) + adk_version.encode("ascii")
_PREFIX_LENGTH = len(_PREFIX)
# Created at the first event: comparing both with google-adk's own takes 35 ms, which would delay
# the import and every command.
_parser = cache(create_parser)

# Events with more bytes in all are parsed one by one: parsing them together takes three copies.
_MAX_JOINED_BYTES = 2**20
MAX_SECONDS = 9e12  # the largest time since 1970 that fits into a column of microseconds


@cache
def _serializer() -> SchemaSerializer | None:
    """Return the serializer, which is also used for subclasses of `Event`, and omits the fields
    that a subclass adds: `decode` returns an `Event`, which has no such fields.
    """
    return event_serializer(_parser())


def microseconds(timestamp: float) -> int:
    """Convert seconds since 1970 to microseconds, with the rounding of `datetime.fromtimestamp`,
    which ADK uses; raise ValueError for an impossible time.
    """
    try:
        is_possible = abs(timestamp) <= MAX_SECONDS  # False for NaN
    except TypeError:
        is_possible = False
    if not is_possible:
        raise ValueError("the timestamp is not a possible time in seconds")
    fraction, seconds = math.modf(timestamp)
    return int(seconds) * 1_000_000 + round(fraction * 1_000_000)


def set_id_and_move_temp(event: Event, state: JsonObject) -> None:
    """Prepare *event* for `encode`: move the `temp:` keys of its state delta to *state*.

    An event without an id gets one: otherwise, google-adk would give it a new id at each read.
    """
    if not event.id:
        event.id = Event.new_id()
    delta = event.actions.state_delta
    temporary = {key: delta[key] for key in delta or () if key.startswith(State.TEMP_PREFIX)}
    if temporary:
        state.update(temporary)
        event.actions.state_delta = {
            key: value for key, value in delta.items() if key not in temporary
        }


def encode(event: Event, *, replaces: bool = True) -> bytes:
    """Return the bytes to store for *event*, without fields that are None.

    If a value cannot be converted to JSON or exceeds a limit, its text is stored instead, and a
    warning is logged; if *replaces* is False, ValueError is raised.  An event that could not be
    read back also raises ValueError.
    """
    if (serializer := _serializer()) is not None:
        try:
            data = serializer.to_json(event, exclude_none=True, warnings="error")
            if json_text.is_within_limits(data):
                # In the JSON of a model, null may stand for infinity or NaN, and U+FFFD for a lone
                # surrogate in a key.  With plain values, `to_json` keeps infinity and NaN, and
                # raises for a lone surrogate.
                if may_contain_null(data) or (b"\xef" in data and b"\xef\xbf\xbd" in data):
                    fields = serializer.to_python(event, exclude_none=True, warnings="error")
                    data = to_json(fields, inf_nan_mode="constants", bytes_mode="base64")
                return _PREFIX + data
        except Exception:
            # `_encode_slowly` handles lone surrogates, values that cannot be converted to JSON
            # (such as callables), and fields whose value has an undeclared type.
            pass
    return _encode_slowly(event, replaces)


def encode_adk_json(data: bytes) -> tuple[bytes, Event] | None:
    """Return the bytes to store for *data*, the JSON of an event that google-adk has written, and
    the event that `decode` returns for them.

    Storing it as it is is much faster than `encode`.  Return None if *data* must not be stored as
    it is: it exceeds a limit, contains a lone surrogate, or cannot be read by the installed
    google-adk.
    """
    if json_text.is_within_limits(data):
        try:
            (event,) = _parser()([data])
            return _PREFIX + data, event
        except ValueError:
            pass
    return None


def encode_item(values: JsonObject) -> bytes:
    """Return the bytes to store for *values*, an item of a collection, or raise ValueError."""
    try:
        data = to_json(values, inf_nan_mode="constants")
        if json_text.is_within_limits(data):
            return _PREFIX + data
    except ValueError:
        pass  # the values hold a lone surrogate, or a value that `to_values` rejects
    return _PREFIX + json_text.dumps(json_text.exact_values(values, json_text.MAX_LEVELS, "item"))


def _encode_slowly(event: Event, replaces: bool) -> bytes:
    values, is_lossy = json_text.to_values(
        _fields(event), levels=json_text.MAX_LEVELS, bytes_mode="base64"
    )
    if is_lossy and not replaces:
        raise ValueError("an event holds values that cannot be converted to JSON or exceed a limit")
    if is_lossy:
        logger.warning(
            "an event holds values that cannot be converted to JSON or exceed a limit: their text "
            "is stored instead"
        )
    plaintext = _PREFIX + json_text.dumps(values)
    try:
        decode(plaintext)
    except ConfigurationError:
        raise ValueError(
            "the event is not stored, because google-adk could not read it back: it rejects "
            + _rejected_fields(values)
        ) from None
    return plaintext


def _rejected_fields(values: JsonObject) -> str:
    try:
        validate_model(Event, values)
    except ValidationError as error:
        names = {str(problem["loc"][0]) for problem in error.errors() if problem["loc"]}
        return f"the values of {', '.join(sorted(names))}"
    except ValueError:
        pass
    return "the value of an enumeration"


def _fields(event: Event) -> JsonObject:
    fields = dump_model(event)
    for name in ("state_delta", "agent_state"):
        # `dump_model` omits all fields that are None.  google-adk also omits them, with one
        # exception: if the value of `state_delta` or `agent_state` cannot be converted to JSON,
        # google-adk keeps the None fields of the models inside that value.  Then use the original
        # value, which still contains these models with all their fields.
        value = getattr(event.actions, name, None)
        if isinstance(value, Mapping) and not isinstance(value, dict):
            value = dict(value)
            fields["actions"][name] = _dumped_value(value)
        _, is_lossy = json_text.json_form(value, "utf8")
        if is_lossy:
            fields["actions"][name] = value
    return fields


def dump_model(model: BaseModel) -> JsonObject:
    """Return the fields of *model* that are not None.  Nothing is logged, whatever their types."""
    serializer: Any = type(model).__pydantic_serializer__
    kind = type(model)
    if isinstance(model, Event):
        serializer, kind = _serializer(), Event
    elif isinstance(model, EventActions):  # its serializer logs errors: see `event_serializer`
        serializer = None
    try:
        dumped: JsonObject = serializer.to_python(model, exclude_none=True, warnings=False)
        return dumped
    except Exception:  # there is no serializer, or the serializer of a value failed
        fields = {name: getattr(model, name, None) for name in kind.model_fields}
    return {name: _dumped_value(value) for name, value in fields.items() if value is not None}


def _dumped_value(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return dump_model(value)
    if type(value) is list:
        return [dump_model(item) if isinstance(item, BaseModel) else item for item in value]
    if type(value) is dict:
        return {
            key: dump_model(item) if isinstance(item, BaseModel) else item
            for key, item in value.items()
        }
    return value


def decode(plaintext: bytes, *primary_key: object, table: str = "secure_events") -> Event:
    """Return the event in *plaintext*, authenticated bytes that `encode` returned.

    ConfigurationError, if the installed google-adk cannot read it, names the event's *table*, its
    *primary_key* and both versions of google-adk.
    """
    if end := json_text.version_end(plaintext):
        try:
            (event,) = _parser()([plaintext[end:]])
            return event
        except ValueError:
            pass
    named = ", ".join(map(str, primary_key))
    try:
        writer, fields = json_text.read_event(plaintext)
    except DecryptionError as error:
        raise error.located(table, named) from None
    try:
        return validate_model(Event, fields)  # accepts lone surrogates, which the parser rejects
    except ValueError:
        raise unreadable_error(table, named, writer) from None


def decode_all(plaintexts: list[bytes], session_row_id: int, seqs: Sequence[int]) -> list[Event]:
    """Return the events in *plaintexts*, as `decode` does; their `seq` is in *seqs*."""
    if sum(map(len, plaintexts)) <= _MAX_JOINED_BYTES:
        texts = [data[_PREFIX_LENGTH:] for data in plaintexts if data.startswith(_PREFIX)]
        if len(texts) == len(plaintexts):
            try:
                return _parser()(texts)
            except ValueError:
                pass  # one is rejected: decode them one by one
    return [
        decode(plaintext, session_row_id, seq)
        for plaintext, seq in zip(plaintexts, seqs, strict=True)
    ]


def unreadable_error(table: str, row: str, writer: str) -> ConfigurationError:
    """Return the error for a row that the version *writer* of google-adk wrote."""
    return ConfigurationError(
        f"{table} row {row} was written by google-adk {writer}, and the installed google-adk "
        f"{adk_version} cannot read it: install that version or a later one"
    )
