"""Values for states and metadata, by their form in JSON."""

import dataclasses
import datetime
import decimal
import enum
import math
import uuid
from typing import Any

import pydantic
from google.genai import types


class Colour(enum.Enum):
    RED = "red"


class Address(pydantic.BaseModel):
    street: str
    since: datetime.date


@dataclasses.dataclass
class Point:
    x: int
    y: int


def nested(depth: int, value: Any = "bottom") -> Any:
    for _ in range(depth):
        value = [value]
    return value


def a_function() -> None:
    """Has no JSON form."""


ADDRESS = Address(street="Main Street", since=datetime.date(2020, 1, 2))

# JSON values, which come back equal.
PLAIN = {
    "none": None,
    "true": True,
    "zero": 0,
    "minus-one": -1,
    "64-bit": 2**63,
    "huge-int": 10**40,
    "float": 0.1 + 0.2,
    "largest-float": 1.7976931348623157e308,
    "smallest-float": 5e-324,
    "infinity": math.inf,
    "minus-infinity": -math.inf,
    "empty-text": "",
    "non-ascii": "Grüße, 世界 🎉 \u2028 \ufeff \U0010ffff",
    "escapes": 'quote " backslash \\ slash / newline \n return \r tab \t bell \x07 del \x7f',
    "nul": "before\0after",
    "lone-surrogate": "high \ud800 low \udfff",
    "looks-like-json": '{"a": [1, 2]}',
    "long-text": "x" * 200_000,
    "empty-list": [],
    "empty-dict": {},
    "none-inside": {"a": None, "b": [None, {"c": None}]},
    "nested": {"a": [{"b": {"c": [1, 2.5, "three", None, False]}}], "ü": {"": []}},
    "deep": nested(150),
    "prefixes-inside": {"app:a": 1, "user:u": 2, "temp:t": 3},
}

# Values that pydantic's rules coerce to JSON.
RICH = {
    "datetime": datetime.datetime(2024, 5, 6, 7, 8, 9, 123456, tzinfo=datetime.UTC),
    "naive-datetime": datetime.datetime(2024, 5, 6, 7, 8, 9),
    "date": datetime.date(2024, 5, 6),
    "timedelta": datetime.timedelta(days=1, seconds=30),
    "decimal": decimal.Decimal("1.10"),
    "uuid": uuid.UUID(int=1),
    "enum": Colour.RED,
    "dataclass": Point(1, 2),
    "model": ADDRESS,
    "models-inside": {"list": [ADDRESS, {"again": ADDRESS}], "tuple": (ADDRESS,)},
    "adk-content": types.Content(role="user", parts=[types.Part(text="hello")]),
    "bytes": "Grüße".encode(),
    "bytes-inside": [b"a", {"b": b"b"}],
    "tuple": (1, (2, 3)),
    "set": {"only"},
    "frozenset": frozenset({1}),
    "complex": 1j,
    "int-keys": {1: "a", 2: {3: "b"}},
    "odd-keys": {None: 1, 1.5: 2, (1, 2): 3},
}

# Values without JSON form: their text is stored.
OPAQUE = {
    "function": a_function,
    "class": Address,
    "object": object(),
    "beside-others": {"when": datetime.date(2024, 5, 6), "bad": a_function, "who": ADDRESS},
}

# Values that cannot be stored.
circular: list[Any] = []
circular.append(circular)
IMPOSSIBLE = {"circular": circular, "bottomless": nested(5000)}
