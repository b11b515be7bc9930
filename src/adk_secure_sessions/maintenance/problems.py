"""Rows that cannot be opened: counted, named, and left alone."""

import struct
from typing import NamedTuple

from adk_secure_sessions.errors import DecryptionError

KEPT = 1000
# What opening a row raises; the others only for one that nothing authenticates, by NoOpBackend.
UNREADABLE = (DecryptionError, struct.error, UnicodeDecodeError)


class Problem(NamedTuple):
    """A row that cannot be opened, or that belongs to nothing.

    Attributes:
        table: Its table.
        row: Its primary key; of a witness, the tag in hexadecimal.
        reason: What is wrong with it.
    """

    table: str
    row: str
    reason: str


class Problems:
    """Counts all, and keeps the first."""

    def __init__(self) -> None:
        self.count = 0
        self.kept: list[Problem] = []
        self._known: set[tuple[str, str]] = set()

    def expect(self, table: str, row: object) -> None:
        """Of what stands in the way of that row, the rows that lead to it have said it all."""
        self._known.add((table, str(row)))

    def add(self, table: str, row: object, reason: str, *, once: bool = False) -> None:
        """*once*: one row may stand in the way of many others."""
        if once:
            if (table, str(row)) in self._known:
                return
            self._known.add((table, str(row)))
        self.count += 1
        if len(self.kept) < KEPT:
            self.kept.append(Problem(table, str(row), reason))

    def refused(self, error: Exception, table: str, row: object) -> bool:
        """*error* came of opening that row, or names another itself.

        Whether that is one of those on which many others depend.
        """
        reason = "its content is malformed"
        if isinstance(error, DecryptionError):
            reason = error.detail
            if error.table is not None and error.row is not None:
                table, row = error.table, error.row
        shared = table in ("secure_apps", "secure_users", "secure_data_keys")
        self.add(table, row, reason, once=shared)
        return shared
