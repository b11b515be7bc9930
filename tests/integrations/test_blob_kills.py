"""Processes that are killed while they re-encrypt, save and delete contents of artifacts."""

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from adk_secure_sessions import AesGcmBackend, EncryptedSessionService
from adk_secure_sessions.integrations.artifacts import EncryptedArtifactService
from adk_secure_sessions.integrations.blob_maintenance import check_blobs, purge_blobs
from adk_secure_sessions.integrations.blob_rotation import rotate_data_and_blobs
from adk_secure_sessions.maintenance import Database, verify
from tests.integrations.blob_files import contents, make_older, marks
from tests.maintenance.dying import Statements, dying
from tests.processes import children

BACKEND = AesGcmBackend(bytes(range(32)))
MONTH = timedelta(days=30)
HERE: dict[str, Any] = {"app_name": "clinic", "user_id": "ada", "filename": "user:scan"}
CONTENTS = [b"small", bytes(9 * 2**20)]  # the second one has two objects
_CREATES = os.O_CREAT | os.O_EXCL


async def save(service: EncryptedArtifactService, content: bytes) -> int:
    async def pieces() -> AsyncIterator[bytes]:
        yield content

    return await service.save_stream(**HERE, pieces=pieces(), mime_type="video/mp4")


async def load(service: EncryptedArtifactService, version: int) -> bytes:
    stream = await service.open_stream(**HERE, version=version)
    assert stream is not None
    return await stream.read()


def rotate_and_die(say: Callable[[object], None], url: str, blobs: Path, last: int) -> None:
    """Rotate, but die before step *last* of the contents; say so if there are fewer steps.

    A step is a statement, or a change of the directory.  The first one is a change.
    """
    statements = Statements(last)
    counts = False

    def step(text: str) -> None:
        nonlocal counts
        counts = counts or text == "os.mkdir"
        if counts:
            statements(text)

    def audit(event: str, arguments: Any) -> None:
        is_change = event in ("os.mkdir", "os.remove", "os.rmdir")
        if is_change or (event == "open" and arguments[2] & _CREATES == _CREATES):
            step(event)

    db = dying(lambda: Database(url, BACKEND), step, url)  # type: ignore[arg-type]

    async def main() -> None:
        async with db:
            sys.addaudithook(audit)
            await rotate_data_and_blobs(db, blobs)

    asyncio.run(main())
    say("ended")


@pytest.mark.parametrize("step", [20, pytest.param(1, marks=pytest.mark.soak)])
async def test_run_that_is_killed_at_any_step_is_completed_by_the_next(
    tmp_path: Path, step: int
) -> None:
    original, copy = tmp_path / "original", tmp_path / "copy"
    original.mkdir()
    async with EncryptedSessionService(f"sqlite:///{original}/s.db", BACKEND) as sessions:
        for content in CONTENTS:
            await save(EncryptedArtifactService(sessions, original / "blobs"), content)
    url, blobs, kills, last = f"sqlite:///{copy}/s.db", copy / "blobs", 0, 1
    left = set()
    while True:
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(original, copy)
        with children((rotate_and_die, url, blobs, last)) as (child,):
            said = list(child.said())
            child.process.join()
            assert child.process.exitcode == (0 if said else -signal.SIGKILL)
        async with EncryptedSessionService(url, BACKEND) as sessions:
            service = EncryptedArtifactService(sessions, blobs)
            for version, content in enumerate(CONTENTS):
                assert await load(service, version) == content
        async with Database(url, BACKEND) as db:
            left.add((await check_blobs(db, blobs)).unused - len(marks(blobs)))
            done = await rotate_data_and_blobs(db, blobs)
            assert (done.bad, done.left) == (0, 0)
            for _ in range(2):  # the blob of the killed run is marked by the first
                make_older(blobs, MONTH)
                await purge_blobs(db, blobs)
            assert (await check_blobs(db, blobs)).numbers == (1, 2, 0, 0, 0, 0)
            assert (await verify(db)).bad == 0
        assert (len(contents(blobs)), marks(blobs)) == (3, [])
        async with EncryptedSessionService(url, BACKEND) as sessions:
            service = EncryptedArtifactService(sessions, blobs)
            for version, content in enumerate(CONTENTS):
                assert await load(service, version) == content
        if said:
            break
        kills += 1
        last += step
    assert kills >= 20 // step
    assert left == {0, 1}
