"""One of each executor, on an empty database with the table `things`.

`executor` gives a test each of `KINDS` in turn, by default without those in `LATER`.  Leave out or
choose some of them with `@on("sqlite", "asyncpg")`.
"""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine

from adk_secure_sessions.db.connect import executors_for
from adk_secure_sessions.db.protocol import Executor
from tests.db.support import KINDS, LATER, Kind, things
from tests.servers import Server


@pytest.fixture(
    params=[pytest.param(name, marks=[pytest.mark.soak] if name in LATER else []) for name in KINDS]
)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture
def url(request: pytest.FixtureRequest, kind: Kind, tmp_path: Path) -> Iterator[sa.URL]:
    """An empty database for the kind of executor."""
    if kind.server is None:
        database = ":memory:" if kind.in_memory else f"{tmp_path}/things.db"
        yield sa.URL.create(kind.driver, database=database)
        return
    server: Server = request.getfixturevalue(kind.server)
    with server.database() as url:
        yield url.set(drivername=kind.driver)


@pytest.fixture
async def executor(kind: Kind, url: sa.URL) -> AsyncIterator[Executor]:
    engine = create_async_engine(url) if kind.by_engine else None
    executor = executors_for(None if engine else url, engine).data
    await executor.run_sync(things.metadata.create_all)
    yield executor
    await executor.close()
    if engine is not None:
        await engine.dispose()
