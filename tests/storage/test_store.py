"""The store remembers sessions, so that an append needs no read, and forgets what is not so."""

from typing import Any

import pytest

from adk_secure_sessions.db.protocol import Executors
from adk_secure_sessions.lru import Caches
from adk_secure_sessions.storage.bindings import StoredSession
from adk_secure_sessions.storage.store import Store
from adk_secure_sessions.storage.unit_of_work import UnitOfWork
from adk_secure_sessions.storage.writes import Expected, MissingSession, NewEvent, StaleRevision
from tests.storage.support import WHO, FakeExecutor, Stored, backends, key_rows


def decoded(plaintext: bytes, session_row: int, seq: int) -> bytes:
    return plaintext


def store_of(stored: Stored, executor: FakeExecutor) -> Store:
    """A store on a database that *executor* stands for; it has read nothing yet."""

    async def open_keyring(known: object) -> Any:
        return stored.keys.keyring

    unit = UnitOfWork(Executors(executor, executor), backends(), open_keyring, cache=Caches(10, 10))
    return Store(unit)


NEW_EVENT = NewEvent(b"new", 500, {}, {}, {})
IDS = WHO[:3]


async def append(store: Store, revision: int) -> list[StoredSession]:
    appended: list[StoredSession] = []
    await store.append(*IDS, Expected(3, revision), NEW_EVENT, appended.append)
    return appended


async def test_session_that_was_read_is_appended_to_without_another_read() -> None:
    stored = Stored(events=2)
    executor = FakeExecutor(stored.rows(keys=True), True, True)
    store = store_of(stored, executor)
    assert await store.get(*IDS, decoded)
    for revision in (2, 3):
        (session,) = await append(store, revision)
        assert session.revision == revision + 1
    assert executor.requests[1:] == ["apply UPDATE_SESSION, INSERT_EVENT"] * 2


async def test_append_at_another_revision_than_the_remembered_one_reads_the_session() -> None:
    stored = Stored(events=2)
    executor = FakeExecutor(stored.rows(keys=True), stored.rows(last=1))
    store = store_of(stored, executor)
    await store.get(*IDS, decoded)
    with pytest.raises(StaleRevision):
        await append(store, 1)
    assert executor.requests[1:] == ["read SESSION_WITH_LAST_EVENTS"]


async def test_deleted_session_is_forgotten() -> None:
    stored = Stored(events=2)
    executor = FakeExecutor(stored.rows(keys=True), True, [])
    store = store_of(stored, executor)
    await store.get(*IDS, decoded)
    assert await store.delete(*IDS)
    with pytest.raises(MissingSession):
        await append(store, 2)
    assert executor.requests[1:] == [
        "apply DELETE_KNOWN_SESSION, DELETE_EVENTS, DELETE_WITNESS",
        "read SESSION_WITH_LAST_EVENTS",
    ]


async def test_snapshot_of_a_remembered_session_is_not_kept() -> None:
    """It may be large: a change that has to be merged into it reads it again."""
    stored = Stored(events=2, snapshot=b'{"large":true}')
    executor = FakeExecutor(stored.rows(keys=True), stored.rows(last=1), True)
    store = store_of(stored, executor)
    await store.get(*IDS, decoded)
    large = NEW_EVENT._replace(session_delta={"k": "x" * 9000})
    await store.append(*IDS, Expected(3, 2), large, lambda session: None)
    assert executor.requests[1:] == [
        "read SESSION_WITH_LAST_EVENTS",
        "apply UPDATE_SESSION, UPDATE_SNAPSHOT, INSERT_EVENT",
    ]


async def test_closed_store_forgets_its_sessions() -> None:
    stored = Stored(events=2)
    executor = FakeExecutor(stored.rows(keys=True), stored.rows(keys=True, last=1), True)
    store = store_of(stored, executor)
    await store.get(*IDS, decoded)
    await store.close()
    await append(store, 2)
    assert executor.requests[1] == "read SESSION_WITH_LAST_EVENTS with keys"
    assert executor.closed == 1


async def test_session_created_is_remembered() -> None:
    stored = Stored()
    executor = FakeExecutor(key_rows([]), True, True)
    store = store_of(stored, executor)
    view = await store.create(*IDS, {}, {}, b"{}", 100)
    appended: list[StoredSession] = []
    expected = Expected(view.session.id, 0)
    await store.append(*IDS, expected, NEW_EVENT, appended.append)
    assert appended[0].revision == 1
    assert executor.requests[2:] == ["apply UPDATE_SESSION, INSERT_EVENT"]
