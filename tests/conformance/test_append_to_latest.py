"""`append_event_to_latest`: append to a session that other writers change."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from google.adk.errors.session_not_found_error import SessionNotFoundError
from google.adk.events import Event
from google.adk.sessions import BaseSessionService, Session

from adk_secure_sessions import (
    AesGcmBackend,
    DatabaseError,
    EncryptedSessionService,
    StaleSessionError,
    append_event_to_latest,
)
from tests import servers
from tests.conformance.support import APP, USER, create, each_kind, event, reload
from tests.processes import results

kind = each_kind("encrypted-file", "encrypted-postgresql", soak=["encrypted-mariadb"])
BACKEND = AesGcmBackend(bytes(32))
WHO: dict[str, Any] = {"app_name": APP, "user_id": USER, "session_id": "s"}
PROCESSES, EVENTS = 4, 8


def ids(session: Session) -> list[str]:
    return [one.id for one in session.events]


async def test_event_is_appended_to_the_stored_session(service: BaseSessionService) -> None:
    session = await create(service)
    other = await reload(service, session)
    first, second = event("first"), event("second", delta={"k": 1, "temp:t": 2})
    assert await append_event_to_latest(service, other, first) is other
    latest = await append_event_to_latest(service, session, second)
    assert latest is not session
    assert session.events == []
    assert ids(latest) == [first.id, second.id]
    assert latest.state == {"k": 1, "temp:t": 2}
    assert ids(await reload(service, latest)) == ids(latest)
    await append_event_to_latest(service, latest, event("third"), attempts=1)


async def test_other_writer_that_is_faster_each_time_is_an_error(
    service: BaseSessionService,
) -> None:
    session = await create(service)
    await service.append_event(await reload(service, session), event("other"))
    with pytest.raises(StaleSessionError):
        await append_event_to_latest(service, session, event("late"), attempts=1)
    with pytest.raises(ValueError, match="attempts"):
        await append_event_to_latest(service, session, event("late"), attempts=0)
    await service.delete_session(app_name=APP, user_id=USER, session_id=session.id)
    with pytest.raises(SessionNotFoundError):
        await append_event_to_latest(service, session, event("late"))


class Unanswered(EncryptedSessionService):
    """A mock of a connection that is lost: the service itself repeats what a real one loses."""

    errors: tuple[DatabaseError, ...] = ()
    stores = True

    async def append_event(self, session: Session, event: Event) -> Event:
        if self.errors:
            if self.stores:
                await super().append_event(session.model_copy(deep=True), event)
            error, self.errors = self.errors[0], ()
            raise error
        return await super().append_event(session, event)


@pytest.mark.parametrize("stores", [True, False])
async def test_event_whose_answer_was_lost_is_stored_once(tmp_path: Path, stores: bool) -> None:
    async with Unanswered(f"sqlite:///{tmp_path}/s.db", BACKEND) as service:
        service.stores = stores
        session = await service.create_session(**WHO)
        service.errors = (DatabaseError("lost", retryable=True),)
        new = event("new")
        latest = await append_event_to_latest(service, session, new)
        assert ids(latest) == [new.id]
        assert ids(await reload(service, latest)) == [new.id]
        await append_event_to_latest(service, latest, event("next"), attempts=1)
        service.errors = (DatabaseError("full"),)
        with pytest.raises(DatabaseError, match="full"):
            await append_event_to_latest(service, latest, event("next"))


def append_some(say: Any, url: str, process: int) -> None:
    async def work() -> None:
        async with EncryptedSessionService(url, BACKEND) as service:
            for number in range(EVENTS):
                session = await service.get_session(**WHO)
                assert session is not None
                new = event(f"{process}.{number}")
                session = await append_event_to_latest(service, session, new, attempts=200)
                assert new.id in ids(session)
                say(new.id)

    asyncio.run(work())


@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
async def test_events_of_several_processes_are_stored_once_each(
    database: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if database == "sqlite":
        await of_several_processes(f"sqlite:///{tmp_path}/s.db")
        return
    server: servers.PostgreSQL = request.getfixturevalue("postgresql")
    with server.database() as url:
        name = url.set(drivername="postgresql+asyncpg").render_as_string(hide_password=False)
        await of_several_processes(name)


async def of_several_processes(url: str) -> None:
    async with EncryptedSessionService(url, BACKEND) as service:
        await service.create_session(**WHO)
        jobs = [(append_some, url, number) for number in range(PROCESSES)]
        said = await asyncio.to_thread(results, *jobs)
        session = await service.get_session(**WHO)
        assert session is not None
        assert Counter(ids(session)) == Counter(one for of_child in said for one in of_child)
        assert len(session.events) == PROCESSES * EVENTS
