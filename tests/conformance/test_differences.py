"""The page "Differences from DatabaseSessionService": each row is held against both services.

The rows that are not here are held by the files that the page names.
"""

import logging
import math
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import Any

import pydantic
import pytest
from google.adk.events import EventActions
from google.adk.sessions import BaseSessionService
from sqlalchemy.exc import StatementError

from tests.conformance import samples
from tests.conformance.services import Kind
from tests.conformance.support import create, each_kind, event, find, ids, reference_lacks, reload
from tests.conformance.values import a_function, nested

# What the service stores does not depend on the database.
kind = each_kind("adk", "encrypted-file", soak=["encrypted-postgresql", "encrypted-mariadb"])
pytestmark = reference_lacks("the page is about the newest release")

TOO_MANY_DIGITS = 10**4300


class Model(pydantic.BaseModel):
    empty: int | None = None
    full: int = 1


async def test_order_of_events_is_that_of_appending(
    kind: Kind, service: BaseSessionService
) -> None:
    session = await create(service)
    for text, time in (("a", 3.0), ("b", 1.0), ("c", 2.0)):
        await service.append_event(session, event(text, id=text, timestamp=time))
    expected = ["b", "c", "a"] if kind.is_reference else ["a", "b", "c"]
    assert ids((await reload(service, session)).events) == expected
    last = (await reload(service, session, num_recent_events=1)).events
    assert ids(last) == expected[-1:]
    late = (await reload(service, session, after_timestamp=2.0)).events
    assert ids(late) == [text for text in expected if text != "b"]


async def test_impossible_time_is_an_error_also_if_the_session_is_unknown(
    kind: Kind, service: BaseSessionService
) -> None:
    session = await create(service)
    unknown = session.model_copy(update={"id": "unknown"})
    for time in (math.nan, math.inf):
        with pytest.raises((ValueError, OverflowError)):
            await reload(service, session, after_timestamp=time)
        if kind.is_reference:
            assert await find(service, unknown, after_timestamp=time) is None
        else:
            with pytest.raises(ValueError, match="not a possible time"):
                await find(service, unknown, after_timestamp=time)


async def test_reused_event_id_is_accepted(kind: Kind, service: BaseSessionService) -> None:
    session = await create(service)
    await service.append_event(session, event("one", id="same"))
    if kind.is_reference:
        with pytest.raises(Exception, match="UNIQUE constraint failed"):
            await service.append_event(session, event("two", id="same"))
    else:
        await service.append_event(session, event("two", id="same"))
        assert ids((await reload(service, session)).events) == ["same", "same"]


async def test_value_without_json_form_in_an_event_becomes_text(
    kind: Kind, service: BaseSessionService, caplog: pytest.LogCaptureFixture
) -> None:
    session = await create(service)
    bad = event("kept", custom_metadata={"bad": a_function, "good": 1})
    if kind.is_reference:
        with pytest.raises(ValueError, match="serialize"):
            await service.append_event(session, bad)
    else:
        await service.append_event(session, bad)
        (stored,) = (await reload(service, session)).events
        assert stored.custom_metadata == {"bad": str(a_function), "good": 1}
        assert [record for record in caplog.records if record.levelno == logging.WARNING]


async def test_bytes_that_are_not_utf_8_in_a_state_become_text(
    kind: Kind, service: BaseSessionService, caplog: pytest.LogCaptureFixture
) -> None:
    if kind.is_reference:
        with pytest.raises(UnicodeDecodeError):
            await create(service, state={"k": b"\xff"})
    else:
        session = await create(service, state={"k": b"\xff"})
        assert session.state == {"k": r"b'\xff'"}
        assert [record for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize("beside", [1, a_function])
async def test_none_in_models_is_kept_where_adk_keeps_it(
    service: BaseSessionService, beside: Any
) -> None:
    session = await create(service)
    delta = {"m": Model(), "l": [Model()], "n": None, "beside": beside}
    await service.append_event(session, event(delta=delta))
    again = await reload(service, session)
    whole = {"empty": None, "full": 1}
    # In the state always; in the event only beside a value without JSON form.
    assert again.state["m"] == whole
    shown = {"full": 1} if beside == 1 else whole
    stored = again.events[0].actions.state_delta
    assert (stored["m"], stored["l"], stored["n"]) == (shown, [shown], None)


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
async def test_infinity_and_nan_in_an_event_come_back(
    kind: Kind, service: BaseSessionService, number: float
) -> None:
    session = await create(service)
    given = samples.parts(samples.call(k=number))
    given.actions.state_delta = given.custom_metadata = {"k": number}
    await service.append_event(session, given)
    (stored,) = (await reload(service, session)).events
    (called,) = stored.get_function_calls()
    for values in (stored.custom_metadata, stored.actions.state_delta, called.args):
        assert values is not None
        if kind.is_reference:
            assert values["k"] is None
        else:
            assert repr(values["k"]) == repr(number)


@pytest.mark.parametrize("key", ["\ud800", "app:\ud800", "user:\udfff"])
async def test_lone_surrogate_in_a_key_comes_back(
    kind: Kind, service: BaseSessionService, key: str
) -> None:
    if kind.is_reference:
        with pytest.raises(UnicodeEncodeError):
            await create(service, state={key: 1})
        return
    session = await create(service, state={key: {key: 1}})
    assert session.state == {key: {key: 1}}
    await service.append_event(session, event("a", delta={key: [key], f"{key} 2": 2}))
    again = await reload(service, session)
    assert again.state == {key: [key], f"{key} 2": 2}
    assert again.events[0].actions.state_delta == {key: [key], f"{key} 2": 2}


@pytest.mark.parametrize("value", [nested(50_000), TOO_MANY_DIGITS], ids=["levels", "digits"])
@pytest.mark.parametrize("scope", ["", "app:", "user:"])
async def test_state_value_beyond_a_limit_is_a_value_error_that_names_its_key(
    kind: Kind, service: BaseSessionService, scope: str, value: Any
) -> None:
    good = await create(service, state={f"{scope}k": 1})
    state = {f"{scope}k": 2, f"{scope}bad": {"in": [0, value]}}
    for call in (
        lambda: create(service, "another", state=state),
        lambda: service.append_event(good, event("lost", delta=dict(state))),
    ):
        # For digits, ADK's is one of SQLAlchemy.
        with pytest.raises((ValueError, StatementError)) as info:
            await call()
        if not kind.is_reference:
            assert isinstance(info.value, ValueError)
            assert str(info.value).startswith(f"state['{scope}bad']['in'][1]")
    assert (await create(service, "another")).state.get(f"{scope}k") == (1 if scope else None)
    again = await reload(service, good)
    assert (again.state, again.events) == ({f"{scope}k": 1}, [])


async def test_state_value_of_more_than_190_levels_is_rejected(
    kind: Kind, service: BaseSessionService
) -> None:
    session = await create(service, state={"app:k": nested(190)})
    await service.append_event(session, event(delta={"k": nested(190)}))
    assert (await reload(service, session)).state == {"app:k": nested(190), "k": nested(190)}
    if kind.is_reference:
        await create(service, "deeper", state={"k": nested(191)})
    else:
        for value in (nested(191), nested(190, [])):
            with pytest.raises(ValueError, match="'k'"):
                await create(service, "deeper", state={"k": value})
            with pytest.raises(ValueError, match="'k'"):
                await service.append_event(session, event(delta={"k": value}))


@pytest.mark.parametrize("value", [nested(50_000), TOO_MANY_DIGITS], ids=["levels", "digits"])
async def test_event_value_beyond_a_limit_becomes_text(
    kind: Kind, service: BaseSessionService, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    session = await create(service)
    bad = event("kept", custom_metadata={"bad": value, "good": 1})
    if kind.is_reference:
        # One of SQLAlchemy's errors for digits; its text cannot be made.
        error = StatementError if value == TOO_MANY_DIGITS else ValueError
        with pytest.raises(error):
            await service.append_event(session, bad)
        return
    await service.append_event(session, bad)
    (stored,) = (await reload(service, session)).events
    assert stored.content == bad.content
    assert stored.custom_metadata is not None
    assert stored.custom_metadata["good"] == 1
    text = stored.custom_metadata["bad"]
    while isinstance(text, list):
        (text,) = text
    assert text == "<list>" or text == "1" + "0" * 4300
    assert [record for record in caplog.records if record.levelno == logging.WARNING]


async def test_key_of_more_than_8192_bytes_is_rejected(
    kind: Kind, service: BaseSessionService
) -> None:
    longest = "k" * 8192
    session = await create(service, state={longest: 1})
    await service.append_event(session, event(delta={longest: 2}))
    assert (await reload(service, session)).state == {longest: 2}
    if kind.is_reference:
        await create(service, "longer", state={longest + "k": 1})
    else:
        with pytest.raises(ValueError, match="8192"):
            await create(service, "longer", state={longest + "k": 1})
        with pytest.raises(ValueError, match="8192"):
            await service.append_event(session, event(delta={longest + "k": 1}))


@pytest.mark.parametrize("argument", ["app_name", "user_id", "session_id"])
@pytest.mark.parametrize(
    ("text", "problem"),
    [("é" * 512 + "x", "has more than 1024 bytes"), ("\ud800", "has a lone surrogate")],
    ids=["1024 bytes", "surrogate"],
)
async def test_id_of_more_than_1024_bytes_or_half_a_character_is_rejected(
    kind: Kind, service: BaseSessionService, argument: str, text: str, problem: str
) -> None:
    who: dict[str, Any] = {"app_name": "app", "user_id": "user", "session_id": "session"}
    longest = {**who, argument: "é" * 512}
    session = await service.create_session(**longest)
    assert await find(service, session) == session
    longer = {**who, argument: text}
    if kind.is_reference:
        # SQLite does not enforce the length of its columns.
        with pytest.raises(UnicodeEncodeError) if "\ud800" in text else nullcontext():
            await service.create_session(**longer)
        return
    user = {name: longer[name] for name in ("app_name", "user_id")}
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: service.create_session(**longer),
        lambda: service.get_session(**longer),
        lambda: service.delete_session(**longer),
        lambda: service.append_event(
            session.model_copy(update={argument.replace("session_id", "id"): longer[argument]}),
            event("lost"),
        ),
    ]
    if argument != "session_id":
        calls.append(lambda: service.list_sessions(**user))
        calls.append(lambda: service.get_user_state(**user))
    for call in calls:
        with pytest.raises(ValueError, match=f"{argument} {problem}") as info:
            await call()
        assert info.value.__context__ is None  # which would hold the id


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
async def test_event_that_adk_could_not_read_back_is_rejected(
    kind: Kind, service: BaseSessionService
) -> None:
    session = await create(service)
    bad = event("bad", actions=EventActions())
    bad.actions.artifact_delta["file"] = "not a number"  # type: ignore[assignment]
    if kind.is_reference:
        await service.append_event(session, bad)
        with pytest.raises(ValueError, match="artifact_delta"):
            await reload(service, session)
    else:
        with pytest.raises(ValueError, match="values of actions"):
            await service.append_event(session, bad)
        assert (await reload(service, session)).events == []
