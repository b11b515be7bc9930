"""The backend without encryption, for benchmarks and for turning encryption off."""

import warnings

from adk_secure_sessions.errors import PlaintextRefusedError, Reason
from adk_secure_sessions.formats.records import NOOP_BACKEND_ID, Cipher
from adk_secure_sessions.hiding import hides_locals
from adk_secure_sessions.keys.providers import PLAINTEXT_ROOT_KEY_ID, KeyProvider, RootKey

_KIND = b"\x00"  # the first byte of a wrapped key


class NoRootKey(RootKey):
    """A key provider without a root key: `wrap` returns a 00 byte and the plaintext of the key."""

    key_id = PLAINTEXT_ROOT_KEY_ID

    async def wrap(self, key: bytes, associated_data: bytes) -> bytes:
        return _KIND + key

    async def unwrap(self, wrapped: bytes, associated_data: bytes) -> bytes:
        if not wrapped.startswith(_KIND):
            raise PlaintextRefusedError("not a key stored as plaintext", Reason.MALFORMED)
        return wrapped[1:]


class _NoCipher:
    """A cipher that returns its argument unchanged, and authenticates nothing."""

    def encrypt(self, plaintext: bytes, associated_data: bytes) -> bytes:
        return plaintext

    def decrypt(self, sealed: bytes, associated_data: bytes) -> bytes:
        return sealed


@hides_locals
class NoOpBackend:
    """Stores everything as plaintext, and issues a `UserWarning` when it is created.

    A service that lists `NoOpBackend`, even only in `additional_backends`, is not protected against
    attackers with write access to the database.
    """

    backend_id = NOOP_BACKEND_ID
    name = "noop"

    def __init__(self) -> None:
        warnings.warn(
            "NoOpBackend stores sessions as plaintext: "
            "use it only for benchmarks or to turn encryption off",
            stacklevel=3,  # the caller of the wrapper that `hides_locals` adds
        )
        self.root_key: KeyProvider = NoRootKey()

    def new_key(self) -> bytes:
        """Return empty bytes, because `NoOpBackend` does not encrypt."""
        return b""

    def cipher(self, key: bytes) -> Cipher:
        """Return a cipher that returns its argument unchanged."""
        return _NoCipher()
