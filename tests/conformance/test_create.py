import asyncio
import time
import uuid
from collections import Counter
from typing import Any

import pytest
from google.adk.errors.already_exists_error import AlreadyExistsError
from google.adk.sessions import BaseSessionService, Session

from tests.conformance.services import OTHER_KINDS
from tests.conformance.support import (
    APP,
    USER,
    create,
    each_kind,
    event,
    ids,
    listed,
    marker,
    reference_lacks,
    reload,
)

kind = each_kind(
    *("adk", "encrypted-file"),
    some={
        "encrypted-mariadb": [
            "test_exactly_one_of_many_creators_of_one_id_wins",
            "test_ids_that_look_alike_are_told_apart",
            "test_creating_an_existing_id_is_rejected_and_leaves_the_session_alone",
        ],
        "encrypted-postgresql": [
            "test_exactly_one_of_many_creators_of_one_id_wins",
            "test_odd_id_is_kept_wherever_it_stands",
        ],
    },
    soak=OTHER_KINDS,
)

ODD_IDS = {
    "spaces": "an id with spaces",
    "spaces-around": "  not stripped ",
    "non-ascii": "ünïcødé 会话 🗝️",
    "combining": "e\u0301 is not \u00e9",
    "url": "../a/b?c=%20&d=e#f",
    "sql": "'; DROP TABLE sessions; --",
    "newline": "two\nlines\ttab",
    "nul": "before\0after",
    "long": "x" * 1024,
}
odd_ids = pytest.mark.parametrize("odd_id", ODD_IDS.values(), ids=ODD_IDS.keys())


async def test_session_without_a_given_id_gets_a_uuid(service: BaseSessionService) -> None:
    first, second = await create(service, None), await create(service, None)
    assert uuid.UUID(first.id) != uuid.UUID(second.id)
    assert (await reload(service, first)).id == first.id


async def test_new_session_has_the_ids_and_the_state_it_was_given(
    service: BaseSessionService,
) -> None:
    before = time.time()
    session = await create(service, "s", state={"k": "v"})
    after = time.time()
    assert (session.app_name, session.user_id, session.id) == (APP, USER, "s")
    assert session.state == {"k": "v"}
    assert session.events == []
    assert before - 1 <= session.last_update_time <= after + 1
    assert marker(session)


@odd_ids
async def test_odd_id_is_kept_wherever_it_stands(service: BaseSessionService, odd_id: str) -> None:
    for field in ("session_id", "user_id", "app_name"):
        where: dict[str, Any] = {"app_name": APP, "user_id": USER, "session_id": "s"}
        where[field] = odd_id
        state = {"k": 1, "user:k": where["user_id"], "app:k": where["app_name"]}
        session = await service.create_session(**where, state=state)
        assert (session.app_name, session.user_id, session.id) == tuple(where.values())
        assert await reload(service, session) == session
        assert (await reload(service, session)).state == state
        for user_id in (where["user_id"], None):
            found = await listed(service, user_id, where["app_name"])
            assert [s for s in found if s.id == session.id and s.user_id == session.user_id] == [
                session
            ]


async def test_ids_that_look_alike_are_told_apart(service: BaseSessionService) -> None:
    alike = ["a", "A", " a", "a ", "a\0", "\u00e9", "e\u0301", "a/b", "a:b", ""]
    for session_id in alike:
        await create(service, session_id, state={"mine": session_id})
    for session in await listed(service):
        assert session.state == {"mine": session.id}
    assert Counter(ids(await listed(service))) == Counter(alike)


async def test_parts_of_an_id_never_run_into_each_other(service: BaseSessionService) -> None:
    places = [("ab", "c", "d"), ("a", "bc", "d"), ("a", "b", "cd"), ("abc", "", "d")]
    for app_name, user_id, session_id in places:
        await create(
            service,
            session_id,
            user_id=user_id,
            app_name=app_name,
            state={"app:k": app_name, "user:k": user_id, "k": session_id},
        )
    for app_name, user_id, session_id in places:
        session = await service.get_session(
            app_name=app_name, user_id=user_id, session_id=session_id
        )
        assert session is not None
        assert session.state == {"app:k": app_name, "user:k": user_id, "k": session_id}


async def test_empty_user_id_is_a_real_user(service: BaseSessionService) -> None:
    session = await create(service, user_id="", state={"user:k": "nobody's", "k": 1})
    await create(service, user_id=USER, state={"user:k": "somebody's"})
    await service.append_event(session, event("hello", delta={"user:l": 2}))
    again = await reload(service, session)
    assert again == session
    assert again.state == {"user:k": "nobody's", "user:l": 2, "k": 1}


@reference_lacks("a second session with an empty id is an SQL error")
async def test_empty_session_id_is_rejected_when_taken(service: BaseSessionService) -> None:
    await create(service, "")
    with pytest.raises(AlreadyExistsError):
        await create(service, "")


async def test_creating_an_existing_id_is_rejected_and_leaves_the_session_alone(
    service: BaseSessionService,
) -> None:
    session = await create(service, "taken", state={"k": "first", "app:k": 1, "user:k": 1})
    await service.append_event(session, event("kept"))
    with pytest.raises(AlreadyExistsError):
        await create(service, "taken", state={"k": "second", "app:k": 2, "user:new": 2})
    again = await reload(service, session)
    assert again == session
    assert again.state == {"k": "first", "app:k": 1, "user:k": 1}


@reference_lacks("the losers get an SQL error")
async def test_exactly_one_of_many_creators_of_one_id_wins(service: BaseSessionService) -> None:
    results = await asyncio.gather(
        *(create(service, "one", state={"winner": n}) for n in range(12)), return_exceptions=True
    )
    won = [result for result in results if isinstance(result, Session)]
    lost = [result for result in results if not isinstance(result, Session)]
    assert [type(error) for error in lost] == [AlreadyExistsError] * 11, lost
    assert (await reload(service, won[0])).state == won[0].state


async def test_new_session_equals_its_reload(service: BaseSessionService) -> None:
    session = await create(service, state={"k": [1, {"a": None}], "app:k": 1.5, "user:k": "u"})
    assert session == await reload(service, session)  # pydantic compares the marker as well
    assert marker(session) == marker(await reload(service, session))


@pytest.mark.parametrize(
    "key",
    [
        "k",
        pytest.param("app:k", marks=reference_lacks("shares app state with the caller")),
        pytest.param("user:k", marks=reference_lacks("shares user state with the caller")),
    ],
)
async def test_new_session_shares_no_mutable_value_with_the_callers_dict(
    service: BaseSessionService, key: str
) -> None:
    state: dict[str, Any] = {key: {"list": [1]}}
    session = await create(service, state=state)
    state[key]["list"].append("from the caller")
    assert session.state == {key: {"list": [1]}}
    session.state[key]["list"].append("from the session")
    assert state == {key: {"list": [1, "from the caller"]}}
    assert (await reload(service, session)).state == {key: {"list": [1]}}


async def test_creating_leaves_the_callers_dict_alone(service: BaseSessionService) -> None:
    state = {"k": [1], "app:k": 1, "user:k": 2, "temp:k": 3}
    await create(service, state=state)
    assert state == {"k": [1], "app:k": 1, "user:k": 2, "temp:k": 3}
