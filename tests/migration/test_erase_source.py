"""`erase_source` deletes what was copied, leaves everything else, and no bytes in the file.

The sources are written by google-adk's own services.
"""

import sqlite3
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from google.adk.sessions import BaseSessionService, DatabaseSessionService
from google.adk.sessions.sqlite_session_service import SqliteSessionService

from adk_secure_sessions.db.protocol import Conflict, Disconnected
from adk_secure_sessions.errors import ConfigurationError, DatabaseError
from adk_secure_sessions.maintenance import verify
from adk_secure_sessions.migration import (
    AdkTables,
    SourceErasure,
    compare,
    erase_source,
    migrate,
    open_source,
)
from adk_secure_sessions.storage.features.imports import MigrationMark
from tests.faults import FaultyExecutor, Point, lost
from tests.maintenance.support import event, query, run_sql
from tests.migration.memory_source import APP, MemorySource
from tests.migration.support import database, service
from tests.servers import DRIVERS, Server, for_service

NEEDLE = "Zanzibar"
VECTORS = Path(__file__).parents[1] / "vectors" / "package_1x"
TABLES = ("sessions", "events", "app_states", "user_states")


@pytest.fixture(params=["sqlite", "adk web", *DRIVERS])
def source_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty database for a service of google-adk."""
    if request.param in ("sqlite", "adk web"):
        yield f"sqlite+aiosqlite:///{tmp_path}/{request.param.replace(' ', '-')}.db"
        return
    server: Server = request.getfixturevalue(request.param)
    with server.database() as url:
        yield for_service(url)


@pytest.fixture
def target_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/sessions.db"


@pytest.fixture
async def source_file(tmp_path: Path, target_url: str) -> str:
    """A file of google-adk whose sessions were copied."""
    url = f"sqlite+aiosqlite:///{tmp_path}/adk.db"
    await fill(url)
    await copied(url, target_url)
    return url


def adk(url: str) -> BaseSessionService:
    if url.endswith("adk-web.db"):
        return SqliteSessionService(url.partition(":///")[2])
    return DatabaseSessionService(url)


async def fill(url: str, *, app: str = APP, sessions: int = 3) -> None:
    """Add sessions; a new file gets the bytes that an earlier test has filled one with."""
    path = Path(url.partition(":///")[2])
    if not url.startswith("sqlite") or path.exists():
        await fill_by_google_adk(url, app, sessions)
        return
    key = (url.endswith("adk-web.db"), app, sessions)
    if key in FILLED:
        path.write_bytes(FILLED[key])
        return
    await fill_by_google_adk(url, app, sessions)
    if sessions:
        FILLED[key] = path.read_bytes()


FILLED: dict[tuple[bool, str, int], bytes] = {}


async def fill_by_google_adk(url: str, app: str, sessions: int) -> None:
    plain = adk(url)
    for user in ("ada", "bob"):
        for number in range(sessions):
            state = {NEEDLE: 1, f"user:{NEEDLE}": 2, f"app:{NEEDLE}": 3}
            session = await plain.create_session(
                app_name=app, user_id=user, session_id=f"s{number}", state=state
            )
            for n in range(3):
                if "mariadb" in url:  # google-adk finds its own session stale
                    loaded = await plain.get_session(
                        app_name=app, user_id=user, session_id=session.id
                    )
                    session = loaded or session
                await plain.append_event(session, event(n, needle=f"{NEEDLE} {n}" * 50))
    if isinstance(plain, DatabaseSessionService):
        await plain.close()


async def write_more(url: str, user: str, session_id: str, **delta: object) -> None:
    plain = adk(url)
    session = await plain.get_session(app_name=APP, user_id=user, session_id=session_id)
    assert session is not None
    await plain.append_event(session, event(100, late=1, **delta))
    if isinstance(plain, DatabaseSessionService):
        await plain.close()


async def copied(source_url: str, target_url: str) -> None:
    async with AdkTables(source_url) as source, database(target_url) as db:
        done = await migrate(source, db)
    assert done.succeeded


async def erased(source_url: str, target_url: str, **options: Any) -> SourceErasure:
    async with AdkTables(source_url) as source, database(target_url) as db:
        return await erase_source(source, db, **options)


def numbers(done: SourceErasure) -> tuple[int, ...]:
    """What was deleted; MariaDB's tests share one file, which is not rewritten."""
    assert all("innodb_file_per_table is off" in one for one in done.obstacles)
    return done.numbers


def rows(url: str) -> list[int]:
    place = sa.make_url(url)
    drivers = {"sqlite": "sqlite", "postgresql": "postgresql+psycopg", "mariadb": "mariadb+pymysql"}
    place = place.set(drivername=drivers[place.get_backend_name()])
    return [query(place, f"SELECT count(*) FROM {name}")[0][0] for name in TABLES]


async def test_everything_that_was_copied_is_deleted(source_url: str, target_url: str) -> None:
    await fill(source_url)
    await copied(source_url, target_url)
    assert rows(source_url) == [6, 18, 1, 2]
    dry = await erased(source_url, target_url, dry_run=True)
    assert numbers(dry) == (6, 18, 3)
    assert not dry.comparison.mark_stored
    assert rows(source_url) == [6, 18, 1, 2]
    done = await erased(source_url, target_url)
    assert numbers(done) == (6, 18, 3)
    assert done.succeeded is ("mariadb" not in source_url)
    assert done.comparison.mark_stored
    assert rows(source_url) == [0, 0, 0, 0]
    async with service(target_url) as made:
        listed = await made.list_sessions(app_name=APP)
        assert len(listed.sessions) == 6
        assert listed.sessions[0].state[f"user:{NEEDLE}"] == 2
    async with database(target_url) as db:
        assert (await verify(db)).bad == 0
    again = await erased(source_url, target_url)
    assert numbers(again) == (0, 0, 0)


async def test_empty_source_ends_no_migration(source_url: str, target_url: str) -> None:
    """It is perhaps the wrong one: services with a fallback must go on reading the right one."""
    await fill(source_url, sessions=0)
    plain = adk(source_url)
    await plain.list_sessions(app_name=APP)
    if isinstance(plain, DatabaseSessionService):
        await plain.close()
    async with service(target_url) as made:
        await made.prepare_tables()
    assert numbers(await erased(source_url, target_url)) == (0, 0, 0)
    async with database(target_url) as db:
        assert await db.imports.migration_mark() is None


@pytest.mark.parametrize("source_url", ["sqlite", "adk web"], indirect=True)
async def test_no_bytes_remain_in_the_files(source_url: str, target_url: str) -> None:
    await fill(source_url, sessions=6)
    path = Path(source_url.partition(":///")[2])
    await copied(source_url, target_url)
    needle = NEEDLE.encode()
    assert path.read_bytes().count(needle) > 120
    done = await erased(source_url, target_url)
    assert done.succeeded
    found = {file.name: file.read_bytes().count(needle) for file in path.parent.iterdir()}
    assert path.name in found
    assert set(found.values()) == {0}


# What differs between databases is in the statements, which one test runs on all of them.
_SERVERS_LATER = pytest.mark.parametrize(
    "source_url",
    ["sqlite", "adk web", *(pytest.param(name, marks=pytest.mark.soak) for name in DRIVERS)],
    indirect=True,
)


async def erased_with_a_write_after_the_comparison(
    source_url: str, target_url: str, write: Callable[[], Awaitable[object]]
) -> SourceErasure:
    async with AdkTables(source_url) as source, database(target_url) as db:
        complete = db.imports.store_mark

        async def complete_and_write(*, source_is_erased: bool = False) -> bool:
            is_new = await complete(source_is_erased=source_is_erased)
            if source_is_erased:
                await write()
            return is_new

        db.imports.store_mark = complete_and_write  # type: ignore[method-assign]
        return await erase_source(source, db)


@_SERVERS_LATER
async def test_nothing_is_deleted_if_the_source_changes_after_the_comparison(
    source_url: str, target_url: str
) -> None:
    await fill(source_url)
    await copied(source_url, target_url)
    late = {f"user:{NEEDLE}": 7}
    done = await erased_with_a_write_after_the_comparison(
        source_url, target_url, lambda: write_more(source_url, "ada", "s1", **late)
    )
    assert (numbers(done), done.source_changed, done.succeeded) == ((0, 0, 0), True, False)
    assert done.comparison.mark_withdrawn
    assert rows(source_url) == [6, 19, 1, 2]
    async with database(target_url) as db:
        assert await db.imports.migration_mark() is None
    await copied(source_url, target_url)  # among others the state of the user
    assert numbers(await erased(source_url, target_url)) == (6, 19, 3)


async def test_source_that_forbids_the_deletion_is_not_marked_as_erased(
    source_file: str, tmp_path: Path, target_url: str
) -> None:
    with closing(sqlite3.connect(tmp_path / "adk.db")) as connection:
        connection.execute(
            "CREATE TRIGGER no BEFORE DELETE ON sessions BEGIN SELECT RAISE(ABORT, 'no'); END"
        )
    with pytest.raises(DatabaseError):
        await erased(source_file, target_url)
    async with database(target_url) as db:
        assert await db.imports.migration_mark() is MigrationMark.COMPLETE
    assert rows(source_file)[0] == 6


def faulty_writer(source: AdkTables) -> FaultyExecutor:
    writer = FaultyExecutor(source.open_writer())
    source.open_writer = lambda: writer  # type: ignore[method-assign]
    return writer


async def test_mark_of_an_erased_source_stays_if_rows_may_have_been_deleted(
    source_file: str, target_url: str
) -> None:
    """A lost connection leaves unknown whether the source has committed the deletion."""
    async with AdkTables(source_file) as source, database(target_url) as db:

        async def write_and_disconnect() -> None:
            await fill(source_file, sessions=1)
            raise Disconnected(OSError())

        faulty_writer(source).after(Point.RUN, write_and_disconnect)
        with pytest.raises(DatabaseError, match="may have been deleted or not"):
            await erase_source(source, db)
        assert await db.imports.migration_mark() is MigrationMark.SOURCE_ERASED
    assert rows(source_file)[0] == 2


async def test_source_that_is_written_to_after_a_rollback_is_kept(
    source_file: str, target_url: str
) -> None:
    async with AdkTables(source_file) as source, database(target_url) as db:
        writer = faulty_writer(source)
        writer.after(Point.WORK, Conflict())
        writer.before(Point.RUN, lambda: write_more(source_file, "ada", "s1"), nth=2)
        assert (await erase_source(source, db)).source_changed
    assert rows(source_file)[0] == 6


async def test_rows_are_counted_if_the_connection_is_lost_in_the_commit(
    source_file: str, target_url: str
) -> None:
    async with AdkTables(source_file) as source, database(target_url) as db:
        faulty_writer(source).after(Point.RUN, lost())
        assert numbers(await erase_source(source, db)) == (6, 18, 3)
    assert rows(source_file) == [0, 0, 0, 0]


async def test_nothing_is_deleted_if_ids_that_are_not_text_are_added_after_the_comparison(
    tmp_path: Path, target_url: str
) -> None:
    source_url = f"sqlite+aiosqlite:///{tmp_path}/adk.db"
    await fill(source_url, sessions=1)
    await copied(source_url, target_url)

    async def add_ids_that_are_not_text() -> None:
        with closing(sqlite3.connect(tmp_path / "adk.db")) as connection, connection:
            connection.execute(
                "INSERT INTO sessions (app_name, user_id, id, state, create_time, update_time) "
                "SELECT app_name, user_id, CAST(id AS BLOB), state, create_time, update_time "
                "FROM sessions"
            )

    with pytest.raises(ConfigurationError, match="not text in UTF-8"):
        await erased_with_a_write_after_the_comparison(
            source_url, target_url, add_ids_that_are_not_text
        )
    assert rows(source_url) == [4, 6, 1, 2]
    async with database(target_url) as db:
        assert await db.imports.migration_mark() is MigrationMark.COMPLETE


async def test_session_created_again_in_an_erased_source_replaces_nothing(
    source_file: str, target_url: str
) -> None:
    await erased(source_file, target_url)
    await fill(source_file, sessions=1)  # by a process that somebody has forgotten
    async with AdkTables(source_file) as source, database(target_url) as db:
        done = await migrate(source, db)
        assert (done.copied, done.conflicts) == (0, 2)
        with pytest.raises(ConfigurationError, match="omit --delete-gone"):
            await migrate(source, db, delete_gone=True)
        assert not (await compare(source, db)).all_equal


async def test_one_database_can_be_source_and_target(tmp_path: Path) -> None:
    url = f"sqlite+aiosqlite:///{tmp_path}/both.db"
    await fill(url)
    await copied(url, url)
    done = await erased(url, url)
    assert (numbers(done), done.obstacles) == ((6, 18, 3), ())
    assert (tmp_path / "both.db").read_bytes().count(NEEDLE.encode()) == 0
    async with service(url) as made:
        session = await made.get_session(app_name=APP, user_id="ada", session_id="s0")
        assert session is not None
        assert len(session.events) == 3
    with sqlite3.connect(tmp_path / "both.db") as connection:
        assert connection.execute("SELECT count(*) FROM secure_sessions").fetchone() == (6,)


async def test_events_without_a_session_are_deleted(tmp_path: Path, target_url: str) -> None:
    """google-adk cannot return them, so they are not copied."""
    url = f"sqlite+aiosqlite:///{tmp_path}/adk.db"
    await fill(url)
    place = sa.URL.create("sqlite", database=f"{tmp_path}/adk.db")
    run_sql(place, "DELETE FROM sessions WHERE id = 's1' AND user_id = 'ada'")
    await copied(url, target_url)
    assert numbers(await erased(url, target_url)) == (5, 18, 3)
    assert rows(url) == [0, 0, 0, 0]


async def test_source_that_cannot_be_erased_is_rejected(target_url: str) -> None:
    async with database(target_url) as db:
        with pytest.raises(ConfigurationError, match="a source in memory"):
            await erase_source(MemorySource(), db)


async def test_database_of_adk_secure_sessions_1_is_deleted(
    tmp_path: Path, target_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(sqlite3.connect(tmp_path / "old.db")) as connection:
        connection.executescript((VECTORS / "release_1_2_passphrase_and_aes.sql").read_text())
    monkeypatch.setenv("PASSPHRASE", "correct horse battery staple \N{EN DASH} π")
    (tmp_path / "aes.key").write_text(bytes(range(32)).hex() + "\n")
    (tmp_path / "aes.key").chmod(0o600)
    keys = ["env:PASSPHRASE", f"file:{tmp_path}/aes.key"]
    with pytest.raises(ConfigurationError, match="give the key of 1"):
        await open_source(f"sqlite:///{tmp_path}/old.db")
    with pytest.raises(ConfigurationError, match="env:NAME or file:PATH"):
        await open_source(f"sqlite:///{tmp_path}/old.db", ["vault:key"])
    source = await open_source(f"sqlite:///{tmp_path}/old.db", keys)
    async with source, database(target_url) as db:
        assert (await migrate(source, db)).copied == 3
        done = await erase_source(source, db)
    assert done.succeeded
    assert rows(f"sqlite:///{tmp_path}/old.db") == [0, 0, 0, 0]


async def test_session_that_was_gone_while_it_was_read_is_not_erased(
    tmp_path: Path, target_url: str
) -> None:
    """A restored session, or one that a lagging replica did not have, was never copied."""
    path = tmp_path / "adk.db"
    url = f"sqlite+aiosqlite:///{path}"
    await fill(url, sessions=1)
    with closing(sqlite3.connect(path)) as file:
        (row,) = file.execute("SELECT * FROM sessions WHERE user_id = 'bob'").fetchall()
        events = file.execute("SELECT * FROM events WHERE user_id = 'bob'").fetchall()

        def write(present: bool) -> None:
            for table, kept in (("sessions", [row]), ("events", events)):
                file.execute(f"DELETE FROM {table} WHERE user_id = 'bob'")
                if present:
                    places = ", ".join("?" * len(kept[0]))
                    file.executemany(f"INSERT INTO {table} VALUES ({places})", kept)
            file.commit()

        write(False)
        await copied(url, target_url)
        write(True)
        async with AdkTables(url) as source, database(target_url) as db:
            read = source.read

            async def reading(found: Any) -> Any:
                write(False)
                try:
                    return await read(found)
                finally:
                    write(True)

            source.read = reading  # type: ignore[assignment,method-assign]
            done = await erase_source(source, db)
        assert not done.comparison.all_equal
        assert (done.comparison.changed_in_source, done.sessions) == (1, 0)
        assert file.execute("SELECT count(*) FROM sessions").fetchone() == (2,)
