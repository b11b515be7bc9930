"""Fernet (https://github.com/fernet/spec): AES-128-CBC with HMAC-SHA-256.

Fernet has no associated data.  Therefore HKDF-Expand-SHA-256 (RFC 5869) derives another key from
the data key for each token, with the associated data as `info`.
"""

import secrets
from base64 import urlsafe_b64decode, urlsafe_b64encode

from cryptography.fernet import Fernet, InvalidToken
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from adk_secure_sessions.crypto.key_material import KeyMaterial, hides_frames
from adk_secure_sessions.errors import TamperedError
from adk_secure_sessions.formats.records import Cipher
from adk_secure_sessions.keys.providers import KeyProvider
from adk_secure_sessions.keys.specs import root_key

_KEY_LENGTH = 32


class FernetCipher(KeyMaterial):
    """Encrypts and decrypts Fernet tokens with one data key.

    Tokens are stored as bytes, not as base64 text.  Several base64 texts decode to the same bytes,
    so a modified text could still be accepted.
    """

    __slots__ = ("_key",)

    def __init__(self, key: bytes) -> None:
        if len(key) != _KEY_LENGTH:
            raise ValueError(f"a Fernet key is {_KEY_LENGTH} bytes, got {len(key)}")
        self._key = key

    def encrypt(self, plaintext: bytes, associated_data: bytes) -> bytes:
        """Encrypt, and return the bytes of a token: 0x80, time, IV, ciphertext, HMAC."""
        return urlsafe_b64decode(self._fernet(associated_data).encrypt(plaintext))

    def decrypt(self, sealed: bytes, associated_data: bytes) -> bytes:
        """Return the plaintext of *sealed*, the bytes of a token.  Tokens do not expire.

        Raises:
            TamperedError: The key or the associated data is wrong, or *sealed* was modified.
        """
        try:
            return self._fernet(associated_data).decrypt(urlsafe_b64encode(sealed))
        except InvalidToken:
            pass
        raise TamperedError()

    def _fernet(self, associated_data: bytes) -> Fernet:
        key = HKDFExpand(SHA256(), _KEY_LENGTH, associated_data).derive(self._key)
        return Fernet(urlsafe_b64encode(key))


class FernetBackend(KeyMaterial):
    """Encrypts with Fernet: AES-128-CBC, authenticated with HMAC-SHA-256.

    Args:
        key: The root key: a Fernet key (base64 text), 32 bytes, a key spec, or a key provider.

    Raises:
        ConfigurationError: `key` is none of these, or the key cannot be read.
    """

    backend_id = 2
    name = "fernet"

    @hides_frames
    def __init__(self, key: bytes | str | KeyProvider) -> None:
        self.root_key: KeyProvider = root_key(key)

    def new_key(self) -> bytes:
        """Return 32 random bytes."""
        return secrets.token_bytes(_KEY_LENGTH)

    @hides_frames
    def cipher(self, key: bytes) -> Cipher:
        """Return the cipher for `key`, a data key of 32 bytes.

        Raises:
            ValueError: `key` is not 32 bytes long.
        """
        return FernetCipher(key)
