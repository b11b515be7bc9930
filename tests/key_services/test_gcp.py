"""Root keys in Google Cloud KMS."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from adk_secure_sessions import (
    ConfigurationError,
    GcpKmsKey,
    KeyServiceError,
    TamperedError,
    key_provider,
)
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
        setattr(response, field, b"x" + getattr(response, field)[1:])

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
        setattr(request, field, b"x" + getattr(request, field)[1:])

    cloud_kms.change_request = corrupt
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


async def test_missing_key_is_named(cloud_kms: CloudKms) -> None:
    error = await failure(GcpKmsKey(f"{RING}/missing", endpoint=cloud_kms.endpoint))
    assert "no such key" in str(error)


async def test_missing_credentials_are_named(
    cloud_kms: CloudKms, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "missing.json"))
    error = await failure(GcpKmsKey(f"{RING}/a", endpoint=cloud_kms.endpoint))
    assert "application default credentials" in str(error)
    assert not error.retryable


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
    with pytest.raises(TamperedError):
        await key.unwrap(b"\x04", CONTEXT)
    assert cloud_kms.operations == []


async def test_slow_server_times_out(cloud_kms: CloudKms) -> None:
    cloud_kms.delay = 1.0
    key = GcpKmsKey(f"{RING}/a", endpoint=cloud_kms.endpoint, timeout=0.1, attempts=2)
    began = time.perf_counter()
    error = await failure(key)
    assert time.perf_counter() - began < 0.9
    assert error.retryable


async def test_call_that_is_cancelled_ends_at_once_and_is_not_repeated(
    cloud_kms: CloudKms, key: GcpKmsKey
) -> None:
    cloud_kms.delay = 1.0
    await cancel_while_asked(key, cloud_kms.operations)
