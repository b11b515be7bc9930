"""Each operation of the service, ours beside ADK's and beside the floor."""

import pytest
from google.adk.sessions import BaseSessionService
from google.adk.sessions.base_session_service import GetSessionConfig

from tests.benchmarks.comparing import compare
from tests.benchmarks.databases import FLOOR
from tests.benchmarks.floor import Floor
from tests.benchmarks.harness import MOST, WARM_UPS, Operation, interleave
from tests.benchmarks.places import DISTANT, POSTGRESQL, Place
from tests.benchmarks.results import Figure, Results
from tests.benchmarks.samples import APP, event, started, state

pytestmark = [pytest.mark.benchmark, pytest.mark.asyncio(loop_scope="session")]

DELETES = 60


@pytest.mark.parametrize("place", [POSTGRESQL, DISTANT], indirect=True)
async def test_distance(place: Place, results: Results) -> None:
    """How far away the server is: what the driver's shortest statement takes."""
    floor = place.sides[FLOOR]
    assert isinstance(floor, Floor)
    [taken] = (await interleave({FLOOR: lambda: floor.read("SELECT 1", ())}, 0.5)).values()
    results.add(f"{place.name}/distance", Figure.of(taken, "s"))
    [(results.versions["PostgreSQL"],)] = await floor.read("SHOW server_version", ())


@pytest.mark.parametrize("size", [1, 100])
async def test_create(place: Place, results: Results, size: int) -> None:
    initial = state(size * 1000)

    def operation(service: BaseSessionService) -> Operation:
        return lambda: service.create_session(app_name=APP, user_id="create", state=initial)

    sides = {side: operation(service) for side, service in place.sides.items()}
    await compare(results, place, f"create, state {size} KB", sides)


@pytest.mark.parametrize("size", [1, 100])
async def test_append(place: Place, results: Results, size: int) -> None:
    async def operation(service: BaseSessionService) -> Operation:
        session = await started(service, "append", size * 1000)
        ready = [event(number) for number in range(MOST + WARM_UPS)]  # making one takes a while
        return lambda: service.append_event(session, ready.pop())

    sides = {side: await operation(service) for side, service in place.sides.items()}
    await compare(results, place, f"append, state {size} KB", sides)


async def test_delete(place: Place, results: Results) -> None:
    async def operation(side: str, service: BaseSessionService) -> Operation:
        ready = await place.stock.add(side, "delete", DELETES + WARM_UPS, events=20)
        return lambda: service.delete_session(
            app_name=APP, user_id="delete", session_id=ready.pop()
        )

    sides = {side: await operation(side, service) for side, service in place.sides.items()}
    await compare(results, place, "delete, 20 events", sides, most=DELETES)


@pytest.mark.parametrize("count", [0, 20, 100, 1000, 5000])
async def test_get(place: Place, results: Results, count: int) -> None:
    config = GetSessionConfig(num_recent_events=0) if count == 0 else None

    async def operation(side: str, service: BaseSessionService) -> Operation:
        name = await place.stock.history(side, count or 20)
        return lambda: service.get_session(
            app_name=APP, user_id="reader", session_id=name, config=config
        )

    sides = {side: await operation(side, service) for side, service in place.sides.items()}
    await compare(results, place, f"get, {count} events", sides)


@pytest.mark.parametrize("count", [10, 100, 1000])
async def test_list(place: Place, results: Results, count: int) -> None:
    async def operation(side: str, service: BaseSessionService) -> Operation:
        user = await place.stock.user(side, count)
        return lambda: service.list_sessions(app_name=APP, user_id=user)

    sides = {side: await operation(side, service) for side, service in place.sides.items()}
    await compare(results, place, f"list, {count} sessions", sides)
