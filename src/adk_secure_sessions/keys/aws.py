"""Root keys in AWS KMS.

Calls of the AWS library botocore block, so each call runs in a thread.
docs/format.md, "Key providers", defines the format of a wrapped key.
"""

import base64
import hashlib
import os
import re
from contextlib import closing
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any

from adk_secure_sessions.errors import ConfigurationError, TamperedError, WrongKeyError
from adk_secure_sessions.hiding import hides_locals
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
    from botocore.exceptions import ClientError

_ARN = r"arn:aws[a-z-]*:kms:(?P<region>[a-z0-9-]+):[0-9]{12}:(?:key|alias)/[\w/-]+"
_NAME = rf"(?:{_ARN}|alias/[\w/-]+|mrk-[0-9a-f]{{32}}|[0-9a-f-]{{36}})"
# The name of the only entry in the "encryption context", which KMS authenticates.  CloudTrail logs
# the encryption context, so the value of the entry is only a hash of the associated data.
_CONTEXT = "adk-secure-sessions"

_CREDENTIALS = (
    "the credentials were rejected",
    "check that they are valid, their region, and this machine's clock",
)
# Maps an error code of AWS to the cause and the advice in our error.
_ADVICE = {
    "AccessDeniedException": (
        "permission was denied",
        "check that the identity's policy and the key's allow kms:Encrypt and kms:Decrypt on it",
    ),
    "NotFoundException": ("there is no such key", "check the ARN or alias, account and region"),
    "DisabledException": ("the key is disabled", "enable it"),
    "KMSInvalidStateException": (
        "the key cannot be used: disabled, pending deletion or import",
        "check its state",
    ),
    "InvalidKeyUsageException": ("the key is of the wrong kind", "use a symmetric encryption key"),
    "InvalidSignatureException": _CREDENTIALS,
    "ExpiredTokenException": _CREDENTIALS,
    "IncompleteSignature": _CREDENTIALS,
    "InvalidClientTokenId": _CREDENTIALS,
    "MissingAuthenticationToken": _CREDENTIALS,
    "RequestExpired": _CREDENTIALS,
    "UnrecognizedClientException": _CREDENTIALS,
}
# The error codes of temporary failures, after which a call is repeated.
_RETRYABLE = {
    "DependencyTimeoutException",
    "KeyUnavailableException",
    "KMSInternalException",
    "LimitExceededException",
    "RequestLimitExceeded",
    "ServiceUnavailable",
    "Throttling",
    "ThrottlingException",
    "TooManyRequestsException",
}
_TOO_MANY, _SERVER_ERROR = 429, 500  # HTTP status codes


@hides_locals
class AwsKmsKey(RemoteKey):
    """A root key that is a symmetric key of AWS KMS; key spec `aws-kms:ARN-or-alias`.

    Credentials come from the usual places of AWS SDKs: the environment, a profile, or the role of
    the machine.

    Args:
        key: The ARN of a key or of an alias, `alias/NAME`, or the id of a key.  Do not change an
            alias to another key: KMS would use the other key to unwrap stored keys, and fail.
        region: The AWS region.  By default the first of these that is set: the region in the ARN,
            `AWS_DEFAULT_REGION`, the region of the profile, `AWS_REGION`.
        profile: A profile in the AWS configuration files; by default `AWS_PROFILE`.
        endpoint_url: The URL of KMS; by default `AWS_ENDPOINT_URL_KMS`, then the endpoint of the
            region.
        timeout: The time limit of each attempt, in seconds.
        attempts: The maximum number of attempts for one call, if the errors are temporary.

    Raises:
        ConfigurationError: An argument cannot be used, no region is known, or the extra `aws` is
            not installed.
    """

    _kind = b"\x03"

    def __init__(
        self,
        key: str,
        *,
        region: str | None = None,
        profile: str | None = None,
        endpoint_url: str | None = None,
        timeout: float = TIMEOUT,
        attempts: int = ATTEMPTS,
    ) -> None:
        require("aws", "botocore")
        from botocore import UNSIGNED

        named = re.fullmatch(_NAME, key, re.ASCII)
        if named is None:
            raise ConfigurationError("a key of AWS KMS is an ARN, alias/NAME or a key id")
        super().__init__(
            f"aws-kms:{key}", region, profile, endpoint_url, timeout=timeout, attempts=attempts
        )
        self._key = key
        self._profile = profile
        self._endpoint_url = endpoint_url
        self._region = region or named["region"]
        # The botocore session of a process, by its id, and a lock: it creates one client at a time.
        self._sessions: dict[int, tuple[Any, Lock]] = {}
        try:
            if not self._region:
                known = self._session()[0].get_config_variable("region")
                self._region = known or os.environ.get("AWS_REGION")
                if not self._region:
                    raise ConfigurationError(
                        "no AWS region is known: give region, or set AWS_REGION"
                    )
            # A client that does not sign needs no credentials, which may come from a slow service.
            with closing(self._client(signature_version=UNSIGNED)) as client:
                # The address may come from the environment, a profile or the region.
                check_transport(client.meta.endpoint_url, "AWS KMS")
        except ConfigurationError:
            raise
        except Exception as error:  # botocore has no common error for configurations
            name = type(error).__name__
            raise ConfigurationError(f"the AWS configuration cannot be used ({name})") from None

    async def _encrypt(self, plaintext: bytes, associated_data: bytes) -> bytes:
        return await in_daemon_thread(
            lambda: self._call("encrypt", "CiphertextBlob", associated_data, Plaintext=plaintext)
        )

    async def _decrypt(self, sealed: bytes, associated_data: bytes) -> bytes:
        # `_call` sends the key's name.  Without the name, AWS decrypts with any key that the
        # ciphertext names, even an attacker's key in another account.
        return await in_daemon_thread(
            lambda: self._call("decrypt", "Plaintext", associated_data, CiphertextBlob=sealed)
        )

    def _call(self, operation: str, answer: str, associated_data: bytes, **data: bytes) -> bytes:
        from botocore.exceptions import BotoCoreError, ClientError

        digest = base64.b64encode(hashlib.sha256(associated_data).digest()).decode()
        try:
            with closing(self._client()) as client:
                ask = getattr(client, operation)
                response = ask(KeyId=self._key, EncryptionContext={_CONTEXT: digest}, **data)
                return bytes(response[answer])
        except ClientError as error:
            raise self._service_error(error) from None
        except ConfigurationError:
            raise
        except (BotoCoreError, OSError, UnicodeEncodeError) as error:
            # OSError is about a file of credentials, UnicodeEncodeError about their text.
            raise self._call_error(error) from None
        except Exception as error:
            # botocore has no common error for malformed answers or for the output of a program that
            # gives credentials.  Such an answer may come from a proxy, for a moment.
            raise self._error(
                f"the call failed ({type(error).__name__})",
                "check the AWS credentials, endpoint_url, and the proxy settings",
                retryable=True,
            ) from None

    def _service_error(self, error: "ClientError") -> Exception:
        status: int = error.response["ResponseMetadata"]["HTTPStatusCode"]
        # A page of a proxy, instead of an answer of STS, which gives credentials, has no "Error".
        code = str(error.response.get("Error", {}).get("Code"))
        retryable = code in _RETRYABLE or status == _TOO_MANY or status >= _SERVER_ERROR
        if error.operation_name not in ("Encrypt", "Decrypt"):
            return self._error(
                f"AWS gave no credentials ({error.operation_name}: {status})",
                "check the role, its trust policy and the AWS credentials",
                retryable=retryable,
            )
        is_verdict = error.operation_name == "Decrypt" and not retryable
        if code == "InvalidCiphertextException" and is_verdict:
            return TamperedError()
        if code == "IncorrectKeyException" and is_verdict:
            return WrongKeyError(
                f"root key {self.key_id!r}: AWS KMS used another key to wrap this master key; if "
                "an alias was moved to another key, move it back"
            )
        if code in _ADVICE:
            return self._known_error(code, *_ADVICE[code])
        return self._other_error("AWS KMS", status, retryable=retryable)

    def _call_error(self, error: Any) -> Exception:
        from botocore import exceptions

        name = type(error).__name__
        if isinstance(error, exceptions.SSLError):
            return self._error(
                f"the certificate of the endpoint is not trusted ({name})", "check AWS_CA_BUNDLE"
            )
        is_of_client = isinstance(error, exceptions.HTTPClientError | exceptions.ConnectionError)
        # A ValueError of the HTTP client is about the request, such as a token with a line break.
        if is_of_client and not isinstance(error.kwargs.get("error"), ValueError):
            return self._unreachable_error(f"cannot be reached ({name})")
        return self._error(
            f"the call could not be sent ({name})",
            "check the AWS credentials and the proxy settings",
            # Credentials may come from a service or a program that fails for a moment.
            retryable=isinstance(
                error,
                exceptions.CredentialRetrievalError
                | exceptions.MetadataRetrievalError
                | exceptions.NoCredentialsError,
            ),
        )

    def _client(self, **options: Any) -> Any:
        from botocore.config import Config

        config = Config(
            connect_timeout=self._timeout,
            read_timeout=self._timeout,
            retries={"total_max_attempts": 1},  # RemoteKey retries
            **options,
        )
        session, one_client = self._session()
        if not one_client.acquire(timeout=self._timeout):
            # A program that gives credentials may never end.  The next attempt runs it again.
            self._sessions = {}
            raise TimeoutError
        try:
            return session.create_client(
                "kms", region_name=self._region, endpoint_url=self._endpoint_url, config=config
            )
        finally:
            one_client.release()

    def _session(self) -> tuple[Any, Lock]:
        """Return the botocore session of this process, and its lock; a fork needs its own."""
        from urllib.request import getproxies  # this module imports 20 others

        from botocore.session import Session

        pid = os.getpid()
        known = self._sessions.get(pid)
        if known is None:
            session = Session(profile=self._profile)
            # In the mode "auto", botocore asks the machine's metadata service for the region, and
            # may ask it through a proxy.
            session.set_config_variable("defaults_mode", "legacy")
            session.register("before-send", partial(_send_plain_http_directly, self._timeout))
            if "http" in getproxies():
                _ask_metadata_service_directly(session)
            known = session, Lock()
            self._sessions = {pid: known}
        return known


def _send_plain_http_directly(timeout: float, request: Any, **_: Any) -> Any:
    """Send *request*, of KMS or of a service that gives credentials, if its address has no TLS.

    botocore calls this function before it sends a request, and sends the request itself if the
    result is None: it would send plain HTTP to the proxy for HTTP, which could read secrets.
    """
    from botocore.httpsession import URLLib3Session

    check_transport(request.url, "an AWS service")
    if not is_plain_http(request.url):
        return None
    with closing(URLLib3Session(timeout=timeout)) as http:  # it uses no proxies
        return http.send(request)


def _ask_metadata_service_directly(session: Any) -> None:
    """Make *session* request credentials from the machine's metadata service without a proxy.

    botocore would send these requests, which are plain HTTP, to the proxy for HTTP, and the proxy
    could read the credentials.  botocore has no public option to prevent this.
    """
    from botocore.httpsession import URLLib3Session

    provider = session.get_component("credential_provider").get_provider("iam-role")
    fetcher = provider._role_fetcher
    fetcher._session = URLLib3Session(timeout=fetcher._timeout)  # it uses no proxies
