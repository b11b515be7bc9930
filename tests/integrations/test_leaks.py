"""Each place where google-adk writes plaintext outside our services: switched on, found, and off.

How it works.  Each test is marked with the places that it tries.  It lets google-adk write needles
(`tests.attacks.needles`), and checks that they are there, and that the functions of `adk doctor`
report the place if they can.  It then applies the setting of docs/adk-plaintext.md, and checks that
the needles and the report are gone.
"""

import inspect
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import types as python_types
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
from google.adk.apps import App
from google.adk.cli import service_registry
from google.adk.events.event import Event
from google.adk.runners import InMemoryRunner, Runner
from google.genai import types

from adk_secure_sessions.integrations.plaintext_leaks import (
    LEAK_CHECKS,
    Leak,
    in_environment,
    in_files,
    in_plugins,
)
from tests.attacks.needles import SESSION, USER, found_in, needle
from tests.cli import schema
from tests.cli.support import run
from tests.conformance.agents import offline_agent
from tests.integrations.adk_processes import AGENT, KEY_VARIABLE, URI, Place
from tests.pages import DOCS, ROOT

pytestmark = [  # google-adk warns of its own experimental and deprecated parts
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

SPANS_OFF = {"ADK_CAPTURE_MESSAGE_CONTENT_IN_SPANS": "false"}
GENAI = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
EXPERIMENTAL = {"OTEL_SEMCONV_STABILITY_OPT_IN": "gen_ai_latest_experimental"}
HAS_SCHEMAS = find_spec("google.adk.telemetry._schema_version") is not None
HAS_RUN_CONFIG = find_spec("google.adk.telemetry.context") is not None
HAS_AUTO_TRACING = find_spec("google.adk.plugins.auto_tracing_plugin") is not None
IDS: dict[str, Any] = {"user_id": USER, "session_id": SESSION}


@pytest.fixture(autouse=True)
def _own_directory_for_temporary_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The machine's may have logs of google-adk."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))


Test = TypeVar("Test", bound=Callable[..., object])
TRIED: set[str] = set()


def tries(*names: str) -> Callable[[Test], Test]:
    TRIED.update(names)
    return lambda test: test


def names(leaks: Iterable[Leak]) -> set[str]:
    return {leak.name for leak in leaks}


def message(text: str) -> types.Content:
    return types.Content(role="user", parts=[types.Part(text=text)])


async def say(runner: Runner, *texts: str, state: dict[str, Any] | None = None) -> None:
    await runner.session_service.create_session(app_name=runner.app_name, **IDS, state=state)
    for text in texts:
        async for _ in runner.run_async(**IDS, new_message=message(text)):
            pass


def runner_with(*plugins: Any) -> InMemoryRunner:
    return InMemoryRunner(app=App(name="app", root_agent=offline_agent(), plugins=list(plugins)))


# --- telemetry ------------------------------------------------------------------------------------


def traced(*trials: dict[str, str], file: Path | None = None, **variables: str) -> list[Any]:
    """Run `traced_agent.py` with the settings of each trial."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.integrations.traced_agent"]
        + ([str(file)] if file is not None else []),
        cwd=ROOT,
        input=json.dumps(trials),
        env=variables,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return [
        python_types.SimpleNamespace(**{name: set(value) for name, value in one.items()})
        for one in json.loads(done.stdout)
    ]


ALWAYS = {SESSION, needle("error message")}  # in spans, whatever the settings
CONTENT = {needle("text"), needle("argument"), needle("response")}


@pytest.mark.soak
@tries("span-content", "genai-content", "mcp-bodies", "telemetry-exporter", "sqlite-spans")
@tries("auto-tracing-plugin")
def test_telemetry_has_content_until_each_setting_is_off(tmp_path: Path) -> None:
    first = {"ADK_TELEMETRY_SCHEMA_VERSION_OPT_IN": "1"}
    file = tmp_path / "spans.db"
    given = SPANS_OFF | {"capture": "SPAN_AND_EVENT"}
    newer = [
        given,
        given | {"ADK_TELEMETRY_IGNORE_RUN_CONFIG": "true"},
        SPANS_OFF | {"kind": "auto"},
    ]
    # One process for all of them: it takes seconds to import google-adk.
    on, off, live, live_off, both, logs, mcp, mcp_off, *others = traced(
        first,
        first | SPANS_OFF,
        {"kind": "live"},
        {"kind": "live"} | SPANS_OFF,
        SPANS_OFF | {GENAI: "SPAN_AND_EVENT"} | EXPERIMENTAL,
        SPANS_OFF | {GENAI: "true"},
        SPANS_OFF | {"kind": "mcp", "ADK_CAPTURE_MCP_HTTP_BODIES": "true"},
        SPANS_OFF | {"kind": "mcp"},
        *(newer if HAS_RUN_CONFIG and HAS_AUTO_TRACING else []),
        file=file,
    )
    assert on.spans >= CONTENT | ALWAYS
    assert off.spans - {USER} == ALWAYS  # older releases always add the user id
    assert live.spans - {USER} == {SESSION, needle("text")}, "also in the newest schema"
    assert live_off.spans - {USER} == {SESSION}
    for one in (off, live_off, mcp_off):
        assert one.records <= {SESSION}
    assert {needle("text"), needle("argument")} <= both.spans | both.records
    assert needle("text") in logs.records
    if HAS_SCHEMAS:
        assert mcp.records == {needle("text")}
    assert mcp_off.records == set()
    assert found_in(file.read_bytes()) >= CONTENT | {SESSION}
    if others:  # google-adk has a run configuration and a plugin that add content to spans
        by_run, ignored, auto = others
        assert by_run.spans == CONTENT | ALWAYS
        assert by_run.records == CONTENT | {SESSION, USER}
        assert (ignored.spans, ignored.records) == (ALWAYS, {SESSION})
        assert auto.spans >= CONTENT | {USER}


@pytest.mark.soak
@tries("telemetry-exporter", "sqlite-spans")
def test_disabled_sdk_of_opentelemetry_exports_nothing(tmp_path: Path) -> None:
    file = tmp_path / "spans.db"
    (one,) = traced({GENAI: "true"}, file=file, OTEL_SDK_DISABLED="true")
    assert (one.spans, one.records) == (set(), set())
    assert found_in(file.read_bytes()) == set()


EXPORTS = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}


@pytest.mark.parametrize(
    ("environment", "on", "notes"),
    [
        ({}, set(), {"span-content"}),
        (SPANS_OFF, set(), set()),
        (EXPORTS, {"span-content", "telemetry-exporter"}, set()),
        (SPANS_OFF | EXPORTS, {"telemetry-exporter"}, set()),
        (SPANS_OFF | {"OTEL_TRACES_EXPORTER": "otlp"}, {"telemetry-exporter"}, set()),
        (SPANS_OFF | {"OTEL_TRACES_EXPORTER": "none"}, set(), set()),
        (SPANS_OFF | {GENAI: "SPAN_AND_EVENT"}, {"genai-content"}, set()),
        (SPANS_OFF | {GENAI: "no_content"}, set(), set()),
        (SPANS_OFF | {"ADK_CAPTURE_MCP_HTTP_BODIES": "1"}, {"mcp-bodies"}, set()),
        (EXPORTS | {GENAI: "true", "OTEL_SDK_DISABLED": "true"}, set(), set()),
    ],
)
def test_variable_is_reported_if_it_is_on_and_noted_if_it_would_matter(
    environment: dict[str, str], on: set[str], notes: set[str]
) -> None:
    found = in_environment(environment)
    assert (names(found[0]), names(found[1])) == (on, notes)


# --- logs -----------------------------------------------------------------------------------------


@tries("info-logs")
async def test_info_logs_quote_messages_of_run_debug(caplog: pytest.LogCaptureFixture) -> None:
    # Older releases print them instead.
    quoted = {needle("text"), SESSION} if "'User > %s'" in inspect.getsource(Runner) else set()
    for level, found in ((logging.INFO, quoted), (logging.WARNING, set())):
        caplog.clear()
        with caplog.at_level(level, "google_adk"):
            async with InMemoryRunner(agent=offline_agent(), app_name="app") as runner:
                await runner.run_debug(needle("text"), **IDS)
        assert found_in(caplog.text) == found


@tries("rewind-log", "log-directory")
async def test_log_of_a_rewind_has_the_state_that_it_restores(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The log directory gets the same lines."""
    for level, found in ((logging.INFO, {needle("argument")}), (logging.WARNING, set())):
        caplog.clear()
        with caplog.at_level(level, "google_adk"):
            async with InMemoryRunner(agent=offline_agent(), app_name="app") as runner:
                await say(runner, f"call remember {needle('argument')}", "call remember other")
                session = await runner.session_service.get_session(app_name="app", **IDS)
                assert session is not None
                last = session.events[-1].invocation_id
                await runner.rewind_async(**IDS, rewind_before_invocation_id=last)
        assert found_in(caplog.text) == found


# --- files of google-adk's commands ---------------------------------------------------------------


@pytest.mark.soak
@tries("local-services", "saved-session", "log-directory")
def test_adk_run_writes_the_session_into_three_places(tmp_path: Path) -> None:
    place = Place(tmp_path)
    command = ("adk", "run", "--save_session", "--session_id", "s1", f"agents/{AGENT}")
    done = place.run(*command, said=f"{needle('text')}\nexit\n")
    assert done.returncode == 0, done.stderr
    found = {name for name, needles in place.needles().items() if needle("text") in needles}
    assert any(name.endswith(".adk/session.db") for name in found)
    assert any(name.endswith("s1.session.json") for name in found)
    assert any("agents_log" in name for name in place.files())
    leaks = list(in_files(place.agents))
    assert names(leaks) == names(in_files(place.agents / AGENT))
    assert names(leaks) == {"local-services", "saved-session"}
    for leak in leaks:
        Path(leak.where).unlink()
    assert list(in_files(place.agents)) == []


@tries("eval-sets", "eval-results")
def test_evaluations_are_files_beside_the_agent(tmp_path: Path) -> None:
    from google.adk.evaluation.eval_case import EvalCase, Invocation
    from google.adk.evaluation.in_memory_eval_sets_manager import InMemoryEvalSetsManager
    from google.adk.evaluation.local_eval_set_results_manager import LocalEvalSetResultsManager
    from google.adk.evaluation.local_eval_sets_manager import LocalEvalSetsManager

    (tmp_path / AGENT).mkdir()
    said = Invocation(user_content=message(needle("text")))
    case = EvalCase(eval_id="case", conversation=[said])
    for manager in (InMemoryEvalSetsManager(), LocalEvalSetsManager(str(tmp_path))):
        assert names(in_files(tmp_path)) == set()
        manager.create_eval_set(AGENT, "set")
        manager.add_eval_case(AGENT, "set", case)
    (file,) = tmp_path.rglob("*.json")
    assert found_in(file.read_bytes()) == {needle("text")}
    assert names(in_files(tmp_path)) == {"eval-sets"}
    file.unlink()
    from google.adk.evaluation.eval_metrics import EvalStatus
    from google.adk.evaluation.eval_result import EvalCaseResult

    result = EvalCaseResult(
        eval_set_id="set",
        eval_id="case",
        final_eval_status=EvalStatus.PASSED,
        overall_eval_metric_results=[],
        eval_metric_result_per_invocation=[],
        session_id=SESSION,
        user_id=USER,
    )
    LocalEvalSetResultsManager(str(tmp_path)).save_eval_set_result(AGENT, "set", [result])
    (file,) = (file for file in tmp_path.rglob("*.json"))
    assert found_in(file.read_bytes()) == {SESSION, USER}
    assert names(in_files(tmp_path)) == {"eval-results"}


@pytest.mark.soak  # imports google-adk's server
@tries("test-files")
async def test_page_of_adk_web_saves_tests_and_adk_api_server_does_not(tmp_path: Path) -> None:
    from google.adk.cli.fast_api import get_fast_api_app

    (tmp_path / AGENT).mkdir()
    (tmp_path / AGENT / "agent.py").write_text("")
    event = Event(author="user", content=message(needle("text")))
    session = {"events": [event.model_dump(mode="json", exclude_none=True)]}
    status = 0
    for web in (False, True):
        assert list(in_files(tmp_path)) == []
        app = get_fast_api_app(
            agents_dir=str(tmp_path),
            session_service_uri="memory://",
            artifact_service_uri="memory://",
            web=web,
        )
        transport = httpx.ASGITransport(app, client=("127.0.0.1", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            saved = await client.put(
                f"/dev/apps/{AGENT}/tests/t.json", json={"sessionData": session}
            )
            status = saved.status_code
            if not web:
                assert status in (404, 405)
    if status in (404, 405):
        pytest.skip("this google-adk cannot save tests yet")
    assert status == 200
    assert needle("text") in (tmp_path / AGENT / "tests" / "t.json").read_text()
    assert names(in_files(tmp_path)) == {"test-files"}


# --- plugins --------------------------------------------------------------------------------------


@tries("debug-logging-plugin")
async def test_debug_logging_plugin_writes_a_file(tmp_path: Path) -> None:
    from google.adk.plugins.debug_logging_plugin import DebugLoggingPlugin

    path = tmp_path / "adk_debug.yaml"
    async with runner_with(DebugLoggingPlugin(output_path=str(path))) as runner:
        await say(runner, needle("text"))
        assert names(in_plugins(runner.app)) == {"debug-logging-plugin"}
    assert needle("text") in path.read_text()
    assert names(in_files(tmp_path)) == {"debug-logging-plugin"}


@tries("logging-plugin")
async def test_logging_plugin_prints_messages(capsys: pytest.CaptureFixture[str]) -> None:
    from google.adk.plugins.logging_plugin import LoggingPlugin

    app = App(name="app", root_agent=offline_agent(), plugins=[LoggingPlugin()])
    for application, found in ((app, {needle("text"), USER, SESSION}), (offline_agent(), set())):
        given = {"app": app} if application is app else {"agent": application, "app_name": "app"}
        async with InMemoryRunner(**given) as runner:
            await say(runner, needle("text"))
        assert found_in(capsys.readouterr().out) == found
        assert names(in_plugins(application)) == ({"logging-plugin"} if found else set())


@tries("recordings")
async def test_recordings_plugin_writes_a_file(tmp_path: Path) -> None:
    from google.adk.cli.plugins.recordings_plugin import RecordingsPlugin

    (tmp_path / AGENT).mkdir()
    config = {"dir": str(tmp_path / AGENT), "user_message_index": 0, "streaming_mode": "none"}
    async with runner_with(RecordingsPlugin()) as runner:
        assert names(in_plugins(runner.app)) == {"recordings"}
        await say(runner, needle("text"), state={"_adk_recordings_config": config})
    (file,) = (tmp_path / AGENT).iterdir()
    assert needle("text") in file.read_text()
    assert names(in_files(tmp_path)) == {"recordings"}


@tries("bigquery-plugin")
def test_bigquery_plugin_is_found_in_a_file_of_plugins(tmp_path: Path) -> None:
    (tmp_path / "plugins.yaml").write_text("bigquery_agent_analytics: {project_id: p}\n")
    assert names(in_files(tmp_path)) == {"bigquery-plugin"}


# --- the command and the page ---------------------------------------------------------------------


@pytest.fixture
def agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with an agent, and an environment without leaks."""
    for name in [name for name in os.environ if name.startswith(("ADK_", "OTEL_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("ADK_SECURE_SESSIONS_URI", URI)  # the key is not needed
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(service_registry, "_service_registry_instance", None)
    agent = tmp_path / "agents" / "doctored"
    agent.mkdir(parents=True)
    (agent / "agent.py").write_text(
        "print('imported')\nfrom tests.conformance.agents import offline_agent\n"
        "root_agent = offline_agent()\n"
    )
    yield agent.parent
    for name in [name for name in sys.modules if name.split(".")[0] in ("doctored", "services")]:
        del sys.modules[name]


def test_doctor_accepts_the_start_that_the_pages_recommend_and_notes_what_is_not_on(
    agents: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = run("adk", "doctor", str(agents))
    *services, note, remedy, end = said.stdout.splitlines()
    assert (said.code, end) == (0, "1 agent: no plaintext outside the services was found")
    assert [line.split() for line in services] == [
        [service, "encrypted", "encrypted+sqlite://"]
        for service in ("sessions", "artifacts", "memory")
    ]
    assert note.startswith("note, only if your own code exports traces: span-content: ADK_CAPTURE_")
    assert remedy == "  ADK_CAPTURE_MESSAGE_CONTENT_IN_SPANS=false"
    assert said.stderr == "imported\n"
    monkeypatch.setenv("ADK_CAPTURE_MESSAGE_CONTENT_IN_SPANS", "false")
    assert len(run("adk", "doctor", str(agents)).stdout.splitlines()) == 4


def test_doctor_finds_plugins_settings_of_dotenv_and_files(
    agents: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ADK_CAPTURE_MCP_HTTP_BODIES", "")
    monkeypatch.delenv("ADK_CAPTURE_MCP_HTTP_BODIES")  # and again after the test
    agent = agents / "doctored"
    (agent / "agent.py").write_text(
        "from google.adk.apps import App\n"
        "from google.adk.plugins.logging_plugin import LoggingPlugin\n"
        "from tests.conformance.agents import offline_agent\n"
        "app = App(name='doctored', root_agent=offline_agent(), plugins=[LoggingPlugin()])\n"
    )
    (agent / ".env").write_text("ADK_CAPTURE_MCP_HTTP_BODIES=1\n")
    (agent / "s.session.json").write_text("{}")
    said = run("adk", "doctor", str(agents), "--json")
    schema.validator("adk doctor").validate(said.json)
    assert said.code == 1
    assert said.json["agents"] == ["doctored"]
    assert [note["name"] for note in said.json["notes"]] == ["span-content"]
    found = {leak["name"]: leak for leak in said.json["leaks"]}
    assert set(found) == {"logging-plugin", "mcp-bodies", "saved-session"}
    assert found["saved-session"]["where"] == str(agent / "s.session.json")
    text = run("adk", "doctor", str(agents))
    assert "saved-session: " in text.stdout
    assert "\n  Do not use adk run --save_session; delete the files.\n" in text.stdout
    assert text.stdout.endswith("google-adk writes plaintext in 3 places\n")
    allowed = run(
        "adk", "doctor", str(agents), "--allow", "logging-plugin,mcp-bodies,saved-session"
    )
    assert allowed.code == 0


@pytest.mark.parametrize(
    ("code", "reason"),
    [("raise ValueError('no key\\nat all')", "the agent doctored cannot be loaded: .*no key"),
     (None, "has no agent: give the directory that adk web gets")],
)  # fmt: skip
def test_doctor_ends_with_one_line_if_no_agent_can_be_loaded(
    agents: Path, code: str | None, reason: str
) -> None:
    if code is None:
        (agents / "doctored" / "agent.py").unlink()
    else:
        (agents / "doctored" / "agent.py").write_text(code)
    said = run("adk", "doctor", str(agents))
    assert said.code == 2
    assert re.fullmatch(f"Error: .*{reason}.*\n", said.stderr)


PLAINTEXT_SERVICES = """
from google.adk.cli.service_registry import get_service_registry
from google.adk.sessions import InMemorySessionService
from google.adk.artifacts import InMemoryArtifactService

class Sessions(InMemorySessionService):
    pass

class Broken(InMemoryArtifactService):
    def __init__(self):
        raise ValueError("password")

get_service_registry().register_session_service("encrypted+sqlite", lambda uri, **_: Sessions())
get_service_registry().register_artifact_service("shelf", lambda uri, **_: Broken())
"""
OURS_IN_YAML = """
services:
  - scheme: encrypted+sqlite
    type: session
    class: adk_secure_sessions.integrations.adk.session_service
"""


@tries("service-uris")
@pytest.mark.parametrize(
    ("options", "files", "expected"),
    [
        ({}, {}, "plaintext plaintext nothing"),
        ({"service": URI}, {}, "encrypted encrypted encrypted"),
        ({"service": URI}, {"services.yaml": OURS_IN_YAML}, "encrypted encrypted encrypted"),
        ({"service": f"{URI}&backend=no-op"}, {}, "plaintext plaintext plaintext"),
        (
            {"session_service": "sqlite:///s.db", "artifact_service": "gs://bucket"},
            {},
            "plaintext plaintext nothing",
        ),
        (
            {"service": URI, "artifact_service": "shelf://", "memory_service": "memory://"},
            {"services.py": PLAINTEXT_SERVICES},
            "plaintext unknown nothing",
        ),
        ({"service": "nobody://"}, {}, "unknown unknown unknown"),
        ({"service": "nobody:me:password@host/db"}, {}, "unknown unknown unknown"),
        ({"service": URI.partition("&blobs")[0]}, {}, "encrypted unknown encrypted"),
    ],
)
def test_doctor_says_what_each_service_would_store(
    agents: Path,
    options: dict[str, str],
    files: dict[str, str],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("ADK_SECURE_SESSIONS_URI")
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    monkeypatch.chdir(agents.parent)
    for name, text in files.items():
        (agents / name).write_text(text)
    given = [text for name, uri in options.items() for text in (f"--{name}_uri", uri)]
    said = run("adk", "doctor", str(agents), "--json", *given)
    schema.validator("adk doctor").validate(said.json)
    stores = [one["protection"] for one in said.json["services"]]
    assert " ".join(stores) == expected
    assert len(said.json["leaks"]) == stores.count("plaintext") + stores.count("unknown")
    assert {leak["name"] for leak in said.json["leaks"]} <= {"service-uris"}
    assert said.code == (1 if said.json["leaks"] else 0)
    assert "password" not in said.stdout + said.stderr
    assert {path.name for path in agents.iterdir()} <= {"doctored", "__pycache__", *files}
    assert {path.name for path in agents.parent.iterdir()} <= {"agents", "blobs"}, "no database"


def test_doctor_says_that_agent_engine_would_store_what_has_no_uri(agents: Path) -> None:
    variables = {"ADK_SECURE_SESSIONS_URI": "", "GOOGLE_CLOUD_AGENT_ENGINE_ID": "7"}
    said = run("adk", "doctor", str(agents), **variables)
    assert len(re.findall("plaintext .* GOOGLE_CLOUD_AGENT_ENGINE_ID is set\n", said.stdout)) == 2


@pytest.mark.parametrize(
    ("uri", "reason"),
    [
        ("encrypted+sqlite:///x.db", "the URI has no key"),
        ("encrypted+mysql://u:needle\u2100@h/d?key=env:K", "the URI of --session_service_uri"),
    ],
)
def test_doctor_rejects_a_uri_that_cannot_be_used(agents: Path, uri: str, reason: str) -> None:
    said = run("adk", "doctor", str(agents), "--service_uri", uri)
    assert said.code == 2
    assert said.stderr.splitlines()[-1].startswith(f"Error: {reason}")
    assert "needle" not in said.stderr


def test_doctor_rejects_a_name_that_is_no_place(agents: Path) -> None:
    said = run("adk", "doctor", str(agents), "--allow", "logs")
    assert said.code == 2
    assert "logs is not one of span-content, " in said.stderr


def test_table_on_the_page_has_the_places_that_are_tried_and_the_remedies_of_the_code() -> None:
    """The page also has places of google-adk that nobody but google-adk can find."""
    page = (DOCS / "adk-plaintext.md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| `")]
    remedies = {row[0].strip("| `"): row[-1].removesuffix(" |") for row in rows}
    assert set(remedies) >= TRIED >= LEAK_CHECKS.keys()
    assert {name: place.remedy for name, place in LEAK_CHECKS.items()}.items() <= remedies.items()
