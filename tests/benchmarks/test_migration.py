"""Moving in and out, beside a plain copy of the same rows."""

import time
from collections.abc import Awaitable, Callable, Sequence

import pytest
import sqlalchemy as sa

from adk_secure_sessions import AesGcmBackend
from adk_secure_sessions.maintenance import Database
from adk_secure_sessions.migration import AdkTables, AdkTarget, compare, export_to_adk, migrate
from tests.benchmarks.deployments import LOCAL, Deployment
from tests.benchmarks.plan import MIGRATED_EVENTS, MIGRATED_SESSIONS, MIGRATION_GOAL
from tests.benchmarks.results import Figure, Results
from tests.migration.memory_source import MemorySource, event

pytestmark = [
    pytest.mark.bench,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.parametrize("deployment", LOCAL, indirect=True),
]

KEY = bytes(range(32))
ROUNDS = 5
PLAIN = (1, 50)  # sessions that one transaction of a plain copy inserts
TABLES = ("sessions", "events", "user_states", "app_states")


async def test_migration(results: Results, deployment: Deployment) -> None:
    """Copy sessions of google-adk, in rounds that alternate with a plain copy of the same rows."""
    create = deployment.databases.create
    adk = create()
    async with Database(create(), AesGcmBackend(KEY)) as made:
        await migrate(_sessions(), made)
        exported = await _rate(lambda: _export(made, adk))
    rates: dict[str, list[float]] = {"migrate": [], "compare": []}
    for together in PLAIN:
        rates[_plain_name(together)] = []
    for _ in range(ROUNDS):
        async with AdkTables(adk) as source, Database(create(), AesGcmBackend(KEY)) as db:
            rates["migrate"].append(await _rate(lambda: _migrate(source, db)))
            rates["compare"].append(await _rate(lambda: _compare(source, db)))
        for together in PLAIN:
            rates[_plain_name(together)].append(_copy_plainly(adk, create(), together))
    name = f"{deployment.name}/migration"
    results.add(f"{name}/export", Figure.of([exported], "/s"))
    for what, values in rates.items():
        results.add(f"{name}/{what}", Figure.of(values, "/s"))
    for together in PLAIN:
        plain = rates[_plain_name(together)]
        # The time for each event, so that lower is better, like all ratios of the page.
        ratio = Figure.ratio(
            plain, rates["migrate"], goal=MIGRATION_GOAL if together == 1 else None
        )
        results.add(f"{name}/time relative to {_plain_name(together)}", ratio)


def _plain_name(together: int) -> str:
    return f"plain copy, {together} sessions at once" if together > 1 else "plain copy"


def _sessions() -> MemorySource:
    source = MemorySource(batch=100)
    events = [event(number, "x" * 1000) for number in range(MIGRATED_EVENTS)]
    for number in range(MIGRATED_SESSIONS):
        source.put(f"user {number // 5}", f"session {number}", events=events, state={"n": number})
    return source


async def _rate(run: Callable[[], Awaitable[int]]) -> float:
    """Return the events per second of *run*, which returns the number of events."""
    began = time.perf_counter()
    return await run() / (time.perf_counter() - began)


async def _migrate(source: AdkTables, db: Database) -> int:
    done = await migrate(source, db)
    assert done.succeeded
    return done.events


async def _compare(source: AdkTables, db: Database) -> int:
    done = await compare(source, db)
    assert done.all_equal
    return done.events


async def _export(db: Database, url: sa.URL) -> int:
    async with AdkTarget(url) as target:
        await export_to_adk(db, target)
    return MIGRATED_SESSIONS * MIGRATED_EVENTS


def _copy_plainly(source: sa.URL, target: sa.URL, together: int) -> float:
    """Copy google-adk's rows to another database; return the events per second.

    As `migrate` does, commit to the disk, and keep each session whole.
    """
    ours, theirs = (sa.create_engine(_synchronous(url)) for url in (source, target))
    metadata = sa.MetaData()
    try:
        with ours.connect() as reader, theirs.connect() as writer:
            if writer.dialect.name == "sqlite":
                writer.exec_driver_sql("PRAGMA journal_mode = WAL")
                writer.exec_driver_sql("PRAGMA synchronous = FULL")
            metadata.reflect(reader, only=TABLES)
            metadata.create_all(writer)
            writer.commit()
            tables = [metadata.tables[name] for name in TABLES]
            began = time.perf_counter()
            events = _copy_rows(reader, writer, tables, together)
            return events / (time.perf_counter() - began)
    finally:
        ours.dispose()
        theirs.dispose()


def _copy_rows(
    reader: sa.Connection, writer: sa.Connection, tables: Sequence[sa.Table], together: int
) -> int:
    sessions, events, *states = tables
    ids = reader.execute(sa.select(sessions.c.app_name, sessions.c.user_id, sessions.c.id)).all()
    copied = 0
    for first in range(0, len(ids), together):
        for table, name in ((sessions, "id"), (events, "session_id")):
            key = sa.tuple_(table.c.app_name, table.c.user_id, table.c[name])
            query = sa.select(table).where(key.in_(ids[first : first + together]))
            rows = [dict(row) for row in reader.execute(query).mappings()]
            writer.execute(sa.insert(table), rows)
            copied += len(rows) if table is events else 0
        writer.commit()
    for table in states:
        rows = [dict(row) for row in reader.execute(sa.select(table)).mappings()]
        if rows:
            writer.execute(sa.insert(table), rows)
    writer.commit()
    return copied


def _synchronous(url: sa.URL) -> sa.URL:
    drivers = {"sqlite": "sqlite", "postgresql": "postgresql+psycopg"}
    return url.set(drivername=drivers[url.get_backend_name()])
