"""A session of 100,000 events is read in pages, in flat memory."""

import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from adk_secure_sessions import AesGcmBackend, EncryptedSessionService
from tests.conformance.support import event

pytestmark = pytest.mark.soak
EVENTS, LARGEST = 100_000, 8_000_000  # bytes
WHO: dict[str, Any] = {"app_name": "app", "user_id": "user", "session_id": "long"}


async def test_memory_of_a_long_history_is_that_of_a_page(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/long.db"
    async with EncryptedSessionService(url, AesGcmBackend(bytes(32))) as service:
        session = await service.create_session(**WHO)
        for number in range(EVENTS):
            await service.append_event(session, event(str(number)))
            session.events.clear()
        for order in ("oldest", "newest"):
            tracemalloc.start()
            found = 0
            async for _ in service.iterate_events(**WHO, order=order):
                found += 1
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert found == EVENTS
            assert peak < LARGEST
