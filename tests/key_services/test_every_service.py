"""What every key service has to do, also for a session service on top of it."""

import asyncio
import contextlib
import json
import logging
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from google.api_core.client_options import ClientOptions
from google.cloud import kms
from google.oauth2 import service_account

from adk_secure_sessions import (
    AesGcmBackend,
    EncryptedSessionService,
    KeyServiceError,
    TamperedError,
)
from adk_secure_sessions.testing import check_key_provider
from tests.attacks.needles import forms_of, locals_of
from tests.key_services import gcp
from tests.key_services.support import Service

WHO: dict[str, Any] = {"app_name": "clinic", "user_id": "ada"}
CALLS_FOR_A_START = 4


def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'sessions.db'}"


# What does not depend on the service: by default, Vault alone.
on_one_service = pytest.mark.parametrize(
    "key_service",
    ["vault", *(pytest.param(name, marks=pytest.mark.soak) for name in ("aws", "gcp", "pkcs11"))],
    indirect=True,
)


async def test_provider_keeps_every_rule(key_service: Service) -> None:
    await check_key_provider(
        key_service.make, key_service.other, hidden=key_service.hidden, every=key_service.every
    )


class Records(logging.Handler):
    """Keeps everything in each log record, not only its message."""

    def __init__(self) -> None:
        super().__init__(0)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(f"{record.getMessage()} {vars(record)!r}")


@pytest.fixture
def records() -> Iterator[Records]:
    """What all loggers log at every level, also those that hand nothing to the root logger."""
    handler = Records()
    names = [None, "asyncio", "google", *logging.root.manager.loggerDict]
    loggers = [logging.getLogger(name) for name in names]
    before = [(logger, logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.setLevel(1)
    loggers[0].addHandler(handler)
    logging.getLogger("google").addHandler(handler)
    try:
        yield handler
    finally:
        loggers[0].removeHandler(handler)
        logging.getLogger("google").removeHandler(handler)
        for logger, level, propagate in before:
            logger.setLevel(level)
            logger.propagate = propagate


@pytest.mark.usefixtures("no_pauses")
async def test_log_at_every_level_shows_no_secret(key_service: Service, records: Records) -> None:
    """With asyncio's debug mode, which logs the results of futures: each step counts as slow."""
    loop = asyncio.get_running_loop()
    loop.set_debug(True)
    loop.slow_callback_duration = 0
    master = secrets.token_bytes(32)
    key = key_service.make()
    assert await key.unwrap(await key.wrap(master, b"context"), b"context") == master
    loop.set_debug(False)
    key_service.stop()
    with pytest.raises(KeyServiceError):
        await key.wrap(master, b"context")
    text = "\n".join(records.texts)
    assert "Executing" in text
    assert [form for form in forms_of(master) if form in text] == []
    assert [secret for secret in key_service.hidden if str(secret) in text] == []


async def test_log_of_google_shows_other_calls_and_none_of_ours(
    gcp_service: Service, cloud_kms: gcp.CloudKms, records: Records
) -> None:
    master = secrets.token_bytes(32)
    key = gcp_service.make()
    await key.unwrap(await key.wrap(master, b"context"), b"context")
    assert not any("Sending request" in text for text in records.texts)
    credentials = service_account.Credentials.from_service_account_info(  # type: ignore[no-untyped-call]
        json.loads(gcp.service_account())
    )
    options = ClientOptions(api_endpoint=cloud_kms.endpoint)
    async with kms.KeyManagementServiceAsyncClient(
        credentials=credentials, client_options=options
    ) as client:
        await client.encrypt(name=f"{gcp.RING}/a", plaintext=master)
    assert any("Sending request" in text for text in records.texts)
    assert any(form in "".join(records.texts) for form in forms_of(master))


# --- variables in tracebacks ---------------------------------------------------------------------

MASTER = secrets.token_bytes(32)


def no_key_is_in(error: BaseException, hidden: Iterable[str | bytes]) -> None:
    shown = locals_of(error)
    assert [form for form in forms_of(MASTER) if form in shown] == []
    assert [secret for secret in hidden if str(secret) in shown] == []


@pytest.mark.usefixtures("no_pauses")
async def test_failed_call_leaves_no_key_in_a_traceback(key_service: Service) -> None:
    key = key_service.make()
    wrapped = await key.wrap(MASTER, b"context")
    with pytest.raises(TamperedError) as tampered:
        await key.unwrap(wrapped, b"another context")
    no_key_is_in(tampered.value, key_service.hidden)
    with pytest.raises(TimeoutError) as late:
        async with asyncio.timeout(0):
            await key.wrap(MASTER, b"context")
    no_key_is_in(late.value, key_service.hidden)
    call = asyncio.ensure_future(key.wrap(MASTER, b"context"))
    await asyncio.sleep(0.001)
    call.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await call
    key_service.stop()
    with pytest.raises(KeyServiceError) as stopped:
        await key.wrap(MASTER, b"context")
    no_key_is_in(stopped.value, key_service.hidden)
    with pytest.raises(KeyServiceError) as stopped:
        await key.unwrap(wrapped, b"context")
    no_key_is_in(stopped.value, key_service.hidden)


def test_providers_of_one_key_are_equal(key_service: Service) -> None:
    assert key_service.make() == key_service.make()
    assert hash(key_service.make()) == hash(key_service.make())
    assert key_service.make() != key_service.other()


@on_one_service
async def test_start_calls_four_times_at_most_and_operations_never(
    key_service: Service, tmp_path: Path
) -> None:
    for _ in range(2):  # the first makes the keys, the second finds them
        before = key_service.calls()
        backend = AesGcmBackend(key_service.make())
        async with EncryptedSessionService(url(tmp_path), backend) as service:
            for number in range(20):
                await service.create_session(**WHO, session_id=f"{before}-{number}")
        assert 0 < key_service.calls() - before <= CALLS_FOR_A_START


@pytest.mark.usefixtures("no_pauses")
async def test_running_service_works_without_the_key_service(
    key_service: Service, tmp_path: Path
) -> None:
    backend = AesGcmBackend(key_service.make())
    async with EncryptedSessionService(url(tmp_path), backend) as service:
        await service.prepare_tables()
        key_service.stop()
        for number in range(10):
            session_id = str(number)
            await service.create_session(**WHO, session_id=session_id)
            assert await service.get_session(**WHO, session_id=session_id)
    async with EncryptedSessionService(url(tmp_path), backend) as service:
        with pytest.raises(KeyServiceError, match="check") as info:
            await service.prepare_tables()
    assert info.value.retryable
    assert repr(key_service.make().key_id) in str(info.value)
