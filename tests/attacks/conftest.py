from pathlib import Path

import pytest

from tests.attacks.support import Database, Older
from tests.attacks.world import BACKENDS


@pytest.fixture(params=list(BACKENDS))
def db(request: pytest.FixtureRequest, tmp_path: Path) -> Database:
    """The database under attack, sealed by each backend in turn."""
    return Database(tmp_path / "sessions.db", request.param)


@pytest.fixture(params=["url", "engine"])
def typed_db(request: pytest.FixtureRequest, tmp_path: Path) -> Database:
    """Read by our own threads, and by a caller's engine, which converts types."""
    return Database(tmp_path / "sessions.db", "aesgcm", on_engine=request.param == "engine")


@pytest.fixture
def aes_db(tmp_path: Path) -> Database:
    """Where the cipher makes no difference."""
    return Database(tmp_path / "sessions.db", "aesgcm")


@pytest.fixture
def older(db: Database, tmp_path: Path) -> Older:
    """What an attacker kept from earlier."""
    return db.older(tmp_path)
