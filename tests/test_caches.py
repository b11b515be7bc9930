"""Caches are bounded, however many sessions and users a service has seen."""

import gc
import os
import sqlite3
import weakref
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path

import pytest
from google.adk.events import Event, EventActions
from google.adk.sessions import Session

from adk_secure_sessions import (
    AesGcmBackend,
    Caches,
    DecryptionError,
    EncryptedSessionService,
    KeyServiceError,
    StaticKey,
)
from adk_secure_sessions.caches import Lru


def caches(holder: object) -> list[Lru[object, object]]:
    """Every cache of *holder* and of the objects that it refers to.

    Private attributes, since no public one could show that a cache was added without a bound.
    """
    values = holder if isinstance(holder, tuple) else tuple(vars(holder).values())
    found = [value for value in values if isinstance(value, Lru) and value.limit]
    for value in values:
        if type(value).__name__ in ("DataKeys", "RowCache", "UnitOfWork", "_Opened"):
            found += caches(value)
    return found


async def test_small_caches_stay_small_and_change_nothing(tmp_path: Path) -> None:
    async with EncryptedSessionService(
        f"sqlite:///{tmp_path}/s.db",
        AesGcmBackend(os.urandom(32)),
        cache=Caches(sessions=5, data_keys=3),
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
        sizes = [len(cache._entries) for cache in caches(service._unit)]
        assert len(sizes) == 6, "a cache was added, or is no longer found"
        assert all(0 < size <= 5 for size in sizes), sizes


class Counting:
    """A root key that counts the calls, and fails if it is told to."""

    def __init__(self) -> None:
        self._root = StaticKey(os.urandom(32))
        self.key_id = "counting"
        self.wrap = self._root.wrap
        self.asked = 0
        self.fails = False

    async def unwrap(self, wrapped: bytes, associated_data: bytes) -> bytes:
        self.asked += 1
        if self.fails:
            raise KeyServiceError("busy", retryable=True)
        return await self._root.unwrap(wrapped, associated_data)


def insert_junk(path: Path, number: int) -> None:
    """Insert *number* rows into the keyring, which no root key unwraps."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("BEGIN")  # one commit for all
        for key_id in range(number):
            connection.execute(
                "INSERT INTO secure_keyring SELECT ?, purpose, root_key_id, created_at, "
                "wrapped FROM secure_keyring WHERE purpose = 'data' LIMIT 1",
                (key_id,),
            )
        connection.execute("COMMIT")


@pytest.mark.parametrize(
    ("junk", "fails", "calls"),
    [(20, False, 20), (64, False, 0), (5000, False, 0), (1, True, 1)],
    ids=["junk rows", "too many rows", "thousands of rows", "key service is down"],
)
async def test_key_service_is_not_called_for_every_operation_if_rows_of_the_keyring_are_rejected(
    tmp_path: Path, junk: int, fails: bool, calls: int
) -> None:
    root = Counting()
    async with EncryptedSessionService(
        f"sqlite:///{tmp_path}/s.db", AesGcmBackend(root)
    ) as service:
        await service.create_session(app_name="a", user_id="known", session_id="s")
        root.asked, root.fails = 0, fails
        insert_junk(tmp_path / "s.db", junk)
        for number in range(10):
            await service.create_session(app_name="a", user_id=f"new {number}")
        assert root.asked == calls
        assert await service.get_session(app_name="a", user_id="known", session_id="s")


# --- what stays in memory ------------------------------------------------------------------------


class Id(str):
    """An id that can be watched: its weak reference is dead once nothing keeps it."""


def kept(watched: list[weakref.ref[Id]]) -> list[Id]:
    gc.collect()
    return [found for ref in watched if (found := ref()) is not None]


async def test_ids_that_do_not_exist_are_not_kept(tmp_path: Path) -> None:
    """Whoever may choose ids would fill the memory with them."""
    url = f"sqlite:///{tmp_path}/s.db"
    async with EncryptedSessionService(url, AesGcmBackend(os.urandom(32))) as service:
        await service.create_session(app_name="a", user_id="u", session_id="s")
        watched = [
            *await unknown_session(service, "a", "u", Id("s?")),
            *await unknown_session(service, "a", Id("u?"), "s"),
            *await unknown_session(service, Id("a?"), "u", "s"),
        ]
        assert len(watched) == 3
        assert kept(watched) == []


async def unknown_session(service: EncryptedSessionService, *ids: str) -> list[weakref.ref[Id]]:
    app_name, user_id, session_id = ids
    found = await service.get_session(app_name=app_name, user_id=user_id, session_id=session_id)
    assert found is None
    await service.list_sessions(app_name=app_name, user_id=user_id)
    return [weakref.ref(one) for one in ids if isinstance(one, Id)]


async def test_ids_are_not_kept_after_close(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/s.db"
    service = EncryptedSessionService(url, AesGcmBackend(os.urandom(32)))
    user_id, session_id = Id("u"), Id("s")
    session = await service.create_session(app_name="a", user_id=user_id, session_id=session_id)
    await service.append_event(session, Event(author="a"))
    await service.get_session(app_name="a", user_id=user_id, session_id=session_id)
    watched = [weakref.ref(user_id), weakref.ref(session_id)]
    del session, user_id, session_id
    await service.close()
    assert kept(watched) == []


# --- a user whom another process has erased ------------------------------------------------------


USES: dict[str, Callable[[EncryptedSessionService, Session], Awaitable[object]]] = {
    "get": lambda service, session: service.get_session(app_name="a", user_id="u", session_id="s"),
    "list": lambda service, session: service.list_sessions(app_name="a", user_id="u"),
    "append": lambda service, session: service.append_event(session, Event(author="a")),
    "create": lambda service, session: service.create_session(app_name="a", user_id="u"),
}


@pytest.mark.parametrize("use", USES)
async def test_erased_user_is_rejected_after_the_cache_time_though_the_rows_return(
    tmp_path: Path, use: str
) -> None:
    url, key = f"sqlite:///{tmp_path}/s.db", os.urandom(32)
    async with EncryptedSessionService(
        url, AesGcmBackend(key), cache=Caches(seconds=0.0)
    ) as service:
        session = await service.create_session(app_name="a", user_id="u", session_id="s")
        await service.append_event(session, Event(author="a"))
        # Another process erases the user, and somebody inserts all rows again but the data keys.
        with closing(sqlite3.connect(tmp_path / "s.db", isolation_level=None)) as connection:
            deleted = connection.execute(
                "DELETE FROM secure_data_keys WHERE owner IN (SELECT tag FROM secure_users)"
            )
            assert deleted.rowcount == 1
        with pytest.raises(DecryptionError):
            await USES[use](service, session)
