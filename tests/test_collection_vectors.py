"""vectors/collections.*: a database with collections, for the service and the page's reader."""

from pathlib import Path

from adk_secure_sessions import EncryptedSessionService
from adk_secure_sessions.formats.events import encode_item
from adk_secure_sessions.formats.json_text import read_event
from adk_secure_sessions.maintenance import Database, verify
from tests import vector_databases as vectors
from tests.vector_databases import Json

DATABASE = vectors.load("collections.json")
COLLECTIONS: list[Json] = DATABASE["collections"]
CASES = vectors.cases_of("collection_rejections.json")
BACKENDS = vectors.backends("collections.json")
assert COLLECTIONS, "an empty vector file must not pass as success"
database = vectors.copies_of("collections.sql")


def service_on(path: Path) -> EncryptedSessionService:
    return EncryptedSessionService(f"sqlite:///{path}", *BACKENDS)


def who(expected: Json) -> tuple[str, str, str]:
    return expected["app_name"], expected["user_id"], expected["name"]


async def test_service_reads_the_collections_as_the_vector_says(database: Path) -> None:
    async with service_on(database) as service:
        for expected in COLLECTIONS:
            found = await service.collections.get(who(expected))
            assert found is not None
            assert [read_event(item)[1] for item in found.items] == expected["items"]
        for user in DATABASE["users"]:
            ids = (user["app_name"], user["user_id"])
            names = {one.name for one in await service.collections.of_user(*ids)}
            assert names == {one["name"] for one in COLLECTIONS if who(one)[:2] == ids}


def test_reader_written_from_the_page_alone_reads_the_same(database: Path) -> None:
    with vectors.reader_of(database, "collections.json") as reader:
        found = reader.contents()
        assert sorted(found["collections"], key=str) == sorted(COLLECTIONS, key=str)
        assert found["apps"] == DATABASE["apps"]
        assert found["users"] == DATABASE["users"]
        assert [one["session_id"] for one in found["sessions"]] == ['["list"]']
        for expected in COLLECTIONS:
            assert reader.collection(*who(expected)) == expected
            last = reader.collection(*who(expected), 1)
            assert last is not None
            assert last["items"] == expected["items"][-1:]
        assert reader.collection("clinic", "bob", '["file","s","empty"]') is None
        assert reader.collection("clinic", "bob", "no such collection") is None
        assert len(reader.listing("clinic", "ada lovelace")) == 1
        assert len(reader.names("clinic", "bob")) == 2


async def test_service_continues_the_collections_and_the_reader_reads_them(database: Path) -> None:
    new = {"new": [1, None, "🍵"]}
    async with service_on(database) as service:
        for expected in COLLECTIONS:
            await service.collections.append(who(expected), encode_item(new))
    with vectors.reader_of(database, "collections.json") as reader:
        for expected in COLLECTIONS:
            found = reader.collection(*who(expected))
            assert found == expected | {"items": [*expected["items"], new]}


async def test_database_is_verified(database: Path) -> None:
    async with Database(f"sqlite:///{database}", *BACKENDS) as db:
        found = await verify(db)
    assert (found.bad, found.unchecked, found.sessions, found.events) == (0, 0, 1, 0)
    assert found.collections == len(COLLECTIONS) + 1, "one of them has no items"
    assert found.items == sum(len(one["items"]) for one in COLLECTIONS)


# --- rejections ----------------------------------------------------------------------------------


async def use(path: Path, case: Json) -> None:
    """Do with the service what the case says."""
    app, user, name = case["of"]
    async with service_on(path) as service:
        if case["when"] == "list":
            await service.list_sessions(app_name=app, user_id=user)
        elif case["when"] == "get session":
            assert await service.get_session(app_name=app, user_id=user, session_id=name)
        elif case["when"] == "names":
            await service.collections.of_user(app, user)
        else:
            limit = 1 if case["when"] == "last" else None
            assert await service.collections.get((app, user, name), limit=limit)


def read(path: Path, case: Json) -> None:
    """Do with the reader what the case says."""
    app, user, name = case["of"]
    with vectors.reader_of(path, "collections.json") as reader:
        if case["when"] == "list":
            reader.listing(app, user)
        elif case["when"] == "get session":
            assert reader.session(app, user, name)
        elif case["when"] == "names":
            reader.names(app, user)
        else:
            assert reader.collection(app, user, name, 1 if case["when"] == "last" else None)


@vectors.each_case(CASES)
async def test_changed_database_is_rejected_as_named(database: Path, case: Json) -> None:
    vectors.change(database, case)
    await vectors.assert_used_as_named(case, lambda: use(database, case))
    vectors.assert_read_as_named(case, lambda: read(database, case))
