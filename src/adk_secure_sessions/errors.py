"""What can go wrong, one class for each thing that a caller would do differently.

Messages name table rows, key ids and the next step; never plaintext, ciphertext, keys,
user ids or session ids.
"""


class SecureSessionError(Exception):
    """Base class: `except SecureSessionError` catches all of ours."""


class ConfigurationError(SecureSessionError, ValueError):
    """A key, backend, URL or database that the service cannot use as it was given.

    The text says what to change.
    """


class WrongKeyError(SecureSessionError):
    """The root key given does not open this database; nothing was written.

    Or its keyring was altered.  The text names the root key that is wanted.
    """


class KeyServiceError(SecureSessionError):
    """A key service, or another key provider, failed.

    The text names the root key and says what to check; nothing of it is the service's.

    Attributes:
        retryable: Whether the same call may work later.
    """

    def __init__(self, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.retryable = retryable


class DecryptionError(SecureSessionError):
    """A stored value cannot be opened; it was left as it is.

    Catch this where it does not matter why.  To mend the database, restore all of it from a
    backup: an older row by itself is refused, too.
    """


class UnknownKeyError(DecryptionError):
    """The value names a key or a backend that this service does not hold.

    Where it is a backend, list it in `additional_backends`.
    """


class TamperedError(DecryptionError):
    """A value or a row was altered, moved, replayed or removed outside the service."""

    def __init__(self, message: str = "wrong key, or the value was altered or moved") -> None:
        super().__init__(message)


class PlaintextRefusedError(DecryptionError):
    """The value is stored in clear, where a sealed one is required.

    If `NoOpBackend` wrote it, and on purpose, list that in `additional_backends`.
    """
