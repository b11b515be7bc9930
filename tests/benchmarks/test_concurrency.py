"""Sealing from several threads; writing in batches; memory that an operation takes."""

import asyncio
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from google.adk.sessions import BaseSessionService
from google.adk.sessions.base_session_service import GetSessionConfig

from tests.benchmarks.ciphers import BACKENDS, new_cipher
from tests.benchmarks.databases import ADK_SQLITE, FLOOR, OURS
from tests.benchmarks.deployments import LOCAL, Deployment
from tests.benchmarks.harness import Operation, gc_paused, interleave
from tests.benchmarks.memory import peak_memory
from tests.benchmarks.plan import BATCH_APPENDS, FIELD_SIZES, MEMORY_OPERATIONS, THREADS
from tests.benchmarks.results import Figure, Results
from tests.benchmarks.workload import APP, event, payload, state

pytestmark = pytest.mark.benchmark

SAMPLES = 25
SECONDS = 0.02  # that each sample takes


@pytest.mark.parametrize("size", FIELD_SIZES)
@pytest.mark.parametrize("name", BACKENDS)
def test_threads(results: Results, name: str, size: str) -> None:
    """One cipher, as a service has one for each user, in so many threads at once."""
    cipher = new_cipher(name)
    plaintext = os.urandom(FIELD_SIZES[size])

    def encrypt(count: int) -> None:
        for _ in range(count):
            cipher.encrypt(plaintext, b"context")

    start = time.perf_counter()
    encrypt(100)
    count = max(8, round(SECONDS / (time.perf_counter() - start) * 100))
    rates: dict[int, list[float]] = {threads: [] for threads in THREADS}
    with ThreadPoolExecutor(max(THREADS)) as pool, gc_paused():
        list(pool.map(encrypt, [1] * max(THREADS)))
        for _ in range(SAMPLES):
            for threads in THREADS:
                start = time.perf_counter()
                list(pool.map(encrypt, [count // threads] * threads))
                done = count // threads * threads
                rates[threads].append(done / (time.perf_counter() - start))
    for threads, values in rates.items():
        results.add(f"threads/{threads}, {size}/{name}", Figure.of(values, "/s"))


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("deployment", LOCAL, indirect=True)
async def test_batch(deployment: Deployment, results: Results) -> None:
    """Events of as many sessions, appended all at once and one after the other."""
    service = deployment.sides[OURS]
    sessions = [
        await service.create_session(app_name=APP, user_id=f"batch-{number}")
        for number in range(BATCH_APPENDS)
    ]

    async def concurrently() -> None:
        await asyncio.gather(*(service.append_event(one, event(0)) for one in sessions))

    async def sequentially() -> None:
        for one in sessions:
            await service.append_event(one, event(0))

    timings = await interleave(
        {"concurrently": concurrently, "sequentially": sequentially}, 5, max_rounds=60
    )
    for how, values in timings.items():
        figure = Figure.of([BATCH_APPENDS / seconds for seconds in values], "/s")
        results.add(f"{deployment.name}/batch/{BATCH_APPENDS} appends {how}", figure)
    ratio = Figure.ratio(timings["concurrently"], timings["sequentially"])
    results.add(f"{deployment.name}/batch/concurrent relative to sequential", ratio)


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("deployment", LOCAL, indirect=True)
async def test_memory_of_each_operation(deployment: Deployment, results: Results) -> None:
    sides = {
        side: service
        for side, service in deployment.all_sides.items()
        if side not in (ADK_SQLITE, FLOOR)
    }
    for side, service in sides.items():
        found = await operations(deployment, side, service)
        for name, operation in zip(MEMORY_OPERATIONS, found, strict=True):
            await operation()  # what is made once, as compiled statements, is not its own
            taken = sorted([await peak_memory(operation) for _ in range(5)])
            results.add(f"{deployment.name}/memory/{name}/{side}", Figure.of(taken, "B"))


async def operations(
    deployment: Deployment, side: str, service: BaseSessionService
) -> list[Operation]:
    initial = payload("10KB")
    history = await deployment.seeded.session_with_events(side, 100)
    session = await service.create_session(app_name=APP, user_id="memory", state=state(1000))
    user = await deployment.seeded.user_with_sessions(side, 100)
    one: Any = {"app_name": APP, "user_id": "reader", "session_id": history}
    return [
        lambda: service.create_session(app_name=APP, user_id="memory", state=initial),
        lambda: service.append_event(session, event(0)),
        lambda: service.get_session(**one, config=GetSessionConfig(num_recent_events=20)),
        lambda: service.get_session(**one),
        lambda: service.list_sessions(app_name=APP, user_id=user),
    ]
