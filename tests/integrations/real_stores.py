"""Servers of object stores in processes of their own: S3 (s3s-fs), Azurite and fake-gcs-server.

How it works: `running(name)` starts the program of `PROGRAMS`, in a temporary directory and on
loopback, and gives an `ObjectServer` that forwards each request to it (object_server.py).
`started(name)` starts the program alone.  If the program is missing, the test is skipped with the
command that installs it.
"""

import base64
import hashlib
import hmac
import http.client
import json
import os
import socket
import subprocess
import tempfile
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from email.utils import formatdate
from pathlib import Path
from typing import Any, NamedTuple

import obstore
import pytest
from obstore.store import AzureStore, GCSStore, S3Store

from tests.integrations.object_server import ACCESS_KEY, BUCKET, SECRET, ObjectServer, s3_options
from tests.programs import find

# Runs a server until its standard input ends, as it does when the test process dies.
_UNTIL_EOF = '"$@" & read -r _; kill $! 2>/dev/null; wait $!'
_PATIENCE = 30.0  # seconds for a server to start
_ATTEMPTS = 3
_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "date", "server"}
ACCOUNT = "clinic"
ACCOUNT_KEY = base64.b64encode(SECRET.encode()).decode()


class RealStore(ObjectServer):
    """Forwards requests to the server on *port*, with the header Host that the client signed."""

    def __init__(self, port: int) -> None:
        self._port = port
        super().__init__()

    @property
    @abstractmethod
    def _bucket(self) -> Any:
        """The bucket as a store of obstore."""

    def keys(self) -> list[str]:
        return [str(meta["path"]) for batch in obstore.list(self._bucket) for meta in batch]

    def delete_all(self) -> None:
        if keys := self.keys():
            obstore.delete(self._bucket, keys)

    def _path(self, method: str, path: str) -> str:
        """Return the path and query that are sent to the server."""
        return path

    def _more_headers(self, method: str) -> list[tuple[str, str]]:
        """Return headers that the server's answer lacks."""
        return []

    def answer(self, environ: Any, start_response: Callable[..., Any]) -> Any:
        headers = {
            name[5:].replace("_", "-"): value
            for name, value in environ.items()
            if name.startswith("HTTP_") and name != "HTTP_CONNECTION"
        }
        for name in ("CONTENT_TYPE", "CONTENT_LENGTH"):
            if name in environ:
                headers[name.replace("_", "-")] = environ[name]
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        with closing(http.client.HTTPConnection("127.0.0.1", self._port)) as connection:
            method, path = environ["REQUEST_METHOD"], environ["RAW_URI"]
            connection.request(method, self._path(method, path), body, headers)
            found = connection.getresponse()
            data = found.read()
        kept = [(k, v) for k, v in found.getheaders() if k.lower() not in _HOP_BY_HOP]
        kept += self._more_headers(environ["REQUEST_METHOD"])
        start_response(f"{found.status} {found.reason}", kept)
        return [data]


class RealS3(RealStore):
    def options_at(self, address: str) -> dict[str, Any]:
        return s3_options(address)

    @property
    def _bucket(self) -> Any:
        return S3Store(BUCKET, client_options={"allow_http": True}, **s3_options(self.address))


class Azurite(RealStore):
    scheme = "az"

    def options_at(self, address: str) -> dict[str, Any]:
        endpoint = f"{address}/{ACCOUNT}"
        return {"account_name": ACCOUNT, "account_key": ACCOUNT_KEY, "endpoint": endpoint}

    @property
    def _bucket(self) -> Any:
        options = self.options_at(self.address)
        return AzureStore(BUCKET, client_options={"allow_http": True}, **options)


class Google(RealStore):
    scheme = "gs"

    def _path(self, method: str, path: str) -> str:
        # fake-gcs-server stores a PUT of the XML API only if its URL looks signed.
        return f"{path}?X-Goog-Algorithm=none" if method == "PUT" else path

    def _more_headers(self, method: str) -> list[tuple[str, str]]:
        # obstore requires this header, which Google's own server sends.
        return [("ETag", '"1"')] if method == "PUT" else []

    def options_at(self, address: str) -> dict[str, Any]:
        return {"base_url": address, "bearer_token": SECRET}

    @property
    def _bucket(self) -> Any:
        options = self.options_at(self.address)
        return GCSStore(BUCKET, client_options={"allow_http": True}, **options)


class Program(NamedTuple):
    """A server: its program, its options, what makes the bucket, and the command to install it."""

    name: str
    install: str
    options: Callable[[str, int], Sequence[str]]  # from the directory and the port
    make_bucket: Callable[[str, int], None]  # as well
    server: type[RealStore]
    environment: dict[str, str] = {}  # noqa: RUF012


def _s3_options(directory: str, port: int) -> list[str]:
    keys = ["--access-key", ACCESS_KEY, "--secret-key", SECRET]
    return ["--host", "127.0.0.1", "--port", str(port), *keys, directory]


def _make_directory(directory: str, port: int) -> None:
    Path(directory, BUCKET).mkdir()


def _azurite_options(directory: str, port: int) -> list[str]:
    quiet = ["--silent", "--disableTelemetry", "--skipApiVersionCheck"]
    return ["--blobHost", "127.0.0.1", "--blobPort", str(port), *quiet, "--location", directory]


def _make_container(directory: str, port: int) -> None:
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-12-02"}
    path, query = f"/{ACCOUNT}/{BUCKET}", "restype=container"
    lines = ["PUT", *[""] * 11, *(f"{name}:{value}" for name, value in sorted(headers.items()))]
    signed = "\n".join([*lines, f"/{ACCOUNT}{path}", query.replace("=", ":")])
    digest = hmac.digest(base64.b64decode(ACCOUNT_KEY), signed.encode(), hashlib.sha256)
    headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"
    _request(port, "PUT", f"{path}?{query}", b"", headers)


def _google_options(directory: str, port: int) -> list[str]:
    listen = ["-scheme", "http", "-host", "127.0.0.1", "-port", str(port)]
    public = ["-public-host", "127.0.0.1", "-external-url", f"http://127.0.0.1:{port}"]
    return [*listen, *public, "-backend", "memory", "-log-level", "error"]


def _make_google_bucket(directory: str, port: int) -> None:
    body = json.dumps({"name": BUCKET}).encode()
    headers = {"Content-Type": "application/json"}
    _request(port, "POST", "/storage/v1/b?project=p", body, headers)


def _request(port: int, method: str, path: str, body: bytes, headers: dict[str, str]) -> None:
    with closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        assert answer.status < 300, answer.read()


PROGRAMS = {
    "s3": Program(
        "s3s-fs",
        "cargo install s3s-fs@0.14.1 --locked --features binary",
        _s3_options,
        _make_directory,
        RealS3,
    ),
    "azurite": Program(
        "azurite-blob",
        "npm install -g --prefix ~/.local azurite@3.37.0",
        _azurite_options,
        _make_container,
        Azurite,
        {"AZURITE_ACCOUNTS": f"{ACCOUNT}:{ACCOUNT_KEY}"},
    ),
    "google": Program(
        "fake-gcs-server",
        "go install github.com/fsouza/fake-gcs-server@v1.56.1",
        _google_options,
        _make_google_bucket,
        Google,
    ),
}


def skip_unless_installed(name: str) -> None:
    program = PROGRAMS[name]
    if find(program.name) is None:
        pytest.skip(f"no {program.name} here: {program.install}")


@contextmanager
def started(name: str) -> Iterator[int]:
    """Start the server *name* with an empty bucket, and return its port."""
    program = PROGRAMS[name]
    with tempfile.TemporaryDirectory(prefix="store-") as directory:
        for _ in range(_ATTEMPTS):
            port = _free_port()
            command = [str(find(program.name)), *program.options(directory, port)]
            process = subprocess.Popen(
                ["sh", "-c", _UNTIL_EOF, name, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, **program.environment},
                cwd=directory,
            )
            try:
                if _is_listening(process, port):
                    program.make_bucket(directory, port)
                    yield port
                    return
            finally:
                process.communicate()  # closes its standard input
            # Another process may have taken the port.
        raise RuntimeError(f"{program.name} does not start, in {_ATTEMPTS} attempts")


@contextmanager
def running(name: str) -> Iterator[RealStore]:
    with started(name) as port:
        server = PROGRAMS[name].server(port)
        try:
            yield server
        finally:
            server.stop()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


def _is_listening(process: "subprocess.Popen[bytes]", port: int) -> bool:
    """Wait until the server listens; return False if it ends before."""
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return True
        except OSError:
            if process.poll() is not None:
                return False
        time.sleep(0.02)
    return False
