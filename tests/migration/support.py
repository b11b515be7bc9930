"""Targets of migrations: `Database` objects and services on them, with one key."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from google.adk.sessions import Session

from adk_secure_sessions import AesGcmBackend, EncryptedSessionService
from adk_secure_sessions.formats.json_text import load_state
from adk_secure_sessions.maintenance import Database
from adk_secure_sessions.migration import Migration, Selection, Source, migrate
from adk_secure_sessions.migration.sources import SessionContent, Unreadable
from adk_secure_sessions.results import Result
from tests.maintenance.support import event as adk_event
from tests.migration.memory_source import APP

KEY = bytes(range(32))
ALL = Selection()


def database(url: str) -> Database:
    return Database(url, AesGcmBackend(KEY))


@asynccontextmanager
async def service(url: str) -> AsyncIterator[EncryptedSessionService]:
    async with EncryptedSessionService(url, AesGcmBackend(KEY)) as made:
        yield made


async def copy(
    source: Source, url: str, selection: Selection | None = None, **options: Any
) -> Migration:
    async with database(url) as db:
        return await migrate(source, db, selection=selection or Selection(), **options)


def numbers(done: Result) -> dict[str, int]:
    """The counts that are not 0."""
    return {name: value for name, value in vars(done).items() if type(value) is int and value}


async def stored(url: str, user: str, session: str) -> Session | None:
    async with service(url) as made:
        return await made.get_session(app_name=APP, user_id=user, session_id=session)


async def append(
    url: str, user: str, session: str, *, number: int = 100, delta: dict[str, Any] | None = None
) -> None:
    """Have a service append an event to a session in the target."""
    async with service(url) as made:
        found = await made.get_session(app_name=APP, user_id=user, session_id=session)
        assert found is not None
        await made.append_event(found, adk_event(number, **(delta or {})))


async def delete(url: str, user: str, session: str) -> None:
    async with service(url) as made:
        await made.delete_session(app_name=APP, user_id=user, session_id=session)


async def contents(
    source: Source, selection: Selection = ALL
) -> dict[tuple[str, ...], SessionContent | Unreadable]:
    found: dict[tuple[str, ...], SessionContent | Unreadable] = {}
    async for batch in source.sessions(selection):
        read = await source.read(batch)
        assert set(read) <= set(batch)
        found |= {one.ids: content for one, content in read.items()}
    return found


async def states(source: Source, selection: Selection = ALL) -> dict[object, Any]:
    """The states of apps by name, and of users by app name and user id."""
    found: dict[object, Any] = {}
    async for batch in source.states(selection):
        for ids, state in batch.items():
            found[ids[0] if len(ids) == 1 else ids] = (
                state if isinstance(state, Unreadable) else load_state(state)
            )
    return found
