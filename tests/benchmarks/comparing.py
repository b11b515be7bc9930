"""Runs a comparison at a place, and keeps each time, and each ratio beside its budget."""

import os
from collections.abc import Mapping

from tests.benchmarks.budgets import BUDGETS
from tests.benchmarks.databases import ADK, FLOOR, OURS
from tests.benchmarks.harness import MOST, Operation, Timings, interleave
from tests.benchmarks.places import DISTANT, POSTGRESQL, Place
from tests.benchmarks.results import Figure, Results

# For each comparison, beside what preparing it takes.
SECONDS = float(os.environ.get("BENCH_SECONDS", "2.5"))


async def compare(
    results: Results,
    place: Place,
    operation: str,
    sides: Mapping[str, Operation],
    most: int = MOST,
) -> None:
    """Interleave *sides*, and keep how ours does beside each of the others."""
    keep_timings(results, place, operation, await interleave(sides, SECONDS, most=most))


def keep_timings(results: Results, place: Place, operation: str, timings: Timings) -> None:
    budget = BUDGETS[POSTGRESQL if place.name == DISTANT else place.name][operation]
    keep(results, f"{place.name}/{operation}", timings, {ADK: budget.adk, FLOOR: budget.floor})


def keep(
    results: Results, name: str, timings: Timings, goals: Mapping[str, float | None] = {}
) -> None:
    """Keep the time of each side, and of which part of each other side's ours is."""
    for side, values in timings.items():
        results.add(f"{name}/{side}", Figure.of(values, "s"))
    for side, values in timings.items():
        if side != OURS:
            goal = goals.get(side)
            results.add(f"{name}/of {side}", Figure.ratio(timings[OURS], values, goal))
