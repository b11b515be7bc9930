"""ADK's memory: ours beside its `SqliteMemoryService`, with plaintext and an index of words.

The two searches differ: ADK's orders the results by BM25, ours as its in-memory service does.
"""

import os
import random
import time
from functools import partial
from pathlib import Path

import pytest
from google.adk.events import Event
from google.adk.memory import BaseMemoryService
from google.adk.sessions import Session
from google.genai import types

from adk_secure_sessions import AesGcmBackend, EncryptedSessionService
from adk_secure_sessions.integrations.memory import EncryptedMemoryService
from tests.benchmarks.comparison import SECONDS
from tests.benchmarks.databases import ADK, OURS
from tests.benchmarks.harness import interleave
from tests.benchmarks.plan import MEMORY_ENTRIES, MEMORY_QUERIES, MEMORY_SEARCH_GOAL
from tests.benchmarks.results import Figure, Results
from tests.benchmarks.workload import APP

pytestmark = [pytest.mark.bench, pytest.mark.asyncio(loop_scope="session")]

SESSIONS, WORDS_OF_ENTRY = 100, 20
START = 1_700_000_000.0
# The most frequent word is in nearly all entries, the rarest in about ten.
VOCABULARY = [f"word{n}" for n in range(5000)]
WEIGHTS = [1 / (1 + n) for n in range(5000)]


def event(chance: random.Random, number: int) -> Event:
    text = " ".join(chance.choices(VOCABULARY, WEIGHTS, k=WORDS_OF_ENTRY))
    content = types.Content(role="user", parts=[types.Part(text=text)])
    return Event(author="user", invocation_id="i", timestamp=START + number, content=content)


def session(name: str, events: list[Event]) -> Session:
    return Session(id=name, app_name=APP, user_id="user", events=events)


async def test_search(results: Results, tmp_path: Path) -> None:
    """Search 10,000 entries of one user."""
    adk = pytest.importorskip("google.adk.memory._sqlite_memory_service")
    chance = random.Random(1)
    size = MEMORY_ENTRIES // SESSIONS
    history = [
        session(f"s{n}", [event(chance, n * size + k) for k in range(size)])
        for n in range(SESSIONS)
    ]
    url = f"sqlite+aiosqlite:///{tmp_path}/ours.db"
    async with EncryptedSessionService(url, AesGcmBackend(os.urandom(32))) as sessions:
        services: dict[str, BaseMemoryService] = {
            OURS: EncryptedMemoryService(sessions),
            ADK: adk.SqliteMemoryService(tmp_path / "adk.db"),
        }
        for service in services.values():
            for one in history:
                await service.add_session_to_memory(one)
        for name, query in MEMORY_QUERIES.items():
            sides = {
                side: partial(service.search_memory, app_name=APP, user_id="user", query=query)
                for side, service in services.items()
            }
            timings = await interleave(sides, SECONDS)
            add(results, f"memory service/search, {name}", timings, MEMORY_SEARCH_GOAL)
        cold = []
        for _ in range(5):
            fresh = EncryptedMemoryService(sessions)
            start = time.perf_counter()
            await fresh.search_memory(app_name=APP, user_id="user", query="word1")
            cold.append(time.perf_counter() - start)
        results.add("memory service/first search of a user", Figure.of(cold, "s"))


def add(
    results: Results, name: str, timings: dict[str, list[float]], goal: float | None = None
) -> None:
    for side, seconds in timings.items():
        limit = goal if side == OURS else None
        results.add(f"{name}/{side}", Figure.of(seconds, "s", goal=limit))
    ratio = Figure.ratio(timings[OURS], timings[ADK])
    results.add(f"{name}/relative to {ADK}", ratio)
