import json
import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
from google.adk.auth.auth_tool import AuthConfig
from google.adk.events.event import Event
from google.adk.events.event_actions import EventActions
from google.adk.sessions import BaseSessionService
from google.genai import types
from pydantic import BaseModel

from tests.conformance import samples
from tests.conformance.samples import CORPUS
from tests.conformance.services import POOLED_KINDS
from tests.conformance.support import create, each_kind, event, reference_lacks, reload
from tests.conformance.values import RICH, a_function

# To a database, all encrypted events are alike.
kind = each_kind(
    *("adk", "encrypted-file"),
    some={
        "encrypted-cached-events": [
            "test_events_of_a_conversation_come_back_equal",
            "test_every_field_of_an_event_comes_back_equal",
        ]
    },
    soak=[
        "encrypted-memory",
        "encrypted-engine",
        "encrypted-postgresql",
        "encrypted-mariadb",
        *POOLED_KINDS,
    ],
)

# ADK's AuthConfig calls a deprecated method of its own.
pytestmark = pytest.mark.filterwarnings("ignore:This method is deprecated:DeprecationWarning")

# A quirk of FastAPI's models: these get one more attribute, whichever service stored them.
AUTH = {"oauth2", "EventActions.requested_auth_configs"}


def through_json(given: Event) -> Event:
    """An event after a round trip through ADK's own JSON."""
    text = json.dumps(given.model_dump(mode="json", exclude_none=True))
    return Event.model_validate(json.loads(text))


async def store(service: BaseSessionService, given: Event) -> Event:
    session = await create(service, None)
    assert await service.append_event(session, given) is given
    (stored,) = (await reload(service, session)).events
    return stored


def dumped(one: Event) -> dict[str, Any]:
    """An event as JSON; older releases write a set in any order."""
    fields: dict[str, Any] = one.model_dump(mode="json")
    if ids := fields.get("long_running_tool_ids"):
        fields["long_running_tool_ids"] = sorted(ids)
    return fields


async def assert_equal(service: BaseSessionService, given: dict[str, Event]) -> None:
    """Append all events to one session; return the names of those that come back different."""
    session = await create(service)
    before = {name: one.model_copy(deep=True) for name, one in given.items()}
    for appended in given.values():
        await service.append_event(session, appended)
    assert given == before
    again = await reload(service, session)
    expected = {n: through_json(one) if n in AUTH else one for n, one in given.items()}
    stored = dict(zip(given, again.events, strict=True))
    assert [name for name in given if stored[name] != expected[name]] == []
    assert [name for name in given if dumped(stored[name]) != dumped(expected[name])] == []
    last = await reload(service, session, num_recent_events=5)
    assert last.events == again.events[-5:]


async def test_events_of_a_conversation_come_back_equal(service: BaseSessionService) -> None:
    await assert_equal(service, {name: build() for name, build in CORPUS.items()})


async def test_every_field_of_an_event_comes_back_equal(service: BaseSessionService) -> None:
    await assert_equal(service, dict(samples.of_every_field()))


def test_every_field_of_an_event_has_a_sample() -> None:
    made = dict(samples.of_every_field())
    models: list[tuple[type[BaseModel], Callable[[Any], BaseModel]]] = [
        (Event, lambda e: e),
        (EventActions, lambda e: e.actions),
        (types.Part, lambda e: e.content.parts[0]),
    ]
    unsampled = set()
    for model, chosen in models:
        for name, field in model.model_fields.items():
            sample = made.get(f"{model.__name__}.{name}")
            unset = field.get_default(call_default_factory=True)
            if sample is None or getattr(chosen(sample), name) == unset:
                unsampled.add(f"{model.__name__}.{name}")
    # Partial events are not stored; the actions have samples of their own.
    assert unsampled == {"Event.partial", "Event.actions"}


async def test_auth_config_comes_back_as_one(service: BaseSessionService) -> None:
    given = samples.oauth2()
    stored = await store(service, samples.actions(requested_auth_configs={"call": given}))
    found = stored.actions.requested_auth_configs["call"]
    assert isinstance(found, AuthConfig)
    assert found.exchanged_auth_credential == given.exchanged_auth_credential
    assert found.raw_auth_credential == given.raw_auth_credential
    assert found.credential_key == given.credential_key


@pytest.mark.parametrize(
    "text", ["nul \0", "lone \ud800 surrogate \udfff", "\U0010ffff \ufffe \ufeff", "\r\n\u2029"]
)
async def test_odd_text_comes_back_wherever_it_stands(
    service: BaseSessionService, text: str
) -> None:
    given = event(
        # ADK also keeps this one in a column, which takes no surrogates.
        invocation_id=text.encode(errors="replace").decode(),
        content=types.Content(
            role="model",
            parts=[
                types.Part(text=text),
                types.Part(function_call=types.FunctionCall(name=text, args={"k": text})),
            ],
        ),
        author=text,
        branch=text,
        error_message=text,
        custom_metadata={"k": [text]},
        actions=EventActions(state_delta={"k": text}, transfer_to_agent=text),
    )
    assert await store(service, given) == given


async def test_odd_log_probabilities_come_back(service: BaseSessionService) -> None:
    for odd in (math.inf, -math.inf, math.nan, 5e-324, -0.0, 1e308):
        stored = await store(service, event(avg_logprobs=odd))
        assert repr(stored.avg_logprobs) == repr(odd)


@reference_lacks("state is not coerced to JSON")
async def test_rich_values_in_events_come_back_as_adks_json_has_them(
    service: BaseSessionService,
) -> None:
    session = await create(service)
    for value in RICH.values():
        await service.append_event(
            session, event("kept", delta={"k": value}, custom_metadata={"k": value})
        )
    again = await reload(service, session)
    assert again.events == [through_json(appended) for appended in session.events]


@reference_lacks("agent state without JSON form is an error")
async def test_agent_state_without_json_form_is_stored_as_text_with_a_warning(
    service: BaseSessionService, caplog: pytest.LogCaptureFixture
) -> None:
    stored = await store(service, samples.actions(agent_state={"agent": {"f": a_function, "n": 1}}))
    assert stored.actions.agent_state == {"agent": {"f": repr(a_function), "n": 1}}
    assert [record for record in caplog.records if record.levelno == logging.WARNING]
