"""Proxies: none reads a key or a credential.

Each test sets the variables that name proxies to a real proxy, which records what it reads.  Plain
HTTP never goes there; TLS goes there if the variable for TLS says so, and only through a tunnel.
"""

import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from adk_secure_sessions import AwsKmsKey, ConfigurationError, GcpKmsKey, KeyServiceError, VaultKey
from tests.key_services import aws, gcp
from tests.key_services.proxy import Proxy, recording
from tests.key_services.support import CONTEXT, MASTER
from tests.key_services.vault import Vault

PLAIN = ("http_proxy", "HTTP_PROXY")
TLS = ("https_proxy", "HTTPS_PROXY")
ALL = (*PLAIN, *TLS, "all_proxy", "ALL_PROXY")


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    with recording() as proxy:
        yield proxy


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Hide this machine's settings, after the fixtures of the services have set theirs."""
    for name in ("vault", "kms", "cloud_kms"):
        if name in request.fixturenames:
            request.getfixturevalue(name)
    for name in (*ALL, "no_proxy", "NO_PROXY", "grpc_proxy"):
        monkeypatch.delenv(name, raising=False)


def set_all(monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], address: str) -> None:
    for name in names:
        monkeypatch.setenv(name, address)


async def use(key: Any) -> None:
    assert await key.unwrap(await key.wrap(MASTER, CONTEXT), CONTEXT) == MASTER


def test_proxy_of_these_tests_reads_plain_http(
    proxy: Proxy, vault: Vault, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_all(monkeypatch, PLAIN, proxy.address)
    with pytest.raises(OSError, match="502"):
        urlopen(f"{vault.address}/v1/needle")
    assert b"/v1/needle" in proxy.requests[0]


@pytest.mark.parametrize("names", [PLAIN, ALL], ids=["http", "all"])
async def test_plain_http_to_vault_uses_no_proxy(
    proxy: Proxy, vault: Vault, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]
) -> None:
    set_all(monkeypatch, names, proxy.address)
    login: dict[str, Any] = {"role_id": vault.role_id, "secret_id": vault.secret_id}
    for options in ({"token": vault.root_token}, login):
        await use(VaultKey("transit/clinic", address=vault.address, **options))
    assert proxy.requests == []


@pytest.mark.parametrize(
    ("address", "error"),
    [("ftp://127.0.0.1", "ValueError"), ("socks5://127.0.0.1", "ImportError")],
)
def test_proxy_that_vault_cannot_use_is_a_configuration_error(
    tls_vault: Vault, ca_file: Path, monkeypatch: pytest.MonkeyPatch, address: str, error: str
) -> None:
    monkeypatch.setitem(sys.modules, "socksio", None)  # the package that SOCKS needs
    monkeypatch.setenv("ALL_PROXY", address)
    with pytest.raises(ConfigurationError, match=rf"proxy for Vault cannot be used \({error}\)"):
        VaultKey("transit/clinic", address=tls_vault.address, token="t", ca_file=ca_file)


@pytest.mark.parametrize("names", [PLAIN, ALL], ids=["http", "all"])
@pytest.mark.parametrize("by", ["argument", "environment"])
async def test_plain_http_to_aws_uses_no_proxy(
    proxy: Proxy, kms: aws.Kms, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], by: str
) -> None:
    arn = kms.new_key()
    set_all(monkeypatch, names, proxy.address)
    if by == "environment":
        monkeypatch.setenv("AWS_ENDPOINT_URL_KMS", kms.address)
        await use(AwsKmsKey(arn))
    else:
        await use(AwsKmsKey(arn, endpoint_url=kms.address))
    assert proxy.requests == []


@pytest.mark.usefixtures("role")
async def test_plain_http_to_sts_of_aws_uses_no_proxy(
    proxy: Proxy, kms: aws.Kms, monkeypatch: pytest.MonkeyPatch
) -> None:
    arn = kms.new_key()
    kms.credentials = (403, b"<html/>")
    set_all(monkeypatch, ALL, proxy.address)
    with pytest.raises(KeyServiceError, match=r"no credentials \(AssumeRoleWithWebIdentity: 403"):
        await AwsKmsKey(arn, endpoint_url=kms.address).wrap(MASTER, CONTEXT)
    # Nothing at all is sent to another machine without TLS.
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", "http://sts.example.com")
    key = AwsKmsKey(arn, endpoint_url=kms.address)
    with pytest.raises(
        ConfigurationError, match=r"^the address of an AWS service begins with https"
    ):
        await key.wrap(MASTER, CONTEXT)
    assert proxy.requests == []


@pytest.mark.parametrize(
    ("names", "tunnels"),
    [(PLAIN, False), (TLS, True), (("all_proxy", "ALL_PROXY"), True)],
    ids=["http", "https", "all"],
)
async def test_tls_to_vault_uses_the_proxy_for_tls_through_a_tunnel(
    proxy: Proxy,
    tls_vault: Vault,
    ca_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    names: tuple[str, ...],
    tunnels: bool,
) -> None:
    set_all(monkeypatch, names, proxy.address)
    await use(
        VaultKey(
            "transit/clinic", address=tls_vault.address, token=tls_vault.root_token, ca_file=ca_file
        )
    )
    assert bool(proxy.tunnels) == tunnels
    assert proxy.tunnels == proxy.requests


@pytest.mark.parametrize(("names", "tunnels"), [(PLAIN, False), (TLS, True)], ids=["http", "https"])
@pytest.mark.usefixtures("kms")
async def test_tls_to_aws_uses_the_proxy_for_tls_through_a_tunnel(
    proxy: Proxy,
    tls_vault: Vault,
    ca_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    names: tuple[str, ...],
    tunnels: bool,
) -> None:
    """The server is not that of AWS: all that matters is how the call gets there."""
    monkeypatch.setenv("AWS_CA_BUNDLE", str(ca_file))
    set_all(monkeypatch, names, proxy.address)
    with pytest.raises(KeyServiceError):
        await AwsKmsKey("alias/clinic", endpoint_url=tls_vault.address).wrap(MASTER, CONTEXT)
    assert len(tls_vault.requests) == 1
    assert bool(proxy.tunnels) == tunnels
    assert proxy.tunnels == proxy.requests


@pytest.mark.parametrize(
    ("names", "tunnels"),
    [(PLAIN, False), (("https_proxy",), True), (("grpc_proxy",), True)],
    ids=["http", "https", "grpc"],
)
async def test_tls_to_google_uses_the_proxy_for_tls_through_a_tunnel(
    proxy: Proxy,
    cloud_kms: gcp.CloudKms,
    monkeypatch: pytest.MonkeyPatch,
    names: tuple[str, ...],
    tunnels: bool,
) -> None:
    set_all(monkeypatch, names, proxy.address)
    await use(GcpKmsKey(f"{gcp.RING}/a", endpoint=cloud_kms.endpoint))
    # google-auth makes tunnels of its own, to Google's service for credentials.
    assert any(cloud_kms.endpoint.encode() in one for one in proxy.tunnels) == tunnels
    assert proxy.tunnels == proxy.requests


# --- the metadata service of a virtual machine ---------------------------------------------------


class Metadata(ThreadingHTTPServer):
    """Answers what the metadata services of AWS and Google answer, with credentials."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), MetadataHandler)
        self.paths: list[str] = []

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"

    def answer(self, path: str) -> str:
        self.paths.append(path)
        if path.endswith("/api/token"):
            return "token of IMDS"
        if path.endswith("/security-credentials/"):
            return "role"
        if path.endswith("/security-credentials/role"):
            return json.dumps(
                {
                    "Code": "Success",
                    "AccessKeyId": aws.ACCESS["aws_access_key_id"],
                    "SecretAccessKey": aws.ACCESS["aws_secret_access_key"],
                    "Token": "session-token",
                    "Expiration": "2999-01-01T00:00:00Z",
                }
            )
        if "/service-accounts/" in path and "/token" in path:
            return json.dumps({"access_token": "t", "expires_in": 3600, "token_type": "Bearer"})
        if "/service-accounts/" in path:
            return json.dumps({"email": "a@example.com", "scopes": [], "aliases": ["default"]})
        return "googleapis.com" if "universe" in path else "clinic-1"


class MetadataHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # in which connections stay open unless a client closes them
    server: Metadata

    def do_GET(self) -> None:
        text = self.server.answer(self.path)
        self.send_response(200)
        self.send_header("Metadata-Flavor", "Google")
        kind = "application/json" if text.startswith("{") else "text/plain"
        self.send_header("Content-Type", kind)
        self.send_header("X-Aws-Ec2-Metadata-Token-Ttl-Seconds", "21600")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    do_PUT = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    with Metadata() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


async def test_metadata_service_of_aws_is_asked_for_credentials_alone_and_without_a_proxy(
    proxy: Proxy, kms: aws.Kms, metadata: Metadata, monkeypatch: pytest.MonkeyPatch
) -> None:
    """botocore asks it for the region with `AWS_DEFAULTS_MODE=auto`, through the proxy."""
    arn = kms.new_key()
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://{metadata.host}/")
    set_all(monkeypatch, ALL, proxy.address)
    with monkeypatch.context() as patch:
        patch.setenv("AWS_DEFAULTS_MODE", "auto")
        await use(AwsKmsKey(arn, endpoint_url=kms.address))
    assert metadata.paths == []
    for name in aws.ACCESS:
        monkeypatch.delenv(name.upper())
    await use(AwsKmsKey(arn, endpoint_url=kms.address))
    assert metadata.paths[-1].endswith("/role")
    assert proxy.requests == []


ON_GOOGLE = """
import asyncio
import gc
import socket
import sys

from adk_secure_sessions import GcpKmsKey

async def main():
    key = GcpKmsKey(sys.argv[1], endpoint=sys.argv[2])
    assert await key.unwrap(await key.wrap(bytes(32), b""), b"") == bytes(32)

asyncio.run(main())
sockets = [one for one in gc.get_objects() if type(one) is socket.socket]
assert not [one for one in sockets if one.family == socket.AF_INET and one.fileno() >= 0]
"""


async def test_credentials_of_a_google_machine_are_fetched_without_a_proxy(
    proxy: Proxy,
    cloud_kms: gcp.CloudKms,
    metadata: Metadata,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS")
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.setenv("GCE_METADATA_HOST", metadata.host)
    monkeypatch.setenv("GCE_METADATA_IP", metadata.host)
    set_all(monkeypatch, (*PLAIN, "all_proxy", "ALL_PROXY"), proxy.address)
    # In a process of its own: google-auth reads the address when it is imported.
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", ON_GOOGLE, f"{gcp.RING}/a", cloud_kms.endpoint
    )
    assert await child.wait() == 0
    assert any("/token" in path for path in metadata.paths)
    assert proxy.requests == []


FEDERATED = {
    "type": "external_account",
    "audience": "//iam.googleapis.com/projects/1/locations/global/workloadIdentityPools/p",
    "subject_token_type": "urn:ietf:params:oauth:token-type:jwt",
    "universe_domain": "googleapis.com",
}


@pytest.mark.parametrize("project", ["", "clinic-1"])  # google-auth asks for it if it is not set
@pytest.mark.parametrize("proxied", [False, True], ids=["direct", "proxy"])
@pytest.mark.parametrize("which", ["token_url", "credential_source"])
async def test_credentials_are_not_sent_to_another_machine_without_tls(
    which: str,
    proxied: bool,
    project: str,
    proxy: Proxy,
    cloud_kms: gcp.CloudKms,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    subject, file = tmp_path / "subject", tmp_path / "credentials.json"
    subject.write_text("needle")
    url = "http://192.0.2.1:9/token"
    settings: dict[str, Any] = {
        "token_url": "https://sts.googleapis.com/v1/token",
        "credential_source": {"file": str(subject)},
    }
    settings[which] = url if which == "token_url" else {"url": url}
    file.write_text(json.dumps(FEDERATED | settings))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
    if proxied:
        set_all(monkeypatch, PLAIN, proxy.address)
    opened: list[object] = []
    monkeypatch.setattr(
        "urllib3.connection.HTTPConnection.connect", lambda self: opened.append(self.host)
    )
    monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", project)
    key = GcpKmsKey(f"{gcp.RING}/a", endpoint=cloud_kms.endpoint, attempts=1)
    expected = "the credentials cannot be used" if project else "the Google credentials name"
    with pytest.raises(KeyServiceError if project else ConfigurationError, match=expected):
        await key.wrap(MASTER, CONTEXT)
    assert opened == []
    assert proxy.requests == []
