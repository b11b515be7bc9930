"""The floor is a valid reference: it does the same work as ADK's own service."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from google.adk.sessions import BaseSessionService, InMemorySessionService
from google.adk.sessions.base_session_service import GetSessionConfig

from tests import servers
from tests.benchmarks.databases import FLOOR, opened
from tests.benchmarks.workload import APP, event, state
from tests.conformance.support import ADK


@pytest.fixture(params=["sqlite", "postgresql"])
async def floor(
    request: pytest.FixtureRequest, tmp_path: Path
) -> AsyncIterator[BaseSessionService]:
    if request.param == "sqlite":
        url = sa.URL.create("sqlite+aiosqlite", database=str(tmp_path / "floor.db"))
        async with opened(FLOOR, url) as service:
            yield service
        return
    server: servers.PostgreSQL = request.getfixturevalue("postgresql")
    with server.database() as url:
        async with opened(FLOOR, url.set(drivername="postgresql+asyncpg")) as service:
            yield service


@pytest.mark.skipif(
    ADK < (1, 39), reason="InMemorySessionService returned all events where 0 were asked for"
)
@pytest.mark.parametrize("size", [1_000, 100_000])
async def test_floor_stores_and_returns_what_adk_does(floor: BaseSessionService, size: int) -> None:
    seen = []
    for service in (InMemorySessionService(), floor):
        names: dict[str, Any] = {"app_name": APP, "user_id": "user", "session_id": "one"}
        session = await service.create_session(**names, state=state(size))
        for number in range(30):
            one = event(number).model_copy(update={"id": str(number), "timestamp": number + 0.5})
            await service.append_event(session, one)
        await service.create_session(app_name=APP, user_id="user", session_id="two")
        await service.create_session(app_name=APP, user_id="other", session_id="three")
        listed = await service.list_sessions(app_name=APP, user_id="user")
        whole = await service.get_session(**names)
        bare = await service.get_session(**names, config=GetSessionConfig(num_recent_events=0))
        await service.delete_session(**names)
        left = await service.list_sessions(app_name=APP, user_id="user")
        assert bare is not None
        assert await service.get_session(**names) is None
        seen.append(
            (
                session.state,
                whole,
                (bare.events, bare.state),
                sorted((one.id, one.state) for one in listed.sessions if one.id == "one"),
                sorted(one.id for one in listed.sessions),
                [one.id for one in left.sessions],
            )
        )
    assert seen[0] == seen[1]


async def test_floor_deletes_all_rows_of_a_session(floor: BaseSessionService) -> None:
    session = await floor.create_session(app_name=APP, user_id="user", state=state(100_000))
    await floor.append_event(session, event(0))
    names: dict[str, Any] = {"app_name": APP, "user_id": "user", "session_id": session.id}
    await floor.delete_session(**names)
    again = await floor.create_session(**names)
    assert again.state == {}
    await floor.append_event(again, event(1))
    read = await floor.get_session(**names)
    assert read is not None
    assert len(read.events) == 1
