"""Run google-adk's own `adk web` with the agent in examples/adk_agent, encrypted.

    python examples/adk_web.py

This starts the server, talks to the agent as the page does, starts the server again, and searches
the files.  At the end, it prints the commands that open the page in a browser.  The page
docs/adk-commands.md explains them.
"""

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from adk_secure_sessions import generate_key

AGENTS = Path(__file__).parent / "adk_agent"
APP, USER, SESSION = "receptionist", "ada.lovelace", "first-visit"
URI = "encrypted+sqlite:///./sessions.db?key=env:ADK_SESSIONS_KEY&blobs=./artifacts"
SECRETS = ("penicillin", "Monday", USER, SESSION)


@contextmanager
def adk_web(directory: Path, key: str) -> Iterator[httpx.Client]:
    """Start the server in *directory*; stop it at the end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", "adk_secure_sessions", "adk", "web", str(AGENTS.resolve())]
    with open(directory / "log", "ab") as log:
        server = subprocess.Popen(
            [*command, f"--service_uri={URI}", f"--port={port}"],
            cwd=directory,
            env=os.environ | {"ADK_SESSIONS_KEY": key},
            stdout=log,
            stderr=log,
        )
    try:
        # A proxy could not reach this machine.
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as http:
            while True:
                try:
                    http.get("/list-apps").raise_for_status()
                    break
                except httpx.TransportError:
                    if server.poll() is not None:
                        sys.exit((directory / "log").read_text())
                    time.sleep(0.1)
            yield http
    finally:
        server.terminate()
        server.wait()


def say(http: httpx.Client, text: str) -> None:
    message = {"role": "user", "parts": [{"text": text}]}
    who = {"appName": APP, "userId": USER, "sessionId": SESSION}
    (answer,) = http.post("/run", json=who | {"newMessage": message}).raise_for_status().json()
    print(f"  you    {text}\n  agent  {answer['content']['parts'][0]['text']}")


def search(directory: Path) -> None:
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        stored = path.read_bytes()
        found = [word for word in SECRETS if word.encode() in stored]
        print(f"  {path.relative_to(directory)}: {', '.join(found) or 'nothing found'}")
        assert not found


def main() -> None:
    key = generate_key()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        print("`adk web` starts with our sessions, artifacts and memory:")
        with adk_web(directory, key) as http:
            session = f"/apps/{APP}/users/{USER}/sessions/{SESSION}"
            http.post(session).raise_for_status()
            say(http, "I am allergic to penicillin.")
        print("\nIt starts again, and continues the session:")
        with adk_web(directory, key) as http:
            say(http, "Can I come on Monday?")
        print(f"\nSearching all files for {', '.join(SECRETS)}:")
        search(directory)
    print("\nTo open the page at http://127.0.0.1:8000:")
    module = f"{sys.executable} -m adk_secure_sessions"
    uri = URI.replace("env:ADK_SESSIONS_KEY", "file:root.key")
    print(f"  {module} keygen --output root.key")
    print(f'  {module} adk web {AGENTS} --service_uri "{uri}"')


if __name__ == "__main__":
    main()
