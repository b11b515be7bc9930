"""Count and list rows that cannot be decrypted, and orphaned rows."""

import struct
from collections.abc import Iterable
from typing import Generic, NamedTuple, TypeVar

from adk_secure_sessions.audit import record_rejected
from adk_secure_sessions.errors import DecryptionError, Reason, TamperedError
from adk_secure_sessions.storage.schema import apps, data_keys, users

T = TypeVar("T")

_MAX_LISTED = 1000
# Errors that decrypting and decoding a row may raise.  The last two errors are raised only for
# plaintext records, which are not authenticated.
UNREADABLE = (DecryptionError, struct.error, UnicodeDecodeError)
# If a row of these tables is bad, many other rows cannot be decrypted, and each of them causes an
# error that names the bad row.  So report a bad row of these tables only once.
_SHARED = (apps.name, users.name, data_keys.name)


class Problem(NamedTuple):
    """A row that cannot be decrypted, or an orphaned row.

    A row is orphaned if the session, user or app row that it belongs to does not exist.

    Attributes:
        table: The table of the row.
        row: The row's primary key; for a version witness, the tag in hexadecimal.
        reason: Why the row was rejected; `Reason.MISSING` for an orphaned row.
        detail: The reason in words; it does not repeat `table` and `row`.
    """

    table: str
    row: str
    reason: Reason
    detail: str

    @property
    def line(self) -> str:
        where = f"{self.table} row {self.row}" if self.row else self.table
        return f"{where}: {self.detail}"


class Listed(Generic[T]):
    """Counts items, and keeps the first 1000 of them in `kept`."""

    def __init__(self) -> None:
        self.count: int = 0
        self.kept: list[T] = []

    def append(self, item: T) -> None:
        self.count += 1
        if len(self.kept) < _MAX_LISTED:
            self.kept.append(item)

    def extend(self, items: Iterable[T]) -> None:
        for item in items:
            self.append(item)

    def include(self, other: "Listed[T]") -> None:
        self.count += other.count
        self.kept += other.kept[: _MAX_LISTED - len(self.kept)]


class Problems(Listed[Problem]):
    """Counts problems, and keeps the first 1000 of them."""

    def __init__(self) -> None:
        super().__init__()
        self._named: set[tuple[str, str]] = set()

    def add_all(self, other: "Problems") -> None:
        """Add the problems of *other*."""
        self.include(other)
        self._named |= other._named

    def suppress(self, table: str, row: object) -> None:
        """Make later calls of `add` with *once* skip *row*, which has been reported already."""
        self._named.add((table, str(row)))

    def add(
        self,
        table: str,
        row: object,
        reason: Reason,
        detail: str,
        *,
        once: bool = False,
        error: DecryptionError | None = None,
    ) -> None:
        """Count a problem of a row, record it, and keep it in `kept` unless `kept` is full.

        If *once* is True, do nothing if an earlier call with *once* reported the same row, or if
        the row was passed to `suppress`.  The audit record names the class of *error*; by default,
        `TamperedError`.
        """
        if once:
            if (table, str(row)) in self._named:
                return
            self._named.add((table, str(row)))
        rejected = error or TamperedError(detail, reason=reason)
        record_rejected(rejected.located(table, row))
        self.append(Problem(table, str(row), reason, detail))

    def add_error(self, error: Exception, table: str, row: object) -> bool:
        """Add a problem for the row that *error* names or, if *error* names none, for *row*.

        Return whether the bad row is that of an app, a user or a data key, without which other
        rows cannot be decrypted.
        """
        reason, detail = Reason.MALFORMED, "its content is malformed"
        if isinstance(error, DecryptionError):
            reason, detail = error.reason, error.detail
            if error.table is not None and error.row is not None:
                table, row = error.table, error.row
        is_shared = table in _SHARED
        rejected = error if isinstance(error, DecryptionError) else None
        self.add(table, row, reason, detail, once=is_shared, error=rejected)
        return is_shared

    def stored_in(self, done: T) -> T:
        """Set the fields `bad` and `problems` of the result *done*, and return it."""
        vars(done).update(bad=self.count, problems=tuple(self.kept))
        return done


def unlisted(found: str, feature: str, remedy: str) -> str:
    """Return the detail of a problem: the database uses *feature*, and does not list it."""
    return (
        f"{found}, and the feature {feature!r} is not listed: an older list was replayed; {remedy}"
    )
