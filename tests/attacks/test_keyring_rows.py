"""Rows of `secure_keyring` that an attacker changes or inserts, at a start and beside a service."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from adk_secure_sessions import ConfigurationError, EncryptedSessionService, WrongKeyError
from tests.attacks.databases import also_on
from tests.attacks.support import Database, assert_rejected, get, only, rejection
from tests.attacks.world import VISIT

COPY = (
    "INSERT INTO secure_keyring SELECT {id}, {purpose}, {root}, {created_at}, {wrapped} "
    "FROM secure_keyring WHERE purpose = 'data'"
)
SAME = {
    "id": "42",
    "purpose": "purpose",
    "root": "root_key_id",
    "created_at": "created_at",
    "wrapped": "wrapped",
}
# Rows that no service has written; a server's columns do not take values of another type.
JUNK = {
    "copy of a data master": {},
    "newest data master": {"created_at": "9000000000000000000"},
    "garbage": {"wrapped": "zeroblob(61)"},
    "plaintext": {"root": "'none'", "wrapped": "zeroblob(33)"},
    "unknown root key": {"root": "'another'"},
    "second index master": {"purpose": "'index'"},
    "unknown purpose": {"purpose": "'other'"},
    "purpose in capitals": {"purpose": "'DATA'"},
    "negative id": {"id": "-42"},
    "negative time": {"created_at": "-1"},
    "no root key": {"root": "''"},
}


def insert(db: Database, junk: str) -> str:
    """Insert the row; return its id."""
    columns = SAME | JUNK[junk]
    db.run(COPY.format(**columns))
    return columns["id"]


@pytest.mark.parametrize("junk", JUNK)
async def test_junk_row_is_rejected_at_a_start_by_its_id(db: Database, junk: str) -> None:
    row = insert(db, junk)
    before = db.dump()
    async with db.service() as service:
        error = await rejection(get, service, db, VISIT)
    assert type(error).__name__ in ("WrongKeyError", "PlaintextRefusedError")
    assert f" {row}" in str(error)
    assert db.dump() == before


@asynccontextmanager
async def running(db: Database) -> AsyncIterator[EncryptedSessionService]:
    async with db.service() as service:
        assert await service.get_session(**VISIT._asdict())
        yield service


@also_on("postgresql")
@pytest.mark.parametrize("junk", JUNK)
async def test_junk_row_beside_a_running_service_is_logged_and_new_users_work(
    db: Database, junk: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(db) as service:
        row = insert(db, junk)
        caplog.set_level(logging.ERROR, "adk_secure_sessions")
        for number in range(3):
            who: dict[str, Any] = {"app_name": VISIT.app_name, "user_id": f"new {number}"}
            session = await service.create_session(**who)
            assert await service.get_session(**who, session_id=session.id)
        assert await service.get_session(**VISIT._asdict())
    (record,) = caplog.records
    assert f" {row}" in record.getMessage()


CHANGED = {
    "id": "id + 1",
    "created_at": "created_at + 1",
    "purpose": "'index'",
    "root_key_id": "'another'",
    "wrapped": "zeroblob(61)",
}


@pytest.mark.parametrize("column", CHANGED)
async def test_changed_master_beside_a_running_service_is_used_for_nothing_new(
    db: Database, column: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Not for new data keys, although the process has unwrapped it before the change."""
    async with running(db) as service:
        insert(db, "garbage")  # so that the service reads the keyring again
        db.run(f"UPDATE secure_keyring SET {column} = {CHANGED[column]} WHERE purpose = 'data'")
        before = db.dump()
        with pytest.raises(WrongKeyError):
            await service.create_session(app_name=VISIT.app_name, user_id="new")
        assert db.dump() == before
        assert await service.get_session(**VISIT._asdict())


@also_on("postgresql")
@pytest.mark.parametrize("change", ["upper(value)", "value || ' '", "'0x' || value", "'00'", "''"])
async def test_database_id_in_another_spelling_is_rejected(db: Database, change: str) -> None:
    db.run(f"UPDATE secure_meta SET value = {change} WHERE name = 'database_id'")
    await assert_rejected(db, only(get), ConfigurationError)
