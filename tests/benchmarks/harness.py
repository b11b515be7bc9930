"""Interleaved rounds: each side of a comparison runs once in each, so a noisy machine hits all."""

import gc
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

Operation = Callable[[], Awaitable[object]]
Clock = Callable[[], float]
Timings = dict[str, list[float]]

WARM_UPS = 3
MIN_ROUNDS, MAX_ROUNDS = 9, 200  # rounds


def side_order(names: Sequence[str], round_number: int) -> list[str]:
    """Return the order of the sides in a round; each is first as often as last."""
    start = round_number // 2 % len(names)
    rotated = [*names[start:], *names[:start]]
    return rotated[::-1] if round_number % 2 else rotated


@contextmanager
def gc_paused() -> Iterator[None]:
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
    min_rounds: int = MIN_ROUNDS,
    max_rounds: int = MAX_ROUNDS,
    warm_ups: int = WARM_UPS,
    clock: Clock = time.perf_counter,
    repeat: int = 1,
) -> Timings:
    """Time rounds of all *sides* for some *seconds*; a timing is the mean of *repeat* runs."""
    for _ in range(warm_ups):
        for operation in sides.values():
            await _mean(operation, clock, repeat)
    timings: Timings = {name: [] for name in sides}
    with gc_paused():
        end = time.monotonic() + seconds
        for round_number in range(max_rounds):
            if round_number >= min_rounds and time.monotonic() > end:
                break
            for name in side_order(list(sides), round_number):
                timings[name].append(await _mean(sides[name], clock, repeat))
                gc.collect(1)  # all that the run left, but not the interpreter's free lists
    return timings


async def _mean(operation: Operation, clock: Clock, repeat: int) -> float:
    results = []  # kept: freeing them is no part of the operation
    start = clock()
    for _ in range(repeat):
        results.append(await operation())
    return (clock() - start) / repeat
