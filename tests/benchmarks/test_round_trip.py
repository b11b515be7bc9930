"""A session's round trip, encrypted beside in clear: the published overhead."""

from pathlib import Path

import pytest
import sqlalchemy as sa

from tests.benchmarks.databases import FERNET, NO_OP, OURS, opened
from tests.benchmarks.overhead import (
    BASELINE,
    ENCRYPTED,
    judge,
    log_line,
    measure,
    overhead,
    round_trip,
)
from tests.benchmarks.plan import PAYLOADS
from tests.benchmarks.results import Figure, Results
from tests.benchmarks.samples import payload

# That the limit was missed has to be told, not raised.
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
    async with opened(NO_OP, file(BASELINE)) as clear, opened(backend, file(ENCRYPTED)) as sealed:
        timings = await measure(round_trip(clear, state), round_trip(sealed, state))
    ratio = overhead(timings)
    what = f"{backend}/{size}"
    for side, values in timings.items():
        results.keep(f"round trip/{what}/{side}", Figure.of(values, "s"))
    results.keep(f"round trip/{what}/overhead", ratio)
    results.log(log_line(results.figures, what))
    judge(what, ratio, is_binding=backend == OURS)
