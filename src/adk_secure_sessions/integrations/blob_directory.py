"""Store blobs as files in a directory, so that a stored blob survives a power failure.

obstore's store for directories does not flush files to the disk: after a power failure, an artifact
that was saved successfully could be empty.  Before `BlobDirectory.put` returns, it flushes the file
and the file's directories to the disk (fsync), as SQLite does at a commit.  On an SSD, this takes
about as long as a commit.  `BlobDirectory` also needs no library, and works in forked processes.
"""

import asyncio
import errno
import os
import re
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

from adk_secure_sessions.errors import ArtifactStoreError, Reason, TamperedError
from adk_secure_sessions.loops import await_to_end

T = TypeVar("T")

_NUMBER = re.compile(r"[0-9]{1,9}")
_NAME = re.compile(r"[0-9a-f]{32}")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_BINARY = getattr(os, "O_BINARY", 0)


class StoredObject(NamedTuple):
    """One object of a blob, as a `list` method yields it.

    Attributes:
        name: The name of the blob.
        number: The number of the object; None for anything else that is stored under the blob's
            name.
        size: The size in bytes.
        modified: When the object was last modified, in seconds since 1970.
    """

    name: str
    number: int | None
    size: int
    modified: float


class BlobDirectory:
    """Stores the objects of blobs as files `NAME/K` in one directory.

    NAME is the name of the blob, and K is the number of the object.  The class creates directories
    with the mode 0700, and files with the mode 0600.
    """

    def __init__(self, directory: Path, *, create: bool = True) -> None:
        """With *create*, create *directory* and its parents if they are missing."""
        self._directory = directory.absolute()  # the process may change its working directory
        if create:
            _translating(lambda: _make_directory(self._directory))

    async def put(self, name: str, number: int, data: bytes) -> None:
        path = self._directory / name / str(number)
        await _in_thread(lambda: _write(path, data))

    async def get(self, name: str, number: int, size: int, start: int, stop: int) -> bytes:
        path = self._directory / name / str(number)
        return await _in_thread(lambda: _read(path, size, start, stop))

    async def delete(self, name: str) -> None:
        directory = self._directory / name
        await _in_thread(lambda: _delete(directory))

    async def list(self, name: str | None = None) -> AsyncIterator[StoredObject]:
        if name is not None:
            names = [name]
        else:
            names = await _in_thread(lambda: sorted(_blob_names(self._directory)))
        for each in names:
            for found in await _in_thread(
                lambda each=each: _objects(self._directory / each)  # type: ignore[misc]
            ):
                yield found


async def _in_thread(call: Callable[[], T]) -> T:
    """Run *call* in a thread, and wait until it has ended even if the caller is cancelled."""
    loop = asyncio.get_running_loop()
    return await await_to_end(loop.run_in_executor(None, _translating, call), None)


def _translating(call: Callable[[], T]) -> T:
    """Run *call*; replace an OSError by an ArtifactStoreError, which does not quote the path."""
    try:
        return call()
    except OSError as raised:
        number = raised.errno
    if number in _FULL:
        text, retryable = "the disk is full; free some space, or raise the quota", True
    elif number in _DENIED:
        text, retryable = "access was denied; check the owner and the mode of the directory", False
    elif number in (errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.ELOOP):
        text, retryable = "it is not a directory, or something else changes it", False
    else:
        code = errno.errorcode.get(number or 0, "an error")
        text, retryable = f"the file system failed ({code}); check the disk", True
    raise ArtifactStoreError(f"the directory of artifacts: {text}", retryable=retryable)


def _make_directory(directory: Path) -> None:
    """Create *directory* and its missing parents, and flush them to the disk."""
    missing = []
    while not directory.is_dir():
        missing.append(directory)
        directory = directory.parent
    for path in reversed(missing):
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:  # another process has created the directory, or it is a file
            if not path.is_dir():
                raise
        _sync_directory(path.parent)


def _write(path: Path, data: bytes) -> None:
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | _NO_LINK | _BINARY
    is_new = True
    try:
        path.parent.mkdir(mode=0o700)
    except FileExistsError:
        is_new = False
    # The file needs no temporary name: nothing reads it before a record names the blob.
    with open(os.open(path, flags, 0o600), "wb", buffering=0) as file:
        view = memoryview(data)
        while view:
            view = view[file.write(view) :]
        os.fsync(file.fileno())
    _sync_directory(path.parent)
    if is_new:
        _sync_directory(path.parent.parent)


def _sync_directory(directory: Path) -> None:
    if os.name == "nt":  # Windows cannot open a directory
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot flush a directory.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _read(path: Path, size: int, start: int, stop: int) -> bytes:
    try:
        # Without O_NONBLOCK, opening a named pipe (FIFO) would wait until a process writes to it.
        flags = os.O_RDONLY | _NO_LINK | _BINARY | getattr(os, "O_NONBLOCK", 0)
        descriptor = os.open(path, flags)
    except (FileNotFoundError, NotADirectoryError):
        descriptor = -1
    if descriptor < 0:
        raise TamperedError(
            "a blob is missing: it was deleted outside the service, or this is not the directory "
            "that it was written to",
            reason=Reason.MISSING,
        )
    with open(descriptor, "rb", buffering=0) as file:
        data = b""
        if os.fstat(descriptor).st_size == size:
            file.seek(start)
            data = _read_exactly(file.read, stop - start)
    if len(data) != stop - start or not data:
        raise TamperedError(
            "a blob does not have the length that it was written with", reason=Reason.MISMATCH
        )
    return data


def _read_exactly(read: Callable[[int], bytes | None], length: int) -> bytes:
    pieces = []
    while length:
        piece = read(length)
        if not piece:
            break
        pieces.append(piece)
        length -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _delete(directory: Path) -> None:
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return
    for name in names:
        try:
            os.unlink(directory / name)
        except FileNotFoundError:  # another process has deleted the file
            pass
    try:
        directory.rmdir()
    except FileNotFoundError:
        pass


def _blob_names(directory: Path) -> Iterator[str]:
    try:
        entries = os.scandir(directory)
    except FileNotFoundError:  # nothing was stored
        return
    with entries:
        for entry in entries:
            if _NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                yield entry.name


def _objects(directory: Path) -> list[StoredObject]:
    """Return the objects of the blob in *directory*.

    For an empty directory, return one entry of 0 bytes, so that a listing includes the blob.
    """
    found: list[StoredObject] = []
    try:
        modified = directory.stat().st_mtime
        with os.scandir(directory) as entries:
            for entry in entries:
                number = int(entry.name) if _NUMBER.fullmatch(entry.name) else None
                status = entry.stat(follow_symlinks=False)
                found.append(StoredObject(directory.name, number, status.st_size, status.st_mtime))
    except FileNotFoundError:  # deleted in the meantime
        return found
    return found or [StoredObject(directory.name, None, 0, modified)]
