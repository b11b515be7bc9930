"""What only our memory has: cheap writes, a cache, rankers, checks of bad input; and agents."""

import asyncio
import datetime
import gc
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
from google.adk.agents import LlmAgent
from google.adk.memory.base_memory_service import BaseMemoryService
from google.adk.memory.memory_entry import MemoryEntry
from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.runners import Runner
from google.adk.sessions import InMemorySessionService
from google.adk.tools.load_memory_tool import load_memory_tool as load_memory
from google.adk.tools.preload_memory_tool import preload_memory_tool as preload_memory
from google.genai import types

from adk_secure_sessions import AesGcmBackend, Caches, ConfigurationError, EncryptedSessionService
from adk_secure_sessions.formats.memory_items import COLLECTION_NAME
from adk_secure_sessions.integrations import memory as module
from adk_secure_sessions.integrations import memory_index
from adk_secure_sessions.integrations.memory import EncryptedMemoryService, RankedEntry
from adk_secure_sessions.integrations.memory_index import UserMemory
from adk_secure_sessions.storage.features.collections import Collections
from tests.integrations.memory_support import (
    APP,
    USER,
    add,
    add_events,
    content,
    forget,
    found,
    items_of,
    memories,
    ours,
    session,
    text_event,
)
from tests.maintenance.support import OLD

BACKEND = AesGcmBackend(OLD)


@pytest.fixture
async def sessions(file_url: str) -> AsyncIterator[EncryptedSessionService]:
    async with EncryptedSessionService(file_url, BACKEND) as service:
        yield service


async def whole(memory: EncryptedMemoryService) -> UserMemory | None:
    return await memory._up_to_date(await memory._cache(), (APP, USER, COLLECTION_NAME))


def remember(service: BaseMemoryService, *memories: MemoryEntry, **more: Any) -> Any:
    return service.add_memory(app_name=APP, user_id=USER, memories=memories, **more)


# --- writes --------------------------------------------------------------------------------------


async def test_only_the_difference_is_written(sessions: EncryptedSessionService) -> None:
    memory = ours(sessions)
    events = [text_event(f"cat {n}") for n in range(30)]
    for n in range(10, 31, 10):
        await add(memory, *events[:n])
        await add(memory, *events[:n])
    items = await items_of(sessions)
    assert len(items) == 4, "the first one is empty"
    for n, event in enumerate(events):
        assert [event.id.encode() in item for item in items].count(True) == 1, n


async def test_window_of_the_last_events_costs_one_item_a_turn(
    sessions: EncryptedSessionService,
) -> None:
    memory = ours(sessions)
    events = [text_event(f"cat {n}") for n in range(12)]
    for n in range(4, 13):
        await add(memory, *events[n - 4 : n])
    assert len(await items_of(sessions)) == 1 + 9
    assert await found(memory, "cat") == [f"cat {n}" for n in range(8, 12)]
    assert await found(ours(sessions), "cat") == [f"cat {n}" for n in range(8, 12)]


async def test_large_session_is_stored_as_several_items(sessions: EncryptedSessionService) -> None:
    memory = ours(sessions)
    events = [text_event(f"cat {n} " + "x" * 50_000) for n in range(12)]
    await add(memory, *events)
    items = await items_of(sessions)
    assert len(items) == 1 + 6
    assert max(map(len, items)) < 2 * module._ITEM_BYTES
    assert len(await found(ours(sessions), "11")) == 1
    await add(memory, *events)
    assert len(await items_of(sessions)) == 7


async def test_turn_costs_one_read_and_one_write(
    sessions: EncryptedSessionService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after each run of an agent: nothing but the position and the new item."""
    memory = ours(sessions)
    events = [text_event(f"cat {n}") for n in range(3)]
    await add(memory, *events[:1])
    calls: list[object] = []
    get, append = Collections.get, Collections.append_at

    async def counted_get(self: Collections, *args: Any, **more: Any) -> Any:
        calls.append(("get", more.get("limit")))
        return await get(self, *args, **more)

    async def counted_append(self: Collections, *args: Any, **more: Any) -> Any:
        calls.append("append")
        return await append(self, *args, **more)

    monkeypatch.setattr(Collections, "get", counted_get)
    monkeypatch.setattr(Collections, "append_at", counted_append)
    await add(memory, *events)
    assert calls == [("get", 0), "append"]
    calls.clear()
    await found(memory, "cat")
    assert calls == [("get", 0)]


async def test_two_services_adding_at_once_lose_nothing(url: str) -> None:
    async with (
        EncryptedSessionService(url, BACKEND) as one,
        EncryptedSessionService(url, BACKEND) as two,
    ):
        services = [ours(one), ours(two), ours(one)]
        common = text_event("cat")
        await asyncio.gather(
            *(
                add_events(services[n % 3], common, text_event(f"cat {n} word{n}"))
                for n in range(18)
            )
        )
        for n in range(18):
            assert len(await found(services[n % 3], f"word{n}")) == 1
        reader = await whole(ours(two))
        assert reader is not None
        assert len(reader.entries) == 19, "the common event is there once"


# --- the cache -----------------------------------------------------------------------------------


async def test_cache_is_limited(sessions: EncryptedSessionService) -> None:
    memory = ours(sessions, cache_entries=205)  # two users with 5 entries
    for user in "abc":
        await add(memory, text_event(f"cat {user}"), user=user)
    kept = (await memory._cache())._entries
    assert [user for _, user, _ in kept] == ["b", "c"]
    await add(memory, *(text_event(f"cat {n}") for n in range(5)), user="b")
    assert await found(memory, "cat", "b") == [f"cat {n}" for n in range(5)]
    assert [user for _, user, _ in kept] == ["b"]
    await add(memory, *(text_event(f"cat {n}") for n in range(110)), user="b")
    assert len(await found(memory, "cat", "b")) == 10
    assert not kept


async def test_cache_expires_with_that_of_the_sessions(file_url: str) -> None:
    async with EncryptedSessionService(file_url, BACKEND, cache=Caches(seconds=0)) as sessions:
        memory = ours(sessions)
        await add(memory, text_event("cat"))
        assert await found(memory, "cat") == ["cat"]
        assert (await sessions.collections.runner.cached_object(memory, dict)) == {}


async def test_cache_ends_with_its_service(sessions: EncryptedSessionService) -> None:
    memory = ours(sessions)
    await add(memory, text_event("cat"))
    cached = ref(await whole(memory))
    del memory
    gc.collect()
    assert cached() is None


async def test_memory_that_was_created_again_is_read_again(
    sessions: EncryptedSessionService, file_url: str
) -> None:
    memory = ours(sessions)
    await add(memory, text_event("cat"))
    async with EncryptedSessionService(file_url, BACKEND) as others:
        await others.collections.delete((APP, USER, '["memory"]'))
        assert await found(memory, "cat dog") == []
        await add(memory, text_event("cat"))
        await others.collections.delete((APP, USER, '["memory"]'))
        for n in range(3):
            await add_events(ours(others), text_event(f"dog {n}"))
        assert await found(memory, "cat dog") == ["dog 0", "dog 1", "dog 2"]
        await others.collections.delete((APP, USER, '["memory"]'))
        await add(memory, text_event("cat"))
        assert await found(ours(others), "cat dog") == ["cat"]


async def test_long_search_lets_other_tasks_run(
    sessions: EncryptedSessionService, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = ours(sessions)
    await add(memory, *(text_event("カキ" * 200 + str(n)) for n in range(300)))
    await found(memory, "x")
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(memory_index, "_WORK_SECONDS", 0)
    monkeypatch.setattr(memory_index, "_TEXTS_AT_ONCE", 10)
    other = asyncio.create_task(count())
    for query, least in ((" ".join(f"ク{n}" for n in range(30)), 100), ("ク", 30)):
        turns = 0
        await memory.search_memory(app_name=APP, user_id=USER, query=query)
        assert turns > least
    other.cancel()


# --- memories that are not events ----------------------------------------------------------------


async def test_explicit_memories_are_added_replaced_and_deleted(
    sessions: EncryptedSessionService,
) -> None:
    memory = ours(sessions)
    first = MemoryEntry(
        content=content("likes cats"),
        id="m1",
        author="notes",
        timestamp="last summer",
        custom_metadata={"source": "form"},
    )
    await remember(memory, first, custom_metadata={"source": "call", "ttl": 3})
    await remember(memory, MemoryEntry(content=content("has a cat and cats")))
    likes, has = await memories(memory, "cats")
    assert likes.model_copy(update={"custom_metadata": {}}) == first.model_copy(
        update={"custom_metadata": {}}
    )
    assert likes.custom_metadata == {"source": "form", "ttl": 3}
    assert has.id
    assert has.timestamp is None
    size = len(await items_of(sessions))
    await remember(memory, first, custom_metadata={"source": "call", "ttl": 3})
    assert len(await items_of(sessions)) == size, "nothing changed"
    await remember(memory, first.model_copy(update={"content": content("likes dogs")}))
    assert await found(memory, "cats") == ["has a cat and cats"]
    await forget(memory, "m1")
    assert await found(ours(sessions), "dogs") == []
    with pytest.raises(ValueError, match=r"memories\[0\] has the id of a memory that was deleted"):
        await remember(memory, first)
    with pytest.raises(ValueError, match="two of the memories have the same id"):
        await remember(memory, *[MemoryEntry(content=content("x"), id="x")] * 2)


async def test_metadata_of_events_is_returned(sessions: EncryptedSessionService) -> None:
    memory = ours(sessions)
    event = text_event("cat")
    await add_events(memory, event, name="s", custom_metadata={"ttl": 3})
    assert [one.custom_metadata for one in await memories(memory, "cat")] == [{"ttl": 3}]
    await add(memory, event)
    assert [one.custom_metadata for one in await memories(ours(sessions), "cat")] == [{"ttl": 3}]


# --- rankers -------------------------------------------------------------------------------------


class ByLength:
    """The two longest texts; a ranker with embeddings looks the same."""

    def __init__(self) -> None:
        self.seen: dict[str, str] = {}

    async def rank(self, query: str, entries: Sequence[RankedEntry]) -> Sequence[RankedEntry]:
        self.seen |= {entry.key: entry.text for entry in entries}
        return sorted(entries, key=lambda entry: -len(entry.text))[:2]


async def test_ranker_chooses_and_orders(sessions: EncryptedSessionService) -> None:
    ranker = ByLength()
    memory = ours(sessions, ranker=ranker)
    assert await found(memory, "anything") == []
    await add(memory, text_event("one"), text_event("three"), text_event("seven ", "teen"))
    assert await found(memory, "anything") == ["seven  teen", "three"]
    await add_events(memory, text_event("four"))
    await found(memory, "")
    assert sorted(ranker.seen.values()) == ["four", "one", "seven  teen", "three"]
    assert all("seven" not in repr(entry) for entry in ranker.seen)


async def test_ranker_cannot_return_the_entry_of_another_user(
    sessions: EncryptedSessionService,
) -> None:
    class Keeping:
        """Keeps the entries that it saw first, as a faulty cache does."""

        kept: Sequence[RankedEntry] = ()

        async def rank(self, query: str, entries: Sequence[RankedEntry]) -> Sequence[RankedEntry]:
            self.kept = self.kept or entries
            return self.kept

    memory = ours(sessions, ranker=Keeping())
    for user in ("ann", "bob"):
        await add(memory, text_event(f"secret of {user}"), user=user)
    assert await found(memory, "x", "ann") == ["secret of ann"]
    with pytest.raises(ConfigurationError, match="for this query") as caught:
        await found(memory, "x", "bob")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("answer", [None, 7, ["secret"]])
async def test_ranker_that_returns_no_entries_is_an_error(
    sessions: EncryptedSessionService, answer: object
) -> None:
    class Wrong:
        async def rank(self, query: str, entries: Sequence[Any]) -> Any:
            return answer

    memory = ours(sessions, ranker=Wrong())
    await add(memory, text_event("secret"))
    with pytest.raises(ConfigurationError, match="must return a sequence") as caught:
        await found(memory, "x")
    assert "secret" not in str(caught.value)


async def test_entry_deleted_while_a_ranker_runs_is_not_returned(
    sessions: EncryptedSessionService,
) -> None:
    class Slow:
        async def rank(self, query: str, entries: Sequence[RankedEntry]) -> Sequence[RankedEntry]:
            await forget(memory, "gone")
            return entries

    memory = ours(sessions, ranker=Slow())
    await add(memory, text_event("kept"), text_event("secret", event_id="gone"))
    assert await found(memory, "x") == ["kept"]


# --- bad input -----------------------------------------------------------------------------------


def answer(value: object) -> Any:
    event = text_event("secret")
    assert event.content is not None
    assert event.content.parts is not None
    response = types.FunctionResponse(name="f", response={"r": value})
    event.content.parts.append(types.Part(function_response=response))
    return event


def deep(levels: int) -> Any:
    value: Any = "secret"
    for _ in range(levels):
        value = [value]
    return value


def circular() -> Any:
    value: list[Any] = []
    value.append(value)
    return value


BAD = {
    "no JSON form": (answer(object()), "holds a value without JSON form"),
    "too deep": (answer(deep(250)), "depth exceeds the limit"),
    "circular": (answer(circular()), "circular"),
    "too many digits": (answer(10**5000), "more than 4300 digits"),
    "infinite time": (
        text_event("secret").model_copy(update={"timestamp": float("inf")}),
        "not a possible time",
    ),
    "time as text": (
        text_event("secret").model_copy(update={"timestamp": "secret"}),
        "not a possible time",
    ),
    "no id": (text_event("secret").model_copy(update={"id": None}), "must be strings"),
}


@pytest.mark.parametrize(("bad", "message"), BAD.values(), ids=BAD)
async def test_event_that_cannot_be_stored_stores_nothing(
    sessions: EncryptedSessionService, bad: Any, message: str
) -> None:
    memory = ours(sessions)
    events = [text_event("cat"), bad]
    unchecked = session().model_copy(update={"events": events})
    for call in (memory.add_session_to_memory(unchecked), add_events(memory, *events)):
        with pytest.raises(ValueError, match=rf"events\[1\].*{message}") as caught:
            await call
        assert "secret" not in str(caught.value)
    assert await items_of(sessions) == ()


@pytest.mark.parametrize(
    "values", [{"a": object()}, {1: 2}, {"a": deep(250)}], ids=["object", "key", "deep"]
)
async def test_metadata_that_cannot_be_stored_stores_nothing(
    sessions: EncryptedSessionService, values: Any
) -> None:
    memory = ours(sessions)
    with pytest.raises(ValueError, match="custom_metadata"):
        await add_events(memory, text_event("cat"), custom_metadata=values)
    with pytest.raises(ValueError, match="custom_metadata"):
        await remember(memory, MemoryEntry(content=content("cat")), custom_metadata=values)
    assert await items_of(sessions) == ()


async def test_values_with_json_form_are_stored(sessions: EncryptedSessionService) -> None:
    memory = ours(sessions)
    values = [float("nan"), None, datetime.date(2026, 1, 2), "\ud800 cat", b"\xff", {"\ud800": 1}]
    await add(memory, answer(values))
    [stored] = await memories(ours(sessions), "secret")
    response = stored.content.parts[1].function_response.response["r"]
    assert response[0] != response[0]
    assert response[1:] == [None, "2026-01-02", "\ud800 cat", "_w==", {"\ud800": 1}]


async def test_ids_are_checked(sessions: EncryptedSessionService) -> None:
    memory = ours(sessions)
    for app, user, message in (("a", 3, "user_id must be"), ("a" * 1025, "u", "app_name has more")):
        with pytest.raises(ValueError, match=message):
            await memory.search_memory(app_name=app, user_id=user, query="x")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="InMemorySessionService"):
        EncryptedMemoryService(InMemorySessionService())  # type: ignore[arg-type]


async def test_content_of_a_later_adk_is_named(
    sessions: EncryptedSessionService, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = ours(sessions)
    await add(memory, text_event("cat"))
    entries = await whole(memory)
    assert entries is not None
    for entry in entries.entries.values():
        entry.content = b'{"parts":[{"unheard_of":"secret"}]}'
    with pytest.raises(ConfigurationError, match=r"row \d+, 1 was written by google-adk") as caught:
        await found(memory, "cat")
    assert "secret" not in str(caught.value)


# --- agents --------------------------------------------------------------------------------------


class Asking(BaseLlm):
    """Calls `load_memory` with the user's words; says "done" to its result.  Keeps all requests."""

    model: str = "offline"
    requests: list[str] = []  # noqa: RUF012 - pydantic copies it

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        self.requests.append(llm_request.model_dump_json(exclude={"tools_dict"}))
        parts = [part for one in llm_request.contents for part in one.parts or ()]
        part = types.Part(text="done")
        if not any(one.function_response for one in parts):
            call = types.FunctionCall(name="load_memory", args={"query": "which allergy"})
            part = types.Part(function_call=call)
        yield LlmResponse(content=types.Content(role="model", parts=[part]))


@pytest.mark.filterwarnings("ignore")
async def test_agent_remembers_other_sessions(file_url: str, tmp_path: Path) -> None:
    """A callback adds the session after each run, and both of ADK's tools search."""

    async def keep(callback_context: Any) -> None:
        inner = callback_context._invocation_context
        await inner.memory_service.add_session_to_memory(inner.session)

    model = Asking()
    agent = LlmAgent(
        name="nurse",
        model=model,
        tools=[load_memory, preload_memory],
        after_agent_callback=keep,
    )

    async def say(text: str, name: str) -> list[str]:
        model.requests.clear()
        async with EncryptedSessionService(file_url, BACKEND) as sessions:
            runner = Runner(
                app_name=APP, agent=agent, session_service=sessions, memory_service=ours(sessions)
            )
            await sessions.create_session(app_name=APP, user_id=USER, session_id=name)
            async for _ in runner.run_async(
                user_id=USER, session_id=name, new_message=content(text)
            ):
                pass
        return list(model.requests)

    assert not any("penicillin" in one for one in await say("hello", "s0"))
    await say("my allergy is penicillin", "s1")
    preloaded, loaded = await say("do you know my allergy", "s2")
    assert "PAST_CONVERSATIONS" in preloaded
    assert preloaded.count("my allergy is penicillin") == 1
    assert loaded.count("my allergy is penicillin") == 2
    async with EncryptedSessionService(file_url, BACKEND) as sessions:
        assert (await found(ours(sessions), "penicillin"))[0] == "my allergy is penicillin"
    assert b"penicillin" not in (tmp_path / "sessions.db").read_bytes()
