"""The places where google-adk may write user content as plaintext, outside our services.

docs/adk-plaintext.md shows this list as a table; `leaks.py` finds which places are in use.
"""

from collections.abc import Mapping
from typing import NamedTuple


class Place(NamedTuple):
    """A place where google-adk may write user content as plaintext.

    Attributes:
        name: A short name.
        content: The content that google-adk writes.
        where: The kind of place.
        default: `on` or `off`: whether google-adk writes without being asked.
        remedy: How to prevent google-adk from writing there, as Markdown.
    """

    name: str
    content: str
    where: str
    default: str
    remedy: str


_LOG_REMEDY = (
    '`logging.getLogger("google_adk").setLevel(logging.WARNING)`, or `--log_level WARNING`'
)
_PLUGIN_REMEDY = "Remove the plugin."

PLACES: Mapping[str, Place] = {
    place.name: place
    for place in (
        Place(
            "span-content",
            "Requests to models, answers, arguments and results of tools. From google-adk 2.13 on, "
            "only the history of live runs; with `ADK_TELEMETRY_SCHEMA_VERSION_OPT_IN=1`, all of "
            "these.",
            "attributes of spans",
            "on",
            "`ADK_CAPTURE_MESSAGE_CONTENT_IN_SPANS=false`",
        ),
        Place(
            "genai-content",
            "Requests to models, answers, arguments and results of tools, user ids.",
            "attributes of spans, log records of OpenTelemetry",
            "off",
            "Do not set `OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT`. Set "
            "`ADK_TELEMETRY_IGNORE_RUN_CONFIG=true`, so that google-adk ignores "
            "`capture_message_content` of a `RunConfig`.",
        ),
        Place(
            "mcp-bodies",
            "HTTP requests to MCP servers, and the responses.",
            "log records of OpenTelemetry",
            "off",
            "Do not set `ADK_CAPTURE_MCP_HTTP_BODIES`.",
        ),
        Place(
            "telemetry-exporter",
            "Session ids, texts and tracebacks of exceptions; in older releases, also user ids. "
            "Spans always contain them.",
            "spans, wherever an exporter sends them",
            "off",
            "`OTEL_SDK_DISABLED=true`. Or use no exporter: do not set "
            "`OTEL_EXPORTER_OTLP_ENDPOINT`, `--otel_to_cloud` or `--trace_to_cloud`.",
        ),
        Place(
            "sqlite-spans",
            "All attributes of spans.",
            "the SQLite file of `SqliteSpanExporter`",
            "off",
            "Do not use `SqliteSpanExporter`, or set `OTEL_SDK_DISABLED=true`; delete the file.",
        ),
        Place(
            "auto-tracing-plugin",
            "Arguments and results of the application's functions.",
            "attributes of spans",
            "off",
            _PLUGIN_REMEDY,
        ),
        Place(
            "debug-logs",
            "Requests to models, answers, events, code.",
            "DEBUG logs of `google_adk`",
            "off",
            _LOG_REMEDY,
        ),
        Place(
            "info-logs",
            "Messages to `Runner.run_debug`, session ids.",
            "INFO logs of `google_adk`",
            "on in google-adk's commands",
            _LOG_REMEDY,
        ),
        Place(
            "rewind-log",
            "The event that rewinds a session, with all state that it restores.",
            "INFO logs of `google_adk`",
            "on in google-adk's commands",
            _LOG_REMEDY,
        ),
        Place(
            "access-log",
            "User ids and session ids, in the paths of requests.",
            "INFO logs of `uvicorn.access`",
            "on in `adk web` and `adk api_server`",
            "`--log_level WARNING`, or `uvicorn.run(..., access_log=False)`; "
            "`adk-secure-sessions adk web` replaces the ids.",
        ),
        Place(
            "log-directory",
            "All logs of all libraries at the level of `--log_level`.",
            "`agents_log` in the directory for temporary files",
            "on in `adk run`",
            "`--log_level WARNING`, or set `TMPDIR` to a directory in memory; delete the files.",
        ),
        Place(
            "saved-session",
            "A whole session.",
            "`*.session.json` beside the agent",
            "off",
            "Do not use `adk run --save_session`; delete the files.",
        ),
        Place(
            "local-services",
            "Sessions, artifacts.",
            "`.adk/session.db` and `.adk/artifacts` beside the agents",
            "on in google-adk's commands without URIs",
            "`--session_service_uri` and `--artifact_service_uri` with our URIs; delete the files.",
        ),
        Place(
            "service-uris",
            "Sessions, artifacts, memory.",
            "the stores that google-adk's commands would use; only `adk doctor` checks them",
            "on without URIs",
            "`adk-secure-sessions adk web --service_uri encrypted+...`, or the environment "
            "variable `ADK_SECURE_SESSIONS_URI`.",
        ),
        Place(
            "plaintext-service",
            "Sessions, artifacts, memory.",
            "a service that does not encrypt",
            "off",
            "Use `EncryptedSessionService`, `EncryptedArtifactService` and "
            "`EncryptedMemoryService`.",
        ),
        Place(
            "rag-memory",
            "Each session that is added to memory.",
            "a temporary file that `VertexAiRagMemoryService` uploads; it stays if the process is "
            "killed",
            "off",
            "Use `EncryptedMemoryService`, or set `TMPDIR` to a directory in memory.",
        ),
        Place(
            "task-store",
            "Tasks of A2A, with their messages.",
            "the database of `DatabaseTaskStore`",
            "off",
            "Use `InMemoryTaskStore`, the default: do not set `--task_store_uri` or the argument "
            "`task_store` of `to_a2a`.",
        ),
        Place(
            "eval-sets",
            "Sessions that were added to an evaluation set.",
            "`*.evalset.json` beside the agent, or the bucket of `--eval_storage_uri`",
            "off",
            "Do not add sessions to evaluation sets, or use `InMemoryEvalSetsManager` in your own "
            "code; delete the files.",
        ),
        Place(
            "eval-results",
            "Conversations of evaluations.",
            "`.adk/eval_history` beside the agent, or the bucket of `--eval_storage_uri`",
            "on in `adk eval` and in evaluations of `adk web`",
            "Evaluate with invented data only; delete the files.",
        ),
        Place(
            "test-files",
            "Sessions that were saved as tests on the page of `adk web`.",
            "`tests/*.json` beside the agent",
            "off",
            "Do not save sessions as tests: run `adk api_server` instead of `adk web`; "
            "delete the files.",
        ),
        Place(
            "recordings",
            "Requests to models, answers, calls of tools.",
            "`generated-recordings*.yaml` of `RecordingsPlugin`",
            "off",
            "Do not load the plugin with `--extra_plugins`; delete the files.",
        ),
        Place(
            "debug-logging-plugin",
            "Messages, requests to models, answers, session state.",
            "`adk_debug.yaml` of `DebugLoggingPlugin`",
            "off",
            f"{_PLUGIN_REMEDY} Delete the file.",
        ),
        Place(
            "logging-plugin",
            "Messages, answers, arguments and results of tools, ids.",
            "stdout, by `LoggingPlugin`",
            "off",
            _PLUGIN_REMEDY,
        ),
        Place(
            "bigquery-plugin",
            "Messages, requests to models, answers, ids, session state.",
            "BigQuery, by `BigQueryAgentAnalyticsPlugin` or `plugins.yaml`",
            "off",
            f"{_PLUGIN_REMEDY} Or use `BigQueryLoggerConfig(enabled=False)`.",
        ),
    )
}
