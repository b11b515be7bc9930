"""Sessions and states of another database that `Store` imports are like those that services write.

`store` is what `migrate` uses: the `Store` of a `maintenance.Database` on the service's database.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import sqlalchemy as sa
from google.adk.events.event import Event
from google.adk.sessions import BaseSessionService, Session
from sqlalchemy import URL

from adk_secure_sessions import AesGcmBackend, ConfigurationError, EncryptedSessionService
from adk_secure_sessions.formats import events, json_text
from adk_secure_sessions.formats.records import EncodedEvent
from adk_secure_sessions.maintenance import (
    Database,
    erase_user,
    purge_sessions,
    rotate_data,
    separate,
    vacuum,
    verify,
)
from adk_secure_sessions.storage.feature_list import create_table_of
from adk_secure_sessions.storage.features.imports import Imports, ImportStatus
from adk_secure_sessions.storage.schema import migrated
from adk_secure_sessions.storage.survey import FeatureName
from tests.conformance.services import KEY, Kind
from tests.conformance.support import APP, START, USER, create, delete, each_kind, event
from tests.faults import Point, lost, with_faults

ON_SERVERS = [
    "test_imported_session_is_like_one_that_a_service_wrote",
    "test_import_after_a_lost_answer_is_stored_once",
]
kind = each_kind(
    "encrypted-file",
    some={
        "encrypted-postgresql": ON_SERVERS,
        "encrypted-mariadb": ON_SERVERS,
        "encrypted-key-database": [*ON_SERVERS, "test_separated_copy_has_no_imports"],
    },
    soak=["encrypted-engine", "encrypted-psycopg", "encrypted-pgbouncer"],
)
IDS = (APP, USER, "s")
LARGE = {"large": "x" * 9000, "small": 1}  # it needs a snapshot


def maintained(url: URL, kind: Kind) -> Database:
    keys: dict[str, Any] = {}
    if "key_database" in kind.open.__name__:
        keys = {"key_db_url": url.set(database=f"{url.database}.keys")}
    return Database(url, AesGcmBackend(KEY), **keys)


@pytest.fixture
async def db(kind: Kind, url: URL, service: BaseSessionService) -> AsyncIterator[Database]:
    assert isinstance(service, EncryptedSessionService)
    await service.prepare_tables()
    async with maintained(url, kind) as db:
        yield db


@pytest.fixture
async def store(db: Database) -> Imports:
    return db.imports


def history(number: int) -> list[Event]:
    return [event(f"text {n}", timestamp=START + n) for n in range(number)]


def micros(one: Event) -> int:
    return round(one.timestamp * 1_000_000)


async def imported(
    store: Imports,
    session_id: str = "s",
    *,
    user_id: str = USER,
    state: dict[str, Any] | None = None,
    of: Sequence[Event] = (),
    version: str = "1",
    replace: bool = False,
) -> ImportStatus:
    return await store.import_session(
        APP,
        user_id,
        session_id,
        state=json_text.encode_state(state or {}),
        events=[EncodedEvent(events.encode(one), micros(one)) for one in of],
        created_at=int(START) * 1_000_000,
        updated_at=micros(of[-1]) if of else int(START) * 1_000_000,
        source_etag=version,
        replace=replace,
    )


async def find(service: BaseSessionService, session_id: str = "s") -> Session | None:
    return await service.get_session(app_name=APP, user_id=USER, session_id=session_id)


async def read(service: BaseSessionService, session_id: str = "s") -> Session:
    found = await find(service, session_id)
    assert found is not None
    return found


async def is_clean(db: Database) -> bool:
    found = await verify(db)
    return not (found.bad or found.unchecked)


@pytest.mark.parametrize("state", [{"k": 1}, LARGE], ids=["small", "large"])
async def test_imported_session_is_like_one_that_a_service_wrote(
    service: BaseSessionService, store: Imports, db: Database, state: dict[str, Any]
) -> None:
    past = history(3)
    written = await create(service, state=state)
    for one in past:
        await service.append_event(written, one)
    assert await imported(store, state=state, of=past) is ImportStatus.NEW
    found, other = await read(service), await read(service, written.id)
    assert found.events == other.events
    assert found.state == other.state == state
    assert found.last_update_time == other.last_update_time
    await service.append_event(found, event("more", delta={"k": 2, "user:u": 3}))
    assert (await rotate_data(db)).bad == 0
    found = await read(service)
    assert len(found.events) == 4
    assert found.state == {**state, "k": 2, "user:u": 3}
    assert await is_clean(db)
    await delete(service, found)
    assert await is_clean(db)
    assert await imported(store, state=state, of=past) is ImportStatus.DELETED
    assert await imported(store, state=state, of=past, version="2") is ImportStatus.CONFLICT


async def test_session_is_replaced_only_if_no_service_has_changed_it(
    service: BaseSessionService, store: Imports, db: Database
) -> None:
    first, second = history(2), history(3)
    assert await store.rows_for([IDS]) == {}
    assert await imported(store, of=first, state=LARGE) is ImportStatus.NEW
    assert await imported(store, of=first) is ImportStatus.UNCHANGED
    assert await imported(store, of=second, version="2") is ImportStatus.CONFLICT
    before = await read(service)
    result = await imported(store, of=second, version="2", replace=True)
    assert result is ImportStatus.OUTDATED
    one = (await store.rows_for([IDS, (APP, USER, "other")]))[IDS]
    assert (one.row.number, one.is_untouched, one.row.is_tombstone) == (3, True, False)
    assert (one.has_source("1"), one.has_source("2")) == (False, True)
    found = await read(service)
    assert (found.events, found.state) == (second, {})
    with pytest.raises(Exception, match="session"):  # it was loaded before
        await service.append_event(before, event("late"))
    await service.append_event(found, event("more"))
    assert not (await store.rows_for([IDS]))[IDS].is_untouched
    assert await imported(store, version="2", replace=True) is ImportStatus.CONTINUED
    assert await imported(store, version="3", replace=True) is ImportStatus.CONFLICT
    await create(service, session_id="own")
    assert await imported(store, "own", replace=True) is ImportStatus.SAME_ID
    again = await read(service)
    assert len(again.events) == 4
    assert await is_clean(db)


async def test_states_are_set_exactly(
    service: BaseSessionService, store: Imports, db: Database
) -> None:
    assert await imported(store) is ImportStatus.NEW
    owners: list[tuple[str, ...]] = [(APP,), (APP, USER)]
    for owner in owners:
        small = json_text.encode_state({"a": {"x": 1, "y": 2}, "b": 2})
        other = b'{"b":2,"a":{"y":2,"x":1}}'
        assert await store.import_state(owner, small) is ImportStatus.NEW
        assert await store.import_state(owner, other) is ImportStatus.UNCHANGED
        assert await store.import_state(owner, b'{"c":1}') is ImportStatus.CONFLICT
        assert await store.import_state(owner, b"{}", replace=True) is ImportStatus.OUTDATED
        assert await store.import_state(owner, small, replace=True) is ImportStatus.OUTDATED
        one = (await store.rows_for([owner, ("unknown", *owner[1:])]))[owner]
        assert one.has_state(other)
        assert not one.has_state(b"{}")
    await rotate_data(db)  # changes the versions of the rows, and no state
    assert await store.import_state((APP, USER), b'{"d":1}', replace=True) is ImportStatus.OUTDATED
    found = await read(service)
    assert found.state == {"app:a": {"x": 1, "y": 2}, "app:b": 2, "user:d": 1}
    await service.append_event(found, event(delta={"user:d": 2, "app:b": 3}))
    assert await store.import_state((APP, USER), b'{"d":1}', replace=True) is ImportStatus.CONTINUED
    assert await store.import_state((APP,), b'{"d":1}', replace=True) is ImportStatus.CONFLICT
    assert await store.import_state((APP, "new"), b'{"d":1}') is ImportStatus.NEW
    assert await store.import_state(("new",), b'{"d":1}') is ImportStatus.NEW
    await create(service, user_id="theirs", state={"user:n": 1})
    assert await store.import_state((APP, "theirs"), b'{"d":1}') is ImportStatus.SAME_ID
    assert await is_clean(db)


async def test_session_of_several_requests_is_one_import(
    service: BaseSessionService, store: Imports, db: Database
) -> None:
    one = event("small", timestamp=START)
    wide = event("x" * 3_000_000, timestamp=START)
    past = [wide, wide, *[one] * 5100]
    await imported(store, of=history(1))
    assert await imported(store, of=past, version="2", replace=True) is ImportStatus.OUTDATED
    found = await read(service)
    assert found.events == past
    await service.append_event(found, event("more"))
    assert await is_clean(db)


@pytest.mark.parametrize("replace", [False, True])
async def test_import_after_a_lost_answer_is_stored_once(
    service: BaseSessionService, kind: Kind, url: URL, store: Imports, replace: bool
) -> None:
    if replace:
        await imported(store, of=history(1))
    db, faults = with_faults(lambda: maintained(url, kind))
    async with db:
        again = db.imports
        await again.feature.ensure()
        plan = faults.data.after(Point.WRITE, lost())
        result = await imported(again, of=history(3), version="2", replace=replace)
        assert result is (ImportStatus.OUTDATED if replace else ImportStatus.NEW)
        assert plan.happened
        for number, expected in ((1, ImportStatus.NEW), (2, ImportStatus.OUTDATED)):
            faults.data.after(Point.WRITE, lost())
            state = b'{"k":%d}' % number
            assert await again.import_state((APP, USER), state, replace=True) is expected
        assert await is_clean(db)
    found = await read(service)
    assert len(found.events) == 3
    assert found.state == {"user:k": 2}


async def test_impossible_time_is_rejected(store: Imports) -> None:
    for at in (10**19, -(10**19)):
        with pytest.raises(ValueError, match="not a possible time"):
            await store.import_session(
                *IDS, state=b"{}", events=[EncodedEvent(b"", at)], created_at=0, updated_at=0,
                source_etag="lone surrogate \ud83c",
            )  # fmt: skip


async def test_imported_session_expires(
    service: BaseSessionService, store: Imports, db: Database
) -> None:
    now = time.time_ns() // 1000
    for name, expires_at in (("expired", now - 1), ("later", now + 60_000_000)):
        await store.import_session(
            APP, USER, name, state=b"{}", events=[], created_at=0, updated_at=now - 10,
            source_etag="1", expires_at=expires_at,
        )  # fmt: skip
    assert await find(service, "expired") is None
    session = await read(service, "later")
    await service.append_event(session, event("goes on", timestamp=now / 1_000_000))
    assert (await purge_sessions(db)).deleted == 1
    assert await is_clean(db)


async def test_cancelled_import_is_whole_or_absent(
    service: BaseSessionService, store: Imports, db: Database
) -> None:
    await imported(store, "first")
    for number in range(6):
        task = asyncio.ensure_future(imported(store, f"s{number}", of=history(40)))
        await asyncio.sleep(number * 0.001)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        found = await find(service, f"s{number}")
        assert found is None or len(found.events) == 40
        result = await imported(store, f"s{number}", of=history(40))
        assert result is (ImportStatus.UNCHANGED if found else ImportStatus.NEW)
    assert await is_clean(db)


async def test_tasks_import_sessions_of_one_new_user(store: Imports, db: Database) -> None:
    results = await asyncio.gather(
        *(imported(store, f"s{n % 12}", of=history(n % 3)) for n in range(24))
    )
    assert sorted(one.name for one in results) == ["NEW"] * 12 + ["UNCHANGED"] * 12
    found = await verify(db)
    assert (found.users, found.sessions, found.bad) == (1, 12, 0)


async def test_nothing_is_imported_after_a_tombstone(
    service: BaseSessionService, store: Imports, db: Database
) -> None:
    await store.add_tombstone(APP, USER, "s")
    await store.add_tombstone(APP, USER, "s")
    assert await imported(store, replace=True) is ImportStatus.DELETED
    await create(service, session_id="s")  # by a service, later
    assert await imported(store, replace=True) is ImportStatus.DELETED
    one = (await store.rows_for([IDS]))[IDS]
    assert (one.row.is_tombstone, one.is_untouched) == (True, False)
    await imported(store, "copied", of=history(1))
    await store.add_tombstone(APP, USER, "copied")  # its row says so already
    assert (await store.rows_for([(APP, USER, "copied")]))[APP, USER, "copied"].row.number == 1
    assert await is_clean(db)


async def test_nothing_of_an_erased_user_is_imported(
    service: BaseSessionService, store: Imports, db: Database, kind: Kind
) -> None:
    await imported(store, of=history(2))
    await store.import_state((APP, USER), b'{"k":1}')
    await imported(store, user_id="other")
    assert (await erase_user(db, APP, USER)).sessions == 1
    await erase_user(db, APP, "never copied")
    await create(service, session_id="s")  # the user comes back
    for name in ("s", "new"):
        result = await imported(store, name, of=history(2), version="2", replace=True)
        assert result is ImportStatus.DELETED
        assert (await store.rows_for([(APP, USER, name)]))[APP, USER, name].row.is_tombstone
    assert await store.import_state((APP, USER), b'{"k":1}', replace=True) is ImportStatus.DELETED
    assert await imported(store, user_id="never copied") is ImportStatus.DELETED
    assert await imported(store, "new", user_id="other") is ImportStatus.NEW
    assert await is_clean(db)
    done = await vacuum(db)
    # The tests' MariaDB server stores all tables in one file, which cannot be rewritten.
    assert done.cleared or kind.server == "mariadb", done.obstacles


async def test_separated_copy_has_no_imports(
    service: BaseSessionService, store: Imports, db: Database
) -> None:
    await imported(store, of=history(2))
    await store.store_mark()
    assert await store.migration_mark()
    await service.close()  # type: ignore[attr-defined]
    assert (await separate(db)).complete
    assert FeatureName.MIGRATION not in (await db.survey_existing()).features
    assert not await store.migration_mark()
    assert await store.rows_for([IDS]) == {}
    assert await imported(store, of=history(2)) is ImportStatus.SAME_ID
    assert await is_clean(db)


async def test_process_that_stops_before_the_feature_is_added_leaves_a_usable_database(
    service: BaseSessionService, store: Imports, db: Database, kind: Kind, url: URL
) -> None:
    assert not await store.feature.is_added()
    await db.runner.data_db.run_sync(
        lambda connection: create_table_of(FeatureName.MIGRATION, connection, may_create=True)
    )
    assert not await store.feature.is_added()
    async with maintained(url, kind) as other:
        assert await is_clean(other)
        assert await imported(other.imports) is ImportStatus.NEW
    assert await store.feature.is_added()
    await create(service)


async def test_removed_table_is_reported(
    store: Imports, db: Database, kind: Kind, url: URL
) -> None:
    await imported(store)
    await db.runner.data_db.run_sync(lambda connection: migrated.drop(connection))
    async with maintained(url, kind) as other:
        with pytest.raises(ConfigurationError, match="secure_migrated was removed: restore it"):
            await other.keyring()


async def test_table_is_not_created_if_the_application_forbids_it(
    db: Database, kind: Kind, url: URL
) -> None:
    db.runner.creates_tables = False
    store = Imports(db.runner, db.search_index)
    names = {"mariadb": "mysql"}
    name = names.get(url.get_backend_name(), url.get_backend_name())
    with pytest.raises(ConfigurationError, match=rf"docs/sql/{name}-migration\.sql"):
        await imported(store)
    assert not await store.feature.is_added()
    with pytest.raises(ConfigurationError, match="create_tables is False"):
        await store.add_tombstone(APP, USER)
    await db.runner.data_db.run_sync(lambda connection: migrated.create(connection))
    assert await imported(store) is ImportStatus.NEW


async def test_table_of_another_program_is_rejected(
    db: Database, store: Imports, kind: Kind, url: URL
) -> None:
    await db.runner.data_db.run_sync(
        lambda connection: connection.execute(sa.text("CREATE TABLE secure_migrated (x INTEGER)"))
    )
    async with maintained(url, kind) as other:
        with pytest.raises(ConfigurationError, match="was not created by adk-secure-sessions"):
            await other.keyring()
