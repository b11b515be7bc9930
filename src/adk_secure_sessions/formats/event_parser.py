"""A faster `Event.model_validate_json`, for JSON that ADK itself wrote and that is authenticated.

Google's models run Python on each value they validate: hooks that look for model instances and
for shorthand arguments, and an `__init__` of `Part` that takes shorthand.  JSON has none of
these, and all but a quarter of the time goes there.  So the same schema without them gives the
same event; what is left out is only what is known here by name, and where pydantic, ADK or a
sample says otherwise, the public call does all the work.
"""

import json
import logging
from collections.abc import Callable
from itertools import count
from typing import Any

from google.adk.events import Event
from google.genai import types
from pydantic_core import SchemaValidator

logger = logging.getLogger(__name__)

Parser = Callable[[bytes], Event]

_IDLE_HOOKS = {
    ("google.genai._common", "BaseModel._check_field_type_mismatches"),
    ("google.adk.events.event", "Event._accept_convenience_kwargs"),
}
_CHECKED = 16  # events of every process that are parsed both ways, and then one in so many
_CHECK_EVERY = 1024


class EventParser:
    """Parses the JSON of one event; raises what `Event.model_validate_json` raises."""

    def __init__(self) -> None:
        self._fast: Parser | None = _without_hooks()
        self._numbers = count()

    @property
    def is_fast(self) -> bool:
        """Whether the shorter way is open with what is installed."""
        return self._fast is not None

    def __call__(self, data: bytes) -> Event:
        if self._fast is None or b"null" in data:  # which `Part` drops
            return Event.model_validate_json(data)
        try:
            event = self._fast(data)
        except ValueError:
            return Event.model_validate_json(data)
        number = next(self._numbers)
        if number < _CHECKED or number % _CHECK_EVERY == 0:
            expected = Event.model_validate_json(data)
            if not same(event, expected):
                logger.warning("events are read the slower way: the faster gave another result")
                self._fast = None
                return expected
        return event


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal in type, content and in which fields were set."""
    if type(one) is not type(other):
        return False
    if hasattr(one, "model_fields_set"):
        return (
            one.model_fields_set == other.model_fields_set
            and same(one.__pydantic_extra__, other.__pydantic_extra__)
            and same(one.__pydantic_private__, other.__pydantic_private__)
            and same(one.__dict__, other.__dict__)
        )
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def _without_hooks() -> Parser | None:
    try:
        schema = _stripped(Event.__pydantic_core_schema__)
        # Not the validators that the nested models already have: those have the hooks.
        validator = SchemaValidator(schema, _use_prebuilt=False)
        parse: Parser = validator.validate_json
        for sample in _SAMPLES:
            data = json.dumps(sample).encode()
            if not same(parse(data), Event.model_validate_json(data)):
                return None
        refused = (b'{"author": 1}', b'{"author": "a", "message": "m"}')
        return None if any(_accepts(parse, data) for data in refused) else parse
    except Exception:  # whatever it is that has changed, the public call is still there
        logger.debug("events are read the slower way", exc_info=True)
        return None


def _stripped(schema: Any) -> Any:
    if isinstance(schema, list | tuple):
        return type(schema)(map(_stripped, schema))
    if not isinstance(schema, dict):
        return schema
    while schema.get("type") == "function-before" and _is_idle(schema["function"]["function"]):
        schema = {**schema["schema"], **({"ref": schema["ref"]} if "ref" in schema else {})}
    stripped = {
        key: value if key in ("cls", "metadata", "serialization") else _stripped(value)
        for key, value in schema.items()
    }
    if stripped.get("type") == "model" and stripped["cls"] is types.Part:
        stripped["custom_init"] = False
    if stripped.get("type") == "model" and stripped["cls"] is Event:
        # Shorthand, which a hook puts in its place, is no field: the public call is to do it.
        stripped["config"] = {**stripped["config"], "extra_fields_behavior": "forbid"}
    return stripped


def _is_idle(hook: Any) -> bool:
    return (hook.__module__, hook.__qualname__) in _IDLE_HOOKS


def _accepts(parse: Parser, data: bytes) -> bool:
    try:
        parse(data)
    except ValueError:
        return False
    return True


_ARGUMENTS = {"city": "Zürich", "days": [1, 2.5, True], "deep": {"n": {"m": []}}}
_PARTS: list[dict[str, Any]] = [
    {"text": "Grüße", "thought": True, "thought_signature": "AAEC_w=="},
    {"inline_data": {"mime_type": "image/png", "data": "AAEC_w==", "display_name": "a"}},
    {"file_data": {"file_uri": "gs://b/o", "mime_type": "text/plain"}},
    {"function_call": {"id": "c", "name": "f", "args": _ARGUMENTS}},
    {"function_response": {"id": "c", "name": "f", "response": _ARGUMENTS}},
    {"executable_code": {"code": "1", "language": "PYTHON"}},
    {"code_execution_result": {"outcome": "OUTCOME_OK", "output": "1"}},
    {"video_metadata": {"start_offset": "1s", "end_offset": "2s", "fps": 1.5}},
]
_SAMPLES: list[dict[str, Any]] = [
    {"author": "user", "id": "e", "invocation_id": "i", "timestamp": 1.5},
    {
        "author": "agent",
        "id": "e",
        "invocation_id": "i",
        "timestamp": 1700000000.25,
        "content": {"role": "model", "parts": _PARTS},
        "partial": False,
        "turn_complete": True,
        "finish_reason": "STOP",
        "branch": "a.b",
        "long_running_tool_ids": ["c"],
        "usage_metadata": {"prompt_token_count": 1, "total_token_count": 3},
        "grounding_metadata": {
            "web_search_queries": ["q"],
            "grounding_chunks": [{"web": {"uri": "https://example.org", "title": "t"}}],
        },
        "citation_metadata": {"citations": [{"uri": "https://example.org", "start_index": 1}]},
        "custom_metadata": {"k": [1, {"a": "b"}]},
        "actions": {
            "state_delta": {"k": 1, "app:l": [1.5, "x"], "user:m": {"n": False}},
            "artifact_delta": {"file": 2},
            "transfer_to_agent": "other",
            "escalate": True,
        },
    },
]
