"""`list_events_page` and `iterate_events`, which ADK does not have: a session's events in pages."""

import re
from typing import Any, Literal

import pytest
from google.adk.errors.session_not_found_error import SessionNotFoundError
from google.adk.events import Event
from google.adk.sessions import BaseSessionService

from adk_secure_sessions import EncryptedSessionService, EventPage, TamperedError
from tests.conformance.support import APP, USER, create, each_kind, event

kind = each_kind("encrypted-file", "encrypted-postgresql", soak=["encrypted-mariadb"])
ORDERS = pytest.mark.parametrize("order", ["oldest", "newest"])
Order = Literal["oldest", "newest"]
WHO: dict[str, Any] = {"app_name": APP, "user_id": USER, "session_id": "s"}


def ours(service: BaseSessionService) -> EncryptedSessionService:
    assert isinstance(service, EncryptedSessionService)
    return service


async def written(service: BaseSessionService, number: int, **options: Any) -> None:
    session = await create(service, "s", **options)
    for n in range(number):
        await service.append_event(session, event(str(n)))


async def pages(
    service: BaseSessionService, limit: int, order: Order, first: EventPage | None = None
) -> list[list[str]]:
    page = first or await ours(service).list_events_page(**WHO, limit=limit, order=order)
    found = [texts(page.events)]
    while page.next is not None:
        page = await ours(service).list_events_page(
            **WHO, limit=limit, order=order, after=page.next
        )
        found.append(texts(page.events))
    return found


def texts(events: list[Event]) -> list[str]:
    return [one.content.parts[0].text or "" for one in events if one.content and one.content.parts]


def named(*numbers: int) -> list[str]:
    return [str(number) for number in numbers]


async def test_pages_contain_each_event_once(service: BaseSessionService) -> None:
    await written(service, 5, state={"large": "x" * 20_000})
    assert await pages(service, 2, "oldest") == [named(0, 1), named(2, 3), named(4)]
    assert await pages(service, 2, "newest") == [named(4, 3), named(2, 1), named(0)]
    assert await pages(service, 5, "oldest") == [named(0, 1, 2, 3, 4)]
    assert await pages(service, 5, "newest") == [named(4, 3, 2, 1, 0)]
    assert await pages(service, 1, "newest") == [named(n) for n in (4, 3, 2, 1, 0)]
    session = await service.get_session(**WHO)
    assert session is not None
    assert [one async for one in ours(service).iterate_events(**WHO, page_size=2)] == session.events


@ORDERS
async def test_session_without_events_has_one_empty_page(
    service: BaseSessionService, order: Order
) -> None:
    await written(service, 0)
    assert await ours(service).list_events_page(**WHO, limit=1, order=order) == EventPage([], None)


async def test_pages_are_stable_under_appends(service: BaseSessionService) -> None:
    await written(service, 4)
    first = {
        order: await ours(service).list_events_page(**WHO, limit=3, order=order)
        for order in ("oldest", "newest")
    }
    session = await service.get_session(**WHO)
    assert session is not None
    await service.append_event(session, event("4"))
    assert await pages(service, 3, "oldest", first["oldest"]) == [named(0, 1, 2), named(3, 4)]
    assert await pages(service, 3, "newest", first["newest"]) == [named(3, 2, 1), named(0)]


@ORDERS
async def test_page_of_a_session_that_was_replaced_is_not_found(
    service: BaseSessionService, order: Order
) -> None:
    await written(service, 3)
    first = await ours(service).list_events_page(**WHO, limit=1, order=order)
    await service.delete_session(**WHO)
    with pytest.raises(SessionNotFoundError):
        await pages(service, 1, order, first)
    await written(service, 3)
    with pytest.raises(SessionNotFoundError):
        await pages(service, 1, order, first)
    unknown = ours(service).iterate_events(**{**WHO, "session_id": "unknown"})
    with pytest.raises(SessionNotFoundError):
        await anext(unknown)


@ORDERS
async def test_page_must_join_the_page_before(service: BaseSessionService, order: Order) -> None:
    await written(service, 4)
    first = await ours(service).list_events_page(**WHO, limit=2, order=order)
    assert first.next is not None
    forged = re.sub(r"[0-9a-f]{32}$", "0" * 31 + "1", first.next)
    with pytest.raises(TamperedError):
        await ours(service).list_events_page(**WHO, limit=2, order=order, after=forged)


@pytest.mark.parametrize("after", ["", "1.2", "1.2.3", f"-1.2.{'0' * 32}", 7, f"1.2.{'g' * 32}"])
async def test_after_that_is_no_position_is_rejected(
    service: BaseSessionService, after: Any
) -> None:
    with pytest.raises(ValueError, match="after must be"):
        await ours(service).list_events_page(**WHO, limit=1, after=after)
    for options in ({"limit": 0}, {"limit": 1001}, {"limit": 1, "order": "none"}):
        with pytest.raises(ValueError, match="must be"):
            await ours(service).list_events_page(**WHO, **options)
