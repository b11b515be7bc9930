"""The leaks that `adk doctor` can find: where google-adk writes user content as plaintext.

docs/adk-plaintext.md lists all of them, also those that only the application itself can find.
"""

from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple


class LeakCheck(NamedTuple):
    """How to detect one way in which google-adk writes plaintext, and how to prevent it."""

    remedy: str  # Markdown
    variables: tuple[str, ...] = ()  # of the environment
    plugin: str = ""  # the name of a class
    files: tuple[str, ...] = ()  # patterns, in the directory of all agents or of one agent
    contains: bytes = b""  # what such a file contains


class Leak(NamedTuple):
    """A place where google-adk writes user content as plaintext.

    Attributes:
        name: The name of the place, as in adk-plaintext.md.
        where: The setting, the plugin, the file or the service.
        remedy: How to prevent it, in Markdown.
    """

    name: str
    where: str
    remedy: str


class Protection(StrEnum):
    """How a service would store: as ciphertext, as plaintext or only in memory."""

    ENCRYPTED = "encrypted"
    PLAINTEXT = "plaintext"
    NOTHING = "nothing"
    UNKNOWN = "unknown"  # the service cannot be created


class ServiceStore(NamedTuple):
    """Whether a service would encrypt, and where it stores.

    Attributes:
        service: The service: `sessions`, `artifacts` or `memory`.
        protection: Whether the service encrypts; `unknown` if it cannot be created.
        where: The scheme of the URI, or the default of google-adk.
    """

    service: str
    protection: Protection
    where: str


# What google-adk's commands may write as plaintext, if --allow-plaintext names it.
PLAINTEXT_KINDS = ("sessions", "artifacts", "memory", "evaluations", "logs", "plugins", "traces")
CAPTURE_IN_SPANS = "ADK_CAPTURE_MESSAGE_CONTENT_IN_SPANS"
EXPORTER = "telemetry-exporter"
_REMOVE = "Remove the plugin."
LEAK_CHECKS: Mapping[str, LeakCheck] = {
    "span-content": LeakCheck(f"`{CAPTURE_IN_SPANS}=false`"),
    "genai-content": LeakCheck(
        "Do not set `OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT`. Set "
        "`ADK_TELEMETRY_IGNORE_RUN_CONFIG=true`, so that google-adk ignores "
        "`capture_message_content` of a `RunConfig`.",
        ("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT",),
    ),
    "mcp-bodies": LeakCheck(
        "Do not set `ADK_CAPTURE_MCP_HTTP_BODIES`.", ("ADK_CAPTURE_MCP_HTTP_BODIES",)
    ),
    EXPORTER: LeakCheck(
        "`OTEL_SDK_DISABLED=true`. Or use no exporter: do not set `OTEL_EXPORTER_OTLP_ENDPOINT`, "
        "`--otel_to_cloud` or `--trace_to_cloud`.",
        (
            "OTEL_EXPORTER_OTLP_ENDPOINT",
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
            "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT",
            "OTEL_EXPORTER_OTLP_LOGS_ENDPOINT",
            "OTEL_TRACES_EXPORTER",
            "OTEL_LOGS_EXPORTER",
            "GOOGLE_CLOUD_AGENT_ENGINE_ENABLE_TELEMETRY",
        ),
    ),
    "auto-tracing-plugin": LeakCheck(_REMOVE, plugin="AutoTracingPlugin"),
    "saved-session": LeakCheck(
        "Do not use `adk run --save_session`; delete the files.", files=("*.session.json",)
    ),
    "local-services": LeakCheck(
        "`--session_service_uri` and `--artifact_service_uri` with our URIs; delete the files.",
        files=(".adk/session.db", ".adk/artifacts/**/*"),
    ),
    "service-uris": LeakCheck(
        "`adk-secure-sessions adk web --service_uri encrypted+...`, or the environment variable "
        "`ADK_SECURE_SESSIONS_URI`."
    ),
    "eval-sets": LeakCheck(
        "Do not add sessions to evaluation sets, or use `InMemoryEvalSetsManager` in your own "
        "code; delete the files.",
        files=("*.evalset.json",),
    ),
    "eval-results": LeakCheck(
        "Evaluate with invented data only; delete the files.", files=(".adk/eval_history/*.json",)
    ),
    "test-files": LeakCheck(
        "Do not save sessions as tests: run `adk api_server` instead of `adk web`; delete the "
        "files.",
        files=("tests/*.json",),
        contains=b'"events"',
    ),
    "recordings": LeakCheck(
        "Do not load the plugin with `--extra_plugins`; delete the files.",
        plugin="RecordingsPlugin",
        files=("**/generated-recordings*.yaml",),
    ),
    "debug-logging-plugin": LeakCheck(
        f"{_REMOVE} Delete the file.", plugin="DebugLoggingPlugin", files=("adk_debug.yaml",)
    ),
    "logging-plugin": LeakCheck(_REMOVE, plugin="LoggingPlugin"),
    "bigquery-plugin": LeakCheck(
        _REMOVE,
        plugin="BigQueryAgentAnalyticsPlugin",
        files=("plugins.yaml",),
        contains=b"bigquery_agent_analytics",
    ),
}
PLUGINS = {check.plugin: name for name, check in LEAK_CHECKS.items() if check.plugin}


def leak(name: str, where: str) -> Leak:
    return Leak(name, where, LEAK_CHECKS[name].remedy)


def _is_disabled(environment: Mapping[str, str]) -> bool:
    """Return True if OpenTelemetry exports nothing, whatever the other variables say."""
    return environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"


def variables_set(name: str, environment: Mapping[str, str]) -> list[str]:
    """Return the variables in *environment* that cause the leak *name*."""
    if _is_disabled(environment):
        return []
    off = {"", "0", "false", "none", "no_content"}
    variables = LEAK_CHECKS[name].variables
    return [one for one in variables if environment.get(one, "").strip().lower() not in off]


def in_environment(environment: Mapping[str, str]) -> tuple[list[Leak], list[Leak]]:
    """Return the leaks that *environment* causes, and those that it causes if traces are exported.

    No variable says whether the application's own code exports traces.
    """
    on = [
        leak(name, f"{variable} is set")
        for name in LEAK_CHECKS
        for variable in variables_set(name, environment)
    ]
    spans = [leak("span-content", f"{CAPTURE_IN_SPANS} is not false")]
    is_off = environment.get(CAPTURE_IN_SPANS, "true").strip().lower() in {"0", "false"}
    if is_off or _is_disabled(environment):
        return on, []
    return (spans + on, []) if variables_set(EXPORTER, environment) else (on, spans)


def in_plugins(application: object) -> Iterator[Leak]:
    """Yield a leak for each plugin of google-adk in *application*, an `App` or an agent."""
    for plugin in getattr(application, "plugins", ()):
        for base in type(plugin).__mro__:
            if base.__name__ in PLUGINS:
                yield leak(PLUGINS[base.__name__], f"the plugin {base.__name__} is in use")


def in_files(agents_dir: Path) -> Iterator[Leak]:
    """Yield a leak for each file that google-adk's commands have written; it may be repeated."""
    inside = [one for one in sorted(agents_dir.iterdir()) if one.is_dir()]
    for directory in (agents_dir, *(one for one in inside if one.name[0] not in "._")):
        for name, check in LEAK_CHECKS.items():
            for path in sorted(path for files in check.files for path in directory.glob(files)):
                if not path.is_file() or not path.stat().st_size:
                    continue
                if not check.contains or check.contains in path.read_bytes():
                    yield leak(name, str(path))
