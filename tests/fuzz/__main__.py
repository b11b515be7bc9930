"""Have atheris look for inputs that break a target: `make fuzz`.

Each target runs in a process of its own, which begins with the inputs of its corpus.  An input that
breaks a target is written to the corpus as `crash-...`; from then on, a test calls the target with
it.  With `--keep`, the other inputs that reach new code are added to the corpus, too.
"""

import argparse
import hashlib
import mmap
import os
import struct
import sys
import tempfile
import time
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["adk_secure_sessions"]):
    from tests.fuzz.targets import TARGETS, Target

from tests.fuzz import corpus

_MAX_LENGTH = 4096  # bytes of one input
_PATIENCE = 20  # seconds that one input may take


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", help="which targets; all by default")
    limit = parser.add_mutually_exclusive_group()
    limit.add_argument("--time", type=int, help="seconds for all targets together (default: 60)")
    limit.add_argument("--runs", type=int, help="inputs for each target, the same at each run")
    parser.add_argument("--keep", action="store_true", help="add inputs to the corpus")
    options = parser.parse_args()
    unknown = set(options.targets) - set(TARGETS)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(TARGETS)}")
    chosen = options.targets or list(TARGETS)
    seconds = max(1, (options.time or 60) // len(chosen))
    stop = [f"-max_total_time={seconds}"]
    if options.runs:  # a check of a change must not fail at random
        stop = [f"-runs={options.runs}", "-seed=1"]
    failed = []
    for name in chosen:
        with tempfile.TemporaryDirectory() as directory:
            began = time.monotonic()
            runs, status = _fuzz(name, TARGETS[name], stop, Path(directory))
            took = time.monotonic() - began
            print(f"{name}: {runs} inputs in {took:.0f} s", "FAILED" if status else "", flush=True)
            if status:
                failed.append(name)
            elif options.keep:
                found = [path.read_bytes() for path in Path(directory).iterdir()]
                kept = corpus.keep(name, TARGETS[name], found)
                print(f"{name}: {len(kept)} inputs of {len(found)} added to the corpus")
    if failed:
        print(f"failed: {', '.join(failed)}; the inputs are in {corpus.ROOT}", file=sys.stderr)
    return bool(failed)


def _fuzz(name: str, target: Target, stop: list[str], found: Path) -> tuple[int, int]:
    """Fuzz one target in a new process; return how many inputs it had, and the exit status.

    Inputs that reach new code are written to the folder *found*.
    """
    own = corpus.ROOT / name
    own.mkdir(parents=True, exist_ok=True)
    counter = mmap.mmap(-1, 8)
    with tempfile.TemporaryFile() as output:
        process = os.fork()
        if process:
            status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
            if status:
                output.seek(0)
                sys.stderr.write(output.read().decode(errors="replace"))
            return struct.unpack("Q", counter[:8])[0], status
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    runs = 0

    def counted(data: bytes) -> None:
        nonlocal runs
        runs += 1
        counter[:8] = struct.pack("Q", runs)
        try:
            target(data)
        except BaseException:
            # The process ends before libFuzzer could store the input.
            (own / f"crash-{hashlib.sha256(data).hexdigest()[:16]}").write_bytes(data)
            raise

    arguments = [
        sys.argv[0], *stop, f"-artifact_prefix={own}/", f"-max_len={_MAX_LENGTH}",
        f"-timeout={_PATIENCE}", "-rss_limit_mb=4096", "-verbosity=0", str(found), str(own),
    ]  # fmt: skip
    try:
        atheris.Setup(arguments, counted)
        atheris.Fuzz()
    finally:
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
