"""Rows of keys that an attacker inserts or alters: planted keys, junk, and altered columns."""

import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

import pytest

from adk_secure_sessions import (
    AesGcmBackend,
    EncryptedSessionService,
    EncryptionBackend,
    FernetBackend,
    KeyServiceError,
    StaticKey,
    UnknownKeyError,
    WrongKeyError,
)
from adk_secure_sessions.formats.records import parse_header
from adk_secure_sessions.keys.keyring import MasterKeyRow, UnwrappedMaster, wrap_master_key
from adk_secure_sessions.maintenance import Database as Maintained
from adk_secure_sessions.maintenance import retire, rotate_data, rotate_master, rotate_root, verify
from tests.attacks.cells import USER_KEY
from tests.attacks.databases import also_on
from tests.attacks.forging import ForgedKey, insert_rows
from tests.attacks.support import (
    Database,
    append,
    append_delta,
    assert_works,
    create_another,
    get,
    get_last,
    list_app,
    list_user,
    outcome,
    rejection,
    user_state,
)
from tests.attacks.world import ALL_SESSIONS, BOB, KEY, NOTES, VISIT
from tests.benchmarks.memory import peak_memory

NEW = bytes(range(32, 64))
ALICES_TAG = "(SELECT tag FROM secure_users WHERE id = :alice)"


def under(root: bytes, db: Database) -> EncryptionBackend:
    return FernetBackend(root) if db.is_fernet else AesGcmBackend(root)


@asynccontextmanager
async def leaked(db: Database) -> AsyncIterator[tuple[EncryptedSessionService, ForgedKey]]:
    """Replace all keys after a leak, while a service runs; yield it, and a key of the attacker.

    The attacker has all keys of before.  The service has read all sessions before the master keys
    and data keys were replaced.
    """
    async with Maintained(db.url, db.backend()) as maintained:
        known = await maintained.keyring()
    async with Maintained(db.url, under(NEW, db), [db.backend()]) as maintained:
        await rotate_root(maintained)
    async with db.service(under(NEW, db)) as service:
        for who in ALL_SESSIONS:
            await get(service, db, who)
        async with Maintained(db.url, under(NEW, db)) as maintained:
            assert (await rotate_master(maintained)).left == 0
            assert (await rotate_data(maintained)).left == 0
            assert (await retire(maintained)).kept == 0
        yield service, ForgedKey(known, db.value(f"SELECT {ALICES_TAG}"), under(NEW, db))


def keys_of_records(db: Database) -> set[int]:
    """The ids of the data keys that the records of alice and her sessions name."""
    columns = dict.fromkeys(("users", "sessions", "bases"), "state")
    columns |= {"events": "event", "witnesses": "seal"}
    return {
        parse_header(record)[1]
        for table, column in columns.items()
        for (record,) in db.rows(f"SELECT {column} FROM secure_{table}")
    }


def data_keys(db: Database) -> dict[int, int]:
    """The ids of the stored data keys, and of the master keys that wrap them."""
    rows = db.rows("SELECT id, wrapped FROM secure_data_keys")
    return {row_id: parse_header(wrapped)[1] for row_id, wrapped in rows}


async def test_data_key_planted_under_a_retired_master_encrypts_nothing(db: Database) -> None:
    async with leaked(db) as (running, forged):
        forged.insert(db)
        session = await running.get_session(**VISIT._asdict())
        assert session == db.session(VISIT)
        async with db.service(under(NEW, db)) as new:
            for number, service in enumerate((running, new)):
                await append_delta(service, session, {"step": number})
                await append_delta(service, session, {"user:step": number})
                await create_another(service, db, VISIT)
    assert forged.row.id not in keys_of_records(db)


@pytest.mark.parametrize("what", ["user", "session"])
async def test_record_under_a_data_key_planted_under_a_retired_master_is_rejected(
    db: Database, what: str
) -> None:
    """By a service that had unwrapped that master, too."""
    async with leaked(db) as (running, forged):
        forged.insert(db)
        forge = {"user": forged.insert_user_row, "session": forged.replace_session}
        forge[what](db)
        before = db.dump()
        operations = (get, get_last, list_user, append, create_another, user_state)
        async with db.service(under(NEW, db)) as new:
            for service in (running, new):
                for operation in operations if what == "user" else operations[:4]:
                    error = await rejection(operation, service, db, VISIT)
                    assert type(error) is UnknownKeyError, operation
                assert await get(service, db, BOB) == db.session(BOB)
        assert db.dump() == before


# --- altered rows of the keyring -----------------------------------------------------------------


@also_on("mariadb")
async def test_older_master_with_a_later_time_does_not_wrap_new_keys(
    db: Database, caplog: pytest.LogCaptureFixture
) -> None:
    """A running service logs the row, and goes on with the newest one that it can unwrap."""
    async with db.maintained() as maintained:
        await rotate_master(maintained)
    old = db.value("SELECT min(created_at) FROM secure_keyring WHERE purpose = 'data'")
    newest = db.value("SELECT id FROM secure_keyring ORDER BY created_at DESC LIMIT 1")
    async with db.service() as service:
        await get(service, db, VISIT)
        db.run(
            "UPDATE secure_keyring SET created_at = created_at + :day "
            "WHERE purpose = 'data' AND created_at = :old",
            day=86_400_000_000,
            old=old,
        )
        before = data_keys(db)
        await create_another(service, db, VISIT._replace(user_id="dave"))
    made = data_keys(db).items() - before.items()
    assert [master for _, master in made] == [newest]
    assert any("secure_keyring" in record.getMessage() for record in caplog.records)


# --- junk ----------------------------------------------------------------------------------------


class CountingKey:
    """A key service that counts the calls."""

    key_id = "counting"

    def __init__(self) -> None:
        self._key = StaticKey(KEY)
        self.calls = 0

    async def wrap(self, key: bytes, associated_data: bytes) -> bytes:
        self.calls += 1
        return await self._key.wrap(key, associated_data)

    async def unwrap(self, wrapped: bytes, associated_data: bytes) -> bytes:
        self.calls += 1
        return await self._key.unwrap(wrapped, associated_data)


def junk_masters(number: int) -> list[tuple[object, ...]]:
    now = time.time_ns() // 1000
    return [
        (secrets.randbits(62), "data", "counting", now + n, secrets.token_bytes(61))
        for n in range(number)
    ]


Key = TypeVar("Key", bound=CountingKey)


async def counted(db: Database, key: Key) -> Key:
    """The root key of the database becomes *key*, of a key service that counts."""
    async with Maintained(db.url, AesGcmBackend(key), [db.backend()]) as maintained:
        await rotate_root(maintained)
    key.calls = 0
    return key


class Failing(CountingKey):
    """A key service that fails for all but the keys that it has unwrapped before."""

    def __init__(self) -> None:
        super().__init__()
        self.known: set[bytes] = set()
        self.fails = False

    async def unwrap(self, wrapped: bytes, associated_data: bytes) -> bytes:
        if self.fails and wrapped not in self.known:
            self.calls += 1
            raise KeyServiceError("rejected by policy")
        self.known.add(wrapped)
        return await super().unwrap(wrapped, associated_data)


async def test_row_for_which_the_key_service_fails_does_not_stop_a_running_service(
    aes_db: Database, caplog: pytest.LogCaptureFixture
) -> None:
    db, key = aes_db, await counted(aes_db, Failing())
    async with db.service(AesGcmBackend(key)) as service:
        for who in ALL_SESSIONS:
            await get(service, db, who)
        key.calls, key.fails = 0, True
        insert_rows(db, "secure_keyring", junk_masters(3))
        for name in ("dave", "erin", "frank"):
            await create_another(service, db, VISIT._replace(user_id=name))
        await append(service, db, VISIT)
        assert key.calls == 3, "each row once"
    assert sum("secure_keyring" in record.getMessage() for record in caplog.records) == 3
    async with db.service(AesGcmBackend(key)) as service:
        with pytest.raises(KeyServiceError, match="secure_keyring row"):
            await service.prepare_tables()


async def test_row_that_holds_another_key_than_before_is_not_used_by_a_running_service(
    aes_db: Database, caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody who has the root key replaces a master key under its id."""
    db = aes_db
    async with db.maintained() as maintained:
        await rotate_master(maintained)
        database_id = (await maintained.keyring()).database_id
    columns = "id, purpose, root_key_id, created_at, wrapped"
    stored = db.rows(f"SELECT {columns} FROM secure_keyring ORDER BY created_at DESC")
    row, root = MasterKeyRow(*stored[0]), db.backend().root_key
    forged = await wrap_master_key(row, root, database_id, UnwrappedMaster(secrets.token_bytes(32)))
    async with db.service() as service:
        await get(service, db, VISIT)
        db.run(
            "UPDATE secure_keyring SET wrapped = :wrapped WHERE id = :id",
            wrapped=forged.wrapped,
            id=row.id,
        )
        before = data_keys(db)
        await create_another(service, db, VISIT._replace(user_id="dave"))
    made = data_keys(db).items() - before.items()
    assert made
    assert row.id not in {master for _, master in made}
    assert "another key than the one" in caplog.text


async def test_thousands_of_junk_rows_of_the_keyring_stop_no_running_service(
    aes_db: Database, caplog: pytest.LogCaptureFixture
) -> None:
    """And the key service is not called."""
    db, key = aes_db, await counted(aes_db, CountingKey())
    async with db.service(AesGcmBackend(key)) as service:
        await get(service, db, VISIT)
        key.calls = 0
        insert_rows(db, "secure_keyring", junk_masters(5000))
        for number in range(5):
            assert await get(service, db, VISIT) == db.session(VISIT)
            assert await create_another(service, db, VISIT._replace(user_id=f"dave {number}"))
        assert sum("more than 64" in record.getMessage() for record in caplog.records) == 1
    async with db.service(AesGcmBackend(key)) as service:
        with pytest.raises(WrongKeyError, match="more than 64 rows"):
            await service.prepare_tables()
    assert key.calls == 0
    db.run("DELETE FROM secure_keyring WHERE length(wrapped) = 61 AND root_key_id = 'counting'")


@pytest.mark.parametrize(
    ("generation", "backend_id"),
    [
        (1, 1),
        (2**62, 3),
        (2**63 - 1, 200),
        *(
            pytest.param(*case, marks=pytest.mark.soak)
            for case in ((1, 3), (1, 200), (2**62, 1), (2**62, 200), (2**63 - 1, 1), (2**63 - 1, 3))
        ),
    ],
)
async def test_junk_data_key_does_not_stop_its_owner_and_is_named_by_verify(
    aes_db: Database, generation: int, backend_id: int
) -> None:
    """No record names it.  Only a new data key cannot be made if the generations are used up."""
    db = aes_db
    (columns,) = db.rows(f"SELECT * FROM secure_data_keys WHERE {USER_KEY.where}")
    junk = (
        secrets.randbits(62),
        columns[1],
        generation,
        backend_id,
        columns[4],
        b"AKS\x02\x01junk",
    )
    insert_rows(db, "secure_data_keys", [junk])
    async with db.maintained() as maintained:
        problems = (await verify(maintained)).problems
    assert [problem.table for problem in problems] == ["secure_data_keys"]
    async with db.service() as service:
        for operation in (get, get_last, list_user, list_app, append, create_another, user_state):
            assert await operation(service, db, VISIT), operation
    for who in (NOTES, BOB):
        await assert_works(db, who)
    async with db.maintained() as maintained:
        done = await outcome(rotate_data(maintained))
        if generation < 2**62:
            assert done.left == 0  # type: ignore[attr-defined]
        await outcome(retire(maintained))
    async with db.service() as service:
        for who in ALL_SESSIONS:
            assert await get(service, db, who)


HUGE = "zeroblob(10000000)"
# On SQLite, the length of a text is the number of characters before its first NUL.
HUGE_TEXT = f"CAST({HUGE} AS TEXT)"
HUGE_VALUES = {
    "keyring, wrapped": ("secure_keyring", f"42, 'data', root_key_id, created_at, {HUGE}"),
    "keyring, purpose": ("secure_keyring", f"42, {HUGE}, root_key_id, created_at, wrapped"),
    "keyring, root key": ("secure_keyring", f"42, 'data', {HUGE}, created_at, wrapped"),
    "keyring, time": ("secure_keyring", f"42, 'data', root_key_id, {HUGE}, wrapped"),
    "keyring, text": ("secure_keyring", f"42, 'data', root_key_id, created_at, {HUGE_TEXT}"),
    "keyring, purpose as text": (
        "secure_keyring",
        f"42, {HUGE_TEXT}, root_key_id, created_at, wrapped",
    ),
    "data key": ("secure_data_keys", f"42, owner, 77, backend_id, created_at, {HUGE}"),
    "data key, text": ("secure_data_keys", f"42, owner, 77, backend_id, created_at, {HUGE_TEXT}"),
    "data key, generation": ("secure_data_keys", f"42, owner, {HUGE}, 1, created_at, wrapped"),
    "data key, backend": ("secure_data_keys", f"42, owner, 77, {HUGE_TEXT}, created_at, wrapped"),
    "data key, time": ("secure_data_keys", f"42, owner, 77, backend_id, {HUGE}, wrapped"),
    "meta, value": ("secure_meta", f"'junk', {HUGE}"),
    "meta, name": ("secure_meta", f"{HUGE}, 'junk'"),
}


@also_on("mariadb")
@pytest.mark.parametrize("place", HUGE_VALUES)
async def test_huge_junk_value_beside_the_keys_is_not_read(
    aes_db: Database, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither by a running service, nor by a start, nor by reads of data keys."""
    db = aes_db
    table, columns = HUGE_VALUES[place]
    async with db.service() as service:
        await get(service, db, BOB)
        where = "" if table == "secure_meta" else f"FROM {table}"
        if table == "secure_data_keys":
            where += f" WHERE owner = {ALICES_TAG}"
        db.run(f"INSERT INTO {table} SELECT {columns} {where} LIMIT 1")

        async def use() -> None:
            await create_another(service, db, VISIT._replace(user_id="dave"))
            async with db.service() as new:
                await outcome(get(new, db, VISIT))

        assert await peak_memory(use) < 8_000_000


async def test_very_many_junk_rows_beside_the_keys_are_not_all_read(aes_db: Database) -> None:
    db = aes_db
    count = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 50000) "
    (columns,) = db.rows(f"SELECT * FROM secure_data_keys WHERE {USER_KEY.where}")
    async with db.service() as service:
        await get(service, db, BOB)
        db.run(f"INSERT INTO secure_meta {count} SELECT 'a' || i, hex(zeroblob(100)) FROM n")
        db.run(
            f"INSERT INTO secure_data_keys {count} "
            "SELECT i, :owner, i + 10, 1, 0, zeroblob(100) FROM n",
            owner=columns[1],
        )

        async def use() -> None:
            async with db.service() as new:
                for operation in (get, append, create_another):
                    assert await operation(new, db, VISIT)

        assert await peak_memory(use) < 15_000_000
