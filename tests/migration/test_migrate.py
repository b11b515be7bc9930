"""`migrate` copies everything once, copies changes again, and overwrites nothing of a service."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from adk_secure_sessions import AesGcmBackend
from adk_secure_sessions.errors import ConfigurationError, TamperedError
from adk_secure_sessions.formats.json_text import load_state
from adk_secure_sessions.maintenance import Database, purge_sessions, rotate_data, verify
from adk_secure_sessions.maintenance.progress import Meter
from adk_secure_sessions.migration import Selection, compare, migrate
from adk_secure_sessions.migration.source_scan import SourceScan
from adk_secure_sessions.migration.sources import ListedSession, SessionContent, Unreadable
from tests.maintenance.dying import Statements, dying
from tests.maintenance.support import query, run_sql
from tests.migration.memory_source import APP, START, MemorySource, event, event_of_another_adk
from tests.migration.support import KEY, append, copy, database, delete, numbers, service, stored
from tests.processes import children


def filled(sessions: int = 3, events: int = 3) -> MemorySource:
    source = MemorySource()
    for user in ("ada", "bob"):
        for number in range(sessions):
            source.put(user, f"s{number}", events=events, state={"n": number})
        source.users[APP, user] = {"name": user}
    source.apps[APP] = {"motd": "hello"}
    return source


# --- everything is copied ------------------------------------------------------------------------


async def test_each_owner_gets_one_data_key(tmp_path: Path) -> None:
    source = MemorySource(batch=100)
    for number in range(60):
        source.put(f"user {number % 3}", f"s{number}", app=f"app {number % 2}", events=1)
    source.spoil("user 0", "s")
    names = (f"{tmp_path}/sessions.db", f"{tmp_path}/keys.db")
    data, keys = (f"sqlite:///{name}" for name in names)
    async with Database(data, AesGcmBackend(KEY), key_db_url=keys) as db:
        assert (await migrate(source, db, skip_bad=True)).copied == 60
    users, apps = (
        query(sa.make_url(data), f"SELECT count(*) FROM {one}")
        for one in ("secure_users", "secure_apps")
    )
    assert (users, apps) == ([(6,)], [(2,)])
    assert query(sa.make_url(keys), "SELECT count(*) FROM secure_data_keys") == [(8,)]


async def test_sessions_and_states_are_copied_exactly(url: str) -> None:
    source = filled()
    source.put("cleo", "long", events=[event(n, "x" * 5000) for n in range(400)])
    source.put("cleo", "empty", updated_at=(START - 5) * 1_000_000 + 7)
    done = await copy(source, url)
    assert numbers(done) == {"copied": 8, "events": 418, "states": 3}
    async with service(url) as made:
        for (app, user, session), content in source.contents.items():
            assert isinstance(content, SessionContent)
            found = await made.get_session(app_name=app, user_id=user, session_id=session)
            assert found is not None
            assert [one.id for one in found.events] == [f"e{n}" for n in range(len(content.events))]
            assert [one.timestamp * 1e6 for one in found.events] == [
                one.time for one in content.events
            ]
            assert found.last_update_time == content.updated_at / 1e6
            of_user = source.users.get((app, user), {})
            assert isinstance(of_user, dict)
            assert found.state == {
                **load_state(content.state),
                **{f"user:{key}": value for key, value in of_user.items()},
                "app:motd": "hello",
            }
    async with database(url) as db:
        checked = await verify(db)
    assert (checked.bad, checked.unchecked, checked.sessions, checked.events) == (0, 0, 8, 418)


async def test_expiry_is_copied(file_url: str) -> None:
    source = MemorySource()
    now = time.time_ns() // 1000
    expiries = {"expired": now - 1, "later": now + 3600 * 1_000_000}
    for name, expires_at in expiries.items():
        source.put("ada", name, updated_at=now - 1_000_000, expires_at=expires_at)
    assert (await copy(source, file_url)).succeeded
    async with database(file_url) as db:
        assert (await compare(source, db)).all_equal
        for name in expiries:
            source.put("ada", name, updated_at=now - 1_000_000, expires_at=now + 7200 * 1_000_000)
        assert (await compare(source, db)).different == 2
    assert await stored(file_url, "ada", "later") is not None
    assert await stored(file_url, "ada", "expired") is None


async def test_copies_may_expire_though_the_source_does_not(file_url: str) -> None:
    source = MemorySource()
    now = time.time_ns() // 1000
    source.put("ada", "old", updated_at=now - 3600 * 1_000_000)
    source.put("ada", "new", updated_at=now)
    source.put("ada", "own", updated_at=now - 3600 * 1_000_000, expires_at=now + 3600 * 1_000_000)
    for bad in (timedelta(), -timedelta(1)):  # all copies would have expired
        with pytest.raises(ConfigurationError, match="expires_after must be a positive"):
            await copy(source, file_url, expires_after=bad)
    assert (await copy(source, file_url, expires_after=timedelta(minutes=30))).succeeded
    assert await stored(file_url, "ada", "old") is None
    assert await stored(file_url, "ada", "new") is not None
    assert await stored(file_url, "ada", "own") is not None
    async with database(file_url) as db:
        assert (await compare(source, db)).all_equal
        assert (await purge_sessions(db)).deleted == 1


async def test_only_the_scope_is_copied(file_url: str) -> None:
    source = filled()
    source.put("ada", "s0", app="other")
    source.put("ada", "new", updated_at=(START + 100) * 1_000_000)
    source.apps["other"] = {}
    done = await copy(source, file_url, Selection(since=(START + 50) * 1_000_000))
    assert (done.copied, done.gone) == (1, 0)
    done = await copy(source, file_url, Selection("other"))
    assert (done.copied, done.unchanged, done.gone) == (1, 0, 0)
    done = await copy(source, file_url, Selection(APP))
    assert (done.copied, done.unchanged, done.gone) == (6, 1, 0)


# --- a second run --------------------------------------------------------------------------------


async def test_second_run_copies_only_what_is_new_or_changed(url: str) -> None:
    source = filled()
    await copy(source, url)
    source.put("ada", "s0", events=5, state={"n": 9})
    source.put("ada", "new", events=1)
    source.users[APP, "ada"] = {"name": "Ada"}
    source.reads = 0
    done = await copy(source, url)
    assert numbers(done) == {"copied": 2, "unchanged": 5, "events": 6, "states": 1}
    assert source.reads == 2
    found = await stored(url, "ada", "s0")
    assert found is not None
    assert (len(found.events), found.state["n"], found.state["user:name"]) == (5, 9, "Ada")
    assert numbers(await copy(source, url)) == {"unchanged": 7}


async def test_what_a_service_wrote_is_never_overwritten(url: str) -> None:
    source = filled()
    await copy(source, url)
    async with service(url) as made:
        await made.create_session(app_name=APP, user_id="bob", session_id="mine")
    await append(url, "ada", "s0", delta={"mine": 1})
    await append(url, "ada", "s1", delta={"user:name": "changed"})
    await delete(url, "ada", "s2")
    await delete(url, "bob", "s0")
    source.put("ada", "s1", events=7)
    source.put("bob", "s0", events=7)
    source.put("bob", "mine", events=7)
    source.users[APP, "ada"] = {"name": "too late"}
    done = await copy(source, url)
    assert numbers(done) == {"unchanged": 4, "conflicts": 4}
    assert not done.succeeded
    # One of the sessions was deleted, and has changed in the source since it was copied.
    assert sorted(one.kind for one in done.findings) == ["session"] * 3 + ["user"]
    assert all(len(one.tag) == 32 and one.user_id is None for one in done.findings)
    for user, session, events in (("ada", "s0", 4), ("ada", "s1", 4), ("bob", "mine", 0)):
        found = await stored(url, user, session)
        assert found is not None
        assert len(found.events) == events
    found = await stored(url, "ada", "s1")
    assert found is not None
    assert found.state["user:name"] == "changed"
    assert await stored(url, "ada", "s2") is None
    assert await stored(url, "bob", "s0") is None
    again = await copy(source, url, show_ids=True)
    assert numbers(again) == numbers(done)
    assert (APP, "bob", "mine") in [one[3:6] for one in again.findings]


async def test_upgrade_of_google_adk_makes_no_conflict_with_an_erased_source(
    file_url: str,
) -> None:
    """A source returns events in the form of the installed google-adk."""
    source, later = MemorySource(), [event_of_another_adk(event(n)) for n in range(3)]
    source.put("ada", "continued", events=2)
    source.put("ada", "changed", events=2)
    await copy(source, file_url)
    async with database(file_url) as db:
        await db.imports.store_mark(source_is_erased=True)
    source.put("ada", "continued", events=later)
    source.put("ada", "changed", events=later[1:])
    done = await copy(source, file_url)
    assert (done.copied, done.conflicts, done.events) == (1, 1, 3)


async def test_gone_sessions_are_reported_and_deleted_only_if_requested(url: str) -> None:
    source = filled()
    await copy(source, url)
    await append(url, "ada", "s0")  # so that the session goes on without its source
    for user, session in (("ada", "s0"), ("ada", "s1"), ("bob", "s2")):
        source.remove(user, session)
    done = await copy(source, url, show_ids=True)
    assert numbers(done) == {"unchanged": 3, "gone": 2}
    assert {one.session_id for one in done.findings} == {"s1", "s2"}
    assert not done.succeeded
    dry = await copy(source, url, dry_run=True, delete_gone=True)
    assert (dry.gone, dry.deleted_gone, dry.succeeded) == (2, True, True)
    done = await copy(source, url, delete_gone=True)
    assert (done.gone, done.deleted_gone, done.succeeded) == (2, True, True)
    assert await stored(url, "ada", "s0") is not None
    assert await stored(url, "ada", "s1") is None
    assert numbers(await copy(source, url)) == {"unchanged": 3}
    source.put("ada", "s1", events=1)  # it comes back
    assert numbers(await copy(source, url)) == {"unchanged": 3, "copied": 1, "events": 1}


async def test_copies_of_another_source_are_not_gone_if_it_has_other_apps(file_url: str) -> None:
    first, second, empty = filled(), MemorySource(), MemorySource()
    second.put("ada", "s0", app="lab", events=2)
    empty.apps["lab"] = {}  # all its sessions were deleted, but not the state of their app
    assert (await copy(first, file_url)).succeeded
    assert (await copy(second, file_url, delete_gone=True)).succeeded
    async with database(file_url) as db:
        assert (await compare(second, db)).all_equal
        assert await db.imports.withdraw_mark()
    assert numbers(await copy(empty, file_url)) == {"states": 1, "gone": 1}
    first.remove("ada", "s0")
    assert (await copy(first, file_url)).gone == 1


async def test_gone_session_that_a_service_continues_meanwhile_is_neither_deleted_nor_counted(
    file_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = filled()
    await copy(source, file_url)
    source.remove("ada", "s0")
    rescan = SourceScan.rescan

    async def continued_after(scan: SourceScan) -> AsyncIterator[Any]:
        async for found in rescan(scan):
            await append(file_url, "ada", "s0")
            yield found

    monkeypatch.setattr(SourceScan, "rescan", continued_after)
    assert (await copy(source, file_url, delete_gone=True)).gone == 0
    assert await stored(file_url, "ada", "s0") is not None


async def test_empty_source_deletes_nothing(file_url: str) -> None:
    """The URL may be wrong."""
    await copy(filled(sessions=60), file_url)  # more than one query reads
    with pytest.raises(ConfigurationError, match="has no sessions"):
        await copy(MemorySource(), file_url, delete_gone=True)
    with pytest.raises(ConfigurationError, match="since"):
        await copy(filled(), file_url, Selection(since=1), delete_gone=True)
    assert (await copy(MemorySource(), file_url)).gone == 120


# --- the source is in use ------------------------------------------------------------------------


async def test_run_says_how_many_sessions_it_is_behind(file_url: str) -> None:
    source = filled(sessions=10)

    def write(sessions: Sequence[ListedSession]) -> None:
        source.before_read = lambda sessions: None
        source.put("ada", "a new session, before those that were listed", events=1)
        source.put("bob", "s9", events=4)
        source.put("ada", "s0", events=4)  # it was listed with its old version
        source.remove("ada", "s1")

    source.before_read = write
    done = await copy(source, file_url)
    assert (done.changed_in_source, done.copied, done.gone) == (2, 19, 0)
    done = await copy(source, file_url)
    assert (done.changed_in_source, done.copied) == (0, 2)
    found = await stored(file_url, "ada", "s0")
    assert found is not None
    assert len(found.events) == 4


async def test_two_runs_at_once_copy_everything_once(url: str) -> None:
    source = filled(sessions=20)
    done = await asyncio.gather(*(copy(source, url) for _ in range(3)))
    assert all(one.conflicts == one.bad == one.gone == 0 for one in done)
    assert numbers(await copy(source, url)) == {"unchanged": 40}
    async with database(url) as db:
        assert (await verify(db)).bad == 0


# --- bad rows ------------------------------------------------------------------------------------


async def test_run_stops_at_a_bad_session_and_continues_when_it_is_repaired(file_url: str) -> None:
    source = filled(sessions=30)
    source.spoil("bob", "s3")
    said: list[tuple[int, int]] = []
    done = await copy(source, file_url, progress=lambda *pair: said.append(pair))
    assert (done.stopped, done.bad, done.changed_in_source) == (True, 1, 0)
    assert said[-1][0] < 60
    assert said[-1][1] == 60
    assert 30 <= done.copied < 60
    (finding,) = done.findings
    assert finding.detail == "its state is not JSON"
    source.put("bob", "s3", events=1)
    done = await copy(source, file_url)
    assert (done.stopped, done.copied + done.unchanged, done.states) == (False, 60, 3)


async def test_bad_rows_are_skipped_if_requested(file_url: str) -> None:
    source = filled()
    source.spoil("bob", "s0")
    source.put("bob", "deep", state=deep(192))
    source.users[APP, "bob"] = Unreadable("its state is not JSON")
    source.apps["large"] = {"x" * 9000: 1}
    done = await copy(source, file_url, skip_bad=True)
    assert numbers(done) == {"copied": 5, "events": 15, "states": 2, "bad": 4}
    assert {one.kind for one in done.findings} == {"session", "user", "app"}
    assert "x" * 100 not in str(done.findings)


async def test_target_rows_that_were_tampered_with_are_skipped_if_requested(file_url: str) -> None:
    source = filled()
    await copy(source, file_url)
    run_sql(
        sa.make_url(file_url).set(drivername="sqlite"),
        "UPDATE secure_users SET version = 9 WHERE id = (SELECT min(id) FROM secure_users)",
    )
    for user in ("ada", "bob"):
        source.put(user, "new", events=1)
        source.users[APP, user] = {"name": "new"}
    with pytest.raises(TamperedError):
        await copy(source, file_url)
    expected = await copy(source, file_url, dry_run=True)
    assert (expected.copied, expected.states, expected.bad) == (2, 1, 1)  # it decrypts only states
    done = await copy(source, file_url, skip_bad=True)
    assert (done.copied, done.states, done.bad, done.stopped) == (1, 1, 2, False)
    assert done.findings[-1].detail.startswith("the target cannot decrypt it: ")


def deep(levels: int) -> dict[str, object]:
    state: dict[str, object] = {}
    for _ in range(levels):
        state = {"a": state}
    return state


async def test_dry_run_changes_nothing_and_counts_what_would_happen(file_url: str) -> None:
    source = filled()
    source.spoil("bob", "s0")
    dry = await copy(source, file_url, dry_run=True)
    assert numbers(dry) == {"copied": 5, "events": 15, "states": 3, "bad": 1}
    assert not Path(file_url.rpartition("///")[2]).exists()
    source.put("bob", "s0", events=3)
    await copy(source, file_url)
    source.put("ada", "s0", events=5)
    await append(file_url, "ada", "s1")
    source.put("ada", "s1", events=6)
    await delete(file_url, "ada", "s2")
    dry = await copy(source, file_url, dry_run=True)
    assert numbers(dry) == {"copied": 1, "unchanged": 4, "conflicts": 1, "events": 5}
    found = await stored(file_url, "ada", "s0")
    assert found is not None
    assert len(found.events) == 3


async def test_dry_run_rejects_a_key_database_that_does_not_exist(
    file_url: str, tmp_path: Path
) -> None:
    keys = f"sqlite:///{tmp_path}/keys.db"
    async with Database(file_url, AesGcmBackend(KEY), key_db_url=keys) as db:
        await migrate(filled(), db, dry_run=True)  # both are new
        await migrate(filled(), db)
    async with Database(file_url, AesGcmBackend(KEY), key_db_url=keys + "x") as db:
        with pytest.raises(ConfigurationError, match=r"there is no file .*keys\.dbx"):
            await migrate(filled(), db, dry_run=True)


@pytest.mark.parametrize("is_erased", [False, True])
async def test_dry_run_counts_states_and_conflicts_as_the_run_after_it(
    file_url: str, is_erased: bool
) -> None:
    source = filled()
    source.apps["lab"] = {"a": 1}
    await copy(source, file_url)
    async with service(file_url) as made:
        for user, value in (("new", "other"), ("same", 1), ("empty", None)):
            state = {"user:a": value} if value else {}
            await made.create_session(app_name=APP, user_id=user, state=state)
        await made.create_session(app_name="lab", user_id="u", state={"app:a": 2})
    async with database(file_url) as db:
        await rotate_data(db)  # changes the versions of all states, and no state
        if is_erased:
            await db.imports.store_mark(source_is_erased=True)
    for user in ("new", "same", "empty", "ada"):
        source.users[APP, user] = {"a": 1}
    source.apps["lab"] = {"a": 3}
    dry = await copy(source, file_url, dry_run=True)
    assert numbers(dry) == numbers(await copy(source, file_url))
    expected = (2, 3) if is_erased else (3, 2)
    assert (dry.states, dry.conflicts) == expected


# --- limits, progress, tampering -----------------------------------------------------------------


async def test_pause_earns_at_most_a_second_of_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    real, later = time.monotonic, 0
    monkeypatch.setattr(time, "monotonic", lambda: real() + later)
    limit = Meter(None, 0, 10)
    later = 3600  # spent on rows that are not counted
    began = real()
    await limit.advance(15)
    assert real() - began >= 0.4


async def test_rate_is_limited_and_progress_ends_at_the_total(file_url: str) -> None:
    said: list[tuple[int, int]] = []
    loop = asyncio.get_running_loop()
    began = loop.time()
    source = filled(sessions=5, events=4)
    await copy(source, file_url, events_per_second=100, progress=lambda *pair: said.append(pair))
    assert loop.time() - began >= 0.35
    assert said[-1] == (10, 10)
    assert [done for done, _ in said] == sorted(done for done, _ in said)
    said.clear()
    source.users[APP, "bob"] = Unreadable("its state is not JSON")  # the progress counts sessions
    await copy(source, file_url, skip_bad=True, progress=lambda *pair: said.append(pair))
    assert said[-2:] == [(10, 10), (10, 10)]


# --- a run that is killed ------------------------------------------------------------------------


def migrate_and_die(say: Callable[[object], None], url: str, last: int) -> None:
    db = dying(lambda: database(url), Statements(last), url)

    async def main() -> None:
        async with db:
            await migrate(filled(), db)

    asyncio.run(main())
    say("ended")


def killed(url: str, last: int) -> bool:
    with children((migrate_and_die, url, last)) as (child,):
        said = list(child.said())
        child.process.join()
        assert child.process.exitcode == (0 if said else -signal.SIGKILL)
    return not said


@pytest.mark.parametrize("step", [83, pytest.param(1, marks=pytest.mark.soak)])
async def test_run_that_is_killed_is_continued(step: int, tmp_path: Path) -> None:
    at, kills = 1, 0
    while True:
        url = f"sqlite:///{tmp_path}/{at}.db"
        if not killed(url, at):
            break
        kills += 1
        done = await copy(filled(), url)
        assert done.conflicts == done.bad == 0
        assert done.copied + done.unchanged == 6
        async with database(url) as db:
            found = await verify(db)
        assert (found.bad, found.unchecked) == (0, 0)
        assert (found.users, found.sessions, found.events) == (2, 6, 18)
        assert numbers(await copy(filled(), url)) == {"unchanged": 6}
        at += step
    assert kills * step > 60
