"""Erasing a user: nothing of that user is left, and everything of the others."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from google.adk.errors.session_not_found_error import SessionNotFoundError
from sqlalchemy.ext.asyncio import create_async_engine

from adk_secure_sessions import (
    AesGcmBackend,
    DatabaseError,
    EncryptedSessionService,
    SecureSessionError,
)
from adk_secure_sessions.formats.events import encode
from adk_secure_sessions.formats.records import EncodedEvent
from adk_secure_sessions.maintenance import (
    Database,
    Erasure,
    erase_user,
    init,
    lookup,
    rotate_data,
    status,
    verify,
)
from tests.faults import Point, with_faults
from tests.maintenance.dying import Statements, dying
from tests.maintenance.support import APP, OLD, all_rows, assert_whole, event, fill, query, run_sql
from tests.on_servers.proxy import Cut, proxy_before
from tests.processes import children
from tests.servers import DRIVERS, PostgreSQL, Server

Say = Callable[[object], None]
BACKEND = AesGcmBackend(OLD)
LARGE = "x" * 9000  # too much for an overlay: it goes into a row of `secure_bases`
NOTHING = (0, 0, 0, 0, 0, 0)


def counts(found: Erasure) -> tuple[int, ...]:
    """The counts alone, without `cleared` and `obstacle`."""
    return found.numbers[:6]


@pytest.mark.parametrize("place", ["postgresql"], indirect=True)
async def test_trigger_that_undoes_the_deletion_at_the_commit_is_reported(
    url: str, place: sa.URL
) -> None:
    """tests/attacks/test_erasure.py has more triggers, on SQLite."""
    await fill(url)
    body = "'BEGIN INSERT INTO secure_events SELECT OLD.*; RETURN NULL; END'"
    run_sql(place, f"CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS {body}")
    when = "AFTER DELETE ON secure_events DEFERRABLE INITIALLY DEFERRED FOR EACH ROW"
    run_sql(place, f"CREATE CONSTRAINT TRIGGER keep {when} EXECUTE FUNCTION keep()")
    before = all_rows(place)
    async with Database(url, BACKEND) as db:
        with pytest.raises(DatabaseError, match="does not delete the rows of the user"):
            await erase_user(db, APP, "ada")
        assert all_rows(place) == before
        run_sql(place, "DROP FUNCTION keep() CASCADE")
        assert (await erase_user(db, APP, "ada")).users == 1


async def test_user_whose_id_is_empty_is_told_from_others_after_a_rotation(file_url: str) -> None:
    await fill(file_url, users=["", "bob"])
    async with Database(file_url, BACKEND) as db:
        await rotate_data(db)  # by the tags of the users
        assert counts(await erase_user(db, APP, ""))[:3] == (2, 1, 2)
    async with EncryptedSessionService(file_url, BACKEND) as service:
        for user, number in (("", 0), ("bob", 2)):
            listed = await service.list_sessions(app_name=APP, user_id=user)
            assert len(listed.sessions) == number


async def fill_with_large_state(url: str) -> None:
    await fill(url, sessions=3)
    async with EncryptedSessionService(url, BACKEND) as service:
        for user in ("ada", "bob"):
            await service.create_session(
                app_name=APP, user_id=user, session_id="large", state={"k": LARGE, "user:k": 1}
            )
            # The same ids, elsewhere.
            await service.create_session(app_name="bank", user_id=user, session_id="s0")


async def test_erasure_deletes_all_rows_of_the_user_and_none_of_others(
    url: str, place: sa.URL
) -> None:
    await fill(url, users=["bob"], sessions=3)
    bobs = all_rows(place)
    await fill(url, users=["ada"], sessions=3)
    both = all_rows(place)
    async with Database(url, BACKEND) as db:
        found = await erase_user(db, APP, "ada")
        assert counts(found) == (1, 1, 3, 0, 9, 4)
        assert found.rows == 18
        assert all_rows(place) == bobs != both
        app, *of_ada = await lookup(db, APP, "ada", "s0")
        assert app.row is not None
        assert [one.row for one in of_ada] == [None, None]
        assert (await erase_user(db, APP, "ada")).rows == 0
        assert all_rows(place) == bobs
    await assert_whole(url)


async def test_erasure_deletes_large_states_and_leaves_the_same_ids_of_another_app(
    url: str,
) -> None:
    await fill_with_large_state(url)
    async with Database(url, BACKEND) as db:
        assert counts(await erase_user(db, APP, "ada")) == (1, 1, 4, 1, 9, 5)
        found = await verify(db)
        assert (found.bad, found.apps, found.users, found.sessions) == (0, 2, 3, 6)
    async with EncryptedSessionService(url, BACKEND) as service:
        assert await service.get_session(app_name=APP, user_id="ada", session_id="s0") is None
        for app, user, session in (("bank", "ada", "s0"), (APP, "bob", "large")):
            assert await service.get_session(app_name=app, user_id=user, session_id=session)


@pytest.mark.parametrize("driver", ["memory", "aiosqlite", "psycopg"])
async def test_erasure_works_on_an_engine_of_the_caller(
    driver: str, file_url: str, request: pytest.FixtureRequest
) -> None:
    if driver != "psycopg":
        url = "sqlite+aiosqlite://" if driver == "memory" else file_url
        await _erase_on_engine(url)
        return
    server: PostgreSQL = request.getfixturevalue("postgresql")
    with server.database() as place:
        by_psycopg = place.set(drivername="postgresql+psycopg")
        await _erase_on_engine(by_psycopg.render_as_string(hide_password=False))


async def _erase_on_engine(url: str) -> None:
    engine = create_async_engine(url)
    try:
        async with EncryptedSessionService(db_engine=engine, backend=BACKEND) as service:
            session = await service.create_session(app_name=APP, user_id="ada", session_id="s")
            await service.append_event(session, event(0, k=LARGE))
            async with Database(db_engine=engine, backend=BACKEND) as db:
                for rewrite in (False, True):
                    found = await erase_user(db, APP, "ada", rewrite=rewrite)
                    assert counts(found) == (NOTHING if rewrite else (1, 1, 1, 1, 1, 2))
                    assert found.cleared == (rewrite or engine.dialect.name == "sqlite")
            with pytest.raises(SessionNotFoundError):
                await service.append_event(session, event(1))
    finally:
        await engine.dispose()


async def test_user_with_more_sessions_than_one_statement_names_is_erased(
    url: str, place: sa.URL
) -> None:
    await fill(url, sessions=5)
    async with Database(url, BACKEND) as db:
        db.limits = db.limits._replace(ids_per_statement=2)
        assert counts(await erase_user(db, APP, "ada")) == (1, 1, 5, 0, 15, 6)
    assert query(place, "SELECT count(*) FROM secure_sessions") == [(5,)]
    await assert_whole(url)


# --- rows that were tampered with ----------------------------------------------------------------

OF_USER = "(SELECT id FROM secure_users WHERE tag = :tag)"
WHOLE = (1, 1, 1, 0, 2, 2)
TAMPERED = {  # a user for each: how their rows are tampered with, and what is then deleted
    "none": ("UPDATE secure_users SET version = version WHERE tag = :tag", WHOLE),
    "user removed": ("DELETE FROM secure_users WHERE tag = :tag", (1, 0, 1, 0, 2, 2)),
    "user retagged": ("UPDATE secure_users SET tag = :junk WHERE tag = :tag", WHOLE),
    "user modified": ("UPDATE secure_users SET state = :junk WHERE tag = :tag", WHOLE),
    "key removed": ("DELETE FROM secure_data_keys WHERE owner = :tag", (0, 1, 1, 0, 2, 2)),
    "key modified": ("UPDATE secure_data_keys SET wrapped = :junk WHERE owner = :tag", WHOLE),
    "witness removed": ("DELETE FROM secure_witnesses WHERE tag = :tag", (1, 1, 1, 0, 2, 1)),
    "session modified": (
        f"UPDATE secure_sessions SET state = :junk WHERE user_row = {OF_USER}",
        WHOLE,
    ),
}


async def test_rows_that_cannot_be_decrypted_are_erased(url: str, place: sa.URL) -> None:
    await fill(url, users=["bob"])
    bobs = all_rows(place)
    await fill(url, users=[*TAMPERED], sessions=1, events=2)
    async with Database(url, BACKEND) as db:
        for name, (statement, expected) in TAMPERED.items():
            _, theirs = await lookup(db, APP, name)
            values = {"tag": bytes.fromhex(theirs.tag), "junk": b"junk"}
            bound = {key: value for key, value in values.items() if f":{key}" in statement}
            assert run_sql(place, statement, **bound) or name == "none"
            assert counts(await erase_user(db, APP, name, dry_run=True)) == expected, name
            assert counts(await erase_user(db, APP, name)) == expected, name
    assert all_rows(place) == bobs


async def test_session_whose_tag_is_text_is_erased(file_url: str) -> None:
    """SQLite stores any type in any column."""
    await fill(file_url, users=["ada"])
    run_sql(file_url, "UPDATE secure_sessions SET tag = CAST(tag AS TEXT)")
    async with Database(file_url, BACKEND) as db:
        assert counts(await erase_user(db, APP, "ada")) == (1, 1, 2, 0, 6, 3)


# --- returning -----------------------------------------------------------------------------------


async def test_user_who_returns_is_a_new_user_to_every_service(url: str, place: sa.URL) -> None:
    """Also to services that have the old key and the old session in memory."""
    who: dict[str, Any] = {"app_name": APP, "user_id": "ada"}
    first, second = (EncryptedSessionService(url, BACKEND) for _ in range(2))
    async with first, second:
        old = await first.create_session(**who, session_id="s", state={"k": 1, "user:k": 1})
        await first.append_event(old, event(0, k=2))
        again = await second.get_session(**who, session_id="s")
        assert again == old
        (before,) = query(place, "SELECT max(id), count(*) FROM secure_data_keys")
        async with Database(url, BACKEND) as db:
            await erase_user(db, APP, "ada")
        assert query(place, "SELECT count(*) FROM secure_data_keys") == [(1,)]  # the app's
        for service in (first, second):
            assert await service.get_session(**who, session_id="s") is None
            assert await service.get_user_state(**who) == {}
            assert (await service.list_sessions(**who)).sessions == []
            with pytest.raises(SessionNotFoundError):
                await service.append_event(old.model_copy(deep=True), event(1))
        new = await first.create_session(**who, session_id="s", state={"n": 1})
        assert new.state == {"n": 1}
        for number, service in enumerate((second, first, second)):
            await service.create_session(**who, session_id=f"t{number}", state={"user:n": number})
            found = await service.get_session(**who, session_id="s")
            assert found is not None
            await service.append_event(found, event(2 + number, n=number))
            assert (found.state["n"], "k" in found.state) == (number, False)
    assert query(place, "SELECT count(*) FROM secure_data_keys") == [(2,)]
    assert before[1] == 2
    await assert_whole(url)
    async with Database(url, BACKEND) as db:
        records = (await status(db)).records
    assert [one for one in records if one.rows != one.under_current] == []


# --- at the same time ----------------------------------------------------------------------------


on_servers = pytest.mark.parametrize("place", DRIVERS, indirect=True)  # SQLite has one writer


@on_servers
@pytest.mark.parametrize("known", ["user", "user and session"])
async def test_user_who_is_erased_between_a_read_and_its_write_is_a_new_one(
    url: str, place: sa.URL, known: str
) -> None:
    await fill(url, users=["ada"], sessions=1)

    async def erase() -> None:
        async with Database(url, BACKEND) as db:
            assert (await erase_user(db, APP, "ada")).sessions == 1

    who: dict[str, Any] = {"app_name": APP, "user_id": "ada"}
    async with EncryptedSessionService(url, BACKEND) as service:
        held = await service.get_session(**who, session_id="s0")
        assert held is not None
        fresh, faults = with_faults(lambda: EncryptedSessionService(url, BACKEND))
        async with fresh:
            await fresh.prepare_tables()
            plan = faults.data.after(Point.READ, erase)
            if known == "user":
                made = await fresh.create_session(**who, session_id="new", state={"k": 1})
                assert made.state == {"k": 1}
            else:
                with pytest.raises(SessionNotFoundError):
                    await fresh.append_event(held, event(9, k=1))
        assert plan.happened
        await service.create_session(**who, session_id="s0", state={"n": 1})
        found = await service.list_sessions(**who)
        assert len(found.sessions) == (2 if known == "user" else 1)
    assert query(place, "SELECT count(*) FROM secure_data_keys") == [(2,)]
    await assert_whole(url)


def create_two(say: Say, url: str, directory: Path) -> None:
    """Create a session and, once the file `go` exists, another one without reading anything."""

    async def main() -> None:
        async with EncryptedSessionService(url, BACKEND) as service:
            await service.create_session(app_name=APP, user_id="ada", session_id="old")
            say("ready")
            while not (directory / "go").exists():
                await asyncio.sleep(0.01)
            await service.create_session(app_name=APP, user_id="ada", session_id="new")
            (directory / "created").touch()

    asyncio.run(main())


@on_servers
async def test_session_that_is_made_while_an_erasure_commits_waits_for_it(
    url: str, place: sa.URL, tmp_path: Path
) -> None:
    db, faults = with_faults(lambda: Database(url, BACKEND))
    with children((create_two, url, tmp_path)) as (child,):
        said = child.said()
        assert await asyncio.to_thread(next, said) == "ready"

        def hold_the_transaction() -> None:
            (tmp_path / "go").touch()
            time.sleep(0.3)
            assert not (tmp_path / "created").exists(), "it did not wait for the erasure"

        async with db:
            await db.keyring()
            # The first work looks for `secure_migrated`.
            plan = faults.data.after(Point.WORK, hold_the_transaction, nth=2)
            await erase_user(db, APP, "ada")
        assert plan.happened
        assert await asyncio.to_thread(list, said) == []
    assert (tmp_path / "created").exists()
    async with EncryptedSessionService(url, BACKEND) as service:
        found = await service.list_sessions(app_name=APP, user_id="ada")
        assert [session.id for session in found.sessions] == ["new"]
    assert query(place, "SELECT count(*) FROM secure_data_keys") == [(2,)]
    await assert_whole(url)


async def test_event_whose_append_is_running_when_an_erasure_begins_is_erased(
    url: str, place: sa.URL
) -> None:
    await fill(url, users=["ada"], sessions=1)
    engine = sa.create_engine(place)
    async with Database(url, BACKEND) as db:
        await db.keyring()
        with engine.begin() as connection:  # what an append does, step by step
            connection.exec_driver_sql("UPDATE secure_sessions SET revision = 4")
            erasure = asyncio.ensure_future(erase_user(db, APP, "ada"))
            await asyncio.sleep(0.2)
            connection.exec_driver_sql(
                "INSERT INTO secure_events SELECT session_row, 3, time, event "
                "FROM secure_events WHERE seq = 2"
            )
        assert counts(await erasure) == (1, 1, 1, 0, 4, 2)
    engine.dispose()
    await assert_whole(url)


@pytest.mark.parametrize(
    ("driver", "stops_at"),
    [
        ("postgresql+asyncpg", "the second request"),  # the first one inserts all but some events
        *(
            pytest.param(driver, "the row of the session", marks=pytest.mark.soak)
            for driver in ["postgresql+psycopg", "mariadb+asyncmy"]
        ),
    ],
)
async def test_user_whose_first_session_is_being_imported_is_erased(
    request: pytest.FixtureRequest, driver: str, stops_at: str
) -> None:
    erasures: list[Future[Erasure]] = []

    async def erase() -> Erasure:
        async with Database(url, BACKEND) as db:
            return await erase_user(db, APP, "ada")

    def begin_erasure() -> None:
        if not erasures:
            erasures.append(another_process.submit(asyncio.run, erase()))
            wait(erasures, timeout=1)  # until it has ended, or waits for the import

    def after_statement(_connection: Any, _cursor: Any, statement: str, *_: object) -> None:
        if statement.startswith("INSERT INTO secure_sessions"):
            begin_erasure()

    server: Server = request.getfixturevalue(driver.partition("+")[0])
    with server.database(reused=True) as place, ThreadPoolExecutor(1) as another_process:
        url = place.set(drivername=driver).render_as_string(hide_password=False)
        engine = create_async_engine(url)
        db, faults = with_faults(lambda: Database(db_engine=engine, backend=BACKEND))
        async with db:
            await init(db)
            store = db.imports
            await store.feature.ensure()
            if stops_at == "the second request":
                faults.data.before(Point.APPLY, begin_erasure, nth=2)
            else:
                sa.event.listen(engine.sync_engine, "after_cursor_execute", after_statement)
            large = EncodedEvent(encode(event(0)) + b" " * 3_000_000, 1)
            await store.import_session(
                APP, "ada", "s", state=b"{}", events=[large, large],
                created_at=1, updated_at=1, source_etag="1",
            )  # fmt: skip
        await engine.dispose()
        assert (await asyncio.wrap_future(erasures[0])).has_migration_table
        left = {name: len(found) for name, found in all_rows(place).items()}
        assert (left["secure_users"], left["secure_sessions"], left["secure_events"]) == (0, 0, 0)
        await assert_whole(url)
        async with Database(url, BACKEND) as db:
            imported = await db.imports.rows_for([(APP, "ada", "other")])
            assert imported[APP, "ada", "other"].row.is_tombstone


STATES: list[dict[str, Any]] = [{"k": 1}, {"user:k": 1}, {"k": LARGE}, {"user:k": 1, "app:k": 1}]


def create_and_append(say: Say, url: str, name: str, number: int) -> None:
    async def use(service: EncryptedSessionService, n: int) -> None:
        who: dict[str, Any] = {"app_name": APP, "user_id": "ada", "session_id": f"{name}-{n}"}
        session = await service.create_session(**who, state=STATES[n % len(STATES)])
        for m in range(3):
            delta = {"user:m": m} if (n + m) % 3 == 0 else {"m": m}
            await service.append_event(session, event(m, **delta))
        if n % 5 == 0:
            await service.delete_session(**who)

    async def task(service: EncryptedSessionService, n: int) -> None:
        try:
            await use(service, n)
        except SessionNotFoundError:
            pass  # erased
        except SecureSessionError as error:
            if "try again" not in str(error):  # others were always faster
                raise

    async def main() -> None:
        async with EncryptedSessionService(url, BACKEND) as service:
            for start in range(0, number, 2):
                await asyncio.gather(task(service, start), task(service, start + 1))

    asyncio.run(main())


async def test_services_that_write_during_erasures_leave_no_row_behind(
    url: str, place: sa.URL
) -> None:
    await fill(url, users=["bob"])
    bobs = all_rows(place)
    jobs = [(create_and_append, url, f"p{n}", 20) for n in range(3)]
    erased = 0
    with children(*jobs) as running:
        done = asyncio.gather(*(asyncio.to_thread(list, child.said()) for child in running))
        async with Database(url, BACKEND) as db:
            while not done.done():
                erased += (await erase_user(db, APP, "ada")).sessions
                await asyncio.sleep(0.02)
            await done
            async with Database(url, BACKEND) as other:
                found = await verify(other)
                assert found.problems == ()
            await erase_user(db, APP, "ada")
            assert (await erase_user(db, APP, "ada")).rows == 0
    assert erased, "nothing was erased while they wrote"
    left = all_rows(place)
    app_rows = {"secure_apps", "secure_witnesses"}  # the app's state has changed
    assert {name: len(left[name]) for name in left} == {name: len(bobs[name]) for name in bobs}
    assert [name for name in left if name not in app_rows and left[name] != bobs[name]] == []
    await assert_whole(url)
    async with EncryptedSessionService(url, BACKEND) as service:
        new = await service.create_session(app_name=APP, user_id="ada", session_id="p0-0")
        assert {key for key in new.state if not key.startswith("app:")} == set()


# --- killed, disconnected ------------------------------------------------------------------------


CLEARING = "wal_checkpoint|CLUSTER|innodb_file_per_table"


def erase_and_die(say: Say, url: str, pattern: str, number: int) -> None:
    """Erase, but die before the statement of that number, of those that contain *pattern*."""
    db = dying(lambda: Database(url, BACKEND), Statements(number, pattern), url)

    async def main() -> None:
        async with db:
            await erase_user(db, APP, "ada", rewrite=True)
        say("ended")

    asyncio.run(main())


async def test_erasure_that_is_killed_has_done_all_or_nothing(url: str, place: sa.URL) -> None:
    await fill(url, users=["bob"], sessions=1)
    bobs = all_rows(place)
    await fill(url, users=["ada"], sessions=1)
    before = all_rows(place)
    for number in (1, 2, 4, 7):  # there are seven deletions
        with children((erase_and_die, url, "^DELETE", number)) as (child,):
            assert await asyncio.to_thread(list, child.said()) == []
        assert all_rows(place) == before
    with children((erase_and_die, url, CLEARING, 1)) as (child,):  # all is committed
        assert await asyncio.to_thread(list, child.said()) == []
    assert all_rows(place) == bobs


@pytest.mark.parametrize("kind", DRIVERS)
async def test_erasure_whose_answer_is_lost_reports_what_it_deleted(
    kind: str, request: pytest.FixtureRequest
) -> None:
    server: Server = request.getfixturevalue(kind)
    with server.database() as place:
        url = place.set(drivername=DRIVERS[kind])
        names = [f"u{number}" for number in range(60)]
        await fill(url.render_as_string(hide_password=False), users=names, sessions=1, events=1)
        async with proxy_before(url) as (proxy, by_proxy), Database(by_proxy, BACKEND) as db:
            await erase_user(db, APP, names.pop())  # and knows its statements
            for number, name in enumerate(names):
                proxy.cut(Cut.ANSWERED, number)
                assert counts(await erase_user(db, APP, name)) == (1, 1, 1, 0, 1, 2)
                if not proxy.leave():  # it had ended before
                    assert number > 10
                    return
    pytest.fail("it never ends")
