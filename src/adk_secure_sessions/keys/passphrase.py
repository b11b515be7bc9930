"""A root key that Argon2id (RFC 9106) derives from a passphrase.

docs/format.md, "Key providers", defines the format of a wrapped key.
"""

import asyncio
import os
import unicodedata
from struct import Struct

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.kdf.argon2 import Argon2id

from adk_secure_sessions.concurrency import LoopLocks, ThreadLock
from adk_secure_sessions.crypto.aead import KEY_LENGTH, Aes256Gcm
from adk_secure_sessions.errors import ConfigurationError, Reason, TamperedError
from adk_secure_sessions.hiding import hides_locals
from adk_secure_sessions.keys.providers import RootKey, check_key_id

_KIND = b"\x02"  # the first byte of a wrapped key
_SALT_LENGTH = 16
_HEADER = Struct(f">c{_SALT_LENGTH}sIII")
# RFC 9106, section 4, second recommended option: t=3, p=4, 64 MiB.
_ITERATIONS, _LANES, _MEMORY_KIB = 3, 4, 64 * 1024
# Derive one key at a time.  Two simultaneous derivations with several lanes (Argon2 threads) may
# deadlock, because OpenSSL has one pool of threads for both.  Seen with cryptography 50.0.
_one_at_a_time = ThreadLock()
# While one task of an event loop derives a key in a thread, the others wait without a thread.
# An attacker can rewrite rows of the keyring, and each new row costs a derivation.
_loop_locks = LoopLocks()


@hides_locals
class PassphraseKey(RootKey):
    """A root key that Argon2id derives from a passphrase.

    The salt and the cost of the derivation are stored with each wrapped key.

    Args:
        passphrase: A text that is not empty.  The text is converted to Unicode normalization form C
            (NFC).
        key_id: The name of the root key.  Use a different name for each passphrase.  The name
            `none` and names that begin with `key:` are reserved for other kinds of root keys.
        max_iterations: The maximum number of iterations: `unwrap` rejects a wrapped key if the
            number that is stored with the key is higher.  For this limit and the next two limits,
            the default is the value that `wrap` uses.
        max_lanes: The maximum number of lanes (Argon2 threads), checked in the same way.
        max_memory_kib: The maximum size of memory in KiB, checked in the same way.

    Raises:
        ConfigurationError: `passphrase` is empty, or `key_id` is empty or not allowed.
    """

    __slots__ = ("__dict__", "_passphrase")  # crash reporters print what is in `__dict__`

    def __init__(
        self,
        passphrase: str,
        *,
        key_id: str = "passphrase",
        max_iterations: int = _ITERATIONS,
        max_lanes: int = _LANES,
        max_memory_kib: int = _MEMORY_KIB,
    ) -> None:
        if not passphrase:
            raise ConfigurationError("the passphrase is empty")
        check_key_id(key_id)
        self.key_id: str = key_id
        # The derivation uses the stored cost before the cost is authenticated.  Without limits, an
        # attacker who can write to the database could make a start take much time and memory.
        self._max_cost = (max_iterations, max_lanes, max_memory_kib)
        # Systems encode the same text in different ways: é is one code point or two.  NFC makes the
        # results equal.
        self._passphrase = unicodedata.normalize("NFC", passphrase).encode("utf-8", "surrogatepass")
        self._new_header = _HEADER.pack(
            _KIND, os.urandom(_SALT_LENGTH), _ITERATIONS, _LANES, _MEMORY_KIB
        )
        self._ciphers: dict[bytes, Aes256Gcm] = {}
        self._authentic_header = b""

    def _equality_key(self) -> tuple[object, ...]:
        return self.key_id, self._passphrase

    async def wrap(self, key: bytes, associated_data: bytes) -> bytes:
        """Encrypt `key` with a key derived from the passphrase.

        All calls of this object use the same salt, because each further salt would cost another
        derivation.  If `unwrap` has unwrapped a key before, this is the salt of the first such key.
        Otherwise, the salt is new and random.

        Raises:
            ConfigurationError: This build of `cryptography` has no Argon2id.
        """
        header = self._authentic_header or self._new_header
        cipher = self._ciphers[header] = await self._cipher(header)
        return header + cipher.encrypt(key, header + associated_data)

    async def unwrap(self, wrapped: bytes, associated_data: bytes) -> bytes:
        """Return the key in `wrapped`, which `wrap` returned.

        Raises:
            TamperedError: The passphrase or `associated_data` is wrong, `wrapped` was modified, or
                the stored cost is above the limits that this object was given.
            ConfigurationError: This build of `cryptography` has no Argon2id.
        """
        header = wrapped[: _HEADER.size]
        if not header.startswith(_KIND) or len(header) < _HEADER.size:
            raise TamperedError("not a key wrapped by a passphrase", reason=Reason.MALFORMED)
        cipher = await self._cipher(header)
        key = cipher.decrypt(wrapped[_HEADER.size :], header + associated_data)
        # An attacker may have stored a header of low cost, or many headers: `wrap` uses authentic
        # headers only, and other headers are not cached.
        self._ciphers[header] = cipher
        self._authentic_header = self._authentic_header or header
        return key

    async def _cipher(self, header: bytes) -> Aes256Gcm:
        if cipher := self._ciphers.get(header):
            return cipher
        async with _loop_locks.lock("derivation"):
            if cipher := self._ciphers.get(header):
                return cipher
            # Argon2id takes 0.1 to 0.2 s.  In a thread, it does not block other tasks.
            return await asyncio.to_thread(self._derive, header)

    def _derive(self, header: bytes) -> Aes256Gcm:
        _, salt, iterations, lanes, memory = _HEADER.unpack(header)
        most = zip((iterations, lanes, memory), self._max_cost, strict=True)
        if any(stored > limit for stored, limit in most):
            raise TamperedError(
                "the stored Argon2id cost is above the limits of this PassphraseKey",
                reason=Reason.MALFORMED,
            )
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
            raise TamperedError(
                "the stored Argon2id cost is not valid", reason=Reason.MALFORMED
            ) from None
        with _one_at_a_time.lock:
            return Aes256Gcm(kdf.derive(self._passphrase))
