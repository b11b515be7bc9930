"""Connections that only servers lose."""

import pytest

from tests.key_database.support import Pair, create, find
from tests.maintenance.support import APP, event
from tests.servers import Server

pytestmark = pytest.mark.parametrize("pair", ["postgresql mariadb"], indirect=True)


async def test_lost_connections_to_both_databases_are_opened_again(
    pair: Pair, postgresql: Server, mariadb: Server
) -> None:
    async with pair.service() as service:
        session = await create(service)
        for n, user in enumerate(["bob", "carol"]):
            postgresql.kill(pair.data)
            mariadb.kill(pair.keys)
            await create(service, user)
            await service.append_event(session, event(n))
            mariadb.kill(pair.keys)
            assert len((await service.list_sessions(app_name=APP)).sessions) == 2 + n
        found = await find(service)
        assert found is not None
        assert len(found.events) == 2
