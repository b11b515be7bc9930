"""The chains in tests/vectors/audit.json are read as docs/format.md says, by two readers."""

import json
import sqlite3
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from adk_secure_sessions import AesGcmBackend, Audit, EncryptedSessionService
from adk_secure_sessions.formats.audit_records import (
    NO_AUDIT_LINK,
    link_of,
    open_entry,
    record_context,
)
from adk_secure_sessions.keys.blind_index import IndexMaster
from adk_secure_sessions.maintenance import Database, verify_audit
from adk_secure_sessions.storage.schema import audit_records
from tests import format_reader
from tests.format_reader import Refused
from tests.test_format_page import rows as table_rows
from tests.test_format_page import section, type_on_page

VECTORS = json.loads((Path(__file__).parent / "vectors" / "audit.json").read_text(encoding="utf-8"))
INDEX_MASTER = bytes.fromhex(VECTORS["index_master"])
DATABASE_ID = bytes.fromhex(VECTORS["database_id"])
REJECTED = {one["name"]: one["rows"] for one in VECTORS["rejected"]}
Row = dict[str, Any]


def decoded(rows: list[Row]) -> list[Row]:
    hexadecimal = {"chain", "record"}
    return [
        {name: bytes.fromhex(row[name]) if name in hexadecimal else row[name] for name in row}
        for row in rows
    ]


@pytest.mark.parametrize("case", VECTORS["accepted"], ids=["one", "two"])
def test_both_readers_accept_the_chain(case: Row) -> None:
    rows = decoded(case["rows"])
    found = format_reader.open_chain(INDEX_MASTER, DATABASE_ID, rows)
    assert [link.hex() for link, _ in found] == case["links"]
    assert [fields for _, fields in found] == case["fields"]
    links = [NO_AUDIT_LINK, *(bytes.fromhex(link) for link in case["links"])]
    for number, row in enumerate(rows):
        moment = datetime.fromtimestamp(0, UTC) + timedelta(microseconds=row["time"])
        assert case["fields"][number]["time"] == f"{moment:%Y-%m-%dT%H:%M:%S.%f+00:00}"
        cipher = IndexMaster(INDEX_MASTER).audit_cipher(DATABASE_ID, row["chain"])
        place = record_context(DATABASE_ID, row["chain"], row["number"], row["time"])
        assert open_entry(cipher, place, row["record"]) == (links[number], case["fields"][number])
        assert link_of(place, row["record"]) == links[number + 1]


@pytest.mark.parametrize("name", REJECTED)
def test_reader_written_from_the_page_alone_rejects_the_chain(name: str) -> None:
    with pytest.raises(Refused):
        format_reader.open_chain(INDEX_MASTER, DATABASE_ID, decoded(REJECTED[name]))


@pytest.fixture
async def database(tmp_path: Path) -> Path:
    """A database with an empty trail, and with the keys of the vectors."""
    path = tmp_path / "sessions.db"
    async with EncryptedSessionService(
        f"sqlite:///{path}", BACKEND, audit=Audit("blind", table=True)
    ) as service:
        await service.prepare_tables()
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DELETE FROM secure_audit")
    return path


BACKEND = AesGcmBackend(bytes(32))


@pytest.mark.parametrize("name", [None, *REJECTED])
async def test_verify_rejects_the_same_chains(database: Path, name: str | None) -> None:
    chain = VECTORS["accepted"][0]["rows"] if name is None else REJECTED[name]
    insert = "INSERT INTO secure_audit VALUES (:chain, :number, :time, :record)"
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.executemany(insert, decoded(chain))
    async with Database(f"sqlite:///{database}", BACKEND) as db:
        keyring = await db.keyring()
        keyring.index_master, keyring.database_id = IndexMaster(INDEX_MASTER), DATABASE_ID
        found = await verify_audit(db)
    assert (found.bad == 0) is (name is None)
    assert found.chains == (found.bad == 0), "a chain counts if it is authentic"


def test_page_lists_the_columns_of_the_trail() -> None:
    text = section("The audit trail").partition("\n\n| value |")[0]
    listed = [(name.strip("`"), kind.split(",")[0]) for name, kind, _ in table_rows(text)]
    assert listed == [(column.name, type_on_page(column)) for column in audit_records.columns]
