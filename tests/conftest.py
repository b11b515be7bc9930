"""Servers for the whole run, and what holds for every test."""

import asyncio
import gc
import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from _pytest.runner import runtestprotocol
from coverage import Coverage
from greenlet import getcurrent
from hypothesis import HealthCheck, settings
from sqlalchemy.engine.default import DefaultDialect

from tests import servers
from tests.galera import Galera, galera_cluster
from tests.reliability.results import Record

# Importing and collecting make no garbage to speak of: looking for it took a fifth of their time.
gc.disable()

_SERVERS = ("postgresql", "mariadb")
# Maintenance, its commands and the stores of `integrations` run on SQLite and, by default, on one
# server: the one listed here for the file.  `make soak` runs them on the other one, too.  A file
# that is not listed runs on both; one with None runs on SQLite alone.  On a server, `maintenance`
# runs the first case of a parametrized test.  What differs between databases is in `db` and
# `storage`, whose tests run on all of them.
_SERVER_OF_FILE: dict[str, str | None] = {
    "integrations/test_artifact_stores.py": "mariadb",
    "integrations/test_memory_attacks.py": "postgresql",
    "integrations/test_memory_contract.py": None,  # storage/test_collections.py runs on a server
    "integrations/test_memory_growth.py": "mariadb",
    "integrations/test_memory_service.py": "mariadb",
    "maintenance/test_checkpoints.py": "postgresql",
    "maintenance/test_clearing.py": "mariadb",
    "maintenance/test_clocks.py": "mariadb",
    "maintenance/test_collections.py": "postgresql",
    "maintenance/test_erasing.py": "postgresql",
    "maintenance/test_finding.py": "postgresql",
    "maintenance/test_kills.py": "mariadb",
    "maintenance/test_overlapping.py": "mariadb",
    "maintenance/test_purge.py": "postgresql",
    "maintenance/test_root_keys.py": "mariadb",
    "maintenance/test_rotations.py": "postgresql",
    "maintenance/test_status.py": "mariadb",
    "maintenance/test_verify.py": "mariadb",
    "migration/test_compare.py": "mariadb",
    "migration/test_migrate.py": "postgresql",
    "storage/test_collections.py": "mariadb",
    "cli/test_commands.py": "postgresql",
    "cli/test_erase.py": None,
    "cli/test_rotate.py": None,  # maintenance/test_rotations.py runs the same on a server
}


# Of these files, by default, only these tests run on the server: those with several connections
# at once, with a lost connection or a killed process, and one of each command.
_TESTS_ON_SERVER = {
    "integrations/test_artifact_stores.py": ["test_concurrent_saves_get_distinct_versions"],
    "integrations/test_memory_attacks.py": ["test_deleted_content_is_not_stored_any_more"],
    "integrations/test_memory_growth.py": ["test_two_services_that_rewrite_lose_nothing"],
    "maintenance/test_clocks.py": ["test_command_does_the_same_whatever_its_clock_says"],
    "maintenance/test_collections.py": [
        "test_all_commands_treat_collections_as_data_of_their_user",
        "test_feature_is_added_once_by_two_processes",
        "test_keys_are_rotated_and_retired_while_items_are_appended_and_replaced",
    ],
    "maintenance/test_erasing.py": [
        "test_erasure_deletes_all_rows_of_the_user_and_none_of_others",
        "test_erasure_that_is_killed_has_done_all_or_nothing",
        "test_erasure_whose_answer_is_lost_reports_what_it_deleted",
        "test_event_whose_append_is_running_when_an_erasure_begins_is_erased",
        "test_services_that_write_during_erasures_leave_no_row_behind",
        "test_session_that_is_made_while_an_erasure_commits_waits_for_it",
        "test_user_with_more_sessions_than_one_statement_names_is_erased",
    ],
    "maintenance/test_overlapping.py": [
        "test_overlapping_rotations_leave_no_record_under_a_retired_data_key",
        "test_rotation_makes_no_key_for_a_user_who_is_erased_meanwhile",
    ],
    "maintenance/test_root_keys.py": [
        "test_of_two_rotations_at_once_one_succeeds_and_the_other_says_so",
        "test_services_read_and_write_during_rotations",
    ],
    "maintenance/test_rotations.py": [
        "test_every_record_is_reencrypted_and_the_old_keys_are_retired",
        "test_processes_lose_nothing_while_everything_is_rotated",
        "test_service_with_a_retired_key_in_memory_loses_nothing",
    ],
    "migration/test_compare.py": [
        "test_later_difference_withdraws_the_mark",
        "test_session_that_has_expired_on_both_sides_is_not_gone",
    ],
    "migration/test_migrate.py": [
        "test_gone_sessions_are_reported_and_deleted_only_if_requested",
        "test_sessions_and_states_are_copied_exactly",
        "test_two_runs_at_once_copy_everything_once",
        "test_what_a_service_wrote_is_never_overwritten",
    ],
}


_RECORD = pytest.StashKey[Record]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("reliability")
    group.addoption("--outcomes", type=Path, help="write the outcomes of faults to this JSON file")


@pytest.fixture(scope="session")
def record(request: pytest.FixtureRequest) -> Record:
    """What faults did, for the page about reliability: see tests/reliability/results.py."""
    return request.config.stash.setdefault(_RECORD, Record())


def pytest_terminal_summary(config: pytest.Config) -> None:
    made = config.stash.get(_RECORD, None)
    if made is not None and (path := config.getoption("outcomes", None)):
        made.save(path)


def _kind(dialect: DefaultDialect) -> tuple[object, ...]:
    return type(dialect), dialect.paramstyle, getattr(dialect, "server_version_info", None)


# SQLAlchemy compiles each statement for each engine, which took a fifth of the tests' time: they
# open thousands of engines.  So engines of one kind share what was compiled.
_COMPILED: Any = sa.util.LRUCache(2000)
_DIALECT: Any = DefaultDialect
_DIALECT.__eq__ = lambda one, other: isinstance(other, _DIALECT) and _kind(one) == _kind(other)
_DIALECT.__hash__ = lambda one: hash(_kind(one))


@sa.event.listens_for(sa.Engine, "engine_connect")
def _share_compiled(connection: sa.Connection) -> None:
    connection.execution_options(compiled_cache=_COMPILED)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "no_tables: the test needs a database without our tables")
    config.addinivalue_line(
        "markers", "in_turn(*names): by default, each value of these parameters, but not each pair"
    )
    # No test depends on the speed of the machine.
    without_limits = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("without time limits", without_limits)
    settings.load_profile("without time limits")


@pytest.hookimpl(wrapper=True, tryfirst=True)  # after those of directories, which mark cases
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
    """Leave cases marked `soak` out before items are made of them, which costs each process 1 s."""
    yield
    if turns := metafunc.definition.get_closest_marker("in_turn"):
        numbers = [{call.indices[name] for call in metafunc._calls} for name in turns.args]
        least = min(map(len, numbers))
        for call in metafunc._calls:
            of_one_turn = len({call.indices[name] % least for name in turns.args}) == 1
            # `no_cover`: the case was chosen to run on another database, too.
            if not of_one_turn and all(mark.name != "no_cover" for mark in call.marks):
                call.marks.append(pytest.mark.soak.mark)
    if metafunc.config.getoption("markexpr").endswith(" and not soak"):
        calls: list[Any] = metafunc._calls
        kept = [call for call in calls if all(mark.name != "soak" for mark in call.marks)]
        metafunc._calls = kept or calls[:1]  # without any, pytest would run the test once


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    firsts: dict[str, str] = {}
    for item in items:
        file = "/".join(item.path.parts[-2:])
        if file not in _SERVER_OF_FILE or not isinstance(item, pytest.Function):
            continue
        listed = _SERVER_OF_FILE[file]
        parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
        if any(server in parameters for server in _SERVERS if server != listed):
            item.add_marker(pytest.mark.soak)
        elif (
            listed
            and listed in parameters
            and (file in _TESTS_ON_SERVER or item.path.parent.name == "maintenance")
        ):
            name, case = item.originalname, item.callspec.id
            tests = _TESTS_ON_SERVER.get(file, [name])
            if name not in tests or case != firsts.setdefault(f"{item.path} {name}", case):
                item.add_marker(pytest.mark.soak)


def pytest_collection_finish() -> None:
    """Exempt all that was imported and collected from garbage collection, which is then faster."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(5000, 20, 20)
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Of a test that passes in a process of xdist, report the call alone.

    The other five messages for each test took the processes and the one that they report to 10 s.
    """
    if not hasattr(item.config, "workerinput"):
        return None
    for report in runtestprotocol(item, nextitem=nextitem, log=False):
        if report.when == "call" or not report.passed:
            item.ihook.pytest_runtest_logreport(report=report)
    return True


@pytest.fixture(autouse=True)
def _level_of_adks_logger() -> Iterator[None]:
    """Undo a change of the log level: examples and commands set it for their whole process."""
    logger = logging.getLogger("google_adk")
    before = logger.level
    yield
    if logger.level != before:
        logger.setLevel(before)


@pytest.fixture(scope="session", autouse=True)
def _ctrl_c_is_not_ignored() -> None:
    """A shell starts jobs in the background with SIGINT ignored, and their processes inherit it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


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


@pytest.fixture
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait before an operation is tried again: five pauses of a write take 3.75 s."""
    sleep = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda seconds: sleep(0))


@pytest.fixture(scope="session")
def postgresql() -> Iterator[servers.PostgreSQL]:
    with servers.postgresql() as server:
        yield server


@pytest.fixture(params=["sqlite", *servers.DRIVERS])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[sa.URL]:
    """An empty database, as a test reaches it behind the services' back; it may have our tables."""
    if request.param == "sqlite":
        yield sa.URL.create("sqlite", database=f"{tmp_path}/sessions.db")
        return
    server: servers.Server = request.getfixturevalue(request.param)
    with server.database(reused=not request.node.get_closest_marker("no_tables")) as url:
        yield url


@pytest.fixture
def url(place: sa.URL) -> str:
    """The same, for a service."""
    return servers.for_service(place)


@pytest.fixture
def file_url(tmp_path: Path) -> str:
    """Where the kind of database makes no difference."""
    return f"sqlite+aiosqlite:///{tmp_path}/sessions.db"


@pytest.fixture(scope="session")
def serializable(postgresql: servers.PostgreSQL) -> Iterator[servers.Serializable]:
    with closing(servers.Serializable(postgresql.admin_url)) as server:
        yield server


@pytest.fixture(scope="session")
def galera() -> Iterator[Galera]:
    with galera_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def pgbouncer(postgresql: servers.PostgreSQL) -> Iterator[servers.PgBouncer]:
    with servers.pgbouncer(postgresql) as pooler:
        yield pooler


@pytest.fixture(scope="session")
def mariadb() -> Iterator[servers.MariaDB]:
    with servers.mariadb() as server:
        yield server
