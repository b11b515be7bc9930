import zlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.attacks.replica import Replica
from tests.attacks.support import Database, Older
from tests.attacks.world import BACKENDS
from tests.servers import MariaDB, PostgreSQL

SERVERS = ["postgresql", "mariadb"]
ONE_IN = 4
_HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of each test's attacks, one in four runs with Fernet and on a server; all in `make soak`.

    The format is the same everywhere, and with AES-256-GCM on SQLite they all run.
    """
    attacks: dict[str, list[str]] = {}
    for item in items:
        if _HERE not in item.path.parents:
            continue
        parts = item.nodeid.replace("]", "-").replace("[", "-").split("-")
        on = next((part for part in (*SERVERS, "fernet") if part in parts), None)
        if on is None:
            continue
        item.add_marker(pytest.mark.no_cover)  # it reaches no code that the others do not
        test, attack = item.nodeid.partition("[")[0], item.nodeid.replace(on, "")
        known = attacks.setdefault(test, [])
        if attack not in known:
            known.append(attack)
        number = known.index(attack)
        turn = number // ONE_IN + zlib.crc32(test.encode())
        if number % ONE_IN or on not in ("fernet", SERVERS[turn % len(SERVERS)]):
            item.add_marker(pytest.mark.soak)


# One for all attacks: making tables takes longer than most attacks do.


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
    """The database under attack: a file, sealed by each backend in turn, and on each server."""
    if request.param in SERVERS:
        return database(request, path, request.param, "aesgcm")
    return database(request, path, "url", request.param)


@pytest.fixture(params=["url", "engine", *SERVERS])
def typed_db(request: pytest.FixtureRequest, path: Path) -> Database:
    """Read by our own threads, and by a caller's engine, which converts types."""
    return database(request, path, request.param, "aesgcm")


@pytest.fixture(params=["url", *SERVERS])
def aes_db(request: pytest.FixtureRequest, path: Path) -> Database:
    """Where the cipher makes no difference."""
    return database(request, path, request.param, "aesgcm")


@pytest.fixture(params=list(BACKENDS))
def file_db(request: pytest.FixtureRequest, path: Path) -> Database:
    """Where it is the file that matters."""
    return database(request, path, "url", request.param)


@pytest.fixture(params=SERVERS)
def server_db(request: pytest.FixtureRequest, path: Path) -> Database:
    """Where there is no file."""
    return database(request, path, request.param, "aesgcm")


@pytest.fixture
def older(db: Database, tmp_path: Path) -> Older:
    """What an attacker kept from earlier."""
    return db.older(tmp_path)
