"""Metrics and spans through OpenTelemetry's API, which google-adk requires; docs/telemetry.md.

Nothing is measured until the application has set a meter provider or a tracer provider.  No name,
attribute or span contains an id, a key or plaintext.

Recording one value takes 5 to 16 µs.  This is longer than encrypting one event, and one operation
may encrypt thousands of events.  Therefore a `MeasuredCall` object adds up the times and the sizes,
and the sums are recorded once, at the end of the call.
"""

import sys
import time
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextvars import ContextVar
from functools import cache, lru_cache, partial
from importlib.metadata import PackageNotFoundError, version
from time import perf_counter
from types import ModuleType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from adk_secure_sessions.concurrency import ThreadLock
from adk_secure_sessions.errors import DecryptionError
from adk_secure_sessions.hiding import coroutine_hiding_locals

if TYPE_CHECKING:
    from opentelemetry.metrics import Counter, Histogram
    from opentelemetry.metrics import _Gauge as Gauge  # the API has no other name for it
    from opentelemetry.trace import SpanKind, Tracer

P = ParamSpec("P")
T = TypeVar("T")

_NAME = "adk_secure_sessions"
# The values of the attribute `SIZE`, and their upper limits: the bytes of plaintext that one
# operation encrypts or decrypts.
_SIZES = (1024, 16 * 1024, 256 * 1024, 4096 * 1024)
_SIZE_CLASSES = ("1KiB", "16KiB", "256KiB", "4MiB", "larger")
# The upper limits of the buckets of a histogram, in seconds.  They reach from the duration of an
# append without a read to the default of `read_timeout`.
_SECONDS = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5,
    5.0, 10.0, 30.0, 60.0,
)  # fmt: skip
# The upper limits for the time of encryption and decryption, in seconds.  Encrypting one record
# takes some microseconds.
_CIPHER_SECONDS = (
    0.000005, 0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01,
    0.025, 0.05, 0.1, 0.25, 1.0,
)  # fmt: skip
# The upper limits for the number of transactions that one commit of SQLite stores.
_BATCHES = (1, 2, 4, 8, 16, 32, 64)

_MAX_MEASUREMENTS = 1000  # of a call, before they are added up
# An error may come from a backend or a key provider of the application, with any text as table.  So
# only these names of tables are recorded.
TABLES = frozenset({
    "secure_apps", "secure_audit", "secure_bases", "secure_data_keys", "secure_events",
    "secure_keyring", "secure_meta", "secure_migrated", "secure_sessions", "secure_state_index",
    "secure_users", "secure_witnesses", "inner events", "inner states",
})  # fmt: skip

OPERATION = "db.operation.name"
ERROR = "error.type"
BACKEND = f"{_NAME}.backend"
SIZE = f"{_NAME}.plaintext.size_class"
DIRECTION = f"{_NAME}.direction"
CACHE = f"{_NAME}.cache.name"
HIT = f"{_NAME}.cache.hit"
PROVIDER = f"{_NAME}.key_provider"
REASON = f"{_NAME}.reason"
TABLE = "db.collection.name"
CAUSE = f"{_NAME}.retry.cause"


class _Instruments:
    """The tracer and the instruments of this package."""

    def __init__(self) -> None:
        from opentelemetry import context, metrics, trace

        try:
            release = version("adk-secure-sessions")
        except PackageNotFoundError:
            release = ""
        meter = metrics.get_meter(_NAME, release)

        def counter(name: str, unit: str, text: str) -> "Counter":
            return meter.create_counter(f"{_NAME}.{name}", unit, text)

        def histogram(name: str, unit: str, text: str, limits: Sequence[float]) -> "Histogram":
            return meter.create_histogram(
                f"{_NAME}.{name}", unit, text, explicit_bucket_boundaries_advisory=limits
            )

        self.context: ModuleType = context
        self.trace: ModuleType = trace
        self.tracer: Tracer = trace.get_tracer(_NAME, release)
        self.internal: SpanKind = trace.SpanKind.INTERNAL
        self.client: SpanKind = trace.SpanKind.CLIENT
        self.operation_duration: Histogram = histogram(
            "operation.duration", "s", "Duration of one call of a service or command", _SECONDS
        )
        self.cipher_duration: Histogram = histogram(
            "cipher.duration", "s", "Time of one operation for its cipher", _CIPHER_SECONDS
        )
        self.plaintext_io: Counter = counter(
            "plaintext.io", "By", "Plaintext that was encrypted or decrypted"
        )
        self.cache_lookups: Counter = counter(
            "cache.lookups", "{lookup}", "Lookups in the caches of a service"
        )
        self.key_service_duration: Histogram = histogram(
            "key_service.duration", "s", "Duration of one request to a key service", _SECONDS
        )
        self.rejected: Counter = counter(
            "decryption.failures", "{error}", "Stored values that were rejected"
        )
        self.retries: Counter = counter("retries", "{retry}", "Repeated attempts at an operation")
        self.group_commits: Histogram = histogram(
            "group_commit.size", "{transaction}", "Transactions in one commit of SQLite", _BATCHES
        )
        self.progress: Gauge = meter.create_gauge(
            f"{_NAME}.command.progress", "1", "Part of a maintenance command that is done"
        )


# Created on first use: importing OpenTelemetry takes 15 ms, which would delay `--help`.
_instruments = cache(_Instruments)


def _is_on() -> bool:
    """Return whether the application has set a meter provider or a tracer provider.

    The answer may be a second old: asking OpenTelemetry takes as long as encrypting two events.
    """
    return _has_providers(int(time.monotonic()))


@lru_cache(maxsize=1)
def _has_providers(_second: int) -> bool:
    if "opentelemetry" not in sys.modules:
        return False
    from opentelemetry import metrics, trace

    # The providers that OpenTelemetry's API itself defines record nothing.
    api_modules = ("opentelemetry.metrics", "opentelemetry.trace")
    providers: list[object] = [metrics.get_meter_provider(), trace.get_tracer_provider()]
    return not all(type(provider).__module__.startswith(api_modules) for provider in providers)


_Attributes = dict[str, str | bool]


class WorkKind:
    """What a call has done: encrypt or decrypt with one backend, or look up in one cache."""

    def __init__(self, amount: _Attributes, durations: list[_Attributes] | None) -> None:
        # The SDK only reads attributes, so that all records can share them.
        self.amount_attributes = amount  # of bytes of plaintext, or lookups
        self.duration_attributes = durations  # by size class; not of lookups


@lru_cache(maxsize=256)  # two databases in one call have the same kinds
def cipher_kind(backend: str, direction: str) -> WorkKind:
    """Return the kind of an encryption or a decryption: *direction* is `encrypt` or `decrypt`."""
    attributes: _Attributes = {BACKEND: backend, DIRECTION: direction}
    return WorkKind(attributes, [{**attributes, SIZE: size_class} for size_class in _SIZE_CLASSES])


def _lookup_kinds(cache: str) -> dict[bool, WorkKind]:
    """Return the kinds of lookups in *cache*, by whether it had what was looked up."""
    return {hit: WorkKind({CACHE: cache, HIT: hit}, None) for hit in (False, True)}


DATA_KEY_CACHE = _lookup_kinds("data_keys")
SESSION_CACHE = _lookup_kinds("sessions")
EVENT_CACHE = _lookup_kinds("events")

# What was done; an amount; seconds.
Measurement = tuple[WorkKind, int, float]
_Sums = dict[WorkKind, tuple[int, float]]


class MeasuredCall:
    """The measured times, sizes and lookups of one call of a service or one maintenance command.

    Several threads may append a measurement for each encryption, decryption and lookup, which needs
    no lock.  They append directly: a method of this class for each one made an append of an event
    1 % slower.
    """

    __slots__ = ("_sums", "measurements", "name")

    def __init__(self, name: str) -> None:
        self.name: str = name
        self.measurements: list[Measurement] = []
        self._sums: _Sums = {}  # of measurements no longer in the list

    def compact(self) -> None:
        """Add the values up if there are many: a command may encrypt millions of records."""
        if len(self.measurements) > _MAX_MEASUREMENTS:
            with _sums_lock.lock:
                number = len(self.measurements)
                counted = self.measurements[:number]
                del self.measurements[:number]  # keeps what other threads have appended meanwhile
                self._add_up(counted)

    def record(self, otel: _Instruments) -> None:
        """Record the sums of all values in the instruments of *otel*."""
        self._add_up(self.measurements)
        for kind, (amount, seconds) in self._sums.items():
            if kind.duration_attributes is None:
                otel.cache_lookups.add(amount, kind.amount_attributes)
            else:
                otel.plaintext_io.add(amount, kind.amount_attributes)
                size_class = bisect_left(_SIZES, amount)
                otel.cipher_duration.record(seconds, kind.duration_attributes[size_class])

    def _add_up(self, measurements: Iterable[Measurement]) -> None:
        for kind, amount, seconds in measurements:
            before = self._sums.get(kind, (0, 0.0))
            self._sums[kind] = before[0] + amount, before[1] + seconds


_sums_lock = ThreadLock()


_current: ContextVar[MeasuredCall | None] = ContextVar(f"{_NAME}_operation", default=None)
# Returns the call that the current task runs; None if nothing is measured.
current_call: Callable[[], MeasuredCall | None] = _current.get


async def _record_span(
    otel: _Instruments,
    name: str,
    kind: "SpanKind",
    duration: "Histogram",
    attributes: dict[str, str],
    call: Callable[[], Awaitable[T]],
) -> T:
    """Await *call*, and record its duration and a span.

    The span is the parent of the spans that start meanwhile.
    """
    span = otel.tracer.start_span(name, kind=kind, attributes=attributes)
    token = None
    if span.is_recording():  # without a tracer provider, no span needs to find its parent
        token = otel.context.attach(otel.trace.set_span_in_context(span))
    began = perf_counter()
    try:
        return await call()
    except BaseException as error:
        # Do not call `record_exception`, which records the text of the error: an error from other
        # code may contain plaintext.
        attributes = {**attributes, ERROR: type(error).__qualname__}
        if token is not None:
            span.set_attribute(ERROR, attributes[ERROR])
            span.set_status(otel.trace.StatusCode.ERROR)
        raise
    finally:
        duration.record(perf_counter() - began, attributes)
        if token is not None:
            otel.context.detach(token)
        span.end()


def measured(method: Callable[P, Awaitable[T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Decorate a public method of a service, or the function of a command: measure each call.

    If one decorated function calls another, both are measured.  The encryption and decryption of
    the inner call count for the inner call only.  An error is raised without the local variables
    of *method*, as `hides_locals` says.
    """
    return coroutine_hiding_locals(method, partial(call_measured, method, method))


def call_measured(
    method: Callable[..., object],
    function: Callable[P, Awaitable[T]],
    *args: P.args,
    **kwargs: P.kwargs,
) -> Awaitable[T]:
    """Call *function*, and measure the call under the name of *method*."""
    if _is_on():
        return _measure_call(method, partial(function, *args, **kwargs))
    return function(*args, **kwargs)


async def _measure_call(method: Callable[..., object], call: Callable[[], Awaitable[T]]) -> T:
    otel = _instruments()
    measured_call, attributes = MeasuredCall(method.__name__), {OPERATION: method.__name__}
    before = _current.get()
    _current.set(measured_call)  # as `concurrency.context_value` does, which takes longer
    try:
        return await _record_span(
            otel, method.__qualname__, otel.internal, otel.operation_duration, attributes, call
        )
    finally:
        _current.set(before)
        measured_call.record(otel)


async def key_service_call(provider: str, operation: str, call: Callable[[], Awaitable[T]]) -> T:
    """Await *call*, one request (`wrap` or `unwrap`) to a key service, and measure it."""
    if not _is_on():
        return await call()
    otel = _instruments()
    attributes = {PROVIDER: provider, OPERATION: operation}
    name = f"{provider}.{operation}"
    return await _record_span(otel, name, otel.client, otel.key_service_duration, attributes, call)


def count_rejected(error: DecryptionError) -> None:
    if _is_on():
        table = error.table if error.table in TABLES else ""
        _instruments().rejected.add(1, {REASON: str(error.reason), TABLE: table})


def count_retry(cause: str) -> None:
    """Count an attempt that is about to be repeated; *cause* is the reason, such as `conflict`."""
    if _is_on():
        _instruments().retries.add(1, {CAUSE: cause})


def record_group_commit(transactions: int) -> None:
    """Record how many transactions one commit of SQLite stores."""
    if _is_on():
        _instruments().group_commits.record(transactions)


def set_progress(fraction: float) -> None:
    """Record which fraction of the running maintenance command is done, from 0 to 1."""
    if (measured_call := _current.get()) is not None:
        _instruments().progress.set(fraction, {OPERATION: measured_call.name})
