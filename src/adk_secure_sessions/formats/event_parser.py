"""Parsing and serializing google-adk's models: faster, and without code that logs values.

The first part is a faster `Event.model_validate_json`, for JSON that ADK itself wrote and that is
authenticated.

Google's models run Python code for each value that they validate:

- a hook that looks for model instances,
- a hook that accepts shorthand arguments, such as `message` of an event,
- `Part.__init__`, which also accepts shorthand arguments.

JSON written by ADK contains neither model instances nor shorthand arguments.  The faster parser
uses a copy of the schema without this Python code.  It returns the same event in a third of the
time.

Parsing 1000 events of a conversation, 423 bytes each, takes 11.6 ms with the faster parser and
33.1 ms with the public call (medians of process CPU time over 200 interleaved pairs; google-adk
2.13, pydantic 2.14).

The faster parser needs a private flag of pydantic-core, `_use_prebuilt=False`.  Without the flag,
nested models keep their own validators with these hooks, and parsing is not faster.  A private flag
may change, so `create_parser` first compares the two parsers on the installed versions (17 ms).
For the comparison, both parse sample events that together hold every field of every model in the
schema.  If a result differs, or if the faster parser cannot be built, the public call parses every
event.
"""

import json
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Final, Never, TypeVar

from google.adk.events import Event
from google.genai import types
from pydantic import BaseModel
from pydantic_core import SchemaSerializer, SchemaValidator, core_schema

from adk_secure_sessions.formats import json_text

logger: logging.Logger = logging.getLogger(__name__)

Parser = Callable[[list[bytes]], list[Event]]
T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)

# The filter that `silence_enumerations` sets, as it is in `warnings.filters`.  A value may have
# several lines.
_SILENCED: Final = (
    "ignore",
    re.compile("(?s).* is not a valid ", re.IGNORECASE),
    UserWarning,
    re.compile(r"google\.genai\._common"),
    0,
)

_NULL: Final = re.compile(rb"[:,\[]\s*null")  # not the word in a text
# Hooks that return JSON values unchanged, by module and name.  Other hooks stay in the schema.
_IDLE_HOOKS = {
    ("google.genai._common", "BaseModel._check_field_type_mismatches"),
    ("google.adk.events.event", "Event._accept_convenience_kwargs"),
}
# A sample JSON value for each schema type that contains no other schema.  The sample for `any` is
# an empty object: a non-empty object in `requested_auth_configs` makes ADK import its
# authentication code, which takes 0.4 s.
_LEAVES = {"any": {}, "bool": True, "bytes": "AAEC_w==", "float": 1.5, "int": 1, "str": "Grüße"}
# The share of the samples that the public call must accept.  If it accepts a smaller share, the
# comparison of the two parsers proves too little, and the faster parser is not used.
_LEAST_ACCEPTED = 0.9
_DEPTH = 2  # the number of nested references to follow: some models contain themselves
# Fields of each sample.  If the id or the timestamp were missing, ADK would generate a new value in
# each call, and the events of the two parsers would differ.
_START = {"author": "agent", "invocation_id": "i", "id": "e", "timestamp": 1700000000.25}


def create_parser() -> Parser:
    """Return the faster parser, or `parse_publicly` if it does not fit the installed versions."""

    def build(schema: Any, samples: list[bytes]) -> Parser | None:
        # pydantic accepts one level more than the limit, if this level is an empty list or object.
        # The parser encloses the JSON in a list, so that pydantic accepts only the limit.
        listed = core_schema.list_schema(_rewritten(schema, _without_hooks))
        validate = SchemaValidator(listed, _use_prebuilt=False).validate_json
        return _parser(validate) if _is_equal(_parser(validate, _reject), samples) else None

    if (parse := _compared(build)) is None:
        logger.warning(
            "events are parsed three times as slowly: the faster parser does not fit the installed "
            "google-adk and pydantic"
        )
    return parse or parse_publicly


def parse_publicly(texts: list[bytes]) -> list[Event]:
    """Return the event in each of *texts*, or raise the errors of `Event.model_validate_json`.

    JSON with more levels than `json_text.MAX_LEVELS` raises ValueError.
    """
    events = [validate_model(Event, data) for data in texts]
    if all(map(json_text.is_within_levels, texts)):
        return events
    raise ValueError


def _parser(validate: Callable[[bytes], list[Event]], otherwise: Parser = parse_publicly) -> Parser:
    """Return a function that parses JSON with *validate*, or with *otherwise* what it rejects.  If
    it rejects one of several texts, the function raises ValueError.

    One call of *validate* parses all texts: a call for each takes 13 % longer.  The texts are
    authentic: one holds more or less than an event only if its writer is faulty.
    """

    def parse(texts: list[bytes]) -> list[Event]:
        data = b"[%b]" % b",".join(texts)
        # The public call drops some null fields of a `Part`, and the faster parser keeps them.  So
        # the public call parses all JSON that may contain null.  Most needs only the first check.
        if b"null" not in data or not may_contain_null(data):
            try:
                events = validate(data)
                if len(events) == len(texts):
                    return events
            except ValueError:
                pass
        if len(texts) > 1:
            raise ValueError
        return otherwise(texts)

    return parse


def _reject(texts: list[bytes]) -> Never:
    raise ValueError


def may_contain_null(data: bytes) -> bool:
    """Return whether the JSON *data* contains the value null, or a text that looks like it."""
    return b"null" in data and _NULL.search(data) is not None


def validate_model(model: type[M], values: Any) -> M:
    """Return the *model* in *values*, a dictionary or JSON, without a warning that quotes a value.

    The text of a ValueError may quote a value.
    """
    silence_enumerations()
    try:
        if isinstance(values, bytes):
            return model.model_validate_json(values)
        return model.model_validate(values)
    except AttributeError:  # google-genai's enumerations raise it for a number
        raise ValueError from None


def silence_enumerations() -> None:
    """Silence a warning of google-genai: its enumerations quote each unknown value.

    The filter stays, because restoring the filters of a process is not safe while other threads
    run.  It is set again if the application has put another filter before it.
    """
    # Setting a filter makes Python show warnings again that it shows only once.
    if warnings.filters[:1] != [_SILENCED]:
        _, text, category, module, _ = _SILENCED
        warnings.filterwarnings("ignore", text.pattern, category, module.pattern)


def event_serializer(parse: Parser) -> SchemaSerializer | None:
    """Return a serializer of `Event` that runs none of google-adk's code; None if there is none.

    google-adk's own serializer logs an error that occurs while it serializes the state delta, with
    the traceback.  If a field before the delta has a wrong type, and `warnings` is "error", the
    text of this error quotes the field.  The serializer is compared with google-adk's, as the
    faster parser is.
    """

    def build(schema: Any, samples: list[bytes]) -> Any:
        options: Any = {
            name: value for name, value in Event.model_config.items() if name.startswith("ser_json")
        }
        serializer = SchemaSerializer(
            _rewritten(schema, _without_wrapper), options, _use_prebuilt=False
        )
        parsed = (_parsed(parse, data) for data in samples)
        fits = all(event is None or _is_serialized_equally(serializer, event) for event in parsed)
        return serializer if fits else None

    if (serializer := _compared(build)) is None:
        logger.warning(
            "events are written several times as slowly: their serializer does not fit the "
            "installed google-adk and pydantic"
        )
    return serializer


def _compared(build: Callable[[Any, list[bytes]], T | None]) -> T | None:
    """Return what *build* makes of the schema of events, after it has compared its results for
    sample events with google-adk's; None if they differ, and after any error.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # with the filter "error", the comparison would fail
            schema = Event.__pydantic_core_schema__
            samples = ({**sample, **_START} for sample in _samples(schema))
            data = [json.dumps(sample, ensure_ascii=False).encode() for sample in samples]
            return build(schema, data)
    except Exception:
        logger.debug("a faster parser or serializer of events failed", exc_info=True)
        return None


def _is_serialized_equally(serializer: SchemaSerializer, event: Event) -> bool:
    public = Event.__pydantic_serializer__
    event.actions.state_delta = {"key": [None, 1.5, b"\xff", {1, "text"}]}
    return bool(
        serializer.to_json(event, exclude_none=True) == public.to_json(event, exclude_none=True)
        and serializer.to_python(event, exclude_none=True)
        == public.to_python(event, exclude_none=True)
    )


def _rewritten(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Return a copy of *schema* in which each dictionary was passed to *change*."""
    if isinstance(schema, list | tuple):
        return type(schema)(_rewritten(item, change) for item in schema)
    if not isinstance(schema, dict):
        return schema
    return {
        key: value if key in ("cls", "metadata") else _rewritten(value, change)
        for key, value in change(schema).items()
    }


def _without_wrapper(schema: dict[str, Any]) -> dict[str, Any]:
    """Remove the function that wraps the serializer of a field."""
    if schema.get("serialization", {}).get("type") != "function-wrap":
        return schema
    return {key: value for key, value in schema.items() if key != "serialization"}


def same(one: Any, other: Any) -> bool:
    """Return whether two values have equal types, contents and, for models, set fields."""
    if type(one) is not type(other):
        return False
    if isinstance(one, BaseModel):  # its state has the set fields, too
        return same(one.__getstate__(), other.__getstate__())
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def _is_equal(parse: Parser, samples: list[bytes]) -> bool:
    """Return whether *parse* returns the same events for *samples* as the public call, which must
    accept most of them, and rejects JSON with a wrong type or with a shorthand argument.
    """
    accepted = 0
    for data in samples:
        expected = _parsed(lambda texts: [*map(Event.model_validate_json, texts)], data)
        parsed = _parsed(parse, data)
        accepted += expected is not None
        if not same(parsed, expected):
            return False
    rejected = (b'{"author": 1}', b'{"author": "a", "message": "m"}')
    if any(_parsed(parse, data) for data in rejected):
        return False
    return accepted >= _LEAST_ACCEPTED * len(samples)


def _parsed(parse: Parser, data: bytes) -> Event | None:
    try:
        (event,) = parse([data])
        return event
    except ValueError:
        return None


def _without_hooks(schema: dict[str, Any]) -> dict[str, Any]:
    """Remove `_IDLE_HOOKS` and calls of `Part.__init__`, and reject unknown fields of an event."""
    while schema.get("type") == "function-before":
        hook = schema["function"]["function"]
        if (hook.__module__, hook.__qualname__) not in _IDLE_HOOKS:
            break
        schema = {**schema["schema"], **({"ref": schema["ref"]} if "ref" in schema else {})}
    if schema.get("type") == "model" and schema["cls"] is types.Part:
        schema = {**schema, "custom_init": False}
    if schema.get("type") == "model" and schema["cls"] is Event:
        # A shorthand argument, such as `message`, is not a field of an event.  The faster parser
        # must reject it, so that the public call is used, which accepts it.
        config = {**schema["config"], "extra_fields_behavior": "forbid"}
        schema = {**schema, "config": config}
    if schema.get("type") == "enum":
        # The faster parser must reject the values that google-genai would warn about.
        schema = {"type": "literal", "expected": schema["members"], "ref": schema["ref"]}
    return schema


def _samples(schema: Any, refs: dict[str, Any] | None = None, depth: int = _DEPTH) -> Iterator[Any]:
    """Yield JSON values that together hold every field of every model in *schema*."""
    refs = refs or {}
    match schema["type"]:
        case kind if kind in _LEAVES:
            yield _LEAVES[kind]
        case "enum":
            yield schema["members"][-1].value
        case "literal":
            yield schema["expected"][0]
        case "list" | "set":
            yield list(_samples(schema.get("items_schema", {"type": "any"}), refs, depth))
        case "dict":
            for value in _samples(schema.get("values_schema", {"type": "any"}), refs, depth):
                yield {"key": value} if value else {}
        case "union":
            for choice in schema["choices"]:
                yield from _samples(choice[0] if isinstance(choice, tuple) else choice, refs, depth)
        case "definitions":
            refs = {definition["ref"]: definition for definition in schema["definitions"]}
            yield from _samples(schema["schema"], refs, depth)
        case "definition-ref":
            if depth:
                yield from _samples(refs[schema["schema_ref"]], refs, depth - 1)
        case "model-fields":
            fields = {name: field["schema"] for name, field in schema["fields"].items()}
            required = {
                name: next(_samples(field, refs, depth))
                for name, field in fields.items()
                if field["type"] != "default"
            }
            yield required
            for name, field in fields.items():
                for value in _samples(field, refs, depth):
                    yield {**required, name: value}
        case _:  # a schema that wraps another: a model, a default, a hook, a nullable
            yield from _samples(schema["schema"], refs, depth)
