"""ADK's contract of a memory service: ours on each database, and ADK's in-memory one beside it."""

from collections.abc import AsyncIterator

import pytest
import sqlalchemy as sa
from google.adk.memory import BaseMemoryService
from google.genai import types

from adk_secure_sessions import AesGcmBackend, EncryptedSessionService
from tests.integrations.memory_support import (
    DIFFERENT,
    IS_NEWEST,
    add,
    add_events,
    forget,
    found,
    memories,
    ours,
    reference,
    text_event,
)
from tests.maintenance.support import OLD
from tests.servers import DRIVERS, Server

BACKEND = AesGcmBackend(OLD)


@pytest.fixture(params=["adk", "sqlite", "cold", *DRIVERS])
async def service(
    request: pytest.FixtureRequest, file_url: str
) -> AsyncIterator[BaseMemoryService]:
    """ADK's own; ours on each database; and one that caches nothing."""
    if request.param == "adk":
        if not IS_NEWEST:
            pytest.skip("the in-memory service of this google-adk is an older one")
        yield reference()
        return
    if request.param in ("sqlite", "cold"):
        async with EncryptedSessionService(file_url, BACKEND) as sessions:
            yield ours(sessions, cache_entries=0 if request.param == "cold" else 100_000)
        return
    server: Server = request.getfixturevalue(request.param)
    with server.database() as url:
        url = url.set(drivername=DRIVERS[url.get_backend_name()])
        async with EncryptedSessionService(sa.make_url(url), BACKEND) as sessions:
            yield ours(sessions)


async def test_session_is_found_by_its_words(service: BaseMemoryService) -> None:
    await add(service, text_event("The Cat sat."), text_event("A dog barked."), text_event())
    assert await found(service, "cat") == ["The Cat sat."]
    assert await found(service, "DOG? cat!") == ["The Cat sat.", "A dog barked."]
    assert await found(service, "ca") == []
    assert await found(service, "") == []


async def test_entry_is_returned_as_it_was_added(service: BaseMemoryService) -> None:
    event = text_event("fever", "since Monday", author="ada")
    assert event.content is not None
    assert event.content.parts is not None
    event.content.parts.append(
        types.Part(inline_data=types.Blob(data=b"\xff\xfe\x00", mime_type="image/png"))
    )
    await add(service, event)
    [memory] = await memories(service, "monday")
    assert memory.content == event.content
    assert (memory.id, memory.author) == (event.id, "ada")
    [again] = await memories(service, "monday")
    again.content.parts.clear()
    [last] = await memories(service, "monday")
    assert last.content == event.content, "a result shares nothing with the store"


async def test_users_and_apps_are_kept_apart(service: BaseMemoryService) -> None:
    await add(service, text_event("cat"))
    await add(service, text_event("cat of bob"), user="bob")
    assert await found(service, "cat") == ["cat"]
    assert await found(service, "cat", "bob") == ["cat of bob"]
    other = await service.search_memory(app_name="other", user_id="ada", query="cat")
    assert other.memories == []


async def test_adding_a_session_again_replaces_it(service: BaseMemoryService) -> None:
    events = [text_event(f"cat {n}") for n in range(4)]
    await add(service, *events[:2])
    await add(service, text_event("other cat"), name="t")
    await add(service, *events)
    first = ["cat 0", "cat 1", "cat 2", "cat 3", "other cat"]
    assert await found(service, "cat") == first
    await add(service, *events)
    assert await found(service, "cat") == first
    await add(service, events[1], events[3])
    assert await found(service, "cat") == ["cat 1", "cat 3", "other cat"]
    await add(service, *events)
    assert await found(service, "cat") == first
    await add(service)
    assert await found(service, "cat") == ["other cat"]


async def test_changed_event_replaces_the_old_one(service: BaseMemoryService) -> None:
    event = text_event("cat")
    await add(service, event)
    event.content = text_event("dog").content
    await add(service, event)
    assert await found(service, "cat dog") == ["dog"]


async def test_events_with_known_ids_are_not_added(service: BaseMemoryService) -> None:
    event, other = text_event("cat"), text_event("second cat")
    await add_events(service, event, text_event())
    changed = text_event("dog", event_id=event.id)
    await add_events(service, changed, other, other)
    assert await found(service, "cat dog") == ["cat", "second cat"]
    await add_events(service, event, name="s")
    assert await found(service, "cat") == ["cat", "second cat", "cat"]
    await add(service, other)
    assert await found(service, "cat") == ["cat", "second cat", "second cat"]


async def test_deleted_memory_is_gone_everywhere_and_stays_away(
    service: BaseMemoryService,
) -> None:
    cat, dog = text_event("cat"), text_event("dog")
    await add(service, cat, dog)
    await add_events(service, cat)
    await forget(service, None)
    await forget(service, "")
    await forget(service, "unknown")
    assert await found(service, "cat dog") == ["cat", "dog", "cat"]
    await forget(service, cat.id)
    assert await found(service, "cat dog") == ["dog"]
    await add(service, cat, dog)
    await add_events(service, cat)
    await add_events(service, cat, name="t")
    assert await found(service, "cat dog") == ["dog"]
    await add(service, cat, user="bob")
    assert await found(service, "cat", "bob") == ["cat"]


async def test_ten_best_are_returned_ties_in_order_of_insertion(service: BaseMemoryService) -> None:
    for name in "ts":
        await add(service, *(text_event(f"cat {name} {n}") for n in range(6)), name=name)
    await add_events(service, text_event("a cat and a dog"))
    await add(service, *(text_event(f"cat {n}") for n in range(6)), name="t")
    assert await found(service, "dog cat") == [
        "a cat and a dog",
        *(f"cat {n}" for n in range(6)),
        "cat s 0",
        "cat s 1",
        "cat s 2",
    ]


@DIFFERENT
async def test_scripts_without_spaces_are_searched(service: BaseMemoryService) -> None:
    await add(service, text_event("私はPythonを使う"), text_event("Cafe\N{COMBINING ACUTE ACCENT}"))
    assert await found(service, "python") == ["私はPythonを使う"]
    assert await found(service, "使う") == ["私はPythonを使う"]
    assert await found(service, "thon") == []
    assert await found(service, "café") == ["Cafe\N{COMBINING ACUTE ACCENT}"]
