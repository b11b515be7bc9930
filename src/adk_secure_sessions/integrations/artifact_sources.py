"""Read artifacts where google-adk's artifact services have stored them.

google-adk's interface cannot list apps and users.  So `FileArtifacts` and `GcsArtifacts` list the
paths of a directory and the names of the objects in a bucket, and of `ServiceArtifacts`, the caller
names the sessions.
"""

import codecs
import io
import json
import os
import re
import shutil
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from itertools import groupby
from operator import itemgetter
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from adk_secure_sessions.concurrency import to_thread
from adk_secure_sessions.errors import ArtifactStoreError, ConfigurationError, SecureSessionError
from adk_secure_sessions.formats.json_text import MAX_LEVELS, JsonObject, exact_values
from adk_secure_sessions.hiding import hides_locals
from adk_secure_sessions.integrations.artifact_versions import USER_PREFIX, mime_type_of
from adk_secure_sessions.maintenance.database import Description
from adk_secure_sessions.migration.sources import ConversionError

if TYPE_CHECKING:
    from google.adk.artifacts.base_artifact_service import ArtifactVersion, BaseArtifactService
    from google.genai import types

T = TypeVar("T")

_PIECE = 2**20  # the number of bytes that are read at once
# The path of the directory with the versions of an artifact: the app, the user, the session and the
# artifact.  Each may contain slashes: google-adk then accepts none of the words between them.
_VERSIONS = re.compile(r"(.+?)/users/(.+?)(?:/sessions/(.+?))?/artifacts/(.+)/versions", re.DOTALL)


@dataclass(frozen=True, slots=True, repr=False)
class SourceVersion:
    """A version of an artifact; *values* are `part`, `metadata` and `time` of a `Version`."""

    number: int
    values: JsonObject
    etag: str  # differs after each change of the content or the metadata
    size: int  # bytes
    open: Callable[[], BinaryIO] | None  # None for a part that refers to a file

    async def content(self) -> AsyncIterator[bytes]:
        """Yield the content; raise ConversionError if it cannot be read, or cannot be copied."""
        assert self.open is not None
        size = 0
        # The encrypted service could not read a text that is not UTF-8.
        is_text = "text" in self.values["part"]
        decoder = codecs.getincrementaldecoder("utf-8")() if is_text else None
        try:
            with closing(await _in_thread(self.open)) as file:
                while piece := await _in_thread(file.read, _PIECE):
                    size += len(piece)
                    if decoder:
                        decoder.decode(piece, size == self.size)
                    yield piece
        except UnicodeDecodeError:
            raise ConversionError(f"version {self.number} is a text that is not UTF-8") from None
        except ArtifactStoreError as error:
            raise ConversionError(f"version {self.number}: {error}") from None
        if size != self.size:
            raise ConversionError("it has changed while it was read: run this again")


@dataclass(frozen=True, slots=True, repr=False)
class SourceArtifact:
    """An artifact of the source.

    If *problem* is not empty, it says why the artifact cannot be copied, and versions are missing.
    An interrupted save may leave an artifact without versions.
    """

    app_name: str
    user_id: str
    session_id: str | None  # None for an artifact of the user, whose name begins with `user:`
    filename: str
    versions: Sequence[SourceVersion]
    problem: str = ""
    delete: Callable[[], None] = lambda: None  # deletes these versions, and none that is newer

    @property
    def owner(self) -> tuple[str, str]:
        return self.app_name, self.user_id

    @property
    def ids_and_etags(self) -> tuple[str, ...]:
        ids = (*self.owner, self.session_id or "", self.filename, self.problem)
        return *ids, *(version.etag for version in self.versions)


@hides_locals
class ArtifactSource:
    """The artifacts that google-adk stores in a directory, a bucket or a service, in plaintext.

    A subclass implements `_walk`, which runs in a thread, or overrides `artifacts`.
    """

    description: Description | None = None  # None if artifacts cannot be deleted there

    async def artifacts(self) -> AsyncIterator[SourceArtifact]:
        """Yield all artifacts."""
        walk = self._walk()
        while (found := await _in_thread(next, walk, None)) is not None:
            yield found

    def _walk(self) -> Iterator[SourceArtifact]:
        raise NotImplementedError

    async def describe(self) -> Description:
        """Return `description` with the number of its artifacts."""
        assert self.description is not None
        count = sum([bool(found.versions) async for found in self.artifacts()])
        return self.description._replace(item_count=count)

    async def delete(self, artifact: SourceArtifact) -> None:
        await _in_thread(artifact.delete)

    async def clean_up(self) -> None:
        """Remove the empty directories of deleted artifacts, also those of a killed run."""


async def _in_thread(call: Callable[..., T], *arguments: Any) -> T:
    return await _translate_errors(to_thread(call, *arguments))


async def _translate_errors(call: Awaitable[T]) -> T:
    try:
        return await call
    except (SecureSessionError, ConversionError):
        raise
    except Exception as error:  # its text quotes a path or the name of an object, which contain ids
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise ArtifactStoreError(
            f"the source cannot be used: {reason}; check the permissions, and that no process "
            "writes to the source"
        ) from None


@hides_locals
class FileArtifacts(ArtifactSource):
    """The directory of google-adk's `FileArtifactService`.

    An artifact gets the name with which its latest version was saved.  The names of users'
    artifacts begin with `user:`, also if they were saved without a session.

    Args:
        root_dir: The `root_dir` of the service.

    Raises:
        ConfigurationError: The directory does not have the form of that service.
    """

    def __init__(self, root_dir: str | os.PathLike[str]) -> None:
        self._root = Path(root_dir).expanduser().resolve()
        self.description: Description = Description(
            None, str(self._root), 0, None, "directory", "artifact"
        )
        if (self._root / "users").exists():
            raise ConfigurationError(
                "an older google-adk has stored artifacts in the source, whose directory 'users' "
                "names no app: move it to apps/NAME/users, with the name of the app"
            )
        if not (self._root / "apps").is_dir():
            raise ConfigurationError(
                "the source is not the directory of a FileArtifactService, because it has no "
                "directory 'apps': check the path"
            )

    def _walk(self) -> Iterator[SourceArtifact]:
        root = self._root / "apps"
        for name, below, files in os.walk(root, onerror=_raise_unless_missing):
            directory = Path(name)
            # A link may lead anywhere.
            if any((directory / one).is_symlink() for one in ("", *below, *files)):
                raise ConfigurationError(
                    "the source contains a symbolic link: replace the link by what it names"
                )
            if found := _VERSIONS.fullmatch(directory.relative_to(root).as_posix()):
                yield _read_artifact(found, directory, below)
                # google-adk 1.28 saved artifacts whose names contain a directory `versions`.
                below[:] = [one for one in below if not one.isdecimal()]
            below.sort()

    async def clean_up(self) -> None:
        await _in_thread(_remove_empty, self._root / "apps")


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):  # a service may delete directories meanwhile
        raise error


def _read_artifact(found: re.Match[str], parent: Path, names: Sequence[str]) -> SourceArtifact:
    app_name, user_id, session_id, path = found.groups()
    # google-adk saves a version in a directory with another name, and renames it at the end.
    numbers = sorted(int(name) for name in names if name.isdecimal())
    name, versions, problem = path, list[SourceVersion](), ""
    try:
        for number in numbers:
            name, version = _read_version(parent / str(number), number)
            versions.append(version)
    # The texts of these errors quote values.
    except (AttributeError, OSError, KeyError, RecursionError, TypeError, ValueError):
        problem = (
            f"version {numbers[len(versions)]} has no content or no readable metadata.json, or "
            "contains a directory: restore the files, or delete the artifact in the source"
        )
    if _path_of(name) != path or (session_id is not None and name.startswith(USER_PREFIX)):
        problem = "its metadata.json has the name of another artifact"
    if session_id is None and not name.startswith(USER_PREFIX):
        name = USER_PREFIX + name
    delete = partial(_delete_versions, parent, numbers)
    return SourceArtifact(app_name, user_id, session_id, name, versions, problem, delete)


def _read_version(directory: Path, number: int) -> tuple[str, SourceVersion]:
    """Return the name with which a version was saved, and the version."""
    with _open(directory / "metadata.json") as file:
        stored = json.load(file)
    part: JsonObject = {"text": ""}
    if mime_type := stored.get("mimeType"):
        part = {"inline_data": {"mime_type": mime_type}}
        if (display_name := stored.get("displayName")) is not None:
            part["inline_data"]["display_name"] = display_name
    # The file of the content has the last part of the artifact's path as its name.  Do not use the
    # URI in metadata.json: an attacker may have changed the URI to that of any file.
    path = directory / directory.parent.parent.name
    status = path.lstat()
    # A directory may contain another artifact, whose name is not told from that of a version.
    if not stat.S_ISREG(status.st_mode) or any(one.is_dir() for one in directory.iterdir()):
        raise ValueError
    metadata, time = dict(stored.get("customMetadata") or {}), float(stored["createTime"])
    values = {"part": part, "metadata": metadata, "time": time}
    etag = f"{status.st_ino} {status.st_size} {status.st_mtime_ns} {stored}"
    version = SourceVersion(number, values, etag, status.st_size, partial(_open, path))
    return str(stored["fileName"]), version


def _open(path: Path) -> BinaryIO:
    no_link = getattr(os, "O_NOFOLLOW", 0)  # Windows has no such flag
    return open(path, "rb", opener=lambda name, flags: os.open(name, flags | no_link))


def _path_of(name: str) -> str:
    """Return the path that google-adk makes of the name of an artifact."""
    bare = name.removeprefix(USER_PREFIX).strip()
    path = PurePosixPath(PureWindowsPath(bare).as_posix() if "\\" in bare else bare).as_posix()
    return "artifact" if path == "." else path


def _delete_versions(parent: Path, numbers: Sequence[int]) -> None:
    """Delete versions and unfinished versions.

    The latest version is first, and becomes an unfinished one at once.  So if the process stops,
    no version is missing before another one, and the next run continues.
    """
    for number in reversed(numbers):
        (parent / str(number)).rename(parent / f".{number}.deleted.pending")
    for unfinished in parent.glob(".*.pending"):
        shutil.rmtree(unfinished)


def _remove_empty(root: Path) -> None:
    """Remove the empty directories below *root*: their names are ids and names of artifacts."""
    for directory, _, _ in os.walk(root, topdown=False, onerror=_raise_unless_missing):
        if Path(directory) != root and not os.listdir(directory):
            os.rmdir(directory)


@hides_locals
class GcsArtifacts(ArtifactSource):
    """The bucket of google-adk's `GcsArtifactService`.

    Objects whose names do not have the form of that service are ignored.

    Args:
        bucket_name: The name of the bucket.
        client: A `google.cloud.storage.Client`.  By default, a new one finds its credentials in the
            environment, as in google-adk's service.

    Raises:
        ConfigurationError: google-cloud-storage is not installed, or there are no credentials.
    """

    def __init__(self, bucket_name: str, client: Any = None) -> None:
        server, self._bucket_name = "Google Cloud Storage", bucket_name
        self.description: Description = Description(
            server, bucket_name, 0, None, "bucket", "artifact"
        )
        self._client = _new_client() if client is None else client

    def _walk(self) -> Iterator[SourceArtifact]:
        # The names are sorted, so the objects of one session are adjacent.  The versions of one
        # artifact are not: "doc/1" and "doc/2" are of "doc", and between them is "doc/1/0".
        listed = self._client.list_blobs(self._bucket_name)
        for scope, blobs in groupby(listed, lambda blob: blob.name.split("/", 3)[:3]):
            found: dict[str, list[tuple[int, Any]]] = {}
            for blob in blobs:
                name, slash, number = "/".join(blob.name.split("/", 3)[3:]).rpartition("/")
                if slash and number.isascii() and number.isdecimal():
                    found.setdefault(name, []).append((int(number), blob))
            for name, numbered in sorted(found.items()):
                app_name, user_id, session_id = scope
                scope_id = None if name.startswith(USER_PREFIX) else session_id
                numbered.sort(key=itemgetter(0))
                versions = [_blob_version(blob, number) for number, blob in numbered]
                delete = partial(_delete_blobs, [blob for _, blob in numbered])
                yield SourceArtifact(app_name, user_id, scope_id, name, versions, delete=delete)


def _new_client() -> Any:
    try:
        from google.cloud import storage  # type: ignore[import-untyped,attr-defined,unused-ignore]

        return storage.Client()
    except ImportError:
        raise ConfigurationError(
            "a bucket of artifacts of google-adk needs the package google-cloud-storage: install it"
        ) from None
    except Exception as error:
        raise ConfigurationError(
            f"the bucket of the source cannot be opened ({type(error).__name__}): check the "
            "credentials of Google Cloud"
        ) from None


def _blob_version(blob: Any, number: int) -> SourceVersion:
    stored = dict(blob.metadata or {})
    file_uri = stored.get("adkFileUri") or stored.get("file_uri")
    mime_type = blob.content_type
    if file_uri and ("adkFileMimeType" in stored or file_uri.startswith("artifact://")):
        mime_type = stored.get("adkFileMimeType")
    data = {"mime_type": mime_type, "display_name": stored.get("adkDisplayName")}
    data = {name: value for name, value in data.items() if value}
    part: JsonObject = {"inline_data": data}
    if file_uri:
        part = {"file_data": {"file_uri": file_uri, **data}}
    elif stored.get("adkIsText") == "true":
        part = {"text": ""}
    internal = ("adkDisplayName", "adkIsText", "adkFileUri", "adkFileMimeType", "file_uri")
    metadata = {name: value for name, value in stored.items() if name not in internal}
    values = {"part": part, "metadata": metadata, "time": blob.time_created.timestamp()}
    read = None if file_uri else partial(blob.open, "rb", if_generation_match=blob.generation)
    etag = f"{blob.generation} {blob.metageneration}"
    return SourceVersion(number, values, etag, blob.size, read)


def _delete_blobs(blobs: Sequence[Any]) -> None:
    for blob in reversed(blobs):  # if the process stops, no version is missing before another one
        blob.delete(if_generation_match=blob.generation)


@hides_locals
class ServiceArtifacts(ArtifactSource):
    """Another artifact service: the artifacts of the given sessions, and of their users.

    All versions of an artifact are in memory at the same time.  They are not erased: a service's
    `delete_artifact` would also delete versions that were saved meanwhile.

    A version of the type `application/octet-stream` that loads as None is one that a rewind of the
    session has saved, and is copied as such.  A reference to another artifact (`artifact://`) loads
    as the content of the other artifact.  Therefore a version that loads with another type than it
    is listed with is not copied.  A `GcsArtifactService` lists some references with that type: read
    it with `GcsArtifacts`.

    Args:
        service: The service; it implements `list_artifact_versions`.
        sessions: The app name, the user id and the session id of each session.
    """

    def __init__(
        self, service: "BaseArtifactService", sessions: Iterable[tuple[str, str, str]]
    ) -> None:
        from google.adk.artifacts import FileArtifactService

        self._service, self._sessions = service, list(sessions)
        self._is_file_service = isinstance(service, FileArtifactService)

    async def artifacts(self) -> AsyncIterator[SourceArtifact]:
        seen: set[tuple[str | None, ...]] = set()
        for app_name, user_id, session_id in self._sessions:
            ids = {"app_name": app_name, "user_id": user_id, "session_id": session_id}
            names = set(await _translate_errors(self._service.list_artifact_keys(**ids)))
            if self._is_file_service:
                # It lists an artifact of the user that was saved without a session without `user:`,
                # also if an artifact of the session has the same name.
                names |= {USER_PREFIX + name.removeprefix(USER_PREFIX) for name in names}
            for filename in sorted(names):
                scope_id = None if filename.startswith(USER_PREFIX) else session_id
                artifact_ids = ids | {"session_id": scope_id, "filename": filename}
                if (key := tuple(artifact_ids.values())) not in seen:
                    seen.add(key)
                    yield await self._read(artifact_ids)

    async def _read(self, ids: dict[str, Any]) -> SourceArtifact:
        versions, problem = list[SourceVersion](), ""
        listed = await _translate_errors(self._service.list_artifact_versions(**ids))
        try:
            for version in sorted(listed, key=lambda one: one.version):
                load = self._service.load_artifact(**ids, version=version.version)
                versions.append(await _translate_errors(self._convert(version, load)))
        except ConversionError as error:
            problem = str(error)
        return SourceArtifact(**ids, versions=versions, problem=problem)

    async def _convert(
        self, listed: "ArtifactVersion", load: "Awaitable[types.Part | None]"
    ) -> SourceVersion:
        from adk_secure_sessions.integrations import artifacts

        mime_type = listed.mime_type
        try:
            part = await load
            if part is None and mime_type == artifacts.REWIND_TYPE:
                part = artifacts.REWIND_PLACEHOLDER
            if part is None:
                raise ValueError
            values, content = artifacts.split_part(part)
            metadata = exact_values(listed.custom_metadata, MAX_LEVELS, "custom_metadata")
        except ValueError:  # its text quotes values
            reason = f"version {listed.version} has no readable content"
            raise ConversionError(reason) from None
        # A FileArtifactService lists no type for a text, and stores no references.
        is_untyped = mime_type is None and self._is_file_service
        if mime_type != mime_type_of(values) and not is_untyped:
            raise ConversionError(
                f"version {listed.version} loads with another type than it is listed with, as a "
                "reference to another artifact does: copy this artifact yourself, or delete it in "
                "the source"
            )
        data = content or b""
        values = {"part": values, "metadata": metadata, "time": listed.create_time}
        etag = f"{sha256(data).hexdigest()} {values}"
        read = None if content is None else partial(io.BytesIO, data)
        return SourceVersion(listed.version, values, etag, len(data), read)
