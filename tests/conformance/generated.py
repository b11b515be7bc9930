"""Random states and events, for tests that compare a service with ADK's own or with a model."""

import math
from typing import Any

from google.adk.events.event import Event
from google.adk.sessions import Session
from google.genai import types
from hypothesis import strategies as st

from tests.conformance.support import ADK, NEWEST_READ
from tests.conformance.values import RICH

# Older releases neither coerce values nor order sessions.
FULL = ADK >= NEWEST_READ

text = st.text(st.characters(), max_size=12)  # surrogates and all
names = st.text(max_size=8)
scalars: st.SearchStrategy[Any] = (
    # Of infinity and NaN, ADK writes null into an event: see test_events.
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | text
)
if FULL:
    scalars |= st.sampled_from([value for name, value in RICH.items() if "set" not in name])
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
)
keys = st.builds(
    "{}{}".format,
    st.sampled_from(["", "", "app:", "user:", "temp:", "user:app:"]),
    st.sampled_from(["a", "b", "c", "ü", ""]),
)
states = st.dictionaries(keys, values, max_size=4)
parts = st.one_of(
    st.builds(types.Part, text=text, thought=st.none() | st.booleans()),
    st.builds(types.Part, text=text, thought_signature=st.binary(max_size=20)),
    st.builds(
        lambda name, args: types.Part(function_call=types.FunctionCall(name=name, args=args)),
        names,
        st.dictionaries(names, values, max_size=2),
    ),
    st.builds(
        lambda response: types.Part(
            function_response=types.FunctionResponse(name="f", response=response)
        ),
        st.dictionaries(names, values, max_size=2),
    ),
    st.builds(
        lambda data: types.Part(inline_data=types.Blob(data=data, mime_type="a/b")),
        st.binary(max_size=50),
    ),
)
events = st.fixed_dictionaries(
    {
        "author": text,
        "invocation_id": names,
        "actions": st.builds(
            dict,
            state_delta=states,
            artifact_delta=st.dictionaries(names, st.integers(0, 9), max_size=2),
            transfer_to_agent=st.none() | text,
            escalate=st.none() | st.booleans(),
            agent_state=st.none() | st.dictionaries(names, values, max_size=2),
        ),
    },
    optional={
        "content": st.builds(
            types.Content,
            role=st.sampled_from(["user", "model"]),
            parts=st.lists(parts, max_size=3),
        ),
        "long_running_tool_ids": st.sets(names, max_size=2),
        "branch": text,
        "custom_metadata": st.dictionaries(names, values, max_size=2),
        "error_message": text,
        "partial": st.booleans(),
        "turn_complete": st.booleans(),
        "avg_logprobs": st.floats(),
        "finish_reason": st.sampled_from(types.FinishReason),
    },
)


def as_text(thing: Session | Event, *, timed: bool = True) -> str:
    """A value as text that shows types, and in which NaN equals itself and keys have no order."""
    dumped = thing.model_dump(exclude=None if timed else {"last_update_time"})
    return repr(normal(dumped))


def normal(value: Any) -> Any:
    if isinstance(value, dict):
        return sorted((repr(key), normal(inner)) for key, inner in value.items())
    if isinstance(value, list):
        return [normal(inner) for inner in value]
    if isinstance(value, set):
        return sorted(value)
    return "NaN" if isinstance(value, float) and math.isnan(value) else value
