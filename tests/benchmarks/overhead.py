"""The overhead of encryption in a round trip: how it is measured, and how much is too much."""

import os
import time
import warnings
from collections.abc import Mapping
from typing import Any

import pytest
from google.adk.sessions import BaseSessionService

from tests.benchmarks.harness import Clock, Operation, Timings, interleave
from tests.benchmarks.plan import BATCH, ITERATIONS, WARM_UPS
from tests.benchmarks.results import Figure
from tests.benchmarks.workload import APP

LIMIT = 1.20
BASELINE, ENCRYPTED = "baseline", "encrypted"


def round_trip(service: BaseSessionService, state: dict[str, object]) -> Operation:
    """Create a session with *state*, get it, delete it."""

    async def run() -> None:
        session = await service.create_session(app_name=APP, user_id="traveller", state=state)
        who: Any = {"app_name": APP, "user_id": "traveller", "session_id": session.id}
        assert await service.get_session(**who) is not None
        await service.delete_session(**who)

    return run


async def measure(
    baseline: Operation, encrypted: Operation, clock: Clock = time.perf_counter
) -> Timings:
    """Seconds of each batch: in every iteration both sides run one, in changing order."""
    sides = {BASELINE: baseline, ENCRYPTED: encrypted}
    timings = await interleave(
        sides,
        0,
        min_rounds=ITERATIONS,
        max_rounds=ITERATIONS,
        warm_ups=WARM_UPS,
        clock=clock,
        repeat=BATCH,
    )
    return {side: [BATCH * mean for mean in means] for side, means in timings.items()}


def overhead(timings: Timings) -> Figure:
    """The median of the ratios of the pairs."""
    return Figure.ratio(timings[ENCRYPTED], timings[BASELINE], LIMIT)


def log_line(figures: Mapping[str, Figure], label: str) -> str:
    """*label*: backend and size."""
    name = f"round trip/{label}"
    baseline, encrypted, ratio = (
        figures[f"{name}/{part}"].value for part in (BASELINE, ENCRYPTED, "overhead")
    )
    return (
        f"Benchmark [{label}]: baseline={baseline:.4f}s, encrypted={encrypted:.4f}s, "
        f"overhead={ratio:.2f}x"
    )


def check_limit(label: str, ratio: Figure, *, is_binding: bool) -> None:
    """At the limit or above it fail; or warn, if it is not binding, or with CI=true."""
    if ratio.value < LIMIT:
        return
    message = f"Benchmark [{label}]: overhead {ratio.value:.2f}x is not below {LIMIT:.2f}x"
    if is_binding and os.environ.get("CI", "").lower() != "true":
        pytest.fail(message)
    warnings.warn(message, UserWarning, stacklevel=2)
