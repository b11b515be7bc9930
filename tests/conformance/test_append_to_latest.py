"""`append_event_to_latest`: append to a session that other writers change."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from google.adk.errors.session_not_found_error import SessionNotFoundError
from google.adk.events import Event
from google.adk.sessions import BaseSessionService, Session

from adk_secure_sessions import (
    AesGcmBackend,
    DatabaseError,
    EncryptedSessionService,
    SecureSessionError,
    StaleSessionError,
    append_event_to_latest,
)
from tests import servers
from tests.conformance.support import APP, USER, create, each_kind, event, reload
from tests.faults import Point, lost, with_faults
from tests.processes import results

kind = each_kind("encrypted-file", "encrypted-postgresql", soak=["encrypted-mariadb"])
BACKEND = AesGcmBackend(bytes(32))
WHO: dict[str, Any] = {"app_name": APP, "user_id": USER, "session_id": "s"}
PROCESSES, EVENTS = 4, 8
ATTEMPTS_OF_SERVICE = 6  # before it raises the error of a lost connection


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


@pytest.mark.usefixtures("without_pauses")
@pytest.mark.parametrize("is_stored", [True, False])
async def test_event_whose_answer_was_lost_is_stored_once(url: sa.URL, is_stored: bool) -> None:
    service, faults = with_faults(lambda: EncryptedSessionService(url, BACKEND))
    async with service:
        session = await service.create_session(**WHO)
        new = event("new")
        plan = faults.data.after if is_stored else faults.data.before
        lost_ones = [plan(Point.WRITE, lost(), nth=nth + 1) for nth in range(ATTEMPTS_OF_SERVICE)]
        latest = await append_event_to_latest(service, session, new)
        assert lost_ones[-1].happened
        assert latest is not session
        assert ids(latest) == ids(await reload(service, latest)) == [new.id]
        await append_event_to_latest(service, latest, event("next"), attempts=1)
        assert len(ids(await reload(service, latest))) == 2


async def test_new_session_whose_answer_was_lost_is_stale_if_others_have_appended(
    tmp_path: Path,
) -> None:
    url = f"sqlite:///{tmp_path}/s.db"
    service, faults = with_faults(lambda: EncryptedSessionService(url, BACKEND))

    async def append() -> None:
        async with EncryptedSessionService(url, BACKEND) as other:
            stored = await other.get_session(**WHO)
            assert stored
            await other.append_event(stored, event("other"))

    async with service:
        faults.data.after(Point.WRITE, append)
        faults.data.after(Point.WRITE, lost())
        session = await service.create_session(**WHO)
        with pytest.raises(StaleSessionError):
            await service.append_event(session, event("late"))


@pytest.mark.usefixtures("without_pauses")
async def test_call_that_failed_can_be_repeated(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/s.db"
    service, faults = with_faults(lambda: EncryptedSessionService(url, BACKEND))
    async with service:
        session = await service.create_session(**WHO)
        new = event("new", delta={"k": 1, "temp:t": 2})
        faults.data.after(Point.WRITE, lost(), nth=None)
        faults.data.before(Point.READ, lost(), nth=None)  # it cannot be loaded again, either
        with pytest.raises(DatabaseError):
            await append_event_to_latest(service, session, new, attempts=1)
        faults.data.forget()
        latest = await append_event_to_latest(service, session, new)
        assert latest is not session  # the call that failed had stored the event
        assert ids(latest) == [new.id]
        assert latest.state == {"k": 1, "temp:t": 2}


async def test_call_that_was_cancelled_can_be_repeated(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/s.db"
    service, faults = with_faults(lambda: EncryptedSessionService(url, BACKEND))
    async with service:
        session, new = await service.create_session(**WHO), event("new")
        call = asyncio.create_task(append_event_to_latest(service, session, new))
        loop = asyncio.get_running_loop()
        faults.data.before(Point.APPLY, lambda: loop.call_soon_threadsafe(call.cancel))
        with pytest.raises(asyncio.CancelledError):
            await call
        assert ids(session) == [new.id]  # the append had begun, so it was completed
        latest = await append_event_to_latest(service, session, new)
        assert ids(await reload(service, latest)) == ids(latest) == [new.id]


async def test_event_that_only_the_session_object_has_is_stored(
    service: BaseSessionService,
) -> None:
    session, new = await create(service), event("new")
    session.events.append(new)
    latest = await append_event_to_latest(service, session, new)
    assert ids(await reload(service, latest)) == ids(latest) == [new.id]


class Failing(EncryptedSessionService):
    """Raises `failure` at the next append, which stores nothing, or `failure_of_read` at a read."""

    failure: SecureSessionError | None = None
    failure_of_read: SecureSessionError | None = None

    async def get_session(self, **options: Any) -> Session | None:
        failure, self.failure_of_read = self.failure_of_read, None
        if failure is not None:
            raise failure
        return await super().get_session(**options)

    async def append_event(self, session: Session, event: Event) -> Event:
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure
        return await super().append_event(session, event)


async def test_only_retryable_errors_are_retried(tmp_path: Path) -> None:
    async with Failing(f"sqlite:///{tmp_path}/s.db", BACKEND) as service:
        session = await service.create_session(**WHO)
        service.failure = SecureSessionError("too many writers", retryable=True)
        service.failure_of_read = DatabaseError("down", retryable=True)
        latest = await append_event_to_latest(service, session, event("new"))
        assert latest is session  # it could not be loaded again, and was current
        service.failure = DatabaseError("full")
        with pytest.raises(DatabaseError, match="full"):
            await append_event_to_latest(service, latest, event("next"))
        service.failure = SecureSessionError("too many writers", retryable=True)
        service.failure_of_read = DatabaseError("full")
        with pytest.raises(DatabaseError, match="full"):
            await append_event_to_latest(service, latest, event("next"))
        assert len(ids(await reload(service, latest))) == 1


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
