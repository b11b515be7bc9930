"""Attacks while `PlaintextFallbackService` reads a plaintext source that nothing authenticates.

The source is in memory: the attacker changes its attributes.  The encrypted database is a SQLite
file, which the attacker changes with SQL.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from adk_secure_sessions import (
    AesGcmBackend,
    ConfigurationError,
    EncryptedSessionService,
    TamperedError,
    WrongKeyError,
)
from adk_secure_sessions.maintenance import Database, erase_user
from adk_secure_sessions.migration.fallback import PlaintextFallbackService
from tests.migration.lookups import APP, MemoryLookup, said
from tests.sqlite_files import execute, value

BACKEND = AesGcmBackend(bytes(range(32)))
ADA: dict[str, Any] = {"app_name": APP, "user_id": "ada"}
VISIT: dict[str, Any] = {**ADA, "session_id": "visit"}
OTHER: dict[str, Any] = {**ADA, "session_id": "other"}
FEATURES = "SELECT value FROM secure_meta WHERE name = 'features'"


class Target:
    """The encrypted database."""

    def __init__(self, path: Path, source: MemoryLookup) -> None:
        self.path = path
        self.source = source
        self.url = f"sqlite+aiosqlite:///{path}"

    @asynccontextmanager
    async def service(self) -> AsyncIterator[PlaintextFallbackService]:
        """A service that has just started."""
        service = EncryptedSessionService(self.url, BACKEND)
        async with PlaintextFallbackService(service, self.source) as opened:
            yield opened

    @asynccontextmanager
    async def plain_service(self) -> AsyncIterator[EncryptedSessionService]:
        async with EncryptedSessionService(self.url, BACKEND) as service:
            yield service

    async def forget(self, *ids: str) -> None:
        """Delete the row of `secure_migrated` of a user or a session."""
        async with Database(self.url, BACKEND) as db:
            index_master = (await db.keyring()).index_master
        tag = index_master.tag_of(*ids)
        execute(self.path, "DELETE FROM secure_migrated WHERE tag = ?", [tag])


@pytest.fixture
def source() -> MemoryLookup:
    source = MemoryLookup()
    source.put("ada", "visit", ["one"], step=1)
    source.put("ada", "other", ["hello"], step=1)
    source.users["ada"] = {"role": "patient"}
    return source


@pytest.fixture
async def target(tmp_path: Path, source: MemoryLookup) -> Target:
    """A database into which `visit` and the states were copied."""
    target = Target(tmp_path / "sessions.db", source)
    async with target.service() as service:
        session = await service.get_session(**VISIT)
        assert session is not None
        await service.append_event(session, said("two", 2))
    return target


def texts(session: Any) -> list[str]:
    return [event.content.parts[0].text for event in session.events]


# --- An attacker who can write to the source ------------------------------------------------------


async def test_forged_source_is_believed_for_sessions_that_were_not_copied(
    target: Target, source: MemoryLookup
) -> None:
    """docs/threats.md says so.  The first read stores the forgery, encrypted."""
    source.put("ada", "other", ["forged"], step=666)
    source.put("bob", "planted", ["forged"])
    async with target.service() as service:
        session = await service.get_session(**OTHER)
        assert session is not None
        assert (texts(session), session.state["step"]) == (["forged"], 666)
        listing = await service.list_sessions(app_name=APP)
        assert [one.id for one in listing.sessions] == ["other", "planted", "visit"]
    async with target.plain_service() as service:
        assert texts(await service.get_session(**OTHER)) == ["forged"]


async def test_forged_source_does_not_change_what_was_copied(
    target: Target, source: MemoryLookup
) -> None:
    source.put("ada", "visit", ["forged"] * 9, step=666)
    source.users["ada"] = {"role": "doctor"}
    source.app = {"greeting": "forged"}
    async with target.service() as service:
        session = await service.get_session(**VISIT)
        assert session is not None
        assert texts(session) == ["one", "two"]
        assert session.state == {"step": 1, "user:role": "patient"}
        other = await service.get_session(**OTHER)
        assert other is not None
        assert other.state == {"step": 1, "user:role": "patient"}
        assert await service.get_user_state(**ADA) == {"role": "patient"}
        await service.append_event(session, said("three", 3))
        assert texts(await service.get_session(**VISIT)) == ["one", "two", "three"]


async def test_forged_source_does_not_bring_back_what_was_deleted(
    target: Target, source: MemoryLookup
) -> None:
    async with target.service() as service:
        await service.delete_session(**VISIT)
        await service.delete_session(**OTHER)
    source.put("ada", "visit", ["forged"])
    source.put("ada", "other", ["forged"])
    async with target.service() as service:
        for ids in (VISIT, OTHER):
            assert await service.get_session(**ids) is None
        assert (await service.list_sessions(app_name=APP)).sessions == []


async def test_forged_source_does_not_bring_back_an_erased_user(
    target: Target, source: MemoryLookup
) -> None:
    async with Database(target.url, BACKEND) as db:
        await erase_user(db, APP, "ada")
    source.put("ada", "planted", ["forged"])
    source.users["ada"] = {"role": "doctor"}
    async with target.service() as service:
        for session_id in ("visit", "other", "planted"):
            assert await service.get_session(**ADA, session_id=session_id) is None
        assert (await service.list_sessions(app_name=APP)).sessions == []
        assert await service.get_user_state(**ADA) == {}
        created = await service.create_session(**VISIT)
        assert created.state == {}


@pytest.mark.parametrize("is_empty", [False, True])
async def test_replayed_list_of_features_does_not_hide_the_source_from_an_erasure(
    tmp_path: Path, source: MemoryLookup, is_empty: bool
) -> None:
    """The attacker replays it while `erase-user` runs, and restores the newer list afterwards."""
    target = Target(tmp_path / "erased.db", source)
    async with target.plain_service() as plain:
        await plain.prepare_tables()
    older = value(target.path, FEATURES)
    async with target.service() as service:
        if is_empty:
            await service._imports.feature.ensure()
        else:
            session = await service.get_session(**OTHER)
            assert session is not None
            await service.append_event(session, said("more", 2))
    newer = value(target.path, FEATURES)
    assert older != newer
    execute(target.path, "UPDATE secure_meta SET value = ? WHERE name = 'features'", [older])
    async with Database(target.url, BACKEND) as db:
        assert (await erase_user(db, APP, "ada")).has_migration_table
    assert value(target.path, FEATURES) == newer  # the erasure has added the feature again
    async with target.service() as service:
        assert (await service.list_sessions(app_name=APP)).sessions == []


# --- An attacker who can also write to the encrypted database -------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        "row_id = row_id + 1",
        "number = number + 1",
        "number = 0, row_id = 0",
        "source = zeroblob(16)",
        "seal = zeroblob(16)",
        "tag",
    ],
)
async def test_modified_row_of_a_copy_is_rejected(target: Target, change: str) -> None:
    async with target.plain_service() as service:
        await service.delete_session(**VISIT)
    async with Database(target.url, BACKEND) as db:
        tag = (await db.keyring()).index_master.tag_of(APP, "ada", "visit")
    if change == "tag":  # the row of another owner
        execute(target.path, "DELETE FROM secure_migrated WHERE tag = ?", [tag])
        first = "tag = (SELECT min(tag) FROM secure_migrated)"
        execute(target.path, f"UPDATE secure_migrated SET tag = ? WHERE {first}", [tag])
    else:
        execute(target.path, f"UPDATE secure_migrated SET {change} WHERE tag = ?", [tag])
    async with target.service() as service:
        calls: list[Any] = [
            lambda: service.get_session(**VISIT),
            lambda: service.list_sessions(**ADA),
            lambda: service.create_session(**VISIT),
            lambda: service.delete_session(**VISIT),
        ]
        for call in calls:
            with pytest.raises(TamperedError):
                await call()


async def test_deleted_row_of_a_copy_does_not_undo_the_copy(
    target: Target, source: MemoryLookup
) -> None:
    await target.forget(APP, "ada", "visit")
    await target.forget(APP, "ada")
    source.users["ada"] = {"role": "doctor"}
    async with target.service() as service:
        session = await service.get_session(**VISIT)
        assert session is not None
        assert texts(session) == ["one", "two"]
        assert session.state == {"step": 1, "user:role": "patient"}
        listing = await service.list_sessions(**ADA)
        assert {one.id: one.state["user:role"] for one in listing.sessions} == {
            "visit": "patient",
            "other": "patient",
        }
        await service.append_event(session, said("three", 3))
        assert texts(await service.get_session(**VISIT)) == ["one", "two", "three"]
        assert await service.get_user_state(**ADA) == {"role": "patient"}


async def test_deleted_row_brings_back_what_the_source_has(target: Target) -> None:
    """docs/limits.md says so: nothing proves that the row existed."""
    async with target.service() as service:
        await service.delete_session(**VISIT)
        await service.delete_session(**OTHER)
    for session_id in ("visit", "other"):
        await target.forget(APP, "ada", session_id)
    async with target.service() as service:
        assert texts(await service.get_session(**VISIT)) == ["one"]  # as before the copy
        assert texts(await service.get_session(**OTHER)) == ["hello"]


async def test_deleted_row_of_a_user_brings_back_an_erased_user(target: Target) -> None:
    """docs/limits.md says so: nothing proves that the row existed."""
    async with Database(target.url, BACKEND) as db:
        await erase_user(db, APP, "ada")
    await target.forget(APP, "ada")
    async with target.service() as service:
        assert texts(await service.get_session(**OTHER)) == ["hello"]
        assert await service.get_session(**VISIT) is None  # this row still exists


async def test_removed_session_does_not_fall_back_to_the_source(target: Target) -> None:
    for table in ("secure_sessions", "secure_events"):
        execute(target.path, f"DELETE FROM {table}")
    async with target.service() as service:
        with pytest.raises(TamperedError):  # its version witness is still there
            await service.get_session(**VISIT)
    async with Database(target.url, BACKEND) as db:
        tag = (await db.keyring()).index_master.tag_of(APP, "ada", "visit")
    execute(target.path, "DELETE FROM secure_witnesses WHERE tag = ?", [tag])
    async with target.service() as service:
        assert await service.get_session(**VISIT) is None


# --- The mark that ends the fallback --------------------------------------------------------------


async def test_forged_mark_is_rejected(target: Target) -> None:
    forged = "INSERT INTO secure_meta VALUES ('migration', ?)"
    execute(target.path, forged, ["complete " + "00" * 16])
    async with target.service() as service:
        with pytest.raises(WrongKeyError):
            await service.get_session(**OTHER)


async def test_removed_mark_switches_the_fallback_on_again(
    target: Target, source: MemoryLookup
) -> None:
    """Therefore, replace `PlaintextFallbackService` after the migration."""
    async with target.service() as service:
        await service._copy_session((APP, "ada", "other"))
        await service._imports.store_mark()
    source.put("ada", "planted", ["forged"])
    async with target.service() as service:
        assert await service.get_session(**ADA, session_id="planted") is None
    execute(target.path, "DELETE FROM secure_meta WHERE name = 'migration'")
    async with target.plain_service() as plain:
        assert await plain.get_session(**ADA, session_id="planted") is None
    async with target.service() as service:
        assert texts(await service.get_session(**ADA, session_id="planted")) == ["forged"]
        assert texts(await service.get_session(**VISIT)) == ["one", "two"]


async def test_replayed_mark_that_was_withdrawn_ends_the_fallback_again(
    target: Target, source: MemoryLookup
) -> None:
    """The sessions are then missing, and are neither forged nor overwritten."""
    source.put("ada", "third", ["not copied"])
    async with target.service() as service:
        await service._imports.store_mark()
    mark = value(target.path, "SELECT value FROM secure_meta WHERE name = 'migration'")
    async with target.service() as service:
        assert await service._imports.withdraw_mark()
    async with target.service() as service:
        assert await service.get_session(**OTHER) is not None
    execute(target.path, "INSERT INTO secure_meta VALUES ('migration', ?)", [mark])
    async with target.service() as service:
        assert await service.get_session(**ADA, session_id="third") is None


async def test_removed_table_or_feature_is_rejected(target: Target) -> None:
    execute(target.path, "UPDATE secure_meta SET value = '-' || substr(value, instr(value, ' ')) "
               "WHERE name = 'features'")  # fmt: skip
    async with target.service() as service:
        with pytest.raises(WrongKeyError):
            await service.get_session(**VISIT)
    execute(target.path, "DROP TABLE secure_migrated")
    async with target.service() as service:
        with pytest.raises((WrongKeyError, ConfigurationError)):
            await service.get_session(**VISIT)
