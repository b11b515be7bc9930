"""Blobs: chunks of any pieces, ranges, and every change that is rejected."""

import hashlib
import json
import re
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given, settings
from hypothesis import strategies as st

from adk_secure_sessions import Reason, TamperedError
from adk_secure_sessions.formats import blobs
from adk_secure_sessions.formats.blobs import (
    CHUNK_LENGTH,
    HEADER,
    SEALED_LENGTH,
    BlobDecryptor,
    encrypted_size,
)
from adk_secure_sessions.integrations import blob_store
from tests import format_reader
from tests.blob_pieces import decrypt_pieces, encrypted, encrypting, without_loop

VECTORS = json.loads((Path(__file__).parent / "vectors" / "blobs.json").read_text(encoding="utf-8"))
PAGE = (Path(__file__).parent.parent / "docs" / "format.md").read_text(encoding="utf-8")
SIZES = [0, 1, CHUNK_LENGTH - 1, CHUNK_LENGTH, CHUNK_LENGTH + 1, 3 * CHUNK_LENGTH, 200_000]


def plaintext_of(size: int) -> bytes:
    return hashlib.shake_256(b"plaintext").digest(size)


def made(size: int) -> tuple[bytes, bytes]:
    """The key and the blob of `plaintext_of(size)`."""
    encryptor, blob = encrypted([plaintext_of(size)])
    assert encryptor.size == size
    return encryptor.key, blob


def opened(key: bytes, size: int, *pieces: bytes, start: int = 0, stop: int | None = None) -> bytes:
    return b"".join(decrypt_pieces(BlobDecryptor(key, size, start, stop), pieces))


def rejection(key: bytes, size: int, *pieces: bytes) -> Reason:
    with pytest.raises(TamperedError) as info:
        opened(key, size, *pieces)
    return info.value.reason


def cut(data: bytes, lengths: list[int]) -> Iterator[bytes]:
    """*data* in pieces of these lengths, and the rest in one."""
    for length in lengths:
        yield data[:length]
        data = data[length:]
    yield data


# --- what is written can be read -----------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_blob_is_decrypted_from_pieces_of_any_length(size: int) -> None:
    key, blob = made(size)
    assert opened(key, size, blob) == plaintext_of(size)
    assert opened(key, size, *cut(blob, [1, 3, 2, 0, 65535, 1])) == plaintext_of(size)
    if size < 100:
        assert opened(key, size, *(bytes([byte]) for byte in blob)) == plaintext_of(size)


LENGTHS = st.lists(
    st.integers(0, 20) | st.sampled_from([CHUNK_LENGTH, SEALED_LENGTH, 65537]), max_size=8
)


@settings(deadline=None)
@given(st.integers(0, 200_000) | st.sampled_from(SIZES), LENGTHS, LENGTHS)
def test_pieces_do_not_matter(size: int, written: list[int], read: list[int]) -> None:
    plaintext = plaintext_of(size)
    encryptor, blob = encrypted(cut(plaintext, written))
    assert len(blob) == encrypted_size(size)
    assert opened(encryptor.key, size, *cut(blob, read)) == plaintext


@settings(deadline=None)
@given(st.integers(0, 200_000), st.data())
def test_range_is_read_from_its_own_chunks(size: int, data: st.DataObject) -> None:
    key, blob = made(size)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    decryptor = BlobDecryptor(key, size, start, stop)
    assert decryptor.end - decryptor.first <= stop - start + 2 * SEALED_LENGTH
    pieces = cut(blob[decryptor.first : decryptor.end], data.draw(LENGTHS))
    assert b"".join(decrypt_pieces(decryptor, pieces)) == plaintext_of(size)[start:stop]


def test_pieces_may_be_one_buffer_that_is_filled_again() -> None:
    def filled() -> Iterator[bytearray | memoryview]:
        buffer = bytearray(2)
        for text in (b"ab", b"cd"):
            buffer[:] = text
            yield buffer
        yield memoryview(b"ef")

    encryptor, blob = encrypted(filled())
    assert opened(encryptor.key, 6, blob) == b"abcdef"


def test_memory_does_not_grow_with_the_blob() -> None:
    def peak(count: int) -> int:
        piece = bytes(100_000)
        encryptor = encrypting(piece for _ in range(count))
        tracemalloc.start()
        try:
            decryptor = BlobDecryptor(encryptor.key, count * len(piece))
            assert sum(
                map(len, decrypt_pieces(decryptor, without_loop(encryptor.blob)))
            ) == count * len(piece)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak(200) < 1.2 * peak(10) < 2_000_000


def test_blob_of_an_encryptor_is_there_once() -> None:
    encryptor, _ = encrypted([b"x"])
    assert list(without_loop(encryptor.blob)) == []


# --- what is rejected ----------------------------------------------------------------------------

SIZE = 2 * CHUNK_LENGTH + 100
KEY, BLOB = made(SIZE)
CHUNKS = [BLOB[at : at + SEALED_LENGTH] for at in range(len(HEADER), len(BLOB), SEALED_LENGTH)]


@pytest.mark.parametrize(
    ("header", "text"),
    [
        (b"AKSB\x02", "version 2, which this release does not know"),
        (b"AKSB\x00", "version 0"),
        (b"AKS\x02\x01", "not an encrypted blob"),
        (b"%PDF-", "not an encrypted blob"),
    ],
)
def test_other_header_is_rejected(header: bytes, text: str) -> None:
    with pytest.raises(TamperedError, match=text) as info:
        opened(KEY, SIZE, header + BLOB[5:])
    assert info.value.reason is Reason.MALFORMED


def test_plaintext_before_the_modified_chunk_is_the_only_plaintext() -> None:
    modified = bytearray(BLOB)
    modified[5 + SEALED_LENGTH] ^= 1
    plaintext = decrypt_pieces(BlobDecryptor(KEY, SIZE), [modified])
    assert next(plaintext) == plaintext_of(SIZE)[:CHUNK_LENGTH]
    with pytest.raises(TamperedError, match="chunk 1"):
        next(plaintext)


def test_range_of_a_moved_chunk_is_rejected() -> None:
    decryptor = BlobDecryptor(KEY, SIZE, CHUNK_LENGTH, CHUNK_LENGTH + 10)
    assert (decryptor.first, decryptor.end) == (5 + SEALED_LENGTH, 5 + 2 * SEALED_LENGTH)
    with pytest.raises(TamperedError):
        list(decrypt_pieces(decryptor, [CHUNKS[0]]))


def test_objects_that_hold_the_key_show_none() -> None:
    encryptor, _ = encrypted([])
    for holder in (encryptor, BlobDecryptor(encryptor.key, 1)):
        assert encryptor.key.hex() not in repr(holder)
        with pytest.raises(TypeError, match="pickled"):
            json.dumps(holder.__reduce_ex__(4))


# --- vectors -------------------------------------------------------------------------------------

ACCEPTED = {case["name"]: case for case in VECTORS["blobs"]}
REJECTED, RANGES = VECTORS["rejected"], VECTORS["ranges"]


def name_of(case: dict[str, Any]) -> str:
    return str(case["name"])


def vector_plaintext(case: dict[str, Any]) -> bytes:
    return hashlib.shake_256(case["label"].encode()).digest(case["size"])


def vector_blob(case: dict[str, Any]) -> bytes:
    with mock.patch("os.urandom", return_value=bytes.fromhex(case["key"])):
        return encrypted([vector_plaintext(case)])[1]


def changed(case: dict[str, Any]) -> bytes:
    """The blob of a case to reject: slices of others, then single bits."""
    blob = bytearray(bytes.fromhex(case.get("header", "")))
    for name, start, stop in case["slices"]:
        blob += vector_blob(ACCEPTED[name])[start:stop]
    for position in case["flips"]:
        blob[position] ^= 1
    return bytes(blob)


@pytest.mark.parametrize("case", ACCEPTED.values(), ids=name_of)
def test_encryption_gives_exactly_the_blob_of_the_vector(case: dict[str, Any]) -> None:
    blob = vector_blob(case)
    assert hashlib.sha256(blob).hexdigest() == case["blob_sha256"]
    assert blob.hex() == case.get("blob", blob.hex())
    plaintext = vector_plaintext(case)
    key = bytes.fromhex(case["key"])
    assert opened(key, case["size"], blob) == plaintext
    assert format_reader.open_blob(blob, key, case["size"]) == plaintext


@pytest.mark.parametrize("case", REJECTED, ids=name_of)
def test_blob_is_rejected_as_the_vector_says(case: dict[str, Any]) -> None:
    blob, key = changed(case), bytes.fromhex(case["key"])
    assert rejection(key, case["size"], blob) == case["reason"]
    with pytest.raises(format_reader.Refused):
        format_reader.open_blob(blob, key, case["size"])


@pytest.mark.parametrize("case", RANGES, ids=name_of)
def test_range_is_read_from_the_bytes_of_the_vector(case: dict[str, Any]) -> None:
    of = ACCEPTED[case["of"]]
    key, (start, stop), (first, end) = bytes.fromhex(of["key"]), case["plaintext"], case["blob"]
    decryptor = BlobDecryptor(key, of["size"], start, stop)
    assert (decryptor.first, decryptor.end) == (first, end)
    pieces = [vector_blob(of)[first:end]]
    expected = vector_plaintext(of)[start:stop]
    assert b"".join(decrypt_pieces(decryptor, pieces)) == expected


def test_example_in_the_page_is_a_blob() -> None:
    text = PAGE.partition("this is the blob of the plaintext `hello`:")[2].partition("###")[0]
    key, nonce, *blob = (bytes.fromhex(digits) for digits in re.findall("`([0-9a-f]+)`", text))
    assert [len(part) for part in blob] == [len(HEADER), 5, 16]
    assert opened(key, 5, b"".join(blob)) == b"hello"
    assert AESGCM(key).decrypt(nonce, b"".join(blob[1:]), blob[0]) == b"hello"


def test_page_gives_the_lengths() -> None:
    section = PAGE.partition("\n## Blobs\n")[2].partition("\n## Records in another")[0]
    text = " ".join(section.split())
    assert f"`{blobs.MAGIC.decode()}` ({blobs.MAGIC.hex(' ')})" in text
    assert f"| 4 | version | {blobs.VERSION:02x} |" in text
    assert f"chunks of {CHUNK_LENGTH} bytes" in text
    assert f"{len(HEADER)} + {SEALED_LENGTH} \N{MULTIPLICATION SIGN} *i*" in text
    assert f"1 to {blob_store.OBJECT_LENGTH:,} bytes (8 MiB)" in text
    assert blobs.MAX_SIZE == 2**48
    assert "at most 2^48" in text


def test_empty_range_of_the_smallest_blob_needs_no_byte_of_it() -> None:
    decryptor = blobs.BlobDecryptor(bytes(32), 1, 0, 0)
    assert (decryptor.first, decryptor.end) == (0, 0)
