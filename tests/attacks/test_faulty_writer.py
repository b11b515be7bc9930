"""Records that are authentic, and hold what no release writes: they are rejected by name.

How it works.  `FaultyBackend` is AES-256-GCM, but encrypts something else instead of a plaintext
that contains `MARK`.  A service with it writes one such record; then a service and `verify` with
the proper backend, which is the same to the database, meet the record.
"""

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
WHO: dict[str, Any] = {"app_name": "app", "user_id": "user", "session_id": "faulty"}
OTHER: dict[str, Any] = {**WHO, "user_id": "other"}

MALFORMED = {
    "empty": b"",
    "no JSON": MARK.encode(),
    "a list": f'["{MARK}"]'.encode(),
    "UTF-16": f'{{"k":"{MARK}"}}'.encode("utf-16"),
    "not UTF-8": f'{{"k":"{MARK}'.encode() + b'\xff"}',
    "too deep": b'{"k":' * 930 + b"1" + b"}" * 930,
    "too many digits": b'{"k":' + b"7" * 5000 + b"}",
}
KEYS = {"app": "app:k", "user": "user:k", "session": "k"}
TABLES = {"user": "secure_users", "session": "secure_sessions", "snapshot": "secure_bases"}


class FaultyCipher:
    """Encrypts *instead* instead of the JSON that contains `MARK`."""

    def __init__(self, cipher: Cipher, instead: bytes) -> None:
        self._cipher = cipher
        self._instead = instead

    def encrypt(self, plaintext: bytes, associated_data: bytes) -> bytes:
        if MARK.encode() in plaintext:
            if b'"author"' in plaintext:  # after the flags and two links
                plaintext = plaintext[:33] + b"\x051.2.3" + self._instead
            else:
                plaintext = plaintext[: plaintext.index(b'{"k"')] + self._instead
        return self._cipher.encrypt(plaintext, associated_data)

    def decrypt(self, sealed: bytes, associated_data: bytes) -> bytes:
        return self._cipher.decrypt(sealed, associated_data)


class FaultyBackend(AesGcmBackend):
    def __init__(self, instead: bytes) -> None:
        super().__init__(KEY)
        self._instead = instead

    def cipher(self, key: bytes) -> Any:
        return FaultyCipher(super().cipher(key), self._instead)


def event(text: str, **delta: Any) -> Event:
    return Event(author=text, invocation_id="i", actions=EventActions(state_delta=delta))


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite+aiosqlite:///{tmp_path / 'sessions.db'}"


async def write(url: str, where: str, instead: bytes) -> Session:
    """Write two sessions of two users, and one malformed record; return its session."""
    async with EncryptedSessionService(url, AesGcmBackend(KEY)) as service:
        await service.create_session(**OTHER)
    async with EncryptedSessionService(url, FaultyBackend(instead)) as service:
        state = {KEYS[where]: MARK} if where in KEYS else {}
        if where == "snapshot":
            state = {"k": MARK * 1000}
        session = await service.create_session(**WHO, state=state)
        await service.append_event(session, event(MARK if where == "event" else "fine"))
        return session


async def get(service: EncryptedSessionService, who: dict[str, Any] = WHO) -> Session | None:
    return await service.get_session(**who)


def assert_names(error: DecryptionError, where: str) -> None:
    assert error.reason is Reason.MALFORMED
    assert "faulty" in str(error)
    assert "7Qx" not in str(error)
    assert error.__context__ is None or isinstance(error.__context__, DecryptionError)
    if where in TABLES:
        assert error.table == TABLES[where]


@pytest.mark.parametrize("instead", MALFORMED.values(), ids=MALFORMED)
@pytest.mark.parametrize("where", ["app", "user", "session", "snapshot"])
async def test_malformed_state_is_rejected_and_may_be_left_out_of_listings(
    url: str, where: str, instead: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    await write(url, where, instead)
    user = {name: WHO[name] for name in ("app_name", "user_id")}
    async with EncryptedSessionService(url, AesGcmBackend(KEY)) as service:
        for call in (
            lambda: get(service),
            lambda: service.list_sessions(app_name="app"),
            lambda: service.list_sessions(**user),
        ):
            with pytest.raises(DecryptionError) as info:
                await call()
            assert_names(info.value, where)
        assert where == "app" or await get(service, OTHER)
    async with EncryptedSessionService(
        url, AesGcmBackend(KEY), skip_unreadable_sessions=True
    ) as service:
        everybody = (await service.list_sessions(app_name="app")).sessions
        assert [one.user_id for one in everybody] == ([] if where == "app" else ["other"])
        assert (await service.list_sessions(**user)).sessions == []
    assert "left out of a listing" in caplog.text
    assert "7Qx" not in caplog.text


@pytest.mark.parametrize("instead", MALFORMED.values(), ids=MALFORMED)
async def test_malformed_event_is_rejected(url: str, instead: bytes) -> None:
    await write(url, "event", instead)
    async with EncryptedSessionService(url, AesGcmBackend(KEY)) as service:
        with pytest.raises(DecryptionError, match="secure_events row") as info:
            await get(service)
        assert_names(info.value, "event")
        assert len((await service.list_sessions(app_name="app")).sessions) == 2


@pytest.mark.parametrize(
    ("where", "key"), [("app", "app:new"), ("user", "user:new"), ("session", "new")]
)
async def test_malformed_state_is_never_overwritten(url: str, where: str, key: str) -> None:
    session = await write(url, where, MALFORMED["no JSON"])
    async with EncryptedSessionService(url, AesGcmBackend(KEY)) as service:
        with pytest.raises(DecryptionError) as info:
            await service.append_event(session, event("fine", **{key: 1}))
        assert info.value.reason is Reason.MALFORMED
        if where != "session":
            with pytest.raises(DecryptionError):
                await service.create_session(app_name="app", user_id="user", state={key: 1})
        with pytest.raises(DecryptionError):
            await get(service)


@pytest.mark.parametrize("where", ["app", "user", "session", "snapshot", "event"])
@pytest.mark.parametrize("instead", MALFORMED.values(), ids=MALFORMED)
async def test_verify_names_the_malformed_record(url: str, where: str, instead: bytes) -> None:
    await write(url, where, instead)
    async with Database(url, AesGcmBackend(KEY)) as db:
        found = await verify(db)
    (problem,) = found.problems
    tables = {"app": "secure_apps", "event": "secure_events", **TABLES}
    assert (problem.table, problem.reason) == (tables[where], Reason.MALFORMED)
    assert "7Qx" not in problem.detail
