"""Compression and padding: sizes in the database, beside ADK's plaintext."""

import itertools
import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import sqlalchemy as sa
from google.adk.events import Event
from google.adk.sessions import BaseSessionService, Session
from google.genai import types

from adk_secure_sessions import AesGcmBackend, EncryptedSessionService
from tests.benchmarks import plan
from tests.benchmarks.databases import ADK, opened, stored_bytes
from tests.benchmarks.deployments import LOCAL, Deployment
from tests.benchmarks.results import Results
from tests.benchmarks.workload import APP, json_size, payload, turn

pytestmark = [
    pytest.mark.bench,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.parametrize("deployment", LOCAL, indirect=True),
]

_KEY = os.urandom(32)
# Words as frequent as in a language: the first is in each sentence, the last in one of a hundred.
_WORDS = [f"{a}{b}{c}" for a in ("re", "mi", "sol", "la", "con") for b in ("ta", "ner", "vo", "lis",
          "du") for c in ("", "n", "ment", "ra", "st", "ble", "tion", "ly")]  # fmt: skip
_WEIGHTS = [1 / (2 + n) for n in range(len(_WORDS))]
SIDES = list(plan.PACKING)


def text(chance: random.Random, words: int) -> str:
    return " ".join(chance.choices(_WORDS, _WEIGHTS, k=words)).capitalize() + "."


def found_rows(chance: random.Random, count: int) -> dict[str, object]:
    """Return what a tool answers: rows of a table, with ids that look random."""
    return {
        "rows": [
            {
                "id": f"{chance.getrandbits(64):016x}",
                "title": text(chance, 6),
                "score": round(chance.random(), 4),
                "created_at": f"2026-0{chance.randint(1, 9)}-{chance.randint(10, 28)}T08:30:00Z",
                "summary": text(chance, 20),
            }
            for _ in range(count)
        ]
    }


def long_turn(chance: random.Random, number: int) -> list[Event]:
    """Return the events of `workload.turn`, with a tool result of 4 KB and an answer of 1.5 KB."""
    events = turn(number)
    parts = [(event.content or types.Content()).parts or [] for event in events]
    response = parts[2][0].function_response
    assert response is not None
    response.response = found_rows(chance, 15)
    parts[3][0].text = text(chance, 220)
    return events


async def converse(service: BaseSessionService, user: str, chance: random.Random) -> Session:
    session = await service.create_session(app_name=APP, user_id=user, state={"step": ""})
    for number in range(plan.TURNS):
        for event in long_turn(chance, number):
            await service.append_event(session, event)
    return session


@asynccontextmanager
async def service_of(side: str, url: sa.URL) -> AsyncIterator[BaseSessionService]:
    if side == ADK:
        async with opened(side, url) as adk:
            yield adk
        return
    options = plan.PACKING[side]
    async with EncryptedSessionService(url, AesGcmBackend(_KEY), **options) as service:  # type: ignore[arg-type]
        yield service


async def test_sizes(deployment: Deployment, results: Results) -> None:
    name = f"{deployment.name}/packing"
    events = [one for n in range(plan.TURNS) for one in long_turn(random.Random(n), n)]
    json = sum(len(event.model_dump_json(exclude_none=True)) for event in events)
    results.count(f"{name}/conversation/JSON", json, "B")
    results.count(f"{name}/session, 100KB/JSON", json_size(payload("100KB")), "B")
    for side in [*SIDES, ADK]:
        url = deployment.databases.create()
        chance = random.Random(1)  # the same texts on each side
        async with service_of(side, url) as service:
            await service.create_session(app_name=APP, user_id="user")
        sizes = [await stored_bytes(url)]
        async with service_of(side, url) as service:
            for _ in range(plan.PACKED_CONVERSATIONS):
                await converse(service, "user", chance)
        sizes.append(await stored_bytes(url))
        async with service_of(side, url) as service:
            for _ in range(plan.PACKED_SESSIONS):
                await service.create_session(app_name=APP, user_id="user", state=payload("100KB"))
        sizes.append(await stored_bytes(url))
        each = [(after - before) for before, after in itertools.pairwise(sizes)]
        conversation = round(each[0] / plan.PACKED_CONVERSATIONS)
        results.count(f"{name}/conversation/{side}", conversation, "B")
        session = round(each[1] / plan.PACKED_SESSIONS)
        results.count(f"{name}/session, 100KB/{side}", session, "B")
