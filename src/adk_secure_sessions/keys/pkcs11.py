"""Root keys in a hardware security module (HSM), through PKCS#11.

docs/format.md, "Key providers", defines the format of a wrapped key.
"""

import os
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from adk_secure_sessions.concurrency import ThreadLock
from adk_secure_sessions.crypto.aead import GCM_TAG_LENGTH, KEY_LENGTH, NONCE_LENGTH
from adk_secure_sessions.errors import ConfigurationError, KeyServiceError, Reason, TamperedError
from adk_secure_sessions.hiding import hides_locals
from adk_secure_sessions.keys.providers import check_utf8, read_environment, read_private_file
from adk_secure_sessions.keys.remote import ATTEMPTS, TIMEOUT, RemoteKey, in_daemon_thread, require

# Maps an error of python-pkcs11 to the cause and the advice in our error.  An error is named by its
# class, or if it has no class of its own, by its code: vendors define codes, too.
_UNMAPPED = "Unmapped error code (0x[0-9a-f]+)"
_INITIALIZED = "already initialized"  # a part of the text for CKR_CRYPTOKI_ALREADY_INITIALIZED
_ADVICE = {
    "MechanismInvalid": ("the module has no AES-GCM", "use a module with CKM_AES_GCM"),
    "MechanismParamInvalid": (
        "the module rejects a nonce that its caller chose",
        "use a module that accepts nonces for AES-GCM",
    ),
    "MultipleTokensReturned": ("several tokens have this label", "give each a different label"),
    "NoSuchToken": ("no token has this label", "check the label, and that the token is plugged in"),
    "PinExpired": ("the PIN has expired", "set a new PIN"),
    "PinInvalid": ("the PIN has characters that the token rejects", "correct it"),
    "PinLenRange": ("the PIN is too short or too long", "correct it"),
    "PinIncorrect": ("the PIN is wrong", "correct it: tokens lock after a few wrong PINs"),
    "PinTooWeak": ("the PIN is too weak", "set a new PIN"),
    "UserPinNotInitialized": ("the token has no PIN yet", "set the PIN of its user"),
    "FunctionRejected": ("the token rejects the call", "check the PIN and the token's policies"),
    "PinLocked": ("the PIN is locked", "have the security officer unlock it"),
}
_NOT_ALLOWED = (
    "the key may not be used",
    "check that it has CKA_ENCRYPT and CKA_DECRYPT, and is for this user",
)
_KEY_FUNCTION_NOT_PERMITTED = "0x68"
_ADVICE |= dict.fromkeys(
    (_KEY_FUNCTION_NOT_PERMITTED, "KeyTypeInconsistent", "UserNotLoggedIn"), _NOT_ALLOWED
)


class _Module:
    """A vendor's PKCS#11 library, which all `Pkcs11Key` objects with the same path share.

    A process loads the library once.  A forked process initializes the library again.  Only one
    thread may use the library at a time, because python-pkcs11 initializes the library without the
    flag CKF_OS_LOCKING_OK: the library then does no locking of its own.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.pid: int | None = None  # of the process that has initialized the library
        self.failed = False  # whether `held` must initialize the library again
        self.one_thread = ThreadLock()

    @contextmanager
    def held(self, seconds: float) -> Iterator[Any]:
        """Lock the library for this thread, initialize the library if needed, and yield it.

        If another thread has locked the library for longer than *seconds*, raise TimeoutError.
        """
        import pkcs11

        if not self.one_thread.lock.acquire(timeout=seconds):
            raise TimeoutError
        try:
            library = pkcs11.lib(self.path)
            # Initialize the library again in a forked process, and after a failure: many libraries
            # notice a reconnected token or server only when they are initialized.
            if self.failed or self.pid not in (None, os.getpid()):
                try:
                    library.finalize()
                except pkcs11.PKCS11Error:
                    pass
                library.initialize()
            self.pid, self.failed = os.getpid(), False
            yield library
        finally:
            self.one_thread.lock.release()


_modules: dict[str, _Module] = {}


@hides_locals
class Pkcs11Key(RemoteKey):
    """An AES-256 key that cannot be extracted from its token; key spec `pkcs11:TOKEN/LABEL`.

    In PKCS#11, a token is the device, or the part of a device, that stores the key.  Each call
    opens a PKCS#11 session and closes it, so the token may be unplugged between two calls.

    Args:
        key: The label of the token and the label of the key, as `TOKEN/LABEL`.
        module: The path of the vendor's library; by default `PKCS11_MODULE`.
        pin: The PIN of the token's user; by default from `pin_file`, then `PKCS11_PIN`, then from
            the file that `PKCS11_PIN_FILE` names.
        pin_file: A file with the PIN, which only the file's owner may read.
        key_id: The name of the root key, stored as plaintext with each wrapped key; by default
            `pkcs11:` followed by `key`.
        timeout: The time limit of each attempt, in seconds.
        attempts: The maximum number of attempts for one call, if the errors are temporary.

    Raises:
        ConfigurationError: An argument is missing or cannot be used, or the extra `pkcs11` is not
            installed.
    """

    _kind = b"\x06"

    def __init__(
        self,
        key: str,
        *,
        module: str | os.PathLike[str] | None = None,
        pin: str | None = None,
        pin_file: str | os.PathLike[str] | None = None,
        key_id: str | None = None,
        timeout: float = TIMEOUT,
        attempts: int = ATTEMPTS,
    ) -> None:
        require("pkcs11", "pkcs11")
        self._token, _, self._label = key.partition("/")
        if not self._token or not self._label:
            raise ConfigurationError("a key in a token is written TOKEN/LABEL")
        path = os.fspath(module) if module is not None else read_environment("PKCS11_MODULE")
        super().__init__(key_id or f"pkcs11:{key}", path, key, timeout=timeout, attempts=attempts)
        # python-pkcs11 crashes if an attribute cannot be encoded.
        check_utf8(key, "the name of the key")
        check_utf8(path, "the path of the library")
        self._module = _modules.setdefault(path, _Module(path))
        self._pin = pin or _find_pin(pin_file)
        check_utf8(self._pin, "the PIN")
        self._pin_error: str | None = None  # a key of `_ADVICE`, if the token rejected the PIN

    async def _encrypt(self, plaintext: bytes, associated_data: bytes) -> bytes:
        return await in_daemon_thread(lambda: self._use_key(_encrypt, plaintext, associated_data))

    async def _decrypt(self, sealed: bytes, associated_data: bytes) -> bytes:
        return await in_daemon_thread(lambda: self._use_key(_decrypt, sealed, associated_data))

    def _use_key(self, use: Callable[[Any, bytes, bytes], bytes], *data: bytes) -> bytes:
        import pkcs11

        is_open = False
        try:
            with self._module.held(self._timeout) as library:
                # A token locks after a few wrong PINs, so do not try a rejected PIN again.
                if self._pin_error is not None:
                    raise self._known_error(self._pin_error, *_ADVICE[self._pin_error])
                try:
                    with _session(library.get_token(token_label=self._token), self._pin) as session:
                        is_open = True
                        return use(self._find_key(session), *data)
                except pkcs11.PKCS11Error as error:
                    # Inside of `held`: the thread that waits for it must not try the PIN again.
                    raise self._token_error(error, at_login=not is_open) from None
        except pkcs11.PKCS11Error as error:
            raise self._token_error(error, at_login=False) from None

    def _find_key(self, session: Any) -> Any:
        from pkcs11 import Attribute, KeyType, ObjectClass

        template = {
            Attribute.CLASS: ObjectClass.SECRET_KEY,
            Attribute.KEY_TYPE: KeyType.AES,
            Attribute.LABEL: self._label,
        }
        keys = [*session.get_objects(template)]
        if len(keys) != 1:
            raise self._error(f"{len(keys)} AES keys have this label", "it must be exactly one")
        (key,) = keys
        if key[Attribute.EXTRACTABLE] or not key[Attribute.SENSITIVE]:
            raise self._error(
                "the key can be extracted from its token",
                "make a key that is CKA_SENSITIVE and not CKA_EXTRACTABLE",
            )
        if not (key[Attribute.ENCRYPT] and key[Attribute.DECRYPT]):
            raise self._error(*_NOT_ALLOWED)
        if key.key_length != 8 * KEY_LENGTH:
            raise self._error(
                f"the key has {key.key_length} bits", f"use a {8 * KEY_LENGTH}-bit key"
            )
        return key

    def _token_error(self, error: Exception, *, at_login: bool) -> KeyServiceError:
        unmapped = re.fullmatch(_UNMAPPED, str(error))
        name = unmapped[1] if unmapped else type(error).__name__
        if _INITIALIZED in str(error):
            return self._error(
                f"other code of this process has initialized the library {self._module.path!r}",
                "let that code use python-pkcs11 and the same path, or use another process",
            )
        if name == "PKCS11Error" and self._module.pid is None:
            return self._error(
                f"the library {self._module.path!r} cannot be loaded", "check module, PKCS11_MODULE"
            )
        if name in _ADVICE:
            if "Pin" in name:
                self._pin_error = name
            return self._known_error(name, *_ADVICE[name])
        self._module.failed = True
        return self._error(
            f"the token failed ({name})",
            "check that it is plugged in and works",
            # At a login, the code of a vendor may be about the PIN.
            retryable=unmapped is None or not at_login,
        )


def _session(token: Any, pin: str) -> Any:
    from pkcs11.exceptions import UserAlreadyLoggedIn

    try:
        return token.open(user_pin=pin)
    except UserAlreadyLoggedIn:
        # Other code of this process has logged in.  A login is valid for the whole process.
        return token.open()


def _encrypt(key: Any, plaintext: bytes, associated_data: bytes) -> bytes:
    nonce = secrets.token_bytes(NONCE_LENGTH)
    return nonce + bytes(key.encrypt(plaintext, **_gcm(nonce, associated_data)))


def _decrypt(key: Any, sealed: bytes, associated_data: bytes) -> bytes:
    from pkcs11 import PKCS11Error

    if len(sealed) < NONCE_LENGTH + GCM_TAG_LENGTH:
        raise TamperedError("not a key wrapped by a token", reason=Reason.MALFORMED)
    nonce, body = sealed[:NONCE_LENGTH], sealed[NONCE_LENGTH:]
    try:
        return bytes(key.decrypt(body, **_gcm(nonce, associated_data)))
    except PKCS11Error:
        pass
    # Some tokens report every failure as "general error".  To distinguish a failed token from a
    # modified key, encrypt and decrypt zeros: a failed token raises an error again.  It may also
    # have failed for a moment only, so decrypt the key once more.
    probe = _encrypt(key, bytes(NONCE_LENGTH), b"")
    key.decrypt(probe[NONCE_LENGTH:], **_gcm(probe[:NONCE_LENGTH], b""))
    try:
        return bytes(key.decrypt(body, **_gcm(nonce, associated_data)))
    except PKCS11Error:
        raise TamperedError() from None


def _gcm(nonce: bytes, associated_data: bytes) -> dict[str, Any]:
    from pkcs11 import GCMParams, Mechanism

    parameters = GCMParams(nonce, associated_data, 8 * GCM_TAG_LENGTH)
    return {"mechanism": Mechanism.AES_GCM, "mechanism_param": parameters}


def _find_pin(file: str | os.PathLike[str] | None) -> str:
    if file is None and not os.environ.get("PKCS11_PIN"):
        file = os.environ.get("PKCS11_PIN_FILE")
    if not file:
        return read_environment("PKCS11_PIN")
    try:
        if pin := read_private_file(Path(file)).decode().strip():
            return pin
    except UnicodeDecodeError:
        pass
    raise ConfigurationError(f"the file {os.fspath(file)!r} does not hold a PIN as text")
