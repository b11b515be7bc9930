import itertools

from google.adk.sessions import BaseSessionService
from google.adk.sessions.base_session_service import ListSessionsResponse

from tests.conformance.services import OTHER_KINDS
from tests.conformance.support import (
    APP,
    START,
    USER,
    create,
    each_kind,
    event,
    ids,
    listed,
    marker,
    reference_fails,
    reference_lacks,
    reload,
)

kind = each_kind(
    *("adk", "encrypted-file"),
    some=dict.fromkeys(
        ["encrypted-mariadb", "encrypted-postgresql"],
        (
            "test_all_users_sessions_are_listed_without_a_user",
            "test_sessions_of_one_update_time_are_listed_by_user_then_id",
        ),
    ),
    soak=OTHER_KINDS,
)
ordered = reference_lacks("sessions are listed in no particular order")


async def test_one_users_sessions_are_listed(service: BaseSessionService) -> None:
    await create(service, "a")
    await create(service, "b")
    await create(service, "c", user_id="another")
    await create(service, "d", app_name="another")
    response = await service.list_sessions(app_name=APP, user_id=USER)
    assert isinstance(response, ListSessionsResponse)
    assert sorted(ids(response.sessions)) == ["a", "b"]
    assert {(s.app_name, s.user_id) for s in response.sessions} == {(APP, USER)}


async def test_all_users_sessions_are_listed_without_a_user(service: BaseSessionService) -> None:
    places = {("a", USER), ("a", "another"), ("b", "another"), ("c", "")}
    for session_id, user_id in places:
        await create(service, session_id, user_id=user_id)
    await create(service, "d", app_name="another")
    assert {(s.id, s.user_id) for s in await listed(service, None)} == places
    response = await service.list_sessions(app_name=APP)
    assert {(s.id, s.user_id) for s in response.sessions} == places


async def test_empty_user_id_lists_that_user_only(service: BaseSessionService) -> None:
    await create(service, "a", user_id="")
    await create(service, "b")
    assert ids(await listed(service, "")) == ["a"]


async def test_listing_of_an_empty_database_is_empty(service: BaseSessionService) -> None:
    assert await listed(service) == []
    assert await listed(service, None) == []
    await create(service)
    assert await listed(service, "unknown") == []
    assert await listed(service, app_name="unknown") == []


@ordered
async def test_sessions_are_listed_by_update_time_oldest_first(service: BaseSessionService) -> None:
    sessions = {name: await create(service, name) for name in "abcde"}
    for n, name in enumerate("dbeac"):
        await service.append_event(sessions[name], event(timestamp=START + n))
    assert ids(await listed(service)) == list("dbeac")
    await service.append_event(sessions["b"], event(timestamp=START + 9))
    assert ids(await listed(service)) == list("deacb")
    await service.append_event(sessions["c"], event(timestamp=START - 9))
    assert ids(await listed(service)) == list("cdeab")


@ordered
async def test_sessions_of_one_update_time_are_listed_by_user_then_id(
    service: BaseSessionService,
) -> None:
    names = ["", "Z", "a", "é", "😀"]
    places = list(itertools.product(names, names))
    for user_id, session_id in reversed(places):
        session = await create(service, session_id, user_id=user_id)
        await service.append_event(session, event(timestamp=START))
    assert [(s.user_id, s.id) for s in await listed(service, None)] == places
    assert ids(await listed(service, "é")) == names


async def test_listed_sessions_have_merged_state_and_no_events(service: BaseSessionService) -> None:
    one = await create(service, "one", state={"app:a": 1, "user:u": "mine", "k": "one"})
    await create(service, "two", state={"k": "two"})
    await create(service, "three", user_id="another", state={"user:u": "theirs"})
    await service.append_event(one, event("text", delta={"app:b": 2, "k": "changed"}))
    states = {s.id: s.state for s in await listed(service, None)}
    assert states == {
        "one": {"app:a": 1, "app:b": 2, "user:u": "mine", "k": "changed"},
        "two": {"app:a": 1, "app:b": 2, "user:u": "mine", "k": "two"},
        "three": {"app:a": 1, "app:b": 2, "user:u": "theirs"},
    }
    assert [s.events for s in await listed(service, None)] == [[], [], []]
    assert {s.id: s.state for s in await listed(service)} == {
        session_id: states[session_id] for session_id in ("one", "two")
    }


@reference_lacks("num_recent_events=0 gives all events")
async def test_listed_session_equals_one_loaded_without_events(service: BaseSessionService) -> None:
    session = await create(service, state={"app:a": 1, "user:u": 2, "k": [3]})
    await service.append_event(session, event("text", timestamp=START + 0.123456))
    (found,) = await listed(service)
    assert found == await reload(service, session, num_recent_events=0)
    assert marker(found) == marker(session)


async def test_append_to_a_listed_session_is_accepted(service: BaseSessionService) -> None:
    session = await create(service)
    await service.append_event(session, event("one"))
    (found,) = await listed(service)
    await service.append_event(found, event("two", delta={"k": 1}))
    again = await reload(service, session)
    assert len(again.events) == 2
    assert again.state == {"k": 1}


@reference_fails("ADK puts the same app and user values into every listed session")
async def test_listed_sessions_share_no_mutable_value(service: BaseSessionService) -> None:
    state = {"app:k": {"list": [1]}, "user:k": {"list": [2]}, "k": {"list": [3]}}
    await create(service, "one", state=state)
    await create(service, "two", state=state)
    for user_id in (USER, None):
        first, second = await listed(service, user_id)
        for key in state:
            first.state[key]["list"].append("changed")
        assert second.state == state
