"""CPU time of telemetry: of the package's own part, and all of it.

A process can set its providers only once, so each case runs in a process of its own.  Sides:

- `measured`: the service.
- `bare`: the service without the decorator `measured`, which makes the same calls of
  OpenTelemetry's API with the same attributes, with constants as values.
- `plain`: the service without the decorator.

The decorator is what switches telemetry on for an operation.  Without it, the code that adds costs
up finds no operation, as if no provider were set.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

from google.adk.sessions import Session
from opentelemetry import context, metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import HistogramDataPoint, InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider

from adk_secure_sessions import AesGcmBackend, EncryptedSessionService
from tests.benchmarks import plan
from tests.benchmarks.harness import WARM_UPS, Operation, Timings, interleave
from tests.benchmarks.workload import APP, event, start_session
from tests.processes import results as results_of

KEY = bytes(range(32))
OTEL_SCOPE = "adk_secure_sessions"
# SQLite records the size of each commit outside of operations, also for the other sides.
OF_ALL_SIDES = "adk_secure_sessions.group_commit.size"
# Without `measured`, which is the outer one of their decorators.
_APPEND: Any = vars(EncryptedSessionService.append_event)["__wrapped__"]
_GET: Any = vars(EncryptedSessionService.get_session)["__wrapped__"]
_CREATE: Any = vars(EncryptedSessionService.create_session)["__wrapped__"]


class Plain(EncryptedSessionService):
    """The service without the decorator."""

    append_event = _APPEND
    get_session = _GET
    create_session = _CREATE


class SdkCall(NamedTuple):
    """A call that records one value."""

    record: Callable[[float, dict[str, Any]], None]
    attributes: dict[str, Any]


class Bare(Plain):
    """`Plain`, which makes the calls of the API that the measured operation makes."""

    name: str
    attributes: dict[str, Any]
    duration: SdkCall
    calls: list[SdkCall]

    async def append_event(self, *args: Any, **kwargs: Any) -> Any:
        return await self._with_calls(_APPEND, args, kwargs)

    async def get_session(self, *args: Any, **kwargs: Any) -> Any:
        return await self._with_calls(_GET, args, kwargs)

    async def _with_calls(
        self, method: Callable[..., Awaitable[Any]], args: Any, kwargs: Any
    ) -> Any:
        span = _TRACER.start_span(
            self.name, kind=trace.SpanKind.INTERNAL, attributes=self.attributes
        )
        token = None
        if span.is_recording():
            token = context.attach(trace.set_span_in_context(span))
        try:
            return await method(self, *args, **kwargs)
        finally:
            self.duration.record(0.001, self.duration.attributes)
            if token is not None:
                context.detach(token)
            span.end()
            for call in self.calls:
                call.record(1, call.attributes)

    def repeat(self, operation: str, reader: InMemoryMetricReader) -> None:
        """Make the calls which *reader* found: those of one measured operation."""
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


async def _operation(
    service: EncryptedSessionService, operation: str, session: Session
) -> Operation:
    if operation == "append_event":
        one = event(0)
        return lambda: service.append_event(session, one)
    for number in range(15):
        await Plain.append_event(service, session, event(number))
    return lambda: service.get_session(app_name=APP, user_id="user", session_id=session.id)


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
    sides: dict[str, type[EncryptedSessionService]] = {
        "measured": EncryptedSessionService,
        "plain": Plain,
    }
    if providers != plan.TELEMETRY_OFF:
        sides["bare"] = Bare

    async def main() -> Timings:
        operations: dict[str, Operation] = {}
        for side, kind in sides.items():
            url = f"sqlite+aiosqlite:///{path}/{side}.db"
            service = opened[side] = kind(url, AesGcmBackend(KEY))
            with_plain = Plain(url, AesGcmBackend(KEY))  # its operations are not measured
            ready = await start_session(with_plain, "user", 1000)
            await with_plain.close()
            if isinstance(service, Bare):
                service.repeat(operation, reader)
            session = await Plain.get_session(
                service, app_name=APP, user_id="user", session_id=ready.id
            )
            # The first append after a get reads nothing, like all later ones.
            operations[side] = await _operation(service, operation, session)
            if side == "measured":
                await operations[side]()
        try:
            return await interleave(
                operations,
                0,
                min_rounds=pairs,
                max_rounds=pairs,
                warm_ups=WARM_UPS,
                clock=time.process_time,
                repeat=per_pair,
            )
        finally:
            for service in opened.values():
                await service.close()

    opened: dict[str, EncryptedSessionService] = {}
    say(asyncio.run(main()))


def measure(
    path: Path, operation: str, providers: str, pairs: int = plan.TELEMETRY_PAIRS
) -> Timings:
    """Return the CPU seconds of each side: of all threads, without waiting for the disk."""
    arguments = (str(path), operation, providers, pairs, plan.TELEMETRY_REPEATS)
    ((timings,),) = results_of((_run, *arguments))
    assert isinstance(timings, dict)
    return timings
