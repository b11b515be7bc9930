"""`EncryptedSource` reads what the services of a database return, and nothing that they reject."""

from datetime import timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa

from adk_secure_sessions import (
    AesGcmBackend,
    ConfigurationError,
    EncryptedSessionService,
    EncryptionBackend,
    FernetBackend,
    WrongKeyError,
)
from adk_secure_sessions.formats import json_text
from adk_secure_sessions.formats.events import decode, encode_item
from adk_secure_sessions.formats.json_text import load_state
from adk_secure_sessions.formats.records import EncodedEvent
from adk_secure_sessions.maintenance import Database
from adk_secure_sessions.migration import compare, migrate
from adk_secure_sessions.migration.encrypted_source import EncryptedSource
from adk_secure_sessions.migration.sources import (
    ListedSession,
    Selection,
    SessionContent,
    Unreadable,
)
from tests.faults import Point, with_faults
from tests.maintenance.support import APP, NEW, OLD, event, fill, plaintext_backend, query, run_sql
from tests.migration.support import ALL, contents, states

BACKEND = AesGcmBackend(OLD)


async def check_equal(source: EncryptedSource, of: EncryptedSessionService) -> None:
    """Everything in *source* is what the service *of* returns, and nothing is missing."""
    owners = await states(source)
    found = await contents(source)
    for app_name in {key[0] for key in found}:
        listing = await of.list_sessions(app_name=app_name)
        mine = {key for key in found if key[0] == app_name}
        assert mine == {(app_name, one.user_id, one.id) for one in listing.sessions}
    for (app_name, user_id, session_id), content in found.items():
        assert isinstance(content, SessionContent)
        session = await of.get_session(app_name=app_name, user_id=user_id, session_id=session_id)
        assert session is not None
        parts = {"app:": owners[app_name], "user:": owners[app_name, user_id]}
        merged = load_state(content.state)
        for prefix, part in parts.items():
            merged |= {prefix + key: value for key, value in part.items()}
        assert merged == session.state
        assert [decode(one.plaintext, 0, 0) for one in content.events] == session.events
        assert [one.time / 1e6 for one in content.events] == [e.timestamp for e in session.events]
        assert content.updated_at / 1e6 == session.last_update_time
        assert content.created_at <= content.updated_at or content.events


async def fill_with_everything(of: EncryptedSessionService) -> None:
    """Odd ids, two apps, interleaved states of all scopes, no events, and a state of 100 KB."""
    ids = [
        (APP, "ada", "s"),
        (APP, "ada", "\u017f\N{MATHEMATICAL BOLD SMALL S}"),
        ("b", "", "\U0001f600"),
    ]
    opened = [
        await of.create_session(
            app_name=a, user_id=u, session_id=s, state={"app:a": 0, "user:u": 0, "own": {"x": None}}
        )
        for a, u, s in ids
    ]
    for number, session in enumerate([*opened, *reversed(opened)]):
        delta = {"app:a": number, "user:u": number, f"k{number}": [number, 1.5, "ü", float("inf")]}
        await of.append_event(session, event(number, **delta))
    await of.append_event(opened[0], event(99, large="x" * 100_000))
    await of.append_event(opened[0], event(100, small=1))
    await of.create_session(app_name=APP, user_id="no events", session_id="s", state={"n": 1})


@pytest.mark.parametrize(
    ("place", "backend"),
    [
        ("sqlite", FernetBackend(OLD)),
        ("sqlite", plaintext_backend()),
        ("mariadb", BACKEND),
        pytest.param("postgresql", BACKEND, marks=pytest.mark.soak),
    ],
    indirect=["place"],
)
async def test_source_reads_what_the_service_returns(url: str, backend: EncryptionBackend) -> None:
    async with (
        EncryptedSessionService(url, backend, [BACKEND]) as of,
        EncryptedSource(Database(url, BACKEND, [backend])) as source,
    ):
        await fill_with_everything(of)
        await check_equal(source, of)
        assert await source.count(ALL) == 4


async def test_wrong_key_is_reported_before_anything_is_read(file_url: str) -> None:
    await fill(file_url)
    async with EncryptedSource(Database(file_url, AesGcmBackend(NEW))) as source:
        with pytest.raises(WrongKeyError):
            await source.count(ALL)
        with pytest.raises(WrongKeyError):
            await contents(source)


async def test_reading_changes_nothing(file_url: str) -> None:
    await fill(file_url)
    db, faults = with_faults(lambda: Database(file_url, BACKEND))
    for point in (Point.APPLY, Point.WRITE):
        faults.data.before(point, AssertionError("the source was written"))
    async with EncryptedSource(db) as source:
        assert len(await contents(source)) == 4
        assert await states(source)
        await source.count(ALL)


async def test_scope_restricts_sessions_states_and_size(file_url: str) -> None:
    async with EncryptedSessionService(file_url, BACKEND) as of:
        await fill_with_everything(of)
        old = await of.get_session(app_name=APP, user_id="ada", session_id="s")
    assert old is not None
    async with EncryptedSource(Database(file_url, BACKEND)) as source:
        assert {key[0] for key in await contents(source, Selection("b"))} == {"b"}
        assert set(await states(source, Selection("b"))) == {"b", ("b", "")}
        assert await source.count(Selection("b")) == 1
        assert await contents(source, Selection("unknown")) == {}
        since = Selection(since=int(old.last_update_time * 1e6) + 1)
        assert {key[1] for key in await contents(source, since)} == {"no events"}
        assert await source.count(since) == 1
        since = Selection(since=int(old.last_update_time * 1e6))
        assert {key[1:] for key in await contents(source, since)} == {
            ("no events", "s"),
            ("ada", "s"),
        }


async def test_version_differs_after_each_change_of_a_session(file_url: str) -> None:
    async with (
        EncryptedSessionService(file_url, BACKEND) as of,
        EncryptedSource(Database(file_url, BACKEND)) as source,
    ):
        etags = []
        session = await of.create_session(app_name=APP, user_id="ada", session_id="s")
        for number in range(3):
            etags += [one.etag async for batch in source.sessions(ALL) for one in batch]
            await of.append_event(session, event(number))
        await of.delete_session(app_name=APP, user_id="ada", session_id="s")
        await of.create_session(app_name=APP, user_id="ada", session_id="s")
        etags += [one.etag async for batch in source.sessions(ALL) for one in batch]
        assert len(set(etags)) == 4


async def test_session_that_was_deleted_or_has_expired_is_omitted(file_url: str) -> None:
    lifetime = timedelta(milliseconds=1)
    async with (
        EncryptedSessionService(file_url, BACKEND) as of,
        EncryptedSource(Database(file_url, BACKEND)) as source,
    ):
        await of.create_session(app_name=APP, user_id="u", session_id="gone")
        await of.create_session(
            app_name=APP, user_id="u", session_id="later", expires_after=timedelta(days=1)
        )
        await of.create_session(
            app_name=APP, user_id="u", session_id="expired", expires_after=lifetime
        )
        (batch,) = [batch async for batch in source.sessions(ALL)]
        await of.delete_session(app_name=APP, user_id="u", session_id="gone")
        read = await source.read([*batch, ListedSession(APP, "u", "expired", "1.0")])
        assert {one.session_id for one in read} == {"later"}
        (later,) = read.values()
        assert isinstance(later, SessionContent)
        assert later.expires_at == later.updated_at + 24 * 3600 * 1_000_000
        assert await source.count(ALL) == 1


async def test_collections_are_no_sessions(file_url: str) -> None:
    async with EncryptedSessionService(file_url, BACKEND) as of:
        await of.create_session(app_name=APP, user_id="ada", session_id="s")
        async with EncryptedSource(Database(file_url, BACKEND)) as source:
            assert not await source.has_artifacts_or_memory()
        await of.collections.append((APP, "bob", "c"), encode_item({"n": 1}))
    async with EncryptedSource(Database(file_url, BACKEND)) as source:
        assert set(await contents(source)) == {(APP, "ada", "s")}
        assert await source.count(ALL) == 1
        assert await source.has_artifacts_or_memory()


REASONS = {
    "UPDATE secure_events SET time = 1 WHERE seq = 1 AND session_row = {row}": "secure_events",
    "DELETE FROM secure_events WHERE seq = 2 AND session_row = {row}": "secure_sessions",
    "UPDATE secure_sessions SET expires_at = 1 WHERE id = {row}": "secure_sessions",
    "UPDATE secure_sessions SET updated_at = 1 WHERE id = {row}": "secure_sessions",
    "UPDATE secure_sessions SET revision = 'x' WHERE id = {row}": "secure_sessions",
    "UPDATE secure_sessions SET tag = 5 WHERE id = {row}": "secure_sessions",
    "UPDATE secure_sessions SET state = 5 WHERE id = {row}": "secure_sessions",
    "DELETE FROM secure_witnesses WHERE tag = (SELECT tag FROM secure_sessions WHERE id = {row})":
        "secure_sessions",
}  # fmt: skip


@pytest.mark.parametrize("statement", REASONS)
async def test_session_that_was_tampered_with_is_unreadable(file_url: str, statement: str) -> None:
    await fill(file_url, users=["ada"])
    ((row,),) = query(file_url, "SELECT max(id) FROM secure_sessions")
    assert run_sql(file_url, statement.format(row=row)) == 1
    # A session of unknown age is in every selection.
    selection = Selection(APP, 2**60 if "secure_sessions SET" in statement else None)
    async with EncryptedSource(Database(file_url, BACKEND)) as source:
        found = await contents(source, selection)
    bad = [content for content in found.values() if isinstance(content, Unreadable)]
    assert len(bad) == 1
    assert len(found) == (1 if selection.since else 2)
    assert bad[0].reason.startswith(f"{REASONS[statement]} row {row}")
    assert "ada" not in bad[0].reason


@pytest.mark.parametrize("plaintext", [b"SECRETGARBAGE\xff", b"\x052.0.0SECRET", b"\x052.0.0[1]"])
async def test_malformed_event_of_a_faulty_writer_is_not_copied(
    tmp_path: Path, file_url: str, plaintext: bytes
) -> None:
    await fill(file_url, users=["ada"])
    at = 1_700_000_000_000_000
    async with Database(file_url, BACKEND) as db:
        await db.imports.import_session(
            *(APP, "ada", "bad"),
            state=b"{}",
            events=[EncodedEvent(plaintext, at)],
            created_at=at,
            updated_at=at,
            source_etag="1",
        )
    ((row,),) = query(file_url, "SELECT max(id) FROM secure_sessions")
    async with (
        EncryptedSource(Database(file_url, BACKEND)) as source,
        Database(f"sqlite:///{tmp_path}/target.db", BACKEND) as target,
    ):
        done = await migrate(source, target, skip_bad=True)
    assert (done.copied, done.bad) == (2, 1)
    (finding,) = done.findings
    assert f"secure_events row {row}, " in finding.detail
    assert "SECRET" not in finding.detail


async def test_state_that_has_outgrown_a_record_is_not_copied(
    file_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_text, "MAX_BYTES", 20_000)
    async with EncryptedSessionService(file_url, BACKEND) as of:
        session = await of.create_session(app_name=APP, user_id="ada", state={"k": "x" * 19_000})
        await of.append_event(session, event(1, other="x" * 4000))
        await of.create_session(app_name=APP, user_id="ada", session_id="s")
    copy = f"sqlite+aiosqlite:///{tmp_path / 'copy.db'}"
    async with (
        EncryptedSource(Database(file_url, BACKEND)) as source,
        Database(copy, BACKEND) as target,
    ):
        migration = await migrate(source, target, skip_bad=True)
    assert (migration.copied, migration.bad) == (1, 1)
    (finding,) = migration.findings
    assert finding.detail.endswith("its state exceeds a limit: see docs/limits.md, Sizes")


async def test_user_that_was_tampered_with_has_unreadable_sessions_and_state(file_url: str) -> None:
    await fill(file_url)
    ((row,),) = query(file_url, "SELECT min(id) FROM secure_users")
    run_sql(file_url, f"UPDATE secure_users SET version = 7 WHERE id = {row}")
    async with EncryptedSource(Database(file_url, BACKEND)) as source:
        found = await contents(source, Selection(APP))
        good = [key for key, one in found.items() if isinstance(one, SessionContent)]
        assert [key[1] for key in good] == ["bob", "bob"]
        assert len(found) == 4
        owners = await states(source, Selection(APP))
        assert set(owners) == {APP, (APP, "bob"), ("", f"secure_users row {row}")}
        bad = owners["", f"secure_users row {row}"]
        assert isinstance(bad, Unreadable)
        assert "wrong key" in bad.reason


@pytest.mark.parametrize("column", ["app_name", "tag"])
async def test_app_whose_name_or_tag_was_modified_has_no_state(file_url: str, column: str) -> None:
    await fill(file_url)
    run_sql(file_url, f"UPDATE secure_apps SET {column} = CAST('other' AS BLOB)")
    async with EncryptedSource(Database(file_url, BACKEND)) as source:
        owners = await states(source)
        (name,) = [one for one in owners if isinstance(one, str)]
        assert name.startswith("secure_apps row ")
        assert isinstance(owners[name], Unreadable)
        found = await contents(source)
        assert len(found) == 4
        assert all(isinstance(one, Unreadable) for one in found.values())


@pytest.mark.parametrize("cause", ["a tampered user row", "a forgotten backend"])
async def test_no_session_is_gone_while_the_source_has_sessions_without_ids(
    file_url: str, tmp_path: Path, cause: str
) -> None:
    fernet, url = FernetBackend(OLD), f"sqlite:///{tmp_path}/target.db"
    is_forgotten = cause == "a forgotten backend"
    async with EncryptedSessionService(file_url, fernet, [BACKEND]) as of:
        await fill_with_everything(of)
    async with (
        EncryptedSource(Database(file_url, BACKEND, [fernet])) as source,
        Database(url, BACKEND) as target,
    ):
        assert (await migrate(source, target)).copied == 4
    if not is_forgotten:
        place = sa.make_url(file_url).set(drivername="sqlite")
        run_sql(place, "UPDATE secure_users SET version = 7")
    others = [] if is_forgotten else [fernet]
    async with (
        EncryptedSource(Database(file_url, BACKEND, others)) as source,
        Database(url, BACKEND) as target,
    ):
        for dry_run in (True, False):
            with pytest.raises(ConfigurationError, match="nothing was deleted"):
                await migrate(source, target, skip_bad=True, delete_gone=True, dry_run=dry_run)
        done = await migrate(source, target, skip_bad=True)
        assert (done.bad >= 4, done.gone, done.changed_in_source, done.conflicts) == (True, 0, 0, 0)
        compared = await compare(source, target)
        assert (compared.bad >= 4, compared.changed_in_source, compared.missing) == (True, 0, 0)
        assert {found.tag for found in (*done.findings, *compared.findings)} == {""}
        assert await EncryptedSource(target).count(ALL) == 4
