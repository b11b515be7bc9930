"""URLs with verified TLS of docs/databases.md: each rejects a server that cannot prove its name.

How it works: PostgreSQL's wheel has no TLS, so a proxy before the server ends TLS.
MariaDB is a private server with a certificate.
"""

import asyncio
import re
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from sqlalchemy import URL

from adk_secure_sessions import AesGcmBackend, DatabaseError, EncryptedSessionService
from tests import servers
from tests.key_services.certificates import certificate

PAGE = (Path(__file__).parents[2] / "docs" / "databases.md").read_text(encoding="utf-8")
# Addresses of this machine: one that the certificate names, and one that it does not.
GOOD, BAD = "127.0.0.1", "127.0.0.2"
_SSL_REQUEST = struct.pack("!ii", 8, 80877103)


class Files(NamedTuple):
    """Certificates: `ca` is what a client trusts, `other` is of somebody else."""

    ca: Path
    both: Path
    other: Path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    directory = tmp_path_factory.mktemp("tls")
    other = directory / "other.pem"
    other.write_bytes(certificate().public)
    return Files(*certificate().write(directory), other)


def documented(driver: str) -> dict[str, str]:
    """Return the options in the URL of *driver* in the page's section about TLS."""
    section = PAGE.partition("\n### TLS\n")[2].partition("\n### ")[0]
    found = re.search(rf"`\w+\+{driver}://[^?`]+\?([^`]+)`", section)
    assert found, driver
    return dict(option.split("=") for option in found[1].split("&"))


async def store(url: URL, ca: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Create a session by *url* with the documented options, trusting *ca*."""
    options = documented(url.get_driver_name())
    monkeypatch.setenv("PGSSLROOTCERT", str(ca))
    query = {name: str(ca) if value.endswith(".pem") else value for name, value in options.items()}
    url = url.update_query_dict(query)
    async with EncryptedSessionService(url, AesGcmBackend(bytes(32))) as service:
        await service.create_session(app_name="clinic", user_id="ada")


@asynccontextmanager
async def tls_before(url: URL, both: Path | None) -> AsyncIterator[int]:
    """Listen for PostgreSQL's clients, and yield the port; without *both*, offer no TLS."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    if both is not None:
        context.load_cert_chain(both)
    tasks: set[asyncio.Task[None]] = set()

    async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 16):
            target.write(data)
            await target.drain()

    async def serve(client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        me = asyncio.current_task()
        assert me is not None
        tasks.add(me)
        writers = [to_client]
        try:
            assert await client.readexactly(8) == _SSL_REQUEST, "the client does not ask for TLS"
            to_client.write(b"N" if both is None else b"S")
            if both is None:
                await client.read(1)
                return
            await to_client.start_tls(context)
            path = Path(str(url.query["host"]), ".s.PGSQL.5432")
            server, to_server = await asyncio.open_unix_connection(str(path))
            writers.append(to_server)
            copies = [copy(client, to_server), copy(server, to_client)]
            running = {asyncio.ensure_future(one) for one in copies}
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for one in running:
                one.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        except (OSError, asyncio.IncompleteReadError):
            pass  # the client has ended the handshake
        finally:
            for writer in writers:
                writer.close()
            tasks.discard(me)

    good = await asyncio.start_server(serve, GOOD, 0)
    port: int = good.sockets[0].getsockname()[1]
    bad = await asyncio.start_server(serve, BAD, port)
    try:
        yield port
    finally:
        good.close()
        bad.close()
        while tasks:
            await asyncio.wait(tasks)
            await asyncio.sleep(0)


@pytest.fixture(scope="module")
def mariadb_with_tls(files: Files) -> Iterator[URL]:
    """A MariaDB server that any address of this machine reaches with TLS."""
    with socket.create_server((GOOD, 0)) as free:
        port = free.getsockname()[1]
    options = ["--skip-networking=0", "--bind-address=0.0.0.0", f"--port={port}"]
    options += [f"--ssl-cert={files.both}", f"--ssl-key={files.both}"]
    with servers.mariadb(*options) as server, server.database() as url:
        with server.admin.connect() as connection:
            connection.exec_driver_sql("CREATE USER clinic@'%%' IDENTIFIED BY 'secret' REQUIRE SSL")
            connection.exec_driver_sql("GRANT ALL ON *.* TO clinic@'%%'")
        yield URL.create("mariadb+asyncmy", "clinic", "secret", GOOD, port, url.database)


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
async def test_documented_postgresql_url_accepts_only_the_server_of_the_certificate(
    postgresql: servers.PostgreSQL, driver: str, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    with postgresql.database() as url:
        async with tls_before(url, files.both) as port:
            url = url.set(drivername=f"postgresql+{driver}", host=GOOD, port=port, query={})
            await store(url, files.ca, monkeypatch)
            for host, ca in [(BAD, files.ca), (GOOD, files.other)]:
                with pytest.raises(DatabaseError):
                    await store(url.set(host=host), ca, monkeypatch)


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
async def test_documented_postgresql_url_rejects_a_server_without_tls(
    postgresql: servers.PostgreSQL, driver: str, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with tls_before(postgresql.admin_url, None) as port:
        url = URL.create(f"postgresql+{driver}", "clinic", "secret", GOOD, port, "clinic")
        with pytest.raises(DatabaseError):
            await store(url, files.ca, monkeypatch)


@pytest.mark.soak  # it starts a server of its own
async def test_documented_mariadb_url_accepts_only_the_server_of_the_certificate(
    mariadb_with_tls: URL, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store(mariadb_with_tls, files.ca, monkeypatch)
    for host, ca in [(BAD, files.ca), (GOOD, files.other)]:
        with pytest.raises(DatabaseError):
            await store(mariadb_with_tls.set(host=host), ca, monkeypatch)


@pytest.mark.soak
async def test_documented_mariadb_url_rejects_a_server_without_tls(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server((GOOD, 0)) as free:
        port = free.getsockname()[1]
    options = ["--skip-networking=0", f"--bind-address={GOOD}", f"--port={port}", "--skip-ssl"]
    with servers.mariadb(*options) as server, server.database() as made:
        with server.admin.connect() as connection:
            connection.exec_driver_sql("CREATE USER clinic@'%%' IDENTIFIED BY 'secret'")
            connection.exec_driver_sql("GRANT ALL ON *.* TO clinic@'%%'")
        url = URL.create("mariadb+asyncmy", "clinic", "secret", GOOD, port, made.database)
        async with EncryptedSessionService(url, AesGcmBackend(bytes(32))) as service:
            await service.create_session(app_name="clinic", user_id="ada")
        with pytest.raises(DatabaseError):
            await store(url, files.ca, monkeypatch)
