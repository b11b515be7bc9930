"""Show in a few seconds what this package does: `make demo`, or `python examples/demo.py`.

An ADK agent stores a conversation; the program looks into the database file, and then tampers with
it.  It needs no network: a small model class in this file answers by a fixed rule.
"""

import asyncio
import os
import sqlite3
import sys
import tempfile
import warnings
from collections.abc import AsyncGenerator
from contextlib import closing
from pathlib import Path

try:
    from google.adk.agents import LlmAgent
    from google.adk.models import BaseLlm
    from google.adk.models.llm_request import LlmRequest
    from google.adk.models.llm_response import LlmResponse
    from google.adk.runners import Runner
    from google.genai import types

    from adk_secure_sessions import (
        AesGcmBackend,
        EncryptedSessionService,
        TamperedError,
        generate_key,
    )
except ImportError as error:  # the wrong environment, or a Python before 3.11
    sys.exit(f"{error}: in the clone of the repository, run `pip install .` with Python 3.11+")

# Some ADK releases warn about their own experimental parts.
warnings.filterwarnings("ignore", message=r"\[EXPERIMENTAL\]")

APP, USER, SESSION = "clinic", "ada.lovelace", "first-visit"
SECRETS = ("penicillin", "Monday", USER, SESSION)
NEXT = (
    ("quickstart.py --db kept.db", "two visits, and every table of the file"),
    ("multi_tenant.py", "erase a user, with the keys in another database"),
    ("adk_web.py", "google-adk's own `adk web`, encrypted, without code"),
)


class OfflineModel(BaseLlm):
    """Replaces a real model: repeats everything that the user has said."""

    model: str = "offline"

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        said = [
            part.text
            for content in llm_request.contents
            for part in content.parts or []
            if content.role == "user" and part.text
        ]
        answer = types.Part(text="I have noted: " + " ".join(said))
        yield LlmResponse(
            content=types.Content(role="model", parts=[answer]),
            # Without this, some ADK releases log a line for every answer.
            usage_metadata=types.GenerateContentResponseUsageMetadata(
                prompt_token_count=0, candidates_token_count=0
            ),
        )


async def talk(service: EncryptedSessionService, *texts: str) -> None:
    agent = LlmAgent(name="receptionist", model=OfflineModel())
    runner = Runner(app_name=APP, agent=agent, session_service=service)
    for text in texts:
        show("you", text, CYAN)
        message = types.Content(role="user", parts=[types.Part(text=text)])
        async for event in runner.run_async(user_id=USER, session_id=SESSION, new_message=message):
            if event.is_final_response() and event.content:
                answer = "".join(part.text or "" for part in event.content.parts or [])
                show("agent", answer, GREEN)


def demo(db: Path) -> None:
    url, backend = f"sqlite+aiosqlite:///{db}", AesGcmBackend(generate_key())

    heading("1. A conversation with an ADK agent, stored by EncryptedSessionService")
    asyncio.run(converse(url, backend))

    heading("2. The database file")
    stored = db.read_bytes()
    for word in SECRETS:
        show("search", f"{word!r}: {'FOUND' if word.encode() in stored else 'not found'}", GREEN)
    assert APP.encode() in stored, "the search does not work"
    show("search", f"{APP!r}: found, because the app's name is not encrypted", DIM)
    assert not [word for word in SECRETS if word.encode() in stored]
    with closing(sqlite3.connect(db)) as connection, connection:
        ((event,),) = connection.execute("SELECT event FROM secure_events WHERE seq = 0")
        print(f"\n  The first message, as stored ({len(event)} bytes; the first 64):")
        hexdump(event[:64])

        heading("3. Somebody with write access changes one bit of this message")
        changed = event[:-1] + bytes([event[-1] ^ 1])
        connection.execute("UPDATE secure_events SET event = ? WHERE seq = 0", [changed])
    asyncio.run(read(url, backend))


async def converse(url: str, backend: AesGcmBackend) -> None:
    async with EncryptedSessionService(url, backend) as service:
        await service.create_session(app_name=APP, user_id=USER, session_id=SESSION)
        await talk(service, "I am allergic to penicillin.", "Can I come on Monday?")


async def read(url: str, backend: AesGcmBackend) -> None:
    async with EncryptedSessionService(url, backend) as service:
        try:
            await service.get_session(app_name=APP, user_id=USER, session_id=SESSION)
        except TamperedError as error:
            show("rejected", str(error), RED)
        else:
            raise AssertionError("the tampered row was accepted")


def hexdump(data: bytes) -> None:
    for start in range(0, len(data), 16):
        line = data[start : start + 16]
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in line)
        print(colored(f"  {start:04x}  {line.hex(' ')}  {text}", DIM))


# --- printing ------------------------------------------------------------------------------------

BOLD, DIM, RED, GREEN, CYAN = "1", "2", "31", "32", "36"


def colored(text: str, color: str) -> str:
    """Color *text* on a terminal, unless NO_COLOR is set: https://no-color.org."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return f"\033[{color}m{text}\033[0m"


def show(label: str, text: str, color: str) -> None:
    print(f"  {label:<10}{colored(text, color)}")


def heading(text: str) -> None:
    print(f"\n{colored(text, BOLD)}\n")


def command(arguments: str) -> str:
    """Return the command that runs a program of this directory, as typed where you are."""
    folder, python = Path(__file__).parent, Path(sys.executable)
    here = Path.cwd()
    if python.is_relative_to(here):
        python = python.relative_to(here)
    if folder.is_relative_to(here):
        folder = folder.relative_to(here)
    return f"{python} {folder / arguments}"


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        demo(Path(directory) / "sessions.db")
    heading("Try next")
    for arguments, text in NEXT:
        print(f"  {colored(command(arguments), CYAN)}\n      {text}")


if __name__ == "__main__":
    main()
