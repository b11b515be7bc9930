"""CPU time of telemetry: of the package's own part, and all of it.

A process can set its providers only once, so each case runs in a process of its own.  `measured` is
the service; `plain` is the service without the decorator `measured`, which switches telemetry on
for an operation; `bare` makes the decorator's calls of OpenTelemetry's API itself, with the same
attributes and constants as values.  All call the same service, on the same session: two databases
with the same content differ by up to 2 %, and by more for appends.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

from opentelemetry import context, metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import HistogramDataPoint, InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider

from adk_secure_sessions import AesGcmBackend, EncryptedSessionService
from adk_secure_sessions.hiding import hides_locals
from tests.benchmarks import plan
from tests.benchmarks.harness import WARM_UPS, Operation, Timings, interleave
from tests.benchmarks.workload import APP, event, state
from tests.processes import results as results_of

KEY = bytes(range(32))
OTEL_SCOPE = "adk_secure_sessions"
# SQLite records the size of each commit outside of operations, also for the other sides.
OF_ALL_SIDES = "adk_secure_sessions.group_commit.size"
# Without their decorator, which measures and also does what `hides_locals` does.  The latter is not
# telemetry and is therefore part of all sides.
_CREATE, _APPEND, _GET = (
    hides_locals(
        cast(
            "Callable[..., Awaitable[Any]]",
            vars(EncryptedSessionService)[name].__wrapped__,
        )
    )
    for name in ("create_session", "append_event", "get_session")
)
_WITHOUT = {"append_event": _APPEND, "get_session": _GET}


class SdkCall(NamedTuple):
    """A call that records one value."""

    record: Callable[[float, dict[str, Any]], None]
    attributes: dict[str, Any]


class BareCalls:
    """The calls of the API that the measured operation makes."""

    name: str
    attributes: dict[str, Any]
    duration: SdkCall
    calls: list[SdkCall]

    async def around(self, run: Operation) -> object:
        """Run *run* as one operation."""
        span = _TRACER.start_span(
            self.name, kind=trace.SpanKind.INTERNAL, attributes=self.attributes
        )
        token = None
        if span.is_recording():
            token = context.attach(trace.set_span_in_context(span))
        try:
            return await run()
        finally:
            self.duration.record(0.001, self.duration.attributes)
            if token is not None:
                context.detach(token)
            span.end()
            for call in self.calls:
                call.record(1, call.attributes)

    def __init__(self, operation: str, reader: InMemoryMetricReader) -> None:
        """Take the calls that *reader* found: those of one measured *operation*."""
        self.name = f"EncryptedSessionService.{operation}"
        self.calls = []
        data = reader.get_metrics_data()
        assert data is not None
        (scope,) = (
            one
            for resource in data.resource_metrics
            for one in resource.scope_metrics
            if one.scope.name == OTEL_SCOPE
        )
        meter = metrics.get_meter("bare")
        for metric in scope.metrics:
            for point in metric.data.data_points:
                attributes = dict(point.attributes or {})
                if isinstance(point, HistogramDataPoint):
                    histogram = meter.create_histogram(
                        metric.name,
                        unit=metric.unit or "",
                        explicit_bucket_boundaries_advisory=list(point.explicit_bounds),
                    )
                    call = SdkCall(histogram.record, attributes)
                else:
                    counter = meter.create_counter(metric.name, unit=metric.unit or "")
                    call = SdkCall(counter.add, attributes)
                if metric.name.endswith(".operation.duration"):
                    assert isinstance(point, HistogramDataPoint)
                    assert point.count == 1, "more than one operation was measured"
                    self.duration, self.attributes = call, attributes
                elif metric.name != OF_ALL_SIDES:
                    self.calls.append(call)


_TRACER = trace.get_tracer("bare")


def _run(
    say: Callable[[object], None],
    path: str,
    operation: str,
    providers: str,
    pairs: int,
    per_pair: int,
) -> None:
    """Say the timings of each side."""
    reader = InMemoryMetricReader()
    if providers != plan.TELEMETRY_OFF:
        metrics.set_meter_provider(MeterProvider(metric_readers=[reader]))
    if providers == plan.TELEMETRY_TRACES:
        trace.set_tracer_provider(TracerProvider())

    async def main() -> Timings:
        url = f"sqlite+aiosqlite:///{path}/sessions.db"
        async with EncryptedSessionService(url, AesGcmBackend(KEY)) as service:
            session = await _CREATE(service, app_name=APP, user_id="user", state=state(1000))
            for number in range(20):
                await _APPEND(service, session, event(number))
            arguments: dict[str, Any] = {"app_name": APP, "user_id": "user"}
            arguments["session_id"] = session.id
            if operation == "append_event":
                arguments = {"session": session, "event": event(0)}
            sides: dict[str, Operation] = {
                "measured": lambda: getattr(service, operation)(**arguments),
                "plain": lambda: _WITHOUT[operation](service, **arguments),
            }
            if providers != plan.TELEMETRY_OFF:
                await sides["measured"]()
                bare = BareCalls(operation, reader)
                sides["bare"] = lambda: bare.around(sides["plain"])
            return await interleave(
                sides,
                0,
                min_rounds=pairs,
                max_rounds=pairs,
                warm_ups=WARM_UPS,
                clock=time.process_time,
                repeat=per_pair,
            )

    say(asyncio.run(main()))


def measure(
    path: Path, operation: str, providers: str, pairs: int = plan.TELEMETRY_PAIRS
) -> Timings:
    """Return the CPU seconds of each side: of all threads, without waiting for the disk."""
    arguments = (str(path), operation, providers, pairs, plan.TELEMETRY_REPEATS)
    ((timings,),) = results_of((_run, *arguments))
    assert isinstance(timings, dict)
    return timings
