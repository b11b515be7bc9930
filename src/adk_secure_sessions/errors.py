"""What can go wrong, one class for each thing that a caller would do differently.

Messages name table rows, key ids and the next step; never plaintext, ciphertext, keys,
user ids or session ids.
"""


class SecureSessionError(Exception):
    """Base class: `except SecureSessionError` catches all of ours."""


class ConfigurationError(SecureSessionError, ValueError):
    """A key, backend, URL or database that the service cannot use as it was given."""


class WrongKeyError(SecureSessionError):
    """The root key given does not open this database; nothing was written."""


class KeyServiceError(SecureSessionError):
    """A key provider failed.  *retryable* says whether the same call may work later."""

    def __init__(self, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.retryable = retryable


class DecryptionError(SecureSessionError):
    """A stored value cannot be opened; it was left as it is."""


class UnknownKeyError(DecryptionError):
    """The value names a key or a backend that this service does not hold."""


class TamperedError(DecryptionError):
    """A value or a row was altered, moved, replayed or removed outside the service."""


class PlaintextRefusedError(DecryptionError):
    """The value is stored in clear, where a sealed one is required."""
