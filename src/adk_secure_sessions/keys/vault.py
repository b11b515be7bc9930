"""Root keys in the transit engine of HashiCorp Vault or OpenBao.

docs/format.md, "Key providers", defines the format of a wrapped key.
"""

import base64
import hashlib
import hmac
import json
import os
import re
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adk_secure_sessions.concurrency import LoopLocks
from adk_secure_sessions.errors import ConfigurationError, KeyServiceError, Reason, TamperedError
from adk_secure_sessions.hiding import hides_locals
from adk_secure_sessions.keys.providers import check_utf8, read_environment
from adk_secure_sessions.keys.remote import (
    ATTEMPTS,
    TIMEOUT,
    RemoteKey,
    check_transport,
    in_daemon_thread,
    is_plain_http,
    require,
)

if TYPE_CHECKING:
    import httpx

_PATH = r"[\w.-]+(/[\w.-]+)*"
_CIPHERTEXT = "vault:v([1-9][0-9]{0,8}):([A-Za-z0-9+/]+={0,2})"
# A token and a namespace are sent as HTTP headers.
_HEADER_VALUE = "[!-~]+"
_VERSION_LENGTH = 4
_DIGEST_LENGTH = 32
_MAX_ANSWER = 1024 * 1024  # bytes
_OK, _BAD_REQUEST, _LOGIN_IS_NEEDED = 200, 400, 403
# Status codes of temporary failures, after which a call is repeated.
_RETRYABLE = {412, 429, 472, 473, 500, 502, 503, 504}
_SEALED = 503
# Maps parts of Vault's error texts to their meanings, because Vault uses one status code for all
# these errors.  Our errors do not quote Vault's text, which may contain the key that was sent.
_TAMPERED = "tampered"
_WORDS = {
    "message authentication failed": _TAMPERED,
    "invalid ciphertext": _TAMPERED,
    "is disallowed by policy": "min_decryption_version is above the version that wrapped it",
    "key not found": "there is no key of this name",
}


@hides_locals
class VaultKey(RemoteKey):
    """A key in the transit engine of Vault (1.13 or later) or OpenBao; key spec `vault:MOUNT/KEY`.

    Args:
        key: The mount of the transit engine and the name of the key, as `MOUNT/KEY`, such as
            `transit/clinic`.  The type of the key must be an AEAD cipher.  The key must not have
            the option `derived`.
        address: The URL of Vault: `https://…`, or `http://…` on this machine; by default
            `VAULT_ADDR`.
        namespace: The Vault namespace; by default `VAULT_NAMESPACE`.  If neither is set, no
            namespace is used.
        token: The Vault token; by default `VAULT_TOKEN`, unless `token_file` or a role id is given.
        token_file: A file with the token, such as the sink file of a Vault agent.  Each call reads
            the file.
        role_id: The role id for an AppRole login; by default `VAULT_ROLE_ID`.
        secret_id: The secret id for that login; by default `VAULT_SECRET_ID`.
        approle_mount: The path at which AppRole is enabled.
        ca_file: A file of certificates to trust instead of the system's; by default
            `VAULT_CACERT`.
        key_id: The name of the root key, stored as plaintext with each wrapped key; by default
            `vault:` followed by `key`.
        timeout: The time limit of each attempt, in seconds.
        attempts: The maximum number of attempts for one call, if the errors are temporary.

    Raises:
        ConfigurationError: An argument is missing or cannot be used, or the extra `vault` is not
            installed.
    """

    _kind = b"\x05"

    def __init__(
        self,
        key: str,
        *,
        address: str | None = None,
        namespace: str | None = None,
        token: str | None = None,
        token_file: str | os.PathLike[str] | None = None,
        role_id: str | None = None,
        secret_id: str | None = None,
        approle_mount: str = "approle",
        ca_file: str | os.PathLike[str] | None = None,
        key_id: str | None = None,
        timeout: float = TIMEOUT,
        attempts: int = ATTEMPTS,
    ) -> None:
        require("vault", "httpx")
        if "/" not in key or not _is_path(key):
            raise ConfigurationError("a key in Vault is written MOUNT/KEY, such as transit/clinic")
        address = (address or read_environment("VAULT_ADDR")).rstrip("/")
        check_transport(address)
        namespace = namespace or os.environ.get("VAULT_NAMESPACE") or ""
        _check_header(namespace, "namespace")
        super().__init__(
            key_id or f"vault:{key}", address, namespace, key, timeout=timeout, attempts=attempts
        )
        self._mount, _, self._name = key.rpartition("/")
        self._url = f"{address}/v1"
        self._uses_proxies = not is_plain_http(address)
        self._headers = {"X-Vault-Request": "true", "Accept-Encoding": "identity"}
        if namespace:
            self._headers["X-Vault-Namespace"] = namespace
        self._tls = _tls_context(address, ca_file or os.environ.get("VAULT_CACERT"))
        role_id = role_id or (None if token or token_file else os.environ.get("VAULT_ROLE_ID"))
        self._login: dict[str, str] | None = None
        if not _is_path(approle_mount):
            raise ConfigurationError("approle_mount is a path such as approle or team/approle")
        self._login_path = f"auth/{approle_mount}/login"
        self._token_file = Path(token_file) if token_file else None
        self._token = token
        if role_id:
            secret_id = secret_id or read_environment("VAULT_SECRET_ID")
            check_utf8(role_id, "role_id")
            check_utf8(secret_id, "secret_id")
            self._login = {"role_id": role_id, "secret_id": secret_id}
        elif not token and not token_file:
            self._token = read_environment("VAULT_TOKEN")
        _check_header(self._token, "token")
        self._logging_in = LoopLocks()
        try:
            self._client()
        except Exception as error:  # httpx has no common error for proxies that it cannot use
            name = type(error).__name__
            raise ConfigurationError(
                f"the proxy for Vault cannot be used ({name}): check the variables HTTPS_PROXY, "
                "HTTP_PROXY, ALL_PROXY and NO_PROXY"
            ) from None

    def _client(self) -> "httpx.AsyncClient":
        import httpx

        return httpx.AsyncClient(
            headers=self._headers,
            verify=self._tls,
            timeout=self._timeout,
            trust_env=self._uses_proxies,
        )

    async def _encrypt(self, plaintext: bytes, associated_data: bytes) -> bytes:
        # Servers before 1.13, which are not supported, ignore associated_data without an error.  So
        # append the hash of associated_data to the plaintext, and let `_decrypt` check the hash.
        content = plaintext + hashlib.sha256(associated_data).digest()
        answer = await self._transit(
            "encrypt", plaintext=_base64(content), associated_data=_base64(associated_data)
        )
        ciphertext = re.fullmatch(_CIPHERTEXT, str(answer.get("ciphertext")))
        if ciphertext is None:
            raise self._unexpected_answer_error()
        # Store bytes, not Vault's base64 text.  Several base64 texts decode to the same bytes, so a
        # modified text could still be accepted.
        return int(ciphertext[1]).to_bytes(_VERSION_LENGTH) + self._decode_base64(ciphertext[2])

    async def _decrypt(self, sealed: bytes, associated_data: bytes) -> bytes:
        version = int.from_bytes(sealed[:_VERSION_LENGTH])
        if len(sealed) <= _VERSION_LENGTH or not version:  # Vault treats version 0 as 1
            raise TamperedError("not a key wrapped by Vault", reason=Reason.MALFORMED)
        answer = await self._transit(
            "decrypt",
            ciphertext=f"vault:v{version}:{_base64(sealed[_VERSION_LENGTH:])}",
            associated_data=_base64(associated_data),
        )
        content = self._decode_base64(answer.get("plaintext"))
        if len(content) < _DIGEST_LENGTH:
            raise self._unexpected_answer_error()
        digest = hashlib.sha256(associated_data).digest()
        if not hmac.compare_digest(content[-_DIGEST_LENGTH:], digest):
            raise TamperedError()
        return content[:-_DIGEST_LENGTH]

    async def _transit(self, operation: str, **body: str) -> Mapping[str, Any]:
        path = f"{self._mount}/{operation}/{self._name}"
        async with self._client() as client:
            token = await self._current_token(client, instead_of=None)
            status, content = await self._post(client, path, body, token)
            if status == _LOGIN_IS_NEEDED and self._login:
                token = await self._current_token(client, instead_of=token)
                status, content = await self._post(client, path, body, token)
        if status != _OK:
            raise self._service_error(status, content, operation)
        return self._parse_answer(content, "data")

    async def _current_token(self, client: "httpx.AsyncClient", *, instead_of: str | None) -> str:
        if self._token_file is not None:
            return await self._read_token(self._token_file)
        if self._login is None:
            assert self._token is not None
            return self._token
        async with self._logging_in.lock("login"):
            # While this task waited for the lock, another task may have logged in.
            if self._token is None or self._token == instead_of:
                self._token = await self._log_in(client, self._login)
            return self._token

    async def _read_token(self, path: Path) -> str:
        try:
            # In a thread, so that the timeout also ends the read of a named pipe (FIFO).
            token = (await in_daemon_thread(path.read_bytes)).decode("ascii").strip()
            if re.fullmatch(_HEADER_VALUE, token):
                return token
        except TimeoutError:
            raise  # the file may be good: this is about threads that have not ended
        except (OSError, ValueError):
            pass
        raise self._error(f"cannot read the token in {str(path)!r}", "check that file")

    async def _log_in(self, client: "httpx.AsyncClient", login: Mapping[str, str]) -> str:
        status, content = await self._post(client, self._login_path, login, None)
        if status == _OK:
            token = self._parse_answer(content, "auth").get("client_token")
            if isinstance(token, str) and re.fullmatch(_HEADER_VALUE, token):
                return token
            raise self._unexpected_answer_error()
        raise self._error(
            f"Vault rejected the AppRole login ({status})",
            f"check role_id, secret_id (expired, used up?), {self._login_path} and the namespace",
            retryable=status in _RETRYABLE,
        )

    async def _post(
        self, client: "httpx.AsyncClient", path: str, body: Mapping[str, str], token: str | None
    ) -> tuple[int, bytes]:
        """Return the status code and the body of the answer."""
        import httpx

        headers = {} if token is None else {"X-Vault-Token": token}
        url, content = f"{self._url}/{path}", b""
        try:
            async with client.stream("POST", url, json=body, headers=headers) as response:
                # Not decompressed, so that a small answer cannot take much memory.
                async for part in response.aiter_raw():
                    content += part
                    if len(content) > _MAX_ANSWER:
                        raise self._unexpected_answer_error()
            return response.status_code, content
        except httpx.TransportError as error:
            if _is_certificate_error(error):
                raise self._error(
                    "the certificate of Vault is not trusted", "give ca_file, or VAULT_CACERT"
                ) from None
            raise self._unreachable_error(f"cannot be reached ({type(error).__name__})") from None

    def _service_error(self, status: int, content: bytes, operation: str) -> Exception:
        meaning = None
        if status == _BAD_REQUEST:  # with other codes, the same words are about Vault's own storage
            text = content.decode(errors="replace")
            meaning = next((meaning for words, meaning in _WORDS.items() if words in text), None)
        if meaning == _TAMPERED and operation == "decrypt":
            return TamperedError()
        if status in _RETRYABLE:
            what = "is sealed or in maintenance" if status == _SEALED else "cannot answer now"
            return self._error(
                f"Vault {what} ({status})", "check its status and its quotas", retryable=True
            )
        if meaning is not None:
            return self._error(
                f"Vault rejects the call ({status}): {meaning}", "check the key in Vault"
            )
        if status == _LOGIN_IS_NEEDED:
            return self._error(
                "Vault denies permission (403)",
                "check that the token is valid and its policies allow update on "
                f"{self._mount}/encrypt/{self._name} and {self._mount}/decrypt/{self._name}",
            )
        return self._error(
            f"Vault rejects the call ({status})",
            f"check the address, the namespace, that {self._mount} is a transit engine, and that "
            "the key is of type aes256-gcm96, aes128-gcm96 or chacha20-poly1305 and not derived",
        )

    def _parse_answer(self, content: bytes, name: str) -> Mapping[str, Any]:
        try:
            part = json.loads(content)[name]
        except (ValueError, KeyError, TypeError, RecursionError):
            part = None
        if not isinstance(part, dict):
            raise self._unexpected_answer_error()
        return part

    def _decode_base64(self, text: object) -> bytes:
        try:
            if isinstance(text, str):
                return base64.b64decode(text, validate=True)
        except ValueError:
            pass
        raise self._unexpected_answer_error()

    def _unexpected_answer_error(self) -> KeyServiceError:
        # A proxy may send its own page for a moment, so try again.
        return self._error(
            "the answer does not come from a transit engine", "check the address", retryable=True
        )


def _is_path(text: str) -> bool:
    return re.fullmatch(_PATH, text, re.ASCII) is not None and ".." not in text


def _check_header(value: str | None, name: str) -> None:
    if value and not re.fullmatch(_HEADER_VALUE, value):
        raise ConfigurationError(
            f"the {name} for Vault has characters other than printable ASCII, or spaces"
        )


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _tls_context(address: str, ca_file: str | os.PathLike[str] | None) -> ssl.SSLContext | bool:
    if is_plain_http(address):
        return False
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ValueError):  # SSLError is a subclass of OSError
        problem = f"cannot read certificates from {os.fspath(ca_file or '')!r}"
        raise ConfigurationError(problem) from None


def _is_certificate_error(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return True
        error = error.__cause__ or error.__context__
    return False
