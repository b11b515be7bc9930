"""Metrics and spans, read with OpenTelemetry's in-memory reader and exporter.

A process can set its providers only once, and all later tests would be measured, too.  Therefore,
each test runs a job in a process of its own, and the job says what was measured.
"""

import asyncio
import json
import os
import re
import signal
from collections.abc import Callable
from contextvars import copy_context
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from google.adk.errors.already_exists_error import AlreadyExistsError
from google.adk.events import Event, EventActions
from google.adk.sessions import DatabaseSessionService
from google.genai import types
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from adk_secure_sessions import (
    AesGcmBackend,
    DecryptionError,
    EncryptedArtifactService,
    EncryptedMemoryService,
    EncryptedSessionService,
    KeyServiceError,
    Reason,
    TamperedError,
    generate_key,
    telemetry,
)
from adk_secure_sessions.integrations import wrapper
from adk_secure_sessions.integrations.blob_maintenance import check_blobs, purge_blobs
from adk_secure_sessions.integrations.blob_rotation import rotate_data_and_blobs
from adk_secure_sessions.keys.remote import RemoteKey
from adk_secure_sessions.maintenance import Database, rotate_data, verify
from adk_secure_sessions.migration import (
    AdkTables,
    AdkTarget,
    compare,
    erase_source,
    export_lines,
    export_to_adk,
    migrate,
)
from adk_secure_sessions.storage import schema
from tests.processes import results
from tests.sqlite_files import execute

PAGE = Path(__file__).parent.parent / "docs" / "telemetry.md"
NEEDLE = "penicillin"
USER, SESSION = "ada-lovelace", "session-of-ada"
IDS: Any = {"app_name": "clinic", "user_id": USER, "session_id": SESSION}
DURATION = "adk_secure_sessions.operation.duration"
CIPHER = "adk_secure_sessions.cipher.duration"
PROGRESS = "adk_secure_sessions.command.progress"
OPERATION = "db.operation.name"

Say = Callable[[object], None]
Attributes = dict[str, Any]


class Point(NamedTuple):
    """What one metric has counted for one set of attributes."""

    metric: str
    unit: str
    attributes: Attributes
    records: int  # of the records of a histogram; 1 for others
    total: float


class Measurements:
    """Sets the providers of this process, and returns what was measured."""

    def __init__(self) -> None:
        self.reader = InMemoryMetricReader()
        self.exporter = InMemorySpanExporter()
        metrics.set_meter_provider(MeterProvider(metric_readers=[self.reader]))
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        trace.set_tracer_provider(provider)

    def points(self) -> list[Point]:
        found = []
        data = self.reader.get_metrics_data()
        for of_resource in data.resource_metrics if data else ():
            for of_scope in of_resource.scope_metrics:
                assert of_scope.scope.name == "adk_secure_sessions"
                for metric in of_scope.metrics:
                    for point in metric.data.data_points:
                        count = getattr(point, "count", 1)
                        total = getattr(point, "sum", None)
                        value = getattr(point, "value", None) if total is None else total
                        assert value is not None
                        attributes = dict(point.attributes or {})
                        found.append(
                            Point(metric.name, metric.unit or "", attributes, count, value)
                        )
        return found

    def spans(self) -> list[tuple[str, Attributes, str, int]]:
        """Return each span's name, attributes, status and number of events."""
        return [
            (span.name, dict(span.attributes or {}), span.status.status_code.name, len(span.events))
            for span in self.exporter.get_finished_spans()
        ]


def measure(job: Callable[..., object], *arguments: object) -> Any:
    """Run *job* in a process of its own, and return the last object that it said."""
    return results((job, *arguments))[0][-1]


def service_of(path: str) -> EncryptedSessionService:
    return EncryptedSessionService(f"sqlite+aiosqlite:///{path}", AesGcmBackend(generate_key()))


def event(text: str = NEEDLE) -> Event:
    content = types.Content(role="user", parts=[types.Part(text=text)])
    return Event(author="user", content=content, actions=EventActions(state_delta={"k": text}))


async def converse(service: EncryptedSessionService, events: int = 3) -> None:
    session = await service.create_session(**IDS, state={"user:a": NEEDLE})
    for _ in range(events):
        await service.append_event(session, event())
    await service.get_session(**IDS)
    await service.list_sessions(app_name="clinic", user_id=USER)


async def save(artifacts: EncryptedArtifactService, filename: str) -> None:
    await artifacts.save_artifact(**IDS, filename=filename, artifact=types.Part(text=NEEDLE))


# --- Operations ---


def _operations(say: Say, path: str) -> None:
    measured = Measurements()

    async def main() -> None:
        async with service_of(path) as service:
            await converse(service)
            old = await service.get_session(**IDS)
            new = await service.get_session(**IDS)
            assert old
            assert new
            await service.append_event(new, event())
            with pytest.raises(Exception, match="modified"):
                await service.append_event(old, event())
            with pytest.raises(AlreadyExistsError):
                await service.create_session(**IDS)

    asyncio.run(main())
    say((measured.points(), measured.spans()))


@pytest.fixture(scope="module")
def operations(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return measure(_operations, str(tmp_path_factory.mktemp("db") / "s.db"))


def test_each_operation_has_a_duration_by_operation_and_outcome(operations: Any) -> None:
    points, _ = operations
    counted = {
        (point.attributes[OPERATION], point.attributes.get("error.type")): point.records
        for point in points
        if point.metric == DURATION
    }
    assert counted == {
        ("create_session", None): 1,
        ("create_session", "AlreadyExistsError"): 1,
        ("append_event", None): 4,
        ("append_event", "StaleSessionError"): 1,
        ("get_session", None): 3,
        ("list_sessions", None): 1,
    }
    assert all(0 < point.total < 100 for point in points if point.metric == DURATION)


def test_each_operation_has_a_span_without_ids_and_content(operations: Any) -> None:
    _, spans = operations
    assert [name for name, *_ in spans if name.endswith("create_session")] == [
        "EncryptedSessionService.create_session"
    ] * 2
    assert len(spans) == 11
    failed = [(name, attributes, events) for name, attributes, status, events in spans
              if status == "ERROR"]  # fmt: skip
    assert failed == [
        (
            "EncryptedSessionService.append_event",
            {OPERATION: "append_event", "error.type": "StaleSessionError"},
            0,
        ),
        (
            "EncryptedSessionService.create_session",
            {OPERATION: "create_session", "error.type": "AlreadyExistsError"},
            0,
        ),
    ]


def test_no_metric_and_no_span_contains_an_id_or_content(operations: Any) -> None:
    said = repr(operations)
    assert "append_event" in said
    for secret in (NEEDLE, USER, SESSION, "clinic", "s.db"):
        assert secret not in said


def test_plaintext_and_time_of_encryption_are_counted_by_backend(operations: Any) -> None:
    points, _ = operations
    cipher = [point for point in points if point.metric == CIPHER]
    assert {point.attributes["adk_secure_sessions.backend"] for point in cipher} == {"aesgcm"}
    written = sum(
        point.records for point in cipher
        if point.attributes["adk_secure_sessions.direction"] == "encrypt"
    )  # fmt: skip
    # Each operation that encrypts records its time once: two creations and four appends.
    assert written == 6
    io = [point for point in points if point.metric == "adk_secure_sessions.plaintext.io"]
    by_direction = {point.attributes["adk_secure_sessions.direction"]: point.total for point in io}
    assert by_direction["encrypt"] > 4 * len(NEEDLE)


def test_lookups_in_the_caches_are_counted(operations: Any) -> None:
    points, _ = operations
    lookups = {
        (point.attributes["adk_secure_sessions.cache.name"],
         point.attributes["adk_secure_sessions.cache.hit"]): point.total
        for point in points
        if point.metric == "adk_secure_sessions.cache.lookups"
    }  # fmt: skip
    # Only the first operation does not have the data keys, and only the stale append reads first.
    assert lookups["data_keys", False] == 1
    assert lookups["sessions", True] == 4
    assert lookups["sessions", False] == 1


# --- What the metrics page says ---


def _everything(say: Say, path: str) -> None:
    """Make each metric count something."""
    measured = Measurements()

    class Flaky(RemoteKey):
        pause = 0.001
        _kind = b"\x7f"
        calls = 0

        async def _encrypt(self, plaintext: bytes, associated_data: bytes) -> bytes:
            Flaky.calls += 1
            if Flaky.calls == 1:
                raise KeyServiceError("try again", retryable=True)
            return bytes(byte ^ 1 for byte in plaintext)

        async def _decrypt(self, sealed: bytes, associated_data: bytes) -> bytes:
            return bytes(byte ^ 1 for byte in sealed)

    async def main() -> None:
        backend = AesGcmBackend(Flaky("flaky", timeout=5, attempts=3))
        url = f"sqlite+aiosqlite:///{path}"
        async with EncryptedSessionService(url, backend) as service:
            await converse(service)
            created = [
                await service.create_session(app_name="clinic", user_id=USER) for _ in range(20)
            ]
            await asyncio.gather(*(service.append_event(one, event()) for one in created))
            async with Database(url, backend) as db:
                await rotate_data(db)
            # The service has cached the old data keys.
            await service.get_user_state(app_name="clinic", user_id=USER)
            artifacts = EncryptedArtifactService(service, Path(path).parent)
            await save(artifacts, "scan")
            memory = EncryptedMemoryService(service)
            session = await service.get_session(**IDS)
            assert session
            await memory.add_session_to_memory(session)
            await memory.search_memory(app_name="clinic", user_id=USER, query=NEEDLE)
        async with Database(url, backend) as db:
            assert (await verify(db)).bad == 0
        execute(Path(path), "UPDATE secure_events SET event = zeroblob(100) WHERE seq = 1")
        async with EncryptedSessionService(url, backend) as service:
            with pytest.raises(DecryptionError):
                await service.get_session(**IDS)

    asyncio.run(main())
    say((measured.points(), measured.spans()))


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return measure(_everything, str(tmp_path_factory.mktemp("db") / "s.db"))


def test_page_lists_each_metric_with_its_unit_and_attributes(everything: Any) -> None:
    points = everything[0]
    seen: dict[str, tuple[str, set[str]]] = {}
    for point in points:
        seen.setdefault(point.metric, (point.unit, set()))[1].update(point.attributes)
    listed = {}
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `adk_secure_sessions.") and len(cells) == 4:
            name, unit = cells[0].strip("`"), cells[1].strip("`")
            listed[name] = (unit, set(re.findall(r"`([^`]+)`", cells[2])))
    assert seen.keys() == listed.keys()
    for name, (unit, attributes) in seen.items():
        assert listed[name][0] == unit, name
        assert attributes <= listed[name][1], name


def test_rejected_records_are_counted_by_reason_and_table(everything: Any) -> None:
    points, _ = everything
    failures = [p for p in points if p.metric == "adk_secure_sessions.decryption.failures"]
    assert [(one.attributes, one.total) for one in failures] == [
        ({"adk_secure_sessions.reason": "plaintext", "db.collection.name": "secure_events"}, 1)
    ]


def test_calls_of_the_key_service_and_their_failures_are_counted(everything: Any) -> None:
    points, spans = everything
    calls = {
        (point.attributes[OPERATION], point.attributes.get("error.type")): point.records
        for point in points
        if point.metric == "adk_secure_sessions.key_service.duration"
    }
    assert calls["wrap", "KeyServiceError"] == 1
    assert calls["wrap", None] >= 1
    assert calls["unwrap", None] >= 1
    assert ("Flaky.unwrap", "UNSET") in {(name, status) for name, _, status, _ in spans}


def test_commits_of_several_transactions_are_counted(everything: Any) -> None:
    points, _ = everything
    (batches,) = (p for p in points if p.metric == "adk_secure_sessions.group_commit.size")
    assert batches.total > batches.records  # of the 20 appends at once, some shared a commit


def test_progress_of_a_command_ends_at_1(everything: Any) -> None:
    points, _ = everything
    progress = {
        point.attributes[OPERATION]: point.total for point in points if point.metric == PROGRESS
    }
    assert progress == {"rotate_data": 1.0, "verify": 1.0}


def test_retry_after_another_process_made_a_newer_key_is_counted(everything: Any) -> None:
    points, _ = everything
    retries = {
        point.attributes["adk_secure_sessions.retry.cause"]: point.total
        for point in points
        if point.metric == "adk_secure_sessions.retries"
    }
    assert retries == {"unknown_key": 1}


def test_services_for_artifacts_and_memory_and_commands_are_measured(everything: Any) -> None:
    points, spans = everything
    names = {point.attributes[OPERATION] for point in points if point.metric == DURATION}
    assert {"save_artifact", "add_session_to_memory", "search_memory", "verify"} <= names
    assert NEEDLE not in json.dumps([points, spans])


# --- Progress ---


def _commands(say: Say, directory: str) -> None:
    """Run the commands that read other databases or the contents of artifacts."""
    measured = Measurements()
    backend = AesGcmBackend(generate_key())
    url, blobs = f"sqlite:///{directory}/s.db", Path(directory) / "blobs"
    seen: dict[str, set[float]] = {}

    def progress(done: int, total: int) -> None:
        for point in measured.points():
            if point.metric == PROGRESS:
                seen.setdefault(point.attributes[OPERATION], set()).add(point.total)

    async def main() -> None:
        source = f"sqlite+aiosqlite:///{directory}/adk.db"
        async with DatabaseSessionService(source) as adk:
            for user in "abc":
                session = await adk.create_session(app_name="clinic", user_id=user)
                await adk.append_event(session, event())
        async with Database(url, backend) as db:
            tables = AdkTables(source)
            await migrate(tables, db, progress=progress)
            assert (await compare(tables, db, progress=progress)).all_equal
            await export_lines(db, lambda line: None, progress=progress)
            await export_to_adk(db, AdkTarget(f"sqlite:///{directory}/out.db"), progress=progress)
            await erase_source(tables, db, progress=progress)
        async with EncryptedSessionService(url, backend) as service:
            artifacts = EncryptedArtifactService(service, blobs)
            for number in range(3):
                await save(artifacts, f"scan {number}")
        async with Database(url, backend) as db:
            rotated = await rotate_data_and_blobs(db, blobs, progress=progress)
            assert rotated.blobs == 3
            await check_blobs(db, blobs)
            await purge_blobs(db, blobs)

    asyncio.run(main())
    progress(0, 0)
    say((measured.points(), {name: sorted(values) for name, values in seen.items()}))


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return measure(_commands, str(tmp_path_factory.mktemp("db")))


def test_migration_export_and_rotation_of_blobs_report_their_progress(commands: Any) -> None:
    _, progress = commands
    assert progress.keys() == {
        "migrate",
        "compare",
        "export_lines",
        "export_to_adk",
        "erase_source",
        "rotate_data_and_blobs",
    }
    assert {values[-1] for values in progress.values()} == {1.0}
    # An export counts its sessions in batches, and the three are one batch.
    for name in ("migrate", "compare", "erase_source", "rotate_data_and_blobs"):
        assert 0 < progress[name][0] < 1, name


def test_commands_that_read_the_contents_of_artifacts_are_measured(commands: Any) -> None:
    points, _ = commands
    names = {point.attributes[OPERATION] for point in points if point.metric == DURATION}
    assert {"rotate_data_and_blobs", "check_blobs", "purge_blobs"} <= names


def _fork_while_values_are_added_up(say: Say) -> None:
    """Add values up in a child that was forked while another thread did so."""
    with telemetry._sums_lock.lock:
        child = os.fork()
        if not child:  # in the block: at its end, the child would release the lock itself
            operation = telemetry.MeasuredCall("append")
            operation.measurements += [(telemetry.cipher_kind("a", "encrypt"), 1, 0.0)] * 10**5
            signal.alarm(10)  # ends a child that waits for ever
            operation.compact()
            os._exit(0)
    say(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_forked_process_waits_for_no_thread_of_its_parent() -> None:
    assert results((_fork_while_values_are_added_up,)) == [[0]]


# --- Names of tables ---


def _foreign_table(say: Say) -> None:
    measured = Measurements()
    telemetry.count_rejected(TamperedError("x", reason=Reason.MISMATCH, table=NEEDLE, row=1))
    say(measured.points())


def test_table_that_another_package_names_is_not_recorded() -> None:
    (rejected,) = measure(_foreign_table)
    assert rejected.attributes[telemetry.TABLE] == ""


def test_every_table_can_be_named() -> None:
    tables = {*schema.metadata.tables, *schema.feature_metadata.tables}
    assert telemetry.TABLES == {*tables, wrapper.EVENTS, wrapper.STATES}


# --- Costs ---


def _long_history(say: Say, path: str) -> None:
    async def main() -> None:
        async with service_of(path) as service:
            session = await service.create_session(**IDS)
            for _ in range(200):
                await service.append_event(session, event())
            measured = Measurements()  # set late: an earlier operation found no provider
            await asyncio.sleep(1.1)
            await service.get_session(**IDS)
            say(measured.points())

    asyncio.run(main())


def test_events_of_one_read_are_one_record_and_a_provider_may_be_set_late(tmp_path: Path) -> None:
    points = measure(_long_history, str(tmp_path / "s.db"))
    cipher = [point for point in points if point.metric == CIPHER]
    assert [point.records for point in cipher] == [1]
    assert cipher[0].attributes["adk_secure_sessions.plaintext.size_class"] == "256KiB"


def test_operation_may_end_in_another_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "_is_on", lambda: True)
    entered = []

    @telemetry.measured
    async def endless() -> None:
        entered.append(telemetry.current_call())
        await asyncio.sleep(0)

    call = endless()
    copy_context().run(call.send, None)
    call.close()  # as the collector of garbage does
    assert entered != [None]
    assert telemetry.current_call() is None
