"""The known answers under vectors/: old records stay readable, bad ones are rejected as named."""

import asyncio
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import pytest

from adk_secure_sessions import (
    AesGcmBackend,
    DecryptionError,
    EncryptionBackend,
    FernetBackend,
    KeyProvider,
    PassphraseKey,
    SecureSessionError,
    StaticKey,
)
from adk_secure_sessions.caches import FifoCache
from adk_secure_sessions.crypto.aead import Aes256Gcm
from adk_secure_sessions.formats import records
from adk_secure_sessions.formats.json_text import canonical_json, load_state
from adk_secure_sessions.keys import passphrase
from adk_secure_sessions.keys.blind_index import IndexMaster
from adk_secure_sessions.keys.data_keys import (
    DatabaseKeys,
    DataKey,
    DataKeyRow,
    OwnerKeys,
    TransactionKeys,
)
from adk_secure_sessions.keys.keyring import Keyring, MasterKeyRow
from tests import format_reader
from tests.maintenance.support import plaintext_backend
from tests.vector_databases import Json, each_case, load

RECORDS, KEYS = load("records.json"), load("keys.json")
SEALED_TABLES = [case for case in RECORDS["cases"] if "nonce" in case or "iv" in case]
WRAPPED = [case for case in KEYS["master_keys"] if "nonce" in case]
LISTS = {
    "records.json": RECORDS["cases"],
    "root_keys": KEYS["root_keys"],
    "master_keys": KEYS["master_keys"],
    "data_keys": KEYS["data_keys"],
    "tags": KEYS["tags"],
    "migration": KEYS["migration"],
    "state_index": KEYS["state_index"],
}


def assert_outcome(case: Json, attempt: Callable[[], bytes], plaintext: str) -> None:
    if case["expect"] == "ok":
        assert attempt().hex() == plaintext
        return
    with pytest.raises(SecureSessionError) as info:
        attempt()
    assert type(info.value).__name__ == case["expect"]
    if "reason" in case:
        assert isinstance(info.value, DecryptionError)
        assert info.value.reason == case["reason"]


def after_flags(case: Json) -> str:
    """The plaintext of a case to accept, in hex, without its flags byte."""
    text: str = case.get("plaintext", "00")
    assert text[:2] == "00"
    return text[2:]


# --- the files themselves ------------------------------------------------------------------------


@pytest.mark.parametrize("cases", LISTS.values(), ids=LISTS)
def test_vector_file_is_not_empty(cases: list[Json]) -> None:
    assert cases, "an empty list must not pass as success"


@pytest.mark.parametrize("kind", ["records.json", "master_keys", "data_keys"])
def test_names_are_unique_and_both_outcomes_occur(kind: str) -> None:
    cases = LISTS[kind]
    names = [case["name"] for case in cases]
    assert len(set(names)) == len(names)
    assert {case["expect"] == "ok" for case in cases} == {True, False}


# --- records -------------------------------------------------------------------------------------


BACKENDS: dict[int, EncryptionBackend] = {
    1: AesGcmBackend(bytes(32)),
    2: FernetBackend(bytes(32)),
    3: plaintext_backend(),
}


def known_keys(accept: list[int]) -> TransactionKeys:
    """The keys of records.json, as a service has them that lists some backends."""
    keyring = Keyring(bytes(16), IndexMaster(bytes(32)), {}, None)
    keys = DatabaseKeys(
        keyring, {i: BACKENDS[i] for i in accept}, BACKENDS[accept[0]], FifoCache(100)
    )
    for key in RECORDS["keys"]:
        row = DataKeyRow(key["id"], bytes.fromhex(key["owner"]), 0, key["backend"], 0, b"")
        cipher = BACKENDS[key["backend"]].cipher(bytes.fromhex(key["key"]))
        data_key = DataKey(row, 0, cipher, keyring)
        before = keys.by_owner.get(row.owner)
        by_id = {**(before.by_id if before else {}), row.id: data_key}
        keys.by_owner.put(row.owner, OwnerKeys(by_id, data_key, 0))
    return TransactionKeys(keys)


def context_of(case: Json) -> bytes:
    texts = tuple(
        part["text"] if "text" in part else bytes.fromhex(part["bytes"])
        for part in case["context"]
        if "int" not in part
    )
    return records.build_context(texts, *(part["int"] for part in case["context"] if "int" in part))


@each_case(RECORDS["cases"])
def test_record_opens_or_is_rejected_as_named(case: Json) -> None:
    assert context_of(case).hex() == case["context_hex"]
    keys = known_keys(case["accept"])
    owner, record = bytes.fromhex(case["owner"]), bytes.fromhex(case["record"])
    assert_outcome(case, lambda: keys.open(owner, context_of(case), record), after_flags(case))


PACKED = [case for case in RECORDS["cases"] if "packed" in case]


@each_case(PACKED)
def test_packed_record_is_encrypted_again_as_it_is(case: Json) -> None:
    keys, owner, context = (
        known_keys(case["accept"]),
        bytes.fromhex(case["owner"]),
        context_of(case),
    )
    plaintext = keys.open_with_flags(
        owner, context, bytes.fromhex(case["record"]), records.keep_packed
    )
    assert plaintext.hex() == case["packed"]
    again = keys.seal(owner, context, plaintext, has_flags=True)
    assert keys.open_with_flags(owner, context, again, records.keep_packed) == plaintext
    assert keys.open(owner, context, again).hex() == after_flags(case)


def test_each_backend_has_a_record_of_each_flags() -> None:
    made = {(case["record"][8:10], case["packed"][:2]) for case in PACKED}
    assert made == {(f"{i:02x}", f"{flags:02x}") for i in BACKENDS for flags in (1, 4, 5)}


@each_case(RECORDS["cases"])
def test_reader_written_from_the_page_alone_agrees_on_the_record(case: Json) -> None:
    keys = {key["id"]: key for key in RECORDS["keys"]}
    stored = bytes.fromhex(case["record"])
    parts = [
        bytes.fromhex(value) if kind == "bytes" else value
        for part in case["context"]
        for kind, value in part.items()
    ]
    try:
        backend, key_id = format_reader.unpack(stored)
        key = keys.get(key_id)
        if backend not in case["accept"] or key is None:
            raise format_reader.Refused
        if key["owner"] != case["owner"] or key["backend"] != backend:
            raise format_reader.Refused
        where = format_reader.context(*parts)
        plaintext = format_reader.open_record(stored, where, backend, bytes.fromhex(key["key"]))
    except format_reader.Refused as refusal:
        assert case["expect"] != "ok"
        is_flags = isinstance(refusal, format_reader.UnknownFlags)
        assert is_flags == (case.get("reason") == "unknown flags")
    else:
        assert case["expect"] == "ok"
        assert plaintext.hex() == after_flags(case)


@contextmanager
def drawing_from(case: Json) -> Iterator[None]:
    """Make the ciphers draw the nonce, or the IV and the time, of *case*."""
    draw = bytes.fromhex(case.get("nonce") or case["iv"])
    with (
        mock.patch("os.urandom", return_value=draw),
        mock.patch("time.time", return_value=case.get("time", 0)),
    ):
        yield


@each_case(SEALED_TABLES)
def test_sealing_with_the_fixed_nonce_gives_exactly_the_record(case: Json) -> None:
    (key,) = (key["key"] for key in RECORDS["keys"] if key["id"] == case["key_id"])
    cipher = BACKENDS[case["backend"]].cipher(bytes.fromhex(key))
    plaintext = bytes.fromhex(case["plaintext"])
    with drawing_from(case):
        header = records.build_header(case["backend"], case["key_id"])
        sealed = records.seal(cipher, header, context_of(case), plaintext)
    assert sealed.hex() == case["record"]


def test_every_backend_and_every_purpose_has_a_vector_to_encrypt() -> None:
    made = {(case["backend"], case["context"][0]["text"]) for case in SEALED_TABLES}
    purposes = {"app", "user", "session", "base", "event", "witness"}
    assert made == {(backend, purpose) for backend in (1, 2) for purpose in purposes}


# --- keys ----------------------------------------------------------------------------------------


@each_case(KEYS["root_keys"])
def test_root_key_gives_the_key_id(case: Json) -> None:
    assert StaticKey(bytes.fromhex(case["root_key"])).key_id == case["root_key_id"]


@each_case(KEYS["root_keys"])
async def test_root_key_gives_the_wrapping_key(case: Json) -> None:
    wrapped = await StaticKey(bytes.fromhex(case["root_key"])).wrap(b"key", b"context")
    wrapping = Aes256Gcm(bytes.fromhex(case["wrapping_key"]))
    assert wrapping.decrypt(wrapped[1:], b"\x01context") == b"key"


def provider_of(case: Json) -> KeyProvider:
    if "passphrase" in case:
        return PassphraseKey(case["passphrase"], key_id=case["root_key_id"])
    return StaticKey(bytes.fromhex(case["root_key"])) if "root_key" in case else NO_OP_ROOT


NO_OP_ROOT: KeyProvider = plaintext_backend().root_key


def master_row(case: Json) -> MasterKeyRow:
    columns = {name: case[name] for name in MasterKeyRow._fields}
    return MasterKeyRow(**columns | {"wrapped": bytes.fromhex(case["wrapped"])})


@each_case(KEYS["master_keys"])
def test_master_key_is_unwrapped_or_rejected_as_named(case: Json) -> None:
    row, where = master_row(case), bytes.fromhex(case["associated_data"])
    assert row.context(bytes.fromhex(case["database_id"])) == where

    def unwrap() -> bytes:
        return asyncio.run(provider_of(case).unwrap(row.wrapped, where))

    assert_outcome(case, unwrap, case.get("master_key", ""))


@each_case(WRAPPED)
async def test_wrapping_with_the_fixed_nonce_gives_exactly_the_wrap(case: Json) -> None:
    draws = [bytes.fromhex(case["nonce"])]
    iterations, lanes, memory = 3, 4, 65536
    if "header" in case:
        salt, iterations, lanes, memory = struct.unpack(">x16sIII", bytes.fromhex(case["header"]))
        draws.insert(0, salt)
    # Private constants: a passphrase's cost is not for callers to choose.
    with (
        mock.patch.multiple(passphrase, _ITERATIONS=iterations, _LANES=lanes, _MEMORY_KIB=memory),
        mock.patch("os.urandom", side_effect=draws),
    ):
        wrapped = await provider_of(case).wrap(
            bytes.fromhex(case["master_key"]), bytes.fromhex(case["associated_data"])
        )
    assert wrapped.hex() == case["wrapped"]


def data_row(case: Json) -> DataKeyRow:
    columns = {name: case[name] for name in DataKeyRow._fields}
    as_bytes = {name: bytes.fromhex(case[name]) for name in ("owner", "wrapped")}
    return DataKeyRow(**columns | as_bytes)


def masters() -> dict[int, Aes256Gcm]:
    return {int(key_id): Aes256Gcm(bytes.fromhex(key)) for key_id, key in KEYS["masters"].items()}


@each_case(KEYS["data_keys"])
def test_data_key_is_unwrapped_or_rejected_as_named(case: Json) -> None:
    row, database_id = data_row(case), bytes.fromhex(case["database_id"])
    assert row.context(database_id).hex() == case["associated_data"]
    keyring = Keyring(database_id, IndexMaster(bytes(32)), masters(), None)

    def unwrap() -> bytes:
        staged = TransactionKeys(DatabaseKeys(keyring, BACKENDS, BACKENDS[1], FifoCache(100)))
        staged.unwrap([row], ())
        # A rejected data key raises when a record names it.
        staged.key_of(row.owner, records.build_header(row.backend_id, row.id))
        master = masters()[records.parse_header(row.wrapped)[1]]
        return records.open_with_flags(row.wrapped, row.context(database_id), master)[1:]

    assert_outcome(case, unwrap, case.get("data_key", ""))


@each_case(KEYS["tags"])
def test_tag_is_the_one_in_the_vector(case: Json) -> None:
    master = IndexMaster(bytes.fromhex(KEYS["index_master"]))
    _, *names = case["context"]
    assert master.tag_of(*names).hex() == master.mac(*case["context"]).hex() == case["tag"]


@each_case(KEYS["migration"])
def test_mac_of_an_import_is_the_one_in_the_vector(case: Json) -> None:
    master = IndexMaster(bytes.fromhex(KEYS["index_master"]))
    purpose, *of = case["texts"]
    database_id, *rest = (bytes.fromhex(part["hex"]) for part in of)
    context = format_reader.context(purpose, database_id, *rest, *case["integers"])
    assert context.hex() == case["context_hex"]
    mac = master.mac(purpose, database_id, *rest, numbers=case["integers"])
    assert mac.hex() == case["mac"]


@each_case(KEYS["state_index"])
def test_tags_of_an_indexed_value_are_those_in_the_vector(case: Json) -> None:
    key = bytes.fromhex(KEYS["index_master"])
    master, names = IndexMaster(key), (case["app_name"], case["key"])
    value = load_state(b'{"value":' + case["json"].encode() + b"}")["value"]
    text = canonical_json(value)
    assert text.decode() == format_reader.canonical(value) == case["canonical"]
    key_tag, value_tag = master.state_key_tag(*names), master.state_value_tag(*names, text)
    assert (key_tag.hex(), value_tag.hex()) == (case["key_tag"], case["value_tag"])
    assert master.mac("state index declared", key_tag).hex() == case["declared"]
    assert master.mac("state index complete", key_tag).hex() == case["complete"]
    read = format_reader.tag(key, "state index value", *names, case["canonical"])
    assert read.hex() == case["value_tag"]


def test_no_two_tags_are_alike() -> None:
    assert len({case["tag"] for case in KEYS["tags"]}) == len(KEYS["tags"])
