"""A service whose keys are in a key database: what it does, and where it stores what."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from adk_secure_sessions import (
    AesGcmBackend,
    ConfigurationError,
    DatabaseError,
    EncryptedSessionService,
    FernetBackend,
    UnknownKeyError,
)
from adk_secure_sessions.formats.records import parse_header
from adk_secure_sessions.maintenance import retire, verify
from tests.faults import Point, with_faults
from tests.key_database.support import KEY, OTHER, Pair, count, create, find, tables
from tests.maintenance.support import APP, event, query, run_sql
from tests.processes import children, results

Say = Callable[[object], None]


async def use(pair: Pair) -> None:
    """Do all that a service does, each time with one that knows no key yet."""
    async with pair.service() as service:
        session = await create(service, state={"user:u": 1, "app:a": 1})
        for n in range(3):
            await service.append_event(session, event(n, n=n, **{"user:u": n, "app:a": n}))
    state = {"n": 2, "user:u": 2, "app:a": 2}
    async with pair.service() as service:
        found = await find(service)
        assert found is not None
        assert (found.state, len(found.events)) == (state, 3)
        await service.append_event(found, event(3, n=3))
    for user_id in ("ada", None):
        async with pair.service() as service:
            (listed,) = (await service.list_sessions(app_name=APP, user_id=user_id)).sessions
            assert listed.state == state | {"n": 3}
    async with pair.service() as service:
        assert await service.get_user_state(app_name=APP, user_id="ada") == {"u": 2}
        await create(service, name="second")
    async with pair.service() as service:
        await service.delete_session(app_name=APP, user_id="ada", session_id="s")
        assert await find(service) is None


async def assert_one_key_for_each_of_two_owners(pair: Pair) -> None:
    """Two processes may each have stored a key; only one of the two is in use."""
    async with pair.maintained() as db:
        await retire(db)
    tables = ("secure_apps", "secure_users", "secure_sessions")
    records = [row[0] for table in tables for row in query(pair.data, f"SELECT state FROM {table}")]
    assert len({parse_header(bytes(record)) for record in records}) == pair.owners() == 2


async def test_service_does_all_it_does_without_a_key_database(pair: Pair) -> None:
    await use(pair)
    await assert_one_key_for_each_of_two_owners(pair)


async def test_data_without_its_key_database_is_rejected(files: Pair, tmp_path: Path) -> None:
    await use(files)
    assert "secure_data_keys" not in tables(files.data)
    alone = EncryptedSessionService(files.urls["db_url"], AesGcmBackend(KEY))
    async with alone as service:
        with pytest.raises(ConfigurationError, match="key_db_url"):
            await find(service)


async def test_all_users_of_an_app_are_listed(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    users = [f"u{n}" for n in range(8)]
    async with pair.service() as service:
        for user in users:
            await create(service, user)
    async with pair.service() as service:
        listed = (await service.list_sessions(app_name=APP)).sessions
        assert sorted(session.user_id for session in listed) == users
    rows = query(pair.data, "SELECT id, tag FROM secure_users ORDER BY id")
    run_sql(pair.keys, "DELETE FROM secure_data_keys WHERE owner = :tag", tag=rows[-1][1])
    async with pair.service() as service:
        with pytest.raises(UnknownKeyError):
            await service.list_sessions(app_name=APP)
    async with pair.service(skip_unreadable_sessions=True) as service:
        assert len((await service.list_sessions(app_name=APP)).sessions) == 7
        run_sql(pair.data, "UPDATE secure_users SET version = 9 WHERE id = :id", id=rows[0][0])
        caplog.clear()
        assert len((await service.list_sessions(app_name=APP)).sessions) == 6
    # The first attempt also rejects the modified row, before it lacks a data key.
    assert len(caplog.messages) == len(set(caplog.messages)) == 4


async def test_more_users_are_listed_than_one_statement_reads_keys_of(files: Pair) -> None:
    users = [f"u{n:03}" for n in range(201)]  # a statement reads the keys of 200
    async with files.service() as service:
        await asyncio.gather(*(create(service, user) for user in users))
    reading, faults = with_faults(files.service)
    async with reading:
        listed = (await reading.list_sessions(app_name=APP)).sessions
        assert sorted(session.user_id for session in listed) == users
        assert faults.keys.counts[Point.READ] == 1 + 2  # of the app, of the users


# --- keys ----------------------------------------------------------------------------------------


async def test_key_is_stored_before_what_it_encrypts(files: Pair) -> None:
    """A key database that is copied after the data has all keys of that copy."""
    async with files.service() as service:
        await service.prepare_tables()
        run_sql(files.data, "CREATE TRIGGER t BEFORE INSERT ON secure_users BEGIN "
                "SELECT RAISE(ABORT, 'no'); END")  # fmt: skip
        with pytest.raises(DatabaseError, match="SQLITE_CONSTRAINT_TRIGGER"):
            await create(service)
        assert (count(files.keys, "secure_data_keys"), files.owners()) == (2, 0)
        run_sql(files.data, "DROP TRIGGER t")
        await create(service)
    # No row names the first two keys, so they encrypt nothing.
    assert (count(files.keys, "secure_data_keys"), files.owners()) == (4, 2)
    async with files.maintained() as db:
        assert (await retire(db)).deleted_data_keys == 2
        assert (await verify(db)).bad == 0


async def test_another_backend_stores_the_next_generation_in_the_key_database(pair: Pair) -> None:
    aes, fernet = AesGcmBackend(KEY), FernetBackend(OTHER)
    async with pair.service() as service:
        await create(service)
    async with EncryptedSessionService(
        **pair.urls, backend=aes, additional_backends=[fernet]
    ) as first:
        assert await find(first) is not None  # it knows the present keys
        async with EncryptedSessionService(
            **pair.urls, backend=fernet, additional_backends=[aes]
        ) as second:
            session = await find(second)
            assert session is not None
            await second.append_event(session, event(n=1, **{"app:a": 1}))
        generations = "SELECT generation, backend_id FROM secure_data_keys ORDER BY generation"
        assert query(pair.keys, generations) == [(0, 1), (0, 1), (1, 2), (1, 2)]
        found = await find(first)
        assert found is not None
        assert found.state == {"n": 1, "app:a": 1}
        await first.append_event(found, event(n=2))


def create_one(say: Say, urls: dict[str, Any], name: str) -> None:
    async def main() -> None:
        async with EncryptedSessionService(**urls, backend=AesGcmBackend(KEY)) as service:
            await asyncio.gather(*(create(service, name=f"{name}-{n}") for n in range(5)))

    asyncio.run(main())


async def test_processes_that_are_the_first_of_a_user_agree_on_one_key(pair: Pair) -> None:
    jobs = [(create_one, pair.urls, f"p{n}") for n in range(4)]
    await asyncio.to_thread(results, *jobs)
    async with pair.service() as service:
        assert len((await service.list_sessions(app_name=APP)).sessions) == 20
    await assert_one_key_for_each_of_two_owners(pair)


def create_and_die(say: Say, urls: dict[str, Any]) -> None:
    """Create a session, but die once the key of the app and that of the user are stored."""
    service, faults = with_faults(
        lambda: EncryptedSessionService(**urls, backend=AesGcmBackend(KEY))
    )
    faults.keys.after(Point.WRITE, lambda: say("a key is stored"), nth=None)
    faults.keys.after(Point.WRITE, lambda: os.kill(os.getpid(), signal.SIGKILL), nth=2)
    asyncio.run(create(service))


async def test_key_whose_process_was_killed_before_it_wrote_the_row_encrypts_nothing(
    pair: Pair,
) -> None:
    with children((create_and_die, pair.urls)) as (child,):
        said = await asyncio.to_thread(list, child.said())
        assert said == ["a key is stored"] * 2  # the app's, and the user's
        child.process.join()
        assert child.process.exitcode == -signal.SIGKILL
    keys = sorted(query(pair.keys, "SELECT id FROM secure_data_keys"))
    assert (len(keys), pair.owners()) == (2, 0)
    await use(pair)
    assert len(set(query(pair.keys, "SELECT id FROM secure_data_keys")) - set(keys)) == 2
    assert pair.owners() == 2
    async with pair.maintained() as db:
        assert (await retire(db)).deleted_data_keys == 2
    assert not set(query(pair.keys, "SELECT id FROM secure_data_keys")) & set(keys)
