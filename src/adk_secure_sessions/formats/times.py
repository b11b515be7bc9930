"""Convert times to microseconds since 1970, UTC, which is how the database stores times."""

import math
import re
from datetime import UTC, datetime, timedelta

from adk_secure_sessions.errors import ConfigurationError

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def parse_age(text: str) -> timedelta | None:
    """Return the age in *text*, such as `90d`; None if it is not a number and a unit."""
    match = re.fullmatch(r"(\d{1,6})([smhdw])", text, re.ASCII)
    return None if match is None else timedelta(**{_UNITS[match[2]]: int(match[1])})


def lifetime_of(expires_after: timedelta | None) -> int | None:
    """Return *expires_after* in microseconds."""
    if expires_after is None:
        return None
    if not isinstance(expires_after, timedelta) or expires_after <= timedelta():
        raise ConfigurationError(
            "expires_after must be a positive time: timedelta(days=90), in a URI or a command 90d"
        )
    return expires_after // _MICROSECOND


def microseconds(timestamp: float) -> int:
    """Convert seconds since 1970 to microseconds, with the rounding of `datetime.fromtimestamp`,
    which ADK uses; raise ValueError for an impossible time.
    """
    if not -9e12 <= timestamp <= 9e12:  # or it is not a number
        raise ValueError("the timestamp is not a possible time in seconds")
    fraction, seconds = math.modf(timestamp)
    return int(seconds) * 1_000_000 + round(fraction * 1_000_000)


def of_datetime(time: datetime) -> int:
    """Convert *time*, which has a time zone, to microseconds."""
    return (time - _EPOCH) // _MICROSECOND


def datetime_of(microseconds: int) -> datetime:
    """Convert microseconds since 1970 to a time in UTC; raise OverflowError if it has none."""
    return _EPOCH + timedelta(microseconds=microseconds)
