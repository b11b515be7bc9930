"""Timeouts and retries of key services, and the addresses they may have."""

import asyncio
import inspect
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable

import pytest

from adk_secure_sessions import (
    AwsKmsKey,
    ConfigurationError,
    GcpKmsKey,
    KeyServiceError,
    Pkcs11Key,
    Reason,
    TamperedError,
    VaultKey,
    telemetry,
)
from adk_secure_sessions.keys import remote
from adk_secure_sessions.keys.remote import RemoteKey, check_transport, in_daemon_thread, require
from tests.key_services.support import join_threads


class Failing(RemoteKey):
    """Fails so many times, then answers."""

    pause = 0.001
    _kind = b"?"

    def __init__(
        self,
        failures: int,
        *address: object,
        attempts: int = 3,
        retryable: bool = True,
        key_id: str = "failing",
    ) -> None:
        super().__init__(key_id, *address, timeout=0.05, attempts=attempts)
        self.failures = failures
        self.hangs = False
        self.retryable = retryable
        self.asked = 0

    async def _encrypt(self, plaintext: bytes, associated_data: bytes) -> bytes:
        self.asked += 1
        if self.hangs:
            await asyncio.sleep(10)
        if self.asked <= self.failures:
            raise self._error("it fails", "check the test", retryable=self.retryable)
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


async def test_pauses_are_random_and_have_the_documented_limits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses: list[float] = []

    async def note(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", note)
    monkeypatch.setattr(Failing, "pause", RemoteKey.pause)
    for _ in range(200):
        assert await Failing(5, attempts=6).wrap(b"key", b"") == b"?key"
    for number, limit in enumerate([0.25, 0.5, 1, 2, 2]):
        found = pauses[number::5]
        assert limit * 0.5 <= min(found) < limit * 0.55
        assert limit * 0.95 < max(found) <= limit


@pytest.mark.parametrize("kind", [AwsKmsKey, GcpKmsKey, Pkcs11Key, VaultKey])
def test_default_is_three_attempts_of_five_seconds(kind: type[RemoteKey]) -> None:
    parameters = inspect.signature(kind).parameters
    assert (parameters["timeout"].default, parameters["attempts"].default) == (5.0, 3)


async def test_each_call_is_measured_with_its_class_and_operation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """tests/test_telemetry.py reads what is recorded then."""
    measured = []

    async def note(provider: str, operation: str, call: Callable[[], Awaitable[bytes]]) -> bytes:
        measured.append((provider, operation))
        return await call()

    monkeypatch.setattr(telemetry, "key_service_call", note)
    key = Failing(1)
    await key.unwrap(await key.wrap(b"key", b""), b"")
    assert measured == [("Failing", "wrap"), ("Failing", "wrap"), ("Failing", "unwrap")]


@pytest.mark.parametrize(("attempts", "retryable"), [(1, True), (2, True), (3, True), (3, False)])
async def test_attempts_are_bounded_and_a_call_that_fails_for_good_is_not_repeated(
    attempts: int, retryable: bool
) -> None:
    for call, value in (("wrap", b"key"), ("unwrap", b"?key")):
        key = Failing(9, attempts=attempts, retryable=retryable)
        with pytest.raises(KeyServiceError, match="root key 'failing': it fails; check the test"):
            await getattr(key, call)(value, b"")
        assert key.asked == (attempts if retryable else 1)


@pytest.mark.parametrize(
    ("retryable", "text"),
    [
        (True, "cannot answer now (7); check its status and quotas"),
        (False, "rejects the call (7); check the kind and state of the key"),
    ],
)
def test_answer_with_an_unknown_code_is_reported(retryable: bool, text: str) -> None:
    error = Failing(0)._other_error("the service", 7, retryable=retryable)
    assert str(error) == f"root key 'failing': the service {text}"
    assert error.retryable is retryable


async def test_service_that_hangs_times_out() -> None:
    key = Failing(0)
    key.hangs = True
    text = r"gave no answer within 0\.05 s; check its address, the network and its status$"
    with pytest.raises(KeyServiceError, match=text) as info:
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
    with pytest.raises(TamperedError) as info:
        await key.unwrap(b"!key", b"")
    assert info.value.reason is Reason.MALFORMED
    assert key.asked == 0


@pytest.mark.parametrize(
    "url",
    ["https://kms.example", "http://127.0.0.1:8200", "http://[::1]:1", "http://localhost",
     "https://[2001:db8::abcd:ef01]", "https://[2001:DB8::ABCD:EF01]:8200/"],
)  # fmt: skip
def test_address_that_keeps_keys_private_is_accepted(url: str) -> None:
    check_transport(url)


@pytest.mark.parametrize(
    "url",
    ["", "kms.example", "http://kms.example", "http://localhost.example", "ftp://localhost",
     "http://127.0.0.1@kms.example", "https://"],
)  # fmt: skip
def test_address_that_does_not_is_rejected(url: str) -> None:
    with pytest.raises(
        ConfigurationError, match=r"^the address of a key service (begins|does not) "
    ):
        check_transport(url)
    with pytest.raises(ConfigurationError, match=r"^the address of that store (begins|does not) "):
        check_transport(url, "that store")


def test_objects_are_equal_if_they_name_the_same_key_of_the_same_service() -> None:
    key = Failing(0, "address", key_id="a")
    assert key == Failing(9, "address", key_id="a", attempts=1)
    assert hash(key) == hash(Failing(9, "another", key_id="a")) != hash(Failing(0, key_id="b"))
    for other in (
        Failing(0, "address", key_id="b"),
        Failing(0, "another", key_id="a"),
        Failing(0, key_id="a"),
        Slow(0, "address", key_id="a"),
        "a",
    ):
        assert key != other


def test_key_id_is_checked() -> None:
    with pytest.raises(ConfigurationError, match="255"):
        Failing(0, key_id="x" * 256)


# --- logs of other libraries ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "library",
    ["botocore", "google", "grpc", "hpack", "httpcore", "httpx", "pkcs11", "requests", "urllib3"],
)
async def test_debug_log_of_a_library_is_discarded_in_our_calls_only(
    library: str, caplog: pytest.LogCaptureFixture
) -> None:
    loggers = [logging.getLogger(name) for name in (library, f"{library}.part.of_it")]
    for logger in loggers:
        caplog.set_level(logging.DEBUG, logger.name)

    class Logging(Failing):
        async def _encrypt(self, plaintext: bytes, associated_data: bytes) -> bytes:
            for logger in loggers:
                logger.debug("within a call")
                try:
                    raise ValueError("within")
                except ValueError:
                    logger.info("within a call", exc_info=True)
            logging.getLogger(f"{library}2").warning("another library")
            logging.getLogger("tests").debug("another library")
            return plaintext

    caplog.set_level(logging.DEBUG, "tests")
    for _ in range(2):
        await Logging(0).wrap(b"key", b"")
        for logger in loggers:
            logger.debug("outside")
    expected = [
        *((logger.name, logging.INFO) for logger in loggers),
        (f"{library}2", logging.WARNING),
        ("tests", logging.DEBUG),
        *((logger.name, logging.DEBUG) for logger in loggers),
    ]
    assert [(record.name, record.levelno) for record in caplog.records] == expected * 2
    debug = [record.getMessage() for record in caplog.records if record.levelno == logging.DEBUG]
    assert set(debug) == {"outside", "another library"}
    # Its frames have local variables, which error reporters record.
    assert not any(record.exc_info for record in caplog.records)


# --- threads and libraries -----------------------------------------------------------------------


async def test_blocking_call_runs_in_a_thread() -> None:
    assert await in_daemon_thread(lambda: threading.current_thread().name) == "key service"


async def test_error_of_a_blocking_call_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        await in_daemon_thread(lambda: bytes(1 // 0))


async def stuck(number: int) -> threading.Event:
    """Abandon *number* calls, which end after the event is set."""
    event = threading.Event()
    calls = [asyncio.create_task(in_daemon_thread(event.wait)) for _ in range(number)]
    await asyncio.sleep(0)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    return event


async def test_calls_that_never_end_block_no_other_threads() -> None:
    event = await stuck(50)
    try:
        assert await asyncio.to_thread(lambda: 7) == 7
        assert await in_daemon_thread(lambda: 8) == 8
    finally:
        event.set()


async def test_number_of_calls_that_never_end_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_MAX_ABANDONED", 5)
    join_threads()  # of other tests
    event = await stuck(5)
    with pytest.raises(TimeoutError):
        await in_daemon_thread(lambda: 8)
    event.set()
    join_threads()
    assert await in_daemon_thread(lambda: 8) == 8
    assert remote._abandoned == []


async def test_thread_of_a_closed_call_is_counted() -> None:
    event = threading.Event()
    call = in_daemon_thread(event.wait)
    call.send(None)
    call.close()
    try:
        assert remote._abandoned[-1].is_alive()
    finally:
        event.set()


NEVER_ENDS = """
import asyncio, threading
from adk_secure_sessions.keys.remote import in_daemon_thread

async def main():
    try:
        await asyncio.wait_for(in_daemon_thread(threading.Event().wait), 0.05)
    except TimeoutError:
        print("timed out")

asyncio.run(main())
"""


def test_call_that_never_ends_does_not_keep_the_process() -> None:
    done = subprocess.run([sys.executable, "-c", NEVER_ENDS], capture_output=True, timeout=60)
    assert (done.stdout, done.stderr) == (b"timed out\n", b"")


def test_call_that_ends_after_its_event_loop_is_discarded(caplog: pytest.LogCaptureFixture) -> None:
    event = asyncio.run(stuck(1))
    event.set()
    join_threads()
    assert caplog.records == []


def test_first_of_several_missing_modules_is_named_with_its_user() -> None:
    require("vault", "json")
    with pytest.raises(ConfigurationError, match=r"^this key needs no_module_a: pip install "):
        require("vault", "json", "no_module_a", "no_module_b")
    with pytest.raises(ConfigurationError, match=r"^that store needs no_module_a: pip install "):
        require("vault", "no_module_a", "json", user="that store")
