"""Reads from a replica (`read_db_url`): own writes are visible, and errors of the replica are not.

The replicas here are second databases, which get the rows of the first one when the test says so:
see `replicas.py`.  `test_failover.py` has streaming replication.
"""

import asyncio
import logging
import time
from datetime import timedelta
from typing import Any

import pytest
from google.adk.events import Event, EventActions
from google.adk.sessions import Session
from google.adk.sessions.base_session_service import GetSessionConfig
from sqlalchemy import URL
from sqlalchemy.ext.asyncio import create_async_engine

from adk_secure_sessions import (
    AesGcmBackend,
    ConfigurationError,
    DatabaseError,
    EncryptedSessionService,
    StaleSessionError,
)
from adk_secure_sessions.maintenance import Database, erase_user, fill_index, retire, rotate_data
from adk_secure_sessions.migration import PlaintextFallbackService
from tests.conformance.services import KEY
from tests.conformance.support import each_kind, ids
from tests.faults import Point, lost
from tests.migration.lookups import MemoryLookup
from tests.on_servers.replicas import APP, USER, CopiedReplica, Process, Start, with_replica

kind = each_kind("encrypted-postgresql", soak=["encrypted-psycopg", "encrypted-mariadb"])
# --- which server is asked ------------------------------------------------------------------------


async def test_reads_are_sent_to_the_replica(process: Start, copied: CopiedReplica) -> None:
    writer = await process()
    session = await writer.create("s", **{"k": 1, "user:k": 2})
    await writer.append(session, k=3)
    copied.catch_up()
    reader = await process()
    assert (await reader.found("s")).state == {"k": 3, "user:k": 2}
    assert reader.asked() == (2, 0), "the first read also checks the id of the database"
    assert await reader.listed() == ["s"]
    assert await reader.listed(None) == ["s"]
    assert await reader.paged() == ["s"]
    assert await reader.paged(None) == ["s"]
    assert await reader.user_state() == {"k": 2}
    recent = GetSessionConfig(num_recent_events=1)
    assert len((await reader.found("s", config=recent)).events) == 1
    assert reader.asked() == (6, 0)


async def test_writes_and_everything_else_are_sent_to_the_primary(
    process: Start, copied: CopiedReplica
) -> None:
    one = await process()
    session = await one.create("s")
    await one.append(session, k=1)
    unmarked = Session.model_validate_json(session.model_dump_json())
    await one.append(unmarked, k=2)
    await one.service.collections.append(APP, USER, "list", b"item")
    assert await one.service.collections.get(APP, USER, "list")
    await one.service.delete_session(app_name=APP, user_id=USER, session_id="s")
    assert one.asked()[0] == 0


async def test_service_without_a_replica_asks_nobody_else(url: URL) -> None:
    service, faults = with_replica(lambda: EncryptedSessionService(url, AesGcmBackend(KEY)))
    async with service:
        alone = Process(service, faults)
        session = await alone.create("s")
        alone.asked()
        await alone.append(session, k=1)
        assert await alone.listed() == ["s"]
        assert (await alone.found("s", at_least=service.revision(session))).state == {"k": 1}
        assert faults.primary is faults.replica
        assert alone.asked()[0] == 2


# --- own writes -----------------------------------------------------------------------------------


async def test_process_reads_its_own_writes_from_a_replica_that_lags(
    process: Start, copied: CopiedReplica
) -> None:
    one = await process()
    session = await one.create("s", **{"user:k": 1})
    copied.catch_up()
    await one.append(session, **{"k": 2, "user:k": 2, "app:k": 3})
    assert (await one.found("s")).state == {"k": 2, "user:k": 2, "app:k": 3}
    assert await one.user_state() == {"k": 2}
    await one.create("new")
    for user in (USER, None):
        assert await one.listed(user) == ["new", "s"]
        assert sorted(await one.paged(user)) == ["new", "s"]
        assert await one.paged(user, order="newest") == ["new", "s"]
    copied.catch_up()
    one.asked()
    assert await one.listed() == ["new", "s"]
    assert (await one.found("new")).events == []
    assert one.asked() == (2, 0), "the replica has caught up"


async def test_search_says_nothing_about_sessions_that_it_does_not_find(
    process: Start, copied: CopiedReplica, url: URL
) -> None:
    one = await process(indexed_state_keys=["k"])
    await one.create("old", k=1)
    async with Database(url, AesGcmBackend(KEY)) as db:
        await fill_index(db, APP, ["k"])
    copied.catch_up()
    await one.create("new", k=2)
    found = await one.service.find_sessions(app_name=APP, key="k", value=1)
    assert [session.id for session in found.sessions] == ["old"]
    for user in (USER, None):
        assert await one.listed(user) == ["new", "old"]
        assert sorted(await one.paged(user)) == ["new", "old"]


async def test_own_deletion_is_visible_although_the_replica_has_the_session(
    process: Start, copied: CopiedReplica
) -> None:
    one = await process()
    for name in ("a", "b", "c"):
        await one.create(name)
    copied.catch_up()
    await one.service.delete_session(app_name=APP, user_id=USER, session_id="b")
    assert await one.get("b") is None
    for user in (USER, None):
        assert await one.listed(user) == ["a", "c"]
        assert await one.paged(user) == ["a", "c"]
    again = await one.create("b", k=1)
    assert (await one.found("b")).state == {"k": 1}
    await one.append(again, k=2)
    assert (await one.found("b")).state == {"k": 2}


async def test_own_writes_stay_visible_when_the_caches_are_emptied(
    process: Start, copied: CopiedReplica
) -> None:
    one = await process(cache_seconds=0.01, session_cache_size=0)
    session = await one.create("s")
    copied.catch_up()
    await one.append(session, k=1)
    await asyncio.sleep(0.05)
    assert (await one.found("s")).state == {"k": 1}
    await one.service.delete_session(app_name=APP, user_id=USER, session_id="s")
    await asyncio.sleep(0.05)
    assert await one.get("s") is None


async def test_session_that_was_read_once_never_gets_older(
    process: Start, copied: CopiedReplica
) -> None:
    """A replica that is behind the one that answered before."""
    writer, reader = await process(), await process()
    session = await writer.create("s")
    for number in range(3):
        await writer.append(session, k=number)
        if number == 1:
            copied.catch_up()
            assert (await reader.found("s")).state == {"k": 1}
            copied.execute("DELETE FROM {}.secure_events")
    assert (await reader.found("s")).state == {"k": 2}


# --- writes of other processes --------------------------------------------------------------------


async def test_revision_that_a_caller_holds_is_not_read_from_a_replica_that_lags(
    process: Start, copied: CopiedReplica
) -> None:
    writer, reader = await process(), await process()
    session = await writer.create("s")
    await writer.append(session, k=1)
    copied.catch_up()
    await writer.append(session, k=2)
    held = writer.service.revision(session)
    assert (await reader.found("s")).state == {"k": 1}, "nothing tells the reader of the newer one"
    assert (await reader.found("s", at_least=held)).state == {"k": 2}
    assert (await reader.found("s")).state == {"k": 2}, "now the reader knows it"
    copied.catch_up()
    reader.asked()
    assert reader.service.revision(await reader.found("s", at_least=held)) == held
    assert reader.asked() == (1, 0)
    newer = writer.service.revision(await writer.create("t"))
    assert (await reader.found("t", at_least=newer)).id == "t"


async def test_revision_of_another_session_is_no_error(
    process: Start, copied: CopiedReplica
) -> None:
    one = await process()
    other = one.service.revision(await one.create("other"))
    await one.create("s")
    copied.catch_up()
    assert (await one.found("s", at_least=other)).id == "s"
    assert await one.get("nobody", at_least=other) is None


@pytest.mark.parametrize("text", ["", "x", "1", "1.", "-1.0", "1.-1", "f" * 17 + ".1", "1.0 ", 7])
async def test_other_texts_are_no_revisions(url: URL, text: Any) -> None:
    async with EncryptedSessionService(url, AesGcmBackend(KEY)) as service:
        with pytest.raises(ValueError, match="at_least must be a text that revision"):
            await service.get_session(app_name=APP, user_id=USER, session_id="s", at_least=text)


async def test_session_object_of_another_service_has_no_revision(url: URL) -> None:
    async with EncryptedSessionService(url, AesGcmBackend(KEY)) as service:
        with pytest.raises(ValueError, match="does not come from"):
            service.revision(Session(id="s", app_name=APP, user_id=USER))


async def test_session_that_the_replica_does_not_have_is_read_from_the_primary(
    process: Start, copied: CopiedReplica
) -> None:
    writer = await process()
    await writer.create("old")
    copied.catch_up()
    await writer.create("new", **{"user:k": 1})
    await writer.service.create_session(
        app_name=APP, user_id="other", session_id="s", state={"user:k": 2}
    )
    reader = await process()
    assert (await reader.found("new")).id == "new"
    state = await reader.service.get_user_state(app_name=APP, user_id="other")
    assert state == {"k": 2}
    listed = await reader.service.list_sessions(app_name=APP, user_id="other")
    assert ids(listed.sessions) == ["s"]
    assert await reader.get("nobody") is None


async def test_append_after_an_old_read_is_stale_and_the_next_read_is_new(
    process: Start, copied: CopiedReplica
) -> None:
    writer, reader = await process(), await process()
    session = await writer.create("s")
    await writer.append(session, k=1)
    copied.catch_up()
    await writer.append(session, k=2)
    old = await reader.found("s")
    assert old.state == {"k": 1}
    with pytest.raises(StaleSessionError):
        await reader.append(old, k=3)
    new = await reader.found("s")
    assert new.state == {"k": 2}
    await reader.append(new, k=3)
    assert (await writer.found("s")).state == {"k": 3}


async def test_append_after_a_read_of_the_replica_needs_no_read(
    process: Start, copied: CopiedReplica
) -> None:
    writer = await process()
    session = await writer.create("s")
    await writer.append(session, k=1)
    copied.catch_up()
    reader = await process()
    found = await reader.found("s")
    reader.faults.primary.counts.clear()
    await reader.append(found, k=2)
    assert reader.faults.primary.counts[Point.READ] == 0
    assert (await reader.found("s")).state == {"k": 2}


async def test_session_of_an_older_replica_is_not_appended_to_as_if_it_were_current(
    process: Start, copied: CopiedReplica
) -> None:
    """The reader creates a session from its rows of the app and the user, which are outdated."""
    writer, reader = await process(), await process()
    await writer.create("s", **{"user:k": 1, "app:k": 1})
    copied.catch_up()
    assert (await reader.found("s")).state == {"user:k": 1, "app:k": 1}
    await writer.append(await writer.found("s"), **{"user:k": 2, "app:k": 2})
    created = await reader.create("t")
    assert created.state == {"user:k": 2, "app:k": 2}


async def test_expired_session_that_was_used_again_is_found(
    process: Start, copied: CopiedReplica
) -> None:
    writer = await process()
    session = await writer.service.create_session(
        app_name=APP, user_id=USER, session_id="s", expires_after=timedelta(seconds=1)
    )
    copied.catch_up()
    actions = EventActions(state_delta={"k": 1})
    later = Event(author="user", actions=actions, timestamp=time.time() + 1000)
    await writer.service.append_event(session, later)
    await asyncio.sleep(1)
    reader = await process()
    assert (await reader.found("s")).state == {"k": 1}


# --- keys -----------------------------------------------------------------------------------------


async def test_replica_from_before_a_rotation_is_read_or_the_primary_is_asked(
    process: Start, copied: CopiedReplica, url: URL, caplog: pytest.LogCaptureFixture
) -> None:
    writer = await process()
    session = await writer.create("s", k=1)
    await writer.append(session, k=2)
    copied.catch_up()
    known = await process()
    assert (await known.found("s")).state == {"k": 2}
    async with Database(url, AesGcmBackend(KEY)) as db:
        await rotate_data(db)
        await retire(db)
    fresh = await process()
    for one in (known, fresh, writer):
        assert (await one.found("s")).state == {"k": 2}
    await writer.append(await writer.found("s"), again=True)
    copied.catch_up()
    for one in (known, fresh, writer, await process()):
        assert (await one.found("s")).state == {"k": 2, "again": True}
    assert caplog.record_tuples == []


async def test_user_whom_this_process_has_erased_is_not_read_from_the_replica(
    process: Start, copied: CopiedReplica, url: URL
) -> None:
    one = await process()
    await one.create("s", **{"user:k": 1})
    copied.catch_up()
    async with Database(url, AesGcmBackend(KEY)) as db:
        await erase_user(db, app_name=APP, user_id=USER)
    assert await one.get("s") is None
    assert await one.listed() == []
    assert await one.user_state() == {}


@pytest.mark.parametrize("lags", [False, True])
async def test_key_database_combines_with_a_replica(
    process: Start, copied: CopiedReplica, tmp_path: Any, lags: bool
) -> None:
    keys = f"sqlite+aiosqlite:///{tmp_path}/keys.db"
    writer = await process(key_db_url=keys)
    session = await writer.create("s")
    copied.catch_up()
    await writer.append(session, k=1)
    if not lags:
        copied.catch_up()
    reader = await process(key_db_url=keys)
    found = await reader.found("s", at_least=writer.service.revision(session))
    assert found.state == {"k": 1}
    assert reader.asked()[1] == lags
    await reader.append(found, k=2)
    assert (await writer.found("s", at_least=reader.service.revision(found))).state == {"k": 2}


# --- a replica that fails -------------------------------------------------------------------------


async def test_replica_of_another_database_is_not_used(
    process: Start, copied: CopiedReplica, caplog: pytest.LogCaptureFixture
) -> None:
    async with EncryptedSessionService(copied.url, AesGcmBackend(KEY)) as stranger:
        await stranger.create_session(app_name=APP, user_id=USER, session_id="s", state={"k": 9})
    one = await process()
    await one.create("s", k=1)
    for _ in range(3):
        assert (await one.found("s")).state == {"k": 1}
    (message,) = [one for one in caplog.records if one.levelno == logging.ERROR]
    assert "no copy of the database" in message.getMessage()
    assert one.asked()[0] == 1


async def test_reads_go_to_the_primary_while_the_replica_fails(
    process: Start, copied: CopiedReplica, caplog: pytest.LogCaptureFixture
) -> None:
    one = await process()
    await one.create("s")
    copied.catch_up()
    assert await one.listed() == ["s"]
    plan = one.faults.replica.before(Point.READ, lost(), nth=None)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert await one.listed() == ["s"]
            assert await one.get("s") is not None
    assert plan.happened == 2, "the first read tries twice, and the others not at all"
    (message,) = caplog.messages
    assert message.startswith("the replica cannot be used, reads go to the primary: ")


async def test_connection_that_the_replica_has_closed_is_no_failure(
    process: Start, copied: CopiedReplica, caplog: pytest.LogCaptureFixture
) -> None:
    one = await process()
    await one.create("s")
    copied.catch_up()
    assert await one.listed() == ["s"]
    one.asked()
    one.faults.replica.before(Point.READ, lost())
    assert await one.listed() == ["s"]
    assert one.asked() == (2, 0)
    assert caplog.messages == []


async def test_replica_that_does_not_exist_is_no_error(
    process: Start, url: URL, caplog: pytest.LogCaptureFixture
) -> None:
    nowhere = url.set(host="127.0.0.1", port=9, query={})
    one = await process(read_db_url=nowhere)
    await one.create("s")
    assert await one.listed() == ["s"]
    assert await one.get("nobody") is None
    assert len(caplog.messages) == 1


async def test_reads_that_the_replica_answers_work_while_the_primary_fails(
    process: Start, copied: CopiedReplica
) -> None:
    one = await process()
    await one.create("s", k=1)
    copied.catch_up()
    one.faults.primary.before(Point.READ, lost(), nth=None)
    assert (await one.found("s")).state == {"k": 1}
    assert await one.listed() == ["s"]
    with pytest.raises(DatabaseError):
        await one.get("nobody")


async def test_own_engine_can_be_the_replica(process: Start, copied: CopiedReplica) -> None:
    engine = create_async_engine(copied.url)
    try:
        one = await process(read_db_url=None, read_db_engine=engine)
        await one.create("s")
        copied.catch_up()
        one.asked()
        assert await one.listed() == ["s"]
        assert one.asked() == (2, 0)
    finally:
        await engine.dispose()


# --- what does not combine ------------------------------------------------------------------------


def test_databases_that_have_no_replica_are_rejected(url: URL) -> None:
    backend = AesGcmBackend(KEY)
    other = url.set(host="replica", query={})
    engine = create_async_engine(other)
    for text, options in {
        "needs a database server": {"db_url": "sqlite:///s.db", "read_db_url": other},
        "which can have a replica": {"db_url": url, "read_db_url": "sqlite:///s.db"},
        "of the same kind": {"db_url": url, "read_db_url": other.set(drivername=_other(url))},
        "the database of db_url itself": {"db_url": url, "read_db_url": url},
        "at most one of read_db_url": {
            "db_url": url,
            "read_db_url": other,
            "read_db_engine": engine,
        },
        "read_db_url is not a database URL": {"db_url": url, "read_db_url": "replica"},
        "read_db_engine must be": {"db_url": url, "read_db_engine": other},
    }.items():
        with pytest.raises(ConfigurationError, match=text):
            EncryptedSessionService(backend=backend, **options)  # type: ignore[arg-type]


def _other(url: URL) -> str:
    of_postgresql = url.get_backend_name() == "postgresql"
    return "mariadb+asyncmy" if of_postgresql else "postgresql+asyncpg"


async def test_fallback_is_rejected(url: URL) -> None:
    replica = url.set(host="replica", query={})
    async with EncryptedSessionService(url, AesGcmBackend(KEY), read_db_url=replica) as service:
        with pytest.raises(ConfigurationError, match="cannot be used with a fallback"):
            PlaintextFallbackService(service, MemoryLookup())
