"""Stale session objects, and session objects that have no marker."""

import json

import pytest
from google.adk.sessions import BaseSessionService, Session

from tests.conformance.services import OTHER_KINDS
from tests.conformance.support import (
    APP,
    START,
    USER,
    create,
    each_kind,
    event,
    ids,
    marker,
    reference_fails,
    rejected_as_stale,
    reload,
)

kind = each_kind(
    *("adk", "encrypted-file"),
    some={
        "encrypted-postgresql": [
            "test_handmade_session_with_an_event_that_is_not_stored_is_rejected",
            "test_one_of_two_services_detects_the_others_write",
            "test_stale_copy_is_rejected_and_changes_nothing_but_temp_keys",
        ]
    },
    soak=["encrypted-mariadb", *OTHER_KINDS],
)

time_is_the_marker = reference_fails("ADK's marker is the update time, which need not change")


def handmade(session: Session, *, last_update_time: float = 0.0) -> Session:
    """The session as a caller builds it who does not know of markers."""
    return Session(
        id=session.id,
        app_name=session.app_name,
        user_id=session.user_id,
        state=dict(session.state),
        events=list(session.events),
        last_update_time=last_update_time,
    )


async def test_stale_copy_is_rejected_and_changes_nothing_but_temp_keys(
    service: BaseSessionService,
) -> None:
    session = await create(service, state={"k": 0})
    stale = await reload(service, session)
    before = stale.model_copy(deep=True)
    await service.append_event(session, event("first", delta={"k": 1}))

    late = event("late", delta={"k": 2, "app:a": 2, "user:u": 2, "temp:t": 2})
    with rejected_as_stale():
        await service.append_event(stale, late)
    assert stale.state == {"k": 0, "temp:t": 2}
    assert late.actions.state_delta == {"k": 2, "app:a": 2, "user:u": 2}
    del stale.state["temp:t"]
    assert stale == before

    again = await reload(service, session)
    assert again == session
    assert again.state == {"k": 1}


async def test_rejected_event_is_accepted_after_a_reload(service: BaseSessionService) -> None:
    session = await create(service)
    stale = await reload(service, session)
    await service.append_event(session, event("first", delta={"k": 1}))
    late = event("late", delta={"l": 2})
    for _ in range(2):
        with rejected_as_stale():
            await service.append_event(stale, late)
    fresh = await reload(service, stale)
    await service.append_event(fresh, late)
    again = await reload(service, session)
    assert again == fresh
    assert again.events == [*session.events, late]
    assert again.state == {"k": 1, "l": 2}


async def test_copy_from_creation_is_stale_after_many_appends(service: BaseSessionService) -> None:
    session = await create(service)
    copies = [session.model_copy(deep=True)]
    for n in range(4):
        await service.append_event(session, event(str(n)))
        copies.append(session.model_copy(deep=True))
    for stale in copies[:-1]:
        with rejected_as_stale():
            await service.append_event(stale, event("late"))
    await service.append_event(copies[-1], event("in time"))
    assert len((await reload(service, session)).events) == 5


async def test_listed_copy_is_stale_after_an_append(service: BaseSessionService) -> None:
    session = await create(service)
    (stale,) = (await service.list_sessions(app_name=APP, user_id=USER)).sessions
    await service.append_event(session, event("first"))
    with rejected_as_stale():
        await service.append_event(stale, event("late"))


@time_is_the_marker
@pytest.mark.parametrize("times", [[START], [START + 1, START]], ids=["same", "set back"])
async def test_write_that_leaves_the_time_as_it_was_is_detected(
    service: BaseSessionService, times: list[float]
) -> None:
    session = await create(service)
    await service.append_event(session, event("first", timestamp=START))
    stale = await reload(service, session)
    for time in times:
        await service.append_event(session, event(timestamp=time))
    with rejected_as_stale():
        await service.append_event(stale, event("late", timestamp=START))
    assert await reload(service, session) == session


async def test_one_of_two_services_detects_the_others_write(
    service: BaseSessionService, another_service: BaseSessionService
) -> None:
    session = await create(service, state={"k": 0})
    stale = await reload(another_service, session)
    await service.append_event(session, event("first", delta={"k": 1}))
    with rejected_as_stale():
        await another_service.append_event(stale, event("late", delta={"k": 2}))
    fresh = await reload(another_service, session)
    await another_service.append_event(fresh, event("second", delta={"k": 2}))
    with rejected_as_stale():
        await service.append_event(session, event("late", delta={"k": 3}))
    again = await reload(service, session)
    assert again == fresh
    assert again.state == {"k": 2}


@pytest.mark.parametrize("stored", [0, 1, 3])
async def test_handmade_session_that_ends_at_the_last_stored_event_is_accepted(
    service: BaseSessionService, stored: int
) -> None:
    session = await create(service, state={"k": 0})
    for n in range(stored):
        await service.append_event(session, event(str(n)))
    made = handmade(session)
    await service.append_event(made, event("by hand", delta={"k": 1}))
    await service.append_event(made, event("again", delta={"l": 2}))
    again = await reload(service, session)
    assert again.state == {"k": 1, "l": 2}
    assert ids(again.events) == ids(made.events)
    assert (marker(made), made.last_update_time) == (marker(again), again.last_update_time)


async def test_handmade_session_of_one_recent_event_is_accepted(
    service: BaseSessionService,
) -> None:
    session = await create(service)
    for n in range(3):
        await service.append_event(session, event(str(n)))
    made = handmade(await reload(service, session, num_recent_events=1))
    await service.append_event(made, event("by hand"))
    assert len((await reload(service, session)).events) == 4


@pytest.mark.parametrize(("known", "missed"), [(0, 1), (1, 1), (1, 2)])
async def test_handmade_session_that_storage_moved_past_is_rejected(
    service: BaseSessionService, known: int, missed: int
) -> None:
    session = await create(service)
    for _ in range(known):
        await service.append_event(session, event("known"))
    made = handmade(session)
    for n in range(missed):
        await service.append_event(session, event(f"missed {n}"))
    before = made.model_copy(deep=True)
    with rejected_as_stale():
        await service.append_event(made, event("late", delta={"user:u": 1, "temp:t": 1}))
    del made.state["temp:t"]
    assert made == before
    assert await reload(service, session) == session


async def test_handmade_session_with_an_event_that_is_not_stored_is_rejected(
    service: BaseSessionService,
) -> None:
    session = await create(service)
    await service.append_event(session, event("stored"))
    made = handmade(session)
    made.events.append(event("invented"))
    with rejected_as_stale():
        await service.append_event(made, event("late"))


async def test_session_that_went_through_json_is_accepted(service: BaseSessionService) -> None:
    session = await create(service, state={"k": [1]})
    await service.append_event(session, event("before", delta={"l": 1}))
    text = (await reload(service, session)).model_dump_json(by_alias=True)
    assert "appName" in json.loads(text)
    revived = Session.model_validate_json(text)
    await service.append_event(revived, event("after", delta={"l": 2}))
    again = await reload(service, session)
    assert len(again.events) == 2
    assert again.state == {"k": [1], "l": 2}
    with rejected_as_stale():
        await service.append_event(session, event("late"))
