"""Unusable keys, URLs, files and databases are rejected with advice, and left unchanged."""

import functools
import logging
import os
import sqlite3
import warnings
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from google.adk.sessions import DatabaseSessionService
from sqlalchemy.ext.asyncio import create_async_engine

import adk_secure_sessions
from adk_secure_sessions import (
    AesGcmBackend,
    ConfigurationError,
    EncryptedSessionService,
    SecureSessionError,
)
from tests.attacks.databases import also_on
from tests.attacks.support import Database, dump
from tests.attacks.world import KEY, VISIT


def service(url: Any, **options: Any) -> EncryptedSessionService:
    return EncryptedSessionService(url, AesGcmBackend(KEY), **options)


# --- paths and files -----------------------------------------------------------------------------


async def assert_unusable(path: Path, match: str = "SQLite file") -> None:
    url = f"sqlite+aiosqlite:///{path}"
    async with service(url) as one:
        with pytest.raises(ConfigurationError, match=match):
            await one.prepare_tables()
        with pytest.raises(ConfigurationError, match=match):
            await one.create_session(app_name="app", user_id="user")
    engine = create_async_engine(url)
    async with EncryptedSessionService(db_engine=engine, backend=AesGcmBackend(KEY)) as one:
        with pytest.raises(ConfigurationError, match=match):
            await one.prepare_tables()
    await engine.dispose()


def tree(directory: Path) -> dict[Path, bytes | None]:
    """The files and directories below *directory*, with the contents of the files."""
    return {one: one.read_bytes() if one.is_file() else None for one in directory.rglob("*")}


# What is in the directory `d`: the content of a file, or None for a directory.
UNUSABLE = {
    "missing directory": ("d/no/such/directory/sessions.db", None),
    "a directory": ("d", None),
    "below a file": ("d/sessions.db", b"text"),
    "a text": ("d", b"not a database, but a text " * 100),
    "a picture": ("d", b"\x89PNG\r\n" + bytes(4096)),
}


@pytest.mark.parametrize(("path", "content"), UNUSABLE.values(), ids=UNUSABLE)
async def test_path_that_cannot_be_a_database_is_rejected(
    tmp_path: Path, path: str, content: bytes | None
) -> None:
    if content is None:
        (tmp_path / "d").mkdir()
    else:
        (tmp_path / "d").write_bytes(content)
    before = tree(tmp_path)
    await assert_unusable(tmp_path / path)
    assert tree(tmp_path) == before


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0, reason="the superuser may read every file"
)
async def test_unreadable_file_is_rejected(file_db: Database) -> None:
    file_db.path.chmod(0)
    await assert_unusable(file_db.path)
    file_db.path.chmod(0o600)


async def test_new_read_only_database_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE theirs (a)")
    before = path.read_bytes()
    async with service(f"sqlite+aiosqlite:///file:{path}?mode=ro&uri=true") as one:
        with pytest.raises(ConfigurationError, match="SQLite file"):
            await one.prepare_tables()
    assert path.read_bytes() == before


# --- what is in the database ---------------------------------------------------------------------


async def assert_left_alone(path: Path, match: str) -> None:
    before = path.read_bytes(), dump(path)
    await assert_unusable(path, match)
    assert (path.read_bytes(), dump(path)) == before


async def assert_unchanged(db: Database, match: str) -> None:
    """The same for the database of an attack, which may be on a server."""
    before = db.dump()
    async with db.service() as one:
        for call in (one.prepare_tables, functools.partial(one.create_session, **VISIT._asdict())):
            with pytest.raises(ConfigurationError, match=match):
                await call()
    assert db.dump() == before


@also_on("engine", "postgresql")
@pytest.mark.parametrize("version", ["3", "10", "1.1", "-1", "next"])
async def test_database_of_a_newer_format_is_rejected(typed_db: Database, version: str) -> None:
    typed_db.run("UPDATE secure_meta SET value = :v WHERE name = 'format'", v=version)
    await assert_unchanged(typed_db, f"format '{version}'.*install")


# A table, and statements of another program.
THEIRS = {
    table: (
        f"{table}.*another database",
        f"CREATE TABLE {table} (id INTEGER, x TEXT); INSERT INTO {table} VALUES (1, 'x')",
    )
    for table in ("secure_meta", "secure_keyring", "secure_users", "secure_sessions")
} | {
    "secure_meta of our shape": (
        "secure_meta",
        "CREATE TABLE secure_meta (name TEXT PRIMARY KEY, value TEXT);"
        "INSERT INTO secure_meta VALUES ('theme', 'dark')",
    ),
    # Its tables may be entirely different: the version in secure_meta decides.
    "newer format": (
        "format '3'.*install",
        "CREATE TABLE secure_meta (name TEXT PRIMARY KEY, value TEXT);"
        "INSERT INTO secure_meta VALUES ('format', '3'); CREATE TABLE secure_things (a)",
    ),
}


@pytest.mark.parametrize(("match", "statements"), THEIRS.values(), ids=THEIRS)
async def test_table_of_our_name_that_is_not_ours_is_rejected(
    tmp_path: Path, match: str, statements: str
) -> None:
    path = tmp_path / "sessions.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.executescript(statements)
    await assert_left_alone(path, match)


@also_on("engine", "postgresql")
async def test_database_without_a_column_of_ours_is_rejected(typed_db: Database) -> None:
    typed_db.define("ALTER TABLE secure_sessions RENAME COLUMN revision TO version")
    await assert_unchanged(typed_db, r"secure_sessions.*another database")


async def test_tables_of_others_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("CREATE TABLE users (id INTEGER PRIMARY KEY, name TEXT)")
        connection.execute("INSERT INTO users VALUES (1, 'theirs')")
    async with service(f"sqlite+aiosqlite:///{path}") as one:
        await one.create_session(app_name="app", user_id="user")
    assert dump(path)["users"] == [(1, "text b'theirs'")]


@pytest.mark.parametrize("adk_first", [True, False])
async def test_database_with_adks_own_tables_works_with_one_warning(
    tmp_path: Path, adk_first: bool, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "sessions.db"
    url = f"sqlite+aiosqlite:///{path}"

    async def use_adk() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs = DatabaseSessionService(url)
            await theirs.create_session(**VISIT._asdict(), state={"in": "plaintext"})
            await theirs.db_engine.dispose()

    if adk_first:
        await use_adk()
    else:
        async with service(url) as one:
            await one.prepare_tables()
        await use_adk()
    caplog.clear()
    before = {name: rows for name, rows in dump(path).items() if not name.startswith("secure_")}
    async with service(url) as one:
        session = await one.create_session(**VISIT._asdict(), state={"a": 1, "user:b": 2})
        assert await one.get_session(**VISIT._asdict()) == session
        assert (await one.list_sessions(app_name=VISIT.app_name)).sessions == [session]
        await one.delete_session(**VISIT._asdict())
        await one.prepare_tables()
    records = [one for one in caplog.records if one.levelno >= logging.WARNING]
    assert [(one.name.split(".")[0], one.levelname) for one in records] == [
        ("adk_secure_sessions", "WARNING")
    ]
    assert "plaintext" in records[0].getMessage()
    after = {name: rows for name, rows in dump(path).items() if not name.startswith("secure_")}
    assert after == before


async def test_database_of_ours_alone_gives_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"sqlite+aiosqlite:///{tmp_path / 'sessions.db'}"
    for _ in range(2):
        async with service(url) as one:
            await one.prepare_tables()
    assert [one for one in caplog.records if one.levelno >= logging.WARNING] == []


@pytest.mark.parametrize(
    "ids",
    [
        {"app_name": 5, "user_id": "user", "session_id": "session"},
        {"app_name": "app", "user_id": None, "session_id": "session"},
        {"app_name": "app", "user_id": "user", "session_id": b"session"},
    ],
)
async def test_id_that_is_not_a_string_is_rejected(aes_db: Database, ids: dict[str, Any]) -> None:
    before = aes_db.dump()
    async with aes_db.service() as one:
        for operation in (one.create_session, one.get_session, one.delete_session):
            with pytest.raises(ValueError, match="must be a string"):
                await operation(**ids)
    assert aes_db.dump() == before


def test_every_public_error_is_a_secure_session_error() -> None:
    names = [name for name in adk_secure_sessions.__all__ if name.endswith("Error")]
    assert len(names) > 5
    for name in set(names) - {"StaleSessionError"}:  # google-adk's own
        assert issubclass(getattr(adk_secure_sessions, name), SecureSessionError)
    assert issubclass(ConfigurationError, ValueError)
