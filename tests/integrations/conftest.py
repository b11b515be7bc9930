import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integrations import s3


@pytest.fixture
def no_settings_of_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide this machine's own settings."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "AZURE_", "GOOGLE_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[s3.Server]:
    with s3.running() as server:
        yield server


@pytest.fixture
def server(s3_server: s3.Server, no_settings_of_stores: None) -> s3.Server:
    """S3 by moto, empty."""
    s3_server.clear()
    return s3_server


@pytest.fixture
def blobs(tmp_path: Path) -> Path:
    """A directory for the contents of artifacts, which does not exist yet."""
    return tmp_path / "blobs"
