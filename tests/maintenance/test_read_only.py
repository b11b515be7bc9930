"""A SQLite file that the account cannot write, for example a backup on a read-only mount."""

import asyncio
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from adk_secure_sessions import AesGcmBackend, EncryptedSessionService, maintenance
from tests.conformance.support import create, event
from tests.processes import results

KEY = bytes(range(32))


async def look(path: str) -> tuple[int, int, int]:
    async with maintenance.Database(f"sqlite:///{path}", AesGcmBackend(KEY)) as db:
        verified = await maintenance.verify(db)
        status = await maintenance.status(db)
    return verified.sessions, len(verified.problems), len(status.records)


def look_as_somebody_else(say: Callable[[object], None], path: str) -> None:
    first = asyncio.run(look(path))  # imports everything, since Python itself may be root's
    if os.geteuid() == 0:
        os.setgid(65534)
        os.setuid(65534)
    say((first, asyncio.run(look(path))))


@pytest.mark.parametrize(
    ("is_open", "mode"),
    [(False, 0o555), (True, 0o555), (False, 0o777)],
    ids=["closed", "open elsewhere", "in a directory that can be written"],
)
async def test_file_that_cannot_be_written_is_verified(is_open: bool, mode: int) -> None:
    with tempfile.TemporaryDirectory() as name:  # tmp_path is closed to other accounts
        directory = Path(name)
        path = directory / "sessions.db"
        service = EncryptedSessionService(f"sqlite:///{path}", AesGcmBackend(KEY))
        for n in range(3):
            await service.append_event(await create(service, str(n)), event("text"))
        if not is_open:
            await service.close()
        for file in directory.iterdir():
            file.chmod(0o444)
        directory.chmod(mode)
        before = {file: file.read_bytes() for file in directory.iterdir()}
        ((seen,),) = await asyncio.to_thread(results, (look_as_somebody_else, str(path)))
        if not is_open:
            assert {file: file.read_bytes() for file in before} == before
        directory.chmod(0o755)
        await service.close()
    first, second = seen
    assert first == second
    assert second[:2] == (3, 0)
