"""Encrypting from several threads, and appending in batches."""

import asyncio
import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.benchmarks.ciphers import BACKENDS, new_cipher
from tests.benchmarks.databases import OURS
from tests.benchmarks.deployments import LOCAL, Deployment
from tests.benchmarks.harness import gc_paused, interleave
from tests.benchmarks.plan import BATCH_APPENDS, FIELD_SIZES, THREADS
from tests.benchmarks.results import Figure, Results
from tests.benchmarks.workload import APP, event

pytestmark = pytest.mark.bench

SAMPLES = 25
SECONDS = 0.02  # duration of a sample


@pytest.mark.parametrize("size", FIELD_SIZES)
@pytest.mark.parametrize("name", BACKENDS)
def test_threads(results: Results, name: str, size: str) -> None:
    """Several threads share one cipher; a service has one per user."""
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
    """Append one event each to `BATCH_APPENDS` sessions, concurrently and sequentially."""
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
    for mode, values in timings.items():
        figure = Figure.of([BATCH_APPENDS / seconds for seconds in values], "/s")
        results.add(f"{deployment.name}/batch/{BATCH_APPENDS} appends {mode}", figure)
    ratio = Figure.ratio(timings["concurrently"], timings["sequentially"])
    results.add(f"{deployment.name}/batch/concurrent relative to sequential", ratio)
