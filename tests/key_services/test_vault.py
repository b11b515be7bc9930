"""Root keys in Vault or OpenBao."""

import asyncio
import hashlib
import os
from pathlib import Path
from typing import Any

import pytest

from adk_secure_sessions import (
    ConfigurationError,
    KeyServiceError,
    Reason,
    TamperedError,
    VaultKey,
    key_provider,
)
from adk_secure_sessions.keys import remote
from tests.key_services.support import CONTEXT, MASTER, cancel_while_asked, failure
from tests.key_services.vault import Vault, new_key

pytestmark = pytest.mark.usefixtures("no_pauses")


@pytest.fixture
def key(vault: Vault) -> VaultKey:
    return with_token(vault)


def with_token(vault: Vault, **options: Any) -> VaultKey:
    return VaultKey("transit/clinic", address=vault.address, token=vault.root_token, **options)


def with_approle(vault: Vault, **options: Any) -> VaultKey:
    role = {"role_id": vault.role_id, "secret_id": vault.secret_id, **options}
    return VaultKey("transit/clinic", address=vault.address, **role)


# --- what is sent and stored ---------------------------------------------------------------------


async def test_wrap_has_the_documented_format(vault: Vault, key: VaultKey) -> None:
    vault.keys["", "transit", "clinic"].versions.append(new_key())
    wrapped = await key.wrap(MASTER, CONTEXT)
    assert wrapped[:5] == bytes([5, 0, 0, 0, 2])
    content = (
        vault.keys["", "transit", "clinic"]
        .versions[1]
        .decrypt(wrapped[5:17], wrapped[17:], b"\x05" + CONTEXT)
    )
    assert content == MASTER + hashlib.sha256(b"\x05" + CONTEXT).digest()


async def test_rotated_key_unwraps_what_its_older_version_wrapped(
    vault: Vault, key: VaultKey
) -> None:
    old = await key.wrap(MASTER, CONTEXT)
    vault.keys["", "transit", "clinic"].versions.append(new_key())
    new = await key.wrap(MASTER, CONTEXT)
    assert await key.unwrap(old, CONTEXT) == await key.unwrap(new, CONTEXT) == MASTER


async def test_version_that_is_no_longer_allowed_is_named(vault: Vault, key: VaultKey) -> None:
    wrapped = await key.wrap(MASTER, CONTEXT)
    vault.keys["", "transit", "clinic"].versions.append(new_key())
    vault.keys["", "transit", "clinic"].min_decryption_version = 2
    with pytest.raises(
        KeyServiceError,
        match=r"\(400\): min_decryption_version is above the version that wrapped it;",
    ) as info:
        await key.unwrap(wrapped, CONTEXT)
    assert not info.value.retryable


async def test_key_of_any_length_is_wrapped(key: VaultKey) -> None:
    for length in (0, 16, 33):
        wrapped = await key.wrap(bytes(length), CONTEXT)
        assert await key.unwrap(wrapped, CONTEXT) == bytes(length)


async def test_shortened_wrap_is_rejected(vault: Vault, key: VaultKey) -> None:
    wrapped = await key.wrap(MASTER, CONTEXT)
    vault.requests.clear()
    for length in (1, 4, 5):  # the rest is sent to the server
        with pytest.raises(TamperedError) as info:
            await key.unwrap(wrapped[:length], CONTEXT)
        assert info.value.reason is Reason.MALFORMED
    assert vault.requests == []
    for wrong in (wrapped[:6], wrapped[:1] + bytes([0, 0, 0, 9]) + wrapped[5:]):
        with pytest.raises(TamperedError) as info:
            await key.unwrap(wrong, CONTEXT)
        assert info.value.reason is Reason.AUTHENTICATION


async def test_server_that_ignores_the_associated_data_is_noticed(
    vault: Vault, key: VaultKey
) -> None:
    vault.ignores_associated_data = True
    wrapped = await key.wrap(MASTER, CONTEXT)
    assert await key.unwrap(wrapped, CONTEXT) == MASTER
    with pytest.raises(TamperedError):
        await key.unwrap(wrapped, b"another context")


# --- tokens, AppRole, namespaces -----------------------------------------------------------------


async def test_approle_logs_in_once_for_calls_made_at_once(vault: Vault) -> None:
    key = with_approle(vault)
    await asyncio.gather(*(key.wrap(MASTER, CONTEXT) for _ in range(4)))
    assert vault.requests.count("auth/approle/login") == 1
    assert len(vault.requests) == 5


async def test_expired_token_of_an_approle_is_replaced(vault: Vault) -> None:
    key = with_approle(vault)
    wrapped = await key.wrap(MASTER, CONTEXT)
    vault.tokens.clear()
    assert await asyncio.gather(*(key.unwrap(wrapped, CONTEXT) for _ in range(3))) == [MASTER] * 3
    assert vault.requests.count("auth/approle/login") == 2


async def test_call_after_a_new_login_is_the_same_call(vault: Vault) -> None:
    key = with_approle(vault, attempts=1)
    wrapped = await key.wrap(MASTER, CONTEXT)
    vault.tokens.clear()
    vault.requests.clear()
    assert await key.unwrap(wrapped, CONTEXT) == MASTER
    call = "transit/decrypt/clinic"
    assert vault.requests == [call, "auth/approle/login", call]


async def test_token_that_is_given_is_used_instead_of_a_role_of_the_environment(
    vault: Vault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VAULT_ROLE_ID", vault.role_id)
    monkeypatch.setenv("VAULT_SECRET_ID", vault.secret_id)
    file = tmp_path / "token"
    file.write_text(vault.root_token)
    await with_token(vault).wrap(MASTER, CONTEXT)
    await VaultKey("transit/clinic", address=vault.address, token_file=file).wrap(MASTER, CONTEXT)
    assert vault.requests == ["transit/encrypt/clinic"] * 2
    vault.requests.clear()
    wrong = VaultKey("transit/clinic", address=vault.address, token="wrong")
    assert "denies permission" in str(await failure(wrong))
    assert vault.requests == ["transit/encrypt/clinic"]


async def test_approle_without_permission_logs_in_again_once(vault: Vault) -> None:
    vault.token_lifetime = -1.0
    assert "denies permission" in str(await failure(with_approle(vault)))
    assert vault.requests.count("auth/approle/login") == 2


async def test_wrong_secret_id_is_a_failure_that_says_what_to_check(vault: Vault) -> None:
    error = await failure(with_approle(vault, secret_id="needle"))
    assert "secret_id" in str(error)
    assert not error.retryable


async def test_login_is_repeated_after_a_retryable_error(vault: Vault) -> None:
    vault.failures = [503]
    await with_approle(vault).wrap(MASTER, CONTEXT)


async def test_token_in_a_file_is_read_for_each_call(vault: Vault, tmp_path: Path) -> None:
    file = tmp_path / "token"
    key = VaultKey("transit/clinic", address=vault.address, token_file=file)
    assert "check that file" in str(await failure(key))
    for wrong in ("hvs.né", "hvs.a\nhvs.b", "hvs.a b", "\n"):
        file.write_text(wrong)
        assert "check that file" in str(await failure(key))
    file.write_text("hvs.old\n")
    assert "token is valid" in str(await failure(key))
    file.write_text(vault.root_token + "\n")
    await key.wrap(MASTER, CONTEXT)


async def test_token_file_that_is_never_written_does_not_stop_the_event_loop(
    vault: Vault, tmp_path: Path
) -> None:
    pipe = tmp_path / "token"
    os.mkfifo(pipe)
    key = VaultKey(
        "transit/clinic", address=vault.address, token_file=pipe, timeout=0.05, attempts=1
    )
    try:
        assert "gave no answer within 0.05 s" in str(await failure(key))
    finally:
        pipe.write_text("ends the thread")


async def test_token_file_is_not_blamed_for_threads_that_do_not_end(
    vault: Vault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_MAX_ABANDONED", 0)
    file = tmp_path / "token"
    file.write_text("token")
    key = VaultKey("transit/clinic", address=vault.address, token_file=file, attempts=1)
    error = await failure(key)
    assert ("gave no answer" in str(error), error.retryable) == (True, True)


async def test_empty_name_of_a_token_file_means_none(vault: Vault) -> None:
    await with_token(vault, token_file="").wrap(MASTER, CONTEXT)


async def test_namespace_is_sent(vault: Vault) -> None:
    vault.add_key("clinic", namespace="team")
    wrapped = await with_token(vault, namespace="team").wrap(MASTER, CONTEXT)
    with pytest.raises(TamperedError):
        await with_token(vault).unwrap(wrapped, CONTEXT)
    assert "namespace" in str(await failure(with_token(vault, namespace="nowhere")))
    assert with_token(vault, namespace="team") != with_token(vault)


async def test_address_may_have_a_path(vault: Vault) -> None:
    address = f"{vault.address}/X//"
    await failure(VaultKey("transit/clinic", address=address, token=vault.root_token))
    assert vault.requests == ["/X/v1/transit/encrypt/clinic"]


def test_keys_of_two_servers_differ() -> None:
    def key(port: int) -> VaultKey:
        return VaultKey("transit/clinic", address=f"http://localhost:{port}", token="t")

    assert key(1) == key(1) != key(2)


async def test_environment_names_server_and_credentials(
    vault: Vault, monkeypatch: pytest.MonkeyPatch
) -> None:
    vault.add_key("clinic", mount="deep/transit", namespace="team")
    monkeypatch.setenv("VAULT_ADDR", vault.address + "/")
    monkeypatch.setenv("VAULT_NAMESPACE", "team")
    monkeypatch.setenv("VAULT_TOKEN", vault.root_token)
    key = key_provider("vault:deep/transit/clinic")
    assert key.key_id == "vault:deep/transit/clinic"
    await key.wrap(MASTER, CONTEXT)
    monkeypatch.delenv("VAULT_TOKEN")
    monkeypatch.setenv("VAULT_ROLE_ID", vault.role_id)
    monkeypatch.setenv("VAULT_SECRET_ID", vault.secret_id)
    await key_provider("vault:deep/transit/clinic").wrap(MASTER, CONTEXT)


@pytest.mark.parametrize("missing", ["VAULT_ADDR", "VAULT_TOKEN", "VAULT_SECRET_ID"])
def test_variable_that_is_missing_is_named(
    vault: Vault, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    given = {"VAULT_ADDR": vault.address}
    if missing == "VAULT_SECRET_ID":
        given["VAULT_ROLE_ID"] = "role"
    for name in given.keys() - {missing}:
        monkeypatch.setenv(name, given[name])
    with pytest.raises(ConfigurationError, match=missing):
        key_provider("vault:transit/clinic")


@pytest.mark.parametrize(
    "name", ["clinic", "/clinic", "transit/", "transit//clinic", "a/../b", "a/b?c", "a/b c", "é/b"]
)
def test_invalid_name_is_rejected(name: str) -> None:
    with pytest.raises(ConfigurationError, match="MOUNT/KEY"):
        VaultKey(name, address="http://127.0.0.1", token="needle")


@pytest.mark.parametrize("wrong", ["needle\n", "needle é", "needle needle", "needle\0"])
def test_token_or_namespace_that_is_no_http_header_is_rejected_without_repeating_it(
    monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    address = "http://127.0.0.1"
    with pytest.raises(ConfigurationError, match=r"^the token for Vault has") as by_argument:
        VaultKey("transit/clinic", address=address, token=wrong)
    with pytest.raises(ConfigurationError, match=r"^the namespace for Vault has") as namespace:
        VaultKey("transit/clinic", address=address, token="t", namespace=wrong)
    texts = [str(by_argument.value), str(namespace.value)]
    if "\0" not in wrong:
        monkeypatch.setenv("VAULT_TOKEN", wrong)
        with pytest.raises(ConfigurationError, match=r"^the token for Vault has") as by_variable:
            VaultKey("transit/clinic", address=address)
        texts.append(str(by_variable.value))
    assert not any("needle" in text for text in texts)


@pytest.mark.parametrize(
    "address",
    [
        "https://vault\n.example", "https://va ult", "https://vault:99999999", "https://[vault",
        "https://user:needle@vault", "http://evil\\@localhost", "http://[::1].evil", "https://:8200",
    ],
)  # fmt: skip
def test_address_that_is_no_url_is_rejected(address: str) -> None:
    with pytest.raises(ConfigurationError, match="https://HOST:PORT/PATH") as info:
        VaultKey("transit/clinic", address=address, token="needle")
    assert "needle" not in str(info.value)


@pytest.mark.parametrize("mount", ["app\nrole", "approle?", "../sys", "/approle", ""])
def test_approle_mount_that_is_no_path_is_rejected(vault: Vault, mount: str) -> None:
    with pytest.raises(ConfigurationError, match="approle_mount"):
        with_approle(vault, approle_mount=mount)


async def test_approle_may_be_enabled_at_another_path(vault: Vault) -> None:
    key = with_approle(vault, approle_mount="team/approle")
    assert "check role_id, secret_id" in str(await failure(key))
    assert vault.requests == ["auth/team/approle/login"]


@pytest.mark.parametrize("name", ["role_id", "secret_id"])
def test_secret_that_is_not_text_is_rejected_without_repeating_it(vault: Vault, name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{name} is not text in UTF-8") as info:
        with_approle(vault, **{name: "needle\udcff"})
    assert "needle" not in repr(info.value)


def test_key_id_may_be_given(vault: Vault) -> None:
    key = with_token(vault, key_id="the old vault")
    assert key.key_id == "the old vault"
    other = VaultKey("transit/b", address=vault.address, token=vault.root_token, key_id=key.key_id)
    assert key != other
    for wrong in ("x" * 256, "line\nbreak"):
        with pytest.raises(ConfigurationError, match="255"):
            with_token(vault, key_id=wrong)


# --- failures ------------------------------------------------------------------------------------

STATUS = {
    403: ("policies allow update on transit/encrypt/clinic", False),
    404: ("transit engine", False),
    405: ("transit engine", False),
    307: ("check the address", False),
    412: ("Vault cannot answer now (412)", True),
    429: ("quotas", True),
    472: ("cannot answer now", True),
    473: ("cannot answer now", True),
    500: ("cannot answer now", True),
    502: ("cannot answer now", True),
    503: ("Vault is sealed or in maintenance (503)", True),
    504: ("cannot answer now", True),
}


@pytest.mark.parametrize(("status", "expected"), STATUS.items())
async def test_failure_says_what_to_check_and_whether_to_try_again(
    vault: Vault, key: VaultKey, status: int, expected: tuple[str, bool]
) -> None:
    words, retryable = expected
    vault.failures = [status] * 3
    error = await failure(key)
    assert words in str(error)
    assert str(status) in str(error)
    assert error.retryable is retryable
    assert len(vault.requests) == (3 if retryable else 1)


@pytest.mark.parametrize("status", [403, 500, 502])
async def test_failure_of_vaults_own_storage_is_no_tampering(
    vault: Vault, key: VaultKey, status: int
) -> None:
    wrapped = await key.wrap(MASTER, CONTEXT)
    vault.failures = [status] * 3
    vault.answer = b'{"errors": ["read failed: cipher: message authentication failed"]}'
    with pytest.raises(KeyServiceError) as info:
        await key.unwrap(wrapped, CONTEXT)
    assert info.value.retryable is (status != 403)


async def test_missing_key_is_named(vault: Vault, key: VaultKey) -> None:
    del vault.keys["", "transit", "clinic"]
    assert "rejects the call (400): there is no key of this name;" in str(await failure(key))


async def test_call_is_repeated_while_vault_is_sealed(vault: Vault, key: VaultKey) -> None:
    vault.failures = [503, 429]
    assert await key.unwrap(await key.wrap(MASTER, CONTEXT), CONTEXT) == MASTER
    vault.sealed = True
    error = await failure(with_token(vault, attempts=1))
    assert "is sealed" in str(error)
    assert error.retryable


@pytest.mark.parametrize(
    "answer",
    [
        b"<html>needle</html>", b"", b"[]", b'{"data": 7}', b'{"data": {}}',
        b'{"data": {"ciphertext": "vault:v1:!", "plaintext": "!"}}',
        b'{"data": {"ciphertext": "vault:v1:A", "plaintext": "A"}}',
        b'{"data": {"ciphertext": "vault:v0:AAAA"}}',
        b'{"data": {"ciphertext": 7}, "auth": {"client_token": ""}}',
        b'{"data": {"ciphertext": 7}, "auth": {"client_token": "needle\\n"}}',
        '{"data": {"ciphertext": "vault:v1:é", "plaintext": "é"}}'.encode(),
        b'{"data": {"ciphertext": null, "plaintext": null}}',
        b'{"data":' * 100_000,
        b'{"data": {"plaintext": ""}}', b'{"data": {"plaintext": "AAAA"}}',
        b'{"data": {"plaintext": "!%s"}}' % (b"A" * 64),
        b'{"data": {"plaintext": "%s", "ciphertext": "vault:v1:QQ=="}}' % (b"A" * 2**21),
    ],
)  # fmt: skip
async def test_answer_of_another_kind_of_server_is_rejected(
    vault: Vault, key: VaultKey, answer: bytes
) -> None:
    wrapped = await key.wrap(MASTER, CONTEXT)
    vault.answer = answer
    expected = "the answer does not come from a transit engine; check the address"
    error = await failure(key)
    assert expected in str(error)
    assert error.retryable is True  # a proxy may send its own page for a moment
    assert expected in str(await failure(with_approle(vault)))
    with pytest.raises(KeyServiceError, match=expected):
        await key.unwrap(wrapped, CONTEXT)


@pytest.mark.parametrize("charset", ["hex", "undefined", "needle"])
async def test_charset_of_an_answer_does_not_matter(
    vault: Vault, key: VaultKey, charset: str
) -> None:
    vault.headers["Content-Type"] = f"application/json; charset={charset}"
    assert await key.unwrap(await key.wrap(MASTER, CONTEXT), CONTEXT) == MASTER
    vault.failures, vault.answer = [400], b"\xff"
    assert "rejects the call (400)" in str(await failure(key))


async def test_error_that_the_library_does_not_document_is_not_passed_on(
    vault: Vault, key: VaultKey
) -> None:
    vault.failures = [302]
    vault.headers["Location"] = "mailto:needle"
    error = await failure(key)
    assert "the call failed (" in str(error)
    assert error.__context__ is None
    assert not error.retryable


async def test_missing_server_cannot_be_reached(key: VaultKey, vault: Vault) -> None:
    vault.stop()
    error = await failure(key)
    vault.start()
    assert "cannot be reached (ConnectError)" in str(error)
    assert error.retryable


async def test_restarted_server_is_reached_again(key: VaultKey, vault: Vault) -> None:
    wrapped = await key.wrap(MASTER, CONTEXT)
    vault.stop()
    vault.start()
    assert await key.unwrap(wrapped, CONTEXT) == MASTER


async def test_call_that_is_cancelled_ends_at_once_and_is_not_repeated(vault: Vault) -> None:
    vault.delay = 1.0
    await cancel_while_asked(with_token(vault), vault.requests)


@pytest.mark.parametrize(
    "options", [{"timeout": 0}, {"timeout": 3601}, {"timeout": float("nan")}, {"attempts": 0}]
)
def test_impossible_timeout_or_attempts_are_rejected(vault: Vault, options: dict[str, Any]) -> None:
    with_token(vault, timeout=3600)
    with pytest.raises(ConfigurationError, match="timeout"):
        with_token(vault, **options)


# --- TLS -----------------------------------------------------------------------------------------


async def test_server_is_trusted_by_its_certificate_only(
    tls_vault: Vault, ca_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await with_token(tls_vault, ca_file=ca_file).wrap(MASTER, CONTEXT)
    monkeypatch.setenv("VAULT_CACERT", str(ca_file))
    await with_token(tls_vault).wrap(MASTER, CONTEXT)
    monkeypatch.delenv("VAULT_CACERT")
    error = await failure(with_token(tls_vault))
    assert "is not trusted" in str(error)
    assert not error.retryable


async def test_case_of_the_address_does_not_matter(tls_vault: Vault, ca_file: Path) -> None:
    """`HTTPS` is TLS, too."""
    address = tls_vault.address.replace("https", "HTTPS")
    options: dict[str, Any] = {"address": address, "token": tls_vault.root_token}
    error = await failure(VaultKey("transit/clinic", **options))
    assert "is not trusted" in str(error)
    assert tls_vault.requests == []
    await VaultKey("transit/clinic", ca_file=ca_file, **options).wrap(MASTER, CONTEXT)


def test_certificates_that_cannot_be_read_are_named(tls_vault: Vault, tmp_path: Path) -> None:
    (tmp_path / "empty.pem").write_text("")
    for name in ("missing.pem", "empty.pem", "a\0b"):
        with pytest.raises(ConfigurationError, match="cannot read certificates"):
            with_token(tls_vault, ca_file=tmp_path / name)
