"""Times of sessions and events as sources store them, in microseconds since 1970, UTC."""

import math
from datetime import UTC, datetime, timedelta

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_MOST_SECONDS = 9e12


def from_seconds(seconds: float) -> int:
    """Convert seconds since 1970, as in `Event.timestamp`.

    Rounding is the same as in `datetime.fromtimestamp`, which google-adk uses.

    Raises:
        ValueError: *seconds* is not a possible time.
    """
    if not math.isfinite(seconds) or abs(seconds) > _MOST_SECONDS:
        raise ValueError("not a possible time in seconds")
    fraction, whole = math.modf(seconds)
    return int(whole) * 1_000_000 + round(fraction * 1_000_000)


def from_datetime(time: datetime) -> int:
    """Convert *time*; without a time zone, it is in UTC."""
    if time.tzinfo is None:
        time = time.replace(tzinfo=UTC)
    return (time - _EPOCH) // _MICROSECOND
