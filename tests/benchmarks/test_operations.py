"""Each operation of the session service: ours, ADK's and the floor's."""

import pytest
from google.adk.sessions import BaseSessionService
from google.adk.sessions.base_session_service import GetSessionConfig

from tests.benchmarks.comparison import compare
from tests.benchmarks.databases import FLOOR
from tests.benchmarks.deployments import POSTGRESQL, REMOTE, Deployment
from tests.benchmarks.floor import Floor
from tests.benchmarks.harness import MAX_ROUNDS, WARM_UPS, Operation, interleave
from tests.benchmarks.results import Figure, Results
from tests.benchmarks.workload import APP, event, start_session, state

pytestmark = [pytest.mark.bench, pytest.mark.asyncio(loop_scope="session")]

DELETES = 60


@pytest.mark.parametrize("deployment", [POSTGRESQL, REMOTE], indirect=True)
async def test_network_round_trip(deployment: Deployment, results: Results) -> None:
    """The network round trip: the time of the driver's shortest statement."""
    floor = deployment.sides[FLOOR]
    assert isinstance(floor, Floor)
    [taken] = (await interleave({FLOOR: lambda: floor.read("SELECT 1", ())}, 0.5)).values()
    results.add(f"{deployment.name}/network round trip", Figure.of(taken, "s"))
    [(results.versions["PostgreSQL"],)] = await floor.read("SHOW server_version", ())


@pytest.mark.parametrize("size", [1, 100])
async def test_create(deployment: Deployment, results: Results, size: int) -> None:
    initial = state(size * 1000)

    def operation(service: BaseSessionService) -> Operation:
        return lambda: service.create_session(app_name=APP, user_id="create", state=initial)

    sides = {side: operation(service) for side, service in deployment.sides.items()}
    await compare(results, deployment, f"create, state {size} KB", sides)


@pytest.mark.parametrize("size", [1, 100])
async def test_append(deployment: Deployment, results: Results, size: int) -> None:
    async def operation(service: BaseSessionService) -> Operation:
        session = await start_session(service, "append", size * 1000)
        # Created in advance: creating an event takes a while.
        ready = [event(number) for number in range(MAX_ROUNDS + WARM_UPS)]
        return lambda: service.append_event(session, ready.pop())

    sides = {side: await operation(service) for side, service in deployment.sides.items()}
    await compare(results, deployment, f"append, state {size} KB", sides)


async def test_delete(deployment: Deployment, results: Results) -> None:
    async def operation(side: str, service: BaseSessionService) -> Operation:
        ready = await deployment.seeded.add(side, "delete", DELETES + WARM_UPS, events=20)
        return lambda: service.delete_session(
            app_name=APP, user_id="delete", session_id=ready.pop()
        )

    sides = {side: await operation(side, service) for side, service in deployment.sides.items()}
    await compare(results, deployment, "delete, 20 events", sides, max_rounds=DELETES)


@pytest.mark.parametrize("count", [0, 20, 100, 1000, 5000])
async def test_get(deployment: Deployment, results: Results, count: int) -> None:
    config = GetSessionConfig(num_recent_events=0) if count == 0 else None

    async def operation(side: str, service: BaseSessionService) -> Operation:
        name = await deployment.seeded.session_with_events(side, count or 20)
        return lambda: service.get_session(
            app_name=APP, user_id="reader", session_id=name, config=config
        )

    sides = {side: await operation(side, service) for side, service in deployment.sides.items()}
    await compare(results, deployment, f"get, {count} events", sides)


@pytest.mark.parametrize("count", [10, 100, 1000])
async def test_list(deployment: Deployment, results: Results, count: int) -> None:
    async def operation(side: str, service: BaseSessionService) -> Operation:
        user = await deployment.seeded.user_with_sessions(side, count)
        return lambda: service.list_sessions(app_name=APP, user_id=user)

    sides = {side: await operation(side, service) for side, service in deployment.sides.items()}
    await compare(results, deployment, f"list, {count} sessions", sides)
