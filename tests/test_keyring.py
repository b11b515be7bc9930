"""The keyring and data keys: each key is unwrapped by the key it names, and by no other."""

import asyncio
import math
import time
import traceback
import warnings
from collections.abc import Generator, Iterable
from types import coroutine
from typing import Any
from unittest import mock

import pytest

from adk_secure_sessions import (
    AesGcmBackend,
    EncryptionBackend,
    FernetBackend,
    KeyProvider,
    KeyServiceError,
    NoOpBackend,
    SecureSessionError,
    StaticKey,
    UnknownKeyError,
    WrongKeyError,
)
from adk_secure_sessions.caches import FifoCache
from adk_secure_sessions.formats.records import Cipher, build_header, parse_header
from adk_secure_sessions.keys.data_keys import DatabaseKeys, DataKeyRow, TransactionKeys
from adk_secure_sessions.keys.keyring import (
    DATA_MASTER,
    INDEX_MASTER,
    RETRY_PAUSE,
    Keyring,
    MasterFingerprint,
    MasterKeyRow,
    UnwrappedMaster,
    check_row_count,
    new_master,
    open_keyring,
    rewrap_master_key,
    unwrap_master_key,
    wrap_master_key,
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
    rows = [await row_of(INDEX_MASTER, roots[0], 0)]
    return rows + [await row_of(DATA_MASTER, root, age) for age, root in enumerate(roots)]


async def row_of(purpose: str, root: KeyProvider, created_at: int) -> MasterKeyRow:
    return (await new_master(purpose, root, DATABASE, created_at))[0]


async def opened(
    rows: list[MasterKeyRow], *roots: KeyProvider, database_id: bytes = DATABASE
) -> Keyring:
    by_id = {root.key_id: root for root in roots}
    return await open_keyring(rows, by_id, roots[0].key_id, database_id)


def row_like(row: MasterKeyRow, **columns: Any) -> MasterKeyRow:
    return row._replace(**columns)


async def renewed(rows: list[MasterKeyRow], known: Keyring, *roots: KeyProvider) -> Keyring:
    """Read the keyring again, as a running service does."""
    by_id = {root.key_id: root for root in roots}
    return await open_keyring(rows, by_id, roots[0].key_id, DATABASE, known, is_service=True)


# --- the keyring ---------------------------------------------------------------------------------


class Counted(StaticKey):
    """Records the calls: all of them, and the most that waited at one time."""

    def __init__(self, key: bytes = bytes(range(32))) -> None:
        super().__init__(key)
        self.unwrapped: list[bytes] = []
        self.waiting = self.most = 0

    async def unwrap(self, wrapped: bytes, associated_data: bytes) -> bytes:
        self.unwrapped.append(wrapped)
        self.waiting += 1
        self.most = max(self.most, self.waiting)
        for _ in range(10):
            await asyncio.sleep(0)
        self.waiting -= 1
        return await super().unwrap(wrapped, associated_data)


async def test_key_service_unwraps_the_index_master_first_then_eight_at_once() -> None:
    rows = await made(*[ROOT] * 20)
    root = Counted()
    await opened(rows[::-1], root)
    assert root.unwrapped[0] == rows[0].wrapped
    assert (len(root.unwrapped), root.most) == (21, 8)


async def test_keyring_of_too_many_rows_is_rejected_without_a_call() -> None:
    rows, root = await made(ROOT, ROOT), Counted()
    junk = [row_like(rows[1], id=number, wrapped=b"junk") for number in range(62)]
    with pytest.raises(WrongKeyError, match="more than 64 rows"):
        await opened([*rows, *junk], root)
    assert root.unwrapped == []
    known = await opened(rows, ROOT)
    with pytest.raises(WrongKeyError, match="more than 64 rows"):
        await open_keyring([*rows, *junk], {ROOT.key_id: root}, ROOT.key_id, DATABASE, known)
    assert root.unwrapped == []


async def test_running_service_uses_only_known_rows_of_a_keyring_of_too_many(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rows, root = await made(ROOT, ROOT), Counted()
    known = await opened(rows, ROOT)
    junk = [row_like(rows[1], id=number, wrapped=b"junk") for number in range(62)]
    for stored in ([*junk, *rows], [*junk, *rows[:2], row_like(rows[2], created_at=9)]):
        again = await renewed(stored, known, root)
        assert again.wrapping_master_id == next(row.id for row in stored[::-1] if row in rows)
        assert again.row_count == 65
        assert not again.is_current(fingerprints_of(stored))
        for _ in range(3):
            again = await renewed(stored, again, root)
    assert len(caplog.records) == 2, "once for each call with another keyring"
    with pytest.raises(WrongKeyError, match="more than 64 rows"):
        await renewed([*junk, rows[0], row_like(rows[1], created_at=9), *junk], known, root)
    assert root.unwrapped == []
    again = await renewed(rows, again, root)
    assert (again.row_count, again.wrapping_master_id) == (3, rows[2].id)


async def test_running_service_takes_up_the_last_of_64_rows(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rows = await made(*[ROOT] * 63)
    known = await opened(rows[:63], ROOT)
    again = await renewed(rows, known, ROOT)
    assert again.wrapping_master_id == rows[63].id
    assert again.row_count == 64
    assert again.is_current(fingerprints_of(rows))
    assert caplog.records == []
    assert (await opened(rows, ROOT)).wrapping_master_id == rows[63].id
    check_row_count(64)
    await renewed([*rows, row_like(rows[1], id=5)], again, ROOT)
    assert len(caplog.records) == 1, "there are 65 now"


async def test_running_service_unwraps_one_new_row_at_a_time() -> None:
    """So that inserted rows do not cause many calls of the key service at once."""
    rows, root = await made(*[ROOT] * 6), Counted()
    await renewed(rows, await opened(rows[:2], ROOT), root)
    assert (len(root.unwrapped), root.most) == (5, 1)


async def test_start_with_a_wrong_root_key_calls_the_key_service_once() -> None:
    root = Counted(bytes(32))
    rows = [row._replace(root_key_id=root.key_id) for row in await made(*[ROOT] * 20)]
    with pytest.raises(WrongKeyError):
        await opened(rows, root)
    assert root.unwrapped == [rows[0].wrapped]


async def test_newest_master_key_of_the_writing_root_key_wraps_new_data_keys() -> None:
    rows = [*(await made(ROOT, OTHER, ROOT)), await row_of(DATA_MASTER, OTHER, 9)]
    assert (await opened(rows, ROOT, OTHER)).wrapping_master_id == rows[3].id
    assert (await opened(rows[::-1], ROOT, OTHER)).wrapping_master_id == rows[3].id
    assert (await opened(rows, OTHER, ROOT)).wrapping_master_id == rows[4].id


async def test_root_key_listed_first_makes_no_master_keys_of_its_own() -> None:
    rows = await made(ROOT, ROOT)
    assert (await opened(rows, OTHER, ROOT)).wrapping_master_id == rows[2].id
    assert (await opened(rows, ROOT, OTHER)).wrapping_master_id == rows[2].id


async def test_plaintext_master_key_wraps_no_data_key_of_another_writer() -> None:
    rows = await made(CLEAR)
    assert (await opened(rows, ROOT, CLEAR)).wrapping_master_id is None
    assert (await opened(rows, CLEAR, ROOT)).wrapping_master_id == rows[1].id
    rows.append(await row_of(DATA_MASTER, OTHER, 0))
    assert (await opened(rows, ROOT, CLEAR, OTHER)).wrapping_master_id == rows[2].id


async def test_root_key_that_is_not_listed_is_named() -> None:
    third = StaticKey(bytes([3]) * 32)
    given = ", ".join(map(repr, sorted((OTHER.key_id, third.key_id))))
    with pytest.raises(WrongKeyError, match=f"{ROOT.key_id}'; this service was given {given}: "):
        await opened(await made(ROOT), OTHER, third)


async def test_row_that_claims_another_root_key_is_rejected() -> None:
    rows = [row._replace(root_key_id=OTHER.key_id) for row in await made(ROOT)]
    with pytest.raises(WrongKeyError, match="does not unwrap master key"):
        await opened(rows, ROOT, OTHER)


class Named(StaticKey):
    """A provider whose root key has this name."""

    def __init__(self, key_id: str) -> None:
        super().__init__(bytes(range(32)))
        self.key_id = key_id


@pytest.mark.parametrize("key_id", ["k", "k" * 255])
async def test_root_key_may_have_the_shortest_and_the_longest_name(key_id: str) -> None:
    rows = await made(Named(key_id))
    assert (await opened(rows, Named(key_id))).wrapping_master_id == rows[1].id


FAULTS = {
    "id": "its id is not an integer of 63 bits",
    "purpose": "its purpose is neither 'index' nor 'data'",
    "root_key_id": "its root_key_id is not a text of 1 to 255 characters",
    "created_at": "its created_at is not an integer of 63 bits",
    "wrapped": "its wrapped key is not bytes",
}
MALFORMED: list[dict[str, Any]] = [
    {"id": -1},
    {"id": 2**63},
    {"id": "1"},
    {"id": True},
    {"purpose": "index "},
    {"purpose": b"data"},
    {"purpose": None},
    {"root_key_id": ""},
    {"root_key_id": "x" * 256},
    {"root_key_id": b"none"},
    {"created_at": -1},
    {"created_at": 2**63},
    {"created_at": 0.0},
    {"wrapped": "text"},
]


@pytest.mark.parametrize("change", MALFORMED, ids=str)
async def test_malformed_row_is_rejected_by_its_id_without_a_call(change: dict[str, Any]) -> None:
    rows, root = await made(ROOT), Counted()
    junk = row_like(rows[1], **({"id": 5} | change))
    (column,) = change
    message = f"secure_keyring row {junk.id!r}: {FAULTS[column]}, so the row was tampered with: "
    with pytest.raises(WrongKeyError, match=message):
        await opened([*rows, junk], root)
    assert root.unwrapped == []
    with pytest.raises(WrongKeyError, match=message):
        await unwrap_master_key(junk, {ROOT.key_id: root}, DATABASE)
    assert root.unwrapped == []


async def test_two_rows_with_one_id_are_rejected() -> None:
    rows = await made(ROOT)
    for junk in (rows[1], row_like(rows[1], wrapped=b"junk")):
        with pytest.raises(WrongKeyError, match=f"{rows[1].id}: another row has the same id"):
            await opened([*rows, junk], ROOT)


async def test_two_index_masters_are_rejected_naming_both() -> None:
    rows = [*(await made(ROOT)), await row_of(INDEX_MASTER, ROOT, 0)]
    with pytest.raises(WrongKeyError, match=f"{rows[0].id}.*{rows[2].id}.*both index masters"):
        await opened(rows, ROOT)
    rows.append(await row_of(INDEX_MASTER, ROOT, 0))
    message = f"row {rows[0].id} and row {rows[2].id}, {rows[3].id} are both index masters"
    with pytest.raises(WrongKeyError, match=message):
        await opened(rows, ROOT)


async def test_keyring_without_an_index_master_is_rejected() -> None:
    with pytest.raises(WrongKeyError, match="holds no index master: rows of secure_keyring were"):
        await opened((await made(ROOT))[1:], ROOT)


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (ValueError("secret 7Qx"), "ValueError"),
        ("text", "something that is not bytes"),
        (None, "something that is not bytes"),
    ],
)
async def test_failing_key_service_is_reported_without_its_text(answer: Any, fault: str) -> None:
    rows = await made(ROOT)
    message = f"the provider of root key {ROOT.key_id!r} failed: {fault}$"
    with pytest.raises(KeyServiceError, match=message) as info:
        await opened(rows, KeyService(answer))
    assert "7Qx" not in str(info.value)
    with pytest.raises(KeyServiceError, match=message):
        await new_master(DATA_MASTER, KeyService(answer), DATABASE, 0)


async def test_error_of_a_provider_whose_calls_are_no_coroutines_is_reported_without_text() -> None:
    class Decorated(KeyService):
        def wrap(self, key: bytes, associated_data: bytes) -> Any:
            raise ValueError(key)

        unwrap = wrap

    rows = await made(ROOT)
    message = f"the provider of root key {ROOT.key_id!r} failed: ValueError$"
    with pytest.raises(KeyServiceError, match=message):
        await opened(rows, Decorated(None))
    with pytest.raises(KeyServiceError, match=message):
        await new_master(DATA_MASTER, Decorated(None), DATABASE, 0)


def test_cancelled_call_of_a_provider_shows_no_frame_of_the_provider() -> None:
    """Its local variables contain the master key."""

    @coroutine
    def pause() -> Generator[None]:
        yield

    class Waiting(KeyService):
        async def wrap(self, key: bytes, associated_data: bytes) -> Any:
            await pause()

    call = new_master(DATA_MASTER, Waiting(None), DATABASE, 0)
    call.send(None)
    with pytest.raises(asyncio.CancelledError) as cancelled:
        call.throw(asyncio.CancelledError())
    frames = [frame.name for frame in traceback.extract_tb(cancelled.value.__traceback__)]
    assert frames[-1] == "_call_provider"
    assert "wrap" not in frames


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


async def test_wrapped_key_of_more_than_64_kib_is_not_stored() -> None:
    """Another process would not read it."""
    row, _ = await new_master(DATA_MASTER, KeyService(bytes(65_536)), DATABASE, 0)
    assert row.wrapped == bytes(65_536)
    message = f"root key {ROOT.key_id!r} wraps a master key in more than 65536 bytes"
    with pytest.raises(KeyServiceError, match=message):
        await new_master(DATA_MASTER, KeyService(bytes(65_537)), DATABASE, 0)


# --- wrapping a master key again -----------------------------------------------------------------


async def test_master_key_is_wrapped_again_by_its_own_root_key() -> None:
    row, key = await new_master(DATA_MASTER, ROOT, DATABASE, 7)
    again = await rewrap_master_key(row, {ROOT.key_id: ROOT}, DATABASE)
    assert again.wrapped != row.wrapped
    assert again._replace(wrapped=b"") == row._replace(wrapped=b"")
    unwrapped = await unwrap_master_key(again, {ROOT.key_id: ROOT}, DATABASE)
    assert unwrapped.digest() == key.digest()


async def test_master_key_is_wrapped_by_another_root_key_for_another_database() -> None:
    row, key = await new_master(DATA_MASTER, ROOT, DATABASE, 7)
    again = await rewrap_master_key(
        row, {ROOT.key_id: ROOT}, DATABASE, new_root=OTHER, new_database_id=bytes(16)
    )
    assert again._replace(wrapped=b"") == row._replace(wrapped=b"", root_key_id=OTHER.key_id)
    unwrapped = await unwrap_master_key(again, {OTHER.key_id: OTHER}, bytes(16))
    assert unwrapped.digest() == key.digest()
    with pytest.raises(WrongKeyError):
        await unwrap_master_key(again, {OTHER.key_id: OTHER}, DATABASE)


async def test_root_key_that_unwraps_another_key_than_it_wraps_is_rejected() -> None:
    row, _ = await new_master(DATA_MASTER, ROOT, DATABASE, 7)
    wrong = KeyService(bytes(32))
    wrong.key_id = "wrong"
    with pytest.raises(SecureSessionError, match="root key 'wrong' does not unwrap what it wraps"):
        await rewrap_master_key(row, {ROOT.key_id: ROOT}, DATABASE, new_root=wrong)


# --- data keys -----------------------------------------------------------------------------------

AES, FERNET = AesGcmBackend(ROOT), FernetBackend(ROOT)


async def store(writer: int = 1, *listed: int, limit: int = 100) -> DatabaseKeys:
    """Return the data keys of one process, under a new keyring."""
    keyring = await opened(await made(ROOT), ROOT)
    return on(keyring, writer, *listed, limit=limit)


def on(keyring: Keyring, writer: int, *listed: int, limit: int = 100) -> DatabaseKeys:
    backends: dict[int, EncryptionBackend] = {1: AES, 2: FERNET}
    return DatabaseKeys(
        keyring, {i: backends[i] for i in (writer, *listed)}, backends[writer], FifoCache(limit)
    )


def loaded(database_keys: DatabaseKeys, *rows: DataKeyRow) -> TransactionKeys:
    """Return the keys of a transaction that has read *rows*, all of them named by their owners."""
    staged = TransactionKeys(database_keys)
    staged.unwrap(rows, fingerprints_of(database_keys.keyring.rows.values()))
    for owner in {row.owner for row in rows}:
        staged.choose_current(owner, [row.id for row in rows])
    return staged


def fingerprints_of(rows: Iterable[MasterKeyRow]) -> list[MasterFingerprint]:
    return [MasterFingerprint(row.id, row.created_at, row.wrapped) for row in rows]


def cipher_of(database_keys: DatabaseKeys, row: DataKeyRow) -> Cipher:
    """Read *row*, and return the cipher for a record that names it."""
    return loaded(database_keys, row).key_of(row.owner, build_header(row.backend_id, row.id)).cipher


async def test_key_of_another_backend_is_not_usable_and_counts_as_a_generation() -> None:
    first = await store(1)
    row = TransactionKeys(first).create_data_key(ADA)
    for listed in ((1,), ()):
        staged = loaded(on(first.keyring, 2, *listed), row)
        assert staged.current(ADA) is None
        assert staged.create_data_key(ADA).generation == 1


async def test_data_key_under_a_plaintext_master_key_is_not_usable() -> None:
    rows = await made(ROOT, CLEAR)
    row = TransactionKeys(on(await opened(rows, CLEAR, ROOT), 1)).create_data_key(ADA)
    assert parse_header(row.wrapped)[1] == rows[2].id
    moved = loaded(on(await opened(rows, ROOT, CLEAR), 1), row)
    assert moved.current(ADA) is None
    assert moved.create_data_key(ADA).generation == 1


# --- the keyring of a running service ------------------------------------------------------------


async def test_keyring_knows_the_rows_that_it_was_read_from() -> None:
    rows = await made(ROOT, OTHER)
    keyring = await opened(rows, ROOT, OTHER)
    assert keyring.rows == {row.id: row for row in rows}
    assert keyring.row_count == 3
    assert keyring.is_current(fingerprints_of(rows))
    assert keyring.is_current(fingerprints_of(reversed(rows)))
    assert not keyring.is_current(fingerprints_of(rows[1:]))
    assert not keyring.is_current(fingerprints_of([*rows[:2], rows[1]]))
    for change in ({"id": 5}, {"created_at": 5}, {"wrapped": b""}):
        assert not keyring.is_current(
            fingerprints_of([rows[0], row_like(rows[1], **change), rows[2]])
        )


JUNK: list[dict[str, Any]] = [
    {"wrapped": b"\x01" + bytes(60)},
    {"root_key_id": "another"},
    {"root_key_id": "none"},
    {"created_at": 7},
    {"purpose": INDEX_MASTER},
    {"id": 5, "purpose": INDEX_MASTER},
    {"id": 5, "created_at": 2**62},
    {"id": 5, "purpose": "other"},
    {"id": "junk"},
    {"wrapped": "text"},
]


@pytest.mark.parametrize("change", JUNK, ids=str)
async def test_running_service_logs_a_junk_row_and_goes_on(
    change: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    rows = await made(ROOT, ROOT)
    known = await opened(rows, ROOT)
    junk = row_like(rows[1], **change)
    stored = [row for row in rows if row.id != junk.id] + [junk]
    root = Counted()
    again = await renewed(stored, known, root)
    assert again.index_master is known.index_master
    assert again.wrapping_master_id == rows[2].id
    assert (rows[1].id in again.data_masters) == (junk.id != rows[1].id)
    assert again.row_count == len(stored)
    assert again.is_current(fingerprints_of(stored))
    assert junk not in again.rows.values()
    TransactionKeys(on(again, 1)).create_data_key(ADA)
    (record,) = caplog.records
    assert str(junk.id) in record.getMessage()
    assert record.levelname == "ERROR"
    called = len(root.unwrapped)
    assert called <= 1
    # The same bytes are neither tried nor logged again; other bytes are.
    for _ in range(3):
        again = await renewed(stored, again, root)
    assert again.is_current(fingerprints_of(stored))
    assert (len(root.unwrapped), len(caplog.records)) == (called, 1)
    with later(RETRY_PAUSE):
        for number in range(3):
            stored[-1] = row_like(junk, wrapped=b"\x01 other junk %d" % number)
            again = await renewed(stored, again, root)
            assert number or len(caplog.records) == 2
            assert len(root.unwrapped) <= called + 1  # the key service is called once in a pause


async def test_running_service_uses_no_data_key_under_a_changed_master() -> None:
    rows = await made(ROOT, ROOT)
    row = TransactionKeys(on(await opened(rows[:2], ROOT), 1)).create_data_key(ADA)
    known = await opened(rows, ROOT)
    assert loaded(on(known, 1), row).current(ADA) is not None
    changed = [rows[0], row_like(rows[1], created_at=5), rows[2]]
    again = await renewed(changed, known, ROOT)
    with pytest.raises(UnknownKeyError, match=f"no data master {rows[1].id}"):
        cipher_of(on(again, 1), row)
    assert loaded(on(again, 1), row).current(ADA) is None


async def test_running_service_without_a_data_master_that_is_left_raises() -> None:
    """The error names the reason: advice to restore old rows could make all data unreadable."""
    rows = await made(ROOT)
    known = await opened(rows, ROOT)
    with pytest.raises(WrongKeyError, match="no data master: rows of secure_keyring were removed"):
        await renewed(rows[:1], known, ROOT)
    with pytest.raises(WrongKeyError, match=f"does not unwrap master key {rows[1].id}"):
        await renewed([rows[0], row_like(rows[1], created_at=5)], known, ROOT)
    by_id = {ROOT.key_id: ROOT}
    moved = [await rewrap_master_key(row, by_id, DATABASE, new_root=OTHER) for row in rows]
    with pytest.raises(WrongKeyError, match=f"is wrapped by root key '{OTHER.key_id}'"):
        await renewed(moved, known, ROOT)
    down = KeyService(KeyServiceError("down", retryable=True))
    failing = [row_like(row, root_key_id=down.key_id, wrapped=b"other") for row in rows[1:]]
    with pytest.raises(KeyServiceError):  # not the junk row, which an attacker may have inserted
        await renewed([rows[0], row_like(rows[1], id=-5), *failing], known, down)


async def test_running_service_takes_up_rows_under_a_new_root_key() -> None:
    rows = await made(ROOT, ROOT)
    known = await opened(rows, ROOT, OTHER)
    roots = {ROOT.key_id: ROOT}
    moved = [await rewrap_master_key(row, roots, DATABASE, new_root=OTHER) for row in rows]
    again = await renewed(moved, known, ROOT, OTHER)
    assert again.is_current(fingerprints_of(moved))
    assert again.wrapping_master_id == rows[2].id
    assert again.rows[rows[0].id].root_key_id == OTHER.key_id
    assert again.index_master is known.index_master


async def test_running_service_rejects_another_index_master(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One that the same root key has wrapped, for example from a test database."""
    rows = await made(ROOT)
    known = await opened(rows, ROOT)
    other = await row_of(INDEX_MASTER, ROOT, 0)
    for index in (other, other._replace(id=rows[0].id)):
        again = await renewed([index, rows[1]], known, ROOT)
        assert again.index_master is known.index_master
        assert index.id not in again.rows
        assert again.is_current(fingerprints_of([index, rows[1]]))
    fault = "it holds another key than the one that this service has read"
    assert f"secure_keyring row {other.id}: {fault}, so the row" in caplog.text
    assert "does not unwrap" in caplog.text


async def test_inserted_row_with_the_id_of_a_known_row_does_not_replace_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rows = await made(ROOT, ROOT)
    known = await opened(rows, ROOT)
    for row in rows:
        for junk in (row_like(row, wrapped=b"\x00 junk"), row):
            again = known
            caplog.clear()
            for _ in range(3):
                again = await renewed([junk, *rows], again, ROOT)
                assert again.rows == known.rows
                assert again.row_count == 4
            assert len(caplog.records) == 1


# --- rows whose key service fails ----------------------------------------------------------------


class Failing(Counted):
    """A key service that fails for some wrapped keys."""

    def __init__(self, *fails: bytes, retryable: bool = False) -> None:
        super().__init__()
        self.fails = set(fails)
        self._retryable = retryable

    async def unwrap(self, wrapped: bytes, associated_data: bytes) -> bytes:
        if wrapped in self.fails:
            self.unwrapped.append(wrapped)
            raise KeyServiceError("busy", retryable=self._retryable)
        return await super().unwrap(wrapped, associated_data)


def later(seconds: float) -> Any:
    """In the block, the time is this many seconds later than now."""
    return mock.patch("time.monotonic", return_value=time.monotonic() + seconds)


def waits(keyring: Keyring) -> bool:
    """Whether the keyring has rows whose key service failed."""
    return not all(map(math.isinf, keyring.rejected_or_pending.values()))


@pytest.mark.parametrize("retryable", [False, True])
async def test_start_names_the_row_whose_key_service_fails(retryable: bool) -> None:
    rows = await made(ROOT)
    for row in rows:
        with pytest.raises(KeyServiceError, match=f"secure_keyring row {row.id}.*busy") as info:
            await opened(rows, Failing(row.wrapped, retryable=retryable))
        assert info.value.retryable == retryable


async def test_command_raises_the_error_of_a_key_service_later_too() -> None:
    rows = await made(ROOT, ROOT)
    known = await opened(rows[:2], ROOT)
    roots = {ROOT.key_id: Failing(rows[2].wrapped)}
    with pytest.raises(KeyServiceError, match=f"row {rows[2].id}.*busy"):
        await open_keyring(rows, roots, ROOT.key_id, DATABASE, known)


async def test_running_service_goes_on_without_a_row_whose_key_service_fails(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rows = await made(ROOT, ROOT)
    row = TransactionKeys(on(await opened(rows, ROOT), 1)).create_data_key(ADA)
    known = await opened(rows[:2], ROOT)
    root = Failing(rows[2].wrapped)
    again = await renewed(rows, known, root)
    assert (waits(again), again.wrapping_master_id) == (True, rows[1].id)
    assert again.is_current(fingerprints_of(rows))
    assert again.row_count == 3
    with pytest.raises(UnknownKeyError, match=f"{rows[2].id} is not unwrapped yet") as of_key:
        cipher_of(on(again, 1), row)
    assert TransactionKeys(on(again, 1)).current(ADA) is None
    with pytest.raises(KeyServiceError, match=f"{rows[2].id} is not unwrapped yet") as of_service:
        await renewed([rows[0], rows[2]], again, root)  # `retire` has deleted the old master
    assert of_key.value.retryable
    assert of_service.value.retryable
    (record,) = caplog.records
    assert f"row {rows[2].id}" in record.getMessage()
    # Before the pause is over, the row is not tried; afterwards it is, and logged only once.
    with later(RETRY_PAUSE - 1):
        assert again.is_current(fingerprints_of(rows))
        again = await renewed(rows, again, root)
    assert (waits(again), len(root.unwrapped)) == (True, 1)
    with later(RETRY_PAUSE):
        assert not again.is_current(fingerprints_of(rows))
        again = await renewed(rows, again, root)
        assert again.is_current(fingerprints_of(rows))
    assert (waits(again), len(root.unwrapped), len(caplog.records)) == (True, 2, 1)
    root.fails.clear()
    with later(2 * RETRY_PAUSE):
        again = await renewed(rows, again, root)
    assert (waits(again), again.wrapping_master_id) == (False, rows[2].id)
    assert again.retry_at == math.inf
    assert loaded(on(again, 1), row).open(ADA, CONTEXT, sealed_by(on(again, 1), row)) == b"text"


def sealed_by(database_keys: DatabaseKeys, row: DataKeyRow) -> bytes:
    staged = loaded(database_keys, row)
    staged.choose_current(ADA, [row.id])
    return staged.seal(ADA, CONTEXT, b"text")


async def test_row_beside_a_rejected_row_is_due_ten_seconds_after_its_failure() -> None:
    rows = await made(ROOT, ROOT)
    known = await opened(rows[:2], ROOT)
    stored = [*rows, row_like(rows[2], id=5, wrapped=b"junk")]
    with later(0):
        again = await renewed(stored, known, Failing(rows[2].wrapped))
        retry_at = time.monotonic() + 10
    assert again.rejected_or_pending == {rows[2]: retry_at, stored[3]: math.inf}
    for now, is_due in ((retry_at - 0.1, False), (retry_at, True)):
        with mock.patch("time.monotonic", return_value=now):
            assert again.is_current(fingerprints_of(stored)) != is_due


async def test_row_that_failed_before_is_tried_after_the_others() -> None:
    """An attacker's row must not keep a service from a new master for ever."""
    rows = await made(ROOT, ROOT, ROOT)
    known = await opened(rows[:2], ROOT)
    root = Failing(rows[2].wrapped, retryable=True)
    again = await renewed(rows[:3], known, root)
    with later(RETRY_PAUSE):
        again = await renewed(rows, again, root)
    assert root.unwrapped == [rows[2].wrapped, rows[3].wrapped, rows[2].wrapped]
    assert again.wrapping_master_id == rows[3].id


async def test_service_that_cannot_be_reached_is_called_once_for_all_rows() -> None:
    rows = await made(*[ROOT] * 9)
    known = await opened(rows[:2], ROOT)
    root = Failing(*[row.wrapped for row in rows], retryable=True)
    again = await renewed(rows, known, root)
    assert (len(root.unwrapped), again.wrapping_master_id) == (1, rows[1].id)


async def test_known_master_whose_row_changed_is_not_used_while_its_key_service_fails() -> None:
    rows = await made(ROOT, ROOT)
    row = TransactionKeys(on(await opened(rows[:2], ROOT), 1)).create_data_key(ADA)
    known = await opened(rows, ROOT)
    changed = [rows[0], row_like(rows[1], wrapped=b"\x01changed"), rows[2]]
    again = await renewed(changed, known, Failing(b"\x01changed"))
    assert waits(again)
    assert rows[1].id not in again.data_masters
    with pytest.raises(UnknownKeyError, match="not unwrapped yet"):
        cipher_of(on(again, 1), row)
    only = await opened(rows[:2], ROOT)
    with pytest.raises(KeyServiceError, match=f"row {rows[1].id}.*busy"):
        await renewed(changed[:2], only, Failing(b"\x01changed"))


@pytest.mark.parametrize("fails_first", [False, True])
async def test_row_that_holds_another_key_than_before_is_rejected(
    fails_first: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if its key service fails at first, so that the known key was not used for a while."""
    rows = await made(ROOT, ROOT)
    known = await opened(rows, ROOT)
    other = UnwrappedMaster(bytes(32))
    changed = [rows[0], await wrap_master_key(rows[1], ROOT, DATABASE, other), rows[2]]
    if fails_first:
        known = await renewed(changed, known, Failing(changed[1].wrapped))
    with later(RETRY_PAUSE):
        again = await renewed(changed, known, ROOT)
    assert rows[1].id not in again.data_masters
    fault = "it holds another key than the one that this service has read"
    assert f"secure_keyring row {rows[1].id}: {fault}, so the row" in caplog.text
    with later(2 * RETRY_PAUSE):
        back = await renewed(rows, again, ROOT)
    assert rows[1].id in back.data_masters


async def test_current_key_is_as_new_as_its_own_and_older_records_only() -> None:
    keys = await store()
    writer = TransactionKeys(keys)
    rows, sealed = [], []
    for _ in range(3):
        rows.append(writer.create_data_key(ADA))
        sealed.append(writer.seal(ADA, CONTEXT, b""))
    staged = loaded(keys, *rows[:2])
    assert staged.current_is_as_new_as(ADA)
    assert staged.current_is_as_new_as(ADA, sealed[0], sealed[1])
    assert not staged.current_is_as_new_as(ADA, sealed[2])
    assert not staged.current_is_as_new_as(BOB)


async def test_current_key_is_not_as_new_as_a_newer_one_of_another_backend() -> None:
    first = await store(1)
    row = TransactionKeys(first).create_data_key(ADA)
    other = loaded(on(first.keyring, 2, 1), row)
    newer = other.create_data_key(ADA)
    sealed = other.seal(ADA, CONTEXT, b"")
    staged = loaded(on(first.keyring, 1, 2), row, newer)
    assert staged.current_is_as_new_as(ADA)
    assert not staged.current_is_as_new_as(ADA, sealed)
