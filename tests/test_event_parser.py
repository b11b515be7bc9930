"""The faster parser of events returns what the public call returns, or it is not used."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from copy import deepcopy
from random import Random
from typing import Any

import pydantic
import pytest
from google.adk.events import Event, EventActions
from google.genai import types
from pydantic_core import SchemaSerializer, SchemaValidator

from adk_secure_sessions.formats import event_parser
from adk_secure_sessions.formats.event_parser import Parser, create_parser, parse_publicly, same
from adk_secure_sessions.formats.events import encode
from tests.conformance.samples import CORPUS, of_every_field

# ADK's AuthConfig calls a deprecated method of its own.
pytestmark = pytest.mark.filterwarnings("ignore:This method is deprecated:DeprecationWarning")

PLAIN = b'{"author":"user","id":"e","invocation_id":"i","timestamp":1.5}'


@pytest.fixture
def public_calls(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What the public call is called with, from now on."""
    calls: list[bytes] = []
    original = Event.model_validate_json

    def recorded(data: bytes, **options: Any) -> Event:
        calls.append(data)
        return original(data, **options)

    monkeypatch.setattr(Event, "model_validate_json", recorded)
    return calls


def json_of(event: Event) -> bytes:
    """Return the JSON of *event* as it is stored."""
    stored = encode(event)
    return stored[1 + stored[0] :]


def test_samples_are_parsed_as_by_the_public_call() -> None:
    parser = create_parser()
    samples = {name: make() for name, make in CORPUS.items()} | dict(of_every_field())
    stored = {name: json_of(sample) for name, sample in samples.items()}
    for name, data in stored.items():
        assert same(parser([data])[0], Event.model_validate_json(data)), name
    assert same(parser([PLAIN] * 3), [Event.model_validate_json(PLAIN)] * 3)
    assert parser is not parse_publicly


def test_most_samples_are_parsed_without_the_public_call(public_calls: list[bytes]) -> None:
    parser = create_parser()
    del public_calls[:]
    assert all(parser([json_of(make())]) for make in CORPUS.values())
    assert len(public_calls) < len(CORPUS) / 4  # the samples are fond of nulls


def test_text_with_the_word_null_is_parsed_without_the_public_call(
    public_calls: list[bytes],
) -> None:
    parser = create_parser()
    del public_calls[:]
    parser([PLAIN[:-1] + b',"error_message":"null: is it a null, or not null?"}'])
    assert not public_calls


def random_json(random: Random, depth: int = 3) -> Any:
    kind = random.randrange(7 if depth else 5)
    if kind < 5:
        return random.choice(
            ["", "text", "1", "AAEC", "Ünï 🎉\0", "STOP", 0, -1, 1, 10**20, 0.5, 1e300, True, False]
            + [None] * (kind == 0)
        )
    inside = [random_json(random, depth - 1) for _ in range(random.randrange(4))]
    if kind == 5:
        return inside
    return {random.choice(["k", "l", "text", "args", "ключ", ""]): value for value in inside}


def some(random: Random, fields: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    """Some of *fields*, here and there with a value that does not belong there."""
    return {
        name: random_json(random) if random.random() < 0.05 else make()
        for name, make in random.sample(list(fields.items()), random.randrange(len(fields) + 1))
    }


def random_event(random: Random) -> dict[str, Any]:
    def text() -> str:
        return random.choice(["", "text", "1.5", "Grüße", "AAEC_w==", "a\nb"])

    def anything() -> Any:
        return random_json(random)

    def an_object() -> dict[str, Any]:
        return {text(): anything() for _ in range(random.randrange(3))}

    def flag() -> bool:
        return random.random() < 0.5

    def part() -> Any:
        kinds: list[dict[str, Callable[[], Any]]] = [
            {"text": text, "thought": flag, "thoughtSignature": text},
            {"function_call": lambda: some(random, {"name": text, "args": an_object, "id": text})},
            {"functionResponse": lambda: some(random, {"name": text, "response": an_object})},
            {"inline_data": lambda: some(random, {"data": text, "mimeType": text})},
            {"inlineData": anything, "text": text, "unknown": anything},
        ]
        return some(random, random.choice(kinds))

    def content() -> Any:
        parts = [part() for _ in range(random.randrange(4))]
        return some(random, {"role": text, "parts": lambda: parts})

    def actions() -> Any:
        scopes: dict[str, Callable[[], Any]] = {"state_delta": an_object, "escalate": flag}
        return some(random, scopes | {"artifactDelta": an_object, "transfer_to_agent": text})

    fields: dict[str, Callable[[], Any]] = {"author": text, "invocation_id": text}
    fields |= {"content": content, "actions": actions, "customMetadata": an_object}
    fields |= {"partial": flag, "turnComplete": flag, "error_code": text, "branch": text}
    fields |= {"longRunningToolIds": lambda: [text(), text()], "unknown": anything}
    fields |= {"finish_reason": lambda: random.choice(["STOP", "OTHER", "stop", "NEW"])}
    # An id or a time that is made up would differ from one call to the next.
    return {"author": "user", "id": "e", "timestamp": random.random(), **some(random, fields)}


def public(texts: list[bytes]) -> list[Event]:
    return [*map(Event.model_validate_json, texts)]


def outcome(parse: Parser, data: bytes) -> Any:
    try:
        return parse([data])[0]
    except AttributeError:  # of an enumeration of google-genai, for a value that is not a text
        return repr(ValueError())
    except Exception as error:
        return repr(error)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of values that are of no enumeration
def test_random_events_are_parsed_or_rejected_as_by_the_public_call() -> None:
    random = Random(1)
    parser = create_parser()
    read = Counter[bool]()
    for _ in range(3000):
        data = json.dumps(random_event(random)).encode()
        expected = outcome(public, data)
        assert same(outcome(parser, data), expected), data
        read[isinstance(expected, Event)] += 1
    assert parser is not parse_publicly
    assert min(read.values()) > 300, "one of the two is hardly tried"


@pytest.mark.parametrize(
    "extra",
    [
        {"error_code": None},
        {"content": {"parts": [{"text": None}]}},
        {"message": "hello"},
        {"state": {"k": 1}},
        {"route": "r"},
        {"node_path": "n"},
        {"nodePath": "n"},
        {"content": {"parts": [{"text": "[null]"}]}},
    ],
    ids=str,
)
def test_unusual_field_is_left_to_the_public_call(
    extra: dict[str, Any], public_calls: list[bytes]
) -> None:
    parser = create_parser()
    data = json.dumps(json.loads(PLAIN) | extra).encode()
    del public_calls[:]
    result = outcome(parser, data)
    assert public_calls == [data]
    assert same(result, outcome(public, data))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b'{"author": 1}',
        b'{"author": "a", "timestamp": "soon"}',
        b'{"author": "a", "content": {"parts": [{"function_call": 1}]}}',
        b'{"author": "a", "content": {"parts": [{"text": "a", "unknown": 1}]}}',
        b'{"author": "a", "unknown_to_everybody": 1}',
        b'{"author": "\xff"}',
    ],
)
def test_error_is_that_of_the_public_call(data: bytes) -> None:
    expected = outcome(public, data)
    result = outcome(create_parser(), data)
    assert type(result) is type(expected)
    assert not isinstance(expected, str) or result == expected


# --- other versions of pydantic and ADK ----------------------------------------------------------


def test_installed_versions_have_a_serializer_that_logs_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    serializer = event_parser.event_serializer(create_parser())
    assert serializer is not None
    event = Event(author="a", actions=EventActions(state_delta={"k": print}))
    with pytest.raises(ValueError, match="Unable to serialize"):
        serializer.to_json(event)
    assert not caplog.records


@pytest.mark.parametrize("difference", ["options", "error"])
def test_serializer_that_differs_from_google_adks_is_not_used(
    difference: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def other(schema: Any, options: Any, **more: Any) -> SchemaSerializer:
        if difference == "error":
            raise TypeError
        return SchemaSerializer(schema, options | {"ser_json_bytes": "hex"}, **more)

    monkeypatch.setattr(event_parser, "SchemaSerializer", other)
    assert event_parser.event_serializer(create_parser()) is None
    assert "their serializer does not fit" in caplog.text


def is_slow(parser: Parser) -> bool:
    return parser is parse_publicly and parser([PLAIN]) == public([PLAIN])


def test_pydantic_without_the_flag_gets_the_public_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def validator(schema: Any) -> None:
        raise AssertionError("it is called with the flag")

    monkeypatch.setattr(event_parser, "SchemaValidator", validator)
    assert is_slow(create_parser())


def test_unknown_type_of_schema_gets_the_public_call_and_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Event, "__pydantic_core_schema__", {"type": "model-of-later"})
    assert is_slow(create_parser())
    assert "three times as slowly" in caplog.text


def models(schema: Any) -> Iterator[dict[str, Any]]:
    """The schema of each model in *schema*."""
    if isinstance(schema, dict) and schema.get("type") == "model":
        yield schema
    if isinstance(schema, dict | list | tuple):
        for value in schema.values() if isinstance(schema, dict) else schema:
            yield from models(value)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (types.Part, "thought"),
        (types.Blob, "data"),
        (types.VideoMetadata, "fps"),
        (types.ExecutableCode, "language"),
        (types.FunctionResponse, "name"),
        (types.GenerateContentResponseUsageMetadata, "total_token_count"),
    ],
)
def test_field_that_is_parsed_differently_gets_the_public_call(
    monkeypatch: pytest.MonkeyPatch, model: type, name: str
) -> None:
    def validator(schema: Any, **options: Any) -> Any:
        found = [one for one in models(schema) if one["cls"] is model]
        assert found
        for one in found:
            field = one["schema"]["fields"][name]["schema"]
            while "schema" in field:
                field = field["schema"]
            other = {"type": "function-plain", "function": {"type": "no-info", "function": repr}}
            field |= other
        return SchemaValidator(schema, **options)

    monkeypatch.setattr(event_parser, "SchemaValidator", validator)
    assert is_slow(create_parser())


def fields_in(
    schema: Any, value: Any, definitions: dict[str, Any], model: type | None = None
) -> Iterator[tuple[type, str]]:
    """Yield the fields of models that *value*, JSON of *schema*, holds: the model and the name."""
    match schema["type"]:
        case "definitions":
            for one in schema["definitions"]:
                definitions[one["ref"]] = one
            yield from fields_in(schema["schema"], value, definitions)
        case "definition-ref":
            yield from fields_in(definitions[schema["schema_ref"]], value, definitions)
        case "model":
            yield from fields_in(schema["schema"], value, definitions, schema["cls"])
        case "model-fields":
            for name in value if isinstance(value, dict) else ():
                if field := schema["fields"].get(name):
                    assert model is not None
                    yield model, name
                    yield from fields_in(field["schema"], value[name], definitions)
        case "list" | "set" | "dict":
            of_item = schema.get("items_schema") or schema.get("values_schema")
            items = value.values() if isinstance(value, dict) else value
            for item in items if of_item and isinstance(value, dict | list) else ():
                yield from fields_in(of_item, item, definitions)
        case "union":
            for choice in schema["choices"]:
                yield from fields_in(choice, value, definitions)
        case _ if "schema" in schema:
            yield from fields_in(schema["schema"], value, definitions, model)


def test_samples_of_the_comparison_hold_every_field_of_every_model() -> None:
    schema = Event.__pydantic_core_schema__
    every = set()
    for one in models(schema):
        inner = one["schema"]
        while "fields" not in inner:
            inner = inner["schema"]
        every |= {(one["cls"], name) for name in inner["fields"]}
    held = {
        field for sample in event_parser._samples(schema) for field in fields_in(schema, sample, {})
    }
    assert held == every
    assert len(every) > 200


def test_hooks_that_are_left_out_exist_in_the_installed_versions() -> None:
    """With other names they would stay, and parsing would take longer."""

    def hooks(schema: Any) -> Iterator[tuple[str, str]]:
        if isinstance(schema, dict):
            if schema.get("type") == "function-before":
                hook = schema["function"]["function"]
                yield hook.__module__, hook.__qualname__
            for value in schema.values():
                yield from hooks(value)
        elif isinstance(schema, list | tuple):
            for value in schema:
                yield from hooks(value)

    names = event_parser._IDLE_HOOKS
    if not hasattr(Event, "_accept_convenience_kwargs"):  # google-adk 1.x
        names = {name for name in names if name[0] != Event.__module__}
    assert set(hooks(Event.__pydantic_core_schema__)) >= names
    assert names


def test_events_are_the_same_only_if_all_their_types_and_set_fields_are() -> None:
    class Open(pydantic.BaseModel, extra="allow"):
        value: int | None = None
        _private: int = 1

    def made(**values: Any) -> Open:
        return Open.model_validate(values)

    assert same(made(value=1), made(value=1))
    assert not same(made(value=1), made(value=2))
    assert not same(made(), made(value=None)), "a field that was set"
    assert same(made(more=1), made(more=1))
    assert not same(made(more=1), made(more=True))
    assert not same(made(more=[1, 2]), made(more=[1, 2.0]))
    changed = made()
    changed._private = True
    assert not same(made(), changed)
    assert not same({"a": 1, "b": 2}, {"b": 2, "a": 1}), "the order of keys"
    assert not same([1], [1, 1])


def test_parser_that_accepts_anything_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class Careless:
        def __init__(self, *arguments: Any, **options: Any) -> None:
            self._validator = SchemaValidator(*arguments, **options)

        def validate_json(self, data: bytes) -> list[Event]:
            try:
                return self._validator.validate_json(data)  # type: ignore[no-any-return]
            except ValueError:
                return [Event(author="anybody")]

    monkeypatch.setattr(event_parser, "SchemaValidator", Careless)
    assert is_slow(create_parser())


def test_parser_is_not_used_if_hardly_any_sample_is_accepted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As if events needed something that no sample has."""
    refusing = SchemaValidator({"type": "is-instance", "cls": Event})
    monkeypatch.setattr(event_parser, "SchemaValidator", lambda *_, **__: refusing)
    original = Event.model_validate_json
    monkeypatch.setattr(Event, "model_validate_json", refusing.validate_json)
    parser = create_parser()
    monkeypatch.setattr(Event, "model_validate_json", original)
    assert is_slow(parser)


def test_hook_of_an_unknown_name_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def unknown(value: Any) -> Any:
        seen.append(value)
        return value

    schema = deepcopy(Event.__pydantic_core_schema__)
    for model in models(schema):
        if model["cls"] is types.Content:
            function = {"type": "no-info", "function": unknown}
            inner = model["schema"]
            model["schema"] = {"type": "function-before", "function": function, "schema": inner}
    monkeypatch.setattr(Event, "__pydantic_core_schema__", schema)
    parser = create_parser()
    del seen[:]
    parser([b'{"author":"a","content":{"role":"model"}}'])
    assert parser is not parse_publicly
    assert seen == [{"role": "model"}]
