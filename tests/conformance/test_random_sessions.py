"""A random conversation reads the same from ADK's own service and from ours."""

import asyncio
import json
import math
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from google.adk.events.event import Event
from google.adk.events.event_actions import EventActions
from google.adk.sessions import BaseSessionService, Session
from google.genai import types
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conformance.services import KINDS, file_in
from tests.conformance.support import ADK, NEWEST_READ, START, create, find, listed
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
conversations = st.lists(
    st.tuples(st.integers(0, 1), events, st.integers(0, 8)),  # session, event, time's progress
    max_size=5,
)


@pytest.fixture(scope="module")
def services(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[asyncio.Runner, BaseSessionService, BaseSessionService]]:
    """Both services, opened once; each example uses an app of its own."""
    url = file_in(tmp_path_factory.mktemp("random"))
    reference = KINDS["adk"].open(url)
    ours = KINDS["encrypted-memory"].open(url)
    with asyncio.Runner() as runner:

        async def enter() -> tuple[BaseSessionService, BaseSessionService]:
            return await reference.__aenter__(), await ours.__aenter__()

        async def leave() -> None:
            await reference.__aexit__(None, None, None)
            await ours.__aexit__(None, None, None)

        yield (runner, *runner.run(enter()))
        runner.run(leave())


@pytest.mark.no_cover  # slow, and runs no code that the other tests do not
@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(first=states, second=states, conversation=conversations)
def test_random_conversation_reads_as_in_adks_own_service(
    services: tuple[asyncio.Runner, BaseSessionService, BaseSessionService],
    first: dict[str, Any],
    second: dict[str, Any],
    conversation: list[tuple[int, dict[str, Any], int]],
) -> None:
    runner, reference, ours = services
    expected = runner.run(converse(reference, [first, second], conversation))
    assert runner.run(converse(ours, [first, second], conversation)) == expected


async def converse(
    service: BaseSessionService,
    states: list[dict[str, Any]],
    conversation: list[tuple[int, dict[str, Any], int]],
) -> list[str]:
    """Have the conversation in a new app; return everything that a caller sees of it, as text."""
    app_name = str(uuid.uuid4())
    live = [
        await create(service, f"s{n}", app_name=app_name, state=state)
        for n, state in enumerate(states)
    ]
    seen = [as_text(session, timed=False) for session in live]
    time = START
    for n, (index, fields, progress) in enumerate(conversation):
        time += 0.25 + progress / 8
        fields = fields | {"actions": EventActions(**fields["actions"])}
        returned = await service.append_event(
            live[index], Event(id=f"e{n}", timestamp=time, **fields)
        )
        seen.append(as_text(returned))
    seen += [as_text(session, timed=bool(session.events)) for session in live]
    for session in live:
        for config in (
            {},
            {"num_recent_events": 2},
            {"after_timestamp": START + 1},
            {"after_timestamp": START + 1, "num_recent_events": 1},
        ):
            found = await find(service, session, **config)
            assert found is not None
            seen.append(as_text(found, timed=bool(session.events)))
            assert found._storage_update_marker == session._storage_update_marker
    for session in sorted(await listed(service, app_name=app_name), key=lambda s: s.id):
        seen.append(as_text(session, timed=bool(live[int(session.id[1:])].events)))
    if FULL:
        user_state = await service.get_user_state(app_name=app_name, user_id="user")
        seen.append(json.dumps(user_state, sort_keys=True))
    return [line.replace(app_name, "app") for line in seen]


def as_text(thing: Session | Event, *, timed: bool = True) -> str:
    """A value as text that shows types, and in which NaN equals itself."""
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
