"""`list_sessions_page`, which ADK does not have: pages of a listing in order of creation."""

from pathlib import Path
from typing import Any

import pytest
from google.adk.sessions import BaseSessionService, Session

from adk_secure_sessions import AesGcmBackend, EncryptedSessionService, SessionPage
from adk_secure_sessions.formats.events import encode_item
from tests.conformance.support import APP, USER, create, delete, each_kind, event
from tests.faults import Point, with_faults

kind = each_kind(
    "encrypted-file",
    some=dict.fromkeys(
        ["encrypted-mariadb", "encrypted-postgresql"],
        (
            "test_pages_list_every_session_once_in_order_of_creation",
            "test_sessions_of_an_app_are_listed_user_by_user",
        ),
    ),
    soak=["encrypted-engine", "encrypted-key-database", "encrypted-psycopg"],
)
OLDEST_AND_NEWEST = pytest.mark.parametrize("order", ["oldest", "newest"])


async def page(
    service: BaseSessionService, user_id: str | None = USER, **options: Any
) -> SessionPage:
    assert isinstance(service, EncryptedSessionService)
    return await service.list_sessions_page(APP, user_id, **options)


async def pages(
    service: BaseSessionService, user_id: str | None = USER, **options: Any
) -> list[list[Session]]:
    """All pages of a listing."""
    found, after = [], None
    for _ in range(100):
        one = await page(service, user_id, after=after, **options)
        found.append(one.sessions)
        after = one.next
        if after is None:
            return found
    raise AssertionError("the listing has no end")


async def named(service: BaseSessionService, session_id: str) -> Session:
    found = await service.get_session(app_name=APP, user_id=USER, session_id=session_id)
    assert found
    return found


async def ids(service: BaseSessionService, *args: Any, **options: Any) -> list[list[str]]:
    return [[one.id for one in sessions] for sessions in await pages(service, *args, **options)]


@OLDEST_AND_NEWEST
async def test_pages_list_every_session_once_in_order_of_creation(
    service: BaseSessionService, order: str
) -> None:
    names = list("cabed")
    for name in names:
        await create(service, name)
        await create(service, name, user_id="another")
    for name in ("a", "c"):  # an update does not move a session
        await service.append_event(await named(service, name), event("text"))
    wanted = names if order == "oldest" else names[::-1]
    for limit in (1, 2, 4, 5, 6):
        expected = [wanted[at : at + limit] for at in range(0, len(wanted), limit)]
        assert await ids(service, limit=limit, order=order) == expected


@OLDEST_AND_NEWEST
async def test_sessions_of_an_app_are_listed_user_by_user(
    service: BaseSessionService, order: str
) -> None:
    created = [("bob", "x"), ("ada", "x"), ("bob", "y"), ("ada", "y"), ("", "x"), ("bob", "z")]
    for user_id, name in created:
        await create(service, name, user_id=user_id)
    await service.create_session(app_name="another", user_id="ada", session_id="w")
    users = ["bob", "ada", ""]
    wanted = sorted(created, key=lambda one: (users.index(one[0]), one[1]))
    wanted = wanted if order == "oldest" else wanted[::-1]
    for limit in (1, 4, 6):
        found = await pages(service, None, limit=limit, order=order)
        assert [(one.user_id, one.id) for part in found for one in part] == wanted
        assert {len(part) for part in found[:-1]} <= {limit}


async def test_session_created_or_deleted_between_pages_moves_no_other(
    service: BaseSessionService,
) -> None:
    for name in "abcdef":
        await create(service, name)
    first = await page(service, limit=3)
    await delete(service, await named(service, "a"))
    await delete(service, await named(service, "c"))  # the position of the next page
    await delete(service, await named(service, "e"))
    await create(service, "g")
    rest = await page(service, limit=9, after=first.next)
    assert [one.id for one in rest.sessions] == ["d", "f", "g"]
    assert rest.next is None
    newest = await page(service, limit=2, order="newest")
    await create(service, "h")
    assert [one.id for one in newest.sessions] == ["g", "f"]
    older = await page(service, limit=9, order="newest", after=newest.next)
    assert [one.id for one in older.sessions] == ["d", "b"]


async def test_listed_session_is_as_in_list_sessions(service: BaseSessionService) -> None:
    state = {"small": 1, "large": "x" * 20_000, "user:u": 2, "app:a": 3}
    await create(service, "s", state=state)
    await service.append_event(await named(service, "s"), event("text", delta={"small": 2}))
    (listed,) = (await service.list_sessions(app_name=APP, user_id=USER)).sessions
    for user_id in (USER, None):
        (paged,) = (await page(service, user_id, limit=5)).sessions
        assert paged == listed
        (bare,) = (await page(service, user_id, limit=5, include_state=False)).sessions
        assert bare == listed.model_copy(update={"state": {}})


@pytest.mark.parametrize("include_state", [True, False])
async def test_event_is_appended_to_a_session_of_a_page(
    service: BaseSessionService, include_state: bool
) -> None:
    await create(service, "s", state={"large": "x" * 20_000, "n": 0})
    await service.append_event(await named(service, "s"), event("one"))
    (session,) = (await page(service, limit=1, include_state=include_state)).sessions
    # The overlay becomes so large that a snapshot is written, which needs the old one.
    await service.append_event(session, event("two", delta={"n": 2, "more": "y" * 20_000}))
    again = await named(service, "s")
    assert again.state == {"large": "x" * 20_000, "n": 2, "more": "y" * 20_000}
    assert len(again.events) == 2


async def test_page_is_full_although_collections_are_left_out(service: BaseSessionService) -> None:
    assert isinstance(service, EncryptedSessionService)
    for n in range(4):
        await create(service, f"s{n}")
        for m in range(3):
            await service.collections.append((APP, USER, f"c{n}{m}"), encode_item({"n": 1}))
    assert await ids(service, limit=2) == [["s0", "s1"], ["s2", "s3"]]
    assert await ids(service, None, limit=3, order="newest") == [["s3", "s2", "s1"], ["s0"]]


async def test_listing_of_the_unknown_is_one_empty_page(service: BaseSessionService) -> None:
    for user_id in (USER, None):
        assert await page(service, user_id, limit=1) == SessionPage([], None)
    await create(service)
    assert await page(service, "unknown", limit=1) == SessionPage([], None)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"limit": 0}, "limit must be an integer from 1 to 1000"),
        ({"limit": 1001}, "limit must be"),
        ({"limit": 1.5}, "limit must be"),
        ({"limit": 1, "order": "updated"}, 'order must be "oldest" or "newest"'),
        ({"limit": 1, "after": ""}, "after must be `next` of the page before"),
        ({"limit": 1, "after": "1"}, "after must be"),
        ({"limit": 1, "after": "8000000000000000.1"}, "after must be"),
        ({"limit": 1, "after": 5}, "after must be"),
        ({"limit": 1, "user_id": 0}, "user_id must be a string"),
    ],
)
async def test_bad_argument_is_a_value_error(
    service: BaseSessionService, options: dict[str, Any], match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        await page(service, **options)


async def test_small_page_of_a_user_with_many_collections_takes_few_reads(tmp_path: Path) -> None:
    def opened() -> EncryptedSessionService:
        return EncryptedSessionService(f"sqlite:///{tmp_path}/s.db", AesGcmBackend(bytes(32)))

    service, faults = with_faults(opened)
    async with service:
        for number in range(120):
            await service.collections.append((APP, USER, f"c{number}"), encode_item({}))
        await create(service, "a")
        before = faults.data.counts[Point.READ]
        assert await ids(service, limit=1) == [["a"]]
        assert faults.data.counts[Point.READ] - before < 5
