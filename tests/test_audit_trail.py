"""The audit trail: no access without a record, records in the transaction of the change, purging.

tests/attacks/test_audit_trail.py has the attacks on it.
"""

import asyncio
import json
import logging
import os
import time
from base64 import b64encode
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import nullcontext
from contextvars import Context
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import sqlalchemy as sa
from google.adk.errors.already_exists_error import AlreadyExistsError
from google.adk.events import Event, EventActions
from google.adk.sessions import DatabaseSessionService
from google.genai import types

from adk_secure_sessions import (
    AesGcmBackend,
    Audit,
    ConfigurationError,
    DatabaseError,
    DecryptionError,
    EncryptedArtifactService,
    EncryptedMemoryService,
    EncryptedSessionService,
    SecureSessionError,
    WrongKeyError,
    audit,
    audit_actor,
    concurrency,
    generate_key,
)
from adk_secure_sessions.db import protocol
from adk_secure_sessions.integrations.adk import session_service
from adk_secure_sessions.maintenance import (
    Database,
    check,
    erase_user,
    export_audit,
    move_keys,
    purge_audit,
    retire,
    rotate_data,
    rotate_master,
    rotate_root,
    separate,
    status,
    verify,
    verify_audit,
)
from adk_secure_sessions.migration import (
    AdkTables,
    EncryptedSource,
    PlaintextFallbackService,
    migrate,
)
from tests.cli.support import run
from tests.clocks import shifted
from tests.drivers import each_driver, on_drivers, server, url
from tests.faults import Point, lost, with_faults
from tests.maintenance.support import run_sql
from tests.processes import children, results
from tests.sqlite_files import execute, value

__all__ = ["name", "server", "url"]

NEEDLE = "penicillin"
IDS: Any = {"app_name": "clinic", "user_id": "ada-lovelace", "session_id": "session-of-ada"}
KEY = bytes(range(32))
BACKEND = AesGcmBackend(KEY)

name = each_driver("sqlite")
on_servers = pytest.mark.parametrize(
    "name",
    [
        "sqlite",
        "asyncpg",
        pytest.param("psycopg", marks=pytest.mark.soak),
        pytest.param("asyncmy", marks=pytest.mark.soak),
        pytest.param("aiosqlite-engine", marks=pytest.mark.soak),
        pytest.param("asyncpg-pgbouncer", marks=pytest.mark.soak),
    ],
    indirect=True,
)


def service_of(place: str | sa.URL, **options: Any) -> EncryptedSessionService:
    chosen: dict[str, Any] = {"audit": Audit("readable", table=True), **options}
    return EncryptedSessionService(place, BACKEND, **chosen)


def event(**delta: object) -> Event:
    content = types.Content(role="user", parts=[types.Part(text=NEEDLE)])
    return Event(author="user", content=content, actions=EventActions(state_delta=delta))


async def trail(place: str | sa.URL, *events: str, **options: Any) -> list[dict[str, Any]]:
    """The records, or those with one of *events*; without that of the export itself."""
    lines: list[bytes] = []
    async with Database(place, BACKEND) as db:
        done = await export_audit(db, lines.append, **options)
    assert done.problems == ()
    records = [json.loads(line) for line in lines]
    records = [one for one in records if one.get("command") != "export_audit"]
    return [one for one in records if not events or one["event"] in events]


async def problems(place: str | sa.URL, heads: list[str] | None = None) -> list[str]:
    async with Database(place, BACKEND) as db:
        found = await verify_audit(db, None if heads is None else {"log": heads})
    assert found.bad == len(found.problems)
    return [one.detail for one in found.problems]


def change(url: sa.URL, statement: str, **values: object) -> None:
    """Change a SQLite file behind the services' backs."""
    run_sql(url.set(drivername="sqlite"), statement, **values)


def shown(records: list[dict[str, Any]]) -> list[tuple[str, str | None, str]]:
    return [(one["event"], one.get("change"), one["outcome"]) for one in records]


@pytest.fixture
def heads(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The lines of the audit log so far."""
    caplog.set_level(logging.INFO, "adk_secure_sessions.audit")

    def lines() -> list[str]:
        found = [one for one in caplog.records if one.name == "adk_secure_sessions.audit"]
        return [one.getMessage() for one in found]

    return lines


@pytest.fixture
async def service(url: sa.URL) -> AsyncIterator[EncryptedSessionService]:
    async with service_of(url) as service:
        yield service


async def test_timers_do_not_keep_the_actor_of_a_call(url: sa.URL) -> None:
    contexts: list[Context | None] = []
    loop = asyncio.get_running_loop()
    call_later = loop.call_later

    def noting(delay: float, call: Any, *args: Any, context: Context | None = None) -> Any:
        if getattr(call, "__module__", "") == concurrency.__name__:
            contexts.append(context)
        return call_later(delay, call, *args, context=context)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "call_later", noting)
        async with service_of(url) as service:
            await service.create_session(app_name="a", user_id="u")
    assert len(contexts) == 2, "the caches and the heads have timers"
    assert all(context is not None and not list(context) for context in contexts)


@on_servers
async def test_every_access_has_a_record(service: EncryptedSessionService, url: sa.URL) -> None:
    token = audit_actor.set("dr. house")
    session = await service.create_session(**IDS, state={"user:a": NEEDLE})
    audit_actor.reset(token)
    await service.append_event(session, event())
    await service.get_session(**IDS)
    await service.list_sessions(app_name="clinic")
    await service.list_sessions_page("clinic", "ada-lovelace", limit=10)
    await service.get_user_state(app_name="clinic", user_id="ada-lovelace")
    stale = session.model_copy(deep=True)
    await service.append_event(session, event())
    with pytest.raises(ValueError, match="modified in storage"):
        await service.append_event(stale, event())
    await service.delete_session(**IDS)
    await service.delete_session(**IDS)
    await service.get_session(**IDS)
    records = await trail(url)
    accesses = [one for one in records if one["event"].startswith(("session", "user"))]
    assert shown(accesses) == [
        ("session.create", "create", "success"),
        ("session.write", "append", "success"),
        ("session.read", None, "success"),
        ("sessions.list", None, "success"),
        ("sessions.list", None, "success"),
        ("user.read", None, "success"),
        ("session.write", "append", "success"),
        ("session.write", None, "failure"),
        ("session.delete", "delete", "success"),
        ("session.delete", None, "success"),
        ("session.read", None, "missing"),
    ]
    assert {one.get("session") for one in accesses} == {IDS["session_id"], None}
    assert [one.get("user") for one in accesses[3:6]] == [None, "ada-lovelace", "ada-lovelace"]
    assert [one["actor"] for one in accesses[:2]] == ["dr. house", None]
    assert [one["error"] for one in accesses if "error" in one] == ["StaleSessionError"]
    assert Counter(one["event"] for one in records if one not in accesses) == {
        "key.created": 4,
        "database.opened": 1,
    }
    assert {one["chain"] for one in records} == {records[0]["chain"]}
    assert NEEDLE not in json.dumps(records)
    assert await problems(url) == []


async def test_expired_session_that_is_deleted_has_a_record_of_its_own(url: sa.URL) -> None:
    async with service_of(url, expires_after=timedelta(hours=1)) as service:
        short = timedelta(seconds=1)
        await service.create_session(**IDS, expires_after=short)
        with shifted(1):
            await service.create_session(app_name="clinic", user_id="bob", session_id="of bob")
    records = await trail(url, "session.create", "session.expire")
    found = [(one["event"], one["user"], one["session"], one.get("change")) for one in records]
    assert [(event, change) for event, *_, change in found] == [
        ("session.create", "create"),
        ("session.create", "create"),
        ("session.expire", "delete"),
    ]
    (ada, _, expired) = found
    assert ada[1:3] == expired[1:3]


async def test_session_that_has_not_expired_has_no_record_of_its_expiry(url: sa.URL) -> None:
    async with service_of(url, expires_after=timedelta(hours=1)) as service:
        await service.create_session(**IDS)
        with pytest.raises(AlreadyExistsError):
            await service.create_session(**IDS)
    records = await trail(url, "session.create", "session.expire")
    assert [one["event"] for one in records] == ["session.create", "session.create"]


async def test_expired_session_that_is_replaced_has_a_record_of_its_own(
    url: sa.URL, heads: Callable[[], list[str]]
) -> None:
    async with service_of(url) as service:
        await service.create_session(**IDS, expires_after=timedelta(seconds=1))
        with shifted(1):
            await service.create_session(**IDS)
    records = await trail(url, "session.create", "session.expire")
    expected = [("session.create", "create"), ("session.expire", "delete")]
    assert [(one["event"], one["change"]) for one in records[:2]] == expected
    assert any("session.expire" in line for line in heads())


async def test_expired_session_that_a_fallback_deletes_has_a_record_of_its_own(
    url: sa.URL, tmp_path: Path
) -> None:
    """The record of the fallback covers the creation alone."""
    source = f"sqlite+aiosqlite:///{tmp_path}/adk.db"
    async with DatabaseSessionService(source) as adk:
        await adk.create_session(**IDS)
    service = service_of(url, expires_after=timedelta(hours=1))
    async with PlaintextFallbackService(service, AdkTables(source)) as fallback:
        await service.create_session(**IDS, expires_after=timedelta(seconds=1))
        with shifted(1):
            await fallback.create_session(app_name="clinic", user_id="bob")
    first, *others = await trail(url, "session.create", "session.expire")
    assert {(one["event"], one["change"], one["user"] == first["user"]) for one in others} == {
        ("session.create", "import", False),
        ("session.create", "create", False),
        ("session.expire", "delete", True),
    }


async def test_log_and_table_have_the_same_record(
    service: EncryptedSessionService, url: sa.URL, heads: Callable[[], list[str]]
) -> None:
    await service.create_session(**IDS)
    await service.get_session(**IDS)
    stored = await trail(url, "session.create", "session.read")
    logged = [json.loads(line) for line in heads()]
    for one in stored:
        fields = {key: one[key] for key in one if key not in ("chain", "number")}
        assert fields in logged


async def test_service_without_the_option_makes_no_more_statements(url: sa.URL) -> None:
    counts = []
    for chosen in (None, Audit("readable")):
        service, faults = with_faults(partial(service_of, url, audit=chosen))
        async with service:
            session = await service.create_session(app_name="a", user_id="u")
            await service.append_event(session, event())
            await service.get_session(app_name="a", user_id="u", session_id=session.id)
        counts.append(faults.data.counts)
    assert counts[0][Point.APPLY] == counts[1][Point.APPLY] == 2
    names = execute(Path(str(url.database)), "SELECT name FROM sqlite_master")
    assert ("secure_audit",) not in names


# --- No access without a record ---


FAIL = "CREATE TRIGGER full BEFORE INSERT ON secure_audit BEGIN SELECT RAISE(ABORT, 'full'); END"


async def test_nothing_is_read_or_written_if_no_record_can_be_stored(
    url: sa.URL, caplog: pytest.LogCaptureFixture
) -> None:
    async with service_of(url) as service:
        session = await service.create_session(**IDS)
        change(url, FAIL)
        with caplog.at_level(logging.INFO, audit.__name__), pytest.raises(DatabaseError):
            await service.get_session(**IDS)
        assert "session.read" in caplog.text, "the log has the access that the table lacks"
        with pytest.raises(DatabaseError):
            await service.append_event(session, event())
        with pytest.raises(DatabaseError):
            await service.delete_session(**IDS)
        with pytest.raises(DatabaseError):
            await service.create_session(app_name="clinic", user_id="bob")
        change(url, "DROP TRIGGER full")
        stored = await service.get_session(**IDS)
        assert stored is not None
        assert stored.events == []
        assert len((await service.list_sessions(app_name="clinic")).sessions) == 1
        await service.append_event(stored, event())
    assert await problems(url) == []


@on_drivers("asyncpg", soak=["psycopg"])
async def test_nothing_is_read_if_a_trigger_discards_the_record(url: sa.URL) -> None:
    sync = url.set(drivername="postgresql+psycopg")
    body = "CREATE FUNCTION discard() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'"
    async with service_of(url) as service:
        await service.create_session(**IDS)
        run_sql(sync, body)
        when = "BEFORE INSERT ON secure_audit FOR EACH ROW"
        run_sql(sync, f"CREATE TRIGGER t {when} EXECUTE FUNCTION discard()")
        with pytest.raises(DatabaseError, match="did not store the records"):
            await service.get_session(**IDS)
        run_sql(sync, "DROP TRIGGER t ON secure_audit")
        assert await service.get_session(**IDS) is not None
    assert await problems(url) == []


async def test_failed_call_raises_its_own_error_if_its_record_cannot_be_stored(
    url: sa.URL, caplog: pytest.LogCaptureFixture
) -> None:
    async with service_of(url) as service:
        session = await service.create_session(**IDS)
        stale = session.model_copy(deep=True)
        await service.append_event(session, event())
        change(url, FAIL)
        with pytest.raises(ValueError, match="modified in storage"):
            await service.append_event(stale, event())
    assert "an audit record could not be stored" in caplog.text


async def test_stored_change_raises_no_error_if_the_record_of_its_new_key_cannot_be_stored(
    url: sa.URL, caplog: pytest.LogCaptureFixture
) -> None:
    """The caller would repeat the change."""
    async with service_of(url) as service:
        await service.create_session(**IDS)
        count = value(Path(str(url.database)), "SELECT count(*) FROM secure_audit")
        change(url, FAIL.replace("BEGIN", f"WHEN NEW.number > {count} BEGIN"))
        await service.create_session(app_name="clinic", user_id="bob")
    assert "an audit record could not be stored" in caplog.text


@on_servers
async def test_lost_answer_loses_no_record(url: sa.URL) -> None:
    service, faults = with_faults(lambda: service_of(url))
    async with service:
        session = await service.create_session(**IDS)
        faults.data.after(Point.WRITE, lost())
        await service.append_event(session, event())
        faults.data.after(Point.WRITE, lost())
        read = await service.get_session(**IDS)
        assert read is not None
        assert len(read.events) == 1
    records = await trail(url, "session.write", "session.read")
    # After the lost answer, it is not known whether the record is stored: another one is.
    assert Counter(one["event"] for one in records) == {"session.write": 2, "session.read": 2}
    assert len({one["chain"] for one in records}) == 3
    assert await problems(url) == []


@on_servers
async def test_rolled_back_write_leaves_its_chain_as_it_was(url: sa.URL) -> None:
    async with service_of(url) as service, service_of(url) as other:
        session = await service.create_session(**IDS)
        copy = await other.get_session(**IDS)
        assert copy is not None
        await other.append_event(copy, event())
        with pytest.raises(ValueError, match="modified in storage"):
            await service.append_event(session, event())
        await service.create_session(app_name="clinic", user_id="bob")
    records = await trail(url)
    assert len({one["chain"] for one in records}) == 2
    assert await problems(url) == []


async def test_cancelled_write_that_is_committed_has_its_record(
    url: sa.URL, heads: Callable[[], list[str]]
) -> None:
    service, faults = with_faults(lambda: service_of(url))
    async with service:
        session = await service.create_session(**IDS)
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(service.append_event(session, event()))
        faults.data.after(Point.APPLY, lambda: loop.call_soon_threadsafe(task.cancel))
        with pytest.raises(asyncio.CancelledError):
            await task
        await service.append_event(session, event())
    both = [("session.write", "append", "success")] * 2
    assert shown(await trail(url, "session.write")) == both
    logged = [json.loads(line) for line in heads()]
    assert shown([one for one in logged if one["event"] == "session.write"]) == both
    assert await problems(url) == []


@on_servers
async def test_writers_at_the_same_time_do_not_wait_for_one_chain(url: sa.URL) -> None:
    async with service_of(url) as service:
        new = (service.create_session(app_name="clinic", user_id=f"u{n}") for n in range(12))
        sessions = await asyncio.gather(*new)
        for _ in range(2):
            await asyncio.gather(*(service.append_event(one, event()) for one in sessions))
    records = await trail(url, "session.write")
    assert len(records) == 24
    assert 1 < len({one["chain"] for one in records}) <= 12
    assert await problems(url) == []


def append_until_killed(say: Callable[[object], None], place: str) -> None:
    async def main() -> None:
        service = service_of(place)
        session = await service.create_session(**IDS)
        for n in range(10**6):
            await service.append_event(session, event(n=n))
            say(n)

    asyncio.run(main())


@on_drivers("sqlite", "asyncpg")
async def test_killed_process_leaves_no_change_without_its_record(url: sa.URL) -> None:
    place = url.render_as_string(hide_password=False)
    with children((append_until_killed, place)) as (child,):
        said = child.said()
        while next(said) < 20:
            pass
        child.process.kill()
        acknowledged = max(said, default=20)
    async with service_of(url, audit=Audit("readable")) as service:
        session = await service.get_session(**IDS)
    assert session is not None
    assert len(session.events) > acknowledged
    assert len(await trail(url, "session.write")) == len(session.events)
    assert await problems(url) == []


async def test_two_event_loops_may_use_one_service(url: sa.URL) -> None:
    service = service_of(url)
    await service.create_session(**IDS)

    async def read() -> None:
        for _ in range(5):
            await service.get_session(**IDS)

    await asyncio.gather(read(), *(asyncio.to_thread(asyncio.run, read()) for _ in range(2)))
    await service.close()
    assert len(await trail(url, "session.read")) == 15
    assert await problems(url) == []


def fork_between_accesses(say: Callable[[object], None], place: str) -> None:
    audit.logger.setLevel(logging.INFO)
    audit.logger.addHandler(logging.NullHandler())
    service = service_of(place)

    async def access() -> None:
        for _ in range(3):
            await service.get_session(**IDS)

    asyncio.run(access())
    child = os.fork()
    asyncio.run(access())
    if child == 0:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    asyncio.run(service.close())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
async def test_forked_process_begins_chains_of_its_own(url: sa.URL) -> None:
    place = url.render_as_string(hide_password=False)
    results((fork_between_accesses, place))
    reads = await trail(url, "session.read")
    assert len(reads) == 9
    assert len({(one["chain"], one["process"]) for one in reads}) == 2
    assert await problems(url) == []


# --- Security events ---


async def test_many_rejected_records_are_counted(
    url: sa.URL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "_MAX_KEPT", 5)
    async with service_of(url, skip_unreadable_sessions=True) as service:
        for _ in range(7):
            await service.create_session(app_name="clinic", user_id="ada-lovelace")
        change(url, "UPDATE secure_sessions SET state = substr(state, 1, 40)")
        assert (await service.list_sessions(app_name="clinic")).sessions == []
    assert len(await trail(url, "record.rejected")) == 5
    (omitted,) = await trail(url, "records.omitted")
    assert omitted["omitted"] == 2


@pytest.mark.parametrize("at", [0, 1, 3])
async def test_trigger_that_discards_one_of_many_records_is_noticed(
    url: sa.URL, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, or for a record between others by `verify`."""
    monkeypatch.setattr(protocol, "MAX_CONFLICTS", 3)
    async with service_of(url, skip_unreadable_sessions=True) as service:
        for _ in range(3):
            await service.create_session(app_name="clinic", user_id="ada-lovelace")
        assert len((await service.list_sessions(app_name="clinic")).sessions) == 3
        path = Path(str(url.database))
        execute(path, "UPDATE secure_sessions SET state = substr(state, 1, 40)")
        stored = value(path, "SELECT max(number) + 1 FROM secure_audit")
        execute(
            path,
            f"CREATE TRIGGER t BEFORE INSERT ON secure_audit WHEN NEW.number = {stored + at} "
            "BEGIN SELECT RAISE(IGNORE); END",
        )
        with pytest.raises(SecureSessionError) if at != 1 else nullcontext():
            await service.list_sessions(app_name="clinic")
    assert (await problems(url) != []) == (at == 1)


async def test_wrong_key_stores_nothing(url: sa.URL) -> None:
    async with service_of(url) as service:
        await service.prepare_tables()
    before = await trail(url, "session.read", "key.created")
    other = EncryptedSessionService(
        url, AesGcmBackend(generate_key()), audit=Audit("blind", table=True)
    )
    async with other:
        with pytest.raises(WrongKeyError):
            await other.get_session(**IDS)
    assert await trail(url, "session.read", "key.created") == before


async def test_rotation_of_the_root_key_is_stored(url: sa.URL) -> None:
    async with service_of(url) as service:
        await service.prepare_tables()
    new, lines = AesGcmBackend(generate_key()), list[bytes]()
    async with Database(url, new, [BACKEND]) as db:
        await rotate_root(db)
        await export_audit(db, lines.append)
    assert "rotate_root" in [json.loads(line).get("command") for line in lines]


async def test_missing_table_is_an_error_if_the_service_may_not_create_it(url: sa.URL) -> None:
    async with service_of(url, audit=Audit("readable")) as service:
        await service.prepare_tables()
    async with service_of(url, create_tables=False) as service:
        with pytest.raises(ConfigurationError, match=r"docs/sql/sqlite-audit\.sql"):
            await service.get_session(**IDS)


async def test_artifacts_and_memory_are_stored_like_sessions(
    service: EncryptedSessionService, url: sa.URL, tmp_path: Path
) -> None:
    session = await service.create_session(**IDS)
    await service.append_event(session, event())
    artifacts = EncryptedArtifactService(service, tmp_path / "blobs")
    await artifacts.save_artifact(**IDS, filename="scan", artifact=types.Part(text=NEEDLE))
    await artifacts.load_artifact(**IDS, filename="scan")
    memory = EncryptedMemoryService(service)
    await memory.add_session_to_memory(session)
    await memory.search_memory(app_name="clinic", user_id="ada-lovelace", query=NEEDLE)
    (blob,) = (path for path in (tmp_path / "blobs").rglob("*") if path.is_file())
    content = blob.read_bytes()
    blob.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    stream = await artifacts.open_stream(**IDS, filename="scan")
    assert stream is not None
    with pytest.raises(DecryptionError):
        await stream.read()
    records = await trail(url)
    found = [one for one in records if one["event"].startswith(("artifact", "memory"))]
    assert shown(found) == [
        ("artifact.write", "create", "success"),
        ("artifact.write", "append", "success"),
        ("artifact.read", None, "success"),
        ("memory.write", "create", "success"),
        ("memory.write", "append", "success"),
        ("memory.write", "append", "success"),
        ("memory.read", None, "success"),
        ("artifact.read", None, "success"),
    ]
    assert sum(one["event"] == "record.rejected" for one in records) == 1
    assert NEEDLE not in json.dumps(records)
    assert "scan" not in json.dumps(records)
    assert {one.get("session") for one in found} <= {IDS["session_id"], None}


async def test_accesses_to_a_plaintext_source_are_stored(url: sa.URL, tmp_path: Path) -> None:
    source = f"sqlite+aiosqlite:///{tmp_path}/adk.db"
    not_copied = {**IDS, "session_id": "not-copied"}
    async with DatabaseSessionService(source) as adk:
        await adk.create_session(**IDS)
        await adk.create_session(**not_copied)
    async with PlaintextFallbackService(service_of(url), AdkTables(source)) as fallback:
        session = await fallback.get_session(**IDS)
        assert session is not None
        await fallback.append_event(session, event())
        await fallback.delete_session(**not_copied)
        assert await fallback.get_session(**not_copied) is None
    assert len(await trail(url, "plaintext.read")) >= 1
    deletion = await trail(url, "session.delete")
    assert [one[1] for one in shown(deletion)] == ["tombstone", None]
    assert ("session.read", "import", "success") in shown(await trail(url, "session.read"))
    assert await problems(url) == []


async def test_migration_from_a_database_with_a_trail_is_stored_there(
    url: sa.URL, tmp_path: Path
) -> None:
    async with service_of(url) as service:
        await service.create_session(**IDS)

    async def copy(source: str | sa.URL, **options: Any) -> None:
        target = Database(f"sqlite:///{tmp_path}/target.db", BACKEND)
        async with EncryptedSource(Database(source, BACKEND)) as opened, target:
            await migrate(opened, target, **options)

    await copy(url, dry_run=True)
    await copy(url)
    records = await trail(url, "command")
    assert shown(records) == [("command", None, "started"), ("command", None, "success")] * 2
    assert [one.get("dry_run") for one in records] == [True, True, None, None]
    assert await problems(url) == []
    with pytest.raises(DatabaseError, match="only read the database, copy it first"):
        await copy(f"sqlite:///file:{url.database}?mode=ro&uri=true")


# --- Heads ---


async def test_heads_are_logged_when_the_service_is_closed(
    url: sa.URL, heads: Callable[[], list[str]]
) -> None:
    service, faults = with_faults(lambda: service_of(url))
    loop, is_running = asyncio.get_running_loop(), asyncio.Event()
    async with service:
        session = await service.create_session(**IDS)
        assert not [line for line in heads() if "audit.head" in line]
        faults.data.after(Point.APPLY, lambda: loop.call_soon_threadsafe(is_running.set))
        task = asyncio.ensure_future(service.append_event(session, event()))
        await is_running.wait()  # `close` then waits for the write
    await task
    async with Database(url, BACKEND) as db:
        found = await verify_audit(db, {"log": heads()})
    assert (found.heads, found.bad) == (1, 0)


async def test_head_is_logged_after_100_records(
    url: sa.URL, heads: Callable[[], list[str]]
) -> None:
    async with service_of(url) as service:
        await service.create_session(**IDS)
        for _ in range(100):
            await service.get_session(**IDS)
        assert len([line for line in heads() if "audit.head" in line]) == 1
        assert await problems(url, heads()) == []


async def test_head_is_logged_after_a_minute(url: sa.URL, heads: Callable[[], list[str]]) -> None:
    loop = asyncio.get_running_loop()
    due: list[Callable[[], object]] = []

    def call_later(delay: float, callback: Any, *arguments: Any, **_: Any) -> Any:
        if delay == 60.0:
            due.append(lambda: callback(*arguments))
            return None
        return later(delay, callback, *arguments)

    later = loop.call_later
    async with service_of(url) as service:
        with mock.patch.object(loop, "call_later", call_later):
            await service.create_session(**IDS)
            await service.get_session(**IDS)
        assert len(due) == 1
        due[0]()
        assert len([line for line in heads() if "audit.head" in line]) == 1


async def test_heads_that_are_not_logged_are_a_warning(
    url: sa.URL, caplog: pytest.LogCaptureFixture
) -> None:
    audit.warn_once.cache_clear()
    async with service_of(url) as service:
        await service.create_session(**IDS)
        await service.get_session(**IDS)
    assert caplog.text.count("the heads of the audit trail's chains are not logged") == 1


# --- Export and purge ---

DAY = 86_400 * 10**9  # nanoseconds


@pytest.fixture
def at() -> Callable[[int], Any]:
    """Set the clock back by a number of days, in a `with` block."""

    def set_back(days: int) -> Any:
        return mock.patch("time.time_ns", return_value=time.time_ns() - days * DAY)

    return set_back


async def test_export_of_a_span_has_only_its_records(url: sa.URL, at: Callable[[int], Any]) -> None:
    for days in (30, 20, 10):
        with at(days):
            async with service_of(url) as service:
                await service.create_session(app_name="clinic", user_id=f"user {days}")
    now = datetime.now(UTC)
    since, until = now - timedelta(days=25), now - timedelta(days=15)
    found = await trail(url, "session.create", since=since, until=until)
    assert [one["user"] for one in found] == ["user 20"]
    async with Database(url, BACKEND) as db:
        with pytest.raises(ConfigurationError, match="time zone"):
            await export_audit(db, print, since=datetime(2026, 1, 1))


async def test_purge_deletes_old_chains_whole_and_names_them(
    url: sa.URL, at: Callable[[int], Any], heads: Callable[[], list[str]]
) -> None:
    with at(100):
        async with service_of(url) as service:
            await service.create_session(**IDS)
    async with service_of(url) as service:
        await service.get_session(**IDS)
    old, new = {one["chain"]: None for one in await trail(url)}
    async with Database(url, BACKEND) as db:
        trial = await purge_audit(db, timedelta(days=90), dry_run=True)
        assert (trial.chains, trial.records, trial.bad) == (1, 6, 0)
        done = await purge_audit(db, timedelta(days=90))
        assert replace(done, before=0) == replace(trial, before=0)
        again = await purge_audit(db, timedelta(days=90))
        assert (again.chains, again.kept) == (0, 0)
    (named,) = await trail(url, "audit.purged")
    assert [(one["chain"], one["number"]) for one in named["chains"]] == [(old, 5)]
    assert old not in {one["chain"] for one in await trail(url)}
    assert new in {one["chain"] for one in await trail(url)}
    assert await problems(url, heads()) == []


@pytest.mark.parametrize("query", ["max(secure_audit.time)", "length(secure_audit.record)"])
async def test_chain_that_is_purged_while_it_is_verified_is_not_missing(
    url: sa.URL, at: Callable[[int], Any], heads: Callable[[], list[str]], query: str
) -> None:
    """After the list of chains was read, or the first page of its records."""
    with at(100):
        async with service_of(url) as service:
            await service.create_session(**IDS)

    async def purge() -> None:
        async with Database(url, BACKEND) as another:
            assert (await purge_audit(another, timedelta(days=90))).chains == 1

    def is_read(step: Any, rows: Any) -> bool:
        return query in str(step.query)

    db, faults = with_faults(lambda: Database(url, BACKEND))
    async with db:
        db.limits = db.limits._replace(rows_per_statement=2)
        plan = faults.data.after(Point.READ, purge, when=is_read)
        done = await verify_audit(db, {"log": heads()})
        assert plan.happened
        assert (done.problems, done.purged, done.chains) == ((), 1, query.startswith("length"))


async def test_purge_keeps_chains_that_name_purged_chains(
    url: sa.URL, at: Callable[[int], Any], heads: Callable[[], list[str]]
) -> None:
    done = None
    for days, oldest in ((100, 0), (60, 30), (0, 40)):
        with at(days):
            if days:
                async with service_of(url) as service:
                    await service.create_session(app_name="clinic", user_id=f"user {days}")
            async with Database(url, BACKEND) as db:
                done = await purge_audit(db, timedelta(days=oldest or 2))
    assert done is not None
    assert (done.chains, done.kept) == (1, 1)
    assert await problems(url, heads()) == []


async def test_purge_keeps_only_the_chain_that_has_changed_since_it_was_checked(
    url: sa.URL, at: Callable[[int], Any]
) -> None:
    with at(100):
        for number in range(3):
            async with service_of(url) as service:
                await service.create_session(app_name="clinic", user_id=f"u{number}")
    lengths = Counter(one["chain"] for one in await trail(url))
    first = min(lengths)

    def remove_the_last_record(done: int, total: int) -> None:
        if done == lengths[first]:  # of the chain whose rows were read
            where = "chain = :chain AND number = :number"
            at_last = {"chain": bytes.fromhex(first), "number": lengths[first] - 1}
            change(url, f"DELETE FROM secure_audit WHERE {where}", **at_last)

    async with Database(url, BACKEND) as db:
        done = await purge_audit(db, timedelta(days=90), progress=remove_the_last_record)
    assert (done.chains, done.kept, done.bad) == (2, 1, 0)


async def test_purge_leaves_chains_in_use(url: sa.URL) -> None:
    async with Database(url, BACKEND) as db, service_of(url) as service:
        await service.create_session(**IDS)
        with pytest.raises(ConfigurationError, match="48 hours"):
            await purge_audit(db, timedelta(hours=47))
        assert (await purge_audit(db, timedelta(days=2))).chains == 0


async def test_chain_is_left_after_a_day(url: sa.URL) -> None:
    async with service_of(url) as service:
        await service.create_session(**IDS)
        with mock.patch("time.time", return_value=time.time() + 86_401):
            await service.get_session(**IDS)
            await service.get_session(**IDS)
    chains = Counter(one["chain"] for one in await trail(url))
    assert sorted(chains.values()) == [2, 6]
    assert await problems(url) == []


# --- Commands ---


async def test_command_is_stored_before_and_after_its_work(url: sa.URL) -> None:
    async with service_of(url) as service:
        await service.create_session(**IDS)
    async with Database(url, BACKEND) as db:
        await rotate_master(db)
        await rotate_data(db)
        await retire(db)
        await erase_user(db, "clinic", "ada-lovelace")
        await check(db)
        await status(db)
        with pytest.raises(ConfigurationError):
            await erase_user(db, "clinic", 7)  # type: ignore[arg-type]
        await verify(db)
    records = await trail(url, "command")
    names = ["rotate_master", "rotate_data", "retire", "erase_user", "verify"]
    assert [(one["command"], one["outcome"]) for one in records] == [
        (name, outcome) for name in names for outcome in ("started", "success")
    ]  # the failure came before the keys were used
    # Rotation, retiring and erasing leave the trail readable, with the keyed hash of the user.
    assert len(await trail(url, "session.create")) == 1
    assert await problems(url) == []


async def test_command_does_nothing_if_its_record_cannot_be_stored(url: sa.URL) -> None:
    async with service_of(url) as service:
        await service.create_session(**IDS)
        change(url, FAIL)
        async with Database(url, BACKEND) as db:
            with pytest.raises(DatabaseError):
                await erase_user(db, "clinic", "ada-lovelace")
            assert await problems(url) == []
        change(url, "DROP TRIGGER full")
        assert await service.get_session(**IDS) is not None


async def test_database_without_a_trail_gets_none_by_commands(url: sa.URL) -> None:
    async with service_of(url, audit=Audit("readable")) as service:
        await service.create_session(**IDS)
    async with Database(url, BACKEND) as db:
        await verify(db)
        for function in (verify_audit, lambda db: export_audit(db, print)):
            with pytest.raises(ConfigurationError, match="has no audit trail"):
                await function(db)


async def test_separated_copy_begins_a_new_trail(url: sa.URL) -> None:
    async with service_of(url) as service:
        await service.create_session(**IDS)
    async with Database(url, BACKEND) as db:
        assert (await separate(db)).complete
    records = await trail(url)
    assert {one["event"] for one in records} == {"key.created", "database.opened", "command"}
    ended = [(one["command"], one["outcome"]) for one in records if one["event"] == "command"]
    assert ended == [("separate", "started"), ("separate", "success")]
    async with service_of(url) as service:
        assert await service.get_session(**IDS) is not None
    assert await problems(url) == []


async def test_status_counts_records_and_chains_without_keys(url: sa.URL) -> None:
    for _ in range(2):
        async with service_of(url) as service:
            await service.list_sessions(app_name="app", user_id="user")
    async with Database(url) as db:
        found = (await status(db)).audit_trail
    assert found is not None
    assert (found.records, found.chains) == (len(await trail(url)), 2)
    assert found.since is not None
    assert 0 < time.time() - found.since / 1e6 < 600


async def test_start_of_moving_the_keys_is_stored_before_they_are_moved(
    url: sa.URL, tmp_path: Path
) -> None:
    async with service_of(url) as service:
        await service.create_session(**IDS)

    def number_of_records() -> int:
        number: int = value(Path(str(url.database)), "SELECT count(*) FROM secure_audit")
        return number

    during: list[int] = []
    async with Database(url, BACKEND, key_db_url=f"sqlite:///{tmp_path}/keys.db") as db:
        for to in ("key-db", "db"):
            before = number_of_records()
            during.clear()
            await move_keys(db, to, progress=lambda *_: during.append(number_of_records()))
            assert during[0] == before + 1


async def test_moving_the_keys_keeps_the_trail(url: sa.URL, tmp_path: Path) -> None:
    async with service_of(url) as service:
        await service.create_session(**IDS)
    keys = f"sqlite:///{tmp_path}/keys.db"
    async with Database(url, BACKEND, key_db_url=keys) as db:
        await move_keys(db, "key-db")
    async with service_of(url, key_db_url=keys) as service:
        await service.get_session(**IDS)
    lines: list[bytes] = []
    async with Database(url, BACKEND, key_db_url=keys) as db:
        await move_keys(db, "db")
        await verify(db)
        await move_keys(db, "key-db")
        await move_keys(db, "db")
    async with Database(url, BACKEND) as db:
        assert (await export_audit(db, lines.append)).bad == 0
        await verify(db)
    records = [json.loads(line) for line in lines]
    events = [one["event"] for one in records]
    assert (events.count("session.create"), events.count("session.read")) == (1, 1)
    moved = [one["outcome"] for one in records if one.get("command") == "move_keys"]
    assert moved == ["started", "success"] * 4


async def test_command_line(
    url: sa.URL, tmp_path: Path, heads: Callable[[], list[str]], at: Callable[[int], Any]
) -> None:
    with at(10):
        async with service_of(url) as service:
            await service.create_session(**IDS)
    (tmp_path / "log").write_text("no json\n" + "\n".join(heads()))
    (tmp_path / "empty").write_text("app: a user wrote\r" + heads()[-1])
    options = ["--db", f"sqlite:///{url.database}", "--key", "env:AUDIT_KEY"]

    def call(*arguments: str) -> Any:
        return asyncio.to_thread(run, *arguments, *options, AUDIT_KEY=_text(KEY))

    log, empty = str(tmp_path / "log"), str(tmp_path / "empty")
    said = await call("verify", "--only", "trail", "--heads", log)
    assert (said.code, said.stderr) == (0, "")
    assert "compared with the trail: 1 logged head" in said.stdout
    for logs in (["--heads", log, "--heads", empty], ["--heads", empty, "--heads", log]):
        said = await call("verify", "--only", "trail", *logs)
        assert (said.code, said.stderr) == (1, "")
        assert f"secure_audit: no line of the log {empty!r} is a head" in said.stdout
        assert "compared with the trail: 1 logged head" in said.stdout
    said = await call("audit", "export", "--since", "2020-01-01")
    assert (said.code, json.loads(said.stdout.splitlines()[0])["event"]) == (0, "session.create")
    said = await call("audit", "export", "--output", str(tmp_path / "out"), "--json")
    assert (said.code, said.json["bad"]) == (0, 0)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o600
    assert (await call("audit", "export", "--json")).code == 2
    assert (await call("audit", "export", "--since", "yesterday")).code == 2
    said = await call("purge", "audit", "--older-than", "5d", "--dry-run", "--json")
    assert (said.code, said.json["chains"], said.json["dry_run"]) == (0, 1, True)
    assert (await call("purge", "audit", "--older-than", "1d")).code == 2
    change(url, "DELETE FROM secure_audit WHERE number = 3")
    said = await call("verify", "--only", "trail", "--heads", log, "--json")
    assert (said.code, said.json["trail"]["bad"]) == (1, 1)
    said = await call("verify", "--only", "rows", "--json")
    assert (said.code, said.json["rows"]["sessions"], said.json["trail"]) == (0, 1, None)
    assert (await call("audit", "export")).code == 1
    said = await call("purge", "audit", "--older-than", "5d")
    assert (said.code, "deleted: 0 records" in said.stdout) == (1, True)
    assert (await call("verify", "--only", "trail", "--heads", str(tmp_path / "nowhere"))).code == 2


def _text(key: bytes) -> str:
    return b64encode(key).decode()


async def test_uri_has_the_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUDIT_KEY", _text(KEY))
    uri = f"encrypted+sqlite:///{tmp_path}/u.db?key=env:AUDIT_KEY&audit_ids=blind"
    service = session_service(f"{uri}&audit_table=true")
    await service.create_session(**IDS)
    await service.close()
    assert len(await trail(f"sqlite:///{tmp_path}/u.db", "session.create")) == 1
    with pytest.raises(ConfigurationError, match="can only be true"):
        session_service(f"{uri}&audit_table=yes")
    with pytest.raises(ConfigurationError, match="blind or readable"):
        session_service(uri.replace("=blind", "=all"))
