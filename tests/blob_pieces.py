"""Encrypt and decrypt blobs without an event loop, with the functions that the services use."""

from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import TypeVar

from adk_secure_sessions.formats.blobs import (
    BlobDecryptor,
    BlobEncryptor,
    Bytes,
    decrypt_stream,
    encrypt_stream,
)

P = TypeVar("P", BlobEncryptor, BlobDecryptor)


def encrypt_pieces(encryptor: BlobEncryptor, pieces: Iterable[Bytes]) -> Iterator[bytes]:
    return _run(encrypt_stream, encryptor, pieces)


def decrypt_pieces(decryptor: BlobDecryptor, pieces: Iterable[Bytes]) -> Iterator[bytes]:
    return _run(decrypt_stream, decryptor, pieces)


def _run(
    stream: Callable[[P, AsyncIterator[Bytes]], AsyncIterator[bytes]],
    blob: P,
    pieces: Iterable[Bytes],
) -> Iterator[bytes]:
    async def each() -> AsyncIterator[Bytes]:
        for piece in pieces:
            yield piece

    made: AsyncIterator[bytes] = stream(blob, each())

    async def following() -> bytes | None:
        return await anext(made, None)

    while True:
        try:
            following().send(None)  # it never waits, so it ends at once
        except StopIteration as end:
            if end.value is None:
                return
            yield end.value
