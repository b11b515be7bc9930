"""Stored size: of one encrypted value, and of sessions and events in the database."""

import os

import pytest

from adk_secure_sessions import AesGcmBackend, FernetBackend
from adk_secure_sessions.formats.records import NO_FLAGS, build_header, seal
from tests.benchmarks.databases import ADK, FERNET, FLOOR, NO_OP, OURS, opened, stored_bytes
from tests.benchmarks.deployments import LOCAL, Deployment
from tests.benchmarks.plan import PAYLOADS, RECORD_SIZES, RECORDS, STORED_EVENTS, STORED_SESSIONS
from tests.benchmarks.results import Results
from tests.benchmarks.seeding import seed_sessions
from tests.benchmarks.workload import APP, event, json_size, payload

pytestmark = pytest.mark.bench

SIDES = (OURS, FERNET, NO_OP, ADK, FLOOR)


@pytest.mark.parametrize("size", RECORDS)
def test_record(results: Results, size: str) -> None:
    """A backend adds the same number of bytes to every value, apart from Fernet's padding."""
    for backend in (AesGcmBackend(os.urandom(32)), FernetBackend(os.urandom(32))):
        cipher = backend.cipher(backend.new_key())
        header = build_header(backend.backend_id, 1)
        record = seal(cipher, header, b"context", NO_FLAGS + bytes(RECORD_SIZES[size]))
        results.count(f"record/{size}/{backend.name}", len(record), "B")


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("deployment", LOCAL, indirect=True)
async def test_database(deployment: Deployment, results: Results) -> None:
    """Measure how much the database grows, including indexes, for each session and event."""
    name = f"{deployment.name}/stored"
    for label in PAYLOADS:
        results.count(f"{name}/session, {label}/JSON", json_size(payload(label)), "B")
    json = len(event(0).model_dump_json(exclude_none=True))
    results.count(f"{name}/event/JSON", json, "B")
    for side in SIDES:
        url = deployment.databases.create()
        async with opened(side, url) as service:
            await service.create_session(app_name=APP, user_id="user")
        size = await stored_bytes(url)
        for label, count in STORED_SESSIONS.items():
            async with opened(side, url) as service:
                await seed_sessions(service, "user", count, initial=payload(label))
            before, size = size, await stored_bytes(url)
            each = (size - before) / count
            results.count(f"{name}/session, {label}/{side}", round(each), "B")
        async with opened(side, url) as service:
            await seed_sessions(service, "user", 1, STORED_EVENTS)
        before, size = size, await stored_bytes(url)
        results.count(f"{name}/event/{side}", round((size - before) / STORED_EVENTS), "B")
