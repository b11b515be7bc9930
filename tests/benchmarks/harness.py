"""Time the sides of a comparison in interleaved rounds.

Each side runs once in each round, so a slow spell of the machine affects all sides alike.
"""

import gc
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

Operation = Callable[[], Awaitable[object]]
Clock = Callable[[], float]
Timings = dict[str, list[float]]

WARM_UPS = 3
MIN_ROUNDS, MAX_ROUNDS = 9, 200


def side_order(names: Sequence[str], round_number: int) -> list[str]:
    """Return the order of the sides in a round.

    Over all rounds, each side is as often in each position, and as often before any other side
    as after it.
    """
    start = round_number // 2 % len(names)
    rotated = [*names[start:], *names[:start]]
    return rotated[::-1] if round_number % 2 else rotated


@contextmanager
def gc_paused() -> Iterator[None]:
    """Turn automatic garbage collection off, and exempt all current objects from explicit calls.

    A full collection of the objects that importing ADK creates takes longer than most operations
    measured here, and would slow down one side at random.  They stay exempt afterwards.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


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
    """Run rounds of all *sides* for *seconds*; return the seconds per run of each side and round.

    In each round a side runs *repeat* times, and its timing is the mean.  The number of rounds
    stays between *min_rounds* and *max_rounds*.
    """
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
                # Free what the run left.  A full collection would also clear the free lists.
                gc.collect(1)
    return timings


async def _mean(operation: Operation, clock: Clock, repeat: int) -> float:
    results = []  # kept until the clock has stopped: freeing them is not part of the operation
    start = clock()
    for _ in range(repeat):
        results.append(await operation())
    return (clock() - start) / repeat
