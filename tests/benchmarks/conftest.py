"""Fixtures for a whole run: one event loop, one set of databases, one set of results."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio

from tests.benchmarks.deployments import LOCAL, REMOTE, Deployment, Deployments
from tests.benchmarks.machine import machine, versions
from tests.benchmarks.many_users import DatabasesByUsers
from tests.benchmarks.results import Results, changes

_RESULTS = pytest.StashKey[Results]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("benchmarks")
    group.addoption("--results", type=Path, help="write the results to this JSON file")
    group.addoption("--update", type=Path, help="replace the measured figures in this JSON file")
    group.addoption("--compare", type=Path, help="list the changes since this file of results")


@pytest.fixture(scope="session")
def results(request: pytest.FixtureRequest) -> Results:
    return request.config.stash.setdefault(_RESULTS, Results(machine(), versions()))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    measured = config.stash.get(_RESULTS, None)
    if measured is None:
        return
    if path := config.getoption("results", None):
        measured.save(path)
    if path := config.getoption("update", None):
        Results.load(path).updated(measured).save(path)
    if path := config.getoption("compare", None):
        terminalreporter.section(f"changes since {path}")
        for line in changes(Results.load(path), measured):
            terminalreporter.write_line(line)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def deployments() -> AsyncIterator[Deployments]:
    async with AsyncExitStack() as stack:
        yield Deployments(stack)


@pytest_asyncio.fixture(scope="session", loop_scope="session", params=[*LOCAL, REMOTE])
async def deployment(request: pytest.FixtureRequest, deployments: Deployments) -> Deployment:
    return await deployments.get(request.param)


@pytest.fixture(scope="session")
def databases_by_users() -> DatabasesByUsers:
    return DatabasesByUsers()
