import asyncio
import base64

import pytest

from adk_secure_sessions.cli.config import variable
from tests.maintenance.support import NEW, OLD, fill

KEYS = {"OLD_KEY": OLD, "NEW_KEY": NEW}


@pytest.fixture(autouse=True)
def _keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, key in KEYS.items():
        monkeypatch.setenv(name, base64.b64encode(key).decode())
    monkeypatch.delenv(variable("db"), raising=False)


@pytest.fixture
def filled(url: str) -> str:
    asyncio.run(fill(url))
    return url


@pytest.fixture
def file(file_url: str) -> str:
    asyncio.run(fill(file_url))
    return file_url
