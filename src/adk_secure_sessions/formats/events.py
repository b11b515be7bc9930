"""Events as storage holds them: `length of the version ‖ google-adk version ‖ JSON of the event`.

Format: docs/format.md, "Events".
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
    """Return *event* as storage holds it.

    Fields that are None are left out.  A value without JSON form is replaced by its text, and a
    warning is logged.
    """
    try:
        data = event.model_dump_json(exclude_none=True, warnings=False).encode()
        if b"null" not in data:  # as infinity and NaN are written here, but not below
            return _PREFIX + data
    except Exception:
        pass  # lone surrogates, or values without JSON form such as callables
    fields = event.model_dump(exclude_none=True, warnings=False)
    try:
        fields = to_jsonable_python(fields, bytes_mode="base64")
    except PydanticSerializationError:
        logger.warning("an event holds values without JSON form: their text is stored instead")
        fields = to_jsonable_python(fields, bytes_mode="base64", serialize_unknown=True)
    return _PREFIX + json.dumps(fields, separators=(",", ":")).encode("ascii")


def decode(plaintext: bytes, session_row: int, seq: int) -> Event:
    """Return the event in *plaintext*, which `encode` made and which is authenticated.

    Raises:
        ConfigurationError: the installed google-adk cannot read an event of the version that
            wrote it.  The message names its row, *session_row* and *seq*, and both versions.
    """
    end = 1 + plaintext[0]
    data = plaintext[end:]
    try:
        return _parse(data)
    except ValueError:
        pass  # our error is raised below: here it would keep this one, whose text holds the event
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
