"""Bulk reads, and the share of their time that is spent decrypting."""

import os
import time
from collections.abc import Awaitable, Callable

import pytest
from google.adk.sessions import BaseSessionService

from adk_secure_sessions import AesGcmBackend, Cipher, EncryptedSessionService, FernetBackend
from adk_secure_sessions.formats.records import (
    NO_FLAGS,
    build_header,
    open_with_flags,
    parse_header,
    seal,
)
from tests.benchmarks.budgets import FIELDS_OPENED
from tests.benchmarks.ciphers import BACKENDS, time_runs
from tests.benchmarks.deployments import LOCAL, Deployment
from tests.benchmarks.harness import gc_paused
from tests.benchmarks.plan import BULK_READS, FIELDS
from tests.benchmarks.results import Figure, Results
from tests.benchmarks.seeding import seed_sessions
from tests.benchmarks.workload import APP, payload, state

pytestmark = pytest.mark.bench

COUNT, ROUNDS = 1000, 15
Reading = Callable[[BaseSessionService], Awaitable[object]]


@pytest.mark.parametrize("name", BACKENDS)
def test_fields(results: Results, name: str) -> None:
    """Decrypt `FIELDS` records of 1 KB each, including the check of their headers."""
    backend = BACKENDS[name](os.urandom(32))
    cipher: Cipher = backend.cipher(backend.new_key())
    content = repr(payload("1KB")).encode()
    contexts = [b"context %d" % number for number in range(FIELDS)]
    header = build_header(backend.backend_id, 1)
    records = [seal(cipher, header, context, NO_FLAGS + content) for context in contexts]

    def decrypt_all() -> list[bytes]:
        values = []
        for record, context in zip(records, contexts, strict=True):
            assert parse_header(record) == (backend.backend_id, 1)
            values.append(open_with_flags(record, context, cipher)[1:])
        return values

    assert decrypt_all() == [content] * FIELDS
    [seconds] = time_runs({name: decrypt_all}).values()
    results.add(f"bulk/{FIELDS} fields/{name}", Figure.of(seconds, "s", goal=FIELDS_OPENED))


class TimedCipher:
    """A cipher that adds the time it spends decrypting to its backend's total."""

    def __init__(self, cipher: Cipher, backend: "TimedBackend") -> None:
        self.encrypt = cipher.encrypt
        self._cipher = cipher
        self._backend = backend

    def decrypt(self, sealed: bytes, associated_data: bytes) -> bytes:
        start = time.perf_counter()
        plaintext = self._cipher.decrypt(sealed, associated_data)
        self._backend.seconds += time.perf_counter() - start
        self._backend.calls += 1
        return plaintext


class TimedBackend:
    """Wraps a backend; totals the calls and seconds of decryption."""

    def __init__(self, backend: AesGcmBackend | FernetBackend) -> None:
        self.backend_id, self.name = 0x80, "timed"
        self.root_key, self.new_key = backend.root_key, backend.new_key
        self._backend = backend
        self.seconds, self.calls = 0.0, 0

    def cipher(self, key: bytes) -> TimedCipher:
        return TimedCipher(self._backend.cipher(key), self)


async def seed_session(service: BaseSessionService) -> Reading:
    [name] = await seed_sessions(service, "reader", 1, COUNT)
    return lambda reader: reader.get_session(app_name=APP, user_id="reader", session_id=name)


async def seed_list(service: BaseSessionService) -> Reading:
    await seed_sessions(service, "lister", COUNT, initial=state(500))
    return lambda reader: reader.list_sessions(app_name=APP, user_id="lister")


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("deployment", LOCAL, indirect=True)
@pytest.mark.parametrize(
    ("operation", "seed"),
    list(zip(BULK_READS, (seed_session, seed_list), strict=True)),
    ids=["get", "list"],
)
@pytest.mark.parametrize("name", BACKENDS)
async def test_decryption_share(
    deployment: Deployment,
    results: Results,
    name: str,
    operation: str,
    seed: Callable[[BaseSessionService], Awaitable[Reading]],
) -> None:
    backend = TimedBackend(BACKENDS[name](os.urandom(32)))
    url = deployment.databases.create()
    async with EncryptedSessionService(url, backend) as writer:
        read = await seed(writer)
    shares = []
    for _ in range(ROUNDS):
        # A new service each time: one that has read a session before need not decrypt all of it.
        async with EncryptedSessionService(url, backend) as reader:
            await reader.prepare_tables()
            with gc_paused():
                backend.seconds, backend.calls = 0.0, 0
                start = time.perf_counter()
                await read(reader)
                shares.append(100 * backend.seconds / (time.perf_counter() - start))
        assert backend.calls >= COUNT
    results.add(
        f"{deployment.name}/bulk/{operation}/{name} decryption share", Figure.of(shares, "%")
    )
