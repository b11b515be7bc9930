"""The backends alone: one value, sealed or opened in memory."""

import os
import time
from collections.abc import Callable, Mapping

from adk_secure_sessions import AesGcmBackend, Cipher, FernetBackend
from tests.benchmarks.databases import FERNET, OURS
from tests.benchmarks.harness import Timings, collector_off, order
from tests.benchmarks.results import Figure

Run = Callable[[], object]

SAMPLES = 60
LEAST = 0.0005  # seconds that a sample takes: far more than reading the clock does
BACKENDS: dict[str, type[AesGcmBackend | FernetBackend]] = {
    OURS: AesGcmBackend,
    FERNET: FernetBackend,
}
PLACE = b"the place of a record".ljust(100, b".")  # about as long as ours are


def new_cipher(name: str) -> Cipher:
    """With a data key of its own, as each user has one."""
    backend = BACKENDS[name](os.urandom(32))
    return backend.cipher(backend.new_key())


def operation(name: str, way: str, size: int) -> Run:
    """Encrypts or decrypts one value, of random bytes, with one data key."""
    cipher = new_cipher(name)
    plaintext = os.urandom(size)
    if way == "encrypt":
        return lambda: cipher.encrypt(plaintext, PLACE)
    sealed = cipher.encrypt(plaintext, PLACE)
    assert cipher.decrypt(sealed, PLACE) == plaintext
    return lambda: cipher.decrypt(sealed, PLACE)


def timed(operations: dict[str, Run]) -> Timings:
    """Seconds of each run, from samples of as many runs as take long enough; interleaved."""
    repeats = {name: _repeats(run) for name, run in operations.items()}
    timings: Timings = {name: [] for name in operations}
    with collector_off():
        for turn in range(SAMPLES):
            for name in order(list(operations), turn):
                timings[name].append(_sample(operations[name], repeats[name]) / repeats[name])
    return timings


def _repeats(run: Run) -> int:
    count = 1
    while (taken := _sample(run, count)) < LEAST / 2:
        count *= 2
    return max(1, round(count * LEAST / taken))


def _sample(run: Run, count: int) -> float:
    rounds = range(count)
    start = time.perf_counter()
    for _ in rounds:
        run()
    return time.perf_counter() - start


def only_line(figures: Mapping[str, Figure], way: str, what: str) -> str:
    """*what*: backend and size."""
    return f"{way.capitalize()}-only [{what}]: median={figures[f'{way} only/{what}'].value:.6f}s"


def comparison_line(figures: Mapping[str, Figure], what: str) -> str:
    """*what*: way and size."""
    name = f"comparison/{what}"
    fernet, ours, ratio = (figures[f"{name}/{part}"].value for part in (FERNET, OURS, "ratio"))
    return (
        f"Comparison [{what}]: fernet={fernet:.6f}s, aesgcm={ours:.6f}s, fernet/aesgcm={ratio:.2f}x"
    )
