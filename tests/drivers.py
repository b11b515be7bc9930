"""Databases by driver, for tests of what drivers and servers report.

How it works: a file lists its drivers with `name = each_driver("sqlite", soak=["psycopg"])`, and
imports the fixtures `server` and `url`: the server of that driver, and an empty database on it.  A
test that is about some drivers alone names them: `@on_drivers("asyncpg", soak=["psycopg"])`.
"""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import URL

from tests.servers import Server

# What SQLAlchemy calls the driver, and the fixture of the server.
DRIVERS: dict[str, tuple[str, str | None]] = {
    "sqlite": ("sqlite+aiosqlite", None),
    "aiosqlite-engine": ("sqlite+aiosqlite", None),  # for an engine of the caller's
    "asyncpg": ("postgresql+asyncpg", "postgresql"),
    "psycopg": ("postgresql+psycopg", "postgresql"),
    "asyncmy": ("mariadb+asyncmy", "mariadb"),
    "asyncpg-pgbouncer": ("postgresql+asyncpg", "pgbouncer"),
    "psycopg-pgbouncer": ("postgresql+psycopg", "pgbouncer"),
}


def each_driver(*names: str, soak: Collection[str] = ()) -> Any:
    """Make the fixture `name`: by default *names*; under `make soak` also those of *soak*."""

    @pytest.fixture(params=_params(names, soak))
    def name(request: pytest.FixtureRequest) -> str:
        found: str = request.param
        return found

    return name


def on_drivers(*names: str, soak: Collection[str] = ()) -> pytest.MarkDecorator:
    """Run one test of a file on other drivers than `each_driver` lists."""
    return pytest.mark.parametrize("name", _params(names, soak), indirect=True)


def _params(names: Collection[str], soak: Collection[str]) -> list[Any]:
    return [*names, *(pytest.param(name, marks=pytest.mark.soak) for name in soak)]


@pytest.fixture
def server(request: pytest.FixtureRequest, name: str) -> Server | None:
    """The server; None is SQLite."""
    _, fixture = DRIVERS[name]
    return request.getfixturevalue(fixture) if fixture else None


@pytest.fixture
def url(name: str, server: Server | None, tmp_path: Path) -> Iterator[URL]:
    """An empty database."""
    driver, _ = DRIVERS[name]
    if server is None:
        yield URL.create(driver, database=f"{tmp_path}/sessions.db")
        return
    with server.database() as made:
        yield made.set(drivername=driver)
