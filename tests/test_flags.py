"""The flags byte: contents are compressed and padded, and come back, or are rejected."""

import secrets
import tracemalloc
import zlib
from math import floor, log2
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adk_secure_sessions import ConfigurationError, DecryptionError, Reason, TamperedError
from adk_secure_sessions.formats import json_text, records
from adk_secure_sessions.formats.records import (
    COMPRESSED_FROM,
    COMPRESSIONS,
    MAX_CONTENT,
    NO_FLAGS,
    PADDED,
    PADDINGS,
    ZLIB,
    Packing,
    packing_of,
    padme,
    unpack,
)
from examples.vectors.fixed import padded

MIB = 2**20
REPETITIVE = b'{"notes":"take one pill, ' * 200


def packed(content: bytes, compression: Any = None, padding: Any = None) -> bytes:
    return records.pack(Packing(compression, padding), content)


# --- contents come back --------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.binary(max_size=3000) | st.integers(0, 5000).map(lambda n: (REPETITIVE * 2)[:n]),
    st.sampled_from([None, *COMPRESSIONS]),
    st.sampled_from([None, *PADDINGS]),
)
def test_content_is_packed_and_comes_back(content: bytes, compression: Any, padding: Any) -> None:
    plaintext = packed(content, compression, padding)
    assert unpack(plaintext) == NO_FLAGS + content
    assert records.pack(Packing(), content) == NO_FLAGS + content  # nothing is packed by default
    assert (plaintext[0] & PADDED != 0) == (padding is not None)
    if padding:
        assert padme(len(plaintext)) == len(plaintext)
    assert records.pack(packing_of(plaintext), content) == plaintext


@pytest.mark.parametrize("padding", [None, "padme"])
def test_content_of_1024_bytes_is_compressed_and_a_shorter_one_is_not(padding: str | None) -> None:
    assert packed(REPETITIVE[:COMPRESSED_FROM], "zlib", padding)[0] & ZLIB
    assert not packed(REPETITIVE[: COMPRESSED_FROM - 1], "zlib", padding)[0] & ZLIB
    assert COMPRESSED_FROM == 1024


def test_content_that_does_not_become_smaller_is_stored_as_it_is() -> None:
    content = secrets.token_bytes(5000)
    assert packed(content, "zlib") == NO_FLAGS + content
    assert packed(content, "zlib", "padme")[:5] == bytes([PADDED]) + (5000).to_bytes(4, "big")


def test_content_whose_compressed_form_is_as_long_is_stored_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(zlib, "compress", lambda content, _: content)
    assert packed(REPETITIVE, "zlib") == NO_FLAGS + REPETITIVE


def test_content_that_a_reader_would_reject_is_not_compressed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(records, "MAX_CONTENT", 2000)
    assert packed(bytes(2000), "zlib")[0] == ZLIB
    assert packed(bytes(2001), "zlib") == NO_FLAGS + bytes(2001)


def test_largest_json_with_the_largest_fields_before_it_may_be_compressed() -> None:
    # A length, a name of a collection, links, 255 key ids.
    fields = 4 + 16384 + 3 * 16 + 1 + 255 * 8
    assert MAX_CONTENT - json_text.MAX_BYTES >= fields
    assert MAX_CONTENT == 268_500_992


# --- Padmé ---------------------------------------------------------------------------------------


def by_the_paper(length: int) -> int:
    """Padmé in floating point, as the paper writes it; for lengths below 2**40."""
    exponent = floor(log2(length))
    bits = floor(log2(exponent)) + 1
    last = exponent - bits
    mask = 2**last - 1
    return (length + mask) // 2**last * 2**last if last > 0 else length


@given(st.integers(2, 2**40) | st.integers(0, 40).map(lambda bits: 2**bits + 1))
def test_padme_is_that_of_the_paper(length: int) -> None:
    assert padme(length) == by_the_paper(length)
    assert length <= padme(length) <= 1.12 * length
    assert padme(padme(length)) == padme(length)


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        *((5, 5), (9, 10), (97, 104), (104, 104), (105, 112), (1024, 1024), (1025, 1088)),
        *((1088, 1088), (65_536, 65_536), (65_537, 67_584), (67_584, 67_584), (67_585, 69_632)),
    ],
)
def test_padme_gives_the_lengths_that_pages_name(length: int, expected: int) -> None:
    assert padme(length) == expected


def test_padding_leaves_few_different_lengths() -> None:
    lengths = {len(packed(bytes(n), None, "padme")) for n in range(1000, 5000)}
    assert len(lengths) < 80
    assert lengths == {padme(n + 5) for n in range(1000, 5000)}


# --- what is rejected ----------------------------------------------------------------------------


def test_each_unknown_byte_is_rejected_by_name() -> None:
    for value in set(range(256)) - {0, 1, 4, 5}:
        with pytest.raises(DecryptionError, match=f"flags are {value:#04x}") as info:
            unpack(bytes([value]) + b"a secret")
        assert info.value.reason is Reason.UNKNOWN_FLAGS
        assert not isinstance(info.value, TamperedError)


def outcome(plaintext: bytes) -> Reason | None:
    """Return why *plaintext* is rejected; None if it has a content."""
    error, found = None, b""
    try:
        found = unpack(plaintext)
    except DecryptionError as rejection:
        error = rejection
    if error is None:
        assert found.startswith(NO_FLAGS)
        return None
    return error.reason


@settings(deadline=None)
@given(st.sampled_from([1, 4, 5]), st.binary(max_size=200))
def test_any_bytes_after_the_flags_are_a_content_or_are_rejected(value: int, rest: bytes) -> None:
    assert outcome(bytes([value]) + rest) in (None, Reason.MALFORMED)


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_damaged_plaintext_is_rejected_or_has_another_content(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([None, "zlib"]))
    padding = data.draw(st.sampled_from(["padme", None])) if name else "padme"
    plaintext = bytearray(packed(REPETITIVE, name, padding))
    position = data.draw(st.integers(0, len(plaintext) - 1))
    plaintext[position] ^= data.draw(st.integers(1, 255))
    assert outcome(bytes(plaintext)) in (None, Reason.MALFORMED, Reason.UNKNOWN_FLAGS)


@pytest.mark.parametrize("body", [b"", b"a", b"content"])
def test_padding_may_be_empty(body: bytes) -> None:
    for zeros in (0, 1, 9):
        assert unpack(bytes([PADDED]) + padded(body, zeros)) == NO_FLAGS + body


@pytest.mark.parametrize(
    "rest",
    [
        b"",
        bytes(3),
        b"\x00\x00\x00\x01",
        b"\x00\x00\x00\x02a",
        b"\xff\xff\xff\xff" + bytes(99),
        b"\xff\xff\xff\xf0" + bytes(99),  # as a signed number: -16
        padded(b"a", 0) + b"b",
        padded(b"a", 3) + b"b",
        padded(b"a", 0) + b"b" + bytes(3),
    ],
)
def test_padding_that_no_writer_makes_is_malformed(rest: bytes) -> None:
    assert outcome(bytes([PADDED]) + rest) is Reason.MALFORMED


def test_padding_holds_zeros_alone() -> None:
    for value in range(1, 256):
        rest = padded(b"a", 0) + bytes([value])
        assert outcome(bytes([PADDED]) + rest) is Reason.MALFORMED


@pytest.mark.parametrize("content", [bytes(2000), REPETITIVE[:2000]])
def test_more_or_less_than_one_compressed_content_is_malformed(content: bytes) -> None:
    plaintext = packed(content, "zlib")
    for damaged in (plaintext + b"x", plaintext * 2, plaintext[:-1], plaintext[:1]):
        for limit in (MAX_CONTENT, len(content)):
            with pytest.raises(TamperedError, match="compressed content is malformed") as info:
                unpack(damaged, limit)
            assert info.value.reason is Reason.MALFORMED


# --- bombs ---------------------------------------------------------------------------------------


def zlib_bomb(size: int) -> bytes:
    """*size* zeros, compressed in pieces, so that the test itself needs little memory."""
    stream, piece = zlib.compressobj(9), bytes(MIB)
    made = [stream.compress(piece) for _ in range(size // MIB)]
    return b"\x01" + b"".join(made) + stream.flush()


def peak_of(plaintext: bytes, limit: int) -> int:
    """Decompress a bomb, which must be rejected, and return the most memory that this took."""
    tracemalloc.start()
    try:
        with pytest.raises(TamperedError, match=f"more than {limit} bytes after decomp") as info:
            unpack(plaintext, limit)
        assert info.value.reason is Reason.MALFORMED
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_bomb_is_rejected_with_bounded_memory() -> None:
    limit = 2 * MIB
    peaks = [peak_of(zlib_bomb(size), limit) for size in (8 * MIB, 64 * MIB)]
    assert max(peaks) < 2.5 * limit


def test_content_of_exactly_the_limit_is_accepted_and_one_byte_more_is_not() -> None:
    plaintext = zlib_bomb(2 * MIB)
    assert len(unpack(plaintext, 2 * MIB)) == 2 * MIB + 1
    with pytest.raises(TamperedError, match="after decompression"):
        unpack(plaintext, 2 * MIB - 1)
    wrapped = bytes([plaintext[0] | PADDED]) + padded(plaintext[1:], 3)
    assert unpack(wrapped, 2 * MIB) == unpack(plaintext, 2 * MIB)


@pytest.mark.soak
def test_bomb_beyond_the_limit_of_the_format_is_rejected() -> None:
    assert peak_of(zlib_bomb(1024 * MIB), MAX_CONTENT) < 2.1 * MAX_CONTENT


# --- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["gzip", b"zlib", "ZLIB", "pad", True, 6, ["zlib"], ["pad"], ""])
def test_unknown_compression_or_padding_is_rejected(value: Any) -> None:
    with pytest.raises(ConfigurationError, match='compression must be "zlib" or None'):
        Packing(value)
    with pytest.raises(ConfigurationError, match='padding must be "padme" or None'):
        Packing(None, value)
