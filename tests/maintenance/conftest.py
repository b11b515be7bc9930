from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from tests.servers import Server

DRIVERS = {"postgresql": "postgresql+asyncpg", "mariadb": "mariadb+asyncmy"}


@pytest.fixture(params=["sqlite", *DRIVERS])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[sa.URL]:
    """An empty database, as a test reaches it behind the services' back; it may have our tables."""
    if request.param == "sqlite":
        yield sa.URL.create("sqlite", database=f"{tmp_path}/sessions.db")
        return
    server: Server = request.getfixturevalue(request.param)
    with server.database(reused=not request.node.get_closest_marker("no_tables")) as url:
        yield url


@pytest.fixture
def url(place: sa.URL) -> str:
    """The same, for a service."""
    driver = DRIVERS.get(place.get_backend_name(), "sqlite+aiosqlite")
    return place.set(drivername=driver).render_as_string(hide_password=False)


@pytest.fixture
def file_url(tmp_path: Path) -> str:
    """Where the kind of database makes no difference."""
    return f"sqlite+aiosqlite:///{tmp_path}/sessions.db"
