"""Short calls for the tests of memory.

How it works.  `text_event("words")` is an event with a text, each a second after the one before it.
`add`, `remember` and `forget` call the service for one app and user; `found` searches and returns
the texts.  `reference()` is ADK's own `InMemoryMemoryService`; `DIFFERENT` skips a test where the
installed google-adk has one with another search than that of 2.13.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from google.adk.events import Event
from google.adk.memory import BaseMemoryService, InMemoryMemoryService, in_memory_memory_service
from google.adk.sessions import Session
from google.genai import types

from adk_secure_sessions import EncryptedSessionService
from adk_secure_sessions.integrations.memory import EncryptedMemoryService

APP, USER = "clinic", "ada"
START = 1_700_000_000.0

_ticks = itertools.count()
IS_NEWEST = hasattr(in_memory_memory_service, "_extract_searchable_words")
DIFFERENT = pytest.mark.skipif(
    not IS_NEWEST, reason="the search of this google-adk's in-memory service is an older one"
)


def content(*texts: str) -> types.Content:
    return types.Content(role="user", parts=[types.Part(text=text) for text in texts])


def text_event(*texts: str, event_id: str | None = None, author: str = "user") -> Event:
    event = Event(
        author=author,
        invocation_id="i",
        timestamp=START + next(_ticks),
        content=content(*texts) if texts else None,
    )
    if event_id is not None:
        event.id = event_id
    return event


def session(*events: Event, name: str = "s", user: str = USER) -> Session:
    return Session(id=name, app_name=APP, user_id=user, events=list(events))


async def add(
    service: BaseMemoryService, *events: Event, name: str = "s", user: str = USER
) -> None:
    await service.add_session_to_memory(session(*events, name=name, user=user))


async def add_events(
    service: BaseMemoryService, *events: Event, name: str | None = None, **more: Any
) -> None:
    await service.add_events_to_memory(
        app_name=APP, user_id=USER, events=events, session_id=name, **more
    )


async def forget(service: Any, memory_id: str | None) -> None:
    await service.delete_memory(app_name=APP, user_id=USER, memory_id=memory_id)


async def memories(service: BaseMemoryService, query: str, user: str = USER) -> list[Any]:
    answer = await service.search_memory(app_name=APP, user_id=user, query=query)
    return list(answer.memories)


async def found(service: BaseMemoryService, query: str, user: str = USER) -> list[str]:
    return [texts(memory.content) for memory in await memories(service, query, user)]


def texts(content: types.Content) -> str:
    return " ".join(part.text for part in content.parts or () if part.text)


def reference() -> InMemoryMemoryService:
    return InMemoryMemoryService()


async def items_of(service: EncryptedSessionService, user: str = USER) -> Sequence[bytes]:
    found = await service.collections.get((APP, user, '["memory"]'))
    return found.items if found else ()


def ours(service: EncryptedSessionService, **options: Any) -> EncryptedMemoryService:
    return EncryptedMemoryService(service, **options)
