"""A database with a key database: copies of either, and exchanges between databases."""

import shutil
import sqlite3
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from adk_secure_sessions import (
    AesGcmBackend,
    ConfigurationError,
    DecryptionError,
    EncryptedSessionService,
    SecureSessionError,
    TamperedError,
    UnknownKeyError,
    WrongKeyError,
)
from adk_secure_sessions.maintenance import erase_user, move_keys, verify
from tests.attacks.needles import APP, SESSION, USER, found_in, large_state, new_event, state
from tests.faults import Point, with_faults
from tests.key_database.support import KEY, Pair, count, everything, marks, pair_in, tables
from tests.maintenance.support import Killed, query, run_sql
from tests.servers import for_service
from tests.sqlite_files import settle

WHO: dict[str, Any] = {"app_name": APP, "user_id": USER, "session_id": SESSION}
BOB = WHO | {"user_id": "bob"}


@pytest.fixture
async def files(tmp_path: Path) -> Pair:
    """Two users with a session each."""
    return await filled(pair_in(tmp_path))


async def filled(pair: Pair) -> Pair:
    async with pair.service() as service:
        for who in (WHO, BOB):
            session = await service.create_session(**who, state=state() | large_state())
            await service.append_event(session, new_event(state()))
    return pair


def copied(database: sa.URL, name: str) -> sa.URL:
    """Copy a database as an attacker or a backup does."""
    settle(Path(str(database.database)))
    copy = Path(database.database or "").with_name(name)
    shutil.copy(database.database or "", copy)
    return database.set(database=str(copy))


async def assert_rejected(pair: Pair, error: type[Exception], match: str = ".") -> None:
    """Every first operation raises *error*, and nothing is created."""
    before = everything(*pair)
    async with pair.service() as service:
        for call in (service.prepare_tables, partial(service.create_session, **WHO)):
            with pytest.raises(error, match=match) as info:
                await call()
            assert type(info.value) is error
    assert everything(*pair) == before


# --- copies --------------------------------------------------------------------------------------


async def test_copy_of_the_data_holds_no_key_and_is_not_opened(files: Pair) -> None:
    copy = copied(files.data, "copy.db")
    assert tables(copy).isdisjoint({"secure_keyring", "secure_data_keys"})
    content = Path(copy.database or "").read_bytes()
    for (wrapped,) in query(files.keys, "SELECT wrapped FROM secure_keyring"):
        assert wrapped not in content
    for (wrapped,) in query(files.keys, "SELECT wrapped FROM secure_data_keys"):
        assert wrapped not in content
    async with EncryptedSessionService(for_service(copy), AesGcmBackend(KEY)) as service:
        with pytest.raises(ConfigurationError, match="key_db_url"):
            await service.get_session(**WHO)


async def test_copy_from_before_a_user_was_erased_opens_nothing_of_that_user(files: Pair) -> None:
    old = Pair(copied(files.data, "old.db"), files.keys)
    async with old.service() as service:
        assert await service.get_session(**WHO) is not None
    async with files.maintained() as db:
        assert (await erase_user(db, APP, USER)).rows
    async with old.service() as service:
        for call in (
            service.get_session(**WHO),
            service.get_user_state(app_name=APP, user_id=USER),
            service.list_sessions(app_name=APP, user_id=USER),
            service.create_session(**WHO | {"session_id": "another"}),
            service.delete_session(**WHO),
        ):
            with pytest.raises(UnknownKeyError):
                await call
        assert await service.get_session(**BOB) is not None
    assert count(files.keys, "secure_data_keys") == 2


async def test_no_file_contains_what_users_say(files: Pair, tmp_path: Path) -> None:
    contents = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert found_in(contents) == set()
    assert APP.encode() in contents


# --- exchanges -----------------------------------------------------------------------------------


async def test_keys_of_another_database_are_rejected(files: Pair, tmp_path: Path) -> None:
    other = await filled(pair_in(tmp_path, "other-"))
    await assert_rejected(Pair(files.data, other.keys), ConfigurationError, "another database")
    mine, theirs = (marks(pair.keys)["database_id"] for pair in (files, other))
    renamed = "UPDATE secure_meta SET value = :id WHERE name = 'database_id'"
    run_sql(other.keys, renamed, id=mine)
    await assert_rejected(Pair(files.data, other.keys), WrongKeyError)
    run_sql(other.keys, renamed, id=theirs)
    # Now the keys and the id are the attacker's: no session is found, and `verify` reports it.
    run_sql(files.data, renamed, id=theirs)
    mixed = Pair(files.data, other.keys)
    async with mixed.service() as service:
        assert await service.get_session(**WHO) is None
    async with mixed.maintained() as db:
        found = await verify(db)
        assert found.bad
        assert (found.apps, found.users, found.sessions) == (0, 0, 0)


async def test_data_keys_of_another_database_are_rejected(files: Pair, tmp_path: Path) -> None:
    other = await filled(pair_in(tmp_path, "other-"))
    rows = query(other.keys, "SELECT wrapped FROM secure_data_keys ORDER BY id")
    own = query(files.keys, "SELECT id FROM secure_data_keys ORDER BY id")
    for (wrapped,), (row,) in zip(rows, own, strict=True):
        run_sql(
            files.keys, "UPDATE secure_data_keys SET wrapped = :w WHERE id = :id", w=wrapped, id=row
        )
    async with files.service() as service:
        with pytest.raises(DecryptionError):
            await service.get_session(**WHO)


async def test_data_keys_of_two_users_swapped_are_rejected(files: Pair) -> None:
    users = [tag for (tag,) in query(files.data, "SELECT tag FROM secure_users")]
    other = b"\0" * 16
    change = "UPDATE secure_data_keys SET owner = :new WHERE owner = :old"
    for old, new in ((users[0], other), (users[1], users[0]), (other, users[1])):
        run_sql(files.keys, change, old=old, new=new)
    async with files.service() as service:
        for who in (WHO, BOB):
            with pytest.raises(TamperedError):
                await service.get_session(**who)


async def test_older_key_database_is_rejected_where_its_keys_are_missing(files: Pair) -> None:
    old = copied(files.keys, "old.db")
    async with files.service() as service:
        await service.create_session(**WHO | {"user_id": "carol"})
    mixed = Pair(files.data, old)
    async with mixed.service() as service:
        with pytest.raises(UnknownKeyError):
            await service.get_session(**WHO | {"user_id": "carol"})
        with pytest.raises(UnknownKeyError):
            await service.create_session(**WHO | {"user_id": "carol", "session_id": "x"})
        assert await service.get_session(**BOB) is not None
    assert count(old, "secure_data_keys") == 3


# --- new keys are not made -----------------------------------------------------------------------

REMOVED = {
    "data's mark": ("data", "DELETE FROM secure_meta WHERE name = 'holds'"),
    "data's marks": ("data", "DELETE FROM secure_meta"),
    "keys' mark": ("keys", "DELETE FROM secure_meta WHERE name = 'holds'"),
    "keys' marks": ("keys", "DELETE FROM secure_meta"),
    "ids": ("keys", "UPDATE secure_meta SET value = '00' WHERE name = 'database_id'"),
    "all of the keys": (
        "keys",
        "DELETE FROM secure_meta; DELETE FROM secure_keyring; DELETE FROM secure_data_keys",
    ),
    "tables of the keys": (
        "keys",
        "DROP TABLE secure_meta; DROP TABLE secure_keyring; DROP TABLE secure_data_keys",
    ),
    "both databases' marks": ("both", "DELETE FROM secure_meta"),
}


@pytest.mark.parametrize("name", REMOVED)
async def test_removed_marks_lead_to_no_new_keys(files: Pair, name: str) -> None:
    where, script = REMOVED[name]
    for database in files if where == "both" else (getattr(files, where),):
        with closing(sqlite3.connect(database.database or "", isolation_level=None)) as connection:
            connection.executescript(script)
    before = everything(files.data)
    await assert_rejected(files, ConfigurationError)
    async with EncryptedSessionService(for_service(files.data), AesGcmBackend(KEY)) as alone:
        with pytest.raises(ConfigurationError):
            await alone.create_session(**WHO)
    assert everything(files.data) == before


async def test_emptied_keyring_leads_to_no_new_keys(files: Pair) -> None:
    run_sql(files.keys, "DELETE FROM secure_keyring")
    await assert_rejected(files, WrongKeyError)


async def test_keyring_inserted_into_the_data_is_rejected(files: Pair, tmp_path: Path) -> None:
    """The keyring claims to be plaintext, and the mark of the key database was removed."""
    path = Path(files.data.database or "")
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("ATTACH ? AS theirs", (files.keys.database,))
        for name in ("secure_keyring", "secure_data_keys"):
            connection.execute(f"CREATE TABLE {name} AS SELECT * FROM theirs.{name}")
        connection.execute("UPDATE secure_keyring SET root_key_id = 'none'")
        connection.execute("DELETE FROM secure_meta WHERE name = 'holds'")
    await assert_rejected(files, ConfigurationError, "keys of its own")
    async with EncryptedSessionService(for_service(files.data), AesGcmBackend(KEY)) as alone:
        with pytest.raises(SecureSessionError):
            await alone.get_session(**WHO)


# --- moving the keys -----------------------------------------------------------------------------


async def test_data_rolled_back_to_an_unfinished_move_does_not_delete_keys_in_use(
    files: Pair,
) -> None:
    """The attacker can write only to the data, and kept a copy from the time of a move."""
    db, faults = with_faults(files.maintained)
    faults.keys.before(Point.RUN, Killed(), when=lambda *_: "holds" not in marks(files.data))
    async with db:
        with pytest.raises(Killed):
            await move_keys(db, "db")
    mixed = Pair(copied(files.data, "old.db"), files.keys)
    assert marks(mixed.data)["features"].startswith("moving ")
    async with files.maintained() as db:
        await move_keys(db, "db")
    async with files.maintained() as db:
        await move_keys(db, "key-db")
    async with files.service() as service:
        await service.create_session(**WHO | {"user_id": "carol"})
    keys = everything(files.keys)
    for to, match in (("db", "may be in use"), ("key-db", "--to db")):
        async with mixed.maintained() as db:
            with pytest.raises(ConfigurationError, match=match):
                await move_keys(db, to)  # type: ignore[arg-type]
    assert everything(files.keys) == keys
    async with files.service() as service:
        assert await service.get_session(**WHO | {"user_id": "carol"})
