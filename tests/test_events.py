"""Events as storage holds them."""

import inspect
import json
import math
import sys
import warnings
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import pydantic
import pytest
from google.adk.events import Event, EventActions
from google.adk.tools.tool_confirmation import ToolConfirmation
from google.adk.version import __version__ as adk_version
from google.genai import types

from adk_secure_sessions import ConfigurationError, DecryptionError, Reason
from adk_secure_sessions.formats import events, json_text

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


def test_lone_surrogate_in_a_key_survives_storage() -> None:
    values = {"\ud800": {"\udfff": 1}, "k": "\ufffd"}
    event = made("\ufffd", actions=EventActions(state_delta=values), custom_metadata=values)
    assert roundtrip(event) == event


@pytest.mark.parametrize("place", ["custom_metadata", "state_delta"])
def test_lone_surrogate_in_no_more_than_a_key_survives_storage(place: str) -> None:
    """`to_json` of a model does not raise for it, but writes U+FFFD."""
    values = {"\ud800": 1}
    event = made("text", custom_metadata=values)
    if place == "state_delta":
        event = made("text", actions=EventActions(state_delta=values))
    assert roundtrip(event) == event


class Inner(pydantic.BaseModel):
    """A model in a state, with a field that is None."""

    empty: int | None = None
    full: int = 1


def test_none_in_a_model_beside_a_value_without_json_form_is_kept() -> None:
    delta = {"m": [Inner()], "bad": print}
    event = made(actions=EventActions(state_delta=delta, agent_state=delta), custom_metadata=delta)
    _, fields = parsed(events.encode(event))
    kept = {"m": [{"empty": None, "full": 1}], "bad": str(print)}
    dropped = {"m": [{"full": 1}], "bad": str(print)}
    assert fields["actions"]["state_delta"] == kept
    assert fields["actions"]["agent_state"] == kept
    assert fields["custom_metadata"] == dropped
    assert "error_code" not in fields


def test_none_in_a_model_of_a_state_that_has_a_json_form_is_dropped() -> None:
    """Even if other values have none."""
    actions = EventActions(state_delta={"m": Inner()}, agent_state={"m": Inner()})
    _, fields = parsed(events.encode(made(actions=actions, custom_metadata={"bad": print})))
    assert fields["actions"]["state_delta"] == {"m": {"full": 1}}
    assert fields["actions"]["agent_state"] == {"m": {"full": 1}}


class Faulty(Inner):
    """A model whose serializer fails."""

    @pydantic.model_serializer
    def fail(self) -> Any:
        raise RuntimeError("secret 7Qx")


def test_model_whose_serializer_fails_is_stored_without_other_none_fields() -> None:
    response = types.FunctionResponse(name="f", response={"bad": Faulty(), "good": Inner()})
    parts = [types.Part(text="plain"), types.Part(function_response=response)]
    event = made(
        content=types.Content(role="user", parts=parts),
        custom_metadata={"bad": Faulty(), "text": "kept"},
        actions=EventActions(requested_tool_confirmations={"call": ToolConfirmation(hint="h")}),
    )
    _, fields = parsed(events.encode(event))
    assert fields["content"] == {
        "role": "user",
        "parts": [
            {"text": "plain"},
            {
                "function_response": {
                    "name": "f",
                    "response": {"bad": {"full": 1}, "good": {"full": 1}},
                }
            },
        ],
    }
    assert fields["custom_metadata"] == {"bad": {"full": 1}, "text": "kept"}
    confirmation = fields["actions"]["requested_tool_confirmations"]["call"]
    assert confirmation == ToolConfirmation(hint="h").model_dump(exclude_none=True)
    assert "error_code" not in fields


@pytest.fixture
def no_slow_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values are not converted one by one, which takes several times as long."""

    def fail(*_: Any, **__: Any) -> Any:
        raise AssertionError("the slow way")

    monkeypatch.setattr(json_text, "to_values", fail)
    monkeypatch.setattr(json_text, "read_event", fail)


NULLS = made(
    "null \ufffd", actions=EventActions(state_delta={"a": None, "b": b"\xff\x00", "c": math.inf})
)


@pytest.mark.usefixtures("no_slow_way")
@pytest.mark.parametrize("event", [*EVENTS.values(), NULLS], ids=[*EVENTS, "nulls"])
def test_ordinary_event_is_encoded_and_decoded_fast(event: Event) -> None:
    assert roundtrip(event).content == event.content


@pytest.mark.usefixtures("no_slow_way")
@pytest.mark.parametrize("text", ["text", "null", "\ufb01"])  # its UTF-8 begins as that of U+FFFD
def test_event_without_null_and_u_fffd_is_serialized_once(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise AssertionError("the fields are serialized again")

    monkeypatch.setattr(events, "to_json", fail)
    assert parsed(events.encode(made(text)))


@pytest.mark.usefixtures("no_slow_way")
@pytest.mark.parametrize("version", ["1.2.3", f"{adk_version}.post10"])
def test_event_of_another_adk_version_is_decoded_fast(version: str) -> None:
    event = made("text")
    _, fields = parsed(events.encode(event))
    plaintext = bytes([len(version)]) + version.encode() + json.dumps(fields).encode()
    assert events.decode(plaintext, 1, 0) == event


def test_fields_that_are_none_are_not_stored_beside_a_null() -> None:
    _, fields = parsed(events.encode(NULLS))
    assert "error_code" not in fields
    assert "escalate" not in fields["actions"]
    assert fields["actions"]["state_delta"] == {"a": None, "b": "_wA=", "c": math.inf}


def test_models_in_a_dict_beside_a_circular_value_lose_their_none_fields() -> None:
    confirmation = ToolConfirmation(hint="h")
    event = made(
        actions=EventActions(
            state_delta={"a": circular}, requested_tool_confirmations={"call": confirmation}
        )
    )
    _, fields = parsed(events.encode(event))
    stored = fields["actions"]["requested_tool_confirmations"]
    assert stored == {"call": confirmation.model_dump(exclude_none=True)}
    assert "payload" not in stored["call"]
    assert "escalate" not in fields["actions"]


def test_field_of_an_undeclared_type_is_named_without_a_warning_that_repeats_it() -> None:
    event = made(error_code="code")
    event.error_code = {"secret 7Qx": 1}  # type: ignore[assignment]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(ValueError, match=r"rejects the values of error_code$"):
            events.encode(event)
    assert not caught


def test_state_delta_may_be_a_mapping_that_is_no_dict() -> None:
    event = made()
    event.actions.state_delta = MappingProxyType({"a": {"b": 1}})  # type: ignore[assignment]
    assert parsed(events.encode(event))[1]["actions"]["state_delta"] == {"a": {"b": 1}}


@pytest.mark.parametrize("name", ["state_delta", "agent_state"])
@pytest.mark.parametrize("mapping", [dict, MappingProxyType])
def test_models_beside_a_value_without_json_keep_their_none_fields(
    name: str, mapping: Callable[[Any], Any]
) -> None:
    event = made()
    setattr(event.actions, name, mapping({"a": len, "b": ToolConfirmation(hint="h")}))
    stored = parsed(events.encode(event))[1]["actions"][name]["b"]
    assert stored == ToolConfirmation(hint="h").model_dump()


def test_models_deep_in_a_state_with_a_lone_surrogate_lose_their_none_fields() -> None:
    confirmation = ToolConfirmation(hint="h")
    event = made(actions=EventActions(state_delta={"a": "\ud800", "b": {"c": confirmation}}))
    stored = parsed(events.encode(event))[1]["actions"]["state_delta"]["b"]
    assert stored == {"c": confirmation.model_dump(exclude_none=True)}


@pytest.mark.parametrize("event", [*EVENTS.values(), NULLS], ids=[*EVENTS, "nulls"])
def test_event_is_stored_as_well_without_the_serializer_of_events(
    event: Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a later google-adk or pydantic, for which the serializer does not work."""
    expected = parsed(events.encode(event))[1]
    monkeypatch.setattr(events, "_serializer", lambda: None)
    found = parsed(events.encode(event))[1]
    for fields in (expected, found):
        fields.get("long_running_tool_ids", []).sort()  # a set
    assert found == expected


def test_wrong_type_of_an_enumeration_is_rejected() -> None:
    event = made()
    event.finish_reason = 5  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r": it rejects the value of an enumeration$"):
        events.encode(event)


def test_value_without_json_form_is_logged_once_without_the_serializer_of_events(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The serializer of `EventActions` would log an error of its own."""
    monkeypatch.setattr(events, "_serializer", lambda: None)
    events.encode(made(actions=EventActions(state_delta={"a": print, "b": Faulty()})))
    assert [one.name for one in caplog.records] == [events.__name__]


# --- preparing -----------------------------------------------------------------------------------


def test_temporary_keys_move_from_the_event_to_the_state() -> None:
    event = made(actions=EventActions(state_delta={"temp:a": 1, "b": 2, "user:c": 3}))
    state = {"old": 0}
    events.set_id_and_move_temp(event, state)
    assert state == {"old": 0, "temp:a": 1}
    assert event.actions.state_delta == {"b": 2, "user:c": 3}


def test_event_without_temporary_keys_is_left_alone() -> None:
    event = made(id="given", actions=EventActions(state_delta={"b": 2}))
    delta, state = event.actions.state_delta, dict[str, Any]()
    events.set_id_and_move_temp(event, state)
    assert event.actions.state_delta is delta
    assert (delta, state, event.id) == ({"b": 2}, {}, "given")


def test_event_without_an_id_gets_one() -> None:
    event = made()
    event.id = ""
    events.set_id_and_move_temp(event, {})
    assert event.id
    assert roundtrip(event).id == event.id


# --- limits --------------------------------------------------------------------------------------


def nested(levels: int, bottom: Any = 1) -> Any:
    for level in range(levels):
        bottom = {"k": bottom} if level % 2 else [bottom]
    return bottom


def from_tool(result: Any) -> Event:
    part = types.Part.from_function_response(name="tool", response={"result": result})
    return made(content=types.Content(role="user", parts=[part, types.Part(text="beside")]))


def result_of(event: Event) -> Any:
    assert event.content is not None
    assert event.content.parts is not None
    assert event.content.parts[1].text == "beside"
    response = event.content.parts[0].function_response
    assert response is not None
    assert response.response is not None
    return response.response["result"]


LARGEST = {"levels": nested(193), "digits": [10**4300 - 1, -(10**4300) + 1]}
circular: list[Any] = ["secret 7Qx"]
circular.append(circular)


@pytest.mark.parametrize("bottom", ["text", None, math.inf, "\ud800"])
@pytest.mark.parametrize("value", LARGEST.values(), ids=LARGEST)
def test_largest_value_survives_storage(
    value: Any, bottom: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert result_of(roundtrip(from_tool([value, bottom]))) == [value, bottom]
    assert not caplog.records


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (math.factorial(2000), "33162750924506332411"),
        (-(10**4300), "-1000"),
        (2**1_100_000, "0x1000"),
        (circular, "['secret 7Qx', "),
    ],
    ids=["factorial", "negative", "millions of digits", "circular"],
)
def test_value_beyond_a_limit_becomes_text_with_a_warning_that_does_not_repeat_it(
    value: Any, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    stored = roundtrip(from_tool({"bad": value, "good": 1}))
    assert result_of(stored)["good"] == 1
    bad = result_of(stored)["bad"]
    while isinstance(bad, list):
        bad = bad[-1]
    assert bad.startswith(text)
    assert "their text is stored" in caplog.text
    assert "7Qx" not in caplog.text
    assert "33162750924506332411" not in caplog.text


@pytest.mark.parametrize("levels", [195, 300, 50_000])
def test_value_that_nests_too_deep_becomes_text_at_the_limit(levels: int) -> None:
    result = result_of(roundtrip(from_tool(nested(levels, "bottom"))))
    depth = 0
    while not isinstance(result, str):
        result = result[0] if isinstance(result, list) else result["k"]
        depth += 1
    assert depth == 194
    assert ("bottom" in result) == (levels < 1000)


def test_event_that_adk_could_not_read_back_is_not_stored() -> None:
    event = made("secret 7Qx")
    event.actions.artifact_delta["secret 7Qx"] = "secret 7Qx"  # type: ignore[assignment]
    with pytest.raises(ValueError, match="values of actions") as info:
        events.encode(event)
    assert "7Qx" not in str(info.value)


def test_event_that_no_record_can_hold_is_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_text, "MAX_BYTES", 10_000)
    assert roundtrip(made("x" * 9_000))
    for text in ("x" * 10_000, "null" * 2500, "\ud800" * 2000):
        with pytest.raises(ValueError, match="too large"):
            events.encode(made(text))


def test_event_of_a_subclass_is_stored_as_an_event() -> None:
    class Special(Event):
        special: str = "secret 7Qx"

    for metadata in (None, {"a": object()}):
        plaintext = events.encode(Special(author="agent", custom_metadata=metadata))
        assert b"7Qx" not in plaintext
        assert type(events.decode(plaintext, 1, 0)) is Event


def at_depth(frames: int, call: Callable[[], Any]) -> Any:
    return at_depth(frames - 1, call) if frames else call()


@pytest.mark.parametrize(
    "value",
    [*LARGEST.values(), ["\ud800", nested(193)]],
    ids=[*LARGEST, "levels with lone surrogates"],
)
def test_writing_and_reading_do_not_depend_on_the_depth_of_the_stack(value: Any) -> None:
    event = from_tool(value)
    frames = sys.getrecursionlimit() - len(inspect.stack(0)) - 60
    plaintext = at_depth(frames, lambda: events.encode(event))
    assert plaintext == events.encode(event)
    assert at_depth(frames, lambda: events.decode(plaintext, 1, 0)) == event


# --- unreadable ----------------------------------------------------------------------------------

UNREADABLE = {
    "unknown field": b'{"author":"secret 7Qx","actions":{"of_a_later_release":"secret 7Qx"}}',
    "wrong type": b'{"author":{"secret 7Qx":1}}',
}


@pytest.mark.parametrize("data", UNREADABLE.values(), ids=UNREADABLE)
def test_unreadable_event_names_both_versions(data: bytes) -> None:
    with pytest.raises(ConfigurationError) as info:
        events.decode_all([events.encode(made("text")), b"\x0599.99" + data], 1, [7, 0])
    assert ROW in str(info.value)
    assert "99.99" in str(info.value)
    assert adk_version in str(info.value)
    assert "7Qx" not in str(info.value)


EVENT = b'{"author":"secret 7Qx"}'
MALFORMED = {
    "empty": b"",
    "version only": b"\x051.2.3",
    "version cut off": b"\x051.2",
    "no version": EVENT,
    "version too short": b"\x041.2.3" + EVENT,
    "version too long": b"\xff1.2.3" + EVENT,
    "version not ASCII": b"\x051.2.\xff" + EVENT,
    "no JSON": b"\x051.2.3secret 7Qx",
    "cut off": b"\x051.2.3" + EVENT[:-1],
    "a list": b'\x051.2.3["secret 7Qx"]',
    "null": b"\x051.2.3null",
    "two events": b"\x051.2.3" + EVENT + b"," + EVENT,
    "not UTF-8": b'\x051.2.3{"author":"secret 7Qx \xff"}',
    "UTF-16": b"\x051.2.3" + EVENT.decode().encode("utf-16"),
    "byte order mark": b"\x051.2.3\xef\xbb\xbf" + EVENT,
    "too deep": b'\x051.2.3{"custom_metadata":{"a":' + b"[" * 199 + b"1" + b"]" * 199 + b"}}",
    "too deep and empty": b'\x051.2.3{"author":"a","custom_metadata":{"a":'
    + b"[" * 199
    + b"]" * 199
    + b"}}",
    "much too deep": b'\x051.2.3{"custom_metadata":{"a":' + b"[" * 100_000,
    "too many digits": b'\x051.2.3{"custom_metadata":{"a":' + b"7" * 4301 + b"}}",
}


@pytest.mark.parametrize("plaintext", MALFORMED.values(), ids=MALFORMED)
def test_malformed_event_is_rejected_without_repeating_it(plaintext: bytes) -> None:
    ours = plaintext.replace(b"\x051.2.3", events._PREFIX)
    with pytest.raises(DecryptionError, match=ROW) as info:
        events.decode_all([ours, events._PREFIX + EVENT], 1, [0, 7])
    assert info.value.reason is Reason.MALFORMED
    assert (info.value.table, info.value.row) == ("secure_events", "1, 0")
    assert "7Qx" not in str(info.value)


def test_event_outside_of_secure_events_names_its_table_and_row() -> None:
    plaintext = events.encode(made("text"))
    assert events.decode(plaintext, "7", table="table") == events.decode(plaintext, 1, 0)
    with pytest.raises(DecryptionError, match=r"^table row 7: ") as info:
        events.decode(b"", "7", table="table")
    assert (info.value.table, info.value.row) == ("table", "7")
    with pytest.raises(ConfigurationError, match=r"^table row 7 was written by google-adk 99\.99"):
        events.decode(b"\x0599.99" + UNREADABLE["wrong type"], "7", table="table")


def _nested(levels: int, value: Any = 1) -> Any:
    for _ in range(levels):
        value = [value]
    return value


ITEMS: dict[str, Any] = {
    "text": "Grüße 🌱\x00",
    "lone surrogate": "\ud800",
    "numbers": [0, -1, 2**200, 0.1, math.inf, 10**4299],
    "null": None,
    "deepest": _nested(199),
    "deepest and empty": _nested(198, []),
}


@pytest.mark.parametrize("value", ITEMS.values(), ids=ITEMS)
def test_item_of_a_collection_is_read_back(value: Any) -> None:
    assert json_text.read_event(events.encode_item({"value": value}))[1] == {"value": value}


@pytest.mark.usefixtures("no_slow_way")
@pytest.mark.parametrize("name", ["text", "null", "deepest"])
def test_ordinary_item_is_encoded_fast(name: str) -> None:
    assert events.encode_item({"value": ITEMS[name]}).startswith(bytes([len(adk_version)]))


UNREADABLE_ITEMS: dict[str, tuple[Any, str]] = {
    "too deep": (_nested(200), r"^item\['value'\]\[0\].*depth"),
    "too deep and empty": (_nested(199, {}), r"^item\['value'\]\[0\].*depth"),
    "deeper than the stack": (_nested(50_000), r"^item\['value'\]\[0\].*depth"),
    "too many digits": (10**4300, r"^item\['value'\]: an integer"),
    "no JSON": (object(), "^item holds a value"),
}


@pytest.mark.parametrize(("value", "text"), UNREADABLE_ITEMS.values(), ids=UNREADABLE_ITEMS)
def test_item_that_could_not_be_read_back_is_not_encoded(value: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        events.encode_item({"value": value})


# --- JSON that google-adk has written -----------------------------------------------------------


@pytest.mark.parametrize("event", EVENTS.values(), ids=EVENTS)
def test_accepted_json_is_stored_as_it_is(event: Event) -> None:
    data = json.dumps(event.model_dump(exclude_none=True, mode="json")).encode()
    accepted = events.encode_adk_json(data)
    assert accepted is not None
    plaintext, parsed_event = accepted
    assert plaintext.endswith(data)
    assert parsed(plaintext)[0] == adk_version
    assert parsed_event == events.decode(plaintext, 1, 0) == event


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b'{"author": 1}',
        b'{"author": "a", "actions": {"unknown": 1}}',
        b'{"author": "\xff"}',
        b'{"author": "\\ud800"}',
        b'{"custom_metadata": ' + b'{"a":' * 200 + b"1" + b"}" * 201,
        b'{"custom_metadata": {"a": ' + b"1" * 5000 + b"}}",
    ],
)
def test_json_that_must_not_be_stored_as_it_is_is_not_accepted(data: bytes) -> None:
    assert events.encode_adk_json(data) is None


def test_value_without_a_json_form_is_rejected_if_its_text_must_not_be_stored() -> None:
    with pytest.raises(ValueError, match="cannot be converted to JSON"):
        events.encode(made(custom_metadata={"a": object()}), replaces=False)
    event = made("a \ud83c z")
    assert events.encode(event, replaces=False) == events.encode(event)
