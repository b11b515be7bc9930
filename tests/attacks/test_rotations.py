"""Keys that were rotated and retired: what an attacker can do who has them or replays them."""

import asyncio
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from adk_secure_sessions import (
    AesGcmBackend,
    EncryptionBackend,
    FernetBackend,
    TamperedError,
    UnknownKeyError,
    WrongKeyError,
)
from adk_secure_sessions.formats.records import parse_header
from adk_secure_sessions.keys.blind_index import IndexMaster
from adk_secure_sessions.maintenance import Database as Maintained
from adk_secure_sessions.maintenance import (
    retire,
    rotate_data,
    rotate_master,
    rotate_root,
    status,
    verify,
)
from tests.attacks.cells import RECORDS, SESSION_STATE, Cell, by_name
from tests.attacks.databases import also_on
from tests.attacks.forging import ForgedKey, insert_rows
from tests.attacks.support import (
    Database,
    Dump,
    OlderCopy,
    append,
    append_delta,
    assert_rejected,
    assert_works,
    contents,
    create_another,
    get,
    named_by_records,
    rejection,
)
from tests.attacks.world import ALL_SESSIONS, BOB, KEY, SECRET, VISIT
from tests.format_reader import expand
from tests.maintenance.support import NEW, ROTATIONS, interrupt
from tests.maintenance.support import OTHER as NEWER

_PLAINTEXT = re.compile(rf"(key|text)-{SECRET}".encode())  # too long to come up by chance
ALICES_TAG = "(SELECT tag FROM secure_users WHERE id = :alice)"


def under(root: bytes, db: Database) -> EncryptionBackend:
    """The database's backend with another root key."""
    return FernetBackend(root) if db.is_fernet else AesGcmBackend(root)


async def replace_data_keys(db: Database) -> None:
    async with Maintained(db.url, db.backend()) as maintained:
        assert (await rotate_data(maintained)).left == 0
        assert (await retire(maintained)).kept == 0


async def replace_all(db: Database, *, retiring: bool = True) -> None:
    """The steps of docs/rotation.md after a leak; afterwards NEW is the root key."""
    async with Maintained(db.url, under(NEW, db), [db.backend()]) as maintained:
        await rotate_root(maintained)
    async with Maintained(db.url, under(NEW, db)) as maintained:
        assert (await rotate_master(maintained)).left == 0
        assert (await rotate_data(maintained)).left == 0
        if retiring:
            assert (await retire(maintained)).kept == 0


async def assert_whole(db: Database, *backends: EncryptionBackend) -> None:
    backend, *others = backends or (db.backend(),)
    async with Maintained(db.url, backend, others) as maintained:
        found = await verify(maintained)
    assert (found.bad, found.sessions) == (0, len(ALL_SESSIONS))


def replay(db: Database, before: Dump, table: str) -> None:
    """Insert the rows of *table* whose ids are no longer there."""
    there = {row[0] for row in db.rows(f"SELECT * FROM {table}")}
    insert_rows(db, table, [row for row in before[table] if row[0] not in there])


# --- an attacker with old keys reads -------------------------------------------------------------


def opened(key: bytes, sealed: bytes) -> bytes:
    """Decrypt AES-256-GCM without checking its tag, as an attacker can."""
    counter = modes.CTR(sealed[:12] + b"\0\0\0\2")
    return Cipher(algorithms.AES256(key), counter).decryptor().update(sealed[12:-16])


def read_with(root: bytes, keys: Dump, data: Dump) -> int:
    """How many records in *data* are decrypted by *root* and the key tables of *keys*."""
    return sum(bool(_PLAINTEXT.search(text)) for text in every_decryption(root, keys, data))


def every_decryption(root: bytes, keys: Dump, data: Dump) -> Iterator[bytes]:
    """Decrypt each record with each key that the attacker can have."""
    wrapping = expand(root, b"adk-secure-sessions/v1/wrap")
    masters = {opened(wrapping, row[4][1:]) for row in keys["secure_keyring"]}
    data_keys = [row[5][13:] for row in keys["secure_data_keys"]]
    known = masters | {opened(key, sealed)[1:] for key in masters for sealed in data_keys}
    for table in ("apps", "users", "sessions", "bases", "events"):
        for row in data[f"secure_{table}"]:
            for key in known:
                yield opened(key, row[-1][13:])


async def test_old_root_key_and_copy_of_the_key_tables_open_nothing_once_all_are_replaced(
    aes_db: Database,
) -> None:
    db = aes_db
    before = contents(db)
    known_before = read_with(KEY, before, before)
    assert known_before > 5 * len(ALL_SESSIONS)
    await replace_all(db)
    async with db.service(under(NEW, db)) as service:
        await append(service, db, VISIT)
        await create_another(service, db, VISIT)
    after = contents(db)
    both = {table: before[table] + after[table] for table in before}
    for known in (before, after, both):
        assert read_with(KEY, known, after) == 0
    assert read_with(KEY, both, before) == known_before  # older copies stay readable


async def test_old_root_key_and_copy_of_the_key_tables_open_records_until_data_keys_are_replaced(
    aes_db: Database,
) -> None:
    """New master keys alone are not enough."""
    db = aes_db
    before = contents(db)
    async with Maintained(db.url, under(NEW, db), [db.backend()]) as maintained:
        await rotate_root(maintained)
        await rotate_master(maintained)
        await retire(maintained)
    async with db.service(under(NEW, db)) as service:
        await append(service, db, VISIT)
    assert read_with(KEY, before, contents(db)) > 5 * len(ALL_SESSIONS)


# --- an attacker replays what was replaced -------------------------------------------------------


@also_on("fernet", "packed", "mariadb", cases=["event"])
@pytest.mark.parametrize("cell", RECORDS, ids=by_name)
async def test_old_record_replayed_after_retire_is_rejected(db: Database, cell: Cell) -> None:
    """The same bytes as before, under a data key that was retired."""
    before = cell.stored(db)
    await replace_data_keys(db)
    assert cell.stored(db) != before
    cell.store(db, before)
    await assert_rejected(db, cell.impact, UnknownKeyError, who=cell.who)


async def test_older_session_replayed_with_its_data_key_is_rejected(older: OlderCopy) -> None:
    """The data key decrypts it again; that the row is older is detected as ever."""
    db = older.database
    before = contents(db)
    await replace_data_keys(db)
    replay(db, before, "secure_data_keys")
    older.replay_row("secure_sessions", "id = :visit")
    async with db.service() as service:
        assert type(await rejection(get, service, db, VISIT)) is TamperedError


@also_on("mariadb")
async def test_retired_data_key_replayed_encrypts_nothing(db: Database) -> None:
    before = contents(db)
    await replace_data_keys(db)
    dropped = {row[0] for row in before["secure_data_keys"]}
    replay(db, before, "secure_data_keys")
    for who in ALL_SESSIONS:
        await assert_works(db, who)
    async with db.service() as service:
        for who in ALL_SESSIONS:
            await create_another(service, db, who)
    after = contents(db)
    assert len(after["secure_sessions"]) == 2 * len(ALL_SESSIONS)
    assert not named_by_records(after) & dropped
    async with Maintained(db.url, db.backend()) as maintained:  # finds and retires it again
        assert (await retire(maintained)).deleted_data_keys == len(dropped)


async def test_retired_data_key_replayed_without_its_master_encrypts_and_decrypts_nothing(
    db: Database,
) -> None:
    """It cannot be unwrapped, which is an error only for a record that names it."""
    before = contents(db)
    stored = SESSION_STATE.stored(db)
    await replace_all(db)
    replay(db, before, "secure_data_keys")
    replayed = {row[0] for row in before["secure_data_keys"]}
    async with db.service(under(NEW, db)) as service:
        for who in ALL_SESSIONS:
            assert await get(service, db, who) == db.session(who)
            await create_another(service, db, who)
        await append(service, db, VISIT)
    assert not named_by_records(contents(db)) & replayed
    SESSION_STATE.store(db, stored)
    async with db.service(under(NEW, db)) as service:
        assert type(await rejection(get, service, db, VISIT)) is UnknownKeyError
        assert type(await rejection(append, service, db, VISIT)) is UnknownKeyError
        assert await get(service, db, BOB) is not None


async def test_retired_master_replayed_under_the_old_root_key_is_rejected(db: Database) -> None:
    before = contents(db)
    await replace_all(db)
    masters = [row for row in before["secure_keyring"] if row[1] == "data"]
    replay(db, before | {"secure_keyring": masters}, "secure_keyring")
    async with db.service(under(NEW, db)) as service:
        assert type(await rejection(get, service, db, VISIT)) is WrongKeyError


@pytest.mark.parametrize("again", [True, False])
async def test_retired_master_replayed_wraps_keys_unless_the_root_key_was_rotated_again(
    db: Database, again: bool
) -> None:
    """The attacker has the master key, and its row as the new root key wrapped it.

    A data key alone encrypts nothing: the attacker also forges the user's row, to name it.
    """
    async with Maintained(db.url, db.backend()) as maintained:
        known = await maintained.keyring()
    await replace_all(db, retiring=False)
    before = contents(db)
    async with Maintained(db.url, under(NEW, db)) as maintained:
        await retire(maintained)
    backend = under(NEW, db)
    if again:
        backend = under(NEWER, db)
        async with Maintained(db.url, backend, [under(NEW, db)]) as maintained:
            await rotate_root(maintained)
    await assert_whole(db, backend)
    replay(db, before, "secure_keyring")
    forged = ForgedKey(known, db.value(f"SELECT {ALICES_TAG}"), backend)
    forged.insert(db)
    async with db.service(backend) as service:
        if again:
            assert type(await rejection(append, service, db, VISIT)) is WrongKeyError
            return
        session = await service.get_session(**VISIT._asdict())
        assert session == db.session(VISIT)
        await append_delta(service, session, {"step": 1})
    stored = "SELECT state FROM secure_sessions WHERE id = :visit"
    assert parse_header(db.value(stored))[1] != forged.row.id
    forged.insert_user_row(db)
    async with db.service(backend) as service:
        await append_delta(service, session, {"step": 2})
    limit = "the limit is gone: say so in docs/limits.md"
    assert parse_header(db.value(stored))[1] == forged.row.id, limit


# --- an attacker makes a rotation skip rows ------------------------------------------------------


async def checkpoint_of(db: Database, name: str) -> str:
    """Begin a rotation and stop it; return its checkpoint."""
    await interrupt(db.url, ROTATIONS[name], db.backend())
    value: str = db.value("SELECT value FROM secure_meta WHERE name = :n", n=f"rotation.{name}")
    return value


def store(db: Database, name: str, value: str) -> None:
    db.run("REPLACE INTO secure_meta VALUES (:n, :v)", n=f"rotation.{name}", v=value)


async def forged_checkpoint(db: Database, name: str, since: int) -> str:
    """A checkpoint by an attacker who has the index master key."""
    async with Maintained(db.url, db.backend()) as maintained:
        master = (await maintained.keyring()).index_master
    return f"{since} {master.mac('checkpoint', f'rotation.{name}', str(since)).hex()}"


def now() -> int:
    return time.time_ns() // 1000


def replaced(done: Any) -> int:
    """How many keys or records a rotation has replaced."""
    return getattr(done, "rotated", 0) + getattr(done, "reencrypted", 0)


@pytest.mark.in_turn("name", "whose")
@pytest.mark.parametrize("name", ROTATIONS)
@pytest.mark.parametrize("whose", ["nobody's", "another index master's", "the other rotation's"])
async def test_forged_checkpoint_is_rejected(file_db: Database, name: str, whose: str) -> None:
    text = str(now())
    if whose == "the other rotation's":
        (other,) = ROTATIONS.keys() - {name}
        value = await checkpoint_of(file_db, other)
    else:
        master = IndexMaster(bytes(32) if whose == "nobody's" else KEY)
        value = f"{text} {master.mac('checkpoint', f'rotation.{name}', text).hex()}"
    store(file_db, name, value)
    before = file_db.dump()
    async with Maintained(file_db.url, file_db.backend()) as maintained:
        with pytest.raises(TamperedError, match="restart"):
            await ROTATIONS[name](maintained)
        assert file_db.dump() == before
        done = await ROTATIONS[name](maintained, restart=True)
        assert (done.resumed, done.left) == (False, 0)
    await assert_whole(file_db)


@pytest.mark.parametrize("name", ROTATIONS)
async def test_replayed_checkpoint_does_not_pass_for_a_new_rotation(
    file_db: Database, name: str
) -> None:
    """The rotation has ended; rows that it has replaced are not replaced again."""
    value = await checkpoint_of(file_db, name)
    async with Maintained(file_db.url, file_db.backend()) as maintained:
        first = await ROTATIONS[name](maintained)
        store(file_db, name, value)
        began = now()
        again = await ROTATIONS[name](maintained)
        assert again.resumed, "it must report that it continued"
        assert again.since == first.since < began
        restarted = await ROTATIONS[name](maintained, restart=True)
        assert restarted.resumed is False
        assert restarted.since >= began
    assert replaced(again) == 0 < replaced(restarted)


@pytest.mark.parametrize("since", ["", "-1", "1" * 18 + "2", "x", "01", "1 0 -1", "\u0661"])
async def test_checkpoint_of_another_form_is_rejected(file_db: Database, since: str) -> None:
    """Also if its MAC is right."""
    async with Maintained(file_db.url, file_db.backend()) as maintained:
        master = (await maintained.keyring()).index_master
        mac = master.mac("checkpoint", "rotation.data", since).hex()
        for value in (f"{since} {mac}", mac, f"{since} {mac}\n", f"{since} \u00df{mac[1:]}"):
            store(file_db, "data", value)
            with pytest.raises(TamperedError, match="restart"):
                await rotate_data(maintained)


async def test_forged_checkpoint_does_not_hide_records_of_another_backend(
    file_db: Database,
) -> None:
    other = AesGcmBackend(KEY) if file_db.is_fernet else FernetBackend(KEY)
    store(file_db, "data", await forged_checkpoint(file_db, "data", 0))
    async with Maintained(file_db.url, other, [file_db.backend()]) as maintained:
        done = await rotate_data(maintained)
    assert (done.resumed, done.since, done.reencrypted > 0, done.left) == (True, 0, True, 0)


@pytest.mark.parametrize("name", ROTATIONS)
async def test_forged_checkpoint_of_an_early_time_is_reported(file_db: Database, name: str) -> None:
    """The limit that docs/limits.md names: it makes every key seem new."""
    store(file_db, name, await forged_checkpoint(file_db, name, 0))
    async with Maintained(file_db.url, file_db.backend()) as maintained:
        done = await ROTATIONS[name](maintained)
        assert (done.resumed, done.since, replaced(done)) == (True, 0, 0)
        again = await ROTATIONS[name](maintained, restart=True)
    assert replaced(again) > 0


@pytest.mark.parametrize("name", ROTATIONS)
async def test_forged_checkpoint_of_a_late_time_replaces_all_keys(
    file_db: Database, name: str
) -> None:
    """The keys are created then, too, and a next rotation replaces them again."""
    since = now() + 3600 * 24 * 365 * 10**6
    store(file_db, name, await forged_checkpoint(file_db, name, since))
    async with Maintained(file_db.url, file_db.backend()) as maintained:
        done = await ROTATIONS[name](maintained)
        again = await ROTATIONS[name](maintained)
    assert (done.since, done.left, again.left) == (since, 0, 0)
    assert again.since > since
    assert min(replaced(done), replaced(again)) > 0
    await assert_whole(file_db)


# --- an attacker makes a rotation wait, or take an old key for a new one --------------------------

PATIENCE = 20  # seconds


@pytest.mark.in_turn("created_at", "name")
@pytest.mark.parametrize("created_at", [2**63 - 1, 253_402_300_799_999_999, "x", 9.9e30, 0])
@pytest.mark.parametrize("name", ROTATIONS)
async def test_created_at_that_was_modified_does_not_decide_when_a_rotation_begins(
    file_db: Database, name: str, created_at: object
) -> None:
    key = file_db.value(f"SELECT id FROM secure_data_keys WHERE owner = {ALICES_TAG}")
    file_db.run("UPDATE secure_data_keys SET created_at = :c WHERE id = :k", c=created_at, k=key)
    async with Maintained(file_db.url, file_db.backend()) as maintained:
        before = now()
        done = await asyncio.wait_for(ROTATIONS[name](maintained), PATIENCE)
        assert before <= done.since <= now()
        assert done.bad
        assert done.left, "her records or her key are not under a new key"
        named = {one.row for one in done.problems if one.table == "secure_data_keys"}
        assert named == {str(key)}


@pytest.mark.parametrize("revision", [10**15, 2**62, -5])
async def test_revision_that_was_modified_does_not_stop_a_rotation_with_a_speed_limit(
    file_db: Database, revision: int
) -> None:
    """A row claims any number of events, which nobody has to wait for."""
    file_db.run("UPDATE secure_sessions SET revision = :r WHERE id = :visit", r=revision)
    async with Maintained(file_db.url, file_db.backend()) as maintained:
        done = await asyncio.wait_for(rotate_data(maintained, rows_per_second=1000), PATIENCE)
        for command in (status, verify):
            await asyncio.wait_for(command(maintained, rows_per_second=1000), PATIENCE)
    assert "secure_sessions" in {one.table for one in done.problems}
    assert done.left
