"""Processes that are killed while they re-encrypt, save and delete contents of artifacts."""

import asyncio
import os
import random
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from adk_secure_sessions import AesGcmBackend, EncryptedSessionService, SecureSessionError
from adk_secure_sessions.integrations.artifact_blobs import check_blobs, purge_blobs
from adk_secure_sessions.integrations.artifacts import EncryptedArtifactService
from adk_secure_sessions.integrations.blob_rotation import rotate_data_and_blobs
from adk_secure_sessions.maintenance import Database, retire, verify
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


@pytest.mark.parametrize("step", [9, pytest.param(1, marks=pytest.mark.soak)])
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


# --- attacks of chance: everything at once -------------------------------------------------------


def rotate_on_and_on(say: Callable[[object], None], url: str, blobs: Path) -> None:
    async def main() -> None:
        async with Database(url, BACKEND) as db:
            while True:
                try:
                    done = await rotate_data_and_blobs(db, blobs)
                    assert done.bad == 0, done.problems
                    say("rotated")
                except SecureSessionError as error:
                    if "another rotation was started meanwhile" not in str(error):
                        raise
                await retire(db)

    asyncio.run(main())


def use_on_and_on(say: Callable[[object], None], url: str, blobs: Path, name: str) -> None:
    """Say what was acknowledged, and check that it can be loaded."""

    async def main() -> None:
        async with EncryptedSessionService(url, BACKEND) as sessions:
            service = EncryptedArtifactService(sessions, blobs)
            here = HERE | {"filename": f"user:{name}"}
            for turn in range(10**6):
                number = len(await service.list_versions(**here))

                async def pieces(number: int = number) -> AsyncIterator[bytes]:
                    yield f"{name} {number}".encode()

                saved = await service.save_stream(**here, pieces=pieces(), mime_type="a/b")
                assert saved == number
                say(("saved", number))
                version = random.randint(0, number)
                stream = await service.open_stream(**here, version=version)
                assert stream is not None
                assert await stream.read() == f"{name} {version}".encode()
                if turn % 7 == 6:
                    say(("deleting", number))
                    await service.delete_artifact(**here)
                    say(("deleted", number))

    asyncio.run(main())


@pytest.mark.soak
async def test_nothing_acknowledged_is_lost_by_processes_that_are_killed(tmp_path: Path) -> None:
    url, blobs = f"sqlite:///{tmp_path}/s.db", tmp_path / "blobs"
    async with EncryptedSessionService(url, BACKEND) as sessions:
        await save(EncryptedArtifactService(sessions, blobs), b"first")
    acknowledged: dict[str, tuple[str, int]] = {}
    rotations = 0
    for seconds in (4.0, 1.0, 2.5, 1.7, 3.3):
        jobs: list[tuple[Any, ...]] = [(rotate_on_and_on, url, blobs)] * 2
        jobs += [(use_on_and_on, url, blobs, name) for name in ("a", "b")]
        with children(*jobs) as running:
            await asyncio.sleep(seconds)
            for child in running:
                child.process.kill()
            for child, name in zip(running, ("", "", "a", "b"), strict=True):
                for said in child.said():
                    if name:
                        acknowledged[name] = said
                    else:
                        rotations += 1
        async with EncryptedSessionService(url, BACKEND) as sessions:
            service = EncryptedArtifactService(sessions, blobs)
            for name, (state, number) in acknowledged.items():
                here = HERE | {"filename": f"user:{name}"}
                versions = await service.list_versions(**here)
                if state == "saved":
                    assert len(versions) in (number + 1, number + 2)
                elif state == "deleted":
                    assert len(versions) <= 1
                for version in versions:
                    stream = await service.open_stream(**here, version=version)
                    assert stream is not None
                    assert await stream.read() == f"{name} {version}".encode()
        async with Database(url, BACKEND) as db:
            assert (await verify(db)).bad == 0
            for _ in range(2):
                make_older(blobs, MONTH)
                assert (await purge_blobs(db, blobs)).withdrawn == 0
            found = await check_blobs(db, blobs)
            assert (found.missing, found.unused, found.bad) == (0, 0, 0)
    assert rotations > 0
    assert acknowledged.keys() == {"a", "b"}
