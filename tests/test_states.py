"""States: their scopes, and their JSON."""

import datetime
import json
import logging
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
from google.adk.sessions import State
from hypothesis import given
from hypothesis import strategies as st

from adk_secure_sessions.formats import states
from adk_secure_sessions.formats.states import dumps, loads, to_json_values

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
    ours = (states.APP_PREFIX, states.USER_PREFIX, states.TEMP_PREFIX)
    assert ours == (State.APP_PREFIX, State.USER_PREFIX, State.TEMP_PREFIX)


def test_keys_go_to_their_scope_without_prefix() -> None:
    scopes = states.split({"app:a": 1, "user:b": 2, "c": 3, "temp:d": 4})
    assert scopes == ({"a": 1}, {"b": 2}, {"c": 3})


@pytest.mark.parametrize("state", [None, {}, {"temp:a": 1}])
def test_nothing_to_store_gives_three_empty_scopes(state: dict[str, Any] | None) -> None:
    assert states.split(state) == ({}, {}, {})


def test_only_the_first_prefix_counts() -> None:
    scopes = states.split({"app:user:a": 1, "user:app:b": 2, "user:": 3, "apple": 4, "App:c": 5})
    assert scopes == ({"user:a": 1}, {"app:b": 2, "": 3}, {"apple": 4, "App:c": 5})


def test_merge_is_the_inverse_of_split() -> None:
    state = {"app:a": 1, "user:b": [2], "c": None}
    assert states.merge(*states.split(state)) == state


def test_json_values_are_copies() -> None:
    value = {"deep": [1]}
    copy = to_json_values({"a": value})
    value["deep"].append(2)
    assert copy == {"a": {"deep": [1]}}


def test_merge_leaves_its_arguments_alone() -> None:
    session = {"a": 1}
    states.merge({"b": 2}, {"c": 3}, session)
    assert session == {"a": 1}


# --- values without a JSON form ------------------------------------------------------------------


def test_values_with_a_json_form_are_stored_in_it() -> None:
    when = datetime.datetime(2024, 1, 2, 3, 4, 5)
    state = {"when": when, "pair": (1, 2), "some": {1}}
    expected = {"when": when.isoformat(), "pair": [1, 2], "some": [1]}
    assert to_json_values(state) == expected
    assert loads(dumps(state)) == expected


@pytest.mark.parametrize(
    "coerce",
    [to_json_values, lambda state: loads(dumps(state))],
)
def test_other_values_become_text_with_a_warning_that_does_not_repeat_them(
    caplog: pytest.LogCaptureFixture, coerce: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    with caplog.at_level(logging.WARNING):
        coerced = coerce({"a": Unserializable(), "b": (1,)})
    assert coerced == {"a": "secret 7Qx", "b": [1]}
    assert "not JSON-serializable" in caplog.text
    assert "7Qx" not in caplog.text
    assert len(caplog.records) == 1


# --- as JSON -------------------------------------------------------------------------------------


@given(STATES)
def test_state_survives_storage(state: dict[str, Any]) -> None:
    assert loads(dumps(state)) == state


@given(STATES)
def test_stored_state_is_json(state: dict[str, Any]) -> None:
    assert json.loads(dumps(state)) == state


@pytest.mark.parametrize("value", [math.inf, -math.inf, 2**70, -(2**63) - 1, 1e300, 5e-324, -0.0])
def test_unusual_number_survives_storage(value: float) -> None:
    loaded = loads(dumps({"a": value}))["a"]
    assert loaded == value
    assert type(loaded) is type(value)
    assert math.copysign(1, loaded) == math.copysign(1, value)


def test_nan_survives_storage() -> None:
    assert math.isnan(loads(dumps({"a": math.nan}))["a"])


@pytest.mark.parametrize("text", ["\x00", "\ud800", "a\udfffb", "🌱", "\u2028", '"\\', "ß"])
def test_unusual_text_survives_storage(text: str) -> None:
    assert loads(dumps({text: text})) == {text: text}


def test_state_of_many_levels_survives_storage() -> None:
    state: dict[str, Any] = {}
    for _ in range(300):
        state = {"a": state}
    assert loads(dumps(state)) == state


def test_empty_state_is_stored_as_an_empty_object() -> None:
    assert dumps({}) == b"{}"
    assert loads(b"{}") == {}


def test_two_loads_share_no_values() -> None:
    stored = dumps({"a": [1]})
    loads(stored)["a"].append(2)
    assert loads(stored) == {"a": [1]}
    loads(b"{}")["a"] = 1
    assert loads(b"{}") == {}


def test_order_of_keys_is_kept() -> None:
    assert list(loads(dumps({"b": 1, "a": 2}))) == ["b", "a"]


def test_json_has_no_spaces() -> None:
    assert not re.search(rb"\s", dumps({"a": [1, {"b": 2}], "c": None}))
