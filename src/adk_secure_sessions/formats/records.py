"""The format of all records: `magic ‖ version ‖ backend id ‖ key id ‖ backend's output`.

docs/format.md, "Records", describes the format.  A record is bound to its context: the kind of the
record, its row, and the ids of its owner.  The associated data of a record is its header, followed
by its context.  If a record is moved to another row, it cannot be decrypted there.

The first byte of a plaintext is the flags, which say whether the rest, the content, is compressed
or padded (docs/format.md, "Flags").  Compression makes the length of a record depend on its
content: an attacker who sees lengths, and whose text is in the same record as a secret, can guess
the secret (docs/limits.md, "Compression").

The last part of this module is about contents: the fields before the JSON of a state or an event
(docs/format.md, "What each record holds").  A *link* is 16 random bytes.  Rows that belong together
share links: each event has its own link and that of the event before it, and the session has those
of its last event and of its snapshot.  A row of another copy of the database, such as a restored
backup, is authentic but has other links.
"""

import os
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import methodcaller
from typing import Literal, NamedTuple, Never, Protocol

from adk_secure_sessions.errors import (
    ConfigurationError,
    DecryptionError,
    PlaintextRefusedError,
    Reason,
    SecureSessionError,
    TamperedError,
)
from adk_secure_sessions.hiding import hides_locals

MAGIC = b"AKS"
VERSION = 2
_PREFIX = MAGIC + bytes([VERSION])
_HEADER = struct.Struct(">4sBq")  # magic and version, backend id, key id
HEADER_LENGTH = _HEADER.size
NOOP_BACKEND_ID = 3  # the backend id of `NoOpBackend`, whose records contain plaintext
BACKEND_NAMES = {1: "aesgcm", 2: "fernet", NOOP_BACKEND_ID: "noop"}  # of this package, by id
_LENGTH = struct.Struct(">I")
# The second half of a context, by the number of integers: their length in bytes, then the integers.
_PACK_INTEGERS = [struct.Struct(f">I{count}q").pack for count in range(8)]


# --- flags: compression and padding --------------------------------------------------------------

Compression = Literal["zlib"]
Padding = Literal["padme"]

NO_FLAGS = b"\x00"  # neither compressed nor padded
ZLIB, PADDED = 0x01, 0x04  # the bit 02 is reserved
COMPRESSIONS: tuple[Compression, ...] = ("zlib",)
PADDINGS: tuple[Padding, ...] = ("padme",)
# The highest length of a content before it is compressed: the JSON in one record
# (`json_text.MAX_BYTES`), and 64 KiB for the fields before it.
MAX_CONTENT = 256 * 2**20 + 64 * 2**10
COMPRESSED_FROM = 1024  # bytes; a shorter content hardly becomes smaller
# Level 6 saves only 6 % more of a typical tool result, in 1.6 times the CPU time.
_ZLIB_LEVEL = 3
_PADDED_START = struct.Struct(">BI")  # the flags, and the length of what follows before the zeros


@hides_locals
@dataclass(frozen=True, slots=True)
class Packing:
    """How new values are compressed and padded before they are encrypted.

    Every service reads compressed and padded values.

    Args:
        compression: `zlib` to compress values of 1 KB or more; None for no compression.  The
            lengths of stored values then tell about their content (docs/limits.md, "Compression").
        padding: `padme` to pad values to a Padmé length, so that stored lengths tell less; None
            for no padding.

    Raises:
        ConfigurationError: An argument has another value.
    """

    compression: Compression | None = None
    padding: Padding | None = None

    def __post_init__(self) -> None:
        if self.compression not in (None, *COMPRESSIONS):
            raise ConfigurationError('compression must be "zlib" or None')
        if self.padding not in (None, *PADDINGS):
            raise ConfigurationError('padding must be "padme" or None')


def pack(packing: Packing, content: bytes) -> bytes:
    """Return the plaintext of a record with *content*: the flags, then the packed content."""
    if packing.compression is None and packing.padding is None:
        return NO_FLAGS + content
    flags, body = 0, content
    if packing.compression and COMPRESSED_FROM <= len(content) <= MAX_CONTENT:
        compressed = zlib.compress(content, _ZLIB_LEVEL)
        if len(compressed) < len(content):
            flags, body = ZLIB, compressed
    if not packing.padding:
        return bytes([flags]) + body
    length = _PADDED_START.size + len(body)
    start = _PADDED_START.pack(flags | PADDED, len(body))
    return b"".join((start, body, bytes(padme(length) - length)))


def packing_of(plaintext: bytes) -> Packing:
    """Return the packing of *plaintext*.

    Maintenance commands use it to rewrite a row without the service's options.
    """
    flags = plaintext[0]
    return Packing("zlib" if flags & ZLIB else None, "padme" if flags & PADDED else None)


def padme(length: int) -> int:
    """Return the smallest Padmé length that is not less than *length*, which is 2 or more: at most
    12 % are added (docs/format.md, "Padding").
    """
    exponent = length.bit_length() - 1
    zeros = exponent - exponent.bit_length()
    mask = (1 << zeros) - 1
    return (length + mask) & ~mask


def unpack(plaintext: bytes, limit: int = MAX_CONTENT) -> bytes:
    """Return `NO_FLAGS` and the content of *plaintext*, decompressed and without padding.

    At most *limit* bytes are decompressed.  Raises TamperedError if the plaintext does not fit
    its flags.  Only a faulty writer can cause this, because the plaintext is authentic.  Unknown
    flags raise DecryptionError.
    """
    flags = plaintext[0]
    if flags & ~(ZLIB | PADDED):
        raise DecryptionError(
            f"its flags are {flags:#04x}, which this release of adk-secure-sessions does not "
            "know: install the release that wrote it",
            Reason.UNKNOWN_FLAGS,
        )
    body = memoryview(plaintext)[1:]
    if flags & PADDED:
        body = _without_padding(body)
    if not flags & ZLIB:
        return b"".join((NO_FLAGS, body))
    content = _zlib_content(body, limit)
    if content is None:
        raise TamperedError("its compressed content is malformed", Reason.MALFORMED)
    if len(content) > limit:
        raise TamperedError(
            f"its content has more than {limit} bytes after decompression", Reason.MALFORMED
        )
    return b"".join((NO_FLAGS, content))


def keep_packed(plaintext: bytes) -> bytes:
    """Return *plaintext*, which `seal` can encrypt again, if `unpack` accepts it."""
    unpack(plaintext)
    return plaintext


def reject_flags(plaintext: bytes) -> Never:
    """Reject *plaintext*, of a wrapped key or a version witness, because it has other flags."""
    raise DecryptionError(
        f"its flags are {plaintext[0]:#04x}, and a wrapped key or a version witness has no flags",
        Reason.UNKNOWN_FLAGS,
    )


def _without_padding(body: memoryview) -> memoryview:
    start = _LENGTH.size
    if len(body) >= start:
        end = start + _LENGTH.unpack_from(body)[0]
        if end <= len(body) and not bytes(body[end:]).strip(b"\x00"):
            return body[start:end]
    raise TamperedError("its padding is malformed", Reason.MALFORMED)


def _zlib_content(body: memoryview, limit: int) -> bytes | None:
    """Return at most *limit* + 1 bytes of the content; None if *body* is not exactly one stream."""
    stream = zlib.decompressobj()
    try:
        content = stream.decompress(body, limit + 1)
    except zlib.error:
        return None
    is_whole = stream.eof and not stream.unused_data
    return content if is_whole or len(content) > limit else None


# --- records -------------------------------------------------------------------------------------


class Cipher(Protocol):
    """Encrypts and decrypts with one data key; backends create ciphers."""

    def encrypt(self, plaintext: bytes, associated_data: bytes, /) -> bytes:
        """Encrypt `plaintext` and authenticate it together with `associated_data`.

        Both arguments may have any length, including 0.  `decrypt` needs the same
        `associated_data`.
        """

    def decrypt(self, sealed: bytes, associated_data: bytes, /) -> bytes:
        """Return the plaintext of `sealed`, which `encrypt` returned.

        Raise an exception, of any class, if the key or `associated_data` is wrong, or if `sealed`
        was modified.
        """


# Encodes a text as UTF-8; lone surrogates, which Python accepts, take three bytes each.
encode_text: Callable[[str], bytes] = methodcaller("encode", "utf-8", "surrogatepass")


def is_unicode(text: str) -> bool:
    """Return whether *text* has no lone surrogate.  No error is raised, which would hold *text*."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def decode_text(data: object) -> str:
    try:
        return require_bytes(data).decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise TamperedError("its text is not UTF-8", Reason.MALFORMED) from None


def require_bytes(value: object) -> bytes:
    """Return *value*, which was read from a binary column; TamperedError if it is not bytes."""
    if not isinstance(value, bytes):
        raise TamperedError("a binary column holds a value of another type", Reason.MALFORMED)
    return value


def build_context(parts: tuple[str | bytes, ...], *numbers: int) -> bytes:
    """Return the context that consists of *parts* and at most 7 *numbers*.

    Different arguments give different contexts (docs/format.md, "Contexts").  An argument of
    another type, which a modified row may hold, raises TamperedError.
    """
    return context_with_prefix(context_prefix(parts), *numbers)


def context_with_prefix(prefix: bytes, *numbers: int) -> bytes:
    """Return the context of *prefix*, a result of `context_prefix`, and *numbers*; if many rows
    have the same prefix, this is faster than `build_context`.
    """
    count = len(numbers)
    try:
        return prefix + _PACK_INTEGERS[count](8 * count, *numbers)
    except struct.error:  # a modified row may hold any type: see `storage.schema`
        raise wrong_integer_error() from None


# Returns the second half of the context of an event, or raises `struct.error` if a value is no
# 64-bit integer.  It takes half the time of `context_with_prefix`.
pack_event_integers: Callable[[int, int, int], bytes] = partial(_PACK_INTEGERS[3], 3 * 8)


def wrong_integer_error() -> TamperedError:
    return TamperedError("an integer column holds a value of another type", Reason.MALFORMED)


def context_prefix(parts: tuple[str | bytes, ...]) -> bytes:
    """Return the first half of a context: the length and the bytes of each part."""
    return b"".join(map(encode_part, parts))


def encode_part(part: str | bytes) -> bytes:
    if isinstance(part, str):
        part = encode_text(part)
    elif not isinstance(part, bytes):
        raise TamperedError(
            "a text or binary column holds a value of another type", Reason.MALFORMED
        )
    return _LENGTH.pack(len(part)) + part


def seal(cipher: Cipher, header: bytes, context: bytes, plaintext: bytes) -> bytes:
    """Encrypt *plaintext*, which begins with its flags; return the record, bound to *context*."""
    failure = "it returned something that is not bytes"
    try:
        sealed = cipher.encrypt(plaintext, header + context)
        if isinstance(sealed, bytes):
            return header + sealed
    except Exception as error:  # its text may contain the plaintext: do not quote it
        failure = type(error).__name__
    backend_id, _ = parse_header(header)
    raise SecureSessionError(f"backend {backend_id} failed to encrypt: {failure}")


def build_header(backend_id: int, key_id: int) -> bytes:
    """Return the header of the records that data key *key_id* of backend *backend_id* encrypts."""
    return _HEADER.pack(_PREFIX, backend_id, key_id)


def parse_header(record: object) -> tuple[int, int]:
    """Return the backend id and the key id in a record's header, which is not authenticated yet."""
    if not record:
        raise TamperedError("its encrypted value was removed", Reason.MISSING)
    if not isinstance(record, bytes) or not record.startswith(MAGIC):
        raise PlaintextRefusedError("not an encrypted record")
    if len(record) < HEADER_LENGTH or record[3] != VERSION:
        raise TamperedError("the record's header is malformed", Reason.MALFORMED)
    _, backend_id, key_id = _HEADER.unpack_from(record)
    return backend_id, key_id


def parse_header_or_none(record: object) -> tuple[int, int] | None:
    """Return the backend id and the key id in a header; None if *record* has no valid header.

    The header is not authenticated here, so use this function only to count records.
    """
    try:
        return parse_header(record)
    except DecryptionError:
        return None


# What is done with a plaintext that has flags: `unpack`, `keep_packed` or `reject_flags`.
FlagHandler = Callable[[bytes], bytes]


def open_with_flags(
    record: bytes, context: bytes, cipher: Cipher, handler: FlagHandler = unpack
) -> bytes:
    """Decrypt a record whose header `parse_header` accepted; return its flags and content.

    The flags stay: readers of events, of which there may be thousands, take slices in any case.
    If the plaintext has other flags than `NO_FLAGS`, return what *handler* makes of it.
    Wrapped keys and version witnesses are never packed.
    """
    return open_sealed(record[HEADER_LENGTH:], record[:HEADER_LENGTH] + context, cipher, handler)


def open_sealed(
    sealed: bytes, associated_data: bytes, cipher: Cipher, handler: FlagHandler = unpack
) -> bytes:
    """Do the same as `open_with_flags`, with the arguments of `Cipher.decrypt`."""
    try:
        plaintext = cipher.decrypt(sealed, associated_data)
    except DecryptionError:
        raise
    except Exception:  # a third party's cipher may put secrets into its exceptions
        plaintext = None
    if not isinstance(plaintext, bytes):
        raise TamperedError("the backend could not decrypt it")
    if plaintext[:1] == NO_FLAGS:  # a quarter of the instructions of `startswith`
        return plaintext
    if not plaintext:
        raise TamperedError("its plaintext is empty", Reason.MALFORMED)
    return handler(plaintext)


# --- plaintexts ----------------------------------------------------------------------------------
# The functions that split plaintexts take authenticated bytes.  Therefore, they raise TamperedError
# only if the program that wrote the bytes is faulty.

LINK_LENGTH = 16
NO_LINK = bytes(LINK_LENGTH)  # stored instead of a link if there is no event or no snapshot
# Slices of an event's plaintext that still begins with the flags byte.
EVENT_LINK = slice(1, 1 + LINK_LENGTH)
EVENT_PREVIOUS = slice(1 + LINK_LENGTH, 1 + 2 * LINK_LENGTH)
EVENT_REST = slice(1 + 2 * LINK_LENGTH, None)  # google-adk's version, and JSON

# The ids of data keys in the plaintext of an owner, by their number: the number, then the ids.
_KEY_IDS = [struct.Struct(f">B{count}q") for count in range(256)]


class EncodedEvent(NamedTuple):
    """An event or an item of a collection, and its time."""

    plaintext: bytes  # of an event, as `events.encode` returns it
    time: int  # microseconds since 1970, UTC


def new_link() -> bytes:
    """Return a new link: 16 random bytes."""
    return os.urandom(LINK_LENGTH)


def join_id(identifier: str, rest: bytes) -> bytes:
    return encode_part(identifier) + rest


def split_id(plaintext: bytes) -> tuple[str, bytes]:
    """Return the id and the rest of a plaintext that `join_id` returned."""
    if len(plaintext) >= _LENGTH.size:
        end = _LENGTH.size + _LENGTH.unpack_from(plaintext)[0]
        if end <= len(plaintext):
            return decode_text(plaintext[_LENGTH.size : end]), plaintext[end:]
    raise _malformed_error()


def join_owner(link: bytes, key_ids: tuple[int, ...], state: bytes) -> bytes:
    """Join the fields of an app or a user to its plaintext; at most 255 key ids fit."""
    return link + _KEY_IDS[len(key_ids)].pack(len(key_ids), *key_ids) + state


def split_owner(data: bytes) -> tuple[bytes, tuple[int, ...], bytes]:
    """Return the link, the key ids and the state that `join_owner` has joined."""
    try:
        layout = _KEY_IDS[data[LINK_LENGTH]]
        _, *key_ids = layout.unpack_from(data, LINK_LENGTH)
    except (IndexError, struct.error):
        raise _malformed_error() from None
    return data[:LINK_LENGTH], tuple(key_ids), data[LINK_LENGTH + layout.size :]


def join_session(last_link: bytes, snapshot_link: bytes, overlay: bytes) -> bytes:
    """Join the fields of a session to its plaintext, which `split_session` splits."""
    return last_link + snapshot_link + overlay


def split_session(data: bytes) -> tuple[bytes, bytes, bytes]:
    """Return the link of the last event, that of the snapshot, and the overlay of a session."""
    if len(data) < 2 * LINK_LENGTH:
        raise _malformed_error()
    end = 2 * LINK_LENGTH
    return data[:LINK_LENGTH], data[LINK_LENGTH:end], data[end:]


def split_link(data: bytes) -> tuple[bytes, bytes]:
    if len(data) < LINK_LENGTH:
        raise _malformed_error()
    return data[:LINK_LENGTH], data[LINK_LENGTH:]


def _malformed_error() -> TamperedError:
    return TamperedError("its plaintext is malformed", Reason.MALFORMED)
