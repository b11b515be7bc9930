import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from google.adk.sessions import BaseSessionService
from sqlalchemy import URL

from tests.conformance.services import CLUSTER_KINDS, MAIN_KINDS, POOLED_KINDS, Kind, file_in
from tests.conformance.support import choose, each_kind
from tests.servers import Server

_HERE = "tests/conformance/"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "reference(outcome, why, applies): how ADK's own service differs from ours"
    )
    config.addinivalue_line(
        "markers", "some_tests(*names): the tests that run by default on this kind of service"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    choose([item for item in items if item.nodeid.startswith(_HERE)])


kind = each_kind(
    *MAIN_KINDS,
    soak=[
        "encrypted-memory",
        "encrypted-engine",
        "encrypted-key-database",
        "encrypted-fallback",
        "encrypted-packed",
        *POOLED_KINDS,
        *CLUSTER_KINDS,
    ],
)


@pytest.fixture
def url(request: pytest.FixtureRequest, kind: Kind, tmp_path: Path) -> Iterator[URL]:
    """An empty database; on a server, it may have our tables, except with the mark `no_tables`."""
    if kind.server is None:
        yield file_in(tmp_path)
        return
    server: Server = request.getfixturevalue(kind.server)
    with server.database(reused=not request.node.get_closest_marker("no_tables")) as database:
        yield database.set(drivername=kind.driver)


@pytest.fixture
async def open_service(
    kind: Kind, url: URL
) -> AsyncIterator[Callable[[], Awaitable[BaseSessionService]]]:
    """Opens services on the test's database; all are closed when the test ends."""
    async with AsyncExitStack() as stack:

        async def open_one() -> BaseSessionService:
            return await stack.enter_async_context(kind.open(url))

        yield open_one


@pytest.fixture
async def service(open_service: Callable[[], Awaitable[BaseSessionService]]) -> BaseSessionService:
    return await open_service()


@pytest.fixture
async def another_service(
    kind: Kind,
    service: BaseSessionService,
    open_service: Callable[[], Awaitable[BaseSessionService]],
) -> BaseSessionService:
    """A second service on the same database, as another process has it."""
    if not kind.is_shared:
        pytest.skip("a database in memory has one service")
    return await open_service()


@pytest.fixture
def service_of_no_loop(kind: Kind, url: URL) -> Iterator[BaseSessionService]:
    """A service that is opened and closed in another event loop than the test's calls."""
    opened = kind.open(url)

    async def enter() -> BaseSessionService:
        return await opened.__aenter__()

    async def leave() -> None:
        await opened.__aexit__(None, None, None)

    # Not asyncio.run: that ends the generator behind `opened`, and so closes the service.
    with asyncio.Runner() as runner:
        yield runner.run(enter())
        runner.run(leave())
