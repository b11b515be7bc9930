"""The results of a run: figures by name, the machine, and the versions of the software."""

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

_log = logging.getLogger("benchmarks")
_NORMAL_95 = 1.96  # standard deviations that hold 95 % of a normal distribution


def _ranks(count: int, share: float) -> tuple[int, int]:
    """Return the ranks of the samples that bound the interval of a quantile."""
    width = _NORMAL_95 * math.sqrt(count * share * (1 - share))
    return max(1, round(count * share - width)), min(count, round(count * share + width + 1))


@dataclass(frozen=True)
class Figure:
    """A quantile of the samples, and its nominal 95 % confidence interval.

    The interval is computed from order statistics and assumes no distribution: W. J. Conover,
    Practical Nonparametric Statistics, section 3.2.  For one sample it is that sample.  Of few
    samples, the interval has a lower probability of containing the quantile.
    """

    value: float
    low: float
    high: float
    samples: int
    unit: str  # "s", "x" for a ratio, "B", "/s", "%", or "" for a count
    goal: float | None = None  # the highest value it should have

    @classmethod
    def of(
        cls, values: Sequence[float], unit: str, percent: float = 50, goal: float | None = None
    ) -> Self:
        """Return a percentile of *values*.

        The median of an even number of values is the mean of the middle two.
        """
        ordered = sorted(values)
        count, share = len(ordered), percent / 100
        first, last = _ranks(count, share)
        rank = max(1, math.ceil(count * share))
        value = ordered[rank - 1]
        if percent == 50:
            value = (value + ordered[count // 2]) / 2
        return cls(value, ordered[first - 1], ordered[last - 1], count, unit, goal)

    @classmethod
    def ratio(
        cls, ours: Sequence[float], reference: Sequence[float], goal: float | None = None
    ) -> Self:
        """Return the median of the ratios ours / reference, taken round by round.

        If the machine slows down for a whole round, the ratio of that round stays the same.
        """
        pairs = zip(ours, reference, strict=True)
        return cls.of([mine / theirs for mine, theirs in pairs], "x", goal=goal)

    @property
    def is_met(self) -> bool | None:
        """Whether the goal is met; None if there is no goal."""
        return None if self.goal is None else self.value <= self.goal

    def __str__(self) -> str:
        text = self.text
        if self.samples > 1:
            interval = quantity(self.low, self.high, unit=self.unit, separator=" to ")
            text += f" ({interval}, {self.samples} samples)"
        if self.goal is not None:
            goal = quantity(self.goal, unit=self.unit)
            text += f", goal {goal}: {'met' if self.is_met else 'MISSED'}"
        return text

    @property
    def text(self) -> str:
        """The value with its unit, rounded."""
        return quantity(self.value, unit=self.unit)


_SIZES = {
    "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")),
    "B": ((1e6, "MB"), (1.0, "B")),
}


def quantity(*values: float, unit: str, separator: str = "/") -> str:
    """Format values with three significant digits and one unit, which fits the largest value."""
    sizes = _SIZES.get(unit, ((1.0, unit),))
    size, name = next((one for one in sizes if max(values) >= 0.9995 * one[0]), sizes[-1])
    digits = _whole if unit in ("B", "/s", "") and size == 1 else _three_digits
    space = "" if unit in ("x", "/s", "") else " "
    return separator.join(digits(value / size) for value in values) + space + name


def _three_digits(value: float) -> str:
    decimals = 0 if value >= 99.95 else 1 if value >= 9.995 else 2 if value >= 0.0995 else 3
    return f"{value:,.{decimals}f}" if value else "0"


def _whole(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.5 or value == int(value) else f"{value:.3g}"


class Results:
    """The figures of one run."""

    def __init__(
        self,
        machine: dict[str, str] | None = None,
        versions: dict[str, str] | None = None,
        figures: dict[str, Figure] | None = None,
    ) -> None:
        self.machine = machine or {}
        self.versions = versions or {}
        self.figures = figures or {}

    def store(self, name: str, figure: Figure) -> None:
        """Store a figure without logging it; raise ValueError if the name is taken."""
        if name in self.figures:
            raise ValueError(f"two figures have the name {name!r}")
        self.figures[name] = figure

    def log(self, line: str) -> None:
        _log.info(line)

    def add(self, name: str, figure: Figure) -> None:
        """Store a figure and log it."""
        self.store(name, figure)
        self.log(f"{name}: {figure}")

    def count(self, name: str, value: float, unit: str = "", goal: float | None = None) -> None:
        """Add a value that was counted, or measured only once."""
        self.add(name, Figure(value, value, value, 1, unit, goal))

    def content(self) -> dict[str, Any]:
        """Return what `save` writes: `machine`, `versions`, and `figures` by name."""
        figures = {name: asdict(figure) for name, figure in self.figures.items()}
        return {"machine": self.machine, "versions": self.versions, "figures": figures}

    def save(self, path: Path) -> None:
        """Write `content` as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.content(), indent=1, ensure_ascii=False)
        path.write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Self:
        return cls.of(json.loads(path.read_text(encoding="utf-8")))

    @classmethod
    def of(cls, content: dict[str, Any]) -> Self:
        """Return the results that *content*, which `content` has returned, describes."""
        figures = {name: Figure(**fields) for name, fields in content["figures"].items()}
        return cls(content["machine"], content["versions"], figures)

    def updated(self, newer: Self) -> Self:
        """Return these results with the figures of *newer*, which must be of the same machine."""
        if self.machine != newer.machine:
            raise ValueError("the figures were measured on another machine: run all benchmarks")
        versions = self.versions | newer.versions
        return type(self)(self.machine, versions, self.figures | newer.figures)


_MIN_CHANGE = 0.05  # smaller changes are not listed


def changes(old: Results, new: Results) -> list[str]:
    """List the figures that changed beyond noise.

    A figure has changed if the intervals do not overlap and the values differ by more than 5 %.
    Between two machines, only ratios and counts are compared, not times and rates.
    """
    lines = []
    same = old.machine == new.machine
    if not same:
        lines.append("another machine: times and rates are not compared")
    for name, figure in new.figures.items():
        before = old.figures.get(name)
        if before is None:
            lines.append(f"{name}: new, {figure}")
        elif (same or figure.unit not in ("s", "/s")) and _differs(before, figure):
            change = f"{figure.value / before.value - 1:+.0%}" if before.value else "from nothing"
            lines.append(f"{name}: {change}, was {before}, is {figure}")
    lines += [f"{name}: gone" for name in old.figures if name not in new.figures]
    return lines or ["no change beyond noise"]


def _differs(one: Figure, other: Figure) -> bool:
    apart = one.high < other.low or other.high < one.low
    return apart and abs(one.value - other.value) > _MIN_CHANGE * min(one.value, other.value)
