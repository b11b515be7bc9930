"""A memory that is changed often is rewritten, so that it does not grow with each change."""

import asyncio
from typing import Any

import pytest
import sqlalchemy as sa
from google.adk.memory.memory_entry import MemoryEntry

from adk_secure_sessions import AesGcmBackend, DatabaseError, EncryptedSessionService, TamperedError
from adk_secure_sessions.integrations import memory as memory_module
from adk_secure_sessions.integrations import memory_index
from adk_secure_sessions.maintenance import Database, retire, rotate_data, verify
from tests.faults import Point, lost, with_faults
from tests.integrations.memory_support import (
    APP,
    USER,
    add,
    content,
    forget,
    found,
    items_of,
    ours,
    text_event,
)
from tests.maintenance.support import OLD, query, run_sql
from tests.processes import results

BACKEND = AesGcmBackend(OLD)
ROWS = {
    "secure_events": "SELECT session_row, seq, time, event FROM secure_events ORDER BY 1, 2",
    "secure_sessions": "SELECT * FROM secure_sessions",
    "secure_witnesses": "SELECT * FROM secure_witnesses",
}


@pytest.fixture(autouse=True)
def spare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_index, "SPARE_ITEMS", 3)


async def note(memory: Any, memory_id: str, text: str) -> None:
    entry = MemoryEntry(id=memory_id, content=content(text))
    await memory.add_memory(app_name=APP, user_id=USER, memories=[entry])


async def test_replaced_memory_does_not_grow(url: str, place: sa.URL) -> None:
    async with EncryptedSessionService(url, BACKEND) as sessions:
        memory = ours(sessions)
        await add(memory, text_event("old cat", event_id="gone"))
        await forget(memory, "gone")
        for n in range(14):
            await note(memory, "fact", f"cat {n}")
            assert query(place, "SELECT count(*) FROM secure_events")[0][0] <= 3 + 2 * 3 + 1
            assert await found(memory, "cat") == [f"cat {n}"]
        for one in (memory, ours(sessions)):
            assert await found(one, "cat") == ["cat 13"]
        await add(memory, text_event("old cat", event_id="gone"))
        assert await found(ours(sessions), "old") == [], "a deleted id stays away"
        assert not any(b"old cat" in item for item in await items_of(sessions))
    async with Database(url, BACKEND) as db:
        assert (await verify(db)).bad == 0
        await rotate_data(db)
        await retire(db)
        assert (await verify(db)).bad == 0


async def test_change_of_many_items_is_one_rewrite(
    url: str, place: sa.URL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_index, "SPARE_ITEMS", 1000)
    monkeypatch.setattr(memory_index, "_PACKED_BYTES", 0)
    monkeypatch.setattr(memory_module, "_MAX_REPLACED", 10)
    events = [text_event(f"cat{n} dog") for n in range(11)]
    async with EncryptedSessionService(url, BACKEND) as sessions:
        memory = ours(sessions)
        for n in range(len(events)):
            await add(memory, *events[: n + 1])
            await add(memory, events[n], name="other")
        first = query(place, ROWS["secure_sessions"])[0][0]
        await add(memory, text_event("bird"))  # drops 11 entries of 11 items
        assert query(place, ROWS["secure_sessions"])[0][0] != first
        assert await found(memory, "bird") == ["bird"]
        assert await found(ours(sessions), "cat3 cat10") == ["cat10 dog"]


async def test_lost_answers_lose_and_double_nothing(file_url: str) -> None:
    """The connection breaks before and after the commit of a rewrite."""
    for when in ("before", "after"):
        sessions, faults = with_faults(lambda: EncryptedSessionService(file_url, BACKEND))
        async with sessions:
            memory = ours(sessions)
            for n in range(12):
                getattr(faults.data, when)(Point.WRITE, lost())
                await note(memory, "fact", f"cat {n}")
                assert await found(ours(sessions), "cat") == [f"cat {n}"]


async def test_failed_rewrite_changes_nothing(file_url: str) -> None:
    sessions, faults = with_faults(lambda: EncryptedSessionService(file_url, BACKEND))
    async with sessions:
        memory = ours(sessions)
        while len(await items_of(sessions)) < 8:
            await note(memory, "fact", f"cat {len(await items_of(sessions))}")
        before = {table: query(file_url, rows) for table, rows in ROWS.items()}
        faults.data.after(Point.APPLY, DatabaseError("the disk is full"))
        with pytest.raises(DatabaseError):
            await note(memory, "fact", "dog")
        assert {table: query(file_url, rows) for table, rows in ROWS.items()} == before
        await note(memory, "fact", "dog")
        assert len(await items_of(sessions)) < 8
        assert await found(memory, "cat dog") == ["dog"]


async def _write(url: str, name: str) -> None:
    async with EncryptedSessionService(url, BACKEND) as sessions:
        memory = ours(sessions)
        for n in range(10):
            await note(memory, name, f"common {name}{n}")
            assert f"common {name}{n}" in await found(memory, "common")


async def is_complete(url: str) -> bool:
    async with EncryptedSessionService(url, BACKEND) as sessions:
        return sorted(await found(ours(sessions), "common")) == ["common a9", "common b9"]


async def test_two_services_that_rewrite_lose_nothing(url: str) -> None:
    await asyncio.gather(_write(url, "a"), _write(url, "b"))
    assert await is_complete(url)


def write_in_process(say: Any, url: str, name: str) -> None:
    memory_index.SPARE_ITEMS = 3
    asyncio.run(_write(url, name))
    say(True)


@pytest.mark.soak
async def test_two_processes_that_rewrite_lose_nothing(file_url: str) -> None:
    jobs = [(write_in_process, file_url, name) for name in ("a", "b")]
    assert await asyncio.to_thread(results, *jobs) == [[True], [True]]
    assert await is_complete(file_url)


async def test_rows_from_before_a_rewrite_are_rejected(file_url: str) -> None:
    async with EncryptedSessionService(file_url, BACKEND) as sessions:
        memory = ours(sessions)
        for n in range(7):
            await note(memory, "fact", f"cat {n}")
        old = {table: query(file_url, rows) for table, rows in ROWS.items()}
        await note(memory, "fact", "cat 7")
        new = {table: query(file_url, rows) for table, rows in ROWS.items()}
        assert new["secure_sessions"][0][0] != old["secure_sessions"][0][0]
    own_tag = new["secure_sessions"][0][2]
    rejected = 0
    for table, rows in old.items():
        for row in rows:
            if row in new[table] or (table == "secure_witnesses" and row[0] != own_tag):
                continue
            async with EncryptedSessionService(file_url, BACKEND) as sessions:
                saved = query(file_url, f"SELECT * FROM {table}")
                replace(file_url, table, row, new)
                try:
                    assert await found(ours(sessions), "cat") == ["cat 7"]
                except TamperedError:
                    rejected += 1
                run_sql(file_url, f"DELETE FROM {table}")
                for one in saved:
                    insert(file_url, table, one)
    assert rejected >= 2 + 3, "the row, the witness, and the items in place of new ones"
    async with EncryptedSessionService(file_url, BACKEND) as sessions:
        assert await found(ours(sessions), "cat") == ["cat 7"]


def replace(place: str, table: str, row: Any, new: Any) -> None:
    """Store *row* in place of the new row with the same tag or number."""
    if table == "secure_events":
        session_row = new["secure_sessions"][0][0]
        run_sql(place, f"DELETE FROM {table} WHERE seq = {row[1]}")
        row = (session_row, *row[1:])
    else:
        tag = row[2] if table == "secure_sessions" else row[0]
        run_sql(place, f"DELETE FROM {table} WHERE tag = :tag", tag=tag)
    insert(place, table, row)


def insert(place: str, table: str, row: Any) -> None:
    values = {f"c{n}": value for n, value in enumerate(row)}
    run_sql(place, f"INSERT INTO {table} VALUES (:{', :'.join(values)})", **values)
