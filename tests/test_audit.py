"""The audit log: its records, and what they never contain."""

import asyncio
import errno
import io
import json
import logging
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator
from contextvars import copy_context
from pathlib import Path
from typing import Any

import pytest
from google.adk.events import Event
from google.adk.sessions import DatabaseSessionService, InMemorySessionService
from google.genai import types

from adk_secure_sessions import (
    AesGcmBackend,
    Audit,
    ConfigurationError,
    DecryptionError,
    EncryptedSessionService,
    NoOpBackend,
    PlaintextRefusedError,
    WrongKeyError,
    audit,
    audit_actor,
    generate_key,
)
from adk_secure_sessions.integrations.blob_maintenance import check_blobs, purge_blobs
from adk_secure_sessions.integrations.blob_rotation import rotate_data_and_blobs
from adk_secure_sessions.integrations.wrapper import EncryptedSessionWrapper
from adk_secure_sessions.maintenance import (
    Database,
    erase_user,
    init,
    lookup,
    retire,
    rotate_data,
    rotate_master,
    rotate_root,
    separate,
    verify,
)
from adk_secure_sessions.migration import AdkTables, PlaintextFallbackService, export_lines
from tests.cli.support import run
from tests.faults import Point, lost, with_faults
from tests.sqlite_files import execute

NEEDLE = "penicillin"
IDS: Any = {"app_name": "clinic", "user_id": "ada-lovelace", "session_id": "session-of-ada"}
KEY = generate_key()


class Log:
    """The records of the audit log, as a handler received them."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog

    @property
    def text(self) -> str:
        return self._caplog.text

    def records(self, *events: str) -> list[dict[str, Any]]:
        found = []
        for record in self._caplog.records:
            if record.name == "adk_secure_sessions.audit":
                entry = json.loads(record.getMessage())
                assert entry == record.__dict__["audit"]
                found.append(entry)
        return [entry for entry in found if not events or entry["event"] in events]


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Log:
    caplog.set_level(logging.INFO, "adk_secure_sessions.audit")
    return Log(caplog)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite+aiosqlite:///{tmp_path}/s.db"


def service_of(url: str, **options: Any) -> EncryptedSessionService:
    return EncryptedSessionService(url, AesGcmBackend(KEY), **options)


@pytest.fixture
async def service(url: str) -> AsyncIterator[EncryptedSessionService]:
    async with service_of(url, audit=Audit("readable")) as service:
        yield service


def event() -> Event:
    return Event(author="user", content=types.Content(role="user", parts=[types.Part(text=NEEDLE)]))


async def test_new_database_and_its_keys_are_recorded(log: Log, url: str) -> None:
    async with service_of(url) as service:
        await service.create_session(**IDS)
        await service.create_session(app_name="clinic", user_id="ada-lovelace")
    (opened,) = log.records("database.opened")
    assert opened["outcome"] == "success"
    created = log.records("key.created")
    assert {entry["database"] for entry in created} == {opened["database"]}
    assert [entry["kind"] for entry in created] == [
        "index master",
        "data master",
        "data key",  # of the app
        "data key",  # of the user
    ]


async def test_keys_that_another_process_stored_first_are_recorded_once(log: Log, url: str) -> None:
    async def open_first() -> None:
        async with service_of(url) as other:
            await other.list_sessions(app_name="clinic")

    service, faults = with_faults(lambda: service_of(url))
    faults.data.before(Point.RUN, open_first, nth=2)  # the first has surveyed the new database
    async with service:
        await service.list_sessions(app_name="clinic")
    created, opened = log.records("key.created"), log.records("database.opened")
    assert [entry["kind"] for entry in created] == ["index master", "data master"]
    assert len({entry["database"] for entry in created + opened}) == 1


@pytest.mark.parametrize("keys", ["s.db", "keys.db"])
async def test_data_keys_that_a_cancelled_call_stored_are_recorded(
    log: Log, url: str, tmp_path: Path, keys: str
) -> None:
    options = {"key_db_url": f"sqlite:///{tmp_path}/keys.db"} if keys == "keys.db" else {}
    service, faults = with_faults(lambda: service_of(url, **options))
    async with service:
        await service.list_sessions(app_name="clinic")
        task = asyncio.ensure_future(service.create_session(**IDS))
        loop = asyncio.get_running_loop()
        executor = faults.keys if options else faults.data
        executor.after(Point.APPLY, lambda: loop.call_soon_threadsafe(task.cancel))
        with pytest.raises(asyncio.CancelledError):
            await task
    rows = execute(tmp_path / keys, "SELECT id FROM secure_data_keys")
    stored = {("data key", key) for (key,) in rows}
    kinds = log.records("key.created")[2:]
    assert {(one["kind"], one["key"]) for one in kinds} == stored
    assert len(kinds) == len(stored) > 0


@pytest.mark.parametrize("stored", [True, False])
async def test_data_keys_of_a_write_that_was_repeated_are_recorded_once(
    log: Log, url: str, stored: bool
) -> None:
    service, faults = with_faults(lambda: service_of(url))
    async with service:
        if stored:
            faults.data.after(Point.WRITE, lost())
        else:
            faults.data.before(Point.APPLY, lost())
        await service.create_session(**IDS)
    kinds = [entry["kind"] for entry in log.records("key.created")]
    assert kinds[2:] == ["data key", "data key"]


async def test_new_session_is_recorded_with_the_id_that_it_got(
    log: Log, service: EncryptedSessionService
) -> None:
    session = await service.create_session(app_name="clinic", user_id="ada-lovelace")
    (created,) = log.records("session.create")
    assert created["session"] == session.id


async def test_blind_ids_are_those_of_lookup(log: Log, url: str) -> None:
    async with service_of(url, audit=Audit("blind")) as service:
        await service.create_session(**IDS)
    (created,) = log.records("session.create")
    async with Database(url, AesGcmBackend(KEY)) as db:
        tags = {one.kind: one.tag for one in await lookup(db, *IDS.values())}
    assert (created["user"], created["session"]) == (tags["user"], tags["session"])
    assert IDS["user_id"] not in log.text
    assert IDS["session_id"] not in log.text


async def test_long_id_is_recorded_up_to_the_length_of_the_longest_that_is_accepted(
    log: Log, service: EncryptedSessionService
) -> None:
    with pytest.raises(ValueError, match="app_name has more than 1024 bytes"):
        await service.create_session(app_name="x" * 10**6, user_id="u")
    (created,) = log.records("session.create")
    assert created["app"] == "x" * 1024


async def test_accesses_are_recorded_only_on_request(log: Log, url: str) -> None:
    async with service_of(url) as service:
        await service.create_session(**IDS)
        await service.get_session(**IDS)
    assert {entry["event"] for entry in log.records()} == {"database.opened", "key.created"}


async def test_accesses_that_are_not_recorded_are_a_warning(
    caplog: pytest.LogCaptureFixture, url: str
) -> None:
    audit.warn_once.cache_clear()
    async with service_of(url, audit=Audit("blind")) as service:
        await service.create_session(**IDS)
        await service.get_session(**IDS)
    (warning,) = caplog.records
    assert (warning.levelname, "no access is recorded" in warning.message) == ("WARNING", True)


async def test_handler_that_raises_stops_the_call(
    log: Log, service: EncryptedSessionService
) -> None:
    class Full(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise OSError("no space left")

    handler = Full()
    audit.logger.addHandler(handler)
    try:
        with pytest.raises(OSError, match="no space left"):
            await service.create_session(**IDS)
    finally:
        audit.logger.removeHandler(handler)
    assert log.records("session.create") == []


async def test_append_to_a_session_with_an_empty_id_is_recorded_without_the_id_of_the_event(
    log: Log, service: EncryptedSessionService
) -> None:
    session = await service.create_session(**(IDS | {"session_id": ""}))
    await service.append_event(session, event())
    (written,) = log.records("session.write")
    assert "session" not in written


def test_other_value_for_the_ids_is_rejected() -> None:
    with pytest.raises(ConfigurationError, match='ids of Audit must be "blind" or "readable"'):
        Audit("plain")  # type: ignore[arg-type]


# --- What was rejected ---


async def tampered(url: str, directory: Path, *statements: str) -> None:
    """Store a session with an event, and then change it with *statements*."""
    async with service_of(url) as service:
        session = await service.create_session(**IDS)
        await service.append_event(session, event())
    for statement in statements:
        execute(directory / "s.db", statement)


async def test_rejected_record_is_recorded_with_its_row_and_reason(
    log: Log, url: str, tmp_path: Path
) -> None:
    await tampered(url, tmp_path, "UPDATE secure_events SET event = substr(event, 1, 40)")
    async with service_of(url) as service:
        with pytest.raises(DecryptionError) as caught:
            await service.get_session(**IDS)
    (rejected,) = log.records("record.rejected")
    assert (rejected["table"], rejected["row"]) == (caught.value.table, caught.value.row)
    assert rejected["reason"] == "authentication"
    async with Database(url, AesGcmBackend(KEY)) as db:
        await verify(db)
    assert [one["row"] for one in log.records("record.rejected")] == [rejected["row"]] * 2


async def test_rejection_in_a_command_of_another_command_is_recorded_once(
    log: Log, url: str, tmp_path: Path
) -> None:
    await tampered(url, tmp_path)

    def progress(done: int, total: int) -> None:
        if done == total > 2:  # at the end of `rotate_data`, before `retire`
            execute(tmp_path / "s.db", "UPDATE secure_sessions SET revision = 7")

    async with Database(url, AesGcmBackend(KEY)) as db:
        with pytest.raises(DecryptionError):
            await separate(db, progress=progress)
    assert len(log.records("record.rejected")) == 1


async def test_rows_that_are_missing_or_orphaned_are_recorded_once_each(
    log: Log, url: str, tmp_path: Path
) -> None:
    statement = "UPDATE secure_users SET state = substr(state, 1, 40)"
    await tampered(url, tmp_path, "DELETE FROM secure_sessions", statement)
    async with Database(url, AesGcmBackend(KEY)) as db:
        found = await verify(db)
    expected = sorted((problem.table, problem.row) for problem in found.problems)
    assert len(expected) >= 3
    assert sorted((one["table"], one["row"]) for one in log.records("record.rejected")) == expected


@pytest.mark.parametrize("app_name", [None, IDS["app_name"]])
async def test_export_of_one_user_is_recorded_with_the_user(
    log: Log, url: str, app_name: str | None
) -> None:
    async with service_of(url) as service:
        await service.create_session(**IDS)
        await service.create_session(**(IDS | {"user_id": "somebody else"}))
    async with Database(url, AesGcmBackend(KEY)) as db:
        await export_lines(db, lambda line: None, app_name=app_name, user_id=IDS["user_id"])
        _, user = await lookup(db, IDS["app_name"], IDS["user_id"])
    (record,) = [one for one in log.records("command") if one["command"] == "export_lines"]
    assert record["users"] == [user.tag]
    assert record.get("app") == app_name


async def test_commands_on_contents_are_recorded(log: Log, url: str, tmp_path: Path) -> None:
    async with service_of(url) as service:
        await service.prepare_tables()
    async with Database(url, AesGcmBackend(KEY)) as db:
        (tmp_path / "blobs").mkdir()
        await check_blobs(db, tmp_path / "blobs")
        await purge_blobs(db, tmp_path / "blobs", dry_run=True)
        await rotate_data_and_blobs(db, tmp_path / "blobs", dry_run=True)
    assert [(one["command"], one["outcome"]) for one in log.records("command")] == [
        ("check_blobs", "success"),
        ("purge_blobs", "success"),
        ("rotate_data_and_blobs", "success"),
    ]


@pytest.mark.filterwarnings("ignore:NoOpBackend")
@pytest.mark.parametrize("wraps", [False, True], ids=["service", "wrapper"])
async def test_plaintext_keyring_is_recorded_as_rejected(log: Log, url: str, wraps: bool) -> None:
    async with EncryptedSessionService(url, NoOpBackend()) as service:
        await service.prepare_tables()
    backend = AesGcmBackend(KEY)
    wrapper = EncryptedSessionWrapper(InMemorySessionService(), backend, key_db_url=url)
    with pytest.raises(PlaintextRefusedError):
        await (wrapper if wraps else EncryptedSessionService(url, backend)).prepare_tables()
    assert [one["reason"] for one in log.records("record.rejected")] == ["plaintext"]


async def test_wrong_key_is_recorded(log: Log, url: str) -> None:
    async with service_of(url) as service:
        await service.prepare_tables()
    async with EncryptedSessionService(url, AesGcmBackend(generate_key())) as other:
        with pytest.raises(WrongKeyError):
            await other.prepare_tables()
    outcomes = [(one["outcome"], one.get("error")) for one in log.records("database.opened")]
    assert outcomes == [("success", None), ("failure", "WrongKeyError")]


# --- Commands ---


def with_key(directory: Path) -> list[str]:
    """Options that name a database and a file with its key."""
    (directory / "root.key").touch(0o600)
    (directory / "root.key").write_text(KEY)
    return ["--db", f"sqlite:///{directory}/s.db", "--key", f"file:{directory}/root.key"]


def test_command_line_appends_its_records_to_a_file(tmp_path: Path) -> None:
    log = tmp_path / "audit.log"
    options = [*with_key(tmp_path), "--audit-log", str(log)]
    for command in ("init", "verify"):
        assert run(command, *options).code == 0
    assert log.stat().st_mode & 0o777 == 0o600
    records = [json.loads(line) for line in log.read_text().splitlines()]
    commands = [one["command"] for one in records if one["event"] == "command"]
    assert commands == ["init", "verify"]
    assert sum(one["event"] == "key.created" for one in records) == 2


@pytest.mark.parametrize("path", ["/dev/full", "."])
def test_command_line_fails_if_a_record_cannot_be_written(tmp_path: Path, path: str) -> None:
    said = run("init", *with_key(tmp_path), "--audit-log", path)
    assert (said.code, "Traceback" in said.stderr) == (2, False)
    assert said.stderr.startswith("Error: ")


def test_error_of_closing_the_audit_log_is_raised() -> None:
    """As NFS reports that a quota is exceeded."""

    def close() -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    before, full = audit.logger.handlers.copy(), io.StringIO()
    full.close = close  # type: ignore[method-assign]
    with pytest.raises(OSError, match="quota"), audit.appending_to(full):
        audit.log_event("command")
    assert audit.logger.handlers == before


async def test_commands_are_recorded_with_the_ids_of_master_keys(log: Log, url: str) -> None:
    new = AesGcmBackend(generate_key())
    async with Database(url, AesGcmBackend(KEY)) as db:
        created = await init(db)
        await rotate_master(db)
        retired = await retire(db)
    async with Database(url, new, [AesGcmBackend(KEY)]) as db:
        rotated = await rotate_root(db)
    init_record, _, retire_record, rotation = log.records("command")
    assert init_record["result"]["master_ids"] == list(created.master_ids) != []
    assert retire_record["result"]["deleted_master_ids"] == list(retired.deleted_master_ids) != []
    assert rotation["result"]["rotated_ids"] == list(rotated.rotated_ids) != []
    assert rotation["root_key"] == rotated.root_key_id


async def test_commands_are_recorded_with_their_counts(log: Log, url: str) -> None:
    async with service_of(url) as service:
        await service.create_session(**IDS)
    async with Database(url, AesGcmBackend(KEY)) as db:
        await rotate_master(db)
        await rotate_data(db)
        tags = {one.kind: one.tag for one in await lookup(db, *IDS.values())}
        await erase_user(db, "clinic", "ada-lovelace", dry_run=True)
        await erase_user(db, "clinic", "ada-lovelace")
        with pytest.raises(ConfigurationError):
            await erase_user(db, "clinic", 7)  # type: ignore[arg-type]
    commands = log.records("command")
    assert [(one["command"], one["outcome"]) for one in commands] == [
        ("rotate_master", "success"),
        ("rotate_data", "success"),
        ("lookup", "success"),
        ("erase_user", "success"),
        ("erase_user", "success"),
        ("erase_user", "failure"),
    ]
    trial, erased = commands[3:5]
    assert trial["dry_run"] is True
    assert "dry_run" not in erased
    assert erased["user"] == tags["user"]
    assert erased["result"]["sessions"] == 1
    kinds = [entry["kind"] for entry in log.records("key.created")]
    assert kinds[4:] == ["data master", "data key", "data key"]  # of the two rotations
    assert "ada-lovelace" not in log.text


@pytest.fixture
async def source(tmp_path: Path) -> str:
    url = f"sqlite+aiosqlite:///{tmp_path}/adk.db"
    async with DatabaseSessionService(url) as adk:
        await adk.create_session(**IDS)
    return url


def test_command_may_end_in_another_context() -> None:
    @audit.audited_command
    async def endless() -> None:
        await asyncio.sleep(0)

    call = endless()
    copy_context().run(call.send, None)
    call.close()  # as the collector of garbage does


async def test_accesses_with_fallback_are_recorded_once_and_with_their_outcome(
    log: Log, url: str, source: str
) -> None:
    service = service_of(url, audit=Audit("readable"))
    async with PlaintextFallbackService(service, AdkTables(source)) as fallback:
        session = await fallback.get_session(**IDS)  # of the source
        assert session is not None
        await fallback.append_event(session, event())  # copies it
        await fallback.get_session(**IDS)
        await fallback.list_sessions(app_name="clinic")
        await fallback.get_user_state(app_name="clinic", user_id="ada-lovelace")
        await fallback.delete_session(**IDS)
        await fallback.get_session(**IDS)
        await fallback.create_session(app_name="clinic", user_id="ada-lovelace", session_id="new")
        await service.get_session(**IDS)  # not covered by a call of the other service
    accesses = [
        (one["event"], one.get("session"), one["outcome"])
        for one in log.records()
        if one["event"].startswith(("session", "user"))
    ]
    ada = IDS["session_id"]
    assert accesses == [
        ("session.read", ada, "success"),
        ("session.write", ada, "success"),
        ("session.read", ada, "success"),
        ("sessions.list", None, "success"),
        ("user.read", None, "success"),
        ("session.delete", ada, "success"),
        ("session.read", ada, "missing"),
        ("session.create", "new", "success"),
        ("session.read", ada, "missing"),
    ]


async def test_cancelled_access_ends_at_once_and_is_recorded(
    log: Log, url: str, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with service_of(url, audit=Audit("blind")) as service:
        monkeypatch.setattr(service._runner, "_open_keyring", lambda _: asyncio.sleep(60))
        read = asyncio.ensure_future(service.get_session(**IDS))
        await asyncio.sleep(0.05)
        read.cancel()
        done, _ = await asyncio.wait({read}, timeout=5)
        assert done
        assert read.cancelled()
        fallback = PlaintextFallbackService(service, AdkTables(source))
        for each in (service, fallback):
            abandoned = each.get_session(**IDS)
            copy_context().run(abandoned.send, None)
            abandoned.close()  # raises RuntimeError if the coroutine waits for anything
    errors = [(one["app"], one["error"]) for one in log.records("session.read")]
    assert errors == [("clinic", "CancelledError"), *[("clinic", "GeneratorExit")] * 2]


async def test_actor_that_is_no_text_is_recorded_as_text(
    log: Log, service: EncryptedSessionService
) -> None:
    actor: Any = uuid.UUID(int=5)
    token = audit_actor.set(actor)
    await service.create_session(**IDS)
    audit_actor.reset(token)
    assert log.records("session.create")[0]["actor"] == str(actor)


@pytest.mark.parametrize(
    ("configure", "expected"),
    [
        ("logging.basicConfig(level=logging.INFO)", False),
        ("logging.getLogger('adk_secure_sessions.audit').setLevel(logging.INFO)", True),
    ],
)
def test_only_the_level_of_its_own_logger_switches_the_log_on(
    configure: str, expected: bool
) -> None:
    use = "from adk_secure_sessions import audit; print(audit.is_on())"
    code = f"import logging; {configure}; {use}"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == str(expected)
