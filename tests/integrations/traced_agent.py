"""A process that runs an agent under different telemetry settings, and says what leaves it.

How it works.  OpenTelemetry's provider is set once for a process, so this is a process of its own.
It reads a JSON list from stdin; each item has the environment variables of one trial.  A trial
says needles to an agent, which calls a tool with one needle and another tool that raises another,
then says one in a live run.  The output is a JSON list: for each trial, the needles in spans and
those in log records.  With an argument, that is the file of a `SqliteSpanExporter`.
"""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator
from typing import Any

from google.adk.agents import LiveRequestQueue, LlmAgent, RunConfig
from google.adk.apps import App
from google.adk.models.base_llm_connection import BaseLlmConnection
from google.adk.models.llm_response import LlmResponse
from google.adk.runners import InMemoryRunner
from google.genai import types
from opentelemetry import _logs, trace
from opentelemetry.sdk._logs import LoggerProvider, LogRecordProcessor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.attacks.needles import SESSION, USER, found_in, needle
from tests.conformance.agents import OfflineLlm

spans = InMemorySpanExporter()  # `AutoTracingPlugin` traces the functions of this module, too
records: list[str] = []


class Records(LogRecordProcessor):
    def on_emit(self, log_record: Any) -> None:
        record = log_record.log_record
        records.append(f"{record.body} {record.attributes}")

    emit = on_emit  # in older releases of OpenTelemetry

    def shutdown(self) -> None:
        pass

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return True


class Connection(BaseLlmConnection):
    async def send_history(self, history: list[types.Content]) -> None:
        pass

    async def send_content(self, content: types.Content) -> None:
        pass

    async def send_realtime(self, blob: types.Blob) -> None:
        pass

    async def receive(self) -> Any:
        yield LlmResponse(turn_complete=True)

    async def close(self) -> None:
        pass


class LiveLlm(OfflineLlm):
    @contextlib.asynccontextmanager
    async def connect(self, llm_request: Any) -> AsyncIterator[BaseLlmConnection]:
        yield Connection()


def repeat(what: str) -> dict[str, str]:
    return {"result": needle("response")}


def fail(what: str) -> None:
    raise ValueError(needle("error message"))


def plugins() -> list[Any]:
    from google.adk.plugins.auto_tracing_plugin import AutoTracingPlugin

    return [AutoTracingPlugin()]


async def run(app: App, texts: list[str], run_config: RunConfig) -> None:
    async with InMemoryRunner(app=app) as runner:
        ids: dict[str, Any] = {"user_id": USER, "session_id": SESSION}
        await runner.session_service.create_session(app_name=runner.app_name, **ids)
        for text in texts:
            message = types.Content(role="user", parts=[types.Part(text=text)])
            with contextlib.suppress(ValueError):
                async for _ in runner.run_async(**ids, new_message=message, run_config=run_config):
                    pass


async def live(text: str) -> None:
    agent = LlmAgent(name="agent", model=LiveLlm())
    async with InMemoryRunner(agent=agent, app_name="app") as runner:
        ids: dict[str, Any] = {"user_id": USER, "session_id": SESSION}
        session = await runner.session_service.create_session(app_name="app", **ids)
        from google.adk.events.event import Event

        content = types.Content(role="user", parts=[types.Part(text=text)])
        await runner.session_service.append_event(session, Event(author="user", content=content))
        queue = LiveRequestQueue()
        queue.close()
        async for event in runner.run_live(**ids, live_request_queue=queue):
            if event.turn_complete:
                break


def exchange(text: str) -> None:
    """Report an exchange with an MCP server, as google-adk's HTTP client does."""
    from google.adk.telemetry import tracing

    report = getattr(tracing, "_trace_mcp_http_exchange", None)
    if report is not None:
        report(
            method="POST",
            url="http://127.0.0.1/mcp",
            server_address=None,
            server_port=None,
            status_code=200,
            mcp_session_id=None,
            mcp_protocol_version=None,
            request_headers={},
            request_body=text,
            response_headers={},
            response_body=text,
        )


def trial(settings: dict[str, str]) -> dict[str, list[str]]:
    spans.clear()
    records.clear()
    for name in [name for name in os.environ if name.startswith(("ADK_", "OTEL_"))]:
        if name != "OTEL_SDK_DISABLED":
            del os.environ[name]
    given = dict(settings)
    kind = given.pop("kind", "run")
    capture = given.pop("capture", None)
    os.environ.update(given)
    app, run_config = None, RunConfig()
    if capture is not None:
        from google.adk.telemetry.context import ContentCapturingMode, TelemetryConfig

        mode = ContentCapturingMode(capture)
        run_config = RunConfig(telemetry=TelemetryConfig(capture_message_content=mode))
    if kind == "live":
        asyncio.run(live(needle("text")))
    elif kind == "mcp":
        exchange(needle("text"))
    else:
        agent = LlmAgent(name="agent", model=LiveLlm(), tools=[repeat, fail])
        app = App(name="app", root_agent=agent, plugins=plugins() if kind == "auto" else [])
        texts = [f"call repeat {needle('argument')}", "call fail x", needle("text")]
        asyncio.run(run(app, texts, run_config))
    return {
        "spans": sorted(found_in("\n".join(one.to_json() for one in spans.get_finished_spans()))),
        "records": sorted(found_in("\n".join(records))),
    }


if __name__ == "__main__":
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    if len(sys.argv) > 1:
        from google.adk.telemetry.sqlite_span_exporter import SqliteSpanExporter

        provider.add_span_processor(SimpleSpanProcessor(SqliteSpanExporter(db_path=sys.argv[1])))
    trace.set_tracer_provider(provider)
    logs = LoggerProvider()
    logs.add_log_record_processor(Records())
    _logs.set_logger_provider(logs)
    json.dump([trial(one) for one in json.load(sys.stdin)], sys.stdout)
