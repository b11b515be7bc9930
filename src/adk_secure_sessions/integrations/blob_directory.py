"""Store blobs as files in a directory, so that a stored blob survives a power failure.

obstore's store for directories does not flush files to the disk: after a power failure, an artifact
that was saved successfully could be empty.  `BlobDirectory` flushes each file and its directories
to the disk (fsync), as SQLite does at a commit.  On an SSD, this takes about as long as a commit.
In addition, `BlobDirectory` needs no library, and works in forked processes.

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
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial, wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from adk_secure_sessions.concurrency import await_to_end
from adk_secure_sessions.errors import ArtifactStoreError, Reason, TamperedError
from adk_secure_sessions.formats.blobs import require_blob_length
from adk_secure_sessions.integrations.blob_store import (
    BLOB_ID,
    MARKS,
    OBJECT_NAME,
    BlobStore,
    StoredObject,
    missing_blob_error,
)

logger: logging.Logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_BINARY = getattr(os, "O_BINARY", 0)
_DIRECTORY = getattr(os, "O_DIRECTORY", 0)
# Without O_NONBLOCK, opening a named pipe (FIFO) would wait until a process writes to it.
_NO_WAIT = getattr(os, "O_NONBLOCK", 0)
# The errors that `open` raises if a link, a directory or a socket is in the place of an object, or
# a link or a file in the place of a blob.
_REPLACED = (errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EMLINK, errno.ENXIO)
_NOT_EMPTY = (errno.ENOTEMPTY, errno.EEXIST)
_HAS_DESCRIPTORS = os.open in os.supports_dir_fd and os.scandir in os.supports_fd  # not on Windows


def _in_thread(call: Callable[P, T]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Run a method in a thread, and wait until it has ended, even if the caller is cancelled."""

    @wraps(call)
    async def run(*args: P.args, **kwargs: P.kwargs) -> T:
        work = partial(_translate_errors, partial(call, *args, **kwargs))
        return await await_to_end(asyncio.get_running_loop().run_in_executor(None, work))

    return run


def _translate_errors(call: Callable[[], T]) -> T:
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


class BlobDirectory(BlobStore):
    """Stores the objects of blobs as files `NAME/K` in one directory, and marks as `deleted/NAME`.

    Directories get the mode 0700, and files 0600.
    """

    def __init__(self, root: Path, prefix: str, opened_prefixes: set[str]) -> None:
        """Use the directory *prefix* in *root*, an absolute path; create it with the first file.

        *opened_prefixes* are those in *root* whose directories this process has opened.  They are
        not created again: if one is missing, the volume that has it is not mounted any more, and
        files would be written to another disk.
        """
        super().__init__(prefix)
        self._root = root
        self._opened_prefixes = opened_prefixes

    @contextmanager
    def _open_prefix(self) -> "Iterator[_Folder]":
        """Open the directory; follow links in the path of *root*, which the operator has chosen."""
        with _open_directory(self._root) as root, root.child(self.prefix) as prefix:
            self._opened_prefixes.add(self.prefix)
            yield prefix

    @_in_thread
    def _put(self, folder: str, name: str, data: bytes, *, replace: bool = False) -> None:
        # Create missing directories, and flush them and the file to the disk.
        if self.prefix not in self._opened_prefixes:
            with _open_directory(self._root) as root, root.ensure_child(self.prefix):
                root.sync()  # another process may have created it just now
        with self._open_prefix() as prefix, prefix.ensure_child(folder) as parent:
            if replace:  # a new file has a new time, on every file system
                _unlink(parent, name)
            # The file needs no temporary name: nothing reads it before a record names the blob.
            # With "ab", a file that somebody has put in its place since is not truncated.
            mode = "ab" if replace else "xb"
            with open(parent.at(name), mode, opener=parent.opener) as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            parent.sync()

    @_in_thread
    def _get(self, name: str, number: int, size: int, start: int, stop: int) -> bytes:
        try:
            with (
                self._open_prefix() as prefix,
                prefix.child(name) as blob,
                open(blob.at(str(number)), "rb", opener=blob.opener) as file,
            ):
                status = os.fstat(file.fileno())
                if stat.S_ISREG(status.st_mode):
                    require_blob_length(status.st_size, size)
                    file.seek(start)
                    return file.read(stop - start)
        except OSError as error:
            if error.errno == errno.ENOENT:
                raise missing_blob_error("directory") from None
            if error.errno not in _REPLACED:
                raise
        raise TamperedError(
            "a blob was replaced by a link, or by something else that is not a file: find out who "
            "can write to the directory of artifacts",
            Reason.MISMATCH,
        )

    @_in_thread
    def delete(self, name: str) -> None:
        # Keep the blob's directory if it contains other files.
        with suppress(FileNotFoundError), self._open_prefix() as prefix, prefix.child(name) as blob:
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

    # In the next two methods, a missing directory means that nothing was stored or marked.

    @_in_thread
    def unmark(self, name: str) -> None:
        missing = suppress(FileNotFoundError)
        with missing, self._open_prefix() as prefix, prefix.child(MARKS) as marks:
            _unlink(marks, name)
            marks.sync()

    @_in_thread
    def _objects(self, folder: str | None) -> list[StoredObject]:
        with suppress(FileNotFoundError), self._open_prefix() as prefix:
            if folder is not None:
                return _list_folder(prefix, folder)
            return [
                found
                for entry in prefix.entries()
                if BLOB_ID.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
                for found in _list_folder(prefix, entry.name)
            ]
        return []


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

    def child(self, name: str) -> "AbstractContextManager[_Folder]":
        """Open the directory *name*; raise an OSError if *name* is a link or a file."""
        return _open_directory(self._path / name, self)

    @contextmanager
    def ensure_child(self, name: str) -> "Iterator[_Folder]":
        """Open the directory *name*; create it if it is missing, and flush this directory."""
        with suppress(FileExistsError):
            os.mkdir(self.at(name), 0o700, dir_fd=self.descriptor)
            self.sync()
        with self.child(name) as child:
            yield child

    def entries(self) -> "list[os.DirEntry[str]]":
        """Return the entries, whose methods work only while this directory is open."""
        with os.scandir(self._path if self.descriptor is None else self.descriptor) as entries:
            return list(entries)

    def opener(self, name: str, flags: int) -> int:
        """Open the file that `at` has named, for `open`; raise an OSError if it is a link."""
        return os.open(name, flags | _NO_LINK | _BINARY | _NO_WAIT, 0o600, dir_fd=self.descriptor)

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
def _open_directory(path: Path, parent: _Folder | None = None) -> Iterator[_Folder]:
    """Open a directory, and follow links in *path* unless *parent* contains it."""
    if not _HAS_DESCRIPTORS:
        if parent is not None:
            _check_directory(path)
        yield _Folder(path, None)
        return
    if parent is None:
        descriptor = os.open(path, _DIRECTORY)
    else:
        descriptor = os.open(path.name, _DIRECTORY | _NO_LINK, dir_fd=parent.descriptor)
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


def make_directory(directory: Path) -> None:
    """Create *directory* and its missing parents, and flush them to the disk.

    Raises ArtifactStoreError if *directory* cannot be opened to flush it later.
    """
    _translate_errors(partial(_make_directory, directory))


def _make_directory(directory: Path) -> None:
    if not directory.is_dir():
        _make_directory(directory.parent)
        with suppress(FileExistsError):  # another process has created it, or it is a file
            directory.mkdir(mode=0o700)
        with _open_directory(directory.parent) as parent:
            parent.sync()
    os.scandir(directory).close()  # raises OSError if it is a file, or cannot be opened


def _unlink(folder: _Folder, name: str) -> None:
    with suppress(FileNotFoundError):  # another process has deleted the file
        os.unlink(folder.at(name), dir_fd=folder.descriptor)


def _deletable(blob: _Folder) -> list[str]:
    """Return the names of the objects in *blob*, and of links and pipes in their places."""
    return [
        entry.name
        for entry in blob.entries()
        if OBJECT_NAME.fullmatch(entry.name) and not entry.is_dir(follow_symlinks=False)
    ]


def _list_folder(prefix: _Folder, name: str) -> list[StoredObject]:
    """Return the objects in the folder *name*; an empty folder counts as an object of no size.

    If a link or a file is in the place of the folder of a blob, there are no objects; in the place
    of the folder of marks, it is an error.
    """
    found = []
    try:
        with prefix.child(name) as folder:
            entries = folder.entries()
            if not entries:
                modified = os.stat(folder.at("."), dir_fd=folder.descriptor).st_mtime
                found.append(StoredObject(name, "0", None, modified))
            for entry in entries:
                with suppress(FileNotFoundError):  # another process has deleted it
                    status = entry.stat(follow_symlinks=False)
                    if not stat.S_ISDIR(status.st_mode):
                        size = status.st_size if stat.S_ISREG(status.st_mode) else None
                        found.append(StoredObject(name, entry.name, size, status.st_mtime))
    except OSError as error:
        is_replaced = error.errno in _REPLACED and name != MARKS
        if error.errno != errno.ENOENT and not is_replaced:
            raise
    return found
