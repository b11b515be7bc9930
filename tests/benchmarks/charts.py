"""Draw the charts of the page as SVG; text and axes take the colour of the page around them."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import StringIO
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from tests.benchmarks.databases import ADK, ADK_SQLITE, FERNET, NO_OP, OURS
from tests.benchmarks.overhead import LIMIT
from tests.benchmarks.plan import CONVERSATION_ROUNDS, DIRECTIONS, EVENTS, PAYLOADS, SIZES
from tests.benchmarks.results import Figure, Results, quantity

SIDE_LABELS = {
    OURS: "AES-256-GCM",
    FERNET: "Fernet",
    NO_OP: "no-op (unencrypted)",
    ADK: "ADK (unencrypted)",
    ADK_SQLITE: "ADK's SQLite service",
}
DATABASE_LABELS = {"sqlite": "SQLite", "postgresql": "PostgreSQL"}
_DATABASE_COLOURS = {"sqlite": "#2f86d1", "postgresql": "#8f7fd0"}
# As wide as a telephone's page, on which the text is as large as the page's.
_WIDTH, _SMALL = 3.5, 10
_LEGEND: Any = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.2), "fontsize": _SMALL}
# Contrast of at least 3:1 on white and on Material's dark slate.
_COLOURS = {
    OURS: "#2f86d1",
    FERNET: "#d6711f",
    NO_OP: "#3f9a5f",
    ADK: "#c2528b",
    ADK_SQLITE: "#8f7fd0",
}
_MARKERS = {OURS: "o", FERNET: "s", NO_OP: "^", ADK: "D", ADK_SQLITE: "v"}
_NAMESPACES = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
# Colours for an SVG that is not embedded in a page but shown as an image.
_STANDALONE_STYLE = (
    "<style>.picture{color:#222}@media (prefers-color-scheme:dark){.picture{color:#ccc}}</style>"
)
_PAGE_COLOUR = "#010203"  # placeholder; the written SVG has `currentColor` instead
_STYLE: Any = {
    "svg.fonttype": "none",  # text stays text, in the font of the page
    "svg.hashsalt": "adk-secure-sessions",  # the same ids in every run
    "font.size": 11,
    "axes.edgecolor": _PAGE_COLOUR,
    "axes.labelcolor": _PAGE_COLOUR,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _PAGE_COLOUR,
    "grid.alpha": 0.15,
    "legend.frameon": False,
    "text.color": _PAGE_COLOUR,
    "xtick.color": _PAGE_COLOUR,
    "ytick.color": _PAGE_COLOUR,
}
_seconds = FuncFormatter(lambda value, _: re.sub(r"\.0+ ", " ", quantity(value, unit="s")))


def charts(results: Results) -> dict[str, str]:
    """Return the SVG of each chart, by file name without the suffix."""
    return {
        "round-trip": _round_trip(results),
        "ciphers": _ciphers(results),
        "fernet": _fernet(results),
        "operations": _operations(results),
        "conversation-sqlite": _conversation(results, "sqlite"),
        "conversation-postgresql": _conversation(results, "postgresql"),
        "growth": _growth(results),
    }


def _round_trip(results: Results) -> str:
    with _titled_axes("Round trip: time relative to no encryption (lower is faster)", 3.2) as axes:
        _plot_backends(axes, results, "round trip/{side}/{label}/overhead", list(PAYLOADS))
        limit = f"limit for AES-256-GCM: {LIMIT:.2f}x"
        axes.axhline(LIMIT, color=_PAGE_COLOUR, linestyle="--", linewidth=1, label=limit)
        axes.axhline(1, color=_PAGE_COLOUR, linewidth=0.8)
        axes.set_ylim(bottom=min(0.9, axes.get_ylim()[0]))
        axes.set_ylabel("time relative to no encryption")
        axes.legend(**_LEGEND)
        return _svg(axes)


def _plot_backends(axes: Axes, results: Results, name: str, labels: Sequence[str]) -> None:
    for shift, side in ((-0.08, OURS), (0.08, FERNET)):
        figures = [results.figures[name.format(side=side, label=label)] for label in labels]
        positions = [number + shift for number in range(len(labels))]
        _plot_points(axes, positions, figures, side, line="")
    axes.set_xlabel("size of the state as JSON")
    axes.set_xticks(range(len(labels)), [size_label(label) for label in labels])
    axes.set_xlim(-0.5, len(labels) - 0.5)


def _plot_points(
    axes: Axes,
    x: Sequence[float],
    figures: Sequence[Figure],
    side: str,
    line: str = "-",
    label: str | None = None,
) -> None:
    values = [figure.value for figure in figures]
    below = [max(0.0, figure.value - figure.low) for figure in figures]
    above = [max(0.0, figure.high - figure.value) for figure in figures]
    axes.errorbar(
        x,
        values,
        yerr=[below, above],
        label=label or SIDE_LABELS[side],
        color=_COLOURS[side],
        marker=_MARKERS[side],
        markersize=5,
        linestyle=line,
        capsize=3,
    )


def _ciphers(results: Results) -> str:
    with _titled_axes("Time to encrypt or decrypt one value (lower is faster)") as axes:
        for side in (FERNET, OURS):
            for direction, line in zip(DIRECTIONS, ("-", ":"), strict=True):
                figures = [results.figures[f"{direction} only/{side}/{size}"] for size in SIZES]
                label = f"{SIDE_LABELS[side]}, {direction}"
                _plot_points(axes, list(SIZES.values()), figures, side, line, label=label)
        _log_sizes(axes)
        axes.set_yscale("log")
        axes.set_ylabel("time for one value")
        axes.yaxis.set_major_formatter(_seconds)
        axes.legend(**_LEGEND)
        return _svg(axes)


def _log_sizes(axes: Axes) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("size of the value")
    axes.set_xticks(
        list(SIZES.values()),
        ["" if size in ("350B", "5KB", "100KB") else size_label(size) for size in SIZES],
    )


def _fernet(results: Results) -> str:
    with _titled_axes("Time of Fernet relative to AES-256-GCM (lower is faster)") as axes:
        for direction, line in zip(DIRECTIONS, ("-", ":"), strict=True):
            figures = [results.figures[f"comparison/{direction}/{size}/ratio"] for size in SIZES]
            _plot_points(axes, list(SIZES.values()), figures, FERNET, line, label=direction)
        _log_sizes(axes)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("time relative to AES-256-GCM")
        axes.legend(loc="lower right", fontsize=_SMALL)
        return _svg(axes)


OPERATIONS = (
    "create, state 1 KB",
    "create, state 100 KB",
    "append, state 1 KB",
    "delete, 20 events",
    "get, 0 events",
    "get, 20 events",
    "get, 100 events",
    "get, 1000 events",
    "list, 10 sessions",
    "list, 1000 sessions",
)


def _operations(results: Results) -> str:
    title = "Time relative to unencrypted ADK (lower is faster)"
    with _titled_axes(title, height=5.6) as axes:
        for shift, database in ((-0.19, "sqlite"), (0.19, "postgresql")):
            figures = [
                results.figures[f"{database}/{operation}/relative to {ADK}"]
                for operation in OPERATIONS
            ]
            bars = axes.barh(
                [number + shift for number in range(len(OPERATIONS))],
                [figure.value for figure in figures],
                height=0.36,
                color=_DATABASE_COLOURS[database],
                label=DATABASE_LABELS[database],
            )
            axes.bar_label(bars, [figure.text for figure in figures], padding=3, fontsize=9)
        axes.set_yticks(range(len(OPERATIONS)), OPERATIONS, fontsize=_SMALL)
        axes.invert_yaxis()
        axes.axvline(1, color=_PAGE_COLOUR, linewidth=1.5, label="ADK, unencrypted")
        axes.set_xlim(0, 1.05)
        axes.set_xlabel("time relative to unencrypted ADK\n(lower is faster)")
        axes.grid(visible=False, axis="y")
        axes.legend(**_LEGEND | {"bbox_to_anchor": (0.3, -0.14)})
        return _svg(axes)


def _conversation(results: Results, database: str) -> str:
    title = f"{DATABASE_LABELS[database]}: operations per second (higher is faster)"
    with _titled_axes(title) as axes:
        for side in SIDE_LABELS:
            names = [
                f"{database}/conversations, {count} concurrent/{side} rate"
                for count in CONVERSATION_ROUNDS
            ]
            if names[0] in results.figures:
                figures = [results.figures[name] for name in names]
                _plot_points(axes, list(CONVERSATION_ROUNDS), figures, side)
        axes.set_xscale("log")
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("concurrent conversations")
        axes.set_ylabel("operations per second")
        axes.set_xticks(list(CONVERSATION_ROUNDS), [str(count) for count in CONVERSATION_ROUNDS])
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.legend(**_LEGEND)
        return _svg(axes)


def _growth(results: Results) -> str:
    with _titled_axes("Time to append an event (lower is faster)") as axes:
        for database, line in (("sqlite", "-"), ("postgresql", ":")):
            for side in (OURS, ADK):
                prefix = f"{database}/growth by events/{side}/append"
                figures = [results.figures[f"{prefix}, {count:,} events"] for count in EVENTS]
                label = f"{SIDE_LABELS[side]}, {DATABASE_LABELS[database]}"
                _plot_points(axes, EVENTS, figures, side, line, label)
        axes.set_xscale("log")
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("events in the session")
        axes.set_ylabel("time to append an event")
        axes.set_xticks(EVENTS, [f"{count:,}" for count in EVENTS])
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(_seconds)
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.legend(**_LEGEND)
        return _svg(axes)


def size_label(size: str) -> str:
    """Write `10KB` as "10 KB", and the state `{}` as "empty"."""
    return re.sub(r"(?<=\d)(?=[KM]?B\b)", " ", size.replace("{}", "empty"))


@contextmanager
def _titled_axes(title: str, height: float = 3.6) -> Iterator[Axes]:
    """Yield axes whose title is the text for those who do not see the chart."""
    with mpl.rc_context(_STYLE):
        axes = Canvas(figsize=(_WIDTH, height)).subplots()
        axes.set_title(title).set_visible(False)
        yield axes


def _svg(axes: Axes) -> str:
    """Return the chart as one SVG element, without XML prologue, absolute size and empty lines."""
    output, canvas = StringIO(), axes.get_figure()
    assert isinstance(canvas, Canvas)
    canvas.savefig(
        output,
        format="svg",
        transparent=True,
        bbox_inches="tight",
        metadata={"Date": None, "Creator": None, "Format": None, "Type": None},
    )
    body = output.getvalue()
    view = re.search(r' viewBox="[^"]*"', body)
    assert view
    body = body[body.index("<defs>") :]  # drops width and height: the page sets the size
    body = body.replace("*{", ".chart *{").replace(_PAGE_COLOUR, "currentColor")
    body = re.sub(r"\n\s*", "\n", body).strip()
    head = f'<svg class="picture chart" role="img" aria-label="{axes.get_title()}"'
    return (
        f"{head}{view[0]} {_NAMESPACES}>\n<!-- matplotlib {mpl.__version__} -->\n"
        f"{_STANDALONE_STYLE}\n{body}\n"
    )
