"""What sessions and events take up in the database, beside the same in ADK's and in the floor's."""

import pytest

from tests.benchmarks.comparing import line
from tests.benchmarks.databases import ADK, FLOOR, OURS, opened, stored_bytes
from tests.benchmarks.filling import fill
from tests.benchmarks.places import NEAR, Place
from tests.benchmarks.samples import APP, event, state

pytestmark = [
    pytest.mark.benchmark,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.parametrize("place", NEAR, indirect=True),
]

EVENTS, SESSIONS = 1000, 500


async def test_stored_bytes(place: Place) -> None:
    json_of = len(event(0).model_dump_json(exclude_none=True)), len(str(state(1000)))
    text = f"JSON          {json_of[1]:6} for a session's state, {json_of[0]} for an event"
    line(place.name, "stored bytes", text)
    taken = {}
    for side in (OURS, ADK, FLOOR):
        url = place.databases.make()
        async with opened(side, url) as service:
            await service.create_session(app_name=APP, user_id="user")
        sizes = [await stored_bytes(url)]
        for sessions, events in ((SESSIONS, 0), (1, EVENTS)):
            async with opened(side, url) as service:
                await fill(service, "user", sessions, events)
            sizes.append(await stored_bytes(url))
        empty, with_sessions, with_events = sizes
        taken[side] = ((with_sessions - empty) / SESSIONS, (with_events - with_sessions) / EVENTS)
    for side, (session, one) in taken.items():
        text = f"{side:<13} {session:6.0f} for a session, {one:6.0f} for an event"
        if side != OURS:
            of = [mine / theirs for mine, theirs in zip(taken[OURS], taken[side], strict=True)]
            text += f"; ours {of[0]:.2f} and {of[1]:.2f} of that"
        line(place.name, "stored bytes", text)
