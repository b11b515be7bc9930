"""States: their scopes, and their JSON."""

import datetime
import inspect
import logging
import math
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
from google.adk.sessions import State
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from adk_secure_sessions import DecryptionError, Reason
from adk_secure_sessions.formats import json_text
from adk_secure_sessions.formats.json_text import (
    canonical_json,
    dump_state,
    encode_state,
    load_state,
)

TEXTS = st.text(st.characters(codec=None), max_size=10)  # lone surrogates among them
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
STATES = st.dictionaries(TEXTS, VALUES, max_size=5)


class Unserializable:
    def __repr__(self) -> str:
        return "secret 7Qx"


# --- scopes --------------------------------------------------------------------------------------


def test_prefixes_are_those_of_adk() -> None:
    ours = (json_text.APP_PREFIX, json_text.USER_PREFIX, json_text.TEMP_PREFIX)
    assert ours == (State.APP_PREFIX, State.USER_PREFIX, State.TEMP_PREFIX)


def test_keys_go_to_their_scope_without_their_first_prefix() -> None:
    state = {"app:a": 1, "user:b": 2, "c": 3, "temp:d": 4}
    more = {"app:user:a": 1, "user:app:b": 2, "user:": 3, "apple": 4, "App:c": 5}
    assert json_text.split_scopes(state | more) == (
        {"a": 1, "user:a": 1},
        {"b": 2, "app:b": 2, "": 3},
        {"c": 3, "apple": 4, "App:c": 5},
    )


@pytest.mark.parametrize("state", [None, {}, {"temp:a": 1}])
def test_nothing_to_store_gives_three_empty_scopes(state: dict[str, Any] | None) -> None:
    assert json_text.split_scopes(state) == ({}, {}, {})


def test_merge_leaves_its_arguments_alone() -> None:
    session = {"a": 1}
    json_text.merge_scopes({"b": 2}, {"c": 3}, session)
    assert session == {"a": 1}


# --- values without a JSON form ------------------------------------------------------------------


def test_values_with_a_json_form_are_stored_in_it() -> None:
    when = datetime.datetime(2024, 1, 2, 3, 4, 5)
    state = {"when": when, "pair": (1, 2), "some": {1}}
    expected = {"when": when.isoformat(), "pair": [1, 2], "some": [1]}
    assert load_state(encode_state(state)) == expected


def test_other_values_become_text_with_a_warning_that_does_not_repeat_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        coerced = load_state(encode_state({"a": Unserializable(), "b": (1,)}))
    assert coerced == {"a": "secret 7Qx", "b": [1]}
    assert "not JSON-serializable" in caplog.text
    assert "7Qx" not in caplog.text
    assert len(caplog.records) == 1


# --- limits --------------------------------------------------------------------------------------


def nested(levels: int, value: Any = "secret 7Qx") -> Any:
    for level in range(levels):
        value = {"k": value} if level % 2 else [value]
    return value


circular: dict[str, Any] = {}
circular["both"] = [circular, circular]

LARGEST = {
    "levels": nested(190),
    "levels with lone surrogates": ["\ud800", nested(189)],
    "levels with an empty list": nested(189, []),
    "levels with an empty list and lone surrogates": ["\ud800", nested(188, {})],
    "digits": [10**4300 - 1, -(10**4300) + 1],
    "digits with lone surrogates": [10**4300 - 1, "\udfff"],
    "key": {"é" * 4096: 1},
}
TOO_LARGE = {
    "levels": nested(191),
    "many levels": nested(5000),
    "levels with an empty list": nested(190, []),
    "levels with an empty list and lone surrogates": ["\ud800", nested(189, [])],
    "levels with lone surrogates": ["\ud800", nested(190)],
    "circular": circular,
    "digits": 10**4300,
    "negative digits": -(10**4300),
    "digits with lone surrogates": ["\ud800", 10**4300],
    "key of too many digits": {"k": {10**4300: 10**4300}},
}


@pytest.mark.parametrize("value", LARGEST.values(), ids=LARGEST)
def test_largest_value_survives_storage(value: Any) -> None:
    assert load_state(encode_state({"k": value})) == {"k": value}
    assert load_state(dump_state(load_state(encode_state({"k": value})))) == {"k": value}


@pytest.mark.parametrize("prefix", ["", "app:", "user:"])
@pytest.mark.parametrize("value", TOO_LARGE.values(), ids=TOO_LARGE)
def test_value_beyond_a_limit_is_rejected_by_its_key_alone(value: Any, prefix: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"state['{prefix}bad']")) as info:
        encode_state({"good": 1, "bad": value}, prefix)
    assert "7Qx" not in str(info.value)
    assert len(str(info.value)) < 300


def test_error_shortens_the_path_of_keys() -> None:
    with pytest.raises(ValueError, match="…") as info:
        encode_state({"k" * 1000: nested(300)})
    assert len(str(info.value)) < 300


@pytest.mark.parametrize("prefix", ["", "user:"])
def test_key_beyond_the_limit_is_rejected(prefix: str) -> None:
    key = "k" * (8192 - len(prefix))
    assert load_state(encode_state({key: 1}, prefix)) == {key: 1}
    for longer in (key + "k", key[:-1] + "é", key[: len(key) // 2] + "\ud800" * 2000):
        with pytest.raises(ValueError, match="8192 bytes") as info:
            encode_state({longer: 1}, prefix)
        assert len(str(info.value)) < 200


@pytest.mark.parametrize(("prefix", "count"), [("", 2048), ("app:", 2047), ("user:", 2046)])
def test_limit_of_keys_counts_the_prefix_and_bytes_of_few_characters(
    prefix: str, count: int
) -> None:
    key = "🌱" * count  # 4 bytes each
    assert load_state(encode_state({key: 1}, prefix)) == {key: 1}
    with pytest.raises(ValueError, match="8192 bytes"):
        encode_state({key + "🌱": 1}, prefix)


def test_state_that_no_record_can_hold_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_text, "MAX_BYTES", 10_000)
    state: dict[str, Any] = {"k": "x" * (10_000 - len('{"k":"","l":1}')), "l": 1}
    assert load_state(dump_state(state)) == load_state(encode_state(state)) == state
    state["k"] += "x"
    with pytest.raises(ValueError, match="10001 bytes of JSON are too large"):
        dump_state(state)
    with pytest.raises(ValueError, match=re.escape("state['app:k']: 10001 bytes")):
        encode_state(state, "app:")


@pytest.mark.parametrize("limit", [0, 640, 100_000])
def test_reading_does_not_depend_on_the_processes_limit_of_digits(limit: int) -> None:
    stored = [(encode_state({"k": value}), {"k": value}) for value in LARGEST.values()]
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(limit)
    try:
        for data, state in stored:
            assert load_state(data) == state
        with pytest.raises(ValueError, match="'k'"):
            encode_state({"k": 10**4300})
    finally:
        sys.set_int_max_str_digits(before)


def at_depth(frames: int, call: Callable[[], Any]) -> Any:
    return at_depth(frames - 1, call) if frames else call()


@pytest.mark.parametrize("name", LARGEST)
def test_writing_and_reading_do_not_depend_on_the_depth_of_the_stack(name: str) -> None:
    state = {"k": LARGEST[name]}
    frames = sys.getrecursionlimit() - len(inspect.stack(0)) - 60
    data = at_depth(frames, lambda: encode_state(state))
    assert data == encode_state(state)
    assert at_depth(frames, lambda: load_state(data)) == state
    assert at_depth(frames, lambda: canonical_json(state)) == canonical_json(state)


# --- malformed -----------------------------------------------------------------------------------

MALFORMED = {
    "empty": b"",
    "no JSON": b"secret 7Qx",
    "cut off": b'{"k":"secret 7Qx',
    "followed by more": b'{"k":1}{"secret 7Qx":2}',
    "a list": b'["secret 7Qx"]',
    "null": b"null",
    "a number": b"7",
    "not UTF-8": b'{"k":"secret 7Qx \xff"}',
    "a surrogate as UTF-8": b'{"k":"\xed\xa0\x80"}',
    "UTF-16": '{"k":"secret 7Qx"}'.encode("utf-16"),
    "UTF-16 without mark": '{"k":"secret 7Qx"}'.encode("utf-16-le"),
    "UTF-32": '{"k":"secret 7Qx"}'.encode("utf-32-be"),
    "byte order mark": b'\xef\xbb\xbf{"k":1}',
    "byte order mark and surrogates": b'\xef\xbb\xbf{"k":"\\ud800"}',
    "surrogates and no JSON": b'{"k":"\\ud800",}',
    "too deep": b'{"k":' * 192 + b"1" + b"}" * 192,
    "too deep and empty": b'{"k":' * 191 + b"{}" + b"}" * 191,
    "much too deep": b'{"k":' * 100_000,
    "too deep with surrogates": b'{"k":' * 192 + b'"\\ud800"' + b"}" * 192,
    "too many digits": b'{"k":' + b"7" * 4301 + b"}",
    "too many digits with surrogates": b'{"k":["\\udfff",' + b"7" * 4301 + b"]}",
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED)
def test_malformed_state_is_rejected_without_repeating_it(data: bytes) -> None:
    with pytest.raises(DecryptionError, match="the user's state is not a JSON object") as info:
        load_state(data, "the user's state")
    assert info.value.reason is Reason.MALFORMED
    assert "7Qx" not in str(info.value)


# --- as JSON -------------------------------------------------------------------------------------


@given(STATES)
def test_state_survives_storage(state: dict[str, Any]) -> None:
    assert load_state(dump_state(state)) == load_state(encode_state(state)) == state


@pytest.mark.parametrize("value", [math.inf, -math.inf, 2**70, -(2**63) - 1, 1e300, 5e-324, -0.0])
def test_unusual_number_survives_storage(value: float) -> None:
    loaded = load_state(dump_state({"a": value}))["a"]
    assert loaded == value
    assert type(loaded) is type(value)
    assert math.copysign(1, loaded) == math.copysign(1, value)


@pytest.mark.parametrize("write", [dump_state, encode_state])
def test_number_without_a_json_form_survives_storage(
    write: Callable[[dict[str, Any]], bytes],
) -> None:
    loaded = load_state(write({"a": math.nan, "b": [math.inf, -math.inf]}))
    assert math.isnan(loaded["a"])
    assert loaded["b"] == [math.inf, -math.inf]


def test_infinity_in_a_model_and_an_iterator_survive_storage() -> None:
    class Model(BaseModel):
        number: float | None

    state = {"models": [Model(number=math.inf), Model(number=None)], "ids": iter([1, 2])}
    models = [{"number": math.inf}, {"number": None}]
    assert load_state(encode_state(state)) == {"models": models, "ids": [1, 2]}


def test_ordinary_state_is_encoded_without_converting_each_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise AssertionError("the slow way")

    monkeypatch.setattr(json_text, "to_values", fail)
    state = {"a": [1, None, math.inf, {"b": "Grüße 🌱"}]}
    assert load_state(encode_state(state, "user:")) == state


def test_empty_state_is_stored_as_an_empty_object() -> None:
    assert dump_state({}) == b"{}"
    assert load_state(b"{}") == {}


def test_two_loads_share_no_values() -> None:
    stored = dump_state({"a": [1]})
    load_state(stored)["a"].append(2)
    assert load_state(stored) == {"a": [1]}
    load_state(b"{}")["a"] = 1
    assert load_state(b"{}") == {}


def test_order_of_keys_is_kept() -> None:
    assert list(load_state(dump_state({"b": 1, "a": 2}))) == ["b", "a"]


def test_no_state_has_three_empty_scopes() -> None:
    assert json_text.convert_scopes(None) == json_text.convert_scopes({}) == ({}, {}, {})


def test_bytes_beside_a_value_without_json_form_are_text() -> None:
    assert load_state(encode_state({"a": b"x", "b": print}))["a"] == "x"
