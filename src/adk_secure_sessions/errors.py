"""The exceptions of this library: one class for each case that a caller handles differently.

A message names tables, primary keys of rows and key ids, and says what to do next.  Programs read
the same facts from the attributes of the error.  No message contains ciphertext, keys, user ids,
session ids or stored plaintext.  Errors of the search index name the state key that was passed.
"""

import re
from copy import copy
from enum import StrEnum
from typing import Self, TypeVar

E = TypeVar("E", bound=Exception)

_MAX_ROW_NAME = 200  # characters; keys that services store are shorter


class SecureSessionError(Exception):
    """Base class of all public exceptions of this library.

    Attributes:
        retryable: Whether the same call may succeed if the caller repeats it later.
    """

    retryable: bool = False

    def __init__(self, message: str = "", *, retryable: bool = False) -> None:
        super().__init__(message)
        self.retryable = retryable


class ConfigurationError(SecureSessionError, ValueError):
    """A key, backend, URL, option or database cannot be used as given.

    The message says what to change.
    """


class WrongKeyError(SecureSessionError):
    """The root key does not decrypt this database's keyring, or the keyring was tampered with.

    Nothing was written.  The message names the root key that is missing or wrong, or the table to
    restore from a backup.
    """


class KeyServiceError(SecureSessionError):
    """A key service, or another key provider, failed.

    The message names the root key and says what to check.  It does not quote the error of the key
    service.
    """


class DatabaseError(SecureSessionError):
    """The database cannot be reached, failed to run a statement, or took too long.

    The message says what to do.  It contains no statement, no parameters, and no text in which a
    database may quote stored values.  If a write raises this error and `retryable` is True, the
    write may or may not have been stored.

    Attributes:
        code: The code that the database reported: PostgreSQL's SQLSTATE, the error number of MySQL
            or MariaDB, or the name of SQLite's error.  None if no code was reported.
    """

    code: str | None = None

    def __init__(
        self, message: str = "", *, retryable: bool = False, code: str | None = None
    ) -> None:
        super().__init__(message, retryable=retryable)
        self.code = code


class ArtifactStoreError(SecureSessionError):
    """The object store of artifacts cannot be reached, denies access, is full, or failed.

    The message says what to do.  It contains no credentials, and does not quote the error of
    the object store.
    """


def copy_of(error: E) -> E:
    """Return a copy of *error* for another caller, who may add notes to it, without a traceback.

    An exception of another package is returned itself, because it may not be possible to copy it.
    """
    return copy(error) if type(error).__module__ == __name__ else error.with_traceback(None)


def install_command(extra: str) -> str:
    """Return the command that installs the packages of the extra *extra* of this package.

    The command does not name this package: on the package index, another package has the same name
    (see RELEASING.md).
    """
    import importlib.metadata  # takes 20 ms

    try:
        required = importlib.metadata.requires("adk-secure-sessions") or []
    except importlib.metadata.PackageNotFoundError:
        required = []
    of_extra = re.compile(rf"extra == ['\"]{re.escape(extra)}['\"]")
    needed = [one.partition(";")[0].strip() for one in required if of_extra.search(one)]
    if not needed:
        return f"pip install '.[{extra}]' in a clone of this package's repository"
    return " ".join(["pip install", *(f"'{one}'" for one in needed)])


class Reason(StrEnum):
    """Reasons to reject a stored value, for `DecryptionError.reason`."""

    AUTHENTICATION = "authentication"
    """The value was modified or moved, or the key is wrong."""

    MALFORMED = "malformed"
    """The value does not have the stored format of any release of this package."""

    MISMATCH = "mismatch"
    """Two rows that must match do not match: one of them was replayed or replaced."""

    MISSING = "missing"
    """A row or a value is missing, although other rows prove that it existed."""

    WRONG_OWNER = "wrong owner"
    """The value belongs to another app, user or session."""

    PLAINTEXT = "plaintext"
    """The value is not encrypted, and the service was not given `NoOpBackend`."""

    UNKNOWN_KEY = "unknown key"
    """The value names a data key or a master key that does not exist."""

    UNKNOWN_BACKEND = "unknown backend"
    """The value names a backend that the service was not given."""

    UNKNOWN_FLAGS = "unknown flags"
    """A later release wrote the value, with flags that this release does not know."""


def row_name(row: object) -> str:
    """Return the primary key *row* as text, shortened if an attacker has stored a long value."""
    text = str(row)
    return text if len(text) <= _MAX_ROW_NAME else f"{text[:_MAX_ROW_NAME]}..."


class DecryptionError(SecureSessionError):
    """A stored value cannot be decrypted or is not authentic; the value was left unchanged.

    To repair the database, restore the whole database from a backup.  An older copy of a single
    row would be rejected, too.

    Attributes:
        detail: The message without the table and the row.
        reason: Why the value was rejected.
        table: The table of the rejected row; None if it is not known.
        row: The primary key of the rejected row as text (for `secure_witnesses`, the row's blind
            index in hexadecimal); None if it is not known.
    """

    # Class attributes, so that a third party's subclass has them without calling `__init__`.
    reason: Reason = Reason.AUTHENTICATION
    table: str | None = None
    row: str | None = None
    _is_recorded = False  # in the audit log

    def __init__(
        self,
        detail: str = "wrong key, or the value was modified or moved",
        reason: Reason | None = None,
        table: str | None = None,
        row: object = None,
    ) -> None:
        name = None if row is None else row_name(row)
        super().__init__(detail if table is None else f"{table} row {name}: {detail}")
        self.detail: str = detail
        self.reason = reason or self.reason
        self.table, self.row = table, name

    def located(self, table: str, row: object) -> Self:
        """Return a copy whose message begins with this table and row.

        If the error already names a rejected row, `table` and `row` keep naming that row.
        """
        name = row_name(row)
        error = self._copy(f"{table} row {name}: {self}")
        if error.table is None:
            error.table, error.row = table, name
        return error

    def about(self, part: str) -> Self:
        """Return a copy whose message begins with *part*, a name of the rejected value.

        The message of the copy does not contain the table and the row.  Therefore, call `about`
        before `located`.
        """
        error = self._copy(f"{part}: {self.__dict__.get('detail', self)}")
        error.detail = str(error)
        return error

    def _copy(self, text: str) -> Self:
        """Return a copy with the message *text*.

        Only the attributes of this class are copied.  A third party's cipher may raise a subclass
        whose other attributes or notes hold secrets.
        """
        error = type(self).__new__(type(self), text)
        error.detail = str(self.__dict__.get("detail", self))
        error.reason, error.retryable = self.reason, self.retryable
        error.table, error.row = self.table, self.row
        return error


class UnknownKeyError(DecryptionError):
    """The value names a key or a backend that this service does not have.

    If the message names a backend, list it in `additional_backends`.
    """

    reason = Reason.UNKNOWN_KEY


class TamperedError(DecryptionError):
    """A value or a row was modified, moved, replayed or removed outside the service."""


class PlaintextRefusedError(DecryptionError):
    """The value is stored as plaintext where an encrypted value is required.

    If `NoOpBackend` wrote the value on purpose, list `NoOpBackend` in `additional_backends`.
    """

    reason = Reason.PLAINTEXT
