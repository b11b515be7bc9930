"""AES-256-GCM with random nonces (NIST SP 800-38D).

Output: `nonce (12 bytes) ‖ ciphertext ‖ GCM tag (16 bytes)`.
"""

import os

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from adk_secure_sessions.errors import TamperedError
from adk_secure_sessions.hiding import HoldsSecrets

KEY_LENGTH = 32
NONCE_LENGTH = 12
GCM_TAG_LENGTH = 16


class Aes256Gcm(HoldsSecrets):
    """AES-256-GCM with one 32-byte key.

    One key may encrypt at most 2^32 records, because the nonces are random (docs/format.md,
    "Limits").
    """

    __slots__ = ("_aead",)

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_LENGTH:  # AESGCM itself also takes 16 and 24 bytes
            raise ValueError(f"an AES-256 key is {KEY_LENGTH} bytes, got {len(key)}")
        self._aead = AESGCM(key)

    def encrypt(self, plaintext: bytes, associated_data: bytes) -> bytes:
        nonce = os.urandom(NONCE_LENGTH)
        return nonce + self._aead.encrypt(nonce, plaintext, associated_data)

    def decrypt(self, sealed: bytes, associated_data: bytes) -> bytes:
        """Return the plaintext of *sealed*, or raise TamperedError.

        AES-GCM cannot tell a wrong key or wrong associated data from a modified value.
        """
        try:
            return self._aead.decrypt(sealed[:NONCE_LENGTH], sealed[NONCE_LENGTH:], associated_data)
        except (InvalidTag, ValueError):  # ValueError: *sealed* is shorter than a nonce
            raise TamperedError() from None
