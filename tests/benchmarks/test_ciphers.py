"""The backends alone, on values of all sizes."""

import pytest

from tests.benchmarks.ciphers import BACKENDS, comparison_line, only_line, operation, timed
from tests.benchmarks.databases import FERNET, OURS
from tests.benchmarks.plan import SIZES, WAYS
from tests.benchmarks.results import Figure, Results

pytestmark = [pytest.mark.benchmark, pytest.mark.parametrize("size", SIZES)]
each_backend = pytest.mark.parametrize("backend", BACKENDS)


@each_backend
def test_encrypt_only(results: Results, backend: str, size: str) -> None:
    keep_one(results, "encrypt", backend, size)


@each_backend
def test_decrypt_only(results: Results, backend: str, size: str) -> None:
    keep_one(results, "decrypt", backend, size)


def keep_one(results: Results, way: str, backend: str, size: str) -> None:
    [values] = timed({backend: operation(backend, way, SIZES[size])}).values()
    results.keep(f"{way} only/{backend}/{size}", Figure.of(values, "s"))
    results.log(only_line(results.figures, way, f"{backend}/{size}"))


@pytest.mark.parametrize("way", WAYS)
def test_comparison(results: Results, way: str, size: str) -> None:
    """Fernet beside AES-256-GCM, in pairs."""
    timings = timed({name: operation(name, way, SIZES[size]) for name in BACKENDS})
    name = f"comparison/{way}/{size}"
    for side, values in timings.items():
        results.keep(f"{name}/{side}", Figure.of(values, "s"))
    results.keep(f"{name}/ratio", Figure.ratio(timings[FERNET], timings[OURS]))
    results.log(comparison_line(results.figures, f"{way}/{size}"))
