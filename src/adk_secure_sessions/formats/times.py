"""Convert times to microseconds since 1970, UTC, which is how the database stores times."""

import math
from datetime import UTC, datetime, timedelta

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


def microseconds(timestamp: float) -> int:
    """Convert seconds since 1970 to microseconds, with the rounding of `datetime.fromtimestamp`,
    which ADK uses; raise ValueError for an impossible time.
    """
    if not math.isfinite(timestamp) or abs(timestamp) > 9e12:
        raise ValueError("the timestamp is not a possible time in seconds")
    fraction, seconds = math.modf(timestamp)
    return int(seconds) * 1_000_000 + round(fraction * 1_000_000)


def of_datetime(time: datetime) -> int:
    """Convert *time*, which has a time zone, to microseconds."""
    return (time - _EPOCH) // _MICROSECOND


def datetime_of(microseconds: int) -> datetime:
    """Convert microseconds since 1970 to a time in UTC; raise OverflowError if it has none."""
    return _EPOCH + timedelta(microseconds=microseconds)
