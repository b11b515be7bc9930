import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
from google.adk.sessions import BaseSessionService
from pydantic_core import to_jsonable_python

from tests.conformance.services import POOLED_KINDS
from tests.conformance.support import (
    create,
    each_kind,
    event,
    find,
    ids,
    marker,
    reference_lacks,
    reload,
)
from tests.conformance.values import IMPOSSIBLE, OPAQUE, PLAIN, RICH

# To a database, all encrypted states are alike.
kind = each_kind(
    "adk", "encrypted-file", soak=["encrypted-postgresql", "encrypted-mariadb", *POOLED_KINDS]
)

coercion = reference_lacks("state is not coerced to JSON")
SCOPES = ("k", "app:k", "user:k")


def assert_same_types(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Equal, and of the same types: 1 is neither 1.0 nor True.  NaN is the same as NaN."""
    assert {k: repr(v) for k, v in found.items()} == {k: repr(v) for k, v in expected.items()}


def each(
    values: dict[str, Any], *marks: pytest.MarkDecorator
) -> Callable[..., pytest.MarkDecorator]:
    params = [pytest.param(value, id=name, marks=marks) for name, value in values.items()]
    return pytest.mark.parametrize("value", params)


@each(PLAIN | {"nan": math.nan})
async def test_json_value_comes_back(service: BaseSessionService, value: Any) -> None:
    state = dict.fromkeys(SCOPES, value)
    session = await create(service, state=state)
    assert_same_types(session.state, state)
    assert_same_types((await reload(service, session)).state, state)

    delta = {f"{key} appended": value for key in SCOPES}
    await service.append_event(session, event(delta=dict(delta)))
    assert_same_types(session.state, state | delta)
    assert_same_types((await reload(service, session)).state, state | delta)


@each(RICH, coercion)
async def test_rich_value_is_coerced_at_creation_and_in_storage_on_append(
    service: BaseSessionService, value: Any
) -> None:
    coerced = to_jsonable_python(value)
    state = dict.fromkeys(SCOPES, coerced)
    session = await create(service, state=dict.fromkeys(SCOPES, value))
    assert_same_types(session.state, state)
    assert_same_types((await reload(service, session)).state, state)

    delta = {f"{key} appended": value for key in SCOPES}
    appended = await service.append_event(session, event(delta=dict(delta)))
    for key in delta:
        assert session.state[key] is value
        assert appended.actions.state_delta[key] is value
    assert_same_types((await reload(service, session)).state, state | dict.fromkeys(delta, coerced))


@each(OPAQUE, coercion)
async def test_value_without_json_form_is_stored_as_text_with_a_warning(
    service: BaseSessionService, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    text = to_jsonable_python(value, serialize_unknown=True)
    session = await create(service, state={"bad": value, "good": 1})
    assert session.state == {"bad": text, "good": 1}
    assert (await reload(service, session)).state == {"bad": text, "good": 1}
    await service.append_event(session, event("kept", delta={"worse": value}))
    assert session.state["worse"] is value
    again = await reload(service, session)
    assert again.state == {"bad": text, "good": 1, "worse": text}
    assert again.events[0].actions.state_delta == {"worse": text}
    warned = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warned) >= 2


@reference_lacks("these fail in the database driver")
async def test_bytes_that_are_not_text_are_rejected_or_stored_as_text(
    service: BaseSessionService,
) -> None:
    try:
        session = await create(service, state={"k": b"\xff\x00", "good": 1})
    except ValueError:
        assert await create(service)  # nothing was stored under this id
        return
    assert isinstance(session.state["k"], str)
    assert (await reload(service, session)).state == session.state


@each(IMPOSSIBLE, coercion)
async def test_creation_with_an_impossible_value_is_rejected_and_stores_nothing(
    service: BaseSessionService, value: Any
) -> None:
    with pytest.raises(ValueError, match=r"(?i)circular|depth"):
        await create(service, state={"user:k": 1, "app:k": 1, "bad": value})
    assert (await create(service)).state == {}


@each(IMPOSSIBLE, coercion)
async def test_append_of_an_impossible_value_changes_nothing_but_temp_keys(
    service: BaseSessionService, value: Any
) -> None:
    session = await create(service, state={"k": 1})
    await service.append_event(session, event("before", delta={"k": 2}))
    before = await reload(service, session)
    with pytest.raises(ValueError, match=r"(?i)circular|depth"):
        await service.append_event(
            session, event("bad", delta={"k": 3, "user:k": 3, "temp:t": 3, "bad": value})
        )
    assert session.state == {"k": 2, "temp:t": 3}
    assert ids(session.events) == ids(before.events)
    assert (session.last_update_time, marker(session)) == (before.last_update_time, marker(before))
    assert await find(service, session) == before
    await service.append_event(session, event("after", delta={"k": 4}))
    assert (await reload(service, session)).state == {"k": 4}
