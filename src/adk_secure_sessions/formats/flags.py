"""The first byte of every plaintext: the flags, which say whether the rest is compressed or padded.

docs/format.md, "Flags", describes the format.  A writer that neither compresses nor pads writes
`FLAGS`, the byte 00.  A reader calls `expand` only if the byte has another value.

Compression makes the length of a record depend on its content: an attacker who sees lengths, and
whose text is in the same record as a secret, can guess the secret (docs/limits.md, "Compression").
"""

import zlib
from dataclasses import dataclass
from struct import Struct
from typing import Literal

from adk_secure_sessions.errors import ConfigurationError, DecryptionError, Reason, TamperedError
from adk_secure_sessions.tracebacks import hides_locals

Compression = Literal["zlib"]
Padding = Literal["padme"]

FLAGS = b"\x00"  # neither compressed nor padded
ZLIB, PADDED = 0x01, 0x04  # the bit 02 is reserved
COMPRESSIONS: tuple[Compression, ...] = ("zlib",)
PADDINGS: tuple[Padding, ...] = ("padme",)
# The highest length of a content before it is compressed: the JSON in one record
# (`json_text.MAX_BYTES`), and 64 KiB for the fields before it.
MAX_CONTENT = 256 * 2**20 + 64 * 2**10
COMPRESSED_FROM = 1024  # bytes; a shorter content hardly becomes smaller
# Of a tool's result of 5 KB, level 6 of zlib makes 6 % less, in 1.6 times the CPU time (67 µs).
_ZLIB_LEVEL = 3
_PADDED_START = Struct(">BI")  # the flags, and the length of what follows before the zeros
_LENGTH = Struct(">I")


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

    def pack(self, content: bytes) -> bytes:
        """Return the plaintext of a record with *content*: the flags, then the packed content."""
        if self.compression is None and self.padding is None:
            return FLAGS + content
        flags, body = 0, content
        if self.compression and COMPRESSED_FROM <= len(content) <= MAX_CONTENT:
            compressed = zlib.compress(content, _ZLIB_LEVEL)
            if len(compressed) < len(content):
                flags, body = ZLIB, compressed
        if not self.padding:
            return bytes([flags]) + body
        length = _PADDED_START.size + len(body)
        start = _PADDED_START.pack(flags | PADDED, len(body))
        return b"".join((start, body, bytes(padme(length) - length)))


def packing_of(plaintext: bytes) -> Packing:
    """Return the packing of *plaintext*, with which a program without the options of the service
    writes the row again.
    """
    flags = plaintext[0]
    compression = COMPRESSIONS[0] if flags & ZLIB else None
    return Packing(compression, PADDINGS[0] if flags & PADDED else None)


def padme(length: int) -> int:
    """Return the smallest Padmé length that is not less than *length*, which is 2 or more: at most
    12 % are added (docs/format.md, "Padding").
    """
    exponent = length.bit_length() - 1
    zeros = exponent - exponent.bit_length()
    mask = (1 << zeros) - 1
    return (length + mask) & ~mask


def expand(plaintext: bytes, limit: int = MAX_CONTENT) -> bytes:
    """Return `FLAGS`, then the content of *plaintext*, which begins with any flags.

    At most *limit* bytes are decompressed.  A plaintext that does not fit its flags is authentic,
    so the program that wrote it is faulty: TamperedError.  Unknown flags raise DecryptionError.
    """
    if not plaintext:
        raise TamperedError("its plaintext is empty", reason=Reason.MALFORMED)
    flags = plaintext[0]
    if flags & ~(ZLIB | PADDED):
        raise DecryptionError(
            f"its flags are {flags:#04x}, which this release of adk-secure-sessions does not "
            "know: install the release that wrote it",
            reason=Reason.UNKNOWN_FLAGS,
        )
    body = memoryview(plaintext)[1:]
    if flags & PADDED:
        body = _without_padding(body)
    if not flags & ZLIB:
        return b"".join((FLAGS, body))
    found = _zlib_content(body, limit)
    if found is None:
        raise TamperedError("its compressed content is malformed", reason=Reason.MALFORMED)
    if len(found) > limit:
        raise TamperedError(
            f"its content has more than {limit} bytes after decompression",
            reason=Reason.MALFORMED,
        )
    return b"".join((FLAGS, found))


def require_none(plaintext: bytes) -> bytes:
    """Return *plaintext* if its flags are `FLAGS`, as in all wrapped keys and version witnesses."""
    if plaintext.startswith(FLAGS):
        return plaintext
    if not plaintext:
        raise TamperedError("its plaintext is empty", reason=Reason.MALFORMED)
    raise DecryptionError(
        f"its flags are {plaintext[0]:#04x}, and a wrapped key or a version witness has no flags",
        reason=Reason.UNKNOWN_FLAGS,
    )


def _without_padding(body: memoryview) -> memoryview:
    start = _LENGTH.size
    if len(body) >= start:
        end = start + _LENGTH.unpack_from(body)[0]
        if end <= len(body) and not bytes(body[end:]).strip(b"\x00"):
            return body[start:end]
    raise TamperedError("its padding is malformed", reason=Reason.MALFORMED)


def _zlib_content(body: memoryview, limit: int) -> bytes | None:
    """Return at most *limit* + 1 bytes of the content; None if *body* is not exactly one stream."""
    stream = zlib.decompressobj()
    try:
        content = stream.decompress(body, limit + 1)
    except zlib.error:
        return None
    is_whole = stream.eof and not stream.unused_data
    return content if is_whole or len(content) > limit else None
