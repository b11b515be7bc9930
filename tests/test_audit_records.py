"""The records of the audit trail: their bytes, their links, and what is rejected."""

import hashlib
import json
import struct
from typing import Any

import pytest

from adk_secure_sessions import Reason, TamperedError
from adk_secure_sessions.crypto.aead import Aes256Gcm
from adk_secure_sessions.formats import audit_records
from adk_secure_sessions.formats.audit_records import (
    AUDIT_LINK_LENGTH,
    CHAIN_LENGTH,
    MAX_RECORD,
    NO_AUDIT_LINK,
    link_of,
    open_entry,
    record_context,
    seal_entry,
)

CIPHER = Aes256Gcm(bytes(32))
DATABASE, CHAIN, LINK = bytes(range(16)), bytes(range(16, 32)), bytes(range(32))
CONTEXT = record_context(DATABASE, CHAIN, 7, 1_700_000_000_000_000)


def test_lengths_are_those_of_the_format() -> None:
    assert (CHAIN_LENGTH, AUDIT_LINK_LENGTH, MAX_RECORD) == (16, 32, 1_048_576)
    assert bytes(32) == NO_AUDIT_LINK


def test_context_has_the_documented_bytes() -> None:
    parts = (b"audit", DATABASE, CHAIN, struct.pack(">qq", 7, 1_700_000_000_000_000))
    assert b"".join(struct.pack(">I", len(part)) + part for part in parts) == CONTEXT


def test_record_is_a_version_and_encrypts_the_link_and_compact_json() -> None:
    record = seal_entry(CIPHER, CONTEXT, LINK, {"user": "ü", "n": [1, 2]})
    assert record[:1] == b"\x01"
    plaintext = CIPHER.decrypt(record[1:], b"\x01" + CONTEXT)
    assert plaintext == LINK + b'{"user":"\\u00fc","n":[1,2]}'
    assert open_entry(CIPHER, CONTEXT, record) == (LINK, {"user": "ü", "n": [1, 2]})


def test_link_of_a_record_is_the_hash_of_its_context_and_bytes() -> None:
    assert link_of(b"context", b"record") == hashlib.sha256(b"contextrecord").digest()


def of_length(length: int) -> dict[str, object]:
    """Fields whose record has *length* bytes."""
    rest = len(seal_entry(CIPHER, CONTEXT, LINK, {"actor": ""}))
    return {"actor": "a" * (length - rest)}


def test_longest_record_is_written_and_read_and_a_longer_one_is_neither() -> None:
    longest = of_length(MAX_RECORD)
    record = seal_entry(CIPHER, CONTEXT, LINK, longest)
    assert len(record) == MAX_RECORD
    assert open_entry(CIPHER, CONTEXT, record) == (LINK, longest)
    longer = of_length(MAX_RECORD + 1)
    with pytest.raises(ValueError, match="more than 1048576 bytes"):
        seal_entry(CIPHER, CONTEXT, LINK, longer)
    assert reason(sealed(LINK + json.dumps(longer).encode())) is Reason.MALFORMED


def sealed(plaintext: bytes) -> bytes:
    """The record of any plaintext."""
    return b"\x01" + CIPHER.encrypt(plaintext, b"\x01" + CONTEXT)


def reason(record: object) -> Reason:
    """Return why *record* is rejected."""
    with pytest.raises(TamperedError) as info:
        open_entry(CIPHER, CONTEXT, record)
    return info.value.reason


VALID = seal_entry(CIPHER, CONTEXT, LINK, {"a": 1})
MALFORMED: dict[str, Any] = {
    "not bytes": "text",
    "empty": b"",
    "another version": b"\x02" + VALID[1:],
    "without a version": VALID[1:] if VALID[1] != 1 else b"\x00",
    "no plaintext": sealed(b""),
    "a link alone": sealed(LINK),
    "no JSON": sealed(LINK + b"secret 7Qx"),
    "a list": sealed(LINK + b"[]"),
    "not UTF-8": sealed(LINK + b'{"a": "\xff"}'),
    "many levels": sealed(LINK + b'{"a": ' + b"[" * 200_000),
}


@pytest.mark.parametrize("record", MALFORMED.values(), ids=MALFORMED)
def test_record_that_no_writer_makes_is_malformed(record: object) -> None:
    assert reason(record) is Reason.MALFORMED


@pytest.mark.parametrize(
    "other",
    [
        record_context(CHAIN, DATABASE, 7, 1_700_000_000_000_000),
        record_context(DATABASE, CHAIN, 8, 1_700_000_000_000_000),
        record_context(DATABASE, CHAIN, 7, 1_700_000_000_000_001),
    ],
)
def test_record_moved_to_another_place_of_a_chain_is_rejected(other: bytes) -> None:
    with pytest.raises(TamperedError) as info:
        open_entry(CIPHER, other, VALID)
    assert info.value.reason is Reason.AUTHENTICATION


def test_time_that_no_integer_column_holds_is_rejected() -> None:
    with pytest.raises(TamperedError):
        audit_records.record_context(DATABASE, CHAIN, 1, 1.5)  # type: ignore[arg-type]
