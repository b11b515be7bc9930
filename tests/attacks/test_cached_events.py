"""Attacks while a service runs that has the events of the session in its cache of events."""

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from google.adk.events import Event
from google.genai import types

from adk_secure_sessions import (
    AesGcmBackend,
    Audit,
    Caches,
    DatabaseError,
    EncryptedSessionService,
    TamperedError,
)
from adk_secure_sessions.migration import PlaintextFallbackService
from tests.attacks.databases import also_on
from tests.attacks.needles import locals_of
from tests.attacks.support import (
    Database,
    OlderCopy,
    Operation,
    append,
    get,
    get_after,
    get_last,
    get_last_three,
    get_no_events,
    outcome,
)
from tests.attacks.test_running import SESSION_COLUMNS
from tests.attacks.test_verify import verified
from tests.attacks.world import VISIT, new_event
from tests.faults import Point, with_faults
from tests.migration.lookups import APP, MemoryLookup

CACHED: dict[str, Any] = {"cache": Caches(events=10**7)}


@asynccontextmanager
async def caching(db: Database, **options: Any) -> AsyncIterator[EncryptedSessionService]:
    """A service that has read the whole session, which has four events."""
    async with db.service(**CACHED, **options) as service:
        assert await service.get_session(**VISIT._asdict()) == db.session(VISIT)
        yield service


OF_OTHER = "(SELECT event FROM secure_events WHERE session_row = {} AND seq = {})"
OLDER_EVENTS = {
    "modified": "UPDATE secure_events SET event = CAST(event || x'00' AS BLOB)",
    "of another event": f"UPDATE secure_events SET event = {OF_OTHER.format(':visit', 2)}",
    "of another session": f"UPDATE secure_events SET event = {OF_OTHER.format(':notes', 1)}",
    "of another time": "UPDATE secure_events SET time = time + 1",
    "removed": "DELETE FROM secure_events",
}


@also_on("fernet", "postgresql")
@pytest.mark.parametrize("attack", OLDER_EVENTS)
async def test_older_event_that_was_tampered_with_is_returned_as_written_and_verify_names_it(
    db: Database, attack: str
) -> None:
    async with caching(db) as service:
        db.run(f"{OLDER_EVENTS[attack]} WHERE session_row = :visit AND seq = 1")
        session = await service.get_session(**VISIT._asdict())
        assert session == db.session(VISIT)
        found = await verified(db)
        assert {problem.table for problem in found.problems} == {"secure_events"}
        async with db.service(**CACHED) as another:
            with pytest.raises(TamperedError):
                await another.get_session(**VISIT._asdict())
        await service.append_event(session, new_event(10))
        assert await service.get_session(**VISIT._asdict()) == session
        await service.close()  # the caches are empty, as after `Caches.seconds`
        with pytest.raises(TamperedError):
            await service.get_session(**VISIT._asdict())


Attack = Callable[[Database, OlderCopy], Awaitable[None]]
READS: tuple[Operation, ...] = (get, get_last, get_last_three, get_after, get_no_events)


async def store(db: Database, *numbers: int) -> None:
    """Another process appends events."""
    async with db.service() as another:
        session = await another.get_session(**VISIT._asdict())
        assert session is not None
        for number in numbers:
            await another.append_event(session, new_event(number, {"step": number}))


def statement(sql: str) -> Attack:
    async def attack(db: Database, older: OlderCopy) -> None:
        db.run(sql)

    return attack


def to_new_event(sql: str, seq: int) -> Attack:
    async def attack(db: Database, older: OlderCopy) -> None:
        await store(db, 10, 11)
        db.run(f"{sql} WHERE session_row = :visit AND seq = {seq}")

    return attack


async def roll_back(db: Database, older: OlderCopy) -> None:
    older.replay_row("secure_sessions", "id = :visit")
    db.run("DELETE FROM secure_events WHERE session_row = :visit AND seq > 1")


async def roll_back_the_row(db: Database, older: OlderCopy) -> None:
    older.replay_row("secure_sessions", "id = :visit")


async def give_it_another_history(db: Database, older: OlderCopy) -> None:
    """Restore an older copy, on which somebody then stores more events than the cache has."""
    await roll_back(db, older)
    await store(db, 20, 21, 22, 23)


async def give_it_another_end(db: Database, older: OlderCopy) -> None:
    """The other history has as many events as the cache."""
    await roll_back(db, older)
    await store(db, 20, 21)


async def create_it_again(db: Database, older: OlderCopy) -> None:
    async with db.service() as another:
        await another.delete_session(**VISIT._asdict())
        await another.create_session(**VISIT._asdict())
    await store(db, *range(20, 26))


async def delete_it(db: Database, older: OlderCopy) -> None:
    async with db.service() as another:
        await another.delete_session(**VISIT._asdict())


async def replay_it_after_a_deletion(db: Database, older: OlderCopy) -> None:
    """All rows but the version witness."""
    rows = db.rows("SELECT * FROM secure_sessions WHERE id = :visit")
    await delete_it(db, older)
    with db.connect() as connection:
        connection.execute(f"INSERT INTO secure_sessions VALUES ({', '.join('?' * 9)})", rows[0])


CASES_OF_ALL_READS = ("another history", "another end", "last new event modified")
MODIFIED = "UPDATE secure_events SET event = CAST(event || x'00' AS BLOB)"
ATTACKS: dict[str, Attack] = {
    **{
        f"column {column}": statement(
            f"UPDATE secure_sessions SET {column} = {value} WHERE id = :visit"
        )
        for column, value in SESSION_COLUMNS.items()
    },
    "session removed": statement("DELETE FROM secure_sessions WHERE id = :visit"),
    "witness removed": statement(
        "DELETE FROM secure_witnesses WHERE tag = (SELECT tag FROM secure_sessions "
        "WHERE id = :visit)"
    ),
    "user removed": statement("DELETE FROM secure_users WHERE id = :alice"),
    "app removed": statement("DELETE FROM secure_apps WHERE id = :clinic"),
    "last event removed": statement(
        "DELETE FROM secure_events WHERE session_row = :visit AND seq = 3"
    ),
    "event added": statement(
        "INSERT INTO secure_events SELECT session_row, 4, time, event FROM secure_events "
        "WHERE session_row = :visit AND seq = 3"
    ),
    "new event modified": to_new_event(MODIFIED, 4),
    "last new event modified": to_new_event(MODIFIED, 5),
    "new event is the last known one": to_new_event(
        f"UPDATE secure_events SET event = {OF_OTHER.format(':visit', 3)}", 4
    ),
    "new event is the next one": to_new_event(
        f"UPDATE secure_events SET event = {OF_OTHER.format(':visit', 5)}", 4
    ),
    "new event of another time": to_new_event("UPDATE secure_events SET time = time - 1", 4),
    "new event removed": to_new_event("DELETE FROM secure_events", 4),
    "new event renumbered": to_new_event("UPDATE secure_events SET seq = 6", 5),
    "rolled back": roll_back,
    "row rolled back": roll_back_the_row,
    "another history": give_it_another_history,
    "another end": give_it_another_end,
    "created again": create_it_again,
    "deleted": delete_it,
    "replayed after a deletion": replay_it_after_a_deletion,
}


@also_on("postgresql", cases=["another history", "new event modified", "column state"])
@pytest.mark.parametrize("attack", ATTACKS)
async def test_outcome_is_as_without_the_cache(db: Database, older: OlderCopy, attack: str) -> None:
    """Two services have read the session before the attack, one with the cache and one without."""
    async with AsyncExitStack() as stack:
        plain = await stack.enter_async_context(db.service())
        assert await plain.get_session(**VISIT._asdict()) == db.session(VISIT)
        reads = READS if attack in CASES_OF_ALL_READS else READS[:1]
        cached = [await stack.enter_async_context(caching(db)) for _ in reads]
        await ATTACKS[attack](db, older)
        for service, operation in zip(cached, reads, strict=True):
            for one in (operation, get):
                found = await outcome(one(service, db, VISIT))
                expected = await outcome(one(plain, db, VISIT))
                assert type(found) is type(expected), (one, found, expected)
                if isinstance(expected, Exception):
                    assert str(found) == str(expected)
                    assert isinstance(found, Exception)
                    assert found.__context__ is None or found.__suppress_context__
                else:
                    assert found == expected
        appended = [type(await outcome(append(one, db, VISIT))) for one in (cached[0], plain)]
        assert appended[0] is appended[1] or not issubclass(appended[0], Exception)


@also_on("postgresql")
async def test_session_that_was_restored_after_an_attack_is_read_again(db: Database) -> None:
    async with caching(db) as service:
        db.run("UPDATE secure_sessions SET updated_at = updated_at + 1 WHERE id = :visit")
        with pytest.raises(TamperedError):
            await service.get_session(**VISIT._asdict())
        db.run("UPDATE secure_sessions SET updated_at = updated_at - 1 WHERE id = :visit")
        assert await service.get_session(**VISIT._asdict()) == db.session(VISIT)


async def test_failed_audit_record_shows_no_cached_events(tmp_path: Path) -> None:
    service, faults = with_faults(
        lambda: EncryptedSessionService(
            f"sqlite:///{tmp_path}/s.db",
            AesGcmBackend(os.urandom(32)),
            cache=Caches(events=10**7),
            audit=Audit("blind", table=True),
        )
    )
    async with service:
        ids: Any = {"app_name": "a", "user_id": "u", "session_id": "s"}
        session = await service.create_session(**ids)
        content = types.Content(role="model", parts=[types.Part(text="NeedleText")])
        await service.append_event(session, Event(author="a", content=content))
        for _ in range(2):
            await service.get_session(**ids)
        faults.data.before(Point.WRITE, DatabaseError("disk is full"), nth=None)
        with pytest.raises(DatabaseError) as caught:
            await service.get_session(**ids)
        faults.data.forget()
    assert "NeedleText" not in locals_of(caught.value)


async def test_failed_query_of_a_fallback_shows_no_cached_events(tmp_path: Path) -> None:
    service, faults = with_faults(
        lambda: EncryptedSessionService(
            f"sqlite:///{tmp_path}/s.db", AesGcmBackend(os.urandom(32)), cache=Caches(events=10**7)
        )
    )
    source = MemoryLookup()
    source.put("u", "other", [])
    source.users["u"] = {"x": 1}
    ids: Any = {"app_name": APP, "user_id": "u", "session_id": "s"}
    shown = []
    async with PlaintextFallbackService(service, source) as fallback:
        session = await service.create_session(**ids)  # the source still has the states
        content = types.Content(role="model", parts=[types.Part(text="NeedleText")])
        await service.append_event(session, Event(author="a", content=content))
        for _ in range(2):
            await fallback.get_session(**ids)
        for nth in range(1, 10):
            another = PlaintextFallbackService(service, source)  # asks which states are copied
            faults.data.before(Point.READ, DatabaseError("a disk fails"), nth=nth)
            try:
                await another.get_session(**ids)
            except DatabaseError as error:
                shown.append(locals_of(error))
            faults.data.forget()
    assert len(shown) >= 3
    assert not [text for text in shown if "NeedleText" in text]
