"""A database and its key database are made together, and are used only with each other."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine

from adk_secure_sessions import AesGcmBackend, ConfigurationError, EncryptedSessionService
from adk_secure_sessions.maintenance import Database, init, status
from tests.key_database.support import KEY, Pair, count, create, everything, marks, pair_in, tables
from tests.maintenance.dying import Statements, dying
from tests.maintenance.support import plaintext_backend, query
from tests.processes import children, results
from tests.servers import for_service

OF_KEYS = {"secure_meta", "secure_keyring", "secure_data_keys"}
OF_DATA = {
    "secure_meta",
    "secure_apps",
    "secure_users",
    "secure_witnesses",
    "secure_sessions",
    "secure_bases",
    "secure_events",
}

Say = Callable[[object], None]


async def start(db_url: Any = None, key_db_url: Any = None, **options: Any) -> None:
    async with EncryptedSessionService(
        db_url, AesGcmBackend(KEY), key_db_url=key_db_url, **options
    ) as service:
        await service.prepare_tables()


# --- making the two ------------------------------------------------------------------------------


async def test_each_database_gets_its_tables_and_a_mark_of_what_it_holds(pair: Pair) -> None:
    await start(**pair.urls)
    assert (tables(pair.data), tables(pair.keys)) == (OF_DATA, OF_KEYS)
    data, keys = marks(pair.data), marks(pair.keys)
    assert data == {"format": "2", "database_id": keys["database_id"], "holds": "data"}
    own = {"holds": "keys", "features": keys["features"]}
    assert keys == {"format": "2", "database_id": keys["database_id"], **own}
    assert count(pair.keys, "secure_keyring") == 2
    before = query(pair.keys, "SELECT * FROM secure_keyring")
    await start(**pair.urls)  # it finds nothing to do
    assert (marks(pair.data), marks(pair.keys)) == (data, keys)
    assert query(pair.keys, "SELECT * FROM secure_keyring") == before


async def test_init_reports_what_it_made_in_both(pair: Pair) -> None:
    async with pair.maintained() as db:
        made = await init(db)
        assert sorted(made.tables) == sorted([*OF_KEYS, *OF_DATA])
        assert len(made.master_ids) == 2
        assert (await init(db)).numbers == (0, 0)


async def test_engines_of_the_caller_are_used_and_left_open(pair: Pair) -> None:
    data, keys = (create_async_engine(url) for url in pair.urls.values())
    async with EncryptedSessionService(
        db_engine=data, key_db_engine=keys, backend=AesGcmBackend(KEY)
    ) as service:
        await service.prepare_tables()
    for engine, rows in ((data, 3), (keys, 4)):  # the key database also has the features
        async with engine.connect() as connection:
            assert await connection.scalar(sa.text("SELECT count(*) FROM secure_meta")) == rows
        await engine.dispose()


async def test_two_databases_in_memory_are_distinct() -> None:
    await start(":memory:", ":memory:")


async def test_no_op_backend_marks_both_databases_as_plaintext(files: Pair) -> None:
    async with EncryptedSessionService(**files.urls, backend=plaintext_backend()) as service:
        await service.prepare_tables()
    assert marks(files.data)["plaintext"] == marks(files.keys)["plaintext"] == "1"


def start_and_say(say: Say, urls: dict[str, str]) -> None:
    asyncio.run(start(**urls))
    say("started")


async def test_processes_starting_at_once_agree(pair: Pair) -> None:
    said = await asyncio.to_thread(results, *[(start_and_say, pair.urls)] * 4)
    assert said == [["started"]] * 4
    assert count(pair.keys, "secure_keyring") == 2
    assert marks(pair.data)["database_id"] == marks(pair.keys)["database_id"]


def start_and_die(say: Say, urls: dict[str, Any]) -> None:
    """Start a service, but die before it makes the first table of the data."""
    first_of_data = Statements(len(OF_KEYS) + 1, "CREATE TABLE")
    service = dying(
        lambda: EncryptedSessionService(**urls, backend=AesGcmBackend(KEY)), first_of_data
    )
    asyncio.run(service.prepare_tables())
    say("ended")


async def test_start_continues_where_a_killed_one_ended(pair: Pair) -> None:
    with children((start_and_die, pair.urls)) as (child,):
        assert await asyncio.to_thread(list, child.said()) == []
        await asyncio.to_thread(child.process.join)
        assert child.process.exitcode == -signal.SIGKILL
    assert count(pair.keys, "secure_keyring") == 2
    masters = query(pair.keys, "SELECT * FROM secure_keyring")
    assert tables(pair.data) == set()
    await start(**pair.urls)
    assert query(pair.keys, "SELECT * FROM secure_keyring") == masters
    assert marks(pair.data)["database_id"] == marks(pair.keys)["database_id"]


# --- databases that do not belong together -------------------------------------------------------


class Places:
    """SQLite databases of every kind, all with the same root key."""

    def __init__(self, directory: Path) -> None:
        self.pair = pair_in(directory)
        self.other = pair_in(directory, "other-")
        self.whole = sa.URL.create("sqlite", database=f"{directory}/whole.db")
        self.new = pair_in(directory, "new-")
        self.all = (*self.pair, *self.other, self.whole, *self.new)

    async def fill(self) -> None:
        for pair in (self.pair, self.other):
            async with pair.service() as service:
                await create(service)
        async with EncryptedSessionService(for_service(self.whole), AesGcmBackend(KEY)) as service:
            await create(service)


@pytest.fixture
async def places(tmp_path: Path) -> Places:
    places = Places(tmp_path)
    await places.fill()
    return places


Wrong = Callable[[Places], tuple[sa.URL, sa.URL | None]]
MISMATCHES: dict[str, tuple[Wrong, str]] = {
    "data without its keys": (lambda p: (p.pair.data, None), "pass that as key_db_url"),
    "keys without their data": (lambda p: (p.pair.keys, None), "this is a key database"),
    "keys in place of data": (lambda p: (p.other.keys, p.pair.keys), "data's URL names a key"),
    "the two swapped": (lambda p: (p.pair.keys, p.pair.data), "names a"),
    "keys beside data": (lambda p: (p.whole, p.pair.keys), "omit key_db_url"),
    "new keys beside data": (lambda p: (p.whole, p.new.keys), "omit key_db_url"),
    "another's keys": (lambda p: (p.pair.data, p.other.keys), "belongs to another database"),
    "all of a database as keys": (lambda p: (p.pair.data, p.whole), "a database of sessions"),
    "all of a database as new keys": (lambda p: (p.new.data, p.whole), "a database of sessions"),
    "data as keys": (lambda p: (p.pair.data, p.other.data), "a database of sessions"),
    "new keys": (lambda p: (p.pair.data, p.new.keys), "restore it from a backup"),
    "new data": (lambda p: (p.new.data, p.pair.keys), "check its URL"),
}


@pytest.mark.parametrize("name", MISMATCHES)
async def test_databases_that_do_not_belong_together_are_rejected_and_left_unchanged(
    places: Places, name: str
) -> None:
    wrong, text = MISMATCHES[name]
    data, keys = wrong(places)
    before = everything(*places.all)
    urls = for_service(data), None if keys is None else for_service(keys)
    with pytest.raises(ConfigurationError, match=text):
        await start(*urls)
    async with Database(urls[0], AesGcmBackend(KEY), key_db_url=urls[1]) as db:
        with pytest.raises(ConfigurationError, match=text):
            await init(db)
        with pytest.raises(ConfigurationError, match=rf"{text}|no file"):
            await status(db)
    made = [url for url in places.new if Path(url.database or "").exists()]
    assert all(tables(url) == set() for url in made)  # SQLite makes a file when it looks
    for url in made:
        Path(url.database or "").unlink()
    assert everything(*places.all) == before


async def test_missing_tables_are_not_made_without_create_tables(files: Pair) -> None:
    with pytest.raises(ConfigurationError, match="docs/sql"):
        await start(**files.urls, create_tables=False)
    assert (tables(files.data), tables(files.keys)) == (set(), set())


# --- arguments -----------------------------------------------------------------------------------


async def test_one_database_as_both_is_rejected(tmp_path: Path) -> None:
    """Through a link, or through an engine; tests/db/test_connect.py has the other ways."""
    file = f"{tmp_path}/s.db"
    url, link = f"sqlite+aiosqlite:///{file}", f"{tmp_path}/link.db"
    os.symlink(file, link)
    engine = create_async_engine(url)
    for other in ({"key_db_url": f"sqlite:///{link}"}, {"key_db_engine": engine}):
        with pytest.raises(ConfigurationError, match="must not be the database of"):
            await start(url, **other)
    await engine.dispose()
    assert [path.name for path in tmp_path.iterdir()] == ["link.db"]


async def test_one_database_by_two_names_is_rejected_once_it_is_opened(tmp_path: Path) -> None:
    Path(tmp_path / "s.db").touch()
    os.link(tmp_path / "s.db", tmp_path / "hard.db")
    urls = f"sqlite:///{tmp_path}/s.db", f"sqlite:///{tmp_path}/hard.db"
    with pytest.raises(ConfigurationError, match="names a key database"):
        await start(*urls)


async def test_missing_directory_of_the_key_database_is_reported_as_such(files: Pair) -> None:
    nowhere = f"sqlite:///{files.keys.database}/no/keys.db"
    with pytest.raises(ConfigurationError, match="key database's SQLite file cannot be used"):
        await start(files.urls["db_url"], nowhere)
    assert tables(files.data) == set()
