import gc
from collections.abc import Iterator

import pytest

from tests import servers


def pytest_collection_finish() -> None:
    """What is imported and collected by now stays: let the garbage collector pass it by."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def postgresql() -> Iterator[servers.PostgreSQL]:
    with servers.postgresql() as server:
        yield server


@pytest.fixture(scope="session")
def mariadb() -> Iterator[servers.MariaDB]:
    with servers.mariadb() as server:
        yield server
