import gc
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from coverage import Coverage
from greenlet import getcurrent

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


@pytest.fixture(scope="session", autouse=True)
def _greenlets_outlive_their_threads() -> Iterator[None]:
    """Under coverage, which refers to them weakly: its callback must not run as a thread ends.

    That is in a pending call of the main thread.  If another thread ends then, Python 3.11 comes
    back to the first line of a function that is traced for ever; python/cpython#118095 is alike.
    """
    kept: list[object] = []
    bootstrap = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

    def keep_and_run(thread: threading.Thread) -> None:  # `run` may be a subclass's
        kept.extend([getcurrent()] * 2)  # a single reference might be taken for a leaked one
        bootstrap(thread)

    with pytest.MonkeyPatch.context() as patch:
        if Coverage.current() is not None:
            patch.setattr(threading.Thread, "_bootstrap_inner", keep_and_run)
        yield


@pytest.fixture(scope="session")
def postgresql() -> Iterator[servers.PostgreSQL]:
    with servers.postgresql() as server:
        yield server


@pytest.fixture(scope="session")
def mariadb() -> Iterator[servers.MariaDB]:
    with servers.mariadb() as server:
        yield server
