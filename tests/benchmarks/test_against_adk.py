"""Our service with AES-256-GCM beside ADK's plaintext services, on SQLite files.

Prints each ratio beside its budget, asserts none: `make bench`.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import pytest
from google.adk.events import Event, EventActions
from google.adk.sessions import BaseSessionService, Session
from google.adk.sessions.base_session_service import GetSessionConfig
from google.adk.sessions.database_session_service import DatabaseSessionService
from google.adk.sessions.sqlite_session_service import SqliteSessionService
from google.genai import types

from adk_secure_sessions import AesGcmBackend, EncryptedSessionService
from tests.benchmarks.harness import Operation, Ratio, measure

pytestmark = pytest.mark.benchmark

APP, USER = "benchmark", "user"
# Ours / DatabaseSessionService, on SQLite.
BUDGET = {
    "create, state 1 KB": 0.20,
    "create, state 100 KB": 0.42,
    "append": 0.12,
    "append, state 100 KB": 0.12,
    "delete, 20 events": 0.15,
    "get, 0 events": 0.03,
    "get, 20 events": 0.15,
    "get, 100 events": 0.40,
    "get, 1000 events": 0.70,
    "list, 10 sessions": 0.10,
    "list, 100 sessions": 0.20,
    "list, 1000 sessions": 0.30,
    "50 tasks appending": 0.05,
}


class Services(NamedTuple):
    """What is compared, each on a file of its own."""

    ours: BaseSessionService
    database: BaseSessionService
    sqlite: BaseSessionService


@pytest.fixture
async def services(tmp_path: Path) -> AsyncIterator[Services]:
    backend = AesGcmBackend(os.urandom(32))
    ours = EncryptedSessionService(f"sqlite+aiosqlite:///{tmp_path}/ours.db", backend)
    database = DatabaseSessionService(f"sqlite+aiosqlite:///{tmp_path}/database.db")
    yield Services(ours, database, SqliteSessionService(f"{tmp_path}/sqlite.db"))
    await ours.close()
    await database.close()


def event(number: int) -> Event:
    """A turn of a conversation, of some 500 bytes, that changes state."""
    return Event(
        author="agent",
        invocation_id=f"invocation-{number}",
        content=types.Content(role="model", parts=[types.Part(text="What was said. " * 16)]),
        actions=EventActions(state_delta={f"key{number % 20}": number, "last": "value " * 4}),
    )


def state(size: int) -> dict[str, object]:
    """State of about *size* bytes of JSON, in values of some 100 bytes."""
    return {f"key{number}": "v" * 90 for number in range(max(1, size // 105))}


async def with_events(service: BaseSessionService, count: int, size: int = 1000) -> Session:
    session = await service.create_session(app_name=APP, user_id=USER, state=state(size))
    for number in range(count):
        await service.append_event(session, event(number))
    return session


async def compare(services: Services, name: str, operations: list[Operation], pairs: int) -> None:
    ours, *references = operations
    for reference, operation in zip(("database", "sqlite"), references, strict=True):
        result = await measure(ours, operation, pairs)
        show(name, reference, result, BUDGET[name] if reference == "database" else None)


def show(name: str, reference: str, result: Ratio, budget: float | None) -> None:
    verdict = ""
    if budget is not None:
        verdict = f"  budget {budget:.2f} {'met' if result.median <= budget else 'MISSED'}"
    print(
        f"\n{name:<24} / {reference:<8} {result.median:6.3f} [{result.low:.3f}-{result.high:.3f}]"
        f"  {result.ours * 1e3:8.3f} ms / {result.reference * 1e3:8.3f} ms{verdict}",
        end="",
    )


@pytest.mark.parametrize("size", [1, 100])
async def test_create(services: Services, size: int) -> None:
    initial = state(size * 1000)

    def operation(service: BaseSessionService) -> Operation:
        return lambda: service.create_session(app_name=APP, user_id=USER, state=initial)

    await compare(services, f"create, state {size} KB", [operation(s) for s in services], 100)


@pytest.mark.parametrize("size", [1, 100])
async def test_append(services: Services, size: int) -> None:
    async def operation(service: BaseSessionService) -> Operation:
        session = await with_events(service, 5, size * 1000)
        turn = iter(range(10**9))
        return lambda: service.append_event(session, event(next(turn)))

    name = "append" if size == 1 else f"append, state {size} KB"
    await compare(services, name, [await operation(s) for s in services], 150)


@pytest.mark.parametrize("count", [0, 20, 100, 1000])
async def test_get(services: Services, count: int) -> None:
    async def operation(service: BaseSessionService) -> Operation:
        session = await with_events(service, count or 20)
        config = GetSessionConfig(num_recent_events=0) if count == 0 else None
        return lambda: service.get_session(
            app_name=APP, user_id=USER, session_id=session.id, config=config
        )

    pairs = 15 if count == 1000 else 60
    await compare(services, f"get, {count} events", [await operation(s) for s in services], pairs)


@pytest.mark.parametrize("count", [10, 100, 1000])
async def test_list(services: Services, count: int) -> None:
    async def operation(service: BaseSessionService) -> Operation:
        for _ in range(count):
            await service.create_session(app_name=APP, user_id=USER, state=state(500))
        return lambda: service.list_sessions(app_name=APP, user_id=USER)

    pairs = 15 if count == 1000 else 60
    await compare(
        services, f"list, {count} sessions", [await operation(s) for s in services], pairs
    )


async def test_delete(services: Services) -> None:
    async def operation(service: BaseSessionService) -> Operation:
        ready = [(await with_events(service, 20)).id for _ in range(80)]

        async def delete() -> None:
            await service.delete_session(app_name=APP, user_id=USER, session_id=ready.pop())

        return delete

    await compare(services, "delete, 20 events", [await operation(s) for s in services], 30)


async def test_throughput(services: Services) -> None:
    """50 tasks, 10 appends each, to a session each; SqliteSessionService gives up: locked."""

    async def operation(service: BaseSessionService) -> Operation:
        sessions = [await with_events(service, 0) for _ in range(50)]

        async def appends(session: Session) -> None:
            for number in range(10):
                await service.append_event(session, event(number))

        async def run() -> None:
            await asyncio.gather(*map(appends, sessions))

        return run

    ours, database = [await operation(service) for service in services[:2]]
    start = time.perf_counter()
    result = await measure(ours, database, 4)
    show("50 tasks appending", "database", result, BUDGET["50 tasks appending"])
    rates = 500 / result.ours, 500 / result.reference
    print(f"  {rates[0]:.0f}/s / {rates[1]:.0f}/s, {time.perf_counter() - start:.0f} s", end="")
