"""The corpus: files with inputs of each target, in `corpus/TARGET`.

An input is there because it reaches code that no other file of its target reaches, or because it
once broke the target: these files are called `crash-...`, and are never removed.  `keep` adds new
inputs by the first rule.  A few files called `seed-...` show the fuzzer what a valid input is like:
the code that parses them is not Python, so the first rule does not see it.
"""

import hashlib
import sys
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

from tests.fuzz.targets import Target

ROOT = Path(__file__).parent / "corpus"
_MAX_LENGTH = 2048  # bytes; longer inputs are not kept

Arc = tuple[str, int, int]


def inputs(target: str) -> list[Path]:
    """The files of *target*."""
    return sorted(path for path in (ROOT / target).glob("*") if path.is_file())


def keep(name: str, target: Target, found: Iterable[bytes]) -> list[Path]:
    """Add each input of *found* to the corpus that reaches new code; return the new files."""
    known: set[Arc] = set()
    for path in inputs(name):
        known |= _reached(target, path.read_bytes())
    kept = []
    for data in sorted(found, key=lambda one: (len(one), one)):
        if len(data) > _MAX_LENGTH:
            continue
        new = _reached(target, data) - known
        if new:
            known |= new
            path = ROOT / name / hashlib.sha256(data).hexdigest()[:16]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            kept.append(path)
    return kept


def _reached(target: Target, data: bytes) -> set[Arc]:
    """The pairs of lines of this package that *target* runs one after another for *data*."""
    reached: set[Arc] = set()
    last: dict[int, int] = {}

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        name = frame.f_code.co_filename
        if "adk_secure_sessions" not in name:
            return None
        if event == "call":
            last[id(frame)] = frame.f_code.co_firstlineno
        elif event == "line":
            reached.add((name, last.get(id(frame), 0), frame.f_lineno))
            last[id(frame)] = frame.f_lineno
        return trace

    target(data)  # what is computed once must not count for this input
    sys.settrace(trace)
    try:
        target(data)
    finally:
        sys.settrace(None)
    return reached
