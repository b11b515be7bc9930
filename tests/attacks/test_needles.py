"""No file, log, warning or error contains what users say, or their ids."""

import asyncio
import io
import re
import sqlite3
import time
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, closing, contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from google.adk.events.event import Event
from google.adk.sessions import Session
from google.adk.sessions.base_session_service import GetSessionConfig
from sqlalchemy.ext.asyncio import create_async_engine

from adk_secure_sessions import (
    AesGcmBackend,
    Audit,
    Caches,
    DatabaseError,
    EncryptedSessionService,
    EncryptionBackend,
    FernetBackend,
    SecureSessionError,
    generate_key,
)
from tests.attacks.needles import (
    APP,
    NAMES,
    NEEDLES,
    SESSION,
    USER,
    Awkward,
    all_logged,
    files_of,
    found_in,
    large_state,
    locals_of,
    needle,
    new_event,
    state,
)
from tests.faults import Point, with_faults
from tests.maintenance.support import plaintext_backend
from tests.servers import Server, for_service, mariadb, postgresql

KEY = generate_key()
WHO: dict[str, Any] = {"app_name": APP, "user_id": USER, "session_id": SESSION}
BACKENDS: dict[str, Callable[[], EncryptionBackend]] = {
    "aesgcm": lambda: AesGcmBackend(KEY),
    "fernet": lambda: FernetBackend(KEY),
}
Opener = Callable[..., Any]


@contextmanager
def everything_logged(*, every_callback: bool = False) -> Iterator[io.StringIO]:
    """Collect what every logger writes, also the event loop in debug mode, and all warnings."""
    loop = asyncio.get_running_loop()
    with all_logged() as text:
        loop.set_debug(every_callback)
        loop.slow_callback_duration = 0  # asyncio then logs every callback and task
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                yield text
            text.writelines(f"{warning.message}\n" for warning in caught)
        finally:
            loop.set_debug(False)


@asynccontextmanager
async def opened(
    url: str | sa.URL, backend: EncryptionBackend, *, as_engine: bool = False, **options: Any
) -> AsyncIterator[EncryptedSessionService]:
    """A caller's own engine logs its statements with their parameters."""
    if not as_engine:
        async with EncryptedSessionService(url, backend, echo="debug", **options) as service:
            yield service
        return
    engine = create_async_engine(url, echo="debug", **options)
    try:
        async with EncryptedSessionService(db_engine=engine, backend=backend) as service:
            yield service
    finally:
        await engine.dispose()


def on_file(path: Path, backend: EncryptionBackend, *, as_engine: bool = False) -> Any:
    url = f"sqlite+aiosqlite:///{path}"
    return opened(url, backend, as_engine=as_engine, connect_args={"timeout": 0.05})


@pytest.fixture(params=[False, True], ids=["URL", "engine"])
def open_service(request: pytest.FixtureRequest) -> Opener:
    return partial(on_file, as_engine=request.param)


async def use(service: EncryptedSessionService) -> Session:
    """Run every operation, with a needle in everything that is stored."""
    session = await service.create_session(**WHO, state=state())
    await service.append_event(session, new_event(state()))
    await service.append_event(session, new_event(state() | large_state()))
    awkward = new_event({"awkward": Awkward()}, with_bytes=False, odd=Awkward())
    await service.append_event(session, awkward)
    for config in (
        None,
        GetSessionConfig(num_recent_events=1),
        GetSessionConfig(after_timestamp=1),
    ):
        assert await service.get_session(**WHO, config=config)
    for user_id in (USER, None):
        assert (await service.list_sessions(app_name=APP, user_id=user_id)).sessions
    assert await service.get_user_state(app_name=APP, user_id=USER)
    other = WHO | {"session_id": SESSION + "2"}
    await service.create_session(**other, state=large_state() | state())
    await service.delete_session(**other)
    return session


@pytest.mark.parametrize("backend", BACKENDS)
async def test_files_and_logs_contain_nothing_of_what_users_say(
    tmp_path: Path, open_service: Opener, backend: str, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "sessions.db"
    with everything_logged(every_callback=True) as log:
        async with open_service(path, BACKENDS[backend]()) as service:
            await use(service)
            # While the service is open: then there is a write-ahead log.
            for name, data in files_of(path).items():
                assert found_in(data) == set(), name
        files = files_of(path)
    for name, data in files.items():
        assert found_in(data) == set(), name
    assert any(APP.encode() in data for data in files.values()), "the search finds nothing at all"
    assert log.getvalue(), "nothing was logged"
    assert found_in(log.getvalue()) == set()
    shown = capfd.readouterr()
    assert found_in(shown.out + shown.err) == set()


@pytest.mark.parametrize("as_engine", [False, True], ids=["URL", "engine"])
async def test_debug_log_of_asyncio_shows_no_end_of_a_result(url: str, as_engine: bool) -> None:
    """asyncio shortens the results of tasks and futures that it logs, but shows their ends."""
    who: dict[str, Any] = {"app_name": "clinic", "user_id": "ada", "session_id": "s"}
    with everything_logged(every_callback=True) as log:
        async with opened(url, AesGcmBackend(KEY), as_engine=as_engine) as service:
            session = await service.create_session(**who, state={"k": "NEEDLE", "user:k": "NEEDLE"})
            await service.append_event(session, Event(author="NEEDLE"))
            await service.get_session(**who)
            await service.list_sessions(app_name="clinic")
            await service.delete_session(**who)
    assert "Executing <" in log.getvalue()
    assert "NEEDLE" not in log.getvalue()


async def assert_all_found(opening: Any, files: Callable[[], dict[str, bytes]]) -> None:
    """The control: under NoOpBackend every needle is in the files, except those of `temp:` keys."""
    async with opening as service:
        await use(service)
        found = set().union(*(found_in(data) for data in files().values()))
    assert set(NEEDLES) - found == {needle("temporary key"), needle("temporary value")}


async def test_search_finds_what_is_not_encrypted(tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"
    await assert_all_found(on_file(path, plaintext_backend()), lambda: files_of(path))
    assert len(NEEDLES) == len(NAMES) + 2


# --- servers -------------------------------------------------------------------------------------


@pytest.fixture(params=["postgresql", pytest.param("mariadb", marks=pytest.mark.soak)])
def logging_server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server that logs every statement and its parameters."""
    if request.param == "postgresql":
        with postgresql("-clog_statement=all") as server:
            yield server
    else:
        with mariadb("--general-log", "--innodb-flush-log-at-trx-commit=2") as server:
            yield server


def written_by(server: Server, since: float) -> dict[str, bytes]:
    """The files that a server has written since then: tables, redo and undo logs, statements."""
    server.flush()
    assert server.directory is not None
    files = [file for file in server.directory.rglob("*") if file.is_file()]
    files = [file for file in files if file.stat().st_mtime >= since]
    return {file.name: re.sub(rb"\0{64,}", b"\0", file.read_bytes()) for file in files}


async def test_server_and_its_logs_contain_nothing_of_what_users_say(
    logging_server: Server,
) -> None:
    errors = Errors()
    began = time.time() - 1  # the clock of files is coarser
    with everything_logged() as log, ExitStack() as stack:
        for backend, as_engine in zip(BACKENDS.values(), (False, True), strict=True):
            url = for_service(stack.enter_context(logging_server.database()))
            async with opened(url, backend(), as_engine=as_engine) as service:
                await use(service)
                await ordinary_errors(service, errors)
        files = written_by(logging_server, began)
    for name, data in files.items():
        assert found_in(data) == set(), name
    errors.assert_none_contains_a_needle()
    assert found_in(log.getvalue()) == set()
    with logging_server.database() as place:
        plain = opened(for_service(place), plaintext_backend())
        await assert_all_found(plain, lambda: written_by(logging_server, began))


# --- errors --------------------------------------------------------------------------------------


class Errors:
    """Collects what each attempt raises."""

    def __init__(self) -> None:
        self.raised: dict[str, BaseException] = {}

    async def of(self, name: str, attempt: Awaitable[object]) -> None:
        error: BaseException | None = None
        try:
            await attempt
        except Exception as caught:
            error = caught
        assert error is not None, f"{name} raised nothing"
        self.raised[name] = error

    def assert_none_contains_a_needle(self) -> None:
        for name, error in self.raised.items():
            assert found_in(locals_of(error)) == set(), f"{name}: {error!r}"


def change(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA synchronous = OFF")
        for statement in statements:
            connection.execute(statement)


async def ordinary_errors(service: EncryptedSessionService, errors: Errors) -> None:
    session = await service.get_session(**WHO)
    assert session is not None
    stale = session.model_copy(deep=True)
    await service.append_event(session, new_event(state()))
    await errors.of("stale", service.append_event(stale, new_event(state())))
    await errors.of("taken", service.create_session(**WHO, state=state()))
    gone = session.model_copy(update={"id": SESSION + "3"}, deep=True)
    await errors.of("not found", service.append_event(gone, new_event(state())))
    handmade = Session(id=SESSION + "4", app_name=APP, user_id=USER, state=state())
    await errors.of("handmade", service.append_event(handmade, new_event(state())))
    handmade = Session(id=SESSION, app_name=APP, user_id=USER, state=state(), events=[])
    await errors.of("handmade, stale", service.append_event(handmade, new_event(state())))
    # ADK keeps the marker in a private attribute.
    session._storage_update_marker = needle("session value")
    await errors.of("strange marker", service.append_event(session, new_event(state())))
    circle: dict[str, Any] = state()
    circle["circle"] = circle
    await errors.of("circle", service.create_session(app_name=APP, user_id=USER, state=circle))
    wrong: Any = [USER]
    await errors.of("ids", service.create_session(app_name=APP, user_id=wrong, state=state()))
    await errors.of("ids", service.get_session(app_name=APP, user_id=USER, session_id=wrong))
    odd: Any = {1: needle("session value")}
    await errors.of("keys", service.create_session(app_name=APP, user_id=USER, state=odd))
    late = new_event(state())
    late.timestamp = float("nan")
    fresh = await service.get_session(**WHO)
    assert fresh is not None
    await errors.of("time", service.append_event(fresh, late))


async def storage_errors(service: EncryptedSessionService, path: Path, errors: Errors) -> None:
    session = await service.get_session(**WHO)
    assert session is not None
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        await errors.of("locked", service.append_event(session, new_event(state())))
        await errors.of("locked", service.create_session(app_name=APP, user_id=USER, state=state()))
    for table in ("secure_events", "secure_witnesses", "secure_data_keys"):
        trigger = f"CREATE TRIGGER reject BEFORE INSERT ON {table}"
        change(path, f"{trigger} BEGIN SELECT RAISE(ABORT, 'no'); END")
        if table == "secure_events":
            await errors.of("trigger", service.append_event(session, new_event(state())))
        else:
            other: dict[str, Any] = {
                "app_name": APP,
                "user_id": USER + table,
                "session_id": SESSION + "5",
            }
            await errors.of("trigger", service.create_session(**other, state=state()))
        change(path, "DROP TRIGGER reject")
    change(path, "ALTER TABLE secure_events RENAME TO away")
    await errors.of("no table", service.append_event(session, new_event(state())))
    await errors.of("no table", service.get_session(**WHO))
    change(path, "ALTER TABLE away RENAME TO secure_events")


async def tampering_errors(service: EncryptedSessionService, path: Path, errors: Errors) -> None:
    session = await service.get_session(**WHO)
    assert session is not None
    before = session.model_copy(deep=True)
    columns = [
        ("secure_events", "event"),
        ("secure_bases", "state"),
        ("secure_sessions", "state"),
        ("secure_users", "state"),
        ("secure_apps", "state"),
        ("secure_witnesses", "seal"),
    ]
    values = [
        "CAST(substr({}, 1, length({}) - 1) AS BLOB)",
        "x''",
        "'text'",
        "CAST({} AS TEXT)",
        "CAST(replace({}, x'414b5302', x'414b5303') AS BLOB)",
        "x'414b5302' || x'03' || zeroblob(8)",
        "x'414b5302' || x'01' || zeroblob(30)",
    ]
    for table, column in columns:
        change(path, f"CREATE TABLE kept AS SELECT * FROM {table}")
        for value in values:
            change(path, f"UPDATE {table} SET {column} = {value.replace('{}', column)}")
            name = f"{table} {value}"
            await errors.of(name, service.get_session(**WHO))
            if table in ("secure_users", "secure_apps"):
                await errors.of(name, service.append_event(session, new_event(state())))
                await errors.of(name, service.create_session(app_name=APP, user_id=USER))
            change(path, f"DELETE FROM {table}", f"INSERT INTO {table} SELECT * FROM kept")
        change(path, "DROP TABLE kept")
    for table in ("secure_sessions", "secure_users", "secure_apps", "secure_witnesses"):
        change(path, f"CREATE TABLE kept AS SELECT * FROM {table}", f"DELETE FROM {table}")
        await errors.of(f"{table} emptied", service.get_session(**WHO))
        change(path, f"INSERT INTO {table} SELECT * FROM kept", "DROP TABLE kept")
    assert await service.get_session(**WHO) == before


async def key_errors(opener: Opener, path: Path, errors: Errors) -> None:
    async with opener(path, AesGcmBackend(generate_key())) as wrong:
        await errors.of("wrong key", wrong.prepare_tables())
        await errors.of("wrong key", wrong.create_session(**WHO, state=state()))
        await errors.of("wrong key", wrong.get_session(**WHO))
    async with opener(path, FernetBackend(KEY)) as other:
        await errors.of("other backend", other.get_session(**WHO))
        await errors.of("other backend", other.list_sessions(app_name=APP, user_id=USER))


async def test_errors_contain_nothing_of_what_users_say(
    tmp_path: Path, open_service: Opener, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "sessions.db"
    errors = Errors()
    with everything_logged() as log:
        async with AsyncExitStack() as stack:
            backend = BACKENDS["aesgcm"]()
            service = await stack.enter_async_context(open_service(path, backend))
            await use(service)
            await ordinary_errors(service, errors)
            await storage_errors(service, path, errors)
            await tampering_errors(service, path, errors)
        await key_errors(open_service, path, errors)
        for name, data in files_of(path).items():
            assert found_in(data) == set(), name
    assert len(errors.raised) > 50
    errors.assert_none_contains_a_needle()
    assert found_in(log.getvalue()) == set()
    shown = capfd.readouterr()
    assert found_in(shown.out + shown.err) == set()


WITH_MANY_COPIES: dict[str, Any] = {"cache": Caches(events=10**7), "indexed_state_keys": ["nested"]}
AUDITED: dict[str, Any] = {"audit": Audit("blind", table=True)}


@pytest.mark.parametrize(
    "options", [{}, WITH_MANY_COPIES, AUDITED], ids=["plain", "copies", "audit"]
)
@pytest.mark.parametrize("kind", [MemoryError, DatabaseError, asyncio.CancelledError])
async def test_failure_at_any_statement_shows_no_local_variables(
    tmp_path: Path, options: dict[str, Any], kind: type[BaseException]
) -> None:
    """An error reporter records the local variables of all frames in a traceback."""
    url = f"sqlite:///{tmp_path}/sessions.db"
    service, faults = with_faults(
        lambda: EncryptedSessionService(url, BACKENDS["aesgcm"](), **options)
    )
    raised: list[tuple[str, BaseException]] = []
    async with service:
        session = await use(service)
        other: dict[str, Any] = {"app_name": APP, "user_id": USER, "state": state()}
        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "get": lambda: service.get_session(**WHO),
            "get again": lambda: service.get_session(**WHO),
            "list": lambda: service.list_sessions(app_name=APP),
            "list of a user": lambda: service.list_sessions(app_name=APP, user_id=USER),
            "create": lambda: service.create_session(**other),
            "append": lambda: service.append_event(session, new_event(state())),
            "state": lambda: service.get_user_state(app_name=APP, user_id=USER),
        }
        for name, call in calls.items():
            points = (Point.READ, Point.APPLY, Point.WRITE)
            for point, nth, is_after in product(points, (1, 2), (False, True)):
                plan = faults.data.after if is_after else faults.data.before
                plan(point, kind(), nth=nth)
                try:
                    await call()
                except BaseException as error:
                    raised.append((name, error))
                faults.data.forget()
    for name, failure in raised:
        assert isinstance(failure, kind | SecureSessionError | ValueError), f"{name}: {failure!r}"
        assert found_in(locals_of(failure)) == set(), name
    assert {name for name, _ in raised} == set(calls)


async def test_event_that_cannot_be_read_is_named_and_not_quoted(
    tmp_path: Path, open_service: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An event of a newer google-adk, with fields that the installed one forbids.

    The encoder is replaced: with the installed google-adk nothing else writes such an event.
    """

    def encode_as_newer_adk(event: Event) -> bytes:
        data = event.model_dump_json(exclude_none=True).encode()
        assert b'"actions":{' in data
        field = f'"actions":{{"{needle("nested key")}":"{needle("nested value")}",'.encode()
        return b"\x069.99.9" + data.replace(b'"actions":{', field)

    errors = Errors()
    with everything_logged() as log:
        async with open_service(tmp_path / "sessions.db", BACKENDS["aesgcm"]()) as service:
            session = await service.create_session(**WHO, state=state())
            with monkeypatch.context() as patch:
                patch.setattr("adk_secure_sessions.formats.events.encode", encode_as_newer_adk)
                await service.append_event(session, new_event(state()))
            await errors.of("all", service.get_session(**WHO))
            last = GetSessionConfig(num_recent_events=1)
            await errors.of("last", service.get_session(**WHO, config=last))
    errors.assert_none_contains_a_needle()
    assert found_in(log.getvalue()) == set()
    assert "9.99.9" in str(errors.raised["all"])
    assert "secure_events" in str(errors.raised["all"])


async def test_values_without_a_json_form_are_stored_as_text_with_a_warning_that_quotes_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with everything_logged() as log:
        async with on_file(tmp_path / "sessions.db", BACKENDS["aesgcm"]()) as service:
            created = await service.create_session(**WHO, state={"awkward": Awkward()})
            assert created.state["awkward"] == needle("object")
            event = new_event({"more": Awkward()}, odd=Awkward())
            await service.append_event(created, event)
            found = await service.get_session(**WHO)
            assert found is not None
            assert found.state["more"] == needle("object")
            assert found.events[0].content == event.content
            metadata = found.events[0].custom_metadata
            assert metadata is not None
            assert metadata["odd"] == needle("object")
    assert "not JSON-serializable" in log.getvalue()
    assert found_in(log.getvalue()) == set()
