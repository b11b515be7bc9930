"""Root keys in AWS KMS, asked by botocore in a thread.

Format of a wrapped key: docs/format.md, "Key providers".
"""

import asyncio
import base64
import hashlib
import logging
import os
import re
import threading
from contextlib import closing
from typing import Any, NamedTuple

from adk_secure_sessions.errors import ConfigurationError, TamperedError, WrongKeyError
from adk_secure_sessions.keys.remote import ATTEMPTS, TIMEOUT, RemoteKey, check_private, need

_ARN = r"arn:aws[a-z-]*:kms:(?P<region>[a-z0-9-]+):[0-9]{12}:(?:key|alias)/[\w/-]+"
_NAME = re.compile(rf"(?:{_ARN}|alias/[\w/-]+|mrk-[0-9a-f]{{32}}|[0-9a-f-]{{36}})", re.ASCII)
# What it is bound to; CloudTrail shows it, so no more than a hash.
_CONTEXT = "adk-secure-sessions"

_CREDENTIALS = (
    "the credentials were refused",
    "check that they are valid, their region, and this machine's clock",
)
_PENDING = ("the key cannot be used: disabled, pending deletion or import", "check its state")
_REFUSED = {
    "AccessDeniedException": (
        "permission was denied",
        "check that the identity's policy and the key's allow kms:Encrypt and kms:Decrypt on it",
    ),
    "NotFoundException": ("there is no such key", "check the ARN or alias, account and region"),
    "DisabledException": ("the key is disabled", "enable it"),
    "KMSInvalidStateException": _PENDING,
    "InvalidKeyUsageException": ("the key is of another kind", "use a symmetric encryption key"),
    "InvalidSignatureException": _CREDENTIALS,
    "ExpiredTokenException": _CREDENTIALS,
    "IncompleteSignature": _CREDENTIALS,
    "InvalidClientTokenId": _CREDENTIALS,
    "MissingAuthenticationToken": _CREDENTIALS,
    "RequestExpired": _CREDENTIALS,
    "UnrecognizedClientException": _CREDENTIALS,
}
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
_TOO_MANY, _SERVER_ERROR = 429, 500  # of HTTP


class _Quiet(logging.Filter):
    """Of this thread's calls, drops what botocore logs for debugging: keys in clear, too."""

    def __init__(self) -> None:
        super().__init__()
        self.calling = threading.local()

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno > logging.DEBUG or not getattr(self.calling, "now", False)


_quiet = _Quiet()


class _Owned(NamedTuple):
    """What a process has made for itself: a fork makes it anew."""

    pid: int
    lock: threading.Lock
    session: Any


class AwsKmsKey(RemoteKey):
    """A symmetric key of AWS KMS; `aws-kms:ARN-or-alias`.

    Credentials are found as by every AWS SDK: environment, profile, role of the machine.

    Args:
        key: An ARN of a key or an alias, `alias/NAME`, or a key's id.  An alias has to stay with
            its key, since its name is what is stored.
        region: Else the ARN's, else `AWS_REGION` or that of the profile.
        profile: Of the AWS configuration files; else `AWS_PROFILE`.
        endpoint_url: Else `AWS_ENDPOINT_URL_KMS`, else AWS.
        timeout: Seconds for each attempt.
        attempts: How often to ask, where asking again may help.

    Raises:
        ConfigurationError: Something of that is missing or cannot be used.
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
        need("aws", "botocore")
        from botocore.exceptions import BotoCoreError

        named = _NAME.fullmatch(key)
        if named is None:
            raise ConfigurationError("a key of AWS KMS is an ARN, alias/NAME or a key id")
        where = (region, profile, endpoint_url)
        super().__init__(f"aws-kms:{key}", *where, timeout=timeout, attempts=attempts)
        self._key = key
        self._profile = profile
        self._endpoint_url = endpoint_url
        self._region = region or named["region"]
        self._owned: _Owned | None = None
        failure = None
        try:
            self._region = self._region or self._default_region()
            with closing(self._client()) as client:
                check_private(client.meta.endpoint_url)
        except BotoCoreError as error:
            failure = type(error).__name__
        if failure is not None:
            raise ConfigurationError(f"the AWS configuration cannot be used ({failure})")

    async def _encrypt(self, plaintext: bytes, associated_data: bytes) -> bytes:
        return await asyncio.to_thread(
            self._call, "encrypt", "CiphertextBlob", associated_data, Plaintext=plaintext
        )

    async def _decrypt(self, sealed: bytes, associated_data: bytes) -> bytes:
        # With the key named, AWS opens nothing that an attacker wrapped with a key of his.
        return await asyncio.to_thread(
            self._call, "decrypt", "Plaintext", associated_data, CiphertextBlob=sealed
        )

    def _call(self, operation: str, answer: str, associated_data: bytes, **data: bytes) -> bytes:
        from botocore.exceptions import BotoCoreError, ClientError

        digest = base64.b64encode(hashlib.sha256(associated_data).digest()).decode()
        _quiet.calling.now = True
        try:
            with closing(self._client()) as client:
                ask = getattr(client, operation)
                said = ask(KeyId=self._key, EncryptionContext={_CONTEXT: digest}, **data)
                return bytes(said[answer])
        except ClientError as error:
            failure = self._refused(error.response)
        except BotoCoreError as error:
            failure = self._broken(error)
        finally:
            _quiet.calling.now = False
        raise failure

    def _refused(self, response: Any) -> Exception:
        code = str(response.get("Error", {}).get("Code"))
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        if code == "InvalidCiphertextException":
            return TamperedError()
        if code == "IncorrectKeyException":
            return WrongKeyError(
                f"root key {self.key_id!r}: AWS KMS wrapped this with another key: if it is an "
                "alias that was moved, move it back"
            )
        if code in _REFUSED:
            what, check = _REFUSED[code]
            return self._failure(f"{what} ({code})", check)
        if code in _RETRYABLE or status == _TOO_MANY or status >= _SERVER_ERROR:
            return self._failure(
                f"AWS KMS cannot answer now ({status})",
                "check its status and quotas",
                retryable=True,
            )
        return self._failure(f"AWS KMS refuses ({status})", "check the kind and state of the key")

    def _broken(self, error: Exception) -> Exception:
        from botocore import exceptions

        name = type(error).__name__
        if isinstance(error, exceptions.SSLError):
            return self._failure(
                f"the certificate of the endpoint is not trusted ({name})", "check AWS_CA_BUNDLE"
            )
        if isinstance(error, exceptions.HTTPClientError | exceptions.ConnectionError):
            return self._unreachable(f"cannot be reached ({name})")
        return self._failure(f"no call could be made ({name})", "check the AWS credentials")

    def _client(self) -> Any:
        from botocore.config import Config

        owned = self._own()
        config = Config(
            connect_timeout=self._timeout,
            read_timeout=self._timeout,
            retries={"total_max_attempts": 1},  # ours come on top
            max_pool_connections=1,
        )
        with owned.lock:
            client = owned.session.create_client(
                "kms", region_name=self._region, endpoint_url=self._endpoint_url, config=config
            )
            for name in list(logging.root.manager.loggerDict):
                if name.startswith("botocore."):
                    logging.getLogger(name).addFilter(_quiet)
        return client

    def _own(self) -> _Owned:
        from botocore.session import Session

        owned = self._owned
        if owned is None or owned.pid != os.getpid():
            owned = _Owned(os.getpid(), threading.Lock(), Session(profile=self._profile))
            self._owned = owned
        return owned

    def _default_region(self) -> str:
        known = self._own().session.get_config_variable("region") or os.environ.get("AWS_REGION")
        if not known:
            raise ConfigurationError("no AWS region is known: give region, or set AWS_REGION")
        return str(known)
