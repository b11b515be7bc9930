"""Blobs that are missing, and blobs that no version of an artifact names any more."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from google.genai import types

from adk_secure_sessions import (
    AesGcmBackend,
    ArtifactStoreError,
    ConfigurationError,
    EncryptedSessionService,
    TamperedError,
)
from adk_secure_sessions.integrations.artifact_store import ArtifactStore
from adk_secure_sessions.integrations.artifacts import EncryptedArtifactService
from adk_secure_sessions.integrations.blob_maintenance import check_blobs, purge_blobs
from adk_secure_sessions.integrations.blob_rotation import rotate_data_and_blobs
from adk_secure_sessions.maintenance import Database, erase_user, retire, separate, verify
from tests.clocks import shifted
from tests.integrations import s3
from tests.integrations.blob_files import contents, make_older, marks, unmarked
from tests.integrations.object_server import BUCKET, Failure
from tests.maintenance.support import run_sql

BACKEND = AesGcmBackend(bytes(range(32)))
DAY = timedelta(days=1)
MONTH = timedelta(days=30)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/s.db"


async def fill(url: str, blobs: Path) -> None:
    async with EncryptedSessionService(url, BACKEND) as sessions:
        service = EncryptedArtifactService(sessions, blobs)
        for user_id in ("ada", "bob"):
            await sessions.create_session(app_name="a", user_id=user_id, session_id="s")
            for name in ("user:x", "user:y"):
                for version in range(2):
                    await service.save_artifact(
                        app_name="a",
                        user_id=user_id,
                        filename=name,
                        artifact=types.Part(text=f"{user_id} {name} {version}"),
                    )


async def assert_all_load(url: str, blobs: Path) -> None:
    async with EncryptedSessionService(url, BACKEND) as sessions:
        service = EncryptedArtifactService(sessions, blobs)
        for user_id in ("ada", "bob"):
            for name in ("user:x", "user:y"):
                for version in range(2):
                    here: dict[str, Any] = {"app_name": "a", "user_id": user_id, "filename": name}
                    loaded = await service.load_artifact(**here, version=version)
                    assert loaded == types.Part(text=f"{user_id} {name} {version}")


async def purge(url: str, blobs: Path, **options: Any) -> tuple[int, ...]:
    """Return how many blobs are deleted, marked, withdrawn and named, and the bad rows."""
    async with Database(url, BACKEND) as db:
        return (await purge_blobs(db, blobs, **options)).numbers


async def test_missing_and_shortened_blobs_are_named(url: str, blobs: Path) -> None:
    await fill(url, blobs)
    contents(blobs)[0].unlink()
    short = contents(blobs)[0]
    short.write_bytes(short.read_bytes()[:-1])
    async with Database(url, BACKEND) as db:
        found = await check_blobs(db, blobs)
    assert found.numbers == (4, 8, 2, 0, 0, 2)
    assert {one.table for one in found.problems} == {"secure_events"}
    assert sorted(one.detail.partition(": ")[2] for one in found.problems) == [
        "it has another length",
        "it is missing",
    ]


async def test_blobs_of_an_erased_user_are_marked_and_deleted_a_month_later(
    url: str, blobs: Path
) -> None:
    await fill(url, blobs)
    async with Database(url, BACKEND) as db:
        await erase_user(db, "a", "ada")
        assert (await check_blobs(db, blobs)).numbers == (2, 4, 0, 0, 4, 0)
    make_older(blobs, 2 * MONTH)
    assert await purge(url, blobs, dry_run=True) == (0, 4, 0, 4, 0)
    assert marks(blobs) == []
    assert await purge(url, blobs) == (0, 4, 0, 4, 0)
    assert (len(contents(blobs)), len(marks(blobs))) == (8, 4)
    make_older(blobs, MONTH - DAY)
    assert await purge(url, blobs) == (0, 4, 0, 4, 0)  # a second run does not begin again
    make_older(blobs, DAY)
    assert await purge(url, blobs, dry_run=True) == (4, 0, 0, 4, 0)
    assert len(contents(blobs)) == 8
    assert await purge(url, blobs) == (4, 0, 0, 4, 0)
    assert (len(contents(blobs)), marks(blobs)) == (4, [])
    async with Database(url, BACKEND) as db:
        assert (await check_blobs(db, blobs)).numbers == (2, 4, 0, 0, 0, 0)
    async with EncryptedSessionService(url, BACKEND) as sessions:
        left = await EncryptedArtifactService(sessions, blobs).load_artifact(
            app_name="a", user_id="bob", filename="user:x"
        )
    assert left == types.Part(text="bob user:x 1")


async def test_clock_of_this_machine_deletes_nothing_early(url: str, blobs: Path) -> None:
    await fill(url, blobs)
    async with Database(url, BACKEND) as db:
        await erase_user(db, "a", "ada")
    make_older(blobs, MONTH)
    assert await purge(url, blobs) == (0, 4, 0, 4, 0)
    for days in (400, -400):
        with shifted(days):
            assert await purge(url, blobs) == (0, 4, 0, 4, 0)
    assert len(contents(blobs)) == 8


async def test_blob_of_a_running_upload_is_not_marked(url: str, blobs: Path) -> None:
    here: dict[str, Any] = {"app_name": "a", "user_id": "ada", "filename": "user:x"}
    uploads = []

    async def pieces() -> AsyncIterator[bytes]:
        yield bytes(9 * 2**20)  # more than an object, so the first one is stored now
        while not contents(blobs):
            await asyncio.sleep(0.01)
        make_older(blobs, DAY - timedelta(hours=1))
        uploads.append(await purge(url, blobs))
        yield b"end"

    async with EncryptedSessionService(url, BACKEND) as sessions:
        service = EncryptedArtifactService(sessions, blobs)
        await service.save_stream(**here, pieces=pieces(), mime_type="a/b")
        assert uploads == [(0, 0, 0, 0, 0)]
        assert await purge(url, blobs) == (0, 0, 0, 1, 0)
        stream = await service.open_stream(**here)
        assert stream is not None
        assert len(await stream.read()) == 9 * 2**20 + 3


async def test_upload_of_a_killed_process_is_marked_after_a_day(url: str, blobs: Path) -> None:
    await fill(url, blobs)
    left = contents(blobs)[0].parents[1] / ("0" * 32) / "0"
    left.parent.mkdir()
    left.write_bytes(b"half")
    assert await purge(url, blobs) == (0, 0, 0, 8, 0)
    make_older(blobs, DAY)
    assert await purge(url, blobs) == (0, 1, 0, 8, 0)
    make_older(blobs, MONTH)
    assert await purge(url, blobs) == (1, 0, 0, 8, 0)
    assert not left.parent.exists()
    await assert_all_load(url, blobs)


async def test_run_that_was_killed_before_it_deleted_a_mark_is_completed(
    url: str, blobs: Path
) -> None:
    await fill(url, blobs)
    await delete_artifact(url, blobs)
    make_older(blobs, MONTH)
    gone, _ = marks(blobs)
    shutil.rmtree(gone.parents[1] / gone.name)
    assert await purge(url, blobs) == (1, 0, 0, 6, 0)
    assert marks(blobs) == []


async def test_mark_of_a_blob_that_is_no_directory_stops_no_run(url: str, blobs: Path) -> None:
    """Whoever can write to the store has put a file in the place of a blob."""
    await fill(url, blobs)
    await delete_artifact(url, blobs)
    placed = marks(blobs)[0].with_name("0" * 32)
    placed.touch()
    (placed.parents[1] / placed.name).write_bytes(b"no blob")
    make_older(blobs, MONTH)
    assert await purge(url, blobs) == (2, 0, 0, 6, 0)
    assert marks(blobs) == []


# --- another copy of the database ----------------------------------------------------------------


@pytest.fixture
async def copy(url: str, blobs: Path, tmp_path: Path) -> str:
    """A copy of the database that was not separated, and uses the same store."""
    await fill(url, blobs)
    shutil.copy(tmp_path / "s.db", tmp_path / "copy.db")
    return f"sqlite:///{tmp_path}/copy.db"


async def delete_artifact(url: str, blobs: Path) -> None:
    async with EncryptedSessionService(url, BACKEND) as sessions:
        service = EncryptedArtifactService(sessions, blobs)
        await service.delete_artifact(app_name="a", user_id="ada", filename="user:x")


async def erase_and_purge(url: str, blobs: Path) -> None:
    async with Database(url, BACKEND) as db:
        await erase_user(db, "a", "ada")
        await purge_blobs(db, blobs)


async def reencrypt(url: str, blobs: Path) -> None:
    async with Database(url, BACKEND) as db:
        assert (await rotate_data_and_blobs(db, blobs)).bad == 0
        await retire(db)


async def everything(url: str, blobs: Path) -> None:
    await delete_artifact(url, blobs)
    await reencrypt(url, blobs)
    await erase_and_purge(url, blobs)


@pytest.mark.parametrize("change", [delete_artifact, erase_and_purge, reencrypt, everything])
async def test_copy_that_deletes_in_the_store_loses_nothing_of_the_original(
    url: str, blobs: Path, copy: str, change: Any
) -> None:
    original = contents(blobs)
    make_older(blobs, 2 * MONTH)
    await change(copy, blobs)
    assert marks(blobs)
    assert set(original) <= set(contents(blobs))
    endangered = len(set(original) - set(unmarked(blobs)))
    async with Database(url, BACKEND) as db:
        found = await check_blobs(db, blobs)
    assert (found.missing, found.marked, found.bad) == (0, endangered, endangered)
    assert "marked as deleted, by another copy" in found.problems[0].detail
    make_older(blobs, MONTH - DAY)
    await purge(copy, blobs)
    assert await purge(url, blobs, dry_run=True) == (0, 0, endangered, 8, 0)
    assert await purge(url, blobs) == (0, 0, endangered, 8, 0)
    assert set(original) <= set(unmarked(blobs))
    make_older(blobs, DAY)
    await purge(copy, blobs)  # the marks begin again
    assert set(original) <= set(contents(blobs))
    await assert_all_load(url, blobs)
    async with Database(url, BACKEND) as db:
        assert (await verify(db)).bad == 0


async def test_separated_copy_deletes_nothing_of_the_original(
    url: str, blobs: Path, copy: str
) -> None:
    async with Database(copy, BACKEND) as db:
        assert (await separate(db)).complete
    make_older(blobs, 2 * MONTH)
    assert await purge(copy, blobs) == (0, 0, 0, 8, 0)  # it has no directory of its own yet
    await everything(copy, blobs)
    for _ in range(2):
        make_older(blobs, 2 * MONTH)
        await purge(copy, blobs)
    assert await purge(url, blobs) == (0, 0, 0, 8, 0)
    await assert_all_load(url, blobs)


# --- rows that were tampered with ----------------------------------------------------------------


REMOVED_ROWS = {
    "artifact": "DELETE FROM secure_sessions WHERE id = (SELECT max(id) FROM secure_sessions)",
    "artifact and its witness": (
        "DELETE FROM secure_witnesses WHERE tag = (SELECT tag FROM secure_sessions WHERE id = "
        "(SELECT max(id) FROM secure_sessions)); "
        "DELETE FROM secure_sessions WHERE id = (SELECT max(id) FROM secure_sessions)"
    ),
}


@pytest.mark.parametrize("attack", REMOVED_ROWS.values(), ids=REMOVED_ROWS.keys())
async def test_content_of_a_removed_row_is_neither_marked_nor_deleted(
    url: str, blobs: Path, tmp_path: Path, attack: str
) -> None:
    await fill(url, blobs)
    make_older(blobs, 2 * MONTH)
    shutil.copy(tmp_path / "s.db", tmp_path / "backup.db")
    for statement in attack.split("; "):
        assert run_sql(sa.make_url(url), statement)
    with pytest.raises(TamperedError, match="the row that it belongs to was removed"):
        await purge(url, blobs)
    assert (len(contents(blobs)), marks(blobs)) == (8, [])
    shutil.copy(tmp_path / "backup.db", tmp_path / "s.db")
    assert await purge(url, blobs) == (0, 0, 0, 8, 0)


async def test_content_whose_rows_were_all_removed_is_marked_until_they_are_restored(
    url: str, blobs: Path, tmp_path: Path
) -> None:
    """Nothing shows that there were rows: the content is like that of a deleted artifact."""
    await fill(url, blobs)
    make_older(blobs, 2 * MONTH)
    shutil.copy(tmp_path / "s.db", tmp_path / "backup.db")
    of_last = "(SELECT {} FROM secure_sessions WHERE id = (SELECT max(id) FROM secure_sessions))"
    for table, key, column in (
        ("secure_events", "session_row", "id"),
        ("secure_witnesses", "tag", "tag"),
        ("secure_sessions", "id", "id"),
    ):
        run_sql(sa.make_url(url), f"DELETE FROM {table} WHERE {key} = {of_last.format(column)}")
    assert await purge(url, blobs) == (0, 2, 0, 6, 0)
    make_older(blobs, MONTH - DAY)
    assert await purge(url, blobs) == (0, 2, 0, 6, 0)
    shutil.copy(tmp_path / "backup.db", tmp_path / "s.db")
    assert await purge(url, blobs) == (0, 0, 2, 8, 0)
    await assert_all_load(url, blobs)


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE secure_sessions SET state = zeroblob(80) "
        "WHERE id = (SELECT max(id) FROM secure_sessions)",
        "UPDATE secure_sessions SET state = zeroblob(80) WHERE base_revision = -1",
        "DELETE FROM secure_events WHERE seq = 1",
        "UPDATE secure_users SET state = zeroblob(80)",
        "DELETE FROM secure_users WHERE id = (SELECT max(id) FROM secure_users)",
        "DELETE FROM secure_apps",
        "UPDATE secure_sessions SET base_revision = 0 WHERE base_revision = -1",
    ],
)
async def test_nothing_is_deleted_while_a_row_cannot_be_read(
    url: str, blobs: Path, change: str
) -> None:
    await fill(url, blobs)
    run_sql(sa.make_url(url), change)
    make_older(blobs, 2 * MONTH)
    async with Database(url, BACKEND) as db:
        found = await purge_blobs(db, blobs)
    assert (found.deleted, found.marked) == (0, 0)
    assert found.bad >= 1
    assert (len(contents(blobs)), marks(blobs)) == (8, [])


# --- a bucket ------------------------------------------------------------------------------------


async def test_marked_blobs_of_a_bucket_are_deleted_when_their_mark_is_old(
    url: str, server: s3.Server
) -> None:
    here: dict[str, Any] = {"app_name": "a", "user_id": "ada", "filename": "user:x"}
    place = ArtifactStore(f"s3://{BUCKET}/ada", options=server.options)
    async with EncryptedSessionService(url, BACKEND) as sessions, Database(url, BACKEND) as db:
        service = EncryptedArtifactService(sessions, place)
        for _ in range(2):
            await service.save_artifact(**here, artifact=types.Part(text="x"))
        await service.delete_artifact(**here)
        keys = server.keys()
        (prefix,) = {key.split("/")[1] for key in keys}
        blobs = {key.split("/")[2] for key in keys} - {"deleted"}
        marked = {f"ada/{prefix}/deleted/{name}" for name in blobs}
        assert set(keys) == {f"ada/{prefix}/{name}/0" for name in blobs} | marked
        assert (await purge_blobs(db, place)).numbers == (0, 2, 0, 0, 0)
        server.make_older(MONTH + DAY)
        # S3's request to delete is a POST; the first one deletes what `purge_blobs` has stored to
        # read the clock.
        server.failures.append(Failure(500, "InternalError", "POST"))
        with pytest.raises(ArtifactStoreError):
            await purge_blobs(db, place)
        assert (await purge_blobs(db, place)).numbers == (2, 0, 0, 0, 0)
        assert len(server.keys()) == 1  # the trace of the run that failed
        server.make_older(MONTH + DAY)
        assert (await purge_blobs(db, place)).numbers == (0, 0, 0, 0, 0)
        assert server.keys() == []


async def test_bad_input(url: str, blobs: Path) -> None:
    await fill(url, blobs)
    async with Database(url, BACKEND) as db:
        with pytest.raises(ConfigurationError, match="48 hours"):
            await purge_blobs(db, blobs, older_than=timedelta(hours=47))
        with pytest.raises(ConfigurationError):
            await check_blobs(db, "ftp://x")
