"""Session services of ADK for `EncryptedSessionWrapper`, each with what an attacker can read.

How it works: `INNER` lists functions by name.  Each opens a service in a directory, and yields an
`Inner`: `open()` returns one more service on the same store, and `stored()` all that the store
holds, as bytes.  A service whose server or client library is missing is skipped visibly.
"""

import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import pytest
from google.adk.sessions import BaseSessionService, InMemorySessionService
from google.adk.sessions.database_session_service import DatabaseSessionService
from google.adk.sessions.sqlite_session_service import SqliteSessionService
from sqlalchemy import URL

from tests.programs import find
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
    path = directory / "redis.sock"
    options = ["--port", "0", "--unixsocket", str(path), "--save", "", "--dir", str(directory)]
    clients: list[Any] = []

    def connect(*, text: bool = True) -> Any:
        clients.append(client.Redis(unix_socket_path=str(path), decode_responses=text))
        return clients[-1]

    async def stored() -> bytes:
        raw = connect(text=False)
        return b"".join([key + (await raw.get(key)) for key in await raw.keys()])

    with _server(path, [program], options):
        try:
            yield Inner(lambda: services.RedisSessionService(redis_client=connect()), stored)
        finally:
            for one in clients:
                await one.aclose()


class FerretDB(NamedTuple):
    """A server that speaks MongoDB's protocol, and stores its documents in SQLite files."""

    socket: Path
    directory: Path

    @contextmanager
    def connected(self, database: str) -> Iterator[Callable[[], BaseSessionService]]:
        """Give a function that opens ADK's MongoDB service on a database of the server."""
        import pymongo
        from google.adk.integrations.mongodb import MongoDbSessionService

        class Client(pymongo.MongoClient[Any]):
            """A client without transactions, which FerretDB does not have.

            ADK's service then writes one document after another, as on a standalone MongoDB.
            """

            def start_session(self, *_: object, **__: object) -> Any:
                raise NotImplementedError

        clients: list[Client] = []

        def open_one() -> BaseSessionService:
            clients.append(Client(f"mongodb://{quote(str(self.socket), safe='')}"))
            return MongoDbSessionService(database_name=database, mongo_client=clients[-1])

        try:
            yield open_one
        finally:
            for one in clients:
                one.close()

    def stored(self) -> bytes:
        return b"".join(one.read_bytes() for one in sorted(self.directory.iterdir()))

    @contextmanager
    def database(self, *, reused: bool = False) -> Iterator[URL]:
        """Name a new database, as the servers of tests/servers.py do; none is used again."""
        name = f"test_{secrets.token_hex(8)}"
        with tempfile.TemporaryDirectory() as directory:
            places = {"socket": str(self.socket), "directory": str(self.directory)}
            keys = {"keys": f"{directory}/keys.db"}
            yield URL.create("mongodb", database=name, query=places | keys)


@contextmanager
def ferretdb(directory: Path) -> Iterator[FerretDB]:
    pytest.importorskip("pymongo", reason="pip install pymongo")
    pytest.importorskip(
        "google.adk.integrations.mongodb", reason="this google-adk has no MongoDB session service"
    )
    if (program := find("ferretdb")) is None:
        pytest.skip("no FerretDB here: tests/README.md says how to build it")
    path, data = directory / "mongodb.sock", directory / "mongodb"
    data.mkdir()
    with _server(
        path,
        [program, "--handler=sqlite", f"--sqlite-url=file:{data}/", f"--state-dir={directory}"],
        ["--listen-addr=", f"--listen-unix={path}", "--debug-addr=-", "--telemetry=disable"],
    ):
        yield FerretDB(path, data)


@asynccontextmanager
async def mongodb(directory: Path) -> AsyncIterator[Inner]:
    """ADK's MongoDB service on a private FerretDB."""
    with ferretdb(directory) as server, server.connected("adk") as open_one:
        yield Inner(open_one, server.stored)


@contextmanager
def _server(path: Path, *command: Sequence[str]) -> Iterator[None]:
    """Run a server for the block, which begins when the server listens on the socket *path*."""
    process = subprocess.Popen(
        ["sh", "-c", _UNTIL_EOF, "server", *chain.from_iterable(command)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + _PATIENCE
        while not _listens(path):  # the file is there before the server listens
            assert process.poll() is None, "the server has ended"
            assert time.monotonic() < deadline, "the server does not start"
            time.sleep(0.01)
        yield
    finally:
        process.communicate()  # closes its standard input


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as connection:
        return connection.connect_ex(str(path)) == 0


INNER: dict[str, Callable[[Path], AbstractAsyncContextManager[Inner]]] = {
    "memory": in_memory,
    "sqlite": sqlite,
    "database": database,
    "redis": redis,
    "mongodb": mongodb,
}
SLOW = {"redis", "mongodb"}  # each starts a server for each test: only under `make soak`
each_inner = [
    pytest.param(name, marks=[pytest.mark.soak] if name in SLOW else []) for name in INNER
]
