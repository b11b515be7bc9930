"""`EncryptedSessionWrapper` before ADK's `DatabaseSessionService`, and that service alone."""

import os
from pathlib import Path

import pytest
from google.adk.sessions import BaseSessionService
from google.adk.sessions.database_session_service import DatabaseSessionService

from adk_secure_sessions import AesGcmBackend, EncryptedSessionWrapper
from tests.benchmarks.comparison import SECONDS, add_comparison
from tests.benchmarks.databases import ADK, OURS
from tests.benchmarks.harness import MAX_ROUNDS, WARM_UPS, Operation, interleave
from tests.benchmarks.plan import WRAPPER_OPERATIONS
from tests.benchmarks.results import Results
from tests.benchmarks.workload import APP, event, state

pytestmark = [pytest.mark.bench, pytest.mark.asyncio(loop_scope="session")]


async def _create(service: BaseSessionService) -> Operation:
    initial = state(1000)
    return lambda: service.create_session(app_name=APP, user_id="create", state=initial)


async def _append(service: BaseSessionService) -> Operation:
    session = await service.create_session(app_name=APP, user_id="append", state=state(1000))
    ready = [event(number) for number in range(MAX_ROUNDS + WARM_UPS)]
    return lambda: service.append_event(session, ready.pop())


async def _get(service: BaseSessionService) -> Operation:
    session = await service.create_session(app_name=APP, user_id="get", state=state(1000))
    for number in range(20):
        await service.append_event(session, event(number))
    return lambda: service.get_session(app_name=APP, user_id="get", session_id=session.id)


OPERATIONS = dict(zip(WRAPPER_OPERATIONS, (_create, _append, _get), strict=True))


async def test_wrapper(results: Results, tmp_path: Path) -> None:
    ours, bare = (
        DatabaseSessionService(f"sqlite+aiosqlite:///{tmp_path}/{side}.db") for side in (OURS, ADK)
    )
    keys = f"sqlite+aiosqlite:///{tmp_path}/keys.db"
    try:
        async with EncryptedSessionWrapper(
            ours, AesGcmBackend(os.urandom(32)), key_db_url=keys
        ) as wrapper:
            for name, prepare in OPERATIONS.items():
                sides = {OURS: await prepare(wrapper), ADK: await prepare(bare)}
                add_comparison(results, f"wrapper/{name}", await interleave(sides, SECONDS))
    finally:
        await bare.close()
