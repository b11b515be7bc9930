"""Maintenance commands on databases with collections, also while items are appended."""

import asyncio
import shutil
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from adk_secure_sessions import (
    AesGcmBackend,
    ConfigurationError,
    EncryptedSessionService,
    SecureSessionError,
)
from adk_secure_sessions.formats.events import encode_item
from adk_secure_sessions.formats.json_text import read_event
from adk_secure_sessions.maintenance import (
    Database,
    erase_user,
    inspect_records,
    lookup,
    purge_sessions,
    retire,
    rotate_data,
    rotate_master,
    rotate_root,
    separate,
    vacuum,
    verify,
)
from tests.faults import Point, with_faults
from tests.key_database.conftest import files, pair  # noqa: F401 - fixtures
from tests.key_database.support import Pair, marks
from tests.maintenance.support import APP, NEW, OLD, event, query, run_sql
from tests.processes import children
from tests.sqlite_files import value

BACKEND = AesGcmBackend(OLD)
ITEMS = [encode_item({"n": n}) for n in range(3)]
FEATURES = "SELECT value FROM secure_meta WHERE name = 'features'"


async def fill(service: EncryptedSessionService, users: tuple[str, ...] = ("ada", "bob")) -> None:
    """For each user: a session with two events, and two collections with three items each."""
    for user in users:
        session = await service.create_session(app_name=APP, user_id=user, session_id="s")
        for n in range(2):
            await service.append_event(session, event(n))
        for name in ("c", "d"):
            for item in ITEMS:
                await service.collections.append((APP, user, name), item)


async def assert_whole(service: EncryptedSessionService, user: str = "ada") -> None:
    for name in ("c", "d"):
        found = await service.collections.get((APP, user, name))
        assert found is not None
        assert list(found.items) == ITEMS


def counts(found: Any) -> tuple[int, ...]:
    return found.sessions, found.events, found.collections, found.items, found.unchecked, found.bad


async def test_verify_checks_the_json_of_items(file_url: str) -> None:
    async with EncryptedSessionService(file_url, BACKEND) as service:
        await fill(service, ("ada",))
        await service.collections.append((APP, "ada", "c"), b"no item")
        await service.collections.append((APP, "ada", "d"), ITEMS[0][:-1])
    rows = query(file_url, "SELECT session_row FROM secure_events WHERE seq = 3 ORDER BY 1")
    async with Database(file_url, BACKEND) as db:
        found = await verify(db)
    assert [(one.table, one.row) for one in found.problems] == [
        ("secure_events", f"{row}, 3") for (row,) in rows
    ]
    assert counts(found) == (1, 2, 0, 0, 0, 2)


async def test_problems_of_collections_are_named_so(file_url: str) -> None:
    async with EncryptedSessionService(file_url, BACKEND) as service:
        await fill(service, ("ada",))
    run_sql(file_url, "DELETE FROM secure_events WHERE seq = 2")
    async with Database(file_url, BACKEND) as db:
        found = await verify(db)
    assert {one.table for one in found.problems} == {"secure_sessions"}
    assert all("items were added or removed" in one.detail for one in found.problems)


async def test_lookup_tells_a_session_from_a_collection_of_the_same_name(url: str) -> None:
    async with EncryptedSessionService(url, BACKEND) as service:
        await fill(service)
        await service.collections.append((APP, "ada", "s"), ITEMS[0])
    async with Database(url, BACKEND) as db:
        *_, session, collection = await lookup(db, APP, "ada", "s", "s")
        assert (session.kind, collection.kind) == ("session", "collection")
        assert session.tag != collection.tag
        assert None not in (session.row, collection.row)
        ((header,),) = [await inspect_records(db, "secure_sessions", str(collection.row))]
        assert header.kind == "collection"
        assert {one.kind for one in await inspect_records(db, "secure_events")} == {None}


async def all_keys_rotated(database: Any, service: Any) -> None:
    """Rotate, retire, purge, vacuum and erase; *database* and *service* open the database."""
    async with service(OLD) as writer:
        await fill(writer)
    async with database(NEW, [AesGcmBackend(OLD)]) as db:
        await rotate_root(db)
        assert (await rotate_master(db)).left == 0
        assert (await rotate_data(db)).left == 0
        done = await retire(db)
        assert (done.deleted_data_keys, len(done.deleted_master_ids), done.kept) == (3, 1, 0)
        assert (await purge_sessions(db, timedelta())).deleted == 2
        await vacuum(db)
        assert counts(await verify(db)) == (0, 0, 4, 12, 0, 0)
    async with service(NEW) as reader:
        await assert_whole(reader)
        await assert_whole(reader, "bob")
    async with database(NEW, []) as db:
        erased = await erase_user(db, APP, "ada")
        assert (erased.sessions, erased.collections, erased.events) == (0, 2, 6)
        assert erased.witnesses == 3
        assert counts(await verify(db)) == (0, 0, 2, 6, 0, 0)
    async with service(NEW) as reader:
        assert await reader.collections.of_user(APP, "ada") == []
        assert await reader.collections.get((APP, "ada", "c")) is None
        await assert_whole(reader, "bob")


async def test_all_commands_treat_collections_as_data_of_their_user(url: str) -> None:
    await all_keys_rotated(
        lambda key, others: Database(url, AesGcmBackend(key), others),
        lambda key: EncryptedSessionService(url, AesGcmBackend(key)),
    )


async def test_all_commands_treat_collections_so_with_a_key_database(pair: Pair) -> None:  # noqa: F811
    await all_keys_rotated(
        lambda key, others: Database(**pair.urls, backend=AesGcmBackend(key),
                                     additional_backends=others),
        pair.service,
    )  # fmt: skip
    assert marks(pair.keys)["features"].startswith("collections ")
    assert "features" not in marks(pair.data)


# --- separate ------------------------------------------------------------------------------------


async def test_separated_copy_keeps_the_feature_and_its_collections(file_url: str) -> None:
    async with EncryptedSessionService(file_url, BACKEND) as service:
        await fill(service)
    seen = set()

    def progress(done: int, total: int) -> None:
        seen.add(query(file_url, FEATURES)[0][0].split()[0])

    async with Database(file_url, BACKEND) as db:
        assert (await separate(db, progress=progress)).complete
    assert seen == {"collections,separating"}
    assert query(file_url, FEATURES)[0][0].startswith("collections ")
    async with EncryptedSessionService(file_url, BACKEND) as service:
        await assert_whole(service)
        await service.collections.append((APP, "ada", "e"), ITEMS[0])


async def test_feature_that_is_added_while_a_separation_begins_is_not_lost(file_url: str) -> None:
    async with EncryptedSessionService(file_url, BACKEND) as service:
        await service.create_session(app_name=APP, user_id="ada", session_id="s")

    async def append() -> None:
        async with EncryptedSessionService(file_url, BACKEND) as service:
            await service.collections.append((APP, "ada", "c"), ITEMS[0])

    db, faults = with_faults(lambda: Database(file_url, BACKEND))
    async with db:
        await db.keyring()
        faults.data.before(Point.RUN, append, nth=2)
        with pytest.raises(SecureSessionError, match="try again"):
            await separate(db)
        assert (await separate(db)).complete
    assert query(file_url, FEATURES)[0][0].startswith("collections ")


async def test_running_service_adds_no_feature_during_a_separation(file_url: str) -> None:
    errors: list[str] = []
    async with EncryptedSessionService(file_url, BACKEND) as running:
        await running.create_session(app_name=APP, user_id="ada", session_id="s")

        async def append() -> None:
            try:
                await running.collections.append((APP, "ada", "c"), ITEMS[0])
            except ConfigurationError as error:
                errors.append(str(error))

        loop = asyncio.get_running_loop()
        waiting: list[asyncio.Task[None]] = []

        def progress(done: int, total: int) -> None:
            if not waiting:
                waiting.append(loop.create_task(append()))

        async with Database(file_url, BACKEND) as db:
            await separate(db, progress=progress)
        await asyncio.gather(*waiting)
    assert len(errors) == 1
    assert query(file_url, FEATURES)[0][0].startswith("- ")
    assert query(file_url, "SELECT count(*) FROM secure_sessions") == [(1,)]


# --- at the same time ----------------------------------------------------------------------------


async def append_meanwhile(service: EncryptedSessionService, done: asyncio.Event) -> int:
    """Append items and replace every third one, until *done* and at least some times."""
    number = 0
    while not done.is_set() or number < 6:
        new, replaced = encode_item({"new": number}), {}
        at = await service.collections.append((APP, "ada", "c"), new)
        number += 1
        if number % 3 == 0:
            replaced = {at.revision - 1: encode_item({"replaced": number - 1})}
            item = encode_item({"names": number - 1})
            await service.collections.append_at(at, (APP, "ada", "c"), item, replaced)
        await asyncio.sleep(0.002)
        if number > 400:
            break
    return number


@pytest.mark.parametrize(
    "separate_keys",
    [
        pytest.param(False, id="one database"),
        pytest.param(True, id="key database", marks=pytest.mark.soak),
    ],
)
async def test_keys_are_rotated_and_retired_while_items_are_appended_and_replaced(
    url: str, tmp_path: Path, separate_keys: bool
) -> None:
    urls: dict[str, Any] = {"db_url": url}
    if separate_keys:
        urls["key_db_url"] = f"sqlite+aiosqlite:///{tmp_path}/keys.db"
    done = asyncio.Event()
    async with EncryptedSessionService(**urls, backend=BACKEND) as service:
        await fill(service, ("ada",))
        writer = asyncio.create_task(append_meanwhile(service, done))
        async with Database(**urls, backend=BACKEND) as db:
            for _ in range(3):
                assert (await rotate_data(db)).left == 0
                assert (await retire(db)).kept == 0
        done.set()
        number = await writer
    async with EncryptedSessionService(**urls, backend=BACKEND) as reader:
        found = await reader.collections.get((APP, "ada", "c"))
    assert found is not None
    items = [read_event(item)[1] for item in found.items[3:]]
    replaced = {item["names"] for item in items if "names" in item}
    assert len(items) == number + number // 3
    assert {item["replaced"] for item in items if "replaced" in item} == replaced
    assert {item["new"] for item in items if "new" in item} == set(range(number)) - replaced
    async with Database(**urls, backend=BACKEND) as db:
        assert (await verify(db)).bad == 0


def append_five(say: Callable[[object], None], url: str, name: str, go: Path) -> None:
    """Open a service, wait for the file *go*, and append five items to a collection."""

    async def main() -> None:
        async with EncryptedSessionService(url, BACKEND) as service:
            await service.get_session(app_name=APP, user_id="ada", session_id="s")
            say("ready")
            while not go.exists():
                time.sleep(0.001)
            for n in range(5):
                await service.collections.append((APP, "ada", "c"), encode_item({name: n}))

    asyncio.run(main())


def test_feature_is_added_once_by_two_processes(url: str, place: sa.URL, tmp_path: Path) -> None:
    async def create() -> None:
        async with EncryptedSessionService(url, BACKEND) as service:
            await service.create_session(app_name=APP, user_id="ada", session_id="s")

    asyncio.run(create())
    go = tmp_path / "go"
    with children(*((append_five, url, name, go) for name in ("a", "b"))) as both:
        said = [child.said() for child in both]
        assert [next(one) for one in said] == ["ready", "ready"]
        go.touch()
        assert [list(one) for one in said] == [[], []]
    assert query(place, FEATURES)[0][0].startswith("collections ")

    async def read() -> list[dict[str, Any]]:
        async with EncryptedSessionService(url, BACKEND) as service:
            found = await service.collections.get((APP, "ada", "c"))
        assert found is not None
        return [read_event(item)[1] for item in found.items]

    items = asyncio.run(read())
    for name in ("a", "b"):
        assert [item[name] for item in items if name in item] == list(range(5))


async def test_feature_is_added_again_after_the_database_was_replaced(file_url: str) -> None:
    """A service is closed, an older copy takes the place of its database, and it is used again."""
    path = sa.make_url(file_url).database or ""
    service = EncryptedSessionService(file_url, BACKEND)
    await service.create_session(app_name=APP, user_id="ada", session_id="s")
    await service.close()
    shutil.copy(path, f"{path}.old")
    await service.collections.append((APP, "ada", "c"), ITEMS[0])
    await service.close()
    shutil.copy(f"{path}.old", path)
    await service.collections.append((APP, "ada", "c"), ITEMS[0])
    await service.close()
    assert value(Path(path), FEATURES).startswith("collections ")
