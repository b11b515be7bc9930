"""A writer that has the keys and is faulty or malicious.

How it works.  `EditingBackend(edit)` is AES-256-GCM, and encrypts `edit(plaintext)` instead of each
plaintext that contains `MARK`.  `write` has a service with it store one such record; then services
and commands with the proper backend, which is the same to the database, meet the record.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from google.adk.events import Event, EventActions
from google.adk.sessions import Session

from adk_secure_sessions import AesGcmBackend, DecryptionError, EncryptedSessionService, Reason
from adk_secure_sessions.formats.records import Cipher
from adk_secure_sessions.maintenance import Database, verify

KEY = bytes(range(32))
MARK = "secret 7Qx"
START = 1_700_000_000.0  # the JSON of a time that is not fixed has one of several lengths
WHO: dict[str, Any] = {"app_name": "app", "user_id": "user", "session_id": "edited"}
OTHER: dict[str, Any] = {**WHO, "user_id": "other"}
TABLES = {
    "app": "secure_apps",
    "user": "secure_users",
    "session": "secure_sessions",
    "snapshot": "secure_bases",
    "event": "secure_events",
}
Edit = Callable[[bytes], bytes]


class EditingCipher:
    def __init__(self, cipher: Cipher, edit: Edit) -> None:
        self._cipher = cipher
        self._edit = edit

    def encrypt(self, plaintext: bytes, associated_data: bytes) -> bytes:
        edited = self._edit(plaintext) if MARK.encode() in plaintext else plaintext
        return self._cipher.encrypt(edited, associated_data)

    def decrypt(self, sealed: bytes, associated_data: bytes) -> bytes:
        return self._cipher.decrypt(sealed, associated_data)


class EditingBackend(AesGcmBackend):
    def __init__(self, edit: Edit) -> None:
        super().__init__(KEY)
        self._edit = edit

    def cipher(self, key: bytes) -> Any:
        return EditingCipher(super().cipher(key), self._edit)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite+aiosqlite:///{tmp_path / 'sessions.db'}"


def event(text: str, **delta: Any) -> Event:
    actions = EventActions(state_delta=delta)
    return Event(author=text, invocation_id="i", timestamp=START, actions=actions)


async def write(url: str, where: str, edit: Edit) -> Session:
    """Write two sessions of two users, and one edited record; return its session."""
    async with EncryptedSessionService(url, AesGcmBackend(KEY)) as service:
        await service.create_session(**OTHER)
    async with EncryptedSessionService(url, EditingBackend(edit)) as service:
        keys = {"app": "app:k", "user": "user:k", "session": "k", "snapshot": "k"}
        text = MARK * 1000 if where == "snapshot" else MARK
        state = {keys[where]: text} if where in keys else {}
        session = await service.create_session(**WHO, state=state)
        await service.append_event(session, event(MARK if where == "event" else "fine"))
        return session


def assert_names(error: DecryptionError, where: str, reason: Reason = Reason.MALFORMED) -> None:
    assert error.reason is reason
    # The message on the JSON of an app's state says whose it is.
    assert error.table == TABLES[where] or "the app's state" in str(error)
    assert error.__context__ is None or isinstance(error.__context__, DecryptionError)
    assert "7Qx" not in str(error)


async def assert_verify_names(url: str, where: str) -> None:
    async with Database(url, AesGcmBackend(KEY)) as db:
        (problem,) = (await verify(db)).problems
    assert (problem.table, problem.reason) == (TABLES[where], Reason.MALFORMED)
    assert "7Qx" not in problem.detail
