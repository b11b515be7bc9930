"""The section on injected faults names every outcome in the file."""

from dataclasses import replace
from pathlib import Path

import pytest

from adk_secure_sessions import DatabaseError
from tests.benchmarks.results import Results
from tests.reliability import report
from tests.reliability.report import RESULTS, render
from tests.reliability.results import Outcome, Record

LABELS = {
    **report.KILLS,
    **report.FILES,
    **report.SERVERS,
    **report.KEY_SERVICES,
    **report.CLOCKS,
    report.TRAFFIC: "",
}


@pytest.fixture(scope="module")
def record() -> Record:
    return Record.load(RESULTS)


def test_nothing_was_lost_or_doubled(record: Record) -> None:
    for name, outcome in record.outcomes.items():
        assert (outcome.lost, outcome.doubled) == (0, 0), name


def test_section_has_a_row_for_every_outcome_and_changes_with_it(record: Record) -> None:
    page = render(record)
    for name, outcome in record.outcomes.items():
        prefix, _, database = name.rpartition("/")
        assert prefix in LABELS, name
        assert database in report.DATABASES, name
        if not outcome.times:
            continue
        changed = replace(outcome, acknowledged=outcome.acknowledged + 1_234_567)
        outcomes = {**record.outcomes, name: changed}
        results = Results(record.machine, record.versions, record.figures)
        assert render(Record(results, outcomes)) != page, name


def test_fault_that_was_not_injected_is_shown_as_not_run(record: Record) -> None:
    results = Results(record.machine, record.versions, record.figures)
    page = render(Record(results, {}))
    for label in (*report.KILLS.values(), *report.SERVERS.values()):
        assert f"| {label} |  | {report.NOT_RUN} |" in page


def test_outcomes_are_read_back_and_those_of_another_run_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "made" / "results.json"
    lost = DatabaseError("text", retryable=True, code="57014")
    first, second = Record(), Record()
    for pause in (1.5, 0.5):
        first.fault("a/sqlite", times=2, acknowledged=3, errors=[lost, lost], pause=pause)
    first.fault("b/sqlite", times=1)
    first.figure("figure", 1.0, "s")
    first.save(path)
    expected = Outcome(4, 6, 0, 0, {"`DatabaseError` (57014), `retryable`": 4}, 1.5)
    assert Record.load(path).outcomes["a/sqlite"] == expected
    second.fault("b/sqlite", times=7)
    second.save(path)
    again = Record.load(path)
    assert again.outcomes == {"a/sqlite": expected, "b/sqlite": Outcome(7)}
    assert again.figures.keys() == {"figure"}
