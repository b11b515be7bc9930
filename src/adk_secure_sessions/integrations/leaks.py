"""Find where google-adk writes user content as plaintext outside our services.

`plaintext_places.py` lists the places.  Whether google-adk writes to a place depends on an object
of the application, on an environment variable, or on an option of google-adk's command line.
Therefore, three functions find the places that are in use:

- `check_plaintext_leaks` examines an application and the environment variables of its process.
- `check_files` looks for files that google-adk has written.
- `check_stores` examines the URIs of services.
"""

import logging
import os
import sqlite3
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from adk_secure_sessions.errors import ConfigurationError
from adk_secure_sessions.integrations.plaintext_guard import SERVICES, is_encrypted
from adk_secure_sessions.integrations.plaintext_places import PLACES
from adk_secure_sessions.integrations.service_stores import (
    PLAINTEXT,
    UNKNOWN,
    ServiceStore,
    find_stores,
)

if TYPE_CHECKING:
    from google.adk.agents.run_config import RunConfig


class Leak(NamedTuple):
    """A place where an application writes user content as plaintext.

    Attributes:
        name: The name of the place, as in docs/adk-plaintext.md.
        where: The object or setting that is in use, or the file that was found.
        remedy: How to prevent google-adk from writing there, as Markdown.
    """

    name: str
    where: str
    remedy: str


CAPTURE_IN_SPANS = "ADK_CAPTURE_MESSAGE_CONTENT_IN_SPANS"
CAPTURE_GENAI = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
CAPTURE_MCP = "ADK_CAPTURE_MCP_HTTP_BODIES"
_IGNORE_RUN_CONFIG = "ADK_TELEMETRY_IGNORE_RUN_CONFIG"
# Variables that make google-adk or OpenTelemetry create exporters, unless the value is in `_OFF`.
_EXPORTERS = (
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_EXPORTER_OTLP_LOGS_ENDPOINT",
    "OTEL_TRACES_EXPORTER",
    "OTEL_LOGS_EXPORTER",
    "GOOGLE_CLOUD_AGENT_ENGINE_ENABLE_TELEMETRY",
)
_OFF = {"", "0", "false", "none", "no_content"}
# Exporters that keep spans and log records in memory, and so are no leaks.
_IN_MEMORY = {
    "ApiServerSpanExporter",
    "InMemoryExporter",
    "InMemoryLogExporter",
    "InMemoryLogRecordExporter",
    "InMemorySpanExporter",
    "WebUiLogExporter",
}
# The name of the place to which each plugin of google-adk writes, by the name of its class.
_PLUGINS = {
    "AutoTracingPlugin": "auto-tracing-plugin",
    "BigQueryAgentAnalyticsPlugin": "bigquery-plugin",
    "DebugLoggingPlugin": "debug-logging-plugin",
    "LoggingPlugin": "logging-plugin",
    "RecordingsPlugin": "recordings",
}
_ADK_LOGGER = "google_adk"
# The loggers that log the rewinding of a session: the first one in google-adk 2 and later, the
# second one in earlier releases.
_REWIND_LOGGERS = (
    "google_adk.google.adk.sessions._rewind_utils",
    "google_adk.google.adk.runners",
)
_ACCESS_LOGGER = "uvicorn.access"


def check_plaintext_leaks(
    application: object = None,
    *,
    services: Iterable[object] = (),
    run_config: "RunConfig | None" = None,
    environ: Mapping[str, str] = os.environ,
) -> list[Leak]:
    """Find where an application writes user content as plaintext.

    Call this function in the process of the application, after the application has set up its logs
    and its telemetry.

    Args:
        application: A `Runner`, an `App` or an agent; None to check only the process.
        services: Services and A2A task stores that *application* does not name.
        run_config: The `RunConfig` that the application gives to its runs.
        environ: The environment variables.

    Returns:
        A leak for each place that is in use; see docs/adk-plaintext.md.

    Raises:
        ConfigurationError: *application* is not a `Runner`, an `App` or an agent.
    """
    plugins, named = _parts(application)
    found = [
        *_telemetry(environ, run_config),
        *_logs(),
        *(leak for plugin in plugins for leak in _plugin(plugin)),
        *(leak for service in (*named, *services) for leak in _service(service)),
    ]
    return list(dict.fromkeys(found))


def check_files(agents_dir: str | os.PathLike[str]) -> list[Leak]:
    """Find files with user content as plaintext that google-adk's commands have written.

    Args:
        agents_dir: The directory of all agents, or of one agent.

    Raises:
        OSError: A directory cannot be read.
    """
    top = Path(agents_dir)
    inside = [one for one in sorted(top.iterdir()) if one.is_dir() and one.name[0] not in "._"]
    found: list[Leak] = []
    for directory in (top, *inside):
        for name, patterns in _FILES.items():
            for pattern, matches in patterns:
                files = sorted(path for path in directory.glob(pattern) if path.is_file())
                found += [_leak(name, str(path)) for path in files if matches(path)]
    found += [_leak("log-directory", str(path)) for path in _log_files()]
    return list(dict.fromkeys(found))


def check_stores(
    agents_dir: str | os.PathLike[str], uris: Mapping[str, str | None]
) -> tuple[list[ServiceStore], list[Leak]]:
    """Find where google-adk's commands would store sessions, artifacts and memory.

    `find_stores` describes the arguments and the error.  Return all stores, and the leaks.  A leak
    is a store that is not known to encrypt, or a file `services.yaml` or `services.py` that
    google-adk cannot load.
    """
    stores, warnings = find_stores(agents_dir, uris)
    unsafe = [one for one in stores if one.stores in (PLAINTEXT, UNKNOWN)]
    found = [f"{one.service}: {one.where}" for one in unsafe] + warnings
    return stores, [_leak("service-uris", where) for where in found]


def _leak(name: str, where: str) -> Leak:
    return Leak(name, where, PLACES[name].remedy)


def _parts(application: object) -> tuple[list[object], list[object]]:
    """Return the plugins and the services of an application."""
    if application is None:
        return [], []
    if hasattr(application, "plugin_manager"):  # a Runner
        named = [
            getattr(application, name, None)
            for name in ("session_service", "artifact_service", "memory_service")
        ]
        return list(application.plugin_manager.plugins), [one for one in named if one is not None]
    if hasattr(application, "root_agent"):  # an App
        return list(getattr(application, "plugins", None) or ()), []
    if _is_of(application, "google.adk", {"BaseAgent", "BaseNode"}):
        return [], []
    raise ConfigurationError(
        f"give a Runner, an App or an agent, not an object of the class "
        f"{type(application).__name__}"
    )


def _is_of(value: object, package: str, names: Collection[str]) -> bool:
    """Return True if *value* has one of the classes *names*, without importing these classes."""
    return any(
        base.__name__ in names and f"{base.__module__}.".startswith(f"{package}.")
        for base in type(value).__mro__
    )


# --- telemetry ------------------------------------------------------------------------------------


def _is_on(value: str | None) -> bool:
    return value is not None and value.strip().lower() not in _OFF


def _telemetry(environ: Mapping[str, str], run_config: "RunConfig | None") -> Iterator[Leak]:
    exporters = list(_exporters())
    for exporter in exporters:
        if _is_of(exporter, "google.adk", {"SqliteSpanExporter"}):
            yield _leak("sqlite-spans", f"the exporter {_named(exporter)} is in use")
        yield _leak("telemetry-exporter", f"the exporter {_named(exporter)} is in use")
    disabled = environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    if disabled and not exporters:
        return
    # Report these settings even without an exporter: an application may add an exporter later.
    if environ.get(CAPTURE_IN_SPANS, "true").strip().lower() not in {"0", "false"}:
        yield _leak("span-content", f"{CAPTURE_IN_SPANS} is not false")
    if _is_on(environ.get(CAPTURE_GENAI)):
        yield _leak("genai-content", f"{CAPTURE_GENAI} is set")
    if _captures_content(run_config) and not _is_on(environ.get(_IGNORE_RUN_CONFIG)):
        yield _leak("genai-content", "the RunConfig has capture_message_content")
    if _is_on(environ.get(CAPTURE_MCP)):
        yield _leak("mcp-bodies", f"{CAPTURE_MCP} is set")
    for name in _EXPORTERS:
        if _is_on(environ.get(name)):
            yield _leak("telemetry-exporter", f"{name} is set")


def _captures_content(run_config: "RunConfig | None") -> bool:
    """Return whether *run_config* makes google-adk write the content of messages to telemetry."""
    mode = getattr(getattr(run_config, "telemetry", None), "capture_message_content", None)
    return mode is not None and _is_on(str(getattr(mode, "value", mode)))


def _exporters() -> Iterator[object]:
    """Yield the exporters of spans and log records that the process uses, except those in memory.

    If a processor has no known exporter, yield the processor, which may itself send spans.
    """
    from opentelemetry import _logs, trace

    providers = (
        (trace.get_tracer_provider(), "_active_span_processor", "_span_processors"),
        (_logs.get_logger_provider(), "_multi_log_record_processor", "_log_record_processors"),
    )
    for provider, together, each in providers:
        if getattr(provider, "_disabled", False):
            continue
        for processor in getattr(getattr(provider, together, None), each, ()):
            batch = getattr(processor, "_batch_processor", None)
            exporters = [
                getattr(owner, name, None)
                for owner in (processor, batch)
                for name in ("span_exporter", "_exporter")
            ]
            exporter = next((one for one in exporters if one is not None), processor)
            if type(exporter).__name__ not in _IN_MEMORY:
                yield exporter


def _named(value: object) -> str:
    return type(value).__name__


# --- logs -----------------------------------------------------------------------------------------


def _logs() -> Iterator[Leak]:
    ours = [name for name in list(logging.root.manager.loggerDict) if _is_below(name)]
    for name, level in (("debug-logs", logging.DEBUG), ("info-logs", logging.INFO)):
        for logger in sorted({_ADK_LOGGER, *ours}):
            if where := _writes(logger, level):
                yield _leak(name, where)
                break  # report only one logger: the others usually write to the same places
    for logger in _REWIND_LOGGERS:
        if where := _writes(logger, logging.INFO):
            yield _leak("rewind-log", where)
            break
    if where := _writes(_ACCESS_LOGGER, logging.INFO):
        filters = logging.getLogger(_ACCESS_LOGGER).filters
        if not any(type(one).__module__.startswith("adk_secure_sessions.") for one in filters):
            yield _leak("access-log", where)
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler):
            path = Path(handler.baseFilename)
            if path.is_relative_to(_log_directory()):
                yield _leak("log-directory", str(path))


def _is_below(logger: str) -> bool:
    return logger.startswith(f"{_ADK_LOGGER}.")


def _writes(name: str, level: int) -> str | None:
    """Return a text that says where the logger *name* writes at *level*; None if it does not."""
    logger: logging.Logger | None = logging.getLogger(name)
    if logger is None or not logger.isEnabledFor(level):
        return None
    handlers: list[str] = []
    while logger is not None:
        handlers += [
            type(one).__name__
            for one in logger.handlers
            if one.level <= level and not isinstance(one, logging.NullHandler)
        ]
        logger = logger.parent if logger.propagate else None
    if not handlers:
        return None
    level_name = logging.getLevelName(level)
    return f"the logger {name} writes {level_name} to {', '.join(dict.fromkeys(handlers))}"


def _log_directory() -> Path:
    return Path(tempfile.gettempdir(), "agents_log")


def _log_files() -> Iterator[Path]:
    """Yield the log files of `adk run` that are not empty."""
    for path in sorted(_log_directory().glob("*.log")):
        if path.is_file() and not path.is_symlink() and path.stat().st_size:
            yield path


# --- plugins and services -------------------------------------------------------------------------


def _plugin(plugin: object) -> Iterator[Leak]:
    for class_name, name in _PLUGINS.items():
        if _is_of(plugin, "google.adk", {class_name}):
            if not getattr(getattr(plugin, "config", None), "enabled", True):
                continue
            path = getattr(plugin, "_output_path", None)
            target = f", which writes to {path}" if path is not None else ""
            yield _leak(name, f"the plugin {_named(plugin)} is in use{target}")


def _service(service: object) -> Iterator[Leak]:
    for kind, base in _BASES.items():
        if _is_of(service, "google.adk", {base}) and not is_encrypted(kind, service):
            yield _leak("plaintext-service", f"{_named(service)} stores {kind}")
    if _is_of(service, "google.adk", {"VertexAiRagMemoryService"}):
        yield _leak("rag-memory", f"{_named(service)} is in use")
    if _is_of(service, "a2a", {"TaskStore"}) and not _is_of(service, "a2a", {"InMemoryTaskStore"}):
        yield _leak("task-store", f"{_named(service)} is in use")


# The name of google-adk's base class for each kind of service.
_BASES = dict(
    zip(SERVICES, ("BaseSessionService", "BaseArtifactService", "BaseMemoryService"), strict=True)
)


# --- files ----------------------------------------------------------------------------------------


def _any(path: Path) -> bool:
    return path.stat().st_size > 0


def _contains(word: bytes) -> Callable[[Path], bool]:
    return lambda path: word in path.read_bytes()


def _has_table(name: str) -> Callable[[Path], bool]:
    def matches(path: Path) -> bool:
        """Return True if *path* is a SQLite database with the table *name*; leave it unchanged."""
        # If there is no write-ahead log, `immutable` keeps SQLite from creating files.
        mode = "mode=ro" if path.with_name(f"{path.name}-wal").exists() else "immutable=1"
        try:
            with closing(sqlite3.connect(f"{path.absolute().as_uri()}?{mode}", uri=True)) as db:
                query = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?"
                return db.execute(query, (name,)).fetchone() is not None
        except sqlite3.Error:  # not a database
            return False

    return matches


_Pattern = tuple[str, Callable[[Path], bool]]
# For each place: patterns of file names, and functions that check the content of a file.
_FILES: Mapping[str, tuple[_Pattern, ...]] = {
    "sqlite-spans": (("*.db", _has_table("spans")), (".adk/*.db", _has_table("spans"))),
    "saved-session": (("*.session.json", _any),),
    "local-services": (
        (".adk/session.db", _any),
        (".adk/artifacts/**/*", _any),
        ("*.db", _has_table("events")),
    ),
    "eval-sets": (("*.evalset.json", _any),),
    "eval-results": ((".adk/eval_history/*.json", _any),),
    "test-files": (("tests/*.json", _contains(b'"events"')),),
    "recordings": (("**/generated-recordings*.yaml", _any),),
    "debug-logging-plugin": (("adk_debug.yaml", _any),),
    "bigquery-plugin": (("plugins.yaml", _contains(b"bigquery_agent_analytics")),),
}


# --- applications on the disk ---------------------------------------------------------------------


def load_agents(agents_dir: str | os.PathLike[str]) -> dict[str, Any]:
    """Import the agents in a directory as google-adk does, with their `.env` files.

    Returns:
        The `App` or the agent for each name.

    Raises:
        ConfigurationError: The directory has no agent, or an agent cannot be imported.
    """
    from google.adk.cli.utils.agent_loader import AgentLoader

    loader = AgentLoader(os.fspath(agents_dir))
    is_single = getattr(loader, "is_single_agent", False)  # google-adk 1 has no such attribute
    found: dict[str, Any] = {}
    for name in loader.list_agents():
        if not is_single and not _looks_like_agent(Path(agents_dir, name)):
            continue
        try:
            found[name] = loader.load_agent(name)
        except Exception as error:  # whatever the agent's code raises
            reason = str(error).partition("\n")[0]
            raise ConfigurationError(f"the agent {name} cannot be loaded: {reason}") from error
    if not found:
        raise ConfigurationError(
            f"{os.fspath(agents_dir)} has no agent: give the directory that adk web gets"
        )
    return found


def _looks_like_agent(directory: Path) -> bool:
    return any(
        (directory / name).is_file() for name in ("__init__.py", "agent.py", "root_agent.yaml")
    )
