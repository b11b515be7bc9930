"""A key service that is slow, throttles or has revoked the permission, while services run.

Running services need it for nothing; those that start wait for it, or say what to check.
`key_services` has the errors of each key service.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from google.adk.sessions import Session

from adk_secure_sessions import (
    AesGcmBackend,
    EncryptedSessionService,
    KeyServiceError,
    VaultKey,
    maintenance,
)
from tests.conformance.support import create, event, reload
from tests.key_services.conftest import no_pauses, vault
from tests.key_services.vault import Vault
from tests.reliability.results import Record

__all__ = ["no_pauses", "vault"]


class Running(NamedTuple):
    vault: Vault
    url: str
    service: EncryptedSessionService
    session: Session

    def open_another(self) -> EncryptedSessionService:
        return EncryptedSessionService(self.url, backend(self.vault))


def backend(vault: Vault) -> AesGcmBackend:
    key = VaultKey("transit/clinic", address=vault.address, token=vault.root_token, timeout=0.3)
    return AesGcmBackend(key)


@pytest.fixture
async def running(vault: Vault, tmp_path: Path) -> AsyncIterator[Running]:
    url = f"sqlite+aiosqlite:///{tmp_path}/sessions.db"
    async with EncryptedSessionService(url, backend(vault)) as service:
        session = await create(service)
        yield Running(vault, url, service, session)


async def use(running: Running) -> None:
    """What the running service is asked for, with known users and new ones."""
    known = running.session
    await running.service.append_event(known, event("text", delta={"user:k": 1}))
    assert await reload(running.service, known) == known
    other = await create(running.service, user_id=f"new {len(known.events)}")
    await running.service.append_event(other, event("text"))


class Fault(NamedTuple):
    begin: Callable[[Vault], None]
    end: Callable[[Vault], None]
    is_retryable: bool


def _delay(seconds: float) -> Callable[[Vault], None]:
    return lambda vault: setattr(vault, "delay", seconds)


def _throttle(vault: Vault) -> None:
    vault.failures = [429] * 1000


def _relax(vault: Vault) -> None:
    vault.failures = []


_tokens: list[str] = []


def _revoke(vault: Vault) -> None:
    """The token of the services is not valid any more, though they still send it."""
    _tokens.append(vault.root_token)
    vault.root_token = "hvs.another"


def _grant(vault: Vault) -> None:
    vault.root_token = _tokens.pop()


FAULTS = {
    "slow": Fault(_delay(1.0), _delay(0.0), True),
    "throttling": Fault(_throttle, _relax, True),
    "revoked": Fault(_revoke, _grant, False),
}


@pytest.mark.usefixtures("no_pauses")
@pytest.mark.parametrize("name", FAULTS)
async def test_key_service_that_fails_stops_no_running_service(
    running: Running, name: str, record: Record
) -> None:
    fault, errors = FAULTS[name], []
    await use(running)
    known = backend(running.vault)  # with the token of before
    opened = EncryptedSessionService(running.url, known)
    fault.begin(running.vault)
    try:
        for _ in range(5):
            await use(running)
        for _ in range(2):
            with pytest.raises(KeyServiceError) as raised:
                await opened.prepare_tables()
            assert raised.value.retryable is fault.is_retryable
            errors.append(raised.value)
        async with maintenance.Database(running.url, known) as db:
            with pytest.raises(KeyServiceError) as raised:
                await maintenance.rotate_master(db)
            errors.append(raised.value)
        await use(running)
    finally:
        fault.end(running.vault)
    ended = time.monotonic()
    async with opened:
        assert await reload(opened, running.session) == running.session
    pause = time.monotonic() - ended
    async with maintenance.Database(running.url, backend(running.vault)) as db:
        await maintenance.rotate_master(db)
        found = await maintenance.verify(db)
    assert (found.bad, found.unchecked, found.sessions) == (0, 0, 8), found.problems
    record.fault(f"key service {name}/vault", times=3, acknowledged=22, errors=errors, pause=pause)


@pytest.mark.usefixtures("no_pauses")
async def test_start_waits_for_a_key_service_that_throttles_twice(running: Running) -> None:
    running.vault.failures = [429, 429]
    async with running.open_another() as another:
        assert await asyncio.wait_for(reload(another, running.session), 30) == running.session
