"""Which data key encrypts: only one that the owner's row names, whatever else is stored."""

import time
from collections.abc import Callable, Collection
from time import perf_counter
from typing import Any

import pytest

from adk_secure_sessions import (
    AesGcmBackend,
    ConfigurationError,
    DecryptionError,
    TamperedError,
    UnknownKeyError,
)
from adk_secure_sessions.caches import FifoCache
from adk_secure_sessions.errors import Reason
from adk_secure_sessions.formats.records import (
    NO_FLAGS,
    Packing,
    build_header,
    keep_packed,
    parse_header,
    reject_flags,
    unpack,
)
from adk_secure_sessions.keys.data_keys import (
    DatabaseKeys,
    DataKeyRow,
    StaleKeyring,
    TransactionKeys,
    unwrap_data_key,
    wrap_data_key,
)
from adk_secure_sessions.keys.keyring import SeparationState
from adk_secure_sessions.telemetry import MeasuredCall, cipher_kind
from tests.storage.support import ANOTHER_MASTER, MASTER, data_keys, fingerprints, keyring

ADA, BOB = b"tag of ada......", b"tag of bob......"
CONTEXT = b"context"
LAST = 2**62


@pytest.fixture
def keys() -> DatabaseKeys:
    return data_keys()


def made(database_keys: DatabaseKeys, number: int, owner_tag: bytes = ADA) -> list[DataKeyRow]:
    """Data keys of the owner, of the generations 0, 1, ..."""
    staged = TransactionKeys(database_keys)
    return [staged.create_data_key(owner_tag) for _ in range(number)]


def read(
    database_keys: DatabaseKeys, rows: Collection[DataKeyRow], *, created: Collection[int] = ()
) -> TransactionKeys:
    staged = TransactionKeys(database_keys, stored_key_ids=created)
    staged.unwrap(rows, fingerprints(database_keys.keyring))
    return staged


def read_and_chosen(
    database_keys: DatabaseKeys, rows: Collection[DataKeyRow], named: Collection[int]
) -> TransactionKeys:
    """The keys of *rows*, where the row of `ADA` has the ids *named*."""
    staged = read(database_keys, rows)
    staged.choose_current(ADA, named)
    return staged


def current_id(staged: TransactionKeys, owner_tag: bytes = ADA) -> int | None:
    current = staged.current(owner_tag)
    return current.id if current else None


def of_another_backend(database_keys: DatabaseKeys, *rows: DataKeyRow) -> DataKeyRow:
    """The data key that a service makes whose writing backend is Fernet."""
    return read(data_keys(database_keys.keyring, fernet=True), rows).create_data_key(ADA)


def test_owner_gets_no_key_that_would_not_be_read(
    keys: DatabaseKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = made(keys, 4)
    monkeypatch.setattr("adk_secure_sessions.keys.data_keys.MAX_DATA_KEYS", 104)
    read(keys, rows[:3]).create_data_key(ADA)
    with pytest.raises(ConfigurationError, match=r"has 4 data keys.*run `retire`"):
        read(keys, rows).create_data_key(ADA)


# --- the current data key ------------------------------------------------------------------------


def test_key_encrypts_nothing_until_the_owners_row_was_read(keys: DatabaseKeys) -> None:
    (row,) = made(keys, 1)
    staged = read(keys, [row])
    assert current_id(staged) is None
    assert not staged.current_is_as_new_as(ADA)
    staged.choose_current(ADA, [row.id])
    assert current_id(staged) == row.id
    assert parse_header(staged.seal(ADA, CONTEXT, b"")) == (1, row.id)


@pytest.mark.parametrize("named", [[0], [1], [2], [1, 0]])
def test_newest_key_that_the_row_names_encrypts_and_none_of_a_higher_generation(
    keys: DatabaseKeys, named: list[int]
) -> None:
    """For example, no erased key that was inserted again."""
    rows = made(keys, 3)
    for order in (rows, rows[::-1]):
        staged = read_and_chosen(keys, order, [rows[one].id for one in named])
        assert current_id(staged) == rows[named[0]].id
        assert staged.current_is_newest(ADA) == (named == [2])


def test_row_that_names_no_key_of_the_owner_leaves_none_to_encrypt_with(keys: DatabaseKeys) -> None:
    """Not even one without a row, or of another owner."""
    (bobs,) = made(keys, 1, BOB)
    rows = [*made(keys, 2), bobs]
    for named in ([], [5], [bobs.id]):
        staged = read_and_chosen(keys, rows, named)
        assert current_id(staged) is None


def test_key_of_another_backend_is_not_taken_though_the_row_names_it(keys: DatabaseKeys) -> None:
    (ours,) = made(keys, 1)
    theirs = of_another_backend(keys, ours)
    staged = read_and_chosen(keys, [ours, theirs], [theirs.id, ours.id])
    assert current_id(staged) == ours.id
    assert not staged.current_is_newest(ADA)


def test_cached_key_that_the_row_no_longer_names_encrypts_nothing(keys: DatabaseKeys) -> None:
    rows = made(keys, 2)
    first = read_and_chosen(keys, rows, [rows[1].id])
    first.publish()
    later = TransactionKeys(keys)
    assert current_id(later) == rows[1].id
    later.choose_current(ADA, [rows[0].id])
    assert current_id(later) == rows[0].id


def test_cached_key_under_a_retired_master_encrypts_nothing() -> None:
    keys = data_keys(keyring(MASTER))
    (row,) = made(keys, 1)
    first = read_and_chosen(keys, [row], (row.id,))
    first.publish()
    later = TransactionKeys(keys)
    later.choose_current(ADA, (row.id,))
    assert current_id(later) == row.id
    keys.keyring = keyring(ANOTHER_MASTER)
    guard, used = later.keyring_guard(), parse_header(later.create_data_key(ADA).wrapped)[1]
    assert guard["master_id"] == used == keyring(MASTER).wrapping_master_id
    latest = TransactionKeys(keys)
    latest.choose_current(ADA, (row.id,))
    assert current_id(latest) is None


def test_key_that_this_operation_stored_is_used_if_the_row_names_none(keys: DatabaseKeys) -> None:
    """With a key database the key is stored first, the row that names it afterwards."""
    rows = made(keys, 3)
    staged = read(keys, rows, created=[rows[1].id])
    staged.choose_current(ADA, [])
    assert current_id(staged) == rows[1].id
    staged.choose_current(ADA, [rows[0].id])  # another process was first
    assert current_id(staged) == rows[0].id


# --- the ids in the owner's row ------------------------------------------------------------------


@pytest.mark.parametrize("is_listed", [True, False])
def test_row_keeps_naming_the_keys_of_other_backends(keys: DatabaseKeys, is_listed: bool) -> None:
    (ours,) = made(keys, 1)
    theirs = of_another_backend(keys, ours)
    alone = DatabaseKeys(keys.keyring, {1: keys.backends[1]}, keys.backends[1], FifoCache(100))
    staged = read(keys if is_listed else alone, [ours, theirs])
    staged.choose_current(ADA, [theirs.id, ours.id])
    assert staged.ids_to_store(ADA, [theirs.id, ours.id]) == (ours.id, theirs.id)
    assert staged.ids_to_store(ADA, [ours.id]) == (ours.id,)


def test_row_keeps_naming_a_key_that_is_newer_than_the_cached_ones(keys: DatabaseKeys) -> None:
    """Another process has made it for another backend, and this process has not read it yet."""
    (ours,) = made(keys, 1)
    first = read_and_chosen(keys, [ours], [ours.id])
    first.publish()
    theirs = of_another_backend(keys, ours)
    later = TransactionKeys(keys)
    later.choose_current(ADA, [ours.id, theirs.id])
    assert later.ids_to_store(ADA, [ours.id, theirs.id]) == (ours.id, theirs.id)


# --- junk ----------------------------------------------------------------------------------------


def junk(row: DataKeyRow, generation: int = 7) -> DataKeyRow:
    """A row that an attacker has made of a stored one."""
    return row._replace(id=99, generation=generation)


def test_record_under_a_junk_key_is_rejected_by_the_row_that_it_names(keys: DatabaseKeys) -> None:
    (row,) = made(keys, 1)
    staged = read(keys, [row, junk(row)._replace(id=98), junk(row)])
    for key_id in (98, 99):
        with pytest.raises(DecryptionError, match=f"secure_data_keys row {key_id}"):
            staged.open(ADA, CONTEXT, build_header(1, key_id) + bytes(40))


def test_record_whose_key_has_lost_its_id_is_rejected_by_the_row_with_another_id(
    keys: DatabaseKeys,
) -> None:
    (row,) = made(keys, 1)
    staged = read(keys, [row._replace(id=99)])
    with pytest.raises(TamperedError, match="secure_data_keys row 99"):
        staged.open(ADA, CONTEXT, build_header(1, row.id) + bytes(40))


def test_row_no_longer_names_junk_keys_and_keys_that_are_not_stored(keys: DatabaseKeys) -> None:
    (row,) = made(keys, 1)
    for stored in ([row], [row, junk(row)]):
        staged = read_and_chosen(keys, stored, [99, row.id])
        assert current_id(staged) == row.id
        assert staged.ids_to_store(ADA, [99, row.id, 6]) == (row.id,)


@pytest.mark.parametrize("taken", [0, 7, LAST - 1])
def test_new_key_has_a_generation_that_no_junk_key_has_taken(
    keys: DatabaseKeys, taken: int
) -> None:
    (row,) = made(keys, 1)
    for order in ([row, junk(row, taken)], [junk(row, taken), row]):
        staged = read_and_chosen(keys, order, [row.id])
        new = staged.create_data_key(ADA)
        assert new.generation == taken + 1
        assert (current_id(staged), staged.ids_to_store(ADA, [row.id])) == (new.id, (new.id,))
        assert current_id(read_and_chosen(keys, [row, new], [row.id, new.id])) == new.id


def test_junk_key_alone_does_not_keep_a_new_owner_from_a_first_key(keys: DatabaseKeys) -> None:
    (bobs,) = made(keys, 1, BOB)
    staged = read(keys, [junk(bobs)._replace(owner=ADA)])
    assert not staged.has_fresh_keys(ADA)
    assert staged.create_data_key(ADA).generation == 8


@pytest.mark.parametrize("generation", ["text", None, 1.5, b"7"])
def test_junk_key_whose_generation_is_no_integer_takes_none(
    keys: DatabaseKeys, generation: object
) -> None:
    """SQLite stores any type in any column."""
    (row,) = made(keys, 1)
    staged = read(keys, [row, row._replace(id=99, generation=generation)])  # type: ignore[arg-type]
    staged.choose_current(ADA, [row.id])
    assert staged.create_data_key(ADA).generation == 1


def test_no_key_is_made_after_the_last_generation(keys: DatabaseKeys) -> None:
    (row,) = made(keys, 1)
    staged = read_and_chosen(keys, [row, junk(row, LAST)], [row.id])
    with pytest.raises(TamperedError, match="highest possible generation") as rejected:
        staged.create_data_key(ADA)
    assert (rejected.value.table, rejected.value.reason) == ("secure_data_keys", Reason.MALFORMED)
    assert current_id(staged) == row.id, "the key that there is still encrypts"


# --- the keyring that is read with the data keys -------------------------------------------------


def test_data_key_under_a_master_that_is_stored_no_longer_is_not_loaded() -> None:
    """A leaked and retired master must not wrap a data key that a running service takes up."""
    both = data_keys(keyring(ANOTHER_MASTER, MASTER))
    (planted,) = made(data_keys(keyring(ANOTHER_MASTER)), 1)
    staged = TransactionKeys(both, keyring_was_reread=False)
    with pytest.raises(StaleKeyring):
        staged.unwrap([planted], fingerprints(keyring(MASTER)))
    assert not staged.has_fresh_keys(ADA)
    both.keyring = keyring(MASTER)
    again = TransactionKeys(both)
    again.unwrap([planted], fingerprints(keyring(MASTER)))
    again.choose_current(ADA, [planted.id])
    assert current_id(again) is None
    with pytest.raises(UnknownKeyError, match="no data master"):
        again.open(ADA, CONTEXT, build_header(1, planted.id) + bytes(40))


def test_keyring_that_changed_is_accepted_after_it_was_read_again() -> None:
    """Only a row whose data master is missing asks the caller to read the keyring again."""
    keys = data_keys(keyring(MASTER))
    (row,) = made(keys, 1)
    (unknown,) = made(data_keys(keyring(ANOTHER_MASTER)), 1, BOB)
    changed = fingerprints(keyring(MASTER, ANOTHER_MASTER))
    for rows, stored, lacks_master in (
        ([row], changed, False),
        ([row, junk(row)], changed, False),
        ([row, unknown], fingerprints(keys.keyring), False),
        ([row, unknown], changed, True),
    ):
        staged = TransactionKeys(keys)
        assert not staged.lacks_master
        staged.unwrap(rows, stored)
        assert staged.lacks_master == lacks_master
        assert staged.has_fresh_keys(ADA)


def test_separated_copy_unwraps_data_keys_of_its_old_masters_only_with_the_old_database_id() -> (
    None
):
    ring = keyring(MASTER)
    (row,) = made(data_keys(ring), 1)
    new_id, old_id = b"new database id.", ring.database_id
    ring.database_id = new_id
    with pytest.raises(TamperedError):
        unwrap_data_key(row, ring)
    ring.separation = SeparationState(old_id, 0, frozenset({MASTER}))
    key = unwrap_data_key(row, ring)
    assert unwrap_data_key(wrap_data_key(row, ring, MASTER, key), ring) == key
    ring.separation = None
    with pytest.raises(TamperedError):
        unwrap_data_key(row, ring)
    ring.database_id = old_id
    assert unwrap_data_key(row, ring) == key


# --- rows of data keys ---------------------------------------------------------------------------


def test_time_of_a_new_key_is_in_microseconds_and_not_before_the_given_time() -> None:
    staged = TransactionKeys(data_keys())
    began = time.time_ns() // 1000
    assert began <= staged.create_data_key(ADA).created_at <= time.time_ns() // 1000
    assert staged.create_data_key(ADA, not_before=began + 10**12).created_at == began + 10**12
    assert staged.create_data_key(ADA, not_before=5).created_at >= began


def test_data_key_whose_record_takes_more_than_64_kib_is_not_stored(keys: DatabaseKeys) -> None:
    """Another process would not read it."""
    (row,) = made(keys, 1)
    overhead = len(wrap_data_key(row, keys.keyring, MASTER, b"").wrapped)
    longest = bytes(65_536 - overhead)
    wrapped = wrap_data_key(row, keys.keyring, MASTER, longest)
    assert unwrap_data_key(wrapped, keys.keyring) == longest
    with pytest.raises(ConfigurationError, match=r"backend 1 makes keys .* more than 65536 bytes"):
        wrap_data_key(row, keys.keyring, MASTER, longest + b"x")


def test_data_key_that_is_wrapped_by_another_backend_is_malformed(keys: DatabaseKeys) -> None:
    (row,) = made(keys, 1)
    changed = row._replace(
        wrapped=build_header(2, MASTER) + row.wrapped[len(build_header(2, MASTER)) :]
    )
    with pytest.raises(TamperedError, match="not wrapped with AES-256-GCM") as rejected:
        unwrap_data_key(changed, keys.keyring)
    assert rejected.value.reason == Reason.MALFORMED


def test_data_key_that_its_backend_rejects_is_malformed(keys: DatabaseKeys) -> None:
    (row,) = made(keys, 1)
    staged = read(keys, [wrap_data_key(row, keys.keyring, MASTER, b"short")])
    with pytest.raises(TamperedError, match="its backend rejects the data key") as rejected:
        staged.key_of(ADA, build_header(row.backend_id, row.id))
    assert rejected.value.reason == Reason.MALFORMED


def test_record_of_a_backend_that_is_not_listed_has_a_reason() -> None:
    with pytest.raises(UnknownKeyError, match="encrypted by backend 9") as rejected:
        TransactionKeys(data_keys()).open(ADA, CONTEXT, build_header(9, 1) + bytes(40))
    assert rejected.value.reason == Reason.UNKNOWN_BACKEND


# --- the cache -----------------------------------------------------------------------------------


def published(database_keys: DatabaseKeys, *rows: DataKeyRow) -> None:
    """Put the keys of *rows* into the cache, all of them named by their owners."""
    staged = read(database_keys, rows)
    for row in rows:
        staged.choose_current(row.owner, [row.id])
    staged.publish()


def test_transaction_goes_on_with_a_key_that_the_cache_has_removed_until_it_forgets_it(
    keys: DatabaseKeys,
) -> None:
    (row,) = made(keys, 1)
    published(keys, row)
    staged, another = TransactionKeys(keys), TransactionKeys(keys)
    assert current_id(staged) == current_id(another) == row.id
    another.evict_from_cache(ADA)
    assert current_id(another) is None
    keys.by_owner.drop(ADA)
    assert current_id(staged) == row.id
    assert current_id(TransactionKeys(keys)) is None


def test_row_is_unwrapped_again_unless_it_and_the_keyring_equal_those_of_a_cached_key(
    keys: DatabaseKeys,
) -> None:
    (row,) = made(keys, 1)
    published(keys, row)
    record, known = build_header(1, row.id), TransactionKeys(keys).current(ADA)
    assert read(keys, [row]).key_of(ADA, record) is known
    for changed in ({"generation": 1}, {"created_at": 1}, {"wrapped": row.wrapped[:-1] + b"x"}):
        with pytest.raises(TamperedError):
            read(keys, [row._replace(**changed)]).key_of(ADA, record)
    keys.keyring = keyring(MASTER)
    assert read(keys, [row]).key_of(ADA, record) is not known
    keys.keyring = keyring(ANOTHER_MASTER)
    with pytest.raises(UnknownKeyError, match="no data master"):
        read(keys, [row]).key_of(ADA, record)


def test_record_under_a_key_of_another_owner_that_was_read_is_rejected_as_such(
    keys: DatabaseKeys,
) -> None:
    writer = TransactionKeys(keys)
    rows = [writer.create_data_key(ADA), writer.create_data_key(BOB)]
    stored = writer.seal(ADA, CONTEXT, b"plaintext")
    later = read(keys, rows)
    with pytest.raises(TamperedError, match="belongs to another owner"):
        later.open(BOB, CONTEXT, stored)
    later.publish()
    with pytest.raises(TamperedError, match="belongs to another owner"):
        TransactionKeys(keys).open(BOB, CONTEXT, stored)


# --- records of each kind ------------------------------------------------------------------------

Encrypt = Callable[[TransactionKeys, bytes], bytes]
Decrypt = Callable[[TransactionKeys, bytes], bytes]
KINDS: dict[str, tuple[Encrypt, Decrypt, bytes]] = {
    "content": (
        lambda staged, text: staged.seal(ADA, CONTEXT, text),
        lambda staged, stored: staged.open(ADA, CONTEXT, stored),
        b"text",
    ),
    "link of a witness": (
        lambda staged, text: staged.seal(ADA, CONTEXT, NO_FLAGS + text, has_flags=True),
        lambda staged, stored: staged.open(ADA, CONTEXT, stored, reject_flags),
        b"text",
    ),
    "plaintext with flags": (
        lambda staged, text: staged.seal(ADA, CONTEXT, text, has_flags=True),
        lambda staged, stored: staged.open_with_flags(ADA, CONTEXT, stored, keep_packed),
        b"\x00text",
    ),
}


@pytest.mark.parametrize(("encrypt", "decrypt", "plaintext"), KINDS.values(), ids=KINDS)
def test_record_of_each_kind_is_decrypted_and_both_are_counted(
    encrypt: Encrypt, decrypt: Decrypt, plaintext: bytes
) -> None:
    staged = TransactionKeys(data_keys())
    staged.create_data_key(ADA)
    assert decrypt(staged, encrypt(staged, plaintext)) == plaintext, "nothing is measured"
    staged.measured_call = operation = MeasuredCall("test")
    times = [perf_counter()]
    stored = encrypt(staged, plaintext)
    times.append(perf_counter())
    assert decrypt(staged, stored) == plaintext
    times.append(perf_counter())
    name = AesGcmBackend(bytes(32)).name
    (encryption, decryption) = operation.measurements
    assert encryption[0].amount_attributes == cipher_kind(name, "encrypt").amount_attributes
    assert decryption[0].amount_attributes == cipher_kind(name, "decrypt").amount_attributes
    assert (encryption[1], decryption[1]) == (4, 4)
    assert 0 < encryption[2] <= times[1] - times[0]
    assert 0 < decryption[2] <= times[2] - times[1]


def test_records_that_were_decrypted_elsewhere_are_counted_if_anything_is_measured(
    keys: DatabaseKeys,
) -> None:
    row = of_another_backend(keys)
    staged = read(keys, [row])
    key = staged.key_of(ADA, build_header(row.backend_id, row.id))
    staged.count_work("decrypt", key, 7, perf_counter())
    staged.measured_call = operation = MeasuredCall("test")
    before = perf_counter()
    staged.count_work("decrypt", key, 7, before - 100)
    ((kind, size, seconds),) = operation.measurements
    assert (kind.amount_attributes, size) == (cipher_kind("fernet", "decrypt").amount_attributes, 7)
    assert 100 <= seconds <= 100 + perf_counter() - before


def test_content_is_packed_as_the_service_says_and_a_witness_never_is() -> None:
    staged = TransactionKeys(data_keys(), packing=Packing("zlib"))
    staged.create_data_key(ADA)
    content = b"x" * 5000
    stored = staged.seal(ADA, CONTEXT, content)
    assert len(stored) < 200
    assert staged.open(ADA, CONTEXT, stored) == content
    witness = staged.seal(ADA, CONTEXT, NO_FLAGS + content, has_flags=True)
    assert len(witness) > 5000
    assert staged.open(ADA, CONTEXT, witness, reject_flags) == content
    with pytest.raises(DecryptionError) as rejected:
        staged.open(ADA, CONTEXT, stored, reject_flags)
    assert rejected.value.reason == Reason.UNKNOWN_FLAGS


@pytest.mark.parametrize("change", [{"owner_tag": BOB}, {"context": b"another"}], ids=str)
@pytest.mark.parametrize("handler", [unpack, reject_flags, keep_packed])
def test_record_of_another_owner_or_context_is_rejected(
    handler: Callable[[bytes], bytes], change: dict[str, Any]
) -> None:
    staged = TransactionKeys(data_keys())
    staged.create_data_key(ADA), staged.create_data_key(BOB)
    stored = staged.seal(ADA, CONTEXT, b"text")
    arguments = {"owner_tag": ADA, "context": CONTEXT, "record": stored} | change
    with pytest.raises(TamperedError):
        staged.open(**arguments, handler=handler)
