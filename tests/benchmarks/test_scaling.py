"""Appends by several processes at once, and operations in PostgreSQL with millions of events."""

import os
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import sqlalchemy as sa
from google.adk.sessions import BaseSessionService, Session

from examples import make_sql
from tests.benchmarks.appenders import append_for
from tests.benchmarks.databases import OURS, autocommit_connection, opened, update_statistics
from tests.benchmarks.deployments import LOCAL, POSTGRESQL, Deployment
from tests.benchmarks.harness import Operation, interleave
from tests.benchmarks.plan import (
    FEW_EVENTS,
    LAYOUTS,
    MANY_EVENTS,
    PROCESSES,
    SCALING_GOAL,
    SCALING_OPERATIONS,
)
from tests.benchmarks.results import Figure, Results
from tests.benchmarks.workload import APP, event, state
from tests.processes import children

pytestmark = [pytest.mark.bench, pytest.mark.asyncio(loop_scope="session")]

ROUNDS = 3
OPERATION_SECONDS = 15.0
EVENTS_OF_SESSION = 100


def server_cpu(directory: Path | None) -> float:
    """Return the CPU seconds that the server in *directory* and its processes have used."""
    if directory is None:
        return 0.0
    main = (directory / "data" / "postmaster.pid").read_text().split()[0]
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # the process has ended
            continue
        if main in (path.parent.name, fields[1]):
            # Its own time, and that of its processes that have ended.
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("deployment", LOCAL, indirect=True)
async def test_processes(deployment: Deployment, results: Results) -> None:
    url = deployment.databases.create()
    async with opened(OURS, url):
        pass
    directory = deployment.databases.directory_of_server
    for count in PROCESSES:
        rates, services, servers = [], [], []
        for _ in range(ROUNDS):
            before = server_cpu(directory)
            with children(*((append_for, url, number) for number in range(count))) as running:
                said = [next(child.said()) for child in running]
            events = sum(one.events for one in said)
            rates.append(sum(one.events / one.seconds for one in said))
            services.append(sum(one.cpu for one in said) / events)
            servers.append((server_cpu(directory) - before) / events)
        name = f"{deployment.name}/scaling/{count} processes"
        results.add(f"{name}/rate", Figure.of(rates, "/s"))
        results.add(f"{name}/CPU of the service", Figure.of(services, "s"))
        if directory is not None:
            results.add(f"{name}/CPU of the server", Figure.of(servers, "s"))


async def fill(url: sa.URL, rows: int) -> None:
    """Add *rows* rows of events, of the size of an encrypted event, to sessions that do not exist.

    No service reads them.  They make the tables and their indexes large.
    """
    sessions = rows // EVENTS_OF_SESSION
    statement = f"""
        INSERT INTO secure_events
        SELECT session * 7919::bigint * 1000003 % 9000000000000000000, seq, 0,
          decode(repeat(md5((session * {EVENTS_OF_SESSION} + seq)::text), 38), 'hex')
        FROM generate_series({{}}, {{}}) session, generate_series(0, {EVENTS_OF_SESSION - 1}) seq
    """
    async with autocommit_connection(url) as connection:
        for start in range(0, sessions, 5000):
            end = min(start + 5000, sessions) - 1
            await connection.exec_driver_sql(statement.format(start, end))
        await connection.exec_driver_sql("VACUUM ANALYZE")


async def create_tables(url: sa.URL, layout: str) -> None:
    """Create the tables with the documented statements."""
    async with autocommit_connection(url) as connection:
        for statement in make_sql.statements(LAYOUTS[layout]):
            await connection.exec_driver_sql(statement)


async def seeded(service: BaseSessionService, url: sa.URL) -> dict[str, Operation]:
    """Return the operations to measure, on sessions that were stored among the many others."""

    async def session_of(user: str, events: int) -> Session:
        made = await service.create_session(app_name=APP, user_id=user, state=state(1000))
        for number in range(events):
            await service.append_event(made, event(number))
        return made

    read, grown = await session_of("reader", 100), await session_of("writer", 20)
    await update_statistics(url)
    return {
        "append": lambda: service.append_event(grown, event(0)),
        "get, 100 events": lambda: service.get_session(
            app_name=APP, user_id="reader", session_id=read.id
        ),
    }


@pytest.mark.parametrize("deployment", [POSTGRESQL], indirect=True)
async def test_millions_of_events(deployment: Deployment, results: Results) -> None:
    sides: dict[str, dict[str, Operation]] = {}
    async with AsyncExitStack() as stack:
        for layout in LAYOUTS:
            for rows in (FEW_EVENTS, MANY_EVENTS):
                url = deployment.databases.create()
                await create_tables(url, layout)
                service = await stack.enter_async_context(opened(OURS, url))
                await fill(url, rows)
                sides[f"{layout}, {rows:,} events"] = await seeded(service, url)
        results.count("scaling/events", MANY_EVENTS)
        for operation in SCALING_OPERATIONS:
            run = {side: operations[operation] for side, operations in sides.items()}
            timings = await interleave(run, OPERATION_SECONDS, max_rounds=2000)
            for side, values in timings.items():
                results.add(f"scaling/{operation}/{side}", Figure.of(values, "s"))
            for layout in LAYOUTS:
                many, few = (timings[f"{layout}, {n:,} events"] for n in (MANY_EVENTS, FEW_EVENTS))
                name = f"scaling/{operation}/{layout}, many relative to few"
                results.add(name, Figure.ratio(many, few, SCALING_GOAL))
