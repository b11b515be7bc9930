"""Encrypt and decrypt blobs without an event loop, with the functions that the services use."""

from collections.abc import AsyncIterator, Iterable, Iterator

from adk_secure_sessions.formats.blobs import BlobDecryptor, BlobEncryptor, Bytes


def encrypting(pieces: Iterable[Bytes]) -> BlobEncryptor:
    return BlobEncryptor(_each(pieces))


def encrypted(pieces: Iterable[Bytes]) -> tuple[BlobEncryptor, bytes]:
    """Return the encryptor of *pieces*, and the blob."""
    encryptor = encrypting(pieces)
    return encryptor, b"".join(without_loop(encryptor.blob))


def decrypt_pieces(decryptor: BlobDecryptor, pieces: Iterable[Bytes]) -> Iterator[bytes]:
    return without_loop(decryptor.decrypt(_each(pieces)))


async def _each(pieces: Iterable[Bytes]) -> AsyncIterator[Bytes]:
    for piece in pieces:
        yield piece


def without_loop(stream: AsyncIterator[bytes]) -> Iterator[bytes]:
    """Yield what *stream* yields, which never waits."""

    async def following() -> bytes | None:
        return await anext(stream, None)

    while True:
        try:
            following().send(None)
        except StopIteration as end:
            if end.value is None:
                return
            yield end.value
