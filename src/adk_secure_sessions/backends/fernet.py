"""Fernet (https://github.com/fernet/spec): AES-128-CBC with HMAC-SHA-256.

Fernet has no associated data.  Therefore HKDF-Expand-SHA-256 (RFC 5869) derives another key from
the data key for each token, with the associated data as `info`.
"""

import os
import time

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.ciphers import Cipher as SymmetricCipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CBC
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.hmac import HMAC
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand
from cryptography.hazmat.primitives.padding import PKCS7

from adk_secure_sessions.errors import TamperedError
from adk_secure_sessions.formats.records import Cipher
from adk_secure_sessions.hiding import HoldsSecrets, hides_locals
from adk_secure_sessions.keys.providers import KeyProvider
from adk_secure_sessions.keys.specs import root_key

_KEY_LENGTH = 32
_VERSION = b"\x80"
_BLOCK = 16  # bytes of an AES block and of the IV
_START = 1 + 8 + _BLOCK  # where the ciphertext begins: after version, time and IV
_MAC_LENGTH = 32


class FernetCipher(HoldsSecrets):
    """Encrypts and decrypts Fernet tokens with one data key.

    Tokens are stored as bytes, not as base64 text.  Several base64 texts decode to the same bytes,
    so a modified text could still be accepted.

    The class `Fernet` of `cryptography` handles only base64 text.  The conversion would take more
    than half of the time of an encryption, so this module assembles the tokens itself.
    """

    __slots__ = ("_key",)

    def __init__(self, key: bytes) -> None:
        if len(key) != _KEY_LENGTH:
            raise ValueError(f"a Fernet key is {_KEY_LENGTH} bytes, got {len(key)}")
        self._key = key

    def encrypt(self, plaintext: bytes, associated_data: bytes) -> bytes:
        """Encrypt, and return the bytes of a token: 0x80, time, IV, ciphertext, HMAC."""
        mac, aes = self._token_keys(associated_data)
        iv = os.urandom(_BLOCK)
        encryptor = SymmetricCipher(aes, CBC(iv)).encryptor()
        missing = _BLOCK - len(plaintext) % _BLOCK
        padding = bytes([missing]) * missing  # PKCS #7
        token = b"".join(
            (
                _VERSION,
                int(time.time()).to_bytes(8, "big"),
                iv,
                encryptor.update(plaintext),
                encryptor.update(padding),
                encryptor.finalize(),
            )
        )
        mac.update(token)
        return token + mac.finalize()

    def decrypt(self, sealed: bytes, associated_data: bytes) -> bytes:
        """Return the plaintext of *sealed*, the bytes of a token.  Tokens do not expire."""
        if not sealed.startswith(_VERSION):
            raise TamperedError()
        mac, aes = self._token_keys(associated_data)
        signed = memoryview(sealed)[:-_MAC_LENGTH]
        mac.update(signed)
        try:
            mac.verify(sealed[-_MAC_LENGTH:])
            decryptor = SymmetricCipher(aes, CBC(sealed[_START - _BLOCK : _START])).decryptor()
            padded = decryptor.update(signed[_START:]) + decryptor.finalize()
            unpadder = PKCS7(8 * _BLOCK).unpadder()
            return unpadder.update(padded) + unpadder.finalize()
        # ValueError: a wrong length or padding, which only a program that has the key can make.
        except (InvalidSignature, ValueError):
            raise TamperedError() from None

    def _token_keys(self, associated_data: bytes) -> tuple[HMAC, AES]:
        return split_key(HKDFExpand(SHA256(), _KEY_LENGTH, associated_data).derive(self._key))


def split_key(key: bytes) -> tuple[HMAC, AES]:
    """Split the key of one Fernet token: 16 bytes for HMAC, then 16 bytes for AES."""
    return HMAC(key[:16], SHA256()), AES(key[16:])


@hides_locals
class FernetBackend(HoldsSecrets):
    """Encrypts with Fernet: AES-128-CBC, authenticated with HMAC-SHA-256.

    Args:
        key: The root key: a Fernet key (base64 text), 32 bytes, a key spec, or a key provider.

    Raises:
        ConfigurationError: `key` is none of these, or the key cannot be read.
    """

    backend_id = 2
    name = "fernet"

    def __init__(self, key: bytes | str | KeyProvider) -> None:
        self.root_key: KeyProvider = root_key(key)

    def new_key(self) -> bytes:
        """Return 32 random bytes."""
        return os.urandom(_KEY_LENGTH)

    def cipher(self, key: bytes) -> Cipher:
        """Return the cipher for `key`, a data key of 32 bytes.

        Raises:
            ValueError: `key` is not 32 bytes long.
        """
        return FernetCipher(key)
