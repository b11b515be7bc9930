"""What a backend is: a cipher, and the root key that protects the keys it is used with."""

from typing import Protocol, runtime_checkable

from adk_secure_sessions.formats.records import Cipher
from adk_secure_sessions.keys.providers import KeyProvider

THIRD_PARTY_IDS = range(0x80, 0x100)


@runtime_checkable
class EncryptionBackend(Protocol):
    """A cipher, and the root key that protects the keys it is used with.

    Anyone may write one; it need not inherit from this class.
    """

    @property
    def backend_id(self) -> int:
        """Names this backend in every record; 0x80 to 0xFF for third parties; never changes."""
        ...

    @property
    def name(self) -> str:
        """A short name for messages."""
        ...

    @property
    def root_key(self) -> KeyProvider:
        """Wraps the master keys."""
        ...

    def new_key(self) -> bytes:
        """Return a new random data key, of whatever length `cipher` takes."""
        ...

    def cipher(self, key: bytes, /) -> Cipher:
        """Return the cipher for one data key; it may be called from several threads."""
        ...
