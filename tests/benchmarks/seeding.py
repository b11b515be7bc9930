"""Seed services with sessions and events; ADK's services are filled by bulk inserts."""

import asyncio
import json
import sqlite3
import uuid
from collections.abc import Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime

import sqlalchemy as sa
from google.adk.events import Event
from google.adk.sessions import BaseSessionService, Session
from google.adk.sessions.database_session_service import DatabaseSessionService
from google.adk.sessions.schemas.v1 import StorageEvent, StorageSession, StorageUserState
from google.adk.sessions.sqlite_session_service import SqliteSessionService

from tests.benchmarks.databases import update_statistics
from tests.benchmarks.workload import APP, event, state

_CONCURRENCY = 50
State = dict[str, object]


async def seed_sessions(
    service: BaseSessionService,
    user: str,
    sessions: int,
    events: int = 0,
    initial: State | None = None,
) -> list[str]:
    """Add sessions with *events* events each; return their ids.

    *initial* is the state of each session; the default is about 1 KB.
    """
    initial = state(1000) if initial is None else initial
    names = [str(uuid.uuid4()) for _ in range(sessions)]
    history = [event(number) for number in range(events)]
    first = await _create(service, user, names[0], initial)
    if isinstance(service, DatabaseSessionService):
        await _seed_adk(service, first, names[1:], history)
        return names
    if isinstance(service, SqliteSessionService):
        _seed_adk_sqlite(service, first, names[1:], history)
        return names
    limit = asyncio.Semaphore(_CONCURRENCY)

    async def add(name: str) -> None:
        async with limit:
            session = first if name == first.id else await _create(service, user, name, initial)
            for one in history:
                await service.append_event(session, one.model_copy())

    await asyncio.gather(*map(add, names))
    return names


async def _create(service: BaseSessionService, user: str, name: str, initial: State) -> Session:
    return await service.create_session(app_name=APP, user_id=user, session_id=name, state=initial)


async def seed_users(service: BaseSessionService, users: int) -> None:
    """Add *users* users, "user-0" and so on, each with one small session, "only"."""
    initial = state(100)
    if isinstance(service, DatabaseSessionService):
        await _create(service, "user-0", "only", initial)
        now = datetime.now(UTC).replace(tzinfo=None)
        async with service.database_session_factory() as database:
            for number in range(1, users):
                owner = {"app_name": APP, "user_id": f"user-{number}"}
                database.add(StorageUserState(**owner, state={}, update_time=now))
                row = owner | {"create_time": now, "update_time": now}
                database.add(StorageSession(**row, id="only", state=initial))
            await database.commit()
        return
    limit = asyncio.Semaphore(_CONCURRENCY)

    async def add(number: int) -> None:
        async with limit:
            await _create(service, f"user-{number}", "only", initial)

    for start in range(0, users, 1000):
        await asyncio.gather(*map(add, range(start, min(users, start + 1000))))


async def _seed_adk(
    service: DatabaseSessionService, first: Session, names: Sequence[str], history: list[Event]
) -> None:
    now = datetime.now(UTC).replace(tzinfo=None)
    async with service.database_session_factory() as database:
        for name in names:
            row = {"app_name": APP, "user_id": first.user_id, "id": name, "state": first.state}
            database.add(StorageSession(**row, create_time=now, update_time=now))
        await database.flush()
        for name in [first.id, *names]:
            session = first.model_copy(update={"id": name})
            for one in history:
                own = one.model_copy(update={"id": str(uuid.uuid4())})
                database.add(StorageEvent.from_event(session, own))
        await database.commit()


def _seed_adk_sqlite(
    service: SqliteSessionService, first: Session, names: Sequence[str], history: list[Event]
) -> None:
    user, now = first.user_id, first.last_update_time
    sessions = [(APP, user, name, json.dumps(first.state), now, now) for name in names]
    events = [
        (
            *(str(uuid.uuid4()), APP, user, name, one.invocation_id, one.timestamp),
            one.model_dump_json(exclude_none=True),
        )
        for name in [first.id, *names]
        for one in history
    ]
    with closing(sqlite3.connect(service._db_path)) as connection:
        connection.executemany("INSERT INTO sessions VALUES (?, ?, ?, ?, ?, ?)", sessions)
        connection.executemany("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, ?)", events)
        connection.commit()


class SeededSessions:
    """Adds sessions to the sides of a deployment before they are measured.

    Sessions that benchmarks only read are added once.
    """

    def __init__(self, sides: Mapping[str, BaseSessionService], urls: Mapping[str, sa.URL]) -> None:
        self._sides = sides
        self._urls = urls
        self._made: dict[tuple[str, str], list[str]] = {}

    async def add(
        self,
        side: str,
        user: str,
        sessions: int,
        events: int = 0,
        initial: State | None = None,
    ) -> list[str]:
        """Call `seed_sessions`, and update the planner's statistics."""
        names = await seed_sessions(self._sides[side], user, sessions, events, initial)
        await update_statistics(self._urls[side])
        return names

    async def session_with_events(self, side: str, events: int) -> str:
        """Return the id of a session with *events* events, of the user "reader"."""
        [name] = await self._make(side, "reader", 1, events)
        return name

    async def user_with_sessions(self, side: str, sessions: int) -> str:
        """Return the id of a user with *sessions* sessions, each with 500 bytes of state."""
        name = f"user with {sessions}"
        await self._make(side, name, sessions, 0, state(500))
        return name

    async def _make(
        self, side: str, user: str, sessions: int, events: int, initial: State | None = None
    ) -> list[str]:
        key = (side, f"{user}, {events}")
        if key not in self._made:
            self._made[key] = await self.add(side, user, sessions, events, initial)
        return self._made[key]
