"""Fixed random bytes, times and ciphers, so that the vectors are the same each time."""

import hashlib
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from adk_secure_sessions.backends.fernet import FernetCipher
from adk_secure_sessions.crypto.aead import NONCE_LENGTH, Aes256Gcm

Json = dict[str, Any]

TIME = 1_700_000_000  # seconds: 2023-11-14 22:13:20 UTC
MICROSECONDS = TIME * 1_000_000
LARGEST = 2**63 - 1  # of an integer column


def made(label: str, length: int) -> bytes:
    """Return bytes that look random and depend only on *label*."""
    return hashlib.shake_256(b"adk-secure-sessions vectors: " + label.encode()).digest(length)


def counting(first: int, length: int) -> bytes:
    """Return *first*, *first* + 1, ...: easy to recognize in a dump."""
    return bytes((first + i) % 256 for i in range(length))


@contextmanager
def fernet_draws(iv: bytes, seconds: int) -> Iterator[None]:
    """Make Fernet use this IV and this time."""
    with mock.patch("os.urandom", return_value=iv), mock.patch("time.time", return_value=seconds):
        yield


class FixedAesGcm:
    """`Aes256Gcm` with a given nonce."""

    def __init__(self, key: bytes, nonce: bytes) -> None:
        assert len(nonce) == NONCE_LENGTH
        self._cipher = Aes256Gcm(key)
        self._nonce = nonce

    def encrypt(self, plaintext: bytes, associated_data: bytes) -> bytes:
        with mock.patch("os.urandom", return_value=self._nonce):
            return self._cipher.encrypt(plaintext, associated_data)

    def decrypt(self, sealed: bytes, associated_data: bytes) -> bytes:
        return self._cipher.decrypt(sealed, associated_data)


class FixedFernet(FernetCipher):
    """`FernetCipher` with a given IV and time."""

    def __init__(self, key: bytes, iv: bytes, seconds: int) -> None:
        super().__init__(key)
        self._iv = iv
        self._seconds = seconds

    def encrypt(self, plaintext: bytes, associated_data: bytes) -> bytes:
        with fernet_draws(self._iv, self._seconds):
            return super().encrypt(plaintext, associated_data)


def zlib_stream(content: bytes, header: bytes = b"\x78\x01") -> bytes:
    """Return *content*, of at most 65,535 bytes, as a zlib stream.

    The stream stores the content as it is, so the result is the same with each release of zlib.
    """
    length = len(content)
    block = b"\x01" + struct.pack("<HH", length, length ^ 0xFFFF) + content
    return header + block + zlib.adler32(content).to_bytes(4, "big")


def padded(body: bytes, zeros: int) -> bytes:
    """Return what follows the flags byte of a padded plaintext."""
    return struct.pack(">I", len(body)) + body + bytes(zeros)


def flipped(data: bytes, position: int) -> bytes:
    """Return *data* with the lowest bit of one byte changed."""
    changed = bytearray(data)
    changed[position] ^= 1
    return bytes(changed)
