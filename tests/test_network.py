"""The library uses the network for the database, the object store and the key service alone.

strace lists the connections and datagrams of a program, also those of C and Rust libraries.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from sqlalchemy import URL

from tests.drivers import each_driver, server, url  # noqa: F401 - fixtures
from tests.integrations import s3
from tests.key_services.conftest import vault  # noqa: F401 - a fixture
from tests.key_services.vault import Vault
from tests.servers import unavailable

name = each_driver("asyncpg", soak=["psycopg", "asyncmy"])

USE = """
import asyncio, sys
from google.adk.events import Event
from google.genai import types
from adk_secure_sessions import AesGcmBackend, ArtifactStore, EncryptedArtifactService
from adk_secure_sessions import EncryptedMemoryService, EncryptedSessionService, generate_key
from adk_secure_sessions.maintenance import Database, erase_user, rotate_data, verify

IDS = {"app_name": "clinic", "user_id": "ada", "session_id": "visit"}

async def use(url, key, store, options=None):
    async with EncryptedSessionService(url, AesGcmBackend(key)) as service:
        session = await service.create_session(**IDS, state={"user:n": 1})
        part = types.Part(text="hello")
        event = Event(author="user", content=types.Content(role="user", parts=[part]))
        await service.append_event(session, event)
        assert len((await service.get_session(**IDS)).events) == 1
        await service.list_sessions(app_name="clinic")
        memory = EncryptedMemoryService(service)
        await memory.add_session_to_memory(session)
        await memory.search_memory(app_name="clinic", user_id="ada", query="hello")
        artifacts = EncryptedArtifactService(service, ArtifactStore(store, options=options))
        await artifacts.save_artifact(**IDS, filename="scan", artifact=part)
        assert (await artifacts.load_artifact(**IDS, filename="scan")).text == "hello"
    async with Database(url, AesGcmBackend(key)) as db:
        await rotate_data(db)
        assert not (await verify(db)).bad
        await erase_user(db, "clinic", "ada")
    print("used")
"""


def addresses(program: str, directory: Path) -> set[tuple[str, int]]:
    """Run *program* and return the network addresses that it sent anything to."""
    if (strace := shutil.which("strace")) is None:
        unavailable("no strace here: on Debian, apt-get install strace")
    trace = directory / "trace"
    # With --seccomp-bpf, the other calls of the program are as fast as without strace.
    tracing = [strace, "-f", "--seccomp-bpf", "-qq", "-s", "0", "-o", str(trace)]
    tracing += ["-e", "trace=connect,sendto,sendmsg,sendmmsg"]
    done = subprocess.run(
        [*tracing, sys.executable, "-c", program],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "used" in done.stdout
    found = re.findall(
        r"sin6?_port=htons\((\d+)\).*?inet_(?:addr\(|pton\(AF_INET6, )\"([^\"]+)\"",
        trace.read_text(),
    )
    return {(address, int(port)) for port, address in found}


def test_connections_are_seen(tmp_path: Path) -> None:
    program = """
import socket
for kind, port in (socket.SOCK_STREAM, 9), (socket.SOCK_DGRAM, 53):
    try:
        with socket.socket(type=kind) as one:
            one.connect(("127.0.0.1", port))
            one.send(b"")
    except OSError:
        pass
with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as one:
    try:
        one.sendto(b"x", ("::1", 7))
    except OSError:
        pass
print("used")
"""
    assert addresses(program, tmp_path) == {("127.0.0.1", 9), ("127.0.0.1", 53), ("::1", 7)}


@pytest.mark.soak
def test_only_the_database_is_connected_to(url: URL, tmp_path: Path) -> None:  # noqa: F811
    address = url.render_as_string(hide_password=False)
    program = USE + f"asyncio.run(use({address!r}, generate_key(), 'blobs'))"
    # The servers of the tests have no address on the network, unless the environment names one.
    allowed = {url.port} if url.host and not url.host.startswith("/") else set()
    assert {port for _, port in addresses(program, tmp_path)} <= allowed


def test_only_the_key_service_and_the_object_store_are_connected_to(
    vault: Vault,  # noqa: F811
    tmp_path: Path,
) -> None:
    with s3.running() as store:
        key = f"VaultKey('transit/clinic', address={vault.address!r}, token={vault.root_token!r})"
        program = f"""{USE}
from adk_secure_sessions import VaultKey
service, store = {key}, {store.url("team")!r}
asyncio.run(use("sqlite:///sessions.db", service, store, options={store.options!r}))
"""
        expected = {("127.0.0.1", urlsplit(one.address).port) for one in (vault, store)}
        assert addresses(program, tmp_path) == expected


@pytest.mark.soak  # starts three interpreters
def test_command_line_connects_to_nothing(tmp_path: Path) -> None:
    program = """
import os, subprocess, sys
from adk_secure_sessions import generate_key
open("key", "w", opener=lambda path, flags: os.open(path, flags, 0o600)).write(generate_key())
for command in ("init", "verify"):
    program = sys.executable, "-m", "adk_secure_sessions"
    names = "--db", "sqlite:///sessions.db", "--key", "file:key"
    subprocess.run([*program, *command.split(), *names], check=True)
print("used")
"""
    assert addresses(program, tmp_path) == set()
