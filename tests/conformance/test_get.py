from typing import Any

import pytest
from google.adk.sessions import BaseSessionService, Session

from tests.conformance.services import OTHER_KINDS, ReadsTwice
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
    reference_fails,
    reference_lacks,
    reload,
)

kind = each_kind(
    "encrypted-file",
    some={
        "encrypted-postgresql": [
            "test_config_selects_events_by_time_then_the_last_ones",
            "test_event_before_1970_is_selected",
            "test_events_of_one_time_stay_in_the_order_they_were_appended",
            "test_history_of_more_than_a_hundred_events_comes_back_whole",
            "test_session_is_none_before_anything_was_stored",
        ],
        "adk": [
            "test_append_to_a_partly_loaded_session_is_accepted",
            "test_config_selects_events_by_time_then_the_last_ones",
            "test_event_at_exactly_the_bound_is_selected",
            "test_no_recent_events_means_no_events",
            "test_session_is_none_before_anything_was_stored",
        ],
        "encrypted-cached-events": [
            "test_config_selects_events_by_time_then_the_last_ones",
            "test_history_of_more_than_a_hundred_events_comes_back_whole",
            "test_live_session_equals_its_reload_after_appends",
        ],
        "encrypted-mariadb": [
            "test_config_selects_events_by_time_then_the_last_ones",
            "test_event_before_1970_is_selected",
            "test_unknown_session_is_none",
        ],
    },
    soak=[name for name in OTHER_KINDS if name != "encrypted-cached-events"],
)
TIMES = [START + n for n in range(5)]


async def with_events(service: BaseSessionService, times: list[float]) -> Session:
    """A session with events "e0", "e1", … at the given times."""
    session = await create(service, state={"app:a": 1, "user:u": 2, "s": 3})
    for n, time in enumerate(times):
        await service.append_event(
            session, event(str(n), id=f"e{n}", timestamp=time, delta={"n": n, "user:n": n})
        )
    return session


async def test_unknown_session_is_none(service: BaseSessionService) -> None:
    session = await create(service)
    for changed in (
        {"id": "unknown"},
        {"user_id": "unknown"},
        {"app_name": "unknown"},
        {"user_id": ""},
        {"id": ""},
        {"id": "SESSION"},
        {"id": "session "},
    ):
        unknown = session.model_copy(update=changed)
        assert await find(service, unknown) is None
        assert await find(service, unknown, num_recent_events=0) is None
        assert await find(service, unknown, after_timestamp=START) is None


async def test_session_is_none_before_anything_was_stored(service: BaseSessionService) -> None:
    assert await service.get_session(app_name=APP, user_id=USER, session_id="s") is None


@reference_fails("ADK orders events of one time by their id")
async def test_events_of_one_time_stay_in_the_order_they_were_appended(
    service: BaseSessionService,
) -> None:
    session = await create(service)
    order = ["m", "b", "z", "a", "k"]
    for event_id in order:
        await service.append_event(session, event(id=event_id, timestamp=START))
    assert ids((await reload(service, session)).events) == order
    assert ids((await reload(service, session, num_recent_events=2)).events) == ["a", "k"]
    assert ids((await reload(service, session, after_timestamp=START)).events) == order


async def test_config_selects_events_by_time_then_the_last_ones(
    service: BaseSessionService,
) -> None:
    await assert_selected(
        service,
        [
            ({}, "01234"),
            ({"num_recent_events": None}, "01234"),
            ({"num_recent_events": 1}, "4"),
            ({"num_recent_events": 3}, "234"),
            ({"num_recent_events": 5}, "01234"),
            ({"num_recent_events": 1000}, "01234"),
            ({"after_timestamp": 0.0}, "01234"),
            ({"after_timestamp": START}, "01234"),
            ({"after_timestamp": START + 2}, "234"),  # the bound itself is included
            ({"after_timestamp": START + 2.000001}, "34"),
            ({"after_timestamp": START + 1.999999}, "234"),
            ({"after_timestamp": START + 4}, "4"),
            ({"after_timestamp": START + 5}, ""),
            ({"after_timestamp": START + 1, "num_recent_events": 2}, "34"),
            ({"after_timestamp": START + 3, "num_recent_events": 4}, "34"),
            ({"after_timestamp": START + 9, "num_recent_events": 4}, ""),
        ],
    )


@reference_lacks("num_recent_events=0 gives all events")
async def test_no_recent_events_means_no_events(service: BaseSessionService) -> None:
    await assert_selected(
        service,
        [
            ({"num_recent_events": 0}, ""),
            ({"num_recent_events": 0, "after_timestamp": START}, ""),
            ({"num_recent_events": 0, "after_timestamp": START + 9}, ""),
        ],
    )


async def assert_selected(
    service: BaseSessionService, cases: list[tuple[dict[str, Any], str]]
) -> None:
    session = await with_events(service, TIMES)
    for config, expected in cases:
        found = await reload(service, session, **config)
        assert ids(found.events) == [f"e{n}" for n in expected], config
        assert found.events == [e for e in session.events if e.id[1:] in expected], config
        # All but the events is complete, whatever was selected.
        found.events = session.events
        assert found == session, config


async def test_event_at_exactly_the_bound_is_selected(service: BaseSessionService) -> None:
    for time in (START + 0.25, START + 0.1234567, START + 0.000001, 0.1 + 0.2):
        session = await create(service, None)
        await service.append_event(session, event(timestamp=time))
        assert len((await reload(service, session, after_timestamp=time)).events) == 1, time
        rounded = (await reload(service, session)).last_update_time
        assert len((await reload(service, session, after_timestamp=rounded)).events) == 1, time
        assert (await reload(service, session, after_timestamp=time + 1)).events == [], time


@reference_lacks("times before 1970 are other times")
async def test_event_before_1970_is_selected(service: BaseSessionService) -> None:
    session = await create(service)
    for time in (-3.5, -1.5, 0.0, 1.5):
        await service.append_event(session, event(timestamp=time))
    for time, count in ((-3.5, 4), (-1.5, 3), (-1.0, 2), (1.0, 1)):
        found = await reload(service, session, after_timestamp=time)
        assert len(found.events) == count, time


async def test_session_without_events_has_none_under_any_config(
    service: BaseSessionService,
) -> None:
    session = await create(service, state={"k": 1})
    for config in ({"num_recent_events": 0}, {"num_recent_events": 3}, {"after_timestamp": START}):
        assert await reload(service, session, **config) == session


async def test_live_session_equals_its_reload_after_appends(service: BaseSessionService) -> None:
    session = await with_events(service, TIMES)
    again = await reload(service, session)
    assert again == session  # pydantic compares the marker as well
    assert again.model_dump() == session.model_dump()
    assert marker(again) == marker(session) is not None


@pytest.mark.parametrize(
    "config", [{}, {"num_recent_events": 1}, pytest.param({"num_recent_events": 0})], ids=str
)
async def test_append_to_a_partly_loaded_session_is_accepted(
    service: BaseSessionService, config: dict[str, Any]
) -> None:
    session = await with_events(service, TIMES)
    part = await reload(service, session, **config)
    await service.append_event(part, event(id="e5", timestamp=START + 5, delta={"n": 5}))
    await service.append_event(part, event(id="e6", timestamp=START + 6, delta={"n": 6}))
    whole = await reload(service, session)
    assert ids(whole.events) == [f"e{n}" for n in range(7)]
    assert whole.state == part.state
    assert whole.state["n"] == 6


async def test_returned_sessions_are_independent_of_each_other_and_of_storage(
    service: BaseSessionService,
) -> None:
    nested = {"list": [1]}
    session = await create(service, state={"k": nested, "app:k": nested, "user:k": nested})
    await service.append_event(session, event("text", custom_metadata={"m": [1]}))
    first, second = await reload(service, session), await reload(service, session)
    for key in ("k", "app:k", "user:k"):
        first.state[key]["list"].append("changed")
    first.state["new"] = 1
    if not isinstance(service, ReadsTwice):  # whose event cache gives all readers the same events
        metadata = first.events[0].custom_metadata
        assert metadata is not None
        metadata["m"].append("changed")
    first.events.clear()
    assert second == await reload(service, session) == session


async def test_history_of_more_than_a_hundred_events_comes_back_whole(
    service: BaseSessionService,
) -> None:
    session = await with_events(service, [START + n for n in range(130)])
    assert await reload(service, session) == session
    last = await reload(service, session, num_recent_events=70)
    assert last.events == session.events[-70:]
