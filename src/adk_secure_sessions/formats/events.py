"""Encode and decode stored events: `length of the version ‖ google-adk version ‖ JSON`.

The format is described in docs/format.md, "Events".
"""

import json
import logging
from typing import Any

from google.adk.events import Event
from google.adk.version import __version__ as adk_version
from pydantic_core import PydanticSerializationError, to_jsonable_python

from adk_secure_sessions.errors import ConfigurationError
from adk_secure_sessions.formats.event_parser import EventParser

logger: logging.Logger = logging.getLogger(__name__)

_parse = EventParser()
_PREFIX = bytes([len(adk_version)]) + adk_version.encode("ascii")


def encode(event: Event) -> bytes:
    """Return the bytes to store for *event*.

    Fields that are None are omitted.  If a value has no JSON form, its text is stored instead, and
    a warning is logged.
    """
    try:
        data = event.model_dump_json(exclude_none=True, warnings=False).encode()
        if b"null" not in data:  # a null may stand for infinity or NaN: encode these below
            return _PREFIX + data
    except Exception:
        pass  # the event has lone surrogates or values without JSON form, such as callables
    fields = event.model_dump(exclude_none=True, warnings=False)
    try:
        fields = to_jsonable_python(fields, bytes_mode="base64")
    except PydanticSerializationError:
        logger.warning("an event holds values without JSON form: their text is stored instead")
        fields = to_jsonable_python(fields, bytes_mode="base64", serialize_unknown=True)
    return _PREFIX + json.dumps(fields, separators=(",", ":")).encode("ascii")


def decode(plaintext: bytes, session_row: int, seq: int) -> Event:
    """Return the event in *plaintext*, authenticated bytes that `encode` returned.

    Raises:
        ConfigurationError: the installed google-adk cannot read the event.  The message names the
            event's row (*session_row*, *seq*), the google-adk version that wrote the event, and
            the installed version.
    """
    end = 1 + plaintext[0]
    data = plaintext[end:]
    try:
        return _parse(data)
    except ValueError:
        pass  # ConfigurationError is raised below: here, its __context__ would hold the event
    try:
        loaded: Any = json.loads(data)  # accepts lone surrogates, which pydantic rejects
        return Event.model_validate(loaded)
    except ValueError:
        pass
    writer = plaintext[1:end].decode("ascii")
    raise ConfigurationError(
        f"secure_events row {session_row}, {seq} was written by google-adk {writer}, and the "
        f"installed google-adk {adk_version} cannot read it: install that version or a later one"
    )
