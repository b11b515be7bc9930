"""The example's metrics are those that the dashboard and the alert rules in examples/ read.

Prometheus's own `promtool` parses the queries and runs the tests of the alerts.
"""

import asyncio
import contextlib
import io
import json
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]
from google.adk.errors.already_exists_error import AlreadyExistsError
from google.adk.errors.session_not_found_error import SessionNotFoundError
from prometheus_client.parser import text_string_to_metric_families

from adk_secure_sessions import EncryptedSessionService, StaleSessionError, generate_key
from tests.cli.support import run
from tests.pages import DOCS, ROOT
from tests.processes import results
from tests.servers import unavailable

PROGRAM = ROOT / "examples" / "telemetry.py"
MONITORING = ROOT / "examples" / "monitoring"
RULES = MONITORING / "alerts.yml"
DASHBOARD = json.loads((MONITORING / "dashboard.json").read_text(encoding="utf-8"))
TARGETS = [target for panel in DASHBOARD["panels"] for target in panel["targets"]]
ALERTS = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
DURATION = "adk_secure_sessions_operation_duration_seconds"
# A metric or a label of ours in a query, in a legend, or in a text of an alert.
NAMES = re.compile(r"\b(?:adk_secure_sessions_|db_|error_)\w+\b")


def query(target: dict[str, str], period: str = "5m") -> str:
    """Return a query of the dashboard as Grafana sends it."""
    sent = target["expr"].replace("$__rate_interval", period).replace("$job", ".*")
    assert "$" not in sent
    return sent


def promtool(*arguments: str | Path) -> None:
    program = shutil.which("promtool")
    if program is None:
        unavailable("promtool is not installed: apt-get install prometheus")
    done = subprocess.run([program, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


# --- the example ---------------------------------------------------------------------------------


def run_example(say: Callable[[object], None]) -> None:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        sys.argv = [str(PROGRAM)]
        runpy.run_path(str(PROGRAM), run_name="__main__")
    say(printed.getvalue())


@pytest.fixture(scope="module")
def text() -> str:
    """What the example prints.  A process of its own: this one must not be measured."""
    ((printed,),) = results((run_example,))
    return str(printed)


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the commands of the rules write to their files for metrics, by the command."""
    directory = tmp_path_factory.mktemp("commands")
    options = ["--db", f"sqlite:///{directory}/sessions.db", "--key", "env:SESSIONS_KEY"]
    key = generate_key()
    found = {}
    for command in ("init", "status", "verify"):
        file = directory / f"{command}.prom"
        assert run(command, *options, "--metrics-file", str(file), SESSIONS_KEY=key).code == 0
        found[command] = file.read_text(encoding="utf-8")
    return found


@pytest.fixture(scope="module")
def names(text: str, commands: dict[str, str]) -> set[str]:
    """The metrics that the example and commands write, and their labels."""
    found = set()
    for family in text_string_to_metric_families("".join([text, *commands.values()])):
        for sample in family.samples:
            found |= {sample.name, *sample.labels}
    return found


def test_example_prints_each_metric_of_the_page(text: str) -> None:
    page = (DOCS / "telemetry.md").read_text(encoding="utf-8")
    metrics = re.findall(r"^\| `(adk_secure_sessions\.[\w.]+)` \| `[^`]+` \|", page, re.M)
    assert len(metrics) > 8
    for metric in metrics:
        assert re.search(rf"^# TYPE {metric.replace('.', '_')}", text, re.M), metric


def test_page_lists_the_metrics_of_commands(commands: dict[str, str]) -> None:
    page = (DOCS / "telemetry.md").read_text(encoding="utf-8")
    written = re.findall(r"^# TYPE (\w+)", "".join(commands.values()), re.M)
    assert set(re.findall(r"^\| `(adk_secure_sessions_\w+)` \|", page, re.M)) == set(written)
    assert ("twelve alert rules" in page) == (len(ALERTS) == 12)


def test_page_pins_the_exporter_that_was_tried() -> None:
    page = (DOCS / "telemetry.md").read_text(encoding="utf-8")
    if f"tried with google-adk {version('google-adk')}." not in page:
        pytest.skip("the page names another google-adk")
    exporter = "opentelemetry-exporter-prometheus"
    assert f"pip install {exporter}=={version(exporter)}\n" in page


def test_example_prints_no_id_and_no_content(text: str) -> None:
    for secret in ("clinic", 'ada"', "turn", "arn:aws", "sessions.db"):
        assert secret not in text


# --- the dashboard and the alerts ----------------------------------------------------------------


def test_dashboard_and_alerts_read_metrics_and_labels_that_exist(names: set[str]) -> None:
    texts = [query(target) + target["legendFormat"] for target in TARGETS]
    texts += [rule["expr"] + json.dumps(rule["annotations"]) for rule in ALERTS]
    for one in texts:
        used = set(NAMES.findall(one))
        assert used or "up{" in one
        # Some exporters append the unit of a gauge, and the dashboard reads both names.
        unknown = {name for name in used if not {name, f"{name}_ratio"} & names}
        assert not unknown, one


def test_dashboard_shows_each_metric(text: str) -> None:
    shown = " ".join(query(target) for target in TARGETS)
    for name in re.findall(r"^# TYPE (\w+)", text, re.M):
        assert name.removesuffix("_ratio") in shown


def test_errors_that_the_alert_leaves_out_have_these_names() -> None:
    (rule,) = (rule for rule in ALERTS if rule["alert"] == "SecureSessionsOperationsFailing")
    (left_out,) = re.findall(r'error_type!~"([^"]*)"', rule["expr"])
    errors = (StaleSessionError, AlreadyExistsError, SessionNotFoundError, asyncio.CancelledError)
    assert left_out.split("|") == ["", *(error.__name__ for error in errors)]


def test_bucket_that_an_alert_reads_exists(text: str) -> None:
    """Without it, the alert would never be raised."""
    (limit,) = {limit for rule in ALERTS for limit in re.findall(r'le="[^"]*"', rule["expr"])}
    assert re.search(rf"^{DURATION}_bucket{{.*{re.escape(limit)}", text, re.M)


def test_alerts_for_the_duration_of_calls_name_methods_of_the_service() -> None:
    (slow,) = (rule for rule in ALERTS if rule["alert"] == "SecureSessionsSlow")
    (methods,) = re.findall(r'db_operation_name=~"([^"]*)"', slow["expr"])
    assert all(callable(getattr(EncryptedSessionService, name)) for name in methods.split("|"))
    assert sum(rule["expr"].count(f'"{methods}"') for rule in ALERTS) == 4


def test_each_alert_keeps_the_job_and_the_instance() -> None:
    for rule in ALERTS:
        for labels in re.findall(r"\bby \(([^)]*)\)", rule["expr"]):
            assert labels.startswith("job, instance"), rule["alert"]
        assert not re.search(r"\b(?:sum|min|max|avg) \(", rule["expr"]), rule["alert"]


@pytest.mark.soak  # 10 s of promtool
def test_alerts_are_raised_when_they_should_be() -> None:
    """Also checks the syntax of the rules."""
    promtool("test", "rules", MONITORING / "alerts_test.yml")
    promtool("check", "config", MONITORING / "prometheus.yml")
    tested = (MONITORING / "alerts_test.yml").read_text(encoding="utf-8")
    for rule in ALERTS:
        assert f"alertname: {rule['alert']}\n" in tested  # one that is raised


def test_queries_of_the_dashboard_can_be_parsed(tmp_path: Path) -> None:
    rules = [{"record": f"query:{n}", "expr": query(one)} for n, one in enumerate(TARGETS)]
    path = tmp_path / "queries.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    promtool("check", "rules", path)
