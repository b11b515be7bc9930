"""`find_sessions`, which ADK does not have: sessions by a value of their state.

How it works.  `opened()` opens a service that indexes `KEYS`; `found` are the ids of the sessions
that a search returns.  `assert_kept` runs `verify`, which computes the rows of the search index
from the states and compares them with the stored rows.
"""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from google.adk.sessions import Session
from sqlalchemy import URL

from adk_secure_sessions import AesGcmBackend, ConfigurationError, EncryptedSessionService
from adk_secure_sessions.db.protocol import Conflict
from adk_secure_sessions.formats import json_text
from adk_secure_sessions.formats.events import encode_item
from adk_secure_sessions.maintenance import (
    Database,
    Problem,
    drop_index,
    erase_user,
    fill_index,
    move_keys,
    purge_sessions,
    retire,
    rotate_data,
    rotate_master,
    separate,
    status,
    vacuum,
    verify,
)
from adk_secure_sessions.storage.features.imports import ImportStatus
from adk_secure_sessions.storage.operation_runner import empty_caches
from tests.conformance.services import KEY, Kind
from tests.conformance.support import APP, START, USER, each_kind, event
from tests.faults import Point, lost, with_faults

ON_SERVERS = [
    "test_each_write_keeps_the_index",
    "test_sessions_are_found_by_a_value_of_their_state",
    "test_sessions_are_found_by_value_and_time",
]
kind = each_kind(
    "encrypted-file",
    some={
        "encrypted-postgresql": [
            *ON_SERVERS,
            "test_imported_sessions_and_states_are_found",
            "test_index_is_filled_while_services_write",
        ],
        "encrypted-mariadb": ON_SERVERS,
        "encrypted-key-database": ["test_each_write_keeps_the_index"],
    },
    soak=["encrypted-engine", "encrypted-psycopg", "encrypted-pgbouncer"],
)
KEYS = ["ticket", "user:mrn"]
LARGE = {"text": "x" * 9000}  # a state with it needs a snapshot
Opened = Callable[..., Awaitable[EncryptedSessionService]]


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


@pytest.fixture
def arguments(url: URL, kind: Kind) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    if "key_database" in kind.open.__name__:
        keys = {"key_db_url": url.set(database=f"{url.database}.keys")}
    return {"db_url": url, "backend": AesGcmBackend(KEY), **keys}


@pytest.fixture
def opened(stack: AsyncExitStack, arguments: dict[str, Any]) -> Opened:
    async def open_one(keys: list[str] = KEYS, **more: Any) -> EncryptedSessionService:
        service = EncryptedSessionService(**arguments, indexed_state_keys=keys, **more)
        return await stack.enter_async_context(service)

    return open_one


@pytest.fixture
async def db(
    stack: AsyncExitStack, arguments: dict[str, Any], opened: Opened
) -> AsyncIterator[Database]:
    await (await opened([])).prepare_tables()
    async with Database(**arguments) as db:
        yield db


async def fill(db: Database, app_name: str = APP) -> None:
    assert (await fill_index(db, app_name, KEYS)).complete


async def create(
    service: EncryptedSessionService, name: str, user: str = USER, **state: Any
) -> Session:
    named = {key.replace("user_", "user:"): value for key, value in state.items()}
    return await service.create_session(app_name=APP, user_id=user, session_id=name, state=named)


async def found(service: EncryptedSessionService, key: str, value: object) -> list[str]:
    response = await service.find_sessions(app_name=APP, key=key, value=value)
    return sorted(session.id for session in response.sessions)


async def assert_kept(arguments: dict[str, Any]) -> None:
    """Compare the index with the states, in a process that has just started."""
    async with Database(**arguments) as db:
        checked = await verify(db)
        assert (checked.bad, checked.problems) == (0, ())


def count_of_rows(connection: sa.Connection) -> int:
    query = sa.text(f"SELECT count(*) FROM secure_state_index WHERE row_id <> {2**63 - 1}")
    return int(connection.scalar(query) or 0)


async def test_sessions_are_found_by_a_value_of_their_state(opened: Opened, db: Database) -> None:
    service = await opened()
    one = await create(service, "one", ticket=7, other=1)
    await create(service, "two", "bob", ticket=7, user_mrn="B")
    await create(service, "three", "bob", ticket=7.0, **LARGE)
    await create(service, "four", ticket={"b": [1, True], "a": "é"})
    await create(service, "five", ticket=None)
    await service.create_session(app_name="other", user_id="bob", state={"ticket": 7})
    await fill(db)
    assert await found(service, "ticket", 7) == ["one", "two"]
    assert await found(service, "ticket", 7.0) == ["three"]
    assert await found(service, "ticket", {"a": "é", "b": (1, True)}) == ["four"]
    assert await found(service, "ticket", None) == ["five"]
    for value in ("7", True, 8, [7], {"a": "é", "b": [1, 1]}):
        assert await found(service, "ticket", value) == []
    assert await found(service, "user:mrn", "B") == ["three", "two"]
    assert await found(await opened([]), "ticket", 7) == ["one", "two"]
    response = await service.find_sessions(app_name=APP, key="ticket", value=7)
    listed = (await service.list_sessions(app_name=APP)).sessions
    assert response.sessions == [session for session in listed if session.id in ("one", "two")]
    await service.append_event(one, event())
    (again,) = [
        session
        for session in (await service.find_sessions(app_name=APP, key="ticket", value=7)).sessions
        if session.id == "one"
    ]
    await service.append_event(again, event(delta={"ticket": 8}))
    assert await found(service, "ticket", 7) == ["two"]


async def test_pages_find_each_session_once(opened: Opened, db: Database) -> None:
    service = await opened()
    names = []
    for number in range(7):
        await create(service, name := f"s{number}", f"u{number % 2}", ticket=number % 3 == 0)
        names += [name] if number % 3 == 0 else []
    await fill(db)
    for order in ("oldest", "newest"):
        pages: list[list[str]] = []
        after = None
        while not pages or after is not None:
            page = await service.find_sessions_page(
                APP, "ticket", True, limit=2, after=after, order=order
            )
            pages.append([session.id for session in page.sessions])
            after = page.next
        listed = await service.list_sessions_page(APP, limit=10, order=order)
        expected = [session.id for session in listed.sessions if session.id in names]
        assert pages == [expected[:2], expected[2:]]
    for wrong in ({"limit": 0}, {"limit": 1, "order": "?"}, {"limit": 1, "after": "?"}):
        with pytest.raises(ValueError, match="must be"):
            await service.find_sessions_page(APP, "ticket", True, **wrong)


async def test_sessions_are_found_by_value_and_time(opened: Opened, db: Database) -> None:
    service = await opened()
    for number, ticket in enumerate((7, 7, 8, 7, 7)):
        session = await create(service, f"s{number}", "bob", ticket=ticket, user_mrn="B")
        await service.append_event(session, event(timestamp=START + number))
    await fill(db)
    for key, value, expected in (
        ("ticket", 7, ["s1", "s3"]),
        ("user:mrn", "B", ["s1", "s2", "s3"]),
        ("user:mrn", "C", []),
    ):
        search: dict[str, Any] = {"updated_after": START + 1, "updated_before": START + 4}
        search |= {"key": key, "value": value}
        response = await service.find_sessions(app_name=APP, **search)
        assert [session.id for session in response.sessions] == expected
        page = await service.find_sessions_page(APP, limit=2, **search)
        assert [session.id for session in page.sessions] == expected[:2]
        if page.next is not None:
            page = await service.find_sessions_page(APP, limit=2, after=page.next, **search)
            assert [session.id for session in page.sessions] == expected[2:]


async def test_search_is_rejected_until_the_index_was_filled(opened: Opened, db: Database) -> None:
    unaware = await opened([])
    await create(unaware, "one", ticket=7)
    with pytest.raises(ConfigurationError, match="index fill"):
        await found(unaware, "ticket", 7)
    service = await opened()
    await create(service, "two", ticket=7)
    for key in KEYS:
        with pytest.raises(ConfigurationError, match=f"'{key}' of the app 'app' is not complete"):
            await found(service, key, 7)
    await fill_index(db, APP, ["ticket"])
    assert await found(service, "ticket", 7) == ["one", "two"]
    with pytest.raises(ConfigurationError):
        await found(service, "user:mrn", 7)
    with pytest.raises(ConfigurationError):
        await unaware.find_sessions(app_name="other", key="ticket", value=7)


@pytest.mark.parametrize("searches_first", [True, False])
async def test_app_without_sessions_is_searched_without_a_fill(
    opened: Opened, db: Database, searches_first: bool
) -> None:
    service = await opened()
    if searches_first:
        assert await found(service, "ticket", 7) == await found(service, "user:mrn", "A") == []
    await create(service, "one", ticket=7, user_mrn="A")
    await create(await opened([]), "two", ticket=7)
    for one in (service, await opened([])):
        assert await found(one, "ticket", 7) == ["one", "two"]
        assert await found(one, "user:mrn", "A") == ["one", "two"]
    later = await opened(["ticket", "user:mrn", "other"])
    await create(later, "three", other=1)
    with pytest.raises(ConfigurationError, match="'other' of the app 'app' is not complete"):
        await found(later, "other", 1)
    assert (await verify(db)).bad == 0
    assert (await fill_index(db, APP, [*KEYS, "other"])).written == 0
    assert await found(later, "other", 1) == ["three"]


@pytest.mark.parametrize("key", ["app:x", "temp:x", "", "user:", 7, "x" * 9000])
async def test_key_that_cannot_be_indexed_is_rejected(
    opened: Opened, db: Database, key: Any
) -> None:
    with pytest.raises(ConfigurationError):
        EncryptedSessionService("sqlite://", AesGcmBackend(KEY), indexed_state_keys=[key])
    with pytest.raises(ConfigurationError):
        await found(await opened(), key, 1)
    with pytest.raises(ConfigurationError):
        await fill_index(db, APP, [key])
    none: list[str] = []
    for keys in ("ticket", none):
        with pytest.raises(ConfigurationError, match="a list of one or more keys"):
            await fill_index(db, APP, keys)
    with pytest.raises(ConfigurationError, match="not one text"):
        EncryptedSessionService("sqlite://", AesGcmBackend(KEY), indexed_state_keys="ticket")


async def test_each_write_keeps_the_index(
    opened: Opened, db: Database, arguments: dict[str, Any]
) -> None:
    service = await opened()
    await fill(db)
    session = await create(service, "one", ticket=1, user_mrn="A")
    await service.append_event(session, event(delta={"ticket": 2}))  # without a read
    await service.append_event(session, event(delta={"other": 2}))
    await service.append_event(session, event(delta={"ticket": 3, "user:mrn": "B", "app:x": 1}))
    await service.append_event(session, event(delta={"user:other": "B"}))
    assert (await found(service, "ticket", 3), await found(service, "ticket", 1)) == (["one"], [])
    assert await found(service, "user:mrn", "B") == ["one"]
    await service.append_event(session, event(delta=LARGE))  # folds the state into a snapshot
    late = await create(service, "late", "bob", **LARGE)
    await service.append_event(late, event(delta={"ticket": 3}))
    await service.append_event(late, event(delta={"user:mrn": "C"}))
    await assert_kept(arguments)
    assert await found(service, "ticket", 3) == ["late", "one"]
    # A service that was started later maintains the index, even if it was not configured to.
    unaware = await opened([])
    copy = await unaware.get_session(app_name=APP, user_id=USER, session_id="one")
    assert copy is not None
    await unaware.append_event(copy, event(delta={"ticket": None, "user:mrn": None}))
    await create(unaware, "two", "new", ticket=None, user_mrn=None)
    assert await found(service, "ticket", None) == ["one", "two"]
    assert await found(service, "user:mrn", None) == ["one", "two"]
    await unaware.collections.append((APP, USER, '["list"]'), encode_item({"ticket": 1}))
    await unaware.delete_session(app_name=APP, user_id=USER, session_id="one")
    await service.delete_session(app_name=APP, user_id="bob", session_id="late")
    await assert_kept(arguments)
    assert (
        await db.runner.data_db.run_sync(count_of_rows) == 4
    )  # of three users, and the session "two"


async def test_append_after_a_lost_answer_keeps_the_index(
    opened: Opened, db: Database, arguments: dict[str, Any], stack: AsyncExitStack
) -> None:
    made, faults = with_faults(
        lambda: EncryptedSessionService(**arguments, indexed_state_keys=KEYS)
    )
    service = await stack.enter_async_context(made)
    await fill(db)
    session = await create(service, "one", ticket=1)
    plan = faults.data.after(Point.WRITE, lost())
    await service.append_event(session, event(delta={"ticket": 2, "user:mrn": "A"}))
    assert plan.happened
    assert await found(service, "ticket", 2) == ["one"]
    await assert_kept(arguments)


async def test_write_keeps_the_index_if_the_keyring_is_read_again_while_its_keys_are_declared(
    stack: AsyncExitStack, arguments: dict[str, Any], db: Database
) -> None:
    made, faults = with_faults(
        lambda: EncryptedSessionService(**arguments, indexed_state_keys=KEYS)
    )
    service, loop = await stack.enter_async_context(made), asyncio.get_running_loop()
    await create(service, "first", ticket=1)

    async def read_keyring_again() -> None:
        async with Database(**arguments) as other:
            await rotate_master(other)
        loop.call_soon_threadsafe(empty_caches)
        creation = create(service, "second", "of a new user", ticket=1)
        await asyncio.to_thread(asyncio.run_coroutine_threadsafe(creation, loop).result)

    faults.data.before(Point.RUN, read_keyring_again)
    await service.create_session(
        app_name="another app", user_id=USER, session_id="s", state={"ticket": 1}
    )
    found = await service.find_sessions(app_name="another app", key="ticket", value=1)
    assert [one.id for one in found.sessions] == ["s"]
    await assert_kept(arguments)


async def test_index_is_filled_while_services_write(
    opened: Opened, db: Database, arguments: dict[str, Any]
) -> None:
    before = await opened([])
    for number in range(40):
        await create(before, f"s{number}", f"u{number % 4}", ticket=number, user_mrn=number)
    services = [await opened(), await opened()]
    is_filled = asyncio.Event()
    writes: Counter[str] = Counter()

    async def write(number: int) -> None:
        service, name, user = services[number % 2], f"s{number}", f"u{number % 4}"
        while not is_filled.is_set():
            session = await service.get_session(app_name=APP, user_id=user, session_id=name)
            assert session is not None
            writes[name] += 1
            delta = {"ticket": writes[name], "user:mrn": writes[name]}
            await service.append_event(session, event(delta=delta))
            await asyncio.sleep(0.01)  # under constant deadlocks, MariaDB may give up
            if writes[name] % 3 == 0:
                await service.delete_session(app_name=APP, user_id=user, session_id=name)
                await create(service, name, user, ticket=-number)

    tasks = [asyncio.create_task(write(number)) for number in range(0, 40, 5)]
    await fill(db)
    await fill(db)
    is_filled.set()
    await asyncio.gather(*tasks)
    await assert_kept(arguments)
    assert (await fill_index(db, APP, KEYS)).written == 0
    assert await found(services[0], "ticket", 39) == ["s39"]


async def test_session_that_others_change_all_the_time_does_not_end_the_command(
    opened: Opened, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random, "uniform", lambda low, high: 0)  # no pause after a conflict
    await create(await opened([]), "s", ticket=1)
    conflicts = 0

    def change() -> None:
        nonlocal conflicts
        conflicts += 1
        if conflicts <= 50:
            raise Conflict

    db, faults = with_faults(lambda: Database(**arguments))
    async with db:
        faults.data.before(Point.APPLY, change, nth=None)
        await fill(db)
    assert conflicts > 50
    assert await found(await opened(), "ticket", 1) == ["s"]


async def test_writes_of_a_service_that_was_not_restarted_are_found_by_verify(
    opened: Opened, db: Database
) -> None:
    old = await opened([])
    session = await create(old, "one", ticket=1, user_mrn="A")
    await fill(db)
    service = await opened()
    await old.append_event(session, event(delta={"ticket": 2}))
    await create(old, "two", ticket=2)
    # A session that is not in the index is not found, and a row that is wrong finds no session.
    assert (await found(service, "ticket", 1), await found(service, "ticket", 2)) == ([], [])
    await old.delete_session(app_name=APP, user_id=USER, session_id="two")
    checked = await verify(db)
    assert [(one.table, "1 wrong" in one.detail) for one in checked.problems] == [
        ("secure_state_index", True)
    ]
    await fill_index(db, APP, ["stage"])
    await create(old, "three", ticket=2, stage=1)
    checked = await verify(db)
    assert checked.bad == 2
    assert sum("2 missing" in one.detail for one in checked.problems) == 1
    filled = await fill_index(db, APP, [*KEYS, "stage"])
    assert (filled.sessions, filled.users, filled.written, filled.removed) == (2, 1, 3, 0)
    assert await found(service, "ticket", 2) == ["one", "three"]
    assert (await verify(db)).bad == 0


async def test_imported_sessions_and_states_are_found(
    opened: Opened, arguments: dict[str, Any], db: Database
) -> None:
    service = await opened()
    await create(service, "own", ticket=0)
    await fill(db)
    async with Database(**arguments) as target:  # a process that has not been told the keys
        store = target.imports

        async def imported(name: str, state: dict[str, Any], version: str) -> ImportStatus:
            return await store.import_session(
                APP,
                "new",
                name,
                state=json_text.encode_state(state),
                events=(),
                created_at=int(START),
                updated_at=int(START),
                source_etag=version,
                replace=True,
            )

        for name in ("s", "t"):  # the second without a read
            assert await imported(name, {"ticket": 1}, "1") is ImportStatus.NEW
        assert await imported("s", {"ticket": 2, **LARGE}, "2") is ImportStatus.OUTDATED
        assert await imported("t", {"other": 2}, "2") is ImportStatus.OUTDATED
        for state in ({"mrn": "A"}, {"mrn": "B", "x": 1}, {"x": 2}):
            await store.import_state((APP, "new"), json_text.encode_state(state), replace=True)
            value = state.get("mrn")
            expected = ["s", "t"] if value else []
            assert await found(service, "user:mrn", value) == expected
        await store.import_state((APP, "newer"), json_text.encode_state({"mrn": "C"}))
    assert (await found(service, "ticket", 1), await found(service, "ticket", 2)) == ([], ["s"])
    await assert_kept(arguments)


async def test_deleted_expired_and_erased_sessions_leave_no_row(
    opened: Opened, arguments: dict[str, Any], db: Database
) -> None:
    service = await opened()
    await fill(db)
    for user in ("ada", "bob"):
        for name in ("one", "two"):
            await create(service, f"{user} {name}", user, ticket=1, user_mrn=user)
    short = await service.create_session(
        app_name=APP,
        user_id="bob",
        session_id="short",
        state={"ticket": 1},
        expires_after=timedelta(microseconds=1),
    )
    assert "short" not in await found(service, "ticket", 1)
    assert (await erase_user(db, APP, "ada", dry_run=True)).sessions == 2
    assert await found(service, "user:mrn", "ada") == ["ada one", "ada two"]
    async with Database(**arguments) as other:
        await erase_user(other, APP, "ada")
        assert (await purge_sessions(other)).deleted == 1
    assert await found(service, "user:mrn", "ada") == []
    assert await found(service, "ticket", 1) == ["bob one", "bob two"]
    await service.create_session(
        app_name=APP, user_id="bob", session_id=short.id, state={"ticket": 2}
    )
    await assert_kept(arguments)
    assert await db.runner.data_db.run_sync(count_of_rows) == 4  # of bob, and three sessions
    for name in ("bob one", "bob two", "short"):
        await service.delete_session(app_name=APP, user_id="bob", session_id=name)
    assert await db.runner.data_db.run_sync(count_of_rows) == 1


async def test_keys_are_rotated_moved_and_separated_and_sessions_are_still_found(
    opened: Opened, arguments: dict[str, Any], url: URL
) -> None:
    service = await opened()
    await create(service, "one", ticket=1, user_mrn="A")
    async with Database(**arguments) as db:
        await fill(db)
        await rotate_master(db)
        await rotate_data(db)
        await retire(db)
        await vacuum(db)
        assert await found(service, "ticket", 1) == ["one"]
        await create(service, "two", ticket=1)
        await service.close()
        await separate(db)
    await assert_kept(arguments)
    keys = url.set(database=f"{url.database}.keys")
    if "key_db_url" not in arguments and url.get_backend_name() == "sqlite":
        arguments["key_db_url"] = keys
        async with Database(**arguments) as db:
            await move_keys(db, to="key-db")
    again = EncryptedSessionService(**arguments, indexed_state_keys=KEYS)
    async with again:
        assert await found(again, "ticket", 1) == ["one", "two"]
        await create(again, "three", ticket=1)
        assert await found(again, "user:mrn", "A") == ["one", "three", "two"]
    await assert_kept(arguments)


async def test_index_that_was_dropped_cannot_be_searched_and_can_be_filled_again(
    opened: Opened, arguments: dict[str, Any], db: Database
) -> None:
    assert (await drop_index(db, APP, ["ticket"])).removed == 0
    service = await opened()
    await create(service, "one", ticket=1, user_mrn="A")
    await fill(db)
    assert (await drop_index(db, APP, ["ticket"])).removed == 1
    with pytest.raises(ConfigurationError):
        await found(service, "ticket", 1)
    assert await found(service, "user:mrn", "A") == ["one"]
    assert await db.runner.data_db.run_sync(count_of_rows) == 1
    async with Database(**arguments) as other:
        assert (await status(other)).state_index == (1, 1, 1, 0)
        assert (await fill_index(other, APP, KEYS)).written == 1
    await assert_kept(arguments)
    assert await found(service, "ticket", 1) == ["one"]
    await fill_index(db, "other", ["ticket"])
    assert (await status(db)).state_index == (2, 3, 3, 0)


async def test_index_that_is_dropped_while_it_is_filled_stays_incomplete(
    opened: Opened, arguments: dict[str, Any], db: Database
) -> None:
    await create(await opened([]), "one", ticket=1)

    async def drop() -> None:
        async with Database(**arguments) as other:
            await drop_index(other, APP, ["ticket"])

    def drop_meanwhile(*numbers: object) -> None:
        with ThreadPoolExecutor(1) as thread:
            thread.submit(asyncio.run, drop()).result()

    with pytest.raises(ConfigurationError, match="index drop"):
        await fill_index(db, APP, ["ticket"], progress=drop_meanwhile)


async def test_unreadable_session_keeps_the_index_incomplete_unless_it_is_skipped(
    opened: Opened, db: Database
) -> None:
    await create(await opened([]), "before the keys")
    service = await opened(skip_unreadable_sessions=True)
    for name in ("one", "two"):
        await create(service, name, ticket=1)

    def damage(connection: sa.Connection) -> None:
        row = sa.text("UPDATE secure_sessions SET revision = 1 WHERE id = :id")
        _, one, _ = connection.scalars(sa.text("SELECT id FROM secure_sessions ORDER BY id"))
        connection.execute(row, {"id": one})

    await db.runner.data_db.run_sync(damage)
    filled = await fill_index(db, APP, KEYS)
    assert (filled.sessions, filled.bad, filled.complete) == (2, 1, False)
    (problem,) = filled.problems
    assert isinstance(problem, Problem)
    with pytest.raises(ConfigurationError):
        await found(service, "ticket", 1)
    assert (await fill_index(db, APP, KEYS, skip_unreadable=True)).complete
    assert await found(service, "ticket", 1) == ["two"]
    strict = await opened()
    with pytest.raises(Exception, match="secure_sessions"):
        await found(strict, "ticket", 1)


async def test_search_reads_only_what_it_finds_in_one_statement(
    arguments: dict[str, Any], db: Database, stack: AsyncExitStack, opened: Opened
) -> None:
    writer = await opened()
    for number in range(30):
        await create(writer, f"s{number}", f"u{number}", ticket=number)
    await fill(db)
    made, faults = with_faults(lambda: EncryptedSessionService(**arguments))
    service = await stack.enter_async_context(made)
    assert await found(service, "ticket", 1) == ["s1"]
    reads: list[int] = []

    def count(_step: object, rows: Any) -> bool:
        reads.append(len(rows))
        return False

    faults.data.after(Point.READ, lambda: None, when=count)
    assert await found(service, "ticket", 7) == ["s7"]
    assert len(reads) == 1
    assert reads[0] < 20
