"""A receptionist whose model repeats what it hears, counts the messages, and remembers."""

from collections.abc import AsyncGenerator

from google.adk.agents import LlmAgent
from google.adk.models import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.tools.preload_memory_tool import preload_memory_tool
from google.genai import types

PAST = "<PAST_CONVERSATIONS>"  # marks what `preload_memory_tool` found


class OfflineModel(BaseLlm):
    """Replaces a real model."""

    model: str = "offline"

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        texts = [
            part.text
            for content in llm_request.contents
            for part in content.parts or []
            if content.role == "user" and part.text
        ]
        said = [text for text in texts if PAST not in text]
        answer = f"Message {len(said)}: I have noted '{said[-1]}'."
        past = "".join(text for text in texts if PAST in text).splitlines()
        for line in past:
            if line.startswith("user: "):
                answer += f" Earlier, you said '{line[6:]}'."
        if stream:
            for word in answer.split():
                yield _said(f"{word} ", partial=True)
        yield _said(answer)


def _said(text: str, *, partial: bool | None = None) -> LlmResponse:
    content = types.Content(role="model", parts=[types.Part(text=text)])
    return LlmResponse(content=content, partial=partial)


root_agent = LlmAgent(
    name="receptionist",
    model=OfflineModel(),
    tools=[preload_memory_tool],
    output_key="user:last_answer",
)
