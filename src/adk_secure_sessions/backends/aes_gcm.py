"""AES-256-GCM: the recommended backend."""

import os

from adk_secure_sessions.crypto.aead import KEY_LENGTH, Aes256Gcm
from adk_secure_sessions.formats.records import Cipher
from adk_secure_sessions.hiding import HoldsSecrets, hides_locals
from adk_secure_sessions.keys.providers import KeyProvider
from adk_secure_sessions.keys.specs import root_key


@hides_locals
class AesGcmBackend(HoldsSecrets):
    """Encrypts with AES-256-GCM (NIST SP 800-38D) and random 96-bit nonces.

    Args:
        key: The root key: 32 bytes, base64 text, a key spec, or a key provider.

    Raises:
        ConfigurationError: `key` is none of these, or the key cannot be read.
    """

    backend_id = 1
    name = "aesgcm"

    def __init__(self, key: bytes | str | KeyProvider) -> None:
        self.root_key: KeyProvider = root_key(key)

    def new_key(self) -> bytes:
        """Return 32 random bytes."""
        return os.urandom(KEY_LENGTH)

    def cipher(self, key: bytes) -> Cipher:
        """Return the cipher for `key`, a data key of 32 bytes.

        Raises:
            ValueError: `key` is not 32 bytes long.
        """
        return Aes256Gcm(key)
