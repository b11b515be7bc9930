"""Root keys (key-encryption keys, KEKs), which wrap the master keys.

This module defines the protocol of key providers, and implements it for root keys in memory, in
the environment and in files.

docs/format.md, "Key providers", defines the format of a wrapped key.
"""

import base64
import binascii
import os
import secrets
import stat
from pathlib import Path
from typing import Protocol, runtime_checkable

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from adk_secure_sessions.crypto.aead import KEY_LENGTH, Aes256Gcm
from adk_secure_sessions.crypto.key_material import KeyMaterial
from adk_secure_sessions.errors import ConfigurationError, Reason, TamperedError

RAW_KEY_WRAP = b"\x01"
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
        """The root key's name: 1 to 255 characters.

        The name is stored as plaintext, so it must not contain a secret.
        """
        ...

    async def wrap(self, key: bytes, associated_data: bytes, /) -> bytes:
        """Encrypt `key`, a master key of 32 bytes, and authenticate `associated_data` with it.

        `unwrap` must reject the result if `unwrap` gets other associated data.

        Raises:
            KeyServiceError: The key service failed.
        """
        ...

    async def unwrap(self, wrapped: bytes, associated_data: bytes, /) -> bytes:
        """Return the key in `wrapped`, which `wrap` returned.

        Raises:
            TamperedError: The root key or `associated_data` is wrong, or `wrapped` was modified.
            WrongKeyError: The key service reported that another root key wrapped the key.
            KeyServiceError: The key service failed.
        """
        ...


def generate_key() -> str:
    """Return a new random root key: 32 bytes as base64 text, which every backend accepts."""
    return base64.urlsafe_b64encode(secrets.token_bytes(KEY_LENGTH)).decode()


def parse_key(key: bytes | str) -> bytes:
    """Return 32 key bytes from 32 bytes or from their base64 text, standard or URL-safe.

    Raises:
        ConfigurationError: *key* is anything else; the message does not repeat *key*.
    """
    if isinstance(key, bytes | bytearray) and len(key) == KEY_LENGTH:
        return bytes(key)
    if not isinstance(key, bytes | bytearray | str):
        raise ConfigurationError(
            f"a key must be bytes, base64 text or a key provider, not {type(key).__name__}"
        )
    text = key if isinstance(key, str) else bytes(key).decode("latin-1")
    text = text.strip().rstrip("=").replace("-", "+").replace("_", "/")
    try:
        decoded = base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (ValueError, binascii.Error):
        decoded = None
    if decoded is None:
        raise ConfigurationError(
            "the key is neither 32 bytes nor base64 text; make one with generate_key()"
        )
    if len(decoded) != KEY_LENGTH:
        raise ConfigurationError(
            f"the key must be {KEY_LENGTH} bytes, got {len(decoded)}; make one with generate_key()"
        )
    return decoded


def _derive(key: bytes, purpose: str, length: int) -> bytes:
    # Do not use the root key itself, because its owner may use it with other algorithms, too.
    info = f"adk-secure-sessions/v1/{purpose}".encode()
    return HKDFExpand(SHA256(), length, info).derive(key)


class StaticKey(KeyMaterial):
    """A root key in this process's memory.

    Its `key_id` is `key:` and 16 hexadecimal digits that are derived from the root key.

    Args:
        key: 32 bytes, or their base64 text, standard or URL-safe.

    Raises:
        ConfigurationError: `key` is neither of these; the message does not repeat `key`.
    """

    __slots__ = ("_cipher", "key_id")

    def __init__(self, key: bytes | str) -> None:
        raw = parse_key(key)
        self.key_id: str = f"key:{_derive(raw, 'key-id', 8).hex()}"
        self._cipher = Aes256Gcm(_derive(raw, "wrap", KEY_LENGTH))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StaticKey) and self.key_id == other.key_id

    def __hash__(self) -> int:
        return hash(self.key_id)

    async def wrap(self, key: bytes, associated_data: bytes) -> bytes:
        """Encrypt `key` with AES-256-GCM and a key derived from the root key."""
        return RAW_KEY_WRAP + self._cipher.encrypt(key, RAW_KEY_WRAP + associated_data)

    async def unwrap(self, wrapped: bytes, associated_data: bytes) -> bytes:
        """Return the key in `wrapped`, which `wrap` returned.

        Raises:
            TamperedError: The root key or `associated_data` is wrong, or `wrapped` was modified.
        """
        if not wrapped.startswith(RAW_KEY_WRAP):
            raise TamperedError("not a key wrapped by a static root key", reason=Reason.MALFORMED)
        return self._cipher.decrypt(wrapped[1:], RAW_KEY_WRAP + associated_data)


class EnvironmentKey(StaticKey):
    """A root key as base64 text in the environment variable `name`.

    The variable is read once, when this object is created.

    Raises:
        ConfigurationError: The variable is not set, or does not contain a key.
    """

    def __init__(self, name: str) -> None:
        super().__init__(read_environment(name))


class FileKey(StaticKey):
    """A root key in a file, as 32 bytes or as their base64 text.

    Only the owner of the file may have the permission to read it.

    Raises:
        ConfigurationError: The file cannot be read, other accounts may read or write it, or it
            does not contain a key.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(read_private_file(Path(path)))


def read_environment(name: str) -> str:
    """Return the value of the environment variable *name*.

    Raises:
        ConfigurationError: the variable is not set, or it is empty.
    """
    value = os.environ.get(name)
    if not value:
        raise ConfigurationError(f"the environment variable {name!r} is not set or is empty")
    return value


def read_private_file(path: Path) -> bytes:
    """Return the first 4096 bytes of the file *path*, which holds a secret.

    Raises:
        ConfigurationError: the file cannot be read, or (on POSIX) other accounts may read or write
            it.
    """
    try:
        with path.open("rb") as file:
            # Check the open file: at its path, there may be another file by now.
            status = os.fstat(file.fileno())
            data = file.read(4096)
    except OSError as error:
        raise ConfigurationError(
            f"cannot read the key file {str(path)!r}: {error.strerror}"
        ) from None
    if os.name == "posix" and stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigurationError(
            f"the key file {str(path)!r} can be read or changed by others: chmod 600 it"
        )
    return data
