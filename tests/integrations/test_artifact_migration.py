"""`migrate artifacts`: from google-adk's own artifact service into the encrypted one."""

import asyncio
import io
import json
import shutil
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from google.adk.artifacts import FileArtifactService, GcsArtifactService, InMemoryArtifactService
from google.genai import types

from adk_secure_sessions import AesGcmBackend, EncryptedArtifactService, EncryptedSessionService
from adk_secure_sessions.errors import ArtifactStoreError, ConfigurationError
from adk_secure_sessions.integrations.artifact_migration import ArtifactMigration, migrate_artifacts
from adk_secure_sessions.integrations.artifact_sources import (
    ArtifactSource,
    FileArtifacts,
    GcsArtifacts,
    ServiceArtifacts,
    SourceArtifact,
)
from adk_secure_sessions.maintenance import Database, erase_user
from tests.integrations.blob_files import contents
from tests.maintenance.support import OLD

BACKEND = AesGcmBackend(OLD)
Migrate = Callable[..., Coroutine[Any, Any, ArtifactMigration]]
ADA: dict[str, Any] = {"app_name": "clinic", "user_id": "ada"}
SCAN: dict[str, Any] = {**ADA, "session_id": "s1", "filename": "scans/é.png"}
NOTE: dict[str, Any] = {**ADA, "session_id": "s1", "filename": "scans"}
PROFILE: dict[str, Any] = {**ADA, "session_id": None, "filename": "user:profile"}


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
        await adk.save_artifact(**SCAN, artifact=blob(b"", "scan.png"))
        await adk.save_artifact(**NOTE, artifact=types.Part(text="needle €"))
        bare = {**PROFILE, "filename": "profile"}  # google-adk lists it as an artifact of the user
        await adk.save_artifact(**bare, artifact=types.Part(text=""))

    asyncio.run(fill())
    return root


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "artifacts"


@pytest.fixture
def migrate(file_url: str, store: Path) -> Migrate:
    async def run(source: Path | ArtifactSource, action: Any, **more: Any) -> ArtifactMigration:
        source = FileArtifacts(source) if isinstance(source, Path) else source
        async with Database(file_url, BACKEND) as db:
            return await migrate_artifacts(source, db, store, action, **more)

    return run


@pytest.fixture
async def target(file_url: str, store: Path) -> AsyncIterator[EncryptedArtifactService]:
    async with EncryptedSessionService(file_url, BACKEND) as sessions:
        yield EncryptedArtifactService(sessions, store)


async def test_every_version_is_equal_afterwards(
    root: Path, store: Path, target: EncryptedArtifactService, migrate: Migrate
) -> None:
    done = await migrate(root, "copy")
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
    done = await migrate(root, "compare")
    assert (done.equal, done.succeeded) == (3, True)
    files = len(contents(store))
    again = await migrate(root, "copy")
    assert (again.copied, again.equal, len(contents(store))) == (0, 3, files)


async def test_copy_goes_on_where_it_ended_and_keeps_what_services_saved(
    root: Path, target: EncryptedArtifactService, migrate: Migrate
) -> None:
    versions = root / "apps/clinic/users/ada/sessions/s1/artifacts/scans/é.png/versions"
    (versions / "1").rename(root / "later")
    assert (await migrate(root, "copy")).versions == 3
    (root / "later").rename(versions / "1")
    compared = await migrate(root, "compare")
    assert (compared.missing, compared.equal, compared.succeeded) == (1, 2, False)
    assert (await migrate(root, "erase-source")).deleted == 0
    done = await migrate(root, "copy")
    assert (done.copied, done.versions, done.equal) == (1, 1, 2)
    assert await target.save_artifact(**NOTE, artifact=types.Part(text="new")) == 1
    assert (await migrate(root, "compare")).succeeded
    # Both sides have saved a version 1.
    await FileArtifactService(root).save_artifact(**NOTE, artifact=types.Part(text="other"))
    done = await migrate(root, "copy", show_ids=True)
    assert (done.different, done.copied, done.succeeded) == (1, 0, False)
    (finding,) = done.findings
    assert finding.detail.startswith("version 1 differs in the target: delete the artifact on one")
    assert finding[3:] == ("clinic", "ada", "s1", "scans")
    assert await target.load_artifact(**NOTE) == types.Part(text="new")


SESSIONS = [("clinic", "ada", "s1"), ("clinic", "ada", "s2"), ("clinic", "nobody", "s3")]


async def test_artifact_that_two_runs_copy_counts_as_copied_in_both(
    root: Path, migrate: Migrate
) -> None:
    class Overtaken(FileArtifacts):
        """Another run copies the last version of an artifact while the first run reads it."""

        async def artifacts(self) -> AsyncIterator[SourceArtifact]:
            found = [one async for one in super().artifacts() if len(one.versions) == 2]
            for one in found:
                first, last = one.versions
                yield replace(one, versions=[first, replace(last, open=copied_by_the_other_run)])

    def copied_by_the_other_run() -> io.BytesIO:
        other.append(asyncio.run(migrate(root, "copy")))
        return io.BytesIO()

    other: list[ArtifactMigration] = []
    done = await migrate(Overtaken(root), "copy")
    assert (done.copied, done.versions, done.equal) == (1, 1, 0)
    assert (other[0].copied, other[0].versions, other[0].equal) == (3, 3, 0)


async def test_artifacts_of_another_service_are_copied_for_the_sessions_that_are_given(
    target: EncryptedArtifactService, migrate: Migrate
) -> None:
    service = InMemoryArtifactService()
    other = {**NOTE, "session_id": "s4"}  # not given
    reference = types.Part.from_uri(file_uri="gs://bucket/a", mime_type="image/png")
    for ids, part in ((SCAN, blob(b"one")), (SCAN, blob(b"", "scan.png")), (other, blob(b"x"))):
        await service.save_artifact(**ids, artifact=part, custom_metadata={"doctor": "bob"})
    await service.save_artifact(**NOTE, artifact=types.Part(text="needle €"))
    await service.save_artifact(**PROFILE, artifact=reference)
    source = ServiceArtifacts(service, SESSIONS)
    done = await migrate(source, "copy")
    assert (done.copied, done.versions, done.size, done.succeeded) == (3, 4, 13, True)
    for ids in (SCAN, NOTE, PROFILE):
        found = await target.list_artifact_versions(**ids)
        expected = await service.list_artifact_versions(**ids)
        for one, original in zip(found, expected, strict=True):
            for field in ("version", "create_time", "custom_metadata"):
                assert getattr(one, field) == getattr(original, field)
            copy = await target.load_artifact(**ids, version=one.version)
            assert copy == await service.load_artifact(**ids, version=one.version)
    assert await target.load_artifact(**other) is None
    assert (await migrate(source, "compare")).equal == 3
    assert (await migrate(source, "copy")).copied == 0
    with pytest.raises(ConfigurationError, match="delete them with the service"):
        await migrate(source, "erase-source")
    service.artifacts["clinic/ada/s1/scans"][0].data = types.Part(text="changed")
    done = await migrate(source, "compare")
    assert (done.different, done.equal) == (1, 2)


async def test_values_that_json_changes_are_equal_after_the_copy(migrate: Migrate) -> None:
    service = InMemoryArtifactService()
    metadata = {"score": float("nan"), "at": (1, 2)}
    await service.save_artifact(**NOTE, artifact=blob(b"x"), custom_metadata=metadata)
    source = ServiceArtifacts(service, SESSIONS)
    assert (await migrate(source, "copy")).copied == 1
    assert (await migrate(source, "copy")).equal == 1


@pytest.mark.parametrize("service", [InMemoryArtifactService, FileArtifactService])
async def test_rewound_artifact_of_a_service_is_copied_as_such(
    service: Any, tmp_path: Path, target: EncryptedArtifactService, migrate: Migrate
) -> None:
    adk = service(tmp_path / "adk") if service is FileArtifactService else service()
    rewound = types.Part.from_bytes(data=b"", mime_type="application/octet-stream")
    for part in (types.Part(text="a"), rewound, types.Part(text="b")):
        await adk.save_artifact(**NOTE, artifact=part)
    source = ServiceArtifacts(adk, SESSIONS)
    assert (await migrate(source, "copy")).versions == 3
    assert (await migrate(source, "compare")).equal == 1
    assert await target.load_artifact(**NOTE, version=1) is None


async def test_reference_that_a_service_resolves_is_named_and_not_copied(migrate: Migrate) -> None:
    service = InMemoryArtifactService()
    await service.save_artifact(**PROFILE, artifact=types.Part(text="a"))
    for name in ("gone", "user:profile"):
        uri = f"artifact://apps/clinic/users/ada/artifacts/{name}/versions/0"
        part = types.Part(file_data=types.FileData(file_uri=uri))
        await service.save_artifact(**{**NOTE, "filename": name[:4]}, artifact=part)
    done = await migrate(ServiceArtifacts(service, SESSIONS), "copy")
    no_content, other_type = [finding.detail for finding in done.findings]
    assert (done.copied, done.bad, no_content) == (1, 2, "version 0 has no readable content")
    assert "loads with another type than it is listed with" in other_type


async def test_artifact_that_a_service_lists_without_its_prefix_is_copied(
    root: Path, target: EncryptedArtifactService, migrate: Migrate
) -> None:
    adk = FileArtifactService(root)
    same_name = {**NOTE, "filename": "profile"}
    await adk.save_artifact(**same_name, artifact=types.Part(text="of the session"))
    assert (await migrate(ServiceArtifacts(adk, SESSIONS), "copy")).copied == 4
    assert await target.load_artifact(**PROFILE) == types.Part(text="")
    assert await target.load_artifact(**same_name) == types.Part(text="of the session")


async def test_service_whose_versions_are_incomplete_is_not_copied(migrate: Migrate) -> None:
    class Incomplete(InMemoryArtifactService):
        async def load_artifact(self, **ids: Any) -> types.Part | None:
            if ids["filename"] == "lost":
                return None
            if ids["filename"] == "needle":
                raise RuntimeError("needle")
            return await super().load_artifact(**ids)

        async def list_artifact_versions(self, **ids: Any) -> Any:
            found = await super().list_artifact_versions(**ids)
            return found[1:] if ids["filename"] == "gap" else found

    service = Incomplete()
    for name in ("gap", "gap", "lost", "sound"):
        await service.save_artifact(**{**NOTE, "filename": name}, artifact=blob(b"x"))
    source = ServiceArtifacts(service, SESSIONS)
    done = await migrate(source, "copy")
    assert (done.copied, done.bad) == (1, 2)
    assert {finding.detail.partition(",")[0] for finding in done.findings} == {
        "version 0 is missing",
        "version 0 has no readable content",
    }
    await service.save_artifact(**{**NOTE, "filename": "needle"}, artifact=blob(b"x"))
    with pytest.raises(ArtifactStoreError) as caught:
        await migrate(source, "copy")
    assert "needle" not in str(caught.value)


async def test_gap_in_the_version_numbers_is_named_and_refused(
    root: Path, migrate: Migrate
) -> None:
    shutil.rmtree(root / "apps/clinic/users/ada/sessions/s1/artifacts/scans/é.png/versions/0")
    for action in ("copy", "compare", "erase-source"):
        done = await migrate(root, action)
        assert (done.bad, done.equal + done.copied, done.deleted) == (1, 2, 0)
        assert not done.succeeded
        (finding,) = done.findings
        assert "version 0 is missing" in finding.detail
        assert "clinic" not in finding.line + repr(finding)


async def test_source_is_erased_after_a_clean_comparison(
    root: Path, target: EncryptedArtifactService, migrate: Migrate
) -> None:
    await migrate(root, "copy")
    (parent,) = root.rglob("é.png/versions")
    (parent / ".2.pending").mkdir()
    (parent / ".2.pending" / "é.png").write_bytes(b"unfinished")
    done = await migrate(root, "erase-source", dry_run=True)
    assert (done.deleted, len(list(root.rglob("metadata.json")))) == (3, 4)
    done = await migrate(root, "erase-source")
    assert (done.deleted, done.succeeded) == (3, True)
    assert list(root.rglob("*")) == [root / "apps"]  # the names of directories contain ids
    assert await target.load_artifact(**SCAN, version=0) == blob(b"one")


@pytest.mark.parametrize("call", [1, 2, 3])
async def test_erasure_that_stopped_is_continued(
    call: int, root: Path, monkeypatch: pytest.MonkeyPatch, migrate: Migrate
) -> None:
    await migrate(root, "copy")
    calls = 0
    rmtree = shutil.rmtree

    def stop(path: Path) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            next(path.iterdir()).unlink()
            raise OSError(5, "stopped")
        rmtree(path)

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", stop)
        with pytest.raises(ArtifactStoreError, match="stopped"):
            await migrate(root, "erase-source")
    (root / "apps/lab/users/ada/artifacts").mkdir(parents=True)  # left by a killed run
    assert (await migrate(root, "erase-source")).succeeded
    assert list(root.rglob("*")) == [root / "apps"]


async def test_artifact_that_changes_after_the_comparison_is_kept(
    root: Path, migrate: Migrate
) -> None:
    await migrate(root, "copy")

    class Changing(FileArtifacts):
        walks = 0

        async def artifacts(self) -> AsyncIterator[Any]:
            self.walks += 1
            if self.walks == 2:
                await FileArtifactService(root).save_artifact(**NOTE, artifact=blob(b"new"))
            async for one in super().artifacts():
                yield one

    done = await migrate(Changing(root), "erase-source")
    assert (done.deleted, done.changed, done.succeeded) == (2, 1, False)
    assert await FileArtifactService(root).list_versions(**NOTE) == [0, 1]


async def test_artifacts_of_an_erased_user_are_not_copied_again(
    root: Path, file_url: str, migrate: Migrate
) -> None:
    await migrate(root, "copy")
    async with Database(file_url, BACKEND) as db:
        assert (await erase_user(db, "clinic", "ada")).has_migration_table
    done = await migrate(root, "copy")
    assert (done.copied, done.erased, done.succeeded) == (0, 3, True)
    assert (await migrate(root, "erase-source")).deleted == 3


async def test_content_outside_the_directory_is_not_read(
    root: Path, tmp_path: Path, migrate: Migrate
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
    done = await migrate(root, "copy")
    assert (done.bad, done.copied) == (1, 2)
    file.unlink()
    done = await migrate(root, "copy")
    assert (done.bad, done.equal) == (1, 2)
    (root / "apps/lab").symlink_to(tmp_path)
    with pytest.raises(ConfigurationError, match="symbolic link"):
        await migrate(root, "copy")


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
    change: dict[str, Any], reason: str, root: Path, migrate: Migrate
) -> None:
    (file,) = root.rglob("versions/1/é.png")
    file.write_bytes(b"needle \xff")
    metadata = file.parent / "metadata.json"
    metadata.write_text(json.dumps(json.loads(metadata.read_text()) | change))
    done = await migrate(root, "copy")
    (finding,) = done.findings
    assert (done.bad, reason in finding.detail, "needle" in finding.detail) == (1, True, False)


@pytest.mark.parametrize("text", ["[1]", "[" * 100_000, None])
async def test_file_that_is_no_metadata_stops_no_other_artifact(
    text: str | None, root: Path, migrate: Migrate
) -> None:
    (metadata,) = root.rglob("versions/1/metadata.json")
    if text is None:  # a link, which may lead anywhere
        metadata.symlink_to(metadata.rename(root / "metadata.json"))
    else:
        metadata.write_text(text)
    done = await migrate(root, "copy")
    assert (done.bad, done.copied) == (1, 2)


async def test_artifact_that_cannot_be_stored_leaves_no_content(
    root: Path, store: Path, migrate: Migrate
) -> None:
    (metadata,) = root.rglob("scans/versions/0/metadata.json")
    nested = '{"a":' * 250 + "1" + "}" * 250
    metadata.write_text(metadata.read_text().replace("{}", nested))
    done = await migrate(root, "copy")
    assert (done.bad, done.copied, len(contents(store))) == (1, 2, 3)


async def test_content_that_cannot_be_read_stops_no_other_artifact(
    root: Path, migrate: Migrate
) -> None:
    class Vanishing(FileArtifacts):
        async def artifacts(self) -> AsyncIterator[Any]:
            async for one in super().artifacts():
                if one.filename == NOTE["filename"]:
                    next(root.rglob("scans/versions/0/scans")).unlink()
                yield one

    done = await migrate(Vanishing(root), "copy")
    (finding,) = done.findings
    assert (done.bad, done.copied) == (1, 2)
    assert "version 0: the source cannot be used: No such file" in finding.detail


async def test_ids_with_slashes_are_copied(
    root: Path, target: EncryptedArtifactService, migrate: Migrate
) -> None:
    adk = FileArtifactService(root)
    more: list[dict[str, Any]] = [
        {**SCAN, "app_name": "hospital/clinic"},
        {**SCAN, "user_id": "ada/1"},
        {**PROFILE, "user_id": "ada/artifact"},
        {**SCAN, "user_id": "artifacts", "session_id": "versions"},
        {**NOTE, "session_id": "s1/a b"},
    ]
    for ids in more:
        await adk.save_artifact(**ids, artifact=blob(b"more"))
    done = await migrate(root, "copy")
    assert (done.copied, done.succeeded) == (3 + len(more), True)
    for ids in more:
        assert await target.load_artifact(**ids) == blob(b"more")
    assert (await migrate(root, "erase-source")).deleted == 3 + len(more)
    assert list(root.rglob("*")) == [root / "apps"]


async def test_name_that_google_adk_rejects_today_is_copied(
    root: Path, target: EncryptedArtifactService, migrate: Migrate
) -> None:
    """google-adk 1.28 saved artifacts with the directory `versions` in their names."""
    (found,) = root.rglob("scans/versions")
    below = {**NOTE, "filename": "scans/versions/final"}
    (found / "final").mkdir()
    shutil.copytree(found, found / "final/versions", ignore=shutil.ignore_patterns("final"))
    version = found / "final/versions/0"
    (version / "scans").rename(version / "final")
    metadata = version / "metadata.json"
    metadata.write_text(metadata.read_text().replace('"scans"', '"scans/versions/final"'))
    assert (await migrate(root, "copy")).copied == 4
    assert await target.load_artifact(**below) == types.Part(text="needle €")
    # A name that google-adk does not tell from a version.
    shutil.copytree(found / "final/versions", found / "0/versions")
    assert (await migrate(root, "compare")).bad == 1
    shutil.rmtree(found / "0/versions")
    assert (await migrate(root, "erase-source")).deleted == 4
    assert list(root.rglob("*")) == [root / "apps"]


async def test_save_that_was_interrupted_counts_as_no_artifact(
    root: Path, migrate: Migrate
) -> None:
    unfinished = root / "apps/clinic/users/eve/artifacts/plan/versions/.0.pending"
    unfinished.mkdir(parents=True)
    (unfinished / "plan").write_bytes(b"needle")
    assert (await migrate(root, "copy")).copied == 3
    assert (await migrate(root, "compare")).equal == 3
    assert (await migrate(root, "erase-source", dry_run=True)).deleted == 3
    assert (await migrate(root, "erase-source")).deleted == 3
    assert list(root.rglob("*")) == [root / "apps"]


async def test_directory_of_an_older_google_adk_names_no_app(root: Path, tmp_path: Path) -> None:
    (root / "users").mkdir()
    with pytest.raises(ConfigurationError, match="apps/NAME/users"):
        FileArtifacts(root)
    with pytest.raises(ConfigurationError, match="has no directory 'apps'"):
        FileArtifacts(tmp_path)


async def test_dry_run_writes_nothing(root: Path, file_url: str, migrate: Migrate) -> None:
    done = await migrate(root, "copy", dry_run=True)
    assert next(iter(done.lines(True))) == "would be copied: 3 artifacts, 4 versions, 13 bytes"
    assert not Path(file_url.partition(":///")[2]).exists()


# --- buckets: a fake of the client, because no server that imitates Google's is available ---------


class FakeBlob:
    """The attributes and methods of `google.cloud.storage.Blob` that the source uses."""

    def __init__(self, bucket: "FakeClient", name: str) -> None:
        self.bucket, self.name = bucket, name
        self.metadata: dict[str, str] | None = None
        self.content_type: str | None = None
        self.data = b""
        self.size = 0
        self.time_created = datetime(2026, 1, 2, 3, 4, 5, 678901, UTC)
        self.generation, self.metageneration = 0, 1

    def upload_from_string(
        self, data: str | bytes, content_type: str | None, if_generation_match: int
    ) -> None:
        self.data = data.encode() if isinstance(data, str) else data
        self.size, self.content_type, self.generation = len(self.data), content_type, 7
        self.bucket.blobs[self.name] = self

    def download_as_bytes(self) -> bytes:
        return self.data

    def open(self, mode: str, *, if_generation_match: int) -> io.BytesIO:
        assert (mode, if_generation_match) == ("rb", self.generation)
        return io.BytesIO(self.data)

    def delete(self, *, if_generation_match: int) -> None:
        assert if_generation_match == self.generation
        del self.bucket.blobs[self.name]


class FakeClient:
    """A client, and its only bucket.  It lists the objects by name, as the service does."""

    def __init__(self) -> None:
        self.blobs: dict[str, FakeBlob] = {}

    def blob(self, name: str) -> FakeBlob:
        return FakeBlob(self, name)

    def get_blob(self, name: str) -> FakeBlob | None:
        return self.blobs.get(name)

    def list_blobs(self, bucket: object, prefix: str = "") -> list[FakeBlob]:
        return [self.blobs[name] for name in sorted(self.blobs) if name.startswith(prefix)]


class FakeGcsService(GcsArtifactService):
    """google-adk's service, which names the objects, with the fake client."""

    def __init__(self, client: FakeClient) -> None:
        self.bucket_name = "bucket"
        self.storage_client = self.bucket = client


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    """A bucket with nested names, more than ten versions, and every kind of part."""
    cloud = ModuleType("google.cloud")
    cloud.exceptions = ModuleType("google.cloud.exceptions")  # type: ignore[attr-defined]
    cloud.exceptions.PreconditionFailed = KeyError
    monkeypatch.setitem(sys.modules, "google.cloud", cloud)
    monkeypatch.setitem(sys.modules, "google.cloud.exceptions", cloud.exceptions)
    client = FakeClient()
    service = FakeGcsService(client)

    async def fill() -> None:
        for number in range(12):
            await service.save_artifact(**NOTE, artifact=blob(b"%d" % number))
        below = {**NOTE, "filename": "scans/1"}
        await service.save_artifact(**below, artifact=blob(b"x", "name"), custom_metadata={"a": 1})
        await service.save_artifact(**{**NOTE, "filename": ""}, artifact=blob(b"without a name"))
        await service.save_artifact(**PROFILE, artifact=types.Part(text="needle €"))
        uris = (
            "gs://other/file",
            "artifact://apps/clinic/users/ada/artifacts/user:profile/versions/0",
        )
        for uri in uris:
            part = types.Part(file_data=types.FileData(file_uri=uri, mime_type="image/png"))
            await service.save_artifact(
                **{**ADA, "session_id": "s2", "filename": "f"}, artifact=part
            )

    asyncio.run(fill())
    client.blob("other/object").upload_from_string(b"", None, 0)
    client.blob("a/b/c/d/e").upload_from_string(b"", None, 0)
    return client


async def test_bucket_is_copied_compared_and_erased(
    client: FakeClient,
    target: EncryptedArtifactService,
    monkeypatch: pytest.MonkeyPatch,
    migrate: Migrate,
) -> None:
    bucket = partial(migrate, GcsArtifacts("bucket", client))
    done = await bucket("copy")
    assert (done.copied, done.versions, done.succeeded) == (5, 17, True)
    service = FakeGcsService(client)
    for name, count in (("", 1), ("scans", 12), ("scans/1", 1), ("user:profile", 1), ("f", 2)):
        ids: Any = {**ADA, "session_id": "s2" if name == "f" else "s1", "filename": name}
        found = await target.list_artifact_versions(**ids)
        expected = await service.list_artifact_versions(**ids)
        assert len(found) == len(expected) == count
        for one, other in zip(found, expected, strict=True):
            for field in ("version", "create_time", "custom_metadata"):
                assert getattr(one, field) == getattr(other, field)
            # The encrypted service gives no type to a reference to another artifact.
            assert one.mime_type == (None if (name, one.version) == ("f", 1) else other.mime_type)
            part = await target.load_artifact(**ids, version=one.version)
            assert part == await service.load_artifact(**ids, version=one.version)
    assert (await bucket("compare")).equal == 5
    assert (await bucket("copy")).equal == 5
    missing = client.blobs.pop("clinic/ada/s1/scans/10")
    (finding,) = (await bucket("compare")).findings
    assert "version 10 is missing" in finding.detail
    client.blobs[missing.name] = missing
    client.blobs["clinic/ada/s1/scans/3"].data = b"x"
    assert (await bucket("erase-source")).deleted == 0
    client.blobs["clinic/ada/s1/scans/3"].data = b"3"
    delete = FakeBlob.delete

    def stop(blob: FakeBlob, **options: int) -> None:
        if blob.name == "clinic/ada/s1/scans/10":
            raise RuntimeError
        delete(blob, **options)

    with monkeypatch.context() as patched:
        patched.setattr(FakeBlob, "delete", stop)
        with pytest.raises(ArtifactStoreError):
            await bucket("erase-source")
    assert "clinic/ada/s1/scans/11" not in client.blobs
    done = await bucket("erase-source")
    assert (done.succeeded, sorted(client.blobs)) == (True, ["a/b/c/d/e", "other/object"])


async def test_error_of_the_bucket_quotes_no_name(client: FakeClient, monkeypatch: Any) -> None:
    def fail(bucket: object) -> None:
        raise RuntimeError("clinic/ada/needle")

    monkeypatch.setattr(client, "list_blobs", fail)
    with pytest.raises(ArtifactStoreError, match="RuntimeError") as caught:
        await GcsArtifacts("bucket", client).describe()
    assert "needle" not in str(caught.value)
