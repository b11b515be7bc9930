"""Make tests/vectors/adk_v0.sql with an old release of google-adk.  No test runs this program.

google-adk 1.20.0 made the file, in a virtual environment without this package:

    python -m venv old
    old/bin/pip install google-adk==1.20.0 aiosqlite "sqlalchemy[asyncio]"
    TZ=UTC old/bin/python tests/migration/make_adk_v0.py tests/vectors/adk_v0.sql

The file is a dump of a SQLite database with schema v0, which stores `EventActions` as pickles.  All
content is fictitious.  A comment at the end has what that release's own `get_session` returned.
"""

import asyncio
import json
import sqlite3
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.adk.auth.auth_credential import AuthCredential, AuthCredentialTypes
from google.adk.auth.auth_schemes import OpenIdConnectWithConfig
from google.adk.auth.auth_tool import AuthConfig
from google.adk.events import Event, EventActions
from google.adk.events.event_actions import EventCompaction
from google.adk.sessions import DatabaseSessionService
from google.adk.tools.tool_confirmation import ToolConfirmation
from google.genai import types

BASE = 1_700_000_000.0
STATE: dict[str, Any] = {
    "text": "Grüße 🌱",
    "list": [1, 2.5, None, True, {}, []],
    "user:nickname": "Lin",
    "app:motd": {"en": "hello"},
    "big": 10**30,
}


def events() -> Iterator[Event]:
    def event(number: int, *parts: types.Part, time: float | None = None, **fields: Any) -> Event:
        content = types.Content(role="model", parts=list(parts)) if parts else None
        return Event(
            id=f"event-{number}",
            author="agent",
            invocation_id=f"inv-{number}",
            timestamp=BASE + number + 0.123456 if time is None else time,
            content=content,
            **fields,
        )

    yield event(1, types.Part(text='What is the weather in Zürich? \n " \\ 🎉'))
    yield event(
        2,
        types.Part(function_call=types.FunctionCall(id="c1", name="weather", args={"city": "Z"})),
        long_running_tool_ids={"c1", "c2"},
        branch="root.weather",
    )
    yield event(
        3,
        types.Part(function_response=types.FunctionResponse(id="c1", name="weather", response={})),
        types.Part(inline_data=types.Blob(data=bytes(range(256)), mime_type="image/png")),
        actions=EventActions(
            state_delta={"k": [1, {"a": None}], "user:visits": 2, "app:n": 1.5},
            artifact_delta={"report.pdf": 3},
            transfer_to_agent="billing",
            escalate=True,
            requested_tool_confirmations={"c1": ToolConfirmation(hint="Sure?", confirmed=True)},
            requested_auth_configs={
                "c1": AuthConfig(
                    auth_scheme=OpenIdConnectWithConfig(
                        authorization_endpoint="https://login.example.com/auth",
                        token_endpoint="https://login.example.com/token",
                        scopes=["openid"],
                    ),
                    raw_auth_credential=AuthCredential(auth_type=AuthCredentialTypes.HTTP),
                )
            },
        ),
    )
    yield event(
        4,
        types.Part(text="thinking", thought=True, thought_signature=b"\x00\xff"),
        custom_metadata={"a": [1, None]},
        usage_metadata=types.GenerateContentResponseUsageMetadata(total_token_count=7),
        grounding_metadata=types.GroundingMetadata(web_search_queries=["weather"]),
        citation_metadata=types.CitationMetadata(citations=[types.Citation(uri="https://e.com")]),
        input_transcription=types.Transcription(text="hello", finished=True),
        turn_complete=True,
        interrupted=False,
    )
    yield event(
        5,
        error_code="SAFETY",
        error_message="blocked",
        actions=EventActions(
            compaction=EventCompaction(
                start_timestamp=1.5,
                end_timestamp=2.5,
                compacted_content=types.Content(role="model", parts=[types.Part(text="short")]),
            ),
            agent_state={"step": 1},
            end_of_agent=True,
        ),
    )


async def fill(path: Path) -> dict[str, Any]:
    service = DatabaseSessionService(f"sqlite+aiosqlite:///{path}")
    told = await service.create_session(
        app_name="clinic", user_id="ålice", session_id="told", state=STATE
    )
    for event in events():
        await service.append_event(told, event)
    await service.create_session(app_name="clinic", user_id="bob", session_id="empty")
    gone = await service.create_session(
        app_name="shop", user_id="carol", session_id="gone", state={"user:cart": [1]}
    )
    await service.delete_session(app_name="shop", user_id="carol", session_id=gone.id)
    returned = {}
    for user_id, session_id in (("ålice", "told"), ("bob", "empty")):
        session = await service.get_session(
            app_name="clinic", user_id=user_id, session_id=session_id
        )
        assert session is not None
        returned[session_id] = session.model_dump(mode="json", exclude_none=True)
        for event_fields in returned[session_id]["events"]:
            event_fields.get("long_running_tool_ids", []).sort()
    await service.db_engine.dispose()
    return returned


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "sessions.db"
        returned = asyncio.run(fill(path))
        with sqlite3.connect(path) as connection:
            lines = list(connection.iterdump())
    lines.append("-- " + json.dumps(returned))
    Path(sys.argv[1]).write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
