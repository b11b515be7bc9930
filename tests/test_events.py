"""Events as storage holds them."""

import json
import math
from typing import Any

import pytest
from google.adk.events import Event, EventActions
from google.adk.version import __version__ as adk_version
from google.genai import types

from adk_secure_sessions import ConfigurationError
from adk_secure_sessions.formats import events

ROW = "secure_events row 1, 0"


def made(text: str | None = None, **fields: Any) -> Event:
    if text is not None:
        fields["content"] = types.Content(role="model", parts=[types.Part(text=text)])
    return Event(author="agent", invocation_id="inv", **fields)


def parsed(plaintext: bytes) -> tuple[str, Any]:
    end = 1 + plaintext[0]
    return plaintext[1:end].decode("ascii"), json.loads(plaintext[end:])


def roundtrip(event: Event) -> Event:
    return events.decode(events.encode(event), 1, 0)


def test_plaintext_is_version_and_json() -> None:
    version, fields = parsed(events.encode(made("Grüße 🌱")))
    assert version == adk_version
    assert fields["content"]["parts"] == [{"text": "Grüße 🌱"}]


def test_fields_that_are_none_are_not_stored() -> None:
    _, fields = parsed(events.encode(made("text")))
    assert "error_code" not in fields
    assert None not in fields.values()


EVENTS = {
    "text": made("Grüße, 世界 🌱\x00"),
    "nothing": made(),
    "bytes": made(
        content=types.Content(
            parts=[types.Part(inline_data=types.Blob(mime_type="a/b", data=bytes(range(256))))]
        )
    ),
    "thought": made(
        content=types.Content(
            parts=[types.Part(text="hm", thought=True, thought_signature=b"\xff\x00")]
        )
    ),
    "long-running tools": made(long_running_tool_ids={"one", "two"}),
    "state": made(actions=EventActions(state_delta={"a": None, "user:b": [1, {"c": 2.5}]})),
    "metadata": made(custom_metadata={"a": [1, None, {"b": "c"}]}),
    "timestamp": made("text", timestamp=1_700_000_000.123456789),
    "largest text": made("x" * 1_000_000),
}


@pytest.mark.parametrize("event", EVENTS.values(), ids=EVENTS)
def test_event_survives_storage(event: Event) -> None:
    assert roundtrip(event) == event


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_number_without_a_json_form_survives_storage(number: float) -> None:
    stored = roundtrip(made(actions=EventActions(state_delta={"a": number})))
    loaded = stored.actions.state_delta["a"]
    assert loaded == number or (math.isnan(loaded) and math.isnan(number))


def test_null_beside_such_a_number_stays_null() -> None:
    delta = {"a": math.inf, "b": None}
    assert roundtrip(made(actions=EventActions(state_delta=delta))).actions.state_delta == delta


def test_lone_surrogate_survives_storage() -> None:
    stored = roundtrip(made("a \ud83c z"))
    assert stored.content is not None
    assert stored.content.parts is not None
    assert stored.content.parts[0].text == "a \ud83c z"


def test_value_without_a_json_form_becomes_text() -> None:
    value = object()
    stored = roundtrip(made("text", custom_metadata={"a": value, "b": 1}))
    assert stored.custom_metadata is not None
    assert stored.custom_metadata["b"] == 1
    assert isinstance(stored.custom_metadata["a"], str)


@pytest.mark.parametrize("data", [b"\xff\x00", b"hello", b"abcd"])
def test_bytes_beside_such_a_value_survive_storage(data: bytes) -> None:
    blob = types.Part(inline_data=types.Blob(mime_type="a/b", data=data))
    event = made(content=types.Content(parts=[blob]), custom_metadata={"a": object()})
    assert roundtrip(event).content == event.content


UNREADABLE = {
    "unknown field": b'{"author":"secret 7Qx","actions":{"of_a_later_release":"secret 7Qx"}}',
    "wrong type": b'{"author":{"secret 7Qx":1}}',
    "not an object": b'["secret 7Qx"]',
    "no JSON": b"secret 7Qx",
}


@pytest.mark.parametrize("data", UNREADABLE.values(), ids=UNREADABLE)
def test_unreadable_event_names_both_versions(data: bytes) -> None:
    with pytest.raises(ConfigurationError) as info:
        events.decode(b"\x0599.99" + data, 1, 0)
    assert ROW in str(info.value)
    assert "99.99" in str(info.value)
    assert adk_version in str(info.value)


@pytest.mark.parametrize("data", UNREADABLE.values(), ids=UNREADABLE)
def test_error_about_an_event_does_not_repeat_it(data: bytes) -> None:
    with pytest.raises(ConfigurationError) as info:
        events.decode(b"\x0599.99" + data, 1, 0)
    assert "7Qx" not in str(info.value)
    assert info.value.__context__ is None
    assert info.value.__cause__ is None
