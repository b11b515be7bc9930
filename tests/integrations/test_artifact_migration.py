"""`migrate artifacts`: from google-adk's own artifact service into the encrypted one."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from google.adk.artifacts import FileArtifactService
from google.genai import types

from adk_secure_sessions import AesGcmBackend, EncryptedArtifactService, EncryptedSessionService
from adk_secure_sessions.errors import ConfigurationError
from adk_secure_sessions.integrations.artifact_migration import ArtifactMigration, migrate_artifacts
from adk_secure_sessions.integrations.artifact_sources import FileArtifacts
from adk_secure_sessions.maintenance import Database, erase_user
from tests.integrations.blob_files import contents
from tests.maintenance.support import OLD

BACKEND = AesGcmBackend(OLD)
ADA = {"app_name": "clinic", "user_id": "ada"}
SCAN = {**ADA, "session_id": "s1", "filename": "scans/é.png"}
NOTE = {**ADA, "session_id": "s1", "filename": "scans"}
PROFILE = {**ADA, "session_id": None, "filename": "user:profile"}


def blob(data: bytes, name: str | None = None) -> types.Part:
    return types.Part(inline_data=types.Blob(data=data, mime_type="image/png", display_name=name))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A directory of google-adk: three artifacts, one of which is below another, four versions."""
    root = tmp_path / "adk-artifacts"

    async def fill() -> None:
        adk = FileArtifactService(root)
        metadata = {"doctor": "bob", "n": [1, None]}
        await adk.save_artifact(**SCAN, artifact=blob(b"one"), custom_metadata=metadata)
        await adk.save_artifact(**SCAN, artifact=blob(b"", "scan.png"))  # type: ignore[arg-type]
        await adk.save_artifact(**NOTE, artifact=types.Part(text="needle €"))  # type: ignore[arg-type]
        bare = {**PROFILE, "filename": "profile"}  # google-adk lists it as an artifact of the user
        await adk.save_artifact(**bare, artifact=types.Part(text=""))  # type: ignore[arg-type]

    asyncio.run(fill())
    return root


@pytest.fixture
def file_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/sessions.db"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "artifacts"


async def migrate(root: Path, url: str, store: Path, action: Any, **more: Any) -> ArtifactMigration:
    async with Database(url, BACKEND) as db:
        return await migrate_artifacts(FileArtifacts(root), db, store, action, **more)


@pytest.fixture
async def target(file_url: str, store: Path) -> AsyncIterator[EncryptedArtifactService]:
    async with EncryptedSessionService(file_url, BACKEND) as sessions:
        yield EncryptedArtifactService(sessions, store)


async def test_every_version_is_equal_afterwards(
    root: Path, file_url: str, store: Path, target: EncryptedArtifactService
) -> None:
    done = await migrate(root, file_url, store, "copy")
    assert (done.copied, done.versions, done.size, done.succeeded) == (3, 4, 3 + 0 + 10, True)
    adk = FileArtifactService(root)
    for ids in (SCAN, NOTE, PROFILE):
        found = await target.list_artifact_versions(**ids)
        expected = await adk.list_artifact_versions(**ids)
        assert len(found) == len(expected) == (2 if ids is SCAN else 1)
        for one, other in zip(found, expected, strict=True):
            # google-adk stores no type for a text.
            assert one.mime_type == (other.mime_type or "text/plain")
            for field in ("version", "create_time", "custom_metadata"):
                assert getattr(one, field) == getattr(other, field)
            part = await target.load_artifact(**ids, version=one.version)
            assert part == await adk.load_artifact(**ids, version=one.version)
    done = await migrate(root, file_url, store, "compare")
    assert (done.equal, done.succeeded) == (3, True)
    files = len(contents(store))
    again = await migrate(root, file_url, store, "copy")
    assert (again.copied, again.equal, len(contents(store))) == (0, 3, files)


async def test_copy_goes_on_where_it_ended_and_keeps_what_services_saved(
    root: Path, file_url: str, store: Path, target: EncryptedArtifactService
) -> None:
    versions = root / "apps/clinic/users/ada/sessions/s1/artifacts/scans/é.png/versions"
    (versions / "1").rename(root / "later")
    assert (await migrate(root, file_url, store, "copy")).versions == 3
    (root / "later").rename(versions / "1")
    compared = await migrate(root, file_url, store, "compare")
    assert (compared.missing, compared.equal, compared.succeeded) == (1, 2, False)
    assert (await migrate(root, file_url, store, "erase-source")).deleted == 0
    done = await migrate(root, file_url, store, "copy")
    assert (done.copied, done.versions, done.equal) == (1, 1, 2)
    assert await target.save_artifact(**NOTE, artifact=types.Part(text="new")) == 1  # type: ignore[arg-type]
    assert (await migrate(root, file_url, store, "compare")).succeeded
    # Both sides have saved a version 1.
    await FileArtifactService(root).save_artifact(**NOTE, artifact=types.Part(text="other"))  # type: ignore[arg-type]
    done = await migrate(root, file_url, store, "copy", show_ids=True)
    assert (done.different, done.copied, done.succeeded) == (1, 0, False)
    (finding,) = done.findings
    assert finding[1:] == ("version 1 differs in the target", "clinic", "ada", "s1", "scans")
    part = await target.load_artifact(**NOTE)  # type: ignore[arg-type]
    assert part is not None
    assert part.text == "new"


async def test_gap_in_the_version_numbers_is_named_and_refused(
    root: Path, file_url: str, store: Path
) -> None:
    shutil.rmtree(root / "apps/clinic/users/ada/sessions/s1/artifacts/scans/é.png/versions/0")
    for action in ("copy", "compare", "erase-source"):
        done = await migrate(root, file_url, store, action)
        assert (done.bad, done.equal + done.copied, done.deleted) == (1, 2, 0)
        assert not done.succeeded
        (finding,) = done.findings
        assert "version 0 is missing" in finding.reason
        assert "clinic" not in finding.line + repr(finding)


async def test_changed_content_is_found_by_compare(root: Path, file_url: str, store: Path) -> None:
    await migrate(root, file_url, store, "copy")
    (file,) = root.rglob("versions/0/é.png")
    file.write_bytes(b"two")
    done = await migrate(root, file_url, store, "compare")
    assert (done.different, done.equal) == (1, 2)
    done = await migrate(root, file_url, store, "erase-source")
    assert (done.deleted, file.exists()) == (0, True)


async def test_source_is_erased_after_a_clean_comparison(
    root: Path, file_url: str, store: Path, target: EncryptedArtifactService
) -> None:
    await migrate(root, file_url, store, "copy")
    (parent,) = root.rglob("é.png/versions")
    (parent / ".2.pending").mkdir()
    (parent / ".2.pending" / "é.png").write_bytes(b"unfinished")
    done = await migrate(root, file_url, store, "erase-source", dry_run=True)
    assert (done.deleted, len(list(root.rglob("metadata.json")))) == (3, 4)
    done = await migrate(root, file_url, store, "erase-source")
    assert (done.deleted, done.succeeded) == (3, True)
    assert [path for path in root.rglob("*") if path.is_file()] == []
    part = await target.load_artifact(**SCAN, version=0)
    assert part == blob(b"one")


async def test_artifact_that_changes_after_the_comparison_is_kept(
    root: Path, file_url: str, store: Path
) -> None:
    await migrate(root, file_url, store, "copy")

    class Changing(FileArtifacts):
        walks = 0

        async def artifacts(self) -> AsyncIterator[Any]:
            self.walks += 1
            if self.walks == 2:
                await FileArtifactService(root).save_artifact(**NOTE, artifact=blob(b"new"))  # type: ignore[arg-type]
            async for one in super().artifacts():
                yield one

    async with Database(file_url, BACKEND) as db:
        done = await migrate_artifacts(Changing(root), db, store, "erase-source")
    assert (done.deleted, done.changed, done.succeeded) == (2, 1, False)
    assert await FileArtifactService(root).list_versions(**NOTE) == [0, 1]


async def test_artifacts_of_an_erased_user_are_not_copied_again(
    root: Path, file_url: str, store: Path
) -> None:
    await migrate(root, file_url, store, "copy")
    async with Database(file_url, BACKEND) as db:
        assert (await erase_user(db, "clinic", "ada")).was_migrated
    done = await migrate(root, file_url, store, "copy")
    assert (done.copied, done.erased, done.succeeded) == (0, 3, True)
    assert (await migrate(root, file_url, store, "erase-source")).deleted == 3


async def test_content_outside_the_directory_is_not_read(
    root: Path, file_url: str, store: Path, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"one")
    (file,) = root.rglob("versions/0/é.png")
    metadata = json.loads((file.parent / "metadata.json").read_text())
    (file.parent / "metadata.json").write_text(
        json.dumps(metadata | {"canonicalUri": secret.as_uri()})
    )
    file.unlink()
    file.symlink_to(secret)
    done = await migrate(root, file_url, store, "copy")
    assert (done.bad, done.copied) == (1, 2)
    file.unlink()
    done = await migrate(root, file_url, store, "copy")
    assert (done.bad, done.equal) == (1, 2)
    (root / "apps/lab").symlink_to(tmp_path)
    with pytest.raises(ConfigurationError, match="symbolic link"):
        await migrate(root, file_url, store, "copy")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"fileName": "other"}, "the name of another artifact"),
        ({"fileName": "../é.png"}, "the name of another artifact"),
        ({"createTime": "needle"}, "no readable metadata.json"),
        ({"mimeType": None}, "not UTF-8"),
    ],
)
async def test_version_with_wrong_metadata_or_text_is_refused(
    change: dict[str, Any], reason: str, root: Path, file_url: str, store: Path
) -> None:
    (file,) = root.rglob("versions/1/é.png")
    file.write_bytes(b"needle \xff")
    metadata = file.parent / "metadata.json"
    metadata.write_text(json.dumps(json.loads(metadata.read_text()) | change))
    done = await migrate(root, file_url, store, "copy")
    (finding,) = done.findings
    assert (done.bad, reason in finding.reason, "needle" in finding.reason) == (1, True, False)


async def test_directory_of_an_older_google_adk_names_no_app(root: Path, tmp_path: Path) -> None:
    (root / "users").mkdir()
    with pytest.raises(ConfigurationError, match="apps/NAME/users"):
        FileArtifacts(root)
    with pytest.raises(ConfigurationError, match="has no directory 'apps'"):
        FileArtifacts(tmp_path)


async def test_dry_run_writes_nothing(root: Path, file_url: str, store: Path) -> None:
    done = await migrate(root, file_url, store, "copy", dry_run=True)
    assert next(iter(done.lines(True))) == "would be copied: 3 artifacts, 4 versions, 13 bytes"
    assert not Path(file_url.partition(":///")[2]).exists()
