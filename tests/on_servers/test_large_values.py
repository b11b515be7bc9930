"""Events of many megabytes, and a server that does not accept them."""

from collections.abc import Iterator

import pytest
from google.adk.sessions import BaseSessionService
from sqlalchemy import URL

from adk_secure_sessions import ConfigurationError
from tests import servers
from tests.conformance.services import KINDS
from tests.conformance.support import create, each_kind, event, reload

MEGABYTE = 1_000_000

kind = each_kind("encrypted-file", "encrypted-postgresql", soak=["encrypted-mariadb"])


async def test_event_of_twenty_megabytes_is_stored_and_read_back(
    service: BaseSessionService,
) -> None:
    session = await create(service, state={"k": "x" * MEGABYTE})
    appended = event("é" * 10 * MEGABYTE, delta={"user:k": "y" * MEGABYTE})
    await service.append_event(session, appended)
    await service.append_event(session, event("after it"))
    stored = await reload(service, session)
    assert stored.events[0] == appended
    assert stored == session


@pytest.fixture
def narrow(mariadb: servers.MariaDB) -> Iterator[URL]:
    """A database whose server accepts packets of one megabyte on new connections."""
    if mariadb.directory is None:
        pytest.skip("the server is not private: its settings stay as they are")
    with mariadb.database() as url, mariadb.admin.connect() as admin:
        (before,) = admin.exec_driver_sql("SELECT @@global.max_allowed_packet").one()
        admin.exec_driver_sql(f"SET GLOBAL max_allowed_packet = {MEGABYTE}")
        try:
            yield url.set(drivername="mariadb+asyncmy")
        finally:
            admin.exec_driver_sql(f"SET GLOBAL max_allowed_packet = {before}")


async def test_event_that_the_server_does_not_accept_is_an_error_and_nothing_is_stored(
    narrow: URL,
) -> None:
    async with KINDS["encrypted-mariadb"].open(narrow) as service:
        session = await create(service)
        await service.append_event(session, event("before", delta={"k": 1}))
        before = session.model_copy(deep=True)
        with pytest.raises(ConfigurationError) as info:
            await service.append_event(
                session, event("x" * 3 * MEGABYTE, delta={"k": 2, "user:k": 2})
            )
        text = str(info.value)
        assert "max_allowed_packet" in text
        assert len(text) < 1000
        assert session == before
        assert await reload(service, session) == before
        await service.append_event(session, event("after it"))
        assert await reload(service, session) == session
