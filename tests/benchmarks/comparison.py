"""Compare the sides of a deployment; add times and ratios, with their goals, to the results."""

import os
from collections.abc import Mapping

from tests.benchmarks.budgets import BUDGETS
from tests.benchmarks.databases import ADK, FLOOR, OURS
from tests.benchmarks.deployments import POSTGRESQL, REMOTE, Deployment
from tests.benchmarks.harness import MAX_ROUNDS, Operation, Timings, interleave
from tests.benchmarks.results import Figure, Results

# For each comparison, not counting its preparation.
SECONDS = float(os.environ.get("BENCH_SECONDS", "2.5"))


async def compare(
    results: Results,
    deployment: Deployment,
    operation: str,
    sides: Mapping[str, Operation],
    max_rounds: int = MAX_ROUNDS,
) -> None:
    """Time *operation* on all *sides*; add each time, and ours relative to each other side."""
    add_with_budget(
        results, deployment, operation, await interleave(sides, SECONDS, max_rounds=max_rounds)
    )


def add_with_budget(
    results: Results, deployment: Deployment, operation: str, timings: Timings
) -> None:
    """Add the timings of an operation that has an entry in `BUDGETS`."""
    budget = BUDGETS[POSTGRESQL if deployment.name == REMOTE else deployment.name][operation]
    add_comparison(
        results, f"{deployment.name}/{operation}", timings, {ADK: budget.adk, FLOOR: budget.floor}
    )


def add_comparison(
    results: Results, name: str, timings: Timings, goals: Mapping[str, float | None] = {}
) -> None:
    """Add the median time of each side, and our time relative to each other side."""
    for side, values in timings.items():
        results.add(f"{name}/{side}", Figure.of(values, "s"))
    for side, values in timings.items():
        if side != OURS:
            goal = goals.get(side)
            results.add(f"{name}/relative to {side}", Figure.ratio(timings[OURS], values, goal))
