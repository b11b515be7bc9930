"""Databases for the tests of maintenance, and their content.

`url` (tests/conftest.py) is an empty database for services, and `place` the same one for plain SQL
behind their backs: `run_sql` changes it and `query` reads it.  `fill` has a service write sessions,
events and states; `interrupt` leaves a rotation unfinished.  Two more helpers end or disturb a run
at a chosen statement: tests/faults.py in this process, dying.py in a process that is killed there.
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
from adk_secure_sessions.maintenance import Database

OLD, NEW, OTHER = bytes(range(32)), bytes(range(32, 64)), bytes(range(64, 96))
APP = "clinic"
START = 1_700_000_000.0


def plaintext_backend() -> NoOpBackend:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return NoOpBackend()


def event(number: int, **delta: object) -> Event:
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


async def interrupt(url: str, rotate: Any) -> None:
    """Begin a rotation, and end it with an error when it first reports progress."""

    class Stop(Exception):
        pass

    def stop(done: int, total: int) -> None:
        raise Stop

    async with Database(url, AesGcmBackend(OLD)) as db:
        with pytest.raises(Stop):
            await rotate(db, progress=stop)


def run_sql(place: sa.URL, statement: str, **values: Any) -> int:
    """Change the database behind the services' backs; return how many rows that matched."""
    engine = sa.create_engine(place)
    with closing(engine.connect()) as connection:
        met = connection.execute(sa.text(statement), values).rowcount
        connection.commit()
    engine.dispose()
    return met


def query(place: sa.URL, statement: str) -> list[tuple[Any, ...]]:
    engine = sa.create_engine(place)
    with closing(engine.connect()) as connection:
        rows = [tuple(row) for row in connection.execute(sa.text(statement))]
    engine.dispose()
    return rows
