"""Blobs in a store: a directory, or a bucket.

A blob is stored as objects `PREFIX/NAME/K` of 8 MiB each (docs/format.md, "The objects of a blob"),
and not as one multipart upload.  After an interrupted upload, every store can list and delete these
objects.  An empty object `PREFIX/deleted/NAME` marks the blob *NAME* as deleted.  An upload holds
only a few objects in memory.
"""

import asyncio
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import NamedTuple

from adk_secure_sessions.concurrency import gather_all, wait_ignoring_cancel
from adk_secure_sessions.errors import ArtifactStoreError, Reason, TamperedError
from adk_secure_sessions.formats.blobs import (
    BlobDecryptor,
    BlobEncryptor,
    encrypted_size,
    regrouped,
)
from adk_secure_sessions.hiding import HoldsSecrets

OBJECT_LENGTH = 8 * 2**20  # bytes; the last object of a blob may be shorter
# The prefix and the name of a blob.  They become parts of paths, so nothing else is accepted.
BLOB_ID = re.compile(r"[0-9a-f]{32}")
OBJECT_NAME = re.compile(r"[0-9]{1,9}")  # of an object of a blob: its name
MARKS = "deleted"  # the folder with the marks of deleted blobs
_PARALLEL = 3  # objects that are uploaded at the same time
_CLEANUP_SECONDS = 20.0  # limit for the two steps after a failed upload: wait, delete


@dataclass(frozen=True, slots=True, repr=False)
class Blob(HoldsSecrets):
    """The blob that stores the content of a version, and the key of the blob."""

    prefix: str  # the id of the database that wrote the blob, in hex
    name: str  # 32 hex digits
    key: bytes
    size: int  # bytes of plaintext


class StoredBlob(NamedTuple):
    """A blob in the store, which may be incomplete."""

    size: int  # bytes
    modified: float  # of its last object: seconds since 1970, by the store's clock


class StoredObject(NamedTuple):
    """An object `PREFIX/FOLDER/NAME` of the store: a part of a blob, a mark, or a foreign one."""

    folder: str
    name: str
    size: int | None  # bytes; None if a link or another thing that is not a file is in its place
    modified: float  # seconds since 1970, by the store's clock


class BlobStore(ABC):
    """Stores, reads, lists and deletes the blobs under one prefix of a store.

    Every method raises `ArtifactStoreError` if the store fails.  A `BlobStore` can be used in
    several event loops.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix: str = prefix  # the id of the database, in hex

    async def write(self, plaintext: AsyncIterable[bytes]) -> Blob:
        """Encrypt *plaintext* with a new random key, and store it as a new blob."""
        name, encryptor = secrets.token_hex(16), BlobEncryptor(plaintext)
        async with aclosing(encryptor.blob) as blob:
            await self.put_stream(name, blob)
        return Blob(self.prefix, name, encryptor.key, encryptor.size)

    def read(
        self, blob: Blob, start: int = 0, stop: int | None = None
    ) -> AsyncGenerator[bytes, None]:
        """Yield bytes *start* to *stop* - 1 of the plaintext of *blob*, by default all."""
        decryptor = BlobDecryptor(blob.key, blob.size, start, stop)
        sealed = self.get_stream(
            blob.name, encrypted_size(blob.size), decryptor.first, decryptor.end
        )
        return decryptor.decrypt(sealed)

    async def put_stream(self, name: str, pieces: AsyncIterable[bytes]) -> None:
        """Store *pieces* as the blob *name*, durably.

        If *pieces* or the store fails, or if the caller is cancelled, the objects that were already
        stored are deleted.
        """
        uploads: set[asyncio.Task[None]] = set()
        number = 0
        try:
            async for data in regrouped(pieces, OBJECT_LENGTH):
                if len(uploads) >= _PARALLEL:
                    done, uploads = await asyncio.wait(uploads, return_when=asyncio.FIRST_COMPLETED)
                    await gather_all(*done)  # raises the error of an upload
                uploads.add(asyncio.create_task(self._put(name, str(number), bytes(data))))
                number += 1
            if uploads:
                done, uploads = await asyncio.wait(uploads)  # which cancels nothing
                await gather_all(*done)
        except BaseException:
            cleanup = asyncio.ensure_future(self._discard(name, uploads))
            await wait_ignoring_cancel(cleanup)
            raise

    async def _discard(self, name: str, uploads: "set[asyncio.Task[None]]") -> None:
        """Wait until *uploads* have ended, then delete the objects that they stored."""
        # `purge blobs` deletes the remaining objects.
        with suppress(ArtifactStoreError, TimeoutError):
            async with asyncio.timeout(_CLEANUP_SECONDS):
                # Do not cancel uploads: a request that was sent may still store its object.
                await asyncio.gather(*uploads, return_exceptions=True)
                await self.delete(name)

    async def get_stream(
        self, name: str, size: int, start: int = 0, stop: int | None = None
    ) -> AsyncIterator[bytes]:
        """Yield bytes *start* to *stop* - 1 of the blob *name*, or all, in pieces of up to 8 MiB.

        *size* is the number of bytes of the whole blob, from the record that names the blob, not
        from the store: an attacker may have modified the store.  Raises TamperedError if an object
        is missing or has another length.
        """
        stop = size if stop is None else stop
        if start == stop:
            return
        numbers = range(start // OBJECT_LENGTH, -(-stop // OBJECT_LENGTH))
        parts = (self._part(name, size, number, start, stop) for number in numbers)
        ahead = asyncio.ensure_future(next(parts))
        try:
            for part in parts:
                # Read the next object while the caller processes the previous one.
                current, ahead = ahead, asyncio.ensure_future(part)
                yield await current
            yield await ahead
        finally:
            ahead.cancel()
            await asyncio.gather(ahead, return_exceptions=True)

    async def _part(self, name: str, size: int, number: int, start: int, stop: int) -> bytes:
        first = number * OBJECT_LENGTH
        length = min(OBJECT_LENGTH, size - first)
        return await self._get(
            name, number, length, max(0, start - first), min(length, stop - first)
        )

    async def size(self, name: str) -> int | None:
        """Return the total size of the objects of the blob *name*; None if there is no object."""
        blob = (await self.stored_blobs(name)).get(name)
        return None if blob is None else blob.size

    async def mark(self, name: str) -> None:
        """Mark the blob *name* as deleted, now; a mark that it has is replaced by a new one."""
        await self._put(MARKS, name, b"", replace=True)

    async def marks(self) -> dict[str, float]:
        """Return when each marked blob was marked, in seconds since 1970, by the store's clock."""
        return {
            mark.name: mark.modified
            for mark in await self._objects(MARKS)
            if BLOB_ID.fullmatch(mark.name) and mark.size is not None
        }

    async def marks_and_time(self) -> tuple[dict[str, float], float]:
        """Return `marks`, and what the store's clock shows now.

        To read the clock, this method stores and deletes a mark of a blob that does not exist.
        """
        probe = secrets.token_hex(16)
        await self.mark(probe)
        marks = await self.marks()
        await self.unmark(probe)
        if probe not in marks:
            raise ArtifactStoreError(
                "the artifact store: it does not list an object that was just stored",
                retryable=True,
            )
        return marks, marks.pop(probe)

    async def stored_blobs(self, name: str | None = None) -> dict[str, StoredBlob]:
        """Return the blob *name*, by default all, by name; also those of interrupted uploads."""
        blobs: dict[str, StoredBlob] = {}
        for one in await self._objects(name):
            if BLOB_ID.fullmatch(one.folder) and OBJECT_NAME.fullmatch(one.name):
                size, modified = blobs.get(one.folder, (0, one.modified))
                size += one.size or 0
                blobs[one.folder] = StoredBlob(size, max(modified, one.modified))
        return blobs

    # --- what a kind of store implements ---------------------------------------------------------

    @abstractmethod
    async def _put(self, folder: str, name: str, data: bytes, *, replace: bool = False) -> None:
        """Store *data* as an object, durably.

        Only with *replace*, the object may exist; it then gets a new time.
        """

    @abstractmethod
    async def _get(self, name: str, number: int, size: int, start: int, stop: int) -> bytes:
        """Return the bytes *start* to *stop* - 1 of an object of a blob.

        Raises TamperedError if the object is missing, or does not have *size* bytes.
        """

    @abstractmethod
    async def delete(self, name: str) -> None:
        """Delete all objects of the blob *name*; if there are none, do nothing.

        If a row may ever have named the blob, call `mark` instead: a copy of the database, or a
        backup, may still name it.  Only `purge blobs` deletes a marked blob.
        """

    @abstractmethod
    async def unmark(self, name: str) -> None:
        """Withdraw the mark of the blob *name*; if there is none, do nothing."""

    @abstractmethod
    async def _objects(self, folder: str | None) -> list[StoredObject]:
        """Return the objects in *folder*, or in all folders of blobs."""


def missing_blob_error(place: str) -> TamperedError:
    return TamperedError(
        f"a blob is missing: it was deleted outside the service, or this is not the {place} that "
        "it was written to",
        Reason.MISSING,
    )
