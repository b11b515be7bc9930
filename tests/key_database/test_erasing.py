"""Erasing a user whose keys are in a key database."""

import pytest

from adk_secure_sessions import DatabaseError, SecureSessionError, UnknownKeyError
from adk_secure_sessions.maintenance import erase_user, verify
from tests.faults import Point, with_faults
from tests.key_database.support import Pair, count, create, find
from tests.maintenance.support import APP, Killed, event


async def test_erased_user_is_gone_from_both_databases(pair: Pair) -> None:
    async with pair.service() as service:
        for user in ("ada", "bob"):
            session = await create(service, user)
            await service.append_event(session, event(big="x" * 9000))
        async with pair.maintained() as db:
            would = await erase_user(db, APP, "ada", dry_run=True)
            done = await erase_user(db, APP, "ada")
            assert done.numbers[:6] == would.numbers[:6] == (1, 1, 1, 1, 1, 2)
            assert (await erase_user(db, APP, "ada")).rows == 0
            assert (await verify(db)).problems == ()
        assert count(pair.keys, "secure_data_keys") == pair.owners() == 2
        assert await find(service) is None
        await create(service)  # a new user
        assert (await find(service, "bob")) is not None
    assert count(pair.keys, "secure_data_keys") == pair.owners() == 3


@pytest.mark.parametrize(
    ("failure", "message"),
    [(Killed(), None), (DatabaseError("it is locked"), r"keys are deleted, .*\(it is locked\)")],
)
async def test_erasure_that_fails_after_the_keys_is_completed_by_the_next(
    pair: Pair, failure: Exception, message: str | None
) -> None:
    async with pair.service() as service:
        await create(service)
        db, faults = with_faults(pair.maintained)
        async with db:
            await db.keyring()
            # The first work on the data looks for `secure_migrated`.
            faults.data.before(Point.WORK, failure, nth=2)
            with pytest.raises((Killed, SecureSessionError), match=message):
                await erase_user(db, APP, "ada")
        with pytest.raises(UnknownKeyError):
            await find(service)  # although the service had cached the key
    assert (count(pair.keys, "secure_data_keys"), count(pair.data, "secure_users")) == (1, 1)
    async with pair.service() as service:
        with pytest.raises(UnknownKeyError):
            await find(service)
        async with pair.maintained() as db:
            done = await erase_user(db, APP, "ada")
            assert done.numbers[:6] == (0, 1, 1, 0, 0, 2)
            assert (done.succeeded, done.missing_part) == (True, "")
            assert any("already deleted" in note for note in done.extra_lines(dry_run=False))
            assert not (await erase_user(db, APP, "ada")).succeeded
        assert await find(service) is None
        await create(service)
    assert count(pair.keys, "secure_data_keys") == pair.owners() == 2


async def test_erasure_whose_keys_are_not_deleted_does_not_say_that_they_are(pair: Pair) -> None:
    async with pair.service() as service:
        await create(service)
    db, faults = with_faults(pair.maintained)
    async with db:
        await db.keyring()
        faults.keys.after(Point.WORK, DatabaseError("the disk is full"))  # so it is rolled back
        with pytest.raises(DatabaseError, match=r"^the disk is full$"):
            await erase_user(db, APP, "ada")
    assert count(pair.keys, "secure_data_keys") == pair.owners() == 2
