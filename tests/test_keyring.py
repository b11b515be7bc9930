"""The keyring and data keys: each key is unwrapped by the key it names, and by no other."""

import asyncio
import copy
import pickle
import warnings
from typing import Any

import pytest

from adk_secure_sessions import (
    AesGcmBackend,
    DecryptionError,
    FernetBackend,
    KeyProvider,
    KeyServiceError,
    NoOpBackend,
    PassphraseKey,
    PlaintextRefusedError,
    StaticKey,
    TamperedError,
    UnknownKeyError,
    WrongKeyError,
)
from adk_secure_sessions.formats.records import unpack
from adk_secure_sessions.keys.blind_index import BlindIndex
from adk_secure_sessions.keys.data_keys import (
    CipherFactory,
    DataKeyRow,
    DataKeys,
    StagedKeys,
    StaleKeyring,
)
from adk_secure_sessions.keys.keyring import (
    DATA,
    INDEX,
    Keyring,
    MasterKeyRow,
    new_master,
    open_keyring,
)

DATABASE = bytes(range(16))
ROOT, OTHER = StaticKey(bytes(range(32))), StaticKey(bytes(32))
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # NoOpBackend warns when it is made
    CLEAR = NoOpBackend().root_key
ADA, BOB = b"tag of ada......", b"tag of bob......"
CONTEXT = b"context"


class KeyService:
    """A provider that fails, or answers wrongly."""

    key_id = ROOT.key_id

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    async def wrap(self, key: bytes, associated_data: bytes) -> Any:
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer

    unwrap = wrap


async def made(*roots: KeyProvider) -> list[MasterKeyRow]:
    """Make an index master key, and a data master key for each of *roots*, the oldest first."""
    rows = [await new_master(INDEX, roots[0], DATABASE, 0)]
    return rows + [await new_master(DATA, root, DATABASE, age) for age, root in enumerate(roots)]


async def opened(
    rows: list[MasterKeyRow], *roots: KeyProvider, database_id: bytes = DATABASE
) -> Keyring:
    by_id = {root.key_id: root for root in roots}
    return await open_keyring(rows, by_id, roots[0].key_id, database_id)


# --- the keyring ---------------------------------------------------------------------------------


async def test_keyring_is_unwrapped_by_its_root_key() -> None:
    rows = await made(ROOT)
    keyring = await opened(rows, ROOT)
    assert keyring.current_id == rows[1].id
    keyring.master(rows[1].id)


async def test_key_service_is_called_for_all_master_keys_at_once() -> None:
    """A start waits as long as for one call, however many master keys there are."""

    class Patient(StaticKey):
        waiting = 0

        async def unwrap(self, wrapped: bytes, associated_data: bytes) -> bytes:
            self.waiting += 1
            while self.waiting < 3:
                await asyncio.sleep(0)
            return await super().unwrap(wrapped, associated_data)

    rows = await made(ROOT, ROOT)
    async with asyncio.timeout(10):
        await opened(rows, Patient(bytes(range(32))))


async def test_missing_data_master_key_is_unknown() -> None:
    keyring = await opened(await made(ROOT), ROOT)
    with pytest.raises(UnknownKeyError, match="no data master key 5"):
        keyring.master(5)


async def test_newest_master_key_of_the_writing_root_key_wraps_new_data_keys() -> None:
    rows = [*(await made(ROOT, OTHER, ROOT)), await new_master(DATA, OTHER, DATABASE, 9)]
    assert (await opened(rows, ROOT, OTHER)).current_id == rows[3].id
    assert (await opened(rows[::-1], ROOT, OTHER)).current_id == rows[3].id
    assert (await opened(rows, OTHER, ROOT)).current_id == rows[4].id


async def test_root_key_listed_first_makes_no_master_keys_of_its_own() -> None:
    rows = await made(ROOT, ROOT)
    assert (await opened(rows, OTHER, ROOT)).current_id == rows[2].id
    assert (await opened(rows, ROOT, OTHER)).current_id == rows[2].id


async def test_plaintext_master_key_wraps_no_data_key_of_another_writer() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        clear = NoOpBackend().root_key
    rows = await made(clear)
    assert (await opened(rows, ROOT, clear)).current_id is None
    assert (await opened(rows, clear, ROOT)).current_id == rows[1].id
    rows.append(await new_master(DATA, OTHER, DATABASE, 0))
    assert (await opened(rows, ROOT, clear, OTHER)).current_id == rows[2].id


async def test_root_key_that_is_not_listed_is_named() -> None:
    with pytest.raises(WrongKeyError, match=f"{ROOT.key_id}.*{OTHER.key_id}"):
        await opened(await made(ROOT), OTHER)


async def test_row_that_claims_another_root_key_is_rejected() -> None:
    rows = [row._replace(root_key_id=OTHER.key_id) for row in await made(ROOT)]
    with pytest.raises(WrongKeyError, match="does not unwrap master key"):
        await opened(rows, ROOT, OTHER)


@pytest.mark.parametrize(
    "change",
    [{"id": 7}, {"purpose": DATA}, {"created_at": 7}, {"wrapped": b""}, {"wrapped": b"\x01" * 61}],
    ids=str,
)
async def test_modified_row_is_rejected(change: dict[str, Any]) -> None:
    rows = await made(ROOT)
    with pytest.raises(WrongKeyError, match="does not unwrap master key"):
        await opened([rows[0]._replace(**change), rows[1]], ROOT)


async def test_wrapped_keys_of_two_rows_cannot_be_exchanged() -> None:
    index, data = await made(ROOT)
    exchanged = [
        index._replace(wrapped=data.wrapped),
        data._replace(wrapped=index.wrapped),
    ]
    with pytest.raises(WrongKeyError):
        await opened(exchanged, ROOT)


async def test_keyring_of_another_database_is_rejected() -> None:
    with pytest.raises(WrongKeyError):
        await opened(await made(ROOT), ROOT, database_id=bytes(16))


async def test_keyring_without_an_index_master_is_rejected() -> None:
    with pytest.raises(WrongKeyError, match="restore secure_keyring"):
        await opened((await made(ROOT))[1:], ROOT)


async def test_plaintext_keyring_is_rejected() -> None:
    rows = [row._replace(root_key_id="none", wrapped=b"\x00" * 33) for row in await made(ROOT)]
    with pytest.raises(PlaintextRefusedError, match="NoOpBackend"):
        await opened(rows, ROOT)


async def test_wrong_passphrase_is_a_wrong_key() -> None:
    rows = await made(PassphraseKey("one"))
    with pytest.raises(WrongKeyError, match="'passphrase' does not unwrap"):
        await opened(rows, PassphraseKey("another"))


@pytest.mark.parametrize("answer", [ValueError("secret 7Qx"), "text", None])
async def test_failing_key_service_is_reported_without_its_text(answer: Any) -> None:
    rows = await made(ROOT)
    with pytest.raises(KeyServiceError, match=ROOT.key_id) as info:
        await opened(rows, KeyService(answer))
    assert "7Qx" not in str(info.value)
    assert info.value.__context__ is None
    with pytest.raises(KeyServiceError):
        await new_master(DATA, KeyService(answer), DATABASE, 0)


async def test_retryable_error_of_a_key_service_stays_retryable() -> None:
    with pytest.raises(KeyServiceError) as info:
        await opened(await made(ROOT), KeyService(KeyServiceError("busy", retryable=True)))
    assert info.value.retryable


@pytest.mark.parametrize("key", [b"", bytes(16), bytes(33)])
async def test_key_service_that_returns_a_key_of_another_length_is_a_wrong_key(key: bytes) -> None:
    with pytest.raises(WrongKeyError):
        await opened(await made(ROOT), KeyService(key))


async def test_master_keys_are_random() -> None:
    rows = [row for _ in range(20) for row in await made(ROOT)]
    assert len({row.id for row in rows}) == len(rows)
    keys = [await ROOT.unwrap(row.wrapped, row.context(DATABASE)) for row in rows]
    assert len(set(keys)) == len(rows)
    assert {len(key) for key in keys} == {32}


# --- data keys -----------------------------------------------------------------------------------

AES, FERNET = AesGcmBackend(ROOT), FernetBackend(ROOT)


async def store(writer: int = 1, *listed: int, limit: int = 100) -> DataKeys:
    """Return the data keys of one process, under a new keyring."""
    keyring = await opened(await made(ROOT), ROOT)
    return on(keyring, writer, *listed, limit=limit)


def on(keyring: Keyring, writer: int, *listed: int, limit: int = 100) -> DataKeys:
    backends: dict[int, CipherFactory] = {1: AES, 2: FERNET}
    return DataKeys(keyring, {i: backends[i] for i in (writer, *listed)}, writer, limit)


def loaded(keys: DataKeys, *rows: DataKeyRow) -> StagedKeys:
    staged = StagedKeys(keys)
    staged.load(rows)
    for row in rows:
        staged.current(row.owner)  # raises what `load` rejected
    return staged


async def test_record_of_a_new_data_key_is_decrypted_after_a_restart() -> None:
    keys = await store()
    staged = StagedKeys(keys)
    row = staged.new(ADA)
    stored = staged.seal(ADA, CONTEXT, b"plaintext")
    later = loaded(on(keys.keyring, 1), row)
    assert later.open(ADA, CONTEXT, stored) == b"plaintext"


async def test_data_key_is_unknown_to_other_transactions_until_it_is_published() -> None:
    keys = await store()
    staged = StagedKeys(keys)
    staged.new(ADA)
    stored = staged.seal(ADA, CONTEXT, b"plaintext")
    with pytest.raises(UnknownKeyError):
        StagedKeys(keys).open(ADA, CONTEXT, stored)
    assert StagedKeys(keys).current(ADA) is None
    assert not keys.knows(ADA)
    staged.publish()
    assert StagedKeys(keys).open(ADA, CONTEXT, stored) == b"plaintext"
    assert keys.knows(ADA)


async def test_record_of_another_owner_is_rejected() -> None:
    staged = StagedKeys(await store())
    staged.new(ADA), staged.new(BOB)
    with pytest.raises(TamperedError, match="another owner"):
        staged.open(BOB, CONTEXT, staged.seal(ADA, CONTEXT, b""))


async def test_record_in_another_context_is_rejected() -> None:
    staged = StagedKeys(await store())
    staged.new(ADA)
    with pytest.raises(TamperedError):
        staged.open(ADA, b"another context", staged.seal(ADA, CONTEXT, b""))


async def test_highest_generation_encrypts() -> None:
    keys = await store()
    staged = StagedKeys(keys)
    rows = [staged.new(ADA) for _ in range(3)]
    assert [row.generation for row in rows] == [0, 1, 2]
    for order in (rows, rows[::-1]):
        current = loaded(keys, *order).current(ADA)
        assert current is not None
        assert current.id == rows[2].id


async def test_key_of_another_backend_is_not_usable_and_counts_as_a_generation() -> None:
    first = await store(1)
    row = StagedKeys(first).new(ADA)
    for listed in ((1,), ()):
        staged = loaded(on(first.keyring, 2, *listed), row)
        assert staged.current(ADA) is None
        assert staged.new(ADA).generation == 1


async def test_record_of_a_backend_that_is_not_listed_is_rejected_by_its_id() -> None:
    first = await store(1)
    writer = StagedKeys(first)
    row = writer.new(ADA)
    stored = writer.seal(ADA, CONTEXT, b"")
    with pytest.raises(UnknownKeyError, match=r"backend 1.*additional_backends"):
        loaded(on(first.keyring, 2), row).open(ADA, CONTEXT, stored)
    assert loaded(on(first.keyring, 2, 1), row).open(ADA, CONTEXT, stored) == b""


async def test_data_key_under_an_older_master_key_stays_usable() -> None:
    rows = await made(ROOT, ROOT)
    old = StagedKeys(on(await opened(rows[:2], ROOT), 1)).new(ADA)
    staged = loaded(on(await opened(rows, ROOT), 1), old)
    current = staged.current(ADA)
    assert current is not None
    assert current.id == old.id
    assert unpack(staged.new(BOB).wrapped)[1] == rows[2].id


async def test_data_key_under_a_plaintext_master_key_is_not_usable() -> None:
    rows = await made(ROOT, CLEAR)
    row = StagedKeys(on(await opened(rows, CLEAR, ROOT), 1)).new(ADA)
    assert unpack(row.wrapped)[1] == rows[2].id
    moved = loaded(on(await opened(rows, ROOT, CLEAR), 1), row)
    assert moved.current(ADA) is None
    assert moved.new(ADA).generation == 1


async def test_unknown_data_master_key_needs_the_keyring_again() -> None:
    rows = await made(ROOT, ROOT)
    row = StagedKeys(on(await opened(rows, ROOT), 1)).new(ADA)
    keys = on(await opened(rows[:2], ROOT), 1)
    with pytest.raises(StaleKeyring):
        StagedKeys(keys, keyring_is_complete=False).load([row])
    with pytest.raises(UnknownKeyError, match=f"no data master key {rows[2].id}"):
        loaded(keys, row)
    keys.keyring = await open_keyring(rows, {ROOT.key_id: ROOT}, "", DATABASE, keys.keyring)
    assert loaded(keys, row).current(ADA) is not None


async def test_keyring_that_is_read_again_unwraps_only_new_master_keys() -> None:
    rows = await made(ROOT, ROOT)
    known = await opened(rows[:2], ROOT)
    asked: list[bytes] = []

    class Counting(KeyService):
        async def unwrap(self, key: bytes, associated_data: bytes) -> bytes:
            asked.append(key)
            return await ROOT.unwrap(key, associated_data)

    roots = {ROOT.key_id: Counting(None)}
    again = await open_keyring(rows, roots, ROOT.key_id, DATABASE, known)
    assert asked == [rows[2].wrapped]
    assert again.current_id == rows[2].id
    assert again.index is known.index
    later = await open_keyring([rows[0], rows[2]], roots, ROOT.key_id, DATABASE, again)
    assert not later.holds(rows[1].id)
    assert len(asked) == 1


async def test_current_key_is_as_new_as_its_own_and_older_records_only() -> None:
    keys = await store()
    writer = StagedKeys(keys)
    rows, sealed = [], []
    for _ in range(3):
        rows.append(writer.new(ADA))
        sealed.append(writer.seal(ADA, CONTEXT, b""))
    staged = loaded(keys, *rows[:2])
    assert staged.is_as_new_as(ADA)
    assert staged.is_as_new_as(ADA, sealed[0], sealed[1])
    assert not staged.is_as_new_as(ADA, sealed[2])
    assert not staged.is_as_new_as(BOB)


async def test_current_key_is_not_as_new_as_a_newer_one_of_another_backend() -> None:
    first = await store(1)
    row = StagedKeys(first).new(ADA)
    other = loaded(on(first.keyring, 2, 1), row)
    newer = other.new(ADA)
    sealed = other.seal(ADA, CONTEXT, b"")
    staged = loaded(on(first.keyring, 1, 2), row, newer)
    assert staged.is_as_new_as(ADA)
    assert not staged.is_as_new_as(ADA, sealed)


async def test_forgotten_owner_has_no_cached_keys() -> None:
    keys = await store()
    staged = StagedKeys(keys)
    staged.new(ADA), staged.new(BOB)
    staged.publish()
    StagedKeys(keys).forget(ADA)
    assert not keys.knows(ADA)
    assert keys.knows(BOB)


async def test_data_key_of_another_database_is_rejected_naming_its_row() -> None:
    row = StagedKeys(await store()).new(ADA)
    with pytest.raises(DecryptionError, match=f"secure_data_keys row {row.id}"):
        loaded(await store(), row)


@pytest.mark.parametrize(
    "change",
    [{"owner": BOB}, {"id": 5}, {"generation": 1}, {"backend_id": 2}, {"created_at": 5}],
    ids=str,
)
async def test_data_key_in_a_modified_row_is_rejected(change: dict[str, Any]) -> None:
    keys = await store(1, 2)
    row = StagedKeys(keys).new(ADA)
    with pytest.raises(TamperedError, match="secure_data_keys row"):
        loaded(keys, row._replace(**change))


@pytest.mark.parametrize("limit", [1, 2])
async def test_evicted_data_key_is_unknown(limit: int) -> None:
    keys = await store(limit=limit)
    writer = StagedKeys(keys)
    rows = [writer.new(owner) for owner in (ADA, BOB, b"tag of eve......")]
    stored = writer.seal(ADA, CONTEXT, b"plaintext")
    loaded(keys, *rows).publish()
    with pytest.raises(UnknownKeyError):
        StagedKeys(keys).open(ADA, CONTEXT, stored)
    assert loaded(keys, rows[0]).open(ADA, CONTEXT, stored) == b"plaintext"


# --- no key is shown -----------------------------------------------------------------------------


@pytest.mark.parametrize("attempt", [pickle.dumps, copy.copy, copy.deepcopy])
async def test_unwrapped_keys_cannot_be_pickled_or_copied(attempt: Any) -> None:
    keys = await store()
    staged = StagedKeys(keys)
    staged.new(ADA)
    for holder in (keys, keys.keyring, keys.keyring.index, staged.current(ADA)):
        with pytest.raises(TypeError, match="holds key material"):
            attempt(holder)


async def test_repr_of_unwrapped_keys_shows_nothing() -> None:
    keys = await store()
    assert repr(keys) == "<DataKeys>"
    assert repr(keys.keyring) == "<Keyring>"
    assert repr(BlindIndex(bytes(32))) == "<BlindIndex>"
