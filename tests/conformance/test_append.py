from typing import Any

import pytest
from google.adk.events.event import Event
from google.adk.sessions import BaseSessionService, Session

from tests.conformance.services import OTHER_KINDS, Kind
from tests.conformance.support import (
    APP,
    START,
    USER,
    create,
    each_kind,
    event,
    find,
    ids,
    marker,
    not_found,
    reference_fails,
    reference_lacks,
    reload,
)

kind = each_kind(
    "encrypted-file",
    some={
        "encrypted-postgresql": [
            "test_append_to_an_unknown_session_changes_nothing_but_temp_keys",
            "test_event_of_two_megabytes_is_stored",
            "test_exact_time_of_an_event_comes_back",
        ],
        "adk": [
            "test_append_returns_and_keeps_the_callers_event_object",
            "test_append_to_an_unknown_session_changes_nothing_but_temp_keys",
            "test_event_without_an_id_keeps_the_one_it_was_given_by_adk",
            "test_marker_follows_every_append",
            "test_partial_event_is_returned_untouched_and_not_stored",
            "test_sessions_update_time_becomes_the_events",
            "test_temp_keys_reach_memory_but_neither_storage_nor_the_event",
            "test_time_more_exact_than_a_microsecond_comes_back",
        ],
    },
    soak=["encrypted-mariadb", *OTHER_KINDS],
)


async def test_append_returns_and_keeps_the_callers_event_object(
    service: BaseSessionService,
) -> None:
    session = await create(service)
    appended = event("text", delta={"k": [1], "temp:t": 1})
    assert await service.append_event(session, appended) is appended
    assert len(session.events) == 1
    assert session.events[0] is appended


async def test_event_without_an_id_keeps_the_one_it_was_given_by_adk(
    service: BaseSessionService,
) -> None:
    session = await create(service)
    appended = Event(author="agent")
    event_id = appended.id
    await service.append_event(session, appended)
    assert appended.id == event_id != ""
    assert ids((await reload(service, session)).events) == [event_id]


@reference_fails("the event has another id each time that it is read")
async def test_event_whose_id_was_emptied_gets_one(service: BaseSessionService) -> None:
    session = await create(service)
    one = event("text")
    one.id = ""
    await service.append_event(session, one)
    assert (await reload(service, session)).events == session.events == [one]


async def test_odd_event_ids_are_kept(service: BaseSessionService) -> None:
    odd = ["e", "an id with spaces", " e", "ünï 会话", "nul\0", "'; --", "E", "x" * 2000]
    session = await create(service)
    for event_id in odd:
        await service.append_event(session, event(id=event_id))
    assert ids((await reload(service, session)).events) == odd


async def test_exact_time_of_an_event_comes_back(service: BaseSessionService) -> None:
    await assert_exact(service, [0.0, 1.5, START, START + 0.123456, 253_402_300_799.0])


@reference_lacks("times are rounded to the microsecond")
async def test_time_more_exact_than_a_microsecond_comes_back(service: BaseSessionService) -> None:
    await assert_exact(service, [-1.5, 1e-9, 0.1 + 0.2, START + 0.1234567, START + 0.9999999])


async def assert_exact(service: BaseSessionService, times: list[float]) -> None:
    session = await create(service)
    for time in times:
        await service.append_event(session, event(timestamp=time))
        again = await reload(service, session)
        assert [one.timestamp for one in again.events] == times[: len(again.events)]
        assert again == session


async def test_sessions_update_time_becomes_the_events(service: BaseSessionService) -> None:
    session = await create(service)
    for time in (START + 5, START + 7.5, START + 1.25, START + 1.25, START - 86400):
        await service.append_event(session, event(timestamp=time))
        assert session.last_update_time == time
        assert (await reload(service, session)).last_update_time == time


async def test_marker_follows_every_append(service: BaseSessionService) -> None:
    session = await create(service)
    seen = {marker(session)}
    for n in range(4):
        await service.append_event(session, event(str(n)))
        seen.add(marker(session))
        assert marker(await reload(service, session)) == marker(session)
    assert len(seen) == 5


@pytest.mark.parametrize("gone", [False, True])
async def test_partial_event_is_returned_untouched_and_not_stored(
    service: BaseSessionService, gone: bool
) -> None:
    session = (
        Session(id="gone", app_name=APP, user_id=USER) if gone else await create(service, "there")
    )
    before = session.model_copy(deep=True)
    partial = event("par", partial=True, delta={"temp:t": 1, "k": 2, "user:u": 3, "app:a": 4})
    untouched = partial.model_copy(deep=True)
    assert await service.append_event(session, partial) is partial
    assert partial == untouched
    assert session == before
    assert (await find(service, session)) == (None if gone else before)


async def test_temp_keys_reach_memory_but_neither_storage_nor_the_event(
    service: BaseSessionService,
) -> None:
    session = await create(service)
    temporary = {"temp:a": [1], "temp:": 2, "temp:app:x": 3}
    appended = event(delta={"k": 1} | temporary)
    await service.append_event(session, appended)
    assert session.state == {"k": 1} | temporary
    assert appended.actions.state_delta == {"k": 1}
    again = await reload(service, session)
    assert again.state == {"k": 1}
    assert again.events[0].actions.state_delta == {"k": 1}


async def test_temp_keys_stay_in_memory_through_later_appends(service: BaseSessionService) -> None:
    session = await create(service)
    await service.append_event(session, event(delta={"temp:t": 1}))
    await service.append_event(session, event(delta={"k": 1}))
    assert session.state == {"temp:t": 1, "k": 1}
    await service.append_event(session, event(delta={"temp:t": 2}))
    assert session.state == {"temp:t": 2, "k": 1}


async def test_changing_the_event_after_the_append_changes_nothing_stored(
    service: BaseSessionService,
) -> None:
    session = await create(service)
    delta: dict[str, Any] = {"k": [1], "user:u": {"a": 1}}
    appended = await service.append_event(session, event("text", delta=delta))
    stored = await reload(service, session)
    appended.actions.state_delta["k"].append("changed")
    appended.actions.state_delta["user:u"]["a"] = "changed"
    session.state["new"] = 1
    assert await reload(service, session) == stored
    assert stored.state == {"k": [1], "user:u": {"a": 1}}


async def test_state_changed_in_memory_only_is_not_stored(service: BaseSessionService) -> None:
    session = await create(service, state={"k": 1})
    session.state["k"] = 2
    session.state["l"] = 3
    await service.append_event(session, event(delta={"m": 4}))
    assert session.state == {"k": 2, "l": 3, "m": 4}
    assert (await reload(service, session)).state == {"k": 1, "m": 4}


@pytest.mark.parametrize("field", ["id", "user_id", "app_name"])
async def test_append_to_an_unknown_session_changes_nothing_but_temp_keys(
    kind: Kind, service: BaseSessionService, field: str
) -> None:
    known = await create(service)
    unknown = known.model_copy(deep=True, update={field: "unknown"})
    appended = event("text", delta={"k": 1, "app:a": 1, "user:u": 1, "temp:t": 1})
    with pytest.raises(not_found(kind)):
        await service.append_event(unknown, appended)
    assert unknown.state == {"temp:t": 1}
    assert unknown.events == []
    assert appended.actions.state_delta == {"k": 1, "app:a": 1, "user:u": 1}
    assert await reload(service, known) == known
    assert await find(service, unknown) is None


async def test_append_before_anything_was_stored_is_rejected(
    kind: Kind, service: BaseSessionService
) -> None:
    with pytest.raises(not_found(kind)):
        await service.append_event(Session(id="s", app_name=APP, user_id=USER), event("text"))


async def test_barest_event_is_stored(service: BaseSessionService) -> None:
    session = await create(service)
    await service.append_event(session, Event(author="", timestamp=START))
    await service.append_event(session, Event(author="", timestamp=START + 1, partial=False))
    assert await reload(service, session) == session
    assert len(session.events) == 2


async def test_event_of_two_megabytes_is_stored(service: BaseSessionService) -> None:
    session = await create(service)
    await service.append_event(session, event("two megabytes " * 150_000))
    await service.append_event(session, event(delta={"k": "x" * 2_000_000}))
    assert await reload(service, session) == session
