"""Root keys in AWS KMS."""

import asyncio
import base64
import hashlib
import json
import socket
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import botocore.session
import pytest
from botocore.utils import ContainerMetadataFetcher

from adk_secure_sessions import (
    AwsKmsKey,
    ConfigurationError,
    KeyServiceError,
    TamperedError,
    WrongKeyError,
    key_provider,
)
from tests.attacks.needles import locals_of
from tests.key_services.aws import ACCESS, REGION, Kms
from tests.key_services.support import CONTEXT, MASTER, cancel_while_asked, failure, join_threads
from tests.key_services.vault import Vault

ARN = f"arn:aws:kms:{REGION}:123456789012:key/1234abcd-12ab-34cd-56ef-1234567890ab"


pytestmark = pytest.mark.usefixtures("no_pauses")


@pytest.fixture
def key(kms: Kms) -> AwsKmsKey:
    return AwsKmsKey(kms.new_key(), endpoint_url=kms.address)


# --- what is sent and stored ---------------------------------------------------------------------


async def test_wrap_has_the_documented_format(kms: Kms, key: AwsKmsKey) -> None:
    wrapped = await key.wrap(MASTER, CONTEXT)
    assert wrapped[:1] == b"\x03"
    digest = base64.b64encode(hashlib.sha256(b"\x03" + CONTEXT).digest()).decode()
    context = {"adk-secure-sessions": digest}
    said = kms.admin.decrypt(CiphertextBlob=wrapped[1:], EncryptionContext=context)
    assert said["Plaintext"] == MASTER
    assert said["KeyId"] == key.key_id.removeprefix("aws-kms:")


async def test_log_of_aws_shows_nothing_of_the_context(kms: Kms, key: AwsKmsKey) -> None:
    """CloudTrail logs the encryption context as plaintext."""
    await key.unwrap(await key.wrap(MASTER, b"clinic, ada"), b"clinic, ada")
    assert len(kms.contexts) == 2
    for name, value in (pair for context in kms.contexts for pair in context.items()):
        assert name == "adk-secure-sessions"
        assert len(base64.b64decode(value)) == 32


# --- how a key is named --------------------------------------------------------------------------


async def test_alias_names_its_key(kms: Kms, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_KMS", kms.address)
    arn = kms.new_key()
    kms.admin.create_alias(AliasName="alias/moved", TargetKeyId=arn)
    key = key_provider("aws-kms:alias/moved")
    assert key.key_id == "aws-kms:alias/moved"
    wrapped = await key.wrap(MASTER, CONTEXT)
    assert await key_provider(f"aws-kms:{arn}").unwrap(wrapped, CONTEXT) == MASTER
    kms.admin.update_alias(AliasName="alias/moved", TargetKeyId=kms.new_key())
    # moto answers AccessDeniedException, AWS IncorrectKeyException: see below.
    with pytest.raises(KeyServiceError, match="permission was denied"):
        await key.unwrap(wrapped, CONTEXT)


@pytest.mark.parametrize(
    "name",
    [
        ARN, ARN.replace(":key/", ":alias/"), ARN.replace("aws:", "aws-us-gov:"),
        "alias/team/clinic", "1234abcd-12ab-34cd-56ef-1234567890ab",
        "mrk-1234abcd12ab34cd56ef1234567890ab",
    ],
)  # fmt: skip
def test_every_form_of_a_key_name_is_accepted(kms: Kms, name: str) -> None:
    assert AwsKmsKey(name, endpoint_url=kms.address).key_id == f"aws-kms:{name}"


@pytest.mark.parametrize(
    "name", ["", "clinic", "needle", "arn:aws:s3:::clinic", f"{ARN} ", f"{ARN}\n", "alias/", "é"]
)
def test_invalid_name_is_rejected_without_repeating_it(name: str) -> None:
    with pytest.raises(ConfigurationError, match="alias/NAME") as info:
        AwsKmsKey(name)
    assert "needle" not in str(info.value)


async def test_region_is_that_of_the_arn_unless_another_is_given(
    kms: Kms, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def region(name: str, **options: Any) -> str:
        await failure(AwsKmsKey(name, endpoint_url=kms.address, **options))
        return kms.signers[-1][1]

    elsewhere = ARN.replace(REGION, "us-east-1")
    assert await region(elsewhere) == "us-east-1"
    assert await region(elsewhere, region=REGION) == REGION
    assert await region("alias/unknown") == REGION
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    monkeypatch.setenv("AWS_REGION", "eu-west-3")
    assert await region("alias/unknown") == "eu-west-3"
    monkeypatch.delenv("AWS_REGION")
    with pytest.raises(ConfigurationError, match="AWS_REGION"):
        await region("alias/unknown")


def test_profile_that_is_missing_is_a_configuration_error(kms: Kms) -> None:
    with pytest.raises(ConfigurationError, match="ProfileNotFound"):
        AwsKmsKey("alias/clinic", profile="nobody")
    with pytest.raises(ConfigurationError, match="ProfileNotFound"):
        AwsKmsKey(ARN, profile="nobody")


async def test_profile_gives_region_and_credentials(
    kms: Kms, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config"
    credentials = "aws_access_key_id = AKIAOFPROFILE\naws_secret_access_key = needle\n"
    file.write_text(f"[profile clinic]\nregion = ap-south-1\n{credentials}")
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(file))
    key = AwsKmsKey("alias/clinic", profile="clinic", endpoint_url=kms.address)
    await failure(key)
    assert kms.signers == [("AKIAOFPROFILE", "ap-south-1")]


def test_address_at_which_keys_would_travel_unencrypted_is_rejected(
    monkeypatch: pytest.MonkeyPatch, kms: Kms
) -> None:
    with pytest.raises(ConfigurationError, match=r"^the address of AWS KMS begins with https://"):
        AwsKmsKey(ARN, endpoint_url="http://localstack.example:4566")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://localstack.example:4566")
    with pytest.raises(ConfigurationError, match="https://"):
        AwsKmsKey(ARN)


def test_malformed_configuration_is_a_configuration_error(
    kms: Kms, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config"
    monkeypatch.setenv("AWS_CONFIG_FILE", str(file))
    file.write_text("[needle")
    with pytest.raises(ConfigurationError, match=r"cannot be used \(ConfigParseError\)") as info:
        AwsKmsKey(ARN)
    assert "needle" not in locals_of(info.value)


@pytest.mark.parametrize(
    ("program", "expected", "retryable"),
    [
        ("/nowhere/x", "could not be sent (FileNotFoundError); check the AWS credentials", False),
        ("echo '{}'", "could not be sent (CredentialRetrievalError)", True),
        ("""echo '["needle"]'""", "the call failed (AttributeError); check the AWS cred", True),
    ],
)
async def test_program_that_gives_no_credentials_is_reported(
    kms: Kms,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    program: str,
    expected: str,
    retryable: bool,
) -> None:
    file = tmp_path / "config"
    file.write_text(f"[default]\ncredential_process = {program}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(file))
    for name in ACCESS:
        monkeypatch.delenv(name.upper())
    error = await failure(AwsKmsKey(ARN, endpoint_url=kms.address))
    assert expected in str(error)
    assert error.retryable is retryable
    assert kms.operations == []


async def test_program_that_never_ends_is_run_again_by_a_later_attempt(
    kms: Kms, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, file = tmp_path / "program", tmp_path / "config"
    credentials = {"Version": 1, "AccessKeyId": "x", "SecretAccessKey": "x"}
    program.write_text(f"mkdir {tmp_path}/hangs && sleep 9; echo '{json.dumps(credentials)}'")
    file.write_text(f"[default]\ncredential_process = sh {program}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(file))
    for name in ACCESS:
        monkeypatch.delenv(name.upper())
    key = AwsKmsKey(kms.new_key(), endpoint_url=kms.address, timeout=0.5, attempts=9)
    assert await key.unwrap(await key.wrap(MASTER, CONTEXT), CONTEXT) == MASTER


async def test_address_is_checked_before_each_call(
    kms: Kms, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_KMS", kms.address)
    key = AwsKmsKey(kms.new_key())
    await key.wrap(MASTER, CONTEXT)
    monkeypatch.setenv("AWS_ENDPOINT_URL_KMS", "http://evil.example:1")
    with pytest.raises(ConfigurationError, match="https://"):
        await key.wrap(MASTER, CONTEXT)


# --- failures ------------------------------------------------------------------------------------

ANSWERS = {
    ("AccessDeniedException", 400): ("kms:Encrypt and kms:Decrypt", False),
    ("DisabledException", 400): ("enable it", False),
    ("KMSInvalidStateException", 400): ("pending deletion", False),
    ("InvalidKeyUsageException", 400): ("symmetric", False),
    ("NotFoundException", 400): ("no such key", False),
    ("UnrecognizedClientException", 400): ("credentials were rejected", False),
    ("ExpiredTokenException", 400): ("credentials were rejected", False),
    ("InvalidSignatureException", 400): ("clock", False),
    ("IncompleteSignature", 400): ("clock", False),
    ("InvalidClientTokenId", 403): ("credentials were rejected", False),
    ("MissingAuthenticationToken", 403): ("credentials were rejected", False),
    ("RequestExpired", 400): ("clock", False),
    ("ValidationException", 400): ("AWS KMS rejects the call (400)", False),
    ("Unheard", 499): ("AWS KMS rejects the call (499)", False),
    ("ThrottlingException", 400): ("quotas", True),
    ("Throttling", 400): ("quotas", True),
    ("LimitExceededException", 400): ("quotas", True),
    ("RequestLimitExceeded", 400): ("quotas", True),
    ("ServiceUnavailable", 400): ("cannot answer now (400)", True),
    ("TooManyRequestsException", 400): ("quotas", True),
    ("KeyUnavailableException", 400): ("cannot answer now", True),
    ("KMSInternalException", 400): ("cannot answer now", True),
    ("DependencyTimeoutException", 400): ("cannot answer now", True),
    # Verdicts about a ciphertext, in answers that cannot be verdicts.
    ("InvalidCiphertextException", 400): ("AWS KMS rejects the call (400)", False),
    ("IncorrectKeyException", 400): ("AWS KMS rejects the call (400)", False),
    ("InvalidCiphertextException", 503): ("cannot answer now", True),
    ("Unheard", 500): ("cannot answer now", True),
    ("Unheard", 502): ("cannot answer now", True),
    ("Unheard", 429): ("cannot answer now", True),
}


async def test_failure_says_what_to_check_and_whether_to_try_again(
    kms: Kms, key: AwsKmsKey
) -> None:
    """With one client for all answers: it takes boto3 long to make one."""
    for answer, (words, retryable) in ANSWERS.items():
        kms.forget()
        kms.failures = [answer] * 3
        error = await failure(key)
        assert words in str(error), answer
        assert error.retryable is retryable, answer
        assert len(kms.operations) == (3 if retryable else 1), answer


@pytest.mark.parametrize("code", ["InvalidCiphertextException", "IncorrectKeyException"])
async def test_failure_of_the_server_is_no_verdict_about_a_ciphertext(
    kms: Kms, key: AwsKmsKey, code: str
) -> None:
    wrapped = await key.wrap(MASTER, CONTEXT)
    for status in (500, 429):
        kms.failures = [(code, status)] * 3
        with pytest.raises(KeyServiceError, match="cannot answer now") as info:
            await key.unwrap(wrapped, CONTEXT)
        assert info.value.retryable
    kms.failures = [(code, 400)]
    with pytest.raises(TamperedError if code.startswith("Invalid") else WrongKeyError):
        await key.unwrap(wrapped, CONTEXT)


async def test_answer_of_another_kind_of_server_is_rejected(kms: Kms, key: AwsKmsKey) -> None:
    wrapped = await key.wrap(MASTER, CONTEXT)
    for answer in (
        b"<html>needle</html>", b"", b"[]", b"7", b"\xff", b'{"needle": 7}',
        b'{"CiphertextBlob": 7, "Plaintext": 7}',
        b'{"CiphertextBlob": null, "Plaintext": null}',
        b'{"CiphertextBlob": "needle!", "Plaintext": "needle!"}',
    ):  # fmt: skip
        kms.answer = answer
        error = await failure(key)
        assert "the call failed" in str(error), answer
        assert error.retryable
        with pytest.raises(
            KeyServiceError, match="check the AWS credentials, endpoint_url"
        ) as info:
            await key.unwrap(wrapped, CONTEXT)
        assert "needle" not in str(info.value)


async def test_missing_credentials_are_named(kms: Kms, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ACCESS:
        monkeypatch.delenv(name.upper())
    error = await failure(AwsKmsKey(ARN, endpoint_url=kms.address))
    assert "NoCredentialsError" in str(error)
    assert error.retryable  # botocore also raises it if the metadata service fails for a moment
    assert kms.operations == []


STS_REFUSAL = b"""<ErrorResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><Error>
<Type>Sender</Type><Code>AccessDenied</Code><Message>needle</Message></Error></ErrorResponse>"""


@pytest.mark.usefixtures("role")
@pytest.mark.parametrize(
    ("status", "answer", "expected", "retryable"),
    [
        (
            403,
            STS_REFUSAL,
            "no credentials (AssumeRoleWithWebIdentity: 403); check the role",
            False,
        ),
        (429, STS_REFUSAL, "no credentials (AssumeRoleWithWebIdentity: 429)", True),
        (503, b"<html>needle</html>", "no credentials (AssumeRoleWithWebIdentity: 503)", True),
        (403, b"<html>needle</html>", "no credentials (AssumeRoleWithWebIdentity: 403)", False),
        (503, b"needle", "the call failed (ResponseParserError)", True),
    ],
)
async def test_missing_credentials_of_a_role_are_named(
    kms: Kms, key: AwsKmsKey, status: int, answer: bytes, expected: str, retryable: bool
) -> None:
    kms.credentials = (status, answer)
    error = await failure(key)
    assert expected in str(error)
    assert error.retryable is retryable
    assert kms.operations == []


async def test_missing_token_of_a_role_is_a_matter_of_the_credentials(
    role: Path, key: AwsKmsKey
) -> None:
    role.unlink()
    error = await failure(key)
    assert "could not be sent (FileNotFoundError); check the AWS credentials" in str(error)
    assert not error.retryable


async def test_call_is_repeated_if_a_container_gets_no_credentials_for_a_moment(
    kms: Kms, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ACCESS:
        monkeypatch.delenv(name.upper())
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{kms.address}/needle")
    monkeypatch.setattr(ContainerMetadataFetcher, "SLEEP_TIME", 0)
    key = AwsKmsKey(kms.new_key(), endpoint_url=kms.address, attempts=1)
    kms.credentials = (500, b"needle")
    error = await failure(key)
    assert "could not be sent (CredentialRetrievalError); check the AWS credentials" in str(error)
    assert error.retryable


@pytest.mark.parametrize(
    ("variable", "value", "error"),
    [
        ("AWS_SECRET_ACCESS_KEY", "needle\udcff", "UnicodeEncodeError"),
        ("AWS_SESSION_TOKEN", "needle\nneedle", "HTTPClientError"),
    ],
)
async def test_credential_that_cannot_be_sent_is_named_as_one(
    kms: Kms, variable: str, value: str, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    said = await failure(AwsKmsKey(ARN, endpoint_url=kms.address))
    assert f"could not be sent ({error}); check the AWS credentials" in str(said)
    assert not said.retryable


async def test_missing_server_cannot_be_reached(kms: Kms, key: AwsKmsKey) -> None:
    kms.stop()
    error = await failure(key)
    kms.start()
    assert "cannot be reached (EndpointConnectionError)" in str(error)
    assert error.retryable


async def test_server_is_trusted_by_its_certificate_only(
    kms: Kms, tls_vault: Vault, ca_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any server with TLS will do: botocore refuses to send anything to it."""
    error = await failure(AwsKmsKey(ARN, endpoint_url=tls_vault.address))
    assert "certificate of the endpoint is not trusted (SSLError)" in str(error)
    assert not error.retryable
    assert tls_vault.requests == []
    monkeypatch.setenv("AWS_CA_BUNDLE", str(ca_file))
    tls_vault.answer = b"{}"
    with pytest.raises(KeyServiceError, match="rejects the call"):
        await AwsKmsKey(ARN, endpoint_url=tls_vault.address).wrap(MASTER, CONTEXT)
    assert len(tls_vault.requests) == 1


def test_keys_of_two_services_differ(kms: Kms) -> None:
    one = AwsKmsKey(ARN, endpoint_url=kms.address)
    assert one == AwsKmsKey(ARN, endpoint_url=kms.address)
    assert one != AwsKmsKey(ARN, endpoint_url="http://localhost:1")
    assert one != AwsKmsKey(ARN, endpoint_url=kms.address, region="us-east-1")


@pytest.mark.parametrize("accepts", [True, False])
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_thread_of_a_call_without_an_answer_ends(kms: Kms, scheme: str, accepts: bool) -> None:
    """Nothing but botocore's own time-outs can end it."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as mute, ExitStack() as stack:
        address = mute.getsockname()[:2]
        for _ in range(0 if accepts else 3):  # more than fit into the queue of this server
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(address)
        url = f"{scheme}://127.0.0.1:{address[1]}"
        key = AwsKmsKey(ARN, endpoint_url=url, timeout=0.2, attempts=1)
        assert asyncio.run(failure(key)).retryable
        join_threads()


def test_thread_of_a_call_with_a_slow_answer_over_tls_ends(
    kms: Kms, tls_vault: Vault, ca_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", str(ca_file))
    tls_vault.delay = 2.0
    key = AwsKmsKey(ARN, endpoint_url=tls_vault.address, timeout=0.2, attempts=1)
    began = time.perf_counter()
    assert asyncio.run(failure(key)).retryable
    join_threads()
    assert time.perf_counter() - began < 2  # the server has not answered yet


async def test_process_reads_the_configuration_of_aws_once_for_each_key(
    kms: Kms, monkeypatch: pytest.MonkeyPatch
) -> None:
    arn = kms.new_key()  # the test server also makes sessions
    made = []
    make = botocore.session.Session

    def note(**options: Any) -> botocore.session.Session:
        made.append(options)
        return make(**options)

    monkeypatch.setattr(botocore.session, "Session", note)
    key = AwsKmsKey(arn, endpoint_url=kms.address)
    made.clear()
    await key.unwrap(await key.wrap(MASTER, CONTEXT), CONTEXT)
    assert made == []


async def test_call_that_is_cancelled_ends_at_once_and_is_not_repeated(
    kms: Kms, key: AwsKmsKey
) -> None:
    kms.delay = 1.0
    await cancel_while_asked(key, kms.operations)
