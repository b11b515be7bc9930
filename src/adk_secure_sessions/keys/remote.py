"""The base class of root keys in key services: timeouts, retries, and errors with advice."""

import asyncio
import importlib
import random
from abc import abstractmethod
from collections.abc import Awaitable, Callable
from typing import ClassVar
from urllib.parse import urlsplit

from adk_secure_sessions.crypto.key_material import KeyMaterial
from adk_secure_sessions.errors import ConfigurationError, KeyServiceError, Reason, TamperedError

TIMEOUT = 5.0  # seconds for each attempt
ATTEMPTS = 3
_KEY_ID_LENGTH = 255  # characters: the width of the column `root_key_id`


class RemoteKey(KeyMaterial):
    """A root key in a key service, which encrypts and decrypts with the key on request.

    No connection stays open between two calls, so one object works in every event loop and in
    forked processes.  Two objects are equal if they name the same key of the same service.

    Attributes:
        pause: The upper limit of the pause before the second attempt, in seconds.  The limit
            doubles for each further attempt.  A pause is random: at least half of the limit.
        longest_pause: The highest value of that limit, in seconds.
    """

    pause: ClassVar[float] = 0.25
    longest_pause: ClassVar[float] = 2.0
    _kind: ClassVar[bytes]  # the first byte of a wrapped key, authenticated with the rest

    def __init__(self, key_id: str, *address: object, timeout: float, attempts: int) -> None:
        if not 0 < len(key_id) <= _KEY_ID_LENGTH or not key_id.isprintable():
            raise ConfigurationError(f"a key_id has 1 to {_KEY_ID_LENGTH} printable characters")
        if not timeout > 0 or attempts < 1:
            raise ConfigurationError("timeout (in seconds) and attempts must be above 0")
        self.key_id = key_id
        self._address = address
        self._timeout = timeout
        self._attempts = attempts

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, RemoteKey)
            and type(other) is type(self)
            and (other.key_id, other._address) == (self.key_id, self._address)
        )

    def __hash__(self) -> int:
        return hash(self.key_id)

    async def wrap(self, key: bytes, associated_data: bytes) -> bytes:
        """Encrypt `key` in the key service, which also authenticates `associated_data`.

        Raises:
            KeyServiceError: The service failed; the message says what to check.
        """
        bound = self._kind + associated_data
        return self._kind + await self._with_retries(lambda: self._encrypt(key, bound))

    async def unwrap(self, wrapped: bytes, associated_data: bytes) -> bytes:
        """Return the key in `wrapped`, which `wrap` returned.

        Raises:
            TamperedError: The root key or `associated_data` is wrong, or `wrapped` was modified.
            WrongKeyError: The service reported that another root key wrapped the key.
            KeyServiceError: The service failed; the message says what to check.
        """
        if not wrapped.startswith(self._kind):
            raise TamperedError(
                "not a key wrapped by this kind of key service", reason=Reason.MALFORMED
            )
        bound = self._kind + associated_data
        return await self._with_retries(lambda: self._decrypt(wrapped[1:], bound))

    @abstractmethod
    async def _encrypt(self, plaintext: bytes, associated_data: bytes) -> bytes:
        """Call the service once to encrypt *plaintext*; `wrap` calls this again after an error."""

    @abstractmethod
    async def _decrypt(self, sealed: bytes, associated_data: bytes) -> bytes:
        """Call the service once to decrypt *sealed*; `unwrap` calls this again after an error."""

    async def _with_retries(self, call_once: Callable[[], Awaitable[bytes]]) -> bytes:
        pause = self.pause
        for _ in range(self._attempts - 1):
            try:
                return await self._with_timeout(call_once)
            except KeyServiceError as error:
                if not error.retryable:
                    raise
            # A random pause, so that processes that start together do not retry together.
            await asyncio.sleep(pause * random.uniform(0.5, 1))  # noqa: S311
            pause = min(2 * pause, self.longest_pause)
        return await self._with_timeout(call_once)

    async def _with_timeout(self, call_once: Callable[[], Awaitable[bytes]]) -> bytes:
        try:
            async with asyncio.timeout(self._timeout):
                return await call_once()
        except TimeoutError:
            pass
        raise self._unreachable(f"gave no answer within {self._timeout:g} s")

    def _failure(self, what: str, check: str, *, retryable: bool = False) -> KeyServiceError:
        """Return an error that does not quote the service, whose text may repeat a key."""
        return KeyServiceError(f"root key {self.key_id!r}: {what}; {check}", retryable=retryable)

    def _unreachable(self, what: str) -> KeyServiceError:
        check = "check its address, the network and its status"
        return self._failure(f"the key service {what}", check, retryable=True)


def require(extra: str, *modules: str) -> None:
    """Import *modules*, to check that the optional dependencies named *extra* are installed.

    Raises:
        ConfigurationError: a module cannot be imported.
    """
    missing = None
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError:
            missing = missing or module
    if missing is not None:
        raise ConfigurationError(
            f"this key needs {missing}: pip install 'adk-secure-sessions[{extra}]'"
        )


def check_transport(url: str) -> None:
    """Reject the address of a key service if keys would cross a network unencrypted.

    Raises:
        ConfigurationError: *url* is neither https nor http to this machine.
    """
    parts = urlsplit(url)
    here = parts.hostname in ("127.0.0.1", "::1", "localhost")
    if not parts.hostname or (parts.scheme != "https" and not (here and parts.scheme == "http")):
        raise ConfigurationError(
            "the address of a key service begins with https://; http:// is only for this machine"
        )
