"""However many sessions and users a service has seen, it remembers a bounded number."""

import os
from pathlib import Path

from google.adk.events import Event, EventActions

from adk_secure_sessions import AesGcmBackend, EncryptedSessionService
from adk_secure_sessions.lru import Lru


def caches(holder: object) -> list[Lru[object, object]]:
    """Every cache that *holder* and its parts have."""
    values = holder if isinstance(holder, tuple) else tuple(vars(holder).values())
    found = [value for value in values if isinstance(value, Lru)]
    for value in values:
        if type(value).__name__ in ("Attempts", "DataKeys", "Memo"):
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
        opened = service._store._state
        assert opened is not None
        sizes = [len(cache._entries) for cache in caches(opened)]
        assert len(sizes) == 6, "a cache was added, or is no longer found"
        assert all(0 < size <= 5 for size in sizes), sizes
