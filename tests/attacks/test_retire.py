"""`retire` on rows that were tampered with: no key is deleted that a record may need."""

from typing import Any

import pytest

from adk_secure_sessions import (
    AesGcmBackend,
    ConfigurationError,
    DecryptionError,
    FernetBackend,
    SecureSessionError,
    TamperedError,
)
from adk_secure_sessions.maintenance import retire, rotate_data, rotate_master, status, verify
from tests.attacks.cells import EVENT, SESSION_STATE, SESSION_WITNESS, SNAPSHOT, Cell, by_name
from tests.attacks.databases import also_on
from tests.attacks.forging import insert_rows
from tests.attacks.support import Database, append_delta, get, list_user, outcome
from tests.attacks.world import ALL_SESSIONS, KEY, VISIT

HEADER = 13


async def rotated_but_for(db: Database, cell: Cell) -> bytes:
    """Give everything new keys but one record, as if a rotation were not complete; return it."""
    stored: bytes = cell.stored(db)
    async with db.maintained() as maintained:
        assert (await rotate_data(maintained)).left == 0
    cell.store(db, stored)
    await assert_whole(db)
    return stored


async def assert_whole(db: Database) -> None:
    async with db.service() as service:
        for who in ALL_SESSIONS:
            assert await get(service, db, who) == db.session(who)


def keys(db: Database) -> list[tuple[object, ...]]:
    return db.rows("SELECT * FROM secure_data_keys") + db.rows("SELECT * FROM secure_keyring")


KEPT: list[Any] = [SESSION_STATE, EVENT]
KEPT += [pytest.param(cell, marks=pytest.mark.soak) for cell in (SNAPSHOT, SESSION_WITNESS)]


@pytest.mark.parametrize("cell", KEPT, ids=by_name)
async def test_record_whose_header_was_altered_keeps_its_data_key(db: Database, cell: Cell) -> None:
    """The header names the newest key, so that nothing seems to need the old one."""
    stored = await rotated_but_for(db, cell)
    newest = db.value("SELECT state FROM secure_users WHERE id = :alice")[:HEADER]
    assert newest != stored[:HEADER]
    for altered in (newest + stored[HEADER:], stored[:5] + bytes(8) + stored[HEADER:], b"AKS"):
        cell.store(db, altered)
        async with db.maintained() as maintained:
            if cell is SESSION_STATE:  # it might be anybody's
                with pytest.raises(TamperedError):
                    await retire(maintained)
            else:
                assert (await retire(maintained)).kept
    cell.store(db, stored)
    await assert_whole(db)


TAKEN_AWAY = {
    "session of nobody": "UPDATE secure_sessions SET user_row = 5 WHERE id = :visit",
    "session of another tag": "UPDATE secure_sessions SET tag = x'00' WHERE id = :visit",
    "events of another session": (
        "UPDATE secure_events SET session_row = :bob_visit, seq = seq + 9 WHERE session_row = "
        ":visit"
    ),
    "session of another user": "UPDATE secure_sessions SET user_row = :bob WHERE id = :visit",
    "user of another app": "UPDATE secure_users SET app_row = :bank WHERE id = :alice",
    "user of another tag": "UPDATE secure_users SET tag = x'00' WHERE id = :alice",
}


@pytest.mark.in_turn("how", "cell")
@also_on("postgresql")
@pytest.mark.parametrize("how", TAKEN_AWAY)
@pytest.mark.parametrize("cell", [SESSION_STATE, EVENT], ids=by_name)
async def test_row_that_seems_to_be_anothers_keeps_its_data_key(
    db: Database, cell: Cell, how: str
) -> None:
    await rotated_but_for(db, cell)
    tables = ("secure_sessions", "secure_users", "secure_events")
    before = {table: db.rows(f"SELECT * FROM {table}") for table in tables}
    db.run(TAKEN_AWAY[how])
    async with db.maintained() as maintained:
        await outcome(retire(maintained))
    for table, rows in before.items():
        db.run(f"DELETE FROM {table}")
        insert_rows(db, table, rows)
    await assert_whole(db)


# --- what a later release may have written -------------------------------------------------------


async def features(db: Database, names: str) -> None:
    """Store the names, with the MAC that a later release writes."""
    async with db.maintained() as maintained:
        keyring = await maintained.keyring()
        mac = keyring.index_master.mac("features", keyring.database_id, names).hex()
    db.run("UPDATE secure_meta SET value = :v WHERE name = 'features'", v=f"{names} {mac}")


@pytest.mark.parametrize("names", ["later", "wrapper,later", "separating,later"])
async def test_unknown_feature_stops_retire_and_all_else(db: Database, names: str) -> None:
    async with db.maintained() as maintained:
        await rotate_master(maintained)
        await rotate_data(maintained)
    before = keys(db)
    await features(db, names)
    for work in (retire, verify, rotate_master, rotate_data, status):
        with pytest.raises(ConfigurationError, match="later"):
            async with db.maintained() as maintained:
                await work(maintained)
    async with db.service() as service:
        for operation in (get, list_user):
            with pytest.raises(ConfigurationError, match="later"):
                await operation(service, db, VISIT)
    assert keys(db) == before


async def test_unknown_feature_that_was_added_since_the_start_stops_retire(db: Database) -> None:
    async with db.maintained() as maintained:
        await rotate_master(maintained)
        await rotate_data(maintained)
        before = keys(db)
        await features(db, "later")
        with pytest.raises(SecureSessionError):
            await retire(maintained)
    assert keys(db) == before


LATER_FLAG = 0x08


class LaterCipher:
    """Encrypts as a later release does: records of *kind* have another flag."""

    def __init__(self, cipher: object, kind: str) -> None:
        self._cipher = cipher
        self._part = len(kind).to_bytes(4, "big") + kind.encode()

    def encrypt(self, plaintext: bytes, associated_data: bytes) -> bytes:
        if associated_data[HEADER:].startswith(self._part):
            plaintext = bytes([plaintext[0] | LATER_FLAG]) + plaintext[1:]
        sealed: bytes = self._cipher.encrypt(plaintext, associated_data)  # type: ignore[attr-defined]
        return sealed

    def decrypt(self, sealed: bytes, associated_data: bytes) -> bytes:
        plaintext: bytes = self._cipher.decrypt(sealed, associated_data)  # type: ignore[attr-defined]
        return bytes([plaintext[0] & ~LATER_FLAG]) + plaintext[1:]


@pytest.mark.parametrize("kind", ["app", "user", "session", "base", "event", "witness"])
async def test_unknown_flags_of_an_authentic_record_are_rejected_by_name(
    file_db: Database, kind: str
) -> None:
    """They are no reason to delete a key."""
    db = file_db
    base = FernetBackend if db.is_fernet else AesGcmBackend

    class Later(base):  # type: ignore[misc, valid-type]
        def cipher(self, key: bytes) -> LaterCipher:
            return LaterCipher(super().cipher(key), kind)

    async with db.service(Later(KEY)) as service:
        who = VISIT._replace(user_id="dave", session_id="later")
        await service.create_session(**who._asdict(), state={"a": "x" * 9000})
        session = await service.get_session(**who._asdict())
        assert session is not None
        await append_delta(service, session, {"app:step": 7, "user:step": 7, "b": "y" * 9000})
    async with db.service() as service:
        with pytest.raises(DecryptionError, match="flags") as info:
            await service.get_session(**who._asdict())
        assert info.value.reason.value == "unknown flags"
    async with db.maintained() as maintained:
        found = await verify(maintained)
        assert any("flags" in problem.detail for problem in found.problems), found.problems
        await rotate_data(maintained)
        await outcome(retire(maintained))
    async with db.service(Later(KEY)) as service:
        assert await service.get_session(**who._asdict()) == session
