"""Services on real servers.  `conformance` tests what they promise on every database."""

import pytest

from tests.conformance.conftest import open_service, service, url
from tests.conformance.services import Kind
from tests.conformance.support import each_kind
from tests.servers import Server

__all__ = ["kind", "open_service", "server", "service", "url"]

kind = each_kind("encrypted-postgresql", "encrypted-mariadb")


@pytest.fixture
def server(request: pytest.FixtureRequest, kind: Kind) -> Server:
    """The server that `url` is on."""
    assert kind.server is not None
    found: Server = request.getfixturevalue(kind.server)
    return found
