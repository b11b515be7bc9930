"""Times are stored as microseconds since 1970, rounded as google-adk rounds them."""

import math
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from adk_secure_sessions.formats.events import microseconds
from adk_secure_sessions.formats.times import of_datetime


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
    assert microseconds(timestamp) == of_datetime(datetime.fromtimestamp(timestamp, UTC))


@pytest.mark.parametrize(
    "timestamp",
    [math.inf, -math.inf, math.nan, math.nextafter(9e12, math.inf), -9e12 - 1, 10**400],
)
def test_impossible_time_is_rejected(timestamp: float) -> None:
    with pytest.raises(ValueError, match="not a possible time"):
        microseconds(timestamp)


@pytest.mark.parametrize("hours", [0, 2, -7])
def test_datetime_of_any_time_zone_becomes_microseconds(hours: int) -> None:
    time = datetime(2024, 1, 2, 3, 4, 5, 6, tzinfo=UTC)
    found = of_datetime(time.astimezone(timezone(timedelta(hours=hours))))
    assert (found, type(found)) == (1_704_164_645_000_006, int)
