"""Records: their header, their context, and what is rejected."""

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adk_secure_sessions import (
    DecryptionError,
    PlaintextRefusedError,
    Reason,
    SecureSessionError,
    TamperedError,
    UnknownKeyError,
)
from adk_secure_sessions.crypto.aead import Aes256Gcm
from adk_secure_sessions.formats import records
from adk_secure_sessions.formats.records import (
    HEADER_LENGTH,
    NO_FLAGS,
    FlagHandler,
    Packing,
    build_context,
    keep_packed,
    open_with_flags,
    parse_header,
    reject_flags,
    unpack,
)

INT64 = st.integers(-(2**63), 2**63 - 1)
TEXTS = st.text(st.characters(codec=None), max_size=12)  # lone surrogates among them
PARTS = st.lists(TEXTS | st.binary(max_size=12), max_size=4).map(tuple)
NUMBERS = st.lists(INT64, max_size=6).map(tuple)
CIPHER = Aes256Gcm(bytes(32))
CONTEXT = build_context(("event", "clinic", "ada"), 1, 2)


# Every function that decrypts a record.
opening = pytest.mark.parametrize("handler", [unpack, keep_packed, reject_flags])


def seal(cipher: Any, backend_id: int, key_id: int, context: bytes, content: bytes) -> bytes:
    header = records.build_header(backend_id, key_id)
    return records.seal(cipher, header, context, NO_FLAGS + content)


EMPTY = seal(CIPHER, 0x80, 1, CONTEXT, b"")


class Misbehaving:
    """A third party's cipher that goes wrong in a given way."""

    def __init__(self, result: Any) -> None:
        self._result = result

    def encrypt(self, plaintext: bytes, associated_data: bytes) -> bytes:
        if isinstance(self._result, Exception):
            raise self._result
        return self._result  # type: ignore[no-any-return]

    decrypt = encrypt


# --- contexts ------------------------------------------------------------------------------------


def parse(joined: bytes) -> tuple[list[bytes], tuple[int, ...]]:
    """Return the parts and the numbers of a context, from its bytes alone."""
    chunks = []
    while joined:
        end = 4 + struct.unpack(">I", joined[:4])[0]
        chunks.append(joined[4:end])
        joined = joined[end:]
    *parts, numbers = chunks
    return parts, struct.unpack(f">{len(numbers) // 8}q", numbers)


@given(PARTS, NUMBERS)
def test_context_can_be_parsed_again(
    parts: tuple[str | bytes, ...], numbers: tuple[int, ...]
) -> None:
    as_bytes = [records.encode_text(part) if isinstance(part, str) else part for part in parts]
    assert parse(build_context(parts, *numbers)) == (as_bytes, numbers)


@pytest.mark.parametrize("number", [None, "1", b"1", 1.0, 2**63, -(2**63) - 1])
def test_context_rejects_what_no_integer_column_holds(number: Any) -> None:
    with pytest.raises(TamperedError):
        build_context(("event",), number)


@pytest.mark.parametrize("part", [None, 1, 1.5])
def test_context_rejects_what_no_text_column_holds(part: Any) -> None:
    with pytest.raises(TamperedError):
        build_context(("event", part), 1)


# --- seal and open -------------------------------------------------------------------------------


@given(st.integers(0, 255), st.integers(0, 2**63 - 1), st.binary(), st.binary())
def test_record_is_decrypted_in_its_context(
    backend_id: int, key_id: int, associated: bytes, plaintext: bytes
) -> None:
    stored = seal(CIPHER, backend_id, key_id, associated, plaintext)
    assert parse_header(stored) == records.parse_header_or_none(stored) == (backend_id, key_id)
    assert open_with_flags(stored, associated, CIPHER) == NO_FLAGS + plaintext


def test_record_begins_with_the_documented_header() -> None:
    assert seal(CIPHER, 0x80, 0x0102, CONTEXT, b"")[:HEADER_LENGTH].hex() == (
        "414b5302800000000000000102"
    )


def test_plaintext_begins_with_the_flags_byte() -> None:
    stored = seal(CIPHER, 1, 7, CONTEXT, b"plaintext")
    whole = CIPHER.decrypt(stored[HEADER_LENGTH:], stored[:HEADER_LENGTH] + CONTEXT)
    assert whole == b"\x00plaintext"


def with_flags(plaintext: bytes) -> bytes:
    """A record of *plaintext*, which includes the flags byte, or lacks it."""
    header = records.build_header(1, 7)
    return header + CIPHER.encrypt(plaintext, header + CONTEXT)


@pytest.mark.parametrize("handler", [unpack, keep_packed])
@pytest.mark.parametrize("flags", [0x03, 0x07, 0x08, 0x80, 0xFF])
def test_unknown_flags_are_rejected_by_name(handler: FlagHandler, flags: int) -> None:
    with pytest.raises(DecryptionError, match=f"flags are 0x{flags:02x}, .* install") as info:
        open_with_flags(with_flags(bytes([flags]) + b"a secret"), CONTEXT, CIPHER, handler)
    assert info.value.reason is Reason.UNKNOWN_FLAGS
    assert not isinstance(info.value, TamperedError)
    assert "secret" not in str(info.value)


@opening
def test_empty_plaintext_is_malformed(handler: FlagHandler) -> None:
    with pytest.raises(TamperedError, match="empty") as info:
        open_with_flags(with_flags(b""), CONTEXT, CIPHER, handler)
    assert info.value.reason is Reason.MALFORMED


CONTENT = b"content " * 300
PACKED = {
    "neither": NO_FLAGS + CONTENT,
    "compressed": records.pack(Packing("zlib", None), CONTENT),
    "padded": records.pack(Packing(None, "padme"), CONTENT),
    "both": records.pack(Packing("zlib", "padme"), CONTENT),
}


@pytest.mark.parametrize("plaintext", PACKED.values(), ids=PACKED)
def test_packed_content_is_read_and_its_plaintext_can_be_written_again(plaintext: bytes) -> None:
    stored = records.seal(CIPHER, records.build_header(1, 7), CONTEXT, plaintext)
    assert open_with_flags(stored, CONTEXT, CIPHER) == NO_FLAGS + CONTENT
    assert open_with_flags(stored, CONTEXT, CIPHER, keep_packed) == plaintext


@pytest.mark.parametrize("handler", [unpack, keep_packed])
def test_plaintext_that_does_not_fit_its_flags_is_malformed(handler: FlagHandler) -> None:
    with pytest.raises(TamperedError, match="malformed") as info:
        open_with_flags(with_flags(b"\x01a secret"), CONTEXT, CIPHER, handler)
    assert info.value.reason is Reason.MALFORMED


def test_record_without_flags_is_read_and_one_with_flags_is_rejected() -> None:
    stored = seal(CIPHER, 1, 7, CONTEXT, b"a key")
    assert open_with_flags(stored, CONTEXT, CIPHER, reject_flags) == NO_FLAGS + b"a key"
    packed = [PACKED[name] for name in ("compressed", "padded", "both")]
    for plaintext in (*packed, b"\x01a key", b"\x02a key", b"\x04a key", b"\x80a key"):
        with pytest.raises(DecryptionError, match="has no flags") as info:
            open_with_flags(with_flags(plaintext), CONTEXT, CIPHER, reject_flags)
        assert info.value.reason is Reason.UNKNOWN_FLAGS


@opening
def test_record_moved_to_another_context_is_rejected(handler: FlagHandler) -> None:
    stored = seal(CIPHER, 1, 7, CONTEXT, b"plaintext")
    for moved, where in (
        (stored, CONTEXT + b"x"),
        (records.build_header(1, 8) + stored[13:], CONTEXT),
    ):
        with pytest.raises(TamperedError) as info:
            open_with_flags(moved, where, CIPHER, handler)
        assert info.value.reason is Reason.AUTHENTICATION


@pytest.mark.parametrize("stored", [None, "", b""])
def test_removed_value_is_rejected(stored: Any) -> None:
    with pytest.raises(TamperedError, match="removed"):
        parse_header(stored)


@pytest.mark.parametrize("stored", ['{"a": 1}', "AKS\x01 as text", b'{"a": 1}', 1, 1.5, b"AK"])
def test_plaintext_where_a_record_belongs_is_rejected(stored: Any) -> None:
    with pytest.raises(PlaintextRefusedError):
        parse_header(stored)


@pytest.mark.parametrize(
    "stored",
    [b"AKS", b"AKS\x02", b"AKS\x02" + bytes(8)]
    + [b"AKS" + bytes([version]) + bytes(40) for version in (0, 1, 3, 0x32, 0xFF)],
)
def test_record_without_a_whole_header_of_this_version_is_rejected(stored: bytes) -> None:
    with pytest.raises(TamperedError, match="header"):
        parse_header(stored)


@pytest.mark.parametrize(
    "stored",
    [None, "", b"", "AKS\x01 and more text", 1, b'{"a": 1, "b": 2}', b"AKS\x02" + bytes(8)]
    + [b"AKS" + bytes([version]) + bytes(40) for version in (0, 1, 3, 0xFF)],
)
def test_value_without_a_whole_header_has_no_backend(stored: Any) -> None:
    assert records.parse_header_or_none(stored) is None


# --- ciphers of third parties --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("result", "failure"),
    [
        (None, "it returned something that is not bytes"),
        ("text", "it returned something that is not bytes"),
        (ValueError("a secret"), "ValueError"),
    ],
)
def test_cipher_that_fails_to_encrypt_stores_nothing(result: Any, failure: str) -> None:
    with pytest.raises(SecureSessionError) as info:
        seal(Misbehaving(result), 0x80, 1, CONTEXT, b"a secret")
    assert str(info.value) == f"backend 128 failed to encrypt: {failure}"
    assert "secret" not in str(info.value)


@opening
@pytest.mark.parametrize("result", [None, "text", ValueError("a secret"), KeyError("a secret")])
def test_error_of_a_cipher_that_decrypts_is_a_rejection(handler: FlagHandler, result: Any) -> None:
    with pytest.raises(TamperedError, match="could not decrypt") as info:
        open_with_flags(EMPTY, CONTEXT, Misbehaving(result), handler)
    assert info.value.reason is Reason.AUTHENTICATION
    assert "secret" not in str(info.value)


@opening
def test_decryption_error_of_a_cipher_passes_unchanged(handler: FlagHandler) -> None:
    refusal = UnknownKeyError("as raised")
    with pytest.raises(UnknownKeyError, match="as raised"):
        open_with_flags(EMPTY, CONTEXT, Misbehaving(refusal), handler)


# --- reasons -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("read", "reason"),
    [
        (lambda: records.require_bytes("text"), Reason.MALFORMED),
        (lambda: records.decode_text(1), Reason.MALFORMED),
        (lambda: records.decode_text(b"\xff"), Reason.MALFORMED),
        (lambda: build_context(("event",), 1.0), Reason.MALFORMED),  # type: ignore[arg-type]
        (lambda: build_context((1,)), Reason.MALFORMED),  # type: ignore[arg-type]
        (lambda: parse_header(b""), Reason.MISSING),
        (lambda: parse_header(records.MAGIC), Reason.MALFORMED),
        (lambda: parse_header(b"plaintext"), Reason.PLAINTEXT),
    ],
)
def test_error_of_a_malformed_value_has_its_reason(read: Any, reason: Reason) -> None:
    with pytest.raises(DecryptionError) as info:
        read()
    assert info.value.reason == reason
