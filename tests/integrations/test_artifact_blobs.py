"""Blobs that are missing, and blobs that no version of an artifact names any more."""

import os
import time
from datetime import timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa
from google.genai import types

from adk_secure_sessions import AesGcmBackend, ConfigurationError, EncryptedSessionService
from adk_secure_sessions.integrations.artifact_blobs import check_blobs, purge_blobs
from adk_secure_sessions.integrations.artifacts import EncryptedArtifactService
from adk_secure_sessions.maintenance import Database, erase_user
from tests.maintenance.support import run_sql

BACKEND = AesGcmBackend(bytes(range(32)))
AT_ONCE = timedelta()


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/s.db"


@pytest.fixture
def blobs(tmp_path: Path) -> Path:
    return tmp_path / "blobs"


def files(blobs: Path) -> list[Path]:
    return sorted((p for p in blobs.rglob("*") if p.is_file()), key=lambda p: p.stat().st_mtime_ns)


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


async def test_nothing_is_missing(url: str, blobs: Path) -> None:
    await fill(url, blobs)
    async with Database(url, BACKEND) as db:
        assert await check_blobs(db, blobs) == (4, 8, 0, 0, 0, ())
        assert await purge_blobs(db, blobs, older_than=AT_ONCE) == (0, 8, 0, ())
    assert len(files(blobs)) == 8


async def test_missing_and_shortened_blobs_are_named(url: str, blobs: Path) -> None:
    await fill(url, blobs)
    files(blobs)[0].unlink()
    short = files(blobs)[0]
    short.write_bytes(short.read_bytes()[:-1])
    async with Database(url, BACKEND) as db:
        found = await check_blobs(db, blobs)
    assert found[:5] == (4, 8, 2, 0, 2)
    assert {one.table for one in found.problems} == {"secure_events"}
    assert sorted(one.detail for one in found.problems) == [
        "its blob has another length",
        "its blob is missing",
    ]


async def test_blobs_of_an_erased_user_are_deleted(url: str, blobs: Path) -> None:
    await fill(url, blobs)
    async with Database(url, BACKEND) as db:
        await erase_user(db, "a", "ada")
        assert (await check_blobs(db, blobs))[:5] == (2, 4, 0, 4, 0)
        assert (await purge_blobs(db, blobs)).deleted == 0  # they are younger than a day
        assert (await purge_blobs(db, blobs, older_than=AT_ONCE, dry_run=True))[:2] == (4, 4)
        assert len(files(blobs)) == 8
        yesterday = time.time() - 86_500
        for file in files(blobs):
            os.utime(file, (yesterday, yesterday))
        assert (await purge_blobs(db, blobs))[:2] == (4, 4)
        assert await check_blobs(db, blobs) == (2, 4, 0, 0, 0, ())
    async with EncryptedSessionService(url, BACKEND) as sessions:
        left = await EncryptedArtifactService(sessions, blobs).load_artifact(
            app_name="a", user_id="bob", filename="user:x"
        )
    assert left == types.Part(text="bob user:x 1")


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE secure_sessions SET state = zeroblob(80) "
        "WHERE id = (SELECT max(id) FROM secure_sessions)",
        "UPDATE secure_sessions SET state = zeroblob(80) WHERE base_revision = -1",
        "DELETE FROM secure_events WHERE seq = 1",
        "UPDATE secure_users SET state = zeroblob(80)",
    ],
)
async def test_nothing_is_deleted_while_a_row_cannot_be_read(
    url: str, blobs: Path, change: str
) -> None:
    await fill(url, blobs)
    run_sql(sa.make_url(url), change)
    async with Database(url, BACKEND) as db:
        found = await purge_blobs(db, blobs, older_than=AT_ONCE)
    assert found.deleted == 0
    assert found.bad >= 1
    assert len(files(blobs)) == 8


async def test_databases_that_share_a_store_leave_each_others_blobs(
    url: str, blobs: Path, tmp_path: Path
) -> None:
    await fill(url, blobs)
    other = f"sqlite:///{tmp_path}/other.db"
    await fill(other, blobs)
    async with Database(url, BACKEND) as db:
        await erase_user(db, "a", "ada")
        assert (await purge_blobs(db, blobs, older_than=AT_ONCE)).deleted == 4
    async with Database(other, BACKEND) as db:
        assert await check_blobs(db, blobs) == (4, 8, 0, 0, 0, ())


async def test_bad_input(url: str, blobs: Path) -> None:
    await fill(url, blobs)
    async with Database(url, BACKEND) as db:
        with pytest.raises(ConfigurationError, match="negative"):
            await purge_blobs(db, blobs, older_than=timedelta(seconds=-1))
        with pytest.raises(ConfigurationError):
            await check_blobs(db, "ftp://x")
