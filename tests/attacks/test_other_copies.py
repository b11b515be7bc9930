"""A command deletes in one copy of the database, and another copy uses the same keys or source.

How it works: `pair` is a database with a key database, and an older copy of the data.  After the
copy was made, the original got more records, under newer keys.  Commands run on the copy, with the
key database of the original.  A test then says what the original has lost, and who notices it.
Copies that share a store of artifacts are tested in `tests/integrations/test_artifact_blobs.py`.
"""

import shutil
import sqlite3
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import pytest
from google.adk.sessions import Session
from google.adk.sessions.sqlite_session_service import SqliteSessionService

from adk_secure_sessions import (
    AesGcmBackend,
    Audit,
    ConfigurationError,
    EncryptedSessionService,
    UnknownKeyError,
)
from adk_secure_sessions.maintenance import (
    Database,
    drop_index,
    erase_user,
    fill_index,
    move_keys,
    purge_audit,
    purge_sessions,
    retire,
    rotate_data,
    rotate_master,
    separate,
    vacuum,
    verify,
    verify_audit,
)
from adk_secure_sessions.migration import AdkTables, erase_source, migrate
from tests.clocks import shifted
from tests.maintenance.support import event

BACKEND = AesGcmBackend(bytes(range(32)))
APP, KEY = "clinic", "ticket"
USERS = ("ada", "bob")


class Copy(NamedTuple):
    """A data database, and its key database."""

    data: Path
    keys: Path

    def database(self) -> Database:
        return Database(f"sqlite:///{self.data}", BACKEND, key_db_url=f"sqlite:///{self.keys}")

    def service(self) -> EncryptedSessionService:
        return EncryptedSessionService(
            f"sqlite:///{self.data}",
            BACKEND,
            key_db_url=f"sqlite:///{self.keys}",
            audit=Audit("blind", table=True),
            indexed_state_keys=[KEY],
        )

    async def get(self, user: str) -> Session | None:
        async with self.service() as service:
            return await service.get_session(app_name=APP, user_id=user, session_id="s")

    async def append(self) -> None:
        async with self.service() as service:
            for user in USERS:
                session = await service.get_session(app_name=APP, user_id=user, session_id="s")
                assert session is not None
                await service.append_event(session, event(0, ticket=user))


class Pair(NamedTuple):
    original: Copy
    copy: Copy

    async def assert_intact(self) -> None:
        """Check that the original has lost nothing, and can be written."""
        for user in USERS:
            session = await self.original.get(user)
            assert session is not None
            assert session.state[KEY] == user
        async with self.original.database() as db:
            assert (await verify(db)).bad == 0
        await self.original.append()

    async def restore_keys(self, backup: Path) -> None:
        """Restore the key database, and check that the original has all its records again."""
        shutil.copy(backup, self.original.keys)
        await self.assert_intact()


@pytest.fixture
async def pair(tmp_path: Path) -> Pair:
    original = Copy(tmp_path / "original.db", tmp_path / "keys.db")
    async with original.service() as service:
        for user in USERS:
            await service.create_session(app_name=APP, user_id=user, session_id="s")
    copy = Copy(tmp_path / "copy.db", original.keys)
    shutil.copy(original.data, copy.data)
    async with original.database() as db:
        await rotate_data(db)
    await original.append()
    return Pair(original, copy)


@pytest.fixture
def backup(pair: Pair, tmp_path: Path) -> Path:
    """A backup of the key database."""
    return Path(shutil.copy(pair.original.keys, tmp_path / "backup.db"))


async def test_retire_in_an_older_copy_deletes_no_key_that_the_original_needs(pair: Pair) -> None:
    async with pair.copy.database() as db:
        assert (await retire(db)).deleted_data_keys == 0
        await rotate_master(db)
        await retire(db)
    await pair.assert_intact()


async def test_retire_in_a_copy_that_was_rotated_is_noticed_when_the_original_is_read(
    pair: Pair, backup: Path
) -> None:
    async with pair.copy.database() as db:
        await rotate_data(db)
        assert (await retire(db)).deleted_data_keys > 0
    for user in USERS:
        with pytest.raises(UnknownKeyError, match="is not known"):
            await pair.original.get(user)
    async with pair.original.database() as db:
        assert (await verify(db)).bad
    await pair.restore_keys(backup)


async def test_retire_after_the_rows_of_a_session_were_removed_is_noticed_when_they_are_restored(
    tmp_path: Path,
) -> None:
    url, tables = f"sqlite:///{tmp_path}/s.db", ("secure_witnesses", "secure_sessions")
    async with EncryptedSessionService(url, BACKEND) as service:
        for session in ("s", "removed"):
            await service.create_session(app_name=APP, user_id="ada", session_id=session)
    shutil.copy(tmp_path / "s.db", tmp_path / "backup.db")
    run = sqlite3.connect(tmp_path / "s.db", isolation_level=None).execute
    run("ATTACH ? AS old", (f"{tmp_path}/backup.db",))
    (tag,) = run("SELECT tag FROM secure_sessions WHERE id = (SELECT max(id) FROM secure_sessions)")
    for table in tables:
        run(f"DELETE FROM {table} WHERE tag = ?", tag)
    async with Database(url, BACKEND) as db:
        await rotate_data(db)
        assert (await retire(db)).kept == 0
        assert (await verify(db)).bad == 0
    for table in tables:
        run(f"INSERT INTO {table} SELECT * FROM old.{table} WHERE tag = ?", tag)
    async with EncryptedSessionService(url, BACKEND) as service:
        assert await service.get_session(app_name=APP, user_id="ada", session_id="s")
        with pytest.raises(UnknownKeyError):
            await service.get_session(app_name=APP, user_id="ada", session_id="removed")
    async with Database(url, BACKEND) as db:
        assert (await verify(db)).bad
    async with EncryptedSessionService(f"sqlite:///{tmp_path}/backup.db", BACKEND) as service:
        assert await service.get_session(app_name=APP, user_id="ada", session_id="removed")


async def test_source_of_a_migration_is_erased_after_all_rows_of_a_copy_were_removed(
    tmp_path: Path,
) -> None:
    plain = SqliteSessionService(f"{tmp_path}/adk.db")
    for number in range(2):
        await plain.create_session(app_name=APP, user_id="ada", session_id=f"s{number}")
    source_url, target = f"sqlite+aiosqlite:///{tmp_path}/adk.db", f"sqlite:///{tmp_path}/s.db"
    async with AdkTables(source_url) as source, Database(target, BACKEND) as db:
        await migrate(source, db)
        run = sqlite3.connect(tmp_path / "s.db", isolation_level=None).execute
        (tag,) = run("SELECT min(tag) FROM secure_sessions").fetchone()
        for table in ("secure_witnesses", "secure_sessions"):
            run(f"DELETE FROM {table} WHERE tag = ?", (tag,))
        done = await erase_source(source, db, dry_run=True)
        assert (done.comparison.deleted, done.comparison.equal) == (1, 1)
        assert any("erased or expired in the target: 1 item; " in line for line in done.lines())
        assert (await erase_source(source, db)).sessions == 2


async def test_separate_with_the_key_database_of_the_original_is_noticed_by_its_services(
    pair: Pair, backup: Path
) -> None:
    async with pair.copy.database() as db:
        assert (await separate(db)).complete
    with pytest.raises(ConfigurationError, match="the key database belongs to another database"):
        await pair.original.get("ada")
    await pair.restore_keys(backup)


async def test_separate_with_a_key_database_of_its_own_loses_nothing(pair: Pair) -> None:
    own = Copy(pair.copy.data, pair.copy.data.with_name("own-keys.db"))
    shutil.copy(pair.original.keys, own.keys)
    async with own.database() as db:
        assert (await separate(db)).complete
    assert await own.get("ada") is not None
    await pair.assert_intact()


async def test_erasure_in_the_copy_erases_the_user_of_the_original(
    pair: Pair, backup: Path
) -> None:
    async with pair.copy.database() as db:
        await erase_user(db, APP, "ada")
    with pytest.raises(UnknownKeyError):
        await pair.original.get("ada")
    assert await pair.original.get("bob") is not None
    async with pair.original.database() as db:
        assert (await verify(db)).bad
    await pair.restore_keys(backup)


async def test_move_of_the_keys_to_the_copy_is_noticed_and_can_be_undone(pair: Pair) -> None:
    async with pair.copy.database() as db:
        await move_keys(db, "db")
    with pytest.raises(ConfigurationError, match="the key database is empty"):
        await pair.original.get("ada")
    async with pair.copy.database() as db:
        await move_keys(db, "key-db")
    await pair.assert_intact()


async def test_purge_in_the_copy_deletes_no_session_of_the_original(pair: Pair) -> None:
    async with pair.copy.database() as db:
        assert (await purge_sessions(db, timedelta())).deleted == 2
    assert await pair.copy.get("ada") is None
    await pair.assert_intact()


async def test_audit_purge_in_the_copy_deletes_no_record_of_the_original(pair: Pair) -> None:
    async with pair.original.database() as db:
        before = (await verify_audit(db)).records
    async with pair.copy.database() as db:
        with shifted(30):
            assert (await purge_audit(db, timedelta(days=7))).records > 0
    async with pair.original.database() as db:
        found = await verify_audit(db)
    assert (found.records, found.bad) == (before, 0)
    await pair.assert_intact()


async def test_dropped_index_of_the_copy_leaves_that_of_the_original(pair: Pair) -> None:
    async with pair.copy.database() as db:
        await fill_index(db, APP, [KEY])
        await drop_index(db, APP, [KEY])
    async with pair.original.service() as service:
        found = await service.find_sessions(app_name=APP, key=KEY, value="ada")
    assert [session.user_id for session in found.sessions] == ["ada"]


async def test_vacuum_of_the_copy_deletes_no_row(pair: Pair) -> None:
    async with pair.copy.database() as db:
        assert (await vacuum(db)).cleared
    assert await pair.copy.get("ada") is not None
    await pair.assert_intact()


async def test_source_of_a_migration_is_not_erased_if_the_target_is_an_older_copy(
    tmp_path: Path,
) -> None:
    source_url = f"sqlite+aiosqlite:///{tmp_path}/adk.db"
    plain = SqliteSessionService(f"{tmp_path}/adk.db")
    target = f"sqlite:///{tmp_path}/s.db"
    for number in range(2):
        await plain.create_session(app_name=APP, user_id="ada", session_id=f"s{number}")
        if number:
            shutil.copy(tmp_path / "s.db", tmp_path / "copy.db")
        async with AdkTables(source_url) as source, Database(target, BACKEND) as db:
            assert (await migrate(source, db)).succeeded
    async with (
        AdkTables(source_url) as source,
        Database(f"sqlite:///{tmp_path}/copy.db", BACKEND) as db,
    ):
        done = await erase_source(source, db)
    assert (done.comparison.all_equal, done.sessions) == (False, 0)
    for number in range(2):
        kept = await plain.get_session(app_name=APP, user_id="ada", session_id=f"s{number}")
        assert kept is not None
