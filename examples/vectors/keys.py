"""tests/vectors/keys.json: root keys, wrapped master keys and data keys, and tags."""

import struct
from collections.abc import Iterator
from typing import NamedTuple

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.hmac import HMAC
from cryptography.hazmat.primitives.kdf.argon2 import Argon2id
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from adk_secure_sessions.formats import records
from adk_secure_sessions.keys.data_keys import DataKeyRow
from adk_secure_sessions.keys.keyring import MasterKeyRow
from examples.vectors.contexts import ADA, BOB, DATABASE_ID
from examples.vectors.fixed import (
    MICROSECONDS,
    FixedAesGcm,
    Json,
    counting,
    flipped,
    made,
    padded,
    zlib_stream,
)

ABOUT = (
    "Keys and tags. examples/make_vectors.py generates them as docs/format.md says. Bytes are in "
    "hex. If 'expect' is not 'ok', it is the class that adk-secure-sessions raises, and any reader "
    "must reject the row. 'root_keys': the id and the wrapping key of each 32-byte root key. "
    "'master_keys': rows of secure_keyring, each with the root key or passphrase that unwraps it. "
    "'data_keys': rows of secure_data_keys, which the data masters in 'masters' unwrap. "
    "'associated_data' is the context of the row. The plaintext of a data key's wrap is the flags "
    "byte 00, then 'data_key'. If 'nonce' is given, wrapping with it gives "
    "exactly 'wrapped'; for a passphrase, 'header' is needed, too (02, salt, iterations, lanes, "
    "memory). 'tags': 'hmac' is the HMAC-SHA-256 of 'context_hex' with the key 'index_master', and "
    "'tag' is its first 16 bytes. 'migration': the MACs of docs/format.md, 'Migration', with "
    "the same key; 'texts' and 'integers' are the parts of the context, texts and bytes first. A "
    "part that is bytes has the form {'hex': ...}. 'state_index': the tags and marks of "
    "docs/format.md, 'State index', with the same key; 'json' is the value, not in canonical form."
)
ROOT_KEYS = {
    "counting bytes": counting(0, 32),
    "all zero": bytes(32),
    "all ones": b"\xff" * 32,
    "random": made("root key", 32),
}
MASTER = made("master key", 32)
PASSPHRASE = "correct horse battery staple"
COMPOSED = "Schl\u00fcssel \u00c5"  # NFC
DECOMPOSED = "Schlu\u0308ssel \u212b"  # the same characters, as another system encodes them
INDEX_MASTER = counting(0xC0, 32)
MASTERS = {11: counting(0x20, 32), 12: made("second data master", 32)}


def expand(key: bytes, purpose: str, length: int) -> bytes:
    info = b"adk-secure-sessions/v1/" + purpose.encode()
    return HKDFExpand(SHA256(), length, info).derive(key)


def root_key_id(root: bytes) -> str:
    return f"key:{expand(root, 'key-id', 8).hex()}"


class _Cost(NamedTuple):
    iterations: int
    lanes: int
    memory: int

    def header(self, salt: bytes) -> bytes:
        return b"\x02" + salt + struct.pack(">III", *self)

    def derive(self, passphrase: bytes, salt: bytes) -> bytes:
        return Argon2id(
            salt=salt, length=32, iterations=self.iterations, lanes=self.lanes,
            memory_cost=self.memory,
        ).derive(passphrase)  # fmt: skip


_WRITERS = _Cost(3, 4, 65536)
_CHEAP = _Cost(1, 1, 8)


def _master_row(root_id: str, purpose: str = "data") -> MasterKeyRow:
    return MasterKeyRow(11, purpose, root_id, MICROSECONDS, b"")


def _master_case(name: str, note: str, root: Json, row: MasterKeyRow, expect: str) -> Json:
    return {
        "name": name,
        "note": note,
        **root,
        "database_id": DATABASE_ID.hex(),
        **row._asdict(),
        "associated_data": row.context(DATABASE_ID).hex(),
        "wrapped": row.wrapped.hex(),
        "expect": expect,
    }


def _master_keys() -> Iterator[Json]:
    root = ROOT_KEYS["counting bytes"]
    for purpose in ("data", "index"):
        row = _master_row(root_key_id(root), purpose)
        nonce = made(f"wrap of the {purpose} master", 12)
        aad = b"\x01" + row.context(DATABASE_ID)
        wrapped = b"\x01" + FixedAesGcm(expand(root, "wrap", 32), nonce).encrypt(MASTER, aad)
        yield _master_case(
            f"{purpose} master under a 32-byte root key", "provider of 32-byte keys",
            {"root_key": root.hex()}, row._replace(wrapped=wrapped), "ok",
        ) | {"nonce": nonce.hex(), "master_key": MASTER.hex()}  # fmt: skip
    row = _master_row(root_key_id(root))
    nonce = made("wrap of the data master", 12)
    aad = b"\x01" + row.context(DATABASE_ID)
    cipher = FixedAesGcm(expand(root, "wrap", 32), nonce)
    wrapped = b"\x01" + cipher.encrypt(MASTER, aad)
    yield from _refused_wraps({"root_key": root.hex()}, row._replace(wrapped=wrapped), 1)
    yield _master_case(
        "wrapped by another 32-byte root key", "its root_key_id is that of the right key",
        {"root_key": ROOT_KEYS["all ones"].hex()}, row._replace(wrapped=wrapped), "TamperedError",
    )  # fmt: skip
    forged = {
        "wrapped under the root key itself": FixedAesGcm(root, nonce).encrypt(MASTER, aad),
        "wrapped without the leading 01 as associated data": cipher.encrypt(MASTER, aad[1:]),
    }
    for name, sealed in forged.items():
        yield _master_case(name, "wrapped in another way", {"root_key": root.hex()},
                           row._replace(wrapped=b"\x01" + sealed), "TamperedError")  # fmt: skip
    yield from _passphrases()
    clear = _master_row("none")._replace(wrapped=b"\x00" + MASTER)
    made_of = {"master_key": MASTER.hex()}
    yield _master_case("plaintext master key, for NoOpBackend", "no root key", {}, clear, "ok") | (
        made_of
    )
    yield _master_case("wrapped key, for NoOpBackend", "no root key", {},
                       clear._replace(wrapped=wrapped), "PlaintextRefusedError")  # fmt: skip
    yield _master_case("plaintext master key, for a 32-byte root key", "as NoOpBackend writes",
                       {"root_key": root.hex()}, row._replace(wrapped=b"\x00" + MASTER),
                       "TamperedError")  # fmt: skip


def _passphrases() -> Iterator[Json]:
    row = _master_row("passphrase")
    salt, nonce = made("salt", 16), made("wrap by passphrase", 12)

    def wrap(passphrase: str, cost: _Cost, row: MasterKeyRow = row) -> tuple[MasterKeyRow, bytes]:
        header, key = cost.header(salt), cost.derive(passphrase.encode(), salt)
        sealed = FixedAesGcm(key, nonce).encrypt(MASTER, header + row.context(DATABASE_ID))
        return row._replace(wrapped=header + sealed), key

    named = row._replace(root_key_id="old passphrase")
    for name, typed, used, cost, unwrapped in (
        ("at the cost that writers take", PASSPHRASE, PASSPHRASE, _WRITERS, row),
        ("at the lowest cost", PASSPHRASE, PASSPHRASE, _CHEAP, row),
        ("that is not ASCII", COMPOSED, COMPOSED, _CHEAP, row),
        ("typed with decomposed letters", DECOMPOSED, COMPOSED, _CHEAP, row),
        ("with a name of the user's", PASSPHRASE, PASSPHRASE, _CHEAP, named),
    ):
        wrapped, key = wrap(used, cost, unwrapped)
        yield _master_case(
            f"passphrase {name}", "Argon2id", {"passphrase": typed}, wrapped, "ok"
        ) | {
            "header": cost.header(salt).hex(),
            "wrapping_key": key.hex(),
            "nonce": nonce.hex(),
            "master_key": MASTER.hex(),
        }
    wrapped, _ = wrap(PASSPHRASE, _CHEAP)
    yield from _refused_wraps({"passphrase": PASSPHRASE}, wrapped, 29)
    yield _master_case("wrong passphrase", "one letter differs", {"passphrase": PASSPHRASE + "s"},
                       wrapped, "TamperedError")  # fmt: skip
    body = wrapped.wrapped[29:]
    headers = {
        "another salt": _CHEAP.header(flipped(salt, 0)),
        "more iterations than it was wrapped with": _Cost(2, 1, 8).header(salt),
        "another version byte": b"\x03" + _CHEAP.header(salt)[1:],
        "more iterations than writers use": _Cost(4, 4, 65536).header(salt),
        "more lanes than writers use": _Cost(3, 5, 65536).header(salt),
        "more memory than writers use": _Cost(3, 4, 65537).header(salt),
        "all the memory that the field can say": _Cost(1, 1, 2**32 - 1).header(salt),
        "no iterations": _Cost(0, 1, 8).header(salt),
        "no lanes": _Cost(1, 0, 8).header(salt),
        "less memory than its lanes need": _Cost(1, 4, 8).header(salt),
        "a header that is cut off": _CHEAP.header(salt)[:28],
    }
    for name, header in headers.items():
        body = b"" if len(header) < 29 else body
        yield _master_case(f"passphrase: {name}", "rejected, whatever follows the header",
                           {"passphrase": PASSPHRASE}, wrapped._replace(wrapped=header + body),
                           "TamperedError")  # fmt: skip


def _refused_wraps(root: Json, row: MasterKeyRow, header: int) -> Iterator[Json]:
    kind = "passphrase" if "passphrase" in root else "32-byte root key"
    moved: dict[str, MasterKeyRow] = {
        "id": row._replace(id=row.id + 1),
        "purpose": row._replace(purpose="index"),
        "root_key_id": row._replace(root_key_id=row.root_key_id + "x"),
        "created_at": row._replace(created_at=row.created_at + 1),
    }
    for column, other in moved.items():
        yield _master_case(f"{kind}: row with another {column}", "the wrap is bound to its row",
                           root, other, "TamperedError")  # fmt: skip
    case = _master_case(f"{kind}: row of another database", "the wrap is bound to database_id",
                        root, row, "TamperedError")  # fmt: skip
    other_id = flipped(DATABASE_ID, 15)
    case["database_id"] = other_id.hex()
    case["associated_data"] = row.context(other_id).hex()
    yield case
    wrapped = row.wrapped
    altered = {
        "altered nonce": flipped(wrapped, header),
        "altered ciphertext": flipped(wrapped, header + 12),
        "altered tag": flipped(wrapped, -1),
        "no tag": wrapped[:-16],
        "no ciphertext": wrapped[: header + 12],
        "nothing but the first byte": wrapped[:1],
        "empty": b"",
        "one byte more": wrapped + b"\x00",
    }
    for name, stored in altered.items():
        yield _master_case(f"{kind}: {name}", "the wrap itself is wrong", root,
                           row._replace(wrapped=stored), "TamperedError")  # fmt: skip


def _data_case(name: str, note: str, row: DataKeyRow, expect: str) -> Json:
    return {
        "name": name,
        "note": note,
        "database_id": DATABASE_ID.hex(),
        **row._asdict(),
        "owner": row.owner.hex(),
        "associated_data": row.context(DATABASE_ID).hex(),
        "wrapped": row.wrapped.hex(),
        "expect": expect,
    }


def _data_keys() -> Iterator[Json]:
    rows = {
        "AES-256-GCM data key": DataKeyRow(21, ADA, 0, 1, MICROSECONDS, b""),
        "Fernet data key": DataKeyRow(22, ADA, 1, 2, MICROSECONDS + 1, b""),
        "no-op data key, which is empty": DataKeyRow(23, ADA, 2, 3, MICROSECONDS + 2, b""),
        "data key of another owner": DataKeyRow(24, BOB, 0, 1, MICROSECONDS, b""),
    }
    wraps: dict[str, bytes] = {}
    for name, row in rows.items():
        key = b"" if row.backend_id == 3 else made(name, 32)
        nonce = made(f"wrap of {name}", 12)
        where = row.context(DATABASE_ID)
        cipher = FixedAesGcm(MASTERS[11], nonce)
        wraps[name] = records.seal(
            cipher, records.build_header(1, 11), where, records.NO_FLAGS + key
        )
        case = _data_case(
            name, "wrapped by data master 11", row._replace(wrapped=wraps[name]), "ok"
        )
        yield case | {"nonce": nonce.hex(), "data_key": key.hex()}
    row = rows["AES-256-GCM data key"]._replace(wrapped=wraps["AES-256-GCM data key"])
    moved = {
        "id": row._replace(id=row.id + 1),
        "owner": row._replace(owner=BOB),
        "generation": row._replace(generation=row.generation + 1),
        "backend_id": row._replace(backend_id=2),
        "created_at": row._replace(created_at=row.created_at + 1),
    }
    for column, other in moved.items():
        yield _data_case(f"data key's row with another {column}", "the wrap is bound to its row",
                         other, "TamperedError")  # fmt: skip
    wrapped = row.wrapped
    altered = {
        "another owner's wrap": (wraps["data key of another owner"], "TamperedError"),
        "another backend's wrap": (wraps["Fernet data key"], "TamperedError"),
        "a master that is not there": (_by_master(wrapped, 13), "UnknownKeyError"),
        "another master than it was wrapped by": (_by_master(wrapped, 12), "TamperedError"),
        "a wrap that says Fernet": (wrapped[:4] + b"\x02" + wrapped[5:], "TamperedError"),
        "a wrap that says no-op": (wrapped[:4] + b"\x03" + wrapped[5:], "TamperedError"),
        "an altered nonce": (flipped(wrapped, 13), "TamperedError"),
        "an altered ciphertext": (flipped(wrapped, 25), "TamperedError"),
        "an altered tag": (flipped(wrapped, -1), "TamperedError"),
        "no body": (wrapped[:13], "TamperedError"),
        "nothing": (b"", "TamperedError"),
        "a plaintext key": (made("AES-256-GCM data key", 32), "PlaintextRefusedError"),
        "a wrap of record version 1": (wrapped[:3] + b"\x01" + wrapped[4:], "TamperedError"),
    }
    for name, (stored, expect) in altered.items():
        yield _data_case(f"data key's row with {name}", "the wrap itself is wrong",
                         row._replace(wrapped=stored), expect)  # fmt: skip
    key = made("AES-256-GCM data key", 32)
    wholes = {
        "flags 01": (b"\x01" + key, "DecryptionError", "unknown flags"),
        "a compressed key": (b"\x01" + zlib_stream(key), "DecryptionError", "unknown flags"),
        "a padded key": (b"\x04" + padded(key, 3), "DecryptionError", "unknown flags"),
        "no flags": (key, "DecryptionError", "unknown flags"),
        "an empty plaintext": (b"", "TamperedError", "malformed"),
        "flags and no key": (b"\x00", "TamperedError", "malformed"),
        "a key of 31 bytes": (b"\x00" + key[:31], "TamperedError", "malformed"),
        "a key of 33 bytes": (b"\x00" + key + b"\x00", "TamperedError", "malformed"),
    }
    header = records.build_header(1, 11)
    for name, (whole, expect, reason) in wholes.items():
        cipher = FixedAesGcm(MASTERS[11], made(f"wrap with {name}", 12))
        sealed = header + cipher.encrypt(whole, header + row.context(DATABASE_ID))
        case = _data_case(f"data key's row whose wrap holds {name}", "wrapped by data master 11",
                          row._replace(wrapped=sealed), expect)  # fmt: skip
        yield case | {"reason": reason}


def _by_master(wrapped: bytes, master_id: int) -> bytes:
    return wrapped[:5] + struct.pack(">q", master_id) + wrapped[13:]


def _tags() -> Iterator[Json]:
    names: tuple[tuple[str, ...], ...] = (
        ("app", "clinic"),
        ("app", ""),
        ("app", "Klinik für Kinder 🌱"),
        ("user", "clinic", "ada"),
        ("user", "clinic", "ada@example.org"),
        ("user", "clini", "cada"),
        ("user", "clinic", "Žofie Nováková"),
        ("user", "clinic", "a\u0308da"),
        ("user", "clinic", "\u00e4da"),
        ("session", "clinic", "ada", "first visit"),
        ("session", "clinic", "ada", ""),
        ("session", "clinic", "ad", "afirst visit"),
        ("session", "clinic", "ada", "世界"),
        ("session", "clinic", "ada", "lone surrogate \ud83c"),
        ("session", "clinic", "ada", "NUL \x00"),
    )
    for parts in names:
        joined = records.build_context(parts)
        mac = HMAC(INDEX_MASTER, SHA256())
        mac.update(joined)
        digest = mac.finalize()
        yield {
            "name": f"tag of {parts!a}",
            "context": list(parts),
            "context_hex": joined.hex(),
            "hmac": digest.hex(),
            "tag": digest[:16].hex(),
        }


def _migration() -> Iterator[Json]:
    """Return the MACs of a copied session, a copied state, a tombstone and a complete migration."""
    database_id, tag = made("database id", 16), made("tag of a session", 16)
    source = made("source", 16)
    state = b'{"a":[1,2.5,null],"b":"\\u4e16"}'
    cases: tuple[tuple[str, tuple[str | bytes, ...], tuple[int, ...]], ...] = (
        ("source of a session", ("migration source", database_id, tag, b"2026-01-01 7"), ()),
        ("source of a state", ("migration source", database_id, tag, state), ()),
        ("seal of a copied session", ("migrated", database_id, tag, source), (2**62 + 5, 7)),
        ("seal of a tombstone", ("migrated", database_id, tag, bytes(16)), (0, 0)),
        ("mark of a complete migration", ("migration complete", database_id), ()),
        ("mark that the source was erased", ("source erased", database_id), ()),
    )
    for name, parts, integers in cases:
        joined = records.build_context(parts, *integers)
        mac = HMAC(INDEX_MASTER, SHA256())
        mac.update(joined)
        yield {
            "name": name,
            "texts": [part if isinstance(part, str) else {"hex": part.hex()} for part in parts],
            "integers": list(integers),
            "context_hex": joined.hex(),
            "mac": mac.finalize()[:16].hex(),
        }


def _state_index() -> Iterator[Json]:
    """Return the tags of indexed values, and the marks of their names."""
    cases = (
        ("an integer", "ticket", "7", "7"),
        ("a large integer", "ticket", str(2**70), str(2**70)),
        ("a double without a fraction", "ticket", "7.00", "7.0"),
        ("a double with an exponent", "ticket", "1E5", "100000.0"),
        ("a small double", "ticket", "0.00001", "1e-05"),
        ("a large double", "ticket", "15000000000000000.0", "1.5e+16"),
        ("the largest exponent that is not written", "ticket", "1e15", "1000000000000000.0"),
        ("minus zero", "ticket", "-0.0", "-0.0"),
        ("not a number", "ticket", "NaN", "NaN"),
        ("true", "ticket", "true", "true"),
        ("null", "ticket", "null", "null"),
        ("a text", "user:mrn", '"A-7"', '"A-7"'),
        ("escapes", "user:mrn", '"\\u00e4\\/\\u0009\\ud83d\\udc4d\\u007f\\""',
         '"\\u00e4/\\t\\ud83d\\udc4d\\u007f\\""'),
        ("an object", "caf\u00e9 \U0001f375", '{"b": [1, {}], "a": null, "\\u00e4": 0.1}',
         '{"a":null,"b":[1,{}],"\\u00e4":0.1}'),
    )  # fmt: skip
    for name, key, text, canonical in cases:
        digest = _mac("state index key", "clinic", key)
        yield {
            "name": name,
            "app_name": "clinic",
            "key": key,
            "json": text,
            "canonical": canonical,
            "key_tag": digest.hex(),
            "value_tag": _mac("state index value", "clinic", key, canonical).hex(),
            "declared": _mac("state index declared", digest).hex(),
            "complete": _mac("state index complete", digest).hex(),
        }


def _mac(*parts: str | bytes) -> bytes:
    mac = HMAC(INDEX_MASTER, SHA256())
    mac.update(records.build_context(parts))
    return mac.finalize()[:16]


def key_vectors() -> Json:
    """Return the content of keys.json."""
    roots = [
        {
            "name": name,
            "root_key": root.hex(),
            "root_key_id": root_key_id(root),
            "wrapping_key": expand(root, "wrap", 32).hex(),
        }
        for name, root in ROOT_KEYS.items()
    ]
    return {
        "about": ABOUT,
        "root_keys": roots,
        "master_keys": list(_master_keys()),
        "masters": {str(key_id): key.hex() for key_id, key in MASTERS.items()},
        "data_keys": list(_data_keys()),
        "index_master": INDEX_MASTER.hex(),
        "tags": list(_tags()),
        "migration": list(_migration()),
        "state_index": list(_state_index()),
    }
