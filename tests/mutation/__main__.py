"""Run the tests of a module on each of its mutants: `make mutants`.

How it works.  `PLAN` names the tests of each module.  The process imports everything that these
tests import from other packages.  For each mutant, it forks: the child runs the tests until the
first one fails.  It imports a copy of this package, which consists of the changed module and of
links to all other files, and so do the processes that its tests start.  So nothing is written to
the source tree, and a mutant takes half a second instead of five.  Slow tests run only on the
mutants that the fast ones have not noticed.

A mutant that no test notices has *survived*.  `survivors.md` explains each survivor that cannot be
noticed or need not be; any other one is an error.
"""

import argparse
import atexit
import importlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

import pytest
from hypothesis import Phase, settings

from tests.mutation.mutants import Mutant, mutants
from tests.mutation.plan import PLAN

ROOT = Path(__file__).parents[2]
PACKAGE = "adk_secure_sessions"
SURVIVORS = Path(__file__).with_name("survivors.md")
_LEAST_PATIENCE = (
    20.0  # seconds for the tests of a mutant; ten times the usual time if that is more
)


_PYTEST = [
    "-x",
    "-q",
    "--no-header",
    "-p",
    "no:cacheprovider",
    "-p",
    "pytest_asyncio.plugin",
    "-p",
    "pytest_cov.plugin",
]
_NOT_RUN = 99  # exit status
# pytest must import its plugins itself, and each process the tests, the examples and this package.
_NOT_SHARED = re.compile(
    rf"{PACKAGE}|examples\b|tests\b|conftest|.*pytest|_hypothesis|xdist|anyio|sybil|__main"
)


class Outcome(NamedTuple):
    """What the tests of a module found."""

    killed: int
    survived: list[Mutant]
    explained: list[Mutant]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("modules", nargs="*", help="such as formats/records.py; all by default")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--list", action="store_true", help="print the mutants, and run nothing")
    parser.add_argument("--only", default="", help="mutants whose name contains this text")
    parser.add_argument("--tests", nargs="*", help="other tests than those of the plan")
    options = parser.parse_args()
    modules = options.modules or list(PLAN)
    unknown = set(modules) - set(PLAN)
    if unknown:
        parser.error(f"not in the plan: {', '.join(sorted(unknown))}")
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    # pytest would warn that the plugin of hypothesis, which this process has imported, came first.
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    # The first failure is enough: looking for a simpler one would take most of the time.
    settings.register_profile(
        "mutants",
        database=None,
        derandomize=True,
        deadline=None,
        max_examples=50,
        phases=(Phase.explicit, Phase.generate),
    )
    settings.load_profile("mutants")
    failed = False
    for module in modules:
        source = (ROOT / "src" / PACKAGE / module).read_text()
        chosen = [mutant for mutant in mutants(source) if options.only in mutant.name]
        if options.list:
            print(*(f"{module}:{mutant.line}: {mutant.name}" for mutant in chosen), sep="\n")
            continue
        outcome = _run(
            module, chosen, [options.tests] if options.tests else PLAN[module], options.jobs
        )
        failed |= bool(outcome.survived)
        for mutant in outcome.survived:
            print(f"{module}:{mutant.line}: SURVIVED {mutant.name}")
        print(
            f"| `{module}` | {len(chosen)} | {outcome.killed} | {len(outcome.explained)} "
            f"| {len(outcome.survived)} |",
            flush=True,
        )
    return failed


def _run(module: str, chosen: list[Mutant], tests: list[list[str]], jobs: int) -> Outcome:
    name = _module_name(module)
    left = chosen
    for stage in tests:
        if not left:
            break
        patience = max(_LEAST_PATIENCE, 10 * _prepare(name, stage))
        results = _results(name, left, stage, patience, jobs)
        left = [mutant for mutant, is_noticed in results if not is_noticed]
    known = explanations().get(module, set())
    explained = [mutant for mutant in left if mutant.name in known]
    survived = [mutant for mutant in left if mutant.name not in known]
    return Outcome(len(chosen) - len(left), survived, explained)


def explanations() -> dict[str, set[str]]:
    """The names of the survivors that `survivors.md` explains, by module."""
    found: dict[str, set[str]] = {}
    module = ""
    for line in SURVIVORS.read_text().splitlines():
        if heading := re.fullmatch(r"## `(.+)`", line):
            module = heading[1]
        elif entry := re.match(r"- (`.+?`: `.+` → `.*?`(?: \(\d+\))?)(?:\.|$)", line):
            found.setdefault(module, set()).add(entry[1])
    return found


def _results(
    name: str, chosen: list[Mutant], tests: list[str], patience: float, jobs: int
) -> Iterator[tuple[Mutant, bool]]:
    """Yield each mutant, and whether a test has noticed it."""
    waiting = list(reversed(chosen))
    running: dict[int, tuple[Mutant, float]] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            mutant = waiting.pop()
            running[_start(name, mutant.source, tests)] = mutant, time.monotonic() + patience
        process, status = os.waitpid(-1, os.WNOHANG)
        if process:
            mutant, _ = running.pop(process)
            print(".", end="", file=sys.stderr, flush=True)
            if os.waitstatus_to_exitcode(status) == _NOT_RUN:
                raise SystemExit(f"pytest itself fails: {mutant.name}")
            yield mutant, status != 0
            continue
        for process, (_, deadline) in running.items():
            if time.monotonic() > deadline:  # an endless loop: the tests have noticed it
                os.killpg(process, signal.SIGKILL)
        time.sleep(0.01)


def _prepare(name: str, tests: list[str]) -> float:
    """Return how many seconds *tests* take without a mutant.

    This process then has the modules of other packages that they need, so that no later process
    imports them.
    """
    with tempfile.TemporaryFile() as file:
        if os.waitpid(_start(name, None, tests, file), 0)[1]:
            raise SystemExit(f"these tests fail without a mutant: {' '.join(tests)}")
        file.seek(0)
        names = json.load(file)
    for one in names:
        try:
            importlib.import_module(one)
        except Exception:  # some modules can only be imported by others
            pass
    if any(one.split(".")[0] == PACKAGE for one in sys.modules):  # no process would see a mutant
        raise SystemExit(f"another module than those of {PACKAGE} imports it: see _NOT_SHARED")
    began = time.monotonic()
    if os.waitpid(_start(name, None, tests), 0)[1]:
        raise SystemExit(f"these tests fail in a second process: {' '.join(tests)}")
    return time.monotonic() - began


def _start(name: str, source: str | None, tests: list[str], file: IO[bytes] | None = None) -> int:
    """Run *tests* in a new process, in which the module *name* has the text *source*.

    Without *source*, the module is not changed.  The new process writes the names of the modules
    that it has imported to *file*, as JSON.
    """
    sys.stdout.flush()
    process = os.fork()
    if process:
        return process
    status = _NOT_RUN
    try:
        os.setsid()
        if file is None:
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, 1)
            os.dup2(null, 2)
        if source is not None:
            copy = _copy(name, source)
            sys.path.insert(0, copy)
            os.environ["PYTHONPATH"] = copy  # of the processes that tests start
            # The byte code beside the links is that of the unchanged package.
            os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
            sys.dont_write_bytecode = True
        status = int(pytest.main([*_PYTEST, *tests]))
        if file is not None:
            names = [one for one in sys.modules if not _NOT_SHARED.match(one)]
            file.write(json.dumps(names).encode())
            file.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


_copies = Path(tempfile.mkdtemp())
atexit.register(shutil.rmtree, _copies)


def _copy(name: str, source: str) -> str:
    """Make a copy of this package in which the module *name* has the text *source*.

    Return the directory in which the copy is: an entry for `sys.path`.
    """
    directory = Path(tempfile.mkdtemp(dir=_copies))
    original, copy = ROOT / "src", directory
    for part in name.split("."):
        for entry in original.iterdir() if copy != directory else ():
            (copy / entry.name).symlink_to(entry)
        original, copy = original / part, copy / part
        copy.unlink(missing_ok=True)
        if original.is_dir():
            copy.mkdir()
    copy.with_suffix(".py").unlink()
    copy.with_suffix(".py").write_text(source)
    return str(directory)


def _module_name(module: str) -> str:
    return f"{PACKAGE}.{module.removesuffix('.py').replace('/', '.')}"


if __name__ == "__main__":
    sys.exit(main())
