"""The stores of the contents of artifacts: a directory, or a bucket through `obstore`."""

import asyncio
import logging
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import urlsplit
from urllib.request import url2pathname

from adk_secure_sessions.errors import ArtifactStoreError, ConfigurationError, TamperedError
from adk_secure_sessions.formats.blobs import require_blob_length
from adk_secure_sessions.hiding import HoldsSecrets, hides_locals
from adk_secure_sessions.integrations.blob_directory import BlobDirectory, make_directory
from adk_secure_sessions.integrations.blob_store import (
    MARKS,
    OBJECT_NAME,
    BlobStore,
    StoredObject,
    missing_blob_error,
)
from adk_secure_sessions.keys.remote import check_transport, require

if TYPE_CHECKING:
    from obstore.store import ObjectStore

logger: logging.Logger = logging.getLogger(__name__)
TIMEOUT = 60.0  # the default limit for one request and its retries, in seconds
# For each scheme, the class of obstore, and how the environment variables begin that it reads.
_SCHEMES = {
    "s3": ("S3Store", "AWS_"),
    "gs": ("GCSStore", "GOOGLE_"),
    "az": ("AzureStore", "AZURE_"),
}
# Object stores, and servers that imitate S3, report a full store with different words.
_FULL = re.compile(r"StorageFull|QuotaExceeded|InsufficientStorage|InsufficientCapacity|code: 507")
_STATUS = re.compile(r"status code: ([0-9]{3})")


# --- opening -------------------------------------------------------------------------------------


@hides_locals
class ArtifactStore(HoldsSecrets):
    """The place of the contents of artifacts, with the options to open it.

    Args:
        store: A path or `file:///DIRECTORY`, which is created if it is missing;
            `s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX`, `az://CONTAINER/PREFIX` or `memory://`; or a
            store of the library `obstore`.
        options: For a URL: arguments of the class in `obstore`, such as `endpoint`, `region`,
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
        self._opened_prefixes: set[str] = set()  # see `BlobDirectory`
        self._remote: ObjectStore | None = None
        if isinstance(store, str | os.PathLike):
            self._directory = directory_of(store)
            if self._directory is None:
                require("artifacts", "obstore", user="this artifact store")
                self._remote = _open_url(os.fspath(store), dict(options or {}), allow_http, timeout)
            elif options:
                raise ConfigurationError("a directory of artifacts has no options")
            return
        if options or allow_http:
            raise ConfigurationError(
                "a store of obstore has its options already: pass them to its own class"
            )
        require("artifacts", "obstore", user="this store")
        from obstore.store import AzureStore, GCSStore, LocalStore, MemoryStore, S3Store

        if isinstance(store, LocalStore) and store.prefix is not None:
            self._directory = Path(store.prefix).absolute()
        elif isinstance(store, S3Store | GCSStore | AzureStore | MemoryStore):
            self._remote = store
        else:
            raise ConfigurationError(
                "an artifact store is a path, a URL, or an S3Store, GCSStore, AzureStore, "
                "MemoryStore or LocalStore of obstore"
            )

    def prepare(self, *, create: bool) -> None:
        """Create the directory of the store, or check that it exists; do nothing for a bucket.

        Raises:
            ConfigurationError: *create* is False, and the directory does not exist.
            ArtifactStoreError: The directory cannot be created, or not be opened.
        """
        if self._directory is not None and create:
            make_directory(self._directory)
        elif self._directory is not None and not self._directory.is_dir():
            raise ConfigurationError("the directory of artifacts does not exist: check its path")

    def blobs(self, prefix: str) -> BlobStore:
        """Open the blobs under *prefix*; each database has its own prefix."""
        if self._remote is not None:
            return _Bucket(self._remote, prefix, self._timeout)
        assert self._directory is not None
        return BlobDirectory(self._directory, prefix, self._opened_prefixes)


# What the functions that take a store accept; a path or a store of obstore needs no options.
AnyStore: TypeAlias = "str | os.PathLike[str] | ObjectStore | ArtifactStore"


def as_store(store: AnyStore) -> ArtifactStore:
    return store if isinstance(store, ArtifactStore) else ArtifactStore(store)


def directory_of(store: "str | os.PathLike[str]") -> Path | None:
    """Return the directory that *store* names; None if *store* is the URL of another store."""
    text = os.fspath(store)
    if not text:
        raise ConfigurationError("the artifact store is empty: give a directory or a URL")
    scheme, separator, _ = text.partition("://")
    if not separator:
        if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:", text):
            raise ConfigurationError("the URL of an artifact store has :// after its scheme")
        return Path(text).absolute()  # the process may change its working directory
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
    if scheme not in (*_SCHEMES, "memory"):
        known = ", ".join(f"{name}://" for name in (*_SCHEMES, "memory"))
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
    name, prefix = _SCHEMES[scheme]
    milliseconds = max(1, round(timeout * 1000))
    client: dict[str, Any] = {"connect_timeout": "5s", "timeout": f"{milliseconds}ms"}
    client |= options.pop("client_options", None) or {}
    retries: dict[str, Any] = {"max_retries": 3, "retry_timeout": timedelta(seconds=timeout)}
    retries |= options.pop("retry_config", None) or {}
    arguments = {"prefix": parts.path.strip("/") or None} | options
    arguments |= {"client_options": client, "retry_config": retries}
    variables = {key: text for key, text in os.environ.items() if key.upper().startswith(prefix)}
    try:
        http_endpoints = _http_endpoints(variables, options, options.get("config") or {})
        # Set the option in any case, so that a variable such as AWS_ALLOW_HTTP has no effect.
        client["allow_http"] = bool(http_endpoints)
        opened: Any = getattr(stores, name)(parts.netloc, **arguments)
    except (BaseError, TypeError, ValueError):
        raise ConfigurationError(
            "the artifact store cannot be opened: check its options, and the environment variables "
            f"that begin with {prefix}"
        ) from None
    for address in http_endpoints:
        try:
            check_transport(address, "an artifact store")
        except ConfigurationError:
            if not allow_http:
                raise
            logger.warning(
                "the artifact store is on another machine, and has no TLS: anybody on the network "
                "can read the names of blobs, replace or delete blobs, and may read credentials"
            )
    return opened  # type: ignore[no-any-return]


def _http_endpoints(*settings: Mapping[str, Any]) -> list[str]:
    """Return the endpoints in *settings* that begin with http://."""
    return [
        str(value)
        for options in settings
        for name, value in options.items()
        if re.search("endpoint|url", name, re.IGNORECASE) and "metadata" not in name.lower()
        if str(value).lower().startswith("http:")
    ]


# --- stores of obstore ---------------------------------------------------------------------------


@cache
def _first_process() -> int:
    """Return the id of the process that first used obstore."""
    return os.getpid()


class _Bucket(BlobStore):
    """The blobs in a store of `obstore`."""

    def __init__(self, store: "ObjectStore", prefix: str, timeout: float) -> None:
        import obstore

        super().__init__(prefix)
        self._obstore: Any = obstore
        self._store = store
        # obstore ends a request after *timeout*.  This longer limit ends the request if the threads
        # of obstore do not run.
        self._timeout = timeout + 5

    def _path(self, folder: str, name: str | int) -> str:
        return f"{self.prefix}/{folder}/{name}"

    async def _put(self, folder: str, name: str, data: bytes, *, replace: bool = False) -> None:
        path = self._path(folder, name)
        await self._call(
            lambda: self._obstore.put_async(self._store, path, data, use_multipart=False)
        )

    async def _get(self, name: str, number: int, size: int, start: int, stop: int) -> bytes:
        path = self._path(name, number)
        whole = (start, stop) == (0, size)

        async def call() -> Any:
            options: Any = None if whole else {"range": (start, stop)}
            answer = await self._obstore.get_async(self._store, path, options=options)
            # Check the size before reading the content: an attacker may have replaced the object by
            # a very large one.
            require_blob_length(answer.meta["size"], size)
            return await answer.bytes_async()

        missing = missing_blob_error("store")
        try:
            return bytes(await self._call(call, missing))
        except ArtifactStoreError:
            # If a range is not within an object, or the object is missing, some stores report an
            # error that does not name the cause.
            if not whole:
                head = partial(self._obstore.head_async, self._store, path)
                require_blob_length((await self._call(head, missing))["size"], size)
            raise

    async def delete(self, name: str) -> None:
        objects = await self._objects(name)
        names = [one.name for one in objects if OBJECT_NAME.fullmatch(one.name)]
        if names:
            await self._delete_objects([self._path(name, one) for one in names])

    async def unmark(self, name: str) -> None:
        await self._delete_objects([self._path(MARKS, name)])

    async def _delete_objects(self, paths: Sequence[str]) -> None:
        with suppress(FileNotFoundError):
            delete = partial(self._obstore.delete_async, self._store, paths)
            await self._call(delete, FileNotFoundError())

    async def _objects(self, folder: str | None) -> list[StoredObject]:
        below = self.prefix if folder is None else f"{self.prefix}/{folder}"
        stream: Any = self._obstore.list(self._store, below, chunk_size=1000)
        objects: list[StoredObject] = []
        while (batch := await self._call(lambda: anext(stream, None))) is not None:
            for meta in batch:
                path = str(meta["path"]).removeprefix(f"{self.prefix}/")
                found, _, name = path.partition("/")
                modified = meta["last_modified"].timestamp()
                objects.append(StoredObject(found, name, int(meta["size"]), modified))
        return objects

    @hides_locals
    async def _call(self, call: Any, missing: Exception | None = None) -> Any:
        """Run *call*; replace its errors by our own, which quote neither the store nor the URL.

        *missing* is the error for a missing object; None if only the bucket can be missing.
        """
        # In a process that was forked later, obstore has no threads, and would wait for ever.
        if _first_process() != os.getpid():
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
            raise _translated_error(error, missing) from None


def _translated_error(error: Exception, missing: Exception | None) -> Exception:
    """Return our error for *error* of obstore."""
    from obstore import exceptions

    missing = missing or _store_error("the bucket does not exist; create it, or check the URL")
    if isinstance(error, FileNotFoundError):
        return missing
    if isinstance(error, TimeoutError):
        return _store_error("no answer in time; check its address and the network", retryable=True)
    text = str(error)
    if _FULL.search(text):
        return _store_error("it is full; free some space, or raise its quota", retryable=True)
    denied = exceptions.PermissionDeniedError | exceptions.UnauthenticatedError
    # If a listing fails, the class of obstore's error does not tell the cause, but the text of the
    # error contains the HTTP status.
    status = _STATUS.search(text)
    if isinstance(error, denied) or (status and status[1] in ("401", "403")):
        return _store_error("access was denied; check the credentials and their permissions")
    if status and status[1] == "404":
        return missing
    return _store_error(
        "it cannot be reached, or failed; check its address, credentials, network and status",
        retryable=True,
    )


def _store_error(text: str, *, retryable: bool = False) -> ArtifactStoreError:
    return ArtifactStoreError(f"the artifact store: {text}", retryable=retryable)
