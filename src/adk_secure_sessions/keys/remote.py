"""The base class of root keys in key services: timeouts, retries, errors, and no debug logs."""

import asyncio
import importlib
import logging
import random
import re
import threading
from abc import abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import suppress
from contextvars import ContextVar, copy_context
from functools import partial
from typing import ClassVar, TypeVar
from urllib.parse import urlsplit

from adk_secure_sessions import telemetry
from adk_secure_sessions.concurrency import context_value
from adk_secure_sessions.errors import (
    ConfigurationError,
    KeyServiceError,
    Reason,
    SecureSessionError,
    TamperedError,
    install_command,
)
from adk_secure_sessions.hiding import hides_locals
from adk_secure_sessions.keys.providers import RootKey, check_key_id

T = TypeVar("T")

TIMEOUT = 5.0  # seconds for each attempt
_MAX_TIMEOUT = 3600.0  # seconds; the libraries cannot use much higher values
ATTEMPTS = 3
# The names of the loggers of the libraries that our providers call directly or indirectly.
_LOGGERS = (
    "botocore",
    "google",
    "grpc",
    "hpack",
    "httpcore",
    "httpx",
    "pkcs11",
    "requests",
    "urllib3",
)
# The host and the port in a URL, without a user name.
_AUTHORITY = r"(\[[0-9A-Fa-f:.]+\]|[^][@:\\\s]+)(:[0-9]*)?"
# The threads of `in_daemon_thread` whose callers were cancelled; how many may run at the same time.
_abandoned: list[threading.Thread] = []
_MAX_ABANDONED = 100
_is_calling: ContextVar[bool] = ContextVar("adk_secure_sessions_is_calling", default=False)


def _log_filter(record: logging.LogRecord) -> bool:
    """Remove secrets from the messages that libraries log in our calls.

    Debug messages may contain plaintext keys.  The traceback of an error leads to local variables,
    which error reporters record.
    """
    if not _is_calling.get():
        return True
    record.exc_info = None
    return record.levelno > logging.DEBUG


@hides_locals
class RemoteKey(RootKey):
    """A root key in a key service, which encrypts and decrypts with this key on request.

    No connection stays open between two calls, so an object can be used in several event loops and
    in forked processes.  Two objects are equal if they name the same key of the same service.
    """

    # The limit of the pause before the second attempt, in seconds.  The limit doubles before each
    # further attempt, up to `longest_pause`.  A pause has a random length, at least half its limit.
    pause: ClassVar[float] = 0.25
    longest_pause: ClassVar[float] = 2.0
    _kind: ClassVar[bytes]  # the first byte of a wrapped key, authenticated with the rest

    def __init__(self, key_id: str, *address: object, timeout: float, attempts: int) -> None:
        check_key_id(key_id)
        if not 0 < timeout <= _MAX_TIMEOUT or attempts < 1:
            raise ConfigurationError(
                f"timeout must be above 0 and at most {_MAX_TIMEOUT:.0f} seconds, and attempts "
                "above 0"
            )
        self.key_id = key_id
        self._address = address
        self._timeout = timeout
        self._attempts = attempts

    def _equality_key(self) -> tuple[object, ...]:
        return type(self), self.key_id, self._address

    async def wrap(self, key: bytes, associated_data: bytes) -> bytes:
        """Encrypt `key` in the key service, and bind the result to `associated_data`."""
        context = self._kind + associated_data
        return self._kind + await self._with_retries("wrap", lambda: self._encrypt(key, context))

    async def unwrap(self, wrapped: bytes, associated_data: bytes) -> bytes:
        """Return the key in `wrapped`, which `wrap` returned."""
        if not wrapped.startswith(self._kind):
            raise TamperedError(
                "not a key wrapped by this kind of key service", reason=Reason.MALFORMED
            )
        context = self._kind + associated_data
        return await self._with_retries("unwrap", lambda: self._decrypt(wrapped[1:], context))

    @abstractmethod
    async def _encrypt(self, plaintext: bytes, associated_data: bytes) -> bytes:
        """Call the service once to encrypt *plaintext*; `wrap` retries temporary errors."""

    @abstractmethod
    async def _decrypt(self, sealed: bytes, associated_data: bytes) -> bytes:
        """Call the service once to decrypt *sealed*; `unwrap` retries temporary errors."""

    async def _with_retries(
        self, operation: str, call_once: Callable[[], Awaitable[bytes]]
    ) -> bytes:
        call = partial(self._with_timeout, call_once)
        attempt = partial(telemetry.key_service_call, type(self).__name__, operation, call)
        pause = self.pause
        for _ in range(self._attempts - 1):
            try:
                return await attempt()
            except KeyServiceError as error:
                if not error.retryable:
                    raise
            # A random pause, so that processes that start together do not retry together.
            await asyncio.sleep(pause * random.uniform(0.5, 1))  # noqa: S311
            pause = min(2 * pause, self.longest_pause)
        return await attempt()

    async def _with_timeout(self, call_once: Callable[[], Awaitable[bytes]]) -> bytes:
        _silence_libraries()
        try:
            with context_value(_is_calling, True):
                async with asyncio.timeout(self._timeout):
                    return await call_once()
        except SecureSessionError:
            raise
        except TimeoutError:
            raise self._unreachable_error(f"gave no answer within {self._timeout:g} s") from None
        except Exception as error:
            # The subclasses handle the errors that the libraries document.  Settings, proxies and
            # answers that nobody expected lead to others, which may contain the key.
            raise self._error(
                f"the call failed ({type(error).__name__})",
                "check the address, the credentials, and the proxy settings",
            ) from None

    def _error(self, cause: str, advice: str, *, retryable: bool = False) -> KeyServiceError:
        """Return an error without the text of the service's answer, which may contain a key."""
        return KeyServiceError(f"root key {self.key_id!r}: {cause}; {advice}", retryable=retryable)

    def _known_error(self, name: str, cause: str, advice: str) -> KeyServiceError:
        """Return the error for one that the key service calls *name*."""
        return self._error(f"{cause} ({name})", advice)

    def _other_error(self, service: str, code: object, *, retryable: bool) -> KeyServiceError:
        """Return the error for an answer of *service* with a *code* that has no advice."""
        if retryable:
            cause, advice = "cannot answer now", "check its status and quotas"
        else:
            cause, advice = "rejects the call", "check the kind and state of the key"
        return self._error(f"{service} {cause} ({code})", advice, retryable=retryable)

    def _unreachable_error(self, cause: str) -> KeyServiceError:
        advice = "check its address, the network and its status"
        return self._error(f"the key service {cause}", advice, retryable=True)


def _silence_libraries() -> None:
    """Add `_log_filter` to every logger of the libraries in `_LOGGERS`.

    A filter does not apply to child loggers, so each logger needs it.
    """
    for name in list(logging.root.manager.loggerDict):
        if name.partition(".")[0] in _LOGGERS:
            logging.getLogger(name).addFilter(_log_filter)


async def in_daemon_thread(call: Callable[[], T]) -> T:
    """Run *call*, which blocks, in a thread, and return its result.

    If the caller is cancelled or closed, the thread runs on, and its result is discarded.  If very
    many such threads have not ended, raise TimeoutError.

    The threads of `asyncio.to_thread` would have three faults.  A few of them that never end would
    block all other users of `asyncio.to_thread`.  The process would not exit before they end.  The
    debug log of asyncio contains the arguments and the result, which may be keys.
    """
    _abandoned[:] = [thread for thread in _abandoned if thread.is_alive()]
    if len(_abandoned) >= _MAX_ABANDONED:
        raise TimeoutError
    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    results: list[T] = []
    errors: list[BaseException] = []

    def end() -> None:
        if not ended.done():
            ended.set_result(None)

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)
        with suppress(RuntimeError):  # the event loop was closed meanwhile
            loop.call_soon_threadsafe(end)

    context = copy_context()
    thread = threading.Thread(target=context.run, args=(run,), daemon=True, name="key service")
    thread.start()
    try:
        await ended
    except BaseException:
        _abandoned.append(thread)
        raise
    if errors:
        raise errors.pop()
    return results[0]


def require(extra: str, *modules: str, user: str = "this key") -> None:
    """Import *modules*, which the optional dependencies named *extra* install and *user* needs."""
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError:
            needed = f"{user} needs {module}: {install_command(extra)}"
            raise ConfigurationError(needed) from None


def is_plain_http(url: str) -> bool:
    """Return whether *url* is an address without TLS.  Callers use no proxy for such an address.

    A proxy for plain HTTP can read the keys.  A proxy for TLS only forwards encrypted bytes.
    """
    return urlsplit(url).scheme != "https"


def check_transport(url: str, service: str = "a key service") -> None:
    """Reject the address of *service* if secrets would be sent over a network unencrypted.

    The address must be an https:// URL, or an http:// URL of this machine.
    """
    try:
        parts = urlsplit(url)
        # Some libraries connect to another host than the one that `urlsplit` finds if this part has
        # a backslash.  Some log a password in it.
        if parts.port == 0 or not re.fullmatch(_AUTHORITY, parts.netloc) or not url.isprintable():
            raise ValueError
    except ValueError:  # also of `urlsplit` or of `port`
        raise ConfigurationError(
            f"the address of {service} does not have the form https://HOST:PORT/PATH"
        ) from None
    here = parts.hostname in ("127.0.0.1", "::1", "localhost")
    if not parts.hostname or (parts.scheme != "https" and not (here and parts.scheme == "http")):
        raise ConfigurationError(
            f"the address of {service} begins with https://; http:// is only for this machine"
        )
