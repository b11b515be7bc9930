"""What a new process pays: imports, a service's first read, and the first read of each user."""

import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Iterator
from contextlib import AsyncExitStack
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from google.adk.sessions import BaseSessionService, Session

from tests.benchmarks.comparison import SECONDS, add_comparison
from tests.benchmarks.databases import ADK, OURS, opened
from tests.benchmarks.deployments import LOCAL, Deployment
from tests.benchmarks.harness import WARM_UPS, Operation, interleave
from tests.benchmarks.plan import COLD_EVENTS
from tests.benchmarks.results import Figure, Results
from tests.benchmarks.seeding import seed_sessions
from tests.benchmarks.workload import APP

pytestmark = pytest.mark.bench

SIDES = (OURS, ADK)
_IMPORTS = """
import json, time
times = [time.perf_counter()]
import google.adk.sessions.database_session_service
times.append(time.perf_counter())
from adk_secure_sessions import AesGcmBackend, EncryptedSessionService
times.append(time.perf_counter())
print(json.dumps(times))
"""
_FIRST_CREATE = """
import asyncio, time
from google.adk.sessions.database_session_service import DatabaseSessionService
from adk_secure_sessions import AesGcmBackend, EncryptedSessionService
async def main():
    begin = time.perf_counter()
    service = {service}
    await service.create_session(app_name="app", user_id="user")
    print(time.perf_counter() - begin)
    await service.close()
asyncio.run(main())
"""
_NO_BYTECODE = "PYTHONDONTWRITEBYTECODE"
_PROCESSES, ROUNDS = 5, 60


def _output(code: str) -> Any:
    """Return what *code* prints as JSON in a new process, which may use compiled modules."""
    environment = {name: value for name, value in os.environ.items() if name != _NO_BYTECODE}
    command = [sys.executable, "-W", "ignore", "-c", code]
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return json.loads(run.stdout)


def test_first_create(tmp_path: Path, results: Results) -> None:
    """A new process creates a session in a database that exists, after the imports."""
    key = bytes(range(32))
    code = {
        OURS: f"EncryptedSessionService('sqlite:///{tmp_path}/ours.db', AesGcmBackend({key!r}))",
        ADK: f"DatabaseSessionService('sqlite+aiosqlite:///{tmp_path}/adk.db')",
    }
    timings: dict[str, list[float]] = {side: [] for side in code}
    for number in range(_PROCESSES + 1):
        for side, service in code.items():
            taken = _output(_FIRST_CREATE.format(service=service))
            if number:  # the first process creates the tables
                timings[side].append(taken)
    add_comparison(results, "cold/first create", timings)


def test_imports(results: Results) -> None:
    """A new process imports ADK's service, and then this package."""
    adk, added = [], []
    for number in range(_PROCESSES + 1):
        start, middle, end = _output(_IMPORTS)
        if number:  # the first process may have compiled the modules
            adk.append(middle - start)
            added.append(end - middle)
    results.add("cold/import/adk", Figure.of(adk, "s"))
    results.add("cold/import/added", Figure.of(added, "s"))


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("deployment", LOCAL, indirect=True)
async def test_first_reads(deployment: Deployment, results: Results) -> None:
    """Get a session: with a new service, of a user whom the service has not met, and again."""
    users = [f"cold-{number}" for number in range(ROUNDS + WARM_UPS)]
    urls, seeded = deployment.urls, deployment.sides
    ids = {
        side: {user: (await seed_sessions(seeded[side], user, 1, COLD_EVENTS))[0] for user in users}
        for side in SIDES
    }

    def get(service: BaseSessionService, side: str, user: str) -> Awaitable[Session | None]:
        return service.get_session(app_name=APP, user_id=user, session_id=ids[side][user])

    def start_and_get(side: str) -> Operation:
        turn = iter(users)

        async def run() -> None:
            async with opened(side, urls[side], prepare=False) as service:
                assert await get(service, side, next(turn)) is not None

        return run

    def get_next(service: BaseSessionService, side: str, turn: Iterator[str]) -> Operation:
        return lambda: get(service, side, next(turn))

    async with AsyncExitStack() as stack:
        new = {side: await stack.enter_async_context(opened(side, urls[side])) for side in SIDES}
        reads: dict[str, dict[str, Operation]] = {
            "new service": {side: start_and_get(side) for side in SIDES},
            "new user": {side: get_next(new[side], side, iter(users)) for side in SIDES},
            "known user": {side: get_next(new[side], side, cycle(users[:1])) for side in SIDES},
        }
        for read, sides in reads.items():
            timings = await interleave(sides, SECONDS, max_rounds=ROUNDS)
            add_comparison(results, f"{deployment.name}/cold/{read}", timings)
