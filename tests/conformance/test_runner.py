"""A real ADK agent, end to end, over each service."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from google.adk.agents import BaseAgent, ParallelAgent, RunConfig
from google.adk.apps.app import App, EventsCompactionConfig
from google.adk.apps.base_events_summarizer import BaseEventsSummarizer
from google.adk.artifacts import InMemoryArtifactService
from google.adk.events.event import Event
from google.adk.events.event_actions import EventActions, EventCompaction
from google.adk.runners import Runner
from google.adk.sessions import BaseSessionService
from google.genai import types

from tests.conformance.agents import offline_agent
from tests.conformance.services import POOLED_KINDS
from tests.conformance.support import (
    APP,
    USER,
    create,
    each_kind,
    ids,
    listed,
    reference_lacks,
    reload,
    together,
)

# ADK warns of its own experimental and deprecated parts.
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


kind = each_kind(
    "encrypted-file",
    some={
        "adk": [
            "test_agent_sees_the_whole_conversation_turn_after_turn",
            "test_parallel_branches_append_through_one_session_object",
            "test_tool_keeps_state_in_every_scope",
            "test_yielded_events_are_the_stored_ones",
        ],
        "encrypted-postgresql": [
            "test_conversation_goes_on_in_another_process",
            "test_synchronous_runs_share_one_service",
        ],
        "encrypted-cached-events": [
            "test_compacted_events_give_way_to_their_summary",
            "test_conversation_goes_on_in_another_process",
            "test_long_running_call_is_answered_later",
            "test_rewound_turns_leave_the_state_and_the_agents_memory",
        ],
    },
    soak=["encrypted-engine", "encrypted-mariadb", *POOLED_KINDS],
)


def runner_for(service: BaseSessionService, agent: BaseAgent | None = None, **app: Any) -> Runner:
    return Runner(
        app=App(name=APP, root_agent=agent or offline_agent(), **app),
        session_service=service,
        artifact_service=InMemoryArtifactService(),
    )


def said(text: str) -> types.Content:
    return types.Content(role="user", parts=[types.Part(text=text)])


async def say(runner: Runner, text: str | types.Part, **settings: Any) -> list[Event]:
    part = text if isinstance(text, types.Part) else types.Part(text=text)
    return [
        one
        async for one in runner.run_async(
            user_id=USER,
            session_id="session",
            new_message=types.Content(role="user", parts=[part]),
            **settings,
        )
    ]


def texts(events: list[Event]) -> list[str]:
    return [
        part.text
        for one in events
        if one.content
        for part in one.content.parts or []
        if part.text is not None
    ]


async def test_agent_sees_the_whole_conversation_turn_after_turn(
    service: BaseSessionService,
) -> None:
    session = await create(service)
    runner = runner_for(service)
    for n in range(1, 4):
        assert texts(await say(runner, f"turn {n}")) == [f"heard {n}: turn {n}"]
    stored = await reload(service, session)
    assert texts(stored.events) == [
        line for n in range(1, 4) for line in (f"turn {n}", f"heard {n}: turn {n}")
    ]
    assert [one.author for one in stored.events] == ["user", "agent"] * 3
    assert len({one.invocation_id for one in stored.events}) == 3


async def test_conversation_goes_on_in_another_process(
    service: BaseSessionService, another_service: BaseSessionService
) -> None:
    await create(service)
    await say(runner_for(service), "one")
    assert texts(await say(runner_for(another_service), "two")) == ["heard 2: two"]
    assert texts(await say(runner_for(service), "three")) == ["heard 3: three"]


async def test_tool_keeps_state_in_every_scope(service: BaseSessionService) -> None:
    session = await create(service, state={"app:old": 1})
    runner = runner_for(service)
    answered = await say(runner, "call remember apples")
    assert texts(answered) == ["tool said {'count': 1}"]
    await say(runner, "call remember pears")
    stored = await reload(service, session)
    assert stored.state == {"app:old": 1, "app:any": True, "user:count": 2, "last": "pears"}
    assert not any(
        key.startswith("temp:") for one in stored.events for key in one.actions.state_delta
    )
    calls = [call for one in stored.events for call in one.get_function_calls()]
    responses = [response for one in stored.events for response in one.get_function_responses()]
    assert [call.args for call in calls] == [{"what": "apples"}, {"what": "pears"}]
    assert [call.id for call in calls] == [response.id for response in responses]
    assert (await create(service, "other")).state == {
        "app:old": 1,
        "app:any": True,
        "user:count": 2,
    }


@pytest.mark.parametrize("output_key", ["answer", "user:answer", "app:answer", "temp:answer"])
async def test_output_key_reaches_its_scope(service: BaseSessionService, output_key: str) -> None:
    session = await create(service)
    await say(runner_for(service, offline_agent(output_key=output_key)), "hello")
    stored = await reload(service, session)
    expected = {} if output_key.startswith("temp:") else {output_key: "heard 1: hello"}
    assert stored.state == expected


@reference_lacks("times are rounded to the microsecond")
async def test_yielded_events_are_the_stored_ones(service: BaseSessionService) -> None:
    session = await create(service)
    yielded = await say(runner_for(service), "call remember apples")
    assert (await reload(service, session)).events[1:] == yielded


async def test_streamed_fragments_are_not_stored(service: BaseSessionService) -> None:
    session = await create(service)
    streamed = await say(
        runner_for(service), "hello", run_config=RunConfig.model_validate({"streaming_mode": "sse"})
    )
    assert [bool(one.partial) for one in streamed] == [True, True, True, False]
    assert texts((await reload(service, session)).events) == ["hello", "heard 1: hello"]


async def test_state_given_with_a_message_is_stored(service: BaseSessionService) -> None:
    session = await create(service)
    await say(
        runner_for(service), "hello", state_delta={"k": [1], "user:u": 2, "app:a": 3, "temp:t": 4}
    )
    assert (await reload(service, session)).state == {"k": [1], "user:u": 2, "app:a": 3}


async def test_long_running_call_is_answered_later(service: BaseSessionService) -> None:
    session = await create(service)
    runner = runner_for(service)
    await say(runner, "call ask_somebody apples")
    (pending,) = (
        one for one in (await reload(service, session)).events if one.long_running_tool_ids
    )
    (call,) = pending.get_function_calls()
    assert pending.long_running_tool_ids == {call.id}
    late = types.FunctionResponse(id=call.id, name=call.name, response={"status": "done"})
    answered = await say(runner, types.Part(function_response=late))
    assert texts(answered) == ["tool said {'status': 'done'}"]


async def test_tool_confirmation_is_asked_for_and_given(service: BaseSessionService) -> None:
    session = await create(service)
    runner = runner_for(service)
    await say(runner, "call spend 100")
    stored = await reload(service, session)
    (asked,) = (one for one in stored.events if one.actions.requested_tool_confirmations)
    (confirmation,) = asked.actions.requested_tool_confirmations.values()
    assert confirmation.confirmed is False
    (request,) = (
        call
        for one in stored.events
        for call in one.get_function_calls()
        if call.name == "adk_request_confirmation"
    )
    yes = types.FunctionResponse(id=request.id, name=request.name, response={"confirmed": True})
    assert texts(await say(runner, types.Part(function_response=yes))) == [
        "tool said {'spent': '100'}"
    ]


async def test_parallel_branches_append_through_one_session_object(
    service: BaseSessionService,
) -> None:
    session = await create(service)
    branches: list[BaseAgent] = [
        offline_agent(f"branch_{n}", output_key=f"out_{n}") for n in range(4)
    ]
    runner = runner_for(service, ParallelAgent(name="root", sub_agents=branches))
    yielded = await say(runner, "hello")
    stored = await reload(service, session)
    assert sorted(ids(stored.events[1:])) == sorted(ids(yielded))
    assert {one.author for one in yielded} == {f"branch_{n}" for n in range(4)}
    assert stored.state == {f"out_{n}": "heard 1: hello" for n in range(4)}
    assert {one.branch for one in stored.events[1:]} == {one.branch for one in yielded}


async def test_rewound_turns_leave_the_state_and_the_agents_memory(
    service: BaseSessionService,
) -> None:
    session = await create(service)
    runner = runner_for(service)
    await say(runner, "call remember apples")
    before = await reload(service, session)
    rewound = await say(runner, "call remember pears")
    await say(runner, "one more")
    await runner.rewind_async(
        user_id=USER, session_id="session", rewind_before_invocation_id=rewound[0].invocation_id
    )
    stored = await reload(service, session)
    assert stored.state["last"] == before.state["last"] == "apples"
    assert stored.events[-1].actions.rewind_before_invocation_id == rewound[0].invocation_id
    assert ids(stored.events)[: len(before.events)] == ids(before.events)
    assert texts(await say(runner, "again")) == ["heard 2: again"]


class Summarizer(BaseEventsSummarizer):
    async def maybe_summarize_events(self, *, events: list[Event]) -> Event | None:
        summary = types.Content(role="model", parts=[types.Part(text=f"{len(events)} events")])
        return Event(
            author="user",
            invocation_id="compaction",
            actions=EventActions(
                compaction=EventCompaction(
                    start_timestamp=events[0].timestamp,
                    end_timestamp=events[-1].timestamp,
                    compacted_content=summary,
                )
            ),
        )


@reference_lacks("times are rounded to the microsecond, which can compact an event twice")
async def test_compacted_events_give_way_to_their_summary(service: BaseSessionService) -> None:
    session = await create(service)
    runner = runner_for(
        service,
        events_compaction_config=EventsCompactionConfig(
            summarizer=Summarizer(), compaction_interval=2, overlap_size=0
        ),
    )
    for n in range(4):
        await say(runner, f"turn {n}")
    stored = await reload(service, session)
    compactions = [one.actions.compaction for one in stored.events if one.actions.compaction]
    assert len(compactions) == 2
    for compaction in compactions:
        assert compaction.compacted_content.parts == [types.Part(text="4 events")]
    first, second = compactions
    assert first.start_timestamp < first.end_timestamp < second.start_timestamp
    assert len(await say(runner, "after")) == 1


async def test_missing_session_is_made_by_the_runner_when_asked(
    service: BaseSessionService,
) -> None:
    runner = Runner(
        app_name=APP, agent=offline_agent(), session_service=service, auto_create_session=True
    )
    assert texts(await say(runner, "hello")) == ["heard 1: hello"]
    assert ids(await listed(service)) == ["session"]


async def test_conversations_of_many_users_at_once_stay_apart(service: BaseSessionService) -> None:
    runner = runner_for(service)

    async def converse(n: int) -> None:
        await create(service, user_id=f"u{n}")
        for m in range(1, 3):
            answered = [
                one
                async for one in runner.run_async(
                    user_id=f"u{n}", session_id="session", new_message=said(f"{n} {m}")
                )
            ]
            assert texts(answered) == [f"heard {m}: {n} {m}"]

    await create(service, "the first makes the tables")
    await together(*(converse(n) for n in range(3)))
    for session in await listed(service, None):
        if session.id == "session":
            assert len((await reload(service, session)).events) == 4


async def test_failing_agent_leaves_a_session_that_goes_on(service: BaseSessionService) -> None:
    class Failing(BaseAgent):
        async def _run_async_impl(self, ctx: Any) -> AsyncGenerator[Event, None]:
            yield Event(
                author=self.name,
                invocation_id=ctx.invocation_id,
                actions=EventActions(state_delta={"reached": True}),
            )
            raise RuntimeError("the agent failed")

    session = await create(service)
    with pytest.raises(RuntimeError, match="the agent failed"):
        await say(runner_for(service, Failing(name="agent")), "hello")
    assert (await reload(service, session)).state == {"reached": True}
    await say(runner_for(service), "again")
    assert len((await reload(service, session)).events) >= 4


def test_synchronous_runs_share_one_service(service_of_no_loop: BaseSessionService) -> None:
    """Each starts an event loop, in a thread, of its own."""
    service = service_of_no_loop
    asyncio.run(create(service))
    runner = runner_for(service)
    for n in range(1, 4):
        answered = list(
            runner.run(user_id=USER, session_id="session", new_message=said(f"turn {n}"))
        )
        assert texts(answered) == [f"heard {n}: turn {n}"]
    (session,) = asyncio.run(listed(service))
    assert len(asyncio.run(reload(service, session)).events) == 6
