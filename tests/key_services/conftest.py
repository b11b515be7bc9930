from collections.abc import Iterator

import pytest

from adk_secure_sessions import VaultKey
from tests.key_services.support import Service
from tests.key_services.vault import Vault, running


@pytest.fixture
def vault(monkeypatch: pytest.MonkeyPatch) -> Iterator[Vault]:
    """A server with the keys `clinic` and `other`; none of this machine's settings."""
    for name in ("ADDR", "TOKEN", "NAMESPACE", "ROLE_ID", "SECRET_ID", "CACERT"):
        monkeypatch.delenv(f"VAULT_{name}", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    server = Vault()
    server.add_key("clinic")
    server.add_key("other")
    with running(server):
        yield server


@pytest.fixture
def vault_service(vault: Vault) -> Service:
    def make(name: str) -> VaultKey:
        return VaultKey(f"transit/{name}", address=vault.address, token=vault.root_token)

    def calls() -> int:
        return len(vault.requests)

    return Service(
        lambda: make("clinic"), lambda: make("other"), [vault.root_token], calls, vault.stop
    )


@pytest.fixture(params=["vault"])
def key_service(request: pytest.FixtureRequest) -> Service:
    service: Service = request.getfixturevalue(f"{request.param}_service")
    return service
