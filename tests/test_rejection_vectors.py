"""vectors/rejections.json: databases that the service and the reader must reject."""

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from google.adk.events import Event
from google.adk.sessions.base_session_service import GetSessionConfig

from adk_secure_sessions import (
    AesGcmBackend,
    DecryptionError,
    EncryptedSessionService,
    FernetBackend,
    SecureSessionError,
)
from tests import format_reader

VECTORS = Path(__file__).parent / "vectors"
Json = dict[str, Any]
CASES: list[Json] = json.loads((VECTORS / "rejections.json").read_text(encoding="utf-8"))["cases"]
DATABASE: Json = json.loads((VECTORS / "database.json").read_text(encoding="utf-8"))
ROOTS = [bytes.fromhex(root["root_key"]) for root in DATABASE["root_keys"]]
ANY_SESSION = [DATABASE["sessions"][0][name] for name in ("app_name", "user_id", "session_id")]
AES = 1


def name_of(case: Json) -> str:
    return str(case["name"])


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vector") / "sessions.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript((VECTORS / "database.sql").read_text(encoding="utf-8"))
    return path


@pytest.fixture
def database(unchanged: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """The database of the case."""
    path = tmp_path / "sessions.db"
    shutil.copy(unchanged, path)
    shutil.copy(unchanged, path.with_name("before.db"))
    with closing(sqlite3.connect(path)) as connection:
        for statement in request.getfixturevalue("case")["sql"]:
            before = connection.total_changes
            connection.execute(statement)
            is_definition = statement.startswith(("CREATE", "DROP", "ALTER"))
            assert is_definition or connection.total_changes > before, "nothing was changed"
        connection.commit()
    return path


def ids(case: Json) -> dict[str, Any]:
    names = ("app_name", "user_id", "session_id")
    return dict(zip(names, case.get("of", ANY_SESSION), strict=True))


async def use(path: Path, case: Json) -> None:
    """Do with the service what the case says."""
    backends = AesGcmBackend(ROOTS[0]), [FernetBackend(ROOTS[1])]
    async with EncryptedSessionService(f"sqlite:///{path}", *backends) as service:
        if case["when"] == "list":
            who = ids(case)
            del who["session_id"]
            assert (await service.list_sessions(**who)).sessions
        elif case["when"] == "append":
            await _append(path, service, case)
        else:
            config = GetSessionConfig(num_recent_events=1) if case["when"] == "last" else None
            assert await service.get_session(**ids(case), config=config)


async def _append(path: Path, service: EncryptedSessionService, case: Json) -> None:
    """Append to the session as it was before the case, so that the append itself must notice."""
    session = await _loaded(path.with_name("before.db"), case)
    await service.append_event(session, Event(author="user", timestamp=1_800_000_000.0))


async def _loaded(path: Path, case: Json) -> Any:
    backends = AesGcmBackend(ROOTS[0]), [FernetBackend(ROOTS[1])]
    async with EncryptedSessionService(f"sqlite:///{path}", *backends) as service:
        return await service.get_session(**ids(case))


def read(path: Path, case: Json) -> None:
    """Do with the reader what the case says; a reader appends nothing."""
    with closing(sqlite3.connect(path)) as connection:
        reader = format_reader.Database(connection, *ROOTS)
        app_name, user_id, session_id = ids(case).values()
        if case["when"] == "list":
            assert reader.listing(app_name, user_id)
        elif case["when"] != "open":
            last = {"get": None, "last": 1, "append": 1}[case["when"]]
            assert reader.session(app_name, user_id, session_id, last)
        if "not_with" in case:
            assert reader.current_key(AES, app_name, user_id) != case["not_with"]


@pytest.mark.parametrize("case", CASES, ids=name_of)
async def test_service_rejects_the_database_as_named(database: Path, case: Json) -> None:
    if case["expect"] == "ok":
        await use(database, case)
        return
    with pytest.raises(SecureSessionError) as info:
        await use(database, case)
    assert type(info.value).__name__ == case["expect"]
    if "reason" in case:
        assert isinstance(info.value, DecryptionError)
        assert info.value.reason == case["reason"]


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_reader_written_from_the_page_alone_rejects_the_database(
    database: Path, case: Json
) -> None:
    if case["expect"] == "ok":
        read(database, case)
        return
    with pytest.raises(format_reader.Refused) as info:
        read(database, case)
    is_flags = isinstance(info.value, format_reader.UnknownFlags)
    assert is_flags == (case.get("reason") == "unknown flags")


@pytest.mark.parametrize("case", [one for one in CASES if "not_with" in one], ids=name_of)
async def test_new_records_are_not_encrypted_with_the_named_key(database: Path, case: Json) -> None:
    before = _records(database)
    await use(database, case)
    headers = [record[5:13] for record in _records(database) - before]
    assert len(headers) >= 2, "an append writes the session and the event"
    assert case["not_with"].to_bytes(8, signed=True) not in headers


def _records(path: Path) -> set[bytes]:
    with closing(sqlite3.connect(path)) as connection:
        query = "SELECT state FROM secure_sessions UNION ALL SELECT event FROM secure_events"
        return {record for (record,) in connection.execute(query)}


def test_cases_are_named_apart_and_have_both_outcomes() -> None:
    names = [case["name"] for case in CASES]
    assert len(set(names)) == len(names)
    assert {case["expect"] == "ok" for case in CASES} == {True, False}
