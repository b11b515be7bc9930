"""Time the backends alone: encrypt or decrypt one value in memory."""

import os
import time
from collections.abc import Callable, Mapping

from adk_secure_sessions import AesGcmBackend, Cipher, FernetBackend
from tests.benchmarks.databases import FERNET, OURS
from tests.benchmarks.harness import Timings, gc_paused, side_order
from tests.benchmarks.results import Figure

Run = Callable[[], object]

SAMPLES = 60
MIN_SAMPLE_SECONDS = 0.0005  # long enough that reading the clock does not count
BACKENDS: dict[str, type[AesGcmBackend | FernetBackend]] = {
    OURS: AesGcmBackend,
    FERNET: FernetBackend,
}
CONTEXT = b"the context of a record".ljust(100, b".")  # about as long as real ones


def new_cipher(name: str) -> Cipher:
    """Return a cipher with a new data key; a service has one such cipher per user."""
    backend = BACKENDS[name](os.urandom(32))
    return backend.cipher(backend.new_key())


def cipher_operation(name: str, direction: str, size: int) -> Run:
    """Return a function that encrypts or decrypts *size* random bytes with one data key."""
    cipher = new_cipher(name)
    plaintext = os.urandom(size)
    if direction == "encrypt":
        return lambda: cipher.encrypt(plaintext, CONTEXT)
    sealed = cipher.encrypt(plaintext, CONTEXT)
    assert cipher.decrypt(sealed, CONTEXT) == plaintext
    return lambda: cipher.decrypt(sealed, CONTEXT)


def time_runs(operations: dict[str, Run]) -> Timings:
    """Time the operations in interleaved rounds; return the seconds per run.

    A sample is the mean of as many runs as fill `MIN_SAMPLE_SECONDS`.
    """
    repeats = {name: _runs_per_sample(run) for name, run in operations.items()}
    timings: Timings = {name: [] for name in operations}
    with gc_paused():
        for round_number in range(SAMPLES):
            for name in side_order(list(operations), round_number):
                timings[name].append(_sample(operations[name], repeats[name]) / repeats[name])
    return timings


def _runs_per_sample(run: Run) -> int:
    count = 1
    while (taken := _sample(run, count)) < MIN_SAMPLE_SECONDS / 2:
        count *= 2
    return max(1, round(count * MIN_SAMPLE_SECONDS / taken))


def _sample(run: Run, count: int) -> float:
    rounds = range(count)
    start = time.perf_counter()
    for _ in rounds:
        run()
    return time.perf_counter() - start


def cipher_line(figures: Mapping[str, Figure], direction: str, label: str) -> str:
    """Return the log line of one backend and size: *label* is "backend/size"."""
    median = figures[f"{direction} only/{label}"].value
    return f"{direction.capitalize()}-only [{label}]: median={median:.6f}s"


def comparison_line(figures: Mapping[str, Figure], label: str) -> str:
    """Return the log line of one comparison: *label* is "encrypt/size" or "decrypt/size"."""
    name = f"comparison/{label}"
    fernet, ours, ratio = (figures[f"{name}/{part}"].value for part in (FERNET, OURS, "ratio"))
    return (
        f"Comparison [{label}]: fernet={fernet:.6f}s, aesgcm={ours:.6f}s, "
        f"fernet/aesgcm={ratio:.2f}x"
    )
