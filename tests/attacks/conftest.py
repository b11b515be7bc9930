from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.attacks.databases import SERVERS, choose
from tests.attacks.replica import Replica
from tests.attacks.support import Database, OlderCopy
from tests.attacks.world import BACKENDS
from tests.servers import MariaDB, PostgreSQL


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "also_on(*databases, cases): where an attack also runs; tests/attacks/databases"
    )


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
    yield
    choose(metafunc)


# One database on each server for all attacks: making tables takes longer than most attacks do.


@pytest.fixture(scope="session")
def on_postgresql(postgresql: PostgreSQL) -> Iterator[Replica]:
    with postgresql.database() as url, closing(Replica(url, "postgresql+asyncpg")) as replica:
        yield replica


@pytest.fixture(scope="session")
def on_mariadb(mariadb: MariaDB) -> Iterator[Replica]:
    with mariadb.database() as url, closing(Replica(url, "mariadb+asyncmy")) as replica:
        yield replica


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sessions.db"


def database(request: pytest.FixtureRequest, path: Path, where: str, backend: str) -> Database:
    if where in SERVERS:
        return Database(path, backend, replica=request.getfixturevalue(f"on_{where}"))
    return Database(path, backend, on_engine=where == "engine")


@pytest.fixture(params=[*BACKENDS, *SERVERS])
def db(request: pytest.FixtureRequest, path: Path) -> Database:
    """The database under attack: a SQLite file of each backend, and AES-256-GCM on each server."""
    if request.param in SERVERS:
        return database(request, path, request.param, "aesgcm")
    return database(request, path, "url", request.param)


@pytest.fixture(params=["url", "engine", *SERVERS])
def typed_db(request: pytest.FixtureRequest, path: Path) -> Database:
    """For values of other types: our SQLite threads, the caller's engine, which converts types."""
    return database(request, path, request.param, "aesgcm")


@pytest.fixture(params=["url", *SERVERS])
def aes_db(request: pytest.FixtureRequest, path: Path) -> Database:
    """For attacks to which the cipher makes no difference."""
    return database(request, path, request.param, "aesgcm")


@pytest.fixture(params=list(BACKENDS))
def file_db(request: pytest.FixtureRequest, path: Path) -> Database:
    """For attacks on the SQLite file itself."""
    return database(request, path, "url", request.param)


@pytest.fixture(params=SERVERS)
def server_db(request: pytest.FixtureRequest, path: Path) -> Database:
    """For attacks that also have a test of their own on a SQLite file."""
    return database(request, path, request.param, "aesgcm")


@pytest.fixture
def older(db: Database, tmp_path: Path) -> OlderCopy:
    """What an attacker copied earlier."""
    return db.older(tmp_path)
