"""Interleaved rounds: each side of a comparison runs once in each, so a noisy machine hits all."""

import gc
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

Operation = Callable[[], Awaitable[object]]
Clock = Callable[[], float]
Timings = dict[str, list[float]]

WARM_UPS = 3
LEAST, MOST = 9, 200  # rounds


class Ratio(NamedTuple):
    """Ours against a reference: the median of the rounds' ratios, and the medians in seconds."""

    median: float
    low: float
    high: float
    ours: float
    reference: float


def summarize(ours: Sequence[float], reference: Sequence[float]) -> Ratio:
    """Compare round by round, in seconds; low and high are the quartiles of the ratio."""
    ratios = [mine / theirs for mine, theirs in zip(ours, reference, strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return Ratio(median, low, high, statistics.median(ours), statistics.median(reference))


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that *percent* of all do not exceed."""
    ordered = sorted(values)
    rank = -(-percent * len(ordered) // 100)  # rounded up
    return ordered[max(0, int(rank) - 1)]


def order(names: Sequence[str], turn: int) -> list[str]:
    """The sides' order in round *turn*: each is as often first as last, and before any other."""
    start = turn // 2 % len(names)
    turned = [*names[start:], *names[:start]]
    return turned[::-1] if turn % 2 else turned


@contextmanager
def collector_off() -> Iterator[None]:
    """No garbage collection by itself, and what lives now is left out of any that is asked for.

    A full collection of all that ADK imports takes longer than most of what is measured
    here, and hits one side at random.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


async def interleave(
    sides: Mapping[str, Operation],
    seconds: float,
    *,
    most: int = MOST,
    clock: Clock = time.perf_counter,
    repeat: int = 1,
) -> Timings:
    """Time rounds of all *sides* for some *seconds*; a timing is the mean of *repeat* runs."""
    for _ in range(WARM_UPS):
        for operation in sides.values():
            await operation()
    timings: Timings = {name: [] for name in sides}
    with collector_off():
        end = time.monotonic() + seconds
        for turn in range(most):
            if turn >= LEAST and time.monotonic() > end:
                break
            for name in order(list(sides), turn):
                timings[name].append(await _mean(sides[name], clock, repeat))
                gc.collect(1)  # all that the run left, but not the interpreter's free lists
    return timings


async def _mean(operation: Operation, clock: Clock, repeat: int) -> float:
    results = []  # kept: freeing them is no part of the operation
    start = clock()
    for _ in range(repeat):
        results.append(await operation())
    return (clock() - start) / repeat
