"""Rotations, retirements and services in one another's way: nothing is under a key that is gone."""

import importlib
from typing import Any

import pytest
import sqlalchemy as sa

from adk_secure_sessions import (
    AesGcmBackend,
    EncryptedSessionService,
    FernetBackend,
    SecureSessionError,
)
from adk_secure_sessions.db import postgresql as asyncpg_executor
from adk_secure_sessions.maintenance import (
    Database,
    erase_user,
    lookup,
    resealing,
    retire,
    rotate_data,
    rotate_master,
    verify,
)
from adk_secure_sessions.maintenance import records as owners
from tests.maintenance.support import APP, OLD, event, fill, query
from tests.servers import Server

data_rotation: Any = importlib.import_module("adk_secure_sessions.maintenance.rotate_data")
master_keys: Any = importlib.import_module("adk_secure_sessions.maintenance.rotate_master")

AES, FERNET = AesGcmBackend(OLD), FernetBackend(OLD)


class Killed(BaseException):
    """Ends a run as a signal would, where nothing runs afterwards."""


async def is_whole(url: str, *backends: Any) -> None:
    async with Database(url, backends[0], backends[1:]) as db:
        found = await verify(db)
    assert (found.bad, found.unchecked) == (0, 0), found.problems


@pytest.fixture
def one_session_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owners, "_SESSIONS", 1)
    monkeypatch.setattr(owners, "_of_user", owners._of_user.__wrapped__)


async def rotate_until_the_second_session(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From then on the user and the first session are under the newest key, the second is not."""
    reseal, sessions = data_rotation._Run._reseal, 0

    async def killed(run: Any, keys: Any, owner: Any, records: Any) -> None:
        nonlocal sessions
        sessions += any(record.kind is resealing.SESSIONS for record in records)
        if sessions == 2:
            raise Killed
        await reseal(run, keys, owner, records)

    with monkeypatch.context() as patch:
        patch.setattr(data_rotation._Run, "_reseal", killed)
        async with Database(url, AES) as db:
            with pytest.raises(Killed):
                await rotate_data(db, restart=True)


async def test_key_that_a_service_may_use_in_place_of_an_older_one_is_kept(
    url: str, one_session_at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rotations that were killed left three generations; nothing is under the middle one."""
    await fill(url, AES, users=["ada"], sessions=2, events=1)
    async with EncryptedSessionService(url, AES) as service:
        await rotate_until_the_second_session(url, monkeypatch)
        found = {}
        async with Database(url, AES) as db:
            for name in ("s0", "s1"):
                (*_, place) = await lookup(db, APP, "ada", name)
                session = await service.get_session(app_name=APP, user_id="ada", session_id=name)
                assert session is not None  # and with it the second generation is known
                found[place.row] = session
        await rotate_until_the_second_session(url, monkeypatch)
        async with Database(url) as db:
            retired = await retire(db)
        assert [one.references != () for one in retired.examples] == [True, False]
        await service.append_event(found[max(row for row in found if row)], event(9))
    await is_whole(url, AES)


async def test_two_rotations_of_the_master_wrap_nothing_with_one_that_was_dropped(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(url)
    walk, walks = master_keys._Run._walk, 0

    async def interrupted(run: Any, *arguments: Any) -> None:
        nonlocal walks
        walks += 1
        if walks == 2:
            raise Killed
        if walks == 1:  # its master is there, and has wrapped nothing
            async with Database(url, AES) as another:
                with pytest.raises(Killed):
                    await rotate_master(another, restart=True)
                assert (await retire(another)).masters
        await walk(run, *arguments)

    monkeypatch.setattr(master_keys._Run, "_walk", interrupted)
    async with Database(url, AES) as db:
        with pytest.raises(SecureSessionError, match="another was begun meanwhile"):
            await rotate_master(db)
    await is_whole(url, AES)
    async with Database(url, AES) as db:
        assert (await rotate_master(db)).left == 0
    await is_whole(url, AES)


async def test_two_rotations_of_data_keys_leave_nothing_under_one_that_was_dropped(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(url, AES, users=["ada"], sessions=1, events=1)
    change, stage = Database.change, 0

    async def interrupted(db: Any, work: Any, **options: Any) -> Any:
        nonlocal stage
        replaces = getattr(work, "func", None) is resealing._replace
        if replaces and work.args[0][0][0].kind is resealing.EVENTS:
            stage += 1
            if stage == 2:
                raise Killed
            if stage == 1:  # sealed anew, but not yet stored
                async with Database(url, AES) as another:
                    with pytest.raises(Killed):
                        await rotate_data(another, restart=True)
                    await retire(another)
        return await change(db, work, **options)

    monkeypatch.setattr(Database, "change", interrupted)
    async with Database(url, AES) as db:
        with pytest.raises(SecureSessionError, match="another was begun meanwhile"):
            await rotate_data(db)
    await is_whole(url, AES)


async def test_key_of_another_backend_that_is_retired_as_a_service_writes_is_not_used(
    postgresql: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its read, which finds the key still there, and its changes."""
    fetch, armed = asyncpg_executor._fetch, False

    async def fetch_then_retire(*arguments: Any) -> Any:
        nonlocal armed
        rows = await fetch(*arguments)
        if armed and any(row[0] == 3 for row in rows):  # data keys
            armed = False
            async with Database(url) as db:
                assert (await retire(db)).kept == 0
        return rows

    monkeypatch.setattr(asyncpg_executor, "_fetch", fetch_then_retire)
    with postgresql.database() as place:
        url = place.set(drivername="postgresql+asyncpg").render_as_string(hide_password=False)
        await fill(url, FERNET, users=["ada"], sessions=1)
        async with EncryptedSessionService(url, FERNET, [AES]) as service:
            async with Database(url, AES, [FERNET]) as db:
                await rotate_data(db)
            session = await service.get_session(app_name=APP, user_id="ada", session_id="s0")
            assert session is not None
            armed = True
            await service.append_event(session, event(9))
            assert not armed
        await is_whole(url, FERNET, AES)


async def test_key_that_a_service_of_another_backend_holds_is_kept(url: str, place: sa.URL) -> None:
    await fill(url, FERNET, users=["ada"], sessions=1)
    async with (
        EncryptedSessionService(url, FERNET, [AES]) as service,
        Database(url, AES, [FERNET]) as db,
    ):
        await rotate_data(db)
        session = await service.get_session(app_name=APP, user_id="ada", session_id="s0")
        assert session is not None
        keys = query(place, "SELECT count(*) FROM secure_data_keys")
        await service.append_event(session, event(9))
        assert query(place, "SELECT count(*) FROM secure_data_keys") == keys
        (kept,) = (await retire(db)).examples
        assert dict(kept.references)["secure_events"] == 1
    await is_whole(url, FERNET, AES)


async def test_key_is_made_for_nobody_who_was_erased(url: str, place: sa.URL) -> None:
    await fill(url, AES, users=["ada"])
    async with Database(url, AES) as db:
        ((owner,),) = query(place, "SELECT tag FROM secure_users")
        run = data_rotation._Run(db, False, None, None)
        run._since = 2**62
        keys = await db.keys_of(bytes(owner))
        row = keys.new(bytes(owner), run._since)
        await erase_user(db, APP, "ada")
        assert not await run._insert(bytes(owner), row._asdict() | keys.keyring_guard())
    assert query(place, "SELECT count(*) FROM secure_data_keys") == [(1,)]  # the app's
    async with EncryptedSessionService(url, AES) as service:
        await service.create_session(app_name=APP, user_id="ada")
