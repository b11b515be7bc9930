"""Encrypt and decrypt blobs: long values that consist of chunks (docs/format.md, "Blobs").

The numbered chunks are encrypted with AES-256-GCM as in STREAM: Hoang, Reyhanitabar, Rogaway and
Vizár, "Online Authenticated-Encryption and its Nonce-Reuse Misuse-Resistance", CRYPTO 2015.  A
nonce consists of the number of the chunk, and of whether it is the last one.  Therefore a chunk
decrypts only at its own position, and a blob whose last chunks were removed is rejected.

Between two calls, a `BlobEncryptor` or `BlobDecryptor` holds at most one chunk, so the
memory used does not grow with the size of the blob.  Each object processes one blob, once.
"""

import os
from collections.abc import AsyncIterable, AsyncIterator, Iterator

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from adk_secure_sessions.crypto.aead import KEY_LENGTH
from adk_secure_sessions.crypto.key_material import KeyMaterial
from adk_secure_sessions.errors import Reason, TamperedError
from adk_secure_sessions.tracebacks import hides_locals

Bytes = bytes | bytearray | memoryview

MAGIC = b"AKSB"
VERSION = 1
HEADER = MAGIC + bytes([VERSION])
TAG_LENGTH = 16
CHUNK_LENGTH = 65536  # bytes of plaintext in each chunk except the last, which may be shorter
SEALED_LENGTH = CHUNK_LENGTH + TAG_LENGTH  # bytes of such a chunk after encryption
MAX_SIZE = 2**48  # bytes of plaintext in one blob
# The functions at the end of this module process longer pieces in steps of this many bytes.  With
# larger steps, the operating system must provide new pages of memory for each step: encrypting
# 10 MB in steps of 8 MiB took four times as long.
_STEP = 1 << 18


def chunk_count(size: int) -> int:
    return max(1, -(-size // CHUNK_LENGTH))


def encrypted_size(size: int) -> int:
    return len(HEADER) + size + TAG_LENGTH * chunk_count(size)


class BlobEncryptor(KeyMaterial):
    """Encrypts one blob with a new random key, which the caller stores in the record that names the
    blob.  *size* is the number of bytes of plaintext so far.
    """

    __slots__ = ("_cipher", "_is_finished", "_next", "_pending", "key", "size")

    def __init__(self) -> None:
        self.key: bytes = os.urandom(KEY_LENGTH)
        self.size: int = 0
        self._cipher = AESGCM(self.key)  # for this blob only: its nonces are not random
        self._next = 0  # number of the next chunk
        self._pending = bytearray()  # at most one chunk, which may be the last chunk of the blob
        self._is_finished = False

    def update(self, piece: Bytes) -> list[bytes]:
        """Encrypt *piece*, of any length; return the next chunks of the blob, if any."""
        if self._is_finished:
            raise ValueError("the blob is finished")
        view = memoryview(piece).cast("B")
        if self.size + len(view) > MAX_SIZE:
            raise ValueError(f"a blob has at most {MAX_SIZE} bytes")
        self.size += len(view)
        sealed = []
        missing = CHUNK_LENGTH - len(self._pending)
        if self._pending and len(view) > missing:
            self._pending += view[:missing]
            view = view[missing:]
            sealed.append(self._seal(bytes(self._pending), False))
            self._pending.clear()
        if not self._pending:
            followed = max(0, len(view) - 1) // CHUNK_LENGTH  # chunks before the last chunk
            for start in range(0, followed * CHUNK_LENGTH, CHUNK_LENGTH):
                sealed.append(self._seal(view[start : start + CHUNK_LENGTH], False))
            view = view[followed * CHUNK_LENGTH :]
        self._pending += view
        return sealed

    def finish(self) -> bytes:
        if self._is_finished:
            raise ValueError("the blob is finished")
        self._is_finished = True
        return self._seal(bytes(self._pending), True)

    def _seal(self, plaintext: bytes | memoryview, is_last: bool) -> bytes:
        number = self._next
        self._next = number + 1
        sealed = self._cipher.encrypt(_nonce(number, is_last), plaintext, HEADER)
        return sealed if number else HEADER + sealed


class BlobDecryptor(KeyMaterial):
    """Decrypts one blob, or the part of one blob that contains a range of the plaintext.

    Pass the bytes *first* to *end* - 1 of the blob to `update`.
    """

    __slots__ = (
        "_chunks", "_cipher", "_left", "_next", "_pending", "_skip", "_unread", "end", "first",
    )  # fmt: skip

    @hides_locals
    def __init__(self, key: bytes, size: int, start: int = 0, stop: int | None = None) -> None:
        """Prepare to decrypt bytes *start* to *stop* - 1 of the plaintext, by default all bytes.

        *size* is the number of bytes of the whole plaintext.  It comes from the record that names
        the blob, never from the store.
        """
        if len(key) != KEY_LENGTH:
            raise ValueError(f"an AES-256 key is {KEY_LENGTH} bytes, got {len(key)}")
        stop = size if stop is None else stop
        if not 0 <= start <= stop <= size <= MAX_SIZE:
            raise ValueError(f"bytes {start} to {stop} are not within {size} bytes")
        self._cipher = AESGCM(key)
        self._chunks = chunk_count(size)
        self._next = start // CHUNK_LENGTH  # number of the next chunk
        chunk_end = chunk_count(stop)  # number of the chunk after the last chunk to read
        self.first: int = 0 if self._next == 0 else len(HEADER) + self._next * SEALED_LENGTH
        self.end: int = min(len(HEADER) + chunk_end * SEALED_LENGTH, encrypted_size(size))
        # For an empty range, no chunk is needed.  But the only chunk of an empty blob must be
        # read: it authenticates that the blob is empty.
        if start == stop and size > 0:
            self.end = self.first
        self._skip = start % CHUNK_LENGTH  # bytes of plaintext before *start*
        self._left = stop - start
        self._unread = self.end - self.first
        self._pending = bytearray()

    def update(self, piece: Bytes) -> bytes:
        """Return the plaintext of the chunks that *piece*, of any length, completes."""
        view = memoryview(piece).cast("B")
        self._unread -= len(view)
        if self._unread < 0:
            raise TamperedError("the blob is longer than it was written", reason=Reason.MISMATCH)
        plaintext: list[bytes] = []
        while view:
            wanted = self._sealed_length()
            if not self._pending and len(view) >= wanted:
                self._open(view[:wanted], plaintext)
                view = view[wanted:]
                continue
            taken = view[: wanted - len(self._pending)]
            view = view[len(taken) :]
            self._pending += taken
            if len(self._pending) == wanted:
                self._open(bytes(self._pending), plaintext)
                self._pending.clear()
        if self._unread == 0 and self._pending:  # a last chunk that is shorter than the others
            self._open(bytes(self._pending), plaintext)
            self._pending.clear()
        return b"".join(plaintext)

    def finish(self) -> None:
        """Raise TamperedError unless bytes `first` to `end` - 1 were passed to `update`."""
        if self._unread:
            raise TamperedError("the blob is shorter than it was written", reason=Reason.MISMATCH)

    def _sealed_length(self) -> int:
        return SEALED_LENGTH + (len(HEADER) if self._next == 0 else 0)

    def _open(self, sealed: bytes | memoryview, plaintext: list[bytes]) -> None:
        number = self._next
        if number == 0:
            _check_header(bytes(sealed[: len(HEADER)]))
            sealed = sealed[len(HEADER) :]
        try:
            nonce = _nonce(number, number == self._chunks - 1)
            opened = self._cipher.decrypt(nonce, sealed, HEADER)
        except InvalidTag:
            detail = f"chunk {number}: wrong key, or the chunk was modified or moved"
            raise TamperedError(detail) from None
        self._next = number + 1
        wanted = opened[self._skip : self._skip + self._left]
        self._skip = 0
        self._left -= len(wanted)
        plaintext.append(wanted)


def _nonce(number: int, is_last: bool) -> bytes:
    return number.to_bytes(11, "big") + bytes([is_last])


def _check_header(header: bytes) -> None:
    if header == HEADER:
        return
    if header[: len(MAGIC)] == MAGIC:
        raise TamperedError(
            f"the blob has version {header[-1]}, which this release does not know",
            reason=Reason.MALFORMED,
        )
    raise TamperedError("not an encrypted blob", reason=Reason.MALFORMED)


async def encrypt_stream(
    encryptor: BlobEncryptor, pieces: AsyncIterable[Bytes]
) -> AsyncIterator[bytes]:
    """Encrypt *pieces* of plaintext, and yield the blob in pieces of about 64 KiB or less."""
    async for piece in pieces:
        for step in _steps(piece):
            for sealed in encryptor.update(step):
                yield sealed
    yield encryptor.finish()


async def decrypt_stream(
    decryptor: BlobDecryptor, pieces: AsyncIterable[Bytes]
) -> AsyncIterator[bytes]:
    """Decrypt *pieces* of a blob, and yield the plaintext in pieces of about 256 KiB or less.

    If the caller stops before the end, the rest of the blob has not been checked.
    """
    async for piece in pieces:
        for step in _steps(piece):
            if plaintext := decryptor.update(step):
                yield plaintext
    decryptor.finish()


def _steps(piece: Bytes) -> Iterator[memoryview]:
    view = memoryview(piece).cast("B")
    for start in range(0, len(view), _STEP):
        yield view[start : start + _STEP]
