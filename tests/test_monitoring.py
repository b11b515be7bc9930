"""The example's metrics are those that the dashboard and the alert rules in examples/ read.

Prometheus itself reads the files: `promtool` in each run, and a server in `make soak`.
"""

import asyncio
import json
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from google.adk.errors.already_exists_error import AlreadyExistsError
from google.adk.errors.session_not_found_error import SessionNotFoundError
from prometheus_client.parser import text_string_to_metric_families

from adk_secure_sessions import StaleSessionError
from tests.pages import DOCS, ROOT
from tests.servers import unavailable

PROGRAM = ROOT / "examples" / "telemetry.py"
MONITORING = ROOT / "examples" / "monitoring"
RULES = MONITORING / "alerts.yml"
DASHBOARD = json.loads((MONITORING / "dashboard.json").read_text(encoding="utf-8"))
TARGETS = [target for panel in DASHBOARD["panels"] for target in panel["targets"]]
ALERTS = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
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


@pytest.fixture(scope="module")
def text() -> str:
    """What the example prints.  A process of its own: this one must not be measured."""
    done = subprocess.run([sys.executable, PROGRAM], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


# A replica needs a server.  tests/test_telemetry.py reads this metric.
WITHOUT_EXAMPLE = {"adk_secure_sessions.replica.reads"}
QUERIED_WITHOUT_EXAMPLE = {f"{metric.replace('.', '_')}_total" for metric in WITHOUT_EXAMPLE}
LABELS = {"adk_secure_sessions_replica_outcome"}


@pytest.fixture(scope="module")
def names(text: str) -> set[str]:
    """The metrics that the example prints, and their labels."""
    found = set()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found |= {sample.name, *sample.labels}
    return found | QUERIED_WITHOUT_EXAMPLE | LABELS


def test_example_prints_each_metric_of_the_page(text: str) -> None:
    page = (DOCS / "telemetry.md").read_text(encoding="utf-8")
    metrics = re.findall(r"^\| `(adk_secure_sessions\.[\w.]+)` \| `[^`]+` \|", page, re.M)
    assert len(metrics) > 8
    for metric in set(metrics) - WITHOUT_EXAMPLE:
        assert re.search(rf"^# TYPE {metric.replace('.', '_')}", text, re.M), metric


def test_example_prints_no_id_and_no_content(text: str) -> None:
    for secret in ("clinic", 'ada"', "turn", "arn:aws", "sessions.db"):
        assert secret not in text


# --- the dashboard and the alerts ----------------------------------------------------------------


def test_dashboard_and_alerts_read_metrics_and_labels_that_exist(names: set[str]) -> None:
    texts = [query(target) + target["legendFormat"] for target in TARGETS]
    texts += [rule["expr"] + json.dumps(rule["annotations"]) for rule in ALERTS]
    for one in texts:
        used = set(NAMES.findall(one))
        assert used
        # Some exporters append the unit of a gauge, and the dashboard reads both names.
        unknown = {name for name in used if not {name, f"{name}_ratio"} & names}
        assert not unknown, one


def test_dashboard_shows_each_metric(text: str) -> None:
    shown = " ".join(query(target) for target in TARGETS)
    for name in re.findall(r"^# TYPE (\w+)", text, re.M):
        assert name.removesuffix("_ratio") in shown


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"])
                 for y in range(at["y"], at["y"] + at["h"])}  # fmt: skip
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_errors_that_the_alert_leaves_out_have_these_names() -> None:
    (rule,) = (rule for rule in ALERTS if rule["alert"] == "SecureSessionsOperationsFailing")
    (left_out,) = re.findall(r'error_type!~"([^"]*)"', rule["expr"])
    errors = (StaleSessionError, AlreadyExistsError, SessionNotFoundError, asyncio.CancelledError)
    assert left_out.split("|") == ["", *(error.__name__ for error in errors)]


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


# --- a Prometheus that reads the example ---------------------------------------------------------


class Prometheus:
    """The HTTP API of a server."""

    def __init__(self, url: str) -> None:
        self._url = url

    def get(self, path: str, **parameters: str) -> Any:
        address = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(address, timeout=10) as response:
            answer = json.load(response)
        assert answer["status"] == "success"
        return answer["data"]

    def values(self, expression: str) -> list[float]:
        found = self.get("query", query=expression)["result"]
        return [float(one["value"][1]) for one in found]


@contextmanager
def running(*arguments: str | Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(30)
        assert process.stdout
        process.stdout.close()


def eventually(passes: Any, what: str) -> None:
    end = time.monotonic() + 90
    while True:
        try:
            if passes():
                return
        except OSError:
            pass  # it does not listen yet
        assert time.monotonic() < end, what
        time.sleep(0.5)


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[Prometheus]:
    """A Prometheus that collects the metrics of the running example each second."""
    program = shutil.which("prometheus")
    if program is None:
        unavailable("prometheus is not installed: apt-get install prometheus")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with running(sys.executable, PROGRAM, "--port", "0") as example:
        assert example.stdout
        metrics = urllib.parse.urlsplit(example.stdout.readline().strip())
        config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(RULES)]
        config["scrape_configs"][0]["static_configs"][0]["targets"] = [metrics.netloc]
        path = tmp_path / "prometheus.yml"
        path.write_text(yaml.safe_dump(config))
        options = [f"--config.file={path}", f"--storage.tsdb.path={tmp_path}/data"]
        with running(program, *options, f"--web.listen-address={address}"):
            yield Prometheus(f"http://{address}")


@pytest.mark.soak
def test_prometheus_has_data_for_each_query_and_raises_the_alert(prometheus: Prometheus) -> None:
    for target in TARGETS:
        sent = query(target, "30s")
        if QUERIED_WITHOUT_EXAMPLE.intersection(NAMES.findall(sent)):
            continue

        def has_data(sent: str = sent) -> bool:
            values = prometheus.values(sent)
            return bool(values) and all(value == value for value in values)  # NaN: no rate yet

        eventually(has_data, sent)

    def is_firing() -> bool:
        alerts = prometheus.get("alerts")["alerts"]
        return "SecureSessionsRecordRejected" in {
            alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"
        }

    eventually(is_firing, "a rejected record raises no alert")
    (group,) = prometheus.get("rules")["groups"]
    assert {rule["name"] for rule in group["rules"]} == {rule["alert"] for rule in ALERTS}
    assert {(rule["health"], rule.get("lastError")) for rule in group["rules"]} == {("ok", None)}
