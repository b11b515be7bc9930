"""The results of the tests of faults: an outcome for each fault, and figures, in one JSON file.

How it works.  The fixture `record` (tests/conftest.py) is a `Record` for the whole run.  A test
that injects faults ends with `record.fault(name, times=..., ...)`, and a test that measures with
`record.figure(name, value, unit)`.  With `--outcomes FILE`, the run writes them to the file.  What
an earlier run on the same machine has written for other faults stays there, so that a part of the
tests can be run again.
"""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import sqlalchemy as sa

from adk_secure_sessions import SecureSessionError
from tests.benchmarks.machine import machine, versions
from tests.benchmarks.results import Figure, Results


@dataclass(frozen=True)
class Outcome:
    """What a fault did to an application.

    Attributes:
        times: How often the fault was injected.
        acknowledged: How many writes were acknowledged before, during and after the faults.
        lost: How many of these are not stored.
        doubled: How many events are stored that nobody has appended, or more than once.
        errors: What the application saw, and how often; see `seen`.
        pause: The longest time in seconds from a fault, or from its end if it lasts, until an
            operation succeeded; None if that was not measured.
    """

    times: int
    acknowledged: int = 0
    lost: int = 0
    doubled: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    pause: float | None = None


_DRIVERS = {
    "sqlite+aiosqlite": "sqlite",
    "postgresql+asyncpg": "postgresql",
    "postgresql+psycopg": "postgresql, psycopg",
    "mariadb+asyncmy": "mariadb",
    "mysql+asyncmy": "mariadb",
}


def database_of(url: sa.URL) -> str:
    """Return what the names of outcomes call the database of *url*."""
    return _DRIVERS[url.drivername]


def seen(error: BaseException) -> str:
    """Return what an application sees of *error*: the class, the code, and whether to try again."""
    code = getattr(error, "code", None)
    text = f"`{type(error).__name__}`" + (f" ({code})" if code else "")
    if isinstance(error, SecureSessionError) and error.retryable:
        text += ", `retryable`"
    return text


class Record:
    """The outcomes and figures of one run, by name."""

    def __init__(
        self, results: Results | None = None, outcomes: dict[str, Outcome] | None = None
    ) -> None:
        self._results = Results(machine(), versions()) if results is None else results
        self.outcomes = {} if outcomes is None else outcomes

    @property
    def machine(self) -> dict[str, str]:
        return self._results.machine

    @property
    def versions(self) -> dict[str, str]:
        return self._results.versions

    @property
    def figures(self) -> dict[str, Figure]:
        return self._results.figures

    def fault(
        self,
        name: str,
        *,
        times: int,
        acknowledged: int = 0,
        lost: int = 0,
        doubled: int = 0,
        errors: Iterable[BaseException | str] = (),
        pause: float | None = None,
    ) -> None:
        """Store the outcome of a fault, or add it to those of the same name in this run."""
        counts = Counter(one if isinstance(one, str) else seen(one) for one in errors)
        before = self.outcomes.get(name, Outcome(0))
        pauses = [one for one in (before.pause, pause) if one is not None]
        self.outcomes[name] = Outcome(
            before.times + times,
            before.acknowledged + acknowledged,
            before.lost + lost,
            before.doubled + doubled,
            dict(Counter(before.errors) + counts),
            max(pauses, default=None),
        )

    def figure(self, name: str, value: float, unit: str = "") -> None:
        """Store a value that was measured once; a later one of the same name replaces it."""
        self.figures[name] = Figure(value, value, value, 1, unit)

    def count(self, name: str, number: int) -> None:
        """Add *number* to the figure of this name in this run."""
        before = self.figures.get(name)
        self.figure(name, number + (before.value if before else 0))

    def save(self, path: Path) -> None:
        """Write to *path*, and keep what another run on this machine has written there."""
        merged = self._merged(type(self).load(path)) if path.exists() else self
        outcomes = {name: asdict(merged.outcomes[name]) for name in sorted(merged.outcomes)}
        content = {**merged._results.content(), "outcomes": outcomes}
        content["figures"] = dict(sorted(content["figures"].items()))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    def _merged(self, older: "Record") -> "Record":
        versions = older.versions | self.versions
        if older.machine != self.machine or older.versions.items() - versions.items():
            return self  # figures of two machines, or of two versions, are not mixed
        figures = older.figures | self.figures
        return Record(Results(self.machine, versions, figures), older.outcomes | self.outcomes)

    @classmethod
    def load(cls, path: Path) -> Self:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        outcomes = {name: Outcome(**fields) for name, fields in content.pop("outcomes").items()}
        return cls(Results.of(content), outcomes)
