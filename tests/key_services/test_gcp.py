"""Root keys in Google Cloud KMS."""

import json
from pathlib import Path
from typing import Any

import google.auth
import google.auth.credentials
import pytest
from google.auth.exceptions import RefreshError, TransportError

from adk_secure_sessions import (
    ConfigurationError,
    GcpKmsKey,
    KeyServiceError,
    Reason,
    TamperedError,
    key_provider,
)
from adk_secure_sessions.keys import gcp
from adk_secure_sessions.keys.gcp import _check_plain_http
from tests.key_services.gcp import RING, CloudKms, service_account
from tests.key_services.support import CONTEXT, MASTER, cancel_while_asked, failure

pytestmark = pytest.mark.usefixtures("no_pauses")


@pytest.fixture
def key(cloud_kms: CloudKms) -> GcpKmsKey:
    return GcpKmsKey(f"{RING}/a", endpoint=cloud_kms.endpoint)


async def test_wrap_has_the_documented_format(cloud_kms: CloudKms, key: GcpKmsKey) -> None:
    wrapped = await key.wrap(MASTER, CONTEXT)
    aead = cloud_kms.keys[f"{RING}/a"]
    assert wrapped[:1] == b"\x04"
    assert aead.decrypt(wrapped[1:13], wrapped[13:], b"\x04" + CONTEXT) == MASTER


def test_spec_names_a_key(cloud_kms: CloudKms) -> None:
    assert key_provider(f"gcp-kms:{RING}/a").key_id == f"gcp-kms:{RING}/a"


@pytest.mark.parametrize(
    "name",
    ["", "a", "needle", f"{RING}/", f"{RING}/a/cryptoKeyVersions/1", f"/{RING}/a", f"{RING}/a\n"],
)
def test_invalid_name_is_rejected_without_repeating_it(name: str) -> None:
    with pytest.raises(ConfigurationError, match="projects/P/") as info:
        GcpKmsKey(name)
    assert "needle" not in str(info.value)


# --- what arrives is what was sent ---------------------------------------------------------------


def changed(value: bytes) -> bytes:
    return bytes([value[0] ^ 1]) + value[1:]


@pytest.mark.parametrize(
    "field", ["verified_plaintext_crc32c", "verified_additional_authenticated_data_crc32c"]
)
async def test_request_that_the_server_did_not_verify_is_rejected(
    cloud_kms: CloudKms, key: GcpKmsKey, field: str
) -> None:
    cloud_kms.change = lambda response: setattr(response, field, False)
    error = await failure(key)
    assert "corrupted in transit" in str(error)
    assert error.retryable
    assert len(cloud_kms.operations) == 3


@pytest.mark.parametrize("field", ["ciphertext", "plaintext"])
async def test_corrupted_answer_is_rejected(
    cloud_kms: CloudKms, key: GcpKmsKey, field: str
) -> None:
    wrapped = await key.wrap(MASTER, CONTEXT)

    def change(response: Any) -> None:
        setattr(response, field, changed(getattr(response, field)))

    cloud_kms.change = change
    with pytest.raises(KeyServiceError, match="corrupted in transit") as info:
        await (key.wrap(MASTER, CONTEXT) if field == "ciphertext" else key.unwrap(wrapped, CONTEXT))
    assert info.value.retryable


@pytest.mark.parametrize(
    ("operation", "field"),
    [
        ("wrap", "plaintext"),
        ("wrap", "additional_authenticated_data"),
        ("unwrap", "ciphertext"),
        ("unwrap", "additional_authenticated_data"),
    ],
)
async def test_request_that_is_corrupted_on_the_way_is_noticed_by_its_checksum(
    cloud_kms: CloudKms, key: GcpKmsKey, operation: str, field: str
) -> None:
    value = MASTER if operation == "wrap" else await key.wrap(MASTER, CONTEXT)

    def corrupt(request: Any) -> None:
        setattr(request, field, changed(getattr(request, field)))

    cloud_kms.change_request = corrupt
    if field == "ciphertext":
        cloud_kms.mismatch = "The Checksum was not verified"
    with pytest.raises(KeyServiceError, match="corrupted in transit") as info:
        await getattr(key, operation)(value, CONTEXT)
    assert info.value.retryable


# --- failures ------------------------------------------------------------------------------------

CODES = {
    "PERMISSION_DENIED": ("useToEncrypt", False),
    "UNAUTHENTICATED": ("credentials were rejected", False),
    "NOT_FOUND": ("no such key", False),
    "FAILED_PRECONDITION": ("version is enabled", False),
    "INVALID_ARGUMENT": ("Cloud KMS rejects the call", False),
    "RESOURCE_EXHAUSTED": ("quotas", True),
    "UNAVAILABLE": ("check its address", True),
    "INTERNAL": ("cannot answer now", True),
    "ABORTED": ("cannot answer now", True),
    "DEADLINE_EXCEEDED": ("cannot answer now", True),
    "CANCELLED": ("cannot answer now", True),
    "UNKNOWN": ("cannot answer now", True),
    "OUT_OF_RANGE": ("Cloud KMS rejects the call", False),
}


@pytest.mark.parametrize(("code", "expected"), CODES.items())
async def test_failure_says_what_to_check_and_whether_to_try_again(
    cloud_kms: CloudKms, key: GcpKmsKey, code: str, expected: tuple[str, bool]
) -> None:
    words, retryable = expected
    cloud_kms.failures = [code] * 3
    error = await failure(key)
    assert words in str(error)
    assert error.retryable is retryable
    assert len(cloud_kms.operations) == (3 if retryable else 1)


async def test_call_is_repeated_after_a_retryable_error(
    cloud_kms: CloudKms, key: GcpKmsKey
) -> None:
    cloud_kms.failures = ["RESOURCE_EXHAUSTED", "UNAVAILABLE"]
    assert await key.unwrap(await key.wrap(MASTER, CONTEXT), CONTEXT) == MASTER


async def test_missing_credentials_are_named(
    cloud_kms: CloudKms, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "missing.json"))
    error = await failure(GcpKmsKey(f"{RING}/a", endpoint=cloud_kms.endpoint))
    assert "application default credentials" in str(error)
    assert not error.retryable


async def test_default_credentials_are_asked_for_with_the_scope_of_cloud_kms(
    cloud_kms: CloudKms, key: GcpKmsKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    find = google.auth.default

    def note(**options: Any) -> Any:
        asked.append(options)
        return find(**options)

    monkeypatch.setattr(google.auth, "default", note)
    await key.unwrap(await key.wrap(MASTER, CONTEXT), CONTEXT)
    (options,) = asked
    assert options["scopes"] == ("https://www.googleapis.com/auth/cloudkms",)
    assert options["request"].session.adapters["http://"] is not None


@pytest.mark.parametrize("retryable", [True, False])
async def test_error_of_the_credentials_is_retryable_if_google_says_so(
    cloud_kms: CloudKms, key: GcpKmsKey, monkeypatch: pytest.MonkeyPatch, retryable: bool
) -> None:
    tried = []

    def fail(**_options: Any) -> None:
        tried.append(1)
        raise TransportError("needle", retryable=retryable)  # type: ignore[no-untyped-call]

    monkeypatch.setattr(google.auth, "default", fail)
    error = await failure(key)
    assert "(TransportError)" in str(error)
    assert error.retryable is retryable
    assert len(tried) == (3 if retryable else 1)


async def test_credentials_that_google_rejects_are_no_failure_of_the_network(
    cloud_kms: CloudKms,
) -> None:
    """Such as a service account whose key was deleted: gRPC says that it is unavailable."""

    class Rejected(google.auth.credentials.Credentials):
        def refresh(self, request: Any) -> None:
            raise RefreshError("invalid_grant: needle")  # type: ignore[no-untyped-call]

    credentials = Rejected()  # type: ignore[no-untyped-call]
    error = await failure(
        GcpKmsKey(f"{RING}/a", endpoint=cloud_kms.endpoint, credentials=credentials)
    )
    assert "the credentials cannot be used" in str(error)
    assert error.retryable
    assert cloud_kms.operations == []


async def test_signed_token_of_a_delegated_user_is_not_sent_without_tls(
    cloud_kms: CloudKms, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a subject, google-auth sends what it has signed to `token_uri`."""
    rejected = []

    def check(url: str) -> None:
        try:
            _check_plain_http(url)
        except ConfigurationError:
            rejected.append(url)
            raise

    monkeypatch.setattr(gcp, "_check_plain_http", check)
    from google.oauth2.service_account import Credentials

    information = json.loads(service_account()) | {"token_uri": "http://tokens.example.com/"}
    made: Any = Credentials
    credentials = made.from_service_account_info(information, subject="ada@example.com")
    key = GcpKmsKey(f"{RING}/a", endpoint=cloud_kms.endpoint, credentials=credentials)
    assert "the credentials cannot be used" in str(await failure(key))
    assert set(rejected) == {"http://tokens.example.com/"}
    assert cloud_kms.operations == []


async def test_call_is_repeated_if_credentials_fail_for_a_moment(cloud_kms: CloudKms) -> None:
    class Flaky(google.auth.credentials.Credentials):
        refreshes = 0

        def refresh(self, request: Any) -> None:
            self.refreshes += 1
            if self.refreshes < 3:
                raise RefreshError("service is busy")  # type: ignore[no-untyped-call]
            self.token = "token"

    credentials = Flaky()  # type: ignore[no-untyped-call]
    key = GcpKmsKey(f"{RING}/a", endpoint=cloud_kms.endpoint, credentials=credentials)
    await key.wrap(MASTER, CONTEXT)
    assert credentials.refreshes == 3
    assert len(cloud_kms.operations) == 1


@pytest.mark.parametrize(
    ("address", "is_accepted"),
    [
        ("http://169.254.169.254/computeMetadata", True),
        ("http://169.254.170.2", True),
        ("http://[fd20:ce::254]/", True),
        ("http://[fd00:ec2::254]/", True),
        ("http://[fe80::1]/", True),
        ("http://metadata.google.internal:80/", True),
        ("http://metadata/", True),
        ("http://root.example.com/", True),
        ("http://METADATA.google.internal/", True),
        ("http://127.0.0.2:8080/", True),
        ("http://localhost/", True),
        ("http://metadata.google.internal./", True),
        ("http://[fd20:ce:0::254]/", True),
        ("http://set.example.com/", True),
        ("http://[2001:db8::7]:8080/", True),
        ("http://192.0.2.1/", False),
        ("http://10.0.0.1/", False),
        ("http://[fd00:ec2::255]/", False),
        ("http://sts.googleapis.com/", False),
        ("http://metadata.google.internal.example.com/", False),
        ("http://localhost.example.com/", False),
        ("http://localhost@example.com/", False),
        ("http://2130706433/", False),
        ("http:///", False),
        ("http://xxxx/", False),
        ("http://[fd20:ce::255]/", False),
    ],
)
def test_metadata_service_of_a_machine_is_the_exception(
    monkeypatch: pytest.MonkeyPatch, address: str, is_accepted: bool
) -> None:
    monkeypatch.setenv("GCE_METADATA_HOST", "set.example.com:8080")
    monkeypatch.setenv("GCE_METADATA_IP", "[2001:db8::7]")
    monkeypatch.setenv("GCE_METADATA_ROOT", "root.example.com")
    if is_accepted:
        _check_plain_http(address)
        return
    with pytest.raises(ConfigurationError, match="only for this machine and its metadata service"):
        _check_plain_http(address)


@pytest.mark.parametrize("value", [None, "", "/"])
def test_variable_of_the_metadata_service_may_name_no_host(
    monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    for name in ("GCE_METADATA_HOST", "GCE_METADATA_IP", "GCE_METADATA_ROOT"):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError):
        _check_plain_http("http:///")


async def test_given_credentials_get_the_scope_of_cloud_kms(cloud_kms: CloudKms) -> None:
    given: list[object] = []

    class Unscoped(google.auth.credentials.Credentials, google.auth.credentials.Scoped):
        def __init__(self, scopes: object = None) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self._scopes = scopes

        @property
        def requires_scopes(self) -> bool:
            return self._scopes is None

        def with_scopes(self, scopes: Any, default_scopes: Any = None) -> "Unscoped":
            given.append(scopes)
            return Unscoped(scopes)

        def refresh(self, request: Any) -> None:
            self.token = "token"

    key = GcpKmsKey(f"{RING}/a", endpoint=cloud_kms.endpoint, credentials=Unscoped())
    assert await key.unwrap(await key.wrap(MASTER, CONTEXT), CONTEXT) == MASTER
    assert given == [("https://www.googleapis.com/auth/cloudkms",)]


def test_keys_of_two_endpoints_differ() -> None:
    keys = [GcpKmsKey(f"{RING}/a", endpoint=endpoint) for endpoint in ("one", "one", "two", None)]
    assert keys[0] == keys[1]
    assert keys[2] not in keys[:2]
    assert keys[3] not in keys[:3]


async def test_credentials_may_be_given(
    cloud_kms: CloudKms, monkeypatch: pytest.MonkeyPatch
) -> None:
    from google.oauth2.service_account import Credentials

    made: Any = Credentials
    credentials = made.from_service_account_info(json.loads(service_account()))
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS")
    key = GcpKmsKey(f"{RING}/a", endpoint=cloud_kms.endpoint, credentials=credentials)
    assert await key.unwrap(await key.wrap(MASTER, CONTEXT), CONTEXT) == MASTER


async def test_shortened_wrap_is_rejected_without_a_call(
    cloud_kms: CloudKms, key: GcpKmsKey
) -> None:
    with pytest.raises(TamperedError) as info:
        await key.unwrap(b"\x04", CONTEXT)
    assert info.value.reason is Reason.MALFORMED
    assert cloud_kms.operations == []


async def test_call_that_is_cancelled_ends_at_once_and_is_not_repeated(
    cloud_kms: CloudKms, key: GcpKmsKey
) -> None:
    cloud_kms.delay = 1.0
    await cancel_while_asked(key, cloud_kms.operations)
