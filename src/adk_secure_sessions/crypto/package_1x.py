"""Decrypt the states and events of the distribution adk-secure-sessions 1.x.

That distribution is another author's, with the same name.  Nothing is encrypted with this module.

An envelope is `0x01 ‖ backend id ‖ ciphertext`.  Releases 0.1 and 1.0 store the bytes of the
envelope, and later releases store them as base64 text.  The ciphertext has no associated data.  An
envelope does not name its row or its key.

`FernetBackend` of 1.x takes a Fernet key or a passphrase.  From a passphrase, it derives keys with
PBKDF2, and since release 1.2 also with HKDF and a salt for each value.  `AesGcmBackend` takes 32
bytes.
"""

import binascii
import hashlib
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache, partial

from cryptography.fernet import Fernet, InvalidToken
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from adk_secure_sessions.crypto.aead import KEY_LENGTH, Aes256Gcm
from adk_secure_sessions.errors import (
    ConfigurationError,
    DecryptionError,
    PlaintextRefusedError,
    Reason,
    TamperedError,
    UnknownKeyError,
)
from adk_secure_sessions.hiding import HoldsSecrets, hides_locals

_VERSION = b"\x01"
_FERNET, _AES_256_GCM = 1, 2  # the backend ids
_HEADER_LENGTH = 2
# The number of base64 characters that contain the first 3 bytes of an envelope.
_BASE64_START = 4
_PBKDF2_SALT = b"adk-secure-sessions-fernet-v1"
_ITERATIONS = 600_000
_ITERATIONS_BEFORE_1_2 = 480_000
_HKDF_INFO = b"adk-fernet-v2"
_HKDF_SALT_LENGTH = 16
# A ciphertext of `FernetBackend` is a Fernet token as base64url text.  If there is a salt, the byte
# `_SALTED` and the salt come before the token.
_SALTED = 0x01
_LEAST_TOKEN = 100  # the minimum length of a Fernet token, in characters of base64url

_Decrypt = Callable[[bytes], bytes]  # it raises InvalidToken or TamperedError


def is_envelope(start: str | bytes) -> bool:
    """Return whether a stored value is an envelope, given the value or its first 4 characters."""
    data = start.encode("utf-8", "surrogatepass") if isinstance(start, str) else start
    if not data.startswith(_VERSION):
        try:
            data = binascii.a2b_base64(data[:_BASE64_START], strict_mode=True)
        except ValueError:
            return False
    return data.startswith(_VERSION) and data[1:2] in (bytes([_FERNET]), bytes([_AES_256_GCM]))


def parse_envelope(stored: object) -> tuple[bytes, bool]:
    """Return the bytes of an envelope, and whether it is stored as base64, in text or bytes."""
    if isinstance(stored, str):
        stored = stored.encode("utf-8", "surrogatepass")
    if not stored:
        raise TamperedError("its encrypted value was removed", Reason.MISSING)
    data = stored if isinstance(stored, bytes) else b""
    if data.startswith(b"{"):
        raise PlaintextRefusedError("not encrypted: adk-secure-sessions 1.x did not write it")
    is_base64 = not data.startswith(_VERSION)
    if is_base64:
        try:
            data = binascii.a2b_base64(data, strict_mode=True)
        except ValueError:
            data = b""
    if not data.startswith(_VERSION) or len(data) <= _HEADER_LENGTH:
        raise TamperedError("not an envelope of adk-secure-sessions 1.x", Reason.MALFORMED)
    return data, is_base64


@hides_locals
class Package1xKeys(HoldsSecrets):
    """The keys of an application that used adk-secure-sessions 1.x.

    *keys* are those that the application gave to `FernetBackend` (a Fernet key or a passphrase) or
    to `AesGcmBackend` (32 bytes, here also as base64 or hexadecimal text).  A passphrase is used
    exactly as given: a newline at its end is a part of it.

    A database may contain values of several keys, even of one backend: an interrupted rotation
    leaves such a database.  Decryption tries all keys of the kind that a value needs, and raises
    UnknownKeyError if there is none.
    """

    def __init__(self, keys: Iterable[str | bytes]) -> None:
        if isinstance(keys, str | bytes):
            keys = [keys]
        self._fernets: list[_Decrypt] = []  # they ignore the times of tokens
        self._passphrases: list[bytes] = []
        self._derived = cache(_derived)  # each derivation takes 0.2 s
        self._aes: list[Aes256Gcm] = []
        for key in keys:
            self._add(key)
        if not self._passphrases and not self._fernets:
            raise ConfigurationError("give the keys of adk-secure-sessions 1.x")

    def decrypt(self, stored: object) -> bytes:
        """Return the plaintext of the envelope *stored*."""
        data, _ = parse_envelope(stored)
        backend_id, sealed = data[1], data[_HEADER_LENGTH:]
        if backend_id == _FERNET:
            salt_end = 1 + _HKDF_SALT_LENGTH
            ciphers = self._unsalted()
            if sealed[:1] == bytes([_SALTED]) and len(sealed) >= salt_end + _LEAST_TOKEN:
                ciphers, sealed = self._salted(sealed[1:salt_end]), sealed[salt_end:]
        elif backend_id == _AES_256_GCM:
            if not self._aes:
                raise UnknownKeyError("encrypted with AES-256-GCM, and no 32-byte key was given")
            ciphers = (partial(one.decrypt, associated_data=b"") for one in self._aes)
        else:
            raise DecryptionError(
                f"encrypted by backend {backend_id}, which is not one of adk-secure-sessions 1.x",
                Reason.UNKNOWN_BACKEND,
            )
        for cipher in ciphers:
            try:
                return cipher(sealed)
            except (InvalidToken, TamperedError):
                pass
        raise TamperedError()

    def _add(self, key: str | bytes) -> None:
        if not isinstance(key, str | bytes):
            raise ConfigurationError(
                f"a key of adk-secure-sessions 1.x must be text or bytes, not {type(key).__name__}"
            )
        data = key.encode() if isinstance(key, str) else key
        if not data:
            raise ConfigurationError("a key of adk-secure-sessions 1.x is empty")
        raw = [data]
        with suppress(ValueError):
            raw.append(bytes.fromhex(data.decode("ascii")))
        try:
            # Distinguish a Fernet key from a passphrase as 1.x does: any text that base64 decodes
            # to 32 bytes is a Fernet key.
            self._fernets.append(Fernet(data).decrypt)
            raw.append(urlsafe_b64decode(data))
        except ValueError:
            self._passphrases.append(data)
        self._aes += [Aes256Gcm(one) for one in raw if len(one) == KEY_LENGTH]

    def _salted(self, salt: bytes) -> Iterator[_Decrypt]:
        if not self._passphrases:
            raise UnknownKeyError("encrypted with a passphrase, and no passphrase was given")
        for passphrase in self._passphrases:
            hkdf = HKDF(SHA256(), KEY_LENGTH, salt, _HKDF_INFO)
            yield _fernet(hkdf.derive(self._derived(passphrase, _ITERATIONS)))

    def _unsalted(self) -> Iterator[_Decrypt]:
        yield from self._fernets
        for passphrase in self._passphrases:
            yield _fernet(self._derived(passphrase, _ITERATIONS_BEFORE_1_2))


def _derived(passphrase: bytes, iterations: int) -> bytes:
    return hashlib.pbkdf2_hmac("sha256", passphrase, _PBKDF2_SALT, iterations, KEY_LENGTH)


def _fernet(key: bytes) -> _Decrypt:
    return Fernet(urlsafe_b64encode(key)).decrypt
