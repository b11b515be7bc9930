"""The statistics, tested with invented samples."""

from pathlib import Path

import pytest

from tests.benchmarks.results import Figure, Results, changes, quantity


def test_ratio_is_the_median_of_the_rounds() -> None:
    ratio = Figure.ratio([1.0, 2.0, 3.0, 4.0, 50.0], [10.0] * 5, goal=0.3)
    assert ratio == Figure(0.3, 0.1, 5.0, 5, "x", 0.3)
    assert ratio.is_met


@pytest.mark.parametrize(
    ("percent", "value"), [(1, 1), (50, 50.5), (98.5, 99), (99, 99), (99.5, 100), (100, 100)]
)
def test_percentile_of_a_hundred_samples(percent: float, value: float) -> None:
    assert Figure.of([float(n) for n in range(100, 0, -1)], "s", percent).value == value


def test_interval_of_a_median_has_the_published_ranks() -> None:
    """The 8th and 18th of 25 samples; the 40th and 61st of 100."""
    for count, low, high in [(25, 8, 18), (100, 40, 61)]:
        figure = Figure.of([float(n) for n in range(1, count + 1)], "s")
        assert (figure.low, figure.high) == (low, high)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (1.234, "s", "1.23 s"),
        (0.0999, "s", "99.9 ms"),
        (0.000999, "s", "999 µs"),
        (0.0009999, "s", "1.00 ms"),
        (0.00000853, "s", "8.53 µs"),
        (0.0000000853, "s", "85.3 ns"),
        (0.203, "x", "0.20x"),
        (0.0312, "x", "0.031x"),
        (33.04, "x", "33.0x"),
        (1041, "B", "1,041 B"),
        (12_345_678, "B", "12.3 MB"),
        (2713.7, "/s", "2,714/s"),
        (3, "", "3"),
        (4.25, "%", "4.25 %"),
        (0.0, "s", "0 ns"),
    ],
)
def test_quantity_shows_three_digits_in_a_fitting_unit(value: float, unit: str, text: str) -> None:
    assert quantity(value, unit=unit) == text


def test_results_are_read_back_as_written(tmp_path: Path) -> None:
    results = Results({"cores": "2"}, {"Python": "3.11"})
    results.add("a", Figure.of([1.0, 2.0, 3.0], "s", goal=2.5))
    results.count("b", 4, goal=4)
    results.save(tmp_path / "made" / "results.json")
    again = Results.load(tmp_path / "made" / "results.json")
    assert (again.machine, again.versions) == ({"cores": "2"}, {"Python": "3.11"})
    assert again.figures == results.figures


def test_part_of_a_run_replaces_its_figures_only() -> None:
    old, new = run_of(kept=seconds(1, 0), again=seconds(2, 0)), run_of(again=seconds(3, 0))
    updated = old.updated(new)
    assert {name: one.value for name, one in updated.figures.items()} == {"kept": 1, "again": 3}
    elsewhere = Results({"processor": "another"}, {}, new.figures)
    with pytest.raises(ValueError, match="another machine"):
        old.updated(elsewhere)


def run_of(machine: str = "one", **figures: Figure) -> Results:
    return Results({"processor": machine}, {}, figures)


def seconds(middle: float, width: float) -> Figure:
    return Figure(middle, middle - width, middle + width, 30, "s")


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (seconds(1.0, 0.1), seconds(1.5, 0.1), "a: +50%, was 1.00 s"),
        (seconds(1.0, 0.1), seconds(0.5, 0.1), "a: -50%, was 1.00 s"),
        (seconds(1.0, 0.3), seconds(1.5, 0.3), "no change beyond noise"),  # intervals touch
        (seconds(1.0, 0.01), seconds(1.04, 0.01), "no change beyond noise"),  # too small
        (Figure(2, 2, 2, 1, ""), Figure(4, 4, 4, 1, ""), "a: +100%, was 2, is 4"),
    ],
)
def test_changes_beyond_noise_are_listed(old: Figure, new: Figure, expected: str) -> None:
    [line] = changes(run_of(a=old), run_of(a=new))
    assert line.startswith(expected)
