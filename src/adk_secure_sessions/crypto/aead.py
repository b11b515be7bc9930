"""AES-256-GCM with random nonces (NIST SP 800-38D): `nonce (12) | ciphertext | tag (16)`."""

import os

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from adk_secure_sessions.errors import TamperedError

KEY_LENGTH = 32
NONCE_LENGTH = 12


class Aes256Gcm:
    """One 32-byte key.  How much one key may encrypt: docs/format.md, "Limits"."""

    __slots__ = ("_aead",)

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_LENGTH:  # AESGCM itself would take 16 and 24 bytes too
            raise ValueError(f"an AES-256 key is {KEY_LENGTH} bytes, got {len(key)}")
        self._aead = AESGCM(key)

    def encrypt(self, plaintext: bytes, associated_data: bytes) -> bytes:
        """Return nonce, ciphertext and tag; decrypting needs the same *associated_data*."""
        return self._seal(os.urandom(NONCE_LENGTH), plaintext, associated_data)

    def decrypt(self, sealed: bytes, associated_data: bytes) -> bytes:
        """Raises TamperedError, on purpose without telling a wrong key from an altered value."""
        try:
            return self._aead.decrypt(sealed[:NONCE_LENGTH], sealed[NONCE_LENGTH:], associated_data)
        except (InvalidTag, ValueError):  # ValueError: not even a whole nonce
            pass
        raise TamperedError()

    def _seal(self, nonce: bytes, plaintext: bytes, associated_data: bytes) -> bytes:
        # The seam for known-answer tests.  Nothing else may choose a nonce.
        return nonce + self._aead.encrypt(nonce, plaintext, associated_data)
