"""Servers for the whole run, and what holds for every test."""

import gc
import threading
from collections.abc import Iterator

import pytest
from coverage import Coverage
from greenlet import getcurrent

from tests import servers

_SERVERS = ("postgresql", "mariadb")
# Maintenance and its commands run on SQLite and, by default, on one server: the one listed here
# for the file.  `make soak` runs them on the other one, too.  A file that is not listed runs on
# both.  What differs between databases is in `db` and `storage`, whose tests run on all of them.
_SERVER_OF_FILE = {
    "maintenance/test_checkpoints.py": "postgresql",
    "maintenance/test_clearing.py": "mariadb",
    "maintenance/test_clocks.py": "mariadb",
    "maintenance/test_erasing.py": "postgresql",
    "maintenance/test_finding.py": "postgresql",
    "maintenance/test_kills.py": "mariadb",
    "maintenance/test_overlapping.py": "mariadb",
    "maintenance/test_purge.py": "postgresql",
    "maintenance/test_root_keys.py": "mariadb",
    "maintenance/test_rotations.py": "postgresql",
    "maintenance/test_status.py": "mariadb",
    "maintenance/test_verify.py": "mariadb",
    "cli/test_commands.py": "postgresql",
    "cli/test_erase.py": "mariadb",
    "cli/test_rotate.py": "mariadb",
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        listed = _SERVER_OF_FILE.get("/".join(item.path.parts[-2:]))
        if listed is None or not isinstance(item, pytest.Function):
            continue
        parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
        if any(server in parameters for server in _SERVERS if server != listed):
            item.add_marker(pytest.mark.soak)


def pytest_collection_finish() -> None:
    """Exempt all that was imported and collected from garbage collection, which is then faster."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _greenlets_outlive_their_threads() -> Iterator[None]:
    """Avoid an endless loop under coverage, caused by a bug of Python 3.11.

    Coverage keeps weak references to greenlets.  When a thread ends, its greenlet dies, and
    coverage's callback runs in the main thread at an arbitrary moment.  If another thread ends at
    that moment, Python 3.11 returns to the first line of a traced function again and again
    (python/cpython#118095 is similar).  If the greenlets never die, the callback never runs.

    `Thread._bootstrap_inner` is a private name.  It is patched because `run` is the only public
    method that each thread calls, and subclasses override that.
    """
    kept: list[object] = []
    bootstrap = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

    def keep_and_run(thread: threading.Thread) -> None:
        kept.extend([getcurrent()] * 2)  # greenlet takes a single reference for a leaked one
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
def pgbouncer(postgresql: servers.PostgreSQL) -> Iterator[servers.PgBouncer]:
    with servers.pgbouncer(postgresql) as pooler:
        yield pooler


@pytest.fixture(scope="session")
def mariadb() -> Iterator[servers.MariaDB]:
    with servers.mariadb() as server:
        yield server
