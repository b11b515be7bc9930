"""A small agent without a network: it calls its tools when told to, and repeats what it heard."""

from collections.abc import AsyncGenerator
from typing import Any

from google.adk.agents import LlmAgent
from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.tools.function_tool import FunctionTool
from google.adk.tools.long_running_tool import LongRunningFunctionTool
from google.adk.tools.tool_context import ToolContext
from google.genai import types


class OfflineLlm(BaseLlm):
    """Answers "call NAME ARG" with a function call, anything else with what it has heard so far."""

    model: str = "offline"

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        part = _last_part(llm_request)
        words = (part.text or "").split()
        if words[:1] == ["call"]:
            yield _said(
                types.Part(function_call=types.FunctionCall(name=words[1], args={"what": words[2]}))
            )
            return
        heard = [
            inner.text
            for content in llm_request.contents
            for inner in content.parts or []
            if content.role == "user" and inner.text
        ]
        answer = f"heard {len(heard)}: {heard[-1] if heard else None}"
        if part.function_response:
            answer = f"tool said {part.function_response.response}"
        if stream:
            for word in answer.split():
                yield _said(types.Part(text=word), partial=True)
        yield _said(types.Part(text=answer))


def remember(what: str, tool_context: ToolContext) -> dict[str, Any]:
    """Keep *what* in every scope of the state."""
    count = tool_context.state.get("user:count", 0) + 1
    tool_context.state["last"] = what
    tool_context.state["user:count"] = count
    tool_context.state["app:any"] = True
    tool_context.state["temp:scratch"] = what
    return {"count": count}


def ask_somebody(what: str) -> dict[str, str]:
    """A long-running call."""
    return {"status": "pending", "what": what}


def spend(what: str) -> dict[str, str]:
    """A call that the user must confirm."""
    return {"spent": what}


def offline_agent(name: str = "agent", **settings: Any) -> LlmAgent:
    return LlmAgent(
        name=name,
        model=OfflineLlm(),
        tools=[
            remember,
            LongRunningFunctionTool(ask_somebody),
            FunctionTool(spend, require_confirmation=True),
        ],
        **settings,
    )


def _last_part(llm_request: LlmRequest) -> types.Part:
    parts = llm_request.contents[-1].parts if llm_request.contents else None
    return parts[-1] if parts else types.Part(text="")


def _said(part: types.Part, *, partial: bool | None = None) -> LlmResponse:
    return LlmResponse(content=types.Content(role="model", parts=[part]), partial=partial)
