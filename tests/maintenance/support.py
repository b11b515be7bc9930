"""Databases for the tests of maintenance, and their content.

`url` (tests/conftest.py) is an empty database for services, and `place` the same one for plain SQL
behind their backs: `run_sql` changes it, `query` and `all_rows` read it.  `fill` has a service
write sessions, events and states, `content` reads them, and `assert_whole` verifies the database.
`interrupt` leaves a rotation unfinished.  Two more helpers end or disturb a run at a chosen
statement: tests/faults.py in this process, dying.py in a process that is killed there.
"""

import warnings
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import pytest
import sqlalchemy as sa
from google.adk.events.event import Event
from google.adk.events.event_actions import EventActions

from adk_secure_sessions import (
    AesGcmBackend,
    EncryptedSessionService,
    EncryptionBackend,
    NoOpBackend,
)
from adk_secure_sessions.maintenance import (
    Database,
    Verification,
    rotate_data,
    rotate_master,
    verify,
)
from adk_secure_sessions.storage.schema import metadata

OLD, NEW, OTHER = bytes(range(32)), bytes(range(32, 64)), bytes(range(64, 96))
APP = "clinic"
START = 1_700_000_000.0
ROTATIONS: dict[str, Any] = {"master": rotate_master, "data": rotate_data}


class Killed(Exception):
    """Ends a run of a command, as if its process had been killed."""


def plaintext_backend() -> NoOpBackend:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return NoOpBackend()


def event(number: int = 0, **delta: object) -> Event:
    return Event(
        author="agent",
        invocation_id="i",
        timestamp=START + number,
        actions=EventActions(state_delta=delta),
    )


async def fill(
    url: str,
    backend: EncryptionBackend | None = None,
    *,
    others: Sequence[EncryptionBackend] = (),
    users: Sequence[str] = ("ada", "bob"),
    sessions: int = 2,
    events: int = 3,
    name: str = "s",
) -> None:
    """*sessions* for each of *users*, each with *events*, a second apart."""
    async with EncryptedSessionService(url, backend or AesGcmBackend(OLD), others) as service:
        for user in users:
            for number in range(sessions):
                session = await service.create_session(
                    app_name=APP, user_id=user, session_id=f"{name}{number}", state={"n": number}
                )
                for n in range(events):
                    await service.append_event(session, event(n, n=n))


async def content(service: EncryptedSessionService) -> dict[tuple[str, str], str]:
    """All sessions as *service* reads them, as JSON, by user and id; it is closed afterwards."""
    found = {}
    async with service:
        for one in (await service.list_sessions(app_name=APP)).sessions:
            who: dict[str, Any] = {"app_name": APP, "user_id": one.user_id, "session_id": one.id}
            session = await service.get_session(**who)
            assert session is not None
            found[one.user_id, one.id] = session.model_dump_json()
    return found


async def assert_whole(url: str | sa.URL, *backends: EncryptionBackend) -> Verification:
    """`verify` finds nothing wrong with *backends*, by default with that of `fill`."""
    backend, *others = backends or (AesGcmBackend(OLD),)
    async with Database(url, backend, others) as db:
        found = await verify(db)
    assert (found.bad, found.unchecked, found.problems) == (0, 0, ())
    return found


async def interrupt(url: str, rotate: Any, backend: EncryptionBackend | None = None) -> None:
    """Begin a rotation, and end it with an error when it first reports progress."""

    def stop(done: int, total: int) -> None:
        raise Killed

    async with Database(url, backend or AesGcmBackend(OLD)) as db:
        db.limits = db.limits._replace(ids_per_statement=1)
        with pytest.raises(Killed):
            await rotate(db, progress=stop)


def engine_of(place: sa.URL | str) -> sa.Engine:
    """Open a place; a text is the URL of a service, of a SQLite file."""
    if isinstance(place, str):
        place = sa.make_url(place).set(drivername="sqlite")
    return sa.create_engine(place)


def run_sql(place: sa.URL | str, statement: str, **values: Any) -> int:
    """Change the database behind the services' backs; return how many rows that matched."""
    engine = engine_of(place)
    with closing(engine.connect()) as connection:
        met = connection.execute(sa.text(statement), values).rowcount
        connection.commit()
    engine.dispose()
    return met


def query(place: sa.URL | str, statement: str) -> list[tuple[Any, ...]]:
    engine = engine_of(place)
    with closing(engine.connect()) as connection:
        rows = [tuple(row) for row in connection.execute(sa.text(statement))]
    engine.dispose()
    return rows


def all_rows(place: sa.URL | str) -> dict[str, list[tuple[Any, ...]]]:
    """The rows of each table, in an order that does not depend on the database."""
    return {
        name: sorted(query(place, f"SELECT * FROM {name}"), key=repr) for name in metadata.tables
    }
