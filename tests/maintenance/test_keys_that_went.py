"""Data keys that are deleted while one `Database` or one service stays open."""

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
from tests.sqlite_files import execute, value

KEY = b"k" * 32


async def fill(path: Path) -> str:
    url = f"sqlite+aiosqlite:///{path}"
    async with EncryptedSessionService(url, AesGcmBackend(KEY)) as service:
        for user in ("ada", "bob"):
            await service.create_session(app_name="a", user_id=user, session_id="s", state={"k": 1})
    return url


def delete_key_of_first_user(path: Path) -> tuple[object, ...]:
    keys = "secure_data_keys WHERE owner = (SELECT tag FROM secure_users ORDER BY id LIMIT 1)"
    (row,) = execute(path, f"SELECT * FROM {keys}")
    execute(path, f"DELETE FROM {keys}")
    return row


async def test_rotation_after_a_verify_creates_no_key_in_place_of_a_deleted_one(
    tmp_path: Path,
) -> None:
    path = tmp_path / "s.db"
    url = await fill(path)
    async with Database(url, AesGcmBackend(KEY)) as db:
        await verify(db)
        deleted = delete_key_of_first_user(path)
        assert (await rotate_data(db)).bad == 1
    places = ", ".join("?" * len(deleted))
    execute(path, f"INSERT INTO secure_data_keys VALUES ({places})", deleted)
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
        execute(keys, "DELETE FROM secure_data_keys WHERE generation = 1")
        count = value(keys, "SELECT count(*) FROM secure_data_keys")
        await service.list_sessions(app_name="a")  # reads the keys, and caches the older one
        delta = EventActions(state_delta={"user:n": 2})
        with pytest.raises(UnknownKeyError):
            await service.append_event(session, Event(author="user", actions=delta))
        assert value(keys, "SELECT count(*) FROM secure_data_keys") == count


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
