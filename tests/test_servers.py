"""What other tests rely on of `tests/servers.py`."""

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine

from tests.servers import MARIADB_VARIABLE, REQUIRE_VARIABLE, Server, mariadb

DRIVERS = {
    "postgresql": ["postgresql+asyncpg", "postgresql+psycopg"],
    "mariadb": ["mariadb+asyncmy", "mysql+asyncmy"],
}


@pytest.fixture(params=[(server, driver) for server in DRIVERS for driver in DRIVERS[server]])
def server_and_driver(request: pytest.FixtureRequest) -> tuple[Server, str]:
    server, driver = request.param
    return request.getfixturevalue(server), driver


async def test_database_in_use_is_dropped(server_and_driver: tuple[Server, str]) -> None:
    server, driver = server_and_driver
    with server.database() as url:
        engine = create_async_engine(url.set(drivername=driver))
        left = await engine.connect()
        await left.execute(sa.text("CREATE TABLE a_table (number INTEGER)"))
        await left.execute(sa.text("INSERT INTO a_table VALUES (1)"))
    with pytest.raises(sa.exc.DBAPIError):
        await left.execute(sa.text("SELECT * FROM a_table"))
    await left.close()
    await engine.dispose()


def test_missing_server_is_a_skip_or_if_servers_are_required_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(MARIADB_VARIABLE, raising=False)
    monkeypatch.delenv(REQUIRE_VARIABLE, raising=False)
    monkeypatch.setattr("shutil.which", lambda *args, **options: None)
    with pytest.raises(pytest.skip.Exception, match="mariadb-server-core"), mariadb():
        pass
    monkeypatch.setenv(REQUIRE_VARIABLE, "1")
    with pytest.raises(pytest.fail.Exception, match="mariadb-server-core"), mariadb():
        pass
