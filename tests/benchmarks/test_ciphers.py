"""The backends alone, with values of all sizes."""

import pytest

from tests.benchmarks.ciphers import (
    BACKENDS,
    cipher_line,
    cipher_operation,
    comparison_line,
    time_runs,
)
from tests.benchmarks.databases import FERNET, OURS
from tests.benchmarks.plan import DIRECTIONS, SIZES
from tests.benchmarks.results import Figure, Results

pytestmark = [pytest.mark.benchmark, pytest.mark.parametrize("size", SIZES)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_one_direction(results: Results, direction: str, backend: str, size: str) -> None:
    [values] = time_runs({backend: cipher_operation(backend, direction, SIZES[size])}).values()
    results.store(f"{direction} only/{backend}/{size}", Figure.of(values, "s"))
    results.log(cipher_line(results.figures, direction, f"{backend}/{size}"))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_comparison(results: Results, direction: str, size: str) -> None:
    """Fernet relative to AES-256-GCM, in interleaved rounds."""
    timings = time_runs({name: cipher_operation(name, direction, SIZES[size]) for name in BACKENDS})
    name = f"comparison/{direction}/{size}"
    for side, values in timings.items():
        results.store(f"{name}/{side}", Figure.of(values, "s"))
    results.store(f"{name}/ratio", Figure.ratio(timings[FERNET], timings[OURS]))
    results.log(comparison_line(results.figures, f"{direction}/{size}"))
