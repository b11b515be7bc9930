"""Sessions move from google-adk's tables while two processes serve an application."""

import asyncio
import itertools
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any, NamedTuple

import pytest
import sqlalchemy as sa
from google.adk.errors.already_exists_error import AlreadyExistsError
from google.adk.errors.session_not_found_error import SessionNotFoundError
from google.adk.events.event_actions import EventActions
from google.adk.sessions.database_session_service import DatabaseSessionService

from adk_secure_sessions import AesGcmBackend, EncryptedSessionService
from adk_secure_sessions.maintenance import Database, erase_user, verify
from adk_secure_sessions.migration import AdkTables, PlaintextFallbackService, compare, migrate
from adk_secure_sessions.service import StaleSessionError
from tests.drivers import each_driver, on_drivers, server, url  # noqa: F401 - fixtures
from tests.migration.lookups import APP, said

# The source and the target are the same database, as for most applications.
name = each_driver("sqlite", "asyncpg", soak=["asyncmy", "psycopg"])
BACKEND = AesGcmBackend(bytes(range(32)))
USERS = ["ada", "bob", "cyd", "dan"]
ERASED = "eve"
SESSIONS = 6  # of each user
EVENTS = 3  # of each session
WRITERS = 6
STEPS = 4  # of all writers together, before `migrate` begins

Ids = tuple[str, str]


class Acknowledged:
    """What the application was told.

    Attributes:
        steps: How many operations the application has done.
        events: The ids of the events of each session, oldest first.
        deleted: The sessions that were deleted, and not created again.
        counters: The latest value of each state key, by user.  `app` is the app.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.ends = False
        self.events: dict[Ids, list[str]] = {}
        self.deleted: set[Ids] = set()
        self.counters: dict[str, dict[str, int]] = {}


class Place(NamedTuple):
    """The URLs of the source and of the target."""

    source: str
    target: str


@pytest.fixture
async def place(url: sa.URL) -> Place:  # noqa: F811
    driver = url.drivername.replace("mariadb", "mysql")  # see test_adk_lookups
    source = url.set(drivername=driver).render_as_string(hide_password=False)
    return Place(source, url.render_as_string(hide_password=False))


@pytest.fixture
async def acknowledged(place: Place) -> Acknowledged:
    """What google-adk's service has stored."""
    told = Acknowledged()
    adk = DatabaseSessionService(place.source)
    for user in [*USERS, ERASED]:
        for number in range(SESSIONS):
            ids = (user, f"s{number}")
            session = await adk.create_session(
                app_name=APP, user_id=user, session_id=ids[1], state={"app:old": 1}
            )
            for n in range(EVENTS):
                event = said("x", n, id=f"{user} {number} {n}")
                event.actions = EventActions(state_delta={"user:old": number, "n": n})
                await adk.append_event(session, event)
            told.events[ids] = [f"{user} {number} {n}" for n in range(EVENTS)]
        told.counters[user] = {"old": SESSIONS - 1}
    told.counters["app"] = {"old": 1}
    await adk.close()
    return told


def opened(place: Place) -> PlaintextFallbackService:
    return PlaintextFallbackService(
        EncryptedSessionService(place.target, BACKEND), AdkTables(place.source)
    )


class Writer:
    """One task of the application, which checks everything that it reads.

    Each writer has state keys of its own, so a lower value than it has written is an older state.
    """

    def __init__(self, number: int, service: PlaintextFallbackService, told: Acknowledged) -> None:
        self._number = number
        self._service = service
        self._told = told
        self._choice = random.Random(number)
        # Each session has one writer, which knows what the session must have.  Nobody writes the
        # last session of a user, so `migrate` always has some to copy.
        last = f"s{SESSIONS - 1}"
        shared = [ids for ids in sorted(told.events) if ids[0] != ERASED and ids[1] != last]
        self._own = shared[number::WRITERS]

    async def run(self) -> None:
        for step in itertools.count():
            if self._told.ends:
                return
            operation = self._choice.choice(["append"] * 6 + ["create", "delete", "list", "probe"])
            await getattr(self, f"_{operation}")(step)
            self._told.steps += 1

    async def _append(self, step: int) -> None:
        user, session_id = ids = self._choice.choice(self._own)
        key = f"w{self._number}"
        event = said("y", 100 + step, id=f"w {self._number} {step}")
        value = step + 1
        event.actions = EventActions(state_delta={f"user:{key}": value, f"app:{key}": value})
        session = await self._service.get_session(app_name=APP, user_id=user, session_id=session_id)
        if ids in self._told.deleted:
            assert session is None, "a deleted session has come back"
            return
        assert session is not None, "a session is missing"
        assert [one.id for one in session.events] == self._told.events[ids]
        self._check_state(user, session.state)
        await self._service.append_event(session, event)
        self._told.events[ids].append(event.id)
        self._told.counters[user][key] = value
        self._told.counters["app"][key] = value

    async def _create(self, step: int) -> None:
        user, session_id = ids = self._choice.choice(self._own)
        try:
            created = await self._service.create_session(
                app_name=APP, user_id=user, session_id=session_id
            )
        except AlreadyExistsError:
            assert ids not in self._told.deleted
        else:
            assert ids in self._told.deleted, "a session was replaced"
            self._check_state(user, created.state)
            self._told.deleted.remove(ids)
            self._told.events[ids] = []

    async def _delete(self, step: int) -> None:
        user, session_id = ids = self._choice.choice(self._own)
        stale = await self._service.get_session(app_name=APP, user_id=user, session_id=session_id)
        await self._service.delete_session(app_name=APP, user_id=user, session_id=session_id)
        self._told.deleted.add(ids)
        if stale is not None:
            with pytest.raises((SessionNotFoundError, StaleSessionError)):
                await self._service.append_event(stale, said("late", 1000))

    async def _list(self, step: int) -> None:
        user = self._choice.choice([*USERS, None])
        response = await self._service.list_sessions(app_name=APP, user_id=user)
        found = [(one.user_id, one.id) for one in response.sessions]
        assert len(found) == len(set(found)), "a session is listed twice"
        for ids in self._own:
            if user in (None, ids[0]):
                assert (ids in found) is (ids not in self._told.deleted)
        for one in response.sessions:
            self._check_own(one.user_id, one.state)

    async def _probe(self, step: int) -> None:
        user = self._choice.choice(USERS)
        state = await self._service.get_user_state(app_name=APP, user_id=user)
        self._check_own(user, {f"user:{key}": value for key, value in state.items()})

    def _check_state(self, user: str, state: dict[str, Any]) -> None:
        assert state["user:old"] == SESSIONS - 1
        assert state["app:old"] == 1
        self._check_own(user, state)

    def _check_own(self, user: str, state: dict[str, Any]) -> None:
        """Check the keys that only this writer changes."""
        key = f"w{self._number}"
        if user != ERASED:
            assert state.get(f"user:{key}") == self._told.counters[user].get(key)


@pytest.fixture
async def services(
    place: Place, acknowledged: Acknowledged
) -> AsyncIterator[list[PlaintextFallbackService]]:
    async with opened(place) as first, opened(place) as second:
        yield [first, second]


async def working(told: Acknowledged, tasks: list["asyncio.Task[None]"], steps: int) -> None:
    """Wait until the application has done so many *steps*; raise the error of a task."""
    while told.steps < steps:
        for task in tasks:
            if task.done():
                task.result()
        await asyncio.sleep(0.01)


@on_drivers("sqlite", soak=["asyncpg", "asyncmy", "psycopg"])
async def test_nothing_is_lost_while_sessions_move(
    place: Place, acknowledged: Acknowledged, services: list[PlaintextFallbackService]
) -> None:
    told = acknowledged
    writers = [Writer(n, services[n % 2], told) for n in range(WRITERS)]
    tasks = [asyncio.create_task(writer.run()) for writer in writers]
    async with Database(place.target, BACKEND) as db, AdkTables(place.source) as source:
        await working(told, tasks, STEPS)
        await erase_user(db, APP, ERASED)
        first = await migrate(source, db)
        assert (first.bad, first.conflicts, first.changed_in_source) == (0, 0, 0)
        by_services = sum(service.copied_sessions for service in services)
        assert by_services > 0, "the services have copied nothing"
        assert first.copied > 0, "nothing was left to copy"
        await working(told, tasks, told.steps + 10)
        second = await migrate(source, db)
        assert (second.copied, second.conflicts) == (0, 0)
        found = await compare(source, db)
        assert found.findings == ()
        assert (found.all_equal, found.mark_stored) == (True, True)
        assert found.equal >= SESSIONS
        await working(told, tasks, told.steps + 10)
        told.ends = True
        await asyncio.gather(*tasks)
        assert (await verify(db)).bad == 0
        assert (await compare(source, db)).all_equal
    async with EncryptedSessionService(place.target, BACKEND) as plain, opened(place) as ended:
        for service in (plain, ended):
            for (user, session_id), expected in told.events.items():
                session = await service.get_session(
                    app_name=APP, user_id=user, session_id=session_id
                )
                if user == ERASED or (user, session_id) in told.deleted:
                    assert session is None
                else:
                    assert session is not None
                    assert [event.id for event in session.events] == expected
            for user in USERS:
                state = await service.get_user_state(app_name=APP, user_id=user)
                assert state == told.counters[user]
            assert await service.get_user_state(app_name=APP, user_id=ERASED) == {}
        created = await plain.create_session(app_name=APP, user_id="new")
        assert created.state == {f"app:{key}": n for key, n in told.counters["app"].items()}
        assert ended.fallback_reads == 0


async def test_first_writes_of_several_processes_copy_a_session_once(place: Place) -> None:
    adk = DatabaseSessionService(place.source)
    session = await adk.create_session(
        app_name=APP, user_id="ada", session_id="s", state={"user:old": 1, "app:old": 1}
    )
    await adk.append_event(session, said("x", 1))
    await adk.close()
    async with AsyncExitStack() as stack:
        services = [await stack.enter_async_context(opened(place)) for _ in range(4)]
        ids: dict[str, Any] = {"app_name": APP, "user_id": "ada", "session_id": "s"}
        read = [await service.get_session(**ids) for service in services]
        events = [said(f"{n}", 10 + n) for n in range(4)]
        for event in events:
            event.actions = EventActions(state_delta={f"user:{event.id}": 1})
        done = await asyncio.gather(
            *(one.append_event(*pair) for one, *pair in zip(services, read, events, strict=True)),  # type: ignore[arg-type]
            return_exceptions=True,
        )
        assert sorted(type(one) is StaleSessionError for one in done) == [False, True, True, True]
        stored = await services[0].get_session(**ids)
        assert stored is not None
        (winner,) = (one for one in done if not isinstance(one, BaseException))
        assert [event.id for event in stored.events] == ["id of x", winner.id]
        assert stored.state == {"user:old": 1, "app:old": 1, f"user:{winner.id}": 1}
        assert sum(one.copied_sessions for one in services) == 1
