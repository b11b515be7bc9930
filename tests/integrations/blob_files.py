"""The files of a store in a directory: contents, marks of deleted blobs, and their times.

How it works: `contents` and `marks` name the files, also of several databases that share the store.
`unmarked` leaves out the contents with a mark.  `make_older` moves the times of all entries into
the past, as if that time had passed since they were written: the clock of a directory is the one
that dates its files.
"""

import os
from datetime import timedelta
from pathlib import Path

DELETED = "deleted"


def contents(store: Path) -> list[Path]:
    """Return the files of blobs, oldest first."""
    found = [path for path in store.rglob("*") if path.is_file() and path.parent.name != DELETED]
    return sorted(found, key=lambda path: path.stat().st_mtime_ns)


def marks(store: Path) -> list[Path]:
    """Return the marks, sorted; the name of a mark is that of its blob."""
    return sorted(path for path in store.rglob(f"{DELETED}/*") if path.is_file())


def unmarked(store: Path) -> list[Path]:
    """Return the files of blobs without a mark, oldest first."""
    marked = {path.parents[1] / path.name for path in marks(store)}
    return [path for path in contents(store) if path.parent not in marked]


def make_older(store: Path, by: timedelta) -> None:
    for path in store.rglob("*"):  # a killed process may leave an empty directory
        status = path.stat()
        times = (status.st_atime, status.st_mtime - by.total_seconds())
        os.utime(path, times)
