"""Attacks on collections and their items: which are rejected, and which nobody can detect."""

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from adk_secure_sessions import (
    AesGcmBackend,
    ConfigurationError,
    EncryptedSessionService,
    TamperedError,
    UnknownKeyError,
    WrongKeyError,
)
from adk_secure_sessions.formats.events import encode_item
from adk_secure_sessions.maintenance import Database, retire, rotate_data, separate, verify
from adk_secure_sessions.storage import feature_list, survey
from tests.attacks.world import LONG, PACKED
from tests.maintenance.support import APP, OLD, event

ITEMS = tuple(encode_item({"n": n, "long": LONG}) for n in range(3))  # long enough to compress
OTHER_ITEMS = tuple(encode_item({"other": n}) for n in range(3))
NEW = encode_item({"new": True})
MISPLACED = (TamperedError, UnknownKeyError)  # the second names a key of another user
OF = "(SELECT id FROM secure_sessions WHERE tag = :{})"


class Victim(NamedTuple):
    """A database with collections, the tags of its rows, and two other copies of the database.

    Ada has the session `session` with three events, and the collections `one` and `two` with three
    items each; Bob has the collection `bobs`.  *older* is the file before the last item of `one`.
    In *fork*, this last item, and `two`, are other ones.
    """

    path: Path
    older: Path
    fork: Path
    tags: dict[str, bytes]
    options: dict[str, Any]  # of its services

    def service(self, path: Path | None = None) -> EncryptedSessionService:
        return EncryptedSessionService(
            f"sqlite:///{path or self.path}", AesGcmBackend(OLD), **self.options
        )

    def maintained(self) -> Database:
        return Database(f"sqlite:///{self.path}", AesGcmBackend(OLD))

    def run(self, *statements: str, **values: object) -> None:
        with closing(sqlite3.connect(self.path)) as connection:
            for statement in statements:
                used = {k: v for k, v in (self.tags | values).items() if f":{k}" in statement}
                assert connection.execute(statement, used).rowcount, f"no row was met: {statement}"
            connection.commit()

    def value(self, query: str) -> Any:
        with closing(sqlite3.connect(self.path)) as connection:
            used = {k: v for k, v in self.tags.items() if f":{k}" in query}
            ((value,),) = connection.execute(query, used).fetchall()
        return value

    def take(self, source: Path, table: str, where: str) -> None:
        """Replace the rows at *where* by those of another copy of the database."""
        with closing(sqlite3.connect(self.path)) as connection:
            connection.execute("ATTACH ? AS source", (str(source),))
            used = {k: v for k, v in self.tags.items() if f":{k}" in where}
            rows = connection.execute(f"SELECT * FROM source.{table} WHERE {where}", used)
            for row in rows.fetchall():
                slots = ", ".join("?" * len(row))
                connection.execute(f"REPLACE INTO main.{table} VALUES ({slots})", row)
            connection.commit()
            assert connection.total_changes


def copied(path: Path, name: str) -> Path:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return Path(shutil.copy(path, path.with_name(name)))


OPTIONS: dict[str, dict[str, Any]] = {"unpacked": {}, "packed": PACKED}


@pytest.fixture(params=["unpacked", pytest.param("packed", marks=pytest.mark.soak)])
async def victim(
    request: pytest.FixtureRequest, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Victim:
    """A copy of files that are built once: that takes longer than an attack."""
    name = request.param
    if name not in _built:
        _built[name] = await build(tmp_path_factory.mktemp("collections"), OPTIONS[name])
    first = _built[name]
    for file in first.path.parent.iterdir():
        shutil.copy(file, tmp_path)
    older, fork = tmp_path / first.older.name, tmp_path / first.fork.name
    return Victim(tmp_path / first.path.name, older, fork, first.tags, first.options)


_built: dict[str, Victim] = {}


async def build(directory: Path, options: dict[str, Any]) -> Victim:
    path = directory / "sessions.db"

    def service(path: Path) -> EncryptedSessionService:
        return EncryptedSessionService(f"sqlite:///{path}", AesGcmBackend(OLD), **options)

    async with service(path) as first:
        session = await first.create_session(app_name=APP, user_id="ada", session_id="session")
        for n in range(3):
            await first.append_event(session, event(n))
        for item in ITEMS[:2]:
            await first.collections.append((APP, "ada", "one"), item)
        master = (await first.collections.runner.keyring()).index_master
        tags = {name: master.mac("collection", APP, "ada", name) for name in ("one", "two")}
        tags["bobs"] = master.mac("collection", APP, "bob", "bobs")
        tags["session"] = master.tag_of(APP, "ada", "session")
    older = copied(path, "older.db")
    fork = copied(path, "fork.db")
    for file, items in ((path, ITEMS), (fork, OTHER_ITEMS)):
        async with service(file) as later:
            await later.collections.append((APP, "ada", "one"), items[2])
            for item in items:
                await later.collections.append((APP, "ada", "two"), item)
    async with service(path) as last:
        for item in ITEMS:
            await last.collections.append((APP, "bob", "bobs"), item)
    copied(path, "whole.db")
    copied(fork, "whole-fork.db")
    victim = Victim(path, older, fork, tags, options)
    longest = victim.value("SELECT max(length(event)) FROM secure_events")
    assert (longest < len(ITEMS[0])) == bool(options), "the items are not packed as they should be"
    return victim


async def assert_rejected(victim: Victim, *names: str) -> None:
    async with victim.service() as service:
        for name in names:
            with pytest.raises(MISPLACED):
                await service.collections.get((APP, "ada", name))
            with pytest.raises(MISPLACED):
                await service.collections.get((APP, "ada", name), limit=1)
            with pytest.raises(MISPLACED):
                await service.collections.append((APP, "ada", name), NEW)
    async with victim.maintained() as db:
        assert (await verify(db)).bad


async def names(service: EncryptedSessionService, user: str = "ada") -> list[str]:
    return sorted(one.name for one in await service.collections.of_user(APP, user))


async def listed(service: EncryptedSessionService) -> list[str]:
    found = await service.list_sessions(app_name=APP, user_id="ada")
    return [one.id for one in found.sessions]


def to(kind: int, name: str) -> str:
    return f"UPDATE secure_sessions SET base_revision = {kind} WHERE tag = :{name}"


# --- sessions and collections --------------------------------------------------------------------


async def test_session_made_a_collection_is_rejected_wherever_it_is_read(victim: Victim) -> None:
    victim.run(to(-2, "session"))
    async with victim.service() as service:
        with pytest.raises(TamperedError):
            await service.get_session(app_name=APP, user_id="ada", session_id="session")
        with pytest.raises(TamperedError):
            await service.collections.of_user(APP, "ada")
        with pytest.raises(TamperedError):
            await listed(service)
    async with victim.maintained() as db:
        found = await verify(db)
        assert (found.sessions, found.bad) == (0, 1)
    victim.run(to(-1, "session"))
    async with victim.service() as service:
        assert await listed(service) == ["session"]


async def test_collection_made_a_session_is_rejected_wherever_it_is_read(victim: Victim) -> None:
    victim.run(to(-1, "one"))
    await assert_rejected(victim, "one")
    async with victim.service() as service:
        with pytest.raises(TamperedError):
            await listed(service)
        assert await names(service) == ["two"], "docs/limits.md: a listing proves no completeness"
    victim.run(to(-2, "one"))
    async with victim.service() as service:
        found = await service.collections.get((APP, "ada", "one"))
        assert found is not None
        assert found.items == ITEMS


@pytest.mark.parametrize("base_revision", [0, 3, -3, "NULL", "'-2'", "-2.5"])
async def test_collection_with_another_base_revision_is_rejected(
    victim: Victim, base_revision: object
) -> None:
    column = "base_revision BIGINT NOT NULL"
    with closing(sqlite3.connect(victim.path)) as connection:  # lift NOT NULL
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute(
            "UPDATE sqlite_master SET sql = replace(sql, ?, 'base_revision BLOB')", (column,)
        )
        connection.commit()
    victim.run(f"UPDATE secure_sessions SET base_revision = {base_revision} WHERE tag = :one")
    await assert_rejected(victim, "one")


async def test_tags_of_a_session_and_a_collection_swapped_are_rejected(victim: Victim) -> None:
    swap = "UPDATE secure_sessions SET tag = {} WHERE tag = {}"
    victim.run(swap.format("x'00'", ":one"), swap.format(":one", ":session"))
    victim.run(swap.format(":session", "x'00'"))
    await assert_rejected(victim, "one")
    async with victim.service() as service:
        with pytest.raises(TamperedError):
            await service.get_session(app_name=APP, user_id="ada", session_id="session")


async def test_collection_given_to_another_user_is_rejected(victim: Victim) -> None:
    of = "(SELECT user_row FROM secure_sessions WHERE tag = :bobs)"
    victim.run(f"UPDATE secure_sessions SET user_row = {of} WHERE tag = :one")
    await assert_rejected(victim, "one")
    async with victim.service() as service:
        with pytest.raises(MISPLACED):
            await service.collections.of_user(APP, "bob")


# --- items ---------------------------------------------------------------------------------------

MOVES = {
    "item of another collection": ("two", "one"),
    "event of a session": ("session", "one"),
    "item of another user": ("bobs", "one"),
}


@pytest.mark.parametrize(("source", "target"), MOVES.values(), ids=MOVES.keys())
@pytest.mark.parametrize("seq", [0, 2], ids=["first", "last"])
async def test_item_replaced_by_a_row_of_something_else_is_rejected(
    victim: Victim, source: str, target: str, seq: int
) -> None:
    at = f"session_row = {OF.format(target)} AND seq = {seq}"
    victim.run(
        f"DELETE FROM secure_events WHERE {at}",
        f"UPDATE secure_events SET session_row = {OF.format(target)} "
        f"WHERE session_row = {OF.format(source)} AND seq = {seq}",
    )
    async with victim.service() as service:
        with pytest.raises(MISPLACED):
            await service.collections.get((APP, "ada", target))
    async with victim.maintained() as db:
        assert (await verify(db)).bad


async def test_item_moved_into_a_session_is_rejected(victim: Victim) -> None:
    at = f"session_row = {OF.format('session')} AND seq = 1"
    victim.run(
        f"UPDATE secure_events SET event = (SELECT event FROM secure_events WHERE session_row = "
        f"{OF.format('one')} AND seq = 1) WHERE {at}"
    )
    async with victim.service() as service:
        with pytest.raises(TamperedError):
            await service.get_session(app_name=APP, user_id="ada", session_id="session")


async def test_item_of_another_copy_of_the_database_is_rejected(victim: Victim) -> None:
    victim.take(victim.fork, "secure_events", f"session_row = {OF.format('one')} AND seq = 2")
    async with victim.service() as service:
        for limit in (None, 1):
            with pytest.raises(TamperedError):
                await service.collections.get((APP, "ada", "one"), limit=limit)
        with pytest.raises(TamperedError):
            await service.collections.append((APP, "ada", "one"), NEW)


async def test_collection_row_of_another_copy_is_rejected_except_in_listings(
    victim: Victim,
) -> None:
    victim.take(victim.fork, "secure_sessions", "tag = :one")
    await assert_rejected(victim, "one")
    async with victim.service() as service:
        assert await names(service) == ["one", "two"], "docs/limits.md: a listing reads no item"
        assert await service.collections.get((APP, "ada", "one"), limit=0), "nor does this"


async def test_older_collection_row_is_rejected(victim: Victim) -> None:
    victim.take(victim.older, "secure_sessions", "tag = :one")
    await assert_rejected(victim, "one")
    async with victim.service() as service:
        with pytest.raises(TamperedError):
            await names(service)


async def test_collection_without_its_last_item_is_rejected(victim: Victim) -> None:
    victim.run(f"DELETE FROM secure_events WHERE session_row = {OF.format('one')} AND seq = 2")
    await assert_rejected(victim, "one")


async def test_deleted_collection_that_is_inserted_again_is_rejected(victim: Victim) -> None:
    async with victim.service() as service:
        assert await service.collections.delete((APP, "ada", "one"))
    copy = victim.path.with_name("whole.db")
    victim.take(copy, "secure_sessions", "tag = :one")
    victim.take(copy, "secure_events", f"session_row = {OF.format('one')}")
    await assert_rejected(victim, "one")


async def test_row_of_a_deleted_collection_cannot_stand_for_the_new_one(victim: Victim) -> None:
    async with victim.service() as service:
        await service.collections.delete((APP, "ada", "one"))
        for item in OTHER_ITEMS:
            await service.collections.append((APP, "ada", "one"), item)
    victim.run("DELETE FROM secure_sessions WHERE tag = :one")
    victim.take(victim.path.with_name("whole.db"), "secure_sessions", "tag = :one")
    await assert_rejected(victim, "one")


async def test_older_version_of_a_replaced_item_is_left_to_the_application(victim: Victim) -> None:
    """Its links are those of the new version: the appended item must name what was replaced."""
    async with victim.service() as service:
        found = await service.collections.get((APP, "ada", "one"), limit=0)
        assert found is not None
        replaced = {1: encode_item({})}
        await service.collections.append_at(found.version, (APP, "ada", "one"), NEW, replaced)
    copy = victim.path.with_name("whole.db")
    victim.take(copy, "secure_events", f"session_row = {OF.format('one')} AND seq = 1")
    async with victim.service() as service:
        again = await service.collections.get((APP, "ada", "one"))
    assert again is not None
    assert again.items == (*ITEMS, NEW)


# --- the list of features ------------------------------------------------------------------------

FEATURES = "SELECT value FROM secure_meta WHERE name = 'features'"


async def rolled_back(victim: Victim) -> None:
    async with victim.maintained() as db:
        keyring = await db.keyring()
        mark = feature_list.features_with_mac(keyring.index_master, keyring.database_id)
    victim.run("UPDATE secure_meta SET value = :mark WHERE name = 'features'", mark=mark)


async def test_older_list_of_features_is_reported_and_mended_by_the_next_append(
    victim: Victim,
) -> None:
    await rolled_back(victim)
    async with victim.maintained() as db:
        found = await verify(db)
    assert [(one.table, one.row) for one in found.problems] == [("secure_meta", "features")]
    assert (found.bad, found.collections, found.items) == (1, 3, 9)
    async with victim.service() as service:
        one = await service.collections.get((APP, "ada", "one"))
        assert one is not None
        assert one.items == ITEMS
        await service.collections.append((APP, "ada", "one"), NEW)
    assert victim.value(FEATURES).startswith("collections ")
    async with victim.maintained() as db:
        assert (await verify(db)).bad == 0


async def test_running_service_adds_no_feature_to_a_list_that_was_modified(victim: Victim) -> None:
    async with victim.service() as service:
        assert await service.collections.get((APP, "ada", "one"))
        value = victim.value(FEATURES)
        victim.run("UPDATE secure_meta SET value = :v WHERE name = 'features'",
                   v=f"- {value.split()[1]}")  # fmt: skip
        with pytest.raises(WrongKeyError):
            await service.collections.append((APP, "ada", "new"), NEW)
    assert victim.value("SELECT count(*) FROM secure_sessions") == 4


async def test_release_that_does_not_know_collections_rejects_the_database(
    victim: Victim, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(survey.KNOWN_FEATURES, survey.FeatureName.COLLECTIONS)
    async with victim.service() as service:
        with pytest.raises(ConfigurationError, match="collections"):
            await service.get_session(app_name=APP, user_id="ada", session_id="session")
    async with victim.maintained() as db:
        with pytest.raises(ConfigurationError, match="collections"):
            await retire(db)


@pytest.mark.parametrize("names", ["-", "separating", "separating,collections"])
async def test_separation_signs_no_list_that_was_modified(
    victim: Victim, names: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list is modified after the database was opened, whose MAC was still right then."""
    for point in ("begin", "end"):
        shutil.copy(victim.path.with_name("whole.db"), victim.path)
        async with victim.maintained() as db:
            if point == "begin":
                await db.keyring()
                forge(victim, names)
                with pytest.raises(WrongKeyError):
                    await separate(db)
                continue

            def progress(done: int, total: int) -> None:
                forge(victim, names)

            with pytest.raises(WrongKeyError):
                await separate(db, progress=progress)


def forge(victim: Victim, names: str) -> None:
    mac = victim.value(FEATURES).split()[1]
    mac = f"{int(mac[0], 16) ^ 1:x}{mac[1:]}"
    victim.run("UPDATE secure_meta SET value = :v WHERE name = 'features'", v=f"{names} {mac}")


# --- retire --------------------------------------------------------------------------------------

CELLS = {
    "item": ("secure_events", "event", f"session_row = {OF.format('one')} AND seq = 1"),
    "version witness": ("secure_witnesses", "seal", "tag = :one"),
}


@pytest.mark.parametrize(("table", "column", "where"), CELLS.values(), ids=CELLS.keys())
async def test_record_of_a_collection_whose_header_was_altered_keeps_its_data_key(
    victim: Victim, table: str, column: str, where: str
) -> None:
    """The header names the newest key, so that nothing seems to need the old one."""
    cell = f"SELECT {column} FROM {table} WHERE {where}"
    put = f"UPDATE {table} SET {column} = :value WHERE {where}"
    stored = victim.value(cell)
    async with victim.maintained() as db:
        assert (await rotate_data(db)).left == 0
        newest = victim.value(cell)[:13]
        assert newest != stored[:13]
        victim.run(put, value=newest + stored[13:])
        done = await retire(db)
        old = int.from_bytes(stored[5:13])
        assert old in {one.id for one in done.kept_keys}
        assert done.deleted_data_keys == 2, "those of the app and of Bob"
    victim.run(put, value=stored)
    async with victim.service() as service:
        found = await service.collections.get((APP, "ada", "one"))
        assert found is not None
        assert found.items == ITEMS
