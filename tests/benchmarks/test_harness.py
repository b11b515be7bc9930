"""The harness, tested with a simulated clock."""

import pytest

from tests.benchmarks.harness import MIN_ROUNDS, interleave, side_order


@pytest.mark.parametrize("count", [2, 3, 4])
def test_each_side_is_equally_often_in_each_position(count: int) -> None:
    names = [str(number) for number in range(count)]
    orders = [side_order(names, round_number) for round_number in range(2 * count)]
    assert all(sorted(one) == names for one in orders)
    for name in names:
        assert sorted(one.index(name) for one in orders) == sorted([*range(count)] * 2)


async def test_timing_is_the_mean_of_repeated_runs() -> None:
    now = 0.0

    async def take(seconds: float) -> None:
        nonlocal now
        now += seconds

    sides = {"ours": lambda: take(1.0), "reference": lambda: take(4.0)}
    timings = await interleave(sides, 0, clock=lambda: now, repeat=5)
    assert timings == {"ours": [1.0] * MIN_ROUNDS, "reference": [4.0] * MIN_ROUNDS}
