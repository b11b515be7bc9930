"""The one record format: `magic ‖ version ‖ backend id ‖ key id ‖ backend's output`.

Format: docs/format.md, "Records".  A record is bound to its context, which says what it is and
which row and column it belongs to: its associated data is its header, followed by the bytes that
`context` makes.  A record that is moved to another row does not decrypt there.
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
NOOP_BACKEND_ID = 3  # names records that `NoOpBackend` wrote: the rest of them is plaintext
_LENGTH = Struct(">I")
_NUMBERS = [Struct(f">I{count}q") for count in range(8)]


class Cipher(Protocol):
    """Encrypts and decrypts with one data key; made by a backend."""

    def encrypt(self, plaintext: bytes, associated_data: bytes, /) -> bytes:
        """Encrypt `plaintext` and authenticate it together with `associated_data`.

        Both are of any length, also empty.  The result needs the same `associated_data` to be
        decrypted.
        """
        ...

    def decrypt(self, sealed: bytes, associated_data: bytes, /) -> bytes:
        """Return the plaintext of `sealed`, which `encrypt` returned.

        Raise an exception of any class for other bytes, another key or other `associated_data`.
        """
        ...


def encode_text(text: str) -> bytes:
    """Return *text* as UTF-8; a lone surrogate, which ADK accepts in ids, takes three bytes."""
    return text.encode("utf-8", "surrogatepass")


def decode_text(data: object) -> str:
    """Return the text that `encode_text` encoded.

    Raises:
        TamperedError: *data* is not bytes; see `binary`.
        UnicodeDecodeError: *data* is not UTF-8.
    """
    return binary(data).decode("utf-8", "surrogatepass")


def binary(value: object) -> bytes:
    """Return *value*, read from a binary column, if it is bytes.

    Raises:
        TamperedError: it is of another type, which SQLite stores in any column.
    """
    if not isinstance(value, bytes):
        raise TamperedError(
            "a binary column holds a value of another type", reason=Reason.MALFORMED
        )
    return value


def context(parts: tuple[str | bytes, ...], *numbers: int) -> bytes:
    """Join *parts*, each after its length, and all *numbers* after theirs.

    Different arguments give different bytes.  At most 7 numbers; docs/format.md, "Records".

    Raises:
        TamperedError: a value of a type that no column of this library holds.
    """
    return numbered_context(context_parts(parts), *numbers)


def numbered_context(parts: bytes, *numbers: int) -> bytes:
    """Complete a context whose *parts* `context_parts` has joined: for many rows of one kind."""
    count = len(numbers)
    try:
        return parts + _NUMBERS[count].pack(8 * count, *numbers)
    except error:  # SQLite stores any type in any column
        pass
    raise TamperedError("an integer column holds a value of another type", reason=Reason.MALFORMED)


@lru_cache(maxsize=4096)
def context_parts(parts: tuple[str | bytes, ...]) -> bytes:
    """Join the first half of a context, which is the same for many rows."""
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
    """Return the plaintext of a row that carries its id: length, *identifier*, *rest*."""
    data = encode_text(identifier)
    return _LENGTH.pack(len(data)) + data + rest


def split_id(plaintext: bytes) -> tuple[str, bytes]:
    """Return the id and the rest of a plaintext that `with_id` made, which is authenticated."""
    end = _LENGTH.size + _LENGTH.unpack_from(plaintext)[0]
    return decode_text(plaintext[_LENGTH.size : end]), plaintext[end:]


def seal(cipher: Cipher, backend_id: int, key_id: int, context: bytes, plaintext: bytes) -> bytes:
    """Return the record that holds *plaintext*, bound to *context*.

    Raises:
        SecureSessionError: the cipher failed; the message has the error's class, not its text.
    """
    start = pack(backend_id, key_id)
    failure = "it returned something that is not bytes"
    try:
        sealed = cipher.encrypt(plaintext, start + context)
        if isinstance(sealed, bytes):
            return start + sealed
    except Exception as error:  # of a third party's cipher: its text may repeat the plaintext
        failure = type(error).__name__
    raise SecureSessionError(f"backend {backend_id} failed to encrypt: {failure}")


def pack(backend_id: int, key_id: int) -> bytes:
    """Return the header of all records that this key encrypts."""
    return _HEADER.pack(_PREFIX, backend_id, key_id)


def unpack(stored: bytes) -> tuple[int, int]:
    """Return a record's backend id and key id, which are not yet authenticated.

    SQLite stores any type in any column, so *stored* may be of any type.

    Raises:
        PlaintextRefusedError: it is not a record.
        TamperedError: it is empty, or a record that no version of this format writes.
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
    """Return the backend id and key id of a record, or None if *stored* is no whole header.

    For counting: nothing is authenticated, and the first `HEADER_LENGTH` bytes are enough.
    """
    if not isinstance(stored, bytes) or len(stored) < HEADER_LENGTH:
        return None
    prefix, backend_id, key_id = _HEADER.unpack_from(stored)
    return (backend_id, key_id) if prefix == _PREFIX else None


def open_record(stored: bytes, context: bytes, cipher: Cipher) -> bytes:
    """Return the plaintext of a record whose header `unpack` accepted.

    Raises:
        DecryptionError: the cipher's own error, if it is one.
        TamperedError: any other error of the cipher, whose text is not repeated.
    """
    try:
        plaintext = cipher.decrypt(stored[HEADER_LENGTH:], stored[:HEADER_LENGTH] + context)
        if isinstance(plaintext, bytes):
            return plaintext
    except DecryptionError:
        raise
    except Exception:  # of a third party's cipher; its text and context may hold secrets
        pass
    raise TamperedError("the backend could not decrypt it")
