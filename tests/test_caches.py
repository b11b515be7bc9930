"""Caches are bounded, however many sessions and users a service has seen."""

import asyncio
import os
import sqlite3
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from google.adk.events import Event, EventActions

from adk_secure_sessions import AesGcmBackend, EncryptedSessionService, StaticKey, WrongKeyError
from adk_secure_sessions.lru import Lru
from tests.servers import Server


def caches(holder: object) -> list[Lru[object, object]]:
    """Every cache of *holder* and of the objects that it refers to.

    Private attributes, since no public one could show that a cache was added without a bound.
    """
    values = holder if isinstance(holder, tuple) else tuple(vars(holder).values())
    found = [value for value in values if isinstance(value, Lru)]
    for value in values:
        if type(value).__name__ in ("DataKeys", "RowCache", "UnitOfWork", "_Opened"):
            found += caches(value)
    return found


async def test_small_caches_stay_small_and_change_nothing(tmp_path: Path) -> None:
    async with EncryptedSessionService(
        f"sqlite:///{tmp_path}/s.db",
        AesGcmBackend(os.urandom(32)),
        session_cache_size=5,
        data_key_cache_size=3,
    ) as service:
        sessions = [
            await service.create_session(app_name="a", user_id=f"u{n}", state={"user:n": n})
            for n in range(40)
        ]
        for _ in range(2):
            for n, session in enumerate(sessions):
                delta = EventActions(state_delta={"last": n, "user:n": n})
                await service.append_event(session, Event(author="a", actions=delta))
        for session in sessions:
            found = await service.get_session(
                app_name="a", user_id=session.user_id, session_id=session.id
            )
            assert found == session
        assert len((await service.list_sessions(app_name="a")).sessions) == 40
        sizes = [len(cache._entries) for cache in caches(service._store)]
        assert len(sizes) == 7, "a cache was added, or is no longer found"
        assert all(0 < size <= 5 for size in sizes), sizes


@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
async def test_more_users_at_once_than_cached_keys_do_not_disturb_each_other(
    database: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        url = f"sqlite:///{tmp_path}/s.db"
        if database == "postgresql":
            server: Server = request.getfixturevalue(database)
            database_url = stack.enter_context(server.database())
            url = database_url.set(drivername="postgresql+asyncpg").render_as_string(
                hide_password=False
            )
        key = AesGcmBackend(os.urandom(32))
        async with EncryptedSessionService(url, key, data_key_cache_size=10) as service:

            async def converse(user: str) -> None:
                session = await service.create_session(app_name="a", user_id=user)
                for n in range(10):
                    await service.append_event(session, Event(author="a"))
                    found = await service.get_session(
                        app_name="a", user_id=user, session_id=session.id
                    )
                    assert found is not None
                    assert len(found.events) == n + 1

            await asyncio.gather(*(converse(f"u{n}") for n in range(30)))


async def test_key_service_is_not_called_for_every_operation_if_the_keyring_is_rejected(
    tmp_path: Path,
) -> None:
    asked = 0
    root = StaticKey(os.urandom(32))

    class Counting:
        key_id = root.key_id
        wrap = root.wrap

        async def unwrap(self, wrapped: bytes, associated_data: bytes) -> bytes:
            nonlocal asked
            asked += 1
            return await root.unwrap(wrapped, associated_data)

    async with EncryptedSessionService(
        f"sqlite:///{tmp_path}/s.db", AesGcmBackend(Counting())
    ) as service:
        await service.create_session(app_name="a", user_id="known", session_id="s")
        asked = 0
        with closing(sqlite3.connect(tmp_path / "s.db", isolation_level=None)) as connection:
            for number in range(20):
                connection.execute(
                    "INSERT INTO secure_keyring SELECT ?, purpose, root_key_id, created_at, "
                    "wrapped FROM secure_keyring WHERE purpose = 'data' LIMIT 1",
                    (number,),
                )
        for number in range(10):
            with pytest.raises(WrongKeyError):
                await service.create_session(app_name="a", user_id=f"new {number}")
        assert asked == 1
        assert await service.get_session(app_name="a", user_id="known", session_id="s")
