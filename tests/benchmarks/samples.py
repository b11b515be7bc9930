"""The sessions, states and events that are stored."""

from google.adk.events import Event, EventActions
from google.adk.sessions import BaseSessionService, Session
from google.genai import types

APP = "benchmark"


def event(number: int, text_size: int = 240) -> Event:
    """A turn of a conversation, of some 250 bytes beside its text, that changes state."""
    text = "What was said. " * (text_size // 15)
    return Event(
        author="agent",
        invocation_id=f"invocation-{number}",
        content=types.Content(role="model", parts=[types.Part(text=text)]),
        actions=EventActions(state_delta={f"key{number % 20}": number, "last": "value " * 4}),
    )


def state(size: int) -> dict[str, object]:
    """State of about *size* bytes of JSON, in values of some 100 bytes."""
    return {f"key{number}": "v" * 90 for number in range(max(1, size // 105))}


async def started(service: BaseSessionService, user: str, size: int) -> Session:
    """A session that has begun, in the hands of whoever goes on with it."""
    session = await service.create_session(app_name=APP, user_id=user, state=state(size))
    for number in range(5):
        await service.append_event(session, event(number))
    return session
