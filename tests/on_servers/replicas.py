"""A replica that a test copies row by row, and services that read from it.

How it works.  A `CopiedReplica` (the fixture `copied`) is a second database on the same server.  It
gets the rows of the first one only when the test calls `catch_up`; until then it is behind.  The
test may also change its rows, as an attacker on a replica could.  The fixture `process` starts
services that read from it, each of which stands for a process of its own.  `Process.asked` tells
which database has answered.
"""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
import sqlalchemy as sa
from google.adk.events import Event, EventActions
from google.adk.sessions import Session
from sqlalchemy import URL

from adk_secure_sessions import AesGcmBackend, EncryptedSessionService
from adk_secure_sessions.db.connect import wrapping_executors
from adk_secure_sessions.db.protocol import Executor
from tests.conformance.services import KEY, Kind
from tests.conformance.support import ids
from tests.faults import FaultyExecutor, Point
from tests.servers import Server


class CopiedReplica:
    """A replica that has the rows of the primary as of the last call of `catch_up`."""

    def __init__(self, server: Server, primary: sa.URL, replica: sa.URL) -> None:
        self._server = server
        self._primary, self._replica = _schema(server, primary), _schema(server, replica)
        self._account = replica.username
        self.url = replica

    def catch_up(self) -> None:
        """Copy all rows of the primary."""
        listed = "SELECT table_name FROM information_schema.tables WHERE table_schema = "
        with self._server.admin.connect() as connection:
            for (table,) in connection.exec_driver_sql(f"{listed}'{self._primary}'").all():
                copy, original = f"{self._replica}.{table}", f"{self._primary}.{table}"
                if self._server.admin_url.get_backend_name() == "postgresql":
                    connection.exec_driver_sql(
                        f"CREATE TABLE IF NOT EXISTS {copy} (LIKE {original} INCLUDING ALL)"
                    )
                    connection.exec_driver_sql(f"GRANT SELECT ON {copy} TO {self._account}")
                else:
                    connection.exec_driver_sql(f"CREATE TABLE IF NOT EXISTS {copy} LIKE {original}")
                connection.exec_driver_sql(f"DELETE FROM {copy}")
                connection.exec_driver_sql(f"INSERT INTO {copy} SELECT * FROM {original}")

    def execute(self, statement: str) -> int:
        """Run a statement on the replica, whose schema is `{}`; return the number of rows."""
        with self._server.admin.connect() as connection:
            done = connection.execute(sa.text(statement.replace("{}", self._replica)))
            return done.rowcount

    def execute_on_primary(self, statement: str) -> int:
        with self._server.admin.connect() as connection:
            done = connection.execute(sa.text(statement.replace("{}", self._primary)))
            return done.rowcount


def _schema(server: Server, url: sa.URL) -> str:
    if server.admin_url.get_backend_name() == "postgresql":
        return str(url.username)
    return str(url.database)


class ReplicaFaults:
    """The executors of a service with a replica, which count reads and can be made to fail."""

    def __init__(self, executors: list[FaultyExecutor]) -> None:
        self.primary, self.replica = executors[0], executors[-1]


def with_replica(
    make: Callable[[], EncryptedSessionService],
) -> tuple[EncryptedSessionService, ReplicaFaults]:
    """Return the service that *make* creates, and its executors."""
    made: list[FaultyExecutor] = []

    def wrap(executor: Executor) -> Executor:
        made.append(FaultyExecutor(executor))
        return made[-1]

    with wrapping_executors(wrap):
        service = make()
    return service, ReplicaFaults(made)


APP, USER = "app", "user"
Start = Callable[..., Any]  # the type of the fixture `process`


@pytest.fixture
def copied(server: Server, kind: Kind, url: URL) -> Iterator[CopiedReplica]:
    with server.database() as other:
        yield CopiedReplica(server, url, other.set(drivername=kind.driver))


class Process:
    """A service with a replica, as one process has it."""

    def __init__(self, service: EncryptedSessionService, faults: ReplicaFaults) -> None:
        self.service = service
        self.faults = faults

    async def create(self, session_id: str | None = None, **state: Any) -> Session:
        return await self.service.create_session(
            app_name=APP, user_id=USER, session_id=session_id, state=state
        )

    async def append(self, session: Session, **delta: Any) -> None:
        actions = EventActions(state_delta=delta)
        await self.service.append_event(session, Event(author="user", actions=actions))

    async def get(self, session_id: str, **options: Any) -> Session | None:
        return await self.service.get_session(
            app_name=APP, user_id=USER, session_id=session_id, **options
        )

    async def found(self, session_id: str, **options: Any) -> Session:
        session = await self.get(session_id, **options)
        assert session is not None
        return session

    async def listed(self, user_id: str | None = USER) -> list[str]:
        response = await self.service.list_sessions(app_name=APP, user_id=user_id)
        return sorted(ids(response.sessions))

    async def paged(self, user_id: str | None = USER, limit: int = 2, **options: Any) -> list[str]:
        listed: list[str] = []
        after = None
        while True:
            page = await self.service.list_sessions_page(
                app_name=APP, user_id=user_id, limit=limit, after=after, **options
            )
            listed += ids(page.sessions)
            if (after := page.next) is None:
                return listed

    async def user_state(self) -> dict[str, Any]:
        return await self.service.get_user_state(app_name=APP, user_id=USER)

    def asked(self) -> tuple[int, int]:
        """Return how many queries the replica and the primary have had since the last call."""
        counts = []
        for executor in (self.faults.replica, self.faults.primary):
            counts.append(executor.counts[Point.READ])
            executor.counts.clear()
        return counts[0], counts[1]


@pytest.fixture
async def process(url: URL, copied: CopiedReplica) -> AsyncIterator[Start]:
    """Starts services with a replica, each like another process."""
    async with AsyncExitStack() as stack:

        async def start(**options: Any) -> Process:
            service, faults = with_replica(
                lambda: EncryptedSessionService(
                    url, AesGcmBackend(KEY), **{"read_db_url": copied.url, **options}
                )
            )
            await stack.enter_async_context(service)
            await service.prepare_tables()
            started = Process(service, faults)
            started.asked()
            return started

        yield start
