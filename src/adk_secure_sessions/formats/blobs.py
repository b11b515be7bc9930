"""Encrypt and decrypt blobs: long values that consist of chunks (docs/format.md, "Blobs").

The numbered chunks are encrypted with AES-256-GCM as in STREAM: Hoang, Reyhanitabar, Rogaway and
Vizár, "Online Authenticated-Encryption and its Nonce-Reuse Misuse-Resistance", CRYPTO 2015.  A
nonce consists of the number of the chunk, and of whether it is the last one.  Therefore a chunk
decrypts only at its own position, and a blob whose last chunks were removed is rejected.

At most two chunks are in memory, so the memory used does not grow with the size of the blob.
"""

import os
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from adk_secure_sessions.crypto.aead import GCM_TAG_LENGTH, KEY_LENGTH
from adk_secure_sessions.errors import Reason, TamperedError
from adk_secure_sessions.hiding import HoldsSecrets

Bytes = bytes | bytearray | memoryview

MAGIC = b"AKSB"
VERSION = 1
HEADER = MAGIC + bytes([VERSION])
CHUNK_LENGTH = 65536  # bytes of plaintext in each chunk except the last, which may be shorter
SEALED_LENGTH = CHUNK_LENGTH + GCM_TAG_LENGTH  # bytes of such a chunk after encryption
MAX_SIZE = 2**48  # bytes of plaintext in one blob


def chunk_count(size: int) -> int:
    return max(1, -(-size // CHUNK_LENGTH))


def encrypted_size(size: int) -> int:
    return len(HEADER) + size + GCM_TAG_LENGTH * chunk_count(size)


class BlobEncryptor(HoldsSecrets):
    """Encrypts *plaintext* with a new random key, which the caller stores in the record that names
    the blob.

    *blob* yields the blob once, because a second blob with the same key would repeat its nonces.
    *size* is the number of bytes of plaintext so far.
    """

    __slots__ = ("blob", "key", "size")

    def __init__(self, plaintext: AsyncIterable[Bytes]) -> None:
        self.key: bytes = os.urandom(KEY_LENGTH)
        self.size: int = 0
        self.blob: AsyncGenerator[bytes, None] = self._encrypt(plaintext)

    async def _encrypt(self, plaintext: AsyncIterable[Bytes]) -> AsyncGenerator[bytes, None]:
        chunk: bytes | memoryview = b""
        cipher, number = AESGCM(self.key), 0
        yield HEADER
        async for following in regrouped(plaintext, CHUNK_LENGTH):
            if self.size:
                yield cipher.encrypt(_nonce(number, False), chunk, HEADER)
                number += 1
            self.size += len(following)
            chunk = following
        yield cipher.encrypt(_nonce(number, True), chunk, HEADER)


class BlobDecryptor(HoldsSecrets):
    """Decrypts one blob, or the part of one blob that contains a range of the plaintext.

    Pass the bytes *first* to *end* - 1 of the blob to `decrypt`.
    """

    __slots__ = ("_cipher", "_last", "_start", "_stop", "end", "first")

    def __init__(self, key: bytes, size: int, start: int = 0, stop: int | None = None) -> None:
        """Prepare to decrypt bytes *start* to *stop* - 1 of the plaintext, by default all bytes.

        *size* is the number of bytes of the whole plaintext.  It comes from the record that names
        the blob, never from the store.
        """
        self._start, self._stop = start, size if stop is None else stop
        self._cipher = AESGCM(key)
        self._last = chunk_count(size) - 1  # number of the last chunk
        number = start // CHUNK_LENGTH
        self.first: int = len(HEADER) + number * SEALED_LENGTH if number else 0
        chunk_end = chunk_count(self._stop)  # number of the chunk after the last chunk to read
        self.end: int = min(len(HEADER) + chunk_end * SEALED_LENGTH, encrypted_size(size))
        # For an empty range, no chunk is needed.  But the only chunk of an empty blob must be
        # read: it authenticates that the blob is empty.
        if start == self._stop and size > 0:
            self.end = self.first

    async def decrypt(self, pieces: AsyncIterable[Bytes]) -> AsyncGenerator[bytes, None]:
        """Yield the plaintext of each chunk in *pieces*, which are of any length.

        If the caller stops before the end, the rest of the blob has not been checked.
        """
        number, unread = self._start // CHUNK_LENGTH, self.end - self.first
        length = SEALED_LENGTH if number else len(HEADER) + SEALED_LENGTH
        async for sealed in regrouped(pieces, SEALED_LENGTH, length):
            require_blob_length(len(sealed), min(length, unread))
            unread -= len(sealed)
            if number == 0:
                _check_header(bytes(sealed[: len(HEADER)]))
                sealed = sealed[len(HEADER) :]
            try:
                nonce = _nonce(number, number == self._last)
                plaintext = self._cipher.decrypt(nonce, sealed, HEADER)
            except InvalidTag:
                detail = f"chunk {number}: wrong key, or the chunk was modified or moved"
                raise TamperedError(detail) from None
            at = number * CHUNK_LENGTH
            yield plaintext[max(0, self._start - at) : self._stop - at]
            number, length = number + 1, SEALED_LENGTH
        require_blob_length(unread, 0)


def _nonce(number: int, is_last: bool) -> bytes:
    return number.to_bytes(11, "big") + bytes([is_last])


def require_blob_length(found: int, expected: int) -> None:
    if found != expected:
        raise TamperedError(
            "a blob does not have the length that it was written with", Reason.MISMATCH
        )


def _check_header(header: bytes) -> None:
    if header == HEADER:
        return
    if header[: len(MAGIC)] == MAGIC:
        raise TamperedError(
            f"the blob has version {header[-1]}, which this release does not know", Reason.MALFORMED
        )
    raise TamperedError("not an encrypted blob", Reason.MALFORMED)


async def regrouped(
    pieces: AsyncIterable[Bytes], length: int, first: int | None = None
) -> AsyncIterator[bytes | memoryview]:
    """Yield the bytes of *pieces* in pieces of *length* bytes; the last one may be shorter.

    The length of the first one is *first*, if it is given.
    """
    parts: list[memoryview] = []
    missing = first or length  # bytes until the next piece is complete
    async for piece in pieces:
        # The caller may use a buffer that is no `bytes` again, so copy it.
        view = memoryview(piece if isinstance(piece, bytes) else bytes(memoryview(piece)))
        while len(view) >= missing:
            yield b"".join([*parts, view[:missing]]) if parts else view[:missing]
            view = view[missing:]
            parts.clear()
            missing = length
        if view:
            parts.append(view)
            missing -= len(view)
    if parts:
        yield b"".join(parts)
