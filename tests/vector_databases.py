"""The databases in tests/vectors: what they contain, and fixtures that make copies of them."""

import json
import sqlite3
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from adk_secure_sessions import AesGcmBackend, FernetBackend

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


def backends(name: str) -> tuple[AesGcmBackend, list[FernetBackend]]:
    """The arguments `backend` and `additional_backends` for the database *name*."""
    keys = roots(name)
    return AesGcmBackend(keys["aesgcm"]), [FernetBackend(keys["fernet"])]


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
