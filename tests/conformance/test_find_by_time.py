"""`find_sessions` by the time of the last update."""

from datetime import UTC, datetime
from typing import Any

import pytest
from google.adk.events import Event
from google.adk.sessions import BaseSessionService

from adk_secure_sessions import EncryptedSessionService
from tests.conformance.support import APP, START, create, each_kind

kind = each_kind("encrypted-file", "encrypted-postgresql", "encrypted-mariadb")
DAY = 86_400.0


def ours(service: BaseSessionService) -> EncryptedSessionService:
    assert isinstance(service, EncryptedSessionService)
    return service


async def written(service: BaseSessionService) -> None:
    """Four sessions of two users, updated on the days 1, 2, 3 and 4, and one of another app."""
    for day, user in ((3, "alice"), (1, "bob"), (4, "bob"), (2, "alice")):
        session = await create(service, f"day {day}", user_id=user)
        await service.append_event(session, Event(author="user", timestamp=START + day * DAY))
    session = await create(service, "day 2", app_name="other")
    await service.append_event(session, Event(author="user", timestamp=START + 2 * DAY))


async def found(service: BaseSessionService, **options: Any) -> list[str]:
    answer = await ours(service).find_sessions(app_name=APP, **options)
    return [session.id for session in answer.sessions]


async def pages(service: BaseSessionService, **options: Any) -> list[list[str]]:
    listed, after = [], None
    while True:
        page = await ours(service).find_sessions_page(APP, limit=2, after=after, **options)
        listed.append([session.id for session in page.sessions])
        if (after := page.next) is None:
            return listed


async def test_sessions_are_found_by_the_time_of_their_last_update(
    service: BaseSessionService,
) -> None:
    await written(service)
    second, fourth = START + 2 * DAY, START + 4 * DAY
    assert await found(service, updated_after=second) == ["day 2", "day 3", "day 4"]
    assert await found(service, updated_before=second) == ["day 1"]
    both = {"updated_after": second, "updated_before": fourth}
    assert await found(service, **both) == ["day 2", "day 3"]
    assert await found(service, updated_after=second + 1e-6, updated_before=fourth) == ["day 3"]
    assert await found(service, updated_after=fourth, updated_before=second) == []


async def test_pages_are_in_the_order_of_creation(service: BaseSessionService) -> None:
    await written(service)
    options = {"updated_after": START + 2 * DAY}
    assert await pages(service, **options) == [["day 3", "day 2"], ["day 4"]]
    assert await pages(service, order="newest", **options) == [["day 4", "day 2"], ["day 3"]]


async def test_search_needs_a_key_or_a_time(service: BaseSessionService) -> None:
    for options in ({}, {"value": 1}, {"updated_after": START, "value": 1}):
        with pytest.raises(ValueError, match="updated_after"):
            await found(service, **options)
    wrong: tuple[Any, ...] = (float("nan"), 1e300, "2026", datetime.now(UTC))
    for at in wrong:
        with pytest.raises(ValueError, match="updated_before must be seconds since 1970"):
            await found(service, updated_before=at)
