"""Data keys that are deleted while one `Database` or one service stays open."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from google.adk.events import Event, EventActions

from adk_secure_sessions import (
    AesGcmBackend,
    EncryptedSessionService,
    FernetBackend,
    KeyServiceError,
    UnknownKeyError,
)
from adk_secure_sessions.keys.providers import StaticKey
from adk_secure_sessions.maintenance import Database, rotate_data, rotate_master, verify

KEY = b"k" * 32


async def fill(path: Path) -> str:
    url = f"sqlite+aiosqlite:///{path}"
    async with EncryptedSessionService(url, AesGcmBackend(KEY)) as service:
        for user in ("ada", "bob"):
            await service.create_session(app_name="a", user_id=user, session_id="s", state={"k": 1})
    return url


def delete_key_of_first_user(path: Path) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(path)) as connection:
        ((tag,),) = connection.execute("SELECT tag FROM secure_users ORDER BY id LIMIT 1")
        rows = connection.execute(
            "SELECT * FROM secure_data_keys WHERE owner = ?", (tag,)
        ).fetchall()
        connection.execute("DELETE FROM secure_data_keys WHERE owner = ?", (tag,))
        connection.commit()
    return rows


async def test_verify_notices_a_data_key_deleted_since_its_last_run(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    async with Database(await fill(path), AesGcmBackend(KEY)) as db:
        assert (await verify(db)).bad == 0
        delete_key_of_first_user(path)
        assert (await verify(db)).bad == 1


async def test_rotation_after_a_verify_creates_no_key_in_place_of_a_deleted_one(
    tmp_path: Path,
) -> None:
    path = tmp_path / "s.db"
    url = await fill(path)
    async with Database(url, AesGcmBackend(KEY)) as db:
        await verify(db)
        deleted = delete_key_of_first_user(path)
        assert (await rotate_data(db)).bad == 1
    with closing(sqlite3.connect(path)) as connection:
        places = ", ".join("?" * len(deleted[0]))
        connection.executemany(f"INSERT INTO secure_data_keys VALUES ({places})", deleted)
        connection.commit()
    async with EncryptedSessionService(url, AesGcmBackend(KEY)) as service:
        found = await service.get_session(app_name="a", user_id="ada", session_id="s")
        assert found is not None
        assert found.state == {"k": 1}


async def test_row_whose_own_data_key_is_gone_leads_to_no_series_of_new_keys(
    tmp_path: Path,
) -> None:
    """An older key is left, so that the user's rows seem to need a newer one."""
    keys = tmp_path / "keys.db"
    url, key_url = f"sqlite:///{tmp_path}/data.db", f"sqlite:///{keys}"
    fernet, aes = FernetBackend(KEY), AesGcmBackend(KEY)
    async with EncryptedSessionService(url, fernet, [aes], key_db_url=key_url) as before:
        await before.create_session(app_name="a", user_id="ada", session_id="s")
    async with EncryptedSessionService(url, aes, [fernet], key_db_url=key_url) as service:
        session = await service.create_session(app_name="a", user_id="ada", state={"user:n": 1})
        await service.list_sessions(app_name="a")
        with closing(sqlite3.connect(keys)) as connection:
            connection.execute("DELETE FROM secure_data_keys WHERE generation = 1")
            connection.commit()
            ((count,),) = connection.execute("SELECT count(*) FROM secure_data_keys")
        await service.list_sessions(app_name="a")  # reads the keys, and caches the older one
        delta = EventActions(state_delta={"user:n": 2})
        with pytest.raises(UnknownKeyError):
            await service.append_event(session, Event(author="user", actions=delta))
        with closing(sqlite3.connect(keys)) as connection:
            assert connection.execute("SELECT count(*) FROM secure_data_keys").fetchone() == (
                count,
            )


class Failing(StaticKey):
    """A root key whose service is down for one call."""

    down = False

    async def unwrap(self, wrapped: bytes, associated_data: bytes) -> bytes:
        if self.down:
            self.down = False
            raise KeyServiceError("down", retryable=True)
        return await super().unwrap(wrapped, associated_data)


async def test_maintenance_asks_the_key_service_again_after_a_failure(tmp_path: Path) -> None:
    url = await fill(tmp_path / "s.db")
    root = Failing(KEY)
    async with Database(url, AesGcmBackend(root)) as db:
        await db.keyring()
        async with Database(url, AesGcmBackend(KEY)) as other:
            await rotate_master(other)
        root.down = True
        with pytest.raises(KeyServiceError):
            await rotate_data(db)
        assert (await rotate_data(db)).left == 0
