"""CPU time of the service with AES-256-GCM relative to the same service without encryption."""

import time

import pytest
from google.adk.sessions import BaseSessionService

from tests.benchmarks.budgets import CIPHER_COST
from tests.benchmarks.comparison import SECONDS
from tests.benchmarks.databases import NO_OP, OURS
from tests.benchmarks.deployments import LOCAL, Deployment
from tests.benchmarks.harness import Operation, interleave
from tests.benchmarks.results import Figure, Results
from tests.benchmarks.workload import APP, event, start_session, state

pytestmark = [
    pytest.mark.bench,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.parametrize("deployment", LOCAL, indirect=True),
]

SIDES = (OURS, NO_OP)


async def compare(
    results: Results,
    deployment: Deployment,
    operation: str,
    sides: dict[str, Operation],
    repeat: int,
) -> None:
    # The CPU time of all threads of this process: excludes waiting for the disk and the server.
    timings = await interleave(sides, SECONDS, clock=time.process_time, repeat=repeat)
    ratio = Figure.ratio(timings[OURS], timings[NO_OP], CIPHER_COST[deployment.name])
    results.add(f"{deployment.name}/CPU time/{operation}/relative to {NO_OP}", ratio)


@pytest.mark.parametrize("size", [1, 100])
async def test_cipher_in_create(deployment: Deployment, results: Results, size: int) -> None:
    initial = state(size * 1000)

    def operation(service: BaseSessionService) -> Operation:
        return lambda: service.create_session(app_name=APP, user_id="cipher", state=initial)

    operations = {side: operation(deployment.all_sides[side]) for side in SIDES}
    await compare(results, deployment, f"create, {size} KB", operations, 10)


@pytest.mark.parametrize("size", [1, 100])
async def test_cipher_in_append(deployment: Deployment, results: Results, size: int) -> None:
    """The event itself has that size, so that all of it is encrypted."""

    async def operation(service: BaseSessionService) -> Operation:
        session = await start_session(service, "cipher", 1000)
        one = event(0, text_size=size * 1000)
        return lambda: service.append_event(session, one)

    operations = {side: await operation(deployment.all_sides[side]) for side in SIDES}
    await compare(results, deployment, f"append, {size} KB", operations, 10)


@pytest.mark.parametrize("count", [20, 1000])
async def test_cipher_in_get(deployment: Deployment, results: Results, count: int) -> None:
    async def operation(side: str) -> Operation:
        name = await deployment.seeded.session_with_events(side, count)
        service = deployment.all_sides[side]
        return lambda: service.get_session(app_name=APP, user_id="reader", session_id=name)

    operations = {side: await operation(side) for side in SIDES}
    await compare(results, deployment, f"get, {count} events", operations, 1 if count > 100 else 10)
