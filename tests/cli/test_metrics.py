"""`--metrics-file`: what each command leaves for a scheduler's monitoring, also after a failure."""

import re
import stat
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.cli.support import on, run
from tests.cli.test_json import arguments
from tests.maintenance.support import run_sql

PREFIX = "adk_secure_sessions_"


def read(file: Path) -> dict[str, float]:
    """Return the values by name; each must have the labels of the run."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(file.read_text(encoding="utf-8")):
        assert (family.type, bool(family.documentation)) == ("gauge", True)
        for sample in family.samples:
            assert sample.labels["file"] == file.name
            name = sample.name.removeprefix(PREFIX).removeprefix("command_")
            found[name + sample.labels.get("purpose", "")] = sample.value
    return found


@pytest.fixture
def metrics(tmp_path: Path) -> Path:
    return tmp_path / "run.prom"


@pytest.mark.parametrize("name", ["export", "audit export"])
def test_command_whose_output_is_on_stdout_writes_them(name: str, file: str, metrics: Path) -> None:
    more = ["--decrypt", "--jsonl", "-"] if name == "export" else []
    if not more:
        arguments(name, file)  # begins a trail
    said = run(*name.split(), *more, *on(file), "--metrics-file", str(metrics))
    assert (said.code, read(metrics)["problems"]) == (0, 0)


def test_failed_run_keeps_the_time_of_the_last_success(file: str, metrics: Path) -> None:
    verify = ["verify", "--metrics-file", str(metrics)]
    assert run(*verify, *on(file)).code == 0
    found = read(metrics)
    assert found["last_success_timestamp_seconds"] == found["last_run_timestamp_seconds"] > 1e9
    assert found["duration_seconds"] > 0
    success = found["last_success_timestamp_seconds"]
    run_sql(file, "UPDATE secure_events SET event = x'00' WHERE seq = 1")
    for options, code, problems in (
        (on(file), 1, 4),  # bad rows
        (on(file, None), 2, 1),  # no key
        (on("sqlite:///nowhere.db"), 2, 1),
        (["--key", "env:OLD_KEY"], 2, 1),  # no --db
        ([*on(file), "--rows-per-second", "many"], 2, 1),
    ):
        said = run(*verify, *options)
        found = read(metrics)
        assert (said.code, found["problems"]) == (code, problems), options
        assert (
            found["last_success_timestamp_seconds"] == success < found["last_run_timestamp_seconds"]
        )


def test_command_that_never_succeeded_has_the_time_zero(file: str, metrics: Path) -> None:
    assert run("status", *on(file), "--metrics-file", str(metrics)).code == 0
    assert run("verify", *on(file, None), "--metrics-file", str(metrics)).code == 2
    assert read(metrics)["last_success_timestamp_seconds"] == 0  # that of status does not count
    metrics.write_bytes(b"\xff")
    assert run("verify", *on(file, None), "--metrics-file", str(metrics)).code == 2
    assert read(metrics)["last_success_timestamp_seconds"] == 0


def test_status_writes_the_age_of_each_master_key(file: str, metrics: Path) -> None:
    said = run("status", *on(file, None), "--json", "--metrics-file", str(metrics))
    ages = {f"key_age_seconds{one['purpose']}": one["age"] for one in said.json["master_keys"]}
    assert len(ages) == 2
    found = read(metrics)
    assert {name: found[name] for name in ages} == pytest.approx(ages, abs=0.01)


def test_purpose_that_is_no_text_does_not_stop_the_metrics(file: str, metrics: Path) -> None:
    run_sql(file, "UPDATE secure_keyring SET purpose = x'ff22' WHERE purpose = 'data'")
    run("status", *on(file), "--metrics-file", str(metrics))
    assert read(metrics)["problems"] == 1


def test_file_is_replaced_by_one_that_every_account_can_read(file: str, metrics: Path) -> None:
    before = {*metrics.parent.iterdir()}
    for _ in range(2):
        assert run("status", *on(file), "--metrics-file", str(metrics)).code == 0
        assert stat.S_IMODE(metrics.stat().st_mode) == 0o644
        assert {*metrics.parent.iterdir()} - before == {metrics}


def test_file_that_cannot_be_written_is_said_on_stderr(file: str, metrics: Path) -> None:
    metrics.mkdir()
    before = {*metrics.parent.iterdir()}
    said = run("status", *on(file), "--json", "--metrics-file", str(metrics))
    assert (said.code, said.json["format_version"]) == (0, "2")
    assert re.fullmatch(r"the metrics were not written to .*run\.prom: [^\[\]]+\n", said.stderr)
    assert {*metrics.parent.iterdir()} == before


@pytest.mark.parametrize("name", ["nowhere/run.prom", "run.txt"])
def test_file_that_no_collector_reads_is_rejected_before_the_command(
    name: str, file: str, tmp_path: Path
) -> None:
    said = run("vacuum", *on(file, None), "--metrics-file", str(tmp_path / name))
    assert (said.code, said.stdout) == (2, "")
    assert "--metrics-file" in said.stderr
