"""No encryption: for benchmarks, and for leaving this library."""

import warnings

from adk_secure_sessions.errors import PlaintextRefusedError, Reason
from adk_secure_sessions.formats.records import NOOP_BACKEND_ID, Cipher
from adk_secure_sessions.keys.providers import PLAINTEXT_ROOT_KEY_ID, KeyProvider

_PLAINTEXT_WRAP = b"\x00"


class _NoRootKey:
    """Stands where a root key would: it stores master keys as plaintext."""

    key_id = PLAINTEXT_ROOT_KEY_ID

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _NoRootKey)

    def __hash__(self) -> int:
        return hash(self.key_id)

    async def wrap(self, key: bytes, associated_data: bytes) -> bytes:
        return _PLAINTEXT_WRAP + key

    async def unwrap(self, wrapped: bytes, associated_data: bytes) -> bytes:
        if not wrapped.startswith(_PLAINTEXT_WRAP):
            raise PlaintextRefusedError("not a key stored as plaintext", reason=Reason.MALFORMED)
        return wrapped[1:]


class _NoCipher:
    """Returns its argument: nothing is encrypted and nothing is authenticated."""

    def encrypt(self, plaintext: bytes, associated_data: bytes) -> bytes:
        return plaintext

    def decrypt(self, sealed: bytes, associated_data: bytes) -> bytes:
        return sealed


class NoOpBackend:
    """Stores everything as plaintext, and warns (`UserWarning`) when it is made.

    Listing it in a service, also in `additional_backends`, gives up the protection against an
    attacker who can write to the database.
    """

    backend_id = NOOP_BACKEND_ID
    name = "noop"

    def __init__(self) -> None:
        warnings.warn(
            "NoOpBackend stores sessions as plaintext: it is for benchmarks and for leaving",
            stacklevel=2,
        )
        self.root_key: KeyProvider = _NoRootKey()

    def new_key(self) -> bytes:
        """Return an empty key: nothing is encrypted with it."""
        return b""

    def cipher(self, key: bytes) -> Cipher:
        """Return a cipher that returns what it is given."""
        return _NoCipher()
