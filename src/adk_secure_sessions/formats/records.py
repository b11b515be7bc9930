"""The format of all records: `magic ‖ version ‖ backend id ‖ key id ‖ backend's output`.

docs/format.md describes the format in "Records".  A record is bound to its context: the kind of the
record, its row, and the ids of its owner.  The associated data of a record is its header, followed
by the bytes that `context` returns.  If a record is moved to another row, it cannot be decrypted
there.
"""

from functools import lru_cache
from struct import Struct, error
from typing import Protocol

from adk_secure_sessions.errors import (
    DecryptionError,
    PlaintextRefusedError,
    Reason,
    SecureSessionError,
    TamperedError,
)

MAGIC = b"AKS"
VERSION = 1
_PREFIX = MAGIC + bytes([VERSION])
_HEADER = Struct(">4sBq")  # magic and version, backend id, key id
HEADER_LENGTH = _HEADER.size
NOOP_BACKEND_ID = 3  # a record with this backend id holds plaintext, written by `NoOpBackend`
_LENGTH = Struct(">I")
_NUMBERS = [Struct(f">I{count}q") for count in range(8)]


class Cipher(Protocol):
    """Encrypts and decrypts with one data key; backends create ciphers."""

    def encrypt(self, plaintext: bytes, associated_data: bytes, /) -> bytes:
        """Encrypt `plaintext` and authenticate it together with `associated_data`.

        Both arguments may have any length, including 0.  `decrypt` needs the same
        `associated_data`.
        """
        ...

    def decrypt(self, sealed: bytes, associated_data: bytes, /) -> bytes:
        """Return the plaintext of `sealed`, which `encrypt` returned.

        Raise an exception, of any class, if the key or `associated_data` is wrong, or if `sealed`
        was modified.
        """
        ...


def encode_text(text: str) -> bytes:
    """Return *text* as UTF-8.

    Lone surrogates, which ADK accepts in ids, are encoded as three bytes each.
    """
    return text.encode("utf-8", "surrogatepass")


def decode_text(data: object) -> str:
    """Return the text that `encode_text` encoded.

    Raises:
        TamperedError: *data* is not bytes.
        UnicodeDecodeError: *data* is not UTF-8.
    """
    return binary(data).decode("utf-8", "surrogatepass")


def binary(value: object) -> bytes:
    """Check that *value*, which was read from a binary column, is bytes, and return it.

    Raises:
        TamperedError: *value* is not bytes.  SQLite stores any type in any column, so a modified
            row may hold another type.
    """
    if not isinstance(value, bytes):
        raise TamperedError(
            "a binary column holds a value of another type", reason=Reason.MALFORMED
        )
    return value


def context(parts: tuple[str | bytes, ...], *numbers: int) -> bytes:
    """Return the context that consists of *parts* and at most 7 *numbers*.

    A context has the length and the bytes of each part, then the length and the bytes of all
    numbers, so different arguments give different contexts (docs/format.md, "Contexts").

    Raises:
        TamperedError: a part is neither text nor bytes, or a number is not a 64-bit integer.
    """
    return numbered_context(context_parts(parts), *numbers)


def numbered_context(parts: bytes, *numbers: int) -> bytes:
    """Return the context that consists of *parts*, which `context_parts` returned, and *numbers*.

    If many rows have the same parts, this is faster than `context`.

    Raises:
        TamperedError: a number is not a 64-bit integer.
    """
    count = len(numbers)
    try:
        return parts + _NUMBERS[count].pack(8 * count, *numbers)
    except error:  # SQLite stores any type in any column, so a modified row may hold any type
        pass
    raise TamperedError("an integer column holds a value of another type", reason=Reason.MALFORMED)


@lru_cache(maxsize=4096)
def context_parts(parts: tuple[str | bytes, ...]) -> bytes:
    """Return the first half of a context: the length and the bytes of each part.

    The result is cached, because many rows have the same parts.

    Raises:
        TamperedError: a part is neither text nor bytes.
    """
    made = []
    for part in parts:
        if not isinstance(part, str | bytes):
            raise TamperedError(
                "a text or binary column holds a value of another type", reason=Reason.MALFORMED
            )
        data = encode_text(part) if isinstance(part, str) else part
        made.append(_LENGTH.pack(len(data)) + data)
    return b"".join(made)


def with_id(identifier: str, rest: bytes) -> bytes:
    """Return the plaintext of a row that stores its own id: the id's length, the id, *rest*."""
    data = encode_text(identifier)
    return _LENGTH.pack(len(data)) + data + rest


def split_id(plaintext: bytes) -> tuple[str, bytes]:
    """Split *plaintext*, authenticated bytes that `with_id` returned, into the id and the rest."""
    end = _LENGTH.size + _LENGTH.unpack_from(plaintext)[0]
    return decode_text(plaintext[_LENGTH.size : end]), plaintext[end:]


def seal(cipher: Cipher, backend_id: int, key_id: int, context: bytes, plaintext: bytes) -> bytes:
    """Encrypt *plaintext* and return the record, bound to *context*.

    Raises:
        SecureSessionError: the cipher failed.  The message names the class of the cipher's
            exception, but does not contain the exception's text.
    """
    start = pack(backend_id, key_id)
    failure = "it returned something that is not bytes"
    try:
        sealed = cipher.encrypt(plaintext, start + context)
        if isinstance(sealed, bytes):
            return start + sealed
    except Exception as error:  # from a third party's cipher: its text may contain the plaintext
        failure = type(error).__name__
    raise SecureSessionError(f"backend {backend_id} failed to encrypt: {failure}")


def pack(backend_id: int, key_id: int) -> bytes:
    """Return the header of the records that data key *key_id* of backend *backend_id* encrypts."""
    return _HEADER.pack(_PREFIX, backend_id, key_id)


def unpack(stored: bytes) -> tuple[int, int]:
    """Return the backend id and the key id in a record's header; nothing is authenticated.

    SQLite stores any type in any column: if a row was modified, *stored* may not be bytes.

    Raises:
        PlaintextRefusedError: *stored* is not a record.
        TamperedError: *stored* is empty, or its header is malformed.
    """
    if not stored:
        raise TamperedError("its encrypted value was removed", reason=Reason.MISSING)
    if not isinstance(stored, bytes) or not stored.startswith(MAGIC):
        raise PlaintextRefusedError("not an encrypted record")
    if len(stored) < HEADER_LENGTH or stored[3] != VERSION:
        raise TamperedError("the record's header is malformed", reason=Reason.MALFORMED)
    _, backend_id, key_id = _HEADER.unpack_from(stored)
    return backend_id, key_id


def header(stored: object) -> tuple[int, int] | None:
    """Return the backend id and the key id in a header; None if *stored* has no valid header.

    Use it only for counting, since nothing is authenticated.  *stored* may be a whole record or
    its first `HEADER_LENGTH` bytes.
    """
    if not isinstance(stored, bytes) or len(stored) < HEADER_LENGTH:
        return None
    prefix, backend_id, key_id = _HEADER.unpack_from(stored)
    return (backend_id, key_id) if prefix == _PREFIX else None


def open_record(stored: bytes, context: bytes, cipher: Cipher) -> bytes:
    """Return the plaintext of a record whose header `unpack` accepted.

    Raises:
        DecryptionError: raised by the cipher itself.
        TamperedError: the cipher raised another exception, whose text is not repeated, or did not
            return bytes.
    """
    try:
        plaintext = cipher.decrypt(stored[HEADER_LENGTH:], stored[:HEADER_LENGTH] + context)
        if isinstance(plaintext, bytes):
            return plaintext
    except DecryptionError:
        raise
    except Exception:  # from a third party's cipher: it may hold secrets
        pass  # TamperedError is raised below: here, this exception would be its __context__
    raise TamperedError("the backend could not decrypt it")
