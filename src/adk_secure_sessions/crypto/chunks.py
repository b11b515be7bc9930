"""AES-256-GCM for the numbered chunks of one long value, as in STREAM.

STREAM: Hoang, Reyhanitabar, Rogaway and Vizár, "Online Authenticated-Encryption and its Nonce-Reuse
Misuse-Resistance", CRYPTO 2015.  The nonce is `chunk number (11 bytes) ‖ last (1 byte)`.  The
byte `last` is 1 for the last chunk and 0 for all others.  Therefore a chunk decrypts only at its
own position, and a value whose last chunks were removed is rejected.
"""

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from adk_secure_sessions.crypto.aead import KEY_LENGTH
from adk_secure_sessions.crypto.key_material import KeyMaterial
from adk_secure_sessions.errors import TamperedError
from adk_secure_sessions.tracebacks import hides_locals

TAG_LENGTH = 16


class ChunkCipher(KeyMaterial):
    """Encrypts and decrypts the chunks of one value, which are numbered from 0.

    Use a key for one value only, and encrypt each chunk only once.  The nonces are not random, so a
    second encryption would use a nonce twice.
    """

    __slots__ = ("_aead", "_associated_data")

    @hides_locals
    def __init__(self, key: bytes, associated_data: bytes) -> None:
        if len(key) != KEY_LENGTH:
            raise ValueError(f"an AES-256 key is {KEY_LENGTH} bytes, got {len(key)}")
        self._aead = AESGCM(key)
        self._associated_data = associated_data

    def encrypt(self, number: int, is_last: bool, plaintext: bytes | memoryview) -> bytes:
        return self._aead.encrypt(_nonce(number, is_last), plaintext, self._associated_data)

    def decrypt(self, number: int, is_last: bool, sealed: bytes | memoryview) -> bytes:
        try:
            return self._aead.decrypt(_nonce(number, is_last), sealed, self._associated_data)
        except InvalidTag:
            detail = f"chunk {number}: wrong key, or the chunk was modified or moved"
            raise TamperedError(detail) from None


def _nonce(number: int, is_last: bool) -> bytes:
    return number.to_bytes(11, "big") + bytes([is_last])
