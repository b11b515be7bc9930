"""The first byte of every plaintext: the flags, which say whether the rest is compressed or padded.

docs/format.md, "Flags", describes the format.  A writer that neither compresses nor pads writes
`FLAGS`, the byte 00.  A reader calls `expand` only if the byte has another value.

Compression makes the length of a record depend on its content: an attacker who sees lengths, and
whose text is in the same record as a secret, can guess the secret (docs/limits.md, "Compression").
"""

import importlib
import sys
import zlib
from collections.abc import Callable
from struct import Struct
from typing import Any, Literal

from adk_secure_sessions.errors import (
    ConfigurationError,
    DecryptionError,
    Reason,
    TamperedError,
    install_command,
)

Compression = Literal["zlib", "zstd"]
Padding = Literal["padme"]

FLAGS = b"\x00"  # neither compressed nor padded
ZLIB, ZSTD, PADDED = 0x01, 0x02, 0x04
COMPRESSIONS: dict[Compression, int] = {"zlib": ZLIB, "zstd": ZSTD}
PADDINGS: tuple[Padding, ...] = ("padme",)
# The highest length of a content before it is compressed: the JSON in one record
# (`json_text.MAX_BYTES`), and 64 KiB for the fields before it.
MAX_CONTENT = 256 * 2**20 + 64 * 2**10
COMPRESSED_FROM = 1024  # bytes; a shorter content hardly becomes smaller
# Of a tool's result of 5 KB, level 6 of zlib makes 6 % less, in 1.6 times the CPU time (67 µs).
_ZLIB_LEVEL = 3
_ZSTD_LEVEL = 3
_WINDOW_LOG = 23  # the window of a Zstandard frame is at most 2**23 bytes (8 MiB)
# The module of Python for Zstandard: in 3.14, a part of the standard library.
_ZSTD_MODULE = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
_PADDED_START = Struct(">BI")  # the flags, and the length of what follows before the zeros
_LENGTH = Struct(">I")


class Packing:
    """How a writer packs contents into plaintexts: compressed, padded or both."""

    __slots__ = ("_compress", "_flag", "_pads")

    def __init__(self, compression: Compression | None, padding: Padding | None) -> None:
        self._flag = 0 if compression is None else COMPRESSIONS[compression]
        self._compress = _compressor(compression)
        self._pads = padding is not None

    def pack(self, content: bytes) -> bytes:
        """Return the plaintext of a record with *content*: the flags, then the packed content."""
        flags, body = 0, content
        if self._compress is not None and COMPRESSED_FROM <= len(content) <= MAX_CONTENT:
            compressed = self._compress(content)
            if len(compressed) < len(content):
                flags, body = self._flag, compressed
        if not self._pads:
            return bytes([flags]) + body
        length = _PADDED_START.size + len(body)
        start = _PADDED_START.pack(flags | PADDED, len(body))
        return b"".join((start, body, bytes(padme(length) - length)))


def packing(compression: object, padding: object) -> Packing | None:
    """Return the packing for these two arguments of a service; None if both are None.

    Raises:
        ConfigurationError: An argument has another value than the service allows, or this Python
            cannot compress with Zstandard.
    """
    if compression is not None and compression not in tuple(COMPRESSIONS):
        raise ConfigurationError('compression must be "zlib", "zstd" or None')
    if padding is not None and padding not in PADDINGS:
        raise ConfigurationError('padding must be "padme" or None')
    if compression is None and padding is None:
        return None
    return Packing(compression, padding)


def packing_of(plaintext: bytes) -> Packing | None:
    """Return the packing of *plaintext*, whose flags `expand` accepts; None if it has none.

    A program that writes a row again without the options of the service uses this packing.
    """
    flags = plaintext[0]
    compression = next((name for name, flag in COMPRESSIONS.items() if flags & flag), None)
    return packing(compression, PADDINGS[0] if flags & PADDED else None)


def padme(length: int) -> int:
    """Return the smallest Padmé length that is not less than *length*, which is 2 or more.

    Padmé keeps the first bits of a length, so lengths differ less, the longer they are: at most
    12 % are added (docs/format.md, "Padding").
    """
    exponent = length.bit_length() - 1
    zeros = exponent - exponent.bit_length()
    mask = (1 << zeros) - 1
    return (length + mask) & ~mask


def expand(plaintext: bytes, limit: int = MAX_CONTENT) -> bytes:
    """Return `FLAGS`, then the content of *plaintext*, which begins with any flags.

    Args:
        plaintext: The plaintext of a record.
        limit: The largest length of a content that was compressed.

    Raises:
        DecryptionError: The flags are unknown, or need Zstandard, which this Python lacks.
        TamperedError: *plaintext* is empty, does not fit its flags, or is larger than *limit* after
            decompression.  It is authentic, so the program that wrote it is faulty.
    """
    if not plaintext:
        raise TamperedError("its plaintext is empty", reason=Reason.MALFORMED)
    flags = plaintext[0]
    compression = flags & (ZLIB | ZSTD)
    if flags & ~(ZLIB | ZSTD | PADDED) or compression == ZLIB | ZSTD:
        raise DecryptionError(
            f"its flags are {flags:#04x}, which this release of adk-secure-sessions does not "
            "know: install the release that wrote it",
            reason=Reason.UNKNOWN_FLAGS,
        )
    body = memoryview(plaintext)[1:]
    if flags & PADDED:
        body = _without_padding(body)
    if not compression:
        return b"".join((FLAGS, body))
    found = _zlib_content(body, limit) if compression == ZLIB else _zstd_content(body, limit)
    if found is None:
        raise TamperedError("its compressed content is malformed", reason=Reason.MALFORMED)
    if len(found) > limit:
        raise TamperedError(
            f"its content has more than {limit} bytes after decompression",
            reason=Reason.MALFORMED,
        )
    return b"".join((FLAGS, found))


def require_none(plaintext: bytes) -> bytes:
    """Return *plaintext* if its flags are `FLAGS`, as in all wrapped keys and version witnesses.

    Raises:
        DecryptionError: It has other flags.
        TamperedError: It is empty.
    """
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
    """Return the content, of which at most *limit* + 1 bytes are decompressed.

    Return None if *body* is not exactly one zlib stream.
    """
    stream = zlib.decompressobj()
    try:
        content = stream.decompress(body, limit + 1)
    except zlib.error:
        return None
    is_whole = stream.eof and not stream.unused_data
    return content if is_whole or len(content) > limit else None


def _zstd_content(body: memoryview, limit: int) -> bytes | None:
    """Do the same as `_zlib_content` for a Zstandard frame."""
    zstd = _zstd()
    if zstd is None:
        raise DecryptionError(
            f"it is compressed with Zstandard, which needs {_ZSTD_MODULE}: "
            f"{install_command('zstd')}, or use Python 3.14",
            reason=Reason.UNKNOWN_FLAGS,
        )
    window = {zstd.DecompressionParameter.window_log_max: _WINDOW_LOG}
    frame = zstd.ZstdDecompressor(options=window)
    try:
        content: bytes = frame.decompress(body, limit + 1)
    except zstd.ZstdError:
        return None
    is_whole = frame.eof and not frame.unused_data
    return content if is_whole or len(content) > limit else None


def _compressor(compression: Compression | None) -> Callable[[bytes], bytes] | None:
    if compression is None:
        return None
    if compression == "zlib":
        return lambda content: zlib.compress(content, _ZLIB_LEVEL)
    zstd = _zstd()
    if zstd is None:
        raise ConfigurationError(
            f'compression="zstd" needs {_ZSTD_MODULE}: {install_command("zstd")}, use Python 3.14, '
            'or use compression="zlib"'
        )
    compress: Callable[[bytes, int], bytes] = zstd.compress
    return lambda content: compress(content, _ZSTD_LEVEL)


def _zstd() -> Any | None:
    """Return the module for Zstandard; None if it is not installed."""
    try:
        return importlib.import_module(_ZSTD_MODULE)
    except ImportError:
        return None
