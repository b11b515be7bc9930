"""Root keys: who wraps the master keys, and where that key comes from.

Format of a wrapped key: docs/format.md, "Key providers".
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
from adk_secure_sessions.errors import ConfigurationError, TamperedError

RAW_KEY_WRAP = b"\x01"
PLAINTEXT_ROOT_KEY_ID = "none"  # of `NoOpBackend`: the master keys are stored as plaintext


@runtime_checkable
class KeyProvider(Protocol):
    """Holds one root key, or speaks for it; called a few times per process start.

    Anyone may write one; it need not inherit from this class.  `check_key_provider`, of
    `adk_secure_sessions.testing`, tries it out.  Calls are made several at once, and from one
    event loop after the other.
    """

    @property
    def key_id(self) -> str:
        """Names the root key, without secrets, up to 255 characters; stored in clear."""
        ...

    async def wrap(self, key: bytes, associated_data: bytes, /) -> bytes:
        """Encrypt a master key of 32 bytes; it opens only with the same `associated_data`.

        Raises:
            KeyServiceError: The key service failed.
        """
        ...

    async def unwrap(self, wrapped: bytes, associated_data: bytes, /) -> bytes:
        """The inverse of `wrap`.

        Raises:
            WrongKeyError: `wrapped` is not of this root key and place; or `TamperedError`.
            KeyServiceError: The key service failed.
        """
        ...


def generate_key() -> str:
    """Return a new random root key: 32 bytes as base64 text, which every backend takes."""
    return base64.urlsafe_b64encode(secrets.token_bytes(KEY_LENGTH)).decode()


def parse_key(key: bytes | str) -> bytes:
    """Return 32 key bytes from 32 bytes or from their base64 text, standard or URL-safe.

    Raises:
        ConfigurationError: anything else; the message never repeats the key.
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
    # Never the caller's bytes themselves: they may serve another algorithm elsewhere.
    info = f"adk-secure-sessions/v1/{purpose}".encode()
    return HKDFExpand(SHA256(), length, info).derive(key)


class StaticKey(KeyMaterial):
    """A root key in the process; its `key_id` is `key:` and 16 hex digits, derived from it.

    Args:
        key: 32 bytes, or their base64 text, standard or URL-safe.

    Raises:
        ConfigurationError: It is neither; the message does not repeat it.
    """

    __slots__ = ("_cipher", "key_id")

    def __init__(self, key: bytes | str) -> None:
        raw = parse_key(key)
        self.key_id = f"key:{_derive(raw, 'key-id', 8).hex()}"
        self._cipher = Aes256Gcm(_derive(raw, "wrap", KEY_LENGTH))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StaticKey) and self.key_id == other.key_id

    def __hash__(self) -> int:
        return hash(self.key_id)

    async def wrap(self, key: bytes, associated_data: bytes) -> bytes:
        """Wrap with AES-256-GCM under a key derived from the root key."""
        return RAW_KEY_WRAP + self._cipher.encrypt(key, RAW_KEY_WRAP + associated_data)

    async def unwrap(self, wrapped: bytes, associated_data: bytes) -> bytes:
        """The inverse of `wrap`.

        Raises:
            TamperedError: Another key or place, or an altered value.
        """
        if not wrapped.startswith(RAW_KEY_WRAP):
            raise TamperedError("not a key wrapped by a static root key")
        return self._cipher.decrypt(wrapped[1:], RAW_KEY_WRAP + associated_data)


class EnvironmentKey(StaticKey):
    """A root key as base64 text in the environment variable `name`, read once.

    Raises:
        ConfigurationError: The variable is not set, or holds no key.
    """

    def __init__(self, name: str) -> None:
        super().__init__(read_environment(name))


class FileKey(StaticKey):
    """A root key in a file that only its owner may read: 32 bytes, or their base64 text.

    Raises:
        ConfigurationError: The file cannot be read, can be read by others, or holds no key.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(read_private_file(Path(path)))


def read_environment(name: str) -> str:
    """The value of the environment variable *name*; unset or empty is a ConfigurationError."""
    value = os.environ.get(name)
    if not value:
        raise ConfigurationError(f"the environment variable {name!r} is not set or is empty")
    return value


def read_private_file(path: Path) -> bytes:
    """What is in a file of secrets that others may not read; else a ConfigurationError."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())  # of the open file: no race with a rename
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
