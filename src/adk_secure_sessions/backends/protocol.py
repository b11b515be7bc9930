"""The protocol of a backend."""

from typing import Protocol, runtime_checkable

from adk_secure_sessions.formats.records import Cipher
from adk_secure_sessions.keys.providers import KeyProvider

THIRD_PARTY_IDS = range(0x80, 0x100)  # ids that no backend of this library will ever have


@runtime_checkable
class EncryptionBackend(Protocol):
    """An encryption algorithm for records, and the root key that protects its data keys.

    To write your own backend, create a class with these attributes; it need not inherit from this
    class.
    """

    @property
    def backend_id(self) -> int:
        """The id of the backend, stored in every record.  It must never change.

        The id of your own backend is a number from 0x80 to 0xFF.
        """
        ...

    @property
    def name(self) -> str:
        """A short name for error messages."""
        ...

    @property
    def root_key(self) -> KeyProvider:
        """The provider that wraps the master keys."""
        ...

    def new_key(self) -> bytes:
        """Return a new random data key that `cipher` accepts."""
        ...

    def cipher(self, key: bytes, /) -> Cipher:
        """Return the cipher for the data key `key`; several threads may use the cipher at once."""
        ...
