"""Rows that cannot be decrypted or belong to nothing: counted, named, and left unchanged."""

import struct
from typing import NamedTuple

from adk_secure_sessions.errors import DecryptionError, Reason
from adk_secure_sessions.storage import (
    apps,
    data_keys,
    users,
)

_KEPT = 1000
# Errors of opening a row.  Only a row of NoOpBackend, which authenticates nothing, raises the last
# two.
UNREADABLE = (DecryptionError, struct.error, UnicodeDecodeError)
# A single row of these tables keeps many other rows from being decrypted.
_SHARED = (apps.name, users.name, data_keys.name)


class Problem(NamedTuple):
    """A row that cannot be decrypted, or that belongs to nothing.

    Attributes:
        table: Its table.
        row: Its primary key; of a witness, the tag in hexadecimal.
        reason: Why it was rejected; `Reason.MISSING` for a row that belongs to nothing.
        detail: The same in words, without the row's name.
    """

    table: str
    row: str
    reason: Reason
    detail: str


class Problems:
    """Counts all problems, and keeps the first 1000 of them."""

    def __init__(self) -> None:
        self.count: int = 0
        self.kept: list[Problem] = []
        self._named: set[tuple[str, str]] = set()

    def suppress(self, table: str, row: object) -> None:
        """Report that row no more: the row that keeps it from being decrypted is reported."""
        self._named.add((table, str(row)))

    def add(
        self, table: str, row: object, reason: Reason, detail: str, *, once: bool = False
    ) -> None:
        """Report a row; with *once*, only if it was neither reported nor suppressed before."""
        if once:
            if (table, str(row)) in self._named:
                return
            self._named.add((table, str(row)))
        self.count += 1
        if len(self.kept) < _KEPT:
            self.kept.append(Problem(table, str(row), reason, detail))

    def add_error(self, error: Exception, table: str, row: object) -> bool:
        """Report the row that *error* names; if it names none, the row that was being opened.

        Returns:
            Whether many other rows depend on the reported one.
        """
        reason, detail = Reason.MALFORMED, "its content is malformed"
        if isinstance(error, DecryptionError):
            reason, detail = error.reason, error.detail
            if error.table is not None and error.row is not None:
                table, row = error.table, error.row
        is_shared = table in _SHARED
        self.add(table, row, reason, detail, once=is_shared)
        return is_shared
