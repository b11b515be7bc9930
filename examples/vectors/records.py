"""tests/vectors/records.json: records to accept, and records to reject."""

import itertools
import struct
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterator

from cryptography.fernet import Fernet

from adk_secure_sessions.formats import records
from adk_secure_sessions.formats.records import NO_LINK
from examples.vectors.contexts import ADA, BOB, CONTEXTS, EVENT, Context
from examples.vectors.fixed import (
    LARGEST,
    TIME,
    FixedAesGcm,
    FixedFernet,
    Json,
    counting,
    fernet_draws,
    flipped,
    made,
    padded,
    zlib_stream,
)

ABOUT = (
    "Records that a reader must accept or reject. examples/make_vectors.py generates them as "
    "docs/format.md says. 'keys' lists the data keys, each with its owner and its backend. In each "
    "case, the reader accepts only the backends in 'accept', and decrypts 'record' (hex), which "
    "belongs to 'owner', with 'context'. 'context_hex' is the encoded context. The associated data "
    "is the 13 header bytes of the record, then the encoded context. If 'expect' is 'ok', the "
    "result is 'plaintext' (hex): the flags byte 00 and the content. If 'packed' (hex) is given, "
    "the record is the encryption of 'packed', whose flags say that the content is compressed or "
    "padded. If 'expect' is not 'ok', it is the class that "
    "adk-secure-sessions raises, and any reader must reject the record. 'reason', where it is "
    "given, is the reason that the reader must name. If 'nonce' (AES-256-GCM), or 'iv' and 'time' "
    "(Fernet, seconds), are given, encrypting 'plaintext' with them gives exactly 'record'. "
    "Integers have 64 bits. Texts may contain lone surrogates."
)
AES, FERNET, CLEAR = 1, 2, 3
KEYS = [
    {"id": 1, "owner": ADA, "backend": AES, "key": counting(0x00, 32)},
    {"id": 2, "owner": ADA, "backend": FERNET, "key": counting(0x20, 32)},
    {"id": 3, "owner": ADA, "backend": AES, "key": counting(0x40, 32)},
    {"id": 4, "owner": BOB, "backend": AES, "key": counting(0x60, 32)},
    {"id": 5, "owner": ADA, "backend": CLEAR, "key": b""},
    {"id": LARGEST, "owner": ADA, "backend": AES, "key": counting(0x80, 32)},
]
KEY_OF = {AES: 1, FERNET: 2, CLEAR: 5}
BACKEND_NAMES = {AES: "aesgcm", FERNET: "fernet", CLEAR: "noop"}

_SEALED, _LOST, _CLEAR_TEXT = "TamperedError", "UnknownKeyError", "PlaintextRefusedError"
_JSON = b'{"step":1}'
_FIRST, _LAST, _SNAPSHOT, _APP, _USER = (counting(first, 16) for first in range(0, 0xA0, 0x20))
_EVENT_TEXT = _LAST + _FIRST + b'\x061.28.0{"author":"user","id":"e-1"}'
_STATE_OF_ADA = records.join_owner(_USER, (1, 2), b'{"allergies":["penicillin"]}')
# Without the flags byte.
_PLAINTEXTS = {
    "app": records.join_owner(_APP, (7,), _JSON),
    "user": records.join_id("ada", _STATE_OF_ADA),
    "session": records.join_id("first visit", records.join_session(_LAST, _SNAPSHOT, _JSON)),
    "base": _SNAPSHOT + b'{"notes":"..."}',
    "event": _EVENT_TEXT,
    "witness": _USER,
}


def _key(key_id: int) -> bytes:
    (found,) = (key["key"] for key in KEYS if key["id"] == key_id)
    assert isinstance(found, bytes)
    return found


def _case(name: str, note: str, context: Context, record: bytes, expect: str) -> Json:
    return {
        "name": name,
        "note": note,
        "owner": ADA.hex(),
        "accept": [AES, FERNET],
        "context": context.as_json(),
        "context_hex": context.joined().hex(),
        "record": record.hex(),
        "expect": expect,
    }


def _accepted(
    name: str,
    note: str,
    context: Context = EVENT,
    plaintext: bytes = _EVENT_TEXT,
    backend: int = AES,
    key_id: int | None = None,
    seconds: int = TIME,
) -> Json:
    """Return a case to accept: *plaintext*, encrypted with a nonce that depends on *name*."""
    key_id = KEY_OF[backend] if key_id is None else key_id
    draws: Json = {}
    sealer: records.Cipher
    if backend == FERNET:
        iv = made(name, 16)
        draws = {"iv": iv.hex(), "time": seconds}
        sealer = FixedFernet(_key(key_id), iv, seconds)
    else:
        nonce = made(name, 12)
        draws = {"nonce": nonce.hex()}
        sealer = FixedAesGcm(_key(key_id), nonce)
    whole = records.NO_FLAGS + plaintext
    header = records.build_header(backend, key_id)
    record = records.seal(sealer, header, context.joined(), whole)
    made_of = {"backend": backend, "key_id": key_id, **draws, "plaintext": whole.hex()}
    return _case(name, note, context, record, "ok") | made_of


def _in_clear(plaintext: bytes) -> bytes:
    """Return a no-op record; *plaintext* includes the flags byte."""
    return records.build_header(CLEAR, KEY_OF[CLEAR]) + plaintext


def _accept() -> Iterator[Json]:
    for purpose, context in CONTEXTS.items():
        for backend in (AES, FERNET):
            name = f"{purpose} record, {BACKEND_NAMES[backend]}"
            yield _accepted(name, f"a record of purpose {purpose!r}", context,
                            _PLAINTEXTS[purpose], backend)  # fmt: skip
    for backend in (AES, FERNET):
        for text, plaintext in {
            "plaintext of nothing but flags": b"",
            "plaintext of one byte and flags": b"\x00",
            "plaintext of sixteen bytes": counting(0, 16),
            "plaintext that is not ASCII": "Grüße, 世界 🌱".encode(),
            "plaintext of 300 bytes": counting(0, 300),
        }.items():
            name = f"{text}, {BACKEND_NAMES[backend]}"
            yield _accepted(name, "00, then any bytes", plaintext=plaintext, backend=backend)
    ids: dict[str, dict[str, str | bytes | int]] = {
        "ids that are not ASCII": {"user_id": "Žofie 🌱", "session_id": "世界"},
        "ids with spaces and a line break": {"user_id": " ada ", "session_id": "a\nb"},
        "empty ids": {"app_name": "", "user_id": "", "session_id": ""},
        "a NUL in an id": {"user_id": "ada\x00"},
        "a lone surrogate in an id": {"user_id": "ada\ud83c"},
        "a decomposed letter in an id": {"user_id": "a\u0308da"},
    }
    for name, changes in ids.items():
        note = "ids are bound as their UTF-8, as they are (a surrogate: its three bytes)"
        yield _accepted(name, note, EVENT.replacing(**changes))
    session = CONTEXTS["session"]
    new = records.join_session(NO_LINK, NO_LINK, _JSON)
    yield _accepted("base_revision -1", "no snapshot: a negative integer",
                    session.replacing(base_revision=-1, revision=0),
                    records.join_id("first visit", new))  # fmt: skip
    yield _accepted("a session that expires", "readers of this format do not interpret expires_at",
                    session.replacing(expires_at=TIME * 1_000_000 + 86_400_000_000),
                    _PLAINTEXTS["session"])  # fmt: skip
    yield _accepted("the smallest and the largest integers", "all 64 bits are bound",
                    EVENT.replacing(session_row=LARGEST, time=-(2**63)))  # fmt: skip
    yield _accepted("the largest key id", "key ids have 63 bits", key_id=LARGEST)
    yield _accepted("a Fernet token of 1985", "tokens never expire", backend=FERNET,
                    seconds=499_162_800)  # fmt: skip
    yield _accepted("a Fernet token of 2100", "tokens of the future are accepted",
                    backend=FERNET, seconds=4_102_444_800)  # fmt: skip
    listed = _case("no-op record where no-op is accepted", "NoOpBackend was listed",
                   EVENT, _in_clear(records.NO_FLAGS + _EVENT_TEXT), "ok")  # fmt: skip
    whole = records.NO_FLAGS + _EVENT_TEXT
    made_of = {"backend": CLEAR, "key_id": KEY_OF[CLEAR], "plaintext": whole.hex()}
    yield listed | made_of | {"accept": [AES, FERNET, CLEAR]}


def _elsewhere(sealed: dict[tuple[str, int], bytes]) -> Iterator[Json]:
    """Yield valid records, each with a wrong context."""
    for purpose, context in CONTEXTS.items():
        for backend in (AES, FERNET) if purpose == "event" else (AES,):
            record = sealed[purpose, backend]
            for field, value in zip(context.names, (*context.parts, *context.numbers), strict=True):
                other: str | bytes | int
                if field == "purpose":
                    other = "base" if purpose != "base" else "event"
                elif isinstance(value, int):
                    other = value - 1 if value == LARGEST else value + 1
                else:
                    other = value + "x" if isinstance(value, str) else flipped(value, 0)
                yield _case(
                    f"{purpose} record at another {field}, {BACKEND_NAMES[backend]}",
                    f"written with {field} {_shown(value)}, read with {_shown(other)}",
                    context.replacing(**{field: other}), record, _SEALED,
                )  # fmt: skip
    event, session = sealed["event", AES], CONTEXTS["session"]
    witness, number = CONTEXTS["witness"], struct.pack(">q", CONTEXTS["witness"].numbers[0])
    shifted = {
        "a letter moved from user_id to session_id":
            (EVENT.replacing(user_id="ad", session_id="afirst visit"), event),
        "a letter moved from app_name to user_id":
            (EVENT.replacing(app_name="clini", user_id="cada"), event),
        "user_id and session_id exchanged":
            (EVENT.replacing(user_id="first visit", session_id="ada"), event),
        "seq and session_row exchanged": (EVENT.replacing(seq=301, session_row=1), event),
        "revision and base_revision exchanged":
            (session.replacing(revision=1, base_revision=2), sealed["session", AES]),
        "the last integer read as bytes":
            (Context((), (*witness.parts, number), ()), sealed["witness", AES]),
        "one integer fewer": (Context((), EVENT.parts, EVENT.numbers[:-1]), event),
        "one integer more": (Context((), EVENT.parts, (*EVENT.numbers, 0)), event),
    }  # fmt: skip
    for name, (context, record) in shifted.items():
        yield _case(name, "the same letters or digits, split into other parts",
                    context, record, _SEALED)  # fmt: skip


def _shown(value: str | bytes | int) -> str:
    return value.hex() if isinstance(value, bytes) else repr(value)


def _altered(sealed: dict[tuple[str, int], bytes]) -> Iterator[Json]:
    """Yield records with wrong bytes of their own."""
    for backend in (AES, FERNET):
        record, name = sealed["event", backend], BACKEND_NAMES[backend]
        body = (
            {"nonce": 13, "ciphertext": 25, "tag": len(record) - 16}
            if backend == AES
            else {"token version": 13, "time": 14, "IV": 22, "ciphertext": 38,
                  "HMAC": len(record) - 32}
        )  # fmt: skip
        for region, start in body.items():
            yield _case(f"altered {region}, {name}", "one bit of its first byte changed",
                        EVENT, flipped(record, start), _SEALED)  # fmt: skip
        yield _case(f"altered last byte, {name}", "one bit changed",
                    EVENT, flipped(record, -1), _SEALED)  # fmt: skip
        yield _case(f"one byte more, {name}", "a zero byte at the end",
                    EVENT, record + b"\x00", _SEALED)  # fmt: skip
        for region, start in body.items():
            yield _case(f"cut off before its {region}, {name}", f"the first {start} bytes",
                        EVENT, record[:start], _SEALED)  # fmt: skip
            yield _case(f"cut off inside its {region}, {name}", f"the first {start + 1} bytes",
                        EVENT, record[: start + 1], _SEALED)  # fmt: skip
        yield _case(f"without its last byte, {name}", "cut off at the end",
                    EVENT, record[:-1], _SEALED)  # fmt: skip
    record = sealed["event", AES]
    headers = {
        "cut off inside the magic": (record[:2], _CLEAR_TEXT),
        "cut off after the magic": (record[:3], _SEALED),
        "cut off after the version": (record[:4], _SEALED),
        "cut off after the backend id": (record[:5], _SEALED),
        "cut off inside the key id": (record[:12], _SEALED),
        "another magic": (b"AKT" + record[3:], _CLEAR_TEXT),
        "the magic in small letters": (b"aks" + record[3:], _CLEAR_TEXT),
        "version 0": (record[:3] + b"\x00" + record[4:], _SEALED),
        "version 1": (record[:3] + b"\x01" + record[4:], _SEALED),
        "version 3": (record[:3] + b"\x03" + record[4:], _SEALED),
        "backend id 0": (record[:4] + b"\x00" + record[5:], _LOST),
        "backend id of another accepted backend": (record[:4] + b"\x02" + record[5:], _SEALED),
        "backend id of a third party that is not accepted":
            (record[:4] + b"\x80" + record[5:], _LOST),
        "backend id changed to no-op": (record[:4] + b"\x03" + record[5:], _CLEAR_TEXT),
        "key id that nobody has": (_with_key(record, 6), _LOST),
        "negative key id": (_with_key(record, -1), _LOST),
        "key id of another generation of the owner's key": (_with_key(record, 3), _SEALED),
        "key id of another owner's key": (_with_key(record, 4), _SEALED),
        "key id of a key of another backend": (_with_key(record, 2), _SEALED),
    }  # fmt: skip
    for name, (stored, expect) in headers.items():
        yield _case(name, "an AES-256-GCM record with another header", EVENT, stored, expect)


def _with_key(record: bytes, key_id: int) -> bytes:
    return record[:5] + struct.pack(">q", key_id) + record[13:]


def _forged() -> Iterator[Json]:
    """Yield values that no writer makes."""
    header, where = records.build_header(AES, 1), EVENT.joined()
    event = records.NO_FLAGS + _EVENT_TEXT
    nonce = made("forged", 12)
    another = made("another key", 32)
    forgeries = {
        "encrypted with another key":
            (FixedAesGcm(another, nonce).encrypt(event, header + where), _SEALED),
        "encrypted without the header as associated data":
            (FixedAesGcm(_key(1), nonce).encrypt(event, where), _SEALED),
        "encrypted without the context as associated data":
            (FixedAesGcm(_key(1), nonce).encrypt(event, header), _SEALED),
        "the plaintext after an encrypted record's header": (event, _SEALED),
    }  # fmt: skip
    for name, (body, expect) in forgeries.items():
        yield _case(name, "an AES-256-GCM header before another body", EVENT,
                    header + body, expect)  # fmt: skip
    header = records.build_header(FERNET, 2)
    right = FixedFernet(_key(2), made("forged", 16), TIME).encrypt(event, header + where)
    unbound = FixedFernet(_key(2), made("forged", 16), TIME).encrypt(event, b"")
    yield _case("a Fernet token that is bound to no context", "its key derived with empty info",
                EVENT, header + unbound, _SEALED)  # fmt: skip
    with fernet_draws(made("forged", 16), TIME):
        direct = urlsafe_b64decode(Fernet(urlsafe_b64encode(_key(2))).encrypt(event))
    yield _case("a Fernet token under the data key itself", "without HKDF-Expand",
                EVENT, header + direct, _SEALED)  # fmt: skip
    yield _case("a Fernet token twice", "two tokens in one record",
                EVENT, header + right + right, _SEALED)  # fmt: skip
    values = {
        "no-op record where no-op is not accepted": (_in_clear(event), _CLEAR_TEXT),
        "empty value": (b"", _SEALED),
        "plaintext JSON": (_JSON, _CLEAR_TEXT),
        "plaintext event": (_EVENT_TEXT, _CLEAR_TEXT),
        "a record behind a space": (b" " + header + right, _CLEAR_TEXT),
    }
    for name, (stored, expect) in values.items():
        yield _case(name, "stored in place of a record", EVENT, stored, expect)


def _flagged() -> Iterator[Json]:
    """Yield records of valid encryption whose plaintext does not begin with the flags 00."""
    unknown = (0x02, 0x03, 0x06, 0x07, 0x08, 0x09, 0x80, 0xFF)
    for backend, flags in itertools.product(BACKEND_NAMES, unknown):
        name = f"flags {flags:02x}, {BACKEND_NAMES[backend]}"
        record = _sealed_whole(name, backend, bytes([flags]) + _EVENT_TEXT)
        case = _case(name, "a plaintext of a later release", EVENT, record, "DecryptionError")
        yield case | {"reason": "unknown flags", "accept": [AES, FERNET, CLEAR]}
    for backend in BACKEND_NAMES:
        name = f"no flags, {BACKEND_NAMES[backend]}"
        record = _sealed_whole(name, backend, b"")
        case = _case(name, "an empty plaintext, as in no release", EVENT, record, _SEALED)
        yield case | {"reason": "malformed", "accept": [AES, FERNET, CLEAR]}


# 678 bytes of content, as zlib 1.2.13 has compressed it.
_LONG = (
    _LAST + _FIRST + b'\x061.28.0{"author":"user","id":"e-1","notes":"' + b"take one pill, " * 40
)
_LONG += b'"}'
_ZLIB = bytes.fromhex(
    "78da5350545256515553d7d0d4d2d6d1d5d36760646266616563e7e0e4e2e6e1e5e36733d433b2d033a8564a2c2dc9c8"
    "2f52b2522a2d4e2d52d251ca4c01b253750d81ccbcfc92d46220af24313b55213f2f55a1203327474761943bcaa50a57"
    "a91600dc20dd5f"
)
# The same text, with a preset dictionary.
_WITH_DICTIONARY = bytes.fromhex(
    "78f92c0905255350545256515553d7d0d4d2d6d1d5d36760646266616563e7e0e4e2e6e1e5e36733d433b2d033a8564a"
    "2c2dc9c82f52b2522a2d4e2d52d251ca4c01b253750d81ccbcfc92d46220af04d5e851ee28972a5ca55a00dc20dd5f"
)


def _packed() -> Iterator[Json]:
    """Yield records whose content is compressed or padded, and some that do not fit their flags."""
    stored = zlib_stream(_EVENT_TEXT)
    accepted = {
        "compressed with zlib": (1, _ZLIB, _LONG),
        "compressed with zlib, and stored as it is": (1, stored, _EVENT_TEXT),
        "compressed with zlib, and empty": (1, zlib_stream(b""), b""),
        "padded with 7 zeros": (4, padded(_EVENT_TEXT, 7), _EVENT_TEXT),
        "padded with nothing": (4, padded(_EVENT_TEXT, 0), _EVENT_TEXT),
        "padded with 3,000 zeros": (4, padded(_EVENT_TEXT, 3000), _EVENT_TEXT),
        "padded content that ends with zeros": (4, padded(bytes(5), 2), bytes(5)),
        "padded and empty": (4, padded(b"", 0), b""),
        "compressed with zlib and padded": (5, padded(_ZLIB, 17), _LONG),
    }
    for (name, (flags, rest, content)), backend in itertools.product(
        accepted.items(), BACKEND_NAMES
    ):
        name, packed = f"{name}, {BACKEND_NAMES[backend]}", bytes([flags]) + rest
        record = _sealed_whole(name, backend, packed)
        case = _case(name, f"flags {flags:02x}", EVENT, record, "ok")
        case |= {"plaintext": (records.NO_FLAGS + content).hex(), "packed": packed.hex()}
        yield case | {"accept": [AES, FERNET, CLEAR]}
    raw = stored[2:-4]
    malformed = {
        "no bytes after the flags 01": (1, b""),
        "no bytes after the flags 04": (4, b""),
        "plaintext after the flags 01": (1, _EVENT_TEXT),
        "plaintext after the flags 04": (4, _EVENT_TEXT),
        "zlib stream without its end": (1, _ZLIB[:-5]),
        "zlib stream without its checksum": (1, _ZLIB[:-4]),
        "zlib stream with another checksum": (1, flipped(_ZLIB, -1)),
        "zlib stream and one byte more": (1, _ZLIB + b"\x00"),
        "two zlib streams": (1, stored * 2),
        "zlib stream with a preset dictionary": (1, _WITH_DICTIONARY),
        "deflate stream without the header of zlib": (1, raw),
        "gzip stream": (1, bytes.fromhex("1f8b08000000000002ff") + raw + bytes(8)),
        "padded with a byte that is not zero": (4, padded(_EVENT_TEXT, 7) + b"\x01"),
        "padded with fewer bytes than its length": (4, padded(_EVENT_TEXT, 0)[:-1]),
        "padded without a whole length": (4, bytes(3)),
        "padded zlib stream that ends in the padding": (5, padded(_ZLIB[:-1], 1)),
    }
    for name, (flags, rest) in malformed.items():
        record = _sealed_whole(name, AES, bytes([flags]) + rest)
        case = _case(name, "authentic: only a faulty writer stores it", EVENT, record, _SEALED)
        yield case | {"reason": "malformed"}


def _sealed_whole(name: str, backend: int, plaintext: bytes) -> bytes:
    """Return a record of *plaintext*, which includes the flags byte, or lacks it."""
    if backend == CLEAR:
        return _in_clear(plaintext)
    header = records.build_header(backend, KEY_OF[backend])
    key, associated_data = _key(KEY_OF[backend]), header + EVENT.joined()
    if backend == FERNET:
        return header + FixedFernet(key, made(name, 16), TIME).encrypt(plaintext, associated_data)
    return header + FixedAesGcm(key, made(name, 12)).encrypt(plaintext, associated_data)


def record_vectors() -> Json:
    """Return the content of records.json."""
    accepted = list(_accept())
    sealed = {
        (purpose, backend): bytes.fromhex(case["record"])
        for purpose in CONTEXTS
        for backend, backend_name in BACKEND_NAMES.items()
        for case in accepted
        if case["name"] == f"{purpose} record, {backend_name}"
    }
    keys = [
        {name: value.hex() if isinstance(value, bytes) else value for name, value in key.items()}
        for key in KEYS
    ]
    cases = [*accepted, *_elsewhere(sealed), *_altered(sealed), *_forged(), *_flagged()]
    cases += _packed()
    return {"about": ABOUT, "keys": keys, "cases": cases}
