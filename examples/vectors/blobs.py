"""tests/vectors/blobs.json: blobs to accept, blobs to reject, and ranges of their plaintexts."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from unittest import mock

from adk_secure_sessions.formats.blobs import (
    CHUNK_LENGTH,
    HEADER,
    SEALED_LENGTH,
    BlobDecryptor,
    BlobEncryptor,
)
from examples.vectors.fixed import Json, counting

ABOUT = (
    "Blobs that a reader must accept or reject. examples/make_vectors.py generates them as "
    "docs/format.md says. In 'blobs', the plaintext has 'size' bytes: the SHAKE-256 of the text "
    "'label'. Encrypting it with 'key' gives a blob with the SHA-256 'blob_sha256'; 'blob' is the "
    "blob itself (hex), if it is short. In 'rejected', a reader that has 'key' and 'size' must "
    "reject the blob that consists of 'header' (hex), if it is given, then of the bytes 'start' to "
    "'stop' - 1 of the named blobs, in 'slices', after the lowest bit of each byte in 'flips' was "
    "changed. 'reason' is the reason that adk-secure-sessions gives. In 'ranges', the bytes "
    "'plaintext' (start, stop) are decrypted from the bytes 'blob' (start, stop)."
)
_LABEL = "adk-secure-sessions vectors: blob"
_SHORT = 200
_SIZES = {
    "empty": 0,
    "one byte": 1,
    "100 bytes": 100,
    "one chunk less a byte": CHUNK_LENGTH - 1,
    "one chunk": CHUNK_LENGTH,
    "one chunk and a byte": CHUNK_LENGTH + 1,
    "two chunks": 2 * CHUNK_LENGTH,
    "five chunks and 100 bytes": 5 * CHUNK_LENGTH + 100,
}
_KEYS = {name: counting(32 * i, 32) for i, name in enumerate(_SIZES)}
_ANOTHER = "five chunks of another blob"


def _plaintext(size: int) -> bytes:
    return hashlib.shake_256(_LABEL.encode()).digest(size)


def _blob(key: bytes, size: int) -> bytes:
    async def plaintext() -> AsyncIterator[bytes]:
        yield _plaintext(size)

    async def joined() -> bytes:
        with mock.patch("os.urandom", return_value=key):
            encryptor = BlobEncryptor(plaintext())
        return b"".join([piece async for piece in encryptor.blob])

    return asyncio.run(joined())


def _accepted(name: str, key: bytes, size: int) -> Json:
    blob = _blob(key, size)
    case: Json = {"name": name, "key": key.hex(), "label": _LABEL, "size": size}
    case["blob_sha256"] = hashlib.sha256(blob).hexdigest()
    return case | ({"blob": blob.hex()} if len(blob) < _SHORT else {})


def _chunk(number: int) -> tuple[int, int]:
    """The position of a chunk in its blob."""
    start = len(HEADER) + number * SEALED_LENGTH
    return start, start + SEALED_LENGTH


def _rejected() -> list[Json]:
    of, long = "100 bytes", "five chunks and 100 bytes"
    size, blob = _SIZES[long], _blob(_KEYS[long], _SIZES[long])
    header, end = (long, 0, len(HEADER)), len(blob)
    chunks = [(long, *_chunk(number)) for number in range(5)]
    last = (long, _chunk(5)[0], end)
    whole = (long, 0, end)
    mismatch, authentication, malformed = "mismatch", "authentication", "malformed"
    short_end = len(HEADER) + 100 + 16

    def case(
        name: str, reason: str, slices: list[tuple[str, int, int]], size: int = size,
        flips: tuple[int, ...] = (), key: bytes = _KEYS[long], **more: str,
    ) -> Json:  # fmt: skip
        return {
            "name": name,
            "key": key.hex(),
            "size": size,
            **more,
            "slices": [list(one) for one in slices],
            "flips": list(flips),
            "reason": reason,
        }

    short: Json = {"size": 100, "key": _KEYS[of]}
    return [
        case("nothing", mismatch, []),
        case("only the header", mismatch, [header]),
        case("cut by one byte", mismatch, [(long, 0, end - 1)]),
        case("cut between chunks", mismatch, [header, *chunks]),
        case("cut between chunks, with a size that fits", authentication, [header, *chunks],
             5 * CHUNK_LENGTH),
        case("extended by one byte", mismatch, [whole, (long, 0, 1)]),
        case("extended by its last chunk", mismatch, [whole, last]),
        case("last chunk twice, with a size that fits", authentication,
             [("two chunks", 0, _chunk(1)[1]), ("two chunks", *_chunk(1))], 3 * CHUNK_LENGTH,
             key=_KEYS["two chunks"]),
        case("first chunk missing", authentication, [header, *chunks[1:], last]),
        case("two chunks swapped", authentication,
             [header, chunks[1], chunks[0], *chunks[2:], last]),
        case("a chunk repeated", authentication,
             [header, chunks[0], chunks[0], *chunks[2:], last]),
        case("a chunk of another blob", authentication,
             [header, chunks[0], (_ANOTHER, *_chunk(1)), *chunks[2:], last]),
        case("another blob", authentication, [(_ANOTHER, 0, end)]),
        case("another key", authentication, [whole], key=counting(7, 32)),
        case("size of one byte less", mismatch, [whole], size - 1),
        case("an empty last chunk more", mismatch,
             [("one chunk", 0, _chunk(0)[1]), ("empty", 5, 21)], CHUNK_LENGTH,
             key=_KEYS["one chunk"]),
        case("magic modified", malformed, [(of, 0, short_end)], flips=(0,), **short),
        case("version modified", malformed, [(of, 0, short_end)], flips=(4,), **short),
        case("ciphertext modified", authentication, [(of, 0, short_end)], flips=(5,), **short),
        case("tag modified", authentication, [(of, 0, short_end)], flips=(short_end - 1,), **short),
        case("a later version", malformed, [(of, 5, short_end)], header="414b534202", **short),
        case("header of a record", malformed, [(of, 5, short_end)], header="414b530201", **short),
    ]  # fmt: skip


def _ranges() -> list[Json]:
    long = "five chunks and 100 bytes"
    wanted = {
        "first byte": (0, 1),
        "first chunk": (0, CHUNK_LENGTH),
        "across a border": (CHUNK_LENGTH - 1, CHUNK_LENGTH + 1),
        "second chunk": (CHUNK_LENGTH, 2 * CHUNK_LENGTH),
        "last byte": (_SIZES[long] - 1, _SIZES[long]),
        "all": (0, _SIZES[long]),
    }
    cases = []
    for name, (start, stop) in wanted.items():
        decryptor = BlobDecryptor(_KEYS[long], _SIZES[long], start, stop)
        part = [decryptor.first, decryptor.end]
        cases.append({"name": name, "of": long, "plaintext": [start, stop], "blob": part})
    return cases


def blob_vectors() -> Json:
    accepted = [_accepted(name, _KEYS[name], size) for name, size in _SIZES.items()]
    another = _accepted(_ANOTHER, counting(1, 32), _SIZES["five chunks and 100 bytes"])
    return {
        "about": ABOUT,
        "blobs": [*accepted, another],
        "rejected": _rejected(),
        "ranges": _ranges(),
    }
