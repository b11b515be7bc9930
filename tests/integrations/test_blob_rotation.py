"""`rotate data`: contents of artifacts are re-encrypted, also while services use them."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from google.genai import types

from adk_secure_sessions import (
    AesGcmBackend,
    ArtifactStoreError,
    DatabaseError,
    EncryptedSessionService,
    KeyServiceError,
    TamperedError,
)
from adk_secure_sessions.formats.events import encode_item
from adk_secure_sessions.formats.json_text import read_event
from adk_secure_sessions.integrations.artifact_store import ArtifactStore
from adk_secure_sessions.integrations.artifact_versions import versions_of
from adk_secure_sessions.integrations.artifacts import EncryptedArtifactService
from adk_secure_sessions.integrations.blob_maintenance import check_blobs, purge_blobs
from adk_secure_sessions.integrations.blob_rotation import rotate_data_and_blobs
from adk_secure_sessions.maintenance import Database, retire, rotate_data, separate, verify
from adk_secure_sessions.storage.features.collections import Collection
from adk_secure_sessions.storage.schema import SessionRevision
from tests.faults import Point, lost, with_faults
from tests.integrations import object_server, s3
from tests.integrations.blob_files import contents, make_older, unmarked
from tests.integrations.object_server import Failure
from tests.maintenance.support import query

BACKEND = AesGcmBackend(bytes(range(32)))
WHO: dict[str, Any] = {"app_name": "clinic", "user_id": "needle-user"}
HERE = WHO | {"filename": "user:needle-name"}
NAME = '["artifact", null, "user:needle-name"]'
MONTH = timedelta(days=30)
LARGE = bytes(range(256)) * 4 * 2**14  # 16 MiB: three objects


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/s.db"


@pytest.fixture
async def sessions(url: str) -> AsyncIterator[EncryptedSessionService]:
    async with EncryptedSessionService(url, BACKEND) as sessions:
        yield sessions


@pytest.fixture
def service(sessions: EncryptedSessionService, blobs: Path) -> EncryptedArtifactService:
    return EncryptedArtifactService(sessions, blobs)


def text(number: int) -> types.Part:
    return types.Part(text=f"needle-content {number}")


async def save(service: EncryptedArtifactService, *numbers: int) -> None:
    for number in numbers:
        metadata = {"n": number}
        saved = await service.save_artifact(**HERE, artifact=text(number), custom_metadata=metadata)
        assert saved == number


async def assert_versions(service: EncryptedArtifactService, count: int) -> None:
    """Check all versions, the latest one, and what is listed of them."""
    assert await service.list_versions(**HERE) == list(range(count))
    for number in (*range(count), None):
        expected = count - 1 if number is None else number
        assert await service.load_artifact(**HERE, version=number) == text(expected)
        one = await service.get_artifact_version(**HERE, version=number)
        assert one is not None
        assert (one.version, one.custom_metadata) == (expected, {"n": expected})
    assert await service.load_artifact(**HERE, version=count) is None
    listed = await service.list_artifact_versions(**HERE)
    assert [one.version for one in listed] == list(range(count))
    assert HERE["filename"] in await service.list_artifact_keys(**WHO)


def files(blobs: Path) -> dict[Path, bytes]:
    """Return the contents that are not marked as deleted."""
    return {path: path.read_bytes() for path in unmarked(blobs)}


async def rotate(url: str, blobs: Path, **options: Any) -> Any:
    async with Database(url, BACKEND) as db:
        return await rotate_data_and_blobs(db, blobs, **options)


async def check(url: str, blobs: Path) -> tuple[int, ...]:
    """Return how many blobs are named, missing and unused, and how many problems there are."""
    async with Database(url, BACKEND) as db:
        found = await check_blobs(db, blobs)
    return found.blobs, found.missing, found.unused, found.bad


async def items(sessions: EncryptedSessionService) -> list[dict[str, Any]]:
    found = await sessions.collections.get((WHO["app_name"], WHO["user_id"], NAME))
    assert found is not None
    return [read_event(item)[1] for item in found.items]


async def test_content_of_a_version_with_nan_in_its_metadata_is_reencrypted(
    service: EncryptedArtifactService, url: str, blobs: Path
) -> None:
    metadata = {"score": float("nan")}
    await service.save_artifact(**HERE, artifact=text(0), custom_metadata=metadata)
    old = files(blobs)
    assert (await rotate(url, blobs)).blobs == 1
    assert not old.keys() & files(blobs).keys()
    assert await service.load_artifact(**HERE) == text(0)


@pytest.mark.parametrize("separate_keys", [False, True], ids=["one database", "key database"])
async def test_every_content_gets_a_new_blob_and_a_new_key(
    url: str, blobs: Path, tmp_path: Path, separate_keys: bool
) -> None:
    urls: dict[str, Any] = {"db_url": url}
    if separate_keys:
        urls["key_db_url"] = f"sqlite:///{tmp_path}/keys.db"
    async with EncryptedSessionService(**urls, backend=BACKEND) as sessions:
        service = EncryptedArtifactService(sessions, blobs)
        await save(service, 0, 1)
        reference = types.Part(
            file_data=types.FileData(file_uri="gs://bucket/needle", mime_type="image/png")
        )
        await service.save_artifact(**HERE | {"filename": "user:link"}, artifact=reference)
        described = await service.list_artifact_versions(**HERE)
        for count in (2, 3):
            old = files(blobs)
            async with Database(**urls, backend=BACKEND) as db:
                done = await rotate_data_and_blobs(db, blobs)
                assert (done.blobs, done.blob_bytes) == (count, 16 * count)
                assert (done.left, done.bad, done.bad_blobs) == (0, 0, 0)
                assert (await retire(db)).kept == 0
                found = await check_blobs(db, blobs)
                assert (found.blobs, found.unused, found.bad) == (count, len(old), 0)
                make_older(blobs, MONTH)
                assert (await purge_blobs(db, blobs)).deleted == len(old)
                assert (await verify(db)).bad == 0
            assert len(contents(blobs)) == count
            assert not old.keys() & files(blobs).keys()
            await assert_versions(service, count)
            assert (await service.list_artifact_versions(**HERE))[:2] == described
            loaded = await service.load_artifact(**HERE | {"filename": "user:link"})
            assert loaded == reference
            await save(service, count)
            await assert_versions(service, count + 1)
        blob_keys = [item["blob"]["key"] for item in await items(sessions)]
        assert len(blob_keys) == len(set(blob_keys)) == 2 + 2 + 1 + 3 + 1
        await service.delete_artifact(**HERE)
        assert files(blobs) == {}
        await save(service, 0)


async def test_dry_run_counts_and_changes_nothing(
    service: EncryptedArtifactService, url: str, blobs: Path
) -> None:
    await save(service, 0, 1)
    rows, stored = query(url, "SELECT * FROM secure_events"), files(blobs)
    done = await rotate(url, blobs, dry_run=True)
    assert (done.blobs, done.blob_bytes, done.bad) == (2, 32, 0)
    assert (query(url, "SELECT * FROM secure_events"), files(blobs)) == (rows, stored)
    next(iter(stored)).unlink()
    done = await rotate(url, blobs, dry_run=True)
    assert (done.blobs, done.bad, done.bad_blobs) == (1, 1, 1)


@pytest.mark.parametrize("damage", ["removed", "modified", "swapped"])
async def test_damaged_blob_is_named_and_the_run_goes_on(
    service: EncryptedArtifactService,
    sessions: EncryptedSessionService,
    url: str,
    blobs: Path,
    damage: str,
) -> None:
    await save(service, 0, 1, 2)
    names = [item["blob"]["name"] for item in await items(sessions)]
    first, bad, _ = (next(blobs.rglob(name)) / "0" for name in names)
    content = bad.read_bytes()
    if damage == "removed":
        bad.unlink()
    elif damage == "modified":
        bad.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    else:
        shutil.copy(first, bad)
    done = await rotate(url, blobs)
    assert (done.blobs, done.bad, done.bad_blobs) == (2, 1, 1)
    (problem,) = done.problems
    assert problem.table == "secure_events"
    assert problem.row.endswith(", 1")
    assert names[1] in problem.detail
    for number in (0, 2):
        assert await service.load_artifact(**HERE, version=number) == text(number)
    with pytest.raises(TamperedError):
        await service.load_artifact(**HERE, version=1)
    bad.parent.mkdir(exist_ok=True)
    bad.write_bytes(content)  # from a backup
    done = await rotate(url, blobs)
    assert (done.resumed, done.blobs, done.bad) == (True, 1, 0)
    # The item of the last version is not the last item.
    await assert_versions(service, 3)
    await save(service, 3)
    await assert_versions(service, 4)
    assert await check(url, blobs) == (4, 0, 3, 0)


async def test_run_that_meets_a_failing_database_keeps_both_blobs_and_is_continued(
    service: EncryptedArtifactService, url: str, blobs: Path
) -> None:
    """If the answer to a commit is lost for good, nobody knows which of the two blobs is needed."""
    await save(service, 0, 1)
    async with Database(url, BACKEND) as db:
        await rotate_data(db)
    db, faults = with_faults(lambda: Database(url, BACKEND))
    async with db:
        appended = faults.data.after(
            Point.WRITE, DatabaseError("lost"), when=lambda *_: len(files(blobs)) == 3
        )
        with pytest.raises(DatabaseError, match="lost"):
            await rotate_data_and_blobs(db, blobs)
    assert appended.happened == 1
    assert await check(url, blobs) == (2, 0, 1, 0)
    await assert_versions(service, 2)
    done = await rotate(url, blobs)
    assert (done.resumed, done.blobs) == (True, 1)
    await assert_versions(service, 2)
    async with Database(url, BACKEND) as db:
        for deleted in (1, 1):  # the blob of the run that continued has a mark
            make_older(blobs, MONTH)
            assert (await purge_blobs(db, blobs)).deleted == deleted
    assert await check(url, blobs) == (2, 0, 0, 0)


async def test_lost_answer_before_another_rotation_does_not_lose_the_content(
    service: EncryptedArtifactService, url: str, blobs: Path
) -> None:
    """The new item is stored, and another run re-encrypts it before this run looks for it."""
    await save(service, 0, 1)

    async def rotate_again() -> None:
        async with Database(url, BACKEND) as other:
            await rotate_data(other, restart=True)

    db, faults = with_faults(lambda: Database(url, BACKEND))
    async with db:
        for fault in (rotate_again, lost()):
            faults.data.after(Point.WRITE, fault, when=lambda *_: len(files(blobs)) == 3)
        await rotate_data_and_blobs(db, blobs)
    await assert_versions(service, 2)
    assert (await check(url, blobs))[:2] == (2, 0)


async def test_content_of_a_stored_row_is_kept_if_looking_for_the_row_fails(
    service: EncryptedArtifactService, url: str, blobs: Path
) -> None:
    await save(service, 0)
    failing, faults = with_faults(lambda: EncryptedSessionService(url, BACKEND))
    async with failing:
        other = EncryptedArtifactService(failing, blobs)
        await other.list_versions(**HERE)
        faults.data.after(Point.WRITE, lost())
        faults.data.before(Point.WRITE, KeyServiceError("failed", retryable=True), nth=2)
        with pytest.raises(KeyServiceError):
            await save(other, 1)
    await assert_versions(service, 2)


@pytest.mark.parametrize("request_that_fails", ["PUT", "GET", "PUT of the mark"])
async def test_run_that_meets_a_failing_store_loses_nothing_and_is_continued(
    url: str, sessions: EncryptedSessionService, server: s3.Server, request_that_fails: str
) -> None:
    method, is_marking = request_that_fails[:3], request_that_fails != request_that_fails[:3]
    failure = Failure(500, "InternalError", method, "/deleted/" if is_marking else "")
    place = ArtifactStore(f"s3://{object_server.BUCKET}/{method}", options=server.options)
    service = EncryptedArtifactService(sessions, place)
    await save(service, 0, 1, 2)

    def progress(done: int, total: int) -> None:
        """After the first content, let the next request of this kind fail."""
        if [method for method, _ in server.requests].count("PUT") == 5 and not server.failures:
            server.failures.append(failure)

    async with Database(url, BACKEND) as db:
        with pytest.raises(ArtifactStoreError) as info:
            await rotate_data_and_blobs(db, place, progress=progress)
        assert info.value.retryable
        server.failures.clear()
        await assert_versions(service, 3)
        done = await rotate_data_and_blobs(db, place)
        assert done.resumed
        assert done.blobs == (1 if is_marking else 2)
        await assert_versions(service, 3)
        server.make_older(MONTH + timedelta(days=1))
        await purge_blobs(db, place)
        server.make_older(MONTH + timedelta(days=1))
        await purge_blobs(db, place)
        found = await check_blobs(db, place)
        assert (found.blobs, found.missing, found.unused, found.bad) == (3, 0, 0, 0)


async def test_separated_copy_gets_contents_of_its_own(
    service: EncryptedArtifactService,
    sessions: EncryptedSessionService,
    url: str,
    blobs: Path,
    tmp_path: Path,
) -> None:
    await save(service, 0, 1)
    await sessions.close()
    shutil.copy(tmp_path / "s.db", tmp_path / "copy.db")
    copy_url = f"sqlite:///{tmp_path}/copy.db"
    original = files(blobs)
    async with Database(copy_url, BACKEND) as db:
        assert (await separate(db)).complete
        assert (await rotate_data_and_blobs(db, blobs)).blobs == 2
    assert len(files(blobs)) == 4
    assert original.items() <= files(blobs).items()
    shutil.rmtree(next(iter(original)).parents[1])
    async with EncryptedSessionService(copy_url, BACKEND) as copied:
        await assert_versions(EncryptedArtifactService(copied, blobs), 2)


# --- items ---------------------------------------------------------------------------------------


BLOB: dict[str, Any] = {"prefix": "a" * 32, "name": "0" * 32, "key": "1f" * 32, "size": 2**48}


def item(version: int, versions: int, **more: Any) -> bytes:
    values = {"part": {}, "metadata": {}, "time": 1.0, "version": version, "versions": versions}
    return encode_item(values | {"blob": BLOB} | more)


def again(version: int, versions: int, **more: Any) -> bytes:
    return item(version, versions, rotation=1, **more)


def of_blob(**changes: Any) -> bytes:
    return item(0, 1, blob=BLOB | changes)


def read_items(first: int, items: list[bytes]) -> list[int]:
    found = versions_of(Collection(NAME, SessionRevision(7, first + len(items)), tuple(items)))
    return [one.number for one in found]


def test_items_that_the_page_allows_are_read() -> None:
    assert read_items(0, [item(0, 1), again(0, 1), item(1, 2), again(0, 2)]) == [0, 1]
    assert read_items(5, [again(1, 3), item(3, 4)]) == [1, 3]
    assert read_items(0, [of_blob(size=0)]) == [0]


@pytest.mark.parametrize(
    ("first", "items"),
    [
        (0, [again(0, 1)]),  # the first item describes nothing again
        (0, [item(1, 2)]),
        (0, [encode_item({"part": {}, "metadata": {}, "time": 1.0})]),  # no number
        (0, [item(0, 1), again(1, 2)]),  # a version that there is not yet
        (0, [item(0, 1), item(1, 2), again(0, 1)]),  # a version was dropped
        (0, [item(0, 1), again(0, 1), item(2, 3)]),
        (0, [item(0, 1), again(0, 1), item(0, 1)]),
        (0, [item(0, 1), again(0, 1, blob=None)]),
        (0, [item(0, 1), item(1, 2, rotation=1)]),
        (0, [of_blob(prefix="../" + "a" * 29)]),
        (0, [of_blob(prefix="A" * 32)]),
        (0, [of_blob(prefix="a" * 31)]),
        (0, [of_blob(name="0" * 32 + "\n")]),
        (0, [of_blob(name=0)]),
        (0, [of_blob(key="1f" * 31)]),
        (0, [of_blob(key="1F" * 32)]),
        (0, [of_blob(size=-1)]),
        (0, [of_blob(size=2**48 + 1)]),
        (0, [of_blob(size=1.0)]),
        (0, [item(0, 1, blob={})]),
        (0, [item(0, 1, time=10**400)]),
        (5, [again(-1, 3)]),
        (5, [again(3, 3)]),
        (5, [again(0, 6)]),
        (5, [again(0.0, 3)]),  # type: ignore[arg-type]
        (5, [item(2, 3), item(4, 5)]),
    ],
)
def test_items_of_a_faulty_writer_are_rejected(first: int, items: list[bytes]) -> None:
    with pytest.raises(TamperedError, match="malformed"):
        read_items(first, items)


# --- at the same time ----------------------------------------------------------------------------


async def large(service: EncryptedArtifactService) -> AsyncIterator[bytes]:
    """Save a large content, open it, and yield its first piece; the caller then does something."""

    async def pieces() -> AsyncIterator[bytes]:
        yield LARGE

    await service.save_stream(**HERE, pieces=pieces(), mime_type="video/mp4")
    stream = await service.open_stream(**HERE, start=5)
    assert stream is not None
    return aiter(stream)


async def test_stream_of_a_deleted_artifact_is_read_to_its_end(
    service: EncryptedArtifactService, url: str, blobs: Path
) -> None:
    stream = await large(service)
    read = [await anext(stream)]
    await service.delete_artifact(**HERE)
    async with Database(url, BACKEND) as db:
        assert (await purge_blobs(db, blobs)).marked == 1
    read += [piece async for piece in stream]
    assert b"".join(read) == LARGE[5:]


async def test_stream_continues_when_its_content_is_reencrypted(
    service: EncryptedArtifactService, url: str, blobs: Path
) -> None:
    stream = await large(service)
    read = [await anext(stream)]
    assert (await rotate(url, blobs)).blobs == 1
    read += [piece async for piece in stream]
    assert b"".join(read) == LARGE[5:]


async def test_services_save_load_and_delete_during_a_run(
    service: EncryptedArtifactService, url: str, blobs: Path
) -> None:
    """Each content is its name and number, so that a wrong one is noticed."""
    names = [f"user:{n}" for n in range(4)]
    saved = dict.fromkeys(names, 0)
    done = asyncio.Event()

    async def use(name: str) -> int:
        turns = 0
        here = WHO | {"filename": name}
        while not done.is_set() or turns < 4:
            number = await service.save_artifact(
                **here, artifact=types.Part(text=f"{name} {saved[name]}")
            )
            assert number == saved[name]
            saved[name] += 1
            for version in range(saved[name]):
                loaded = await service.load_artifact(**here, version=version)
                assert loaded == types.Part(text=f"{name} {version}")
            if turns % 5 == 4:
                await service.delete_artifact(**here)
                assert await service.load_artifact(**here) is None
                saved[name] = 0
            turns += 1
        return turns

    await service.save_artifact(**HERE, artifact=text(0))
    users = [asyncio.create_task(use(name)) for name in names]
    async with Database(url, BACKEND) as db:
        for _ in range(3):
            rotated = await rotate_data_and_blobs(db, blobs)
            assert (rotated.bad, rotated.left) == (0, 0)
            assert (await retire(db)).kept == 0
    done.set()
    assert all(await asyncio.gather(*users))
    named, missing, _, bad = await check(url, blobs)
    assert (named, missing, bad) == (1 + sum(saved.values()), 0, 0)


async def test_two_runs_at_once_do_not_lose_a_content(
    service: EncryptedArtifactService, url: str, blobs: Path
) -> None:
    await save(service, *range(6))
    runs = await asyncio.gather(rotate(url, blobs), rotate(url, blobs), return_exceptions=True)
    for run in runs:
        assert not isinstance(run, BaseException) or "another rotation" in str(run)
    await assert_versions(service, 6)
    assert (await check(url, blobs))[:2] == (6, 0)
