import gc
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import servers

_SERVERS = ("postgresql", "mariadb")
_HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Maintenance runs on SQLite and, test by test, on one of the servers; `make soak`: on both.

    What differs from one to the next is in storage, whose tests run on all of them.
    """
    for item in items:
        if not {_HERE / "maintenance", _HERE / "cli"} & set(item.path.parents):
            continue
        parts = item.nodeid.replace("]", "-").replace("[", "-").split("-")
        on = next((part for part in parts if part in _SERVERS), None)
        if on is not None:
            turn = zlib.crc32(item.nodeid.replace(on, "").encode()) % len(_SERVERS)
            if on != _SERVERS[turn]:
                item.add_marker(pytest.mark.soak)


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
