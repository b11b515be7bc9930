"""A root key made from a passphrase with Argon2id (RFC 9106)."""

import asyncio
import hmac
import os
import threading
import unicodedata
from struct import Struct

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.kdf.argon2 import Argon2id

from adk_secure_sessions.crypto.aead import KEY_LENGTH, Aes256Gcm
from adk_secure_sessions.crypto.key_material import KeyMaterial
from adk_secure_sessions.errors import ConfigurationError, TamperedError
from adk_secure_sessions.keys.providers import PLAINTEXT_ROOT_KEY_ID

PASSPHRASE_WRAP = b"\x02"
_SALT_LENGTH = 16
_HEADER = Struct(f">c{_SALT_LENGTH}sIII")
# RFC 9106, section 4, second recommended option: t=3, p=4, 64 MiB.
_ITERATIONS, _LANES, _MEMORY_KIB = 3, 4, 64 * 1024
# Read from the database before anything vouches for them: bounds on what they may cost.
_MAX_ITERATIONS, _MAX_LANES, _MAX_MEMORY_KIB = 64, 64, 4 * 1024 * 1024
# Two that derive at once, with several lanes each, wait for one another for ever: OpenSSL gives
# both threads of one pool.  Seen with cryptography 50.0.
_one_at_a_time = threading.Lock()


def _renew_lock() -> None:
    global _one_at_a_time
    _one_at_a_time = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


class PassphraseKey(KeyMaterial):
    """A root key from a passphrase, by Argon2id; salt and cost lie beside each wrapped key.

    Args:
        passphrase: Not empty; compared in Unicode's form NFC.
        key_id: Tells two passphrases apart.  Not `none`, nor beginning with `key:`.

    Raises:
        ConfigurationError: One of them is not as said.
    """

    __slots__ = ("_ciphers", "_new_header", "_passphrase", "key_id")

    def __init__(self, passphrase: str, *, key_id: str = "passphrase") -> None:
        if not passphrase:
            raise ConfigurationError("the passphrase is empty")
        if not key_id or key_id == PLAINTEXT_ROOT_KEY_ID or key_id.startswith("key:"):
            raise ConfigurationError("this key_id stands for another kind of root key")
        self.key_id = key_id
        # The same characters typed on another system must give the same bytes.
        self._passphrase = unicodedata.normalize("NFC", passphrase).encode("utf-8", "surrogatepass")
        self._new_header = _HEADER.pack(
            PASSPHRASE_WRAP, os.urandom(_SALT_LENGTH), _ITERATIONS, _LANES, _MEMORY_KIB
        )
        self._ciphers: dict[bytes, Aes256Gcm] = {}

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, PassphraseKey)
            and self.key_id == other.key_id
            and hmac.compare_digest(self._passphrase, other._passphrase)
        )

    def __hash__(self) -> int:
        return hash(self.key_id)

    async def wrap(self, key: bytes, associated_data: bytes) -> bytes:
        """Wrap under the key of this object's first salt, so that a start derives once."""
        header = next(iter(self._ciphers), self._new_header)
        cipher = await self._cipher(header)
        return header + cipher.encrypt(key, header + associated_data)

    async def unwrap(self, wrapped: bytes, associated_data: bytes) -> bytes:
        """The inverse of `wrap`.

        Raises:
            TamperedError: Another passphrase or place, or an altered value.
        """
        header = wrapped[: _HEADER.size]
        if not header.startswith(PASSPHRASE_WRAP) or len(header) < _HEADER.size:
            raise TamperedError("not a key wrapped by a passphrase")
        cipher = await self._cipher(header)
        return cipher.decrypt(wrapped[_HEADER.size :], header + associated_data)

    async def _cipher(self, header: bytes) -> Aes256Gcm:
        cipher = self._ciphers.get(header)
        if cipher is None:
            # 0.1-0.2 s of hashing: in a thread, or every other task would stand still.
            cipher = await asyncio.to_thread(self._derive_once, header)
        return cipher

    def _derive_once(self, header: bytes) -> Aes256Gcm:
        with _one_at_a_time:
            if header not in self._ciphers:
                self._ciphers[header] = self._derive(header)
            return self._ciphers[header]

    def _derive(self, header: bytes) -> Aes256Gcm:
        _, salt, iterations, lanes, memory = _HEADER.unpack(header)
        if iterations > _MAX_ITERATIONS or lanes > _MAX_LANES or memory > _MAX_MEMORY_KIB:
            raise TamperedError("the stored Argon2id cost is beyond what this service computes")
        try:
            kdf = Argon2id(
                salt=salt, length=KEY_LENGTH, iterations=iterations, lanes=lanes, memory_cost=memory
            )
        except UnsupportedAlgorithm:
            raise ConfigurationError(
                "passphrases need Argon2id, which this build of cryptography lacks: "
                "install a cryptography wheel (OpenSSL 3.2 or later)"
            ) from None
        except ValueError:
            raise TamperedError("the stored Argon2id cost is not a possible one") from None
        return Aes256Gcm(kdf.derive(self._passphrase))
