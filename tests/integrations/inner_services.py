"""Session services of ADK for `EncryptedSessionWrapper`, each with what an attacker can read.

How it works: `INNER` lists functions by name.  Each opens a service in a directory, and yields an
`Inner`: `open()` returns one more service on the same store, and `stored()` all that the store
holds, as bytes.  A service whose server or client library is missing is skipped visibly.
"""

import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from google.adk.sessions import BaseSessionService, InMemorySessionService
from google.adk.sessions.database_session_service import DatabaseSessionService
from google.adk.sessions.sqlite_session_service import SqliteSessionService

from tests.servers import unavailable

# Runs a server until its standard input ends, as it does when the test process dies.
_UNTIL_EOF = '"$@" & read -r _; kill $! 2>/dev/null; wait $!'
_PATIENCE = 30.0  # seconds for a server to start


@dataclass(frozen=True)
class Inner:
    open: Callable[[], BaseSessionService]
    stored: Callable[[], Any]  # bytes, or a coroutine that returns them


async def stored_bytes(inner: Inner) -> bytes:
    found = inner.stored()
    return found if isinstance(found, bytes) else await found


@asynccontextmanager
async def in_memory(directory: Path) -> AsyncIterator[Inner]:
    service = InMemorySessionService()

    def stored() -> bytes:
        everything = (service.sessions, service.user_state, service.app_state)
        return repr(everything).encode()

    yield Inner(lambda: service, stored)


@asynccontextmanager
async def sqlite(directory: Path) -> AsyncIterator[Inner]:
    file = directory / "inner.db"
    yield Inner(lambda: SqliteSessionService(str(file)), lambda: _files(file))


@asynccontextmanager
async def database(directory: Path) -> AsyncIterator[Inner]:
    file = directory / "inner.db"
    url = f"sqlite+aiosqlite:///{file}"
    yield Inner(lambda: DatabaseSessionService(url), lambda: _files(file))


def _files(file: Path) -> bytes:
    return b"".join(one.read_bytes() for one in sorted(file.parent.glob(f"{file.name}*")))


@asynccontextmanager
async def redis(directory: Path) -> AsyncIterator[Inner]:
    """ADK's Redis service on a private server, which listens on a Unix socket only."""
    client = pytest.importorskip("redis.asyncio", reason="pip install redis")
    services = pytest.importorskip(
        "google.adk.integrations.redis", reason="this google-adk has no Redis session service"
    )
    if (program := shutil.which("redis-server")) is None:
        unavailable("no Redis here: on Debian, apt-get install redis-server")
    socket = directory / "redis.sock"
    options = ["--port", "0", "--unixsocket", str(socket), "--save", "", "--dir", str(directory)]
    command = ["sh", "-c", _UNTIL_EOF, "redis", program, *options]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    clients: list[Any] = []

    def connect(*, text: bool = True) -> Any:
        clients.append(client.Redis(unix_socket_path=str(socket), decode_responses=text))
        return clients[-1]

    async def stored() -> bytes:
        raw = connect(text=False)
        return b"".join([key + (await raw.get(key)) for key in await raw.keys()])

    try:
        deadline = time.monotonic() + _PATIENCE
        while not socket.exists():
            assert process.poll() is None, "redis-server has ended"
            assert time.monotonic() < deadline, "redis-server does not start"
            time.sleep(0.01)
        yield Inner(lambda: services.RedisSessionService(redis_client=connect()), stored)
    finally:
        for one in clients:
            await one.aclose()
        process.communicate()  # closes its standard input


@asynccontextmanager
async def mongodb(directory: Path) -> AsyncIterator[Inner]:
    """ADK's MongoDB service.  Neither Debian nor a wheel brings a MongoDB server."""
    pytest.skip("no MongoDB server can be installed from Debian or from a wheel")
    yield  # type: ignore[unreachable]


INNER: dict[str, Callable[[Path], AbstractAsyncContextManager[Inner]]] = {
    "memory": in_memory,
    "sqlite": sqlite,
    "database": database,
    "redis": redis,
    "mongodb": mongodb,
}
