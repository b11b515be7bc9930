from collections.abc import Iterator

import pytest

from tests import servers


@pytest.fixture(scope="session")
def postgresql() -> Iterator[servers.PostgreSQL]:
    with servers.postgresql() as server:
        yield server


@pytest.fixture(scope="session")
def mariadb() -> Iterator[servers.MariaDB]:
    with servers.mariadb() as server:
        yield server
