"""Hold a conversation with an ADK agent, and store it encrypted on disk.

    python examples/quickstart.py [--db PATH]

It needs no network: a small model class in this file answers by fixed rules. If GOOGLE_API_KEY or
GEMINI_API_KEY is set, the same agent uses Gemini instead.
"""

import argparse
import asyncio
import json
import os
import re
import sqlite3
import sys
import tempfile
import warnings
from collections.abc import AsyncGenerator, Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

from google.adk.agents import LlmAgent
from google.adk.models import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.runners import Runner
from google.adk.sessions import BaseSessionService, Session
from google.adk.tools.tool_context import ToolContext
from google.genai import types

from adk_secure_sessions import AesGcmBackend, EncryptedSessionService, generate_key

# Some ADK releases warn about their own experimental parts.
warnings.filterwarnings("ignore", message=r"\[EXPERIMENTAL\]")

APP = "clinic"
USER = "ada@example.org"
SESSION = "first-visit"

FIRST_VISIT = (
    "Good morning, my name is Ada Lovelace and I am allergic to penicillin.",
    "Please book me an appointment on Monday at nine.",
    "What do you know about me so far?",
)
SECOND_VISIT = ("It is me again. What is my name, and when is my appointment?",)


# --- the agent -----------------------------------------------------------------------------------


def note_allergy(substance: str, tool_context: ToolContext) -> dict[str, str]:
    """Note down that the patient is allergic to a substance."""
    known = tool_context.state.get("user:allergies", [])
    tool_context.state["user:allergies"] = [*known, substance]  # kept for all the user's sessions
    return {"noted": substance}


def book_appointment(day: str, time: str, tool_context: ToolContext) -> dict[str, str]:
    """Book an appointment for the patient."""
    tool_context.state["appointment"] = f"{day} at {time}"  # kept for this session
    return {"booked": f"{day} at {time}"}


class OfflineModel(BaseLlm):
    """Answers by fixed rules, from nothing but the history that ADK passes to it."""

    model: str = "offline"

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        parts = [part for content in llm_request.contents for part in content.parts or []]
        yield LlmResponse(
            content=types.Content(role="model", parts=[self._answer(parts)]),
            # Without this, some ADK releases log a line for every answer.
            usage_metadata=types.GenerateContentResponseUsageMetadata(
                prompt_token_count=0, candidates_token_count=0
            ),
        )

    def _answer(self, history: list[types.Part]) -> types.Part:
        if history[-1].function_response:
            done = history[-1].function_response.response or {}
            return types.Part(text="Done. " + _sentence(done))
        asked = history[-1].text or ""
        if found := re.search(r"allergic to (\w+)", asked):
            return _call("note_allergy", substance=found[1])
        if found := re.search(r"appointment on (\w+) at (\w+)", asked):
            return _call("book_appointment", day=found[1], time=found[2])
        return types.Part(text=self._recall(history))

    def _recall(self, history: list[types.Part]) -> str:
        names = [found[1] for p in history if (found := _NAME.search(p.text or ""))]
        facts = [
            _sentence(p.function_response.response or {}) for p in history if p.function_response
        ]
        return " ".join([f"You are {names[0]}." if names else "We have not met.", *facts])


_NAME = re.compile(r"my name is (\w+ \w+)")


def _call(name: str, **args: str) -> types.Part:
    return types.Part(function_call=types.FunctionCall(name=name, args=args))


def _sentence(result: dict[str, Any]) -> str:
    return " ".join(f"{key.capitalize()}: {value}." for key, value in result.items())


def make_runner(service: BaseSessionService) -> Runner:
    agent = LlmAgent(
        name="receptionist",
        model="gemini-2.5-flash" if online() else OfflineModel(),
        instruction="You are the receptionist of a clinic. Note allergies, book appointments.",
        tools=[note_allergy, book_appointment],
    )
    return Runner(app_name=APP, agent=agent, session_service=service)


def online() -> bool:
    return bool(os.environ.get("GOOGLE_API_KEY") or os.environ.get("GEMINI_API_KEY"))


async def talk(runner: Runner, texts: Iterable[str]) -> str:
    """Say *texts* one after the other; return the agent's last answer."""
    answer = ""
    for text in texts:
        print(f"  you    {text}")
        message = types.Content(role="user", parts=[types.Part(text=text)])
        async for event in runner.run_async(user_id=USER, session_id=SESSION, new_message=message):
            for call in event.get_function_calls():
                print(f"  tool   {call.name}({json.dumps(call.args)})")
            if event.is_final_response() and event.content:
                answer = "".join(part.text or "" for part in event.content.parts or []).strip()
                print(f"  agent  {answer}")
    return answer


# --- the two visits, which share only the file and the key --------------------------------------


async def first_visit(db: Path, key: str) -> None:
    async with EncryptedSessionService(
        db_url=f"sqlite+aiosqlite:///{db}", backend=AesGcmBackend(key)
    ) as service:
        await service.create_session(app_name=APP, user_id=USER, session_id=SESSION)
        await talk(make_runner(service), FIRST_VISIT)


async def second_visit(db: Path, key: str) -> bool:
    """Continue the conversation and inspect the file; return True if both are as expected."""
    async with EncryptedSessionService(
        db_url=f"sqlite+aiosqlite:///{db}", backend=AesGcmBackend(key)
    ) as service:
        answer = await talk(make_runner(service), SECOND_VISIT)
        remembered = online() or ("Ada Lovelace" in answer and "Monday" in answer)
        if not remembered:
            print("  !! the agent has forgotten the first visit")

        heading("The rows in the file, and the same data from the service")
        session = await service.get_session(app_name=APP, user_id=USER, session_id=SESSION)
        assert session is not None
        show_tables(db, session)

        # The service is still open, so that the write-ahead log exists.  This comes last: to read
        # the file directly releases this process's locks on it.
        heading("Searching the file for the conversation")
        return search(db, session) and remembered


# --- looking at the file -------------------------------------------------------------------------


def show_tables(db: Path, session: Session) -> None:
    """Print the first row of each table, and the same data as the service returns it."""
    user_state = {k: v for k, v in session.state.items() if k.startswith("user:")}
    first = session.events[0].content
    returned = {
        "secure_users": f"user {session.user_id}, state {json.dumps(user_state)}",
        "secure_sessions": f"session {session.id}, state "
        + json.dumps({k: v for k, v in session.state.items() if k not in user_state}),
        "secure_events": first.parts[0].text if first and first.parts else "",
    }
    with closing(sqlite3.connect(db)) as connection:
        tables = connection.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY rootpage"
        ).fetchall()
        for (table,) in tables:
            rows = connection.execute(f'SELECT * FROM "{table}"')
            first_row = rows.fetchone()
            count = connection.execute(f'SELECT count(*) FROM "{table}"').fetchone()[0]
            print(f"\n  {table}: {count} row{'' if count == 1 else 's'}")
            for column, value in zip(rows.description, first_row or (), strict=False):
                print(f"    {column[0]:<18} {shorten(value)}")
            if table in returned:
                print(f"    -> {returned[table]}")


def shorten(value: object) -> str:
    if not isinstance(value, bytes):
        return repr(value)
    shown = value.hex() if len(value) <= 32 else f"{value[:20].hex()}...{value[-8:].hex()}"
    return f"{shown}  ({len(value)} bytes)"


def search(db: Path, session: Session) -> bool:
    """Search the database and its write-ahead log; return True if only the app's name is there."""
    said = " ".join([*FIRST_VISIT, *SECOND_VISIT])
    keys = [key.removeprefix("user:") for key in session.state]
    secrets = sorted({USER, SESSION, *keys, *re.findall(r"\w{6,}", said)}, key=str.lower)
    files = [path for path in (db, Path(f"{db}-wal")) if path.exists()]
    stored = b"".join(path.read_bytes() for path in files).lower()

    print(f"  searched       {', '.join(f'{p.name} ({p.stat().st_size} bytes)' for p in files)}")
    print(f"  looked for     {', '.join(secrets)}")
    found = [word for word in secrets if word.lower().encode() in stored]
    print(f"  found          {', '.join(found) or 'nothing'}")
    # The app's name is stored as plaintext; finding it shows that the search itself works.
    control = APP.encode() in stored
    print(
        f"  plaintext      the app's name, {APP!r}, as documented: {'found' if control else '??'}"
    )
    return control and not found


# --- putting it together -------------------------------------------------------------------------


def heading(text: str) -> None:
    print(f"\n{text}\n{'-' * len(text)}")


def run(db: Path) -> bool:
    key = generate_key()  # in production, use a key service, a file or the environment
    heading("A first visit: three turns, stored encrypted")
    asyncio.run(first_visit(db, key))
    heading("A new service on the same file: the conversation continues")
    return asyncio.run(second_visit(db, key))


def main() -> int:
    parser = argparse.ArgumentParser(description="An ADK conversation, stored encrypted on disk.")
    parser.add_argument("--db", type=Path, help="keep the database here (a new file)")
    db: Path | None = parser.parse_args().db
    if db and db.exists():
        parser.error(f"{db} exists already; name a new file")
    with tempfile.TemporaryDirectory() as directory:
        ok = run(db or Path(directory) / "sessions.db")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
