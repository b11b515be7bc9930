"""The page and its charts agree with the file of results."""

from dataclasses import replace

import matplotlib as mpl
import pytest

from tests.benchmarks.charts import charts
from tests.benchmarks.report import CHARTS, PAGE, RESULTS, render
from tests.benchmarks.results import Results

REGENERATE = "regenerate the page and charts: python -m tests.benchmarks.report"


@pytest.fixture(scope="module")
def results() -> Results:
    return Results.load(RESULTS)


def test_page_agrees_with_the_results(results: Results) -> None:
    assert PAGE.read_text(encoding="utf-8") == render(results), REGENERATE


def test_charts_agree_with_the_results(results: Results) -> None:
    drawn = {path.stem: path.read_text(encoding="utf-8") for path in CHARTS.glob("*.svg")}
    again = charts(results)
    assert drawn.keys() == again.keys()
    if f"matplotlib {mpl.__version__} " not in next(iter(drawn.values())):
        pytest.skip("drawn by another version of matplotlib, whose layout differs")
    assert drawn == again, REGENERATE


def changed(results: Results, **values: float) -> str:
    """Return the page with other values; a name has `__` for a slash."""
    figures = dict(results.figures)
    for key, value in values.items():
        name = key.replace("__", "/")
        figures[name] = replace(figures[name], value=value)
    return render(Results(results.machine, results.versions, figures))


def test_first_lines_say_what_the_results_say(results: Results) -> None:
    page = changed(
        results,
        **{f"round trip__aesgcm__{size}__overhead": 1.03 for size in ("{}", "1KB", "10KB")},
        **{"round trip__aesgcm__100KB__overhead": 0.98},
        **{"sqlite__get, 20 events__relative to adk": 0.02},
        **{"postgresql__get, 20 events__relative to adk": 0.98},
    )
    first = page.partition("\n## ")[0]
    assert "AES-256-GCM adds 0 to 3 % to its time" in first
    assert "2 to 98 % of the time of ADK's" in first
    assert "are faster than ADK's" in first
    slow = changed(results, **{"postgresql__list, 10 sessions__relative to adk": 1.2})
    assert "are faster than ADK's" not in slow
    assert "to 120 % of the time of ADK's" in slow


def test_missed_goals_are_marked(results: Results) -> None:
    page = changed(
        results,
        **{"round trip__fernet__100KB__overhead": 1.5},
        **{"sqlite__delete, 20 events__relative to adk": 0.99},
    )
    assert "**missed** by 1 of 8 figures (round trip, fernet, 100KB, overhead: 1.50x)" in page
    [row] = [line for line in page.splitlines() if line.startswith("| delete, 20 events |")]
    assert "| 0.99x (0.15x, **missed**) |" in row


def test_every_figure_has_an_interval_around_it(results: Results) -> None:
    assert len(results.figures) > 500
    for name, figure in results.figures.items():
        assert figure.low <= figure.value <= figure.high, name
