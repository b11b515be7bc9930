"""Convert rows of google-adk's tables to sessions, events and states.

The converted values are those that google-adk's own `get_session` returns.  The driver returns the
columns unconverted: a text is a str or bytes, and a time is a datetime, a text or a number of
seconds.
"""

import json
from collections.abc import Sequence
from datetime import UTC, datetime, tzinfo
from typing import Any

from google.adk.events import Event, EventActions
from google.adk.version import __version__ as adk_version
from google.genai import types
from pydantic import BaseModel

from adk_secure_sessions.errors import DecryptionError
from adk_secure_sessions.formats import events, json_text
from adk_secure_sessions.formats.event_parser import validate_model
from adk_secure_sessions.formats.events import microseconds
from adk_secure_sessions.formats.records import EncodedEvent
from adk_secure_sessions.formats.times import microseconds_of
from adk_secure_sessions.migration.pickled_actions import PickleReader
from adk_secure_sessions.migration.sources import SEE_LIMITS, ConversionError, encoded_state
from adk_secure_sessions.service import check_ids

Row = Sequence[Any]

INSTALLED_ADK = f"the installed google-adk {adk_version}"
# google-adk before 1.17 stored `temp:` keys in the state delta of events.  An event whose JSON
# contains this text is not stored as it is: `convert_event` removes these keys first.
_TEMPORARY = b'"temp:'


# --- Values --------------------------------------------------------------------------------------


def to_text(value: str | bytes) -> str:
    """Decode *value*, if it is not a str; raise ValueError if it is no text in UTF-8."""
    return value if isinstance(value, str) else to_bytes(value).decode()


def to_bytes(value: object) -> bytes:
    if isinstance(value, str):
        # UTF-8 cannot encode a lone surrogate, which no driver returns, but a caller's engine may.
        return value.encode("utf-8", "surrogatepass")
    # SQLite may have a number in any column, and `bytes(10**9)` would allocate 10**9 bytes.
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise ValueError("a column of text or bytes holds another type")


def to_microseconds(value: object, zone: tzinfo | None) -> int:
    """Convert a time to microseconds since 1970, UTC."""
    try:
        return microseconds(to_seconds(value, zone))
    except (OverflowError, ValueError):
        raise ConversionError("its create_time or update_time is not a time") from None


def to_seconds(value: object, zone: tzinfo | None) -> float:
    """Convert a time to seconds since 1970, UTC.

    *value* may be a datetime; or text, as SQLite stores a datetime; or seconds since 1970.  *zone*
    is the time zone of a datetime without one; None is the local zone of this process.
    """
    if isinstance(value, int | float):
        return value
    if isinstance(value, str | bytes):
        value = datetime.fromisoformat(to_text(value))
    if not isinstance(value, datetime):
        raise ValueError("a column of times holds no time")
    if value.tzinfo is None:
        value = value.replace(tzinfo=zone) if zone else value.astimezone()
    return microseconds_of(value) / 1_000_000


def convert_state(value: object) -> bytes:
    """Return the JSON of a state as this package stores it."""
    try:
        state = json_text.loads(to_bytes(value))
    except (DecryptionError, ValueError):
        problem = f"its state is not a JSON object, or exceeds a limit: {SEE_LIMITS}"
        raise ConversionError(problem) from None
    return encoded_state(state)


def require_valid_ids(app_name: str, user_id: str = "", session_id: str = "") -> None:
    try:
        check_ids(app_name, user_id, session_id)
    except ValueError as error:  # the text of the error contains no name
        raise ConversionError(f"{error}: {SEE_LIMITS}") from None


# --- Events --------------------------------------------------------------------------------------

JSON_EVENT_COLUMNS = ("id", "invocation_id", "timestamp", "event_data")


def convert_json_row(row: Row, zone: tzinfo | None) -> EncodedEvent:
    """Convert the columns `JSON_EVENT_COLUMNS` of google-adk's tables with JSON.

    The columns `id` and `invocation_id` override the fields of the JSON, as in schema v1.
    `SqliteSessionService`, which writes the same values to both, reads only the JSON.
    """
    event_id, invocation_id, timestamp, event_data = row
    names = {"id": to_text(event_id), "invocation_id": to_text(invocation_id)}
    stored = b"{}" if event_data is None else to_bytes(event_data)
    return convert_event_json(stored, names, timestamp, zone)


def convert_event_json(
    stored: bytes, columns: dict[str, str], timestamp: object, zone: tzinfo | None
) -> EncodedEvent:
    """Convert the JSON of an event; the values of *columns* replace its fields.

    *timestamp* is used only if the JSON has none: google-adk would use the present time.
    """
    accepted = None if _TEMPORARY in stored else events.encode_adk_json(stored)
    if accepted is not None:
        plaintext, event = accepted
        # If the JSON contains no id, google-adk's class has just created a random one.
        are_equal = all(getattr(event, name) == value for name, value in columns.items())
        if are_equal and "timestamp" in event.model_fields_set:
            return EncodedEvent(plaintext, microseconds(event.timestamp))
    fields = _parse_json(stored) | columns
    if fields.get("timestamp") is None:
        fields["timestamp"] = to_seconds(timestamp, zone)
    return convert_event(validate_model(Event, fields))


_TEXTS = ("id", "invocation_id", "author", "branch", "error_code", "error_message")
_FLAGS = ("partial", "turn_complete", "interrupted")
_MODELS: dict[str, type[BaseModel]] = {
    "content": types.Content,
    "grounding_metadata": types.GroundingMetadata,
    "usage_metadata": types.GenerateContentResponseUsageMetadata,
    "citation_metadata": types.CitationMetadata,
    "input_transcription": types.Transcription,
    "output_transcription": types.Transcription,
}
_OTHERS = ("actions", "custom_metadata", "long_running_tool_ids_json", "timestamp")
PICKLED_EVENT_COLUMNS = (*_TEXTS, *_FLAGS, *_MODELS, *_OTHERS)
# The names of all columns that contain JSON, in any schema.
JSON_COLUMNS = frozenset({"state", "event_data", "custom_metadata", *_MODELS})


def convert_pickle_row(pickles: PickleReader, row: Row, zone: tzinfo | None) -> EncodedEvent:
    fields = dict(zip(PICKLED_EVENT_COLUMNS, row, strict=True))
    pickled = fields["actions"]
    ids = fields.pop("long_running_tool_ids_json")
    fields |= {name: to_text(fields[name]) for name in _TEXTS if fields[name] is not None}
    fields |= {name: bool(fields[name]) for name in _FLAGS if fields[name] is not None}
    fields |= {name: _parse_model(fields[name], kind) for name, kind in _MODELS.items()}
    fields |= {
        "timestamp": to_seconds(fields["timestamp"], zone),
        "custom_metadata": _parse_json(fields["custom_metadata"]),
        "long_running_tool_ids": set(json.loads(to_text(ids))) if ids else set(),
        "actions": EventActions() if pickled is None else pickles.read(to_bytes(pickled)),
    }
    return convert_event(Event(**fields))


def convert_event(event: Event) -> EncodedEvent:
    """Convert *event*, which gets an id and loses its `temp:` keys, as google-adk stores it."""
    time = microseconds(event.timestamp)
    events.set_id_and_move_temp(event, {})
    return EncodedEvent(events.encode(event, replaces=False), time)


def _parse_json(value: object) -> Any:
    """Parse a column of JSON as google-adk does; None if the column is NULL."""
    if value is None:
        return None
    json_bytes = to_bytes(value)
    return json_text.loads(json_bytes) if json_bytes[:1] == b"{" else json.loads(json_bytes)


def _parse_model(value: object, kind: type[BaseModel]) -> BaseModel | None:
    """Parse a column of JSON as a model; None if the JSON is not an object, as in google-adk."""
    decoded = _parse_json(value)
    return validate_model(kind, decoded) if isinstance(decoded, dict) else None


def sessions_time_zone(dialect: str) -> tzinfo | None:
    """Return the time zone of the times in the table `sessions`; None is this process's local zone.

    The result is the zone that the installed google-adk assumes when it reads these times.  The
    release that stored the times may have used another zone: see docs/migrate.md, Times.
    """
    major, minor = adk_version.split(".")[:2]
    return UTC if dialect == "sqlite" or (int(major), int(minor)) >= (2, 3) else None
