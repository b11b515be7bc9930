"""Runs a comparison at a place, and prints each ratio beside its budget."""

import os
from collections.abc import Mapping

from tests.benchmarks.budgets import BUDGETS
from tests.benchmarks.databases import ADK, FLOOR, OURS
from tests.benchmarks.harness import MOST, Operation, Ratio, Timings, interleave, summarize
from tests.benchmarks.places import DISTANT, POSTGRESQL

# For each comparison, beside what preparing it takes.
SECONDS = float(os.environ.get("BENCH_SECONDS", "2.5"))


async def compare(
    place: str, operation: str, sides: Mapping[str, Operation], most: int = MOST
) -> None:
    """Interleave *sides* and print how ours does beside each of the others."""
    show_timings(place, operation, await interleave(sides, SECONDS, most=most))


def show_timings(place: str, operation: str, timings: Timings) -> None:
    budget = BUDGETS[POSTGRESQL if place == DISTANT else place][operation]
    limits = {ADK: budget.adk, FLOOR: budget.floor}
    for reference in timings:
        if reference != OURS:
            ratio = summarize(timings[OURS], timings[reference])
            show(place, operation, reference, ratio, limits.get(reference))


def show(place: str, operation: str, reference: str, ratio: Ratio, limit: float | None) -> None:
    quartiles = f"[{ratio.low:.3f}-{ratio.high:.3f}]"
    times = f"{ratio.ours * 1e3:8.3f} / {ratio.reference * 1e3:8.3f} ms"
    text = f"of {reference:<10} {ratio.median:6.3f} {quartiles:<15}  {times}"
    line(place, operation, f"{text}  {verdict(ratio.median, limit)}")


def verdict(value: float, limit: float | None, unit: str = "") -> str:
    if limit is None:
        return ""
    return f"at most {limit:.3g}{unit}: {'met' if value <= limit else 'MISSED'}"


def line(place: str, subject: str, text: str) -> None:
    """Print a line of results; pytest's own progress stays at the end of the one before."""
    print(f"\n{place:<11}{subject:<22} {text}".rstrip(), end="", flush=True)
