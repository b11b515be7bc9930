"""Timeouts and retries of key services, and the addresses they may have."""

import asyncio
import time

import pytest

from adk_secure_sessions import ConfigurationError, KeyServiceError, TamperedError
from adk_secure_sessions.keys.remote import RemoteKey, check_transport


class Failing(RemoteKey):
    """Fails so many times, then answers."""

    pause = 0.001
    _kind = b"?"

    def __init__(self, failures: int, *, attempts: int = 3, retryable: bool = True) -> None:
        super().__init__("failing", timeout=0.05, attempts=attempts)
        self.failures = failures
        self.hangs = False
        self.retryable = retryable
        self.asked = 0

    async def _encrypt(self, plaintext: bytes, associated_data: bytes) -> bytes:
        self.asked += 1
        if self.hangs:
            await asyncio.sleep(10)
        if self.asked <= self.failures:
            raise self._failure("it fails", "check the test", retryable=self.retryable)
        return plaintext

    async def _decrypt(self, sealed: bytes, associated_data: bytes) -> bytes:
        return await self._encrypt(sealed, associated_data)


class Slow(Failing):
    pause = 0.1
    longest_pause = 0.2


async def test_service_is_called_again_after_growing_pauses() -> None:
    key, began = Slow(3, attempts=4), time.perf_counter()
    assert await key.wrap(b"key", b"") == b"?key"
    # Pauses of 0.1, 0.2 and again 0.2, each less up to a half.
    assert 0.25 <= time.perf_counter() - began < 0.25 * 2 + 0.5
    assert key.asked == 4


@pytest.mark.parametrize("attempts", [1, 2, 3])
async def test_attempts_are_bounded(attempts: int) -> None:
    key = Failing(9, attempts=attempts)
    with pytest.raises(KeyServiceError, match="root key 'failing': it fails; check the test"):
        await key.wrap(b"key", b"")
    assert key.asked == attempts


async def test_call_that_fails_for_good_is_not_repeated() -> None:
    key = Failing(9, retryable=False)
    with pytest.raises(KeyServiceError):
        await key.unwrap(b"?key", b"")
    assert key.asked == 1


async def test_service_that_hangs_times_out() -> None:
    key = Failing(0)
    key.hangs = True
    with pytest.raises(KeyServiceError, match=r"gave no answer within 0\.05 s") as info:
        await key.wrap(b"key", b"")
    assert info.value.retryable
    assert key.asked == 3


async def test_cancellation_in_a_pause_ends_the_call() -> None:
    class Patient(Failing):
        pause = longest_pause = 10.0

    key = Patient(9)
    call = asyncio.create_task(key.wrap(b"key", b""))
    while not key.asked:
        await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert key.asked == 1


async def test_timeout_of_the_caller_stays_a_timeout() -> None:
    """It is not an error of the key service, and the call is not repeated."""
    key = Failing(0)
    key.hangs = True
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await key.wrap(b"key", b"")
    assert key.asked == 1


async def test_key_wrapped_by_another_kind_is_rejected_without_a_call() -> None:
    key = Failing(0)
    with pytest.raises(TamperedError):
        await key.unwrap(b"!key", b"")
    assert key.asked == 0


@pytest.mark.parametrize(
    "url", ["https://kms.example", "http://127.0.0.1:8200", "http://[::1]:1", "http://localhost"]
)
def test_address_that_keeps_keys_private_is_accepted(url: str) -> None:
    check_transport(url)


@pytest.mark.parametrize(
    "url",
    ["", "kms.example", "http://kms.example", "http://localhost.example", "ftp://localhost",
     "http://127.0.0.1@kms.example", "https://"],
)  # fmt: skip
def test_address_that_does_not_is_rejected(url: str) -> None:
    with pytest.raises(ConfigurationError):
        check_transport(url)
