"""Root keys in Google Cloud KMS.

docs/format.md, "Key providers", defines the format of a wrapped key.
"""

import ipaddress
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from adk_secure_sessions.errors import ConfigurationError, KeyServiceError, Reason, TamperedError
from adk_secure_sessions.hiding import hides_locals
from adk_secure_sessions.keys.remote import ATTEMPTS, TIMEOUT, RemoteKey, in_daemon_thread, require

if TYPE_CHECKING:
    from google.auth.credentials import Credentials
    from google.cloud.kms import KeyManagementServiceAsyncClient

_NAME = r"projects/[\w.:-]+/locations/[\w-]+/keyRings/[\w-]+/cryptoKeys/[\w-]+"
# The addresses of metadata services that are not link-local: of Google and of AWS.
_METADATA_IPV6 = ("fd20:ce::254", "fd00:ec2::254")
# The variables with which an operator sets the address of Google's metadata service.
_METADATA_VARIABLES = ("GCE_METADATA_HOST", "GCE_METADATA_ROOT", "GCE_METADATA_IP")
_SCOPES = ("https://www.googleapis.com/auth/cloudkms",)
# Maps the class name of an exception of Google's library to the cause and the advice in our error.
_ADVICE = {
    "PermissionDenied": (
        "permission was denied",
        "check that the identity has cloudkms.cryptoKeyVersions.useToEncrypt and useToDecrypt",
    ),
    "Unauthenticated": ("the credentials were rejected", "check that they are valid"),
    "NotFound": ("there is no such key", "check its name, project and location"),
    "FailedPrecondition": (
        "the key cannot be used",
        "check that its version is enabled, and that its purpose is ENCRYPT_DECRYPT",
    ),
}
# The class names of exceptions for temporary failures, after which a call is repeated.
_RETRYABLE = {
    "Aborted",
    "Cancelled",
    "DeadlineExceeded",
    "InternalServerError",
    "ResourceExhausted",
    "Unknown",
}


@hides_locals
class GcpKmsKey(RemoteKey):
    """A root key that is a symmetric key of Google Cloud KMS; key spec `gcp-kms:projects/…`.

    Args:
        key: The name of the key, `projects/P/locations/L/keyRings/R/cryptoKeys/K`, without a
            version.
        credentials: A credentials object of google-auth; by default the application default
            credentials.
        endpoint: The address of the service, `HOST` or `HOST:PORT`; by default
            `cloudkms.googleapis.com`.
        timeout: The time limit of each attempt, in seconds.
        attempts: The maximum number of attempts for one call, if the errors are temporary.

    Raises:
        ConfigurationError: `key` does not have the form above, or the extra `gcp` is not installed.
    """

    _kind = b"\x04"

    def __init__(
        self,
        key: str,
        *,
        credentials: "Credentials | None" = None,
        endpoint: str | None = None,
        timeout: float = TIMEOUT,
        attempts: int = ATTEMPTS,
    ) -> None:
        require("gcp", "google.cloud.kms", "google_crc32c")
        if not re.fullmatch(_NAME, key, re.ASCII):
            raise ConfigurationError(
                "a key of Cloud KMS is written projects/P/locations/L/keyRings/R/cryptoKeys/K"
            )
        super().__init__(f"gcp-kms:{key}", endpoint, timeout=timeout, attempts=attempts)
        self._name = key
        self._credentials = credentials
        self._safe_credentials: Any = None  # what `_find_credentials` has returned
        self._endpoint = endpoint

    async def _encrypt(self, plaintext: bytes, associated_data: bytes) -> bytes:
        response = await self._call("encrypt", plaintext=plaintext, aad=associated_data)
        arrived = (
            response.verified_plaintext_crc32c
            and response.verified_additional_authenticated_data_crc32c
        )
        if not arrived or response.ciphertext_crc32c != _checksum(response.ciphertext):
            raise self._corrupted_error()
        return bytes(response.ciphertext)

    async def _decrypt(self, sealed: bytes, associated_data: bytes) -> bytes:
        if not sealed:
            raise TamperedError("not a key wrapped by Cloud KMS", reason=Reason.MALFORMED)
        response = await self._call("decrypt", ciphertext=sealed, aad=associated_data)
        if response.plaintext_crc32c != _checksum(response.plaintext):
            raise self._corrupted_error()
        return bytes(response.plaintext)

    async def _call(self, operation: str, *, aad: bytes, **data: bytes) -> Any:
        from google.api_core.exceptions import GoogleAPICallError
        from google.auth.exceptions import GoogleAuthError

        data["additional_authenticated_data"] = aad
        checksums = {f"{field}_crc32c": _checksum(value) for field, value in data.items()}
        request = {"name": self._name, **data, **checksums}
        try:
            if self._safe_credentials is None:
                # google-auth blocks: it reads files or calls the machine's metadata service.
                self._safe_credentials = await in_daemon_thread(
                    partial(_find_credentials, self._credentials)
                )
            async with self._client(self._safe_credentials) as client:
                ask = getattr(client, operation)
                return await ask(request=request, retry=None, timeout=self._timeout)
        except GoogleAuthError as error:
            raise self._error(
                f"no credentials were found ({type(error).__name__})",
                "check the application default credentials",
                retryable=error.retryable,
            ) from None
        except GoogleAPICallError as error:
            raise self._service_error(error, operation) from None

    def _client(self, credentials: "Credentials") -> "KeyManagementServiceAsyncClient":
        from google.api_core.client_options import ClientOptions
        from google.cloud.kms import KeyManagementServiceAsyncClient

        transport: Any = KeyManagementServiceAsyncClient.get_transport_class("grpc_asyncio")

        def create_channel(*args: Any, options: Sequence[tuple[str, Any]], **rest: Any) -> Any:
            # By default, gRPC would also use the proxy that `http_proxy` names.  That is the proxy
            # for plain HTTP, but gRPC always connects with TLS.
            is_proxied = any(os.environ.get(name) for name in ("grpc_proxy", "https_proxy"))
            options = [*options, ("grpc.enable_http_proxy", int(is_proxied))]
            return transport.create_channel(*args, options=options, **rest)

        return KeyManagementServiceAsyncClient(
            credentials=credentials,
            transport=partial(transport, channel=create_channel),
            client_options=ClientOptions(api_endpoint=self._endpoint),
        )

    def _service_error(self, error: Exception, operation: str) -> Exception:
        name, text = type(error).__name__, str(error).lower()
        if name == "InvalidArgument":
            if "crc32c" in text or "checksum" in text:
                return self._corrupted_error()
            if operation == "decrypt":
                return TamperedError()
        if name in _ADVICE:
            return self._known_error(name, *_ADVICE[name])
        if "metadata from plugin" in text:  # what gRPC says of all errors of credentials
            return self._error(
                f"the credentials cannot be used ({name})",
                "check that they are valid, and that Google's service for tokens can be reached",
                retryable=True,
            )
        if name == "ServiceUnavailable":
            return self._unreachable_error(f"cannot be reached ({name})")
        return self._other_error("Cloud KMS", name, retryable=name in _RETRYABLE)

    def _corrupted_error(self) -> KeyServiceError:
        return self._error("data was corrupted in transit", "try again", retryable=True)


def _checksum(data: bytes) -> int:
    import google_crc32c

    return int(google_crc32c.value(data))


def _find_credentials(credentials: Any) -> Any:
    """Return *credentials*, or the application default credentials if *credentials* is None.

    The credentials of a cloud machine come from the machine's metadata service, through plain HTTP.
    If a proxy for HTTP is configured, google-auth would send these requests to the proxy, which
    could then read the access token.  A file of credentials may also name a service on another
    machine, to which google-auth would send secrets through plain HTTP.  The returned credentials
    do neither.
    """
    import google.auth
    import google.auth.credentials
    import requests
    from google.auth import compute_engine
    from google.auth.compute_engine import _metadata
    from google.auth.transport.requests import Request
    from google.oauth2 import service_account
    from requests.adapters import HTTPAdapter

    class Direct(HTTPAdapter):
        def send(self, request: Any, *args: Any, **options: Any) -> Any:
            _check_plain_http(request.url)
            return super().send(request, *args, **options | {"proxies": {}})

    class Closing(Request):
        def __call__(self, *args: Any, **options: Any) -> Any:
            with self.session:  # a connection that stayed open would be shared by a forked process
                return super().__call__(*args, **options)  # type: ignore[no-untyped-call]

    session = requests.Session()
    session.mount("http://", Direct())
    send = Closing(session)
    inner = credentials or google.auth.default(scopes=_SCOPES, request=send)[0]
    with_scopes: Any = google.auth.credentials.with_scopes_if_required
    inner = with_scopes(inner, _SCOPES)
    if isinstance(inner, service_account.Credentials):
        # Unless they have a subject, they sign tokens and send nothing.
        inner = inner.with_always_use_jwt_access(True)  # type: ignore[no-untyped-call]
    # Set the "universe domain", the domain of Google's services.  Otherwise, *inner* would request
    # this domain through the proxy.
    if isinstance(inner, compute_engine.Credentials):
        domain = _metadata.get_universe_domain(send)  # type: ignore[no-untyped-call]
        inner = inner.with_universe_domain(domain)

    class Checked(google.auth.credentials.Credentials):
        universe_domain: str = inner.universe_domain

        def refresh(self, request: Any) -> None:
            inner.refresh(send)

        def before_request(self, request: Any, method: str, url: str, headers: Any) -> None:
            inner.before_request(send, method, url, headers)

    return Checked()  # type: ignore[no-untyped-call]


def _check_plain_http(url: str) -> None:
    """Reject an http:// URL of a service that gives credentials, if it is on another machine.

    The machine's metadata service has a link-local address, or a name that the operator has set.
    """
    host = (urlsplit(url).hostname or "").rstrip(".")
    named = (urlsplit(f"//{os.environ.get(name, '')}").hostname for name in _METADATA_VARIABLES)
    known = {"localhost", "metadata.google.internal", "metadata", *_METADATA_IPV6, *named}
    is_here = False
    with suppress(ValueError):  # a name is no address
        address = ipaddress.ip_address(host)
        host = str(address)
        is_here = address.is_loopback or address.is_link_local
    if not is_here and host not in known:
        raise ConfigurationError(
            "the Google credentials name a service whose address begins with http://; http:// is "
            "only for this machine and its metadata service"
        )
