"""The databases that earlier releases have written: every release must be able to use them."""

import base64
import hashlib
import json
import re
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from google.adk.events import Event

from adk_secure_sessions import (
    AesGcmBackend,
    EncryptedArtifactService,
    EncryptedMemoryService,
    EncryptedSessionService,
)
from adk_secure_sessions.integrations.blob_maintenance import check_blobs
from adk_secure_sessions.maintenance import Database, status, verify
from examples.freeze_release import described
from tests.pages import DOCS, ROOT

VECTORS = Path(__file__).parent / "vectors"
# The folders that examples/freeze_release.py has written, each with the hash of its files.
RELEASES = {"release_2_0": "33ef9c8f29e8b52deb417dcacfaad50bc4fadd09289a0bb6ebf9bc330895b92e"}
USER = {"app_name": "clinic", "user_id": "ada"}
Json = dict[str, Any]


def contents(release: str) -> Json:
    found: Json = json.loads((VECTORS / release / "contents.json").read_text("utf-8"))
    return found


class Restored:
    """A copy of what a release has written: databases, artifacts and the root key."""

    def __init__(self, release: str, directory: Path) -> None:
        self.contents = contents(release)
        for name in ("data", "keys"):
            with closing(sqlite3.connect(directory / f"{name}.db")) as connection:
                connection.executescript((VECTORS / release / f"{name}.sql").read_text("utf-8"))
        for name, content in self.contents["blobs"].items():
            path = directory / "artifacts" / name
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            path.write_bytes(base64.b64decode(content))
        self.directory = directory
        self._places = (
            f"sqlite:///{directory}/data.db",
            AesGcmBackend(bytes.fromhex(self.contents["root_key"])),
        )
        self._keys = f"sqlite:///{directory}/keys.db"

    def service(self) -> EncryptedSessionService:
        return EncryptedSessionService(*self._places, key_db_url=self._keys)

    def database(self) -> Database:
        return Database(*self._places, key_db_url=self._keys)

    def dump(self) -> list[list[str]]:
        found = []
        for name in ("data", "keys"):
            with closing(sqlite3.connect(self.directory / f"{name}.db")) as connection:
                found.append([*connection.iterdump()])
        return found


@pytest.fixture(params=RELEASES)
def restored(request: pytest.FixtureRequest, tmp_path: Path) -> Restored:
    return Restored(request.param, tmp_path)


@pytest.mark.parametrize("release", RELEASES)
def test_frozen_release_is_never_changed(release: str) -> None:
    files = sorted((VECTORS / release).iterdir())
    assert [path.name for path in files] == ["README.md", "contents.json", "data.sql", "keys.sql"]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in files[1:]))
    assert digest.hexdigest() == RELEASES[release]


async def test_sessions_of_an_earlier_release_are_read_and_appended_to(restored: Restored) -> None:
    async with restored.service() as service:
        listed = (await service.list_sessions(app_name="clinic")).sessions
        expected = restored.contents["sessions"]
        assert {one.id for one in listed} == {one["session_id"] for one in expected}
        for one in expected:
            ids = {name: one[name] for name in ("user_id", "session_id")}
            session = await service.get_session(app_name="clinic", **ids)
            assert session is not None
            assert described(session) == one
            await service.append_event(session, Event(author="user", id="new"))
            again = await service.get_session(app_name="clinic", **ids)
            assert again is not None
            assert [event.id for event in again.events][-1] == "new"


async def test_artifacts_and_memories_of_an_earlier_release_are_read(restored: Restored) -> None:
    async with restored.service() as service:
        artifacts = EncryptedArtifactService(service, restored.directory / "artifacts")
        for name, texts in restored.contents["artifacts"].items():
            for version, text in enumerate(texts):
                part = await artifacts.load_artifact(**USER, filename=name, version=version)
                assert part is not None
                assert part.text == text
        memory = EncryptedMemoryService(service)
        for text in restored.contents["memories"]:
            (found,) = (await memory.search_memory(**USER, query=text)).memories
            assert found.content.parts is not None
            assert found.content.parts[0].text == text


async def test_commands_understand_an_earlier_release_and_change_nothing(
    restored: Restored,
) -> None:
    before = restored.dump()
    async with restored.database() as db:
        found = await verify(db)
        assert found.bad == found.unchecked == 0
        assert found.sessions == len(restored.contents["sessions"])
        assert found.items > 0
        state = await status(db)
        assert state.migration is not None
        assert state.migration.sessions == 1
        blobs = await check_blobs(db, restored.directory / "artifacts")
        assert (blobs.blobs, blobs.missing) == (len(restored.contents["blobs"]), 0)
    assert restored.dump() == before


# --- docs/operations-reference.md ----------------------------------------------------------------

PAGE = (DOCS / "operations-reference.md").read_text("utf-8")


def test_page_on_upgrading_names_every_frozen_database() -> None:
    folders = {f"tests/vectors/{path.name}" for path in VECTORS.iterdir() if path.is_dir()}
    assert set(re.findall(r"`(tests/vectors/\w+)`", PAGE)) == folders
    assert {f"tests/vectors/{name}" for name in RELEASES} < folders


def test_page_on_upgrading_names_every_feature_of_the_format() -> None:
    table = (DOCS / "format.md").read_text("utf-8").split("Format 2 defines these features:")[1]
    defined = re.findall(r"^\| \[`([\w-]+)`\]", table.split("\n1. ")[0], re.MULTILINE)
    listed = PAGE.split("| feature | added when |")[1].split("\n\n")[0]
    assert len(defined) >= 6
    assert sorted(re.findall(r"`([\w-]+)`(?=[,\s].*\|.*\|)", listed)) == sorted(defined)


def test_page_on_upgrading_says_which_names_are_deprecated() -> None:
    source = ROOT / "src" / "adk_secure_sessions"
    warned = [path for path in source.rglob("*.py") if "DeprecationWarning" in path.read_text()]
    assert ("At present, no name is deprecated." in PAGE) == (not warned)
