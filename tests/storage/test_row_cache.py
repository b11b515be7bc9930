"""Sessions are cached, so that an append needs no read, and forgotten if they are not so."""

from typing import Any

import pytest

from adk_secure_sessions.db.protocol import Executors
from adk_secure_sessions.lru import Caches
from adk_secure_sessions.storage.reads import GetSession
from adk_secure_sessions.storage.rows import StoredSession
from adk_secure_sessions.storage.unit_of_work import UnitOfWork
from adk_secure_sessions.storage.writes import (
    AppendEvent,
    CreateSession,
    DeleteSession,
    Expected,
    MissingSession,
    NewEvent,
    StaleRevision,
)
from tests.storage.support import WHO, FakeExecutor, Stored, backends, key_rows


def decoded(plaintext: bytes, session_row: int, seq: int) -> bytes:
    return plaintext


def unit_of(stored: Stored, executor: FakeExecutor) -> UnitOfWork:
    """A unit of work on a database that *executor* stands for; it has read nothing yet."""

    async def open_keyring(known: object) -> Any:
        return stored.keys.keyring

    return UnitOfWork(Executors(executor, executor), backends(), open_keyring, cache=Caches(10, 10))


NEW_EVENT = NewEvent(b"new", 500, {}, {}, {})
IDS = WHO[:3]


async def get(unit: UnitOfWork) -> object:
    return await unit.run(GetSession(await unit.identify(*IDS), decoded))


async def append(
    unit: UnitOfWork, revision: int, new: NewEvent = NEW_EVENT, row: int = 3
) -> StoredSession:
    who = await unit.identify(*IDS)
    return await unit.run(AppendEvent(who, Expected(row, revision), new, lambda _: None))


async def test_session_that_was_read_is_appended_to_without_another_read() -> None:
    stored = Stored(events=2)
    executor = FakeExecutor(stored.rows(keys=True), True, True)
    unit = unit_of(stored, executor)
    assert await get(unit)
    for revision in (2, 3):
        session = await append(unit, revision)
        assert session.revision == revision + 1
    assert executor.requests[1:] == ["apply UPDATE_SESSION, INSERT_EVENT"] * 2


async def test_append_at_another_revision_than_the_remembered_one_reads_the_session() -> None:
    stored = Stored(events=2)
    executor = FakeExecutor(stored.rows(keys=True), stored.rows(last=1))
    unit = unit_of(stored, executor)
    await get(unit)
    with pytest.raises(StaleRevision):
        await append(unit, 1)
    assert executor.requests[1:] == ["read SESSION_WITH_LAST_EVENTS"]


async def test_deleted_session_is_forgotten() -> None:
    stored = Stored(events=2)
    executor = FakeExecutor(stored.rows(keys=True), True, [])
    unit = unit_of(stored, executor)
    await get(unit)
    assert await unit.run(DeleteSession(await unit.identify(*IDS)))
    with pytest.raises(MissingSession):
        await append(unit, 2)
    assert executor.requests[1:] == [
        "apply DELETE_KNOWN_SESSION, DELETE_EVENTS, DELETE_WITNESS",
        "read SESSION_WITH_LAST_EVENTS",
    ]


async def test_snapshot_of_a_remembered_session_is_not_kept() -> None:
    """It may be large: a change that has to be merged into it reads it again."""
    stored = Stored(events=2, snapshot=b'{"large":true}')
    executor = FakeExecutor(stored.rows(keys=True), stored.rows(last=1), True)
    unit = unit_of(stored, executor)
    await get(unit)
    large = NEW_EVENT._replace(session_delta={"k": "x" * 9000})
    await append(unit, 2, large)
    assert executor.requests[1:] == [
        "read SESSION_WITH_LAST_EVENTS",
        "apply UPDATE_SESSION, UPDATE_SNAPSHOT, INSERT_EVENT",
    ]


async def test_closed_unit_forgets_its_sessions() -> None:
    stored = Stored(events=2)
    executor = FakeExecutor(stored.rows(keys=True), stored.rows(keys=True, last=1), True)
    unit = unit_of(stored, executor)
    await get(unit)
    await unit.close()
    await append(unit, 2)
    assert executor.requests[1] == "read SESSION_WITH_LAST_EVENTS with keys"
    assert executor.closed == 1


async def test_session_created_is_remembered() -> None:
    stored = Stored()
    executor = FakeExecutor(key_rows([]), True, True)
    unit = unit_of(stored, executor)
    created = await unit.run(CreateSession(await unit.identify(*IDS), {}, {}, b"{}", 100))
    assert (await append(unit, 0, row=created.session.id)).revision == 1
    assert executor.requests[2:] == ["apply UPDATE_SESSION, INSERT_EVENT"]
