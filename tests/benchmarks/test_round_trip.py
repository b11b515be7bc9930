"""A session's round trip, encrypted and as plaintext: the published overhead."""

from pathlib import Path

import pytest
import sqlalchemy as sa

from tests.benchmarks.databases import FERNET, NO_OP, OURS, opened
from tests.benchmarks.overhead import (
    BASELINE,
    ENCRYPTED,
    check_limit,
    log_line,
    measure,
    overhead,
    round_trip,
)
from tests.benchmarks.plan import PAYLOADS
from tests.benchmarks.results import Figure, Results
from tests.benchmarks.workload import payload

# A missed limit that is not binding is reported as a warning, not raised as an error.
pytestmark = [
    pytest.mark.benchmark,
    pytest.mark.filterwarnings("default:Benchmark:UserWarning"),
]


@pytest.mark.parametrize("size", PAYLOADS)
@pytest.mark.parametrize("backend", [OURS, FERNET])
async def test_round_trip(tmp_path: Path, results: Results, backend: str, size: str) -> None:
    def file(name: str) -> sa.URL:
        return sa.URL.create("sqlite+aiosqlite", database=str(tmp_path / f"{name}.db"))

    state = payload(size)
    async with (
        opened(NO_OP, file(BASELINE)) as plain,
        opened(backend, file(ENCRYPTED)) as encrypted,
    ):
        timings = await measure(round_trip(plain, state), round_trip(encrypted, state))
    ratio = overhead(timings)
    label = f"{backend}/{size}"
    for side, values in timings.items():
        results.store(f"round trip/{label}/{side}", Figure.of(values, "s"))
    results.store(f"round trip/{label}/overhead", ratio)
    results.log(log_line(results.figures, label))
    check_limit(label, ratio, is_binding=backend == OURS)
