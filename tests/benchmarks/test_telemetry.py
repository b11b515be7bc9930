"""CPU time of telemetry: all of it, and the package's own part; see telemetry_sides.py."""

import os
from pathlib import Path

import pytest

from tests.benchmarks import plan
from tests.benchmarks.budgets import TELEMETRY_OFF, TELEMETRY_ON
from tests.benchmarks.results import Figure, Results
from tests.benchmarks.telemetry_sides import measure


@pytest.mark.bench
@pytest.mark.parametrize("providers", plan.TELEMETRY)
@pytest.mark.parametrize("operation", plan.TELEMETRY_OPERATIONS)
def test_telemetry(results: Results, tmp_path: Path, operation: str, providers: str) -> None:
    pairs = int(os.environ.get("BENCH_PAIRS", plan.TELEMETRY_PAIRS))  # fewer: to try it out
    timings = measure(tmp_path, plan.TELEMETRY_OPERATIONS[operation], providers, pairs)
    name = f"telemetry/{providers}/{operation}"
    is_off = providers == plan.TELEMETRY_OFF
    goal = TELEMETRY_OFF if is_off else None
    results.add(f"{name}/service", Figure.of(timings["measured"], "s"))
    ratio = Figure.ratio(timings["measured"], timings["plain"], goal)
    results.add(f"{name}/relative to no telemetry", ratio)
    if not is_off:
        ratio = Figure.ratio(timings["measured"], timings["bare"], TELEMETRY_ON)
        results.add(f"{name}/relative to bare calls", ratio)
