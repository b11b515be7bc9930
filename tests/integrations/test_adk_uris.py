"""URIs of encrypted services: what they mean, and what is rejected before anything is opened."""

import base64
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from google.adk.sessions import InMemorySessionService
from google.adk.sessions.sqlite_session_service import SqliteSessionService
from starlette.applications import Starlette
from starlette.responses import Response

from adk_secure_sessions import (
    AesGcmBackend,
    Audit,
    Caches,
    ConfigurationError,
    EncryptedSessionService,
    EncryptedSessionWrapper,
    NoOpBackend,
    Packing,
    WrongKeyError,
    generate_key,
)
from adk_secure_sessions.cli.adk_commands import _hide_ids_in_logs, _ignore_trace_variables
from adk_secure_sessions.integrations import adk
from adk_secure_sessions.integrations.artifacts import EncryptedArtifactService
from adk_secure_sessions.integrations.memory import EncryptedMemoryService
from adk_secure_sessions.integrations.plaintext_guard import (
    guard_registry,
    plaintext_causes,
    without_evaluations,
)
from adk_secure_sessions.integrations.plaintext_leaks import EXPORTER, LEAK_CHECKS
from tests.cli.support import run

with warnings.catch_warnings():  # of an old Python, and of ADK's experimental parts
    warnings.simplefilter("ignore")
    from google.adk.cli import service_registry
    from google.adk.cli.utils import envs

KEY = base64.b64encode(bytes(range(32))).decode()
SQLITE = "encrypted+sqlite:///./sessions.db"
ENVIRONMENT_KEY = "key=env:URI_KEY"


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("URI_KEY", KEY)
    monkeypatch.setenv("URI_OLD_KEY", generate_key())
    monkeypatch.chdir(tmp_path)
    before = logging.getLogRecordFactory()
    yield
    logging.setLogRecordFactory(before)  # our command changes it


@pytest.fixture
def services(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process has no services yet, and its handler of SIGTERM stays."""
    monkeypatch.setattr(adk, "_services", {})
    monkeypatch.setattr(adk, "_close_on_sigterm", lambda: None)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(service_registry, "_service_registry_instance", None)
    return service_registry.get_service_registry()


def rejected(uri: str) -> str:
    with pytest.raises(ConfigurationError) as error:
        adk.session_service(uri)
    return str(error.value)


def test_options_of_a_uri_name_database_keys_backends_and_blobs() -> None:
    parsed = adk.parse(
        "encrypted+postgresql://u:p%40w@db:5432/chat?sslmode=require&key=env:A&also_key=file:/x%26y"
        "&backend=fernet&also_backend=aesgcm&key_db=sqlite:///keys.db&blobs=s3://bucket/prefix"
        "&allow_http=true&audit_ids=blind&compression=zlib&padding=padme"
        "&cache_events=1000&audit_table=true&expires_after=90d"
        "&indexed_state_key=ticket&indexed_state_key=user:mrn"
    )
    assert tuple(parsed) == (
        "postgresql://u:p%40w@db:5432/chat?sslmode=require",
        ("fernet", "aesgcm"),
        ("env:A", "file:/x&y"),
        "s3://bucket/prefix",
        True,
        (
            ("key_db_url", "sqlite:///keys.db"),
            ("audit", Audit("blind", table=True)),
            ("cache", Caches(events=1000)),
            ("indexed_state_keys", ("ticket", "user:mrn")),
            ("packing", Packing("zlib", "padme")),
            ("expires_after", timedelta(days=90)),
        ),
    )
    assert "p%40w" not in repr(parsed)


def test_uri_can_name_several_servers_after_a_scheme_in_any_case() -> None:
    hosts = "host=db1:5432&host=db2:5432&target_session_attrs=read-write"
    parsed = adk.parse(f"ENCRYPTED+Postgresql://u@/chat?{hosts}&key=env:A")
    assert parsed.db_url == f"postgresql://u@/chat?{hosts}"


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("sqlite:///./sessions.db?key=env:URI_KEY", "begins with one of encrypted+sqlite"),
        ("encrypted+oracle://db?key=env:URI_KEY", "begins with one of encrypted+sqlite"),
        ("encrypted+sqlite", "begins with one of encrypted+sqlite"),
        (SQLITE, "has no key: add a key spec"),
        (f"{SQLITE}?also_key=env:URI_KEY", "has no key"),
        (f"{SQLITE}?key=", "'key' of the URI has no value"),
        (f"{SQLITE}?key=env:URI_KEY&key=env:URI_OLD_KEY", "give older ones as also_key"),
        (f"{SQLITE}?{ENVIRONMENT_KEY}&key_bd=x", "unknown (did you mean key_db?)"),
        (f"{SQLITE}?{ENVIRONMENT_KEY}&sslmode=require", "option 2 of the URI is unknown"),
        (f"{SQLITE}?{ENVIRONMENT_KEY}&backend=aes", "can only be aesgcm or fernet or no-op"),
        (f"{SQLITE}?{ENVIRONMENT_KEY}&compression=gzip", "'compression' of the URI can only be"),
        (f"{SQLITE}?{ENVIRONMENT_KEY}&padding=gzip", "'padding' of the URI can only be"),
        (f"{SQLITE}?{ENVIRONMENT_KEY}&expires_after=0d", "90d"),
        (f"{SQLITE}?key=env:URI_MISSING", "'URI_MISSING' is not set"),
        (f"{SQLITE}?{ENVIRONMENT_KEY}&allow_http=true", "needs blobs= with a bucket"),
        (f"{SQLITE}?{ENVIRONMENT_KEY}&blobs=s3://b&allow_http=1", "can only be true"),
    ],
)  # fmt: skip
def test_uri_that_cannot_be_used_is_rejected(uri: str, said: str) -> None:
    assert said in rejected(uri)


@pytest.mark.parametrize(
    "query",
    ["key={}", "key=env:URI_KEY&also_key={}", "{}", "{}=", "key=x:{}", "backend={}", "key={}&x={}"],
)  # fmt: skip
def test_key_in_a_uri_is_rejected_and_not_repeated(query: str, tmp_path: Path) -> None:
    assert KEY[:8] not in rejected(f"{SQLITE}?{query.format(KEY, KEY)}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("create", [adk.session_service, adk.artifact_service, adk.memory_service])
def test_options_outside_of_the_uri_are_rejected(create: Callable[..., object]) -> None:
    with pytest.raises(ConfigurationError, match="pool_size: options of an encrypted service"):
        create(f"{SQLITE}?{ENVIRONMENT_KEY}&blobs=x", agents_dir=".", pool_size=5)


def test_artifacts_need_a_place_for_their_contents() -> None:
    with pytest.raises(ConfigurationError, match="add blobs= to the URI"):
        adk.artifact_service(f"{SQLITE}?{ENVIRONMENT_KEY}")


@pytest.mark.usefixtures("services")
def test_bucket_without_tls_needs_an_option_of_the_uri_and_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in (
        ("AWS_REGION", "r"),
        ("AWS_ACCESS_KEY_ID", "id"),
        ("AWS_SECRET_ACCESS_KEY", KEY),
    ):
        monkeypatch.setenv(name, value)
    uri = f"{SQLITE}?{ENVIRONMENT_KEY}&blobs=s3://bucket"
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://minio:9000")
    with pytest.raises(ConfigurationError, match="http:// is only for this machine"):
        adk.artifact_service(uri)
    assert caplog.messages == []
    adk.artifact_service(f"{uri}&allow_http=true")
    (warning,) = caplog.messages
    assert "has no TLS" in warning
    assert "minio" not in warning
    caplog.clear()
    for address in ("http://127.0.0.1:9000", "https://minio:9000"):
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        adk.artifact_service(uri)
        adk.artifact_service(f"{uri}&allow_http=true")
    assert caplog.messages == []


def test_class_of_the_service_in_services_yaml_says_what_to_write() -> None:
    with pytest.raises(ConfigurationError, match=r"integrations\.adk\.session_service"):
        EncryptedSessionService(uri=SQLITE, agents_dir=".")


@pytest.mark.usefixtures("services")
async def test_one_service_is_shared_by_all_uris_of_a_database_and_its_keys() -> None:
    uri = f"{SQLITE}?{ENVIRONMENT_KEY}"
    service = adk.session_service(uri=uri, agents_dir="agents")
    assert adk.session_service(f"{uri}&blobs=./artifacts") is service
    assert adk.session_service(f"{uri}&also_key=env:URI_OLD_KEY") is not service
    await service.create_session(app_name="app", user_id="user", session_id="session")
    await service.close()
    other = adk.session_service(f"{SQLITE}?key=env:URI_OLD_KEY")
    with pytest.raises(WrongKeyError):
        await other.prepare_tables()
    await other.close()


@pytest.mark.usefixtures("services")
async def test_old_key_of_a_uri_reads_what_it_encrypted() -> None:
    old = adk.session_service(f"{SQLITE}?key=env:URI_OLD_KEY&backend=fernet")
    await old.create_session(app_name="app", user_id="user", session_id="session")
    await old.close()
    new = adk.session_service(
        f"{SQLITE}?{ENVIRONMENT_KEY}&also_key=env:URI_OLD_KEY&also_backend=fernet"
    )
    assert await new.get_session(app_name="app", user_id="user", session_id="session") is not None
    await new.close()


# --- schemes and google-adk's registry ------------------------------------------------------------


@pytest.mark.parametrize("scheme", adk.SCHEMES)
def test_neither_adk_nor_sqlalchemy_resolves_a_scheme(scheme: str, registry: Any) -> None:
    uri = f"{scheme}://host/db?{ENVIRONMENT_KEY}"
    for create in (
        registry.create_session_service,
        registry.create_artifact_service,
        registry.create_memory_service,
    ):
        assert create(uri) is None
    with pytest.raises((sa.exc.NoSuchModuleError, ValueError)):
        sa.create_engine(uri)


@pytest.mark.usefixtures("services")
def test_register_serves_every_scheme_and_leaves_those_of_adk_alone(registry: Any) -> None:
    names = ("_session_factories", "_artifact_factories", "_memory_factories")
    before = {name: dict(getattr(registry, name)) for name in names}
    adk.register()
    adk.register()
    for name in names:
        factories = getattr(registry, name)
        assert factories.items() >= before[name].items()
        assert factories.keys() - before[name].keys() == set(adk.SCHEMES)
    made = registry.create_session_service(f"{SQLITE}?{ENVIRONMENT_KEY}", agents_dir=".")
    assert isinstance(made, EncryptedSessionService)


# --- what the command refuses ---------------------------------------------------------------------

TRACE_VARIABLES = LEAK_CHECKS[EXPORTER].variables
ENCRYPTED = f"{SQLITE}?{ENVIRONMENT_KEY}"
BOTH = {"session_service_uri": ENCRYPTED, "artifact_service_uri": "memory://"}


PLUGIN = "google.adk.plugins.save_files_as_artifacts_plugin.SaveFilesAsArtifactsPlugin"
DEBUG_PLUGIN = "google.adk.plugins.debug_logging_plugin.DebugLoggingPlugin"


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ({}, {"sessions": "no --session_service_uri, so in .adk",
              "artifacts": "no --artifact_service_uri, so in .adk"}),
        (BOTH, {}),
        (BOTH | {"memory_service_uri": "memory://"}, {}),
        (BOTH | {"memory_service_uri": "sqlite:///m.db"},
         {"memory": "--memory_service_uri sqlite://..."}),
        (BOTH | {"session_service_uri": "sqlite:///s.db"},
         {"sessions": "--session_service_uri sqlite://..."}),
        (BOTH | {"session_service_uri": "sqlite+aiosqlite:///s.db"},
         {"sessions": "--session_service_uri sqlite+aiosqlite://..."}),
        (BOTH | {"session_service_uri": f"{SQLITE}?backend=no-op"},
         {"sessions": "--session_service_uri has backend=no-op"}),
        (BOTH | {"session_service_uri": None, "session_db_url": "mysql://x"},
         {"sessions": "--session_service_uri mysql://..."}),
        (BOTH | {"artifact_service_uri": None, "artifact_storage_uri": "gs://b"},
         {"artifacts": "--artifact_service_uri gs://..."}),
        (BOTH | {"save_session": True}, {"sessions": "--save_session"}),
        (BOTH | {"eval_storage_uri": "gs://b"}, {"evaluations": "--eval_storage_uri"}),
        (BOTH | {"otel_to_cloud": True}, {"traces": "--otel_to_cloud"}),
        (BOTH | {"verbose": True}, {"logs": "--verbose"}),
        (BOTH | {"log_level": "debug"}, {"logs": "--log_level debug"}),
        (BOTH | {"log_level": "INFO"}, {"logs": "--log_level INFO"}),
        (BOTH | {"log_level": "WARNING"}, {}),
        (BOTH | {"extra_plugins": (PLUGIN,)}, {}),
        (BOTH | {"extra_plugins": (PLUGIN, f"{DEBUG_PLUGIN}, {PLUGIN}")},
         {"plugins": f"--extra_plugins {DEBUG_PLUGIN}"}),
        ({"in_memory": True}, {}),
    ],
)  # fmt: skip
def test_causes_of_plaintext_are_found_in_the_arguments(
    arguments: dict[str, Any], found: dict[str, str]
) -> None:
    assert plaintext_causes(arguments, {}) == found


@pytest.mark.parametrize("signal", ["", "TRACES_", "METRICS_", "LOGS_"])
def test_environment_variable_that_sends_traces_is_found(signal: str) -> None:
    name = f"OTEL_EXPORTER_OTLP_{signal}ENDPOINT"
    found = plaintext_causes(BOTH, {name: "http://user:secret@host:4318"})
    assert found == {"traces": f"the environment variable {name}: unset it"}
    assert plaintext_causes(BOTH, {name: ""}) == {}


def test_env_file_of_an_agent_cannot_make_adk_send_traces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in TRACE_VARIABLES:
        monkeypatch.setenv(name, "")  # so that monkeypatch restores it
        monkeypatch.delenv(name)
    text = "".join(f"{name}=http://host:4318\n" for name in TRACE_VARIABLES)
    (tmp_path / ".env").write_text(text)
    envs._get_explicit_env_keys.cache_clear()
    try:
        _ignore_trace_variables()
        envs.load_dotenv_for_agent("", str(tmp_path))
    finally:
        envs._get_explicit_env_keys.cache_clear()
    assert [os.environ[name] for name in TRACE_VARIABLES] == [""] * len(TRACE_VARIABLES)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/dev/apps/a/eval-sets/e/add-session", 403),
        ("POST", "/dev/apps/a/%65val-sets/e/add-session", 403),
        ("POST", "/apps/a/eval_sets/e/run_eval", 403),
        ("PUT", "/dev/apps/a/tests/t", 403),
        ("DELETE", "/dev/apps/a/Tests/t", 403),
        ("POST", "/new/evaluations", 403),  # no route, for example in another release
        ("POST", "/mounted/eval", 403),
        ("POST", "/prefix/apps/a/eval_sets/e/run_eval", 403),
        ("GET", "/dev/apps/a/tests/t", 200),
        ("POST", "/apps/evaluator/users/eval/sessions", 200),
        ("POST", "/apps/tests/users/u/sessions", 200),
        ("POST", "/apps/a/users/u/sessions/s/artifacts/evaluation/tests", 200),
    ],
)
async def test_requests_that_write_evaluations_are_rejected(
    method: str, path: str, status: int
) -> None:
    methods = ["DELETE", "GET", "POST", "PUT"]
    app = Starlette()
    for template in (
        "/apps/{app}/users/{user}/sessions",
        "/dev/apps/{app}/eval-sets/{set}/add-session",
        "/apps/{app}/eval_sets/{set}/run_eval",
        "/dev/apps/{app}/tests/{test}",
        "/dev/apps/{app}/Tests/{test}",
        "/prefix/apps/{app}/eval_sets/{set}/run_eval",
        "/apps/{app}/users/{user}/sessions/{session}/artifacts/{name:path}",
    ):
        app.router.add_route(template, lambda _: Response(), methods)
    app.mount("/mounted", Response())
    transport = httpx.ASGITransport(without_evaluations(app))
    async with httpx.AsyncClient(transport=transport, base_url="http://host") as client:
        answer = await client.request(method, path)
    assert answer.status_code == status
    if status == 403:
        assert "--allow-plaintext evaluations" in answer.json()["detail"]


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("/run_live?app_name=a&user_id=U&session_id=S", "/run_live?..."),
        ("/apps/a/users/U/x/sessions/S/y", "/apps/a/users/.../sessions/..."),
        ("/apps/a/users/U/sessions", "/apps/a/users/.../sessions"),
        ("/apps/a/users/U/memory", "/apps/a/users/.../memory"),
        (
            "/apps/a/users/U/sessions/S/artifacts/user:dir/F.pdf/versions?x=U",
            "/apps/a/users/.../sessions/.../artifacts/...?...",
        ),
        ("/dev/apps/a/debug/trace/session/S", "/dev/apps/a/debug/trace/session/..."),
    ],
)
@pytest.mark.parametrize("logger", ["uvicorn.access", "uvicorn.error"])
def test_addresses_in_logs_of_uvicorn_have_no_ids(logger: str, address: str, shown: str) -> None:
    _hide_ids_in_logs()
    text, values = '%s - "WebSocket %s" [accepted]', ("host:1", address)
    record = logging.getLogger(logger).makeRecord(logger, logging.INFO, "", 0, text, values, None)
    assert record.getMessage() == f'host:1 - "WebSocket {shown}" [accepted]'


@pytest.mark.parametrize(
    ("logger", "text", "values", "shown"),
    [
        (
            "google_adk.google.adk.cli.api_server",
            "Internal error while saving artifact %s for app=%s user=%s session=%s: %s",
            ("F", "app", "U", "S", "disk full"),
            "Internal error while saving artifact ... for app=app user=... session=...: disk full",
        ),
        ("google_adk.x", 'Artifact "%s" not found, skipping', ("F",), 'Artifact "..." not found,'),
        ("google_adk.x", "100%% of artifact %r version %d", ("F", 3), "100% of artifact '...' ver"),
        ("google_adk.x", "New session created: %s", ("S",), "New session created: ..."),
        ("google_adk.x", "Failed to load agent %s", ("app",), "Failed to load agent app"),
        ("google_adk.x", "for session %*d", (5, 1), "for session     1"),
        ("google_adk.x", "for session %s", (), "for session %s"),
        ("application", "artifact %s", ("mine",), "artifact mine"),
    ],
)
def test_logs_of_adk_have_no_ids_and_no_names_of_artifacts(
    logger: str, text: str, values: tuple[object, ...], shown: str
) -> None:
    _hide_ids_in_logs()
    record = logging.getLogger(logger).makeRecord(logger, logging.ERROR, "", 0, text, values, None)
    assert record.getMessage().startswith(shown)


def test_guarded_registry_makes_no_service_that_stores_plaintext(
    registry: Any, tmp_path: Path
) -> None:
    """A service of ours over `NoOpBackend` does, whatever the name of its class says."""
    with pytest.warns(UserWarning, match="NoOpBackend"):
        no_op = NoOpBackend()
    plain = EncryptedSessionService("sqlite:///plain.db", no_op)
    encrypting = EncryptedSessionService("sqlite:///x.db", AesGcmBackend(KEY), [no_op])
    inner = InMemorySessionService()

    class Sessions(InMemorySessionService):
        """Some service of an application."""

    rejected: dict[str, list[Any]] = {"session": [Sessions(), SqliteSessionService("plain.db")]}
    created: dict[str, list[Any]] = {}
    for service, backend, found in (
        (plain, no_op, rejected),
        (encrypting, AesGcmBackend(KEY), created),
    ):
        wrapper = EncryptedSessionWrapper(inner, backend, key_db_url="sqlite:///keys.db")
        artifacts = EncryptedArtifactService(service, tmp_path / "blobs")
        found.setdefault("session", []).extend([service, wrapper])
        found["artifact"] = [artifacts]
        found["memory"] = [EncryptedMemoryService(service)]
    guard_registry(registry, ())
    for kind in created:
        register = getattr(registry, f"register_{kind}_service")
        create = getattr(registry, f"create_{kind}_service")
        assert create("memory://") is not None
        for one in created[kind]:
            register("some", lambda uri, one=one, **_: one)
            assert create("some://") is one
        for one in rejected[kind]:
            register("some", lambda uri, one=one, **_: one)
            with pytest.raises(ConfigurationError, match=f"this as plaintext: {kind}.* makes a"):
                create("some://")
        with pytest.raises(ConfigurationError, match="nothing is registered"):
            create("nobody://")


def test_guarded_registry_leaves_what_is_allowed_to_google_adk(registry: Any) -> None:
    guard_registry(registry, ("memory",))
    assert registry.create_memory_service("nobody://") is None
    with pytest.raises(ConfigurationError, match="nothing is registered"):
        registry.create_session_service("nobody://")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["."], "plaintext: sessions (no --session_service_uri"),
        (
            [".", "--service_uri", "sqlite:///x.db"],
            "://...); give --service_uri (ADK_SECURE_SESSIONS_URI) encrypted+..., or mem",
        ),
        ([".", "--service_uri", "memory://", "-v"], "plaintext: logs (--verbose); leave it out"),
        (
            [".", "--allow-plaintext", "session"],
            "session is not one of sessions, artifacts, memory",
        ),
        ([".", "--service_uri", SQLITE], "the URI has no key"),
        ([".", "--service_uri", f"{SQLITE}?key={KEY}"], "never the key itself"),
        ([".", "--service_uri", f"encrypted+mysql://u:{KEY}[@h/d?key=env:K"], "cannot be parsed"),
        ([".", "--service_uri", f"encrypted+mysql://u:{KEY}\u2100@h/d?key=env:K"], "be parsed"),
    ],
)
@pytest.mark.usefixtures("services", "registry")
def test_command_ends_with_one_line(arguments: list[str], said: str, tmp_path: Path) -> None:
    done = run("adk", "api_server", *arguments)
    assert done.code == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    assert said in line
    assert line == done.stderr.splitlines()[-1]
    assert KEY not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("services", "registry")
def test_command_with_a_wrong_key_ends_with_one_line_before_adk_starts() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("URI_KEY", generate_key())
        run("init", "--db", "sqlite:///sessions.db", "--key", "env:URI_KEY")
    done = run("adk", "api_server", ".", "--allow-plaintext", "artifacts",
               "--session_service_uri", ENCRYPTED)  # fmt: skip
    assert (done.code, done.stdout) == (2, "")
    assert "root key" in done.stderr.splitlines()[-1]


def test_help_of_the_group_names_adks_commands() -> None:
    done = run("adk", "--help")
    assert done.code == 0
    assert [name for name in ("api_server", "run", "web") if f"  {name} " not in done.stdout] == []
