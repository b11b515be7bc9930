"""The cost of keys: the start of a service, and a slow key service."""

import asyncio
import itertools
import os
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from adk_secure_sessions import AesGcmBackend, EncryptedSessionService, StaticKey
from tests.benchmarks.budgets import KEY_SERVICE_CALLS
from tests.benchmarks.databases import OURS, Databases, opened
from tests.benchmarks.deployments import LOCAL, SQLITE, Deployment
from tests.benchmarks.harness import interleave
from tests.benchmarks.many_users import DatabasesByUsers
from tests.benchmarks.plan import FEW_USERS, KEY_OPERATIONS, KEY_SERVICE_DELAY, MANY_USERS
from tests.benchmarks.results import Figure, Results
from tests.benchmarks.workload import APP, event

pytestmark = [pytest.mark.bench, pytest.mark.asyncio(loop_scope="session")]


class SlowKeyService:
    """A key provider that answers after `KEY_SERVICE_DELAY` seconds and counts its calls."""

    def __init__(self, key: bytes) -> None:
        self._key = StaticKey(key)
        self.key_id = "slow"
        self.calls = 0

    async def wrap(self, key: bytes, associated_data: bytes) -> bytes:
        await self._answer()
        return await self._key.wrap(key, associated_data)

    async def unwrap(self, wrapped: bytes, associated_data: bytes) -> bytes:
        await self._answer()
        return await self._key.unwrap(wrapped, associated_data)

    async def _answer(self) -> None:
        self.calls += 1
        await asyncio.sleep(KEY_SERVICE_DELAY)


@pytest.mark.parametrize("deployment", LOCAL, indirect=True)
async def test_start(
    deployment: Deployment, results: Results, databases_by_users: DatabasesByUsers
) -> None:
    """Start a service on a database with that many users, and read one session."""
    counts = (FEW_USERS, MANY_USERS)
    urls = {users: await databases_by_users.url(deployment, users) for users in counts}
    numbers = itertools.count()

    async def start(users: int) -> None:
        number = next(numbers) % FEW_USERS
        async with opened(OURS, urls[users]) as service:
            session = await service.get_session(
                app_name=APP, user_id=f"user-{number}", session_id="only"
            )
            assert session is not None

    sides = {f"{count:,} users": partial(start, count) for count in counts}
    timings = await interleave(sides, 5)
    for side, values in timings.items():
        results.add(f"{deployment.name}/keys/start, {side}", Figure.of(values, "s"))
    few, many = timings.values()
    results.add(
        f"{deployment.name}/keys/start, many relative to few users", Figure.ratio(many, few)
    )


async def test_slow_key_service(results: Results, tmp_path: Path) -> None:
    with ExitStack() as stack:
        url = Databases(SQLITE, stack, tmp_path).create()
        key = os.urandom(32)
        await count_calls(results, "first start", url, SlowKeyService(key))
        await count_calls(results, "later start", url, SlowKeyService(key))


async def count_calls(results: Results, start_name: str, url: sa.URL, key: SlowKeyService) -> None:
    """Count the calls of a start and of many operations; the service knows none of the users."""
    each = 5
    async with EncryptedSessionService(url, AesGcmBackend(key)) as service:
        start = time.perf_counter()
        await service.list_sessions(app_name=APP, user_id="nobody")
        results.count(f"keys/{start_name}, first request", time.perf_counter() - start, "s")
        limit = asyncio.Semaphore(50)

        async def visit(number: int) -> None:
            async with limit:
                user: Any = {"app_name": APP, "user_id": f"{start_name} {number}"}
                session = await service.create_session(**user)
                await service.append_event(session, event(0))
                await service.get_session(**user, session_id=session.id)
                await service.list_sessions(**user)
                await service.delete_session(**user, session_id=session.id)

        await asyncio.gather(*map(visit, range(KEY_OPERATIONS // each)))
        start = time.perf_counter()
        await service.list_sessions(app_name=APP, user_id="nobody")
        results.count(f"keys/{start_name}, later request", time.perf_counter() - start, "s")
    name = f"keys/{start_name}, calls for {KEY_OPERATIONS:,} operations"
    results.count(name, key.calls, goal=KEY_SERVICE_CALLS)
