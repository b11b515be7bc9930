"""google-adk's own service reads all that was exported, and nothing else becomes plaintext.

The source is a SQLite file.  `target` is an empty database of each product, as google-adk's service
gets it; `PLAIN` and `CORPUS` have values and events of every kind.
"""

import asyncio
import base64
import builtins
import io
import json
import math
import os
import sqlite3
import stat
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from google.adk.events import Event
from google.adk.sessions import DatabaseSessionService, Session
from google.adk.sessions.schemas import v1

from adk_secure_sessions import AesGcmBackend, EncryptedSessionService, WrongKeyError
from adk_secure_sessions.db.protocol import Executor
from adk_secure_sessions.errors import ConfigurationError, DatabaseError
from adk_secure_sessions.formats import json_text
from adk_secure_sessions.formats.json_text import same_json
from adk_secure_sessions.maintenance import Database
from adk_secure_sessions.migration import (
    AdkTables,
    AdkTarget,
    Export,
    Selection,
    export_lines,
    export_to_adk,
)
from tests.attacks import needles
from tests.cli.support import run
from tests.conformance.samples import CORPUS
from tests.conformance.values import PLAIN
from tests.faults import FaultyExecutor, Point, wrapping_executors
from tests.maintenance.support import APP, NEW, OLD, START, event, fill, run_sql
from tests.servers import Server

# google-adk warns of its own deprecated parts.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

BACKEND = AesGcmBackend(OLD)
KEY = "env:OLD_KEY"
# The values of PLAIN that PostgreSQL's JSONB rejects.
NOT_IN_JSONB = {"infinity", "minus-infinity", "nul", "lone-surrogate"}
ADK_DRIVERS = {"postgresql": "postgresql+asyncpg", "mariadb": "mysql+asyncmy"}


@pytest.fixture(
    params=["sqlite", "postgresql", pytest.param("mariadb", marks=pytest.mark.soak)],
)
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of an empty database, for google-adk."""
    if request.param == "sqlite":
        yield f"sqlite+aiosqlite:///{tmp_path}/adk.db"
        return
    server: Server = request.getfixturevalue(request.param)
    with server.database() as url:
        driver = ADK_DRIVERS[request.param]
        yield url.set(drivername=driver).render_as_string(hide_password=False)


# What differs between databases is in the statements of google-adk's service, which
# `test_google_adk_reads_what_was_exported` runs on all of them.
servers_later = pytest.mark.parametrize(
    "target",
    ["sqlite", *(pytest.param(name, marks=pytest.mark.soak) for name in ADK_DRIVERS)],
    indirect=True,
)


@pytest.fixture
def adk_file(tmp_path: Path) -> str:
    return f"sqlite+aiosqlite:///{tmp_path}/adk.db"


async def export(source: str, target: str, **options: Any) -> Export:
    async with Database(source, BACKEND) as db, AdkTarget(target) as opened:
        return await export_to_adk(db, opened, **options)


async def lines(source: str, **options: Any) -> list[dict[str, Any]]:
    written: list[bytes] = []
    async with Database(source, BACKEND) as db:
        done = await export_lines(db, written.append, **options)
    assert (done.bad, done.sessions + done.states) == (0, len(written))
    assert (done.verified, done.only_in_target) == (None, None)
    assert all(line.endswith(b"\n") and line.count(b"\n") == 1 for line in written)
    return [json.loads(line) for line in written]


@asynccontextmanager
async def adks_own(url: str) -> AsyncIterator[DatabaseSessionService]:
    service = DatabaseSessionService(url)
    try:
        yield service
    finally:
        await service.db_engine.dispose()


async def everything(of: Any, app_names: tuple[str, ...]) -> dict[tuple[str, str, str], Session]:
    """Return all sessions of these apps with their events."""
    found = {}
    for app_name in app_names:
        for one in (await of.list_sessions(app_name=app_name)).sessions:
            ids = {"app_name": app_name, "user_id": one.user_id, "session_id": one.id}
            found[app_name, one.user_id, one.id] = await of.get_session(**ids)
    return found


def check_equal(ours: Session | None, theirs: Session | None) -> None:
    assert ours is not None
    assert theirs is not None
    assert same_json(theirs.state, ours.state, numbers_may_differ=True)
    assert [one.id for one in theirs.events] == [one.id for one in ours.events]
    for stored, expected in zip(theirs.events, ours.events, strict=True):
        assert same_json(stored.model_dump(), expected.model_dump(), numbers_may_differ=True)
    assert theirs.last_update_time == ours.last_update_time


def reads_times_from_json() -> bool:
    """Whether this release of google-adk keeps the exact times of events."""
    row = v1.StorageEvent(id="e", invocation_id="i", event_data={"author": "a", "timestamp": 2.0})
    row.timestamp = datetime(2001, 1, 1)
    return row.to_event().timestamp == 2.0


# --- all content ---------------------------------------------------------------------------------


async def test_google_adk_reads_what_was_exported(file_url: str, target: str) -> None:
    on_postgresql = target.startswith("postgresql")
    async with EncryptedSessionService(file_url, BACKEND) as of:
        for name, value in PLAIN.items():
            await of.create_session(
                app_name=APP, user_id="values", session_id=name, state={"value": value}
            )
        for name, made in CORPUS.items():
            session = await of.create_session(app_name=APP, user_id="events", session_id=name)
            await of.append_event(session, made())
        expected = await everything(of, (APP,))
    done = await export(file_url, target, skip_bad=True, verify=True)
    unsuitable = {(APP, "values", name) for name in NOT_IN_JSONB}
    for ids, session in expected.items():
        if any("\\u0000" in one.model_dump_json() for one in session.events):
            unsuitable.add(ids)
    bad = unsuitable if on_postgresql else set()
    assert (done.bad, done.sessions) == (len(bad), len(expected) - len(bad))
    # The comparison does not list the sessions again that PostgreSQL cannot hold.
    assert (done.verified, done.different, done.only_in_target) == (len(expected), 0, 0)
    async with adks_own(target) as theirs:
        stored = await everything(theirs, (APP,))
        assert stored.keys() == expected.keys() - bad
        for ids, session in stored.items():
            check_equal(expected[ids], session)


@servers_later
async def test_states_of_all_scopes_ids_and_long_histories_are_exported(
    file_url: str, target: str
) -> None:
    ids = [("b", "", "s"), (APP, "ädä\u2028🎉", "Grüße"), (APP, "a" * 128, "b" * 128)]
    async with EncryptedSessionService(file_url, BACKEND) as of:
        opened = [
            await of.create_session(
                app_name=app_name,
                user_id=user_id,
                session_id=session_id,
                state={"own": 1, "user:u": {"x": [1.5]}, "app:a": 0, "temp:t": 1},
            )
            for app_name, user_id, session_id in ids
        ]
        for number in range(20):  # the sessions take turns, so the states do, too
            session = opened[number % 3]
            await of.append_event(session, event(number, **{"app:a": number, "user:u": number}))
        for number in range(500):
            await of.append_event(opened[1], event(100 + number, n=number))
        expected = await everything(of, (APP, "b"))
    done = await export(file_url, target, verify=True)
    assert done.succeeded
    assert (done.sessions, done.events, done.states) == (3, 520, 5)
    async with adks_own(target) as theirs:
        stored = await everything(theirs, (APP, "b"))
        assert stored.keys() == expected.keys()
        for key, session in stored.items():
            check_equal(expected[key], session)
        # google-adk goes on with the session.
        session = stored[APP, "ädä\u2028🎉", "Grüße"]
        await theirs.append_event(session, event(5000, **{"user:u": "new"}))


async def test_events_keep_their_order_whatever_their_times_are(
    file_url: str, adk_file: str
) -> None:
    """google-adk sorts by time and then by id."""
    async with EncryptedSessionService(file_url, BACKEND) as of:
        session = await of.create_session(app_name=APP, user_id="ada", session_id="s")
        for number, second in enumerate([5, 5, 3, 5, 9, 1]):
            made = event(second)
            made.id = f"id-{9 - number}"
            await of.append_event(session, made)
        expected = await everything(of, (APP,))
    done = await export(file_url, adk_file, verify=True)
    if not reads_times_from_json():
        assert "increasing times" in done.findings[0].detail
        return
    assert done.succeeded
    async with adks_own(adk_file) as theirs:
        stored = await everything(theirs, (APP,))
        check_equal(expected[APP, "ada", "s"], stored[APP, "ada", "s"])


async def test_only_the_given_app_or_user_is_exported(file_url: str, tmp_path: Path) -> None:
    async with EncryptedSessionService(file_url, BACKEND) as of:
        for app_name, user_id in ((APP, "ada"), (APP, "bob"), ("b", "ada"), ("c", "eve")):
            state = {"user:name": user_id, "app:name": app_name}
            await of.create_session(app_name=app_name, user_id=user_id, state=state)
    rows = {"app_states": "app_name", "user_states": "app_name, user_id"}
    rows["sessions"] = rows["user_states"]
    wanted: dict[str, list[list[tuple[str, ...]]]] = {
        "app": [[(APP,)], [(APP, "ada"), (APP, "bob")], [(APP, "ada"), (APP, "bob")]],
        "user": [[("b",), (APP,)], [("b", "ada"), (APP, "ada")], [("b", "ada"), (APP, "ada")]],
    }
    for number, options in enumerate(({"app_name": APP}, {"user_id": "ada"})):
        path = tmp_path / f"{number}.db"
        done = await export(file_url, f"sqlite:///{path}", verify=True, **options)
        assert done.succeeded
        with closing(sqlite3.connect(path)) as connection:
            found = [
                sorted(connection.execute(f"SELECT {columns} FROM {name}"))
                for name, columns in rows.items()
            ]
        assert found == list(wanted.values())[number]


async def test_app_with_another_spelling_is_another_app(file_url: str, mariadb: Server) -> None:
    """The collation of MariaDB ignores case and spaces at the end."""
    with mariadb.database() as url:
        target = url.set(drivername="mysql+asyncmy").render_as_string(hide_password=False)
        async with EncryptedSessionService(file_url, BACKEND) as of:
            for number, app_name in enumerate(("grün ", "GRÜN", "grün")):
                await of.create_session(app_name=app_name, user_id="ada", session_id=f"{number}")
                done = await export(file_url, target, app_name=app_name, verify=True)
                assert (done.sessions, done.verified, done.only_in_target, done.succeeded) == (
                    1,
                    1,
                    0,
                    True,
                )
        async with AdkTables(target) as source:
            selection = Selection("GRÜN")
            assert await source.count(selection) == 1
            listed = [one.ids async for batch in source.sessions(selection) for one in batch]
            assert listed == [("GRÜN", "ada", "1")]


async def test_expired_sessions_are_not_exported(file_url: str, adk_file: str) -> None:
    async with EncryptedSessionService(file_url, BACKEND) as of:
        for name, seconds in (("old", 0.001), ("new", 3600)):
            expires_after = timedelta(seconds=seconds)
            await of.create_session(
                app_name=APP, user_id="ada", session_id=name, expires_after=expires_after
            )
    await asyncio.sleep(0.01)
    assert (await export(file_url, adk_file, verify=True)).sessions == 1
    assert [one["session_id"] for one in await lines(file_url)] == ["new"]


# --- again, and other content --------------------------------------------------------------------


@servers_later
async def test_interrupted_export_can_be_repeated(file_url: str, target: str) -> None:
    await fill(file_url, users=("ada", "bob"), sessions=3)

    class Stop(Exception):
        pass

    def stop(done: int, total: int) -> None:
        raise Stop

    async with Database(file_url, BACKEND) as db, AdkTarget(target) as opened:
        db.limits = db.limits._replace(rows_per_statement=2)
        with pytest.raises(Stop):
            await export_to_adk(db, opened, progress=stop)
    done = await export(file_url, target, verify=True)
    assert (done.sessions, done.unchanged, done.states) == (4, 2, 3)
    again = await export(file_url, target, verify=True)
    assert (again.sessions, again.unchanged, again.states) == (0, 6, 0)
    assert done.succeeded
    assert again.succeeded


async def test_what_the_target_has_is_never_changed(file_url: str, adk_file: str) -> None:
    await fill(file_url, sessions=2)
    async with adks_own(adk_file) as theirs:
        mine = await theirs.create_session(
            app_name=APP, user_id="ada", session_id="s0", state={"mine": 1, "user:mine": 2}
        )
        await theirs.create_session(app_name=APP, user_id="eve", session_id="hers")
        Path(sa.make_url(adk_file).database or "").chmod(0o600)
        done = await export(file_url, adk_file, skip_bad=True, verify=True)
        found = await theirs.get_session(app_name=APP, user_id="ada", session_id="s0")
    assert found is not None
    assert (found.state, found.events) == (mine.state, [])
    assert (done.sessions, done.bad, done.only_in_target) == (3, 2, 1)
    details = [one.detail for one in done.findings if one.kind == "session"]
    assert details[0].startswith("the target has another session with its ids: different: state")
    assert [one.kind for one in done.findings[:2]] == ["session", "user"]


@pytest.mark.parametrize(
    ("statement", "detail"),
    [
        ("DELETE FROM sessions WHERE user_id = 'bob'", "the target does not have it"),
        ("DELETE FROM events WHERE user_id = 'bob'", "different: number of events (3, 0)"),
        ("UPDATE sessions SET state = '{}' WHERE user_id = 'bob'", "different: state"),
        ("UPDATE user_states SET state = '{\"a\": 1}' WHERE user_id = 'bob'", "its state differs"),
        (
            "UPDATE sessions SET create_time = '2001-01-01 00:00:00.000000' WHERE user_id = 'bob'",
            "different: created_at",
        ),
        (
            "UPDATE sessions SET update_time = '2001-01-01 00:00:00.000000' WHERE user_id = 'bob'",
            "different: updated_at",
        ),
        (
            "UPDATE events SET event_data = replace(event_data, 'agent', 'x') "
            "WHERE user_id = 'bob' AND event_data LIKE '%n__1}%'",
            "different: event 2",
        ),
        ("UPDATE events SET invocation_id = 'x' WHERE user_id = 'bob'", "different: event 1"),
    ],
)
async def test_comparison_finds_each_difference(
    file_url: str, adk_file: str, statement: str, detail: str
) -> None:
    await fill(file_url, sessions=1)
    await export(file_url, adk_file)
    async with Database(file_url, BACKEND) as db, AdkTarget(adk_file) as opened:

        def disturb(done: int, total: int) -> None:
            if not disturbed and done >= (total if "user_states" in statement else 1):
                path = sa.make_url(adk_file).set(drivername="sqlite")
                disturbed.append(run_sql(path, statement))

        disturbed: list[int] = []
        # The progress is reported when the sessions were found unchanged, and again before their
        # states are compared.
        done = await export_to_adk(db, opened, verify=True, progress=disturb, skip_bad=True)
    assert disturbed != [0]
    assert not done.succeeded
    assert detail in {one.detail for one in done.findings}


# --- what cannot be exported ---------------------------------------------------------------------


def unsuitable(database: str) -> dict[str, tuple[dict[str, Any], str]]:
    """Return what makes a session unsuitable, and the reason, by the session's id."""
    twins: dict[str, tuple[dict[str, Any], str]] = {
        "twins": ({}, "two of its events have the same id"),
    }
    if database == "sqlite":
        return twins
    too_long = 1406 if database == "mysql" else 22001
    text = f"the target cannot hold one of its values (error {too_long})"
    cases = twins | {"x" * 129: ({}, text), "invocation": ({}, text)}
    if database == "mysql":
        text = "the target already has it, or an id that its collation takes for the same"
        return cases | {"GOOD": ({}, text)}
    return cases | {
        "nul\0": ({}, "one of its ids has a lone surrogate or a NUL character"),
        "text": ({"n": "a\0b"}, "the target cannot hold one of its values (error 22P05)"),
        "nan": ({"n": math.nan}, "the target cannot hold one of its values (error 22P02)"),
    }


async def test_session_that_the_target_cannot_hold_is_reported(file_url: str, target: str) -> None:
    cases = unsuitable(sa.make_url(target).get_backend_name())
    tags = {}
    async with EncryptedSessionService(file_url, BACKEND) as of:
        await of.create_session(app_name=APP, user_id="ada", session_id="good")
        for session_id, (state, _) in cases.items():
            session = await of.create_session(
                app_name=APP, user_id="ada", session_id=session_id, state=state
            )
            made = event(1)
            if session_id == "invocation":
                made.invocation_id = "x" * 257
            await of.append_event(session, made)
            if session_id == "twins":
                await of.append_event(session, made.model_copy(update={"timestamp": START + 2}))
        async with Database(file_url, BACKEND) as db:
            for session_id, (_, reason) in cases.items():
                identity = await db.runner.identify(APP, "ada", session_id)
                tags[identity.session_tag.hex()] = reason
    done = await export(file_url, target, skip_bad=True, verify=True)
    assert {one.tag: one.detail for one in done.findings} == tags
    assert (done.sessions, done.bad, done.stopped) == (1, len(cases), False)
    assert (len(done.findings), done.different) == (len(cases), 0)  # none is listed twice
    stopped = await export(file_url, target)
    assert (stopped.bad, stopped.stopped) == (1, True)


async def test_large_numbers_are_exported(file_url: str, target: str) -> None:
    values = [1e22, 1e23, 1.7976931348623157e308, -0.0, 1e16, 5e-324, 2**70, "1e23", {"1e23": 0.1}]
    async with EncryptedSessionService(file_url, BACKEND) as of:
        await of.create_session(app_name=APP, user_id="ada", state={"values": values})
    assert (await export(file_url, target, verify=True)).succeeded


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE secure_events SET event = x'00' WHERE seq = 1",
        "UPDATE secure_sessions SET revision = revision + 1",
        "UPDATE secure_users SET state = x'00'",
        "UPDATE secure_apps SET state = x'00'",
    ],
)
async def test_content_that_cannot_be_decrypted_is_reported(
    file_url: str, adk_file: str, statement: str
) -> None:
    await fill(file_url, sessions=1)
    run_sql(file_url, statement)
    done = await export(file_url, adk_file, skip_bad=True)
    assert done.bad
    assert not done.stopped
    assert "secure_" in done.findings[0].detail
    stopped = await export(file_url, adk_file)
    assert stopped.stopped
    written: list[bytes] = []
    async with Database(file_url, BACKEND) as db:
        assert (await export_lines(db, written.append)).stopped
        assert (await export_lines(db, written.append, skip_bad=True)).bad


@pytest.mark.parametrize("table", ["sessions", "events"])
async def test_line_has_the_state_of_a_user_whose_sessions_cannot_be_decrypted(
    file_url: str, table: str
) -> None:
    await fill(file_url, users=["ada"], sessions=2)
    async with EncryptedSessionService(file_url, BACKEND) as service:
        session = await service.get_session(app_name=APP, user_id="ada", session_id="s0")
        assert session is not None
        await service.append_event(session, event(9, **{"user:u": 1}))
    column = {"sessions": "state", "events": "event"}[table]
    run_sql(file_url, f"UPDATE secure_{table} SET {column} = x'00'")
    written: list[bytes] = []
    async with Database(file_url, BACKEND) as db:
        done = await export_lines(db, written.append, skip_bad=True)
    assert (done.bad, done.sessions, done.states) == (2, 0, 1)
    (line,) = map(json.loads, written)
    assert (line["session_id"], line["state"]["user"]) == (None, {"u": 1})


async def test_wrong_key_leaves_no_file(file_url: str, adk_file: str, tmp_path: Path) -> None:
    await fill(file_url)
    async with Database(file_url, AesGcmBackend(NEW)) as db, AdkTarget(adk_file) as opened:
        with pytest.raises(WrongKeyError):
            await export_to_adk(db, opened)
    assert not (tmp_path / "adk.db").exists()


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("no url", "not a database URL"),
        ("sqlite://", "must be a file"),
        ("oracle://host/x", "SQLite, PostgreSQL, MySQL or MariaDB"),
    ],
)
def test_target_that_cannot_be_used_is_rejected(url: str, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        AdkTarget(url)


async def test_tables_of_the_older_schema_are_rejected(file_url: str, tmp_path: Path) -> None:
    await fill(file_url)
    path = tmp_path / "v0.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE events (id TEXT, actions BLOB)")
    path.chmod(0o600)
    with pytest.raises(ConfigurationError, match="other tables"):
        await export(file_url, f"sqlite:///{path}")


# --- files ---------------------------------------------------------------------------------------


@pytest.fixture
def _open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.usefixtures("_open_umask")
def test_only_the_owner_can_read_the_files_of_an_export(
    file_url: str, adk_file: str, tmp_path: Path
) -> None:
    asyncio.run(fill(file_url))
    modes: dict[str, int] = {}

    def look(connection: sa.Connection) -> None:
        modes.update({path.name: mode(path) for path in tmp_path.glob("adk.db*")})

    sa.event.listen(sa.Engine, "commit", look)
    try:
        asyncio.run(export(file_url, adk_file))
    finally:
        sa.event.remove(sa.Engine, "commit", look)
    assert modes == {"adk.db": 0o600, "adk.db-journal": 0o600}
    said = run("export", *on(file_url), "--jsonl", f"{tmp_path}/all.jsonl", "--decrypt")
    assert said.code == 0
    assert mode(tmp_path / "all.jsonl") == 0o600
    (tmp_path / "adk.db").chmod(0o640)
    with pytest.raises(ConfigurationError, match="chmod 600"):
        asyncio.run(export(file_url, adk_file))
    (tmp_path / "adk.db").rename(tmp_path / "elsewhere.db").chmod(0o600)
    (tmp_path / "adk.db").symlink_to(tmp_path / "elsewhere.db")
    with pytest.raises(ConfigurationError, match="is a link"):
        asyncio.run(export(file_url, adk_file))


# --- lines ---------------------------------------------------------------------------------------


def test_link_that_replaces_the_new_file_is_not_written_to(
    file_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asyncio.run(fill(file_url))
    path, victim = tmp_path / "all.jsonl", tmp_path / "victim"
    victim.write_text("precious")

    def replace_and_open(really: Any, name: Any, *arguments: Any, **options: Any) -> Any:
        if str(name) == str(path) and path.exists():
            path.unlink()
            path.symlink_to(victim)
        return really(name, *arguments, **options)

    for module in (builtins, io, os):
        monkeypatch.setattr(module, "open", partial(replace_and_open, module.open))
    said = run("export", *on(file_url), "--jsonl", str(path), "--decrypt")
    assert said.code == 0
    assert victim.read_text() == "precious"
    assert not path.is_symlink()


async def test_lines_have_all_that_the_service_returns(file_url: str) -> None:
    async with EncryptedSessionService(file_url, BACKEND) as of:
        session = await of.create_session(
            app_name=APP,
            user_id="ada",
            session_id="Grüße\n\0",
            state={"user:u": 1, "app:a": [2]} | PLAIN,
        )
        for made in CORPUS.values():
            await of.append_event(session, made())
        for ids, state in (((APP, "bob"), {"user:only": True}), (("c", "bob"), {"app:only": 1})):
            who: dict[str, Any] = {"app_name": ids[0], "user_id": ids[1], "session_id": "gone"}
            await of.create_session(**who, state=state)
            await of.delete_session(**who)
        await of.create_session(app_name="b", user_id="eve", session_id="empty")
        expected = await everything(of, (APP,))
    first, second, third, last = await lines(file_url)
    assert list(first) == [
        *("format", "app_name", "user_id", "session_id"),
        *("created_at", "updated_at", "expires_at", "state", "events"),
    ]
    ours = expected[APP, "ada", session.id]
    assert (first["format"], first["session_id"]) == (1, session.id)
    scopes = first["state"]
    merged = json_text.merge_scopes(scopes["app"], scopes["user"], scopes["session"])
    assert same_json(merged, ours.state, numbers_may_differ=True)
    events = [Event.model_validate(one) for one in first["events"]]
    for stored, one in zip(events, ours.events, strict=True):
        assert same_json(stored.model_dump(), one.model_dump(), numbers_may_differ=True)
    assert first["updated_at"].endswith("Z")
    assert (second["session_id"], second["events"]) == ("empty", [])
    assert (third["user_id"], third["session_id"]) == ("bob", None)
    assert third["state"] == {**scopes, "user": {"only": True}, "session": {}}
    assert [last[name] for name in ("app_name", "user_id", "session_id")] == ["c", None, None]
    assert last["state"] == {"app": {"only": 1}, "user": {}, "session": {}}
    assert [one["user_id"] for one in await lines(file_url, user_id="bob")] == ["bob", None]
    assert [one["app_name"] for one in await lines(file_url, app_name="b")] == ["b"]


# --- the command ---------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLD_KEY", base64.b64encode(OLD).decode())


def on(url: str) -> list[str]:
    return ["--db", url, "--key", KEY]


async def fill_with_needles(url: str) -> None:
    async with EncryptedSessionService(url, BACKEND) as of:
        session = await of.create_session(
            app_name=needles.APP,
            user_id=needles.USER,
            session_id=needles.SESSION,
            state=needles.state(),
        )
        await of.append_event(session, needles.new_event(needles.state()))


def test_nothing_is_decrypted_without_the_word(file_url: str, tmp_path: Path) -> None:
    asyncio.run(fill_with_needles(file_url))
    before = sorted(tmp_path.iterdir())
    for output in (
        ["--to", f"sqlite:///{tmp_path}/a.db"],
        ["--jsonl", f"{tmp_path}/a"],
        ["--jsonl", "-"],
    ):
        said = run("export", *on(file_url), *output)
        assert said.code == 2
        assert "add --decrypt" in said.stderr
        assert needles.found_in(said.stdout + said.stderr) == set()
    assert sorted(tmp_path.iterdir()) == before


def test_command_exports_and_compares(file_url: str, tmp_path: Path) -> None:
    asyncio.run(fill(file_url))
    output = ["--to", f"sqlite:///{tmp_path}/adk.db", "--decrypt", "--verify"]
    said = run("export", *on(file_url), *output)
    assert (said.code, said.stdout) == (
        0,
        "exported as plaintext: 4 sessions, 12 events\ncompared: 4 sessions\n",
    )
    lines = run("export", *on(file_url), "--jsonl", "-", "--decrypt", "--user", "ada")
    assert [json.loads(line)["user_id"] for line in lines.stdout.splitlines()] == ["ada", "ada"]
    assert lines.stderr == "exported as plaintext: 2 sessions, 6 events\n"
    nobody = run("export", *on(file_url), "--jsonl", "-", "--decrypt", "--user", "typo")
    assert nobody.stderr.splitlines()[1:] == [
        "there is nothing to export: if you gave --app or --user, check the name"
    ]
    file = ["--jsonl", f"{tmp_path}/ada.jsonl", "--decrypt", "--user", "ada"]
    assert run("export", *on(file_url), *file).code == 0
    assert (tmp_path / "ada.jsonl").read_text() == lines.stdout
    said = run("export", *on(file_url), *file)
    assert (said.code, said.stdout) == (2, "")
    assert "exists already, and a file is not overwritten" in said.stderr
    assert (tmp_path / "ada.jsonl").read_text() == lines.stdout


def test_export_that_fails_leaves_no_file_of_lines_and_continues_in_a_database(
    file_url: str, tmp_path: Path
) -> None:
    asyncio.run(fill(file_url))
    path = tmp_path / "a.jsonl"

    def wrap(executor: Executor) -> Executor:
        faulty = FaultyExecutor(executor)
        faulty.before(Point.READ, DatabaseError("gone"), when=reads_a_session)
        return faulty

    to_lines, to_adk = ["--jsonl", str(path)], ["--to", f"sqlite:///{tmp_path}/a.db"]
    for output in (to_lines, ["--jsonl", "-"], to_adk):
        with wrapping_executors(wrap):
            said = run("export", *on(file_url), *output, "--decrypt")
        again = (
            "the target has only a part of the sessions, as plaintext: to continue, run the same"
        )
        assert said.code == 2
        assert "delete" not in said.stderr
        assert not path.exists()
        assert (again in said.stderr) == (output is to_adk)
    for output in (to_lines, to_adk):
        assert run("export", *on(file_url), *output, "--decrypt").code == 0


def test_no_plaintext_is_written_to_an_encrypted_database(file_url: str, tmp_path: Path) -> None:
    asyncio.run(fill(file_url))
    file = Path(sa.make_url(file_url).database or "")
    (tmp_path / "linked").symlink_to(file.parent, target_is_directory=True)
    other, keys = (f"sqlite:///{tmp_path}/{name}.db" for name in ("other", "keys"))
    assert run("init", *on(other), "--key-db", keys).code == 0
    for url in (file_url, f"sqlite:///{tmp_path}/linked/{file.name}", other, keys):
        path = Path(sa.make_url(url).database or "")
        path.chmod(0o600)
        said = run("export", *on(file_url), "--to", url, "--decrypt")
        assert (said.code, "is an encrypted database" in said.stderr) == (2, True)
        assert b"app_states" not in path.read_bytes()


def test_export_that_stops_says_how_to_continue_and_no_content(
    file_url: str, tmp_path: Path
) -> None:
    asyncio.run(fill_with_needles(file_url))
    run_sql(file_url, "UPDATE secure_events SET event = x'00'")
    path = tmp_path / "a.jsonl"
    for output, first in (
        (["--to", f"sqlite:///{tmp_path}/a.db"], ""),
        (["--jsonl", str(path)], f"delete '{path}', and then "),
    ):
        command = ["export", *on(file_url), *output, "--decrypt"]
        said = run(*command)
        advice = f"to export the other sessions, {first}run the same command again with --skip-bad"
        assert (said.code, f"stopped there: {advice}" in said.stdout) == (1, True)
        assert "session " in said.stdout
        path.unlink(missing_ok=True)
        again = run(*command, "--skip-bad", "--json")
        assert (again.code, again.json["bad"], again.json["stopped"]) == (1, 1, False)
        assert needles.found_in(said.stdout + said.stderr + again.stdout) == set()


def reads_a_session(step: Any, answer: Any) -> bool:
    return "session_tag" in step.parameters


@pytest.mark.parametrize(
    ("output", "text"),
    [
        ([], "either --to URL or --jsonl FILE"),
        (["--to", "sqlite:///a.db", "--jsonl", "a"], "either --to URL or --jsonl FILE"),
        (["--jsonl", "a", "--verify"], "give it with --to"),
        (["--jsonl", "-", "--json"], "give --json with --jsonl FILE"),
    ],
)
def test_wrong_usage_is_rejected(output: list[str], text: str, tmp_path: Path) -> None:
    said = run("export", *on(f"sqlite:///{tmp_path}/x.db"), *output, "--decrypt")
    assert said.code == 2
    assert text in said.stderr
