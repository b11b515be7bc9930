"""No encryption: for benchmarks, and for leaving."""

import warnings

from adk_secure_sessions.errors import PlaintextRefusedError
from adk_secure_sessions.formats.records import Cipher

_CLEAR_KEY = b"\x00"


class _ClearKeys:
    """The root key that is none: master keys stand in the database in clear."""

    key_id = "none"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ClearKeys)

    def __hash__(self) -> int:
        return hash(self.key_id)

    async def wrap(self, key: bytes, associated_data: bytes) -> bytes:
        return _CLEAR_KEY + key

    async def unwrap(self, wrapped: bytes, associated_data: bytes) -> bytes:
        if not wrapped.startswith(_CLEAR_KEY):
            raise PlaintextRefusedError("not a key stored in clear")
        return wrapped[1:]


class _Clear:
    """Returns what it is given: nothing is hidden and nothing is authenticated."""

    def encrypt(self, plaintext: bytes, associated_data: bytes) -> bytes:
        return plaintext

    def decrypt(self, sealed: bytes, associated_data: bytes) -> bytes:
        return sealed


class NoOpBackend:
    """Stores everything in clear, and warns (`UserWarning`) when it is made.

    Listing it anywhere gives up protection against those who can write to the database.
    """

    backend_id = 3
    name = "noop"

    def __init__(self) -> None:
        warnings.warn(
            "NoOpBackend stores sessions in clear: it is for benchmarks and for leaving",
            stacklevel=2,
        )
        self.root_key = _ClearKeys()

    def new_key(self) -> bytes:
        """Return an empty key: there is nothing to key."""
        return b""

    def cipher(self, key: bytes) -> Cipher:
        """Return the cipher that does nothing."""
        return _Clear()
