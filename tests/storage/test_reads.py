"""Each read asks for what it needs in one query, and accepts nothing that is not authentic."""

import asyncio
import logging
from typing import Any

import pytest

from adk_secure_sessions.db.protocol import Read
from adk_secure_sessions.errors import TamperedError
from adk_secure_sessions.formats.records import NO_LINK
from adk_secure_sessions.keys.data_keys import StagedKeys
from adk_secure_sessions.storage import sealed_rows
from adk_secure_sessions.storage.attempts import Attempt
from adk_secure_sessions.storage.reads import (
    GetSession,
    GetStates,
    ListSessions,
)
from adk_secure_sessions.storage.rows import identify
from tests.storage.support import (
    APP,
    BLOB,
    EVENT,
    INDEX,
    SECOND_BLOB,
    SESSION,
    USER,
    WHO,
    RawRow,
    Stored,
    key_rows,
    marks,
    one_database,
    owner_row,
    session_row,
    two_databases,
    witness_row,
)


def get(limit: int | None = None, after: int | None = None) -> GetSession[str]:
    return GetSession(WHO, decoded, limit, after)


def decoded(plaintext: bytes, session_row: int, seq: int) -> str:
    return f"{session_row}/{seq}: {plaintext.decode()}"


# --- one session ---------------------------------------------------------------------------------


async def test_session_is_read_with_its_states_and_its_events_in_order() -> None:
    stored = Stored(events=2)
    executors, _ = one_database(stored.rows()[::-1])
    found = await get().attempt(stored.attempt(), executors)
    assert found is not None
    view, events = found
    assert view == (stored.session, "alice", b'{"a":1}', b'{"u":1}')
    assert events == ["3/0: event 0", "3/1: event 1"]


@pytest.mark.parametrize(
    ("limit", "after", "query"),
    [
        (None, None, "SESSION_WITH_ALL_EVENTS"),
        (5, None, "SESSION_WITH_LAST_EVENTS"),
        (0, None, "SESSION_WITHOUT_EVENTS"),
        (1, 0, "SESSION_WITH_ALL_EVENTS"),
    ],
    ids=["all", "the last five", "none", "from a time on"],
)
async def test_query_reads_no_more_events_than_are_asked_for(
    limit: int | None, after: int | None, query: str
) -> None:
    stored = Stored(events=0)
    executors, executor = one_database(stored.rows())
    await get(limit, after).attempt(stored.knowing(), executors)
    assert executor.requests == [f"read {query}"]


@pytest.mark.parametrize(
    ("operation", "parameters"),
    [
        (get(5), {**WHO.tags(), "limit": 5}),
        (get(), {**WHO.tags(), "limit": 0}),
        (GetStates(WHO), WHO.tags()),
        (ListSessions(WHO, of_app=False, skip=False), WHO.tags()),
        (ListSessions(WHO, of_app=True, skip=False), {"app_tag": WHO.app_tag}),
    ],
    ids=["last events", "session", "user's state", "user's sessions", "app's sessions"],
)
async def test_query_is_given_the_tags_that_it_searches_for(
    operation: Any, parameters: dict[str, object]
) -> None:
    executors, executor = one_database([])
    await operation.attempt(Stored().attempt(), executors)
    (step,) = executor.steps
    assert isinstance(step, Read)
    assert step.parameters == parameters


async def test_data_keys_that_are_not_known_come_with_the_rows() -> None:
    stored = Stored()
    executors, executor = one_database(stored.rows(keys=True))
    attempt = stored.attempt(keys=StagedKeys(stored.keys))
    assert await get().attempt(attempt, executors)
    assert executor.requests == ["read SESSION_WITH_ALL_EVENTS with keys"]


async def test_session_that_is_not_there_is_none() -> None:
    stored = Stored()
    executors, _ = one_database([])
    assert await get().attempt(stored.attempt(), executors) is None


@pytest.mark.parametrize(("after", "number"), [(99, 3), (101, 2), (102, 1), (103, 0)])
async def test_events_before_the_time_asked_for_are_left_out(after: int, number: int) -> None:
    stored = Stored(events=3)  # at 100, 101 and 102
    executors, _ = one_database(stored.rows())
    found = await get(after=after).attempt(stored.attempt(), executors)
    assert found is not None
    assert len(found[1]) == number


@pytest.mark.parametrize("time", [99, 999])
async def test_event_that_the_time_leaves_out_must_be_authentic_too(time: int) -> None:
    """Until then its time is not to be trusted: an attacker may hide an event that way."""
    stored = Stored(events=3)
    executors, _ = one_database(stored.replaced(EVENT, 2, time))
    with pytest.raises(TamperedError):
        await get(after=500).attempt(stored.attempt(), executors)


async def test_history_of_many_events_is_read_whole() -> None:
    stored = Stored(events=150)
    executors, _ = one_database(stored.rows())
    found = await get().attempt(stored.attempt(), executors)
    assert found is not None
    assert found[1] == [f"3/{n}: event {n}" for n in range(150)]


@pytest.mark.parametrize(("events", "turns"), [(64, 0), (65, 1), (150, 2)])
async def test_other_tasks_get_a_turn_after_each_64_events(events: int, turns: int) -> None:
    taken = 0

    async def other_task() -> None:
        nonlocal taken
        while True:
            await asyncio.sleep(0)
            taken += 1

    stored = Stored(events=events)
    executors, _ = one_database(stored.rows())
    other = asyncio.create_task(other_task())
    await asyncio.sleep(0)  # it begins
    await get().attempt(stored.attempt(), executors)
    other.cancel()
    assert taken == turns


async def test_session_whose_apps_row_was_removed_is_rejected() -> None:
    stored = Stored()
    rows = [row for row in stored.rows(without=[APP]) if row[BLOB] != WHO.app_tag]
    executors, _ = one_database(rows)
    with pytest.raises(TamperedError, match="its app's row was removed"):
        await get().attempt(stored.attempt(), executors)


# --- the user's state ----------------------------------------------------------------------------


async def test_users_state_is_read_without_sessions() -> None:
    stored = Stored()
    executors, executor = one_database(stored.rows(without=[SESSION, EVENT]))
    assert await GetStates(WHO).attempt(stored.knowing(), executors) == (b'{"a":1}', b'{"u":1}')
    assert executor.requests == ["read OWNERS"]


async def test_unknown_user_has_an_empty_state() -> None:
    assert await GetStates(WHO).attempt(Stored().attempt(), one_database([])[0]) == (b"{}", b"{}")


# --- listings ------------------------------------------------------------------------------------


def another_session(stored: Stored, attempt: Attempt, number: int) -> list[RawRow]:
    """A session of the same user, without events, and its version witness."""
    who = identify(INDEX, "clinic", "alice", f"session {number}")
    session = stored.session._replace(
        id=number, tag=who.session_tag, session_id=who.session_id, revision=0, head=NO_LINK
    )
    session = sealed_rows.seal_session(attempt._replace(who=who), session)
    witness = witness_row(attempt, WHO.user_tag, who.session_tag, number, b"")
    return [session_row(session), witness]


def listing(stored: Stored) -> list[RawRow]:
    """The rows of three sessions of one user."""
    rows, attempt = stored.rows(without=[EVENT]), stored.sealing()
    return [*rows, *another_session(stored, attempt, 4), *another_session(stored, attempt, 5)]


@pytest.mark.parametrize("of_app", [False, True])
async def test_listing_has_every_session(of_app: bool) -> None:
    stored = Stored()
    attempt = stored.attempt()
    executors, _ = one_database(listing(stored))
    views = await ListSessions(WHO, of_app=of_app, skip=False).attempt(attempt, executors)
    assert [view.session.session_id for view in views] == ["visit", "session 4", "session 5"]
    assert {(view.user_id, view.user_state) for view in views} == {("alice", b'{"u":1}')}


def damaged(rows: list[RawRow], kind: int, row: int) -> list[RawRow]:
    at = SECOND_BLOB
    return [
        (*one[:at], one[at][:-1], *one[at + 1 :]) if one[0] == kind and one[1] == row else one
        for one in rows
    ]


@pytest.mark.parametrize("of_app", [False, True])
async def test_listing_names_the_session_that_cannot_be_decrypted(of_app: bool) -> None:
    stored = Stored()
    attempt = stored.attempt()
    executors, _ = one_database(damaged(listing(stored), SESSION, 4))
    with pytest.raises(TamperedError, match="secure_sessions row 4"):
        await ListSessions(WHO, of_app=of_app, skip=False).attempt(attempt, executors)


@pytest.mark.parametrize("of_app", [False, True])
async def test_listing_that_skips_leaves_out_and_logs_the_session_that_cannot_be_decrypted(
    of_app: bool, caplog: pytest.LogCaptureFixture
) -> None:
    stored = Stored()
    attempt = stored.attempt()
    executors, _ = one_database(damaged(listing(stored), SESSION, 4))
    views = await ListSessions(WHO, of_app=of_app, skip=True).attempt(attempt, executors)
    assert [view.session.id for view in views] == [3, 5]
    ((_, level, message),) = caplog.record_tuples
    assert level == logging.ERROR
    assert "secure_sessions row 4" in message


@pytest.mark.parametrize("of_app", [False, True])
async def test_listing_that_skips_is_empty_where_its_user_cannot_be_decrypted(
    of_app: bool, caplog: pytest.LogCaptureFixture
) -> None:
    stored = Stored()
    attempt = stored.attempt()
    executors, _ = one_database(damaged(listing(stored), USER, 2))
    assert await ListSessions(WHO, of_app=of_app, skip=True).attempt(attempt, executors) == []
    assert "secure_users row 2" in caplog.text


@pytest.mark.parametrize("of_app", [False, True])
async def test_listing_that_skips_is_rejected_where_its_app_cannot_be_decrypted(
    of_app: bool,
) -> None:
    """The app's state is part of every session's."""
    stored = Stored()
    attempt = stored.attempt()
    executors, _ = one_database(damaged(listing(stored), APP, 1))
    with pytest.raises(TamperedError, match="secure_apps row 1"):
        await ListSessions(WHO, of_app=of_app, skip=True).attempt(attempt, executors)


def test_listing_that_skips_reads_the_data_keys_anew() -> None:
    """A session must not be left out for a key that this process has not read yet."""
    assert ListSessions(WHO, of_app=False, skip=True).reads_keys
    assert not ListSessions(WHO, of_app=False, skip=False).reads_keys


async def test_listing_of_an_app_reads_its_users_keys_from_the_key_database() -> None:
    stored = Stored()
    app_key, user_key = stored.key_rows
    keys = StagedKeys(stored.keys)
    keys.load([app_key], marks())
    executors, data, key_database = two_databases(
        data=[stored.rows(without=[EVENT])], keys=[key_rows([user_key])]
    )
    attempt = stored.attempt(keys=keys)
    views = await ListSessions(WHO, of_app=True, skip=False).attempt(attempt, executors)
    assert [view.session.id for view in views] == [3]
    assert key_database.requests == ["read data keys of owners"]
    assert len(data.requests) == 1


@pytest.mark.parametrize("of_app", [False, True])
async def test_session_that_is_stored_twice_is_listed_once(
    of_app: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Possible in a table that was rebuilt without its keys."""
    stored = Stored()
    rows = listing(stored)
    twice = [*rows, *(row for row in rows if row[0] == SESSION and row[1] == 4)]
    with pytest.raises(TamperedError, match="secure_sessions row 4: it is stored twice"):
        await ListSessions(WHO, of_app=of_app, skip=False).attempt(
            stored.attempt(), one_database(twice)[0]
        )
    views = await ListSessions(WHO, of_app=of_app, skip=True).attempt(
        stored.attempt(), one_database(twice)[0]
    )
    assert [view.session.id for view in views] == [3, 4, 5]
    assert len(caplog.records) == 1


@pytest.mark.parametrize("of_app", [False, True])
async def test_listing_rejects_a_session_without_its_witness(of_app: bool) -> None:
    """Only its row and an event were put back: its head is not proven in a listing."""
    stored = Stored()
    executors, _ = one_database(stored.without_witness(WHO.session_tag))
    with pytest.raises(TamperedError, match=r"version witness .* was removed"):
        await ListSessions(WHO, of_app=of_app, skip=False).attempt(stored.attempt(), executors)


async def test_session_of_a_user_who_is_not_in_the_listing_is_rejected() -> None:
    stored = Stored()
    executors, _ = one_database(stored.replaced(SESSION, 2, 99))
    with pytest.raises(TamperedError, match="its user's row was removed"):
        await ListSessions(WHO, of_app=True, skip=False).attempt(stored.attempt(), executors)


async def test_user_of_another_app_is_not_listed() -> None:
    stored = Stored()
    moved = stored.user._replace(app_row=99)
    rows = [*stored.rows(without=[USER, EVENT]), owner_row(stored.sealing(), moved)]
    executors, _ = one_database(rows)
    with pytest.raises(TamperedError, match="its app's row was removed"):
        await ListSessions(WHO, of_app=True, skip=False).attempt(stored.attempt(), executors)
