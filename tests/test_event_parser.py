"""The faster way to read events gives what the public one gives, or is not taken."""

import json
import logging
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from google.adk.events import Event

from adk_secure_sessions.formats import event_parser
from adk_secure_sessions.formats.event_parser import EventParser, same
from adk_secure_sessions.formats.events import encode
from tests.conformance.samples import CORPUS, of_every_field

# ADK's AuthConfig calls a deprecated method of its own.
pytestmark = pytest.mark.filterwarnings("ignore:This method is deprecated:DeprecationWarning")

PLAIN = b'{"author":"user","id":"e","invocation_id":"i","timestamp":1.5}'


@pytest.fixture
def public_calls(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What was given to the public call since."""
    calls: list[bytes] = []
    original = Event.model_validate_json

    def recorded(data: bytes, **options: Any) -> Event:
        calls.append(data)
        return original(data, **options)

    monkeypatch.setattr(Event, "model_validate_json", recorded)
    return calls


def json_of(event: Event) -> bytes:
    """As it is stored, but for the version before it."""
    stored = encode(event)
    return stored[1 + stored[0] :]


def only_fast(monkeypatch: pytest.MonkeyPatch) -> EventParser:
    """A parser that no longer compares its results with the public call's."""
    parser = EventParser()
    monkeypatch.setattr(event_parser, "_CHECKED", 0)
    next(parser._numbers)
    return parser


def test_installed_adk_has_the_faster_way() -> None:
    assert EventParser().is_fast


def test_samples_are_read_as_the_public_call_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = only_fast(monkeypatch)
    samples = {name: make() for name, make in CORPUS.items()} | dict(of_every_field())
    stored = {name: json_of(sample) for name, sample in samples.items()}
    differing = [
        name
        for name, data in stored.items()
        if not same(parser(data), Event.model_validate_json(data))
    ]
    assert differing == []
    assert parser.is_fast


def test_most_samples_are_read_without_the_public_call(
    public_calls: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    parser = only_fast(monkeypatch)
    for make in CORPUS.values():
        parser(json_of(make()))
    assert len(public_calls) < len(CORPUS) / 4 + 8  # the samples are fond of nulls


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


def outcome(parse: Callable[[bytes], Event], data: bytes) -> Any:
    try:
        return parse(data)
    except Exception as error:
        return repr(error)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of values that are of no enumeration
def test_random_events_are_read_or_refused_as_by_the_public_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    random = Random(1)
    parser = only_fast(monkeypatch)
    read = Counter[bool]()
    for _ in range(3000):
        data = json.dumps(random_event(random)).encode()
        expected = outcome(Event.model_validate_json, data)
        assert same(outcome(parser, data), expected), data
        read[isinstance(expected, Event)] += 1
    assert parser.is_fast
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
        {"content": {"parts": [{"text": "null"}]}},
    ],
    ids=str,
)
def test_unusual_word_takes_the_public_call(
    extra: dict[str, Any], public_calls: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    parser = only_fast(monkeypatch)
    data = json.dumps(json.loads(PLAIN) | extra).encode()
    del public_calls[:]
    result = outcome(parser, data)
    assert public_calls == [data]
    assert same(result, outcome(Event.model_validate_json, data))


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
def test_error_is_the_public_call_s(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = outcome(Event.model_validate_json, data)
    result = outcome(only_fast(monkeypatch), data)
    assert type(result) is type(expected)
    assert not isinstance(expected, str) or result == expected


def slow(parser: EventParser) -> bool:
    return not parser.is_fast and parser(PLAIN) == Event.model_validate_json(PLAIN)


def test_pydantic_that_does_not_know_the_flag_leaves_the_public_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def validator(schema: Any) -> None:
        raise AssertionError("it is called with the flag")

    monkeypatch.setattr(event_parser, "SchemaValidator", validator)
    assert slow(EventParser())


def test_sample_that_is_read_differently_leaves_the_public_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = event_parser._stripped

    def without_defaults(schema: Any) -> Any:
        """As if a hook that does something had been taken for idle."""
        stripped = original(schema)
        if isinstance(stripped, dict) and stripped.get("type") == "str":
            stripped["to_upper"] = True
        return stripped

    monkeypatch.setattr(event_parser, "_stripped", without_defaults)
    assert slow(EventParser())


def test_schema_that_takes_anything_leaves_the_public_call(monkeypatch: pytest.MonkeyPatch) -> None:
    original = event_parser._without_hooks.__globals__["SchemaValidator"]

    class Careless:
        def __init__(self, *arguments: Any, **options: Any) -> None:
            self._validator = original(*arguments, **options)

        def validate_json(self, data: bytes) -> Event:
            try:
                return self._validator.validate_json(data)  # type: ignore[no-any-return]
            except ValueError:
                return Event(author="anybody")

    monkeypatch.setattr(event_parser, "SchemaValidator", Careless)
    assert slow(EventParser())


def test_hook_of_an_unknown_name_is_kept() -> None:
    def unknown(value: Any) -> Any:
        return value

    def idle(value: Any) -> Any:
        return value

    idle.__module__, idle.__qualname__ = next(iter(event_parser._IDLE_HOOKS))
    schema = {"type": "str"}
    for hook in (unknown, idle, unknown):
        function = {"type": "no-info", "function": hook}
        schema = {"type": "function-before", "function": function, "schema": schema}  # type: ignore[dict-item]
    stripped = event_parser._stripped(schema)
    kept = []
    while stripped["type"] != "str":
        kept.append(stripped["function"]["function"])
        stripped = stripped["schema"]
    assert kept == [unknown, unknown]


def test_result_that_differs_later_is_replaced_and_ends_the_faster_way(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    parser = EventParser()
    fast = parser._fast
    assert fast is not None
    parser._fast = lambda data: fast(data).model_copy(update={"author": "somebody"})
    with caplog.at_level(logging.WARNING):
        assert parser(PLAIN) == Event.model_validate_json(PLAIN)
    assert "slower way" in caplog.text
    assert "somebody" not in caplog.text
    assert slow(parser)


def test_result_is_checked_now_and_then_for_ever(
    public_calls: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_parser, "_CHECKED", 4)
    monkeypatch.setattr(event_parser, "_CHECK_EVERY", 10)
    parser = EventParser()
    del public_calls[:]
    for _ in range(35):
        parser(PLAIN)
    assert len(public_calls) == 4 + 3
