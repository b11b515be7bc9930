"""Blobs in a directory, in memory, and in S3 over HTTP: contents, ranges, failures, leftovers."""

import asyncio
import errno
import hashlib
import os
import secrets
import stat
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from adk_secure_sessions import ArtifactStoreError, ConfigurationError, Reason, TamperedError
from adk_secure_sessions.integrations import blob_store
from adk_secure_sessions.integrations.artifact_store import ArtifactStore
from adk_secure_sessions.integrations.blob_directory import BlobDirectory
from adk_secure_sessions.integrations.blob_store import BlobStore, StoredBlob
from tests.integrations import s3
from tests.integrations.object_server import (
    ACCESS_KEY,
    BUCKET,
    CLOSED,
    REGION,
    SECRET,
    Failure,
    ObjectServer,
)
from tests.processes import results

PREFIX = "0ada57141459e0f9"
SMALL_OBJECT = 1000  # instead of 8 MiB, in tests of blobs with many objects
SIZES = [1, SMALL_OBJECT - 1, SMALL_OBJECT, SMALL_OBJECT + 1, 3 * SMALL_OBJECT, 5500]


@pytest.fixture(params=["directory", "memory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> BlobStore:
    if request.param == "s3":
        server = request.getfixturevalue("server")
        return ArtifactStore(server.url("team"), options=server.options).blobs(PREFIX)
    return ArtifactStore(tmp_path if request.param == "directory" else "memory://").blobs(PREFIX)


@pytest.fixture
def small_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blob_store, "OBJECT_LENGTH", SMALL_OBJECT)


def new_name() -> str:
    return secrets.token_hex(16)


def content(size: int) -> bytes:
    return hashlib.shake_256(b"content").digest(size)


async def pieces_of(data: bytes, length: int = 300) -> AsyncIterator[bytes]:
    for start in range(0, len(data), length):
        yield data[start : start + length]


async def put(store: BlobStore, data: bytes) -> str:
    """Store *data*, and return the name of the blob."""
    name = new_name()
    await store.put_stream(name, pieces_of(data))
    return name


async def read(
    store: BlobStore, name: str, size: int, start: int = 0, stop: int | None = None
) -> bytes:
    return b"".join([piece async for piece in store.get_stream(name, size, start, stop)])


# --- contents ------------------------------------------------------------------------------------


async def test_blob_is_read_as_it_was_written(store: BlobStore, small_objects: None) -> None:
    for size in SIZES:
        name = await put(store, content(size))
        assert await read(store, name, size) == content(size)
        assert await store.size(name) == size


async def test_every_range_is_read_alone(store: BlobStore, small_objects: None) -> None:
    data = content(3500)
    name = await put(store, data)
    for start in (0, 1, 999, 1000, 1001, 2500, 3499, 3500):
        for stop in (start, start + 1, 1000, 2000, 3500):
            if start <= stop <= 3500:
                assert await read(store, name, 3500, start, stop) == data[start:stop]


async def test_listing_names_whole_blobs_with_their_size(
    store: BlobStore, small_objects: None
) -> None:
    names = sorted(new_name() for _ in range(3))
    before = time.time()
    for size, name in zip((10, 1000, 12_500), names, strict=True):
        await store.put_stream(name, pieces_of(content(size)))
    blobs = await store.stored_blobs()
    assert [(name, blobs[name].size) for name in sorted(blobs)] == list(
        zip(names, (10, 1000, 12_500), strict=True)
    )
    assert all(before - 2 < blob.modified < time.time() + 2 for blob in blobs.values())


async def test_deleted_blob_is_gone_and_others_stay(store: BlobStore, small_objects: None) -> None:
    name, other = [await put(store, content(2500)) for _ in range(2)]
    await store.delete(name)
    assert list(await store.stored_blobs()) == [other]
    assert await store.size(name) is None
    await store.delete(name)


async def test_mark_stays_until_it_is_withdrawn_and_is_no_blob(store: BlobStore) -> None:
    marked, other = [await put(store, b"x") for _ in range(2)]
    blobs = await store.stored_blobs()
    assert await store.marks() == {}
    before = time.time()
    await store.mark(marked)
    first = await store.marks()
    assert first.keys() == {marked}
    assert before - 2 < first[marked] < time.time() + 2
    await store.mark(marked)  # its age begins again
    await store.mark(new_name())  # of a blob that is gone
    again = await store.marks()
    assert len(again) == 2
    assert again[marked] >= first[marked]
    assert await store.stored_blobs() == blobs
    assert await read(store, marked, 1, 0, 1) == b"x"
    await store.delete(marked)
    assert await store.marks() == again
    for name in again:
        await store.unmark(name)
        await store.unmark(name)
    assert await store.marks() == {}
    assert list(await store.stored_blobs()) == [other]


async def test_clock_of_the_store_is_read_without_a_trace(store: BlobStore) -> None:
    before = time.time()
    await store.mark(name := new_name())
    marks, now = await store.marks_and_time()
    assert marks.keys() == {name}
    assert before - 2 < marks[name] <= now < time.time() + 2
    assert (await store.marks()).keys() == {name}


async def test_blobs_and_marks_of_another_prefix_are_not_listed(
    tmp_path: Path, server: ObjectServer
) -> None:
    roots: tuple[Path | str, ...] = (tmp_path, server.url())
    for root in roots:
        options = server.options if isinstance(root, str) else None
        one, other = (ArtifactStore(root, options=options).blobs(prefix) for prefix in ("a", "ab"))
        await put(other, b"x")
        await other.mark(new_name())
        assert (await one.stored_blobs(), len(await other.stored_blobs())) == ({}, 1)
        assert (await one.marks(), len(await other.marks())) == ({}, 1)


async def test_foreign_objects_are_not_listed(tmp_path: Path, server: s3.Server) -> None:
    bucket = ArtifactStore(f"s3://{BUCKET}", options=server.options).blobs(PREFIX)
    directory = ArtifactStore(tmp_path).blobs(PREFIX)
    for store in (bucket, directory):
        await store.mark(new_name())
    below = f"{PREFIX}/deleted"
    for name in ("readme.txt", "0" * 31, f"{new_name()}/0", f"x/{new_name()}"):
        server.admin.put_object(Bucket=BUCKET, Key=f"{below}/{name}", Body=b"x")
    for name in ("readme.txt", f"{new_name()}/x/0"):
        server.admin.put_object(Bucket=BUCKET, Key=f"{PREFIX}/{name}", Body=b"x")
    (tmp_path / PREFIX / "folder").mkdir()
    (tmp_path / PREFIX / "readme.txt").write_text("x")
    (tmp_path / below / "readme.txt").write_text("x")
    (tmp_path / below / new_name()).mkdir()
    (tmp_path / below / new_name()).symlink_to(tmp_path / below / "readme.txt")
    for store in (bucket, directory):
        assert len(await store.marks()) == 1
        assert await store.stored_blobs() == {}


# --- what was changed in the store ---------------------------------------------------------------


async def test_missing_blob_is_rejected(store: BlobStore) -> None:
    with pytest.raises(TamperedError, match="missing") as info:
        await read(store, new_name(), 10)
    assert info.value.reason is Reason.MISSING
    with pytest.raises(TamperedError, match="missing"):
        await read(store, new_name(), 10, 3, 4)


async def test_blob_of_another_length_is_rejected(store: BlobStore, small_objects: None) -> None:
    name = await put(store, content(2500))
    for size in (1, 999, 2499, 2501, 3000):
        with pytest.raises(TamperedError) as info:
            await read(store, name, size)
        assert info.value.reason is Reason.MISMATCH
    for size in (2501, 3000, 9000):
        with pytest.raises(TamperedError):
            await read(store, name, size, size - 1, size)


@pytest.mark.parametrize("kind", ["directory", "memory"])  # moto's memory would count as ours
async def test_object_of_any_size_is_not_read_into_memory(
    kind: str, tmp_path: Path, small_objects: None
) -> None:
    store = ArtifactStore("memory://" if kind == "memory" else tmp_path).blobs(PREFIX)
    with mock.patch.object(blob_store, "OBJECT_LENGTH", 20_000_000):
        await store.put_stream(name := new_name(), pieces_of(bytes(10_000_000), 1_000_000))
    tracemalloc.start()
    try:
        with pytest.raises(TamperedError):
            await read(store, name, 500)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


# --- failures ------------------------------------------------------------------------------------


async def failing(count: int) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield content(700)
    raise LookupError("of the source")


@pytest.mark.parametrize("count", [0, 1, 20])
async def test_upload_whose_source_fails_leaves_nothing(
    store: BlobStore, small_objects: None, count: int
) -> None:
    with pytest.raises(LookupError, match="of the source"):
        await store.put_stream(new_name(), failing(count))
    assert await store.stored_blobs() == {}


async def test_cancelled_upload_leaves_nothing(store: BlobStore, small_objects: None) -> None:
    started = asyncio.Event()

    async def endless() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield content(700)
        started.set()
        await asyncio.Event().wait()

    upload = asyncio.create_task(store.put_stream(new_name(), endless()))
    await started.wait()
    upload.cancel()
    with pytest.raises(asyncio.CancelledError):
        await upload
    assert await store.stored_blobs() == {}


async def test_object_that_is_stored_after_the_cancellation_is_deleted(
    store: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, sent, goes_on = store._put, asyncio.Event(), asyncio.Event()

    async def slow_put(*arguments: Any) -> None:
        sent.set()
        request = asyncio.ensure_future(put(*arguments))  # the store does not notice the cancel
        await goes_on.wait()
        await request

    monkeypatch.setattr(store, "_put", slow_put)
    upload = asyncio.create_task(store.put_stream(new_name(), pieces_of(content(700))))
    await sent.wait()
    await asyncio.sleep(0)  # `put_stream` waits for its last object
    upload.cancel()
    await asyncio.sleep(0.05)
    assert not upload.done()  # until it is known what was stored
    goes_on.set()
    with pytest.raises(asyncio.CancelledError):
        await upload
    assert await store.stored_blobs() == {}


async def test_reader_that_stops_early_ends_the_read(store: BlobStore, small_objects: None) -> None:
    name = await put(store, content(5000))
    stream: Any = store.get_stream(name, 5000)
    assert await anext(stream) == content(1000)
    await stream.aclose()
    assert len(asyncio.all_tasks()) == 1


async def test_memory_does_not_grow_with_the_blob(tmp_path: Path) -> None:
    store, name, piece = ArtifactStore(tmp_path).blobs(PREFIX), new_name(), bytes(1_000_000)

    async def source() -> AsyncIterator[bytes]:
        for _ in range(60):
            yield piece

    with mock.patch.object(blob_store, "OBJECT_LENGTH", 1_000_000):
        tracemalloc.start()
        try:
            await store.put_stream(name, source())
            async for _ in store.get_stream(name, 60_000_000):
                pass
            # 5 MB on a quiet machine; a loaded one frees parts later, which are then counted here.
            assert tracemalloc.get_traced_memory()[1] < 30_000_000
        finally:
            tracemalloc.stop()


def open_bucket(server: ObjectServer, bucket: str = BUCKET, **changes: Any) -> BlobStore:
    options = server.options | changes
    return ArtifactStore(server.url(bucket=bucket), options=options, timeout=5).blobs(PREFIX)


FAILURES: dict[str, tuple[Failure, str, bool]] = {
    "denied": (Failure(403, "AccessDenied"), "access was denied", False),
    "unauthenticated": (Failure(401, "InvalidAccessKeyId"), "access was denied", False),
    "full": (Failure(507, "XMinioStorageFull"), "is full", True),
    "quota": (Failure(403, "QuotaExceeded"), "is full", True),
    "broken": (Failure(500, "InternalError"), "cannot be reached, or failed", True),
    "slow down": (Failure(503, "SlowDown"), "cannot be reached, or failed", True),
}


@pytest.mark.parametrize("case", FAILURES.values(), ids=FAILURES)
async def test_failure_of_the_store_is_our_error(
    server: ObjectServer, case: tuple[Failure, str, bool]
) -> None:
    failure, text, retryable = case
    store = open_bucket(server)
    name = await put(store, b"content")
    calls: list[Callable[[], Any]] = [
        lambda: put(store, b"content"),
        lambda: read(store, name, 7),
        lambda: store.delete(name),
        lambda: store.stored_blobs(),
    ]
    for call in calls:
        server.failures.append(failure)
        with pytest.raises(ArtifactStoreError, match=text) as info:
            await call()
        assert info.value.retryable is retryable
        assert_says_nothing(info.value, name)
    assert len(await store.stored_blobs()) == 1


def assert_says_nothing(error: BaseException, *more: str) -> None:
    """No secret, address or name in the error or in one from which it was raised."""
    seen: BaseException | None = error
    while seen is not None:
        for needle in (SECRET, "needle", "127.0.0.1", BUCKET, *more):
            assert needle not in f"{seen} {seen!r} {vars(seen)}"
        seen = seen.__cause__ or seen.__context__


async def test_full_store_in_a_large_upload_leaves_nothing(
    server: ObjectServer, small_objects: None
) -> None:
    store = open_bucket(server)
    server.failures.extend([Failure(507, "StorageFull", "PUT")] * 3)
    with pytest.raises(ArtifactStoreError, match="full"):
        await put(store, content(20_500))
    server.failures.clear()
    assert server.keys() == []


async def test_missing_bucket_is_named(server: ObjectServer) -> None:
    store = open_bucket(server, "another-bucket")
    for call in (put(store, b"x")), store.stored_blobs():
        with pytest.raises(ArtifactStoreError, match="the bucket does not exist; create it"):
            await call


async def test_unreachable_store_is_our_error(server: ObjectServer) -> None:
    store = open_bucket(server, **server.options_at(CLOSED))
    for call in (put(store, b"x")), read(store, new_name(), 1):
        with pytest.raises(ArtifactStoreError, match="cannot be reached") as info:
            await call
        assert info.value.retryable
        assert_says_nothing(info.value)


async def test_store_that_does_not_answer_is_our_error(server: ObjectServer) -> None:
    store = ArtifactStore(server.url(), options=server.options, timeout=0.2).blobs(PREFIX)
    server.delay = 1
    start = time.monotonic()
    with pytest.raises(ArtifactStoreError) as info:
        await read(store, new_name(), 1)
    assert info.value.retryable
    assert time.monotonic() - start < 5
    server.delay = 0


async def test_temporary_failure_is_retried(server: ObjectServer) -> None:
    store = open_bucket(server, retry_config={"max_retries": 3})
    server.failures.extend([Failure(503, "SlowDown")] * 2)
    name = await put(store, b"content")
    server.failures.append(Failure(500, "InternalError"))
    assert await read(store, name, 7) == b"content"


async def test_store_works_in_another_event_loop(store: BlobStore) -> None:
    async def use() -> bytes:
        name = await put(store, b"content")
        found = await read(store, name, 7)
        await store.delete(name)
        return found

    assert await asyncio.to_thread(lambda: asyncio.run(use())) == b"content"
    assert await use() == b"content"


FORK = """
import asyncio, os, sys
from adk_secure_sessions.integrations.artifact_store import ArtifactStore
store = ArtifactStore(sys.argv[1]).blobs("p")
async def use():
    return await store.size("0" * 32)
asyncio.run(use())
child = os.fork()
if child == 0:
    try:
        asyncio.run(use())
    except Exception as error:
        print(type(error).__name__, error)
    else:
        print("works")
    sys.stdout.flush()
    os._exit(0)
os.waitpid(child, 0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_forked_process_is_told_that_obstore_cannot_work() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK, "memory://"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.startswith("ConfigurationError this process was forked"), done.stderr


# --- the directory -------------------------------------------------------------------------------


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


async def test_directory_is_readable_by_its_owner_alone(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path / "new" / "blobs")
    store.prepare(create=True)
    name = await put(store.blobs(PREFIX), b"x")
    path = tmp_path / "new"
    for part in ("blobs", PREFIX, name):
        assert mode(path) == 0o700
        path /= part
    assert (mode(path), mode(path / "0")) == (0o700, 0o600)


def test_mode_of_a_directory_that_exists_stays(tmp_path: Path) -> None:
    tmp_path.chmod(0o750)
    ArtifactStore(tmp_path).prepare(create=True)
    assert mode(tmp_path) == 0o750


async def test_missing_directory_is_not_created_by_a_write(tmp_path: Path) -> None:
    """The disk that has it may not be mounted any more."""
    store = ArtifactStore(tmp_path / "gone")
    with pytest.raises(ArtifactStoreError, match="not a directory"):
        await put(store.blobs(PREFIX), b"x")
    with pytest.raises(ConfigurationError, match="does not exist"):
        store.prepare(create=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("first", ["write", "read"])
async def test_directory_of_a_disk_that_was_unmounted_is_not_created_again(
    tmp_path: Path, first: str
) -> None:
    store = ArtifactStore(tmp_path / "disk")
    store.prepare(create=True)
    name = await put(store.blobs(PREFIX), b"x")
    if first == "read":
        store = ArtifactStore(tmp_path / "disk")
        assert await read(store.blobs(PREFIX), name, 1) == b"x"
    (tmp_path / "disk").rename(tmp_path / "unmounted")
    (tmp_path / "disk").mkdir()
    with pytest.raises(ArtifactStoreError, match="not a directory"):
        await put(store.blobs(PREFIX), b"y")
    with pytest.raises(ArtifactStoreError, match="not a directory"):
        await store.blobs(PREFIX).mark(name)
    assert list((tmp_path / "disk").iterdir()) == []
    (tmp_path / "disk").rmdir()
    (tmp_path / "unmounted").rename(tmp_path / "disk")
    await put(store.blobs(PREFIX), b"y")


async def _write(store: ArtifactStore) -> str:
    try:
        await put(store.blobs(PREFIX), b"x")
    except ArtifactStoreError as error:
        return str(error)
    return "stored"


def use_unlistable(say: Callable[[object], None], path: str) -> None:
    root = Path(path)
    warm, store = ArtifactStore(root / "other"), ArtifactStore(root / "blobs")
    asyncio.run(_write(warm))  # imports all, since Python may be root's
    if os.geteuid() == 0:
        os.setgid(65534)
        os.setuid(65534)
    try:
        store.prepare(create=True)
    except ArtifactStoreError as error:
        say(str(error))
    say([asyncio.run(_write(store)) for _ in range(3)])


@pytest.mark.skipif(os.name == "nt", reason="this system has no modes")
def test_directory_that_forbids_listing_is_rejected_because_it_cannot_be_flushed() -> None:
    with tempfile.TemporaryDirectory() as name:  # tmp_path is closed to other accounts
        root = Path(name)
        for path, its_mode in ((root, 0o755), (root / "other", 0o755), (root / "blobs", 0o333)):
            path.mkdir(exist_ok=True)
            path.chmod(its_mode)
        ((at_start, writes),) = results((use_unlistable, name))
        (root / "blobs").chmod(0o755)
        assert [path for path in (root / "blobs").rglob("*") if path.is_file()] == []
    assert "access was denied" in at_start
    assert all("access was denied" in text for text in writes)


async def test_blob_is_on_the_disk_before_it_is_acknowledged(tmp_path: Path) -> None:
    """The entry of each new directory is, too, before anything is written in the directory."""
    synced: list[tuple[str, list[str]]] = []
    store, real = ArtifactStore(tmp_path).blobs(PREFIX), os.fsync

    def fsync(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        below = sorted(one.name for one in path.glob("*/*"))
        synced.append((str(path.relative_to(tmp_path)), below))
        real(descriptor)

    with mock.patch("os.fsync", fsync):
        name, other = [await put(store, b"x") for _ in range(2)]
    assert synced == [
        *[(".", []), (".", []), (PREFIX, []), (f"{PREFIX}/{name}/0", []), (f"{PREFIX}/{name}", [])],
        *[(PREFIX, ["0"]), (f"{PREFIX}/{other}/0", []), (f"{PREFIX}/{other}", [])],
    ]


@pytest.mark.parametrize(
    ("code", "text", "retryable"),
    [
        (errno.ENOSPC, "disk is full", True),
        (errno.EDQUOT, "disk is full", True),
        (errno.EACCES, "access was denied", False),
        (errno.EROFS, "access was denied", False),
        (errno.EIO, r"failed \(EIO\)", True),
    ],
)
async def test_failure_of_the_file_system_is_our_error(
    tmp_path: Path, code: int, text: str, retryable: bool
) -> None:
    store = ArtifactStore(tmp_path).blobs("needle")
    with (
        mock.patch("os.fsync", side_effect=OSError(code, "needle")),
        pytest.raises(ArtifactStoreError, match=text) as info,
    ):
        await put(store, b"content")
    assert info.value.retryable is retryable
    assert "needle" not in str(info.value)
    assert await store.stored_blobs() == {}


def test_file_where_the_directory_should_be_is_our_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ArtifactStoreError, match="not a directory"):
        ArtifactStore(tmp_path / "file").prepare(create=True)


async def test_what_a_killed_writer_left_is_listed_and_deleted(tmp_path: Path) -> None:
    store, empty, partial = ArtifactStore(tmp_path).blobs(PREFIX), "0" * 32, "1" * 32
    (tmp_path / PREFIX / empty).mkdir(parents=True)
    (tmp_path / PREFIX / partial).mkdir()
    (tmp_path / PREFIX / partial / "0").write_bytes(b"half")
    os.utime(tmp_path / PREFIX / partial / "0", (1000, 1000))
    os.utime(tmp_path / PREFIX / empty, (2000, 2000))
    assert await store.stored_blobs() == {empty: StoredBlob(0, 2000), partial: StoredBlob(4, 1000)}
    for name in (empty, partial):
        await store.delete(name)
    assert list((tmp_path / PREFIX).iterdir()) == []


async def test_relative_directory_stays_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = ArtifactStore("blobs")
    store.prepare(create=True)
    name = await put(store.blobs(PREFIX), b"x")
    monkeypatch.chdir("/")
    assert await store.blobs(PREFIX).size(name) == 1


# --- opening -------------------------------------------------------------------------------------


def test_file_urls_and_paths_are_directories(tmp_path: Path) -> None:
    from obstore.store import LocalStore

    names: list[Path | str] = [str(tmp_path / "a b"), tmp_path / "a b", (tmp_path / "a b").as_uri()]
    for store in names:
        assert isinstance(ArtifactStore(store).blobs("p"), BlobDirectory)
        ArtifactStore(store).prepare(create=True)
        (tmp_path / "a b").rmdir()
    local = ArtifactStore(LocalStore(tmp_path))
    assert isinstance(local.blobs("p"), BlobDirectory)
    local.prepare(create=False)


REJECTED: dict[str, tuple[Any, str]] = {
    "empty": ("", "give a directory or a URL"),
    "http": ("https://bucket/x", "begins with file://, s3://"),
    "credentials": ("s3://needle:needle@bucket/x", "no credentials"),
    "query": ("s3://bucket/x?secret=needle", "no credentials and no options"),
    "no bucket": ("s3:///x", "name the bucket"),
    "colon": ("s3:bucket", "has :// after its scheme"),
    "file on a host": ("file://needle/x", "file:///PATH"),
    "unparsable": ("s3://[needle/x", "begins with file://"),
    "object": (object(), "S3Store, GCSStore"),
}


@pytest.mark.parametrize(("store", "text"), REJECTED.values(), ids=REJECTED)
def test_store_that_cannot_be_opened_is_named(store: Any, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text) as info:
        ArtifactStore(store).blobs(PREFIX)
    assert_says_nothing(info.value)


@pytest.mark.parametrize("options", [{"no_such_option": "needle"}, {"timeout": 3, "needle": 1}])
def test_unknown_option_is_rejected(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="check its options") as info:
        ArtifactStore(f"s3://{BUCKET}", options=options).blobs(PREFIX)
    assert_says_nothing(info.value)


def test_directory_and_store_of_obstore_take_no_options(tmp_path: Path) -> None:
    from obstore.store import MemoryStore

    options = {"options": {"region": "x"}}
    given: list[tuple[Any, dict[str, Any]]] = [(tmp_path, options), (MemoryStore(), options)]
    for store, more in [*given, (MemoryStore(), {"allow_http": True})]:
        with pytest.raises(ConfigurationError, match="options"):
            ArtifactStore(store, **more)


@pytest.mark.parametrize("scheme", ["s3", "gs", "az", "memory"])
def test_missing_library_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(
        ConfigurationError,
        match=r"this artifact store needs obstore: pip install 'obstore>=0.8'",
    ):
        ArtifactStore(f"{scheme}://bucket").blobs(PREFIX)


def test_directory_needs_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    ArtifactStore(tmp_path).blobs(PREFIX)


PLAIN = "http://10.0.0.1:9000"


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"])
def test_plain_http_of_the_environment_is_rejected_unless_allowed(
    server: s3.Server, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, PLAIN)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    with pytest.raises(ConfigurationError, match="an artifact store begins with https://"):
        ArtifactStore(f"s3://{BUCKET}").blobs(PREFIX)
    ArtifactStore(f"s3://{BUCKET}", allow_http=True).blobs(PREFIX)


@pytest.mark.parametrize("address", [PLAIN, "HTTP://10.0.0.1", "http://127.0.0.1.example.com"])
def test_plain_http_of_an_option_is_rejected(address: str) -> None:
    with pytest.raises(ConfigurationError, match="begins with https://"):
        ArtifactStore(f"s3://{BUCKET}", options={"endpoint": address, "region": "x"}).blobs(PREFIX)


async def test_environment_names_the_store_and_its_credentials(
    server: s3.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.address)
    monkeypatch.setenv("AWS_REGION", REGION)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    store = ArtifactStore(f"s3://{BUCKET}/some/where/").blobs(PREFIX)
    name = await put(store, b"x")
    assert server.keys() == [f"some/where/{PREFIX}/{name}/0"]
    assert SECRET not in repr(store)


async def test_store_of_obstore_can_be_given(server: s3.Server) -> None:
    from obstore.store import S3Store

    made = S3Store(BUCKET, client_options={"allow_http": True}, **server.options)
    name = await put(ArtifactStore(made).blobs(PREFIX), b"x")
    assert server.keys() == [f"{PREFIX}/{name}/0"]


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("gs://bucket/x", {"skip_signature": True}),
        ("az://container/x", {"account_name": "clinic", "skip_signature": True}),
    ],
)
def test_other_clouds_can_be_opened(url: str, options: dict[str, Any]) -> None:
    ArtifactStore(url, options=options).blobs(PREFIX)
