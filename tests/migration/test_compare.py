"""`compare` finds every difference, shows no content, and ends a migration that is complete."""

import asyncio
import copy as copying
import time
from typing import Any

import pytest
import sqlalchemy as sa

from adk_secure_sessions.maintenance import erase_user
from adk_secure_sessions.migration import Comparison, Selection, Source, compare
from adk_secure_sessions.migration.compare import session_difference
from adk_secure_sessions.migration.sources import SessionContent, Unreadable
from adk_secure_sessions.storage import meta
from adk_secure_sessions.storage.features.imports import MigrationMark
from tests.maintenance.support import query, run_sql
from tests.migration.memory_source import APP, START, MemorySource, event, event_of_another_adk
from tests.migration.support import append, copy, database, delete, numbers, service
from tests.servers import DRIVERS, PostgreSQL


def filled() -> MemorySource:
    source = MemorySource()
    for user in ("ada", "bob"):
        for number in range(4):
            source.put(user, f"s{number}", events=number, state={"n": number})
        source.users[APP, user] = {"name": user}
    source.apps[APP] = {"motd": "hello"}
    return source


async def compared(source: Source, url: str, **options: Any) -> Comparison:
    async with database(url) as db:
        return await compare(source, db, **options)


def rows(url: str) -> list[int]:
    """The row ids of the sessions in the target."""
    return [row_id for (row_id,) in query(url, "SELECT id FROM secure_sessions")]


async def is_complete(url: str) -> bool:
    async with database(url) as db:
        return await db.imports.migration_mark() is not None


async def test_equal_sides_end_the_migration(url: str) -> None:
    source = filled()
    await copy(source, url)
    async with service(url) as made:
        await made.create_session(app_name=APP, user_id="eve")
    assert not await is_complete(url)
    done = await compared(source, url)
    assert numbers(done) == {"sessions": 8, "equal": 8, "events": 12, "states": 3}
    assert done.all_equal
    assert done.mark_stored
    assert await is_complete(url)


async def test_part_of_a_source_does_not_end_the_migration(file_url: str) -> None:
    source = filled()
    await copy(source, file_url)
    for selection in (Selection(APP), Selection(since=0)):
        done = await compared(source, file_url, selection=selection)
        assert (done.all_equal, done.mark_stored, done.sessions) == (True, False, 8)
    assert not await is_complete(file_url)


async def test_session_that_has_expired_on_both_sides_is_not_gone(url: str) -> None:
    source = filled()
    past = int(START * 1_000_000) + 5
    source.put("ada", "expired", expires_at=past)
    source.put("ada", "expires later", expires_at=time.time_ns() // 1000 + 3600 * 1_000_000)
    await copy(source, url)
    source.remove("ada", "expired")  # as an encrypted source lists it no more
    assert (await copy(source, url)).gone == 0
    source.remove("ada", "expires later")
    assert (await copy(source, url)).gone == 1
    done = await compared(source, url)
    assert (done.changed_in_source, done.all_equal) == (1, False)
    source.put("ada", "expires later")
    await copy(source, url)
    assert (await compared(source, url)).mark_stored


async def test_copies_that_an_attacker_lets_expire_are_reported_as_different(
    file_url: str,
) -> None:
    source, others = filled(), MemorySource()
    await copy(source, file_url)
    run_sql(file_url, "UPDATE secure_sessions SET expires_at = 1")
    others.put("ada", "new")
    done = await compared(others, file_url, show_ids=True)
    assert numbers(done) == {"sessions": 1, "missing": 1, "different": 8}
    names = {one.session_id for one in done.findings}
    assert names == {"new", *(f"secure_sessions row {one}" for one in rows(file_url))}
    assert all(one.tag for one in done.findings)
    again = await copy(others, file_url, delete_gone=True)
    assert (again.copied, again.bad, again.gone, again.succeeded) == (1, 8, 0, False)
    assert len(rows(file_url)) == 9


@pytest.mark.parametrize("tag", ["'x'", "1000000000000", "x''"])
async def test_copy_whose_tag_has_another_type_is_reported_as_different(
    file_url: str, tag: str
) -> None:
    source, place = filled(), sa.make_url(file_url).set(drivername="sqlite")
    await copy(source, file_url)
    first = rows(file_url)[0]
    run_sql(place, f"UPDATE secure_sessions SET tag = {tag} WHERE id = {first}")
    run_sql(place, f"UPDATE secure_migrated SET tag = {tag} WHERE row_id = {first}")
    assert numbers(await compared(source, file_url)) == {
        "sessions": 8, "equal": 7, "missing": 1, "different": 1, "events": 12, "states": 3
    }  # fmt: skip


async def test_later_difference_withdraws_the_mark(url: str) -> None:
    source = filled()
    await copy(source, url)
    backup = copying.deepcopy(source)
    source.put("carol", "later")
    assert (await compared(backup, url)).mark_stored
    done = await compared(source, url)
    assert (done.all_equal, done.mark_withdrawn, done.missing) == (False, True, 1)
    assert not await is_complete(url)
    assert not (await compared(source, url)).mark_withdrawn, "there was no mark"
    await copy(source, url)
    done = await compared(source, url)
    assert (done.mark_stored, done.mark_withdrawn) == (True, False)
    source.put("ada", "s0", events=9)
    assert (await compared(source, url, selection=Selection(APP))).mark_withdrawn, "of a part, too"


async def test_mark_of_an_erased_source_is_not_withdrawn(file_url: str) -> None:
    source = filled()
    await copy(source, file_url)
    async with database(file_url) as db:
        await db.imports.store_mark(source_is_erased=True)
    source.put("carol", "later")
    done = await compared(source, file_url)
    assert (done.all_equal, done.mark_withdrawn) == (False, False)
    assert await is_complete(file_url)


@pytest.mark.parametrize("method", ["store_mark", "withdraw_mark"])
async def test_mark_of_an_erased_source_stays_if_a_comparison_has_waited_for_it(
    postgresql: PostgreSQL, method: str
) -> None:
    with postgresql.database() as place:
        url = place.set(drivername=DRIVERS["postgresql"]).render_as_string(hide_password=False)
        engine = sa.create_engine(place, poolclass=sa.NullPool)
        await copy(filled(), url)
        async with database(url) as db:
            await db.imports.store_mark()
            erased = MigrationMark.SOURCE_ERASED.text(await db.runner.keyring())
            with engine.begin() as connection:
                meta.put(connection, meta.MIGRATION_MARK, erased)
                comparing = asyncio.ensure_future(getattr(db.imports, method)())
                locks = "SELECT count(*) FROM pg_locks WHERE NOT granted"
                while not query(place, locks)[0][0]:
                    await asyncio.sleep(0.01)
            assert await comparing is False
            assert await db.imports.migration_mark() is MigrationMark.SOURCE_ERASED


async def test_sessions_that_services_continued_are_compared_up_to_the_copied_part(
    url: str,
) -> None:
    source = filled()
    await copy(source, url)
    await append(url, "ada", "s0")
    await append(url, "ada", "s1", number=1, delta={"n": 7})
    await append(url, "bob", "s3", delta={"user:name": "changed"})
    await delete(url, "bob", "s2")
    done = await compared(source, url)
    assert numbers(done) == {"sessions": 8, "equal": 7, "deleted": 1, "events": 12, "states": 3}
    assert done.mark_stored


async def test_session_and_state_of_an_erased_user_are_counted_as_deleted(file_url: str) -> None:
    source = filled()
    await copy(source, file_url)
    async with database(file_url) as db:
        await erase_user(db, APP, "bob")
    done = await compared(source, file_url)
    assert numbers(done) == {"sessions": 8, "equal": 4, "deleted": 5, "events": 12, "states": 3}
    assert any("in the target: 5 items; `migrate erase-source`" in line for line in done.lines())


async def test_every_difference_is_found(file_url: str) -> None:
    source = filled()
    for number in range(4, 8):
        source.put("ada", f"s{number}", events=number)
    await copy(source, file_url)
    assert (await compared(source, file_url, selection=Selection(APP))).all_equal
    source.put("ada", "s0", events=0, state={"n": False})
    source.put("ada", "s1", events=[event(0, "other")], state={"n": 1})
    source.put("ada", "s2", events=[event(1), event(0)], state={"n": 2})
    source.put("ada", "s3", events=2, state={"n": 3})
    source.put("ada", "s4", events=4, updated_at=START * 1_000_000 + 1)
    source.spoil("ada", "s5")
    source.put("ada", "new")
    source.remove("ada", "s6")
    source.put("ada", "s7", events=8)
    await append(file_url, "ada", "s7")
    source.users[APP, "ada"] = {"name": "Ada"}
    source.users[APP, "cleo"] = {"a": 1}
    source.users[APP, "dora"] = {}
    source.users[APP, "erik"] = Unreadable("its state is not JSON")
    done = await compared(source, file_url, show_ids=True)
    assert numbers(done) == {
        "sessions": 12, "equal": 4, "missing": 1, "different": 8, "bad": 2, "changed_in_source": 1,
        "events": done.events, "states": 6,
    }  # fmt: skip
    assert not done.all_equal
    assert not done.mark_stored
    reasons = {one.session_id or one.user_id: one.detail for one in done.findings}
    behind = "it has changed in the source since it was copied; different: "
    assert reasons == {
        "s0": f"{behind}state",
        "s1": f"{behind}event 1",
        "s2": f"{behind}updated_at, time of event 1",
        "s3": f"{behind}updated_at, number of events (2, 3)",
        "s4": f"{behind}updated_at",
        "s5": "its state is not JSON",
        "s6": "it was copied before, and this source does not have it",
        "s7": "both sides have changed or deleted it since it was copied",
        "new": "it was not copied",
        "ada": "it has changed in the source since it was copied",
        "cleo": "it was not copied",
        "erik": "its state is not JSON",
    }
    hidden = await compared(source, file_url)
    assert all(one.user_id is None and len(one.tag) == 32 for one in hidden.findings)


@pytest.mark.parametrize(
    "attack",
    [
        "DELETE FROM secure_sessions",
        "UPDATE secure_sessions SET id = -id",
        "UPDATE secure_users SET version = version + 1",
        "UPDATE secure_apps SET version = version + 1, state = X'00'",
    ],
)
async def test_row_that_was_tampered_with_is_no_deletion_and_no_change(
    file_url: str, attack: str
) -> None:
    source = filled()
    await copy(source, file_url)
    assert run_sql(file_url, attack)
    done = await compared(source, file_url)
    assert (done.equal, done.all_equal, done.mark_stored) == (0, False, False)
    assert done.different >= 8


async def test_unchanged_content_with_a_new_version_is_equal(file_url: str) -> None:
    source = filled()
    await copy(source, file_url)
    source.put("ada", "s2", events=2, state={"n": 2})
    assert (await compared(source, file_url)).all_equal


async def test_changes_during_the_comparison_are_noticed(file_url: str) -> None:
    source = filled()
    await copy(source, file_url)

    def write(_: object) -> None:
        source.before_read = lambda _: None
        source.put("ada", "new")
        source.put("ada", "s0", events=1)

    source.before_read = write
    done = await compared(source, file_url)
    assert (done.changed_in_source, done.different) == (2, 1)
    assert (done.all_equal, done.mark_stored) == (False, False)


async def test_service_that_writes_during_the_comparison_makes_no_difference(
    file_url: str,
) -> None:
    """The session is compared again."""
    source = filled()
    await copy(source, file_url)
    again = filled()
    original = again.read
    written = False

    async def read(sessions: Any) -> Any:
        nonlocal written
        if not written:
            written = True
            await append(file_url, "bob", "s1", delta={"n": 5})
        return await original(sessions)

    again.read = read  # type: ignore[method-assign]
    done = await compared(again, file_url)
    assert (done.all_equal, done.equal) == (True, 8)


async def test_session_that_is_deleted_before_it_is_compared_again_is_counted_as_done(
    file_url: str,
) -> None:
    source, said = filled(), list[tuple[int, int]]()
    await copy(source, file_url)
    source.put("ada", "s0", events=1)

    def remove(sessions: Any) -> None:
        if len(sessions) == 1:  # the session that differs is read again
            source.before_read = lambda _: None
            source.remove("ada", "s0")

    source.before_read = remove
    await compared(source, file_url, progress=lambda *pair: said.append(pair))
    assert said[-1] == (8, 8)


async def test_erased_source_is_no_difference_after_the_end_of_the_migration(
    file_url: str,
) -> None:
    source = filled()
    await copy(source, file_url)
    assert (await compared(MemorySource(), file_url)).changed_in_source == 8
    assert (await compared(source, file_url)).mark_stored
    assert (await compared(MemorySource(), file_url)).changed_in_source == 0
    assert (await copy(MemorySource(), file_url)).gone == 0


# --- fields --------------------------------------------------------------------------------------


def test_event_of_another_version_of_google_adk_with_the_same_fields_is_equal() -> None:
    one = event(0)
    first, second = (
        SessionContent(b"{}", [made], 0, 0) for made in (one, event_of_another_adk(one))
    )
    assert session_difference(first, second) == ""
