"""What every key service has to do, also for a session service on top of it."""

import asyncio
import base64
import contextlib
import logging
import secrets
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from adk_secure_sessions import (
    AesGcmBackend,
    EncryptedSessionService,
    FernetBackend,
    KeyServiceError,
    WrongKeyError,
)
from adk_secure_sessions.testing import check_key_provider
from tests.key_services.support import Service

WHO: dict[str, Any] = {"app_name": "clinic", "user_id": "ada"}
CALLS_FOR_A_START = 4


def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'sessions.db'}"


async def test_provider_keeps_every_rule(key_service: Service) -> None:
    await check_key_provider(
        key_service.make, key_service.other, hidden=key_service.hidden, every=key_service.every
    )


async def test_debugging_log_shows_no_secret(
    key_service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    master = secrets.token_bytes(32)
    key = key_service.make()
    assert await key.unwrap(await key.wrap(master, b"context"), b"context") == master
    for secret in (base64.b64encode(master).decode(), master.hex(), repr(master)):
        assert secret not in caplog.text
    assert [secret for secret in key_service.hidden if str(secret) in caplog.text] == []


def test_providers_of_one_key_are_equal(key_service: Service) -> None:
    assert key_service.make() == key_service.make()
    assert hash(key_service.make()) == hash(key_service.make())
    assert key_service.make() != key_service.other()


async def test_start_calls_four_times_at_most_and_operations_never(
    key_service: Service, tmp_path: Path
) -> None:
    for _ in range(2):  # the first makes the keys, the second finds them
        before = key_service.calls()
        backend = AesGcmBackend(key_service.make())
        async with EncryptedSessionService(url(tmp_path), backend) as service:
            for number in range(100):
                await service.create_session(**WHO, session_id=f"{before}-{number}")
        assert 0 < key_service.calls() - before <= CALLS_FOR_A_START


async def test_two_backends_may_have_one_key(key_service: Service, tmp_path: Path) -> None:
    aes, fernet = AesGcmBackend(key_service.make()), FernetBackend(key_service.make())
    async with EncryptedSessionService(url(tmp_path), aes, [fernet]) as service:
        await service.create_session(**WHO)


async def test_another_key_does_not_unwrap_the_keyring(
    key_service: Service, tmp_path: Path
) -> None:
    async with EncryptedSessionService(url(tmp_path), AesGcmBackend(key_service.make())) as service:
        await service.create_session(**WHO)
    other = key_service.other()
    async with EncryptedSessionService(url(tmp_path), AesGcmBackend(other)) as service:
        with pytest.raises(WrongKeyError, match=key_service.make().key_id):
            await service.list_sessions(app_name="clinic")


async def test_tampered_keyring_is_rejected(key_service: Service, tmp_path: Path) -> None:
    async with EncryptedSessionService(url(tmp_path), AesGcmBackend(key_service.make())) as service:
        await service.prepare_tables()
    with contextlib.closing(sqlite3.connect(tmp_path / "sessions.db")) as database, database:
        ((first, one), (second, two)) = database.execute("SELECT id, wrapped FROM secure_keyring")
        swap = [(two, first), (one, second)]
        database.executemany("UPDATE secure_keyring SET wrapped = ? WHERE id = ?", swap)
    async with EncryptedSessionService(url(tmp_path), AesGcmBackend(key_service.make())) as service:
        with pytest.raises(WrongKeyError):
            await service.prepare_tables()


async def test_running_service_works_without_the_key_service(
    key_service: Service, tmp_path: Path
) -> None:
    backend = AesGcmBackend(key_service.make())
    async with EncryptedSessionService(url(tmp_path), backend) as service:
        await service.prepare_tables()
        key_service.stop()
        for number in range(50):
            session_id = str(number)
            await service.create_session(**WHO, session_id=session_id)
            assert await service.get_session(**WHO, session_id=session_id)
    async with EncryptedSessionService(url(tmp_path), backend) as service:
        with pytest.raises(KeyServiceError, match="check") as info:
            await service.prepare_tables()
    assert info.value.retryable
    assert repr(key_service.make().key_id) in str(info.value)


async def test_services_that_start_at_once_agree_on_the_keys(
    key_service: Service, tmp_path: Path
) -> None:
    services = [
        EncryptedSessionService(url(tmp_path), AesGcmBackend(key_service.make())) for _ in range(3)
    ]
    async with contextlib.AsyncExitStack() as stack:
        for service in services:
            await stack.enter_async_context(service)
        await asyncio.gather(*(service.prepare_tables() for service in services))
        for number, service in enumerate(services):
            await service.create_session(**WHO, session_id=str(number))
        for service in services:
            found = await service.list_sessions(**WHO)
            assert len(found.sessions) == len(services)
    with contextlib.closing(sqlite3.connect(tmp_path / "sessions.db")) as database:
        assert database.execute("SELECT count(*) FROM secure_keyring").fetchone() == (2,)


def test_one_backend_serves_event_loops_one_after_the_other(
    key_service: Service, tmp_path: Path
) -> None:
    backend = AesGcmBackend(key_service.make())

    async def run() -> int:
        async with EncryptedSessionService(url(tmp_path), backend) as service:
            await service.create_session(**WHO)
            return len((await service.list_sessions(**WHO)).sessions)

    assert [asyncio.run(run()) for _ in range(3)] == [1, 2, 3]
