"""A random conversation reads the same from ADK's own service and from ours."""

import asyncio
import json
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from google.adk.events.event import Event
from google.adk.events.event_actions import EventActions
from google.adk.sessions import BaseSessionService
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conformance.generated import FULL, as_text, events, states
from tests.conformance.services import KINDS, file_in
from tests.conformance.support import START, create, find, listed

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
    max_examples=3,
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
