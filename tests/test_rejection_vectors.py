"""vectors/rejections.json: databases that the service and the reader must reject."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from google.adk.events import Event
from google.adk.sessions.base_session_service import GetSessionConfig

from adk_secure_sessions import EncryptedSessionService
from tests import vector_databases as vectors
from tests.sqlite_files import execute
from tests.vector_databases import Json

CASES = vectors.cases_of("rejections.json")
BACKENDS = vectors.backends("database.json")
ANY_SESSION = [
    vectors.load("database.json")["sessions"][0][name]
    for name in ("app_name", "user_id", "session_id")
]
original = vectors.copies_of("database.sql")
AES = 1


@pytest.fixture
def database(original: Path, case: Json) -> Path:
    """The database of the case."""
    shutil.copy(original, original.with_name("before.db"))
    vectors.change(original, case)
    return original


def ids(case: Json) -> dict[str, Any]:
    names = ("app_name", "user_id", "session_id")
    return dict(zip(names, case.get("of", ANY_SESSION), strict=True))


async def use(path: Path, case: Json) -> None:
    """Do with the service what the case says."""
    async with EncryptedSessionService(f"sqlite:///{path}", *BACKENDS) as service:
        if case["when"] == "list":
            who = ids(case)
            del who["session_id"]
            assert (await service.list_sessions(**who)).sessions
        elif case["when"] == "append":
            # To the session as it was before the case, so that the append itself must notice.
            before = f"sqlite:///{path.with_name('before.db')}"
            async with EncryptedSessionService(before, *BACKENDS) as other:
                session = await other.get_session(**ids(case))
            assert session is not None
            await service.append_event(session, Event(author="user", timestamp=1_800_000_000.0))
        else:
            config = GetSessionConfig(num_recent_events=1) if case["when"] == "last" else None
            assert await service.get_session(**ids(case), config=config)


def read(path: Path, case: Json) -> None:
    """Do with the reader what the case says; a reader appends nothing."""
    with vectors.reader_of(path, "database.json") as reader:
        app_name, user_id, session_id = ids(case).values()
        if case["when"] == "list":
            assert reader.listing(app_name, user_id)
        elif case["when"] != "open":
            last = {"get": None, "last": 1, "append": 1}[case["when"]]
            assert reader.session(app_name, user_id, session_id, last)
        if "not_with" in case:
            assert reader.current_key(AES, app_name, user_id) != case["not_with"]


@vectors.each_case(CASES)
async def test_reader_written_from_the_page_alone_and_service_reject_the_database_as_named(
    database: Path, case: Json
) -> None:
    vectors.assert_read_as_named(case, lambda: read(database, case))
    await vectors.assert_used_as_named(case, lambda: use(database, case))


@vectors.each_case([one for one in CASES if "not_with" in one])
async def test_new_records_are_not_encrypted_with_the_named_key(database: Path, case: Json) -> None:
    before = _records(database)
    await use(database, case)
    headers = [record[5:13] for record in _records(database) - before]
    assert len(headers) >= 2, "an append writes the session and the event"
    assert case["not_with"].to_bytes(8, signed=True) not in headers


def _records(path: Path) -> set[bytes]:
    query = "SELECT state FROM secure_sessions UNION ALL SELECT event FROM secure_events"
    return {record for (record,) in execute(path, query)}
