"""Compressed and padded records: what their lengths tell, bombs, and flags that do not fit."""

import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from adk_secure_sessions import (
    AesGcmBackend,
    DecryptionError,
    EncryptedSessionService,
    Packing,
    Reason,
    TamperedError,
)
from adk_secure_sessions.formats import records
from adk_secure_sessions.formats.records import HEADER_LENGTH, Cipher
from adk_secure_sessions.maintenance import Database, verify
from adk_secure_sessions.maintenance.rotate_data import rotate_data
from tests.attacks.faulty import (
    KEY,
    OTHER,
    TABLES,
    WHO,
    Edit,
    EditingCipher,
    assert_names,
    assert_verify_names,
    event,
    url,
    write,
)
from tests.attacks.support import HISTORY, SESSION, Impact, OlderCopy, append, get, outcome
from tests.attacks.support import Database as Attacked
from tests.attacks.world import ALL_SESSIONS, LONG, PACKED, VISIT
from tests.maintenance.support import plaintext_backend
from tests.sqlite_files import execute, settle, value

__all__ = ["url"]


def bomb(plaintext: bytes) -> bytes:
    """Return a plaintext whose content is JSON with many spaces; the JSON itself is right."""
    stream = zlib.compressobj(9)
    made = stream.compress(plaintext[1:]) + stream.compress(b" " * (8 * 2**20)) + stream.flush()
    return b"\x01" + made


def _flagged(value: int) -> Edit:
    return lambda plaintext: bytes([value]) + plaintext[1:]


def _padded(length: int, content: bytes) -> bytes:
    return b"\x04" + length.to_bytes(4, "big") + content


MALFORMED: dict[str, Edit] = {
    "not compressed": _flagged(1),
    "not padded": _flagged(4),
    "cut": lambda plaintext: b"\x01" + zlib.compress(plaintext[1:])[:-1],
    "overlong": lambda plaintext: _padded(2**32 - 1, plaintext[1:]),
    "dirty padding": lambda text: _padded(len(text) - 1, text[1:] + b"\x00x"),
}


@pytest.mark.in_turn("where", "edit")
@pytest.mark.parametrize("where", TABLES)
@pytest.mark.parametrize("edit", MALFORMED.values(), ids=MALFORMED)
async def test_malformed_record_is_rejected_named_and_left_as_it_is(
    url: str, where: str, edit: Edit
) -> None:
    await write(url, where, edit)
    async with EncryptedSessionService(url, AesGcmBackend(KEY)) as service:
        with pytest.raises(TamperedError) as info:
            await service.get_session(**WHO)
        assert_names(info.value, where)
        assert where == "app" or await service.get_session(**OTHER)
    await assert_verify_names(url, where)
    async with Database(url, AesGcmBackend(KEY)) as db:
        before = _records(url, where)
        done = await rotate_data(db)
        assert TABLES[where] in {one.table for one in done.problems}
        assert before <= _records(url, where), "what is malformed is never overwritten"


def file(url: str) -> Path:
    return Path(url.partition(":///")[2])


def _records(url: str, where: str) -> set[bytes]:
    column = "event" if where == "event" else "state"
    query = f"SELECT {column} FROM {TABLES[where]} WHERE length({column}) > 0"
    # Of two users or sessions, the first is the other one's.
    return {execute(file(url), query)[-1][0]}


@pytest.mark.parametrize("where", TABLES)
async def test_bomb_is_rejected_and_other_sessions_are_read(
    url: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The limit of the format is 256 MiB and more: tests/test_flags.py meets it under `make soak`.
    monkeypatch.setattr(records.unpack, "__defaults__", (2**20,))
    await write(url, where, bomb)
    sizes = {len(record) for record in _records(url, where)}
    assert max(sizes) < 20_000
    async with EncryptedSessionService(url, AesGcmBackend(KEY)) as service:
        with pytest.raises(TamperedError, match="after decompression") as info:
            await service.get_session(**WHO)
        assert_names(info.value, where)
        assert where == "app" or await service.get_session(**OTHER)


async def test_flags_that_an_attacker_changes_in_plaintext_records_never_give_another_content(
    url: str,
) -> None:
    """`NoOpBackend` authenticates nothing: its records can be changed, but not be mistaken."""
    async with EncryptedSessionService(url, plaintext_backend()) as service:
        session = await service.create_session(**WHO)
        await service.append_event(session, event("said"))
        record = value(file(url), "SELECT event FROM secure_events")
        for flags in range(256):
            changed = record[:13] + bytes([flags]) + record[14:]
            execute(file(url), "UPDATE secure_events SET event = ?", [changed])
            if flags == 0:
                assert await service.get_session(**WHO)
                continue
            with pytest.raises(DecryptionError) as info:
                await service.get_session(**WHO)
            is_known = flags in (1, 4, 5)
            reason = Reason.MALFORMED if is_known else Reason.UNKNOWN_FLAGS
            assert info.value.reason is reason, flags


# --- the world of the other attacks --------------------------------------------------------------


class SeenCipher(EditingCipher):
    def __init__(self, cipher: Cipher, seen: list[bytes]) -> None:
        super().__init__(cipher, lambda plaintext: plaintext)
        self._seen = seen

    def decrypt(self, sealed: bytes, associated_data: bytes) -> bytes:
        plaintext = super().decrypt(sealed, associated_data)
        self._seen.append(plaintext)
        return plaintext


class SeenBackend(AesGcmBackend):
    def __init__(self) -> None:
        super().__init__(KEY)
        self.seen: list[bytes] = []

    def cipher(self, key: bytes) -> Any:
        return SeenCipher(super().cipher(key), self.seen)


async def test_every_attack_can_meet_packed_records(path: Path) -> None:
    """Only a world with such records shows that they are attacked, too."""
    db = Attacked(path, "packed")
    for who in ALL_SESSIONS:
        backend = SeenBackend()
        async with db.service(backend) as service:
            assert await service.get_session(**who._asdict())
        keys_and_links = 100  # their length in bytes is lower
        found = Counter(one[0] for one in backend.seen if len(one) > keys_and_links)
        states = 3  # of the app, the user and the session
        assert found == {0x00: 1, records.ZLIB | records.PADDED: states + 3}, who


# --- what packing could add for an attacker without keys -----------------------------------------

NONCE = 12
FLAGS_AT = HEADER_LENGTH + NONCE  # AES-GCM encrypts the flags to this byte of a record


@pytest.mark.parametrize("seq", [0, 1], ids=["neither", "compressed and padded"])
async def test_changed_flags_of_an_encrypted_record_are_never_looked_at(
    path: Path, seq: int
) -> None:
    """Authentication fails first: otherwise, errors would tell an attacker what flags do."""
    db = Attacked(path, "packed")
    where = f"session_row = :visit AND seq = {seq}"
    record = db.value(f"SELECT event FROM secure_events WHERE {where}")
    async with db.service() as service:
        for difference in (*range(1, 8), 0x80, 0xFF):
            changed = bytearray(record)
            changed[FLAGS_AT] ^= difference
            db.run(f"UPDATE secure_events SET event = :new WHERE {where}", new=bytes(changed))
            error = await outcome(get(service, db, VISIT))
            assert isinstance(error, TamperedError)
            assert error.reason is Reason.AUTHENTICATION


FORKED: dict[str, tuple[str, Impact]] = {
    "event": ("session_row = :visit AND seq = 4", HISTORY),
    "session": ("id = :visit", SESSION),
}


@pytest.mark.parametrize("table", FORKED)
@pytest.mark.parametrize("ours", [{}, PACKED], ids=["ours unpacked", "ours packed"])
async def test_record_of_a_copy_that_was_packed_otherwise_is_rejected(
    path: Path, tmp_path: Path, ours: dict[str, Any], table: str
) -> None:
    """Two services write the same to two copies of the database, one with the options, one without.

    The content is the same, and so is the event before it.  But the two records are of two
    histories, which the session row tells apart.
    """
    db = Attacked(path, "packed")
    fork = Attacked(tmp_path / "fork.db", "packed")
    unpacked: dict[str, Any] = {"packing": Packing()}
    for one, options in ((db, ours), (fork, {} if ours else PACKED)):
        async with one.service(**unpacked | options) as service:
            session = await service.get_session(**VISIT._asdict())
            assert session is not None
            said = event("agent", step=50, long=LONG)
            said.id = "same"
            await service.append_event(session, said)
        settle(one.path)
    where, impact = FORKED[table]
    column = "event" if table == "event" else "state"
    lengths = [
        one.value(f"SELECT length({column}) FROM {TABLES[table]} WHERE {where}")
        for one in ((fork, db) if ours else (db, fork))
    ]
    assert lengths[0] > lengths[1] + 500, "the copies are packed alike"
    OlderCopy(fork.path, db).replay_row(TABLES[table], where)
    async with db.service() as service:
        for operation in impact.rejected[:3]:
            assert isinstance(await outcome(operation(service, db, VISIT)), TamperedError)
        assert isinstance(await outcome(append(service, db, VISIT)), TamperedError)
    async with db.maintained() as opened:
        assert {one.table for one in (await verify(opened)).problems} == {"secure_sessions"}


# --- lengths -------------------------------------------------------------------------------------


async def length_of(url: str, text: str, **options: Any) -> int:
    """The length of the record of an event with a secret and *text*."""
    secret = {"token": "tok-48151623-aurora-lighthouse-4242", "filler": "0123456789abcdef" * 70}
    async with EncryptedSessionService(url, AesGcmBackend(KEY), **options) as service:
        session = await service.create_session(app_name="app", user_id="user")
        await service.append_event(session, event("user", said=text, **secret))
    query = "SELECT length(event) FROM secure_events ORDER BY session_row DESC LIMIT 1"
    length: int = value(file(url), query)
    return length


RIGHT, WRONG = "tok-48151623-aurora-lighthouse-4242", "tok-62341518-meadow-spaceships-1717"


@pytest.mark.parametrize("packing", [Packing(), Packing(padding="padme"), Packing("zlib")])
async def test_right_guess_makes_a_record_shorter_with_compression_alone(
    tmp_path: Path, packing: Packing
) -> None:
    """So the pages say that compression does not prevent this."""
    right, wrong = [
        await length_of(f"sqlite+aiosqlite:///{tmp_path}/{n}.db", guess, packing=packing)
        for n, guess in enumerate([RIGHT, WRONG])
    ]
    if packing == Packing("zlib"):
        assert right < wrong - 5  # random ids and times make a difference of a few bytes
    else:
        assert right == wrong


async def test_padded_values_of_similar_length_have_the_same_length(tmp_path: Path) -> None:
    async def lengths(**options: Any) -> set[int]:
        url = f"sqlite+aiosqlite:///{tmp_path}/{len(options)}.db"
        return {await length_of(url, "x" * (8000 + n), **options) for n in range(0, 200, 20)}

    assert len(await lengths()) == 10
    assert len(await lengths(packing=Packing(padding="padme"))) <= 2
