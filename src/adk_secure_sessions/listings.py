"""The arguments and results of listings: pages, the positions between them, periods of time."""

import re
from typing import Any, NamedTuple

from google.adk.events import Event
from google.adk.sessions import Session

from adk_secure_sessions.formats.events import MAX_SECONDS, microseconds
from adk_secure_sessions.formats.records import LINK_LENGTH
from adk_secure_sessions.storage import reads

MAX_PAGE = 1000  # sessions or events

_ROW_ID = "([0-9a-f]{1,15}|[0-7][0-9a-f]{15})"  # at most 63 bits
_POSITION = rf"{_ROW_ID}\.{_ROW_ID}"
_EVENT_POSITION = rf"{_ROW_ID}\.([0-9a-f]{{1,10}})\.([0-9a-f]{{{2 * LINK_LENGTH}}})"


class SessionPage(NamedTuple):
    """A part of a listing, which `EncryptedSessionService.list_sessions_page` returns.

    Attributes:
        sessions: The sessions, without events.
        next: The value of *after* for the next page; None if this is the last page.
    """

    sessions: list[Session]
    next: str | None


class EventPage(NamedTuple):
    """A part of a session's events, which `EncryptedSessionService.list_events_page` returns.

    Attributes:
        events: The events.
        next: The value of *after* for the next page; None if this is the last page.
    """

    events: list[Event]
    next: str | None


def check_page(limit: object, order: object) -> None:
    """Raise ValueError if *limit* or *order* is not an option of a page."""
    if not isinstance(limit, int) or not 1 <= limit <= MAX_PAGE:
        raise ValueError(f"limit must be an integer from 1 to {MAX_PAGE}")
    if order not in ("oldest", "newest"):
        raise ValueError('order must be "oldest" or "newest"')


def page_options(limit: int, after: str | None, order: str, **more: Any) -> reads.PageOptions:
    """Return the checked options of a page of sessions; *more* are other fields of the result."""
    check_page(limit, order)
    match = _match(_POSITION, after)
    position = match and reads.SessionPosition(int(match[1], 16), int(match[2], 16))
    return reads.PageOptions(limit, position, order == "newest", **more)


def period(after: float | None, before: float | None) -> range | None:
    """Return the microseconds from *after* until before *before*; None if both are None."""
    if after is None and before is None:
        return None
    for name, at in (("updated_after", after), ("updated_before", before)):
        if at is not None and not (isinstance(at, float | int) and abs(at) <= MAX_SECONDS):
            raise ValueError(
                f"{name} must be seconds since 1970, such as time.time() or the timestamp() of a "
                "datetime"
            )
    first = -(2**63) if after is None else microseconds(after)
    return range(first, 2**63 - 1 if before is None else microseconds(before))


def position_text(position: reads.SessionPosition | reads.EventPosition | None) -> str | None:
    """Return the fields of *position* in hexadecimal, for `next` of a page."""
    fields = (one.hex() if isinstance(one, bytes) else f"{one:x}" for one in position or ())
    return ".".join(fields) or None


def parse_event_position(after: str | None) -> reads.EventPosition | None:
    """Return the position in *after*, which is `EventPage.next` of the page before, or None."""
    match = _match(_EVENT_POSITION, after)
    return match and reads.EventPosition(
        int(match[1], 16), int(match[2], 16), bytes.fromhex(match[3])
    )


def _match(form: str, after: str | None) -> re.Match[str] | None:
    """Return the match of *after*; None for the first page, for which *after* is None."""
    if after is None:
        return None
    match = re.fullmatch(form, after) if isinstance(after, str) else None
    if match is None:
        raise ValueError("after must be `next` of the page before")
    return match
