"""A directory of blobs in which an attacker placed links, directories and other entries."""

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from unittest import mock

import pytest

from adk_secure_sessions import ArtifactStoreError, Reason, TamperedError
from adk_secure_sessions.integrations import blob_directory
from adk_secure_sessions.integrations.artifact_store import ArtifactStore
from adk_secure_sessions.integrations.blob_store import BlobStore

PREFIX = "0ada57141459e0f9"
NAME, OTHER = "0" * 32, "1" * 32
CONTENT = b"content"


@pytest.fixture(params=["descriptors", "paths"])
def store(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> BlobStore:
    """A store that uses descriptors, and one that uses paths, as on Windows."""
    if request.param == "paths":
        monkeypatch.setattr(blob_directory, "_HAS_DESCRIPTORS", False)
    return opened(tmp_path)


def opened(tmp_path: Path) -> BlobStore:
    (tmp_path / "blobs" / PREFIX).mkdir(parents=True)
    return ArtifactStore(tmp_path / "blobs").blobs(PREFIX)


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A directory elsewhere; its files have the names and the length of an object."""
    path = tmp_path / "victim"
    path.mkdir()
    for name in ("0", "1", "important"):
        (path / name).write_bytes(CONTENT)
    return path


def assert_intact(victim: Path) -> None:
    assert {path.name: path.read_bytes() for path in victim.iterdir()} == dict.fromkeys(
        ("0", "1", "important"), CONTENT
    )


async def put(store: BlobStore, name: str = NAME) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield CONTENT

    await store.put_stream(name, pieces())


async def read(store: BlobStore, name: str = NAME) -> bytes:
    return b"".join([piece async for piece in store.get_stream(name, len(CONTENT))])


async def names(store: BlobStore) -> list[str]:
    return sorted(await store.stored_blobs())


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# --- a link in the place of a directory ----------------------------------------------------------


async def test_link_in_place_of_a_blobs_directory_is_not_followed(
    store: BlobStore, tmp_path: Path, victim: Path
) -> None:
    link = tmp_path / "blobs" / PREFIX / NAME
    link.symlink_to(victim)
    with pytest.raises(TamperedError, match="replaced by a link") as info:
        await read(store)
    assert info.value.reason is Reason.MISMATCH
    assert await names(store) == []
    assert await store.size(NAME) is None
    with pytest.raises(ArtifactStoreError, match="symbolic link"):
        await store.delete(NAME)
    assert_intact(victim)


async def test_link_in_place_of_the_marks_is_not_followed(
    store: BlobStore, tmp_path: Path, victim: Path
) -> None:
    (victim / NAME).write_bytes(b"important")
    marks = tmp_path / "blobs" / PREFIX / "deleted"
    marks.symlink_to(victim)
    for call in (store.mark(NAME), store.unmark(NAME), store.marks()):
        with pytest.raises(ArtifactStoreError, match="symbolic link"):
            await call
    assert (victim / NAME).read_bytes() == b"important"


async def test_link_in_place_of_a_mark_is_replaced(
    store: BlobStore, tmp_path: Path, victim: Path
) -> None:
    await store.mark(OTHER)
    link = tmp_path / "blobs" / PREFIX / "deleted" / NAME
    link.symlink_to(victim / "important")
    before = (victim / "important").read_bytes()
    assert (await store.marks()).keys() == {OTHER}
    await store.mark(NAME)
    assert (await store.marks()).keys() == {NAME, OTHER}
    link.unlink()
    link.symlink_to(victim / "important")
    await store.unmark(NAME)
    assert not link.is_symlink()
    assert (victim / "important").read_bytes() == before


async def test_file_that_is_put_in_place_of_a_new_mark_is_not_emptied(
    store: BlobStore, tmp_path: Path, victim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.mark(OTHER)
    before = (victim / "important").read_bytes()

    def replace(_parent: object, name: str) -> None:
        (tmp_path / "blobs" / PREFIX / "deleted" / name).hardlink_to(victim / "important")

    monkeypatch.setattr(blob_directory, "_unlink", replace)
    await store.mark(NAME)
    assert (victim / "important").read_bytes() == before


async def test_upload_into_a_link_stores_nothing_elsewhere(
    store: BlobStore, tmp_path: Path, victim: Path
) -> None:
    (victim / "0").unlink()
    (tmp_path / "blobs" / PREFIX / NAME).symlink_to(victim)
    with pytest.raises(ArtifactStoreError, match="symbolic link"):
        await put(store)
    assert sorted(os.listdir(victim)) == ["1", "important"]


async def test_link_in_place_of_the_prefix_is_not_followed(
    store: BlobStore, tmp_path: Path, victim: Path
) -> None:
    await put(store)
    prefix = tmp_path / "blobs" / PREFIX
    moved = victim / "moved"
    prefix.rename(moved)
    prefix.symlink_to(moved)
    with pytest.raises(TamperedError, match="replaced by a link"):
        await read(store)
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: store.delete(NAME), lambda: names(store), lambda: put(store, OTHER)
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(ArtifactStoreError, match="symbolic link"):
            await call()
    assert [path.name for path in moved.iterdir()] == [NAME]
    assert (moved / NAME / "0").read_bytes() == CONTENT


async def test_directory_that_the_operator_gave_may_be_a_link(
    store: BlobStore, tmp_path: Path
) -> None:
    await put(store)
    (tmp_path / "link").symlink_to(tmp_path / "blobs")
    linked = ArtifactStore(tmp_path / "link").blobs(PREFIX)
    assert await read(linked) == CONTENT
    await put(linked, OTHER)
    assert await names(linked) == [NAME, OTHER]
    await linked.delete(OTHER)
    assert await names(store) == [NAME]


async def test_blob_that_becomes_a_link_during_its_deletion_is_not_followed(
    tmp_path: Path, victim: Path
) -> None:
    store = opened(tmp_path)
    await put(store)
    path, real = tmp_path / "blobs" / PREFIX / NAME, blob_directory._deletable

    def swap(blob: blob_directory._Folder) -> list[str]:
        found = real(blob)
        path.rename(tmp_path / "moved")
        path.symlink_to(victim)
        return found

    with (
        mock.patch.object(blob_directory, "_deletable", swap),
        pytest.raises(ArtifactStoreError, match="something else changes it"),
    ):
        await store.delete(NAME)
    assert_intact(victim)
    assert os.listdir(tmp_path / "moved") == []


# --- something else in the place of an object ----------------------------------------------------


PLACES: dict[str, Callable[[Path, Path], object]] = {
    "link to an object": lambda path, victim: path.symlink_to(victim / "0"),
    "link to a directory": lambda path, victim: path.symlink_to(victim),
    "directory": lambda path, _: path.mkdir(),
    "pipe": lambda path, _: os.mkfifo(path),
}


@pytest.mark.parametrize("place", PLACES)
async def test_object_that_is_not_a_file_is_rejected(
    store: BlobStore, tmp_path: Path, victim: Path, place: str
) -> None:
    await put(store)
    path = tmp_path / "blobs" / PREFIX / NAME / "0"
    path.unlink()
    PLACES[place](path, victim)
    with pytest.raises(TamperedError, match="not a file") as info:
        await read(store)
    assert info.value.reason is Reason.MISMATCH
    assert not await store.size(NAME)  # so a check reports the blob as missing
    await store.delete(NAME)
    assert_intact(victim)
    assert not path.is_symlink()
    assert not path.is_fifo()
    assert await names(store) == []


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
async def test_rejected_blobs_leave_no_descriptor_open(store: BlobStore, tmp_path: Path) -> None:
    await put(store)
    path = tmp_path / "blobs" / PREFIX / NAME
    (path / "0").unlink()
    (path / "0").mkdir()
    (tmp_path / "blobs" / PREFIX / OTHER).symlink_to(path)
    before = descriptors()
    for _ in range(20):
        for name in (NAME, OTHER):
            with pytest.raises(TamperedError):
                await read(store, name)
        await store.delete(NAME)
        await names(store)
    assert descriptors() <= before + 2  # the threads of the executor may start in between


async def test_file_in_place_of_a_blobs_directory_is_rejected(
    store: BlobStore, tmp_path: Path
) -> None:
    path = tmp_path / "blobs" / PREFIX / NAME
    path.write_bytes(CONTENT)
    with pytest.raises(TamperedError):
        await read(store)
    with pytest.raises(ArtifactStoreError, match="not a directory"):
        await store.delete(NAME)
    assert path.read_bytes() == CONTENT


# --- foreign entries -----------------------------------------------------------------------------


async def test_foreign_entries_in_a_blob_stop_neither_the_list_nor_the_deletion_of_others(
    store: BlobStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in (NAME, OTHER):
        await put(store, name)
    path = tmp_path / "blobs" / PREFIX / NAME
    (path / "sub").mkdir()
    (path / "7").mkdir()
    (path / "sub" / "0").write_bytes(CONTENT)
    (path / "note.txt").write_bytes(CONTENT)
    assert await read(store) == CONTENT
    sizes = {name: blob.size for name, blob in (await store.stored_blobs()).items()}
    assert sizes == {NAME: 7, OTHER: 7}
    for name in (NAME, OTHER):
        await store.delete(name)
    assert sorted(os.listdir(path)) == ["7", "note.txt", "sub"]
    assert (path / "sub" / "0").read_bytes() == CONTENT
    assert [record.getMessage()[:32] for record in caplog.records] == [
        "the directory of a deleted blob "
    ]
    assert await names(store) == []


async def test_object_that_is_stored_during_the_deletion_is_reported(
    store: BlobStore, tmp_path: Path
) -> None:
    await put(store)
    path, real = tmp_path / "blobs" / PREFIX / NAME, blob_directory._deletable

    def store_another(blob: blob_directory._Folder) -> list[str]:
        found = real(blob)
        (path / "1").write_bytes(CONTENT)
        return found

    with (
        mock.patch.object(blob_directory, "_deletable", store_another),
        pytest.raises(ArtifactStoreError) as info,
    ):
        await store.delete(NAME)
    assert info.value.retryable
    await store.delete(NAME)
    assert not path.exists()
