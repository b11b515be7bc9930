"""Root keys (key-encryption keys, KEKs), which wrap the master keys.

This module defines the protocol of key providers, and implements it for root keys in memory, in
the environment and in files.

docs/format.md, "Key providers", defines the format of a wrapped key.
"""

import base64
import os
import secrets
import stat
import sys
from contextlib import suppress
from pathlib import Path
from typing import Protocol, runtime_checkable

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from adk_secure_sessions.crypto.aead import KEY_LENGTH, Aes256Gcm
from adk_secure_sessions.errors import ConfigurationError, Reason, TamperedError
from adk_secure_sessions.formats.records import is_unicode
from adk_secure_sessions.hiding import HoldsSecrets, hides_locals

_KIND = b"\x01"  # the first byte of a wrapped key
MAX_KEY_ID_LENGTH = 255  # characters: the width of the column `root_key_id`
_STATIC_KEY = "key:"
PLAINTEXT_ROOT_KEY_ID = "none"  # `NoOpBackend` has no root key and stores master keys as plaintext


@runtime_checkable
class KeyProvider(Protocol):
    """Wraps and unwraps master keys with one root key, which is in memory or in a key service.

    To write your own provider, create a class with these attributes; it need not inherit from this
    class.  Test your class with `adk_secure_sessions.testing.check_key_provider`.

    `EncryptedSessionService` calls the provider a few times when a process starts.  Several of
    these calls may run at the same time.  A process may also use the provider in several event
    loops, one after another.
    """

    @property
    def key_id(self) -> str:
        """The name of the root key, 1 to 255 characters.

        The database stores the name as plaintext, so the name must not contain a secret.
        """

    async def wrap(self, key: bytes, associated_data: bytes, /) -> bytes:
        """Encrypt `key`, a master key of 32 bytes, and bind the result to `associated_data`.

        `unwrap` must reject the result if it is called with other associated data.

        Raises:
            KeyServiceError: The key service failed.
        """

    async def unwrap(self, wrapped: bytes, associated_data: bytes, /) -> bytes:
        """Return the key in `wrapped`, which `wrap` returned.

        Raises:
            TamperedError: The root key or `associated_data` is wrong, or `wrapped` was modified.
            WrongKeyError: The key service reported that another root key wrapped the key.
            KeyServiceError: The key service failed.
        """


def check_key_id(key_id: object) -> None:
    """Check the id that a provider other than `StaticKey` gives its root key."""
    if not (
        isinstance(key_id, str) and 0 < len(key_id) <= MAX_KEY_ID_LENGTH and key_id.isprintable()
    ):
        raise ConfigurationError(f"a key_id has 1 to {MAX_KEY_ID_LENGTH} printable characters")
    if key_id == PLAINTEXT_ROOT_KEY_ID or key_id.startswith(_STATIC_KEY):
        raise ConfigurationError(
            f"the key_id {key_id!r} is reserved for another kind of root key: it must not be "
            f"{PLAINTEXT_ROOT_KEY_ID!r} and must not begin with {_STATIC_KEY!r}"
        )


def generate_key() -> str:
    """Return a new random root key: 32 bytes as base64 text, which every backend accepts."""
    return base64.urlsafe_b64encode(secrets.token_bytes(KEY_LENGTH)).decode()


@hides_locals
def parse_key(key: bytes | str) -> bytes:
    """Return the 32 bytes of *key*: 32 bytes or their base64 text, standard or URL-safe."""
    if isinstance(key, bytes | bytearray) and len(key) == KEY_LENGTH:
        return bytes(key)
    if not isinstance(key, bytes | bytearray | str):
        raise ConfigurationError(
            "a key must be 32 bytes, base64 text, a key spec or a key provider, "
            f"not {type(key).__name__}"
        )
    text = key if isinstance(key, str) else bytes(key).decode("latin-1")
    text = text.strip().rstrip("=").replace("-", "+").replace("_", "/")
    try:
        decoded = base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except ValueError:
        raise ConfigurationError(
            "the key is neither 32 bytes nor base64 text; make one with generate_key()"
        ) from None
    if len(decoded) != KEY_LENGTH:
        raise ConfigurationError(
            f"the key must be {KEY_LENGTH} bytes, got {len(decoded)}; make one with generate_key()"
        )
    return decoded


def _derive(key: bytes, purpose: str, length: int) -> bytes:
    # Do not encrypt with the root key itself: the application may use the same key elsewhere.
    info = f"adk-secure-sessions/v1/{purpose}".encode()
    return HKDFExpand(SHA256(), length, info).derive(key)


class RootKey(HoldsSecrets):
    """Base class of the root keys of this package: two are equal if `_equality_key` is."""

    __slots__ = ()
    key_id: str

    def _equality_key(self) -> tuple[object, ...]:
        """Return a value that only equal root keys have."""
        return (self.key_id,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RootKey) and self._equality_key() == other._equality_key()

    def __hash__(self) -> int:
        return hash(self.key_id)


@hides_locals
class StaticKey(RootKey):
    """A root key in the memory of this process.

    `key_id` is the text `key:`, followed by 16 hexadecimal digits that are derived from the root
    key.

    Args:
        key: 32 bytes, or their base64 text, standard or URL-safe.

    Raises:
        ConfigurationError: `key` is neither of these; the message does not repeat `key`.
    """

    __slots__ = ("_cipher", "key_id")

    def __init__(self, key: bytes | str) -> None:
        raw = parse_key(key)
        self.key_id: str = f"{_STATIC_KEY}{_derive(raw, 'key-id', 8).hex()}"
        self._cipher = Aes256Gcm(_derive(raw, "wrap", KEY_LENGTH))

    async def wrap(self, key: bytes, associated_data: bytes) -> bytes:
        """Encrypt `key` with AES-256-GCM and a key derived from the root key."""
        return _KIND + self._cipher.encrypt(key, _KIND + associated_data)

    async def unwrap(self, wrapped: bytes, associated_data: bytes) -> bytes:
        """Return the key in `wrapped`, which `wrap` returned."""
        if not wrapped.startswith(_KIND):
            raise TamperedError("not a key wrapped by a static root key", reason=Reason.MALFORMED)
        return self._cipher.decrypt(wrapped[1:], _KIND + associated_data)


@hides_locals
class EnvironmentKey(StaticKey):
    """A root key as base64 text in the environment variable `name`.

    The variable is read once, when this object is created.

    Raises:
        ConfigurationError: The variable is not set, or does not contain a key.
    """

    def __init__(self, name: str) -> None:
        super().__init__(read_environment(name))


@hides_locals
class FileKey(StaticKey):
    """A root key in a file, as 32 bytes or as their base64 text.

    On POSIX, the owner of the file must be root or the user of this process, and no other account
    may have permission to read or write the file.

    Raises:
        ConfigurationError: The file cannot be read, is not a regular file or does not contain a
            key.  On POSIX: the file belongs to another account, or other accounts may read or write
            it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(read_private_file(Path(path)))


def read_environment(name: str) -> str:
    """Return the value of the environment variable *name*; reject an empty value."""
    check_utf8(name, "the name of an environment variable")
    value = os.environ.get(name)
    if not value:
        # Do not quote a secret that was given in place of a name, such as `env:$KEY` in a shell.
        shown = repr(name) if name.isupper() else "in the key spec"
        raise ConfigurationError(f"the environment variable {shown} is not set or is empty")
    check_utf8(value, f"the environment variable {name!r}")
    return value


def check_utf8(secret: str, name: str) -> None:
    """Check that *secret* can be encoded as UTF-8; *name* says what it is.

    Bytes that are not UTF-8 become surrogates in a variable or an argument.  Without this check, a
    library would raise UnicodeEncodeError, which contains the text.
    """
    if not is_unicode(secret):
        raise ConfigurationError(f"{name} is not text in UTF-8")


def read_private_file(path: Path) -> bytes:
    """Return the first 4096 bytes of the regular file *path*, which contains a secret.

    On POSIX, its owner must be root or the user of this process, and nobody else may read or write
    it.
    """
    name = repr(str(path))
    with suppress(ConfigurationError):
        parse_key(str(path))
        name = "(its name is a key)"
    try:
        # Without O_NONBLOCK, opening a named pipe (FIFO) would wait until a process writes to it.
        # Without O_BINARY, Windows would change line ends.
        flags = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        file = os.open(path, os.O_RDONLY | flags)
        try:
            # Check the open file, not the path: another process may have replaced the file since.
            fault = _fault(name, os.fstat(file))
            if fault is None:
                return os.read(file, 4096)
        finally:
            os.close(file)
    except (OSError, ValueError) as error:  # ValueError: the path has a null byte
        fault = f"cannot read the key file {name}: {getattr(error, 'strerror', 'invalid path')}"
    raise ConfigurationError(fault)


def _fault(name: str, status: os.stat_result) -> str | None:
    """Return why the file *name* must not contain a secret; None if nothing is wrong."""
    if not stat.S_ISREG(status.st_mode):
        return f"the key file {name} is not a regular file"
    if sys.platform != "win32":  # on Windows, the mode does not contain the access rights
        if status.st_uid not in (0, os.geteuid()):
            return (
                f"the key file {name} belongs to another user (uid {status.st_uid}), who can "
                "replace the key: chown it to the user of this process"
            )
        if stat.S_IMODE(status.st_mode) & 0o077:
            return f"the key file {name} can be read or changed by others: chmod 600 it"
    return None
