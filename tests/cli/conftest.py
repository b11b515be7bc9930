import asyncio
import base64
from pathlib import Path

import pytest

from adk_secure_sessions.cli.config import envvar
from tests.maintenance.support import NEW, OLD, fill

KEYS = {"OLD_KEY": OLD, "NEW_KEY": NEW}


@pytest.fixture(autouse=True)
def _keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, key in KEYS.items():
        monkeypatch.setenv(name, base64.b64encode(key).decode())
    monkeypatch.delenv(envvar("db"), raising=False)


@pytest.fixture
def filled(url: str) -> str:
    asyncio.run(fill(url))
    return url


@pytest.fixture(scope="session")
def filled_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Made once: copying it takes less than a tenth of the time of `fill`."""
    path = tmp_path_factory.mktemp("filled") / "sessions.db"
    asyncio.run(fill(f"sqlite:///{path}"))
    return path.read_bytes()


@pytest.fixture
def file(filled_file: bytes, tmp_path: Path, file_url: str) -> str:
    (tmp_path / "sessions.db").write_bytes(filled_file)
    return file_url
