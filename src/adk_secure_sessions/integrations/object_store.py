"""Blobs in an object store: a directory, or a bucket through the library `obstore`.

A blob is stored as objects `PREFIX/NAME/K` of 8 MiB each (docs/format.md, "The objects of a blob"),
and not as one multipart upload.  After an interrupted upload, every store can list and delete these
objects.  An empty object `PREFIX/deleted/NAME` marks the blob *NAME* as deleted.  An upload holds
only a few objects in memory.  This module does not encrypt: callers pass and receive the encrypted
bytes of blobs.
"""

import asyncio
import logging
import os
import re
import secrets
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias
from urllib.parse import urlsplit
from urllib.request import url2pathname

from adk_secure_sessions.crypto.key_material import KeyMaterial
from adk_secure_sessions.errors import (
    ArtifactStoreError,
    ConfigurationError,
    Reason,
    TamperedError,
)
from adk_secure_sessions.integrations.blob_directory import DELETED, BlobDirectory, StoredObject
from adk_secure_sessions.keys.remote import check_transport, require
from adk_secure_sessions.loops import wait_ignoring_cancel
from adk_secure_sessions.tracebacks import hides_locals

if TYPE_CHECKING:
    from obstore.store import ObjectStore

logger: logging.Logger = logging.getLogger(__name__)
OBJECT_LENGTH = 8 * 2**20  # bytes; the last object of a blob may be shorter
TIMEOUT = 60.0  # the default limit for one request and its retries, in seconds
_PARALLEL = 3  # objects that are uploaded at the same time
_CLEANUP_SECONDS = 10.0  # limit for each of the two steps after a failed upload: wait, delete
_SCHEMES = ("s3", "gs", "az", "memory")
_NAME = re.compile(r"[0-9a-f]{32}")
# Object stores, and servers that imitate S3, report a full store with different words.
_FULL = re.compile(r"StorageFull|QuotaExceeded|InsufficientStorage|InsufficientCapacity|code: 507")
_STATUS = re.compile(r"status code: ([0-9]{3})")


class StoredBlob(NamedTuple):
    """A blob in the store, which may be incomplete; *modified* is the time of its last object."""

    name: str
    size: int
    modified: float


class Objects(Protocol):
    """A store of the objects of blobs; an object is identified by the blob's name and a number.

    `put` stores *data* as a new object.  `get` returns the bytes *start* to *stop* - 1 of an object
    with *size* bytes.  `get` raises `TamperedError` if the object is missing, or does not have the
    length *size*.  `delete` deletes all objects of a blob.  `list` yields the objects of the blob
    *name* or, if *name* is None, of all blobs.  `mark` stores the mark of a blob; if there is one,
    `mark` replaces it.  `unmark` deletes the mark, and `marks` yields all marks.  All methods raise
    `ArtifactStoreError` if the store fails.
    """

    async def put(self, name: str, number: int, data: bytes) -> None: ...
    async def get(self, name: str, number: int, size: int, start: int, stop: int) -> bytes: ...
    async def delete(self, name: str) -> None: ...
    def list(self, name: str | None = None) -> AsyncIterator[StoredObject]: ...
    async def mark(self, name: str) -> None: ...
    async def unmark(self, name: str) -> None: ...
    def marks(self) -> AsyncIterator[StoredObject]: ...


class BlobStore:
    """Stores, reads, lists and deletes the blobs under one prefix of an object store.

    Every method raises `ArtifactStoreError` if the store fails.  A `BlobStore` can be used in
    several event loops.  Unless the blobs are in a directory, do not
    use it in a process that was forked after the library `obstore` was first used.
    """

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    async def put_stream(self, name: str, pieces: AsyncIterable[bytes]) -> int:
        """Store *pieces* as the blob *name*, durably, and return the number of bytes.

        If *pieces* or the store fails, or if the caller is cancelled, the objects that were already
        stored are deleted.
        """
        _check_name(name)
        uploads: set[asyncio.Task[None]] = set()
        try:
            return await self._put_objects(name, pieces, uploads)
        except BaseException:
            cleanup = asyncio.ensure_future(self._discard(name, uploads))
            await wait_ignoring_cancel(lambda: asyncio.wait([cleanup]), cleanup.done)
            raise

    async def _put_objects(
        self, name: str, pieces: AsyncIterable[bytes], uploads: "set[asyncio.Task[None]]"
    ) -> int:
        size = number = 0
        parts: list[memoryview] = []  # of the next object
        missing = OBJECT_LENGTH  # bytes until the next object is complete
        async for piece in pieces:
            size += len(piece)
            view = memoryview(piece)
            while len(view) >= missing:
                parts.append(view[:missing])
                view = view[missing:]
                await self._start_upload(name, number, b"".join(parts), uploads)
                parts.clear()
                missing = OBJECT_LENGTH
                number += 1
            if view:
                parts.append(view)
                missing -= len(view)
        if parts:
            await self._start_upload(name, number, b"".join(parts), uploads)
        while uploads:
            await _first_upload(uploads)
        return size

    async def _start_upload(
        self, name: str, number: int, data: bytes, uploads: "set[asyncio.Task[None]]"
    ) -> None:
        if len(uploads) >= _PARALLEL:
            await _first_upload(uploads)
        uploads.add(asyncio.create_task(self._objects.put(name, number, data)))

    async def _discard(self, name: str, uploads: "set[asyncio.Task[None]]") -> None:
        """Wait until *uploads* have ended, then delete the objects that they stored."""
        if uploads:
            # Do not cancel uploads at once: a request that was sent may still store its object.
            await asyncio.wait(uploads, timeout=_CLEANUP_SECONDS)
        for upload in uploads:
            upload.cancel()
        await asyncio.gather(*uploads, return_exceptions=True)
        try:
            async with asyncio.timeout(_CLEANUP_SECONDS):
                await self._objects.delete(name)
        except (ArtifactStoreError, TimeoutError):
            pass  # `purge blobs` deletes blobs that no record names

    async def get_stream(
        self, name: str, size: int, start: int = 0, stop: int | None = None
    ) -> AsyncIterator[bytes]:
        """Yield bytes *start* to *stop* - 1 of the blob *name*, or all, in pieces of up to 8 MiB.

        *size* is the number of bytes of the whole blob, from the record that names the blob, not
        from the store: an attacker may have modified the store.  Raises TamperedError if an object
        is missing or has another length.
        """
        _check_name(name)
        stop = size if stop is None else stop
        if not 0 <= start <= stop <= size:
            raise ValueError(f"bytes {start} to {stop} are not within {size} bytes")
        parts = (self._get(name, size, number, start, stop) for number in _numbers(start, stop))
        ahead: asyncio.Future[bytes] | None = None
        try:
            for part in parts:
                # Read the next object while the caller processes the previous one.
                now, ahead = ahead, asyncio.ensure_future(part)
                if now is not None:
                    yield now.result() if now.done() else await now
            if ahead is not None:
                now, ahead = ahead, None
                yield await now
        finally:
            if ahead is not None:
                ahead.cancel()
                await asyncio.gather(ahead, return_exceptions=True)

    async def _get(self, name: str, size: int, number: int, start: int, stop: int) -> bytes:
        first = number * OBJECT_LENGTH
        length = min(OBJECT_LENGTH, size - first)
        begin, end = max(0, start - first), min(length, stop - first)
        return await self._objects.get(name, number, length, begin, end)

    async def size(self, name: str) -> int | None:
        """Return the total size of the objects of the blob *name*; None if there is no object."""
        _check_name(name)
        sizes = [found.size async for found in self._objects.list(name)]
        return sum(sizes) if sizes else None

    async def delete(self, name: str) -> None:
        """Delete all objects of the blob *name*; if there are none, do nothing.

        If a row may ever have named the blob, call `mark` instead: a copy of the database, or a
        backup, may still name it.  Only `purge blobs` deletes a marked blob.
        """
        _check_name(name)
        await self._objects.delete(name)

    async def mark(self, name: str) -> None:
        """Mark the blob *name* as deleted, now."""
        _check_name(name)
        await self._objects.mark(name)

    async def unmark(self, name: str) -> None:
        """Withdraw the mark of the blob *name*; if there is none, do nothing."""
        _check_name(name)
        await self._objects.unmark(name)

    async def marks(self) -> dict[str, float]:
        """Return when each marked blob was marked, in seconds since 1970, by the store's clock."""
        return {found.name: found.modified async for found in self._objects.marks()}

    async def marks_and_time(self) -> tuple[dict[str, float], float]:
        """Return `marks`, and what the store's clock shows now.

        To read the clock, this method stores and deletes a mark of a blob that does not exist.
        """
        probe = secrets.token_hex(16)
        await self._objects.mark(probe)
        marks = await self.marks()
        await self._objects.unmark(probe)
        if probe not in marks:
            raise _failed("it does not list an object that was just stored", retryable=True)
        return marks, marks.pop(probe)

    async def list(self) -> AsyncIterator[StoredBlob]:
        """Yield all blobs, including incomplete blobs of interrupted uploads."""
        blob: StoredBlob | None = None
        async for found in self._objects.list():  # the objects of one blob are adjacent
            if blob is not None and blob.name == found.name:
                modified = max(blob.modified, found.modified)
                blob = StoredBlob(blob.name, blob.size + found.size, modified)
                continue
            if blob is not None:
                yield blob
            blob = StoredBlob(found.name, found.size, found.modified)
        if blob is not None:
            yield blob


async def _first_upload(uploads: "set[asyncio.Task[None]]") -> None:
    """Wait until an upload has ended, and remove it from *uploads*; raise its error, if any."""
    done, _ = await asyncio.wait(uploads, return_when=asyncio.FIRST_COMPLETED)
    uploads -= done
    errors = [error for upload in done if (error := upload.exception()) is not None]
    if errors:
        raise errors[0]


def _numbers(start: int, stop: int) -> Iterable[int]:
    """Return the numbers of the objects that contain the bytes *start* to *stop* - 1 of a blob."""
    return range(start // OBJECT_LENGTH, -(-stop // OBJECT_LENGTH)) if start < stop else ()


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ValueError("the name of a blob is 32 lower-case hex digits")


# --- opening -------------------------------------------------------------------------------------


@hides_locals
class ArtifactStore(KeyMaterial):
    """The place of the contents of artifacts, with the options to open it.

    Args:
        store: A path or `file:///DIRECTORY`, which is created if it is missing;
            `s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX`, `az://CONTAINER/PREFIX` or `memory://`; or a
            store of the library `obstore`.
        options: Arguments for the store's class in `obstore`, such as `endpoint`, `region`,
            `access_key_id` and `secret_access_key` for S3.  Options that are not given come from
            the environment (`AWS_ENDPOINT_URL`, `AWS_REGION`, `AWS_ACCESS_KEY_ID`, ...).
        allow_http: Whether the URL of an endpoint on another machine may begin with `http://`.
            Without TLS, anybody on the network can read the names of blobs, and delete or replace
            blobs.
        timeout: Seconds for each request, including its retries.

    Raises:
        ConfigurationError: The store cannot be used as given, or the extra `artifacts` is not
            installed.
    """

    def __init__(
        self,
        store: "str | os.PathLike[str] | ObjectStore",
        *,
        options: Mapping[str, Any] | None = None,
        allow_http: bool = False,
        timeout: float = TIMEOUT,
    ) -> None:
        if not timeout > 0:
            raise ConfigurationError("timeout (in seconds) must be above 0")
        self._timeout = timeout
        self._directory: Path | None = None
        self._remote: ObjectStore | None = None
        if isinstance(store, str | os.PathLike):
            self._directory = _directory_of(store)
            if self._directory is None:
                require("artifacts", "obstore", user="this artifact store")
                self._remote = _open_url(os.fspath(store), dict(options or {}), allow_http, timeout)
            elif options:
                raise ConfigurationError("a directory of artifacts has no options")
            return
        require("artifacts", "obstore", user="this store")
        from obstore.store import LocalStore

        if isinstance(store, LocalStore) and store.prefix is not None:
            self._directory = Path(store.prefix)
        else:
            _check_store_object(store)
            self._remote = store

    def blobs(self, prefix: str, *, create: bool = True) -> BlobStore:
        """Open the blobs under *prefix*; each database has its own prefix.

        If *create* is False, a missing directory of the whole store raises ConfigurationError, and
        the directory of *prefix* is not created.  Raises ArtifactStoreError if the directory cannot
        be created.
        """
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", prefix):
            raise ValueError("a prefix is 1 to 64 letters, digits, _ and -")
        if self._remote is not None:
            return BlobStore(_Remote(self._remote, prefix, self._timeout))
        assert self._directory is not None
        if not create and not self._directory.is_dir():
            raise ConfigurationError("the directory of artifacts does not exist: check its path")
        return BlobStore(BlobDirectory(self._directory / prefix, create=create))


# What the functions that take a store accept; a path or a store of obstore needs no options.
AnyStore: TypeAlias = "str | os.PathLike[str] | ObjectStore | ArtifactStore"


def opened(store: AnyStore) -> ArtifactStore:
    return store if isinstance(store, ArtifactStore) else ArtifactStore(store)


def _directory_of(store: "str | os.PathLike[str]") -> Path | None:
    """Return the directory that *store* names; None if *store* is the URL of another store."""
    text = os.fspath(store)
    if not text:
        raise ConfigurationError("the artifact store is empty: give a directory or a URL")
    scheme, separator, _ = text.partition("://")
    if not separator:
        if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:", text):
            raise ConfigurationError("the URL of an artifact store has :// after its scheme")
        return Path(text)
    if scheme.lower() != "file":
        return None
    parts = urlsplit(text)
    if parts.netloc not in ("", "localhost") or parts.query or parts.fragment or not parts.path:
        raise ConfigurationError("a directory of artifacts is written file:///PATH, or as a path")
    return Path(url2pathname(parts.path))


def _open_url(url: str, options: dict[str, Any], allow_http: bool, timeout: float) -> "ObjectStore":
    """Create the store for *url*.  No error quotes the URL or the options."""
    from obstore import store as stores
    from obstore.exceptions import BaseError

    try:
        parts = urlsplit(url)
    except ValueError:
        parts = urlsplit("")
    scheme = parts.scheme
    if scheme not in _SCHEMES:
        known = ", ".join(f"{name}://" for name in _SCHEMES)
        raise ConfigurationError(f"the artifact store is a path, or begins with file://, {known}")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ConfigurationError(
            "the URL of an artifact store has no credentials and no options: set them in the "
            "environment, or pass them as options"
        )
    if scheme == "memory":
        return stores.MemoryStore()
    if not parts.netloc:
        raise ConfigurationError(f"name the bucket: {scheme}://BUCKET/PREFIX")
    classes: dict[str, Any] = {
        "s3": stores.S3Store,
        "gs": stores.GCSStore,
        "az": stores.AzureStore,
    }
    milliseconds = max(1, round(timeout * 1000))
    client: dict[str, Any] = {"connect_timeout": "5s", "timeout": f"{milliseconds}ms"}
    client |= options.pop("client_options", None) or {}
    retries: dict[str, Any] = {"max_retries": 3, "retry_timeout": timedelta(seconds=timeout)}
    retries |= options.pop("retry_config", None) or {}
    arguments = {
        "prefix": parts.path.strip("/") or None,
        **options,
        "client_options": client,
        "retry_config": retries,
    }
    variables = {
        name.lower(): value
        for name, value in os.environ.items()
        if name.upper().startswith(_VARIABLES[scheme])
    }
    try:
        # This object only shows the configuration, which obstore reads from the environment, too.
        made: Any = classes[scheme](parts.netloc, **arguments)
        plain = _plain_addresses(made.config) or _plain_addresses(variables)
        # Set the option in any case, so that a variable such as AWS_ALLOW_HTTP has no effect.
        client["allow_http"] = bool(plain)
        made = classes[scheme](parts.netloc, **arguments)
    except (BaseError, TypeError, ValueError):
        raise ConfigurationError(
            "the artifact store cannot be opened: check its options, and the environment variables "
            f"that begin with {_VARIABLES[scheme]}"
        ) from None
    for address in plain:
        try:
            check_transport(address, "an artifact store")
        except ConfigurationError:
            if not allow_http:
                raise
            logger.warning(
                "the artifact store is on another machine, and has no TLS: anybody on the network "
                "can read the names of blobs, replace or delete blobs, and may read credentials"
            )
    return made  # type: ignore[no-any-return]


# obstore reads the environment variables whose names begin with these prefixes.
_VARIABLES = {"s3": "AWS_", "gs": "GOOGLE_", "az": "AZURE_"}


def _plain_addresses(settings: Mapping[str, Any]) -> list[str]:
    """Return the endpoints in *settings* that begin with http://."""
    return [
        str(value)
        for name, value in settings.items()
        if ("endpoint" in name or "url" in name) and "metadata" not in name
        if str(value).lower().startswith("http:")
    ]


def _check_store_object(store: object) -> None:
    from obstore import store as stores

    classes = (stores.S3Store, stores.GCSStore, stores.AzureStore, stores.MemoryStore)
    if not isinstance(store, classes):
        raise ConfigurationError(
            "an artifact store is a path, a URL, or an S3Store, GCSStore, AzureStore, MemoryStore "
            "or LocalStore of obstore"
        )


# --- stores of obstore ---------------------------------------------------------------------------

# The id of the process that first used obstore.  In a process that was forked later, the threads of
# obstore do not exist, so every call of obstore would wait for ever.
_first_process: int | None = None


class _Remote:
    """The objects of blobs in a store of `obstore`: see `Objects`."""

    def __init__(self, store: "ObjectStore", prefix: str, timeout: float) -> None:
        self._store = store
        self._prefix = prefix
        # obstore ends a request after *timeout*.  This longer limit ends the request if the threads
        # of obstore do not run.
        self._timeout = timeout + 5

    def __repr__(self) -> str:  # the store's configuration contains credentials
        return f"<{type(self).__name__}>"

    def _path(self, name: str, number: int) -> str:
        return f"{self._prefix}/{name}/{number}"

    def _mark(self, name: str) -> str:
        return f"{self._prefix}/{DELETED}/{name}"

    async def put(self, name: str, number: int, data: bytes) -> None:
        await self._put(self._path(name, number), data)

    async def _put(self, path: str, data: bytes) -> None:
        import obstore

        try:
            await self._call(
                lambda: obstore.put_async(self._store, path, data, use_multipart=False)
            )
        except _Missing:
            raise _no_bucket() from None

    async def get(self, name: str, number: int, size: int, start: int, stop: int) -> bytes:
        import obstore

        path = self._path(name, number)
        whole = (start, stop) == (0, size)

        async def call() -> bytes:
            options: Any = None if whole else {"range": (start, stop)}
            answer = await obstore.get_async(self._store, path, options=options)
            # Check the size before reading the content: an attacker may have replaced the object by
            # a very large one.
            _check_size(answer.meta["size"], size)
            return bytes(await answer.bytes_async())

        try:
            data: bytes | None = await self._call(call)
        except _Missing:
            data = None
        except ArtifactStoreError:
            if whole or not await self._is_missing(path, size):
                raise
            data = None
        if data is None:
            raise TamperedError(
                "a blob is missing: it was deleted outside the service, or this is not the store "
                "that it was written to",
                reason=Reason.MISSING,
            )
        _check_size(len(data), stop - start)
        return data

    async def _is_missing(self, path: str, size: int) -> bool:
        """Return whether the object is missing; raise TamperedError if it has another length.

        `get` calls this after an error: if a range is not within an object, some stores report an
        error that does not name the cause.
        """
        import obstore

        try:
            answer = await self._call(lambda: obstore.head_async(self._store, path))
        except _Missing:
            return True
        _check_size(answer["size"], size)
        return False

    async def delete(self, name: str) -> None:
        numbers = [found.number async for found in self.list(name)]
        paths = [self._path(name, number) for number in numbers if number is not None]
        if paths:
            await self._delete(paths)

    async def _delete(self, paths: Sequence[str]) -> None:
        import obstore

        try:
            await self._call(lambda: obstore.delete_async(self._store, paths))
        except _Missing:
            pass

    async def list(self, name: str | None = None) -> AsyncIterator[StoredObject]:
        below = self._prefix if name is None else f"{self._prefix}/{name}"
        async for path, meta in self._list(below):
            blob, _, number = path.partition("/")
            if _NAME.fullmatch(blob) and re.fullmatch(r"[0-9]{1,9}", number):
                modified = meta["last_modified"].timestamp()
                yield StoredObject(blob, int(number), int(meta["size"]), modified)

    async def mark(self, name: str) -> None:
        await self._put(self._mark(name), b"")

    async def unmark(self, name: str) -> None:
        await self._delete([self._mark(name)])

    async def marks(self) -> AsyncIterator[StoredObject]:
        async for path, meta in self._list(f"{self._prefix}/{DELETED}"):
            _, _, name = path.partition("/")
            if _NAME.fullmatch(name):
                yield StoredObject(name, None, 0, meta["last_modified"].timestamp())

    async def _list(self, below: str) -> AsyncIterator[tuple[str, Any]]:
        """Yield the objects below the path *below*: the path after the prefix, and its facts."""
        import obstore

        stream: Any = obstore.list(self._store, below, chunk_size=1000)

        async def next_batch() -> Any:
            async for batch in stream:
                return batch
            return None

        while True:
            try:
                batch = await self._call(next_batch)
            except _Missing:
                raise _no_bucket() from None
            if batch is None:
                return
            for meta in batch:
                yield str(meta["path"]).removeprefix(f"{self._prefix}/"), meta

    @hides_locals
    async def _call(self, call: Any) -> Any:
        """Run *call*; replace its errors by our own, which quote neither the store nor the URL."""
        global _first_process
        if _first_process is None:
            _first_process = os.getpid()
        if _first_process != os.getpid():
            raise ConfigurationError(
                "this process was forked after the artifact store was used, where obstore cannot "
                "work: start processes with spawn, or use the store only after the fork"
            )
        try:
            async with asyncio.timeout(self._timeout):
                return await call()
        except TamperedError:
            raise
        except Exception as error:
            raise _translated(error) from None


class _Missing(Exception):
    """The object, or its bucket, does not exist."""


def _check_size(found: int, expected: int) -> None:
    if found != expected:
        raise TamperedError(
            "a blob does not have the length that it was written with", reason=Reason.MISMATCH
        )


def _translated(error: Exception) -> Exception:
    """Return our own error for *error* of obstore; `_Missing` if an object or bucket is missing."""
    from obstore import exceptions

    if isinstance(error, FileNotFoundError):
        return _Missing()
    if isinstance(error, TimeoutError):
        return _failed("no answer in time; check its address and the network", retryable=True)
    text = str(error)
    if _FULL.search(text):
        return _failed("it is full; free some space, or raise its quota", retryable=True)
    denied = exceptions.PermissionDeniedError | exceptions.UnauthenticatedError
    # If a listing fails, the class of obstore's error does not tell the cause, but the text of the
    # error contains the HTTP status.
    status = _STATUS.search(text)
    if isinstance(error, denied) or (status and status[1] in ("401", "403")):
        return _failed("access was denied; check the credentials and their permissions")
    if status and status[1] == "404":
        return _Missing()
    return _failed(
        "it cannot be reached, or failed; check its address, credentials, network and status",
        retryable=True,
    )


def _failed(text: str, *, retryable: bool = False) -> ArtifactStoreError:
    return ArtifactStoreError(f"the artifact store: {text}", retryable=retryable)


def _no_bucket() -> ArtifactStoreError:
    return _failed("the bucket does not exist; create it, or check the URL")
