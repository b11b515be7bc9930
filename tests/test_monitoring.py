"""The example's metrics are those that the dashboard and the alert rules in examples/ read.

Prometheus itself reads the files: `promtool` in each run, and a server in `make soak`.
"""

import asyncio
import http.server
import json
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from google.adk.errors.already_exists_error import AlreadyExistsError
from google.adk.errors.session_not_found_error import SessionNotFoundError
from prometheus_client.parser import text_string_to_metric_families

from adk_secure_sessions import EncryptedSessionService, StaleSessionError, generate_key
from tests.cli.support import run
from tests.pages import DOCS, ROOT
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


@pytest.fixture(scope="module")
def text() -> str:
    """What the example prints.  A process of its own: this one must not be measured."""
    done = subprocess.run([sys.executable, PROGRAM], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


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


def test_page_lists_the_metrics_of_commands_and_the_alerts(commands: dict[str, str]) -> None:
    page = (DOCS / "telemetry.md").read_text(encoding="utf-8")
    written = re.findall(r"^# TYPE (\w+)", "".join(commands.values()), re.M)
    assert set(re.findall(r"^\| `(adk_secure_sessions_\w+)` \|", page, re.M)) == set(written)
    alerts = re.findall(r"^\| `(SecureSessions\w+)` \|", page, re.M)
    assert alerts == [rule["alert"] for rule in ALERTS]


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

    def firing(self) -> dict[str, dict[str, str]]:
        """Return the labels of each raised alert, by its name."""
        alerts = self.get("alerts")["alerts"]
        return {
            one["labels"]["alertname"]: one["labels"] for one in alerts if one["state"] == "firing"
        }

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


@contextmanager
def collecting(tmp_path: Path, rules: Path, **targets: str) -> Iterator[Prometheus]:
    """Run a Prometheus that collects the metrics of *targets*, by job, each second."""
    program = shutil.which("prometheus")
    if program is None:
        unavailable("prometheus is not installed: apt-get install prometheus")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(rules)]
    jobs = {one["job_name"].replace("-", "_"): one for one in config["scrape_configs"]}
    config["scrape_configs"] = [jobs[name] for name in targets]
    for name, target in targets.items():
        jobs[name]["static_configs"][0]["targets"] = [target]
    path = tmp_path / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    options = [f"--config.file={path}", f"--storage.tsdb.path={tmp_path}/data"]
    with running(program, *options, f"--web.listen-address={address}"):
        yield Prometheus(f"http://{address}")


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[Prometheus]:
    """A Prometheus that collects the metrics of the running example."""
    with running(sys.executable, PROGRAM, "--port", "0") as example:
        assert example.stdout
        metrics = urllib.parse.urlsplit(example.stdout.readline().strip())
        with collecting(tmp_path, RULES, adk_secure_sessions=metrics.netloc) as server:
            yield server


@pytest.mark.soak
def test_prometheus_has_data_for_each_query_and_raises_the_alert(prometheus: Prometheus) -> None:
    for target in TARGETS:
        sent = query(target, "30s")

        def has_data(sent: str = sent) -> bool:
            values = prometheus.values(sent)
            return bool(values) and all(value == value for value in values)  # NaN: no rate yet

        eventually(has_data, sent)

    def is_firing() -> bool:
        return "SecureSessionsRecordRejected" in prometheus.firing()

    eventually(is_firing, "a rejected record raises no alert")
    rules = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
    assert {rule["name"] for rule in rules} == {rule["alert"] for rule in ALERTS}
    assert {(rule["health"], rule.get("lastError")) for rule in rules} == {("ok", None)}


class Exporter:
    """Serves metrics over HTTP.  Each answer adds to the counters.

    Attributes:
        text: Metrics that do not change between answers.
        growth: How much each answer adds to a counter, by the counter.
    """

    def __init__(self) -> None:
        self.text = ""
        self.growth: dict[str, float] = {}
        self._values: dict[str, float] = {}

    def answer(self) -> str:
        for series, growth in self.growth.items():
            self._values[series] = self._values.get(series, 0) + growth
        lines = (f"{series} {value}\n" for series, value in self._values.items())
        return self.text + "".join(lines)

    @contextmanager
    def serving(self) -> Iterator[str]:
        """Yield the address."""
        exporter = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.end_headers()
                self.wfile.write(exporter.answer().encode())

            def log_message(self, *_: object) -> None:
                pass

        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            try:
                yield f"127.0.0.1:{server.server_port}"
            finally:
                server.shutdown()
                thread.join()


def calls(method: str, number: float, seconds: float, error: str = "") -> dict[str, float]:
    """The growth of the counters after *number* calls that take so many *seconds* each."""
    labels = f'db_operation_name="{method}",error_type="{error}"'
    found = {
        f'{DURATION}_bucket{{{labels},le="{limit}"}}': number if seconds <= float(limit) else 0
        for limit in ("0.1", "10.0", "30.0", "+Inf")
    }
    sums = {
        f"{DURATION}_count{{{labels}}}": number,
        f"{DURATION}_sum{{{labels}}}": number * seconds,
    }
    return found | sums


def key_service_calls(number: float, error: str = "") -> dict[str, float]:
    labels = f'adk_secure_sessions_key_provider="VaultKey",error_type="{error}"'
    return {f"adk_secure_sessions_key_service_duration_seconds_count{{{labels}}}": number}


def changed(text: str, metric: str, value: float) -> str:
    """Return *text* with another value of *metric*."""
    found, number = re.subn(rf"^({metric}\{{.*\}}) .*$", rf"\1 {value}", text, flags=re.M)
    assert number
    return found


@pytest.mark.soak
def test_prometheus_raises_each_alert_and_none_before(
    tmp_path: Path, commands: dict[str, str]
) -> None:
    rules = tmp_path / "alerts.yml"  # with seconds instead of minutes
    rules.write_text(re.sub(r"\b(\d+)m\b", r"\1s", RULES.read_text(encoding="utf-8")))
    service, node = Exporter(), Exporter()
    service.growth = calls("get_session", 10, 0.05) | calls("append_event", 10, 0.05)
    service.growth |= key_service_calls(1)
    node.text = commands["status"] + commands["verify"]
    with ExitStack() as stack:
        node_address = stack.enter_context(node.serving())
        with service.serving() as address:
            prometheus = stack.enter_context(
                collecting(tmp_path, rules, adk_secure_sessions=address, node=node_address)
            )
            rate = f'sum(rate({DURATION}_count{{job="adk-secure-sessions"}}[15s]))'
            eventually(lambda: prometheus.values(f"{rate} > 10"), "no metrics")
            eventually(lambda: prometheus.values("absent(up == 0) and count(up) == 2"), "not up")
            eventually(lambda: not prometheus.firing(), "an alert is raised without a reason")
            service.growth |= calls("get_session", 10, 25)
            service.growth |= calls("create_session", 10, 0.05, "DatabaseError")
            service.growth |= calls("append_event", 10, 0.05, "StaleSessionError")
            service.growth |= key_service_calls(9, "KeyServiceError")
            service.growth |= {
                'adk_secure_sessions_retries_total{adk_secure_sessions_retry_cause="conflict"}': 90,
                'adk_secure_sessions_decryption_failures_total{db_collection_name=""}': 1,
            }
            success = "adk_secure_sessions_command_last_success_timestamp_seconds"
            status = changed(commands["status"], "adk_secure_sessions_key_age_seconds", 4e7)
            node.text = status + changed(commands["verify"], success, 0)
            expected = {rule["alert"] for rule in ALERTS} - {"SecureSessionsDown"}
            for name in expected:
                eventually(lambda name=name: name in prometheus.firing(), name)
            for name, labels in prometheus.firing().items():
                assert {"job", "instance"} <= labels.keys(), name
        # The service has ended:
        eventually(lambda: "SecureSessionsDown" in prometheus.firing(), "its end is not noticed")
