"""What somebody who reads or writes the database can do to a memory, and what stays of it."""

import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from adk_secure_sessions import (
    AesGcmBackend,
    DecryptionError,
    EncryptedSessionService,
    TamperedError,
)
from adk_secure_sessions.formats.events import encode_item
from adk_secure_sessions.maintenance import Database, verify
from adk_secure_sessions.storage.operation_runner import empty_caches
from tests.attacks.needles import files_of, found_in, locals_of, needle
from tests.integrations.memory_support import (
    APP,
    USER,
    add,
    add_events,
    forget,
    found,
    items_of,
    ours,
    session,
    text_event,
)
from tests.maintenance.support import OLD, query, run_sql

BACKEND = AesGcmBackend(OLD)
VALUE = "0123456789abcdef" * 2
ROWS = "SELECT session_row, seq, time, event FROM secure_events ORDER BY seq"


async def fill_and_forget(url: str, place: sa.URL | str) -> tuple[list[Any], list[Any]]:
    """Six items: an empty one, four that add, and a tombstone of the second of the four.

    Return their rows before and after the deletion.
    """
    async with EncryptedSessionService(url, BACKEND) as sessions:
        memory = ours(sessions)
        events = [text_event(f"cat {n}") for n in range(4)]
        for n in range(4):
            await add(memory, *events[: n + 1])
        before = query(place, ROWS)
        await forget(memory, events[1].id)
        return before, query(place, ROWS)


async def reads_and_writes(url: str) -> list[Callable[[], Awaitable[object]]]:
    sessions = EncryptedSessionService(url, BACKEND)
    memory = ours(sessions, cache_entries=0)

    def call(what: Callable[[], Awaitable[object]]) -> Callable[[], Awaitable[object]]:
        async def then_close() -> object:
            try:
                return await what()
            finally:
                await sessions.close()

        return then_close

    return [
        call(lambda: found(memory, "cat")),
        call(lambda: add(memory, text_event("new"))),
        call(lambda: add_events(memory, text_event("new"))),
        call(lambda: forget(memory, "unknown")),
    ]


async def every_call_is_rejected(url: str, *, verify_finds: bool = True) -> None:
    for call in await reads_and_writes(url):
        with pytest.raises(TamperedError) as caught:
            await call()
        shown = locals_of(caught.value)
        assert not any(f"cat {n}" in shown for n in range(4))
    async with Database(url, BACKEND) as db:
        assert ((await verify(db)).bad >= 1) == verify_finds


async def test_deleted_content_is_not_stored_any_more(url: str, place: sa.URL) -> None:
    before, after = await fill_and_forget(url, place)
    assert len(before) == 5
    assert len(after) == 6
    assert [n for n in range(5) if before[n] != after[n]] == [2]
    async with EncryptedSessionService(url, BACKEND) as sessions:
        items = await items_of(sessions)
        assert not any(b"cat 1" in item for item in items)
        assert sum(b"cat 2" in item for item in items) == 1
        assert await found(ours(sessions), "cat") == ["cat 0", "cat 2", "cat 3"]
    async with Database(url, BACKEND) as db:
        assert (await verify(db)).bad == 0


async def test_replay_of_a_deleted_entry_is_rejected(url: str, place: sa.URL) -> None:
    before, _ = await fill_and_forget(url, place)
    async with EncryptedSessionService(url, BACKEND) as sessions:
        warm = ours(sessions)
        expected = ["cat 0", "cat 2", "cat 3"]
        assert await found(warm, "cat") == expected
        put(place, before[2])
        await every_call_is_rejected(url)
        # A warm cache never reads an old item again, so it cannot get the deleted entry back.
        assert await found(warm, "cat") == expected
        await add_events(warm, text_event("new cat"))
        assert await found(warm, "cat") == [*expected, "new cat"]
        empty_caches()
        with pytest.raises(TamperedError):
            await found(warm, "cat")


def put(place: sa.URL | str, row: Any) -> None:
    values = dict(zip(("row", "seq", "time", "event"), row, strict=True))
    where = "WHERE session_row = :row AND seq = :seq"
    assert run_sql(place, f"UPDATE secure_events SET event = :event {where}", **values) in (0, 1)


@pytest.mark.parametrize(
    "seq", [0, 2, 5, *(pytest.param(seq, marks=pytest.mark.soak) for seq in (1, 3, 4))]
)
async def test_removal_of_any_item_is_rejected(file_url: str, seq: int) -> None:
    await fill_and_forget(file_url, file_url)
    assert run_sql(file_url, f"DELETE FROM secure_events WHERE seq = {seq}") == 1
    await every_call_is_rejected(file_url)


@pytest.mark.parametrize(
    "seq", [0, 3, *(pytest.param(seq, marks=pytest.mark.soak) for seq in (1, 2, 4))]
)
async def test_exchange_of_any_two_items_is_rejected(file_url: str, seq: int) -> None:
    _, rows = await fill_and_forget(file_url, file_url)
    put(file_url, (*rows[seq][:3], rows[seq + 1][3]))
    put(file_url, (*rows[seq + 1][:3], rows[seq][3]))
    await every_call_is_rejected(file_url)


async def forget_another_in_a_copy(
    directory: Path, url: str, forgotten: str, other: str
) -> list[tuple[Any, ...]]:
    """Delete *forgotten* from the database and *other* from a copy; return the copy's rows."""
    copy = f"sqlite+aiosqlite:///{shutil.copy(directory / 'sessions.db', directory / 'copy.db')}"
    for one, event_id in ((url, forgotten), (copy, other)):
        async with EncryptedSessionService(one, BACKEND) as sessions:
            await forget(ours(sessions), event_id)
    return query(copy, ROWS)


async def test_tombstone_of_another_deletion_is_rejected(file_url: str, tmp_path: Path) -> None:
    """The tombstone and all else of a copy in which another entry was deleted."""
    events = [text_event(f"cat {n}") for n in range(2)]
    async with EncryptedSessionService(file_url, BACKEND) as sessions:
        await add(ours(sessions), events[0])
        await add(ours(sessions), *events)
    rows = await forget_another_in_a_copy(tmp_path, file_url, events[0].id, events[1].id)
    put(file_url, rows[-1])
    await every_call_is_rejected(file_url)


async def test_replaced_item_of_another_copy_is_rejected(file_url: str, tmp_path: Path) -> None:
    """Both copies have deleted an entry of the same item, with the same number of writes."""
    events = [text_event(f"cat {n}") for n in range(3)]
    async with EncryptedSessionService(file_url, BACKEND) as sessions:
        await add(ours(sessions), *events)  # one item
    rows = await forget_another_in_a_copy(tmp_path, file_url, events[1].id, events[0].id)
    own = query(file_url, ROWS)
    put(file_url, rows[1])
    await every_call_is_rejected(file_url)
    put(file_url, own[1])
    async with EncryptedSessionService(file_url, BACKEND) as sessions:
        assert await found(ours(sessions), "cat") == ["cat 0", "cat 2"]


async def test_rollback_of_the_collection_row_is_rejected(file_url: str) -> None:
    columns = "SELECT revision, updated_at, state FROM secure_sessions"
    async with EncryptedSessionService(file_url, BACKEND) as sessions:
        await add(ours(sessions), text_event("cat"))
        [(revision, updated_at, state)] = query(file_url, columns)
        await add(ours(sessions), text_event("cat"))
    change = "UPDATE secure_sessions SET revision = :r, updated_at = :u, state = :s"
    run_sql(file_url, change, r=revision, u=updated_at, s=state)
    await every_call_is_rejected(file_url)


async def test_malformed_item_is_rejected(file_url: str) -> None:
    """tests/test_memory_items.py has all kinds of them."""
    async with EncryptedSessionService(file_url, BACKEND) as sessions:
        for item in ({}, {"scope": "s"}):
            await sessions.collections.append((APP, USER, '["memory"]'), encode_item(item))
        with pytest.raises(DecryptionError, match=r"secure_events row \d+, 1: .*its writer"):
            await found(ours(sessions), "cat")


@pytest.mark.parametrize(
    ("replacement", "places"), [(VALUE, [0]), (VALUE, [1, 0]), ("f" * 32, [1]), (None, [1])]
)
async def test_record_that_does_not_fit_to_the_deletion_is_rejected(
    file_url: str, replacement: str | None, places: list[int]
) -> None:
    entry = {"id": "e", "content": {"parts": [{"text": "cat"}]}}
    item: dict[str, Any] = {"scope": ["events"], "add": [entry]}
    if replacement:
        item["replacement"] = replacement
    drop = {"1": {"places": places, "replacement": VALUE}}
    async with EncryptedSessionService(file_url, BACKEND) as sessions:
        for values in ({}, item, {"drop": drop}):
            await sessions.collections.append((APP, USER, '["memory"]'), encode_item(values))
    await every_call_is_rejected(file_url)


async def test_file_holds_no_word_and_no_id(file_url: str, tmp_path: Path) -> None:
    user, name = needle("user id"), needle("session id")
    async with EncryptedSessionService(file_url, BACKEND) as sessions:
        memory = ours(sessions)
        event = text_event(needle("text"), event_id=needle("metadata"), author=needle("author"))
        await memory.add_session_to_memory(session(event, name=name, user=user))
        assert await found(memory, needle("text"), user) == [needle("text")]
        await memory.delete_memory(app_name=APP, user_id=user, memory_id=event.id)
        files = files_of(tmp_path / "sessions.db")
    files |= files_of(tmp_path / "sessions.db")
    assert APP.encode() in files["sessions.db"]
    assert {text for data in files.values() for text in found_in(data)} == set()


# --- the rest of the package ---------------------------------------------------------------------
