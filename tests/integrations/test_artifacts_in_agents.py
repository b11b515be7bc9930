"""Agents that use `EncryptedArtifactService` through ADK's runner, plugin, tools and rewind."""

from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from google.adk.agents import LlmAgent
from google.adk.agents.base_agent import BaseAgent
from google.adk.apps import App
from google.adk.events import Event
from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.plugins.save_files_as_artifacts_plugin import SaveFilesAsArtifactsPlugin
from google.adk.runners import Runner
from google.adk.tools.load_artifacts_tool import load_artifacts_tool
from google.adk.tools.tool_context import ToolContext
from google.genai import types

from adk_secure_sessions import AesGcmBackend, EncryptedSessionService
from adk_secure_sessions.integrations.artifacts import EncryptedArtifactService
from adk_secure_sessions.integrations.blob_maintenance import check_blobs
from adk_secure_sessions.maintenance import Database, verify

# google-adk warns of its own experimental parts.
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

BACKEND = AesGcmBackend(bytes(range(32)))
WHO: dict[str, Any] = {"app_name": "clinic", "user_id": "ada", "session_id": "visit"}


class OfflineLlm(BaseLlm):
    """Calls a tool when told to; then repeats all texts that the request has after the call."""

    model: str = "offline"

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        parts = [part for one in llm_request.contents for part in one.parts or []]
        answered = [n for n, part in enumerate(parts) if part.function_response]
        asked = [n for n, part in enumerate(parts) if (part.text or "").startswith("call ")]
        if asked and asked[-1] > (answered or [-1])[-1]:
            _, name, what = (parts[asked[-1]].text or "").split()
            args: dict[str, Any] = {"what": what}
            if name == "load_artifacts":
                args = {"artifact_names": [what]}
            yield answer(types.Part(function_call=types.FunctionCall(name=name, args=args)))
            return
        texts = [part.text for part in parts[(answered or [0])[-1] :] if part.text]
        yield answer(types.Part(text=" | ".join(texts)))


def answer(part: types.Part) -> LlmResponse:
    return LlmResponse(content=types.Content(role="model", parts=[part]))


async def write(what: str, tool_context: ToolContext) -> dict[str, int]:
    """Save an artifact."""
    part = types.Part(text=f"by {tool_context.agent_name}")
    return {"version": await tool_context.save_artifact(what, part)}


def agent(name: str = "agent") -> LlmAgent:
    return LlmAgent(name=name, model=OfflineLlm(), tools=[write, load_artifacts_tool])


class Clinic:
    """A runner with encrypted services, and a session."""

    def __init__(self, sessions: EncryptedSessionService, store: Path) -> None:
        self.sessions = sessions
        self.artifacts = EncryptedArtifactService(sessions, store)

    async def say(self, *parts: types.Part, root: BaseAgent | None = None) -> list[Event]:
        message = types.Content(role="user", parts=list(parts))
        run = self.runner(root).run_async(user_id="ada", session_id="visit", new_message=message)
        return [event async for event in run]

    async def ask(self, text: str) -> str:
        events = await self.say(types.Part(text=text))
        assert events[-1].content
        assert events[-1].content.parts
        return events[-1].content.parts[0].text or ""

    def runner(self, root: BaseAgent | None = None) -> Runner:
        plugins: list[Any] = [SaveFilesAsArtifactsPlugin()]
        return Runner(
            app=App(name="clinic", root_agent=root or agent(), plugins=plugins),
            session_service=self.sessions,
            artifact_service=self.artifacts,
        )


@pytest.fixture
async def clinic(tmp_path: Path) -> AsyncIterator[Clinic]:
    async with EncryptedSessionService(f"sqlite:///{tmp_path}/s.db", BACKEND) as sessions:
        await sessions.create_session(**WHO)
        yield Clinic(sessions, tmp_path / "blobs")


def file(name: str, content: str) -> types.Part:
    return types.Part(
        inline_data=types.Blob(mime_type="text/plain", data=content.encode(), display_name=name)
    )


async def test_file_of_a_message_is_saved_by_the_plugin_and_loaded_by_the_tool(
    clinic: Clinic,
) -> None:
    first = await clinic.say(types.Part(text="here"), file("notes.txt", "penicillin"))
    assert {"notes.txt": 0} in [event.actions.artifact_delta for event in first]
    second = await clinic.say(types.Part(text="here"), file("notes.txt", "aspirin"))
    assert {"notes.txt": 1} in [event.actions.artifact_delta for event in second]
    # The message refers to the artifact; the content is not stored in the session.
    stored = await clinic.sessions.get_session(**WHO)
    assert stored is not None
    assert "aspirin" not in "".join(event.model_dump_json() for event in stored.events)
    assert "aspirin" in await clinic.ask("call load_artifacts notes.txt")
    assert await clinic.artifacts.load_artifact(**WHO, filename="notes.txt", version=0) == file(
        "notes.txt", "penicillin"
    )


async def test_rewind_restores_artifacts(clinic: Clinic, tmp_path: Path) -> None:
    await clinic.say(types.Part(text="here"), file("notes.txt", "penicillin"))
    turn = await clinic.say(types.Part(text="here"), file("notes.txt", "aspirin"))
    await clinic.say(types.Part(text="here"), file("later.txt", "none"))
    await clinic.runner().rewind_async(
        user_id="ada", session_id="visit", rewind_before_invocation_id=turn[0].invocation_id
    )
    stored = await clinic.sessions.get_session(**WHO)
    assert stored is not None
    assert stored.events[-1].actions.artifact_delta == {"notes.txt": 2, "later.txt": 1}
    assert await clinic.artifacts.load_artifact(**WHO, filename="later.txt") is None
    loaded = await clinic.ask("call load_artifacts notes.txt")
    assert "penicillin" in loaded
    assert "aspirin" not in loaded
    async with Database(f"sqlite:///{tmp_path}/s.db", BACKEND) as db:
        assert (await verify(db)).bad == 0
        assert (await check_blobs(db, tmp_path / "blobs")).numbers == (2, 5, 0, 0, 0, 0)
