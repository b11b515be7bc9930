"""Another root key, while services run: nothing is lost, and the old one unwraps nothing after."""

import asyncio
import threading
from typing import Any

import pytest
import sqlalchemy as sa

from adk_secure_sessions import (
    AesGcmBackend,
    ConfigurationError,
    EncryptedSessionService,
    SecureSessionError,
    WrongKeyError,
)
from adk_secure_sessions.maintenance import Database, rotate_master, rotate_root, verify
from tests.faults import Point, with_faults
from tests.maintenance.support import (
    APP,
    NEW,
    OLD,
    OTHER,
    assert_whole,
    event,
    fill,
    plaintext_backend,
    query,
)

KEYRING = "SELECT id, purpose, root_key_id, created_at, wrapped FROM secure_keyring ORDER BY id"


def old() -> AesGcmBackend:
    return AesGcmBackend(OLD)


def new() -> AesGcmBackend:
    return AesGcmBackend(NEW)


async def assert_readable(url: str, backend: AesGcmBackend, *others: AesGcmBackend) -> None:
    assert (await assert_whole(url, backend, *others)).users == 2


async def test_rotated_database_opens_with_the_new_root_key_and_not_with_the_old(
    url: str, place: sa.URL
) -> None:
    await fill(url)
    before = query(place, KEYRING)
    async with Database(url, new(), [old()]) as db:
        done = await rotate_root(db)
        assert (len(done.rotated_ids), done.unchanged_ids, done.plaintext_ids) == (2, (), ())
        again = await rotate_root(db)
        assert (again.rotated_ids, sorted(again.unchanged_ids)) == ((), sorted(done.rotated_ids))
    after = query(place, KEYRING)
    assert [row[:2] + row[3:4] for row in after] == [row[:2] + row[3:4] for row in before]
    assert {row[2] for row in after} == {new().root_key.key_id}
    await assert_readable(url, new())
    async with EncryptedSessionService(url, old()) as service:
        with pytest.raises(WrongKeyError, match=new().root_key.key_id):
            await service.prepare_tables()
    async with Database(url, new()) as db:  # the old one is not needed to see that
        assert len((await rotate_root(db)).unchanged_ids) == 2


async def test_services_read_and_write_during_rotations(url: str) -> None:
    """Configured as in a rolling change: some with the old key first, some with the new."""
    await fill(url)
    stopped = asyncio.Event()

    async def work(name: str, first: AesGcmBackend, second: AesGcmBackend) -> int:
        n = 0
        async with EncryptedSessionService(url, first, [second]) as service:
            while not stopped.is_set() or n < 3:
                # New users, who get new data keys, and those there are.
                for user in (f"{name}{n}", "ada"):
                    who: dict[str, Any] = {
                        "app_name": APP,
                        "user_id": user,
                        "session_id": f"{name}-{n}",
                    }
                    session = await service.create_session(**who, state={"user:n": n})
                    await service.append_event(session, event(n, n=n))
                    found = await service.get_session(
                        app_name=APP, user_id=user, session_id=f"{name}-{n}"
                    )
                    assert found is not None
                    assert found.events == session.events
                assert await service.get_session(app_name=APP, user_id="bob", session_id="s1")
                n += 1
        return n

    async with asyncio.TaskGroup() as group:
        workers = [group.create_task(work("x", old(), new()))]
        workers.append(group.create_task(work("y", new(), old())))
        try:
            for backend, other in ((new(), old()), (old(), new()), (new(), old())):
                async with Database(url, backend, [other]) as db:
                    assert len((await rotate_root(db)).rotated_ids) == 2
                # Those that start meanwhile find either.
                workers.append(group.create_task(work(f"z{len(workers)}", new(), old())))
                await asyncio.sleep(0.1)
        finally:
            stopped.set()
    async with Database(url, new()) as db:
        checked = await verify(db)
    made = sum(worker.result() for worker in workers)
    assert (checked.bad, checked.users, checked.sessions) == (0, 2 + made, 4 + 2 * made)


async def test_of_two_rotations_at_once_one_succeeds_and_the_other_says_so(url: str) -> None:
    await fill(url)
    barrier = threading.Barrier(2, timeout=60)

    async def both_have_read() -> None:
        barrier.wait()

    counted, its_runs = with_faults(lambda: Database(url, old()))
    async with counted:
        await rotate_root(counted, dry_run=True)
        await counted.keyring()
    backends = (new(), AesGcmBackend(OTHER))
    one, its_faults = with_faults(lambda: Database(url, backends[0], [old()]))
    two, other_faults = with_faults(lambda: Database(url, backends[1], [old()]))
    for faults in (its_faults, other_faults):
        last = its_runs.keys.counts[Point.RUN] + 1  # it changes the keyring
        faults.keys.before(Point.RUN, both_have_read, nth=last)
    async with one, two:
        outcomes = await asyncio.gather(rotate_root(one), rotate_root(two), return_exceptions=True)
    (error,) = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    assert isinstance(error, SecureSessionError)
    assert "was changed meanwhile" in str(error)
    await assert_readable(url, backends[outcomes.index(error) ^ 1])


async def test_master_key_that_is_added_meanwhile_ends_the_rotation(url: str) -> None:
    """Otherwise, the old root key would still wrap it, and may be destroyed."""
    await fill(url)

    async def add() -> None:
        async with Database(url, old()) as other:
            await rotate_master(other)

    db, faults = with_faults(lambda: Database(url, new(), [old()]))
    async with db:
        await db.keyring()
        faults.keys.before(Point.RUN, add, nth=2)  # after the survey
        with pytest.raises(SecureSessionError, match="was changed meanwhile"):
            await rotate_root(db)
        assert len((await rotate_root(db)).rotated_ids) == 3
    await assert_readable(url, new())


async def test_master_keys_stored_as_plaintext_are_left_unchanged(file_url: str) -> None:
    no_op = plaintext_backend()
    await fill(file_url, no_op)
    await fill(file_url, old(), others=[no_op], users=["eve"])
    async with Database(file_url, new(), [old(), no_op]) as db:
        done = await rotate_root(db)
        assert (len(done.rotated_ids), len(done.plaintext_ids)) == (1, 2)
        assert (await verify(db)).bad == 0
    async with Database(file_url, no_op, [new()]) as db:
        with pytest.raises(ConfigurationError, match="no root key to rotate to"):
            await rotate_root(db)
