import json
import os
import ssl
from collections.abc import Iterator
from pathlib import Path

import botocore.session
import moto.kms.models
import pytest
from botocore.loaders import create_loader

from adk_secure_sessions import AwsKmsKey, GcpKmsKey, Pkcs11Key, VaultKey
from adk_secure_sessions.keys.remote import RemoteKey
from tests.key_services import aws, gcp
from tests.key_services import softhsm as hsm
from tests.key_services.certificates import certificate
from tests.key_services.support import Service, join_threads
from tests.key_services.vault import Vault, running


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are repeated without a pause."""
    monkeypatch.setattr(RemoteKey, "pause", 0.001)


@pytest.fixture
def vault(monkeypatch: pytest.MonkeyPatch) -> Iterator[Vault]:
    """A server with the keys `clinic` and `other`; this machine's settings are hidden."""
    for name in ("ADDR", "TOKEN", "NAMESPACE", "ROLE_ID", "SECRET_ID", "CACERT"):
        monkeypatch.delenv(f"VAULT_{name}", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    server = Vault()
    server.add_key("clinic")
    server.add_key("other")
    with running(server):
        yield server


@pytest.fixture
def ca_file(tmp_path: Path) -> Path:
    """The certificate of `tls_vault`."""
    return certificate().write(tmp_path)[0]


@pytest.fixture
def tls_vault(vault: Vault, ca_file: Path) -> Iterator[Vault]:
    """A second server, with TLS, and with the key `clinic`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(ca_file.with_name("both.pem"))
    server = Vault(tls=context)
    server.add_key("clinic")
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


@pytest.fixture(scope="session")
def moto_kms() -> Iterator[aws.Kms]:
    # A session of botocore parses its models again, which takes most of the time of a test.
    models = create_loader()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(botocore.session, "create_loader", lambda *_: models)
        # moto makes an RSA key for each key, also for one that only encrypts.
        patch.setattr(moto.kms.models, "generate_private_key", lambda _: None)
        with aws.running() as kms:
            yield kms


@pytest.fixture
def kms(moto_kms: aws.Kms, monkeypatch: pytest.MonkeyPatch) -> aws.Kms:
    """AWS, with credentials in the environment; this machine's own settings are hidden."""
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    for name, value in aws.ACCESS.items():
        monkeypatch.setenv(name.upper(), value)
    monkeypatch.setenv("AWS_DEFAULT_REGION", aws.REGION)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    join_threads()  # a call that another test gave up may still reach the server
    moto_kms.forget()
    return moto_kms


@pytest.fixture
def aws_service(kms: aws.Kms) -> Iterator[Service]:
    clinic, other = kms.new_key(), kms.new_key()
    yield Service(
        lambda: AwsKmsKey(clinic, endpoint_url=kms.address),
        lambda: AwsKmsKey(other, endpoint_url=kms.address),
        [aws.ACCESS["aws_secret_access_key"]],
        lambda: len(kms.operations),
        kms.stop,
        every=48,  # the server authenticates each byte, which tests nothing of the provider
    )
    kms.start()


@pytest.fixture
def cloud_kms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[gcp.CloudKms]:
    """A server with the keys `a`, `b` and `c`, and credentials for it."""
    account = tmp_path / "account.json"
    account.write_text(gcp.service_account())
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(account))
    monkeypatch.setenv("NO_PROXY", "localhost")
    with gcp.running() as server:
        yield server


@pytest.fixture
def gcp_service(cloud_kms: gcp.CloudKms) -> Service:
    def make(name: str) -> GcpKmsKey:
        return GcpKmsKey(f"{gcp.RING}/{name}", endpoint=cloud_kms.endpoint)

    private = json.loads(gcp.service_account())["private_key"]
    return Service(
        lambda: make("a"),
        lambda: make("b"),
        [private],
        lambda: len(cloud_kms.operations),
        cloud_kms.stop,
        every=32,
    )


@pytest.fixture
def softhsm(monkeypatch: pytest.MonkeyPatch) -> hsm.SoftHsm:
    """A token `clinic` with the keys `a` and `b`."""
    token = hsm.the_token()
    monkeypatch.setenv("PKCS11_MODULE", token.module)
    monkeypatch.setenv("PKCS11_PIN", hsm.PIN)
    monkeypatch.delenv("PKCS11_PIN_FILE", raising=False)
    return token


@pytest.fixture
def pkcs11_service(softhsm: hsm.SoftHsm) -> Iterator[Service]:
    asked = []

    class Counted(Pkcs11Key):
        """Records the calls that RemoteKey makes."""

        async def _encrypt(self, plaintext: bytes, associated_data: bytes) -> bytes:
            asked.append("encrypt")
            return await super()._encrypt(plaintext, associated_data)

        async def _decrypt(self, sealed: bytes, associated_data: bytes) -> bytes:
            asked.append("decrypt")
            return await super()._decrypt(sealed, associated_data)

    yield Service(
        lambda: Counted("clinic/a"),
        lambda: Counted("clinic/b"),
        [hsm.PIN],
        lambda: len(asked),
        softhsm.take_out,
    )
    softhsm.put_back()


@pytest.fixture(params=["vault", "aws", "gcp", "pkcs11"])
def key_service(request: pytest.FixtureRequest) -> Service:
    service: Service = request.getfixturevalue(f"{request.param}_service")
    return service


@pytest.fixture
def role(kms: aws.Kms, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a token, for which STS gives credentials, as in a cluster of Kubernetes."""
    for name in aws.ACCESS:
        monkeypatch.delenv(name.upper())
    file = tmp_path / "token"
    file.write_text("needle-of-a-token")
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", kms.address)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # its library would wait seconds between them
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/clinic")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(file))
    return file
