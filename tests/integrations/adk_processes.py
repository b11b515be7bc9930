"""google-adk's commands as processes of their own, in a directory that holds all that they write.

How it works.  `Place` is a directory with agents (a copy of examples/adk_agent), an environment
whose HOME and TMPDIR are in that directory, and a root key.  `Place.serve` starts a server and
yields an HTTP client; the server ends by SIGTERM, or by the signal that is given.  `Place.run` runs
a command to its end.  `Place.needles()` searches every file, logs included, for the texts that
`tests.attacks.needles` makes.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from adk_secure_sessions import generate_key
from tests.attacks.needles import found_in
from tests.pages import ROOT

BIN = Path(sys.executable).parent
AGENT = "receptionist"
KEY_VARIABLE = "ADK_SESSIONS_KEY"
URI = f"encrypted+sqlite:///./sessions.db?key=env:{KEY_VARIABLE}&blobs=./artifacts"
# Otherwise the page of `adk web` asks in a dialog, which takes the focus at any moment.
_NO_TELEMETRY = b'{"telemetry": false}'
_PATIENCE = 120.0  # seconds


class Place:
    """A directory in which commands run."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.agents = directory / "agents"
        self.log = directory / "log"
        shutil.copytree(
            ROOT / "examples" / "adk_agent", self.agents, ignore=shutil.ignore_patterns("__pyc*")
        )
        (directory / "tmp").mkdir()
        (directory / ".adk").mkdir()
        (directory / ".adk" / "config.json").write_bytes(_NO_TELEMETRY)
        self.environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("ADK_", "GOOGLE_", "GEMINI_", "OTEL_"))
        } | {
            "HOME": str(directory),
            "TMPDIR": str(directory / "tmp"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONUNBUFFERED": "1",
            KEY_VARIABLE: generate_key(),
        }

    @contextlib.contextmanager
    def serve(self, *command: str, end: signal.Signals = signal.SIGTERM) -> Iterator[httpx.Client]:
        """Start a server in this directory; end it with the signal *end*."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [BIN / command[0], *command[1:], f"--port={port}"],
                cwd=self.directory,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=_PATIENCE) as client:
                self._wait_for(client, process)
                yield client
            process.send_signal(end)
            process.wait(_PATIENCE)
        finally:
            process.kill()
            self.status = process.wait()

    def _wait_for(self, client: httpx.Client, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + _PATIENCE
        while True:
            try:
                client.get("/list-apps").raise_for_status()
                return
            except httpx.TransportError:
                assert process.poll() is None, f"the server ended: {self.logged()}"
                assert time.monotonic() < deadline, f"the server does not answer: {self.logged()}"
            time.sleep(0.05)

    def run(self, *command: str, said: str = "") -> subprocess.CompletedProcess[str]:
        """Run a command that reads *said*; add what it writes to the log."""
        done = subprocess.run(
            [BIN / command[0], *command[1:]],
            cwd=self.directory,
            env=self.environment,
            input=said,
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
        )
        with self.log.open("a") as log:
            log.write(done.stderr)
        return done

    def logged(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def files(self) -> dict[str, bytes]:
        """The contents of every file that a command wrote, by name."""
        found = {
            str(path.relative_to(self.directory)): path.read_bytes()
            for path in sorted(self.directory.rglob("*"))
            if path.is_file() and path.suffix not in (".py", ".yaml")
        }
        return {name: data for name, data in found.items() if data != _NO_TELEMETRY}

    def names(self) -> set[str]:
        """The names of the files and directories at the top that a command wrote."""
        return {Path(name).parts[0] for name in self.files()}

    def needles(self) -> dict[str, set[str]]:
        """The needles in each file that has one."""
        found = {name: found_in(data) for name, data in self.files().items()}
        return {name: needles for name, needles in found.items() if needles}
