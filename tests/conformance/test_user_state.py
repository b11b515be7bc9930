import pytest
from google.adk.sessions import BaseSessionService

from tests.conformance.services import OTHER_KINDS
from tests.conformance.support import APP, USER, create, each_kind, event, reference_lacks

kind = each_kind(
    "encrypted-file",
    some={
        "encrypted-postgresql": ["test_each_user_of_each_app_has_a_state_of_their_own"],
        "adk": ["test_unknown_users_state_is_empty", "test_user_state_has_keys_without_prefix"],
    },
    soak=["encrypted-mariadb", *OTHER_KINDS],
)

pytestmark = reference_lacks("no get_user_state", seen_in=(2, 6))


async def test_user_state_has_keys_without_prefix(service: BaseSessionService) -> None:
    session = await create(service, state={"user:a": 1, "app:b": 2, "c": 3})
    await service.append_event(session, event(delta={"user:d": None, "user:user:e": [4]}))
    assert await service.get_user_state(app_name=APP, user_id=USER) == {
        "a": 1,
        "d": None,
        "user:e": [4],
    }


@pytest.mark.parametrize(("app_name", "user_id"), [(APP, "x"), ("x", USER), ("x", "x"), (APP, "")])
async def test_unknown_users_state_is_empty(
    service: BaseSessionService, app_name: str, user_id: str
) -> None:
    assert await service.get_user_state(app_name=app_name, user_id=user_id) == {}
    await create(service, state={"user:a": 1})
    assert await service.get_user_state(app_name=app_name, user_id=user_id) == {}


async def test_each_user_of_each_app_has_a_state_of_their_own(service: BaseSessionService) -> None:
    places = [(APP, USER), (APP, ""), ("another", USER)]
    for app_name, user_id in places:
        await create(
            service, app_name=app_name, user_id=user_id, state={"user:k": [app_name, user_id]}
        )
    for app_name, user_id in places:
        assert await service.get_user_state(app_name=app_name, user_id=user_id) == {
            "k": [app_name, user_id]
        }


async def test_changing_the_returned_user_state_changes_nothing_else(
    service: BaseSessionService,
) -> None:
    await create(service, state={"user:k": [1]})
    state = await service.get_user_state(app_name=APP, user_id=USER)
    state["k"].append(2)
    state["l"] = 1
    assert await service.get_user_state(app_name=APP, user_id=USER) == {"k": [1]}
