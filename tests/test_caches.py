"""Caches are bounded, however many sessions and users a service has seen."""

import gc
import os
import weakref
from datetime import timedelta
from pathlib import Path

import pytest
from google.adk.events import Event, EventActions
from sqlalchemy.ext.asyncio import create_async_engine

from adk_secure_sessions import AesGcmBackend, Caches, EncryptedSessionService, TamperedError
from adk_secure_sessions.caches import FifoCache
from adk_secure_sessions.maintenance import Database, rotate_data
from adk_secure_sessions.storage.key_operations import EnsureOwners
from tests.faults import Point, with_faults
from tests.sqlite_files import execute


def caches(holder: object) -> list[FifoCache[object, object]]:
    """Every cache of *holder* and of the objects that it refers to.

    Private attributes, since no public one could show that a cache was added without a bound.
    """
    values = holder if isinstance(holder, tuple) else tuple(vars(holder).values())
    found = [value for value in values if isinstance(value, FifoCache) and value.limit]
    for value in values:
        if type(value).__name__ in ("DatabaseKeys", "RowCache", "OperationRunner", "_OpenState"):
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
        sizes = [len(cache._entries) for cache in caches(service._runner)]
        assert len(sizes) == 5, "a cache was added, or is no longer found"
        assert all(0 < size <= 5 for size in sizes), sizes


async def test_owners_that_were_found_for_a_wrapper_are_cached(tmp_path: Path) -> None:
    url, backend = f"sqlite:///{tmp_path}/s.db", AesGcmBackend(os.urandom(32))
    async with EncryptedSessionService(url, backend) as service:
        await service.create_session(app_name="a", user_id="u")
    async with EncryptedSessionService(url, backend) as service:
        await service._runner.run(EnsureOwners(await service._runner.identify("a", "u")))
        opened = service._runner._opened
        assert opened
        assert (len(opened.row_cache.apps._entries), len(opened.row_cache.users._entries)) == (1, 1)


async def test_session_that_leaves_the_cache_during_an_append_is_read_with_its_witness(
    tmp_path: Path,
) -> None:
    url, backend = f"sqlite:///{tmp_path}/s.db", AesGcmBackend(os.urandom(32))
    service, faults = with_faults(
        lambda: EncryptedSessionService(url, backend, cache=Caches(sessions=1))
    )
    async with service:
        await service.create_session(app_name="a", user_id="u", session_id="other")
        session = await service.create_session(app_name="a", user_id="u", session_id="s")

        async def read_the_other() -> None:
            await service.get_session(app_name="a", user_id="u", session_id="other")

        faults.data.after(Point.APPLY, read_the_other)
        await service.append_event(session, Event(author="a"))
        execute(
            tmp_path / "s.db",
            "DELETE FROM secure_witnesses WHERE tag = (SELECT tag FROM secure_sessions "
            "ORDER BY revision DESC LIMIT 1)",
        )
        with pytest.raises(TamperedError, match="witness"):
            await service.get_session(app_name="a", user_id="u", session_id="s")


@pytest.mark.parametrize("stored", ["another user", "u"])
async def test_read_that_saw_no_session_that_is_stored_meanwhile_empties_no_cache(
    stored: str, tmp_path: Path
) -> None:
    url, backend = f"sqlite:///{tmp_path}/s.db", AesGcmBackend(os.urandom(32))
    service, faults = with_faults(lambda: EncryptedSessionService(url, backend))
    async with service:
        await service.create_session(app_name="a", user_id=stored)

        async def create() -> None:
            await service.create_session(app_name="a", user_id="u", session_id="s")

        faults.data.after(Point.READ, create)
        assert await service.get_session(app_name="a", user_id="u", session_id="s") is None
        opened = service._runner._opened
        assert opened
        assert len(opened.row_cache.users._entries) == len({stored, "u"})
        assert len(opened.row_cache.sessions._entries) == 2


# --- what stays in memory ------------------------------------------------------------------------


async def test_listing_keeps_no_second_copy_of_a_row(tmp_path: Path) -> None:
    """Rows of an engine of the application refer to the description of the whole answer, too."""
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/s.db")
    async with EncryptedSessionService(
        db_engine=engine, backend=AesGcmBackend(os.urandom(32))
    ) as service:
        await service.create_session(app_name="a", user_id="u", state={"key": "value"})
        for _ in range(3):
            await service.list_sessions(app_name="a", user_id="u")
        opened = service._runner._opened
        assert opened
        [cached] = opened.row_cache.sessions._entries.values()
        assert type(cached.listed) is tuple
        assert any(value is cached.value.row.record for value in cached.listed)
    await engine.dispose()


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


async def test_ids_and_keys_are_not_kept_after_close(tmp_path: Path) -> None:
    url, lifetime = f"sqlite:///{tmp_path}/s.db", timedelta(days=1)
    service = EncryptedSessionService(url, AesGcmBackend(os.urandom(32)), expires_after=lifetime)
    user_id, session_id = Id("u"), Id("s")
    session = await service.create_session(app_name="a", user_id=user_id, session_id=session_id)
    await service.append_event(session, Event(author="a"))
    await service.get_session(app_name="a", user_id=user_id, session_id=session_id)
    watched = [weakref.ref(user_id), weakref.ref(session_id)]
    keyring = weakref.ref(await service._runner.keyring())
    del session, user_id, session_id
    await service.close()
    assert (kept(watched), keyring()) == ([], None)


async def test_append_to_a_session_whose_row_was_encrypted_again_is_cached_once(
    tmp_path: Path,
) -> None:
    """The changes that rely on the cached row match no row; the second ones are stored."""
    url, backend = f"sqlite:///{tmp_path}/s.db", AesGcmBackend(os.urandom(32))
    async with EncryptedSessionService(url, backend) as service:
        session = await service.create_session(app_name="a", user_id="u")
        async with Database(url, backend) as db:
            await rotate_data(db)
        await service.append_event(session, Event(author="a", id="e"))
        assert [one.id for one in session.events] == ["e"]
        found = await service.get_session(app_name="a", user_id="u", session_id=session.id)
        assert found == session
