"""Convert ages, and times with a time zone, to microseconds and back.

Stored times are microseconds since 1970, UTC; `events.microseconds` converts those of google-adk.
"""

import re
import time
from datetime import UTC, datetime, timedelta

from adk_secure_sessions.errors import ConfigurationError

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def time_now() -> int:
    """Return the present time, by the clock of this machine, in microseconds since 1970, UTC."""
    return time.time_ns() // 1000


def time_ago(age: timedelta) -> int:
    """Return the time that was *age* ago, but no earlier time than the beginning of the year 1."""
    return max(microseconds_of(datetime.min.replace(tzinfo=UTC)), time_now() - age // _MICROSECOND)


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
            "expires_after must be a positive time: timedelta(days=90), in a URI or with "
            "--expires-after 90d"
        )
    return expires_after // _MICROSECOND


def microseconds_of(time: datetime) -> int:
    """Convert *time*, which has a time zone, to microseconds."""
    return (time - _EPOCH) // _MICROSECOND


def datetime_of(microseconds: int) -> datetime:
    """Convert microseconds since 1970 to a time in UTC; raise OverflowError if it has none."""
    return _EPOCH + timedelta(microseconds=microseconds)
