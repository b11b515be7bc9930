"""The search finds what that of ADK's `InMemoryMemoryService` finds, whatever was done before."""

import asyncio
import os
import random
import re
import sys
import unicodedata
from collections.abc import AsyncIterator
from typing import Any

import pytest
from google.adk.memory import BaseMemoryService
from google.genai import types
from hypothesis import given, settings
from hypothesis import strategies as st

from adk_secure_sessions import AesGcmBackend, EncryptedSessionService
from adk_secure_sessions.formats import json_text
from adk_secure_sessions.formats.memory_items import EVENTS_SCOPE, MemoryItem
from adk_secure_sessions.integrations import memory_index
from adk_secure_sessions.integrations.memory import EncryptedMemoryService, _content
from adk_secure_sessions.integrations.memory_index import (
    UserMemory,
    normalized,
    query_words,
    words_and_text,
)
from adk_secure_sessions.storage.schema import SessionRevision
from tests.integrations.memory_support import (
    DIFFERENT,
    add,
    add_events,
    content,
    forget,
    memories,
    reference,
    session,
    text_event,
)

# Few letters and words, so that many of them meet: Latin with and without accents, in both forms,
# letters whose lower case is longer or depends on the place, Cyrillic, Greek, kana, Thai, digits.
ALPHABET = "ab_1 .-ée\u0301İΣς\u017fßдДδ私はをアัก٣\u200d\n"
TEXTS = st.lists(st.text(ALPHABET, max_size=12) | st.text(max_size=8), max_size=3)


@DIFFERENT
@settings(max_examples=50, deadline=None)
@given(st.lists(TEXTS, max_size=14), st.text(ALPHABET, max_size=12) | st.text(max_size=10))
def test_random_texts_are_found_as_by_adk(stored: list[list[str]], query: str) -> None:
    async def both() -> None:
        theirs = reference()
        events = [text_event(*texts, event_id=str(n)) for n, texts in enumerate(stored) if texts]
        await theirs.add_session_to_memory(session(*events))
        mine = UserMemory(SessionRevision(1, 0))
        values = [
            {"id": event.id, "content": json_text.loads(_content(event.content, "", 0))}
            for event in events
            if event.content
        ]
        mine.apply(MemoryItem(EVENTS_SCOPE, values), "2.0.0")
        assert [entry.id for entry in await mine.search(query)] == [
            memory.id for memory in await memories(theirs, query)
        ]

    asyncio.run(both())


WORDS = ["cat", "dog", "Katze", "私は", "Pythonを", "é", "x1", "the", "The", "a"]


async def one_step(chance: random.Random, services: list[Any], known: list[Any]) -> None:
    step = chance.random()
    name = chance.choice(["s", "t", "u", None])
    if step < 0.6:
        event = text_event(" ".join(chance.choices(WORDS, k=chance.randrange(4))))
        if chance.random() < 0.1:
            event.content = None
        known.append(event)
    chosen = known[:]
    if chance.random() < 0.5:
        chosen = chance.sample(known, chance.randrange(len(known) + 1))
    if chance.random() < 0.1 and known:
        chosen.append(chance.choice(known))
    for service in services:
        if step < 0.45:
            await add(service, *chosen, name=name or "s")
        elif step < 0.9:
            await add_events(service, *chosen, name=name)
        elif known:
            await forget(service, known[len(known) // 2].id)


@pytest.fixture
async def sessions() -> AsyncIterator[EncryptedSessionService]:
    async with EncryptedSessionService(":memory:", AesGcmBackend(os.urandom(32))) as service:
        yield service


@DIFFERENT
@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(n, marks=pytest.mark.soak) for n in range(4, 25))]
)
async def test_random_changes_leave_what_adk_has(
    sessions: EncryptedSessionService, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Beside a service that made the changes: one that reads them now and then, and a cold one.

    With every second seed, the memory is rewritten often.
    """
    if seed % 2:
        monkeypatch.setattr(memory_index, "SPARE_ITEMS", -5)
    chance = random.Random(seed)
    theirs, mine, other = (
        reference(),
        EncryptedMemoryService(sessions),
        EncryptedMemoryService(sessions),
    )
    known: list[Any] = []
    for _ in range(25):
        writer = chance.choice([mine, other])
        await one_step(chance, [theirs, writer], known)
        query = " ".join(chance.choices(WORDS, k=chance.randrange(1, 5)))
        expected = await memories(theirs, query)
        readers: list[BaseMemoryService] = [mine]
        if chance.random() < 0.3:
            readers += [other, EncryptedMemoryService(sessions, cache_entries=0)]
        for reader in readers:
            assert await memories(reader, query) == expected


# --- work in linear time -------------------------------------------------------------------------


def longest_run(text: str) -> int:
    longest = run = 0
    for character in unicodedata.normalize("NFD", text):
        run = run + 1 if unicodedata.combining(character) else 0
        longest = max(longest, run)
    return longest


@pytest.mark.parametrize(
    "marks",
    ["\u0315" * 500 + "\u0300" * 500, "\u0315\u0300" * 500, "\u0f73" * 500, "\u0344" * 1000],
    ids=["sorted", "mixed", "decomposed", "double"],
)
def test_runs_of_marks_are_broken(marks: str) -> None:
    """Normalizing a run takes quadratic time: 15 s for 60,000 marks."""
    text = f"cat a{marks} dog"
    assert longest_run(text) >= 1000
    assert longest_run(normalized(text)) <= 60
    assert {"cat", "dog"} <= query_words(text) <= words_and_text(text)[0]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.text(ALPHABET) | st.text("a-\u0315\u0300\u0f73é\u0344", max_size=60)))
def test_words_are_those_of_nfc_unless_a_run_is_long(texts: list[str]) -> None:
    text = "".join(texts)
    if longest_run(text) <= 30:
        words = re.findall(r"\w+", unicodedata.normalize("NFC", text))
        assert query_words(text) == {word.lower() for word in words}


def test_every_mark_may_be_part_of_a_long_run() -> None:
    for character in map(chr, range(sys.maxunicode + 1)):
        if character.isalnum() or character.isspace() or character == "_":
            assert not unicodedata.combining(unicodedata.normalize("NFD", character)[0])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.text(max_size=4), JSON, max_size=3), st.text(max_size=5), st.binary())
def test_content_is_unchanged_by_storing_it(
    response: dict[str, Any], text: str, data: bytes
) -> None:
    """Otherwise, adding the same session again would write it again."""
    function = types.FunctionResponse(name="f", response=response)
    blob = types.Blob(data=data, mime_type="a/b")
    original = content(text)
    assert original.parts is not None
    original.parts += [types.Part(function_response=function), types.Part(inline_data=blob)]
    stored = _content(original, "", 0)
    assert json_text.dumps(json_text.loads(stored)) == stored
    again = types.Content.model_validate(json_text.loads(stored))
    assert _content(again, "", 0) == stored
