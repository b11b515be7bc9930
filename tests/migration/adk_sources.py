"""Databases of google-adk's own session services, for the tests of the sources.

How it works: a file lists the kinds of databases with `kind = each_kind("v1-sqlite", soak=[...])`
and imports the fixture `adk`, an `Adk`: an empty database, and google-adk's own service on it.
`assert_same_as_adk` reads everything from a source and compares it with what the service returns.
"""

import atexit
import functools
import json
import sqlite3
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import sqlalchemy as sa
from google.adk.events import Event, EventActions
from google.adk.sessions import BaseSessionService, DatabaseSessionService, Session
from google.adk.sessions.sqlite_session_service import SqliteSessionService
from google.genai import types

from adk_secure_sessions.formats import events, json_text
from adk_secure_sessions.formats.events import microseconds
from adk_secure_sessions.migration import adk_queries
from adk_secure_sessions.migration.adk_queries import TableKind
from adk_secure_sessions.migration.adk_tables import AdkTables
from adk_secure_sessions.migration.pickled_actions import PickleReader
from adk_secure_sessions.migration.sources import (
    ListedSession,
    Selection,
    SessionContent,
    Source,
    Unreadable,
)
from tests.conformance.support import ADK
from tests.servers import Server

ALL = Selection()
START = 1_700_000_000.0
V0 = Path(__file__).parent.parent / "vectors" / "adk_v0.sql"
# The first release that reads schema v0 without loading any pickle.
READS_V0 = ADK >= (2, 8)
# Before, the order of events with equal times was undefined.
ORDERS_TIES = ADK >= (2, 7)

# For each kind: the schema, the driver, and the fixture of the server; None is SQLite.
KINDS: dict[str, tuple[str, str, str | None]] = {
    "v1-sqlite": ("v1", "sqlite+aiosqlite", None),
    "v1-postgresql": ("v1", "postgresql+asyncpg", "postgresql"),
    "v1-psycopg": ("v1", "postgresql+psycopg", "postgresql"),
    "v1-mysql": ("v1", "mysql+asyncmy", "mariadb"),
    "v1-mariadb": ("v1", "mariadb+asyncmy", "mariadb"),
    "v0-sqlite": ("v0", "sqlite+aiosqlite", None),
    "v0-postgresql": ("v0", "postgresql+asyncpg", "postgresql"),
    "v0-mysql": ("v0", "mysql+asyncmy", "mariadb"),
    "sqlite-service": ("sqlite-service", "sqlite+aiosqlite", None),
}
# The drivers with which tests change rows.
_SYNCHRONOUS = {"postgresql": "postgresql+psycopg", "mysql": "mysql+pymysql", "sqlite": "sqlite"}


class Adk(NamedTuple):
    """A database of google-adk, and its service."""

    kind: str
    url: sa.URL
    service: BaseSessionService

    @property
    def is_postgresql(self) -> bool:
        return self.url.get_backend_name() == "postgresql"

    def source(self) -> AdkTables:
        return AdkTables(self.url)

    def run(self, sql: str, *rows: dict[str, Any]) -> None:
        """Change rows behind google-adk's back."""
        backend = self.url.get_backend_name().replace("mariadb", "mysql")
        engine = sa.create_engine(self.url.set(drivername=_SYNCHRONOUS[backend]))
        try:
            with engine.begin() as connection:
                connection.execute(sa.text(sql), list(rows) or [{}])
        finally:
            engine.dispose()


def each_kind(*names: str, soak: Collection[str] = ()) -> Any:
    """Make the fixture `kind`: by default *names*; under `make soak` also those of *soak*."""

    @pytest.fixture(params=[*names, *(pytest.param(name, marks=pytest.mark.soak) for name in soak)])
    def kind(request: pytest.FixtureRequest) -> str:
        found: str = request.param
        return found

    return kind


@pytest.fixture
async def adk(request: pytest.FixtureRequest, kind: str, tmp_path: Path) -> AsyncIterator[Adk]:
    """An empty database of google-adk."""
    schema, driver, fixture = KINDS[kind]
    if schema == "v0" and not READS_V0:
        pytest.skip("this google-adk has no restricted unpickler")
    with ExitStack() as stack:
        url = sa.URL.create(driver, database=f"{tmp_path}/sessions.db")
        if fixture:
            server: Server = request.getfixturevalue(fixture)
            url = stack.enter_context(server.database()).set(drivername=driver)
        if schema == "sqlite-service":
            service = SqliteSessionService(str(url.database))
            await service.list_sessions(app_name="any")  # creates the tables
            yield Adk(kind, url, service)
            return
        if schema == "v0":
            stack.enter_context(one_pickle_reader())
            _create_v0(url)
        database_service = DatabaseSessionService(url.render_as_string(hide_password=False))
        await database_service.list_sessions(app_name="any")  # creates the tables
        yield Adk(kind, url, database_service)
        await database_service.db_engine.dispose()


def _create_v0(url: sa.URL) -> None:
    from google.adk.sessions.schemas import v0

    backend = url.get_backend_name().replace("mariadb", "mysql")
    engine = sa.create_engine(url.set(drivername=_SYNCHRONOUS[backend]))
    v0.Base.metadata.create_all(engine)
    engine.dispose()


@functools.cache
def _pickle_reader() -> PickleReader:
    reader = PickleReader()
    atexit.register(reader.close)
    return reader


@contextmanager
def one_pickle_reader() -> Iterator[None]:
    """Let all sources share the process that loads pickles: to start it takes seconds."""

    class Shared:
        read = staticmethod(_pickle_reader().read)

        def close(self) -> None:
            pass

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adk_queries, "PickleReader", Shared)
        yield


@contextmanager
def frozen_v0(directory: Path) -> Iterator[tuple[sa.URL, dict[str, Any]]]:
    """The database that google-adk 1.20.0 made, and what its `get_session` returned."""
    *lines, returned = V0.read_text(encoding="utf-8").splitlines()
    path = directory / "v0.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript("\n".join(lines))
    url = sa.URL.create("sqlite+aiosqlite", database=str(path))
    yield url, json.loads(returned.removeprefix("-- "))


def said(text: str = "hello", *, at: float = START, **fields: Any) -> Event:
    content = types.Content(role="user", parts=[types.Part(text=text)])
    given = {"author": "user", "invocation_id": "i", "content": content, "timestamp": at}
    return Event(**{**given, **fields})


def setting(at: float = START, **delta: Any) -> Event:
    return said(at=at, actions=EventActions(state_delta=delta))


async def fill(service: BaseSessionService, history: Iterable[Event] = (), **ids: Any) -> Session:
    """Create a session with the events *history*."""
    names = {"app_name": "app", "user_id": "user", **ids}
    session = await service.create_session(**names)
    for event in history:
        session = await append(service, session, event)
    return session


async def append(service: BaseSessionService, session: Session, event: Event) -> Session:
    """Append *event*; return the session to which the next event can be appended.

    With a URL that begins with mariadb, google-adk stores times in whole seconds, and then takes
    every session object for stale that it has not just read.
    """
    try:
        await service.append_event(session, event)
        return session
    except ValueError:
        pass
    found = await service.get_session(
        app_name=session.app_name, user_id=session.user_id, session_id=session.id
    )
    assert found is not None
    found.last_update_time = 1e11  # SqliteSessionService takes an earlier event for stale
    await service.append_event(found, event)
    return found


async def listed(source: Source, selection: Selection = ALL) -> list[ListedSession]:
    return [session async for batch in source.sessions(selection) for session in batch]


async def contents(
    source: Source, selection: Selection = ALL
) -> dict[ListedSession, SessionContent | Unreadable]:
    found: dict[ListedSession, SessionContent | Unreadable] = {}
    async for batch in source.sessions(selection):
        found.update(await source.read(batch))
    return found


async def states_of(
    source: Source, selection: Selection = ALL
) -> tuple[dict[str, Any], dict[tuple[str, str], Any]]:
    """The states of all apps and of all users."""
    apps: dict[str, Any] = {}
    users: dict[tuple[str, str], Any] = {}
    async for batch in source.states(selection):
        for ids, encoded in batch.items():
            state: Any = encoded
            if not isinstance(encoded, Unreadable):
                state = json_text.load_state(encoded)
            if len(ids) == 1:
                assert ids[0] not in apps
                apps[ids[0]] = state
            else:
                assert (ids[0], ids[1]) not in users
                users[ids[0], ids[1]] = state
    return apps, users


def decoded(content: SessionContent | Unreadable) -> list[Event]:
    assert isinstance(content, SessionContent), content
    return [events.decode(event.plaintext, 0, 0) for event in content.events]


async def assert_same_as_adk(service: BaseSessionService, source: Source) -> int:
    """Compare everything in *source* with what *service* returns; return the number of events."""
    apps, users = await states_of(source)
    from_json = source.description in (TableKind.ADK_V1, TableKind.ADK_SQLITE)
    number = 0
    for key, content in (await contents(source)).items():
        expected = await service.get_session(
            app_name=key.app_name, user_id=key.user_id, session_id=key.session_id
        )
        assert expected is not None
        assert [key.app_name, key.user_id, key.session_id] == [
            expected.app_name,
            expected.user_id,
            expected.id,
        ]
        found = decoded(content)
        assert isinstance(content, SessionContent)
        assert [event.id for event in found] == [event.id for event in expected.events]
        for one, other in zip(found, expected.events, strict=True):
            # Without JSON, google-adk returns some enums of AuthConfig; from JSON, their texts.
            if not from_json and other.actions.requested_auth_configs:
                assert one.model_dump(mode="json") == other.model_dump(mode="json")
                continue
            assert one == other
            assert shown(one) == shown(other)
        app, user = apps.get(key.app_name, {}), users.get((key.app_name, key.user_id), {})
        assert not isinstance(app, Unreadable)
        own = json_text.load_state(content.state)
        assert repr(json_text.merge_scopes(app, user, own)) == repr(expected.state)
        assert content.updated_at == microseconds(expected.last_update_time)
        times = [microseconds(event.timestamp) for event in expected.events]
        assert [event.time for event in content.events] == times
        number += len(found)
    return number


def shown(event: Event) -> Sequence[Any]:
    """All values of *event*, to compare types, too: 1 and True are equal."""
    values = event.model_dump()
    ids = values.pop("long_running_tool_ids", None)
    return repr(values), ids
