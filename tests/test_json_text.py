"""The limits of JSON, conversion to JSON values, and the version at the start of an event."""

import datetime
import json
import math
import re
import sys
from typing import Any

import pydantic
import pytest

from adk_secure_sessions import DecryptionError, Reason
from adk_secure_sessions.formats import json_text
from adk_secure_sessions.formats.json_text import (
    MAX_BYTES,
    MAX_DIGITS,
    MAX_LEVELS,
    is_within_limits,
    largest_key,
    loads,
    read_event,
    subscripts,
    to_values,
    version_end,
)

LONG = "x" * 5000  # a value with more bytes than an integer may have digits


def test_limits_are_those_of_the_pages() -> None:
    assert (MAX_LEVELS, MAX_DIGITS, MAX_BYTES) == (200, 4300, 268_435_456)


# --- is_within_limits ----------------------------------------------------------------------------


def nested(levels: int, bottom: Any = 1) -> Any:
    """*levels* lists and objects; the outermost is an object."""
    for level in range(levels - 1, -1, -1):
        bottom = [bottom] if level % 2 else {"k": bottom}
    return bottom


@pytest.mark.parametrize("is_long", [False, True])
@pytest.mark.parametrize("levels", [2, 190, 191, 199, 200])
def test_json_of_so_many_levels_fits_and_one_more_does_not(levels: int, is_long: bool) -> None:
    bottom = LONG if is_long else 1
    assert is_within_limits(json.dumps(nested(levels, bottom)).encode(), levels)
    assert not is_within_limits(json.dumps(nested(levels + 1, bottom)).encode(), levels)
    empties: list[Any] = [[], {}]
    for empty in empties:
        padding = LONG if is_long else ""
        data = json.dumps({padding: nested(levels - 2, empty)}, indent=1 if is_long else None)
        assert is_within_limits(data.encode(), levels)
        data = json.dumps({padding: nested(levels - 1, empty)}, indent=1 if is_long else None)
        assert not is_within_limits(data.encode(), levels)


def test_levels_are_200_by_default() -> None:
    assert is_within_limits(json.dumps(nested(200)).encode())
    assert not is_within_limits(json.dumps(nested(201)).encode())


def test_json_of_exactly_the_largest_size_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    data = json.dumps({"k": LONG}).encode()
    monkeypatch.setattr(json_text, "MAX_BYTES", len(data))
    assert is_within_limits(data)
    assert not is_within_limits(data + b" ")


def test_integer_of_4300_digits_fits_and_a_longer_one_does_not() -> None:
    assert is_within_limits(b'{"k":%s}' % (b"7" * 4300))
    assert not is_within_limits(b'{"k":%s}' % (b"7" * 4301))
    assert is_within_limits(b'{"k":"%s"}' % (b"7" * 4301))


@pytest.mark.parametrize("data", [b'{"k":"' + b"x" * 5000, b'["' + b"x" * 5000 + b'"]', b"[" * 300])
def test_bytes_that_are_no_json_object_do_not_fit(data: bytes) -> None:
    assert not is_within_limits(data)


# --- dumps, largest, subscripts ------------------------------------------------------------------


def test_json_is_compact_and_has_a_largest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, data in (("é", b'{"k":["\xc3\xa9",1]}'), ("\ud800", b'{"k":["\\ud800",1]}')):
        monkeypatch.setattr(json_text, "MAX_BYTES", len(data))
        assert json_text.dumps({"k": [text, 1]}) == data
        monkeypatch.setattr(json_text, "MAX_BYTES", len(data) - 1)
        size = len(data)
        with pytest.raises(ValueError, match=f"^{size} bytes .* the limit is {size - 1}$"):
            json_text.dumps({"k": [text, 1]})


def test_largest_value_is_that_of_the_longest_json() -> None:
    assert largest_key({"a": [1, 2], "b": "\ud800", "c": "123"}) == "b"
    assert largest_key({"a": [1, 2, 3, 4], "b": "\ud800", "c": {"1": None}}) == "c"


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ([], ""),
        (["a", 0, "it's"], "['a'][0][\"it's\"]"),
        (["k" * 60], f"['{'k' * 60}']"),
        (["k" * 61], f"['{'k' * 60}…']"),
        (list(range(10)), "[0][1][2][3][4][5][6][7][8][9]"),
        (list(range(11)), "[0][1][2][3][4][5][6][7][8][9][…]"),
    ],
)
def test_path_of_keys_is_shown_as_subscripts(keys: list[object], text: str) -> None:
    assert subscripts(keys) == text


# --- to_values -----------------------------------------------------------------------------------


class Unserializable:
    def __str__(self) -> str:
        return "its text"


class Broken:
    def __str__(self) -> str:
        raise ValueError("secret 7Qx")


class Failing(pydantic.BaseModel):
    n: int

    @pydantic.model_serializer
    def fail(self) -> Any:
        raise ValueError("secret 7Qx")


def converted(values: dict[Any, Any], levels: int = 200, mode: str = "utf8") -> Any:
    return to_values(values, levels=levels, bytes_mode=mode)


@pytest.mark.parametrize("first", [1, {"a": 1}, [1], datetime.datetime(2026, 1, 1), object()])
@pytest.mark.parametrize("last", ["b", {"c": 2}, datetime.date(2026, 1, 2)])
def test_last_value_of_keys_with_one_text_is_kept(first: object, last: object) -> None:
    both: Any = {"k": {1: first, "1": last}}
    alone: Any = {"k": {"1": last}}
    assert (
        to_values(both, levels=9, bytes_mode="utf8")[0]
        == (to_values(alone, levels=9, bytes_mode="utf8")[0])
    )


def test_values_with_a_json_form_are_converted() -> None:
    shared = [1]
    values = {
        "plain": [None, True, 1, -1, 1.5, "text", 10**4300 - 1],
        "tuple": (1, (2,)),
        "set": {1},
        "frozen": frozenset({2}),
        "date": datetime.date(2024, 1, 2),
        "bytes": b"abc",
        "empty": [[], {}, ()],
        "shared": [shared, shared, {"k": shared}],
    }
    assert converted(values) == (
        {
            "plain": [None, True, 1, -1, 1.5, "text", 10**4300 - 1],
            "tuple": [1, [2]],
            "set": [1],
            "frozen": [2],
            "date": "2024-01-02",
            "bytes": "abc",
            "empty": [[], {}, []],
            "shared": [[1], [1], {"k": [1]}],
        },
        False,
    )
    assert converted({"k": b"\xff\x00"}, mode="base64") == ({"k": "_wA="}, False)


def test_keys_become_text_and_the_last_of_equal_keys_is_kept() -> None:
    values = {1: "one", None: 2, 1.5: 3, datetime.date(2024, 1, 2): 4, "1": "text"}
    found, is_lossy = converted({"k": values})
    assert found == {"k": {"1": "text", "None": 2, "1.5": 3, "2024-01-02": 4}}
    assert not is_lossy
    assert converted({"k": {(1, 2): 3}})[0]["k"] in ({"1,2": 3}, {"(1, 2)": 3})
    assert converted({"k": {True: 1, Unserializable(): 2}})[0]["k"] == {"true": 1, "its text": 2}


def test_values_without_a_json_form_become_text() -> None:
    assert converted({"a": Unserializable(), "b": 1}) == ({"a": "its text", "b": 1}, True)
    assert converted({"a": Broken()}) == ({"a": "<Unserializable Broken object>"}, True)
    assert converted({"a": Failing(n=1)}) == ({"a": "n=1"}, True)
    assert converted({"a": 10**4300})[1]
    assert converted({"a": 10**4300})[0]["a"] == "1" + "0" * 4300
    assert converted({"a": -(10**4300)})[0]["a"] == "-1" + "0" * 4300
    assert converted({"a": 2**1_050_000})[0]["a"].startswith("0x1000")


def test_value_beyond_the_levels_becomes_text() -> None:
    assert converted(nested(3), levels=3) == ({"k": [{"k": 1}]}, False)
    assert converted(nested(3), levels=2) == ({"k": ["{'k': 1}"]}, True)
    assert converted({"k": [[]]}, levels=3) == ({"k": [[]]}, False)
    assert converted({"k": [[]]}, levels=2) == ({"k": ["[]"]}, True)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"a": {"b": [0, 10**4300]}}, "['a']['b'][1]: an integer has more than 4300 digits"),
        ({"a": -(10**4300)}, "['a']: an integer has more than 4300 digits"),
        ({"a": [1, nested(2)]}, "['a'][1]['k']: the value is circular, or its depth exceeds"),
    ],
)
def test_value_beyond_a_limit_is_rejected_by_its_path(values: Any, text: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(f"name{text}")):
        to_values(values, levels=3, bytes_mode="utf8", reject="name")


def test_circular_value_is_rejected_where_it_begins_again() -> None:
    inner: dict[str, Any] = {"x": [1]}
    inner["x"].append(inner)
    with pytest.raises(ValueError, match=re.escape("name['a']['x'][1]: the value is circular")):
        to_values({"a": inner}, levels=200, bytes_mode="utf8", reject="name")


# --- loads ---------------------------------------------------------------------------------------


def test_error_of_reading_names_the_data_and_does_not_repeat_it() -> None:
    for data in (b"[]", b"secret 7Qx", b'{"\\ud800": 7Qx}'):
        for arguments, name in (((), "the plaintext"), (("the state",), "the state")):
            with pytest.raises(DecryptionError, match=f"^{name} is not a JSON object") as info:
                loads(data, *arguments)
            assert info.value.reason is Reason.MALFORMED
            assert "7Qx" not in str(info.value)


@pytest.mark.parametrize(
    "text", ["\\ud800", "\\uD9aF", "\\udbff", "\\udFFf", "\\ude00 \\u0020", "\\udAfA", "\\uDc99"]
)
def test_lone_surrogate_is_read_in_json_of_the_largest_size(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = f'{{"{text}":["{LONG}{text}",{"7" * 4300}]}}'.encode()
    monkeypatch.setattr(json_text, "MAX_BYTES", len(data))
    found = loads(data)
    key = json.loads(f'"{text}"')
    assert found == {key: [LONG + key, (10**4300 - 1) // 9 * 7]}


@pytest.mark.parametrize("empty", [b"[]", b"{}", b"[ \n]", b'["\\ud800",{}]', b'[{},"[]"]'])
def test_empty_list_or_object_is_a_level_of_what_is_read(empty: bytes) -> None:
    inner = 1 + (b"," in empty)
    for levels, limits in ((200, ()), (191, ("the state", 191))):
        opened = levels - inner - 1
        assert loads(b'{"k":' + b"[" * opened + empty + b"]" * opened + b"}", *limits)
        opened += 1
        with pytest.raises(DecryptionError, match="within the limits"):
            loads(b'{"k":' + b"[" * opened + empty + b"]" * opened + b"}", *limits)


# --- the version of an event ---------------------------------------------------------------------


def with_version(text: bytes) -> bytes:
    return bytes([len(text)]) + text + b'{"a":1}'


@pytest.mark.parametrize(
    "version",
    [b"1.2", b"1.2.3", b"1.2.3.4", b"1234.123456", b"0.0.0a1", b"1.2" + b"a.+z0" * 4, b"2.0.0rc1"],
)
def test_version_of_google_adk_is_found(version: bytes) -> None:
    assert version_end(with_version(version)) == 1 + len(version)
    assert read_event(with_version(version)) == (version.decode(), {"a": 1})


@pytest.mark.parametrize("text", [b"", b"1", b"v1.2.3", b"secret 7Qx", b"1.2\n", b"9" * 255])
def test_other_ascii_text_is_accepted_as_a_version_and_not_repeated(text: bytes) -> None:
    assert version_end(with_version(text)) == 1 + len(text)
    assert read_event(with_version(text)) == ("of an unknown version", {"a": 1})


@pytest.mark.parametrize(
    "plaintext",
    [
        b"",
        b"\x051.2",
        b"\xff" + b"1" * 254,
        with_version("1.2é".encode()),
        with_version(b"1.2\xff"),
    ],
)
def test_text_that_is_no_version_is_malformed(plaintext: bytes) -> None:
    assert version_end(plaintext) == 0
    with pytest.raises(DecryptionError, match="a version of google-adk") as info:
        read_event(plaintext)
    assert info.value.reason is Reason.MALFORMED


# --- comparing -----------------------------------------------------------------------------------

NAN, INF = math.nan, math.inf
# The smallest integer that is rounded above every finite float.
TOO_LARGE = 2**1024 - 2**970


@pytest.mark.parametrize(
    ("one", "other", "same", "same_value"),
    [
        (1, 1, True, True),
        (1, 2, False, False),
        (1, 1.0, False, True),
        (-1.0, -1, False, True),
        (1, 1.5, False, False),
        (2**53 + 1, float(2**53), False, True),
        (TOO_LARGE - 1, sys.float_info.max, False, True),
        (TOO_LARGE, sys.float_info.max, False, False),
        (TOO_LARGE, INF, False, False),
        (1, INF, False, False),
        (1, NAN, False, False),
        (1, True, False, False),
        (1.0, True, False, False),
        (True, True, True, True),
        (None, None, True, True),
        (None, False, False, False),
        (NAN, NAN, True, True),
        (NAN, 1.0, False, False),
        (INF, INF, True, True),
        (INF, -INF, False, False),
        ("a", "a", True, True),
        ("a", "b", False, False),
        ("1", 1, False, False),
        ([], {}, False, False),
        ([1, "a"], [1, "a"], True, True),
        ([1, 2], [2, 1], False, False),
        ([1], [1, 2], False, False),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True, True),
        ({"a": 1}, {"b": 1}, False, False),
        ({"a": 1}, {"a": 1, "b": 1}, False, False),
        ({"a": [{"b": 1}, NAN]}, {"a": [{"b": 1.0}, NAN]}, False, True),
        ({"a": [{"b": 1}, 2]}, {"a": [{"b": 1.0}, 3]}, False, False),
    ],
)
def test_json_values_are_the_same_or_not(
    one: Any, other: Any, same: bool, same_value: bool
) -> None:
    for pair in ((one, other), (other, one)):
        assert json_text.same_json(*pair) is same
        assert json_text.same_json(*pair, numbers_may_differ=True) is same_value


def test_canonical_json_has_sorted_keys_and_no_spaces() -> None:
    assert json_text.canonical_json({"b": 1, "a": [1.5, "ä"]}) == b'{"a":[1.5,"\\u00e4"],"b":1}'


# --- values of the application -------------------------------------------------------------------


def test_exact_values_have_bytes_in_base64() -> None:
    assert json_text.exact_values({"a": b"\xff\x00"}, 10, "item") == {"a": "_wA="}


def test_lone_surrogate_after_leading_spaces_is_read() -> None:
    long = "x" * 5000
    assert json_text.loads(b' {"a":"\\ud800' + long.encode() + b'"}') == {"a": "\ud800" + long}


def test_event_of_nothing_but_a_version_is_no_object() -> None:
    with pytest.raises(DecryptionError, match=r"^the plaintext is not a JSON object"):
        json_text.read_event(b"\x011")
