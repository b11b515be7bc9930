"""Store blobs as files in a directory, so that a stored blob survives a power failure.

obstore's store for directories does not flush files to the disk: after a power failure, an artifact
that was saved successfully could be empty.  `BlobDirectory` flushes each file and its directories
to the disk (fsync), as SQLite does at a commit.  On an SSD, this takes
about as long as a commit.  In addition, `BlobDirectory` needs no library, and works in forked
processes.

Other users of the machine may be able to write to the directory.  So this module follows no
symbolic link below the directory that the operator gave.  Otherwise, a link in the place of a blob
could make `BlobDirectory.delete` delete files elsewhere.  To exclude links, this module opens each
directory by its name, relative to the descriptor of the parent directory.
"""

import asyncio
import errno
import logging
import os
import stat
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from adk_secure_sessions.concurrency import await_to_end
from adk_secure_sessions.errors import ArtifactStoreError, Reason, TamperedError
from adk_secure_sessions.formats.blobs import check_size
from adk_secure_sessions.integrations.blob_store import (
    BLOB_ID,
    DELETED,
    NUMBER,
    BlobStore,
    StoredObject,
    missing_blob,
)

logger: logging.Logger = logging.getLogger(__name__)

T = TypeVar("T")

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_BINARY = getattr(os, "O_BINARY", 0)
_DIRECTORY = getattr(os, "O_DIRECTORY", 0)
# With this flag, opening a directory needs no permission to list its entries.
_PASS = getattr(os, "O_PATH", 0)
# Without O_NONBLOCK, opening a named pipe (FIFO) would wait until a process writes to it.
_NO_WAIT = getattr(os, "O_NONBLOCK", 0)
# The errors that `open` raises if a link or a socket is in the place of a blob or an object, or if
# a file is in the place of a blob.
_REPLACED = (errno.ENOTDIR, errno.ELOOP, errno.EMLINK, errno.ENXIO)
_NOT_EMPTY = (errno.ENOTEMPTY, errno.EEXIST)
_HAS_DESCRIPTORS = os.open in os.supports_dir_fd and os.scandir in os.supports_fd  # not on Windows


class BlobDirectory(BlobStore):
    """Stores the objects of blobs as files `NAME/K` in one directory, and marks as `deleted/NAME`.

    Directories get the mode 0700, and files 0600.
    """

    def __init__(self, root: Path, prefix: str) -> None:
        """Use the directory *prefix* in *root*, an absolute path; create it with the first file."""
        super().__init__(prefix)
        self._directory = root / prefix

    async def _put(self, folder: str, name: str, data: bytes, *, replace: bool = False) -> None:
        await _in_thread(lambda: _write(self._directory, folder, name, data, replace=replace))

    async def _get(self, name: str, number: int, size: int, start: int, stop: int) -> bytes:
        return await _in_thread(lambda: _read(self._directory, name, number, size, start, stop))

    async def _delete(self, name: str) -> None:
        await _in_thread(lambda: _delete(self._directory, name))

    async def _unmark(self, name: str) -> None:
        await _in_thread(lambda: _unmark(self._directory, name))

    async def _objects(self, folder: str | None) -> AsyncIterator[StoredObject]:
        for found in await _in_thread(lambda: _objects(self._directory, folder)):
            yield found


async def _in_thread(call: Callable[[], T]) -> T:
    """Run *call* in a thread, and wait until it has ended, even if the caller is cancelled."""
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
    elif number in (errno.ENOENT, errno.EEXIST, *_REPLACED):
        text = "it is not a directory, or is a symbolic link, or something else changes it"
        retryable = False
    else:
        code = errno.errorcode.get(number or 0, "an error")
        text, retryable = f"the file system failed ({code}); check the disk", True
    raise ArtifactStoreError(f"the directory of artifacts: {text}", retryable=retryable)


class _Folder:
    """An open directory, whose entries are opened relative to its descriptor, not by its path.

    Windows has no descriptors of directories: there, the path is checked and used.
    """

    def __init__(self, path: Path, descriptor: int | None) -> None:
        self._path = path
        self.descriptor = descriptor

    def at(self, name: str) -> str:
        """Return *name* for a function of `os` that also gets `dir_fd=descriptor`."""
        return str(self._path / name) if self.descriptor is None else name

    def child(self, name: str, flags: int = os.O_RDONLY) -> "AbstractContextManager[_Folder]":
        """Open the directory *name*; raise an OSError if *name* is a link or a file."""
        return _opened(self._path / name, flags, self)

    @contextmanager
    def made(self, name: str) -> "Iterator[_Folder]":
        """Open the directory *name*; create it if it is missing, and then flush this directory."""
        is_new = True
        try:
            os.mkdir(self.at(name), 0o700, dir_fd=self.descriptor)
        except FileExistsError:
            is_new = False
        with self.child(name) as child:
            yield child
        if is_new:
            self.sync()

    def entries(self) -> "list[os.DirEntry[str]]":
        """Return the entries, whose methods work only while this directory is open."""
        with os.scandir(self._path if self.descriptor is None else self.descriptor) as entries:
            return list(entries)

    def status(self, name: str = ".") -> os.stat_result:
        return os.stat(self.at(name), dir_fd=self.descriptor, follow_symlinks=False)

    def sync(self) -> None:
        if self.descriptor is None:
            return
        try:
            os.fsync(self.descriptor)
        except OSError as error:
            # Some network file systems cannot flush a directory.
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise


@contextmanager
def _opened(
    path: Path, flags: int = os.O_RDONLY, parent: _Folder | None = None
) -> Iterator[_Folder]:
    """Open a directory, and follow links in *path* unless *parent* contains it."""
    if not _HAS_DESCRIPTORS:
        if parent is not None:
            _check_directory(path)
        yield _Folder(path, None)
        return
    if parent is None:
        descriptor = os.open(path, flags | _DIRECTORY)
    else:
        descriptor = os.open(path.name, flags | _DIRECTORY | _NO_LINK, dir_fd=parent.descriptor)
    try:
        yield _Folder(path, descriptor)
    finally:
        os.close(descriptor)


def _check_directory(path: Path) -> None:
    """Raise an OSError if *path* is a link (on Windows, also a junction) or not a directory."""
    status = os.lstat(path)
    junction = getattr(stat, "IO_REPARSE_TAG_MOUNT_POINT", None)
    is_junction = getattr(status, "st_reparse_tag", 0) == junction
    if is_junction or not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))


@contextmanager
def _prefix(directory: Path, flags: int = os.O_RDONLY) -> Iterator[_Folder]:
    """Open *directory*; follow links in the path of its parent, which the operator has chosen."""
    with _opened(directory.parent, _PASS) as root, root.child(directory.name, flags) as prefix:
        yield prefix


def make_directory(directory: Path) -> None:
    """Create *directory* and its missing parents, and flush them to the disk."""
    _translating(lambda: _make_directory(directory))


def _make_directory(directory: Path) -> None:
    if directory.is_dir():
        return
    _make_directory(directory.parent)
    with suppress(FileExistsError):  # another process has created the directory, or it is a file
        directory.mkdir(mode=0o700)
    with _opened(directory.parent) as parent:
        parent.sync()
    if not directory.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))


def _write(
    directory: Path, folder: str, file_name: str, data: bytes, *, replace: bool = False
) -> None:
    """Write a new file in *folder*; create missing directories; flush all of them to the disk."""
    flags = os.O_CREAT | os.O_WRONLY | _NO_LINK | _BINARY | _NO_WAIT
    flags |= 0 if replace else os.O_EXCL
    with (
        _opened(directory.parent) as root,
        root.made(directory.name) as prefix,
        prefix.made(folder) as opened_folder,
    ):
        if replace:  # a new file has a new time, on every file system
            _unlink(opened_folder, file_name)
        # The file needs no temporary name: nothing reads it before a record names the blob.
        opened = os.open(opened_folder.at(file_name), flags, 0o600, dir_fd=opened_folder.descriptor)
        with open(opened, "wb", buffering=0) as file:
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]
            os.fsync(file.fileno())
        opened_folder.sync()


def _read(directory: Path, name: str, number: int, size: int, start: int, stop: int) -> bytes:
    """Return bytes *start* to *stop* - 1 of an object of *name*, which must have *size* bytes."""
    data: bytes | None = None
    try:
        with _prefix(directory, _PASS) as prefix, prefix.child(name, _PASS) as blob:
            flags = os.O_RDONLY | _NO_LINK | _BINARY | _NO_WAIT
            descriptor = os.open(blob.at(str(number)), flags, dir_fd=blob.descriptor)
            try:
                status = os.fstat(descriptor)
                if stat.S_ISREG(status.st_mode):
                    check_size(status.st_size, size)
                    with open(descriptor, "rb", closefd=False) as file:
                        file.seek(start)
                        data = file.read(stop - start)
            finally:
                os.close(descriptor)
    except OSError as error:
        if error.errno == errno.ENOENT:
            raise missing_blob("directory") from None
        if error.errno not in _REPLACED:
            raise
    if data is None:
        raise TamperedError(
            "a blob was replaced by a link, or by something else that is not a file: find out who "
            "can write to the directory of artifacts",
            reason=Reason.MISMATCH,
        )
    check_size(len(data), stop - start)
    return data


def _delete(directory: Path, name: str) -> None:
    """Delete the objects of the blob *name*, and the blob's directory unless other files are left.

    If a link is in the place of the blob's directory, delete only the link.
    """
    with suppress(FileNotFoundError), _prefix(directory) as prefix:
        if stat.S_ISLNK(prefix.status(name).st_mode):
            os.unlink(prefix.at(name), dir_fd=prefix.descriptor)  # the link, not its target
            logger.warning("a symbolic link in the place of a deleted blob was removed")
            return
        with prefix.child(name) as blob:
            for number in _deletable(blob):
                _unlink(blob, number)
            try:
                os.rmdir(prefix.at(name), dir_fd=prefix.descriptor)
            except OSError as error:
                if error.errno not in _NOT_EMPTY or _deletable(blob):
                    raise
                logger.warning(
                    "the directory of a deleted blob was not removed: it contains files that are "
                    "not objects of the blob"
                )


def _unlink(folder: _Folder, name: str) -> None:
    with suppress(FileNotFoundError):  # another process has deleted the file
        os.unlink(folder.at(name), dir_fd=folder.descriptor)


def _deletable(blob: _Folder) -> list[str]:
    """Return the names of the objects in *blob*, and of links and pipes in their places."""
    return [
        entry.name
        for entry in blob.entries()
        if NUMBER.fullmatch(entry.name) and not entry.is_dir(follow_symlinks=False)
    ]


# In the next two functions, a missing directory means that nothing was stored or marked.


def _unmark(directory: Path, name: str) -> None:
    with suppress(FileNotFoundError), _prefix(directory) as prefix, prefix.child(DELETED) as marks:
        _unlink(marks, name)
        marks.sync()


def _objects(directory: Path, folder: str | None) -> list[StoredObject]:
    """Return the objects in *folder* or, if it is None, in the folders of all blobs, by name."""
    with suppress(FileNotFoundError), _prefix(directory) as prefix:
        if folder is not None:
            return _objects_in(prefix, folder)
        folders = sorted(
            entry.name
            for entry in prefix.entries()
            if BLOB_ID.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
        )
        return [found for one in folders for found in _objects_in(prefix, one)]
    return []


def _objects_in(prefix: _Folder, name: str) -> list[StoredObject]:
    """Return the objects in the folder *name*; an empty folder counts as an object of no size.

    If a link or a file is in the place of the folder of a blob, there are no objects; in the place
    of the folder of marks, it is an error.
    """
    found = []
    try:
        with prefix.child(name) as folder:
            entries = folder.entries()
            if not entries:
                found.append(StoredObject(name, "0", None, folder.status().st_mtime))
            for entry in entries:
                with suppress(FileNotFoundError):  # another process has deleted it
                    status = entry.stat(follow_symlinks=False)
                    if not stat.S_ISDIR(status.st_mode):
                        size = status.st_size if stat.S_ISREG(status.st_mode) else None
                        found.append(StoredObject(name, entry.name, size, status.st_mtime))
    except OSError as error:
        is_replaced = error.errno in _REPLACED and name != DELETED
        if error.errno != errno.ENOENT and not is_replaced:
            raise
    return found
