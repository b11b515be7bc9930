"""How the overhead is computed and compared with the limit, tested with a simulated clock."""

from contextlib import nullcontext

import pytest

from tests.benchmarks.harness import Operation, Timings
from tests.benchmarks.overhead import check_limit, measure, overhead
from tests.benchmarks.plan import ITERATIONS
from tests.benchmarks.results import Figure


class FakeClock:
    """A clock that only its operations advance, each by its number of seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def read(self) -> float:
        return self.now

    def operation(self, seconds: float) -> Operation:
        async def run() -> None:
            self.now += seconds

        return run


async def timings(encrypted: float) -> Timings:
    clock = FakeClock()
    operations = clock.operation(1.0), clock.operation(encrypted)
    return await measure(*operations, clock.read)


@pytest.fixture(autouse=True)
def outside_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)


@pytest.mark.parametrize(("seconds", "passes"), [(0.5, True), (1.19, True), (1.21, False)])
async def test_ratio_must_be_below_the_limit(seconds: float, passes: bool) -> None:
    ratio = overhead(await timings(seconds))
    assert ratio.value == pytest.approx(seconds)
    failure = pytest.raises(pytest.fail.Exception, match=r"1\.21x is not below 1\.20x")
    with nullcontext() if passes else failure:
        check_limit("aesgcm/1KB", ratio, is_binding=True)


@pytest.mark.parametrize(("ci", "is_binding"), [("true", True), ("", False)])
def test_ratio_above_the_limit_warns_on_ci_or_if_the_limit_is_not_binding(
    monkeypatch: pytest.MonkeyPatch, ci: str, is_binding: bool
) -> None:
    monkeypatch.setenv("CI", ci)
    with pytest.warns(UserWarning, match=r"Benchmark \[aesgcm/1KB\]: overhead 1\.30x"):
        check_limit("aesgcm/1KB", Figure(1.3, 1.2, 1.4, ITERATIONS, "x"), is_binding=is_binding)
