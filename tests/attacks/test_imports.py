"""Attacks on `secure_migrated`, which says what `migrate` must not copy again, or replace."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import pytest

from adk_secure_sessions import (
    AesGcmBackend,
    ConfigurationError,
    EncryptedSessionService,
    TamperedError,
    WrongKeyError,
)
from adk_secure_sessions.formats.events import encode
from adk_secure_sessions.formats.records import EncodedEvent
from adk_secure_sessions.maintenance import Database, erase_user, verify
from adk_secure_sessions.storage.features.imports import Imports, ImportStatus
from adk_secure_sessions.storage.writes import DeleteSession
from tests.maintenance.support import APP, OLD, event
from tests.sqlite_files import execute, value

COPIED, DELETED, BURIED = "copied", "deleted", "buried"
USER = "ada"


class Victim(NamedTuple):
    """A database to which sessions were copied, and the tags of its rows.

    `copied` is stored, `deleted` was copied and then deleted, and `buried` was deleted before it
    was copied.  The user's state was copied, too.
    """

    path: Path
    tags: dict[str, bytes]

    def maintained(self) -> Database:
        return Database(f"sqlite:///{self.path}", AesGcmBackend(OLD))

    def service(self) -> EncryptedSessionService:
        return EncryptedSessionService(f"sqlite:///{self.path}", AesGcmBackend(OLD))

    def modify(self, name: str, change: str) -> None:
        column = change.partition(" ")[0]
        new = MODIFIED[change]
        self.run(
            f"UPDATE secure_migrated SET {column} = {new} WHERE tag = :tag", tag=self.tags[name]
        )

    def run(self, statement: str, **values: object) -> None:
        execute(self.path, statement, values)

    def row(self, tag: bytes, table: str = "secure_migrated") -> tuple[object, ...]:
        (row,) = execute(self.path, f"SELECT * FROM {table} WHERE tag = ?", [tag])
        return row

    def put(self, row: tuple[object, ...], table: str = "secure_migrated") -> None:
        slots = ", ".join("?" * len(row))
        execute(self.path, f"REPLACE INTO {table} VALUES ({slots})", row)


async def copy_session(
    store: Imports, name: str, version: str = "1", *, replace: bool = False
) -> ImportStatus:
    return await store.import_session(
        APP,
        USER,
        name,
        state=b"{}",
        events=[EncodedEvent(encode(event(n)), n) for n in range(3)],
        created_at=1,
        updated_at=2,
        source_etag=version,
        replace=replace,
    )


async def build(path: Path) -> Victim:
    victim = Victim(path, {})
    async with victim.service() as service:
        await service.prepare_tables()
    async with victim.maintained() as db:
        store = db.imports
        index_master = (await db.keyring()).index_master
        for name in (COPIED, DELETED, BURIED):
            victim.tags[name] = index_master.tag_of(APP, USER, name)
        victim.tags["user"] = index_master.tag_of(APP, USER)
        await copy_session(store, COPIED)
        await copy_session(store, DELETED)
        await store.import_state((APP, USER), b'{"k":1}')
        deleted = await db.runner.identify(APP, USER, DELETED)
        await db.runner.run(DeleteSession(deleted))
        await store.add_tombstone(APP, USER, BURIED)
    return victim


_built: list[tuple[bytes, dict[str, bytes]]] = []  # the file of the first test, for the others


@pytest.fixture
async def victim(tmp_path: Path) -> Victim:
    path = tmp_path / "sessions.db"
    if not _built:
        victim = await build(path)
        _built.append((path.read_bytes(), victim.tags))
    path.write_bytes(_built[0][0])
    return Victim(path, dict(_built[0][1]))


@pytest.fixture
async def another(tmp_path: Path) -> Victim:
    """Another database, with the same root key and the same sessions."""
    return await build(tmp_path / "another.db")


@pytest.fixture
async def store(victim: Victim) -> AsyncIterator[Imports]:
    async with victim.maintained() as db:
        yield db.imports


async def problems(victim: Victim) -> list[str]:
    async with victim.maintained() as db:
        return [f"{one.table}: {one.detail}" for one in (await verify(db)).problems]


async def assert_rejected(victim: Victim, store: Imports, name: str) -> None:
    with pytest.raises(TamperedError, match="secure_migrated"):
        await store.rows_for([(APP, USER, name)])
    for version in ("1", "2"):
        with pytest.raises(TamperedError, match="secure_migrated"):
            await copy_session(store, name, version, replace=True)
    if name != COPIED:
        with pytest.raises(TamperedError, match="secure_migrated"):
            await store.add_tombstone(APP, USER, name)
    (found,) = await problems(victim)
    assert found.startswith("secure_migrated: ")


MODIFIED = {
    "row_id": "row_id + 1",
    "row_id to a tombstone": "0",
    "number": "number + 1",
    "source": "zeroblob(16)",
    "seal": "zeroblob(16)",
    "seal to a text": "'seal'",
    "row_id to a text": "'row'",
}


@pytest.mark.in_turn("change", "name")
@pytest.mark.parametrize("change", MODIFIED)
@pytest.mark.parametrize("name", [COPIED, DELETED])
async def test_modified_row_is_rejected(
    victim: Victim, store: Imports, change: str, name: str
) -> None:
    victim.modify(name, change)
    await assert_rejected(victim, store, name)


@pytest.mark.parametrize(("taken", "name"), [(BURIED, COPIED), (COPIED, BURIED), ("user", DELETED)])
async def test_row_moved_to_another_session_is_rejected(
    victim: Victim, store: Imports, taken: str, name: str
) -> None:
    _, *rest = victim.row(victim.tags[taken])
    victim.put((victim.tags[name], *rest))
    await assert_rejected(victim, store, name)


@pytest.mark.parametrize("name", [COPIED, BURIED])
async def test_inserted_row_of_another_database_is_rejected(
    victim: Victim, another: Victim, store: Imports, name: str
) -> None:
    _, *rest = another.row(another.tags[name])
    victim.put((victim.tags[name], *rest))
    await assert_rejected(victim, store, name)


@pytest.mark.parametrize("change", MODIFIED)
async def test_modified_row_of_a_user_is_rejected(
    victim: Victim, store: Imports, change: str
) -> None:
    victim.modify("user", change)
    for call in (
        store.rows_for([(APP, USER, "new")]),
        store.rows_for([(APP, USER)]),
        store.import_state((APP, USER), b'{"k":2}', replace=True),
    ):
        with pytest.raises(TamperedError, match="secure_migrated"):
            await call
    if change != "row_id to a tombstone":
        # The erasure of a user must not depend on a row that somebody may tamper with.
        async with victim.maintained() as db:
            await erase_user(db, APP, USER)
        assert (await store.rows_for([(APP, USER, "new")]))[APP, USER, "new"].row.is_tombstone


async def test_replayed_row_never_lets_an_import_replace_a_session(
    victim: Victim, store: Imports
) -> None:
    older = victim.row(victim.tags[COPIED])
    assert await copy_session(store, COPIED, "2", replace=True) is ImportStatus.OUTDATED
    victim.put(older)
    assert not (await store.rows_for([(APP, USER, COPIED)]))[APP, USER, COPIED].is_untouched
    assert await copy_session(store, COPIED, "3", replace=True) is ImportStatus.CONFLICT


async def test_replayed_row_of_a_user_never_lets_an_import_replace_a_state(
    victim: Victim, store: Imports
) -> None:
    older = victim.row(victim.tags["user"])
    await store.import_state((APP, USER), b'{"k":2}', replace=True)
    victim.put(older)
    result = await store.import_state((APP, USER), b'{"k":3}', replace=True)
    assert result is ImportStatus.CONFLICT


async def test_state_rolled_back_behind_its_import_is_rejected(
    victim: Victim, store: Imports
) -> None:
    tag = victim.tags["user"]
    tables = ("secure_users", "secure_witnesses")
    older = [victim.row(tag, table) for table in tables]
    await store.import_state((APP, USER), b'{"k":2}', replace=True)
    for table, row in zip(tables, older, strict=True):
        victim.put(row, table)
    async with victim.maintained() as db:  # it has read no later version
        with pytest.raises(TamperedError, match="version 2 was imported: an older row"):
            await db.imports.import_state((APP, USER), b'{"k":3}', replace=True)
    (found,) = await problems(victim)
    assert "an older row was replayed" in found


async def test_session_is_not_replaced_if_its_row_was_removed(
    victim: Victim, store: Imports
) -> None:
    victim.run("DELETE FROM secure_migrated")
    assert await copy_session(store, COPIED, "2", replace=True) is ImportStatus.SAME_ID


async def test_deleted_session_is_copied_again_if_its_row_was_removed(
    victim: Victim, store: Imports
) -> None:
    """Nobody can detect this: docs/limits.md says so."""
    victim.run("DELETE FROM secure_migrated WHERE tag = :tag", tag=victim.tags[DELETED])
    assert await copy_session(store, DELETED) is ImportStatus.NEW
    assert await problems(victim) == []


async def test_replayed_list_of_features_does_not_hide_imports(
    victim: Victim, tmp_path: Path
) -> None:
    path = tmp_path / "without.db"
    async with EncryptedSessionService(f"sqlite:///{path}", AesGcmBackend(OLD)) as service:
        await service.prepare_tables()
    fresh = Victim(path, {})
    older = value(path, "SELECT value FROM secure_meta WHERE name = 'features'")
    async with fresh.maintained() as db:
        await copy_session(db.imports, COPIED)
    fresh.run("UPDATE secure_meta SET value = :older WHERE name = 'features'", older=older)
    async with fresh.maintained() as db:
        store = db.imports
        with pytest.raises(WrongKeyError, match="an older list was replayed"):
            await store.rows_for([(APP, USER, COPIED)])
        (found,) = (await verify(db)).problems
        assert "'migration' is not listed" in found.detail
        # What is sealed stays sealed, so an import may add the feature again.
        assert await copy_session(store, COPIED) is ImportStatus.UNCHANGED
        assert (await verify(db)).bad == 0


async def test_made_up_or_replayed_mark_of_a_complete_migration_is_rejected(
    victim: Victim, another: Victim, store: Imports
) -> None:
    async with another.maintained() as db:
        await db.imports.store_mark()
    theirs = value(another.path, "SELECT value FROM secure_meta WHERE name = 'migration'")
    assert not await store.migration_mark()
    insert = "REPLACE INTO secure_meta VALUES ('migration', :value)"
    for forged in (theirs, "complete", "complete " + "0" * 32):
        victim.run(insert, value=forged)
        with pytest.raises(WrongKeyError, match="`migration` of secure_meta was tampered with"):
            await store.migration_mark()
    assert await problems(victim) != []


async def test_removed_table_of_imports_is_noticed(victim: Victim) -> None:
    victim.run("DROP TABLE secure_migrated")
    for opened in (victim.maintained(), victim.service()):
        async with opened:
            with pytest.raises(ConfigurationError, match="secure_migrated was removed"):
                await (
                    opened.keyring() if isinstance(opened, Database) else opened.prepare_tables()
                )


async def test_modified_row_of_an_erased_user_is_rejected(victim: Victim, store: Imports) -> None:
    async with victim.maintained() as db, victim.service() as service:
        await erase_user(db, APP, USER)
        await service.create_session(app_name=APP, user_id=USER)  # the user comes back
    for _ in range(2):  # the second import knows the rows of the app and the user
        assert await copy_session(store, "new") is ImportStatus.DELETED
    victim.run(
        "UPDATE secure_migrated SET row_id = 7, number = 1 WHERE tag = :tag",
        tag=victim.tags["user"],
    )
    with pytest.raises(TamperedError, match="secure_migrated"):
        await copy_session(store, "new")
