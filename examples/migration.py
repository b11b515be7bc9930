"""Move plaintext sessions of ADK's own service into an encrypted database, then erase the source.

    python examples/migration.py

The page docs/migrate.md does the same with the command line, step by step.
"""

import asyncio
import tempfile
from pathlib import Path

from google.adk.events import Event
from google.adk.sessions import DatabaseSessionService
from google.genai import types

from adk_secure_sessions import AesGcmBackend, EncryptedSessionService, generate_key
from adk_secure_sessions.maintenance import Database
from adk_secure_sessions.migration import AdkTables, compare, erase_source, migrate

SECRET = "penicillin"


async def fill(db: Path) -> None:
    """Store two conversations with ADK's service, in plaintext."""
    service = DatabaseSessionService(f"sqlite+aiosqlite:///{db}")
    for user in ("ada", "bob"):
        session = await service.create_session(
            app_name="clinic", user_id=user, session_id="visit", state={"user:name": user}
        )
        said = types.Content(role="user", parts=[types.Part(text=f"I am allergic to {SECRET}.")])
        await service.append_event(session, Event(author="user", content=said))
    await service.db_engine.dispose()


def search(db: Path) -> bool:
    files = [path for path in (db, Path(f"{db}-wal")) if path.exists()]
    found = any(SECRET.encode() in path.read_bytes() for path in files)
    print(f"  {db.name:<12}{SECRET!r} {'is in the file' if found else 'is not in the file'}")
    return found


async def run(directory: Path) -> None:
    plain, encrypted = directory / "adk.db", directory / "sessions.db"
    backend = AesGcmBackend(generate_key())  # back up this key before you erase the source

    print("Two sessions, stored by ADK's DatabaseSessionService:")
    await fill(plain)
    assert search(plain), "the search does not work"

    async with (
        AdkTables(f"sqlite:///{plain}") as source,
        Database(f"sqlite:///{encrypted}", backend) as target,
    ):
        print("\nmigrate copies them, and can run again while the application writes:")
        copied = await migrate(source, target)
        print(f"  copied: {copied.copied} sessions, {copied.events} events, {copied.states} states")

        print("\ncompare reads both sides, and decrypts the copy:")
        comparison = await compare(source, target)
        print(f"  equal in every field: {comparison.equal} of {comparison.sessions}")
        assert comparison.all_equal

        print("\nerase_source compares once more, and deletes the plaintext:")
        erasure = await erase_source(source, target)
        assert erasure.succeeded
        print(f"  deleted: {erasure.sessions} sessions, {erasure.events} events")

    print("\nThe files now:")
    assert not search(plain)
    assert not search(encrypted)

    print("\nEncryptedSessionService continues with the sessions:")
    async with EncryptedSessionService(f"sqlite:///{encrypted}", backend) as service:
        for user in ("ada", "bob"):
            session = await service.get_session(app_name="clinic", user_id=user, session_id="visit")
            assert session is not None
            print(f"  {user}: {len(session.events)} event, state {session.state}")


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(run(Path(directory)))


if __name__ == "__main__":
    main()
