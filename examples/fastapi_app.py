"""An encrypted conversation behind FastAPI.

    python examples/fastapi_app.py

This talks to the application, starts it again, and starts it with a wrong key.  It opens no port,
and uses a new SQLite file, unless DATABASE_URL and SESSION_KEY are set.  To serve the application,
set both, and run `uvicorn --app-dir examples fastapi_app:app`: see docs/adk-commands.md.
"""

# --8<-- [start:app]
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from google.adk.agents import LlmAgent
from google.adk.errors.already_exists_error import AlreadyExistsError
from google.adk.models import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.runners import Runner
from google.genai import types
from pydantic import BaseModel

from adk_secure_sessions import (
    AesGcmBackend,
    EncryptedSessionService,
    SecureSessionError,
    StaleSessionError,
)

APP = "clinic"
logger = logging.getLogger(__name__)


class OfflineModel(BaseLlm):
    """Replaces a real model: counts the messages of the user."""

    model: str = "offline"

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        said = [content for content in llm_request.contents if content.role == "user"]
        answer = types.Part(text=f"That was message {len(said)}.")
        yield LlmResponse(content=types.Content(role="model", parts=[answer]))


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with EncryptedSessionService(
        db_url=os.environ["DATABASE_URL"],
        backend=AesGcmBackend("env:SESSION_KEY"),
    ) as service:
        await service.prepare_tables()
        agent = LlmAgent(name="receptionist", model=OfflineModel())
        app.state.runner = Runner(app_name=APP, agent=agent, session_service=service)
        yield


app = FastAPI(lifespan=lifespan)


@app.exception_handler(SecureSessionError)
async def refuse(request: Request, error: SecureSessionError) -> JSONResponse:
    logger.error("%s", error)  # the text names rows and keys: do not return it
    return JSONResponse({"detail": "the session cannot be read"}, status_code=500)


@app.exception_handler(StaleSessionError)
@app.exception_handler(AlreadyExistsError)
async def conflict(request: Request, error: Exception) -> JSONResponse:
    return JSONResponse({"detail": "another request changed the session"}, status_code=409)


class Message(BaseModel):
    text: str


@app.post("/sessions/{session_id}/messages")
async def say(session_id: str, message: Message) -> dict[str, str]:
    runner: Runner = app.state.runner
    user = "ada"  # take the user from your authentication
    sessions = runner.session_service
    if await sessions.get_session(app_name=APP, user_id=user, session_id=session_id) is None:
        await sessions.create_session(app_name=APP, user_id=user, session_id=session_id)
    content = types.Content(role="user", parts=[types.Part(text=message.text)])
    answer = ""
    async for event in runner.run_async(user_id=user, session_id=session_id, new_message=content):
        if event.is_final_response() and event.content:
            answer = "".join(part.text or "" for part in event.content.parts or [])
    return {"answer": answer}


# --8<-- [end:app]


async def send(session_id: str, *texts: str) -> None:
    """Start the application, send it messages, and stop it."""
    import httpx

    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://app") as client,
    ):
        for text in texts:
            response = await client.post(f"/sessions/{session_id}/messages", json={"text": text})
            response.raise_for_status()
            print(f"  you    {text}\n  agent  {response.json()['answer']}")


def main() -> None:
    import asyncio
    import tempfile
    import uuid

    from adk_secure_sessions import WrongKeyError, generate_key

    # Some ADK releases log a line for each answer of a model that counts no tokens.
    logging.getLogger("google_adk").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as directory:
        os.environ.setdefault("DATABASE_URL", f"sqlite+aiosqlite:///{directory}/sessions.db")
        os.environ.setdefault("SESSION_KEY", generate_key())
        session_id = f"visit-{uuid.uuid4()}"
        print("The application starts, and stores two messages:")
        asyncio.run(send(session_id, "Good morning.", "I am allergic to penicillin."))
        print("\nIt starts again, and continues the conversation:")
        asyncio.run(send(session_id, "Please book me an appointment."))

        os.environ["SESSION_KEY"] = generate_key()
        print("\nWith another key, it does not start:")
        try:
            asyncio.run(send(session_id, "Good evening."))
        except WrongKeyError as error:
            print(f"  {error}")
        else:
            raise AssertionError("the application started with another key")


if __name__ == "__main__":
    main()
