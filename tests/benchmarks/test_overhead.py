"""How the overhead is computed and compared with the limit, tested with a simulated clock."""

import pytest

from tests.benchmarks.harness import Operation, Timings
from tests.benchmarks.overhead import BASELINE, ENCRYPTED, check_limit, measure, overhead
from tests.benchmarks.plan import BATCH, ITERATIONS, WARM_UPS
from tests.benchmarks.results import Figure

ABOVE = Figure(1.3, 1.2, 1.4, ITERATIONS, "x")


class FakeClock:
    """A clock that only its operations advance, each by its number of seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self.ran: list[str] = []

    def read(self) -> float:
        return self.now

    def operation(self, name: str, seconds: float) -> Operation:
        async def run() -> None:
            self.ran.append(name)
            self.now += seconds

        return run


async def timings(encrypted: float) -> Timings:
    clock = FakeClock()
    operations = clock.operation(BASELINE, 1.0), clock.operation(ENCRYPTED, encrypted)
    return await measure(*operations, clock.read)


@pytest.fixture(autouse=True)
def outside_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)


@pytest.mark.parametrize("seconds", [0.5, 1.19])
async def test_ratio_below_the_limit_passes(seconds: float) -> None:
    ratio = overhead(await timings(seconds))
    assert ratio.value == pytest.approx(seconds)
    check_limit("aesgcm/1KB", ratio, is_binding=True)


@pytest.mark.parametrize("seconds", [1.21, 3.0])
async def test_ratio_above_the_limit_fails(seconds: float) -> None:
    ratio = overhead(await timings(seconds))
    assert ratio.value == pytest.approx(seconds)
    with pytest.raises(pytest.fail.Exception, match=rf"{seconds:.2f}x is not below 1\.20x"):
        check_limit("aesgcm/1KB", ratio, is_binding=True)


def test_ratio_above_the_limit_warns_on_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    with pytest.warns(UserWarning, match=r"Benchmark \[aesgcm/1KB\]: overhead 1\.30x"):
        check_limit("aesgcm/1KB", ABOVE, is_binding=True)


def test_ratio_above_a_limit_that_is_not_binding_warns() -> None:
    with pytest.warns(UserWarning, match="fernet"):
        check_limit("fernet/1KB", ABOVE, is_binding=False)


async def test_batches_alternate_after_warming_up() -> None:
    clock = FakeClock()
    sides = {name: clock.operation(name, 1.0) for name in (BASELINE, ENCRYPTED)}
    taken = await measure(sides[BASELINE], sides[ENCRYPTED], clock.read)
    assert taken == {name: [float(BATCH)] * ITERATIONS for name in sides}
    batches = [clock.ran[start : start + BATCH] for start in range(0, len(clock.ran), BATCH)]
    assert all(len(set(batch)) == 1 for batch in batches)
    first, second = batches[2 * WARM_UPS :: 2], batches[2 * WARM_UPS + 1 :: 2]
    assert len(first) == len(second) == ITERATIONS
    assert all(one != other for one, other in zip(first, second, strict=True))
    assert sum(batch[0] == BASELINE for batch in first) == ITERATIONS / 2
