"""Interleaved pairs: both sides of a comparison run in turn, so that a noisy machine hits both."""

import gc
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

Operation = Callable[[], Awaitable[object]]
WARM_UPS = 3


class Ratio(NamedTuple):
    """Ours against a reference: the median of the pairs' ratios, and the medians in seconds."""

    median: float
    low: float
    high: float
    ours: float
    reference: float


def summarize(pairs: list[tuple[float, float]]) -> Ratio:
    """*pairs* of (ours, reference) in seconds; low and high are the quartiles of the ratio."""
    ratios = [ours / reference for ours, reference in pairs]
    low, median, high = statistics.quantiles(ratios, n=4)
    ours, reference = (statistics.median(side) for side in zip(*pairs, strict=True))
    return Ratio(median, low, high, ours, reference)


async def measure(ours: Operation, reference: Operation, pairs: int) -> Ratio:
    """Time *pairs* runs of each side in turn, each side first every other time."""
    for _ in range(WARM_UPS):
        await ours()
        await reference()
    timed: list[tuple[float, float]] = []
    gc.collect()
    for turn in range(pairs):
        if turn % 2:
            theirs = await _seconds(reference)
            timed.append((await _seconds(ours), theirs))
        else:
            mine = await _seconds(ours)
            timed.append((mine, await _seconds(reference)))
    return summarize(timed)


async def _seconds(operation: Operation) -> float:
    start = time.perf_counter()
    await operation()
    return time.perf_counter() - start
