"""The sessions, states and events that benchmarks store."""

import json

from google.adk.events import Event, EventActions
from google.adk.sessions import BaseSessionService, Session
from google.genai import types

from tests.benchmarks.plan import PAYLOADS

APP = "benchmark"


def event(number: int, text_size: int = 240) -> Event:
    """Return an event that changes state; its JSON has about 250 bytes besides its text."""
    text = "What was said. " * (text_size // 15)
    return Event(
        author="agent",
        invocation_id=f"invocation-{number}",
        content=types.Content(role="model", parts=[types.Part(text=text)]),
        actions=EventActions(state_delta={f"key{number % 20}": number, "last": "value " * 4}),
    )


def turn(number: int) -> list[Event]:
    """Return four events: a question, a tool call, its response with new state, the answer."""
    call = f"call-{number}"
    question = types.Part(text=f"Can I have an appointment on day {number}, in the morning?")
    arguments = {"day": number, "part": "morning", "reason": "check-up"}
    response = {"free": ["08:30", "09:15", "11:00"], "doctor": "Dr. Noether", "room": number}
    answer = types.Part(text="There are three: half past eight, a quarter past nine, and eleven.")
    delta = {f"offered:{number}": response["free"], "user:last_day": number, "step": "choosing"}
    asked = types.FunctionCall(id=call, name="find_slots", args=arguments)
    found = types.FunctionResponse(id=call, name="find_slots", response=response)
    said: list[tuple[str, str, types.Part, dict[str, object]]] = [
        ("user", "user", question, {}),
        ("clerk", "model", types.Part(function_call=asked), {}),
        ("clerk", "user", types.Part(function_response=found), delta),
        ("clerk", "model", answer, {"step": "offered"}),
    ]
    return [
        Event(
            author=author,
            invocation_id=f"invocation-{number}",
            content=types.Content(role=role, parts=[part]),
            actions=EventActions(state_delta=changed),
        )
        for author, role, part, changed in said
    ]


def state(size: int) -> dict[str, object]:
    """Return a state of about *size* bytes as JSON, in values of about 100 bytes."""
    return {f"key{number}": "v" * 90 for number in range(max(1, size // 105))}


def payload(label: str) -> dict[str, object]:
    """Return the state of a patient's intake, of the size that *label* names in `PAYLOADS`."""
    whole: dict[str, object] = {}
    for number in range(PAYLOADS[label] // 200):
        visit = {
            "on": f"2026-{number % 12 + 1:02}-{number % 28 + 1:02}",
            "complaint": "headache in the mornings, worse on working days, better outdoors",
            "readings": [118 + number % 30, 76 + number % 12, 36.6],
            "resolved": number % 3 == 0,
            "seen_by": "Dr. Emmy Noether",
            "next": None,
        }
        whole[f"visit:{number:04}"] = visit
    return whole


def json_size(state: dict[str, object]) -> int:
    """Return the size of *state* as compact JSON, in bytes."""
    return len(json.dumps(state, separators=(",", ":")).encode())


async def start_session(service: BaseSessionService, user: str, size: int) -> Session:
    """Create a session with *size* bytes of state and five events, and return it."""
    session = await service.create_session(app_name=APP, user_id=user, state=state(size))
    for number in range(5):
        await service.append_event(session, event(number))
    return session
