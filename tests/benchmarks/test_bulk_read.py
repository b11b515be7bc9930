"""Reading much at once, and which part of it is decrypting."""

import os
import time
from collections.abc import Awaitable, Callable

import pytest
from google.adk.sessions import BaseSessionService

from adk_secure_sessions import AesGcmBackend, Cipher, EncryptedSessionService, FernetBackend
from adk_secure_sessions.formats.records import open_record, seal, unpack
from tests.benchmarks.budgets import FIELDS_OPENED
from tests.benchmarks.ciphers import BACKENDS, timed
from tests.benchmarks.filling import fill
from tests.benchmarks.harness import collector_off
from tests.benchmarks.places import NEAR, Place
from tests.benchmarks.plan import BULK_READS, FIELDS
from tests.benchmarks.results import Figure, Results
from tests.benchmarks.samples import APP, payload, state

pytestmark = pytest.mark.benchmark

COUNT, READS = 1000, 15
Reading = Callable[[BaseSessionService], Awaitable[object]]


@pytest.mark.parametrize("name", BACKENDS)
def test_fields(results: Results, name: str) -> None:
    """A hundred sealed values of 1 KB, each with its header checked and authenticated."""
    backend = BACKENDS[name](os.urandom(32))
    cipher: Cipher = backend.cipher(backend.new_key())
    plaintext = repr(payload("1KB")).encode()
    places = [b"place %d" % number for number in range(FIELDS)]
    records = [seal(cipher, backend.backend_id, 1, place, plaintext) for place in places]

    def open_all() -> list[bytes]:
        opened = []
        for record, place in zip(records, places, strict=True):
            assert unpack(record) == (backend.backend_id, 1)
            opened.append(open_record(record, place, cipher))
        return opened

    assert open_all() == [plaintext] * FIELDS
    [values] = timed({name: open_all}).values()
    results.add(f"bulk/{FIELDS} fields/{name}", Figure.of(values, "s", goal=FIELDS_OPENED))


class Watched:
    """A cipher that adds up the time it takes to decrypt."""

    def __init__(self, cipher: Cipher, backend: "WatchedBackend") -> None:
        self.encrypt = cipher.encrypt
        self._cipher = cipher
        self._backend = backend

    def decrypt(self, sealed: bytes, associated_data: bytes) -> bytes:
        start = time.perf_counter()
        plaintext = self._cipher.decrypt(sealed, associated_data)
        self._backend.seconds += time.perf_counter() - start
        self._backend.calls += 1
        return plaintext


class WatchedBackend:
    """Another backend under a watch."""

    def __init__(self, backend: AesGcmBackend | FernetBackend) -> None:
        self.backend_id, self.name = 0x80, "watched"
        self.root_key, self.new_key = backend.root_key, backend.new_key
        self._backend = backend
        self.seconds, self.calls = 0.0, 0

    def cipher(self, key: bytes) -> Watched:
        return Watched(self._backend.cipher(key), self)


async def add_session(service: BaseSessionService) -> Reading:
    [name] = await fill(service, "reader", 1, COUNT)
    return lambda of: of.get_session(app_name=APP, user_id="reader", session_id=name)


async def add_list(service: BaseSessionService) -> Reading:
    await fill(service, "lister", COUNT, of=state(500))
    return lambda of: of.list_sessions(app_name=APP, user_id="lister")


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("place", NEAR, indirect=True)
@pytest.mark.parametrize(
    ("what", "add"),
    list(zip(BULK_READS, (add_session, add_list), strict=True)),
    ids=["get", "list"],
)
@pytest.mark.parametrize("name", BACKENDS)
async def test_share_of_decrypting(
    place: Place,
    results: Results,
    name: str,
    what: str,
    add: Callable[[BaseSessionService], Awaitable[Reading]],
) -> None:
    backend = WatchedBackend(BACKENDS[name](os.urandom(32)))
    url = place.databases.make()
    async with EncryptedSessionService(url, backend) as writer:
        read = await add(writer)
    shares = []
    for _ in range(READS):
        # A new one each time: whoever has read a session before need not open all of it again.
        async with EncryptedSessionService(url, backend) as reader:
            await reader.prepare_tables()
            with collector_off():
                backend.seconds, backend.calls = 0.0, 0
                start = time.perf_counter()
                await read(reader)
                shares.append(100 * backend.seconds / (time.perf_counter() - start))
        assert backend.calls >= COUNT
    results.add(f"{place.name}/bulk/{what}/{name} decrypting", Figure.of(shares, "%"))
