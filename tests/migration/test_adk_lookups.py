"""`AdkTables` finds single sessions and states in tables that google-adk's service has written."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from google.adk.events.event_actions import EventActions
from google.adk.sessions.database_session_service import DatabaseSessionService

from adk_secure_sessions.migration import adk_queries
from adk_secure_sessions.migration.adk_tables import AdkTables
from adk_secure_sessions.migration.sources import (
    ListedSession,
    Selection,
    SessionContent,
    Unreadable,
)
from tests.drivers import each_driver, on_drivers, server, url  # noqa: F401 - fixtures
from tests.migration.lookups import APP, said

name = each_driver("sqlite", "asyncpg", "asyncmy", soak=["aiosqlite-engine", "psycopg"])
ODD = ["", "%_", "ö 🌱", "o'clock", "x" * 100]


@pytest.fixture
async def adk(url: sa.URL) -> AsyncIterator[DatabaseSessionService]:  # noqa: F811
    # As `mariadb`, google-adk stores times without fractions, and finds its own objects stale.
    driver = url.drivername.replace("mariadb", "mysql")
    service = DatabaseSessionService(
        url.set(drivername=driver).render_as_string(hide_password=False)
    )
    yield service
    await service.close()


@pytest.fixture
async def source(adk: DatabaseSessionService, url: sa.URL) -> AsyncIterator[AdkTables]:  # noqa: F811
    await adk.list_sessions(app_name="none")  # creates the tables
    async with AdkTables(url.render_as_string(hide_password=False)) as source:
        yield source


async def add(adk: DatabaseSessionService, user: str, session_id: str, events: int = 0) -> None:
    state = {"n": 1, "user:name": user, "app:greeting": "hi"}
    ids: dict[str, Any] = {"app_name": APP, "user_id": user, "session_id": session_id}
    await adk.create_session(**ids, state=state)
    # google-adk 1.39 on MariaDB, which rounds the time, rejects an append to what it has created.
    session = await adk.get_session(**ids)
    assert session is not None
    for number in range(events):
        event = said(f"{session_id} {number}", number, actions=EventActions(state_delta={"n": 2}))
        await adk.append_event(session, event)


async def listed(source: AdkTables, user: str | None) -> dict[ListedSession, Any]:
    return {
        session: header
        async for batch in source.sessions_of(APP, user)
        for session, header in batch.items()
    }


async def test_found_sessions_are_those_of_a_copy(
    adk: DatabaseSessionService, source: AdkTables
) -> None:
    await add(adk, "ada", "visit", 2)
    await add(adk, "ada", "empty")
    await add(adk, "bob", "visit", 1)
    for number, session_id in enumerate(ODD[1:]):
        await add(adk, "ada", session_id, number)
    copied = [session async for batch in source.sessions(Selection()) for session in batch]
    contents = await source.read(copied)
    for session in copied:
        assert (await source.read([session]))[session] == contents[session]
    everything = await listed(source, None)
    for session, content in contents.items():
        assert isinstance(content, SessionContent)
        assert everything[session] == content._replace(events=[])
        assert await source.find(*session[:3]) == session
    assert sorted(everything) == sorted(copied)
    of_ada = await listed(source, "ada")
    assert sorted(of_ada) == sorted(session for session in copied if session.user_id == "ada")
    assert all(everything[session] == header for session, header in of_ada.items())


async def test_states_are_found_by_their_ids(
    adk: DatabaseSessionService, source: AdkTables
) -> None:
    await add(adk, "ada", "visit")
    assert await source.state(APP) == b'{"greeting":"hi"}'
    assert await source.state(APP, "ada") == b'{"name":"ada"}'
    assert await source.state("other") is None
    assert await source.state(APP, "bob") is None
    assert await source.state("other", "ada") is None


async def test_id_that_differs_is_not_found(adk: DatabaseSessionService, source: AdkTables) -> None:
    """MySQL ignores case and spaces at the end; PostgreSQL accepts no NUL."""
    await add(adk, "visit", "visit", 1)
    assert await source.find(APP, "visit", "visit") is not None
    for odd in ["VISIT", "visit ", "vis\0it", "vis\ud800it", *ODD]:
        assert await source.find(APP, "visit", odd) is None
        assert await source.find(APP, odd, "visit") is None
        assert await source.find(odd, "visit", "visit") is None
        assert await listed(source, odd) == {}
        assert await source.count(Selection(odd)) == 0
        if odd.strip().lower() != "visit":  # there, google-adk uses the row of `visit`
            assert await source.state(APP, odd) is None
            assert await source.state(odd) is None


@on_drivers("sqlite")
async def test_column_that_ignores_case_shows_no_session_of_another_user(
    adk: DatabaseSessionService, source: AdkTables
) -> None:
    await add(adk, "ada", "visit", 1)
    await add(adk, "Ada", "own")
    columns = "app_name, user_id TEXT COLLATE NOCASE, id, state, create_time, update_time"
    async with adk.db_engine.begin() as connection:
        for statement in (
            f"CREATE TABLE others ({columns}, PRIMARY KEY (app_name, user_id, id))",
            "INSERT INTO others SELECT * FROM sessions",
            "DROP TABLE sessions",
            "ALTER TABLE others RENAME TO sessions",
        ):
            await connection.execute(sa.text(statement))
    assert await source.find(APP, "Ada", "visit") is None
    assert [session.ids for session in await listed(source, "Ada")] == [(APP, "Ada", "own")]


@on_drivers("sqlite")
async def test_sessions_are_listed_in_batches(
    adk: DatabaseSessionService, source: AdkTables, tmp_path: Path
) -> None:
    await add(adk, "ada", "visit", 2)
    number = 2 * adk_queries.LOOKUP_PAGE + 1
    async with adk.db_engine.begin() as connection:
        await connection.execute(
            sa.text(
                "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < :number) "
                "INSERT INTO sessions SELECT app_name, 'u' || (i % 7), 's' || i, state, "
                "create_time, update_time FROM sessions, n"
            ),
            {"number": number},
        )
    batches = [batch async for batch in source.sessions_of(APP, None)]
    assert [len(batch) for batch in batches] == [*2 * [adk_queries.LOOKUP_PAGE], 2]
    found = [session for batch in batches for session in batch]
    assert len(set(found)) == number + 1
    of_user = await listed(source, "u3")
    assert sorted(of_user) == sorted(session for session in found if session.user_id == "u3")


@on_drivers("sqlite")
async def test_unreadable_row_is_reported(adk: DatabaseSessionService, source: AdkTables) -> None:
    await add(adk, "ada", "visit")
    async with adk.db_engine.begin() as connection:
        await connection.execute(sa.text("UPDATE sessions SET state = 'secret'"))
        await connection.execute(sa.text("UPDATE user_states SET state = 'secret'"))
    ((session, header),) = (await listed(source, None)).items()
    assert await source.find(APP, "ada", "visit") == session
    assert await source.read([session]) == {session: header}
    state = await source.state(APP, "ada")
    for found in (header, state):
        assert isinstance(found, Unreadable)
        assert "is not a JSON object" in found.reason
        assert "secret" not in found.reason
