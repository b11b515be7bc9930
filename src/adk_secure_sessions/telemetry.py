"""Metrics and spans through OpenTelemetry's API, which google-adk requires; docs/telemetry.md.

The application decides whether anything is measured: nothing is before it has set a meter provider
or a tracer provider.  No name, attribute or span contains an id, a key or plaintext.

To record a value takes 5 to 16 µs, longer than to encrypt an event, and an operation may encrypt
thousands.  Therefore an `Operation` adds its costs up, and they are recorded once, when it ends.
"""

import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import ContextVar, Token
from functools import cache, wraps
from importlib.metadata import PackageNotFoundError, version
from threading import Lock
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from adk_secure_sessions.errors import DecryptionError

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.metrics import Histogram

P = ParamSpec("P")
T = TypeVar("T")

_NAME = "adk_secure_sessions"
# Asking OpenTelemetry whether a provider was set takes 4 µs, as much as encrypting two events.  The
# application may set a provider at any time, so the question is repeated after this time.
_RECHECK = 1.0  # seconds
# Upper limits in bytes of the plaintext of one operation, with the value of the attribute.
_SIZES = ((1024, "1KiB"), (16 * 1024, "16KiB"), (256 * 1024, "256KiB"), (4096 * 1024, "4MiB"))
_LARGER = "larger"
# The upper limits of the buckets, in seconds: from a cached append to a slow database.
_SECONDS = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5,
    5.0, 10.0,
)  # fmt: skip
# Encrypting one record takes some microseconds.
_CIPHER_SECONDS = (
    0.000005, 0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01,
    0.025, 0.05, 0.1, 0.25, 1.0,
)  # fmt: skip
_BATCHES = (1, 2, 4, 8, 16, 32, 64)

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
        self.context = context
        self.trace = trace
        self.tracer = trace.get_tracer(_NAME, release)
        self.operation_duration = meter.create_histogram(
            f"{_NAME}.operation.duration",
            unit="s",
            description="Duration of one call of a service or of one command",
            explicit_bucket_boundaries_advisory=_SECONDS,
        )
        self.cipher_duration = meter.create_histogram(
            f"{_NAME}.cipher.duration",
            unit="s",
            description="Time that one operation spends on encryption or on decryption",
            explicit_bucket_boundaries_advisory=_CIPHER_SECONDS,
        )
        self.plaintext_io = meter.create_counter(
            f"{_NAME}.plaintext.io",
            unit="By",
            description="Plaintext that was encrypted or decrypted",
        )
        self.cache_lookups = meter.create_counter(
            f"{_NAME}.cache.lookups",
            unit="{lookup}",
            description="Lookups in the caches of a service",
        )
        self.key_service_duration = meter.create_histogram(
            f"{_NAME}.key_service.duration",
            unit="s",
            description="Duration of one request to a key service",
            explicit_bucket_boundaries_advisory=_SECONDS,
        )
        self.rejected = meter.create_counter(
            f"{_NAME}.decryption.failures",
            unit="{error}",
            description="Stored values that were rejected",
        )
        self.retries = meter.create_counter(
            f"{_NAME}.retries", unit="{retry}", description="Repeated attempts at an operation"
        )
        self.group_commits = meter.create_histogram(
            f"{_NAME}.group_commit.size",
            unit="{transaction}",
            description="Transactions that one commit of SQLite stores",
            explicit_bucket_boundaries_advisory=_BATCHES,
        )
        self.progress = meter.create_gauge(
            f"{_NAME}.command.progress",
            unit="1",
            description="Part of a maintenance command that is done",
        )


# Importing OpenTelemetry takes 15 ms, which `--help` can do without.
_instruments = cache(_Instruments)


class _Switch:
    """Whether the application has set a meter provider or a tracer provider."""

    def __init__(self) -> None:
        self._check_at = 0.0
        self._is_on = False

    def is_on(self) -> bool:
        now = time.monotonic()
        if now >= self._check_at:
            self._check_at = now + _RECHECK
            self._is_on = _has_providers()
        return self._is_on


def _has_providers() -> bool:
    if "opentelemetry" not in sys.modules:
        return False
    from opentelemetry import metrics, trace

    return _records(metrics.get_meter_provider()) or _records(trace.get_tracer_provider())


def _records(provider: object) -> bool:
    """Return whether *provider* records; those that the API itself defines do nothing."""
    module = type(provider).__module__
    return not module.startswith(("opentelemetry.metrics", "opentelemetry.trace"))


_is_on = _Switch().is_on


class Operation:
    """What one call of a service or one maintenance command does, added up until it ends.

    Threads of SQLite and the event loop may add at the same time.

    Attributes:
        name: The name of the method or the command.
        costs: Seconds and bytes of plaintext, by the backend's name and `encrypt` or `decrypt`.
        lookups: The number of lookups, by the name of the cache and whether it had the value.
    """

    __slots__ = ("_lock", "costs", "lookups", "name")

    def __init__(self, name: str) -> None:
        self.name: str = name
        self.costs: dict[tuple[str, str], tuple[float, int]] = {}
        self.lookups: Counter[tuple[str, bool]] = Counter()
        self._lock = Lock()

    def add_cost(self, backend: str, direction: str, size: int, began: float) -> None:
        """Add the encryption or decryption of *size* bytes, which *began* at this perf_counter."""
        seconds = time.perf_counter() - began
        with self._lock:
            before = self.costs.get((backend, direction), (0.0, 0))
            self.costs[backend, direction] = before[0] + seconds, before[1] + size

    def add_lookup(self, cache: str, *, hit: bool) -> None:
        """Add a lookup in a cache."""
        with self._lock:
            self.lookups[cache, hit] += 1


_current: ContextVar[Operation | None] = ContextVar(f"{_NAME}_operation", default=None)
# The operation that the current task runs; None if nothing is measured.
current_operation: Callable[[], Operation | None] = _current.get


class _Span:
    """A context manager: a span, which is the current one in its block, and a duration.

    *attributes* are those of the span and of the duration.
    """

    __slots__ = ("_attributes", "_began", "_duration", "_is_client", "_name", "_span", "_token")

    def __init__(
        self,
        name: str,
        duration: "Histogram",
        attributes: dict[str, str],
        *,
        is_client: bool = False,
    ) -> None:
        self._name = name
        self._duration = duration
        self._attributes = attributes
        self._is_client = is_client

    def __enter__(self) -> None:
        otel = _instruments()
        kinds = otel.trace.SpanKind
        kind = kinds.CLIENT if self._is_client else kinds.INTERNAL
        self._span = otel.tracer.start_span(self._name, kind=kind, attributes=self._attributes)
        # Without a tracer provider, no span needs to find its parent.
        self._token: Token[Context] | None = None
        if self._span.is_recording():
            self._token = otel.context.attach(otel.trace.set_span_in_context(self._span))
        self._began = time.perf_counter()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        seconds = time.perf_counter() - self._began
        attributes = self._attributes
        if error is not None:
            attributes = {**attributes, ERROR: type(error).__qualname__}
        self._duration.record(seconds, attributes)
        if self._token is not None:
            _instruments().context.detach(self._token)
            if error is not None:
                # Do not call `record_exception`, which records the text of the error: an error
                # from other code may contain plaintext.
                self._span.set_attribute(ERROR, type(error).__qualname__)
                self._span.set_status(_instruments().trace.StatusCode.ERROR)
        self._span.end()


class _OperationSpan(_Span):
    """The span and the duration of an operation; at its end, records what the operation did."""

    __slots__ = ("_operation", "_outer")

    def __enter__(self) -> None:
        self._operation = Operation(self._attributes[OPERATION])
        self._outer = _current.get()
        _current.set(self._operation)
        super().__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, traceback)
        _current.set(self._outer)  # `reset` raises an error if another context ends the call
        otel = _instruments()
        for (backend, direction), (seconds, size) in self._operation.costs.items():
            attributes = {BACKEND: backend, DIRECTION: direction}
            otel.plaintext_io.add(size, attributes)
            otel.cipher_duration.record(seconds, {**attributes, SIZE: _size_class(size)})
        for (name, hit), number in self._operation.lookups.items():
            otel.cache_lookups.add(number, {CACHE: name, HIT: hit})


def _size_class(size: int) -> str:
    return next((name for limit, name in _SIZES if size <= limit), _LARGER)


def measured(method: Callable[P, Awaitable[T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Decorate a public method of a service, or the function of a command: measure each call.

    If one calls another, both are measured, and encryption counts for the inner one.
    """
    name, attributes = method.__qualname__, {OPERATION: method.__name__}

    @wraps(method)
    async def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if not _is_on():
            return await method(*args, **kwargs)
        with _OperationSpan(name, _instruments().operation_duration, attributes):
            return await method(*args, **kwargs)

    return call


async def key_service_call(provider: str, operation: str, call: Callable[[], Awaitable[T]]) -> T:
    """Await *call*, one request to a key service, and measure it.

    Args:
        provider: The name of the provider's class.
        operation: `wrap` or `unwrap`.
        call: Sends the request.
    """
    if not _is_on():
        return await call()
    attributes = {PROVIDER: provider, OPERATION: operation}
    name = f"{provider}.{operation}"
    with _Span(name, _instruments().key_service_duration, attributes, is_client=True):
        return await call()


def count_rejected(error: DecryptionError) -> None:
    """Count a stored value that was rejected."""
    if _is_on():
        _instruments().rejected.add(1, {REASON: str(error.reason), TABLE: error.table or ""})


def count_retry(cause: str) -> None:
    """Count an attempt that is about to be repeated."""
    if _is_on():
        _instruments().retries.add(1, {CAUSE: cause})


def record_group_commit(transactions: int) -> None:
    """Record how many transactions one commit of SQLite stores."""
    if _is_on():
        _instruments().group_commits.record(transactions)


def set_progress(part: float) -> None:
    """Record which part of the current operation, a maintenance command, is done: 0 to 1."""
    if (operation := _current.get()) is not None:
        _instruments().progress.set(part, {OPERATION: operation.name})
