"""Generate docs/benchmarks.md and its charts from the files of results.

python -m tests.benchmarks.report [--compare OLD] [RESULTS]
"""

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.benchmarks import budgets, overhead, plan
from tests.benchmarks.charts import DATABASE_LABELS, OPERATIONS, SIDE_LABELS, charts, size_label
from tests.benchmarks.databases import ADK, ADK_SQLITE, FERNET, FLOOR, NO_OP, OURS
from tests.benchmarks.markdown import markdown_table as _markdown
from tests.benchmarks.markdown import rendered
from tests.benchmarks.results import Results, changes, quantity
from tests.reliability import report as reliability
from tests.reliability.results import Record

_ROOT = Path(__file__).parents[2]
RESULTS = _ROOT / "benchmarks" / "results.json"
PAGE, CHARTS = _ROOT / "docs" / "benchmarks.md", _ROOT / "docs" / "charts"
TEMPLATE = Path(__file__).with_name("page.md")
_SIDES = (OURS, FERNET, NO_OP, ADK)


def render(results: Results, record: Record | None = None) -> str:
    """Return the text of the page; *record* has the outcomes of injected faults."""
    record = record or Record.load(reliability.RESULTS)
    return rendered(
        TEMPLATE,
        figures=Report(results),
        faults=reliability.Report(record),
        reliability=reliability.render(record),
        plan=plan,
        budgets=budgets,
        limit=quantity(overhead.LIMIT, unit="x"),
        to_adk=f"relative to {ADK}",
    )


def write(results: Results) -> None:
    """Write the page and the charts into docs/."""
    PAGE.write_text(render(results), encoding="utf-8")
    CHARTS.mkdir(exist_ok=True)
    for name, svg in charts(results).items():
        (CHARTS / f"{name}.svg").write_text(svg, encoding="utf-8")


class Report:
    """The texts and Markdown tables that the template inserts; `name` is the name of a figure."""

    def __init__(self, results: Results) -> None:
        self.machine, self.versions = results.machine, results.versions
        self._figures = results.figures

    def text(self, name: str) -> str:
        """Return the rounded value of a figure, with its unit."""
        return self._figures[name].text

    def added(self, backend: str) -> str:
        """Return how much a backend adds to a round trip: `2 to 5 %`."""
        names = [f"round trip/{backend}/{label}/overhead" for label in plan.PAYLOADS]
        return _percent(max(0.0, self._figures[name].value - 1) for name in names)

    def time_of_adk(self, *databases: str, adk: str = ADK) -> str:
        """Return the time of the charted operations as a share of ADK's time: `14 to 38 %`."""
        return _percent(self._ratios_to_adk(databases, adk))

    def is_faster_than_adk(self, *databases: str) -> bool:
        """Whether each charted operation takes less time than with ADK."""
        return max(self._ratios_to_adk(databases, ADK)) < 1

    def _ratios_to_adk(self, databases: Sequence[str], adk: str) -> list[float]:
        return [
            self._figures[f"{database}/{operation}/relative to {adk}"].value
            for database in databases
            for operation in OPERATIONS
        ]

    def share(self, part: str, whole: str) -> str:
        """Return one figure as a share of another: `9 %`."""
        return _percent([self._figures[part].value / self._figures[whole].value])

    def saved(self, part: str, whole: str) -> str:
        """Return by how much one figure is smaller than another: `91 %`."""
        return _percent([1 - self._figures[part].value / self._figures[whole].value])

    def verdict(self, *prefixes: str) -> str:
        """Return whether the goals of all figures whose names begin so are met, in bold if not."""
        figures = {
            name: figure
            for name, figure in self._figures.items()
            if name.startswith(prefixes) and figure.goal is not None
        }
        missed = [name for name, figure in figures.items() if not figure.is_met]
        assert figures, prefixes
        if not missed:
            return "met"
        texts = [f"{name.replace('/', ', ')}: {figures[name].text}" for name in missed]
        return f"**missed** by {len(missed)} of {len(figures)} figures ({'; '.join(texts)})"

    def interval(self, name: str) -> str:
        """Return the rounded value of a figure, with its unit and its confidence interval."""
        figure = self._figures[name]
        bounds = quantity(figure.low, figure.high, unit=figure.unit, separator="–")  # noqa: RUF001
        return f"{figure.text} ({bounds})"

    def table(
        self,
        first: str,
        columns: Sequence[tuple[str, str]],
        rows: Sequence[object],
        interval: bool = False,
    ) -> str:
        """Return a Markdown table of figures, with confidence intervals if *interval* is True.

        *first* is the heading of the first column, which contains the rows' labels.  *columns* has
        the heading of each further column, and the name of its figures, in which the first `{}` is
        replaced by the row.
        """
        show = self.interval if interval else self.text
        cells = [
            [_label(row), *(show(name.replace("{}", str(row), 1)) for _, name in columns)]
            for row in rows
        ]
        return _markdown([first, *(heading for heading, _ in columns)], cells)

    def operations(self, *databases: str) -> str:
        """Return the table of all operations: the time, and the ratios with their goals."""
        cells = []
        for operation in budgets.BUDGETS["postgresql"]:
            if self.has(_to_adk(databases[0], operation)):
                row = [operation]
                for database in databases:
                    to_floor = f"{database}/{operation}/relative to {FLOOR}"
                    time = self.text(f"{database}/{operation}/{OURS}")
                    row += [time, self.with_goal(_to_adk(database, operation))]
                    if database == "sqlite":
                        to_other = f"sqlite/{operation}/relative to {ADK_SQLITE}"
                        row.append(self.text(to_other) if self.has(to_other) else "")
                    row.append(self.with_goal(to_floor))
                cells.append(row)
        columns = [
            text
            for database in databases
            for text in (
                DATABASE_LABELS[database],
                "to ADK (goal)",
                *(["to ADK's SQLite service"] if database == "sqlite" else []),
                "to the floor (goal)",
            )
        ]
        return _markdown(["operation", *columns], cells)

    def met(self, database: str) -> str:
        """Return how many goals of the operations are met: `17 of 32`."""
        goals = [
            figure.is_met
            for name, figure in self._figures.items()
            if name.rpartition("/")[0] in {f"{database}/{one}" for one in budgets.BUDGETS["sqlite"]}
            and figure.goal is not None
        ]
        return f"{sum(map(bool, goals))} of {len(goals)}"

    def with_goal(self, name: str) -> str:
        """Return a figure with its goal, marked if it is missed; without, if it has no goal."""
        figure = self._figures[name]
        if figure.goal is None:
            return figure.text
        text, goal = figure.text, quantity(figure.goal, unit=figure.unit)
        if not figure.is_met and text == goal:
            text = f"{figure.value:.4g}{figure.unit}"  # a digit more, which shows the difference
        return f"{text} ({goal}{'' if figure.is_met else ', **missed**'})"

    def rates(self, database: str) -> str:
        """Return the table of operations per second for each number of concurrent conversations."""
        cells = []
        for side in (*_SIDES, ADK_SQLITE):
            names = [
                f"{database}/conversations, {count} concurrent/{side}"
                for count in plan.CONVERSATION_ROUNDS
            ]
            if self.has(f"{names[0]} rate"):
                cells.append([SIDE_LABELS[side], *map(self._rate, names)])
        counts = [f"{count} at once" for count in plan.CONVERSATION_ROUNDS]
        return _markdown([f"{DATABASE_LABELS[database]}: operations", *counts], cells)

    def _rate(self, name: str) -> str:
        errors = self._figures[f"{name} errors"].value
        return self.text(f"{name} rate") + (f", {errors:.0f} errors" if errors else "")

    def stored(self, database: str) -> str:
        """Return the table of stored bytes for each session and event."""
        sides = [("JSON", "JSON"), *((SIDE_LABELS[side], side) for side in (OURS, FERNET, ADK))]
        columns = [(heading, f"{database}/stored/{{}}/{side}") for heading, side in sides]
        rows = [*(f"session, {label}" for label in plan.PAYLOADS), "event"]
        return self.table(DATABASE_LABELS[database], columns, rows)

    def scaling(self, database: str, label: str) -> str:
        """Return the table of appends by several processes at once."""
        cells = []
        columns = ["appends", "CPU of the service", "CPU of the server"]
        keys = [
            key
            for key in ("rate", *columns[1:])
            if self.has(f"{database}/scaling/1 processes/{key}")
        ]
        for count in plan.PROCESSES:
            name = f"{database}/scaling/{count} processes"
            cells.append([str(count), *(self.text(f"{name}/{key}") for key in keys)])
        return _markdown([f"{label}: processes", *columns[: len(keys)]], cells)

    def per_core(self, name: str) -> str:
        """Return how often a core can do, in one second, what takes this CPU time: `2,900`."""
        return f"{round(1 / self._figures[name].value, -2):,.0f}"

    def count(self, name: str) -> int:
        """Return a number that was counted."""
        return round(self._figures[name].value)

    def packing(self, database: str, rows: Sequence[str]) -> str:
        """Return the table of sizes or times with each kind of compression and padding."""
        sides = [("JSON", "JSON"), ("ADK", ADK), *((side, side) for side in plan.PACKING)]
        columns = [
            (heading, f"{database}/packing/{{}}/{side}")
            for heading, side in sides
            if self.has(f"{database}/packing/{rows[0]}/{side}")
        ]
        return self.table(DATABASE_LABELS[database], columns, rows)

    def compared(self, first: str, name: str, rows: Sequence[str]) -> str:
        """Return a table of our time, ADK's and their ratio; *name* has a `{}` for the row."""
        sides = [("encrypted", OURS), ("ADK", ADK), ("relative to ADK", f"relative to {ADK}")]
        return self.table(first, [(text, f"{name}/{side}") for text, side in sides], rows)

    def has(self, name: str) -> bool:
        """Whether the results include this figure."""
        return name in self._figures

    def record_overhead(self, backend: str) -> str:
        """Return the number of bytes that a record adds to its value: `29`, or `70 to 85`."""
        more = {
            int(self._figures[f"record/{size}/{backend}"].value) - plan.RECORD_SIZES[size]
            for size in plan.RECORDS
        }
        return f"{min(more)}" if len(more) == 1 else f"{min(more)} to {max(more)}"


def _label(row: object) -> str:
    return size_label(DATABASE_LABELS.get(str(row), str(row)))


def _to_adk(database: str, operation: str) -> str:
    return f"{database}/{operation}/relative to {ADK}"


def _percent(shares: Iterable[float]) -> str:
    percent = [round(100 * share) for share in shares]
    low, high = min(percent), max(percent)
    return f"{high} %" if low == high else f"{low} to {high} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", nargs="?", type=Path, default=RESULTS)
    parser.add_argument(
        "--compare",
        type=Path,
        metavar="OLD",
        help="list the figures that differ from those in OLD, and write nothing",
    )
    arguments = parser.parse_args()
    results = Results.load(arguments.results)
    if arguments.compare:
        print("\n".join(changes(Results.load(arguments.compare), results)))
    else:
        write(results)


if __name__ == "__main__":
    main()
