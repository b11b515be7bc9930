"""vectors/state_index.*: a database with a search index, for the service and the page's reader."""

from pathlib import Path

import pytest

from adk_secure_sessions import ConfigurationError, EncryptedSessionService
from adk_secure_sessions.maintenance import Database, fill_index, verify
from tests import format_reader
from tests.sqlite_files import execute
from tests.vector_databases import Json, backends, copies_of, load, reader_of

SEARCHES: list[Json] = load("state_index.json")["searches"]
BACKENDS = backends("state_index.json")
CLINIC = SEARCHES[0]["app_name"]
database = copies_of("state_index.sql")


async def test_service_finds_what_the_vector_says(database: Path) -> None:
    async with EncryptedSessionService(f"sqlite:///{database}", *BACKENDS) as service:
        for one in SEARCHES:
            found = service.find_sessions(
                app_name=one["app_name"], key=one["key"], value=one["value"]
            )
            if one["found"] is None:
                with pytest.raises(ConfigurationError, match="is not complete"):
                    await found
            else:
                sessions = (await found).sessions
                assert sorted([each.user_id, each.id] for each in sessions) == sorted(one["found"])


def test_reader_written_from_the_page_alone_finds_the_same(database: Path) -> None:
    with reader_of(database, "state_index.json") as reader:
        for one in SEARCHES:
            arguments = (one["app_name"], one["key"], one["value"])
            if one["found"] is None:
                with pytest.raises(format_reader.Refused):
                    reader.search(*arguments)
            else:
                found = reader.search(*arguments)
                assert [[each["user_id"], each["session_id"]] for each in found] == one["found"]


async def test_verify_names_the_forged_rows_and_fill_corrects_them(database: Path) -> None:
    async with Database(f"sqlite:///{database}", *BACKENDS) as db:
        found = await verify(db)
        assert found.bad == 4
        assert {one.table for one in found.problems} == {"secure_state_index"}
        filled = await fill_index(db, CLINIC, ["ticket", "user:mrn"])
        assert (filled.written, filled.removed, filled.complete) == (3, 1, True)
        assert (await verify(db)).bad == 0
    with reader_of(database, "state_index.json") as reader:
        query = "SELECT * FROM secure_state_index WHERE row_id <> ?"
        rows = execute(database, query, [2**63 - 1])
        right = [reader.indexed_rows(CLINIC, key) for key in ("ticket", "user:mrn")]
        assert set(rows) == right[0] | right[1]
