"""The one record format: `magic ‖ version ‖ backend id ‖ key id ‖ backend's output`.

Format: docs/format.md.  A record is bound to its place: the associated data is the header
followed by what `place` joins.
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
_HEADER = Struct(">4sBq")
HEADER_LENGTH = _HEADER.size
_LENGTH = Struct(">I")
_NUMBERS = [Struct(f">I{count}q") for count in range(8)]


class Cipher(Protocol):
    """What a backend makes of one data key."""

    def encrypt(self, plaintext: bytes, associated_data: bytes, /) -> bytes:
        """Seal `plaintext`; the result opens only with the same `associated_data`."""
        ...

    def decrypt(self, sealed: bytes, associated_data: bytes, /) -> bytes:
        """Open what `encrypt` returned; raise on anything else."""
        ...


def encode_text(text: str) -> bytes:
    """UTF-8; a lone surrogate, which ADK accepts in ids, keeps its three-byte form."""
    return text.encode("utf-8", "surrogatepass")


def decode_text(data: object) -> str:
    """The inverse of `encode_text`.  Raises TamperedError as `binary` does."""
    return binary(data).decode("utf-8", "surrogatepass")


def binary(value: object) -> bytes:
    """*value*, from a column that SQLite may hold anything in.  Raises TamperedError."""
    if not isinstance(value, bytes):
        raise TamperedError(
            "a binary column holds a value of another type", reason=Reason.MALFORMED
        )
    return value


def context(parts: tuple[str | bytes, ...], *numbers: int) -> bytes:
    """Join *parts*, each behind its length, and then all *numbers* behind theirs.

    No two places share bytes.  Raises TamperedError for values that no column of ours holds.
    """
    return numbered_context(context_parts(parts), *numbers)


def numbered_context(parts: bytes, *numbers: int) -> bytes:
    """The place of which *parts* are `joined` already, for one row after the other."""
    count = len(numbers)
    try:
        return parts + _NUMBERS[count].pack(8 * count, *numbers)
    except error:  # SQLite keeps any type in any column
        pass
    raise TamperedError("an integer column holds a value of another type", reason=Reason.MALFORMED)


@lru_cache(maxsize=4096)
def context_parts(parts: tuple[str | bytes, ...]) -> bytes:
    """The first half of a `place`."""
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
    """*identifier* behind its length, then *rest*: how a row's plaintext carries its id."""
    data = encode_text(identifier)
    return _LENGTH.pack(len(data)) + data + rest


def split_id(plaintext: bytes) -> tuple[str, bytes]:
    """The inverse of `with_id`, on authenticated bytes only."""
    end = _LENGTH.size + _LENGTH.unpack_from(plaintext)[0]
    return decode_text(plaintext[_LENGTH.size : end]), plaintext[end:]


def seal(cipher: Cipher, backend_id: int, key_id: int, where: bytes, plaintext: bytes) -> bytes:
    """Make the record that holds *plaintext* at the place *where*."""
    header = pack(backend_id, key_id)
    failure = "it returned something that is not bytes"
    try:
        sealed = cipher.encrypt(plaintext, header + where)
        if isinstance(sealed, bytes):
            return header + sealed
    except Exception as error:  # a third party's; its text may repeat the plaintext
        failure = type(error).__name__
    raise SecureSessionError(f"backend {backend_id} failed to encrypt: {failure}")


def pack(backend_id: int, key_id: int) -> bytes:
    """The header of records that this key seals."""
    return _HEADER.pack(_PREFIX, backend_id, key_id)


def unpack(stored: bytes) -> tuple[int, int]:
    """Return a record's backend id and key id, which are not yet authenticated.

    SQLite stores any type in any column, so *stored* may in truth be anything.

    Raises:
        PlaintextRefusedError: not a record at all.
        TamperedError: a record that no version of this format writes.
    """
    if not stored:
        raise TamperedError("its encrypted value was removed", reason=Reason.MISSING)
    if not isinstance(stored, bytes) or not stored.startswith(MAGIC):
        raise PlaintextRefusedError("not an encrypted record")
    if len(stored) < HEADER_LENGTH or stored[3] != VERSION:
        raise TamperedError("the record's header is malformed", reason=Reason.MALFORMED)
    _, backend_id, key_id = _HEADER.unpack_from(stored)
    return backend_id, key_id


def open_record(stored: bytes, where: bytes, cipher: Cipher) -> bytes:
    """Open a record whose header `unpack` accepted, at the place *where*.

    Raises:
        TamperedError: whatever the cipher raised, if it is not a DecryptionError already.
    """
    try:
        plaintext = cipher.decrypt(stored[HEADER_LENGTH:], stored[:HEADER_LENGTH] + where)
        if isinstance(plaintext, bytes):
            return plaintext
    except DecryptionError:
        raise
    except Exception:  # a third party's; its text and context may hold secrets
        pass
    raise TamperedError("the backend could not decrypt it")
