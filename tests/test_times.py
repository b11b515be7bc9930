"""Times are stored as microseconds since 1970, rounded as google-adk rounds them."""

import math
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from adk_secure_sessions.errors import ConfigurationError
from adk_secure_sessions.formats.events import microseconds
from adk_secure_sessions.formats.times import datetime_of, lifetime_of, microseconds_of, parse_age


@pytest.mark.parametrize(
    ("timestamp", "expected"),
    [
        (0, 0),
        (1.5, 1_500_000),
        (-1.5, -1_500_000),
        (1_700_000_000.25, 1_700_000_000_250_000),
        (0.000_001, 1),
        (0.000_000_6, 1),
        (0.000_000_4, 0),
        (9e12, 9 * 10**18),
        (-9e12, -9 * 10**18),
    ],
)
def test_seconds_become_microseconds(timestamp: float, expected: int) -> None:
    found = microseconds(timestamp)
    assert (found, type(found)) == (expected, int)


@given(st.floats(-6e10, 2.5e11))
@example(0.000_000_5)
@example(0.000_001_5)
@example(-0.000_000_5)
@example(1.999_999_9)
def test_rounding_is_that_of_fromtimestamp(timestamp: float) -> None:
    assert microseconds(timestamp) == microseconds_of(datetime.fromtimestamp(timestamp, UTC))


@pytest.mark.parametrize(
    "timestamp",
    [math.inf, -math.inf, math.nan, math.nextafter(9e12, math.inf), -9e12 - 1, 10**400, "7", None],
)
def test_impossible_time_is_rejected(timestamp: Any) -> None:
    with pytest.raises(ValueError, match="not a possible time"):
        microseconds(timestamp)


@pytest.mark.parametrize("hours", [0, 2, -7])
def test_datetime_of_any_time_zone_becomes_microseconds(hours: int) -> None:
    time = datetime(2024, 1, 2, 3, 4, 5, 6, tzinfo=UTC)
    found = microseconds_of(time.astimezone(timezone(timedelta(hours=hours))))
    assert (found, type(found)) == (1_704_164_645_000_006, int)
    assert datetime_of(found) == time


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1s", 1),
        ("2m", 120),
        ("3h", 10_800),
        ("90d", 7_776_000),
        ("1w", 604_800),
        ("999999s", 999_999),
    ],
)
def test_age_is_a_number_and_a_unit(text: str, seconds: int) -> None:
    assert parse_age(text) == timedelta(seconds=seconds)


@pytest.mark.parametrize(
    "text", ["", "90", "d", "-1d", "1.5d", "90 d", "90d ", "1y", "1D", "1000000s", "\u0661d"]
)
def test_other_text_is_no_age(text: str) -> None:
    assert parse_age(text) is None


def test_lifetime_is_in_microseconds() -> None:
    found = lifetime_of(timedelta(days=90))
    assert (found, type(found)) == (90 * 86_400_000_000, int)
    assert lifetime_of(timedelta(microseconds=1)) == 1
    assert lifetime_of(None) is None


@pytest.mark.parametrize("value", [timedelta(), timedelta(microseconds=-1), 90, "90d"])
def test_lifetime_that_is_no_positive_time_is_rejected(value: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^expires_after must be a positive time"):
        lifetime_of(value)
