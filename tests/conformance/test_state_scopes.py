from google.adk.sessions import BaseSessionService

from tests.conformance.services import OTHER_KINDS
from tests.conformance.support import create, each_kind, event, reload

kind = each_kind(
    "encrypted-file",
    some={
        "encrypted-mariadb": [
            "test_odd_keys_survive_creation",
            "test_prefixes_send_keys_to_their_scope",
            "test_state_of_a_thousand_keys_is_kept",
        ],
        "adk": [
            "test_none_in_a_delta_is_stored_as_none",
            "test_odd_keys_survive_appending",
            "test_odd_keys_survive_creation",
            "test_prefixes_send_keys_to_their_scope",
            "test_shared_state_written_by_another_session_does_not_make_this_one_stale",
        ],
    },
    soak=["encrypted-postgresql", *OTHER_KINDS],
)

# None of these keys belongs to the scope that it seems to at first sight.
EDGE_KEYS = {
    "app:": 1,
    "user:": 2,
    "app:user:x": 3,
    "user:app:x": 4,
    "app:temp:x": 5,
    "user:temp:x": 6,
    "APP:x": 7,
    "session:x": 8,
    "app": 9,
    "app :x": 10,
    " app:x": 11,
    "application:x": 12,
    "": 13,
    "_temp:x": 14,
    "a.b/c d": 15,
    "ключ": 16,
    "app:ключ": 17,
    "user:nul\0nul": 18,
}
TEMPORARY = {"temp:": 1, "temp:x": 2, "temp:app:x": 3}


async def test_prefixes_send_keys_to_their_scope(service: BaseSessionService) -> None:
    state = {"app:a": 1, "user:u": 2, "s": 3}
    session = await create(service, "one", state=state)
    assert session.state == state

    same_user = await create(service, "two")
    other_user = await create(service, "three", user_id="another")
    other_app = await create(service, "four", app_name="another")
    assert same_user.state == {"app:a": 1, "user:u": 2}
    assert other_user.state == {"app:a": 1}
    assert other_app.state == {}


async def test_new_session_has_the_shared_state_that_earlier_ones_stored(
    service: BaseSessionService,
) -> None:
    await create(service, "one", state={"app:a": 1, "user:u": 1, "s": 1})
    first = await create(service, "two")
    await service.append_event(first, event(delta={"app:b": 2, "user:v": 2, "s": 2}))
    second = await create(service, "three", state={"user:u": 3, "app:c": 3})
    assert second.state == {"app:a": 1, "app:b": 2, "app:c": 3, "user:u": 3, "user:v": 2}
    assert (await reload(service, second)).state == second.state


async def test_odd_keys_survive_creation(service: BaseSessionService) -> None:
    session = await create(service, state=EDGE_KEYS | TEMPORARY)
    assert session.state == EDGE_KEYS
    assert (await reload(service, session)).state == EDGE_KEYS
    assert (await create(service, "other")).state == {
        key: value for key, value in EDGE_KEYS.items() if key.startswith(("app:", "user:"))
    }


async def test_odd_keys_survive_appending(service: BaseSessionService) -> None:
    session = await create(service)
    await service.append_event(session, event(delta=EDGE_KEYS | TEMPORARY))
    assert session.state == EDGE_KEYS | TEMPORARY
    assert (await reload(service, session)).state == EDGE_KEYS
    assert (await create(service, "other")).state == {
        key: value for key, value in EDGE_KEYS.items() if key.startswith(("app:", "user:"))
    }


async def test_appended_keys_reach_their_scope(service: BaseSessionService) -> None:
    one, two = await create(service, "one"), await create(service, "two")
    other_user = await create(service, "one", user_id="another")
    other_app = await create(service, "one", app_name="another")
    await service.append_event(one, event(delta={"app:a": 1, "user:u": 2, "s": 3, "temp:t": 4}))
    assert one.state == {"app:a": 1, "user:u": 2, "s": 3, "temp:t": 4}
    assert (await reload(service, one)).state == {"app:a": 1, "user:u": 2, "s": 3}
    assert (await reload(service, two)).state == {"app:a": 1, "user:u": 2}
    assert (await reload(service, other_user)).state == {"app:a": 1}
    assert (await reload(service, other_app)).state == {}


async def test_shared_state_written_by_another_session_does_not_make_this_one_stale(
    service: BaseSessionService,
) -> None:
    one, two = await create(service, "one"), await create(service, "two")
    await service.append_event(one, event(delta={"app:a": 1, "user:u": 1}))
    await service.append_event(two, event(delta={"app:b": 2, "user:v": 2}))
    everything = {"app:a": 1, "app:b": 2, "user:u": 1, "user:v": 2}
    assert (await reload(service, one)).state == everything
    assert (await reload(service, two)).state == everything


async def test_none_in_a_delta_is_stored_as_none(service: BaseSessionService) -> None:
    keys = {"s": 1, "app:a": 1, "user:u": 1}
    session = await create(service, state=keys)
    await service.append_event(session, event(delta=dict.fromkeys(keys)))
    assert session.state == dict.fromkeys(keys)
    assert (await reload(service, session)).state == dict.fromkeys(keys)


async def test_delta_replaces_nested_values_whole(service: BaseSessionService) -> None:
    session = await create(service, state={"k": {"a": 1}, "user:k": {"a": 1}, "kept": 1})
    await service.append_event(session, event(delta={"k": {"b": 2}, "user:k": {}}))
    expected = {"k": {"b": 2}, "user:k": {}, "kept": 1}
    assert session.state == expected
    assert (await reload(service, session)).state == expected


async def test_state_of_a_thousand_keys_is_kept(service: BaseSessionService) -> None:
    big = {f"{scope}key {n}": n for n in range(350) for scope in ("", "app:", "user:")}
    session = await create(service, state=big)
    await service.append_event(session, event(delta={"one more": 1}))
    assert (await reload(service, session)).state == big | {"one more": 1}
