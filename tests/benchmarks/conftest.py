"""One event loop and one set of databases for the whole run."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio

from tests.benchmarks.places import DISTANT, NEAR, Place, Places


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def places() -> AsyncIterator[Places]:
    async with AsyncExitStack() as stack:
        yield Places(stack)


@pytest_asyncio.fixture(scope="session", loop_scope="session", params=[*NEAR, DISTANT])
async def place(request: pytest.FixtureRequest, places: Places) -> Place:
    return await places.get(request.param)
