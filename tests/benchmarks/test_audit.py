"""Reads and appends with the audit log and with the audit trail, and without both."""

import logging
import os
from collections.abc import Iterator
from contextlib import AsyncExitStack

import pytest
from google.adk.sessions import Session

from adk_secure_sessions import AesGcmBackend, EncryptedSessionService
from tests.benchmarks import plan
from tests.benchmarks.comparison import SECONDS
from tests.benchmarks.deployments import LOCAL, Deployment
from tests.benchmarks.harness import Operation, interleave
from tests.benchmarks.results import Figure, Results
from tests.benchmarks.workload import APP, event, start_session

pytestmark = [
    pytest.mark.bench,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.parametrize("deployment", LOCAL, indirect=True),
]


@pytest.fixture(autouse=True)
def _log() -> Iterator[None]:
    """Switch the audit log on; its records end in a handler that formats and discards them."""
    logger = logging.getLogger("adk_secure_sessions.audit")
    before = logger.level, logger.propagate
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        handler = logging.StreamHandler(nowhere)
        logger.setLevel(logging.INFO)
        logger.propagate = False
        logger.addHandler(handler)
        yield
        logger.removeHandler(handler)
    logger.setLevel(before[0])
    logger.propagate = before[1]


def operation(name: str, service: EncryptedSessionService, session: Session) -> Operation:
    if name == "append":
        one = event(0)
        return lambda: service.append_event(session, one)
    return lambda: service.get_session(app_name=APP, user_id="user", session_id=session.id)


@pytest.mark.parametrize("name", plan.AUDITED)
async def test_audit(deployment: Deployment, results: Results, name: str) -> None:
    operations: dict[str, Operation] = {}
    async with AsyncExitStack() as stack:
        for side, options in plan.AUDIT.items():
            service = EncryptedSessionService(
                deployment.databases.create(), AesGcmBackend(os.urandom(32)), **options
            )
            await stack.enter_async_context(service)
            session = await start_session(service, "user", 1000)
            operations[side] = operation(name, service, session)
        timings = await interleave(operations, SECONDS, max_rounds=1000)
    base = f"{deployment.name}/audit/{name}"
    for side, values in timings.items():
        results.add(f"{base}/{side}", Figure.of(values, "s"))
        if side != plan.NO_AUDIT:
            ratio = Figure.ratio(values, timings[plan.NO_AUDIT])
            results.add(f"{base}/{side} relative to {plan.NO_AUDIT}", ratio)
