"""The databases in tests/vectors: what they contain, copies of them, and cases of rejections."""

import json
import sqlite3
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from adk_secure_sessions import AesGcmBackend, EncryptionBackend, FernetBackend, SecureSessionError
from tests import format_reader

VECTORS = Path(__file__).parent / "vectors"
Json = dict[str, Any]


@cache
def load(name: str) -> Json:
    found: Json = json.loads((VECTORS / name).read_text(encoding="utf-8"))
    assert found, "an empty vector file must not pass as success"
    return found


def roots(name: str) -> dict[str, bytes]:
    """The root keys of the database *name*, by backend."""
    return {root["backend"]: bytes.fromhex(root["root_key"]) for root in load(name)["root_keys"]}


def backends(name: str, writer: str = "aesgcm") -> tuple[EncryptionBackend, list[Any]]:
    """The arguments `backend` and `additional_backends` for the database *name*."""
    keys = roots(name)
    both: dict[str, EncryptionBackend]
    both = {"aesgcm": AesGcmBackend(keys["aesgcm"]), "fernet": FernetBackend(keys["fernet"])}
    return both.pop(writer), list(both.values())


@contextmanager
def reader_of(path: Path, name: str) -> Iterator[format_reader.Database]:
    """The reader that was written from the page alone, on *path*, a copy of the database *name*."""
    with closing(sqlite3.connect(path)) as connection:
        yield format_reader.Database(connection, *roots(name).values())


def copies_of(name: str) -> Any:
    """Make the fixture `database`: each test gets a new copy of the SQLite database *name*."""

    @pytest.fixture
    def database(tmp_path: Path) -> Path:
        path = tmp_path / "sessions.db"
        path.write_bytes(_file(name))
        return path

    return database


@cache
def _file(name: str) -> bytes:
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript((VECTORS / name).read_text(encoding="utf-8"))
        return connection.serialize()


# --- rejections ----------------------------------------------------------------------------------


def cases_of(name: str) -> list[Json]:
    """The cases of a file of rejections: each has a name of its own, and some are accepted."""
    cases: list[Json] = load(name)["cases"]
    assert len({case["name"] for case in cases}) == len(cases)
    assert {case["expect"] == "ok" for case in cases} == {True, False}
    return cases


def each_case(cases: list[Json]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=lambda case: str(case["name"]))


def change(path: Path, case: Json) -> None:
    """Change the database as *case* says."""
    with closing(sqlite3.connect(path)) as connection:
        for statement in case.get("sql", ()):
            before = connection.total_changes
            connection.execute(statement)
            is_definition = statement.startswith(("CREATE", "DROP", "ALTER"))
            assert is_definition or connection.total_changes > before, "nothing was changed"
        connection.commit()


async def assert_used_as_named(case: Json, use: Callable[[], Awaitable[object]]) -> None:
    """Using a service is accepted, or rejected with the error that *case* names."""
    if case["expect"] == "ok":
        await use()
        return
    with pytest.raises(SecureSessionError) as info:
        await use()
    assert type(info.value).__name__ == case["expect"]
    if "reason" in case:
        assert getattr(info.value, "reason", None) == case["reason"]


def assert_read_as_named(case: Json, read: Callable[[], object]) -> None:
    """The same of the reader that was written from the page alone."""
    if case["expect"] == "ok":
        read()
        return
    with pytest.raises(format_reader.Refused) as info:
        read()
    is_flags = isinstance(info.value, format_reader.UnknownFlags)
    assert is_flags == (case.get("reason") == "unknown flags")
