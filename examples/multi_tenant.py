"""Erase one user of one tenant, and show that the data is gone, also from a backup.

    python examples/multi_tenant.py

Each tenant is an app of ADK.  Every user of every app has a data key of their own, and all data
keys are in a second database.  The page docs/erasure.md explains what an erasure reaches.
"""

import asyncio
import shutil
import tempfile
from pathlib import Path

from google.adk.events import Event
from google.genai import types

from adk_secure_sessions import (
    AesGcmBackend,
    EncryptedSessionService,
    SecureSessionError,
    generate_key,
)
from adk_secure_sessions.maintenance import Database, erase_user, verify

# App names are stored as plaintext, so they do not name the tenants.
TENANTS = {"tenant-7c31": "I am allergic to penicillin.", "tenant-b04e": "I broke my arm."}
USERS = ("ada", "bob")
BACKEND = AesGcmBackend(generate_key())  # in production, use a key service, a file or a variable


def service(data: Path, keys: Path) -> EncryptedSessionService:
    return EncryptedSessionService(f"sqlite:///{data}", BACKEND, key_db_url=f"sqlite:///{keys}")


async def fill(data: Path, keys: Path) -> None:
    async with service(data, keys) as sessions:
        for tenant, text in TENANTS.items():
            for user in USERS:
                session = await sessions.create_session(app_name=tenant, user_id=user)
                said = types.Content(role="user", parts=[types.Part(text=f"{user}: {text}")])
                await sessions.append_event(session, Event(author="user", content=said))


async def show(data: Path, keys: Path) -> dict[tuple[str, str], str]:
    """Print and return what can be read of each user of each tenant."""
    read = {}
    async with service(data, keys) as sessions:
        for tenant in TENANTS:
            for user in USERS:
                read[tenant, user] = await read_user(sessions, tenant, user)
                print(f"  {tenant:<14}{user:<6}{read[tenant, user]}")
    return read


async def read_user(sessions: EncryptedSessionService, tenant: str, user: str) -> str:
    try:
        found = (await sessions.list_sessions(app_name=tenant, user_id=user)).sessions
        if not found:
            return "no data"
        session = await sessions.get_session(app_name=tenant, user_id=user, session_id=found[0].id)
    except SecureSessionError as error:
        return f"{type(error).__name__}: {error}"
    assert session is not None
    content = session.events[0].content
    return (content and content.parts and content.parts[0].text) or ""


async def run(directory: Path) -> None:
    data, keys, backup = (directory / name for name in ("data.db", "keys.db", "backup.db"))
    await fill(data, keys)
    print("Two tenants, each with a user 'ada' and a user 'bob':")
    await show(data, keys)
    shutil.copy(data, backup)  # the application does not run: the file is complete

    print("\nErase ada of tenant-7c31:")
    async with Database(f"sqlite:///{data}", BACKEND, key_db_url=f"sqlite:///{keys}") as database:
        erased = await erase_user(database, "tenant-7c31", "ada")
        print(f"  deleted: {erased.data_keys} data key, {erased.sessions} session")
        report = await verify(database)
        print(
            f"  the rest: {report.sessions} sessions decrypted, {report.bad} of them tampered with"
        )
    print("\nAfterwards, with the root key:")
    now = await show(data, keys)
    assert now["tenant-7c31", "ada"] == "no data"

    print("\nA backup of the data from before the erasure, with the root key and today's keys:")
    before = await show(backup, keys)
    assert "penicillin" not in before["tenant-7c31", "ada"]
    assert "arm" in before["tenant-b04e", "ada"]


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(run(Path(directory)))


if __name__ == "__main__":
    main()
