"""The peak memory of each operation."""

from typing import Any

import pytest
from google.adk.sessions import BaseSessionService
from google.adk.sessions.base_session_service import GetSessionConfig

from tests.benchmarks.databases import ADK_SQLITE, FLOOR
from tests.benchmarks.deployments import LOCAL, Deployment
from tests.benchmarks.harness import Operation
from tests.benchmarks.memory import peak_memory
from tests.benchmarks.plan import MEMORY_OPERATIONS
from tests.benchmarks.results import Figure, Results
from tests.benchmarks.workload import APP, event, payload, state

pytestmark = pytest.mark.bench


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("deployment", LOCAL, indirect=True)
async def test_memory_of_each_operation(deployment: Deployment, results: Results) -> None:
    sides = {
        side: service
        for side, service in deployment.all_sides.items()
        if side not in (ADK_SQLITE, FLOOR)
    }
    for side, service in sides.items():
        found = await operations(deployment, side, service)
        for name, operation in zip(MEMORY_OPERATIONS, found, strict=True):
            await operation()  # warm-up: compiled statements and the like are made only once
            taken = sorted([await peak_memory(operation) for _ in range(5)])
            results.add(f"{deployment.name}/memory/{name}/{side}", Figure.of(taken, "B"))


async def operations(
    deployment: Deployment, side: str, service: BaseSessionService
) -> list[Operation]:
    initial = payload("10KB")
    history = await deployment.seeded.session_with_events(side, 100)
    session = await service.create_session(app_name=APP, user_id="memory", state=state(1000))
    user = await deployment.seeded.user_with_sessions(side, 100)
    one: Any = {"app_name": APP, "user_id": "reader", "session_id": history}
    return [
        lambda: service.create_session(app_name=APP, user_id="memory", state=initial),
        lambda: service.append_event(session, event(0)),
        lambda: service.get_session(**one, config=GetSessionConfig(num_recent_events=20)),
        lambda: service.get_session(**one),
        lambda: service.list_sessions(app_name=APP, user_id=user),
    ]
