"""What all key services have in common: time-outs, retries, and errors that say what to check."""

import asyncio
import importlib
import random
from abc import abstractmethod
from collections.abc import Awaitable, Callable
from typing import ClassVar
from urllib.parse import urlsplit

from adk_secure_sessions.crypto.key_material import KeyMaterial
from adk_secure_sessions.errors import ConfigurationError, KeyServiceError, TamperedError

TIMEOUT = 5.0  # seconds for each attempt
ATTEMPTS = 3
_PAUSE = 0.25  # seconds after the first attempt; doubled after each, less some jitter
_LONGEST_PAUSE = 2.0
_KEY_ID_LENGTH = 255  # what the column holds


class RemoteKey(KeyMaterial):
    """A root key that never leaves its service, which is asked to encrypt and decrypt.

    Nothing is kept open between two calls: one object serves any event loop, and forked
    processes.  `==` is true of two that would ask the same service for the same key.
    """

    _kind: ClassVar[bytes]  # the first byte of a wrap, authenticated with the rest

    def __init__(self, key_id: str, *where: object, timeout: float, attempts: int) -> None:
        if not 0 < len(key_id) <= _KEY_ID_LENGTH or not key_id.isprintable():
            raise ConfigurationError(f"a key_id has 1 to {_KEY_ID_LENGTH} printable characters")
        if not timeout > 0 or attempts < 1:
            raise ConfigurationError("timeout, in seconds, must be above 0, and attempts above 0")
        self.key_id = key_id
        self._where = where
        self._timeout = timeout
        self._attempts = attempts

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, RemoteKey)
            and type(other) is type(self)
            and (other.key_id, other._where) == (self.key_id, self._where)
        )

    def __hash__(self) -> int:
        return hash(self.key_id)

    async def wrap(self, key: bytes, associated_data: bytes) -> bytes:
        """Have the service encrypt `key`, bound to `associated_data`.

        Raises:
            KeyServiceError: It did not; the text says what to check.
        """
        bound = self._kind + associated_data
        return self._kind + await self._ask(lambda: self._encrypt(key, bound))

    async def unwrap(self, wrapped: bytes, associated_data: bytes) -> bytes:
        """The inverse of `wrap`.

        Raises:
            TamperedError: Another key or place, or an altered value; or `WrongKeyError`.
            KeyServiceError: The service did not answer that; the text says what to check.
        """
        if not wrapped.startswith(self._kind):
            raise TamperedError("not a key wrapped by this kind of key service")
        bound = self._kind + associated_data
        return await self._ask(lambda: self._decrypt(wrapped[1:], bound))

    @abstractmethod
    async def _encrypt(self, plaintext: bytes, associated_data: bytes) -> bytes:
        """Ask once."""

    @abstractmethod
    async def _decrypt(self, sealed: bytes, associated_data: bytes) -> bytes:
        """Ask once."""

    async def _ask(self, once: Callable[[], Awaitable[bytes]]) -> bytes:
        pause = _PAUSE
        for _ in range(self._attempts - 1):
            try:
                return await self._in_time(once)
            except KeyServiceError as error:
                if not error.retryable:
                    raise
            # Jitter: processes that start together must not come back together.
            await asyncio.sleep(pause * random.uniform(0.5, 1))  # noqa: S311
            pause = min(2 * pause, _LONGEST_PAUSE)
        return await self._in_time(once)

    async def _in_time(self, once: Callable[[], Awaitable[bytes]]) -> bytes:
        try:
            async with asyncio.timeout(self._timeout):
                return await once()
        except TimeoutError:
            pass
        raise self._unreachable(f"gave no answer within {self._timeout:g} s")

    def _failure(self, what: str, check: str, *, retryable: bool = False) -> KeyServiceError:
        """*what* and *check* are words of ours: what a service says may hold what it was sent."""
        return KeyServiceError(f"root key {self.key_id!r}: {what}; {check}", retryable=retryable)

    def _unreachable(self, what: str) -> KeyServiceError:
        check = "check its address, the network and its status"
        return self._failure(f"the key service {what}", check, retryable=True)


def need(extra: str, *modules: str) -> None:
    """Import optional libraries, which only those who use them have.

    Raises:
        ConfigurationError: one is missing.
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


def check_private(url: str) -> None:
    """Refuse an address at which keys would cross a network in clear.

    Raises:
        ConfigurationError: neither https, nor http to this machine itself.
    """
    parts = urlsplit(url)
    here = parts.hostname in ("127.0.0.1", "::1", "localhost")
    if not parts.hostname or (parts.scheme != "https" and not (here and parts.scheme == "http")):
        raise ConfigurationError(
            "the address of a key service begins with https://; http:// only leads to this machine"
        )
