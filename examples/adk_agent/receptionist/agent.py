"""A receptionist whose model repeats what it hears, and counts the messages."""

from collections.abc import AsyncGenerator

from google.adk.agents import LlmAgent
from google.adk.models import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.genai import types


class OfflineModel(BaseLlm):
    """Replaces a real model."""

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
        answer = f"Message {len(said)}: I have noted '{said[-1]}'."
        if stream:
            for word in answer.split():
                yield _said(f"{word} ", partial=True)
        yield _said(answer)


def _said(text: str, *, partial: bool | None = None) -> LlmResponse:
    content = types.Content(role="model", parts=[types.Part(text=text)])
    return LlmResponse(content=content, partial=partial)


root_agent = LlmAgent(name="receptionist", model=OfflineModel(), output_key="user:last_answer")
